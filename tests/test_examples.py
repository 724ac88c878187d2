"""Every example runs on two ranks, shortened, and stays short."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.programs import ROOT, run_script

EXAMPLES = ROOT / "examples"
# The number of processes, and the arguments.
SHORT_COMMANDS: dict[str, tuple[int, list[str]]] = {
    "demo.py": (1, ["--devices=2", "--max-steps=24", "--readme=README.md"]),
    "digits_dgc.py": (2, ["--devices=2", "--max-epochs=1"]),
    "digits_local_sgd.py": (2, ["--devices=2", "--max-epochs=2", "--strategy=adaptive_local_sgd"]),
    "gan_manual.py": (2, ["--devices=2", "--max-epochs=1"]),
    "plain_loop.py": (2, []),
    "text_sparse_loco.py": (2, ["--devices=2", "--max-steps=10", "--k-steps=5"]),
    "two_nodes.py": (4, ["--max-epochs=1"]),
    "slow_link.py": (2, ["--steps=12"]),
}
MAX_LINES = 100
README = "Before.\n<!-- demo:begin -->\nold\n<!-- demo:end -->\nAfter.\n"


def run_example(name: str, folder: Path) -> str:
    num_ranks, arguments = SHORT_COMMANDS[name]
    return run_script(folder, str(EXAMPLES / name), *arguments, num_ranks=num_ranks)


def test_each_example_has_a_short_command() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SHORT_COMMANDS)


@pytest.mark.parametrize("name", sorted(SHORT_COMMANDS.keys() - {"demo.py"}))
def test_examples_are_short(name: str) -> None:
    assert len((EXAMPLES / name).read_text().splitlines()) <= MAX_LINES


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SHORT_COMMANDS.keys() - {"demo.py"}))
def test_examples_run(name: str, tmp_path: Path) -> None:
    run_example(name, tmp_path)
    assert not list(tmp_path.iterdir()), "an example leaves nothing behind"


@pytest.mark.slow
def test_the_demo_compares_both_strategies_on_both_tasks(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(README)
    shown = run_example("demo.py", tmp_path)
    results = tmp_path / "demo_results"
    rows = json.loads((results / "demo.json").read_text())["rows"]
    assert [(row["task"], row["strategy"]) for row in rows] == [
        (task, strategy) for task in ("digits", "text") for strategy in ("ddp", "dgc")
    ]
    assert all(row["sent_kb"] > 2000 for row in rows), "24 steps are within the dense phase"
    assert all(row["measured_kb"] is None or row["measured_kb"] > row["sent_kb"] for row in rows)
    table = (results / "demo.md").read_text()
    assert table.count("\n| ") == 1 + len(rows)
    assert (tmp_path / "README.md").read_text() == README.replace("old\n", table)
    assert (results / "demo.png").stat().st_size > 10_000
    assert "compression" in shown
