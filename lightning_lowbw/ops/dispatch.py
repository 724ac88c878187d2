"""Chooses the twin of `reference` that runs: the fastest that works for a device and dtype."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from lightning_lowbw.ops import (
    averages,
    blocks,
    compiled,
    compiled_averages,
    compiled_blocks,
    compiler,
    cpu,
    gpu,
    reference,
    trial,
)
from lightning_lowbw.ops.trial import Uses

LONGEST_CAUSE = 200  # characters of an exception that are passed on: of a compiler's output the first line will do


def kernels_for(*tensors: Tensor) -> ModuleType:
    """Return the module with what selects, from `accumulate_` to `take_out_`, for these arguments."""
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return reference
    is_plain = all(tensor.dtype == torch.float32 and tensor.is_contiguous() for tensor in tensors)
    return compiled if is_plain and compiler.is_available() else cpu


def packs_compiled(tensor: Tensor) -> bool:
    """Return whether `compiled_positions` is to be used for positions, or their words."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and compiler.is_available()


def averages_for(device: torch.device) -> ModuleType:
    """Return the module to take `average_many_` from, for float32 that is contiguous."""
    if gpu.is_available(device):
        return gpu
    return compiled_averages if device.type == "cpu" and compiler.is_available() else averages


def blocks_for(packed: Tensor, values: Tensor | None = None) -> ModuleType:
    """Return the module to take `encode_` and `decode` from, for these bytes and values."""
    is_plain = packed.device.type == "cpu" and packed.is_contiguous()
    is_plain = is_plain and (values is None or (values.dtype == torch.float32 and values.is_contiguous()))
    return compiled_blocks if is_plain and compiler.is_available() else blocks


def prepare(device: torch.device, uses: Uses | None = None) -> str | None:
    """Compile and run on a tiny problem each kernel that a training would use, before it needs them.

    Triton needs a C compiler on every node, even to start a kernel. Without this check a node that has none would fail
    at its first sparse step, hours after the start, and the other nodes would wait for it. So call this on all ranks at
    the start; if any rank returns a reason, all must call `disable`, because the kernels round differently.

    Takes seconds for the first time; what has been compiled is kept.

    Args:
        device: of the parameters.
        uses: what the Triton kernels are compiled for; None: what `Uses` says by default.

    Returns:
        None if the kernels work, if a device has none, or they are disabled; else one sentence with the reason.
    """
    if gpu.is_available(device):
        name = "Triton"
    elif device.type == "cpu" and compiler.is_installed():
        name = "numba"
    else:
        return _what_is_missing(device)
    try:
        trial.run_numba(device) if name == "numba" else trial.run_triton(device, uses or Uses())
    except Exception as error:  # noqa: BLE001 - a compiler may fail in any way; the caller is told
        cause = next(iter(str(error).strip().splitlines()), "")[:LONGEST_CAUSE]
        return f"The kernels of {name} do not work on {device}: {type(error).__name__}: {cause}".rstrip(": .") + "."
    return None


def _what_is_missing(device: torch.device) -> str | None:
    """Return what is to be installed for kernels on a device; None if nothing is, or they are disabled."""
    if device.type == "cpu" and not compiler.is_disabled():
        return "numba is not installed: pip install numba."
    if device.type == "cuda" and not gpu.is_disabled() and not gpu.has_triton():
        return f"Triton {'.'.join(map(str, gpu.OLDEST_TRITON))} or newer is not installed: pip install triton."
    return None


def disable(device: torch.device, reason: str) -> None:
    """Use plain torch on devices of this type, in this process, from now on.

    Args:
        device: as given to `prepare`.
        reason: what `prepare` said, here or on another rank.
    """
    (compiler if device.type == "cpu" else gpu).disable(reason)
