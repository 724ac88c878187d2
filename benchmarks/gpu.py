"""What has to be proved on a GPU, in eight minutes at most: `make gpu OUT=folder`.

    python benchmarks/gpu.py --out folder        # needs a CUDA device; on a CPU (`--device cpu`) it shows that it runs

The parts run one after the other, the cheapest proof first, each in a process and a time limit of its own. After each
one line is printed, and folder/gpu.json is written anew: what later parts do, hang or crash does not take it away. The
tests of a part leave folder/NAME.xml (JUnit, with bytes per parameter and waits as properties). The exit status is 1 if
a part has failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "lightning", "triton", "numpy", "lightning-lowbw")


@dataclass(frozen=True)
class Part:
    """One proof: tests, or a program.

    Attributes:
        limit_s: after which it is ended.
        tests: paths, and options, of pytest.
        program: in place of tests.
    """

    name: str
    limit_s: int
    tests: tuple[str, ...] = ()
    program: tuple[str, ...] = ()

    def command(self, out: Path, device: str) -> list[str]:
        """Return what is run."""
        if self.program:
            return [sys.executable, *self.program, "--out", str(out / self.name), "--device", device]
        options = ["-q", "-p", "no:cacheprovider", "-W", "default", "--continue-on-collection-errors"]
        return [sys.executable, "-m", "pytest", *options, "-m", "gpu", *self.tests, f"--junitxml={out / self.name}.xml"]


NCCL = "tests/gpu/test_gpu.py"
STEPS = "tests/gpu/test_steps.py"
PARTS = (
    Part("streams", 40, (STEPS, "-k", "side_stream or future")),
    Part("kernels", 120, ("tests/gpu/test_kernels.py", "tests/kernels", "tests/compress", "tests/comm")),
    Part("nccl", 60, (NCCL, "-k", "nccl")),
    Part("steps", 60, (STEPS, "-k", "waits_and_memory")),
    Part("speed", 90, program=("benchmarks/ops_gpu.py", "--repetitions", "10")),
    Part("gloo", 50, (NCCL, "-k", "not nccl")),
    Part("lightning", 60, ("tests/gpu/test_lightning.py",)),
)


@dataclass(frozen=True)
class Outcome:
    """What has become of a part: the exit status, None where the limit was reached, and the end of what it printed."""

    name: str
    status: int | None
    seconds: float
    command: list[str]
    tail: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        said = "passed" if self.status == 0 else "ended at its limit" if self.status is None else f"exit {self.status}"
        return f"{self.name}: {said} in {self.seconds:.0f} s; {self.tail[-1] if self.tail else 'it printed nothing'}"


def run(part: Part, out: Path, device: str) -> Outcome:
    """Run a part, with all processes that it starts."""
    command, started = part.command(out, device), time.monotonic()
    with (out / f"{part.name}.log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status: int | None = process.wait(part.limit_s)
        except subprocess.TimeoutExpired:
            status = None
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = [line for line in (out / f"{part.name}.log").read_text(errors="replace").splitlines() if line.strip()]
    return Outcome(part.name, status, round(time.monotonic() - started, 1), command, lines[-20:])


def environment() -> dict[str, Any]:
    """Return versions, and the device."""
    import torch

    found: dict[str, Any] = {"python": platform.python_version(), "kernel": platform.release(), "cpus": os.cpu_count()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "memory": properties.total_memory, "devices": torch.cuda.device_count()}
        found |= {"cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    return found


def main() -> None:
    """Run the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "gpu", help="folder of the results")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    names = [part.name for part in PARTS]
    parser.add_argument("--parts", nargs="+", default=names, choices=names)
    options = parser.parse_args()
    results: dict[str, Any] = {"environment": environment(), "parts": []}
    if options.device == "cuda" and "gpu" not in results["environment"]:
        raise SystemExit("There is no CUDA device: all parts would be left out. With --device cpu they are.")
    options.out.mkdir(parents=True, exist_ok=True)
    failed = []
    for part in PARTS:
        if part.name in options.parts:
            outcome = run(part, options.out, options.device)
            print(outcome, flush=True)
            results["parts"].append(asdict(outcome))
            (options.out / "gpu.json").write_text(json.dumps(results, indent=1) + "\n")
            failed += [] if outcome.status == 0 else [part.name]
    if failed:
        raise SystemExit(f"Failed: {', '.join(failed)}; see {options.out}.")


if __name__ == "__main__":
    main()
