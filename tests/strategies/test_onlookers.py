"""Whoever looks at the gradients of a sparse step gets them dense; where nobody does they are never made."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer

from tests.ranks import run_ranks
from tests.tiny import Tiny, make_data, make_strategy, make_trainer, weights_of

STEPS, FIRST_SPARSE = 8, 2
SPARSE = ("wide.weight", "wider.weight", "head.weight")
Gradients = dict[str, Tensor | None]


def gradients_of(module: pl.LightningModule) -> Gradients:
    named = [(name, p.grad) for name, p in module.named_parameters() if p.requires_grad]
    return {name: None if gradient is None else gradient.clone() for name, gradient in named}


class Plain(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Gradients] = []

    def look(self, *_: Any) -> None:
        self.seen.append(gradients_of(self))


class WithHook(Plain):
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.look()


class WithLateHook(Plain):
    """Sees the gradients of the last step before they are forgotten."""

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        self.look()


class WithOptimizerHook(Plain):
    def configure_optimizers(self) -> Optimizer:
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(self.look)  # one before the step runs before backward, too
        return optimizer


class Manual(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        optimizer.zero_grad()  # type: ignore[union-attr]
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer.step()  # type: ignore[union-attr]
        self.look()
        return loss


class Looking(pl.Callback):
    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        assert isinstance(pl_module, Plain)
        pl_module.look()


class LookingAfterwards(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        assert isinstance(pl_module, Plain)
        pl_module.look()


MODULES = (Plain, WithHook, WithLateHook, WithOptimizerHook, Manual)


def fit(make_module: type[Plain], callbacks: list[pl.Callback], dense: bool = False) -> tuple[str, list[Gradients]]:
    strategy = make_strategy("dense" if dense else "dgc")
    module = make_module()
    make_trainer(strategy, 2, callbacks=callbacks).fit(module, make_data(2, STEPS))
    return weights_of(module), module.seen


def fit_all() -> tuple[list[tuple[str, list[Gradients]]], list[Gradients]]:
    runs = [fit(make_module, [Looking()] if make_module is Plain else []) for make_module in MODULES]
    return [*runs, fit(Plain, [])], fit(Plain, [LookingAfterwards()])[1]


def test_onlookers_get_dense_gradients_and_change_nothing() -> None:
    for runs, afterwards in run_ranks(fit_all, 2):
        (expected_weights, expected), *others = runs
        assert len(expected) == STEPS
        for gradients in expected[FIRST_SPARSE:]:
            for name in SPARSE:
                gradient = gradients[name]
                assert gradient is not None
                assert 0 < gradient.count_nonzero() < 0.9 * gradient.numel(), "neither a rank's own nor nothing"
        for (weights, seen), make_module in zip(others, (*MODULES[1:], None), strict=True):
            assert weights == expected_weights, make_module
            if make_module is None:
                continue
            # Before the first step there is nothing to be forgotten, and the last one's is not.
            mine = seen[1:] if make_module is WithLateHook else seen
            for gradients, theirs in zip(mine, expected, strict=make_module is not WithLateHook):
                for name, gradient in theirs.items():
                    assert torch.equal(gradients[name], gradient), (make_module, name)  # type: ignore[arg-type]
        # Nobody is known to look after the step: what has been applied is gone, as after zero_grad.
        for number, gradients in enumerate(afterwards):
            absent = {name for name, gradient in gradients.items() if gradient is None}
            assert absent == (set(SPARSE) if number >= FIRST_SPARSE else set())
