"""What DDP ignores, and frozen weights of other classes, is each rank's own; wrappers of optimizers are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightning_lowbw import ConfigurationError, LocalSGD, Method, Strategy
from lightning_lowbw.presets import DGC
from tests.ranks import run_ranks
from tests.strategies.fits import fit
from tests.sync.problem import each
from tests.tiny import MIN_NUMEL, Tiny

SPARSE = DGC(sparsity=[0.8], min_numel=MIN_NUMEL)
LOCAL = LocalSGD(k_steps=2, begin_step=0)


class InFewBits(Tensor):
    """A frozen weight that knows no arithmetic, as quantized ones of LoRA."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.split, Tensor.split, Tensor.view, Tensor.permute):
            raise NotImplementedError(func)
        return super().__torch_function__(func, types, args, kwargs or {})


class Ignoring(Tiny):
    """Has a frozen parameter and a buffer that each rank sets to its number, and a weight of another class."""

    def __init__(self) -> None:
        super().__init__()
        self.mine = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.few = nn.Parameter(torch.ones(3).as_subclass(InFewBits), requires_grad=False)
        self.register_buffer("own", torch.zeros(3))
        self._ddp_params_and_buffers_to_ignore = ["mine", "few", "own"]

    def on_train_start(self) -> None:
        self.mine.fill_(self.global_rank)
        self.own.fill_(self.global_rank)


def fit_ignoring(method: Method) -> list[list[float]]:
    module = Ignoring()
    fit(module, strategy=Strategy(method))
    return [module.mine.tolist(), module.own.tolist()]


def test_what_ddp_ignores_is_each_ranks_own() -> None:
    for rank, found in enumerate(run_ranks(each, 2, fit_ignoring, [(SPARSE,), (LOCAL,)])):
        assert found == [[[float(rank)] * 3] * 2] * 2


class WithoutHooks(Optimizer):
    """Holds an optimizer, and has not called Optimizer's constructor, as those that add noise for privacy."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner, self.defaults = inner, inner.defaults
        self.param_groups, self.state = inner.param_groups, inner.state

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return self.inner.step(closure)


def fit_private(method: Method) -> str:
    module = Tiny(lambda parameters: WithoutHooks(SGD(parameters, lr=0.1)))
    with pytest.raises(ConfigurationError) as caught:
        fit(module, strategy=Strategy(method))
    return str(caught.value)


def test_wrappers_that_are_no_optimizers_are_refused() -> None:
    for messages in run_ranks(each, 2, fit_private, [(SPARSE,), (LOCAL,)]):
        assert all("WithoutHooks has not called torch.optim.Optimizer.__init__" in message for message in messages)
