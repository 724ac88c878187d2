"""The communication hook with optimizers in different phases, on the CPU and as it would run on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from lightning_lowbw.comm import side_queue
from lightning_lowbw.comm.peers import Peers
from lightning_lowbw.strategies import gradient_hook
from lightning_lowbw.strategies.gradient_hook import GradientHook, completed, copied_back
from tests.ranks import run_ranks
from tests.tiny import Tiny, make_data, make_strategy, make_trainer

CUDA = torch.device("cuda", 1)


@dataclass
class Log:
    """The order of what happens around a bucket on a GPU."""

    events: list[str] = field(default_factory=list)

    def side_stream(self, device: torch.device, purpose: str) -> str:
        return f"side stream of {device}"

    @contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        self.events.append(f"enter {stream}")
        yield
        self.events.append(f"leave {stream}")


class FakeFuture:
    """A future whose reduction has not run before it is waited for; callbacks are an error."""

    def __init__(self, log: Log, name: str, buffer: Tensor, reduce_: Callable[[Tensor], Any]) -> None:
        self._log, self._name, self._buffer, self._reduce = log, name, buffer, reduce_

    def wait(self) -> Tensor:
        self._log.events.append(f"wait for {self._name}")
        self._reduce(self._buffer)
        return self._buffer

    def then(self, callback: Any) -> None:
        raise AssertionError("a callback of a CUDA future that carries no device waits for nothing")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    """Stand-ins for what needs a GPU: the side stream, and futures that carry devices."""
    log = Log()

    class FakeDeviceFuture:
        def __init__(self, *, devices: list[torch.device] | None = None) -> None:
            self.devices = devices

        def set_result(self, value: Any) -> None:
            log.events.append(f"set result on {self.devices}")
            self.value = value

    monkeypatch.setattr(gradient_hook, "side_stream", log.side_stream)
    monkeypatch.setattr(torch.cuda, "stream", log.stream)
    monkeypatch.setattr(side_queue, "Future", FakeDeviceFuture)
    monkeypatch.setattr(gradient_hook, "collect_all", None)  # its future would carry no device
    return log


def on_cuda() -> Any:
    return SimpleNamespace(is_cuda=True, device=CUDA)


def test_a_bucket_that_is_left_alone_has_a_future_with_its_device(log: Log) -> None:
    buffer = on_cuda()
    future: Any = completed(buffer)
    assert future.devices == [CUDA]
    assert future.value is buffer
    assert copied_back(on_cuda(), []).devices == [CUDA]  # type: ignore[attr-defined]


def test_on_a_gpu_views_are_copied_back_after_their_reductions_and_before_the_result(log: Log) -> None:
    buffer, views = on_cuda(), [torch.ones(2, 3), torch.ones(4)]
    pending: Any = [
        ([views[0]], FakeFuture(log, "all ranks", torch.ones(6), lambda flat: flat.mul_(2.0))),
        ([views[1]], FakeFuture(log, "the node", torch.ones(4), lambda flat: flat.mul_(3.0))),
    ]
    future: Any = copied_back(buffer, pending)
    assert log.events == [
        f"enter side stream of {CUDA}",
        "wait for all ranks",
        "wait for the node",
        f"set result on {[CUDA]}",
        f"leave side stream of {CUDA}",
    ]
    assert future.value is buffer
    assert [view.unique().tolist() for view in views] == [[2.0], [3.0]]


def test_on_the_cpu_nobody_waits_in_the_hook() -> None:
    buffer, reduction = torch.ones(5), Future[Tensor]()
    future = copied_back(buffer, [([buffer[:2], buffer[2:4]], reduction)])
    assert not future.done()
    reduction.set_result(torch.arange(4.0))
    assert future.wait() is buffer
    assert buffer.tolist() == [0.0, 1.0, 2.0, 3.0, 1.0]


def test_an_error_of_a_reduction_reaches_the_bucket() -> None:
    reduction = Future[Tensor]()
    future = copied_back(torch.ones(2), [([torch.ones(2)], reduction)])
    reduction.set_exception(RuntimeError("connection closed"))  # type: ignore[arg-type]  # torch's annotation is wrong
    with pytest.raises(RuntimeError, match="connection closed"):
        future.wait()


# Real ranks -----------------------------------------------------------------------------------------------------------


def reduce_two_optimizers(phases: tuple[bool, bool]) -> list[list[float]]:
    """Reduce a bucket of two parameters, whose optimizers are dense (True) or sparse (False)."""
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))]
    workers: dict[int, Any] = {
        number: SimpleNamespace(
            reduces_in_backward=is_dense,
            reduces_in_node=False,
            optimizer=torch.optim.SGD([parameter], lr=1.0),
        )
        for number, (parameter, is_dense) in enumerate(zip(parameters, phases, strict=True))
    }
    buffer = torch.full((5,), float(dist.get_rank()))
    views = list(buffer.split([2, 3]))
    bucket: Any = SimpleNamespace(
        buffer=lambda: buffer, parameters=lambda: parameters, gradients=lambda: views, index=lambda: 0
    )
    model: Any = SimpleNamespace(register_comm_hook=lambda state, hook: hook(state, bucket).wait())
    GradientHook(workers).register(model, Peers(), is_manual=False)
    return [view.tolist() for view in views]


@pytest.mark.parametrize("phases", [(True, True), (True, False), (False, True), (False, False)])
def test_each_parameter_is_reduced_as_its_optimizer_asks(phases: tuple[bool, bool]) -> None:
    for rank, views in enumerate(run_ranks(reduce_two_optimizers, 2, phases)):
        for view, is_dense in zip(views, phases, strict=True):
            assert set(view) == {0.5 if is_dense else float(rank)}


class Manual(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        optimizer.zero_grad()  # type: ignore[union-attr]
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer.step()  # type: ignore[union-attr]
        return loss


class Counter(pl.Callback):
    """Counts the buckets that DDP fills in each step."""

    def __init__(self) -> None:
        self.buckets: list[int] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.buckets.append(0)


def count_buckets(make_module: Callable[[], Tiny]) -> list[int]:
    counter, reduce = Counter(), GradientHook.reduce

    @functools.wraps(reduce)  # DDP looks at the annotations
    def counted(hook: GradientHook, state: object, bucket: dist.GradBucket) -> Future[Tensor]:
        counter.buckets[-1] += 1
        return reduce(hook, state, bucket)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(GradientHook, "reduce", counted)
        trainer = make_trainer(make_strategy("dgc", rampup_begin_step=3), 2, callbacks=[counter])
        trainer.fit(make_module(), make_data(2, 6))
    return counter.buckets


@pytest.mark.parametrize("make_module", [Tiny, Manual])
def test_in_sparse_steps_no_bucket_is_filled(make_module: Callable[[], Tiny]) -> None:
    """Each would cost a copy of the gradient, and nothing is reduced."""
    for buckets in run_ranks(count_buckets, 2, make_module):
        dense, sparse = buckets[:3], buckets[3:]
        assert all(dense)
        assert sparse == [0, 0, 0]
