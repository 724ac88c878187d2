"""Averages of weights in Lightning: what is logged, one counter per optimizer, begins that are fractions of a run."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LearningRateFinder
from torch import Tensor, nn

from lightning_lowbw import AveragingSchedule, ConfigurationError, LocalSGDStrategy, TrafficMonitor
from lightning_lowbw.comm.agreement import digest
from lightning_lowbw.comm.collectives import all_reduce_bytes
from tests.ranks import run_ranks
from tests.strategies.fits import gathered, weights
from tests.tiny import Tiny, make_data, make_trainer


def monitor() -> tuple[list[dict[str, float]], int, list[float]]:
    rows: list[dict[str, float]] = []
    distances = []

    class Logged(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            rows.append({k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("traffic/")})

    model = Tiny(partial(torch.optim.SGD, lr=1e-12))  # the fifth step moves nothing: what differs has been set here

    class Drift(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
            if trainer.global_step == 4:
                with torch.no_grad():
                    for p in module.parameters():
                        if p.requires_grad:
                            p.add_(0.1 * (dist.get_rank() + 1) * torch.randn(p.shape))
                own = torch.cat([p.detach().reshape(-1) for p in module.parameters() if p.requires_grad])
                mean = torch.stack(gathered(own)).mean(0)
                distances.append(float((own - mean).norm() / mean.norm()))

    callbacks = [TrafficMonitor(prog_bar=False), Logged(), Drift()]
    trainer = make_trainer(LocalSGDStrategy(k_steps=4), dist.get_world_size(), callbacks=callbacks)
    trainer.fit(model, make_data(2, 9))
    return rows, sum(p.numel() for p in model.parameters() if p.requires_grad), distances


def test_what_is_logged() -> None:
    for rows, numel, distances in run_ranks(monitor, 2):
        buffers = 2 * 64  # running mean and variance; the counts of batches are equal
        average = all_reduce_bytes(4 * (numel + buffers + 7 + 2 * 2), 2)
        sent = [row["traffic/bytes_sent"] for row in rows]
        average += all_reduce_bytes(2 * 8 * (1 + 1), 2)  # whether the counts differ: before averages 1 and 2
        assert sent[1:] == [0, 0, 0, average, 0, 0, 0, average]
        assert [row["traffic/averages"] for row in rows] == [0, 0, 0, 0, 1, 1, 1, 1, 2]
        assert {row["traffic/k_steps"] for row in rows} == {4.0}
        assert rows[4]["traffic/compression_ratio"] == pytest.approx(4 * all_reduce_bytes(4 * numel, 2) / average)
        assert rows[1]["traffic/exposed_s"] == 0.0
        assert rows[4]["traffic/exposed_s"] > 0.0
        assert rows[4]["traffic/consensus_distance"] == pytest.approx(distances[0], rel=1e-3)


class Gan(pl.LightningModule):
    """Two optimizers by hand; the second steps in every other batch only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.first = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8))
        self.second = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        one, two = self.optimizers()
        for optimizer in (one, two):
            if optimizer is two and batch_idx % 2:
                continue
            loss = (self.second(self.first(batch[0])) - batch[1][:, None]).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.first.parameters(), 1e-2), torch.optim.SGD(self.second.parameters(), 1e-2)


def fit_gan() -> dict[str, Any]:
    model = Gan()
    trace = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            trace.append((digest(model.first.parameters()), digest(model.second.parameters())))

    strategy = LocalSGDStrategy(3, find_unused_parameters=True)
    make_trainer(strategy, 2, callbacks=[Watch()]).fit(model, make_data(2, 14))
    return {
        "trace": trace,
        "averages": [worker.num_averages for worker in strategy.replicas],
        "steps": [worker.step for worker in strategy.replicas],
        "buffers": [sorted(worker.buffers.start) for worker in strategy.replicas],
        "end": weights(model),
    }


def test_each_optimizer_has_its_own_counter() -> None:
    first, second = run_ranks(fit_gan, 2)
    assert first["steps"] == [14, 7]
    assert first["end"] == second["end"]
    assert first["averages"] == second["averages"] == [4, 2]
    assert first["buffers"] == [
        ["first.1.running_mean", "first.1.running_var"],
        ["second.1.running_mean", "second.1.running_var"],
    ]
    steps = list(enumerate(zip(first["trace"], second["trace"], strict=True), start=1))
    assert [step for step, ((one, _), (other, _)) in steps if one == other] == [1, 4, 7, 10, 13]
    assert [step for step, ((_, one), (_, other)) in steps if one == other] == [1, 2, 7, 8, 13, 14]


class WithRate(Tiny):
    lr = 0.01

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def fit_after_a_search(folder: str) -> tuple[Any, list[str]]:
    """Return the first local step, and what is warned of."""
    strategy = LocalSGDStrategy(k_steps=2, begin_step=0.5)
    callbacks = [LearningRateFinder(num_training_steps=8, early_stop_threshold=None)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(strategy, 2, callbacks=callbacks, default_root_dir=folder)
        trainer.fit(WithRate(), make_data(2, 40))
    begin = strategy.replicas[0].when.begin_step
    return begin, [str(each.message) for each in caught if "optimizer steps" in str(each.message)]


def test_a_search_is_no_run(tmp_path: Path) -> None:
    """It has few steps: a schedule is not fixed by their number, and nobody is warned that it does not begin."""
    assert run_ranks(fit_after_a_search, 2, str(tmp_path)) == [(20, [])] * 2


REFUSED: dict[str, dict[str, Any]] = {
    "Give a number of batches": {"val_check_interval": "00:00:00:05", "check_val_every_n_epoch": None},
    "sync_batchnorm=True": {"sync_batchnorm": True},
    "would prune others": {"callbacks": [pl.callbacks.ModelPruning("l1_unstructured")]},
}


def fit_refused() -> None:
    for words, options in REFUSED.items():
        with pytest.raises(ConfigurationError, match=words):
            make_trainer(LocalSGDStrategy(), 2, **options).fit(Tiny(), make_data(2, 8), make_data(2, 2))


@pytest.mark.skipif(not hasattr(pl.callbacks, "WeightAveraging"), reason="a time since Lightning 2.6")
def test_settings_that_do_not_go_with_replicas_are_refused() -> None:
    run_ranks(fit_refused, 2)


def fit_twice() -> Any:
    """Return where the local phase of a second fit begins, and of a fit to which a callback gives the fraction."""
    strategy = LocalSGDStrategy(k_steps=2, begin_step=0.5)
    trainer = make_trainer(strategy, 2)
    for epochs in (1, 2):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(Tiny(), make_data(2, 6))
    by_callback = LocalSGDStrategy(k_steps=3)
    callbacks = [AveragingSchedule(begin_step=0.25)]
    make_trainer(by_callback, 2, callbacks=callbacks, max_epochs=2).fit(Tiny(), make_data(2, 8))
    (worker,) = by_callback.replicas
    return strategy.method.when.begin_step, worker.when.begin_step, worker.num_averages  # type: ignore[union-attr]


def test_a_second_fit_has_its_own_fraction_and_so_has_a_callback() -> None:
    """The second has 6 steps, of which the first is number 0, and the Trainer has done 6 before."""
    assert run_ranks(fit_twice, 2) == [(3, 4, 4)] * 2
