"""Every example runs on two ranks, shortened, and stays short."""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path

import pytest

from tests.programs import ROOT, run_script

EXAMPLES = ROOT / "examples"
# The number of processes, and the arguments.
SHORT_COMMANDS: dict[str, tuple[int, list[str]]] = {
    "digits_dgc.py": (2, ["--devices=2", "--max-epochs=1"]),
    "elastic.py": (2, ["--max-steps=20", "--min-replicas=1", "--round-s=0.2"]),
    "digits_local_sgd.py": (2, ["--devices=2", "--max-epochs=2", "--strategy=adaptive_local_sgd"]),
    "lora.py": (2, ["--devices=2", "--steps=4", "--width=64"]),
    "gan_manual.py": (2, ["--devices=2", "--max-epochs=1"]),
    "plain_loop.py": (2, []),
    "text_sparse_loco.py": (2, ["--devices=2", "--max-steps=4", "--k-steps=2"]),
    "two_nodes.py": (4, ["--max-epochs=1"]),
    "sharded_text.py": (4, ["--steps=4", "--width=32"]),
    "slow_link.py": (2, ["--steps=12"]),
}
# Half of PyPI, and an extra: it runs where they are installed.
NEEDS = {"lora.py": ("transformers", "peft"), "elastic.py": ("torchft",)}
MAX_LINES = 100


def run_example(name: str, folder: Path, **environment: str) -> str:
    num_ranks, arguments = SHORT_COMMANDS[name]
    return run_script(folder, str(EXAMPLES / name), *arguments, num_ranks=num_ranks, environment=environment)


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
    if name == "elastic.py":
        server = importlib.import_module("torchft.coordination").LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
        run_example(name, tmp_path, TORCHFT_LIGHTHOUSE=server.address())
        server.shutdown()
    else:
        run_example(name, tmp_path)
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
