"""What has to be proved on a GPU, in eight minutes at most: `make gpu OUT=folder`.

    python benchmarks/gpu.py --out folder        # needs a CUDA device; on a CPU (`--device cpu`) it shows that it runs
    python benchmarks/gpu.py --report folders    # named as the commits they are of: what is kept, and its table

Needs torch, lightning, triton, numpy and pytest. The parts run one after the other, each in processes and a time limit
of its own. After each one line is printed, and folder/gpu.json is written anew: what later parts do, hang or crash does
not take it away. The tests of a part leave folder/NAME.xml (JUnit), programs a NAME.json, all of them a NAME.log. The
exit status is 1 if a part has failed; one that is not possible here says why.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "lightning", "triton", "numpy", "pytest", "lightning-lowbw")
TOTAL_S = 480  # of all parts; the last has what is left
PATIENCE = 4  # times longer are the limits on a CPU, which has other work
GRACE_S = 4.0  # in which pytest writes what it has found until the limit
SANITIZER = shutil.which("compute-sanitizer", path=f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin")
CAPTION = (
    "nccl: 2, 4 and 6 ranks share the device. Elsewhere the 7 peers of a rank are its echoes: their work on the device "
    "is done, their network is not there. alone: a training without any exchange; local SGD without a number averages "
    "every 2 batches. Of the host: before it waits for the device, in the wait, after it, from the end of backward. "
    "Bytes: at most during a step, beyond parameters, gradients, the optimizer's state and residuals."
)
NO_TESTS = 5  # pytest's exit status: a shard may be empty


@dataclass(frozen=True)
class Part:
    """One proof: tests, or a program.

    Attributes:
        limit_s: after which it is ended.
        tests: paths, and options, of pytest.
        program: in place of tests; arguments of Python.
        shards: processes that share the tests.
        needs_nccl: whether ranks share the device through NCCL, which `probe` tries.
        sanitizers: the tools of compute-sanitizer that the program runs under, at the same time.
    """

    name: str
    limit_s: int
    tests: tuple[str, ...] = ()
    program: tuple[str, ...] = ()
    shards: int = 1
    needs_nccl: bool = False
    sanitizers: tuple[str, ...] = ()

    def commands(self, out: Path, device: str) -> list[list[str]]:
        """Return what is run, at the same time."""
        if self.program:
            program = [sys.executable, *self.program, "--out", str(out / self.name), "--device", device]
            tools = [[SANITIZER or "", "--tool", tool, "--error-exitcode", "9"] for tool in self.sanitizers]
            return [[*tool, *program] for tool in tools or [[]]]
        options = ["-v", "-p", "no:cacheprovider", "-W", "default", "--continue-on-collection-errors", "-m", "gpu"]
        options += self.tests
        return [
            [sys.executable, "-m", "pytest", *options, f"--shard={each}/{self.shards}", f"--junitxml={out / name}.xml"]
            for each, name in enumerate(self.names())
        ]

    def names(self) -> list[str]:
        """Return the names of the files that its processes write, without suffixes."""
        if self.sanitizers:
            return [*self.sanitizers]
        return [self.name] if self.shards == 1 else [f"{self.name}{each}" for each in range(self.shards)]

    def is_impossible(self, device: str, has_nccl: bool) -> str:
        """Return why it cannot be run here; "" where it can."""
        if self.needs_nccl and not has_nccl:
            return "the probe has found no NCCL between ranks that share a device"
        if self.sanitizers and device == "cpu":
            return "compute-sanitizer looks at a GPU"
        if self.sanitizers and SANITIZER is None:
            return "compute-sanitizer is not installed"
        return "pytest is not installed" if self.tests and importlib.util.find_spec("pytest") is None else ""


KERNELS = (
    *("tests/gpu/test_kernels.py", "tests/kernels/test_reference.py", "tests/kernels/test_tensors.py"),
    *("tests/payloads/test_values.py", "tests/comm/test_collectives.py"),
)
LIGHTNING = "tests/gpu/test_lightning.py"
ELASTIC = "tests/elastic/test_strategy.py"
STEPS = "benchmarks/steps_gpu.py"
SELF = "benchmarks/gpu.py"
PARTS = (
    Part("probe", 15, program=(SELF, "--do", "probe")),
    Part("kernels", 60, KERNELS, shards=6),
    Part("streams", 30, ("tests/gpu/test_streams.py",)),
    Part("waits", 30, program=(STEPS, "waits")),
    Part("memory", 30, program=(STEPS, "memory")),
    Part("speed", 75, program=("benchmarks/ops_gpu.py", "--repetitions", "10")),
    Part("profile", 20, program=(STEPS, "profile")),
    Part("training", 105, program=(STEPS, "training")),
    Part("sanitizers", 45, program=(SELF, "--do", "kernels"), sanitizers=("memcheck", "racecheck")),
    Part("lightning-nccl", 80, (LIGHTNING, ELASTIC, "-k", "nccl"), shards=4, needs_nccl=True),
    Part("lightning-gloo", 90, (LIGHTNING, "-k", "not nccl"), shards=4),
)


@dataclass(frozen=True)
class Outcome:
    """What has become of a part.

    Attributes:
        statuses: of its processes; None where the limit was reached. Empty if it is not possible here.
        said: of the tests how many have passed, failed and so on, of a program the last line.
        tails: the end of what each process has printed.
    """

    name: str
    statuses: list[int | None]
    seconds: float
    said: str
    commands: list[list[str]] = field(default_factory=list)
    tails: list[list[str]] = field(default_factory=list)

    @property
    def has_failed(self) -> bool:
        return any(status != 0 for status in self.statuses)

    def __str__(self) -> str:
        if not self.statuses:
            return f"{self.name}: not possible here: {self.said}"
        ends = {None: "ended at its limit", 0: "passed"}
        worst = next((status for status in self.statuses if status != 0), 0)
        return f"{self.name}: {ends.get(worst, f'exit {worst}')} in {self.seconds:.0f} s; {self.said}"


def run(part: Part, out: Path, device: str, limit_s: float) -> Outcome:
    """Run a part, with all processes that it starts."""
    commands, started, logs = part.commands(out, device), time.monotonic(), [out / f"{n}.log" for n in part.names()]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    environment |= {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if part.sanitizers else {}  # else it sees no borders
    processes = []
    for command, path in zip(commands, logs, strict=True):
        with path.open("w") as log:
            output = {"stdout": log, "stderr": subprocess.STDOUT, "start_new_session": True}
            processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, **output))  # type: ignore[call-overload]
    statuses = [_end(process, started + limit_s) for process in processes]
    if any(status == 0 for status in statuses):
        statuses = [0 if status == NO_TESTS and part.tests else status for status in statuses]
    lines = [[line for line in log.read_text(errors="replace").splitlines() if line.strip()] for log in logs]
    ends = [each[-1] if each else "it printed nothing" for each in lines]
    said = "; ".join(ends) if part.program else _counts(ends)
    seconds = round(time.monotonic() - started, 1)
    return Outcome(part.name, statuses, seconds, said, commands, [each[-20:] for each in lines])


def _end(process: subprocess.Popen[bytes], deadline: float) -> int | None:
    """Return the exit status of a process, None if it did not end in time; nothing that it has started is left."""
    try:
        return process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _counts(ends: list[str]) -> str:
    """Return the sums of what the last lines of pytest count."""
    counts = Counter[str]()
    for number, what in re.findall(r"(\d+) (passed|failed|skipped|error)", "\n".join(ends)):
        counts[what] += int(number)
    return ", ".join(f"{number} {what}" for what, number in counts.items()) or ends[0]


def environment() -> dict[str, Any]:
    """Return versions, and the device; asked in another process, because a device may be for one process at a time."""
    found: dict[str, Any] = {"python": platform.python_version(), "kernel": platform.release(), "cpus": os.cpu_count()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    found["C compiler, which Triton needs"] = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    query = ["nvidia-smi", "--query-gpu=driver_version,compute_mode,mig.mode.current", "--format=csv,noheader"]
    try:
        found["driver, compute mode, MIG"] = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    except OSError as error:
        found["driver, compute mode, MIG"] = str(error)
    device = subprocess.run([sys.executable, SELF, "--do", "device"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    return found | json.loads((device.stdout.splitlines() or ["{}"])[-1])


# What runs in processes of its own -----------------------------------------------------------------------------------


def describe_device() -> dict[str, Any]:
    """Return what torch knows about the first device; nothing if there is none."""
    import torch

    if not torch.cuda.is_available():
        return {}
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "memory": properties.total_memory,
        "devices": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }


def probe(device: str, out: Path) -> None:
    """Sum over two ranks that share a device."""
    store = out.with_suffix(".store")
    store.unlink(missing_ok=True)
    shared = [sys.executable, SELF, "--device", device, "--out", str(store), "--do"]
    ranks = [subprocess.Popen([*shared, f"rank {rank}"]) for rank in (0, 1)]
    statuses = [rank.wait() for rank in ranks]
    if any(statuses):
        raise SystemExit(f"The ranks have ended with {statuses}.")
    print(f"two ranks share a device through {'NCCL' if device == 'cuda' else 'gloo: there is no NCCL on a CPU'}")


def be_rank(rank: int, device: str, store: str) -> None:
    """Sum over two ranks, as one of them."""
    sys.path.insert(0, str(ROOT))
    import torch
    import torch.distributed as dist

    from tests.gpu.problem import init_process_group

    if device == "cuda":
        init_process_group("nccl", store, rank, 2, is_bound=False)
    else:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    ones = torch.ones(1, device=device)
    dist.all_reduce(ones)
    if float(ones) != 2.0:
        raise SystemExit(f"The sum of two ones is {float(ones)}.")
    dist.destroy_process_group()


def run_kernels() -> None:
    """Run kernels on a tiny problem: what every training does before it starts."""
    sys.path.insert(0, str(ROOT))
    import torch

    from lightning_lowbw.tools.check import kernels_of

    if (found := kernels_of(torch.device("cuda", 0))) != "compiled":
        raise SystemExit(found)
    print("The kernels of dgc and int8 ran, and compute what plain torch does.")


def main() -> None:
    """Run the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "gpu", help="folder of the results")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    names = [part.name for part in PARTS]
    parser.add_argument("--parts", nargs="+", default=names, choices=names)
    parser.add_argument("--report", nargs="+", type=Path, default=[], help="folders of runs, the last run last")
    parser.add_argument("--do", default="", help="what runs in a process of its own")
    options = parser.parse_args()
    kind, _, rank = options.do.partition(" ")
    if options.report:
        report(options.report)
    elif kind == "device":
        print(json.dumps(describe_device()))
    elif kind == "kernels":
        run_kernels()
    elif kind == "probe":
        probe(options.device, options.out)
    elif kind == "rank":
        be_rank(int(rank), options.device, str(options.out))
    else:
        run_parts(options.out, options.device, options.parts)


def run_parts(out: Path, device: str, names: list[str]) -> None:
    """Run the parts of these names."""
    found = environment()
    print(", ".join(f"{name} {value}" for name, value in found.items()), flush=True)
    if device == "cuda" and "gpu" not in found:
        raise SystemExit("There is no CUDA device: all parts would be left out. With --device cpu they are.")
    out.mkdir(parents=True, exist_ok=True)
    out, patience, outcomes, has_nccl = out.resolve(), 1 if device == "cuda" else PATIENCE, list[Outcome](), True
    deadline = time.monotonic() + TOTAL_S * patience
    for part in [part for part in PARTS if part.name in names]:
        left_s = deadline - time.monotonic()
        if reason := part.is_impossible(device, has_nccl) or ("no time is left" if left_s < GRACE_S else ""):
            outcome = Outcome(part.name, [], 0.0, reason)
        else:
            outcome = run(part, out, device, min(part.limit_s * patience, left_s))
        print(outcome, flush=True)
        has_nccl = has_nccl and not (part.name == "probe" and outcome.has_failed)
        outcomes.append(outcome)
        results = {"environment": found, "parts": [asdict(each) for each in outcomes]}
        (out / "gpu.json").write_text(json.dumps(results, indent=1) + "\n")
    if failed := [outcome.name for outcome in outcomes if outcome.has_failed]:
        raise SystemExit(f"Failed: {', '.join(failed)}; see {out}.")


# What is kept of runs ------------------------------------------------------------------------------------------------


def report(folders: list[Path]) -> None:
    """Write of each part, and each row, what the last run says that has it; with the names of the runs' folders.

    Times are kept of each device.
    """
    parts: dict[str, dict[str, Any]] = {part.name: {} for part in PARTS}
    rows: dict[str, dict[str, dict[str, Any]]] = {kind: {} for kind in ("training", "memory", "waits", "profile")}
    environment: dict[str, Any] = {}
    for folder in folders:
        for path in sorted(folder.rglob("gpu.json")):
            found = json.loads(path.read_text())
            environment = found["environment"]
            for part in found["parts"]:
                outcome = Outcome(**part | {"commands": [], "tails": []})
                if part["statuses"] and not (outcome.has_failed and parts.get(part["name"])):
                    parts[part["name"]] = {"commit": folder.name, "outcome": str(outcome)}
        for kind, of_kind in rows.items():
            for path in folder.rglob(f"{kind}.json"):
                found = json.loads(path.read_text())
                device = found["environment"]["device"]
                for row in found["rows"]:
                    name = f"{row['name']}, {device}" if kind == "training" else row["name"]  # times are of one machine
                    of_kind[name] = {"commit": folder.name, **row}
    results = {"environment": environment, "parts": parts, "rows": rows}
    path = ROOT / "benchmarks" / "results" / "gpu"
    path.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    tables = {
        ("part", "commit", "outcome"): [
            (name, each["commit"], each["outcome"].partition(": ")[2].partition("; |")[0])
            for name, each in parts.items()
        ],
        ("training", "how", "commit", "method", "ms per batch", "of alone", "ms in kernels", "host, ms"): [
            (
                name,
                each.get("what", "eager, a plain loop, with echoes for peers"),
                each["commit"],
                method,
                median,
                each["of alone"][method],
                each["ms per batch in kernels"].get(method, ""),
                " + ".join(map(str, each.get("ms of the host in a step", {}).get(method, {}).values())),
            )
            for name, each in rows["training"].items()
            for method, (median, _) in each["ms per batch"].items()
        ],
        ("step", "commit", "bytes per parameter at most", "by the formula"): [
            (name, each["commit"], each["bytes"], each["formula"]) for name, each in rows["memory"].items()
        ],
        ("step", "commit", "waits for the device", "allowed"): [
            (name, each["commit"], len(each["waits"]), each["allowed"]) for name, each in rows["waits"].items()
        ],
    }
    lines = [", ".join(f"{name} {value}" for name, value in environment.items() if name != "kernel") + "."]
    lines += ["", CAPTION]
    for head, body in tables.items():
        lines += ["", _line(head), _line(["---"] * len(head)), *map(_line, body)]
    path.with_suffix(".md").write_text("\n".join(lines) + "\n")


def _line(cells: Iterable[Any]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    main()
