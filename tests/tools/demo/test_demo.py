"""The demo: its trainings, shortened; and its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_lowbw.tools.demo import __main__ as demo
from lightning_lowbw.tools.demo.__main__ import LOOPBACK, STRATEGIES, Run, replace_block, summarize
from tests.ranks import run_ranks
from tests.tools.lab.namespaces import needs_lab

STEPS = 5
DOCUMENT = "Before.\n<!-- demo:begin -->\nold\n<!-- demo:end -->\nAfter.\n"
SECONDS = [float(second) for second in range(1, 41)]
RUNS = [  # the mean loss of 20 steps is small enough from the 30th step on, or never
    Run("ddp", 1, 0.9, SECONDS, [1.0] * 10 + [0.001] * 30, [4000.0] * 40, 200e3),
    Run("dgc", 1, 0.8, [second / 2 for second in SECONDS], [1.0] * 10 + [0.001] * 30, [2000.0] * 40, None),
    Run("ddp", 2, 1.0, SECONDS, [1.0] * 10 + [0.001] * 30, [4000.0] * 40, 200e3),
    Run("dgc", 2, 0.8, [second / 2 for second in SECONDS], [1.0] * 40, [40.0] * 40, None),
]


def test_its_ranks_train_with_each_strategy_and_write_what_they_saw(tmp_path: Path) -> None:
    run_ranks(demo.train_all, 2, [1], STEPS, tmp_path / "records.json")
    records = [Run(**record) for record in json.loads((tmp_path / "records.json").read_text())]
    assert [run.strategy for run in records] == list(STRATEGIES)
    for run in records:
        assert list(run.seconds) == sorted(run.seconds)
        assert len(run.seconds) == len(run.loss) == len(run.sent_bytes) == STEPS
        assert 0 < run.test_accuracy < 1
        assert all(nbytes > 2e6 for nbytes in run.sent_bytes), "so short a run is dense with both"
        assert run.interface_bytes is None or run.interface_bytes > sum(run.sent_bytes)


@pytest.mark.slow
@pytest.mark.parametrize("link", [LOOPBACK, pytest.param(demo.LINK, marks=needs_lab)])
def test_a_training_over_each_kind_of_link(link: str) -> None:
    runs = demo.train(link, [1], STEPS)
    assert [run.strategy for run in runs] == list(STRATEGIES)
    for run in runs:
        assert run.interface_bytes is not None
        if link != LOOPBACK:  # other programs use it as well
            assert sum(run.sent_bytes) < run.interface_bytes < 2 * sum(run.sent_bytes)


def test_the_numbers_of_the_table() -> None:
    ddp, dgc = summarize(RUNS)
    assert (ddp["training_s"], dgc["training_s"], ddp["speed_up"], dgc["speed_up"]) == (40.0, 20.0, 1.0, 2.0)
    assert (ddp["test_accuracy"], dgc["test_accuracy"]) == pytest.approx((0.95, 0.8))
    assert (ddp["reached_s"], ddp["num_reached"], dgc["reached_s"], dgc["num_reached"]) == (30.0, 2, 15.0, 1)
    assert (ddp["sent_kb"], dgc["sent_kb"]) == (4.0, 1.02)
    assert (ddp["measured_kb"], dgc["measured_kb"]) == (5.0, None)


@pytest.mark.parametrize("columns", ["80", "120"])
def test_the_table_has_whole_words(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    demo.show(summarize(RUNS), "A caption.")
    heads, _, rest = capsys.readouterr().out.partition("─")
    assert len(heads.splitlines()) == 2
    assert {*" ".join(demo.COLUMNS).split()} == {*heads.split()}
    assert max(map(len, rest.splitlines())) <= 80
    assert rest.splitlines()[1].split()[:4] == ["ddp", "2", "40", "95.00%"]


def test_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_has_lab", lambda: True)
    monkeypatch.setattr(demo, "train", lambda *_: RUNS)
    document, results = tmp_path / "lab.md", tmp_path / "results"
    document.write_text(DOCUMENT)
    assert demo.main(["--output", str(results), "--document", str(document), "--seeds", "1", "2"]) == 0
    assert [row["strategy"] for row in json.loads((results / "demo.json").read_text())["rows"]] == list(STRATEGIES)
    table = (results / "demo.md").read_text()
    assert "15.0 (1 of 2)" in table
    assert document.read_text() == DOCUMENT.replace("old\n", table)
    assert (results / "demo.png").stat().st_size > 10_000


def test_without_the_lab_it_says_what_is_not_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no iproute2
    links = []
    monkeypatch.setattr(demo, "train", lambda link, *_: links.append(link) or RUNS)
    assert demo.main(["--output", str(tmp_path)]) == 0
    assert links == [LOOPBACK]
    shown = capsys.readouterr().out
    assert "not installed" in shown or "this is" in shown
    assert "not the time that fewer bytes save" in shown
    with pytest.raises(ValueError, match="demo:begin"):
        replace_block(tmp_path / "demo.md", "table")  # which has no markers
