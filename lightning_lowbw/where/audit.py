"""Checks that nothing is communicated: finds collectives on the process group, and the lines that called them."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from lightning_lowbw.errors import UnexpectedCollectiveError

COLLECTIVES = (
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "monitored_barrier",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
)
# Libraries that communicate for others: the line that called them is reported.
LIBRARIES = ("torch/", "torchmetrics/", "lightning/", "pytorch_lightning/", "lightning_fabric/")


class CollectiveAudit:
    """Counts the collectives of the world's process group, also those that C++ issues; names those of Python.

    While it is installed, the functions of `torch.distributed` are wrapped.
    """

    def __init__(self) -> None:
        self._calls: list[str] = []
        self._ignored: Collection[dist.ProcessGroup | None] = ()
        self._originals: dict[tuple[Any, str], Callable[..., Any]] = {}
        self._sequence_number: int | None = None

    def install(self, ignoring: Collection[dist.ProcessGroup | None] = ()) -> None:
        """Wrap the collectives, except those on some groups: the levels of a topology, which are not the world."""
        self._ignored = ignoring
        for module in (dist, distributed_c10d):
            for name in COLLECTIVES:
                if hasattr(module, name):
                    original = getattr(module, name)
                    self._originals[module, name] = original
                    setattr(module, name, self._recording(name, original))

    def uninstall(self) -> None:
        """Put the originals back."""
        for (module, name), original in self._originals.items():
            setattr(module, name, original)
        self._originals.clear()
        self._ignored = ()
        self._sequence_number = None

    def begin(self) -> None:
        """From now on nothing is to be issued."""
        self._calls.clear()
        self._sequence_number = self._sequence()

    def pause(self) -> None:
        """What is issued up to the next `begin` is allowed."""
        self._sequence_number = None

    @contextmanager
    def allowing(self) -> Iterator[None]:
        """Allow what is issued in a `with` block, and nothing before it."""
        self.check()
        was_on = self._sequence_number is not None
        self.pause()
        yield
        if was_on:
            self.begin()

    def check(self) -> None:
        """Raise if something was issued since `begin`.

        Raises:
            UnexpectedCollectiveError: with the collectives and the lines that called them.
        """
        if self._sequence_number is None:
            return
        num_issued = self._sequence() - self._sequence_number
        if num_issued or self._calls:
            calls = self._calls or ["issued by C++ code: DDP's reducer, or a library"]
            raise UnexpectedCollectiveError(
                f"audit=True: {max(num_issued, len(self._calls))} collective(s) between two averages, where each rank "
                "is to train alone:\n  " + "\n  ".join(dict.fromkeys(calls)) + "\nLeave them out, or do them every "
                "k-th step only. (self.log(..., sync_dist=True) is one per step; log with on_epoch=True, "
                "on_step=False instead.)"
            )

    @staticmethod
    def _sequence() -> int:
        group = distributed_c10d._get_default_group()
        return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]  # not in torch's stubs

    def _recording(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            if not any(kwargs.get("group") is group for group in self._ignored):
                self._calls.append(f"{name} at {_caller()}")
            return original(*args, **kwargs)

        return recorded


def _caller() -> str:
    """Return the line nearest to the call that is not of a library that communicates for others; else the nearest."""
    frames = [frame for frame in traceback.extract_stack() if "where/audit.py" not in frame.filename]
    for frame in reversed(frames):
        if not any(f"site-packages/{part}" in frame.filename.replace("\\", "/") for part in LIBRARIES):
            return f"{frame.filename}:{frame.lineno} in {frame.name}"
    return f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}"
