"""An accelerator whose collectives are not its own, without one: tensors that say so, on the host.

Operations are those of the CPU, so a training on it has the CPU's bits. What mixes tensors of two devices, or gives
`torch.distributed` a tensor of this one, fails as it does with Apple's or Intel's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partialmethod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from lightning_lowbw.comm.collectives import SideQueue

FAKE, CPU = torch.device("mps", 0), torch.device("cpu")
COPIES = {Tensor.copy_, Tensor.to, Tensor.cpu, torch._foreach_copy_}  # between devices
COLLECTIVES = ("all_reduce", "all_gather_single", "all_gather_into_tensor", "broadcast", "reduce", "isend", "irecv")
COLLECTIVES += ("all_to_all_single", "reduce_scatter_single", "reduce_scatter_tensor")


class OnDevice(Tensor):
    """A tensor of the device."""

    device = property(lambda _: FAKE)  # type: ignore[assignment]
    is_cpu = property(lambda _: False)  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(function, args, kwargs or {})


class FakeDevice(TorchFunctionMode):
    """Where functions make tensors on the device."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(function, args, kwargs or {})


def run(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    leaves = tree_leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    devices = [leaf for leaf in leaves if isinstance(leaf, torch.device)]
    is_fake = any(isinstance(tensor, OnDevice) for tensor in tensors)
    if is_fake and function not in COPIES and any(not isinstance(each, OnDevice) and each.dim() for each in tensors):
        raise RuntimeError(f"{function.__name__}: expected all tensors to be on the same device")
    stays = devices[0].type == FAKE.type if devices else function is not Tensor.cpu and is_fake
    if function is Tensor.copy_:
        stays = isinstance(args[0], OnDevice)
    with torch._C.DisableTorchFunctionSubclass():
        args, kwargs = tree_map(lambda leaf: CPU if isinstance(leaf, torch.device) else leaf, (args, kwargs))
        result = function(*args, **kwargs)
        if is_fake and not stays and result is args[0]:  # a copy between devices is new memory
            result = result.clone()
        return moved(result, OnDevice if stays else Tensor)


def moved(result: Any, kind: type[Tensor]) -> Any:
    """Return tensors of a kind, in lists and tuples, too; others are what they are."""
    if isinstance(result, (list, tuple)) and not isinstance(result, torch.Size):
        return type(result)(moved(each, kind) for each in result)
    return result.as_subclass(kind) if isinstance(result, Tensor) and type(result) is not kind else result


def refuse_tensors() -> None:
    """Let the collectives of this rank refuse tensors of the device, which is known to the thread of a queue, too."""
    SideQueue.begin = partialmethod(begin_on_device, SideQueue.begin)  # type: ignore[method-assign, assignment]
    for name in COLLECTIVES:
        if hasattr(dist, name):
            setattr(dist, name, refusing(getattr(dist, name)))


def begin_on_device(queue: SideQueue, begin: Any, stage: Callable[[Tensor], Tensor], *args: Any, **options: Any) -> Any:
    def run_stage(tensor: Tensor) -> Tensor:
        with FakeDevice():  # a mode of functions is one of a thread
            return stage(tensor)

    return begin(queue, run_stage, *args, **options)


def refusing(collective: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(each, OnDevice) for each in (*args, *kwargs.values())):
            raise RuntimeError(f"{collective.__name__}: no backend type associated with device type {FAKE.type}")
        return collective(*args, **kwargs)

    return call
