"""What the traffic monitor logs, and reports at the end of a fit."""

from __future__ import annotations

import math
from copy import copy
from itertools import accumulate
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist

import lightning_lowbw as lowbw
from lightning_lowbw.comm.collectives import TrafficLedger, all_reduce_bytes
from lightning_lowbw.schedules.every_step import EveryStep
from lightning_lowbw.strategies import traffic_monitor
from lightning_lowbw.strategies.traffic_monitor import size, summary
from tests.measured import give_measured, make_measured
from tests.ranks import on_ranks
from tests.strategies.fits import Noted, make, num_collectives, traffic, train
from tests.tiny import MIN_NUMEL, Tiny, trained


@on_ranks(2)
def test_each_step_is_logged_with_its_own_bytes_and_density() -> None:
    """tests/contract compares the bytes of the ledger with the formulas."""
    model, logged, sent_by = Tiny(), traffic(), Noted(lambda module: module.trainer.strategy.ledger.sent_bytes)
    train("dgc, warm-up", model, 8, callbacks=[lowbw.TrafficMonitor(), logged, sent_by], log_every_n_steps=2)
    rows, numels = logged.values, [p.numel() for p in trained(model)]
    sparse = sum(n for n in numels if n >= MIN_NUMEL)
    dense_bytes, buffer_bytes = all_reduce_bytes(4 * sum(numels), 2), sum(each.nbytes for each in model.buffers())
    assert list(accumulate(row["traffic/bytes_sent"] for row in rows)) == sent_by.values
    for step, row in enumerate(rows):
        density, sent = EveryStep(2, 4, (0.5, 0.95)).density(step), row["traffic/bytes_sent"]
        assert row["traffic/density"] == pytest.approx(1.0 - (1.0 - density) * sparse / sum(numels))
        assert (sent == dense_bytes + buffer_bytes) == (step < 2)  # DDP broadcasts buffers in dense steps alone
        assert row["traffic/compression_ratio"] == pytest.approx(max(1.0, dense_bytes / sent))
        assert row["traffic/bytes_received"] == sent
        assert row["traffic/exposed_s"] > 0 or step < 2
    norms = [row.get("traffic/residual_norm") for row in rows]
    assert norms[1] is None
    assert 0 < norms[2] != norms[-1] < math.inf


RATIOS: tuple[tuple[lowbw.Method, list[float | None]], ...] = (  # None: buffers, or nothing
    (lowbw.Hierarchical(algorithm="leader"), [1.0] * 8),
    (lowbw.LocalSGD(k_steps=3, begin_step=2), [1.0, None, None, None, 3.0, None, None, 3.0]),
)


@on_ranks(4)
def test_the_ratio_is_that_of_the_network_between_nodes() -> None:
    """If a step sends as much between nodes as "hierarchical" does it is 1, whatever is sent inside them."""
    for method, ratios in RATIOS:
        asked, logged = {} if method.when.averages_weights else {"broadcast_buffers": False}, traffic()
        train(lowbw.Strategy(method, topology=2, **asked), data=8, callbacks=[lowbw.TrafficMonitor(), logged])
        assert any(row["traffic/bytes_intra_node"] for row in logged.values)
        if method.where.algorithm == "leader" and dist.get_rank() in (1, 3):
            assert not any(row.get("traffic/bytes_inter_node") for row in logged.values)
            continue
        for row, ratio in zip(logged.values, ratios, strict=True):
            if ratio is not None:  # a ratio stays among the Trainer's metrics until the next one
                assert row["traffic/bytes_inter_node"] > 0
                assert row["traffic/compression_ratio"] == pytest.approx(ratio, rel=0.02 if ratio < 3 else 0.15)


@on_ranks(2)
def test_the_monitor_issues_no_collective() -> None:
    counts = []
    for callbacks in ([], [lowbw.TrafficMonitor()]):
        before = num_collectives()
        train("dgc, warm-up", data=8, callbacks=callbacks, log_every_n_steps=1)
        counts.append(num_collectives() - before)
    assert counts[0] == counts[1] > 8


def said_by(name: str, *callbacks: pl.Callback, **options: Any) -> tuple[list[str], TrafficLedger]:
    """Return what the monitor has said at the end of a fit, and the ledger."""
    ledger, said = Noted(lambda module: copy(module.trainer.strategy.ledger), "on_train_end"), list[str]()
    with pytest.MonkeyPatch.context() as monkeypatch:
        give_measured(monkeypatch, make_measured(0.1, 1.0, 1.2, float16=0.6, int8=0.4))
        monkeypatch.setattr(traffic_monitor, "rank_zero_info", said.append)
        strategy = lowbw.AutoStrategy() if name == "lowbw" else make(name)
        train(strategy, data=20, callbacks=[ledger, *callbacks], **options)
    (sums,) = ledger.values
    return said, sums


@on_ranks(2)
def test_a_fit_ends_with_one_line_by_rank_0_of_what_is_in_the_ledger() -> None:
    is_first, logged = dist.get_rank() == 0, traffic()
    for name, callback in (("lowbw", logged), ("dgc, warm-up", lowbw.TrafficMonitor())):  # the user's monitor is enough
        said, sums = said_by(name, callback, enable_progress_bar=True)
        assert len(said) == is_first, said
        if is_first:
            begin = f"Sent {size(sums.sent_bytes)} instead of {size(sums.dense_bytes)}, waited "
            assert said[0].startswith(begin)
    assert not any(logged.values), "metrics of rank 0 alone, for which nobody has asked"
    assert said_by("dgc, warm-up")[0] == []  # without a progress bar


def test_on_two_levels_the_bytes_between_nodes_are_compared() -> None:
    ledger = TrafficLedger(9, 1200, 1200, 1000, 200, dense_bytes=900_000, dense_inter_bytes=354_000)
    ledger.has_levels = True
    assert summary(ledger) == "Sent 200 bytes instead of 354 kB."
    assert (
        summary(TrafficLedger(9, 800, 800, dense_bytes=800, exposed_s=31.0))
        == "Sent 800 bytes, as DDP would, waited 31 s."
    )
