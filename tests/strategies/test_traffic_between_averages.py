"""Between two averages nothing is sent. Signals, which wait for an average: test_signals.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from lightning_lowbw import LocalSGDStrategy, TrafficMonitor
from tests.ranks import run_ranks
from tests.strategies.fits import SPARSE, Silence, Trace
from tests.tiny import Tiny, make_data, make_trainer

STEPS = 10


def fit_in_silence(accumulate: int, kwargs: dict[str, Any]) -> list[int]:
    """Return the optimizer steps after which there was an average."""
    num_ranks, trace = dist.get_world_size(), Trace()
    callbacks = [trace, TrafficMonitor(prog_bar=False), Silence()]
    options = {"callbacks": callbacks, "accumulate_grad_batches": accumulate}
    trainer = make_trainer(LocalSGDStrategy(**kwargs), num_ranks, **options)
    trainer.fit(Tiny(unused="find_unused_parameters" in kwargs), make_data(num_ranks, STEPS * accumulate))
    averages = [0, *trace.averages[accumulate - 1 :: accumulate]]
    return [step for step in range(1, STEPS + 1) if averages[step] > averages[step - 1]]


@pytest.mark.parametrize(
    ("accumulate", "kwargs", "due"),
    [
        (2, {"k_steps": 3, "begin_step": 2}, [5, 8]),
        (1, {"k_steps": 4, "delay_steps": 3, "compression": SPARSE}, [8]),
        (1, {"k_steps": 3, "find_unused_parameters": True, "gradient_as_bucket_view": True}, [4, 7, 10]),
    ],
)
def test_averages_come_when_they_should_and_nothing_is_sent_between(
    accumulate: int, kwargs: dict[str, Any], due: list[int]
) -> None:
    assert run_ranks(fit_in_silence, 2, accumulate, kwargs) == [due] * 2
