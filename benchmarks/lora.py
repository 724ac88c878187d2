"""Fine-tuning of adapters on two throttled nodes: examples/lora.py, into benchmarks/results/lora.md.

    .venv/bin/python benchmarks/lora.py    # five minutes; needs transformers and peft

Two nodes in the lab, a core each.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import RESULTS, describe_environment
from lightning_lowbw.tools.lab import Network, launch, parse_rate

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "lora.py"
RATE, STEPS, WIDTH = "20mbit", 200, 512
NUM_NODES = 2


def main() -> None:
    """Run the example and write its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="for a look; writes nothing")
    options = parser.parse_args()
    command = [sys.executable, str(EXAMPLE), f"--steps={options.steps or STEPS}", f"--width={WIDTH}"]
    with tempfile.TemporaryFile() as output:
        with Network([parse_rate(RATE)] * NUM_NODES) as network:
            report = launch(network, command, output=output)
        output.seek(0)
        shown = output.read().decode()
    if report.status != 0:
        raise SystemExit(shown)
    table = "".join(f"{line}\n" for line in shown.splitlines() if line.startswith("| "))
    print(table)
    if options.steps is None:
        environment = describe_environment()
        about = next(line for line in shown.splitlines() if line.endswith("are trained."))
        versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("transformers", "peft"))
        note = (
            f"{NUM_NODES} nodes of one rank, {RATE} between them. {about} {STEPS} steps (`benchmarks/lora.py`, "
            f"{environment['num_cpus']} cores, torch {environment['torch']}, {versions}, {environment['date']}).\n\n"
        )
        (RESULTS / "lora.md").write_text(note + table)


if __name__ == "__main__":
    main()
