"""Every example runs on two ranks, shortened, and stays short."""

from __future__ import annotations

import importlib.util
import json
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
    "text_sparse_loco.py": (2, ["--devices=2", "--max-steps=2", "--k-steps=2"]),
    "two_machines.py": (2, ["--max-steps=12"]),
    "two_nodes.py": (4, ["--max-epochs=1"]),
    "sharded_text.py": (4, ["--steps=2", "--width=32"]),
    "slow_link.py": (2, ["--steps=12"]),
}
NEEDS = {"lora.py": ("transformers", "peft")}  # half of PyPI: it runs where they are installed
MAX_LINES = 100


def test_each_example_has_a_short_command_and_is_short() -> None:
    """That of elastic.py is on the page, which tests/elastic/test_separate_machines.py runs."""
    paths = sorted(EXAMPLES.glob("*.py"))
    assert {path.name for path in paths} == {*SHORT_COMMANDS, "elastic.py"}
    assert [path.name for path in paths if len(path.read_text().splitlines()) > MAX_LINES] == []


@pytest.mark.parametrize("name", sorted(SHORT_COMMANDS))
def test_examples_run(name: str, tmp_path: Path) -> None:
    for package in NEEDS.get(name, ()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    num_ranks, arguments = SHORT_COMMANDS[name]
    run_script(tmp_path, str(EXAMPLES / name), *arguments, num_ranks=num_ranks)
    assert not list(tmp_path.iterdir()), "an example leaves nothing behind"


def test_the_notebook_runs(tmp_path: Path) -> None:
    cells = json.loads((EXAMPLES / "quick_start.ipynb").read_text())["cells"]
    lines = [line for cell in cells if cell["cell_type"] == "code" for line in [*cell["source"], "\n"]]
    code = "".join(line for line in lines if not line.startswith("%"))  # pip
    (tmp_path / "notebook.py").write_text(code.replace("max_epochs=10", "max_epochs=3"))
    shown = run_script(tmp_path, str(tmp_path / "notebook.py")).splitlines()
    ddp, dgc = (next(line for line in shown if line.startswith(name)) for name in ("ddp:", "dgc:"))
    sent_kb = [int(line.split()[4].replace(",", "")) for line in (ddp, dgc)]
    assert sent_kb[0] > 4 * sent_kb[1]
