"""Runs several collectives one after another in the background: on a thread with gloo, on a stream with NCCL.

The work runs in the order of the calls, which is the same on all ranks. It starts when earlier work on the caller's
stream has ended; a wait on another stream waits for its end there (tests/gpu/test_streams.py).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.futures import Future

_cuda: Any = torch.cuda  # replaced in tests
_streams: dict[tuple[torch.device, str], Any] = {}
_threads: dict[str, tuple[ThreadPoolExecutor, WeakSet[SideQueue]]] = {}  # by purpose, with the queues that use it


def new_future(device: torch.device) -> Future[Tensor]:
    """Return a future of a tensor on a device, whose `wait` is a wait of the current stream where there are streams.

    A future that was made without its device would return from `wait` at once: DDP would go on with a bucket before
    it has been reduced.
    """
    return Future() if device.type == "cpu" else Future(devices=[device])


class SideQueue:
    """Runs collectives in the order of calls, in the background.

    Args:
        purpose: queues of one purpose share a thread, and a stream of a device, because they share process groups,
            whose collectives must come in one order; those of two do not wait for one another.
    """

    def __init__(self, purpose: str) -> None:
        self.purpose = purpose

    def begin(
        self,
        collectives: Callable[[Tensor], Tensor],
        tensors: tuple[Tensor, ...],
        after: Future[Tensor] | None = None,
        *,
        in_thread: bool,
    ) -> Future[Tensor]:
        """Begin to run collectives; return the future of what they return.

        Collective: all ranks, in the same order of calls.

        Args:
            collectives: blocking ones; called with the first of `tensors`, or with what comes `after`.
            tensors: all that the collectives use of the caller's stream; with `in_thread` the thread waits until they
                have been filled there.
            after: of another queue: what is to be done before.
            in_thread: for gloo, whose collectives block the host; else they are queued on a stream from here.
        """
        future = new_future(tensors[0].device)
        run = partial(_run, collectives, _Start(tensors[0].device, self.purpose), tensors, after, future, in_thread)
        if in_thread:
            if self.purpose not in _threads:
                _threads[self.purpose] = ThreadPoolExecutor(1, f"lightning_lowbw {self.purpose}"), WeakSet()
            thread, users = _threads[self.purpose]
            users.add(self)
            thread.submit(run)
        else:
            run()
        return future

    def close(self) -> None:
        """End the thread, unless another queue uses it, after the work that has been begun."""
        thread, users = _threads.get(self.purpose, (None, WeakSet()))
        users.discard(self)
        if thread is not None and not users:
            thread.shutdown(wait=False)
            del _threads[self.purpose]


def side_stream(device: torch.device, purpose: str) -> Any:
    """Return the CUDA stream of a device for a purpose, always the same one."""
    if (device, purpose) not in _streams:
        _streams[device, purpose] = _cuda.Stream(device)
    return _streams[device, purpose]


class _Start:
    """What is on the device's current stream now: work on a stream beside it begins after that."""

    def __init__(self, device: torch.device, purpose: str) -> None:
        self._stream = None  # on the host what was computed before is there
        if device.type != "cpu":
            self._stream, self._ready = side_stream(device, purpose), _cuda.Event()
            self._ready.record(_cuda.current_stream(device))

    def wait(self, tensors: tuple[Tensor, ...], in_thread: bool) -> Any:
        """Wait for it on the stream beside, and return the context in which work is queued there."""
        if self._stream is None:
            return nullcontext()
        if in_thread:  # gloo reads from the host
            self._ready.synchronize()
        self._stream.wait_event(self._ready)
        for tensor in tensors:  # whose memory is not to be used again before this stream has done with it
            tensor.record_stream(self._stream)
        return _cuda.stream(self._stream)


def _run(
    collectives: Callable[[Tensor], Tensor],
    start: _Start,
    tensors: tuple[Tensor, ...],
    after: Future[Tensor] | None,
    future: Future[Tensor],
    in_thread: bool,
) -> None:
    try:
        with torch.no_grad(), start.wait(tensors, in_thread):
            given = tensors[0]
            if after is not None:
                given = after.wait()
                if given.device.type != "cpu":  # it was made on another side stream
                    given.record_stream(_cuda.current_stream(given.device))
            future.set_result(collectives(given))  # here: it records an event on the side stream
    except Exception as error:  # noqa: BLE001 - handed to whoever waits for it
        future.set_exception(error)  # type: ignore[arg-type]  # torch's annotation is wrong
