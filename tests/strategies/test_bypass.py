"""A step past Lightning is refused on all ranks: its gradients have not been exchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from lightning_lowbw import ConfigurationError, LocalSGDStrategy
from tests.ranks import run_ranks
from tests.strategies.watching import STEPS
from tests.tiny import TwoOptimizers, make_data, make_strategy, make_trainer


class Bypasses(TwoOptimizers):
    """Steps both optimizers itself, past Lightning, as libraries do that keep optimizers of their own."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizers: Any = self.optimizers(use_pl_optimizer=False)
        self.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        for optimizer in optimizers:
            optimizer.step()


def bypass(name: str) -> tuple[str, list[int]]:
    num_ranks = dist.get_world_size()
    strategy = make_strategy("dgc") if name == "dgc" else LocalSGDStrategy(k_steps=2, begin_step=3)
    with pytest.raises(ConfigurationError) as caught:
        make_trainer(strategy, num_ranks).fit(Bypasses(), make_data(num_ranks, STEPS))
    return str(caught.value), [worker.step for worker in strategy.workers]


@pytest.mark.parametrize("name", ["dgc", "local_sgd"])
def test_a_step_past_lightning_is_refused_on_all_ranks(name: str) -> None:
    for message, steps in run_ranks(bypass, 2, name):
        assert "not by Lightning" in message
        assert "strategy='ddp'" in message
        assert steps == [0, 0]
