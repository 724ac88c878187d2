"""What the traffic monitor logs, and reports at the end of a fit."""

from __future__ import annotations

import contextlib
import io
import math
import sys
import time
from copy import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist

from lightning_lowbw import (
    DGC,
    AutoStrategy,
    ConfigurationError,
    Hierarchical,
    LocalSGD,
    Method,
    Strategy,
    TrafficMonitor,
)
from lightning_lowbw.comm.collectives import TrafficLedger, all_gather_bytes, all_reduce_bytes
from lightning_lowbw.compress.codec import SparseCodec
from lightning_lowbw.compress.selection import num_selected
from lightning_lowbw.schedules.every_step import EveryStep
from lightning_lowbw.strategies import traffic_monitor
from lightning_lowbw.strategies.traffic_monitor import Report, draw, show, size
from tests.measured import give_measured, make_measured
from tests.ranks import run_ranks
from tests.sync.problem import each
from tests.tiny import MIN_NUMEL, Tiny, make_data, make_strategy, make_trainer


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


@pytest.mark.parametrize("name", ["ddp", "dgc"])
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


RATIOS: tuple[tuple[Method, list[float | None]], ...] = (  # None: buffers, or nothing
    (Hierarchical(algorithm="leader"), [1.0] * 8),
    (LocalSGD(k_steps=3, begin_step=2), [1.0, None, None, None, 3.0, None, None, 3.0]),
)


def test_the_ratio_is_that_of_the_network_between_nodes() -> None:
    """Where a step sends as much between nodes as "hierarchical" does it is 1, whatever is sent inside them."""
    results = run_ranks(each, 4, monitor_on_two_levels, [(method,) for method, _ in RATIOS])
    for rank, of_rank in enumerate(results):
        for (method, ratios), rows in zip(RATIOS, of_rank, strict=True):
            assert any(row["traffic/bytes_intra_node"] for row in rows)
            if method.where.algorithm == "leader" and rank in (1, 3):
                assert not any(row.get("traffic/bytes_inter_node") for row in rows)
                continue
            for row, ratio in zip(rows, ratios, strict=True):
                if ratio is not None:  # a ratio stays among the Trainer's metrics until the next one
                    assert row["traffic/bytes_inter_node"] > 0
                    assert row["traffic/compression_ratio"] == pytest.approx(ratio, rel=0.02 if ratio < 3 else 0.15)


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


# The report -----------------------------------------------------------------------------------------------------------


class Ledger(pl.Callback):
    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.traffic = copy(trainer.strategy.ledger)


def report_of(name: str, **options: Any) -> tuple[list[str], dict[str, str]]:
    """Return the lines that a fit has printed, and what of them is in the ledger."""
    ledger, printed = Ledger(), io.StringIO()
    with pytest.MonkeyPatch.context() as monkeypatch, contextlib.redirect_stdout(printed):
        give_measured(monkeypatch, make_measured(0.1, 1.0, 1.2, float16=0.6, int8=0.4))
        strategy = AutoStrategy() if name == "lowbw" else make_strategy(name)
        callbacks = [ledger, *options.pop("callbacks", [])]
        trainer = make_trainer(strategy, dist.get_world_size(), callbacks=callbacks, **options)
        trainer.fit(Tiny(), make_data(dist.get_world_size(), 20))
    traffic = ledger.traffic
    rows = {"steps": "20", "sent": size(traffic.sent_bytes), "DDP would send": size(traffic.dense_bytes)}
    rows["compression ratio"] = f"{traffic.dense_bytes / traffic.sent_bytes:.3g}"
    return printed.getvalue().splitlines(), rows


def reports() -> None:
    is_first, logged = dist.get_rank() == 0, Logged()
    given: dict[str, list[pl.Callback]] = {"lowbw": [logged], "dgc": [TrafficMonitor()]}  # one of the user's is enough
    for name, callbacks in given.items():
        lines, rows = report_of(name, enable_progress_bar=True, callbacks=callbacks)
        sentences = [line for line in lines if line.startswith("Sent ")]
        assert len(sentences) == is_first, lines
        if not is_first:
            continue
        table = dict(line.strip("│ ").split(" │ ") for line in map(" ".join, map(str.split, lines)) if "│" in line)
        assert rows.items() <= table.items()
        known = {"a step took", "waited for the network"}
        known |= {"a step of DDP took", "predicted for it"} if name == "lowbw" else set()  # which has measured it
        assert {*table} == {*rows, *known}
        assert table.get("a step of DDP took", "1 s") == "1 s"
        assert table.get("predicted for it", "0.5 s") == "0.5 s"
        assert f"Sent {rows['sent']} instead of {rows['DDP would send']}, waited " in sentences[0]
        assert ("times as fast as DDP on this link." in sentences[0]) == (name == "lowbw")
    assert not any(logged.rows), "metrics of rank 0 alone, which nobody has asked for"
    lines, _ = report_of("dgc")  # without a progress bar
    assert not lines


def test_a_fit_ends_with_one_report_by_rank_0_of_what_is_in_the_ledger() -> None:
    run_ranks(reports, 2)


def test_on_two_levels_the_bytes_between_nodes_are_compared() -> None:
    ledger = TrafficLedger(9, 1200, 1200, 1000, 200, dense_bytes=900_000, dense_inter_bytes=354_000)
    report = Report(ledger, has_levels=True, step_s=0.0123, waited=0.0004)
    assert dict(report.rows()) == {
        "steps": "9",
        "a step took": "0.0123 s",
        "waited for the network": "0.0 % of the time",
        "sent inside nodes": "1 kB",
        "sent between nodes": "200 bytes",
        "hierarchical would send": "354 kB",
        "compression ratio": "1,770",
    }
    assert report.sentence() == "Sent 200 bytes instead of 354 kB, waited 0 % of the time."
    same = Report(TrafficLedger(9, 800, 800, dense_bytes=800), waited=0.31)
    assert same.sentence() == "Sent 800 bytes, as DDP would, waited 31 % of the time."


def test_only_the_time_of_steps_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.0, 1.0, 10.0, 12.0, 30.0, 32.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(seconds))
    clock, strategy = traffic_monitor._Clock(), SimpleNamespace(method=DGC())
    times = [clock.note(1, 0.0, strategy), clock.note(1, 0.0, strategy)]
    clock.stop()  # validation
    times += [clock.note(1, 0.0, strategy), clock.note(1, 0.0, strategy)]
    strategy.method = Hierarchical()  # chosen meanwhile
    times += [clock.note(1, 0.0, strategy), clock.note(1, 0.0, strategy)]
    assert times == pytest.approx([math.nan, 1.0, math.nan, 2.0, math.nan, 2.0], nan_ok=True)
    assert clock.step_s == pytest.approx(5 / 3)
    assert clock.waited is None  # not known of other strategies


def test_without_rich_the_report_is_lines_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str]()
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setattr(traffic_monitor, "rank_zero_info", said.append)
    report = Report(TrafficLedger(9, 800, 800, dense_bytes=800), step_s=0.25)
    show(report)
    (text,) = said
    assert text.splitlines()[1:3] == ["steps: 9", "a step took: 0.25 s"]
    assert text.endswith(report.sentence())


def test_a_picture_is_drawn_or_refused_at_construction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "runs/traffic.png"
    monitor = TrafficMonitor(report=str(path))
    draw(Path(str(monitor.report)), [0.0, 1e6, 0.0], [math.nan, 0.1, 0.2])
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigurationError, match=r"report='traffic.txt': give a file that ends in .png"):
        TrafficMonitor(report="traffic.txt")
    monkeypatch.setattr(traffic_monitor, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"matplotlib, which is not installed: pip install"):
        TrafficMonitor(report="traffic.png")
