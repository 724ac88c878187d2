"""Averages of weights in Lightning: bytes and metrics, counters, begins as fractions of a run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LearningRateFinder

from lightning_lowbw import AveragingSchedule, LocalSGDStrategy, TrafficMonitor
from lightning_lowbw.comm.collectives import all_reduce_bytes
from tests.ranks import on_ranks
from tests.strategies.fits import SPARSE, At, Noted, Silence, gathered, refusal, same, traffic, train, warned, weights
from tests.tiny import Tiny, TwoOptimizers, WithRate, make_data, make_trainer, trained


@pytest.mark.parametrize(
    ("accumulate", "options", "num_averages"),
    [
        (2, {"k_steps": 3, "begin_step": 2}, 2),
        (1, {"k_steps": 4, "delay_steps": 3, "compression": SPARSE}, 1),
        (1, {"k_steps": 3, "find_unused_parameters": True, "gradient_as_bucket_view": True}, 3),
    ],
)
@on_ranks(2)
def test_nothing_is_sent_between_averages(accumulate: int, options: Any, num_averages: int) -> None:
    """Signals, which wait for an average: test_signals.py."""
    model, strategy = Tiny(unused="find_unused_parameters" in options), LocalSGDStrategy(**options)
    callbacks = [TrafficMonitor(prog_bar=False), Silence()]
    train(strategy, model, 10 * accumulate, callbacks=callbacks, accumulate_grad_batches=accumulate)
    assert strategy.replicas[0].num_averages == num_averages


@on_ranks(2)
def test_what_is_logged() -> None:
    distances, logged = list[float](), traffic()
    model = Tiny(partial(torch.optim.SGD, lr=1e-12))  # the fifth step moves nothing: all differences are set here

    def drift(trainer: pl.Trainer, module: pl.LightningModule) -> None:
        for p in trained(module):
            p.data.add_(0.1 * (dist.get_rank() + 1) * torch.randn(p.shape))
        own = torch.cat([p.detach().reshape(-1) for p in trained(module)])
        mean = torch.stack(gathered(own)).mean(0)
        distances.append(float((own - mean).norm() / mean.norm()))

    callbacks = [TrafficMonitor(prog_bar=False), logged, At(4, drift, "on_train_batch_start")]
    train(LocalSGDStrategy(k_steps=4), model, callbacks=callbacks)
    rows, numel = logged.values, sum(p.numel() for p in trained(model))
    average = rows[4]["traffic/bytes_sent"]
    assert [row["traffic/bytes_sent"] for row in rows][1:] == [0, 0, 0, average, 0, 0, 0, average]
    assert [row["traffic/averages"] for row in rows] == [0, 0, 0, 0, 1, 1, 1, 1, 2]
    assert {row["traffic/k_steps"] for row in rows} == {4.0}
    assert rows[4]["traffic/compression_ratio"] == pytest.approx(4 * all_reduce_bytes(4 * numel, 2) / average)
    assert rows[1]["traffic/exposed_s"] == 0.0
    assert rows[4]["traffic/exposed_s"] > 0.0
    assert rows[4]["traffic/consensus_distance"] == pytest.approx(distances[0], rel=1e-3)


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [
        *[(name, 2) for name in ("local_sgd", "post-local", "diloco", "sparse_loco", "delayed", "streaming")],
        *[(name, 4) for name in ("local_sgd on two levels", "diloco, sharded")],
    ],
)
@on_ranks()
def test_a_fit_ends_with_the_mean_of_the_replicas(name: str, num_ranks: int) -> None:
    """Without a step of the outer optimizer, if the last step is inside a period."""

    def own(module: Any) -> torch.Tensor:
        return torch.cat([getattr(p, "to_local", p.detach)().detach().reshape(-1) for p in trained(module)])

    def outer(module: Any) -> list[torch.Tensor]:
        replica = module.trainer.strategy.replicas[0].replica
        anchors = [start.clone() for p, start in replica.start.items() if start.device == p.device]
        return anchors + [velocity.clone() for velocity in replica.velocity.values()]

    model, last, before = Tiny(), Noted(own), Noted(outer)
    of_node = 2 if "sharded" in name else 1
    trainer = train(name, model, 7, callbacks=[last, before])
    replicas = gathered(last.values[-1])[dist.get_rank() % of_node :: of_node]
    assert not torch.equal(replicas[0], replicas[-1])
    torch.testing.assert_close(own(model), torch.stack(replicas).mean(0), rtol=1e-5, atol=1e-6)
    (worker,) = trainer.strategy.replicas
    if worker.replica.needs_start:
        assert all(map(torch.equal, outer(model), before.values[-1]))
    if of_node == 1:
        same(weights(model))


@on_ranks(2)
def test_a_search_is_no_run(tmp_path: Path) -> None:
    """It has few steps: a schedule is not fixed by their number, and nobody is warned that it does not begin."""
    strategy = LocalSGDStrategy(k_steps=2, begin_step=0.5)
    callbacks = [LearningRateFinder(num_training_steps=8, early_stop_threshold=None)]
    _, said = warned(lambda: train(strategy, WithRate(), 40, callbacks=callbacks, default_root_dir=tmp_path))
    assert strategy.replicas[0].method.when.begin_step == 20
    assert not [each for each in said if "optimizer steps" in each]


@on_ranks(2)
def test_a_fraction_of_a_run_with_several_optimizers_is_refused() -> None:
    assert "several optimizers" in refusal(LocalSGDStrategy(k_steps=2, begin_step=0.5), TwoOptimizers(), 8)


@on_ranks(2)
def test_a_second_fit_has_its_own_fraction_and_so_has_a_callback() -> None:
    """The second fit has 6 steps, numbered from 0, and the Trainer has done 6 steps before it."""
    strategy, by_callback = LocalSGDStrategy(k_steps=2, begin_step=0.5), LocalSGDStrategy(k_steps=3)
    trainer = make_trainer(strategy, 2)
    for epochs in (1, 2):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(Tiny(), make_data(2, 6))
    train(by_callback, data=8, callbacks=[AveragingSchedule(begin_step=0.25)], max_epochs=2)
    (worker,) = by_callback.replicas
    assert (strategy.method.when.begin_step, worker.method.when.begin_step, worker.num_averages) == (3, 4, 4)
