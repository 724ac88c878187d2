"""Twins of `reference` for many tensors on a GPU: a fixed number of kernel launches, and no wait for the device.

`compress_many_`, whatever the number of tensors: correct and collect candidates (one launch per `Kind`), order them,
find the k-th magnitudes digit by digit, take. Thresholds and counts stay on the device; the host never waits. All
tensors are passed over once: gradient read, velocity and residual read and written, 20 bytes per element of float32,
24 with weight decay, 28 with Adam's second moment. Where a threshold does not fit, the same kernels look through all
of the tensor instead of its candidates, five times 4 bytes per element more.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_lowbw.ops.reference import Segment
from lightning_lowbw.ops.table import BINS, BLOCK, DIGITS, DTYPES, Kind, Workspace, takes, upload

__all__ = ["DTYPES", "Workspace", "compress_many_", "disable", "is_available", "scatter_mean_many_", "takes"]

SELECT_BLOCK = BLOCK  # elements that a program of the selection looks at at a time; `table` has room for no more
PROGRAMS_PER_PROCESSOR = 8  # of the selection, whose number of blocks the host does not know
SCATTER_BLOCK = 1024
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

    The same elements as the reference selects. A threshold, `workspace.thresholds`, finds the candidates in the pass
    that corrects; it aims at twice k of them and is steered by their exact number and the k-th magnitude. Where they
    are too few or too many, all of the tensor is looked through. Tensors of which more than about a fiftieth is sent
    always are, for the room for candidates is bounded (`table.MOST_ROOM`).

    In place:
        the residuals, momentum buffers, second moments and faults; `workspace`.

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
        _correct(workspace)
        num_sent = sum(segment.num_sent for segment in segments)
        positions = torch.empty(num_sent, dtype=torch.int64, device=device)
        values = torch.empty(num_sent, dtype=value_dtype, device=device)
        _take(workspace, positions, values, masking)
    return positions, values


def _types(kind: Kind) -> dict[str, Any]:
    import triton.language as tl

    names = {"G": kind.gradient, "U": kind.momentum_buffer, "W": kind.weight}
    return {name: getattr(tl, str(dtype).removeprefix("torch.")) for name, dtype in names.items()}


def _correct(workspace: Workspace) -> None:
    """Correct all tensors in place, and write down their candidates in the order of their positions."""
    from lightning_lowbw.ops.triton_kernels import correct_kernel, order_kernel

    w = workspace
    w.counts.zero_()
    for kind, first, num_blocks in w.launches:
        correct_kernel[(num_blocks,)](
            w.table, w.factors, w.thresholds, w.owners, w.counts, w.block_counts, w.block_bases, w.positions, w.values,
            first, **_types(kind), ADAM=kind.is_adam, ALIGNED=kind.is_aligned, BLOCK=BLOCK, num_warps=8, **OPTIONS,
        )  # fmt: skip
    block_ends = w.block_counts.cumsum(0)
    order_kernel[(w.owners.numel(),)](
        w.table, w.owners, w.counts, w.block_counts, w.block_bases, block_ends, w.positions, w.values,
        w.ordered_positions, w.ordered_values, BLOCK=ORDER_BLOCK, num_warps=1,
    )  # fmt: skip


def _take(workspace: Workspace, positions: Tensor, values: Tensor, masking: bool) -> None:
    """Take the k largest of each tensor."""
    import triton
    import triton.language as tl

    from lightning_lowbw.ops.triton_kernels import choose_kernel, count_kernel, digits_kernel, plan_kernel, take_kernel

    w, num_tensors = workspace, len(workspace.rows)
    blocks = {"BLOCK": SELECT_BLOCK, "TENSORS": triton.next_power_of_2(num_tensors)}
    source = (w.table, w.counts, w.ordered_positions, w.ordered_values, w.ends, w.kth)
    grid = (min(w.owners.numel(), PROGRAMS_PER_PROCESSOR * _num_processors(w.table.device)),)
    plan_kernel[(1,)](w.table, w.counts, w.ends, w.kth, w.left, num_tensors, **blocks)
    for turn, (shift, bits) in enumerate(DIGITS):
        digit = {"SHIFT": shift, "BITS": bits, "WIDTH": BINS}
        digits_kernel[grid](*source, w.bins, num_tensors, **digit, **blocks)
        choose_kernel[(num_tensors,)](
            w.table, w.counts, w.thresholds, w.kth, w.left, w.bins, IS_FIRST=turn == 0, **digit
        )
    count_kernel[grid](*source, *w.found, num_tensors, **blocks)
    ends = w.found.cumsum(1, dtype=torch.int32)
    take_kernel[grid](
        *source, w.left, *w.found, *ends, positions, values, torch.finfo(values.dtype).max, num_tensors,
        V=getattr(tl, str(values.dtype).removeprefix("torch.")), MASKING=masking, **blocks, **OPTIONS,
    )  # fmt: skip


@cache
def _num_processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


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
                scatter_kernel[(math.ceil(numel / SCATTER_BLOCK),)](
                    addresses, owners, positions, values, numel, 1.0 / len(parts), BLOCK=SCATTER_BLOCK, **OPTIONS
                )
