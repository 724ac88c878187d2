"""GradScaler: the scale does not reach the residual, and an infinite gradient on one rank skips the step on all."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_lowbw import NonFiniteGradientError
from lightning_lowbw.comm.agreement import digest
from lightning_lowbw.strategies.step_hooks import exchange_unscaled_
from tests.ranks import run_ranks
from tests.strategies.fits import STEPS, fit
from tests.tiny import Tiny, amp_with_scaler, make_data, make_strategy, make_trainer, sgd, weights_of

BAD = {1: "dense", 6: "sparse"}  # batches in which rank 1 has an infinite loss


class Poisoned(Tiny):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.poison = (1, batch_idx) if batch_idx in BAD else None
        return super().training_step(batch, batch_idx)


def inf_on_one_rank() -> list[dict[str, Any]]:
    trace: list[dict[str, Any]] = []

    class Trace(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
            (worker,) = trainer.strategy.workers
            buffers = [s["momentum_buffer"] for s in worker.optimizer.state.values()]
            trace.append(
                {
                    "weights": weights_of(module),
                    "residuals": digest(worker.residuals.values()),
                    "momentum": digest(buffers),
                    "scale": trainer.precision_plugin.scaler.get_scale(),
                    "step": worker.step,
                    "param_group": {k: v for k, v in worker.optimizer.param_groups[0].items() if k != "params"},
                }
            )

    trainer = make_trainer(make_strategy("dgc"), 2, plugins=[amp_with_scaler()], callbacks=[Trace()])
    trainer.fit(Poisoned(), make_data(2, STEPS))
    return trace


def test_an_inf_on_one_rank_skips_the_step_on_all() -> None:
    here, there = run_ranks(inf_on_one_rank, 2)
    for trace in (here, there):
        for bad, phase in BAD.items():
            before, after = trace[bad - 1], trace[bad]
            for unchanged in ("weights", "residuals", "momentum", "param_group"):
                assert before[unchanged] == after[unchanged], (phase, unchanged)
            assert after["scale"] == before["scale"] / 2
            assert after["step"] == before["step"] + 1
            assert trace[bad + 1]["weights"] != after["weights"]  # and goes on
        assert trace[-1]["param_group"]["momentum"] == 0.9
    for mine, theirs in zip(here, there, strict=True):
        assert (mine["weights"], mine["scale"], mine["step"]) == (theirs["weights"], theirs["scale"], theirs["step"])


def scaled_and_unscaled(clip: float | None, optimizer: Any) -> list[list[Tensor]]:
    weights = []
    for init_scale in (1.0, 2.0**8):
        model = Tiny(optimizer).double().float()
        plugin = amp_with_scaler(init_scale)
        plugin.forward_context = contextlib.nullcontext  # type: ignore[method-assign]
        # the scaler alone: fp16 would round otherwise
        fit(model, plugins=[plugin], gradient_clip_val=clip)
        weights.append([p.detach() for p in model.parameters()])
    return weights


@pytest.mark.parametrize(
    ("clip", "optimizer"),
    [(0.3, sgd), (None, partial(torch.optim.AdamW, lr=0.01, fused=True))],  # which unscales inside its step
)
def test_the_scale_does_not_reach_the_residual(clip: float | None, optimizer: Any) -> None:
    unscaled, scaled = run_ranks(scaled_and_unscaled, 2, clip, optimizer)[0]
    for a, b in zip(unscaled, scaled, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def nonfinite_without_scaler() -> str:
    model = Tiny(poison=(1, 6))
    with pytest.raises(NonFiniteGradientError) as caught:
        fit(model)
    return str(caught.value)


def test_a_nonfinite_gradient_is_an_error_on_all_ranks() -> None:
    messages = run_ranks(nonfinite_without_scaler, 2)
    assert messages[0] == messages[1]
    assert "rank 1" in messages[0]
    assert "wide.weight" in messages[0]


def test_an_optimizer_without_gradients_has_nothing_to_scale() -> None:
    plugin = amp_with_scaler()
    plugin.scaler.scale(torch.ones(()))  # type: ignore[union-attr]
    asked: list[bool] = []
    exchange_unscaled_(plugin, sgd([torch.nn.Parameter(torch.ones(2))]), lambda skip: not asked.append(skip))
    assert asked == [True]
