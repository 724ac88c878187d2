"""Chooses the twin of `reference` that runs: kernels that numba or Triton compiles, or plain torch."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from operator import attrgetter
from types import ModuleType

import torch
from torch import Tensor

from lightning_lowbw.kernels import gpu, reference

OLDEST_CAPABILITY = (7, 0)  # what Triton compiles for

_IS_CPU, _DTYPE = attrgetter("is_cpu"), attrgetter("dtype")
_disabled = set[str]()  # types of devices whose kernels this process does not use


def has_triton() -> bool:
    """Return whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def uses_triton(device: torch.device) -> bool:
    """Return whether Triton's kernels run on a device: CUDA or ROCm, with a Triton for it, and not disabled."""
    return device.type not in _disabled and _has_kernels(device)


@cache  # called in each step
def _has_kernels(device: torch.device) -> bool:
    if device.type != "cuda" or not has_triton():
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= OLDEST_CAPABILITY


@cache
def _import_cpu() -> ModuleType | None:
    try:
        return importlib.import_module("lightning_lowbw.kernels.cpu")
    except ImportError:  # numba is not installed, or not for this numpy
        return None


def compiled_for(*tensors: Tensor) -> ModuleType | None:
    """Return `cpu`, the module that numba compiles, if it takes these tensors, whatever their dtypes; else None."""
    # In few calls: each step asks for each tensor.
    if "cpu" in _disabled or not (all(map(_IS_CPU, tensors)) and all(map(Tensor.is_contiguous, tensors))):
        return None
    return _import_cpu()


def kernels_for(*tensors: Tensor | None) -> ModuleType:
    """Return the module to take `accumulate_`, `reach`, `largest` and `take_` from, for these tensors."""
    given = [each for each in tensors if each is not None]
    is_plain = {*map(_DTYPE, given)} == {torch.float32}
    return (compiled_for(*given) if is_plain else None) or reference


def averages_for(device: torch.device) -> ModuleType:
    """Return the module to take `average_many_` from, for contiguous tensors of float32 or 16 bits."""
    if uses_triton(device):
        return gpu
    return (compiled_for() if device.type == "cpu" else None) or reference


def blocks_for(*tensors: Tensor) -> ModuleType:
    """Return the module to take `encode_blocks_` and `decode_blocks` from, for these tensors."""
    return compiled_for(*tensors) or reference


# Before the training --------------------------------------------------------------------------------------------------


def has_kernels(device: torch.device) -> bool:
    """Return whether a device has compiled kernels that are not disabled."""
    return uses_triton(device) or (device.type == "cpu" and compiled_for() is not None)


def what_is_missing(device: torch.device) -> str | None:
    """Say which package a device's kernels lack; None if nothing is missing, or the kernels are disabled."""
    if device.type in _disabled or has_kernels(device):
        return None
    if device.type == "cpu":
        return "numba is not installed, or cannot be imported: pip install numba."
    return "Triton is not installed: pip install triton." if device.type == "cuda" and not has_triton() else None


def disable(device: torch.device) -> None:
    """Use plain torch on devices of this type, in this process, from now on."""
    _disabled.add(device.type)


@contextmanager
def plain_torch(device: torch.device) -> Iterator[None]:
    """Use plain torch on devices of this type in a context."""
    disable(device)
    try:
        yield
    finally:
        _disabled.discard(device.type)
