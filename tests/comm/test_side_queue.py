"""Work beside the caller's: its order, its errors, and, by a recorder in place of CUDA, when it waits for which stream.

That a GPU keeps the order that is asked for here is not tested without one.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from lightning_lowbw.comm import collectives
from lightning_lowbw.comm.collectives import SideQueue, TensorWork
from lightning_lowbw.kernels import tensors

FUTURE = "future of [device(type='cuda', index=0)]"
GPU, OTHER_GPU = torch.device("cuda", 0), torch.device("cuda", 1)


class Recorder:
    """In place of torch.cuda and of torch.futures.Future: writes down what is called, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.num_streams = 0
        self.entered: Any = None
        self.threads: dict[str, int] = {}

    def note(self, call: str) -> None:
        self.calls.append(call)
        self.threads[call] = threading.get_ident()

    def Event(self, *, enable_timing: bool = False) -> Any:
        return types.SimpleNamespace(
            record=lambda stream: self.note(f"record on {stream.name}"),
            synchronize=lambda: self.note("wait on the host"),
        )

    def Stream(self, device: torch.device) -> Any:
        self.num_streams += 1
        stream, name = types.SimpleNamespace(), f"side stream {self.num_streams}"
        stream.name, stream.wait_event = name, lambda event: self.note(f"{name} waits")
        return stream

    def current_stream(self, device: torch.device) -> Any:
        return self.entered or types.SimpleNamespace(name=f"the caller's stream of {device}")

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.note(f"enter {stream.name}")
        self.entered = stream
        yield
        self.entered = None
        self.note(f"leave {stream.name}")

    def Future(self, *, devices: list[torch.device] | None = None) -> Any:
        self.note(f"future of {devices}")
        return types.SimpleNamespace(
            set_result=lambda result: self.note("result"), set_exception=lambda error: self.note(repr(error))
        )

    def tensor(self, name: str, device: torch.device = GPU) -> Any:
        note = lambda stream: self.note(f"{name} is used on {stream.name}")  # noqa: E731
        return types.SimpleNamespace(device=device, record_stream=note)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(tensors, "_cuda", recorder)
    monkeypatch.setattr(tensors, "_streams", {})
    monkeypatch.setattr(tensors, "Future", recorder.Future)
    return recorder


@pytest.mark.parametrize("in_thread", [True, False], ids=["gloo", "nccl"])
def test_work_on_a_gpu_waits_for_what_fills_its_tensors(recorder: Recorder, in_thread: bool) -> None:
    """The event is recorded by the caller; gloo's thread waits for it before anything reads the tensor.

    The result is set on the side stream: a future with devices records an event there, which `wait` waits for.
    """
    queue = SideQueue("gradients")
    tensors = recorder.tensor("the result"), recorder.tensor("the message")
    queue.begin(lambda _: recorder.note("collective"), tensors, in_thread=in_thread)
    if in_thread:
        collectives._threads.pop("gradients")[0].shutdown(wait=True)
    assert [call for call in recorder.calls if call != "wait on the host"] == [
        *(FUTURE, "record on the caller's stream of cuda:0", "side stream 1 waits"),
        *("the result is used on side stream 1", "the message is used on side stream 1"),
        *("enter side stream 1", "collective", "result", "leave side stream 1"),
    ]
    assert ("wait on the host" in recorder.calls) == in_thread
    assert (recorder.threads["collective"] != threading.get_ident()) == in_thread
    assert recorder.threads["record on the caller's stream of cuda:0"] == threading.get_ident()
    if in_thread:
        assert recorder.calls.index("wait on the host") == 2
        assert recorder.threads["wait on the host"] == recorder.threads["collective"]


def test_a_wait_is_timed_on_the_device_of_its_tensors(recorder: Recorder) -> None:
    """The current one may be another."""
    with collectives.TrafficLedger().waiting(OTHER_GPU):
        recorder.note("wait")
    recorded = f"record on the caller's stream of {OTHER_GPU}"
    assert recorder.calls == [recorded, "wait", recorded]


def test_one_stream_for_each_purpose_and_device(recorder: Recorder) -> None:
    for purpose, gpu in (("gradients", GPU), ("averages", GPU), ("gradients", OTHER_GPU), ("gradients", GPU)):
        SideQueue(purpose).begin(lambda _: None, (recorder.tensor("the result", gpu),), in_thread=False)
    used = [call.split(" on ")[1] for call in recorder.calls if call.startswith("the result is used")]
    assert used == ["side stream 1", "side stream 2", "side stream 3", "side stream 1"]


def test_what_comes_after_another_stream_waits_for_it_there(recorder: Recorder) -> None:
    """And keeps the memory of what was made there until it has read it."""
    made = recorder.tensor("the part")
    before = types.SimpleNamespace(wait=lambda: recorder.note("wait for the future") or made)
    tensors = (recorder.tensor("the result"),)
    SideQueue("gradients").begin(lambda given: recorder.note(given is made), tensors, before, in_thread=False)
    inside = ("wait for the future", "the part is used on side stream 1", True, "result")
    assert recorder.calls[-6:] == ["enter side stream 1", *inside, "leave side stream 1"]


def test_on_a_cpu_it_runs_in_order_and_errors_are_raised_where_they_are_waited_for() -> None:
    queue, order, gate = SideQueue("gradients"), [], threading.Event()
    first, second = torch.zeros(1), torch.zeros(1)

    def slow(tensor: torch.Tensor) -> torch.Tensor:
        gate.wait(10.0)
        order.append("first")
        return tensor.add_(1)

    def fail(_: torch.Tensor) -> torch.Tensor:
        order.append("failed")
        raise ValueError("not this one")

    def last(tensor: torch.Tensor) -> torch.Tensor:
        order.append("last")
        return tensor

    works = ((slow, first), (fail, second), (last, second))
    futures = [queue.begin(work, (tensor,), in_thread=True) for work, tensor in works]
    assert not any(future.done() for future in futures)
    gate.set()
    assert futures[2].wait() is second
    assert futures[0].wait().tolist() == [1.0]
    with pytest.raises(ValueError, match="not this one"):
        futures[1].wait()
    assert order == ["first", "failed", "last"]
    queue.close()
    queue.close()  # again is nothing
    assert queue.begin(last, (first,), in_thread=False).wait() is first  # and it may be used again
    with pytest.raises(ValueError, match="not this one"):
        queue.begin(last, (first,), futures[1], in_thread=False).wait()


def test_an_error_of_a_collective_reaches_the_hook_of_ddp() -> None:
    failed: torch.futures.Future[Any] = torch.futures.Future()
    future = TensorWork(torch.zeros(2), types.SimpleNamespace(get_future=lambda: failed)).get_future()
    failed.set_exception(RuntimeError("the peer is gone"))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="the peer is gone"):
        future.wait()


def test_queues_of_one_purpose_share_a_thread_until_the_last_is_closed() -> None:
    """They share process groups, whose collectives must come in one order on all ranks."""
    names: list[str] = []
    first, second, other = SideQueue("shared"), SideQueue("shared"), SideQueue("another")
    release = threading.Event()

    def named(name: str, gate: threading.Event | None = None) -> Any:
        return lambda tensor: (gate is None or gate.wait(10), names.append(name), tensor)[-1]

    slow = first.begin(named("first", release), (torch.zeros(1),), in_thread=True)
    fast = second.begin(named("second"), (torch.zeros(1),), in_thread=True)
    other.begin(named("other"), (torch.zeros(1),), in_thread=True).wait()
    first.close()
    release.set()
    slow.wait(), fast.wait()
    second.begin(named("third"), (torch.zeros(1),), in_thread=True).wait()
    second.close(), other.close()
    assert names == ["other", "first", "second", "third"]
    assert not {"shared", "another"} & set(collectives._threads)
