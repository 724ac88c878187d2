"""The Lightning step: what the strategy makes of automatic, accumulated and manual optimization, and of other fits."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.tuner import Tuner

from lightning_lowbw import DGCStrategy
from lightning_lowbw.comm.agreement import digest
from tests.ranks import on_ranks
from tests.strategies.fits import STEPS, make, same, train
from tests.tiny import BATCH, Tiny, TwoOptimizers, WithRate, make_data, make_trainer, weights_of


@on_ranks(2)
def test_two_optimizers_in_manual_optimization() -> None:
    ends = {}
    for name in ("dgc, warm-up", "dense", "ddp"):
        model = TwoOptimizers()
        trainer = train(make(name), model, max_epochs=2)
        ends[name] = same(weights_of(model))
        if name == "dgc, warm-up":  # a counter per optimizer: each goes through the warm-up at its own pace
            assert [worker.step for worker in trainer.strategy.workers] == [18, 8]
    # While both are dense it is DDP, also with one optimizer's gradients in buckets of the other.
    assert ends["dense"] == ends["ddp"]


@on_ranks(2)
def test_fit_twice_validate_test_predict() -> None:
    data, model, digests = make_data(2, STEPS), Tiny(), []
    trainer = make_trainer(make("dgc, warm-up"), 2, max_epochs=1)
    trainer.validate(model, data, verbose=False)
    for epochs in (1, 2):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(model, data)
        digests += [weights_of(model), digest(model.buffers())]
        trainer.test(model, data, verbose=False)
        assert weights_of(model) == digests[-2]
    assert [worker.step for worker in trainer.strategy.workers] == [STEPS]  # of the second fit
    trainer.predict(model, torch.utils.data.DataLoader(data.dataset.tensors[0], batch_size=BATCH))
    assert "clip_gradients" not in vars(trainer.precision_plugin)
    assert len(set(same(digests))) == 4


class Thawing(pl.Callback):
    """Unfreeze a layer in the middle of the run, as BaseFinetuning does."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: Tiny, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            module.frozen.requires_grad_(True)
            trainer.optimizers[0].add_param_group({"params": list(module.frozen.parameters()), "lr": 0.01})


@on_ranks(2)
def test_a_layer_unfrozen_later_stays_the_same_on_all_ranks() -> None:
    """Stock DDP lets it drift apart: parameters that are frozen when it wraps are never reduced."""
    model = Tiny()
    before = model.frozen.weight.detach().clone()
    train("dgc, warm-up", model, callbacks=[Thawing()])
    same(weights_of(model))
    assert bool((model.frozen.weight != before).any())


@pytest.mark.parametrize("name", ["dgc, warm-up", "local_sgd"])
@on_ranks(2)
def test_the_tuner_leaves_no_trace(name: str) -> None:
    """It trains on the live strategy, then puts everything back."""
    ends = []
    for tunes in (False, True):
        model = WithRate()
        trainer: Any = make_trainer(make(name), 2, max_steps=STEPS, max_epochs=-1)
        if tunes:
            Tuner(trainer).lr_find(model, make_data(2, 30), num_training=11, update_attr=False)
        trainer.fit(model, make_data(2, STEPS))
        ends.append(same((weights_of(model), trainer.strategy.workers[0].step)))
    assert ends[0] == ends[1]


def test_a_strategy_can_be_copied_and_pickled_before_the_fit() -> None:
    strategy = DGCStrategy(sparsity=[0.5], start_method="spawn")
    assert pickle.loads(pickle.dumps(strategy)).method == strategy.method == copy.deepcopy(strategy).method
