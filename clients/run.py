"""Train other people's projects with ddp, dgc and local_sgd, each in processes of its own, and compare.

    make test-clients                          # everything anew, in an environment of its own; under 40 minutes
    python -m clients.run                      # goes on where it was stopped
    python -m clients.run timm darts           # these again

Writes clients/results.json and benchmarks/results/compatibility.md. Fails where dgc or local_sgd fails and ddp does
not.

A client is a module beside this one: a docstring that says what is trained, PROJECT (the name that pip knows), perhaps
a REMARK, and a program that trains about 120 steps with the strategy of its `Trial`.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import multiprocessing.connection
import os
import platform
import re
import runpy
import socket
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from clients.trial import NUM_RANKS, RECORD, WAY, WAYS

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "clients" / "results.json"
DOCUMENT = ROOT / "benchmarks" / "results" / "compatibility.md"
TIMEOUT_S = 300
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",  # nothing is downloaded
    "CUDA_VISIBLE_DEVICES": "",
}


def clients() -> dict[str, dict[str, str]]:
    """Return what each client says about itself, without importing it: that would load its project."""
    found = {}
    for path in sorted((ROOT / "clients").glob("*.py")):
        tree = ast.parse(path.read_text())
        values = {
            node.targets[0].id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
        }
        if "PROJECT" in values:
            what = " ".join((ast.get_docstring(tree) or "").split())
            found[path.stem] = {"what": what, "project": values["PROJECT"], "remark": values.get("REMARK", "")}
    return found


def run(client: str, way: str) -> dict[str, Any]:
    """Train a client in one way; return what its ranks have recorded, or the error."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        server.close()  # free again
        # Forked from a process that has torch and Lightning loaded: that is most of what a program does in its first
        # ten seconds.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["clients.trial"])
        ranks = [context.Process(target=train, args=(client, way, folder, rank, port)) for rank in range(NUM_RANKS)]
        start = time.monotonic()
        for rank in ranks:
            rank.start()
        while alive := [rank for rank in ranks if rank.is_alive()]:
            left_s = start + TIMEOUT_S - time.monotonic()
            multiprocessing.connection.wait([rank.sentinel for rank in alive], timeout=max(0.0, left_s))
            if left_s <= 0 or any(rank.exitcode for rank in ranks):
                for rank in ranks:
                    rank.kill()
        seconds = time.monotonic() - start
        codes = [rank.exitcode for rank in ranks]
        shown = "".join(path.read_text() for path in sorted(Path(folder).glob("shown.*")))
        records = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("record.*"))]
    late = f"TimeoutError: not finished after {TIMEOUT_S} s" if seconds >= TIMEOUT_S else None
    outcome: dict[str, Any] = {"seconds": round(seconds, 1)}
    if error := late or why_failed(codes, records, shown):
        return {**outcome, "error": error, "output": shown[-4000:].replace(str(ROOT), ".")}
    losses = {name: sum(each[name] for each in records) / len(records) for name in ("first_loss", "loss")}
    return {**outcome, **{name: value for name, value in records[0].items() if name != "weights"}, **losses}


def train(client: str, way: str, folder: str, rank: int, port: int) -> None:
    """Be a rank of a client, as torchrun starts it."""
    os.chdir(folder)
    shown = os.open(f"shown.{rank}", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(shown, stream)
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": NUM_RANKS, "LOCAL_WORLD_SIZE": NUM_RANKS, "GROUP_RANK": 0}
    os.environ.update({name: str(value) for name, value in own.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID=client)
    os.environ.update({WAY: way, RECORD: f"{folder}/record"})
    sys.argv = [f"{client}.py"]
    runpy.run_module(f"clients.{client}", run_name="__main__", alter_sys=True)


def why_failed(codes: list[int | None], records: list[dict[str, Any]], shown: str) -> str | None:
    """Return the error of a run, in a line; None where it trained, and left the same weights on both ranks."""
    if any(codes) or len(records) != NUM_RANKS:
        errors = re.findall(r"^(?:\[rank\d\]: )?([\w.]*(?:Error|Exception|Interrupt)\b.*)$", shown, re.MULTILINE)
        return errors[-1] if errors else f"exit status {codes}, {len(records)} of {NUM_RANKS} ranks finished"
    if not all(math.isfinite(each["loss"]) for each in records):
        return "the loss is not finite"
    if len({each["weights"] for each in records}) > 1:
        return "the weights of the ranks differ after the fit"
    return None


def document(results: dict[str, Any]) -> str:
    """Return benchmarks/results/compatibility.md."""
    runs = results["runs"]
    complete = {client: about for client, about in clients().items() if set(WAYS) <= set(runs.get(client, ()))}
    failures = ", ".join(ours_alone(results))
    missing = ", ".join(client for client in clients() if client not in complete)
    return TEXT.format(
        table="\n".join([TITLES, *(row(name, about, runs[name]) for name, about in complete.items())]),
        failed=f"Failures that ddp does not have: {failures}." if failures else "No failure that ddp does not have.",
        projects=len({about["project"] for about in complete.values()}),
        runs=len(complete) * len(WAYS),
        missing=f" Not run yet: {missing}." if missing else "",
        minutes=round(sum(runs[client][way]["seconds"] for client in complete for way in WAYS) / 60),
        environment=", ".join(f"{name} {value}" for name, value in results["environment"].items()),
    )


def row(client: str, about: dict[str, str], ways: dict[str, dict[str, Any]]) -> str:
    """Return a client's line of the table."""
    outcomes = [ways[way] for way in WAYS]
    first, dgc, _ = outcomes
    errors = [f"{way}: {each['error']}" for way, each in zip(WAYS, outcomes, strict=True) if "error" in each]
    cells = [
        about["project"],
        first["version"],
        f"[{about['what'].rstrip('.')}](../../clients/{client}.py)",
        f"`{dgc['typed']}`" if "typed" in dgc else "",
        f"{first['first_loss']:.4g}" if "first_loss" in first else "",
        *(
            ("refused" if is_refused(each) else "fails") if "error" in each else f"{each['loss']:.4g}"
            for each in outcomes
        ),
        *("" if "error" in each else f"{each['dense_bytes'] / each['sent_bytes']:.1f}" for each in outcomes[1:]),
        " ".join([about["remark"], *errors]).strip().replace("|", "/"),
    ]
    return f"| {' | '.join(cells)} |"


def cell(outcome: dict[str, Any]) -> str:
    """Return the loss of a run, or why there is none."""
    if "error" not in outcome:
        return f"{outcome['loss']:.4g}"
    return "refused" if is_refused(outcome) else "fails"


TITLES = (
    "| project | version | what is trained | typed | loss at first | ddp | dgc | local_sgd | bytes: ddp / dgc "
    "| ddp / local_sgd | remark |\n" + "| --- " * 11 + "|"
)
TEXT = """<!-- Written by `make test-clients` (clients/run.py): change that, not this. -->
# Compatibility

Published projects that train with Lightning, used as a new user would: with `import lightning_lowbw as lowbw`, and
another `strategy`. Random weights and synthetic data, two ranks on the CPU of one machine. `make test-clients` installs
the projects into a separate environment (`clients/requirements.txt`) and writes this page.

{failed} {projects} projects, {runs} runs, {minutes} minutes.{missing}

{table}

- **Typed**: the code for dgc; for the other columns it has `ddp` or `local_sgd` instead of `dgc`.
- **Loss**: training loss, the mean of both ranks, over the first fifth of the steps (with ddp) and over the last
  fifth. With local_sgd it is the loss of each rank's replica. The runs are short, about 120 steps: for the
  accuracy of a method see the measurements in the [cards of the methods](../../docs/methods/dgc.md). After
  each fit both ranks have the same weights.
- **dgc** without numbers would measure that loopback is not slow, and send whole gradients. Therefore the callbacks
  contain `lowbw.SparsityWarmup(begin_step=20, steps=20, sparsity=[0.9, 0.99])`. local_sgd has its defaults.
- **Bytes**: the bytes that ddp would have sent, divided by the bytes sent, over the whole run including dense steps.
  The callbacks contain `lowbw.TrafficMonitor()`.

{environment}.
"""


def ours_alone(results: dict[str, Any]) -> list[str]:
    """Return the runs that failed where ddp did not."""
    return [
        f"{client} with {way}"
        for client, ways in results["runs"].items()
        for way in WAYS
        if "error" in ways.get(way, {}) and "error" not in ways.get("ddp", {}) and not is_refused(ways[way])
    ]


def is_refused(outcome: dict[str, Any]) -> bool:
    """Return whether the strategy has refused the run, with an error that names the way out."""
    return "ConfigurationError" in outcome.get("error", "")


def main() -> None:
    known = clients()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"of {', '.join(known)}; default: what is missing")
    parser.add_argument("--again", action="store_true", help="forget what is there")
    options = parser.parse_args()
    if unknown := set(options.clients) - set(known):
        parser.error(f"no such client: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    os.environ.update(ENVIRONMENT)
    if options.again:
        RESULTS.unlink(missing_ok=True)
    for client in options.clients or known:
        stored = read()["runs"].get(client, {})
        for way in WAYS:
            if way in stored and not options.clients:
                continue
            outcome = run(client, way)
            print(f"{client} {way}: {outcome.get('error') or outcome['loss']} ({outcome['seconds']} s)", flush=True)
            keep(client, way, {"version": version(known[client]["project"]), **outcome})
    results = read()
    DOCUMENT.write_text(document(results))
    failures = ours_alone(results)
    if failures:
        sys.exit(f"Failures that ddp does not have: {', '.join(failures)}.")


def read() -> dict[str, Any]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {"runs": {}}


def keep(client: str, way: str, outcome: dict[str, Any]) -> None:
    """Store a run; those that another process has stored meanwhile stay."""
    runs = read()["runs"]
    runs.setdefault(client, {})[way] = outcome
    RESULTS.write_text(json.dumps({"environment": describe_environment(), "runs": runs}, indent=1) + "\n")


def describe_environment() -> dict[str, str]:
    packages = ("lightning-lowbw", "torch", "lightning", "pytorch-lightning")
    versions = {package: version(package) for package in packages}
    return {**versions, "Python": platform.python_version(), "date": time.strftime("%Y-%m-%d")}


if __name__ == "__main__":
    main()
