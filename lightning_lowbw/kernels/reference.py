"""The arithmetic of deep gradient compression on one tensor, in plain torch: the specification of every faster twin.

Source: Lin et al., "Deep Gradient Compression", arXiv 1712.01887. The equations below have the numbers of the
PaddlePaddle Fleet document, which follows the paper. Nothing here communicates. `payloads.top_k` finds the
thresholds.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from lightning_lowbw.kernels.tensors import as_real, flat

SCALED, HALF = 128, 16  # values with one scale; bits between bfloat16 and float32
AT_ONCE_ON_CPU = 1 << 16  # elements whose chunks are searched together; their keys of 8 bytes stay in the cache
AT_ONCE = 1 << 24  # the same on other devices: few launches, and the keys take 128 MiB

# These classes are not frozen: a frozen one takes several times as long to make, for each tensor in each step.


@dataclass(kw_only=True)
class SecondMoment:
    """Adam's mean of squares, whose root the velocity is divided by.

        q = b2 q + share (1 - b2) g^2;  s = (sqrt(q / (1 - b2^t)) + eps) (1 - b1^t)

    Args:
        square: q, of as many elements as the gradient; float32, bfloat16 or float16.
        largest: the largest q so far, which takes its place under a root (amsgrad); None without.
        beta2: b2.
        share: of a gradient's square; 1/N, see `payloads.corrections`.
        eps: see above.
        corrections: 1 - b1^t and 1 - b2^t, with t the steps including this one.
    """

    square: Tensor
    largest: Tensor | None
    beta2: float
    share: float
    eps: float
    corrections: tuple[float, float]

    def map(self, function: Callable[[Tensor], Tensor]) -> SecondMoment:
        """Return the same with other tensors: each tensor is replaced by the function's result."""
        made: dict[str, Any] = {name: function(tensor) for name, tensor in _tensors_of(self).items()}
        return replace(self, **made)

    def update_(self, gradient: Tensor) -> Tensor:
        """Take a gradient in; return s, which the velocity is divided by.

        In place:
            q, and the largest.

        Args:
            gradient: g; float32, with Adam's own weight decay.

        Returns:
            float32.
        """
        square = self.square.float()
        # q = beta2 q + (1 - beta2) share g^2
        square.mul_(self.beta2).addcmul_(gradient, gradient, value=(1.0 - self.beta2) * self.share)
        if square is not self.square:
            self.square.copy_(square)
        if self.largest is not None:
            self.largest.copy_(torch.maximum(self.largest, self.square))  # AMSGrad's
            square = self.largest.float()
        slope, least = self.line
        return square.sqrt().mul_(slope).add_(least)

    @property
    def line(self) -> tuple[float, float]:
        """The factor of sqrt(q) in s, and the constant that is added to it."""
        first, second = self.corrections
        return first / math.sqrt(second), self.eps * first


@dataclass(kw_only=True)
class Constants:
    """How a gradient enters the residual of a param group's tensors.

    Args:
        momentum: m, in [0, 1).
        dampening: d, in [0, 1); see `correct_`.
        nesterov: whether the optimizer uses Nesterov's form; no effect without a buffer.
        weight_decay: c.
        ahead: a, not negative; see `correct_`.
        sign: -1.0 with `maximize=True`, else 1.0.
    """

    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    ahead: float = 0.0
    sign: float = 1.0


@dataclass(kw_only=True)
class OtherPart(Constants):
    """A part of a tensor that another rank of the node accumulates; this rank keeps the second moment of the part, too.

    Args:
        second_moment: q of this part.
        gradient: G of this part.
        weight: w of this part; None without weight decay.
    """

    second_moment: SecondMoment
    gradient: Tensor
    weight: Tensor | None
    # Fields of a segment that a part of another rank lacks.
    residual: ClassVar[None] = None
    momentum_buffer: ClassVar[None] = None
    fault: ClassVar[None] = None
    k: ClassVar[int] = 0

    def update_(self) -> None:
        """Bring the second moment up to date; elements that are not finite count as zero."""
        gradient = self.gradient.nan_to_num(0.0, 0.0, 0.0)
        self.second_moment.update_(decayed(gradient, self.weight, self))


@dataclass(kw_only=True)
class Segment(Constants):
    """One tensor of a compress step: a row of the table that every backend takes.

    All of its tensors are contiguous and have as many elements, in the order of the parameter's elements in memory (see
    `kernels.tensors`); the residual is flat.

    Args:
        residual: v, the unsent gradient; float32.
        momentum_buffer: u; None without momentum; float32, bfloat16 or float16, like the tensors below.
        gradient: G, this rank's mean gradient, clipped; it is read only.
        weight: w, the parameter; None without weight decay.
        k: elements to send: of the tensor, in [0, numel], or of each whole chunk, in [0, chunk].
        chunk: the number of consecutive elements whose largest are sent; None: the whole tensor.
        k_last: with a chunk, the elements to send of the rest behind the last whole chunk.
        second_moment: gives the s of `correct_`; None for 1.
        fault: set if G has inf or NaN, which then count as zeros, or v has some afterwards, because the sum of finite
            numbers may overflow: bool, a scalar; None: no check, and inf and NaN enter v.
        other_parts: other parts of the tensor whose second moments are kept here; `compress_many_` updates them, and
            `accumulate_` does not.
    """

    residual: Tensor
    gradient: Tensor
    k: int
    momentum_buffer: Tensor | None = None
    weight: Tensor | None = None
    chunk: int | None = None
    k_last: int = 0
    second_moment: SecondMoment | None = None
    fault: Tensor | None = None
    other_parts: tuple[OtherPart, ...] = ()

    @property
    def num_sent(self) -> int:
        """Elements sent of the tensor."""
        return self.k if self.chunk is None else self.residual.numel() // self.chunk * self.k + self.k_last

    def map(self, function: Callable[[Tensor], Tensor]) -> Segment:
        """Return the same step on other tensors: each tensor is replaced by the function's result."""
        moment = self.second_moment
        made: dict[str, Any] = {name: function(tensor) for name, tensor in _tensors_of(self).items()}
        return replace(self, **made, second_moment=None if moment is None else moment.map(function))


def _tensors_of(values: Segment | SecondMoment) -> dict[str, Tensor]:
    return {name: each for name, each in vars(values).items() if isinstance(each, Tensor) and name != "fault"}


class Factors(NamedTuple):
    """The numbers of a tensor's step, see `Segment`; float32 for compiled passes."""

    momentum: float
    weight_decay: float
    ahead: float
    sign: float
    undamped: float  # 1 - dampening
    beta2: float
    of_square: float  # the factor of a squared gradient in the second moment
    slope: float  # of `SecondMoment.line`
    least: float


def factors_of(segment: Segment | OtherPart) -> Factors:
    """Return the numbers of a tensor's step."""
    moment = segment.second_moment
    slope, least = (0.0, 1.0) if moment is None else moment.line
    return Factors(
        momentum=segment.momentum,
        weight_decay=segment.weight_decay,
        ahead=segment.ahead,
        sign=segment.sign,
        undamped=1.0 - segment.dampening,
        beta2=0.0 if moment is None else moment.beta2,
        of_square=0.0 if moment is None else (1.0 - moment.beta2) * moment.share,
        slope=slope,
        least=least,
    )


def correct_(
    residual: Tensor,
    momentum_buffer: Tensor | None,
    gradient: Tensor,
    constants: Constants,
    divisor: Tensor | None = None,
) -> None:
    """Accumulate a corrected gradient locally: momentum correction.

    Plain: ``u = m u + g; v = v + u`` (eq. 7). Nesterov: ``u = m u + g; v = v + g + m u``.
    Without a buffer: ``v = v + g``, which is error feedback. With a divisor, for Adam: ``u = m u + (1 - d) g;
    v = v + u / s``. With `ahead`, a: ``g - a v`` takes the place of g. If g contains the decay c w, and a is c lr, then
    this is the decay of ``w - lr v``, the weight after the residual has been applied.

    Deviation: the paper's Nesterov form is ``u = m (u + g); v = v + u + g``. Its velocity is m times torch's
    `momentum_buffer`; keeping torch's leaves the buffer valid for the dense phase, for checkpoints and for plain DDP.

    In place:
        `residual` and `momentum_buffer`.

    Args:
        residual: v, the unsent gradient; float32, the parameter's shape.
        momentum_buffer: u, the optimizer's own velocity, the parameter's shape and dtype; None without momentum.
        gradient: g, this rank's mean gradient, clipped, weight decay already added; the parameter's shape.
        constants: m, d, a, and whether the optimizer takes the look-ahead form.
        divisor: s, the parameter's shape; None for 1. Not with Nesterov's form.

    Source: arXiv 1712.01887, section 3.2 and appendix B.
    """
    momentum = constants.momentum
    if constants.ahead != 0:
        gradient = gradient.sub(residual, alpha=constants.ahead)  # g - a v: the decay of the weight after the residual
    if momentum_buffer is None:
        residual.add_(gradient)
        return
    momentum_buffer.mul_(momentum).add_(gradient, alpha=1.0 - constants.dampening)  # u = m u + (1 - d) g
    if divisor is not None:
        residual.addcdiv_(momentum_buffer, divisor)  # v = v + u / s
    elif constants.nesterov:
        residual.add_(gradient).add_(momentum_buffer, alpha=momentum)  # v = v + g + m u, torch's Nesterov form
    else:
        residual.add_(momentum_buffer)  # v = v + u (eq. 7)


def is_finite(tensor: Tensor) -> Tensor:
    """Return whether all elements are finite: bool, a scalar on the tensor's device; True where there are none.

    By the extremes: unlike a norm they do not overflow, and a NaN is both. On a CPU first by the sum, five times as
    fast: where that is finite all are.
    """
    if tensor.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    real = as_real(tensor)
    if not tensor.is_cuda and real.is_floating_point() and (is_sum_finite := real.sum().isfinite()):
        return is_sum_finite
    least, largest = torch.aminmax(real)
    return least.isfinite() & largest.isfinite()


def are_not_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Return of each tensor whether an element is not finite: bool, on their device, shape (tensors,).

    On CUDA all together, a few launches; see `is_finite`.
    """
    if not tensors:
        return torch.zeros(0, dtype=torch.bool, device="cpu")
    if {tensor.device.type for tensor in tensors} == {"cpu"}:
        flags = torch.stack([tensor.sum() for tensor in tensors]).isfinite().logical_not_()
        for number in flags.nonzero().flatten().tolist():  # a sum of finite numbers may overflow
            flags[number] = ~is_finite(tensors[number])
        return flags
    if not all(tensor.is_cuda and tensor.numel() for tensor in tensors):
        return torch.stack([~is_finite(tensor) for tensor in tensors])
    largest = torch.stack(torch._foreach_norm([as_real(tensor) for tensor in tensors], math.inf))
    return largest * 0 != 0  # NaN of a NaN, and of an infinity


def decayed(gradient: Tensor, weight: Tensor | None, constants: Constants) -> Tensor:
    """Return ``g = sign G + c w`` (eq. 12): float32, because c w would be lost in a narrow G."""
    gradient = -gradient.float() if constants.sign < 0 else gradient.float()
    return gradient if weight is None else gradient.add(weight, alpha=constants.weight_decay)


def accumulate_(segment: Segment, threshold: float, most: int = sys.maxsize) -> Tensor | None:
    """Accumulate a gradient locally, and return where the residual reaches a threshold.

    ``g = sign G + c w`` (eq. 12), then `correct_`, then `reach`. If the threshold is known beforehand, a single pass
    over memory is enough.

    In place:
        the residual, the momentum buffer, the second moment, and the fault.

    Args:
        segment: its tensors.
        threshold: at or below 0 nothing is compared, and no position is returned.
        most: the largest number of positions that is of use; there is room for no more.

    Returns:
        The positions where |v| reaches the threshold: int64, ascending; None if there are more than `most`.

    Source: arXiv 1712.01887, section 3.2; the decay as in PaddlePaddle Fleet.
    """
    segment = segment.map(lambda tensor: flat(tensor.detach()))
    residual, gradient = segment.residual, segment.gradient
    if segment.fault is not None:
        are_finite = gradient.isfinite()
        segment.fault.logical_or_(are_finite.all().logical_not_())
        gradient = torch.where(are_finite, gradient, 0.0)  # the step is refused; until then v stays finite
    gradient = decayed(gradient, segment.weight, segment)
    divisor = None if segment.second_moment is None else segment.second_moment.update_(gradient)
    correct_(residual, segment.momentum_buffer, gradient, segment, divisor)
    if segment.fault is not None:
        segment.fault.logical_or_(is_finite(residual).logical_not_())  # a sum of finite numbers may overflow
    if not threshold > 0:
        return torch.empty(0, dtype=torch.int64, device=residual.device)
    return reach(residual, threshold, most)


def sample_accumulated(segment: Segment, stride: int) -> Tensor:
    """Return |v| as `accumulate_` will leave it, of every `stride`-th element; nothing is written.

    Returns:
        float32, shape (ceil(numel / stride),).
    """
    sample = segment.map(lambda tensor: flat(tensor.detach())[::stride].clone())
    accumulate_(sample, 0.0)
    return sample.residual.abs_()


def reach(values: Tensor, threshold: float, most: int = sys.maxsize) -> Tensor | None:
    """Return the positions of the elements whose magnitude reaches a threshold: int64, ascending.

    Args:
        values: flat.
        threshold: above 0.
        most: None is returned if there are more positions.
    """
    positions = (values.abs() >= threshold).nonzero().squeeze(1)
    return positions if positions.numel() <= most else None


def largest(values: Tensor, k: int, chunk: int | None = None, k_last: int = 0) -> Tensor:
    """Return the positions of the k largest |values|, of all or of each chunk; of equal values the first.

    NaN counts as the largest.

    Args:
        values: flat, float32.
        k: in [0, numel], or of each whole chunk, in [0, chunk].
        chunk: this many consecutive elements; None: all.
        k_last: with a chunk, the number of positions in the rest behind the last whole chunk, in [0, rest].

    Returns:
        int64, ascending.
    """
    if chunk is None:
        # As integers the bits of floats are in the order of magnitudes, NaN behind infinity.
        magnitudes = values.abs().view(torch.int32)
        least = magnitudes.topk(k, sorted=False).values.amin() if k else 0
        larger = (magnitudes > least).nonzero().squeeze(1)[:k]
        equal = (magnitudes == least).nonzero().squeeze(1)[: k - larger.numel()]
        return torch.cat([larger, equal]).sort().values
    at_once = AT_ONCE_ON_CPU if values.device.type == "cpu" else AT_ONCE
    size, split = max(1, at_once // chunk) * chunk, values.numel() // chunk * chunk
    rows = values[:split].split(size)
    positions = [_largest_of_rows(each.view(-1, chunk), k) + number * size for number, each in enumerate(rows)]
    return torch.cat([*positions, _largest_of_rows(values[split:].unsqueeze(0), k_last) + split])


def _largest_of_rows(rows: Tensor, k: int) -> Tensor:
    """Search the rows of a matrix together, without waiting for a GPU."""
    length = rows.shape[1]
    # `topk` takes any of equal keys. So no two keys are equal: the magnitude first, then the distance from the end.
    from_end = torch.arange(length - 1, -1, -1, device=rows.device)
    keys = rows.abs().view(torch.int32).to(torch.int64).bitwise_left_shift_(32).add_(from_end)
    firsts = torch.arange(len(rows), device=rows.device).mul_(length).unsqueeze(1)
    return keys.topk(k, sorted=False).indices.sort().values.add_(firsts).view(-1)


def take_(residual: Tensor, masked: Tensor | None, positions: Tensor) -> Tensor:
    """Take elements out of a residual, and clear the velocity there: momentum factor masking.

    ``v = v * not Mask; u = u * not Mask`` (eq. 9). `payloads.codec` puts the rounding errors of the wire format back
    into v: sent + residual is the corrected gradient, to the bit where a value was rounded by less than a factor of two
    (so float32 subtracts it exactly), as all formats of `payloads.codec` do in their range.

    In place:
        `residual` and `masked`.

    Args:
        residual: v; flat, float32.
        masked: u, the velocity that is cleared, of the same shape; None: no velocity is cleared.
        positions: distinct; int64, shape (k,).

    Returns:
        float32, shape (k,); for an infinity, which stays in the residual, the largest finite number.

    Source: arXiv 1712.01887, section 3.3.
    """
    limit = torch.finfo(torch.float32).max
    # By `index_select` and the like, which take a third of the time that an index in brackets does.
    values = residual.index_select(0, positions).clamp_(-limit, limit)
    residual.index_add_(0, positions, values, alpha=-1)  # v = v * not Mask (eq. 9); the clamped excess stays in v
    if masked is not None:
        # A zero is padding (a dead tensor has fewer than k candidates): nothing was sent, so nothing is masked. No
        # boolean index: on a GPU it would wait for the device.
        velocities = masked.index_select(0, positions).masked_fill_(values != 0, 0)
        masked.index_copy_(0, positions, velocities)
    return values


def compress_many_(segments: Sequence[Segment], *, masking: bool) -> tuple[Tensor, Tensor]:
    """Correct, select and take, tensor by tensor: `accumulate_`, `largest`, `take_`.

    In place:
        the residuals, momentum buffers, second moments (also the second moments of other parts) and faults.

    Args:
        segments: at least one.
        masking: whether the velocity of taken elements is cleared.

    Returns:
        Positions (int64; ascending within a tensor; of equal magnitudes the first) and values (float32) of all tensors,
        concatenated: shapes (sum of num_sent,).
    """
    positions, values = [], []
    for segment in segments:
        for other in segment.other_parts:
            other.update_()
        accumulate_(segment, 0.0)
        positions.append(largest(segment.residual, segment.k, segment.chunk, segment.k_last))
        masked = segment.momentum_buffer if masking else None
        values.append(take_(segment.residual, masked, positions[-1]))
    return torch.cat(positions), torch.cat(values)


def scatter_mean_(out: Tensor, parts: Sequence[tuple[Tensor, Tensor]], *, over_senders: bool = False) -> None:
    """Average sparse vectors, one per rank, into a dense one: ``out = 1/N sum_k sparse_k`` (eq. 7).

    The sum runs in rank order, so that all replicas get the same bits; equal indices of two ranks add up. N counts all
    ranks, also a rank that sent no element here. With `over_senders` N counts the ranks that sent this element: a zero
    does not count, because a rank with fewer than k elements that are not zero pads its message with zeros.

    In place:
        `out`, which is overwritten.

    Args:
        out: flat, contiguous.
        parts: (indices int64, values) of each rank, in rank order; indices are distinct within a rank.
    """
    out.zero_()
    share = 1.0 / len(parts)  # as DDP does, each addend is divided first: the same bits for one sender, no overflow
    if over_senders:
        for indices, values in parts:
            out.index_add_(0, indices, (values != 0).to(out.dtype))
        parts = [(indices, values / out.index_select(0, indices).clamp_(min=1.0)) for indices, values in parts]
        share = 1.0
        out.zero_()
    for indices, values in parts:
        out.index_add_(0, indices, values.to(out.dtype) * share)


class Arrival(NamedTuple):
    """A tensor, or a part of one, for which messages have been received.

    Args:
        out: the tensor that the mean is written to: float32, or 16 bits without a weight; contiguous, of any shape.
        group: the row of the messages about this tensor.
        first: the place of the tensor's first element in each message of the row.
        num_sent: the number of the tensor's elements in each message.
        weight: the weight to step by the mean, of the same shape: float32, contiguous; None: no step.
        rate: the rate of the step.
    """

    out: Tensor
    group: int
    first: int
    num_sent: int
    weight: Tensor | None = None
    rate: float = 0.0


def average_many_(
    arrivals: Sequence[Arrival], positions: Tensor, values: Tensor, *, over_senders: bool = False
) -> None:
    """Average the elements that all participants have sent for several tensors, or step weights by the mean.

    See `scatter_mean_`.

    In place:
        `out` of each arrival, which is overwritten. With a weight: the weight, ``w = w - rate mean``; `out` is a
        workspace, whose content is undefined afterwards.

    Args:
        arrivals: all with a weight or all without, and all of one dtype. Means of 16 bits are summed in float32.
        positions: in `out`: int32, ascending for each tensor, shape (groups, participants, elements).
        values: float32, of the same shape; summed in the order of the participants.
        over_senders: see `scatter_mean_`.
    """
    for arrival in arrivals:
        own = slice(arrival.first, arrival.first + arrival.num_sent)
        parts = list(zip(positions[arrival.group, :, own].long(), values[arrival.group, :, own], strict=True))
        out = flat(arrival.out)
        mean = out.float()
        scatter_mean_(mean, parts, over_senders=over_senders)
        if arrival.weight is not None:
            flat(arrival.weight.detach()).add_(mean, alpha=-arrival.rate)  # where nothing was sent, zero
        elif mean is not out:
            out.copy_(mean)


# Integers with a scale per block, see `payloads.quantized` ---------------------------------------------------------


def largest_integer(bits: int) -> int:
    """Return the largest integer of `bits` bits; the smallest is its negative."""
    return (1 << (bits - 1)) - 1


def largest_scale_bits(bits: int) -> int:
    """Return the bits of the largest scale, a bfloat16: the largest integer times it is finite in float32."""
    limit = torch.finfo(torch.float32).max / largest_integer(bits)
    number: int  # without a tensor, which would be a fake one if torch only traces
    (number,) = struct.unpack("<i", struct.pack("<f", limit))
    return number >> HALF


def encode_blocks_(values: Tensor, scales: Tensor, packed: Tensor, bits: int) -> None:
    """Write vectors as integers with scales.

    The scale of a block is its largest magnitude in units of the largest integer, rounded upwards to bfloat16. A value
    that is not finite makes its whole block not finite.

    In place:
        `scales` and `packed`; `values`, which become their rounding errors: value minus integer times scale.

    Args:
        values: float32, shape (vectors, numel).
        scales: bfloat16, shape (vectors, blocks).
        packed: the nearest integers in units of the scales: uint8, shape (vectors, bytes); two integers of 4 bits share
            a byte, the first has the lower bits.
        bits: 8 or 4.
    """
    blocks, largest = _blocks_of(values), largest_integer(bits)
    exact = blocks.abs().amax(2) / largest
    rounded = ((exact.view(torch.int32) + 0xFFFF) >> HALF).clamp_(max=largest_scale_bits(bits)) << HALF
    scale = torch.where(exact.isfinite(), rounded.view(torch.float32), exact)
    units = scale.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(2)
    integers = (blocks / units).round_().nan_to_num_(0.0).clamp_(-largest, largest)
    numbers = integers.to(torch.int8).flatten(1)[:, : values.shape[1]].view(torch.uint8)
    if bits == 4:
        even = torch.nn.functional.pad(numbers, (0, numbers.shape[1] % 2))
        numbers = (even[:, ::2] & 0xF) | (even[:, 1::2] << 4)
    packed.copy_(numbers)
    scales.copy_(scale)
    values.sub_(decode_blocks(scales, packed, values.shape[1], bits))


def decode_blocks(scales: Tensor, packed: Tensor, numel: int, bits: int) -> Tensor:
    """Return what `encode_blocks_` has written, integers times scales: float32, shape (vectors, numel)."""
    numbers = packed.contiguous().view(torch.int8)
    if bits == 4:
        low, high = (packed << 4).view(torch.int8) >> 4, numbers >> 4  # keeps the sign
        numbers = torch.stack([low, high], 2).flatten(1)[:, :numel]
    return (_blocks_of(numbers.to(torch.float32)) * scales.to(torch.float32).unsqueeze(2)).flatten(1)[:, :numel]


def _blocks_of(vectors: Tensor) -> Tensor:
    """Return the values of each block, the last filled with zeros: shape (vectors, blocks, SCALED)."""
    num_vectors, numel = vectors.shape
    return torch.nn.functional.pad(vectors, (0, -numel % SCALED)).view(num_vectors, -(-numel // SCALED), SCALED)


# Tensors as one vector, in few bits per value, see `payloads.quantized` -----------------------------------------------

Code = int | torch.dtype  # bits of integers with scales, or a float type


def scales_end(numel: int) -> int:
    """Return where in a message the integers begin: behind a bfloat16 for each block."""
    return -(-numel // SCALED) * torch.bfloat16.itemsize
