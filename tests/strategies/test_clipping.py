"""Clipping acts before a sparse exchange on this rank's own gradient, and after a dense one as in DDP."""

from __future__ import annotations

import functools
import math
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch

from lightning_lowbw import DisagreementError, QuantizedGradients, Strategy
from tests.ranks import run_ranks
from tests.strategies.watching import STEPS, fit
from tests.tiny import Tiny, amp_with_scaler, sgd, weights_of


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


def clip_quantized_gradients() -> tuple[list[tuple[str, bool, float]], str]:
    model = ClipsInItsOwnWay()
    fit(model, strategy=Strategy(QuantizedGradients()))
    return model.seen, weights_of(model)


def test_gradients_in_few_bits_are_clipped_after_the_exchange() -> None:
    """The mean, which is the same on all ranks, as in DDP."""
    (first, weights), (second, other_weights) = run_ranks(clip_quantized_gradients, 2)
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


def clip_by_hand(num_passes: int, clips_each: bool, *, is_quantized: bool) -> tuple[list[float], str, list[float]]:
    model = ClipsByHand(num_passes, clips_each)
    strategy = Strategy(QuantizedGradients("float16")) if is_quantized else "ddp"
    fit(model, strategy=strategy)
    if is_quantized:
        assert strategy.workers[0].step == STEPS
    return model.norms, weights_of(model), [float(p.detach().norm()) for p in model.parameters()]


@pytest.mark.parametrize(("num_passes", "clips_each"), [(1, False), (2, False), (2, True)])
def test_manual_optimization_clips_the_mean_of_gradients_in_few_bits(num_passes: int, clips_each: bool) -> None:
    found = run_ranks(functools.partial(clip_by_hand, num_passes, clips_each, is_quantized=True), 2)
    stock = run_ranks(functools.partial(clip_by_hand, num_passes, clips_each, is_quantized=False), 2)
    for norms, weights, sizes in found:
        assert weights == found[0][1]
        assert norms == pytest.approx(stock[0][0], rel=1e-2)
        assert sizes == pytest.approx(stock[0][2], rel=1e-3)


class ClipsScaled(Tiny):
    """Manual optimization with a GradScaler, where one rank has an inf in its second step."""

    def __init__(self, algorithm: str) -> None:
        super().__init__(poison=(1, 1))
        self.automatic_optimization = False
        self.algorithm = algorithm
        self.scales: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm=self.algorithm)
        optimizer.step()
        self.scales.append(self.trainer.precision_plugin.scaler.get_scale())


def clip_scaled(algorithm: str) -> tuple[str, list[float]]:
    model = ClipsScaled(algorithm)
    fit(model, strategy=Strategy(QuantizedGradients()), plugins=[amp_with_scaler()])
    return weights_of(model), model.scales


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_a_step_that_is_clipped_by_hand_is_skipped_on_all_ranks(algorithm: str) -> None:
    """Clipping by value would remove the inf that lets the scaler skip it."""
    first, second = run_ranks(clip_scaled, 2, algorithm)
    assert first == second
    assert first[1][1] == first[1][0] / 2


class AsksToSave(ClipsByHand):
    """A rank asks all to save, in a step that exchanges twice."""

    def __init__(self) -> None:
        super().__init__(num_passes=2, clips_each=True)
        self.due: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if (batch_idx, self.global_rank) == (1, 1):
            self.trainer.strategy.workers[0].save_requested = True
        super().training_step(batch, batch_idx)
        self.due.append(self.trainer.strategy.signals.save_is_due)


def ask_to_save() -> list[bool]:
    model, strategy = AsksToSave(), Strategy(QuantizedGradients())
    with mock.patch.object(strategy.signals, "save_if_due"):  # which would reset it
        fit(model, strategy=strategy)
    return model.due


def test_a_request_is_not_lost_where_a_step_exchanges_twice() -> None:
    for due in run_ranks(ask_to_save, 2):
        assert due == [False] + [True] * (STEPS - 1)


class ClipsOnOneRank(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        if self.global_rank == 0 or batch_idx == 0:
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        optimizer.step()


def clip_on_one_rank() -> tuple[str, int]:
    model = ClipsOnOneRank()
    with pytest.raises(DisagreementError) as caught:
        fit(model, strategy=Strategy(QuantizedGradients()))
    return str(caught.value), model.global_step


def test_ranks_that_do_not_all_clip_by_hand_are_told() -> None:
    for message, step in run_ranks(clip_on_one_rank, 2):
        assert "exchange before: rank 0 has 'clip_gradients', rank 1 has 'optimizer.step'" in message
        assert step == 1


class FailsAfterClipping(ClipsByHand):
    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        super().clip_gradients(*args, **kwargs)
        if self.global_step == 1:
            raise KeyError("after the exchange")


def fail_after_clipping() -> str:
    strategy = Strategy(QuantizedGradients())
    with pytest.raises(KeyError):
        fit(FailsAfterClipping(), strategy=strategy)
    strategy.workers[0].recall()  # as before a state is saved
    return strategy.workers[0].torn


def test_a_step_that_ends_between_clipping_and_stepping_is_torn() -> None:
    assert run_ranks(fail_after_clipping, 2) == ["the optimizer's step after step 1"] * 2


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
