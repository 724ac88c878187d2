"""Optimizers that outlive a fit: after sparse or local steps their states are each rank's own."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.optim import Adam, Optimizer, RMSprop

from lightning_lowbw import (
    DGC,
    ConfigurationError,
    DGCStrategy,
    DisagreementError,
    HierarchicalStrategy,
    LocalSGD,
    LocalSGDStrategy,
    PowerSGD,
    QuantizedGradients,
    ShardedStrategy,
    Strategy,
)
from lightning_lowbw.comm.agreement import digest
from tests.ranks import run_ranks
from tests.strategies.fits import gathered, weights
from tests.tiny import MIN_NUMEL, Tiny, make_data, make_trainer, sgd

STEPS = 4
SPARSE: dict[str, Any] = {"sparsity": [0.9], "min_numel": MIN_NUMEL}
STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": DDPStrategy,
    "dgc": lambda: DGCStrategy(**SPARSE),
    "dgc, dense": lambda: DGCStrategy(rampup_begin_step=STEPS, **SPARSE),
    "dgc, dense at first": lambda: DGCStrategy(rampup_begin_step=2, **SPARSE),
    "dgc on two levels": lambda: DGCStrategy(rampup_begin_step=2, topology=2, **SPARSE),
    "hierarchical": lambda: HierarchicalStrategy(topology=2),
    "int8": lambda: Strategy(QuantizedGradients("int8")),
    "powersgd": lambda: Strategy(PowerSGD()),
    "local_sgd": lambda: LocalSGDStrategy(k_steps=2, begin_step=0),
    "diloco": lambda: Strategy(LocalSGD(k_steps=2, begin_step=0, outer="nesterov", outer_lr=0.7)),
    "post-local": lambda: LocalSGDStrategy(k_steps=2, begin_step=2),
    "post-local on two levels": lambda: LocalSGDStrategy(k_steps=2, begin_step=2, topology=2),
    "dgc, sharded": lambda: ShardedStrategy(DGC(rampup_begin_step=2, **SPARSE), topology=2),
    "post-local, sharded": lambda: ShardedStrategy(LocalSGD(k_steps=2, begin_step=2), topology=2),
}


class Keeps(Tiny):
    """Makes its optimizer once."""

    def __init__(self, optimizer: Callable[[Any], Optimizer] = lambda p: Adam(p, lr=1e-3)) -> None:
        super().__init__(optimizer)
        self.kept: Optimizer | None = None

    def configure_optimizers(self) -> Optimizer:
        self.kept = self.kept or super().configure_optimizers()
        return self.kept


class First(pl.Callback):
    """Keep the optimizer's state before the fit and at its first batch, and the weights after two steps, which
    are not local in any second fit here."""

    def __init__(self) -> None:
        self.before: list[Tensor] = []
        self.begun: list[Tensor] = []
        self.after: list[str] = []

    def setup(self, trainer: pl.Trainer, module: Any, stage: str) -> None:
        self.before = state_of(module.kept)

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        self.begun = self.begun or state_of(module.kept)

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step <= 2:
            self.after.append(digest([getattr(p, "full_tensor", p.detach)() for p in module.parameters()]))


def state_of(optimizer: Optimizer | None) -> list[Tensor]:
    entries = [] if optimizer is None else optimizer.state.values()
    return [getattr(each, "to_local", each.clone)().clone() for entry in entries for each in entry.values()]


def fit_twice(first: str, second: str, optimizer: Any = None, stops: bool = False) -> tuple[list[str], float, float]:
    """Return the weights after the steps of the second fit, how far the ranks' states were apart before it,
    and how far from their mean they began.
    """
    num_ranks, model, seen = dist.get_world_size(), Keeps(*([] if optimizer is None else [optimizer])), First()
    trainer = make_trainer(STRATEGIES[first](), num_ranks, callbacks=[Interrupts()] if stops else [])
    if stops:
        with pytest.raises(RuntimeError, match="in mid-fit"):
            trainer.fit(model, make_data(num_ranks, STEPS))
    else:
        trainer.fit(model, make_data(num_ranks, STEPS))
    make_trainer(STRATEGIES[second](), num_ranks, callbacks=[seen]).fit(model, make_data(num_ranks, 2))
    others = gathered((seen.before, dist.get_rank()))
    if second.endswith("sharded"):  # those with the same shards
        others = [each for each in others if each[1] % 2 == dist.get_rank() % 2]
    means = [torch.stack(each).mean(0) for each in zip(*(before for before, _ in others), strict=True)]
    apart = max(float((own - mean).abs().max()) for own, mean in zip(seen.before, means, strict=True))
    left = max(float((own - mean).abs().max()) for own, mean in zip(seen.begun, means, strict=True))
    return seen.after, apart, left


class Interrupts(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == STEPS - 1:
            raise RuntimeError("in mid-fit")


@pytest.mark.fault(
    "an optimizer that the module keeps for a second fit",
    "the states, each rank's own after sparse or local steps, are averaged; under `ddp` such an optimizer is refused",
)
@pytest.mark.parametrize(
    ("first", "second", "num_ranks"),
    [
        ("dgc", "dgc, dense", 2),
        ("dgc", "dgc", 2),
        ("dgc, dense at first", "hierarchical", 4),
        ("local_sgd", "int8", 2),
        ("diloco", "powersgd", 2),
        ("post-local", "post-local", 2),
        ("post-local on two levels", "dgc on two levels", 4),
        ("dgc on two levels", "post-local on two levels", 4),
        ("dgc, sharded", "post-local, sharded", 4),
        ("post-local, sharded", "dgc, sharded", 4),
    ],
)
def test_a_second_fit_begins_with_the_mean_of_the_ranks_states(first: str, second: str, num_ranks: int) -> None:
    ranks = run_ranks(fit_twice, num_ranks, first, second)
    for after, apart, left in ranks:
        assert after == ranks[0][0]
        assert len(after) == 2
        assert apart > 1e-5
        assert left < 1e-6


@pytest.mark.parametrize("optimizer", [sgd, Adam])
def test_after_an_exception_a_node_s_parts_of_a_velocity_are_put_together(optimizer: Any) -> None:
    ranks = run_ranks(fit_twice, 4, "dgc on two levels", "dgc, dense", optimizer, True)
    for after, apart, _ in ranks:
        assert after == ranks[0][0]
        assert apart > 1e-5


def test_also_after_an_exception_and_with_other_states_than_adam_s() -> None:
    for results in zip(*run_ranks(after_an_exception, 2), strict=True):
        assert results[0][0] == results[1][0]
        assert min(apart for _, apart, _ in results) > 1e-5
        assert max(left for _, _, left in results) < 1e-6


def rmsprop(parameters: Any) -> Optimizer:
    return RMSprop(parameters, lr=1e-3)


def after_an_exception() -> list[Any]:
    return [fit_twice("dgc", "dgc, dense", sgd, True), fit_twice("local_sgd", "dgc, dense", rmsprop)]


def second_fits() -> list[str]:
    """Of one Trainer; of a state that differs because a rank has loaded another one by hand."""
    found, num_ranks = [], dist.get_world_size()
    model = Keeps()
    trainer = make_trainer(STRATEGIES["dgc, dense at first"](), num_ranks, max_epochs=1)
    trainer.fit(model, make_data(num_ranks, STEPS))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, make_data(num_ranks, STEPS))
    found.append(weights(model))
    model = Keeps()
    optimizer = model.configure_optimizers()
    if dist.get_rank():
        optimizer.load_state_dict(trainer.optimizers[0].state_dict())
    with pytest.raises(DisagreementError, match="optimizers' states at the start of the fit") as caught:
        make_trainer(STRATEGIES["int8"](), num_ranks).fit(model, make_data(num_ranks, STEPS))
    assert "optimizer 0, wide.weight, exp_avg: rank 0 has nothing" in str(caught.value)
    return found


def test_a_second_fit_of_a_trainer_and_a_state_that_one_rank_has() -> None:
    first, second = run_ranks(second_fits, 2)
    assert first == second


def refused_elsewhere(first: str) -> dict[str, Any]:
    num_ranks, model = dist.get_world_size(), Keeps()
    make_trainer(STRATEGIES[first](), num_ranks).fit(model, make_data(num_ranks, STEPS))
    optimizer, found = model.kept, {}
    assert optimizer is not None
    copies = [deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer)), deepcopy(model)]
    assert len(copies) == 3
    with pytest.raises(ConfigurationError) as caught:
        make_trainer("ddp", num_ranks).fit(model, make_data(num_ranks, 2))
    found["ddp"] = str(caught.value)
    with pytest.raises(ConfigurationError) as caught:
        optimizer.step()
    found["plain loop"] = str(caught.value)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.load_state_dict(gathered(optimizer.state_dict())[0])  # one for all
    make_trainer("ddp", num_ranks).fit(model, make_data(num_ranks, 2))
    found["loaded"] = digest(model.parameters())
    make_trainer(STRATEGIES[first](), num_ranks).fit(model, make_data(num_ranks, STEPS))
    make_trainer(STRATEGIES["dgc, dense"](), num_ranks).fit(model, make_data(num_ranks, 2))  # takes over
    make_trainer("ddp", num_ranks).fit(model, make_data(num_ranks, 2))
    found["taken over"] = digest(model.parameters())
    return found


@pytest.mark.parametrize("first", ["dgc", "local_sgd"])
def test_stock_ddp_and_a_plain_loop_refuse_such_a_state(first: str) -> None:
    ranks = run_ranks(refused_elsewhere, 2, first)
    assert ranks[0] == ranks[1]
    for name in ("ddp", "plain loop"):
        assert "The state of this Adam is each rank's own" in ranks[0][name]


def same_on_all() -> list[str]:
    """Fits that leave the state equal are followed by any other."""
    found = []
    for first in ("int8", "dgc, dense", "ddp"):
        model = Keeps()
        for name in (first, "ddp", "dgc, dense", "post-local"):
            make_trainer(STRATEGIES[name](), dist.get_world_size()).fit(model, make_data(dist.get_world_size(), 2))
        found.append(digest(model.parameters()))
    return found


def test_states_that_are_equal_are_left_alone() -> None:
    first, second = run_ranks(same_on_all, 2)
    assert first == second
