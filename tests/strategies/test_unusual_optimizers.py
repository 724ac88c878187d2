"""Optimizers with two sets of weights or with communication in their step, without a learning rate or hooks."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from lightning_lowbw import ConfigurationError, LocalSGD
from tests.ranks import on_ranks
from tests.strategies.fits import refusal, same, saving, train
from tests.tiny import Tiny, weights_of

with warnings.catch_warnings():  # of torch about itself
    warnings.simplefilter("ignore")
    from torch.distributed.optim import ZeroRedundancyOptimizer

STEPS = 6


class ScheduleFree(SGD):
    """Has two sets of weights, as schedulefree's optimizers."""

    def train(self) -> None:
        """Put the weights of the training into the model."""

    def eval(self) -> None:
        """Put the averaged weights into the model."""


def zero(parameters: Any) -> Optimizer:
    return ZeroRedundancyOptimizer(parameters, AdamW, lr=0.01)


def attach(optimizer: Optimizer) -> None:
    LocalSGD(k_steps=2, begin_step=0).attach(optimizer, [("weight", optimizer.param_groups[0]["params"][0])])


@pytest.mark.fault
@pytest.mark.parametrize(
    ("optimizer", "words"),
    [(ScheduleFree, "ScheduleFree has train() and eval()"), (zero, "ZeroRedundancyOptimizer communicates in its step")],
)
@on_ranks(2)
def test_optimizers_that_are_refused_where_weights_are_averaged(optimizer: Any, words: str) -> None:
    """Before the first step, also of a fit that begins synchronous; and in a plain loop."""
    for strategy in ("post-local", "streaming"):
        model = Tiny(optimizer)
        assert words in same(refusal(strategy, model, STEPS))
        assert model.trainer.global_step == 0
    with pytest.raises(ConfigurationError) as caught:
        attach(optimizer([nn.Parameter(torch.ones(2))]))
    assert words in same(str(caught.value))


class Relative(Optimizer):
    """As transformers' Adafactor with relative steps: the learning rate of its groups is None."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": None})

    @torch.no_grad()
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.05)
        return loss


@pytest.mark.parametrize("name", ["dgc", "local_sgd", "diloco"])
@on_ranks(2)
def test_a_learning_rate_of_none_trains(name: str) -> None:
    model = Tiny(Relative)
    train(name, model, STEPS)
    same(weights_of(model))


class WithoutHooks(Optimizer):
    """Holds an optimizer, and has not called Optimizer's constructor, as optimizers that add noise for privacy."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner, self.defaults = inner, inner.defaults
        self.param_groups, self.state = inner.param_groups, inner.state

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return self.inner.step(closure)


@pytest.mark.parametrize("name", ["dgc", "local_sgd"])
@on_ranks(2)
def test_wrappers_that_are_no_optimizers_are_refused(name: str) -> None:
    message = refusal(name, Tiny(lambda parameters: WithoutHooks(SGD(parameters, lr=0.1))))
    assert "WithoutHooks has not called torch.optim.Optimizer.__init__" in message


# With gradients ------------------------------------------------------------------------------------------------------


@pytest.mark.fault
@pytest.mark.parametrize("name", ["dense", "dgc"])
@on_ranks(2)
def test_an_optimizer_that_communicates_trains_and_resumes_with_gradients(name: str, tmp_path: Path) -> None:
    whole, first, resumed = (Tiny(zero) for _ in range(3))
    options = {"max_steps": 2 * STEPS, "max_epochs": -1}
    train(name, whole, STEPS, **options)
    train(name, first, STEPS, callbacks=[saving(f"{tmp_path}/{{}}.ckpt", (STEPS,))])
    train(name, resumed, STEPS, resume=f"{tmp_path}/{STEPS}.ckpt", **options)
    assert resumed.trainer.global_step == 2 * STEPS
    assert weights_of(whole) == weights_of(resumed)
