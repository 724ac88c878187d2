"""What comes after a fit: the model and all state are on the CPU then, and NCCL sends nothing from there.

Lightning's own collectives work as under ddp, also after an exception that the user's code has caught; and nothing
keeps a process group alive that torch has destroyed.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LambdaCallback

from tests.ranks import on_ranks
from tests.strategies.fits import Noted, make, same, train
from tests.tiny import Tiny, make_data, make_trainer, weights_of


class Validated(Tiny):
    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> None:
        self(batch[0])


def refusing(collective: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals["__name__"]
        assert not caller.startswith("lightning_lowbw"), "a tensor is sent after the fit"
        return collective(*args, **kwargs)

    return call


@pytest.mark.parametrize("name", ["dgc on two levels", "local_sgd"])
@on_ranks(4)
def test_nothing_is_sent_after_the_fit(name: str, tmp_path: Path) -> None:
    model, path = Validated(), tmp_path / "after.ckpt"
    trainer = train(name, model, 5)
    before = same(weights_of(model))
    with pytest.MonkeyPatch.context() as monkeypatch:
        for collective in ("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor"):
            monkeypatch.setattr(dist, collective, refusing(getattr(dist, collective)))
        trainer.save_checkpoint(path)
    trainer.validate(model, make_data(4, 2), verbose=False)  # compares what callbacks may have put in
    assert same(weights_of(model)) == before
    if dist.get_rank() == 0:
        state = torch.load(path, weights_only=True)["optimizer_states"][0]["state"]
        assert all(entry["momentum_buffer"] is not None for entry in state.values())
        assert state


class Failing(Tiny):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 4:  # in the middle of an interval
            raise RuntimeError("of the user's code, on all ranks")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("name", ["local_sgd", "local_sgd, sharded"])
@on_ranks(4)
def test_ranks_communicate_after_an_exception_that_was_caught(name: str) -> None:
    strategy, own, answers = make(name), f"from rank {dist.get_rank()}", list[str]()
    ask = LambdaCallback(on_exception=lambda *_: answers.append(strategy.broadcast(own)))  # waits for nobody
    trainer = make_trainer(strategy, 4, callbacks=[ask])
    with contextlib.suppress(RuntimeError):
        trainer.fit(Failing(), make_data(4, 6))
    strategy.barrier()
    decision = strategy.reduce_boolean_decision(dist.get_rank() == 0, all=False)
    assert (answers, trainer.interrupted, strategy.broadcast(own), decision) == ([own], True, "from rank 0", True)


@pytest.mark.parametrize("name", ["ddp", "dgc", "local_sgd"])
@on_ranks(2)
def test_the_wrapped_model_is_gone_without_a_collection(name: str) -> None:
    """Else any thread that collects the cycle ends DDP's reducer, perhaps while the next fit's backward uses it."""
    seen = Noted(lambda module: ref(module.trainer.strategy.model), "on_train_start")
    gc.collect()
    gc.disable()
    try:
        train(name, data=3, callbacks=[seen])
        assert seen.values[0]() is None
    finally:
        gc.enable()


def destroy_all_groups() -> None:
    """Check that nothing keeps one alive: threads may be dropping a tensor when the interpreter ends, which aborts."""
    groups = [ref(group) for group in dist.distributed_c10d._world.pg_map]
    assert len(groups) > 4
    dist.destroy_process_group()
    gc.collect()
    assert not [group for group in groups if group() is not None]


@pytest.mark.parametrize("name", ["dgc, warm-up", "local_sgd"])
@on_ranks(4)
def test_a_trainer_and_its_workers_keep_no_group_alive(name: str) -> None:
    trainer: Any = train(make(name, topology=((0, 1), (2, 3))), data=4)
    destroy_all_groups()
    (worker,) = trainer.strategy.workers
    with pytest.raises(RuntimeError, match="The process group has been destroyed"):
        _ = worker.peers.node.group
