"""Parameters that the loss does not depend on: DDP searches for them in dense steps, and in no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.overrides import distributed as lightning_ddp
from torch.nn.parallel import distributed as torch_ddp

from lightning_lowbw import AveragingSchedule, DGCStrategy, LocalSGDStrategy, SparsityWarmup
from tests.ranks import run_ranks
from tests.sync.problem import each
from tests.tiny import MIN_NUMEL, ManualTiny, Tiny, make_data, make_trainer, weights_of

STEPS = 8


class Searches(pl.Callback):
    """Notes of each batch whether its step is a dense one, and how often a search began in it."""

    def __init__(self) -> None:
        self.num = 0
        self.by_batch: list[tuple[bool, int]] = []

    def count(self, find_tensors: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def counting(output: Any) -> Any:
            self.num += 1
            return find_tensors(output)

        return counting

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.num = 0
        self.is_dense = any(worker.reduces_in_backward for worker in trainer.strategy.workers)

    def on_train_batch_end(self, *_: Any) -> None:
        self.by_batch.append((self.is_dense, self.num))


def fit(strategy: Any, make_model: Callable[..., Tiny], callback: pl.Callback | None) -> tuple[list[Any], str]:
    """Return what `Searches` has noted, and the weights."""
    searches, model = Searches(), make_model(unused=True)
    never, rank_zero_only = model.never, model.rank_zero_only
    assert never is not None
    assert rank_zero_only is not None
    before, before_of_one = never.weight.clone(), rank_zero_only.weight.clone()
    modules = {module: module._find_tensors for module in (torch_ddp, lightning_ddp)}  # type: ignore[attr-defined]
    try:
        for module, find_tensors in modules.items():
            module._find_tensors = searches.count(find_tensors)  # type: ignore[attr-defined]
        callbacks = [searches] if callback is None else [callback, searches]
        trainer = make_trainer(strategy, dist.get_world_size(), callbacks=callbacks)
        trainer.fit(model, make_data(dist.get_world_size(), STEPS))
    finally:
        for module, find_tensors in modules.items():
            module._find_tensors = find_tensors  # type: ignore[attr-defined]
    assert torch.equal(never.weight, before)  # not decayed either
    assert not torch.equal(rank_zero_only.weight, before_of_one)
    return searches.by_batch, weights_of(model)


# By name: what gives both phases to a short run, and how many steps are dense then.
NAMES: dict[str, tuple[pl.Callback | None, int]] = {
    "dgc": (SparsityWarmup(begin_step=3, steps=1, sparsity=[0.9]), 3),
    "int8": (None, 0),
    "local_sgd": (AveragingSchedule(k_steps=6, begin_step=3), 3),
    "hierarchical": (None, STEPS),
}


def fit_by_names(make_model: Callable[..., Tiny]) -> list[Any]:
    return [fit(f"{name}_find_unused_parameters_true", make_model, NAMES[name][0]) for name in NAMES]


def check(results: list[tuple[list[tuple[bool, int]], str]], dense: int) -> None:
    """Check that replicas are equal, and that exactly the dense steps have searched."""
    assert len({weights for _, weights in results}) == 1
    for by_batch, _ in results:
        assert [is_dense for is_dense, _ in by_batch] == [True] * dense + [False] * (STEPS - dense)
        assert all((num > 0) == is_dense for is_dense, num in by_batch)


@pytest.mark.parametrize("make_model", [Tiny, ManualTiny])
def test_only_dense_steps_search(make_model: Callable[..., Tiny]) -> None:
    for (_, dense), *results in zip(NAMES.values(), *run_ranks(fit_by_names, 2, make_model), strict=True):
        check(results, dense)


def fit_sparse_from_the_start(make_model: Callable[..., Tiny]) -> list[Any]:
    strategies = [DGCStrategy(sparsity=[0.9], min_numel=MIN_NUMEL), LocalSGDStrategy(2, begin_step=0)]
    return [fit(strategy, make_model, None) for strategy in strategies]


def test_without_dense_steps_nothing_need_be_asked_for() -> None:
    for by_model in zip(*run_ranks(each, 2, fit_sparse_from_the_start, [(Tiny,), (ManualTiny,)]), strict=True):
        for results in zip(*by_model, strict=True):
            check(list(results), 0)
