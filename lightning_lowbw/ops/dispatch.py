"""Which twin of `reference` runs: the fastest that there is for a device and dtype, and works there."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from lightning_lowbw.ops import compiled, cpu, gpu, reference
from lightning_lowbw.ops.reference import Segment
from lightning_lowbw.ops.table import BLOCK

LONGEST_CAUSE = 200  # characters of an exception that are passed on: of a compiler's output the first line will do


def kernels_for(*tensors: Tensor) -> ModuleType:
    """Return the module to take `reach`, `accumulate_` and `sample_accumulated` from, for these arguments."""
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return reference
    is_plain = all(tensor.dtype == torch.float32 and tensor.is_contiguous() for tensor in tensors)
    return compiled if is_plain and compiled.is_available() else cpu


def scatter_mean_many_(outs: Sequence[Tensor], counts: Sequence[int], parts: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Average what all ranks sent for several tensors, by kernels where there are any.

    See `reference.scatter_mean_many_`; `outs` are float32. The same bits either way.
    """
    twin = gpu if outs and gpu.is_available(outs[0].device) else reference
    twin.scatter_mean_many_(outs, counts, parts)


def prepare(device: torch.device) -> str | None:
    """Compile and run on a tiny problem each kernel that a device would use, before the training needs it.

    Triton takes a C compiler on every node, even to start a kernel. A node that has none finds out at its first sparse
    step, hours after the start, and the other nodes wait for it. So call this on all ranks at the start; if any has a
    reason, all call `disable`, or they round differently.

    Takes seconds on a GPU for the first time, half a second on a CPU; both keep what they have compiled.

    Returns:
        None where the kernels work, or where there are none to use; else one sentence with the reason.
    """
    if gpu.is_available(device):
        name, run = "Triton", _run_triton
    elif device.type == "cpu" and compiled.is_installed():
        name, run = "numba", _run_numba
    else:
        return None
    try:
        run(device)
    except Exception as error:  # noqa: BLE001 - a compiler may fail in any way; the caller is told
        cause = next(iter(str(error).strip().splitlines()), "")[:LONGEST_CAUSE]
        return f"The kernels of {name} do not work on {device}: {type(error).__name__}: {cause}".rstrip(": .") + "."
    return None


def disable(device: torch.device, reason: str) -> None:
    """Use plain torch on devices of this type, in this process, from now on.

    Args:
        device: as given to `prepare`.
        reason: what `prepare` said, here or on another rank.
    """
    (compiled if device.type == "cpu" else gpu).disable(reason)


def _run_numba(device: torch.device) -> None:
    """Raise if the compiled pass does not do what its specification does."""
    (segment, _), (twin, _) = _tiny_segments(device, torch.float32), _tiny_segments(device, torch.float32)
    found, expected = compiled.accumulate_(segment, 1.0), reference.accumulate_(twin, 1.0)
    assert found is not None
    assert expected is not None
    _compare([found, segment.residual], [expected, twin.residual])


def _run_triton(device: torch.device) -> None:
    """Raise if the Triton kernels do not do what their specification does; waits for the device."""
    for dtype in (torch.float32, torch.bfloat16):
        segments, twins = _tiny_segments(device, dtype), _tiny_segments(device, dtype)
        workspace = gpu.Workspace()
        for _ in range(2):  # without thresholds, and with them
            expected = reference.compress_many_(twins, value_dtype=torch.float32, masking=True)
            found = gpu.compress_many_(segments, value_dtype=torch.float32, masking=True, workspace=workspace)
            _compare([*found, *(each.residual for each in segments)], [*expected, *(each.residual for each in twins)])
        counts = [each.num_sent for each in segments]
        gpu.scatter_mean_many_([each.residual for each in segments], counts, [found])
        reference.scatter_mean_many_([each.residual for each in twins], counts, [expected])
        _compare([each.residual for each in segments], [each.residual for each in twins])


def _tiny_segments(device: torch.device, dtype: torch.dtype) -> list[Segment]:
    """Return two segments: one for wide loads, one whose length is odd. Large enough for a threshold, without ties."""

    def shuffled(numel: int) -> Tensor:  # small multiples of a power of two: no operation on them rounds
        return (torch.arange(numel, device=device) * 7 % numel - numel // 2).to(torch.float32).div_(64)

    return [
        Segment(
            residual=shuffled(numel),
            momentum_buffer=torch.zeros(numel, dtype=dtype, device=device),
            gradient=torch.ones(numel, dtype=dtype, device=device),
            weight=torch.ones(numel, dtype=dtype, device=device),
            k=2,
            momentum=0.5,
            weight_decay=2.0**-4,
        )
        for numel in (BLOCK, BLOCK + 1)
    ]


def _compare(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    if not all(one.equal(other) for one, other in zip(found, expected, strict=True)):
        raise ArithmeticError("they compute something else than plain torch")
