"""Optimizers with two sets of weights, or with communication in their step: right with gradients, else refused."""

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
from tests.strategies.fits import Noted, refusal, same, saving, train
from tests.tiny import Tiny, weights_of

with warnings.catch_warnings():  # of torch about itself
    warnings.simplefilter("ignore")
    from torch.distributed.optim import ZeroRedundancyOptimizer

STEPS = 6


class ScheduleFree(Optimizer):
    """schedulefree.SGDScheduleFree without warm-up and decay: y is in the model while it trains, x in eval mode."""

    def __init__(self, params: Any, lr: float = 0.5, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": False})

    def _switch(self, mode: bool) -> None:
        for group in self.param_groups:
            weight = 1 - group["beta"] if mode else 1 - 1 / group["beta"]
            for p in group["params"]:
                if group["train_mode"] != mode and "z" in self.state[p]:
                    p.data.lerp_(self.state[p]["z"], weight)
            group["train_mode"] = mode

    def train(self) -> None:
        self._switch(True)

    def eval(self) -> None:
        self._switch(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            assert group["train_mode"]
            group["k"] += 1
            c = 1 / group["k"]
            for p in group["params"]:
                if p.grad is not None:
                    z = self.state[p].setdefault("z", p.clone())
                    p.lerp_(z, c).add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - c) - 1))
                    z.sub_(p.grad, alpha=group["lr"])
        return loss


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
    for strategy in ("local_sgd", "post-local", "sparse_loco", "streaming"):
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


class Modes(Tiny):
    """Calls `eval` and `train` of its optimizer where its validation begins and ends."""

    def __init__(self) -> None:
        super().__init__(ScheduleFree)

    def on_train_start(self) -> None:
        self.trainer.optimizers[0].train()  # type: ignore[attr-defined]

    def on_validation_start(self) -> None:
        self.trainer.optimizers[0].eval()  # type: ignore[attr-defined]

    on_validation_end = on_train_start


@pytest.mark.parametrize("name", ["dense", "dgc", "int8", "powersgd", "hierarchical"])
@on_ranks(2)
def test_a_second_set_of_weights_is_equal_on_all_ranks_with_gradients(name: str) -> None:
    traces = []
    for num_looks in (0, 1):
        after, validated = Noted(weights_of), Noted(weights_of, "on_validation_batch_end")
        options = {"callbacks": [after, validated], "max_epochs": 2, "num_sanity_val_steps": 0}
        train(name, Modes(), STEPS, num_looks, **options)
        assert len(same(validated.values)) == 2 * num_looks
        traces.append(same(after.values))
    assert traces[0][:STEPS] == traces[1][:STEPS]  # after the first validation there is the rounding of y -> x -> y


@pytest.mark.fault
@pytest.mark.parametrize("name", ["dense", "dgc", "int8", "hierarchical"])
@on_ranks(2)
def test_an_optimizer_that_communicates_trains_and_resumes_with_gradients(name: str, tmp_path: Path) -> None:
    whole, first, resumed = (Tiny(zero) for _ in range(3))
    options = {"max_steps": 2 * STEPS, "max_epochs": -1}
    train(name, whole, STEPS, **options)
    train(name, first, STEPS, callbacks=[saving(f"{tmp_path}/{{}}.ckpt", (STEPS,))])
    train(name, resumed, STEPS, resume=f"{tmp_path}/{STEPS}.ckpt", **options)
    assert resumed.trainer.global_step == 2 * STEPS
    assert weights_of(whole) == weights_of(resumed)
