"""Whoever looks at the gradients of a sparse step gets them dense; where nobody does they are never made."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer

from tests.ranks import run_ranks
from tests.tiny import ManualTiny, Tiny, make_data, make_strategy, make_trainer, weights_of

STEPS, FIRST_SPARSE = 6, 2
SPARSE = ("wide.weight", "wider.weight", "head.weight")
Gradients = dict[str, Tensor | None]


class Plain(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Gradients] = []

    def look(self, *_: Any) -> None:
        named = [(name, p.grad) for name, p in self.named_parameters() if p.requires_grad]
        self.seen.append({name: None if gradient is None else gradient.clone() for name, gradient in named})


class WithLateHook(Plain):
    """Sees the gradients of the last step before they are forgotten."""

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        self.look()


class WithOptimizerHook(Plain):
    def configure_optimizers(self) -> Optimizer:
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(self.look)
        return optimizer


class Manual(ManualTiny, Plain):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.look()
        return loss


class LookingBefore(pl.Callback):
    """Sees a rank's own gradient: in sparse steps the hook comes before the exchange, as clipping does."""

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        assert isinstance(pl_module, Plain)
        pl_module.look()


class LookingAfterwards(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        assert isinstance(pl_module, Plain)
        pl_module.look()


# Who looks: a module, or callbacks. The late one sees a step's gradients when the next one begins.
ONLOOKERS: dict[str, tuple[type[Plain], list[pl.Callback]]] = {
    "early callback": (Plain, [LookingBefore()]),
    "late hook": (WithLateHook, []),
    "optimizer's hook": (WithOptimizerHook, []),
    "manual optimization": (Manual, []),
    "nobody": (Plain, []),
    "unseen callback": (Plain, [LookingAfterwards()]),
}


def fit_all() -> dict[str, tuple[str, list[Gradients]]]:
    """Return the weights, and the gradients that each onlooker has seen."""
    fits = {}
    for name, (make_module, callbacks) in ONLOOKERS.items():
        module = make_module()
        make_trainer(make_strategy("dgc"), 2, callbacks=callbacks).fit(module, make_data(2, STEPS))
        fits[name] = weights_of(module), module.seen
    return fits


def test_onlookers_get_dense_gradients_and_change_nothing() -> None:
    """Who is not known to look finds nothing: what has been applied is gone, as after zero_grad."""
    both = run_ranks(fit_all, 2)
    for mine, theirs in zip(*(fits["early callback"][1][FIRST_SPARSE:] for fits in both), strict=True):
        assert not any(torch.equal(mine[name], theirs[name]) for name in SPARSE)
    for fits in both:
        weights, expected = fits["optimizer's hook"]
        assert len(expected) == STEPS
        for gradients in expected[FIRST_SPARSE:]:
            for name in SPARSE:
                gradient = gradients[name]
                assert 0 < gradient.count_nonzero() < 0.9 * gradient.numel(), "neither a rank's own nor nothing"
        assert {other for other, _ in fits.values()} == {weights}
        for who in ("late hook", "manual optimization"):
            # Before the first step there is nothing to be forgotten, and the last one's is not.
            is_late = who == "late hook"
            seen, theirs = (fits[who][1][1:], expected[:-1]) if is_late else (fits[who][1], expected)
            for mine, gradients in zip(seen, theirs, strict=True):
                for name, gradient in gradients.items():
                    assert torch.equal(mine[name], gradient), (who, name)
        for number, gradients in enumerate(fits["unseen callback"][1]):
            absent = {name for name, gradient in gradients.items() if gradient is None}
            assert absent == (set(SPARSE) if number >= FIRST_SPARSE else set())
