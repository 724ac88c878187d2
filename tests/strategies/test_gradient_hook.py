"""DDP's communication hook: what it reduces, and when DDP fills no bucket."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from lightning_lowbw.comm.peers import Peers
from lightning_lowbw.strategies.gradient_hook import GradientHook, Reduction
from tests.ranks import run_ranks
from tests.tiny import ManualTiny, Tiny, make_data, make_strategy, make_trainer


def reduce_a_bucket(reduction: Reduction | None) -> tuple[list[float], bool]:
    """Return the bucket of this rank, which has the value of its rank; and whether it is said to be reduced."""
    parameter, buffer = nn.Parameter(torch.zeros(2)), torch.full((2,), float(dist.get_rank()))
    bucket: Any = SimpleNamespace(buffer=lambda: buffer, parameters=lambda: [parameter])
    model: Any = SimpleNamespace(
        register_comm_hook=lambda state, hook: hook(state, bucket).wait(), parameters=lambda: [parameter]
    )
    hook = GradientHook()
    hook.reduction = reduction
    hook.register(model, Peers(), is_manual=True)
    return buffer.tolist(), hook.have_reduced([parameter])


def test_a_bucket_is_reduced_or_left_as_it_is() -> None:
    assert run_ranks(reduce_a_bucket, 2, "all") == [([0.5, 0.5], True)] * 2
    assert run_ranks(reduce_a_bucket, 2, None) == [([0.0, 0.0], False), ([1.0, 1.0], False)]


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


@pytest.mark.parametrize("make_module", [Tiny, ManualTiny])
def test_in_sparse_steps_no_bucket_is_filled(make_module: Callable[[], Tiny]) -> None:
    """Each would cost a copy of the gradient, and nothing is reduced."""
    for buckets in run_ranks(count_buckets, 2, make_module):
        dense, sparse = buckets[:3], buckets[3:]
        assert all(dense)
        assert sparse == [0, 0, 0]
