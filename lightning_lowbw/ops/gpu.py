"""Twins of `reference` for many tensors on a GPU: a fixed number of kernel launches, one wait for the device.

Steady state of `compress_many_`, whatever the number of tensors: correct and collect candidates (one launch per
`Kind`), order them, take; then the counts come to the host. Thresholds stay on the device. All tensors are passed over
once: gradient read, velocity and residual read and written, 20 bytes per element of float32, 24 with weight decay.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_lowbw.ops.reference import Segment, flat

BLOCK = 2048  # elements per program
SELECT_BLOCK = 1024  # candidates that a program looks at at a time
ORDER_BLOCK = 64  # candidates that a program copies at a time; in a block there are a handful
SAMPLE = 1 << 15  # elements; at density 1e-3 some 65 of them lie above the threshold
SURPLUS, MARGIN = 2, 32  # candidates aimed at: 2 k, and some more lest a small k be missed by chance
ROOM = 4  # for candidates, in units of those aimed at: in its first steps a residual grows fast
ALIGNMENT_BYTES, ALIGNMENT_NUMEL = 16, 8  # of the widest load; elements in it, of the narrowest dtype
# Where torch rounds twice, in u.mul_(m).add_(g), a multiply and an add are not to become one instruction.
OPTIONS: dict[str, Any] = {"enable_fp_fusion": False}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OLDEST_TRITON = (3, 2)  # comes with torch 2.6; those before it want the types of pointers written out
OLDEST_CAPABILITY = (7, 0)  # what Triton compiles for


class Row(NamedTuple):
    """What the kernels know of a tensor. Addresses in bytes, 0 for a tensor that is not there; the rest in elements."""

    residual: int
    momentum_buffer: int
    gradient: int
    weight: int
    momentum_itemsize: int  # in bytes
    is_nesterov: int
    numel: int
    k: int
    aim: int  # candidates wanted
    capacity: int  # candidates there is room for
    stride: int  # of the sample
    first_block: int
    first_candidate: int
    first_output: int

    @property
    def is_sorted(self) -> bool:
        """Whether so much of the tensor is sent that a threshold would not help."""
        return self.aim == self.k


class Kind(NamedTuple):
    """What a kernel is compiled for; aligned: all tensors start at 16 bytes and have a multiple of 8 elements."""

    gradient: torch.dtype
    momentum_buffer: torch.dtype
    weight: torch.dtype
    is_aligned: bool


@cache  # each step asks
def is_available(device: torch.device) -> bool:
    """Return whether the kernels run on a device: CUDA or ROCm, with a Triton that compiles them."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    import triton

    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < OLDEST_TRITON:
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= OLDEST_CAPABILITY


def compress_many_(
    segments: Sequence[Segment], *, value_dtype: torch.dtype, masking: bool, workspace: Workspace
) -> tuple[Tensor, Tensor]:
    """Correct, select and take all tensors at once; see `reference.compress_many_`.

    The same elements as the reference selects (but for ties at the k-th magnitude where a tensor had to be sorted).
    A threshold, `workspace.thresholds`, finds the candidates in the pass that corrects; it aims at twice k of them
    and is steered by their exact number and the k-th magnitude. Too few or too many: the tensor is sorted, and its
    threshold estimated anew in the next step from a sample. Tensors of which about an eighth or more is sent are always
    sorted.

    In place:
        the residuals and momentum buffers; `workspace`.

    Args:
        segments: at least one, all on one device.
        value_dtype: see `reference.take_`.
        masking: see `reference.take_`.
        workspace: what is kept between steps.

    Returns:
        See `reference.compress_many_`.

    Raises:
        ValueError: a tensor is not contiguous, or of a dtype that the kernels do not take.
    """
    device = segments[0].residual.device
    with torch.cuda.device_of(segments[0].residual):
        workspace.update(segments)
        _estimate(workspace)
        _correct(workspace)
        num_sent = sum(segment.k for segment in segments)
        positions = torch.empty(num_sent, dtype=torch.int64, device=device)
        values = torch.empty(num_sent, dtype=value_dtype, device=device)
        _take(workspace, range(len(segments)), positions, values, masking)
        counts = workspace.counts.tolist()  # the step's one wait for the device
        missed = [
            number
            for number, (row, count) in enumerate(zip(workspace.rows, counts, strict=True))
            if not row.k <= count <= row.capacity
        ]
        if missed:
            for number in missed:
                _sort(workspace, number, segments[number])
            _take(workspace, missed, positions, values, masking)
            workspace.unknown = [number for number in missed if not workspace.rows[number].is_sorted]
    return positions, values


class Workspace:
    """What `compress_many_` keeps between steps: thresholds, the device's table of the tensors, and room.

    The table is written again when an address or a factor has changed (gradients may come to lie elsewhere in every
    step), the rest only when the tensors themselves or their k have.

    Attributes:
        thresholds: magnitude that somewhat more than 2 k elements reach, per tensor; float32, on the device; 0 where
            none is known. They influence the time, never which elements are selected: no checkpoint need keep them.
    """

    def __init__(self) -> None:
        self.thresholds = torch.empty(0)
        self.rows: list[Row] = []
        self.kinds: list[Kind] = []
        self.unknown: list[int] = []  # tensors whose threshold is to be estimated
        self._signature: list[Any] = []

    def update(self, segments: Sequence[Segment]) -> None:
        """Take over the tensors of this step; raises as `compress_many_` does."""
        signature = [_signature(segment) for segment in segments]
        if signature == self._signature:
            return
        device = segments[0].residual.device
        kinds = [_kind(segment) for segment in segments]
        rows = _rows(segments, kinds)
        if [_place(row) for row in rows] != [_place(row) for row in self.rows] or kinds != self.kinds:
            self._allocate(rows, kinds, device)
        self.table = upload(rows, torch.int64, device)
        factors = [(segment.momentum, segment.weight_decay, segment.sign) for segment in segments]
        self.factors = upload(factors, torch.float32, device)
        self.rows, self.kinds, self._signature = rows, kinds, signature

    def _allocate(self, rows: Sequence[Row], kinds: Sequence[Kind], device: torch.device) -> None:
        numbers = {_place(row): number for number, row in enumerate(self.rows)}
        kept = {new: numbers[_place(row)] for new, row in enumerate(rows) if _place(row) in numbers}
        unknown = {new for new, old in kept.items() if old in self.unknown} | (set(range(len(rows))) - set(kept))
        self.unknown = [number for number in sorted(unknown) if not rows[number].is_sorted]
        thresholds = torch.zeros(len(rows), device=device)
        if kept:
            olds = self.thresholds[upload(kept.values(), torch.int64, self.thresholds.device)]
            thresholds[upload(kept, torch.int64, device)] = olds.to(device)
        self.thresholds = thresholds
        num_blocks = [_num_blocks(row.numel) for row in rows]
        # (kind, its first block, its number of blocks); the blocks of a kind lie behind one another
        self.launches: list[tuple[Kind, int, int]] = []
        owners: list[Tensor] = []
        for kind in dict.fromkeys(kinds):
            mine = [number for number, other in enumerate(kinds) if other == kind]
            self.launches.append((kind, rows[mine[0]].first_block, sum(num_blocks[number] for number in mine)))
            owners += [torch.full((num_blocks[number],), number, dtype=torch.int32) for number in mine]
        self.owners = torch.cat(owners).to(device)
        self.everyone = torch.arange(len(rows), dtype=torch.int32, device=device)
        self.counts = torch.zeros(len(rows), dtype=torch.int32, device=device)
        self.block_counts = torch.empty_like(self.owners)
        self.block_bases = torch.empty_like(self.owners)
        room = sum(row.capacity for row in rows)
        self.positions, self.ordered_positions = torch.empty(2, room, dtype=torch.int32, device=device)
        self.values, self.ordered_values = torch.empty(2, room, device=device)


def _signature(segment: Segment) -> tuple[Any, ...]:
    """Return all that the table is made from, fast: it is compared in every step."""
    gradient, buffer, weight = segment.gradient, segment.momentum_buffer, segment.weight
    return (
        segment.residual.data_ptr(),
        segment.residual.numel(),
        (gradient.data_ptr(), gradient.dtype, gradient.is_contiguous()),
        None if buffer is None else (buffer.data_ptr(), buffer.dtype),
        None if weight is None else (weight.data_ptr(), weight.dtype),
        (segment.k, segment.momentum, segment.nesterov, segment.weight_decay, segment.sign),
    )


def _place(row: Row) -> tuple[int, int, int]:
    """Return what a threshold belongs to."""
    return row.residual, row.numel, row.k


def _num_blocks(numel: int) -> int:
    return -(-numel // BLOCK)


def _kind(segment: Segment) -> Kind:
    """Return what the kernel that corrects a tensor is compiled for; checks the tensor."""
    tensors = [segment.residual, segment.gradient]
    tensors += [tensor for tensor in (segment.momentum_buffer, segment.weight) if tensor is not None]
    for tensor in tensors:
        if tensor.dtype not in DTYPES or not tensor.is_contiguous() or tensor.numel() != segment.residual.numel():
            raise ValueError(
                f"A {tensor.dtype} tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()}: the kernels "
                f"take contiguous ones of one size, of {', '.join(map(str, DTYPES))}."
            )
    if segment.residual.dtype != torch.float32:
        raise ValueError(f"The residual is {segment.residual.dtype}; it must be torch.float32.")
    return Kind(
        segment.gradient.dtype,
        torch.float32 if segment.momentum_buffer is None else segment.momentum_buffer.dtype,
        torch.float32 if segment.weight is None else segment.weight.dtype,
        segment.residual.numel() % ALIGNMENT_NUMEL == 0
        and all(tensor.data_ptr() % ALIGNMENT_BYTES == 0 for tensor in tensors),
    )


def _rows(segments: Sequence[Segment], kinds: Sequence[Kind]) -> list[Row]:
    """Return the table; the blocks of one kind lie behind one another, candidates and output are in order."""
    first_blocks, num_blocks = [0] * len(segments), 0
    for kind in dict.fromkeys(kinds):
        for number, segment in enumerate(segments):
            if kinds[number] == kind:
                first_blocks[number] = num_blocks
                num_blocks += _num_blocks(segment.residual.numel())
    rows: list[Row] = []
    first_candidate = first_output = 0
    for segment, first_block in zip(segments, first_blocks, strict=True):
        numel, buffer, weight = segment.residual.numel(), segment.momentum_buffer, segment.weight
        aim = SURPLUS * segment.k + MARGIN
        aim, capacity = (aim, ROOM * aim) if ROOM * aim <= numel else (segment.k, segment.k)
        rows.append(
            Row(
                residual=segment.residual.data_ptr(),
                momentum_buffer=0 if buffer is None else buffer.data_ptr(),
                gradient=segment.gradient.data_ptr(),
                weight=0 if weight is None or segment.weight_decay == 0 else weight.data_ptr(),
                momentum_itemsize=0 if buffer is None else buffer.itemsize,
                is_nesterov=int(segment.nesterov and buffer is not None),
                numel=numel,
                k=segment.k,
                aim=aim,
                capacity=capacity,
                stride=max(1, numel // SAMPLE) | 1,  # odd: it does not fall into step with rows of a power of two
                first_block=first_block,
                first_candidate=first_candidate,
                first_output=first_output,
            )
        )
        first_candidate += capacity
        first_output += segment.k
    return rows


def upload(numbers: Iterable[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy numbers to a device without waiting for it."""
    tensor = torch.tensor(list(numbers), dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _types(kind: Kind) -> dict[str, Any]:
    import triton.language as tl

    names = {"G": kind.gradient, "U": kind.momentum_buffer, "W": kind.weight}
    return {name: getattr(tl, str(dtype).removeprefix("torch.")) for name, dtype in names.items()}


def _estimate(workspace: Workspace) -> None:
    """Estimate the unknown thresholds from a sample of what `_correct` is going to write."""
    from lightning_lowbw.ops.triton_kernels import sample_kernel

    table, factors, device = workspace.table, workspace.factors, workspace.table.device
    for kind, _first, _num_blocks in workspace.launches:
        numbers = [number for number in workspace.unknown if workspace.kinds[number] == kind]
        if not numbers:
            continue
        rows = [workspace.rows[number] for number in numbers]
        sizes = [-(-row.numel // row.stride) for row in rows]
        num_programs = -(-max(sizes) // BLOCK)
        samples = torch.empty(len(rows), num_programs * BLOCK, device=device)
        tensors = upload(numbers, torch.int64, device)
        grid = (len(rows), num_programs)
        sample_kernel[grid](table, factors, tensors, samples, samples.shape[1], **_types(kind), BLOCK=BLOCK, **OPTIONS)
        ranks = [max(1, round(row.aim * size / row.numel)) for row, size in zip(rows, sizes, strict=True)]
        largest = samples.topk(max(ranks), dim=1).values
        chosen = upload([[rank - 1] for rank in ranks], torch.int64, device)
        workspace.thresholds[tensors] = largest.gather(1, chosen).squeeze(1)
    workspace.unknown = []


def _correct(workspace: Workspace) -> None:
    """Correct all tensors in place, and write down their candidates in the order of their positions."""
    from lightning_lowbw.ops.triton_kernels import correct_kernel, order_kernel

    w = workspace
    w.counts.zero_()
    for kind, first, num_blocks in w.launches:
        correct_kernel[(num_blocks,)](
            w.table, w.factors, w.thresholds, w.owners, w.counts, w.block_counts, w.block_bases, w.positions, w.values,
            first, **_types(kind), ALIGNED=kind.is_aligned, BLOCK=BLOCK, num_warps=8, **OPTIONS,
        )  # fmt: skip
    block_ends = w.block_counts.cumsum(0)
    order_kernel[(w.owners.numel(),)](
        w.table, w.owners, w.counts, w.block_counts, w.block_bases, block_ends, w.positions, w.values,
        w.ordered_positions, w.ordered_values, BLOCK=ORDER_BLOCK, num_warps=1,
    )  # fmt: skip


def _take(workspace: Workspace, numbers: Sequence[int], positions: Tensor, values: Tensor, masking: bool) -> None:
    """Take the k largest of the candidates of some tensors, where there are enough of them and room for all."""
    import triton.language as tl

    from lightning_lowbw.ops.triton_kernels import take_kernel

    w, device = workspace, workspace.table.device
    tensors = w.everyone if len(numbers) == len(w.rows) else upload(numbers, torch.int32, device)
    take_kernel[(len(numbers),)](
        w.table, tensors, w.counts, w.thresholds, w.ordered_positions, w.ordered_values, positions, values,
        torch.finfo(values.dtype).max, V=getattr(tl, str(values.dtype).removeprefix("torch.")),
        MASKING=masking, BLOCK=SELECT_BLOCK, num_warps=16, **OPTIONS,
    )  # fmt: skip


def _sort(workspace: Workspace, number: int, segment: Segment) -> None:
    """Make the `aim` largest of a corrected tensor its candidates; waits for nothing."""
    row, residual = workspace.rows[number], flat(segment.residual)
    largest = residual.abs().topk(row.aim, sorted=False).indices.sort().values
    room = slice(row.first_candidate, row.first_candidate + row.aim)
    workspace.ordered_positions[room] = largest
    workspace.ordered_values[room] = residual[largest]
    workspace.counts[number] = row.aim


def scatter_mean_many_(outs: Sequence[Tensor], counts: Sequence[int], parts: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Average what all ranks sent for several tensors; see `reference.scatter_mean_many_`.

    One launch per rank, in rank order. Positions of one rank are distinct, so plain loads and stores do, and every
    replica gets the same bits. torch's `index_add_` on CUDA is deterministic for the same reason, for its atomic adds
    never meet; but it takes launches per rank and tensor.

    In place:
        `outs`, which are overwritten.

    Args:
        outs: flat, contiguous; float32.
        counts: elements that each rank sent of each of `outs`.
        parts: (indices int64 or int32, values) of each rank, in rank order; of all tensors behind one another.

    Raises:
        ValueError: one of `outs` is not contiguous, or not float32.
    """
    from lightning_lowbw.ops.triton_kernels import scatter_kernel

    for out in outs:
        if out.dtype != torch.float32 or not out.is_contiguous():
            raise ValueError(f"A {out.dtype} tensor of strides {out.stride()}: averages are float32 and contiguous.")
    device, numel = outs[0].device, sum(counts)
    with torch.cuda.device_of(outs[0]):
        torch._foreach_zero_(list(outs))
        addresses = upload([out.data_ptr() for out in outs], torch.int64, device)
        numbers = torch.arange(len(outs), device=device)
        owners = numbers.repeat_interleave(upload(counts, torch.int64, device), output_size=numel)
        for positions, values in parts:
            if numel:
                scatter_kernel[(math.ceil(numel / SELECT_BLOCK),)](
                    addresses, owners, positions, values, numel, 1.0 / len(parts), BLOCK=SELECT_BLOCK, **OPTIONS
                )
