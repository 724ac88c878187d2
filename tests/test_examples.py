"""Every example runs on two ranks, shortened, and stays short."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.programs import ROOT, run_script

EXAMPLES = ROOT / "examples"
# The number of processes, and the arguments.
SHORT_COMMANDS: dict[str, tuple[int, list[str]]] = {
    "digits_dgc.py": (2, ["--devices=2", "--max-epochs=1"]),
    "digits_local_sgd.py": (2, ["--devices=2", "--max-epochs=2", "--strategy=adaptive_local_sgd"]),
    "lora.py": (2, ["--devices=2", "--steps=4", "--width=64"]),
    "gan_manual.py": (2, ["--devices=2", "--max-epochs=1"]),
    "plain_loop.py": (2, []),
    "text_sparse_loco.py": (2, ["--devices=2", "--max-steps=4", "--k-steps=2"]),
    "two_nodes.py": (4, ["--max-epochs=1"]),
    "sharded_text.py": (4, ["--steps=4", "--width=32"]),
    "slow_link.py": (2, ["--steps=12"]),
}
NEEDS = {"lora.py": ("transformers", "peft")}  # half of PyPI: it runs where they are installed
MAX_LINES = 100


def run_example(name: str, folder: Path) -> str:
    num_ranks, arguments = SHORT_COMMANDS[name]
    return run_script(folder, str(EXAMPLES / name), *arguments, num_ranks=num_ranks)


def test_each_example_has_a_short_command() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SHORT_COMMANDS)


@pytest.mark.parametrize("name", sorted(SHORT_COMMANDS))
def test_examples_are_short(name: str) -> None:
    assert len((EXAMPLES / name).read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize("name", sorted(SHORT_COMMANDS))
def test_examples_run(name: str, tmp_path: Path) -> None:
    for package in NEEDS.get(name, ()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    run_example(name, tmp_path)
    assert not list(tmp_path.iterdir()), "an example leaves nothing behind"
