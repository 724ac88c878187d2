"""What comes after a fit: the model and all state are on the CPU then, and NCCL sends nothing from there.

Lightning's own collectives work as under ddp, also after an exception that the user's code has caught.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy

from lightning_lowbw import DGCStrategy, LocalSGD, LocalSGDStrategy, ShardedStrategy
from tests.ranks import run_ranks
from tests.sync.problem import each
from tests.tiny import MIN_NUMEL, Tiny, make_data, make_trainer, weights_of

STRATEGIES: dict[str, Any] = {
    "dgc on two levels": lambda: DGCStrategy(sparsity=[0.9], min_numel=MIN_NUMEL, topology=2),
    "local_sgd": lambda: LocalSGDStrategy(k_steps=2, begin_step=0),
}
STRATEGIES_OF_ONE_NODE: dict[str, Any] = {
    "ddp": DDPStrategy,
    "dgc": lambda: DGCStrategy(sparsity=[0.9], min_numel=MIN_NUMEL),
    "local_sgd": STRATEGIES["local_sgd"],
}
SHARDED = {"sharded": lambda: ShardedStrategy(LocalSGD(k_steps=2, begin_step=0), topology=2)}


class Validated(Tiny):
    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> None:
        self(batch[0])


def use_after_the_fit(name: str, path: str) -> tuple[list[str], dict[str, Any]]:
    """Validate and save after a fit; return the weights before and after, and the checkpoint that rank 0 has saved."""

    def refusing(collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1).f_globals["__name__"]
            assert not caller.startswith("lightning_lowbw"), "a tensor is sent after the fit"
            return collective(*args, **kwargs)

        return call

    num_ranks, model = dist.get_world_size(), Validated()
    trainer = make_trainer(STRATEGIES[name](), num_ranks)
    trainer.fit(model, make_data(num_ranks, 5))
    digests = [weights_of(model)]
    with pytest.MonkeyPatch.context() as monkeypatch:
        for collective in ("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor"):
            monkeypatch.setattr(dist, collective, refusing(getattr(dist, collective)))
        trainer.save_checkpoint(path)
    trainer.validate(model, make_data(num_ranks, 2), verbose=False)  # compares what callbacks may have put in
    digests.append(weights_of(model))
    return digests, torch.load(path, weights_only=True)["optimizer_states"][0]["state"] if dist.get_rank() == 0 else {}


@pytest.mark.parametrize("name", STRATEGIES)
def test_nothing_is_sent_after_the_fit(name: str, tmp_path: Path) -> None:
    results = run_ranks(use_after_the_fit, 4, name, str(tmp_path / "after.ckpt"))
    assert len({digest for digests, _ in results for digest in digests}) == 1
    _, state = results[0]
    assert all(entry["momentum_buffer"] is not None for entry in state.values())
    assert state


class Failing(Tiny):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 3:
            raise RuntimeError("of the user's code, on all ranks")
        return super().training_step(batch, batch_idx)


def communicate_after_an_exception(name: str) -> tuple[list[str], bool, str, bool]:
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    strategy = {**STRATEGIES, **SHARDED}[name]()
    while_handled: list[str] = []

    class Asks(Callback):
        def on_exception(self, trainer: Any, *_: Any) -> None:
            while_handled.append(trainer.strategy.broadcast(f"from rank {rank}"))  # waits for nobody

    trainer = make_trainer(strategy, num_ranks, callbacks=[Asks()])
    with contextlib.suppress(RuntimeError):
        trainer.fit(Failing(), make_data(num_ranks, 5))
    strategy.barrier()
    decision = strategy.reduce_boolean_decision(rank == 0, all=False)
    return while_handled, trainer.interrupted, strategy.broadcast(f"from rank {rank}"), decision


@pytest.mark.parametrize("name", ["local_sgd", *SHARDED])
def test_ranks_communicate_after_an_exception_that_was_caught(name: str) -> None:
    expected = [([f"from rank {rank}"], True, "from rank 0", True) for rank in range(4)]
    assert run_ranks(communicate_after_an_exception, 4, name) == expected


def ddp_that_is_left(name: str) -> bool:
    """Return whether the model that DDP has wrapped outlives its fit."""
    seen: list[Any] = []

    class Watching(Callback):
        def on_train_start(self, trainer: Any, *_: Any) -> None:
            seen.append(weakref.ref(trainer.strategy.model))

    trainer = make_trainer(STRATEGIES_OF_ONE_NODE[name](), dist.get_world_size(), callbacks=[Watching()])
    gc.collect()
    gc.disable()
    try:
        trainer.fit(Tiny(), make_data(dist.get_world_size(), 3))
        return seen[0]() is not None
    finally:
        gc.enable()


def test_the_wrapped_model_is_gone_without_a_collection() -> None:
    """Else any thread that collects the cycle ends DDP's reducer, perhaps while the next fit's backward uses it."""
    cases = [(name,) for name in STRATEGIES_OF_ONE_NODE]
    assert run_ranks(each, 2, ddp_that_is_left, cases) == [[False] * len(cases)] * 2
