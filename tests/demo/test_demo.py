"""The demo: each of its trainings, shortened; and what it writes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_lowbw.demo import __main__ as demo
from lightning_lowbw.demo.__main__ import LOOPBACK, TRAINER_ARGUMENTS, Run, replace_in_readme, summarize
from tests.lab.namespaces import needs_lab
from tests.ranks import run_ranks

STEPS = 5
README = "Before.\n<!-- demo:begin -->\nold\n<!-- demo:end -->\nAfter.\n"
RUNS = [
    Run("1 Gb/s", "ddp", 0.9, [1.0, 2.0], [2.0, 1.0], [4000.0, 4000.0], 8400.0),
    Run("1 Gb/s", "dgc", 0.9, [0.5, 1.0], [2.0, 1.0], [4000.0, 40.0], None),
]


def check(record: dict[str, object], strategy: str) -> None:
    seconds, loss, sent_bytes = (record[name] for name in ("seconds", "loss", "sent_bytes"))
    assert isinstance(seconds, list)
    assert isinstance(sent_bytes, list)
    assert seconds == sorted(seconds)
    assert len(seconds) == len(loss) == len(sent_bytes) == STEPS  # type: ignore[arg-type]
    assert 0 < record["test_accuracy"] < 1  # type: ignore[operator]
    dense = strategy == "ddp"
    assert all((nbytes > 2e6) == dense for nbytes in sent_bytes)
    if record["interface_bytes"] is not None:
        assert record["interface_bytes"] > sum(sent_bytes)


@pytest.mark.parametrize("strategy", TRAINER_ARGUMENTS)
def test_a_rank_trains_and_writes_what_it_saw(strategy: str, tmp_path: Path) -> None:
    run_ranks(demo.train_rank, 2, strategy, STEPS, tmp_path / "record.json")
    check(json.loads((tmp_path / "record.json").read_text()), strategy)


@pytest.mark.slow
@pytest.mark.parametrize("link", [LOOPBACK, pytest.param("1 Gb/s", marks=needs_lab)])
def test_a_training_over_each_kind_of_link(link: str) -> None:
    run = demo.train(link, "dgc", STEPS)
    check(vars(run), "dgc")
    assert run.interface_bytes is not None
    if link != LOOPBACK:  # which others use as well
        assert run.interface_bytes < 2 * sum(run.sent_bytes)


def test_the_numbers_of_the_table() -> None:
    ddp, dgc = summarize(RUNS)
    assert (ddp["step_s"], dgc["step_s"]) == (1.0, 0.5)
    assert (ddp["speed_up"], dgc["speed_up"]) == (1.0, 2.0)
    assert (ddp["sent_kb"], dgc["sent_kb"]) == (4.0, 2.02)
    assert (ddp["measured_kb"], dgc["measured_kb"]) == (4.2, None)


def test_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(demo, "_has_lab", lambda: True)
    monkeypatch.setattr(demo, "train", lambda link, strategy, _: replace(RUNS[0], link=link, strategy=strategy))
    monkeypatch.setattr(demo, "time", SimpleNamespace(perf_counter=iter([100.0, 223.4]).__next__))
    readme, results = tmp_path / "README.md", tmp_path / "results"
    readme.write_text(README)
    assert demo.main(["--output", str(results), "--readme", str(readme)]) == 0
    written = json.loads((results / "demo.json").read_text())
    rows = written["rows"]
    assert written["total_s"] == pytest.approx(123.4)
    assert [(row["link"], row["strategy"]) for row in rows] == [
        (link, strategy) for link in ("1 Gb/s", "100 Mb/s") for strategy in ("ddp", "dgc")
    ]
    table = (results / "demo.md").read_text()
    assert table.count("\n| ") == 1 + len(rows)
    assert table.endswith("The demo took 123 s in all, without loading libraries.\n")
    assert readme.read_text() == README.replace("old\n", table)
    assert (results / "demo.png").stat().st_size > 10_000
    shown = capsys.readouterr().out
    assert "100 Mb/s" in shown
    assert "The demo took 123 s in all" in shown


def test_without_the_lab_it_says_what_is_not_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no iproute2
    links = []
    monkeypatch.setattr(demo, "train", lambda link, *_: links.append(link) or RUNS[0])
    assert demo.main(["--output", str(tmp_path)]) == 0
    assert links == [LOOPBACK, LOOPBACK]
    shown = capsys.readouterr().out
    assert "not installed" in shown or "this is" in shown
    assert "not the time that fewer bytes save" in shown
    with pytest.raises(ValueError, match="demo:begin"):
        replace_in_readme(tmp_path / "demo.md", "table")  # which has no markers
