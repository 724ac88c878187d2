"""A tiny problem for each kernel, run before the training: does it compile, and compute what its specification does?

Triton compiles a kernel for each set of its constexprs and for the dtypes of its tensors; nothing else makes another
variant (`triton_kernels.kernel`). `Uses` lists what these depend on in a training; the sizes of blocks are constants.

| kernel | compiled for |
| --- | --- |
| correct | `Kind`: dtypes of gradient, velocity and weight; Adam; alignment, which is the gradient's in each step |
| order, plan, count, take | nothing that varies |
| digits, choose | each of the three digits |
| pack, unpack | the dtype of values on the wire, or that they are not floats |
| apply | the next power of two of the number of messages; whether weights are stepped |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType

import torch
from torch import Tensor

from lightning_lowbw.ops import (
    averages,
    blocks,
    compiled,
    compiled_averages,
    compiled_blocks,
    compiled_positions,
    gpu,
    reference,
)
from lightning_lowbw.ops.averages import Arrival
from lightning_lowbw.ops.compiled_places import BYTE
from lightning_lowbw.ops.reference import SecondMoment, Segment
from lightning_lowbw.ops.table import BLOCK, Field, Kind, upload

PLAIN = Kind(torch.float32, torch.float32, torch.float32, is_adam=False, is_aligned=True)
WIDTH = 10  # of the low bits of a position in the trial's message


@dataclass(frozen=True, kw_only=True)
class Uses:
    """What a training uses of the Triton kernels.

    Args:
        kinds: of the tensors that kernels compress.
        value_dtypes: of the values in messages; None: they are coded and decoded by torch.
        num_messages: that kernels average.
        steps: whether weights are stepped by the means; otherwise the means are written.
    """

    kinds: tuple[Kind, ...] = (PLAIN, PLAIN._replace(is_aligned=False))
    value_dtypes: tuple[torch.dtype | None, ...] = (torch.bfloat16,)
    num_messages: tuple[int, ...] = (2,)
    steps: tuple[bool, ...] = (False, True)


def run_numba(device: torch.device) -> None:
    """Raise if the compiled pass differs from its specification."""
    segment, twin = _tiny_segment(device, PLAIN), _tiny_segment(device, PLAIN)
    found, expected = compiled.accumulate_(segment, 1.0), reference.accumulate_(twin, 1.0)
    assert found is not None
    assert expected is not None
    _compare([found, segment.residual], [expected, twin.residual])
    _compare(*(_run_selection(module, twin) for module in (reference, compiled)))
    _compare(*(_run_averages(module, found) for module in (averages, compiled_averages)))
    _run_positions(found, twin.residual.numel())
    for bits in (8, 4):
        _compare(
            *(
                _run_blocks(module, segment.residual[None, : blocks.BLOCK + 1], bits)
                for module in (blocks, compiled_blocks)
            )
        )


def _run_selection(module: ModuleType, segment: Segment) -> list[Tensor]:
    """Return all that a twin of `reference` selects and takes out."""
    residual, velocity = segment.residual.clone(), segment.residual.clone()
    candidates = module.reach(residual, 1.0)
    positions, least = module.narrow(residual, candidates, 2)
    of_chunks = module.top_k_of_chunks(residual, BLOCK // 3, 3, 1)
    taken = module.take_out_(residual, velocity, positions, masking=True)
    return [candidates, positions, module.top_k(residual, 3), of_chunks, taken, residual, velocity, torch.tensor(least)]


def _run_averages(module: ModuleType, positions: Tensor) -> list[Tensor]:
    """Return what a twin of `averages` makes of two messages about the same elements."""
    count, numel = positions.numel(), int(positions[-1]) + 1
    mean, room, weight = torch.ones(numel), torch.ones(numel), torch.ones(numel)
    messages = positions.expand(1, 2, -1), torch.full((1, 2, count), 0.75)
    module.average_many_([Arrival(mean, 0, 0, count)], *messages)
    module.average_many_([Arrival(room, 0, 0, count, weight, 0.5)], *messages)
    return [mean, weight]


def _run_positions(positions: Tensor, numel: int) -> None:
    """Raise if positions do not come out of a message."""
    width = 2
    unary = positions.numel() + ((numel - 1) >> width)
    field = Field(positions.numel(), 0, width, 0, unary, unary, numel)
    fields = upload([field], torch.int64, positions.device).view(1, -1)
    words = torch.zeros((unary + width * positions.numel()) // 32 + 2, dtype=torch.int32)
    compiled_positions.pack_(positions, fields, words)
    found = torch.empty(positions.numel() + BYTE, dtype=torch.int64)
    compiled_positions.unpack(words, fields, unary, found)
    _compare([found[:-BYTE]], [positions])


def _run_blocks(module: ModuleType, values: Tensor, bits: int) -> list[Tensor]:
    """Return all that a twin of `blocks` makes of some values."""
    unsent, packed = values.clone(), torch.empty((len(values), -(-values.shape[1] * bits // 8)), dtype=torch.uint8)
    scales = module.encode_(unsent, bits, packed)
    return [unsent, packed, scales, module.decode(scales, packed, values.shape[1], bits)]


def run_triton(device: torch.device, uses: Uses) -> None:
    """Raise if the Triton kernels differ from their specification; waits for the device."""
    plain = [kind for kind in uses.kinds if not kind.is_adam]
    if plain:
        _run_compression(device, plain)
    if len(plain) < len(uses.kinds):
        _run_adam(device, [kind for kind in uses.kinds if kind.is_adam])
    for value_dtype in uses.value_dtypes:
        _run_wire(device, value_dtype)
    for num_messages in uses.num_messages:
        _run_means(device, num_messages, uses.steps)


def _run_compression(device: torch.device, kinds: Sequence[Kind]) -> None:
    """Raise if other elements are selected, or residuals differ."""
    segments, twins = ([_tiny_segment(device, kind) for kind in kinds] for _ in range(2))
    workspace = gpu.Workspace()
    for _ in range(2):  # without thresholds, and with them
        expected = reference.compress_many_(twins, masking=True)
        found = gpu.compress_many_(segments, masking=True, workspace=workspace)
        _compare([*found, *(each.residual for each in segments)], [*expected, *(each.residual for each in twins)])


def _run_adam(device: torch.device, kinds: Sequence[Kind]) -> None:
    """Raise if Adam's steps into the residuals differ from plain torch's by more than rounding."""
    segments, twins = ([_with_second_moment(_tiny_segment(device, kind)) for kind in kinds] for _ in range(2))
    positions, values = gpu.compress_many_(segments, masking=False, workspace=gpu.Workspace())
    counts = [segment.k for segment in segments]
    for segment, twin, at, sent in zip(segments, twins, positions.split(counts), values.split(counts), strict=True):
        reference.accumulate_(twin, 0.0)
        # Of a step of about 1, which may cancel what is left.
        tolerance = 1e-5 if twin.gradient.dtype == torch.float32 else 1e-2
        _compare([segment.residual.index_put((at,), sent)], [twin.residual], tolerance=tolerance)


def _with_second_moment(segment: Segment) -> Segment:
    assert segment.momentum_buffer is not None
    square = torch.ones_like(segment.momentum_buffer)
    moment = SecondMoment(square=square, largest=None, beta2=0.5, share=0.5, eps=1e-8, corrections=(0.5, 0.5))
    return replace(segment, dampening=segment.momentum, second_moment=moment)


def _selected(device: torch.device) -> tuple[list[int], Tensor, Tensor]:
    """Return the sizes of two tensors, and as many positions and values of each."""
    positions = torch.tensor([5, BLOCK - 3, 0, BLOCK], device=device)
    return [BLOCK, BLOCK + 1], positions, torch.tensor([1.0, -1.0 - 2.0**-9, 3.0, 2.0**-3], device=device)


def _run_wire(device: torch.device, value_dtype: torch.dtype | None) -> None:
    """Raise if what has been selected does not come out of a message, or is rounded otherwise."""
    numels, positions, values = _selected(device)
    k = positions.numel() // 2
    first, second = (k + ((numel - 1) >> WIDTH) for numel in numels)  # bits, `what.positions`
    start = first + second
    rows = [
        Field(k, 0, WIDTH, 0, first, start, numels[0]),
        Field(k, k, WIDTH, first, start, start + k * WIDTH, numels[1]),
    ]
    fields = upload(rows, torch.int64, device).view(2, -1)
    residuals = [torch.ones(numel, device=device) for numel in numels]
    twins = [residual.clone() for residual in residuals]
    message = torch.zeros(8, dtype=torch.int32, device=device)  # two words of positions, then the values
    sent = message[2:].view(value_dtype or torch.float32)[: positions.numel()]
    rounded = values.to(value_dtype or torch.bfloat16).float()
    if value_dtype is None:
        sent.copy_(rounded)
    gpu.pack(positions, values, fields, k, message, sent, residuals, is_written=value_dtype is None)
    damaged = torch.zeros((), dtype=torch.bool, device=device)
    first_value = 0 if value_dtype is None else 8 // value_dtype.itemsize
    read_positions, read = gpu.unpack(
        message.unsqueeze(0), fields, positions.numel(), value_dtype, first_value, damaged
    )
    for twin, at, error in zip(twins, positions.split(k), (values - rounded).split(k), strict=True):
        twin.index_add_(0, at, error)
    read = rounded if value_dtype is None else read[0]
    expected = [positions, rounded, *twins, torch.zeros_like(damaged)]
    _compare([read_positions[0], read, *residuals, damaged], expected)


def _run_means(device: torch.device, num_messages: int, steps: Sequence[bool]) -> None:
    """Raise if messages are averaged otherwise."""
    numels, positions, values = _selected(device)
    k = positions.numel() // 2
    messages = [each.expand(1, num_messages, -1).contiguous() for each in (positions, values)]
    for is_step in steps:
        mine, theirs = (
            [
                Arrival(out, 0, number * k, k, torch.ones_like(out) if is_step else None, 0.5)
                for number, out in enumerate(torch.ones(numel, device=device) for numel in numels)
            ]
            for _ in range(2)
        )
        gpu.average_many_(mine, *messages)
        averages.average_many_(theirs, *messages)
        _compare(*([each.out if each.weight is None else each.weight for each in many] for many in (mine, theirs)))


def _tiny_segment(device: torch.device, kind: Kind) -> Segment:
    """Return a segment of a kind. Large enough for a threshold, without ties."""
    numel = BLOCK if kind.is_aligned else BLOCK + 1
    # Small multiples of a power of two: no operation on them rounds.
    shuffled = (torch.arange(numel, device=device) * 7 % numel - numel // 2).to(torch.float32).div_(64)
    return Segment(
        residual=shuffled,
        momentum_buffer=torch.zeros(numel, dtype=kind.momentum_buffer, device=device),
        gradient=torch.ones(numel, dtype=kind.gradient, device=device),
        weight=torch.ones(numel, dtype=kind.weight, device=device),
        k=2,
        momentum=0.5,
        weight_decay=2.0**-4,
        ahead=2.0**-5,
    )


def _compare(found: Sequence[Tensor], expected: Sequence[Tensor], *, tolerance: float = 0.0) -> None:
    for one, other in zip(found, expected, strict=True):
        is_same = torch.allclose(one, other, rtol=tolerance, atol=tolerance) if tolerance else one.equal(other)
        if not is_same:
            raise ArithmeticError("they compute something else than plain torch")
