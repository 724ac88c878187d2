"""Two ranks that share one GPU train over a slow link, through NCCL's sockets: `make gpu-lab OUT=folder`.

    python benchmarks/gpu_lab.py --out folder                 # at most nine minutes; goes on where it was stopped
    python benchmarks/gpu_lab.py --out folder --device cpu    # the same with gloo and a small model: that it runs

Each rank is a node of the lab: a network namespace with a token bucket. Where there are no namespaces, the bucket lies
in front of the sockets of each process (token_bucket.c), without latency. The model is a decoder of GPT-2's size, in
bf16-mixed, with fused AdamW, on text that every machine has. Rows, in this order: the step without communication; at
1 and at 10 Gb/s the step of each method; curves of the loss at 10 Gb/s, of 500 steps or as many as a minute has; and
what is said when one rank raises an error while the other is in a collective. folder/gpu_lab.json, gpu_lab.md and
gpu_lab.png are written anew after each row.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import lightning_lowbw as lowbw
from benchmarks.beside_ddp.tasks import Row, be_quiet
from benchmarks.contestants import COMMON, NO_COMMUNICATION, HookStrategy, power_sgd
from benchmarks.harness import describe_environment
from benchmarks.headline import Fused
from lightning_lowbw.strategies.auto_choice import NUM_STEPS
from lightning_lowbw.tools.lab import LabError, Network, parse_rate
from lightning_lowbw.tools.lab.launcher import MASTER_PORT
from lightning_lowbw.tools.lab.network import INTERFACE, read_sent_bytes
from lightning_lowbw.tools.zoo import ByteLanguageModel, StdlibText
from lightning_lowbw.tools.zoo.optimizers import ScheduleName

NUM_NODES = 2
TOTAL_S = 520.0
LINKS: dict[str, tuple[str, float]] = {"unlimited": ("unlimited", 0.0)}  # rate, and round-trip time in milliseconds
LINKS |= {"1 Gb/s, 0.5 ms": ("1gbit", 0.5), "10 Gb/s, 0.1 ms": ("10gbit", 0.1)}
# Layers, width, heads, crops of a rank and their length: 126M parameters; on a CPU 0.7M.
SIZES = {"cuda": (13, 896, 14, 8, 1024), "cpu": (3, 128, 4, 4, 64)}
METHODS: dict[str, Callable[[], Any]] = {
    "ddp": lambda: DDPStrategy(**COMMON),
    "ddp, fp16 hook": lambda: HookStrategy(ddp_comm_hook=default_hooks.fp16_compress_hook, **COMMON),
    "ddp, PowerSGD rank 2 hook": lambda: power_sgd(2),
    "int8": lambda: lowbw.Strategy(lowbw.QuantizedGradients("int8"), **COMMON),
    "dgc, 0.1 %": lambda: lowbw.DGCStrategy(sparsity=[0.999], **COMMON),
    "lowbw": lambda: lowbw.AutoStrategy(**COMMON),
    "local SGD, hidden": lambda: lowbw.LocalSGDStrategy(8, begin_step=0, delay_steps=7, **COMMON),
}
FLOOR = {"no communication": NO_COMMUNICATION.make, "ddp": METHODS["ddp"]}
CURVES: dict[str, Callable[[], Any]] = {
    "ddp, fp16 hook": METHODS["ddp, fp16 hook"],
    "dgc": lambda: lowbw.DGCStrategy(**COMMON),
    "lowbw": METHODS["lowbw"],
}
ENDS = {"int8": lambda: lowbw.Strategy(lowbw.QuantizedGradients("int8"), timeout=FAULT_TIMEOUT_S, **COMMON)}
PLANNED_STEPS = 20_000  # of which `lowbw` knows; few are taken
UNTIMED, WINDOW_S, LEAST, MOST = NUM_STEPS + 3, 8.0, 8, 64  # steps before those that are timed, and how many of these
CURVE_STEPS, CURVE_S, LOOK = 500, 60.0, 20  # every how many steps the ranks look at the clock
FAULT_STEP, FAULT_TIMEOUT_S = 4, 20
LEAST_S = 30.0  # in which ranks start, and take a few steps
TAIL = 30  # lines of a log that are kept of a failure
RATE = "TOKEN_BUCKET_RATE"
SOURCE = Path(__file__).with_name("token_bucket.c")


# A rank ---------------------------------------------------------------------------------------------------------------


def sent_bytes() -> int:
    """Return what this node has sent, by the counter of its interface, or of the bucket before its sockets."""
    if RATE in os.environ:
        counter = ctypes.CDLL(None).token_bucket_sent
        counter.restype = ctypes.c_uint64
        return int(counter())
    sent = read_sent_bytes(INTERFACE)
    assert sent is not None, f"no interface {INTERFACE}"
    return sent


def settle(trainer: pl.Trainer) -> None:
    """Wait for the device and for the other rank."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    trainer.strategy.barrier()


class Timed(pl.Callback):
    """Time steps one by one, and count the bytes; as many as take about `WINDOW_S`, the same on both ranks."""

    def __init__(self) -> None:
        self.clock: list[float] = []
        self.num_timed, self.bytes_per_step = 0, 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        step = trainer.global_step
        if step == UNTIMED:
            step_s = (time.perf_counter() - self.started) / 2
            self.num_timed = trainer.strategy.broadcast(int(min(MOST, max(LEAST, WINDOW_S / step_s))))
        if step in (UNTIMED - 2, UNTIMED):
            settle(trainer)
            self.started, self.before = time.perf_counter(), sent_bytes()
        if step >= UNTIMED:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.clock.append(time.perf_counter())
        if self.num_timed and step == UNTIMED + self.num_timed:
            settle(trainer)
            self.bytes_per_step = (sent_bytes() - self.before) / self.num_timed
            trainer.should_stop = True

    def row(self) -> Row:
        steps_s = [after - before for before, after in zip(self.clock, self.clock[1:], strict=False)]
        return {"steps_s": [round(each, 5) for each in steps_s], "bytes_per_step": round(self.bytes_per_step)}


class Curve(pl.Callback):
    """Keep losses and their times, until both ranks stop."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.clock: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))
        self.clock.append(time.perf_counter())
        if len(self.clock) % LOOK == 0:
            trainer.should_stop = trainer.strategy.broadcast(self.clock[-1] - self.clock[0] > CURVE_S)

    def row(self) -> Row:
        seconds = [round(clock - self.clock[0], 3) for clock in self.clock]
        return {"losses": [round(loss, 4) for loss in self.losses], "seconds": seconds}


class Fault(pl.Callback):
    """Raise an error on the last rank."""

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == FAULT_STEP and trainer.global_rank == NUM_NODES - 1:
            raise RuntimeError("the planned error")

    def row(self) -> Row:
        return {}


def train_rank(job: Row, path: Path) -> None:
    """Train, on this rank, what the job lists; rank 0 appends a line of JSON for each row."""
    be_quiet()
    device = job["device"]
    layers, width, heads, crops, length = SIZES[device]
    for kind, link, name in job["rows"]:
        if os.environ["RANK"] == "0":
            print(f"{kind}, {link}, {name}", flush=True)
        pl.seed_everything(0, workers=True, verbose=False)
        schedule: ScheduleName = "one_cycle" if kind == "curve" else "constant"
        model = ByteLanguageModel(width, layers, heads, optimizer="adamw", lr=6e-4, schedule=schedule)
        watching = {"step": Timed, "curve": Curve, "fault": Fault}[kind]()
        strategy = {"step": METHODS | FLOOR, "curve": CURVES, "fault": ENDS}[kind][name]()
        trainer = pl.Trainer(
            strategy=strategy,
            accelerator="gpu" if device == "cuda" else "cpu",
            devices=1,
            num_nodes=NUM_NODES,
            precision="bf16-mixed",
            max_steps=CURVE_STEPS if kind == "curve" else PLANNED_STEPS,
            max_epochs=-1,
            callbacks=[Fused(), watching],
            limit_val_batches=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, StdlibText(batch_size=crops, context=length))
        auto = getattr(trainer.strategy, "auto", None)
        chosen = auto.chosen if auto is not None else None
        row = {
            "kind": kind,
            "link": link,
            "method": name,
            "parameters": sum(each.numel() for each in model.parameters()),
            "chosen": chosen and chosen.name,
            "predicted_s": chosen and chosen.mean_s,
            **watching.row(),
        }
        if os.environ["RANK"] == "0":
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")
        del trainer, model, strategy
        gc.collect()


# Both ranks -----------------------------------------------------------------------------------------------------------


def rows_of() -> list[list[str]]:
    """Return what is to be measured: kind, link, method."""
    slow, fast = list(LINKS)[1:]
    steps = [["step", "unlimited", name] for name in FLOOR]
    steps += [["step", link, name] for link in (slow, fast) for name in METHODS]
    return [*steps, *(["curve", fast, name] for name in CURVES), ["fault", fast, "int8"]]


def has_namespaces() -> str:
    """Return "" if there are network namespaces here, else why not."""
    try:
        with Network([None] * NUM_NODES):
            return ""
    except (LabError, OSError) as error:
        return str(error)


def build_bucket(out: Path) -> Path:
    """Compile the token bucket; return the library."""
    library = out / "token_bucket.so"
    compiler = [os.environ.get("CC", "cc"), "-O2", "-shared", "-fPIC"]
    subprocess.run([*compiler, "-o", str(library), str(SOURCE), "-ldl", "-lpthread"], check=True)
    return library


@contextmanager
def network_of(link: str, library: Path | None) -> Iterator[tuple[list[list[str]], Row]]:
    """Yield what goes before the command of each node, and the environment of its network."""
    rate, rtt_ms = LINKS[link]
    if library is None:
        with Network([parse_rate(rate)] * NUM_NODES, rtt_ms=rtt_ms) as network:
            place = {"MASTER_ADDR": network.address(0), "MASTER_PORT": str(MASTER_PORT)}
            yield [network.enter(node) for node in range(NUM_NODES)], {**place, "NCCL_SOCKET_IFNAME": INTERFACE}
            return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "NCCL_SOCKET_IFNAME": "lo"}
    yield [[]] * NUM_NODES, {**place, "LD_PRELOAD": str(library), RATE: str((parse_rate(rate) or 0) / 8)}


def run(command: list[str], prefixes: list[list[str]], place: Row, log: Any, limit_s: float) -> int:
    """Run the ranks, a share of the cores each; return the first bad exit status, 124 where the time was over.

    Where one has failed the other has a time to say what it sees.
    """
    cores, ranks = sorted(os.sched_getaffinity(0)), list[subprocess.Popen[bytes]]()
    share = max(1, len(cores) // NUM_NODES)
    for rank, prefix in enumerate(prefixes):
        number = {name: str(rank) for name in ("RANK", "GROUP_RANK", "NODE_RANK")}
        world = {"WORLD_SIZE": str(NUM_NODES), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "lab"}
        nccl = {"NCCL_HOSTID": f"node{rank}", "NCCL_NET": "Socket", "GLOO_SOCKET_IFNAME": place["NCCL_SOCKET_IFNAME"]}
        options: Row = {"stdout": log, "stderr": log, "start_new_session": True}
        options["env"] = {**os.environ, **number, **world, **nccl, "OMP_NUM_THREADS": str(share), **place}
        options["preexec_fn"] = partial(os.sched_setaffinity, 0, cores[rank * share :][:share] or cores)
        ranks.append(subprocess.Popen([*prefix, *command], **options))
    end = time.monotonic() + limit_s
    failed = False
    try:
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < end:
            if not failed and any(rank.poll() for rank in ranks):
                failed, end = True, min(end, time.monotonic() + 2 * FAULT_TIMEOUT_S)
            time.sleep(0.05)
        if all(rank.poll() is None for rank in ranks):
            return 124
        return next((rank.returncode for rank in ranks if rank.poll()), 0)
    finally:
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()


def measure(results: Row, out: Path, device: str, limit_s: float) -> None:
    """Measure what is missing, link by link; a row that fails is said, and the others go on."""
    reason, deadline = has_namespaces(), time.monotonic() + limit_s
    results["network"] = f"a token bucket before the sockets, no latency ({reason})" if reason else "network namespaces"
    library = build_bucket(out) if reason else None
    while todo := [row for row in rows_of() if row not in results["done"]]:
        left_s = deadline - time.monotonic()
        if left_s < LEAST_S:
            print(f"No time is left for {len(todo)} rows: start it again with the same folder.")
            return
        kind, link, _ = todo[0]
        together = [row for row in todo if row[:2] == [kind, link]]
        lines, given, log_path = out / "rows.jsonl", out / "job.json", out / f"{kind} {LINKS[link][0]}.log"
        lines.unlink(missing_ok=True)
        given.write_text(json.dumps({"device": device, "rows": together}))
        command, started = [sys.executable, __file__, "--rank", str(given), str(lines)], time.monotonic()
        with log_path.open("wb") as log, network_of(link, library) as (prefixes, place):
            status = run(command, prefixes, place, log, left_s)
        rows = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
        results["rows"] += rows
        results["done"] += together[: len(rows)]
        if len(rows) < len(together) and time.monotonic() < deadline:  # not for want of time
            failed, seconds = together[len(rows)], round(time.monotonic() - started)
            tail = log_path.read_text(errors="replace").splitlines()[-TAIL:]
            results["done"].append(failed)
            results["failures"].append({"row": failed, "status": status, "s": seconds, "tail": tail})
        write(results, out)
        print(f"{kind}, {link}: {len(rows)} of {len(together)} rows, status {status}", flush=True)


# What is written ------------------------------------------------------------------------------------------------------


def write(results: Row, out: Path) -> None:
    """Write the results, the page and the plot."""
    path = out / "gpu_lab.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    environment = ", ".join(f"{name} {value}" for name, value in results["environment"].items())
    lines = ["# Two ranks on one GPU, over a slow link", "", " ".join(__doc__.split("\n\n")[-1].split()), ""]
    lines += [f"Network: {results['network']}. {environment}.", ""]
    lines += ["| link | method | s per step (quartiles) | x ddp | x no communication | MB per step | predicted |"]
    lines += ["| --- " * 7 + "|"]
    steps = [row for row in results["rows"] if row["kind"] == "step"]
    floor = next((statistics.median(row["steps_s"]) for row in steps if row["method"] in FLOOR), None)
    for row in steps:
        quartiles = statistics.quantiles(row["steps_s"], n=4)
        dense = [each for each in steps if (each["link"], each["method"]) == (row["link"], "ddp")]
        to_ddp = f"{statistics.median(dense[0]['steps_s']) / quartiles[1]:.2f}" if dense else ""
        chosen = f" ({row['chosen']})" if row["chosen"] else ""
        predicted = f"{row['predicted_s']:.3f}, the mean of {PLANNED_STEPS:,} steps" if row["predicted_s"] else ""
        cells = (
            row["link"],
            row["method"] + chosen,
            f"{quartiles[1]:.3f} ({quartiles[0]:.3f} to {quartiles[2]:.3f})",
            to_ddp,
            f"{quartiles[1] / floor:.2f}" if floor else "",
            f"{row['bytes_per_step'] / 1e6:.1f}",
            predicted,
        )
        lines.append(f"| {' | '.join(cells)} |")
    curves = [row for row in results["rows"] if row["kind"] == "curve"]
    if curves:
        lines += ["", "| curve | steps | s | last loss, mean of 20 |", "| --- | --- | --- | --- |"]
        lines += [
            f"| {row['method']}, {row['link']} | {len(row['losses'])} | {row['seconds'][-1]:.0f} | "
            f"{statistics.fmean(row['losses'][-20:]):.3f} |"
            for row in curves
        ]
        plot(curves, out / "gpu_lab.png")
    for failure in results["failures"]:
        what = ", ".join(failure["row"])
        planned = "planned: " if failure["row"][0] == "fault" else ""
        lines += ["", f"{planned}{what}: status {failure['status']} after {failure['s']:.0f} s with its start.", "```"]
        lines += [*failure["tail"], "```"]
    path.with_suffix(".md").write_text("\n".join([*lines, ""]))


def plot(curves: list[Row], path: Path) -> None:
    """Draw losses over seconds, if there is matplotlib."""
    with suppress(ImportError):
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
        for row in curves:
            mean = torch.tensor(row["losses"]).unfold(0, min(20, len(row["losses"])), 1).mean(1).tolist()
            axes.plot(row["seconds"][-len(mean) :], mean, label=row["method"])
        axes.set(xlabel=f"seconds at {curves[0]['link']}", ylabel="training loss, mean of 20 steps")
        axes.legend(frameon=False)
        figure.savefig(path, dpi=150)
        pyplot.close(figure)


def main() -> None:
    """Measure what is missing in the folder."""
    if sys.argv[1:2] == ["--rank"]:
        train_rank(json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--device", choices=SIZES, default="cuda")
    parser.add_argument("--limit-s", type=float, default=TOTAL_S)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("There is no CUDA device; --device cpu shows that the program runs.")
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "gpu_lab.json"
    results: Row = json.loads(path.read_text()) if path.exists() else {"rows": [], "done": [], "failures": []}
    results["environment"] = describe_environment(None)
    if options.device == "cuda":
        results["environment"]["gpu"] = torch.cuda.get_device_name()
    measure(results, options.out.resolve(), options.device, options.limit_s)
    write(results, options.out)


if __name__ == "__main__":
    main()
