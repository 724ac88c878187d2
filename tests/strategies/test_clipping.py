"""Clipping acts before a sparse exchange on this rank's own gradient, and after a dense one as in DDP."""

from __future__ import annotations

import functools
import math
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_lowbw import NarrowGradients, Strategy
from tests.ranks import run_ranks
from tests.strategies.watching import STEPS, fit
from tests.tiny import Tiny, sgd, weights_of


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


def clip_in_its_own_way() -> list[tuple[str, bool, float]]:
    model = ClipsInItsOwnWay()
    fit(model)
    return model.seen


def test_a_modules_own_clipping_acts_on_the_local_gradient() -> None:
    for seen in run_ranks(clip_in_its_own_way, 2):
        dense = [entry for entry in seen if not entry[1]]
        sparse = [entry for entry in seen if entry[1]]
        # Once per step; DDP clips the mean after the hook, DGC clips its own gradient before the exchange.
        assert [name for name, _, _ in dense] == ["step", "clip"] * 2
        assert [name for name, _, _ in sparse] == ["clip", "step"] * (STEPS - 2)
        assert all(norm == pytest.approx(0.1, rel=1e-3) for name, _, norm in dense if name == "clip")
        clipped = [norm for name, _, norm in sparse if name == "clip"]
        assert all(norm == pytest.approx(0.1 * math.sqrt(2), rel=1e-3) for norm in clipped)


def clip_narrow_gradients() -> tuple[list[tuple[str, bool, float]], str]:
    model = ClipsInItsOwnWay()
    fit(model, strategy=Strategy(NarrowGradients()))
    return model.seen, weights_of(model)


def test_gradients_in_few_bits_are_clipped_after_the_exchange() -> None:
    """The mean, which is the same on all ranks, as in DDP."""
    (first, weights), (second, other_weights) = run_ranks(clip_narrow_gradients, 2)
    assert first == second
    assert weights == other_weights
    assert [name for name, _, _ in first] == ["step", "clip"] * STEPS
    assert all(norm == pytest.approx(0.1, rel=1e-3) for name, _, norm in first if name == "clip")
    assert all(norm > 0.1 for name, _, norm in first if name == "step")


class ClipsByHand(Tiny):
    """Manual optimization: a gradient of one or two backward passes, clipped after each, or after the last."""

    def __init__(self, num_passes: int = 1, clips_each: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.num_passes, self.clips_each = num_passes, clips_each
        self.norms: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for number in range(self.num_passes):
            self.manual_backward(super().training_step(batch, batch_idx) / (number + 1))
            if self.clips_each or number == self.num_passes - 1:
                self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
                self.norms.append(own_norm(self))
        optimizer.step()


def clip_by_hand(num_passes: int, clips_each: bool, *, is_narrow: bool) -> tuple[list[float], str, list[float]]:
    model = ClipsByHand(num_passes, clips_each)
    strategy = Strategy(NarrowGradients("float16")) if is_narrow else "ddp"
    fit(model, strategy=strategy)
    if is_narrow:
        assert strategy.workers[0].step == STEPS
    return model.norms, weights_of(model), [float(p.detach().norm()) for p in model.parameters()]


@pytest.mark.parametrize(("num_passes", "clips_each"), [(1, False), (2, False), (2, True)])
def test_manual_optimization_clips_the_mean_of_gradients_in_few_bits(num_passes: int, clips_each: bool) -> None:
    found = run_ranks(functools.partial(clip_by_hand, num_passes, clips_each, is_narrow=True), 2)
    stock = run_ranks(functools.partial(clip_by_hand, num_passes, clips_each, is_narrow=False), 2)
    for norms, weights, sizes in found:
        assert weights == found[0][1]
        assert norms == pytest.approx(stock[0][0], rel=1e-2)
        assert sizes == pytest.approx(stock[0][2], rel=1e-3)


class Lookahead(torch.optim.Optimizer):
    """A wrapper with an attribute `optimizer`, as many have: it is the one Lightning knows."""

    def __init__(self, parameters: Any) -> None:
        self.optimizer = sgd(list(parameters), weight_decay=0.0)
        super().__init__(self.optimizer.param_groups, {})

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        self.optimizer.step()
        return loss


def clip_a_wrapper() -> str:
    model = Tiny(Lookahead)
    fit(model, gradient_clip_val=0.3)
    return weights_of(model)


def test_an_optimizer_that_wraps_another() -> None:
    assert len(set(run_ranks(clip_a_wrapper, 2))) == 1
