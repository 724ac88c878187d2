"""The warm-up in epochs, and what the traffic monitor reports."""

from __future__ import annotations

import math
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_lowbw import (
    DGC,
    ConfigurationError,
    DGCStrategy,
    DisagreementError,
    Hierarchical,
    LocalSGD,
    Method,
    SparsityWarmup,
    Strategy,
    TrafficMonitor,
)
from lightning_lowbw.comm.collectives import all_gather_bytes, all_reduce_bytes
from lightning_lowbw.compress.codec import SparseCodec
from lightning_lowbw.compress.selection import num_selected
from lightning_lowbw.schedules.every_step import EveryStep
from tests.ranks import run_ranks
from tests.tiny import MIN_NUMEL, Tiny, make_data, make_strategy, make_trainer, sgd


def test_epochs_become_steps() -> None:
    assert SparsityWarmup().schedule(1252) == EveryStep(2504, 3756, (0.984375, 0.996, 0.999))
    assert SparsityWarmup(begin_epoch=0.5, epochs=0).schedule(10) == EveryStep(5, 3, (0.984375, 0.996, 0.999))
    assert SparsityWarmup(begin_step=7, sparsity=[0.9]).schedule(1252) == EveryStep(7, 1, (0.9,))  # nothing to spread
    assert SparsityWarmup(begin_step=7, sparsity=[0.5, 0.9, 0.99]).schedule(1252) == EveryStep(7, 3, (0.5, 0.9, 0.99))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"begin_epoch": 1, "steps": 5}, "give epochs or steps, not both"),
        ({"begin_step": -1}, "begin_step=-1"),
        ({"epochs": -1}, "epochs=-1"),
        ({"sparsity": [2.0]}, "outside"),
        ({"sparsity": []}, "at least one"),
        ({"steps": 2}, "rampup_step=2 for the 3 values"),
        ({"epochs": 3, "sparsity": [0.9]}, r"epochs=3, sparsity=\[0\.9\]\): a single value is not spread"),
        ({"steps": 2, "sparsity": [0.9]}, r"steps=2, sparsity=\[0\.9\]\): a single value is not spread"),
    ],
)
def test_bad_warmups(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        SparsityWarmup(**options)


class Densities(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.seen.append(round(trainer.strategy.workers[0].last_density, 6))


def warm_up(
    options: dict[str, Any],
    trainer_options: dict[str, Any],
    per_rank: int = 0,
    strategy: Any = "dgc",
    optimizer: Any = sgd,
) -> Any:
    densities = Densities()
    callbacks = [SparsityWarmup(**options), densities, *trainer_options.pop("callbacks", [])]
    trainer = make_trainer(strategy, dist.get_world_size(), callbacks=callbacks, **trainer_options)
    try:
        trainer.fit(Tiny(optimizer), make_data(2, 4 + per_rank * dist.get_rank()))
    except ConfigurationError as error:
        return type(error).__name__, str(error)
    return densities.seen


def test_warmup_by_name() -> None:
    stairs = {"begin_epoch": 1, "epochs": 2, "sparsity": [0.5, 0.9]}
    expected = [1.0] * 4 + [0.5] * 4 + [0.1] * 8
    assert run_ranks(warm_up, 2, stairs, {"max_epochs": 4}) == [expected, expected]
    halved = [1.0] * 5 + [0.5] * 4 + [0.1] * 7  # every other batch steps: two steps per epoch now
    assert run_ranks(warm_up, 2, stairs, {"max_epochs": 4, "accumulate_grad_batches": 2})[0] == halved


def test_warmups_that_cannot_be_known() -> None:
    changing = {"callbacks": [GradientAccumulationScheduler({0: 4})]}  # Lightning sets it when the first epoch starts
    for name, message in run_ranks(warm_up, 2, {}, changing):
        assert name == "ConfigurationError"
        assert "GradientAccumulationScheduler" in message
    for name, message in run_ranks(warm_up, 2, {"begin_epoch": 1}, {}, 1):  # a batch more on rank 1
        assert name == DisagreementError.__name__
        assert "different numbers of batches per epoch: rank 0 has 4, rank 1 has 5" in message


def warnings_of(schedule: dict[str, Any], warmup: dict[str, Any]) -> list[str]:
    trainer = make_trainer(DGCStrategy(**schedule), 2, callbacks=[SparsityWarmup(**warmup)], max_epochs=3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Tiny(), make_data(2, 4))
    return [str(warning.message) for warning in caught if "overrides" in str(warning.message)]


def test_a_warmup_that_replaces_the_strategys_own_is_warned_about() -> None:
    (replaced,) = run_ranks(warnings_of, 2, {"rampup_begin_step": 1}, {"begin_epoch": 1, "epochs": 1})[0]
    assert "rampup_begin_step=1" in replaced
    assert "rampup_begin_step=4" in replaced
    assert run_ranks(warnings_of, 2, {}, {"begin_epoch": 1, "epochs": 1})[0] == []


def wrong_strategy() -> list[str]:
    messages = []
    for callback, name in ((SparsityWarmup(), "ddp"), (TrafficMonitor(), "auto")):
        options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "max_epochs": 1}
        options |= {"enable_progress_bar": False, "enable_model_summary": False}
        trainer = pl.Trainer(strategy=name, devices=1, callbacks=[callback], **options)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError) as caught:
            trainer.fit(Tiny(), make_data(1, 2))
        messages.append(str(caught.value))
    return messages


def test_callbacks_need_their_strategy() -> None:
    warmup, monitor = run_ranks(wrong_strategy, 1)[0]
    assert "strategy='dgc'" in warmup
    assert "SingleDeviceStrategy" in monitor


class Logged(pl.Callback):
    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.rows.append({k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("traffic/")})


def monitor(name: str) -> tuple[list[dict[str, float]], list[int], list[int], int]:
    logged = Logged()
    model = Tiny()
    trainer = make_trainer(
        make_strategy(name), dist.get_world_size(), callbacks=[TrafficMonitor(), logged], log_every_n_steps=2
    )
    trainer.fit(model, make_data(2, 8))
    trained = [p.numel() for p in model.parameters() if p.requires_grad]
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    return logged.rows, [n for n in trained if n >= MIN_NUMEL], [n for n in trained if n < MIN_NUMEL], buffers


@pytest.mark.parametrize("name", ["ddp", "dense", "dgc"])
def test_bytes_are_those_of_the_formula(name: str) -> None:
    for rows, sparse, dense, buffers in run_ranks(monitor, 2, name):
        gradients = all_reduce_bytes(4 * (sum(sparse) + sum(dense)), 2)
        assert len(rows) == 8
        for step, row in enumerate(rows):
            if name == "dgc" and step >= 2:
                density = EveryStep(2, 4, (0.5, 0.95)).density(step)
                counts = [num_selected(numel, density) for numel in sparse]
                small = 4 * (sum(dense) + len(sparse) + len(dense) + 2 * 2)
                sent = all_reduce_bytes(small, 2) + all_gather_bytes(SparseCodec().nbytes(counts, sparse), 2)
                of_all = (density * sum(sparse) + sum(dense)) / (sum(sparse) + sum(dense))
                assert row["traffic/density"] == pytest.approx(of_all)
                assert row["traffic/exposed_s"] > 0
            else:
                sent = gradients + buffers  # those of batch norm alone, which only dense steps broadcast
            assert row["traffic/bytes_sent"] == row["traffic/bytes_received"] == sent
            assert row["traffic/compression_ratio"] == pytest.approx(1.0 if sent > gradients else gradients / sent)
        if name == "dgc":
            assert "traffic/residual_norm" not in rows[1]
            assert rows[2]["traffic/residual_norm"] > 0
            assert rows[-1]["traffic/residual_norm"] != rows[2]["traffic/residual_norm"]
            assert math.isfinite(rows[-1]["traffic/residual_norm"])


def monitor_on_two_levels(method: Method) -> list[dict[str, float]]:
    logged = Logged()
    asked = {} if method.averages_weights else {"broadcast_buffers": False}
    strategy = Strategy(method, topology=[[0, 1], [2, 3]], **asked)
    trainer = make_trainer(strategy, dist.get_world_size(), callbacks=[TrafficMonitor(), logged])
    trainer.fit(Tiny(), make_data(dist.get_world_size(), 8))
    return logged.rows


@pytest.mark.parametrize(
    ("method", "ratios"),
    [
        (Hierarchical(algorithm="leader"), [1.0] * 8),
        (Hierarchical(inter_dtype="bfloat16"), [2.0] * 8),
        (LocalSGD(k_steps=3, begin_step=2), [1.0, None, None, None, 3.0, None, None, 3.0]),  # None: buffers, or nothing
        (DGC(sparsity=[0.9], min_numel=MIN_NUMEL, rampup_begin_step=7), [1.0] * 7 + [7.5]),
    ],
)
def test_the_ratio_is_that_of_the_network_between_nodes(method: Method, ratios: list[float | None]) -> None:
    """Where a step sends as much between nodes as "hierarchical" does it is 1, whatever is sent inside them."""
    for rank, rows in enumerate(run_ranks(monitor_on_two_levels, 4, method)):
        seen = [row["traffic/compression_ratio"] for row in rows if row.get("traffic/bytes_inter_node")]
        if method.where.algorithm == "leader" and rank in (1, 3):
            assert seen == []  # these send nothing between nodes
            continue
        assert len(rows) == len(ratios)
        for row, ratio in zip(rows, ratios, strict=True):
            if ratio is not None:  # a ratio stays among the Trainer's metrics until the next one
                assert row["traffic/bytes_inter_node"] > 0
                assert row["traffic/compression_ratio"] == pytest.approx(ratio, rel=0.02 if ratio < 3 else 0.15)
        assert any(row["traffic/bytes_intra_node"] for row in rows)


def count_collectives() -> int:
    """Return how many collectives a training with the monitor has more than one without."""
    counts, group = [], dist.distributed_c10d._get_default_group()
    for callbacks in ([], [TrafficMonitor()]):
        before = group._get_sequence_number_for_group()
        make_trainer(make_strategy("dgc"), 2, callbacks=callbacks, log_every_n_steps=1).fit(Tiny(), make_data(2, 8))
        counts.append(group._get_sequence_number_for_group() - before)
    assert counts[0] > 8
    return counts[1] - counts[0]


def test_the_monitor_issues_no_collective() -> None:
    assert run_ranks(count_collectives, 2) == [0, 0]
