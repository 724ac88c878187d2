"""Between two averages nothing is sent. Signals, which wait for an average: test_signals.py."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from torch import Tensor

from lightning_lowbw import LocalSGDStrategy, TrafficMonitor
from tests.ranks import run_ranks
from tests.strategies.fits import SPARSE, Silence, Trace, gathered
from tests.tiny import Tiny, make_data, make_trainer

STEPS = 10


def fit_in_silence(accumulate: int, kwargs: dict[str, Any]) -> dict[str, Any]:
    num_ranks = dist.get_world_size()
    trace = Trace()
    callbacks = [trace, TrafficMonitor(prog_bar=False), Silence()]
    trainer = make_trainer(
        LocalSGDStrategy(**kwargs), num_ranks, callbacks=callbacks, accumulate_grad_batches=accumulate
    )
    trainer.fit(Tiny(unused=bool(kwargs.get("find_unused_parameters"))), make_data(num_ranks, STEPS * accumulate))
    by_rank = gathered(trace.after)
    same = [len(set(step)) == 1 for step in zip(*by_rank, strict=True)]
    return {"same": same, "averages": trace.averages, "steps": trainer.global_step}


@pytest.mark.parametrize(
    ("accumulate", "kwargs"),
    [
        (1, {"k_steps": 3, "begin_step": 2}),
        (2, {"k_steps": 3, "begin_step": 2}),
        (1, {"k_steps": 3, "begin_step": 0}),
        (1, {"k_steps": 4, "delay_steps": 2}),
        (1, {"k_steps": 3, "compression": SPARSE}),
        (1, {"k_steps": 4, "delay_steps": 3, "compression": SPARSE}),
        (1, {"k_steps": 3, "find_unused_parameters": True}),
        (1, {"k_steps": 3, "gradient_as_bucket_view": True}),
    ],
)
def test_averages_come_when_they_should_and_nothing_is_sent_between(accumulate: int, kwargs: dict[str, Any]) -> None:
    for result in run_ranks(fit_in_silence, 2, accumulate, kwargs):
        assert result["steps"] == STEPS
        begin, k, delay = kwargs.get("begin_step", 1), kwargs["k_steps"], kwargs.get("delay_steps", 0)
        due = [step for step in range(1, STEPS + 1) if step > begin and (step - begin - delay) % k == 0]
        due = [step for step in due if step - delay > begin]
        averages = result["averages"][accumulate - 1 :: accumulate]
        assert [
            step for step in range(1, STEPS + 1) if averages[step - 1] > (averages[step - 2] if step > 1 else 0)
        ] == due
        if not delay:
            same = result["same"][accumulate - 1 :: accumulate]
            assert [step for step in range(begin + 1, STEPS + 1) if same[step - 1]] == due


class Sleepy(Tiny):
    """Rank 0 sleeps in some steps, rank 1 in others."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if batch_idx % 2 == self.global_rank and batch_idx > 0:
            time.sleep(0.1)
        return super().training_step(batch, batch_idx)


def time_fit(strategy: str) -> float:
    num_ranks = dist.get_world_size()
    chosen = pl.strategies.DDPStrategy() if strategy == "ddp" else LocalSGDStrategy(k_steps=10, begin_step=1)
    trainer = make_trainer(chosen, num_ranks)
    started = time.perf_counter()
    trainer.fit(Sleepy(), make_data(num_ranks, 21))
    return time.perf_counter() - started


@pytest.mark.slow
def test_a_rank_does_not_wait_for_another_between_averages() -> None:
    """20 steps, each slow on one of two ranks: 20 x 0.1 s in lock-step, 10 x 0.1 s alone."""
    local, dense = max(run_ranks(time_fit, 2, "local")), max(run_ranks(time_fit, 2, "ddp"))
    assert dense - local > 0.6
