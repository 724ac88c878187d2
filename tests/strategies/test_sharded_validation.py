"""Validation of sharded models: it does not change what is trained, although FSDP keeps the weights it has gathered."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist

from lightning_lowbw import ShardedStrategy
from lightning_lowbw.engine.method import Method
from lightning_lowbw.engine.presets import DGC, LocalSGD
from lightning_lowbw.what.top_k import SPARSE_LOCO
from tests.ranks import run_ranks
from tests.strategies.sharded_models import Configured, Listed, Plain, data, shard_digest, train
from tests.tiny import Watcher, sgd

STEPS = 5
MODULES = {"by its children": Configured, "by layers": Listed}  # the root is not sharded itself
METHODS: dict[str, Method] = {
    "dgc": DGC(sparsity=[0.9], min_numel=50),
    "local_sgd": LocalSGD(k_steps=4, begin_step=0),
    "sparse_loco": LocalSGD(k_steps=4, begin_step=0, compression={**SPARSE_LOCO, "min_numel": 50, "density": 0.1}),
}


def fit(module: type[Plain], method: Method, **kwargs: Any) -> str:
    model = module(sgd)
    train(ShardedStrategy(method, topology=2), model, STEPS, 4, dist.get_rank(), **{"max_epochs": 3, **kwargs})
    return shard_digest(model)


class Sampling(pl.Callback):
    """Run a forward pass after some steps, as callbacks do that show what a model makes."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        with torch.no_grad():
            module(torch.ones(4, 16))


def fit_and_look(module: type[Plain], method: Method, folder: str) -> dict[str, str]:
    """Train without validation, with validation of some kinds, and on from the end of an epoch."""
    found = {
        "unwatched": fit(module, method),
        "validated": fit(module, method, val=True, num_sanity_val_steps=1, val_check_interval=2),
        "sampled": fit(module, method, callbacks=[Sampling()], val=True),
    }
    path = f"{folder}/{{}}.ckpt"
    found["saved"] = fit(module, method, val=True, callbacks=[Watcher(path, (2 * STEPS,))])
    found["resumed"] = fit(module, method, val=True, num_sanity_val_steps=2, ckpt_path=path.format(2 * STEPS))
    return found


@pytest.mark.parametrize(
    ("how", "name"), [*(("by layers", name) for name in METHODS), ("by its children", "local_sgd")]
)
def test_training_is_the_same_with_validation(how: str, name: str, tmp_path: Path) -> None:
    for found in run_ranks(fit_and_look, 4, MODULES[how], METHODS[name], str(tmp_path)):
        assert found == dict.fromkeys(found, found["unwatched"])


def fit_after_validation(module: type[Plain], method: Method) -> tuple[str, str]:
    """Train two fits of an epoch each; return the weights with and without a validation before, between and after."""
    digests = []
    for validates in (True, False):
        model, loader = module(sgd), data(STEPS, 4, dist.get_rank())
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        make = functools.partial(pl.Trainer, devices=4, accelerator="cpu", use_distributed_sampler=False, **quiet)
        for _ in range(2):
            strategy = ShardedStrategy(method, topology=2)
            trainer = make(strategy=strategy, max_epochs=1, enable_model_summary=False)
            if validates:
                trainer.validate(model, loader, verbose=False)
            trainer.fit(model, loader)
            if validates:
                trainer.validate(model, loader, verbose=False)
        digests.append(shard_digest(model))
    return digests[0], digests[1]


@pytest.mark.parametrize("how", MODULES)
def test_a_fit_after_a_validation(how: str) -> None:
    for validated, unwatched in run_ranks(fit_after_validation, 4, MODULES[how], METHODS["local_sgd"]):
        assert validated == unwatched


class Growing(Listed):
    """Puts a longer buffer in the place of one after each validation."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.register_buffer("losses", torch.zeros(1))

    def on_validation_epoch_end(self) -> None:
        self.losses = torch.cat([self.losses, torch.ones(1)])


def grow_a_buffer(method: Method) -> int:
    model = Growing(sgd)
    train(ShardedStrategy(method, topology=2), model, STEPS, 4, dist.get_rank(), max_epochs=3, val=True)
    return model.losses.numel()


@pytest.mark.parametrize("name", ["dgc", "local_sgd"])
def test_a_buffer_may_get_another_shape_in_validation(name: str) -> None:
    assert run_ranks(grow_a_buffer, 4, METHODS[name]) == [4] * 4
