"""Groups that are killed, stopped, cut off and slow: the cost of each fault for the other groups, and the goodput.

    .venv/bin/python benchmarks/elastic.py                          # 25 minutes: each fault, and the time without any
    .venv/bin/python benchmarks/elastic.py --state-mb 200           # half an hour: with a large state, no slow groups
    .venv/bin/python benchmarks/elastic.py --only alone --minutes 60     # many faults
    .venv/bin/python benchmarks/elastic.py --only sharded --minutes 60   # the same, two processes in each group
    .venv/bin/python benchmarks/elastic.py --only restart --minutes 60   # the same faults; restarts the whole job
    .venv/bin/python benchmarks/elastic.py --report                 # table and plot of what there is

The cases run one after the other, because they share the cores. Each group is a program on a node of the lab, and
trains a small transformer with `sparse_loco_elastic`; the lighthouse has a node of its own. Loss, messages and faults
are real, the time of a step is a wait. Writes benchmarks/results/elastic.json, .md and .png; a case that is measured
again replaces its row.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import logging
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

import lightning_lowbw as lowbw
from benchmarks.harness import RESULTS, describe_environment
from lightning_lowbw.elastic.torchft_membership import TorchftMembership
from lightning_lowbw.presets import preset
from lightning_lowbw.tools.lab import Network, parse_rate
from lightning_lowbw.tools.lab.network import INTERFACE
from lightning_lowbw.tools.zoo import ByteLanguageModel, StdlibText

RATE, RTT_MS = "100mbit", 50.0
K_STEPS, STEP_S = 20, 0.2  # of a round; of a step, without the exchange
DELAY_STEPS = 5  # that hide an exchange
STEPS = 480
PORT = 29510  # the lighthouse's; for a restarted job that of torchrun's rendezvous
GRACE_S, HEARTBEAT_S = 10, 1.5  # the lighthouse's times
AWAY_S = 30.0  # for which a group is stopped or cut off
CHECKPOINT_STEPS = 5 * K_STEPS  # of the job that is restarted
FAULTS_PER_HOUR = 30
PATIENCE_S = 300.0  # for a training to begin, and to end after the last event
NAMES = "abcd"
LR = 2e-3
FAULTS = ("kill", "stop", "stop_inside", "cut")  # of events
SAME = ("digest", "seen", "averaged")  # after a round, on all
NOISE_S = 0.5  # of a round
POINT_S = 15.0  # between points of a curve
NUM_LOSSES = 5  # the last, whose mean is compared
NOTHING_ELSE: dict[str, Any] = {"limit_val_batches": 0, "logger": False, "enable_checkpointing": False}
NOTHING_ELSE |= {"enable_progress_bar": False, "enable_model_summary": False}
Row = dict[str, Any]
Event = tuple[float, str, str]  # seconds after all groups have averaged once, what happens, to which group


@dataclass(frozen=True)
class Case:
    """A training, and what happens to it.

    Attributes:
        title: for the table.
        groups: the groups that begin; an event starts any other group.
        events: the events, in their order.
        slow: a group, and how many times slower it is.
        round_s: length of a round, in place of `K_STEPS`.
        is_elastic: whether each group is a job; else all groups are one job.
        minutes: time after which all groups are ended; until then torchrun, or `elastic.run`, restarts them. None: the
            groups end after `STEPS`.
        ballast: more elements of the state, in millions, which no step changes.
        delay_steps: the method's.
        size: processes of each group; more than one shard the model.
    """

    title: str
    groups: str = "abc"
    events: Sequence[Event] = ()
    slow: tuple[str, int] = ("", 1)
    round_s: float | None = None
    is_elastic: bool = True
    minutes: float | None = None
    ballast: float = 0.0
    delay_steps: int = DELAY_STEPS
    size: int = 1


CASES = {
    "undisturbed": Case("none"),
    "shown": Case("none, rounds not hidden", delay_steps=0),
    "kill": Case(
        "one killed, twice; back after 20 s",
        events=[(13.7, "kill", "c"), (33.7, "start", "c"), (55.2, "kill", "c"), (75.2, "start", "c")],
    ),
    "join": Case("a fourth joins", events=[(30.0, "start", "d")]),
    "stop": Case("one stopped for 30 s, between rounds", events=[(20.0, "stop", "c"), (50.0, "continue", "c")]),
    "stop_inside": Case(
        "one stopped for 30 s, inside a collective", events=[(20.0, "stop_inside", "c"), (50.0, "continue", "c")]
    ),
    "link": Case("one link down for 30 s", events=[(20.0, "cut", "c"), (50.0, "connect", "c")]),
    "lighthouse": Case(
        "the lighthouse killed; back after 10 s", events=[(20.0, "kill", "lighthouse"), (30.0, "start", "lighthouse")]
    ),
    "half": Case("one at half speed", slow=("c", 2), round_s=K_STEPS * STEP_S),
    "seventh": Case("one at a seventh of the speed", slow=("c", 7), round_s=K_STEPS * STEP_S),
    "fixed": Case("none, not elastic", is_elastic=False),
}
LONG = {
    "alone": Case("elastic", groups=NAMES, minutes=60.0),
    "sharded": Case("elastic, two processes in each group, FSDP", groups=NAMES, minutes=60.0, size=2),
    "restart": Case("restart of all from the last checkpoint", groups=NAMES, is_elastic=False, minutes=60.0),
}


def random_faults(minutes: float, faults_per_hour: float, seed: int = 0) -> list[Event]:
    """Return faults at random moments: four kills for each stop; a killed group starts again at once."""
    drawn, events = random.Random(seed), []
    for _ in range(round(minutes * faults_per_hour / 60)):
        at_s, group = drawn.uniform(0, 60 * minutes), drawn.choice(NAMES)
        if drawn.random() < 0.2:
            events += [(at_s, "stop", group), (at_s + AWAY_S, "continue", group)]
        else:
            events += [(at_s, "kill", group), (at_s, "start", group)]
    return sorted(events, key=lambda event: event[0])


# One group, in a process of its own ----------------------------------------------------------------------------------


def lr_factor(step: int) -> float:
    """Return what the learning rate is multiplied with in a step: all groups must take the same steps to have it."""
    return min(1.0, (step + 1) / 50) / (1 + step / 1000)


class Model(ByteLanguageModel):
    """With steps that take as long on each machine.

    Args:
        step_s: of forward and backward, and of waiting.
        ballast: as of `Case`.
    """

    def __init__(self, step_s: float = 0.0, ballast: float = 0.0) -> None:
        super().__init__(d_model=96, num_layers=2)
        self.step_s = step_s
        if ballast:
            self.ballast = torch.nn.Parameter(torch.zeros(round(1e6 * ballast)))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.began_s = time.monotonic()
        return super().training_step(batch, batch_idx)

    def on_after_backward(self) -> None:
        time.sleep(max(0.0, self.began_s + self.step_s - time.monotonic()))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=LR)
        return [optimizer], [{"scheduler": LambdaLR(optimizer, lr_factor), "interval": "step"}]


class Log(pl.Callback):
    """Write a line of JSON for each round, with a digest of the weights that all have after it.

    Args:
        case: the case that has the group.
        folder: for all files.
        group: its name.
    """

    def __init__(self, case: Case, folder: Path, group: str) -> None:
        self.case, self.folder, self.group = case, folder, group
        self.path = folder / f"{group}.jsonl"
        self.num_steps = self.num_rounds = 0
        self.after_s = 0.0  # the last step
        self.took_s: list[float] = []

    def write(self, kind: str, **fields: Any) -> None:
        line = {"group": self.group, "kind": kind, "at_s": time.monotonic(), **fields}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.is_global_zero and not self.after_s:
            self.num_rounds, self.after_s = trainer.strategy.replicas[0].num_averages, time.monotonic()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if not trainer.is_global_zero:
            return
        self.took_s.append(time.monotonic() - self.after_s)
        self.after_s, worker = time.monotonic(), trainer.strategy.replicas[0]
        self.num_steps += 1
        if worker.num_averages == self.num_rounds:
            return
        contributed = getattr(worker, "contributed", dict.fromkeys(self.case.groups, worker.num_averages))
        is_in = contributed.get(self.group) == worker.num_averages
        step_s = statistics.median(self.took_s)
        step_of_anchor = trainer.global_step - (worker.fragments[0].steps or 0)  # without the steps that hid the round
        weights = {worker.params.name_of(p): start for p, start in worker.replica.start.items()}
        weights.pop("ballast", None)
        self.write(
            "round",
            round=worker.num_averages,
            step=trainer.global_step,
            step_of_anchor=step_of_anchor,
            steps=self.num_steps if is_in else 0,  # that were averaged
            step_s=step_s,
            round_s=max(0.0, sum(self.took_s) - len(self.took_s) * step_s),  # in all steps, whichever has waited
            lr=trainer.optimizers[0].param_groups[0]["lr"],
            seen=getattr(worker, "tokens_seen", 0.0),
            averaged="".join(sorted(name for name, last in contributed.items() if last == worker.num_averages)),
            digest=hashlib.sha256(b"".join(each.numpy().tobytes() for each in weights.values())).hexdigest()[:16],
        )
        saved = self.folder / f"{worker.num_averages}.pt"
        if self.case.is_elastic and self.case.minutes is None and not saved.exists():
            torch.save({"seen": worker.tokens_seen, "weights": weights}, saved)
        self.num_rounds, self.took_s = worker.num_averages, []
        self.num_steps = 0 if is_in else self.num_steps
        if not self.case.is_elastic and step_of_anchor % CHECKPOINT_STEPS == 0:
            trainer.save_checkpoint(self.folder / f"{trainer.global_step:09d}.ckpt")


def stop_inside(mark: Path) -> None:
    """Let this process stop inside its next collective, once a file is there."""
    collective: Any = TorchftMembership.collective

    def stopping(membership: TorchftMembership, fn: Any) -> Any:
        if mark.exists():
            mark.unlink()
            os.kill(os.getpid(), signal.SIGSTOP)
        return collective(membership, fn)

    TorchftMembership.collective = stopping  # type: ignore[method-assign, assignment]


def train_group(case: Case, folder: Path, group: str) -> None:
    """Train one group, or one rank of a job that is not elastic, to the end."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    log = Log(case, folder, group)
    log.write("begin", pid=os.getpid())  # of each process of the group
    method = preset("sparse_loco").replace(begin_step=0, k_steps=K_STEPS, delay_steps=case.delay_steps)
    pl.seed_everything(0, verbose=False)
    model = Model(STEP_S * (case.slow[1] if group == case.slow[0] else 1), case.ballast)
    data = StdlibText(batch_size=8)
    strategy: Any = lowbw.Strategy(method)
    checkpoint = None
    if case.is_elastic:
        stop_inside(folder / f"stop {group}")
        kind = lowbw.ElasticStrategy if case.size == 1 else lowbw.ElasticShardedStrategy
        strategy = kind(method, round_s=case.round_s, group=group)
    elif case.minutes is not None:
        checkpoint = max(map(str, folder.glob("*.ckpt")), default=None)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=case.size,
        num_nodes=1 if case.is_elastic else int(os.environ["WORLD_SIZE"]),
        max_steps=STEPS if case.minutes is None else 10**7,
        max_epochs=-1,
        callbacks=[log],
        **NOTHING_ELSE,
    )
    trainer.fit(model, data, ckpt_path=checkpoint)
    log.write("end", step=trainer.global_step)


# All groups ----------------------------------------------------------------------------------------------------------


class Site:
    """The nodes, the lighthouse, and the programs of one case.

    Args:
        network: with a node for each of `NAMES`, and one for the lighthouse.
        folder: for all files.
        name: of the case.
        case: itself.
    """

    def __init__(self, network: Network, folder: Path, name: str, case: Case) -> None:
        self.network, self.folder, self.name, self.case = network, folder, name, case
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        """Start a group, the first or another time, or the lighthouse. What torchrun has started it starts again."""
        node = len(NAMES) if name == "lighthouse" else NAMES.index(name)
        if name in self.processes and self.case.minutes is not None:
            return
        if name == "lighthouse":
            command = [
                str(Path(sys.executable).with_name("torchft_lighthouse")),
                "--bind",
                f"{self.network.address(node)}:{PORT}",
                "--min_replicas",
                "2",
            ]
            command += ["--join_timeout_ms", f"{1000 * GRACE_S}", "--heartbeat_timeout_ms", f"{1000 * HEARTBEAT_S:.0f}"]
        else:
            command = [
                sys.executable,
                *self._launcher(node),
                __file__,
                "--group",
                self.name,
                str(self.folder),
                name,
                f"{self.case.ballast}",
            ]
        with (self.folder / f"{name}.txt").open("ab") as output:
            self.processes[name] = subprocess.Popen(
                [*self.network.enter(node), *command],
                env={
                    **os.environ,
                    "GLOO_SOCKET_IFNAME": INTERFACE,
                    "TORCHFT_LIGHTHOUSE": f"http://{self.network.address(len(NAMES))}:{PORT}",
                    "RUST_LOG": "warn",
                    # With torchrun's store ranks find addresses of an earlier start, as its agents count these apart.
                    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
                    "OMP_NUM_THREADS": "1",
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _launcher(self, node: int) -> list[str]:
        if self.case.is_elastic and self.case.minutes is None:
            return []
        if self.case.is_elastic:
            return ["-m", "lightning_lowbw.elastic.run", f"--nproc-per-node={self.case.size}", "--max-restarts=10000"]
        options = {
            "nnodes": len(self.case.groups),
            "nproc-per-node": 1,
            "max-restarts": 10_000,
            "rdzv-backend": "c10d",
            "rdzv-endpoint": f"{self.network.address(0)}:{PORT}",
            "rdzv-conf": f"is_host={node == 0}",  # which it would find by the names of hosts
            "local-addr": self.network.address(node),
        }
        return ["-m", "torch.distributed.run", *(f"--{name}={each}" for name, each in options.items())]

    def act(self, what: str, name: str) -> None:
        """Let an event happen."""
        if what == "start":
            self.start(name)
        elif what in ("cut", "connect"):
            state = "down" if what == "cut" else "up"
            enter = self.network.enter(NAMES.index(name))
            subprocess.run([*enter, "ip", "link", "set", INTERFACE, state], check=True)
        elif what == "stop_inside":
            mark = self.folder / f"stop {name}"
            mark.touch()
            wait_for(lambda: not mark.exists(), "a group inside a collective")
        else:
            number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "continue": signal.SIGCONT}[what]
            pid = self.processes[name].pid
            if self.case.minutes is not None:
                pid = [line["pid"] for line in self.lines() if (line["group"], line["kind"]) == (name, "begin")][-1]
            with contextlib.suppress(ProcessLookupError):  # it is being started again
                os.kill(pid, number)
            if what == "kill" and self.case.minutes is None:
                self.processes[name].wait()

    def lines(self) -> list[Row]:
        """Return the lines of all groups, in the order of time."""
        logs = [path.read_text().splitlines(keepends=True) for path in self.folder.glob("*.jsonl")]
        found = [json.loads(line) for line in chain(*logs) if line.endswith("\n")]
        return sorted(found, key=lambda line: line["at_s"])

    def end(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self.network.end_processes()


def wait_for(is_so: Callable[[], bool], what: str) -> None:
    """Wait for a condition.

    Raises:
        TimeoutError: it is not met.
    """
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_so():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"Waited for {what} for {PATIENCE_S:g} s.")
        time.sleep(0.05)


def run(name: str, case: Case, folder: Path) -> Row:
    """Train a case, in a folder that is made anew; return its lines, and when each event was."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    happened = []
    with Network([parse_rate(RATE)] * (len(NAMES) + 1), rtt_ms=RTT_MS) as network:
        site = Site(network, folder, name, case)
        try:
            for each in (["lighthouse"] if case.is_elastic else []) + list(case.groups):
                site.start(each)

            def have_all(kind: str, groups: set[str]) -> bool:
                for each, process in site.processes.items():
                    if process.poll():
                        raise RuntimeError(f"{each} has ended with {process.poll()}; see {folder}/{each}.txt")
                return {line["group"] for line in site.lines() if line["kind"] == kind} >= groups

            wait_for(lambda: have_all("round", set(case.groups)), "a round of all groups")
            began_s = time.monotonic()
            late_s = 0.0
            for at_s, what, group in case.events:
                time.sleep(max(0.0, began_s + late_s + at_s - time.monotonic()))
                site.act(what, group)
                happened.append((time.monotonic(), what, group))
                if what == "stop_inside":  # which has waited
                    late_s = happened[-1][0] - began_s - at_s
            if case.minutes is None:
                groups = set(case.groups) | {each for _, what, each in case.events if what == "start"} - {"lighthouse"}
                wait_for(lambda: have_all("end", groups), "the end of all groups")
            else:
                time.sleep(max(0.0, began_s + 60 * case.minutes - time.monotonic()))
            found = {"began_s": began_s, "ended_s": time.monotonic(), "events": happened, "lines": site.lines()}
            (folder / "found.json").write_text(json.dumps(found))
            return found
        finally:
            site.end()


# Results -------------------------------------------------------------------------------------------------------------


def summarise(found: Row, case: Case) -> Row:
    """Return the numbers of a case."""
    rounds = [line for line in found["lines"] if line["kind"] == "round"]
    exchange_s = statistics.median(line["round_s"] for line in rounds)
    step_s = statistics.median(line["step_s"] for line in rounds if line["group"] != case.slow[0])
    by_round, by_group = gathered(rounds, "round"), gathered(rounds, "group")
    gaps = [after["at_s"] - before["at_s"] for lines in by_group.values() for before, after in pairwise(lines)]
    differ = {what: [n for n, lines in by_round.items() if len({line[what] for line in lines}) > 1] for what in SAME}
    # A group that has taken the state meanwhile is in the middle of the next round.
    there = gathered([line for line in rounds if line["group"] in line["averaged"]], "round")
    differ["step_of_anchor"] = [n for n, lines in there.items() if len({line["step_of_anchor"] for line in lines}) > 1]
    differ["lr"] = [line["round"] for line in rounds if abs(line["lr"] / LR - lr_factor(line["step"])) > 1e-9]
    faults = [event for event in found["events"] if event[1] in FAULTS or case.groups + event[2] == NAMES]
    ends = [*(event[0] for event in faults[1:]), found["ended_s"]][: len(faults)]
    lost_s, back_s = [], []
    for (at_s, what, name), until_s in zip(faults, ends, strict=True):
        others = [line for line in rounds if line["group"] != name and at_s < line["at_s"] <= until_s]
        lost_s.append(waited_s(others, exchange_s))
        own = [line["at_s"] - at_s for line in by_group.get(name, []) if line["at_s"] > at_s]
        back_s += own[:1] if what == "kill" else []
    return {
        "seconds": found["ended_s"] - found["began_s"],
        "step_s": step_s,
        "exchange_s": exchange_s,
        "round_s": statistics.median(gaps),
        "faults_s": [at_s - found["began_s"] for at_s, *_ in faults],
        "lost_s": lost_s,
        "waited_s": waited_s(rounds, exchange_s),
        "back_s": back_s,
        "num_rounds": max(by_round),
        "contributions": {
            name: sum(name in lines[0]["averaged"] for lines in by_round.values()) for name in sorted(by_group)
        },
        "num_compared": sum(len(lines) > 1 for lines in by_round.values()),
        "differ": {what: numbers for what, numbers in differ.items() if numbers},
        "end_steps": sorted({line["step"] for line in found["lines"] if line["kind"] == "end"}),
        "goodput": goodput(found, len(by_group), step_s, exchange_s),
        "by_steps": goodput(found, len(by_group), step_s, 0.0)[-1][1],
        "state_mb": 4 * case.ballast,
        "with": f"{HEARTBEAT_S:g} s, {'hidden' if case.delay_steps else 'shown'}",
    }


def gathered(lines: Sequence[Row], by: str) -> dict[Any, list[Row]]:
    """Return lines by one of their values."""
    found: dict[Any, list[Row]] = {}
    for line in lines:
        found.setdefault(line[by], []).append(line)
    return found


def waited_s(rounds: Sequence[Row], usual_s: float) -> float:
    """Return the seconds that a group, the one with the most, has lost in rounds that took much longer than usual."""
    lost = dict.fromkeys(NAMES, 0.0)
    for line in rounds:
        more_s = line["round_s"] - usual_s
        lost[line["group"]] += more_s if more_s > NOISE_S else 0.0
    return max(lost.values())


def goodput(found: Row, num_groups: int, step_s: float, exchange_s: float) -> list[tuple[float, float]]:
    """Return times, and up to each the share of the time that groups have spent in steps and exchanges that counted.

    A step and an exchange count as long as usual. A step counts if it was averaged, and once: not again where it is
    repeated after a checkpoint.
    """
    points, useful_s, counted = [(0.0, 0.0)], 0.0, set()
    for line in found["lines"]:
        key = (line["group"], line.get("step"))
        if line["kind"] == "round" and line["at_s"] > found["began_s"] and key not in counted:
            counted.add(key)
            useful_s += line["steps"] * step_s + exchange_s
            if line["at_s"] - found["began_s"] > points[-1][0] + POINT_S:
                points.append((line["at_s"] - found["began_s"], useful_s))
    points.append((found["ended_s"] - found["began_s"], useful_s))
    return [(round(at_s, 1), round(useful_s / num_groups / at_s, 4)) for at_s, useful_s in points[1:]]


def losses(folder: Path, last: int) -> list[tuple[float, float]]:
    """Return tokens seen and validation loss after each of the last rounds."""
    torch.set_num_threads(1)
    data, model = StdlibText(batch_size=64, num_eval=128), Model()
    data.setup("fit")
    found = []
    for path in sorted(folder.glob("*.pt"), key=lambda path: int(path.stem))[-last:]:
        saved = torch.load(path)
        model.load_state_dict(saved["weights"], strict=False)  # metrics have states, too
        with torch.no_grad():
            each = [F.cross_entropy(model(x).flatten(0, 1), y.flatten()).item() for x, y in data.val_dataloader()]
        found.append((saved["seen"], statistics.fmean(each)))
    return found


def loss_beside(curve: list[tuple[float, float]], undisturbed: list[tuple[float, float]]) -> float:
    """Return by how many percent the last losses exceed the losses of the undisturbed run after as many tokens."""
    compared = [point for point in curve if point[0] <= undisturbed[-1][0]][-NUM_LOSSES:]
    percent = []
    for seen, loss in compared:
        (x0, y0), (x1, y1) = next(pair for pair in pairwise(undisturbed) if pair[1][0] >= seen)
        percent.append(100 * (loss / (y0 + (y1 - y0) * (seen - x0) / (x1 - x0)) - 1))
    return statistics.fmean(percent)


def to_markdown(rows: Row) -> str:
    """Return the table of the faults, and the time without any."""
    undisturbed: Any = rows.get("undisturbed")
    lines = [
        "| fault | heartbeat timeout, rounds | s that the other groups lose, each event | rounds averaged, each group "
        "| loss, then beside it | weights after every round |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in CASES:
        row = rows.get(name)
        if row is None or name == "fixed":
            continue
        beside, usual = "-", rows.get("undisturbed" if row["with"].endswith("hidden") else "shown")
        if usual and row is not usual:
            beside = f"{loss_beside(row['losses'], usual['losses']):+.1f} %"
        cells = [
            CASES[name].title,
            row["with"],
            ", ".join(f"{each:.1f}" for each in row["lost_s"]) or f"{row['waited_s']:.1f} in all rounds",
            ", ".join(f"{number}" for number in row["contributions"].values()) + f" of {row['num_rounds']}",
            f"{row['losses'][-1][1]:.3f}" if row is usual else beside,
            f"differ: {row['differ']}" if row["differ"] or len(row["end_steps"]) > 1 else "equal",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    if undisturbed:
        most_s = GRACE_S + undisturbed["round_s"]
        lines += ["", f"Expected are at most {most_s:.0f} s, the lighthouse's {GRACE_S} and a round."]
    measured = {name: rows[name]["exchange_s"] for name in ("undisturbed", "fixed", "shown") if name in rows}
    if undisturbed:
        titles = {
            "undisturbed": f"hidden by {DELAY_STEPS} steps",
            "fixed": f"not elastic, {rows.get('fixed', {}).get('with', '').rpartition(' ')[2]}",
            "shown": "shown",
        }
        shown = [
            f"{titles[name]}: {each_s:.2f} s, {each_s / STEP_S / K_STEPS:.1%}" for name, each_s in measured.items()
        ]
        of_s = f"of a round of {K_STEPS * STEP_S:.0f} s"
        lines += ["", f"What a round without faults costs beside its steps, {'; '.join(shown)} {of_s}."]
    return "\n".join([*lines, ""])


def goodput_table(rows: Row) -> str:
    """Return a row for each way to go on after a fault; nothing if none has been measured."""
    if not any(name in rows for name in LONG):
        return ""
    lines = [
        "Goodput is the share of the time in steps whose result was kept, each counted with its usual length; "
        '"with rounds" also counts usual averages.',
        "",
        f"| after a fault | heartbeat timeout, rounds | minutes | faults, {FAULTS_PER_HOUR} an hour | steps "
        "| with rounds | s from a kill to the next round of the killed |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in ((name, rows[name]) for name in LONG if name in rows):
        cells = [
            f"{LONG[name].title}, {row['cpu']}",
            row["with"],
            f"{row['seconds'] / 60:.0f}",
            f"{len(row['faults_s'])}",
        ]
        cells += [f"{row['by_steps']:.1%}" if "by_steps" in row else "-", f"{row['goodput'][-1][1]:.1%}"]
        cells += [f"{statistics.median(row['back_s']):.0f}" if row["back_s"] else "-"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def draw(rows: Row, path: Path) -> None:
    """Draw the seconds that the other groups lose, and goodput over time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    shown = [name for name in CASES if rows.get(name, {}).get("lost_s")]
    left.barh([CASES[name].title for name in shown], [max(rows[name]["lost_s"]) for name in shown])
    if "undisturbed" in rows:
        left.axvline(GRACE_S + rows["undisturbed"]["round_s"], color="tab:red", label="goal: at most")
        left.legend()
    left.invert_yaxis()
    left.set(xlabel="seconds lost by the other groups, per event")
    for name in (name for name in LONG if name in rows):
        minutes, parts = zip(*((at_s / 60, part) for at_s, part in rows[name]["goodput"]), strict=True)
        (line,) = right.plot(minutes, parts, label=LONG[name].title)
        right.vlines([at_s / 60 for at_s in rows[name]["faults_s"]], 0, 0.03, color=line.get_color())
    right.set(
        xlabel="minutes; marks are faults", ylabel=f"goodput so far, {FAULTS_PER_HOUR} faults an hour", ylim=(0, 1)
    )
    right.grid(axis="y", alpha=0.3)
    if right.lines:
        right.legend(loc="lower right")
    figure.savefig(path, dpi=120)


def report(results: Row) -> None:
    """Write the tables and the plot."""
    rows, environment = results["rows"], results["environment"]
    numel = sum(p.numel() for p in Model().parameters())
    note = (
        f"`sparse_loco_elastic`, a transformer of {numel / 1e6:.1f}M parameters. "
        f"Groups on one machine of {environment['num_cpus']} cores ({environment['cpu']}), {RATE}, {RTT_MS:g} ms, "
        f"torch {environment['torch']}, {environment['date']}. A step takes {STEP_S:g} s, mostly a wait; a round has "
        f"{K_STEPS} steps, or with a slow group lasts the time of {K_STEPS} steps."
    )
    large, sections = results.get("large", {}), [to_markdown(rows)]
    if large:
        (megabytes,) = {row["state_mb"] for row in large.values()}
        sections += [f"With a state of {megabytes:.0f} MB:", "", to_markdown(large)]
    text = "\n".join([*sections, goodput_table(rows), note, ""])
    (RESULTS / "elastic.md").write_text(text)
    draw(rows, RESULTS / "elastic.png")
    print(text)


def main() -> None:
    """Measure, and keep each row as soon as there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*CASES, *LONG], help="default: all cases without many faults")
    parser.add_argument("--minutes", type=float, default=60.0, help="length of a case with many faults")
    parser.add_argument("--state-mb", type=float, default=0.0, help="of more state, for a table of its own")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    options = parser.parse_args()
    path = RESULTS / "elastic.json"
    # With a large state an exchange is longer than the rounds in seconds.
    names = options.only or [name for name, case in CASES.items() if not (options.state_mb and case.round_s)]
    for name in [] if options.report else names:
        case, folder = {**CASES, **LONG}[name], Path(tempfile.gettempdir()) / "lowbw_elastic" / name
        case = replace(case, ballast=options.state_mb / 4)
        if name in LONG:
            events = random_faults(options.minutes, FAULTS_PER_HOUR)
            case = replace(case, minutes=options.minutes, events=events)
        found = run(name, case, folder)
        row = {**summarise(found, case), "losses": losses(folder, STEPS if name == "undisturbed" else NUM_LOSSES)}
        # Read now: another process may have measured another case meanwhile.
        results = json.loads(path.read_text()) if path.exists() else {"rows": {}}
        results["environment"] = describe_environment()
        results.setdefault("large" if options.state_mb else "rows", {})[name] = {
            **row,
            "cpu": results["environment"]["cpu"],
        }
        path.write_text(json.dumps(results) + "\n")
        shown = {key: value for key, value in row.items() if key not in ("losses", "goodput")}
        print(f"{name}: {shown}, goodput {row['goodput'][-1][1]:.1%}", flush=True)
    report(json.loads(path.read_text()))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--group"]:
        given, group_folder, group_name, group_ballast = sys.argv[2:]
        train_group(replace({**CASES, **LONG}[given], ballast=float(group_ballast)), Path(group_folder), group_name)
    else:
        main()
