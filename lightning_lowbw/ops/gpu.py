"""Twins of `reference` for many tensors on a GPU: a fixed number of kernel launches, one wait for the device.

Steady state of `compress_many_`, whatever the number of tensors: correct and collect candidates (one launch per
`Kind`), order them, take; then the counts come to the host. Thresholds stay on the device. All tensors are passed over
once: gradient read, velocity and residual read and written, 20 bytes per element of float32, 24 with weight decay.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_lowbw.ops.reference import Segment, take_
from lightning_lowbw.ops.table import BLOCK, DTYPES, Kind, Workspace, takes, upload

__all__ = ["DTYPES", "Workspace", "compress_many_", "disable", "is_available", "scatter_mean_many_", "takes"]

SELECT_BLOCK = 1024  # candidates that a program looks at at a time
ORDER_BLOCK = 64  # candidates that a program copies at a time; in a block there are a handful
# Where torch rounds twice, in u.mul_(m).add_(g), a multiply and an add are not to become one instruction.
OPTIONS: dict[str, Any] = {"enable_fp_fusion": False}
OLDEST_TRITON = (3, 2)  # comes with torch 2.6; those before it want the types of pointers written out
OLDEST_CAPABILITY = (7, 0)  # what Triton compiles for

_faults: list[str] = []  # why the kernels are not to be used in this process


def is_available(device: torch.device) -> bool:
    """Return whether the kernels run on a device: CUDA or ROCm, with a Triton for it, and not disabled."""
    return not _faults and _is_supported(device)


def disable(reason: str) -> None:
    """Use plain torch instead of the kernels, in this process, from now on; see `dispatch.disable`."""
    _faults.append(reason)


@cache  # each step asks
def _is_supported(device: torch.device) -> bool:
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
    threshold estimated anew in the next step from a sample. Tensors of which more than about a fiftieth is sent are
    always sorted, for the room for candidates is bounded (`table.MOST_ROOM`).

    In place:
        the residuals and momentum buffers; `workspace`.

    Args:
        segments: at least one, all on one device; see `takes`.
        value_dtype: see `reference.take_`.
        masking: see `reference.take_`.
        workspace: what is kept between steps.

    Returns:
        See `reference.compress_many_`.

    Raises:
        ValueError: a segment that the kernels do not take.
    """
    device = segments[0].residual.device
    with torch.cuda.device_of(segments[0].residual):
        workspace.update(segments)
        _estimate(workspace)
        _correct(workspace)
        num_sent = sum(segment.num_sent for segment in segments)
        positions = torch.empty(num_sent, dtype=torch.int64, device=device)
        values = torch.empty(num_sent, dtype=value_dtype, device=device)
        _take(workspace, positions, values, masking)
        counts = workspace.counts.tolist()  # the step's one wait for the device
        missed = [
            number
            for number, (row, count) in enumerate(zip(workspace.rows, counts, strict=True))
            if not row.k <= count <= row.capacity
        ]
        for number in missed:
            row, segment = workspace.rows[number], segments[number]
            mine = slice(row.first_output, row.first_output + row.k)
            positions[mine] = segment.residual.view(-1).abs().topk(row.k, sorted=False).indices.sort().values
            values[mine] = take_(
                segment.residual, segment.momentum_buffer, positions[mine], value_dtype=value_dtype, masking=masking
            )
        workspace.unknown = [number for number in missed if not workspace.rows[number].is_sorted]
    return positions, values


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
        samples = torch.empty(len(rows), num_programs * BLOCK, dtype=torch.float32, device=device)
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


def _take(workspace: Workspace, positions: Tensor, values: Tensor, masking: bool) -> None:
    """Take the k largest of the candidates of each tensor, where there are enough of them and room for all."""
    import triton.language as tl

    from lightning_lowbw.ops.triton_kernels import take_kernel

    w = workspace
    take_kernel[(len(w.rows),)](
        w.table, w.everyone, w.counts, w.thresholds, w.ordered_positions, w.ordered_values, positions, values,
        torch.finfo(values.dtype).max, V=getattr(tl, str(values.dtype).removeprefix("torch.")),
        MASKING=masking, BLOCK=SELECT_BLOCK, num_warps=16, **OPTIONS,
    )  # fmt: skip


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
