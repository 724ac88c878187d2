"""Process groups of some ranks of the world, made once, with the user's timeout; and the properties of their backend.

This package does not keep a group alive; torch does, until `destroy_process_group`. At interpreter shutdown a gloo
thread may still release a tensor. It then needs the GIL, Python ends the thread, and C++ aborts the process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist


class Held:
    """Returns a group, as long as torch has it, and does not keep it alive.

    Raises:
        RuntimeError: when it is called; the group has been destroyed.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._is_weak = isinstance(group, dist.ProcessGroup)  # else the world, or a group without this rank
        self._group: Any = ref(group) if self._is_weak else group

    def __call__(self) -> dist.ProcessGroup | None:
        """Return the group."""
        group: dist.ProcessGroup | None = self._group() if self._is_weak else self._group
        if group is None and self._is_weak:
            raise RuntimeError("The process group has been destroyed: attach a new worker, or build a new Trainer.")
        return group


_groups: dict[tuple[ref[dist.ProcessGroup], tuple[object, ...]], Held] = {}  # by the world, and what it is for


def group_of(ranks: tuple[int, ...], purpose: str, timeout: timedelta | None = None) -> dist.ProcessGroup | None:
    """Return the process group of some ranks, made at the first call.

    Collective: all ranks of the world, those outside of the group as well, in the same order of calls.

    Args:
        ranks: of the world; a group has them in ascending order.
        purpose: concurrent work needs its own groups, because the ranks may begin it in different orders.
        timeout: after which a collective of the group fails; None is that of the world.
    """
    world = dist.group.WORLD
    assert world is not None
    for stale in [key for key in _groups if key[0]() is not world]:
        del _groups[stale]  # a world that was made anew has groups of its own
    key = ref(world), (ranks, purpose, timeout)
    if key not in _groups:
        with _not_split_from(world):
            group = dist.new_group(list(ranks), timeout=_timeout_of_world() if timeout is None else timeout)
        _groups[key] = Held(group)
    return _groups[key]()


@contextmanager
def _not_split_from(world: dist.ProcessGroup) -> Iterator[None]:
    """Let `new_group` make a new gloo group, also where the world is bound to a GPU, as Lightning's is.

    From a bound world torch splits the group off. Gloo says that it supports that, and a rank outside of the group ends
    in an AttributeError (torch 2.13).
    """
    device = world.bound_device_id
    if device is None or dist.get_backend(world) != "gloo":
        yield
        return
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = device


def _timeout_of_world() -> timedelta | None:
    """Return the timeout given to `init_process_group`; None, the backend's default, if it is not known."""
    for device in ("cpu", "cuda"):
        try:
            backend = dist.group.WORLD._get_backend(torch.device(device))  # type: ignore[union-attr]
        except RuntimeError:  # the world has none for this device
            continue
        timeout = getattr(getattr(backend, "options", None), "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    return None


def is_gloo(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Return whether a group's collectives on tensors of a device are gloo's, where it has several backends, too."""
    return device.type == "cpu" or dist.get_backend(group) == "gloo"
