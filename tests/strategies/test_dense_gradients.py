"""Whoever looks at the gradients of a sparse step gets them dense; where nobody does they are never made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor
from torch.optim import Optimizer

from tests.ranks import run_ranks
from tests.tiny import ManualTiny, Tiny, make_data, make_strategy, make_trainer, weights_of

STEPS, FIRST_SPARSE = 6, 2
SPARSE = ("wide.weight", "wider.weight", "head.weight")
Gradients = dict[str, Tensor | None]


def gradients_of(module: pl.LightningModule) -> Gradients:
    named = [(name, p.grad) for name, p in module.named_parameters() if p.requires_grad]
    return {name: None if gradient is None else gradient.clone() for name, gradient in named}


class Plain(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Gradients] = []
        self.norms: list[dict[str, Tensor]] = []  # that have been logged

    def look(self, *_: Any) -> None:
        self.seen.append(gradients_of(self))

    def log_norms(self) -> None:
        self.log_dict(grad_norm(self, 2))

    def on_train_batch_end(self, *_: Any) -> None:
        logged = self.trainer.callback_metrics
        self.norms.append({name: value.clone() for name, value in logged.items() if name.startswith("grad_")})


class WithHook(Plain):
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.look()
        self.log_norms()


class WithLateHook(Plain):
    """Sees the gradients of the last step before they are forgotten."""

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        self.look()


class WithOptimizerHook(Plain):
    def configure_optimizers(self) -> Optimizer:
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(self.look)
        return optimizer


class WithEarlyOptimizerHook(Plain):
    """Lightning runs backward inside of the step: what is before the step sees the gradients of the last one."""

    def configure_optimizers(self) -> Optimizer:
        optimizer = super().configure_optimizers()
        optimizer.register_step_pre_hook(self.look)
        return optimizer


class Manual(ManualTiny, Plain):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.look()
        return loss


class Looking(pl.Callback):
    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        assert isinstance(pl_module, Plain)
        pl_module.look()
        pl_module.log_norms()


class LookingLate(pl.Callback):
    def on_before_zero_grad(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        assert isinstance(pl_module, Plain)
        pl_module.look()


class LookingAfterwards(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        assert isinstance(pl_module, Plain)
        pl_module.look()


# Who looks: a module, or callbacks. The late ones see a step's gradients when the next one begins.
ONLOOKERS: dict[str, tuple[type[Plain], list[pl.Callback]]] = {
    "callback": (Plain, [Looking()]),
    "hook": (WithHook, []),
    "late hook": (WithLateHook, []),
    "late callback": (Plain, [LookingLate()]),
    "optimizer's hook": (WithOptimizerHook, []),
    "optimizer's early hook": (WithEarlyOptimizerHook, []),
    "manual optimization": (Manual, []),
    "nobody": (Plain, []),
    "unseen callback": (Plain, [LookingAfterwards()]),
}
LATE = ("late hook", "late callback", "optimizer's early hook")


@dataclass(frozen=True)
class Fit:
    weights: str
    seen: list[Gradients]
    norms: list[dict[str, Tensor]]


def fit(make_module: type[Plain], callbacks: list[pl.Callback]) -> Fit:
    module = make_module()
    make_trainer(make_strategy("dgc"), 2, callbacks=callbacks).fit(module, make_data(2, STEPS))
    return Fit(weights_of(module), module.seen, module.norms)


def fit_all() -> dict[str, Fit]:
    return {name: fit(*onlooker) for name, onlooker in ONLOOKERS.items()}


@pytest.fixture(scope="module")
def fits() -> list[dict[str, Fit]]:
    """What each rank has seen."""
    return run_ranks(fit_all, 2)


def test_dense_gradients_get_dense_gradients_and_change_nothing(fits: list[dict[str, Fit]]) -> None:
    for runs in fits:
        expected = runs["callback"].seen
        assert len(expected) == STEPS
        for gradients in expected[FIRST_SPARSE:]:
            for name in SPARSE:
                gradient = gradients[name]
                assert gradient is not None
                assert 0 < gradient.count_nonzero() < 0.9 * gradient.numel(), "neither a rank's own nor nothing"
        for who, run in runs.items():
            assert run.weights == runs["callback"].weights, who
        for who in ONLOOKERS.keys() - {"nobody", "unseen callback"}:
            # Before the first step there is nothing to be forgotten, and the last one's is not.
            seen, theirs = (runs[who].seen[1:], expected[:-1]) if who in LATE else (runs[who].seen, expected)
            for mine, gradients in zip(seen, theirs, strict=True):
                for name, gradient in gradients.items():
                    assert torch.equal(mine[name], gradient), (who, name)  # type: ignore[arg-type]


def test_who_is_not_known_to_look_finds_nothing(fits: list[dict[str, Fit]]) -> None:
    """What has been applied is gone, as after zero_grad."""
    for runs in fits:
        for number, gradients in enumerate(runs["unseen callback"].seen):
            absent = {name for name, gradient in gradients.items() if gradient is None}
            assert absent == (set(SPARSE) if number >= FIRST_SPARSE else set())
