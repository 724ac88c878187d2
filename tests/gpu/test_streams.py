"""On a GPU: what a side stream writes late is there for a reader on the main stream, who does not wait on the host.

Each proof has a control: with futures that do not know their device the reader comes too early.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.futures import Future

from lightning_lowbw.comm.collectives import SideQueue, TensorWork
from lightning_lowbw.kernels import tensors

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
CYCLES = 200_000_000  # a tenth of a second
NUMEL = 1 << 20


def zeros() -> Tensor:
    return torch.zeros(NUMEL, device=torch.device("cuda", 0))


def begin_late(result: Tensor, source: Tensor | None = None) -> Future[Tensor]:
    """Fill a tensor with ones on the side stream, or with what another one has when the work begins."""

    def write(given: Tensor) -> Tensor:
        torch.cuda._sleep(CYCLES)
        return given.fill_(1.0) if source is None else given.copy_(source)

    return SideQueue("proof").begin(write, (result,) if source is None else (result, source), in_thread=False)


def side_write() -> Tensor:
    return begin_late(zeros()).wait()


def hook_of_ddp() -> Tensor:
    """A collective that is done late, as `TensorWork` hands it over to DDP."""
    result = zeros()
    done: Future[Any] = Future(devices=[result.device])  # torch.distributed's own
    with torch.cuda.stream(tensors.side_stream(result.device, "proof")):
        torch.cuda._sleep(CYCLES)
        done.set_result([result.fill_(1.0)])
    return TensorWork(result, SimpleNamespace(get_future=lambda: done)).get_future().wait()


def copy_back_of_two_optimizers() -> Tensor:
    """Both begun before either is waited for; the copies back are on the main stream."""
    works = [TensorWork(zeros(), begin_late(staged), staged) for staged in (zeros(), zeros())]
    first, second = (work.wait() for work in works)
    return torch.minimum(first, second)


def summing_stream() -> Tensor:
    """It reads what the main stream writes late, and the main stream reads what it has made of that."""
    result, source = zeros(), zeros()
    torch.cuda._sleep(CYCLES)
    source.fill_(1.0)
    return begin_late(result, source).wait()


@pytest.mark.parametrize("read", [side_write, hook_of_ddp, copy_back_of_two_optimizers, summing_stream])
def test_what_is_written_late_is_read(read: Callable[[], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    zeros(), torch.cuda.synchronize()
    assert float(read().sum()) == NUMEL
    monkeypatch.setattr(tensors.Cuda, "new_future", lambda _: Future())
    torch.cuda.synchronize()
    assert float(read().sum()) == 0.0, "the proof has no power: a future without devices waits, too"


def test_the_side_stream_waits_for_the_main_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """That it does is why `summing_stream` reads ones; here without its event."""
    monkeypatch.setattr(tensors.Cuda, "fork", lambda gpu, purpose: lambda *_: gpu.aside(purpose))
    result, source = zeros(), zeros().fill_(0.0)  # so that the kernel is loaded
    side = tensors.side_stream(result.device, "proof")
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES)
    source.fill_(1.0)
    SideQueue("proof").begin(lambda given: given.copy_(source), (result, source), in_thread=False)
    side.synchronize()
    assert float(result.sum()) == 0.0, "the proof has no power: streams run one after the other"
