"""Clipping acts before a sparse exchange on this rank's own gradient, and after a dense one as in DDP."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_lowbw import ConfigurationError, QuantizedGradients, Strategy
from tests.ranks import run_ranks
from tests.strategies.fits import STEPS, fit
from tests.tiny import Tiny, weights_of


def own_norm(module: pl.LightningModule) -> float:
    return math.sqrt(sum(float(p.grad.norm()) ** 2 for p in module.parameters() if p.grad is not None))


class ClipsInItsOwnWay(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, bool, float]] = []

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        is_sparse = not self.trainer.strategy.workers[0].reduces_in_backward
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        self.seen.append(("clip", is_sparse, own_norm(self)))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append(("step", not self.trainer.strategy.workers[0].reduces_in_backward, own_norm(self)))


def clip_in_its_own_way(**options: Any) -> tuple[list[tuple[str, bool, float]], str]:
    model = ClipsInItsOwnWay()
    fit(model, **options)
    return model.seen, weights_of(model)


def test_a_modules_own_clipping_acts_on_the_local_gradient() -> None:
    for seen, _ in run_ranks(clip_in_its_own_way, 2):
        dense = [entry for entry in seen if not entry[1]]
        sparse = [entry for entry in seen if entry[1]]
        # Once per step, after the hook: DDP clips the mean, DGC its own gradient before the exchange.
        assert [name for name, _, _ in dense] == ["step", "clip"] * 2
        assert [name for name, _, _ in sparse] == ["step", "clip"] * (STEPS - 2)
        assert all(norm == pytest.approx(0.1, rel=1e-3) for name, _, norm in dense if name == "clip")
        clipped = [norm for name, _, norm in sparse if name == "clip"]
        assert all(norm == pytest.approx(0.1 * math.sqrt(2), rel=1e-3) for norm in clipped)


def test_gradients_in_few_bits_are_clipped_after_the_exchange() -> None:
    """The mean, which is the same on all ranks, as in DDP."""
    (seen, weights), other = run_ranks(partial(clip_in_its_own_way, strategy=Strategy(QuantizedGradients())), 2)
    assert (seen, weights) == other
    assert [name for name, _, _ in seen] == ["step", "clip"] * STEPS
    assert all(norm == pytest.approx(0.1, rel=1e-3) for name, _, norm in seen if name == "clip")
    assert all(norm > 0.1 for name, _, norm in seen if name == "step")


class ClipsByHand(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        optimizer.step()


def clip_by_hand() -> str:
    with pytest.raises(ConfigurationError) as caught:
        fit(ClipsByHand(), strategy=Strategy(QuantizedGradients()))
    return str(caught.value)


def test_a_mean_that_is_not_there_yet_cannot_be_clipped_by_hand() -> None:
    for message in run_ranks(clip_by_hand, 2):
        assert message.startswith("clip_gradients in manual optimization, step 0: here the mean over ranks is clipped")
