"""How many steps local averages need to ddp's loss, times ddp's: N replicas in one process, where no link matters.

    .venv/bin/python benchmarks/steps_to_loss.py             # hours on a core; goes on where it was stopped
    .venv/bin/python benchmarks/steps_to_loss.py --report    # the table of what there is

The replicas have weights and optimizers of their own, and step in turn, each on its batch; averages are those of the
package (`EveryK.outer_step_`, `apply_means_`), and tests/sync/test_steps_to_loss.py compares them with two ranks. `ddp`
steps one model on the mean of N gradients. A schedule of the learning rate is stretched with the steps. The loss is
that of the mean of the replicas on data that is not trained on, and reached with at most `SLACK` times ddp's. Between
the numbers of steps that have been run, the logarithm of the number is interpolated.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from functools import cache, partial
from itertools import chain, pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from benchmarks.beside_ddp.tasks import TASKS, Task, be_quiet, write
from benchmarks.harness import RESULTS, describe_environment
from lightning_lowbw import Compression, EveryK, MuonAdamW, TopK
from lightning_lowbw.comm.collectives import Collectives
from lightning_lowbw.comm.echoes import echo
from lightning_lowbw.schedules.every_k import balance, steps_before
from lightning_lowbw.sync.fragments import apply_means_
from lightning_lowbw.tools.zoo import ByteLanguageModel, StdlibText

Row = dict[str, Any]
SLACK = 1.01
STRETCHES = (1.0, 1.6, 2.5)
MOST_FACTOR = 3.0  # that a line through two numbers may lead to
OUTER = (0.7, 0.6)  # rate and momentum of the first runs
NUM_CROPS, NUM_EVAL = 64_000, 1024


class Simulated(NamedTuple):
    """A task, and ddp's number of steps.

    Attributes:
        goes_on: a run of ddp whose weights it starts from; None: from scratch.
    """

    title: str
    task: Task
    num_steps: int
    goes_on: Row | None = None


def text(lr: float, seed: int = 0) -> Task:
    """Return the transformer of the headline, with AdamW and a peak of the learning rate."""
    return Task(
        lambda: ByteLanguageModel(optimizer="adamw", schedule="one_cycle", lr=lr),
        lambda: StdlibText(batch_size=8, num_train=NUM_CROPS, num_eval=NUM_EVAL, seed=seed),
        "",
    )


SIMULATED = {
    "text": Simulated("transformer, AdamW", text(2e-3), 240),
    "continued": Simulated("the same, continued", text(1e-3, seed=1), 240, {"task": "text", "ranks": 1}),
    "resnet": Simulated("ResNet, SGD", TASKS["resnet"], 240),
    "longer": Simulated("transformer, AdamW, 480 steps", text(2e-3), 480),
}
SHORT = ("text", "continued", "resnet")


# A run ---------------------------------------------------------------------------------------------------------------


def when_of(run: Row) -> EveryK | None:
    """Return the schedule of a run; None is ddp."""
    if run["k"] == 1:
        return None
    lr, momentum = run["outer"] or (None, None)
    outer: Row = {"outer": "nesterov", "outer_lr": lr, "outer_momentum": momentum} if run["outer"] else {}
    numbers = {"delay_steps": run["delay"], "num_fragments": run["fragments"], "mixing": run["mixing"]}
    return EveryK(k_steps=run["k"], begin_step=0, **outer, **numbers)


class Mailbox(Collectives):
    """The messages of replicas that send in turn: each waits until all have sent."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__(is_alone=True)
        self.num_ranks, self.messages = num_ranks, list[Tensor]()

    def begin_all_gather(self, message: Tensor, out: Tensor | None = None) -> Any:
        self.messages = [*(self.messages if len(self.messages) < self.num_ranks else []), message]
        return SimpleNamespace(wait=lambda: torch.stack(self.messages).unsqueeze(0))


class Averages:
    """The averages of replicas in one process.

    Args:
        replicas: the parameters of each, in one order; equal.
        when: the schedule; a fixed k, from the step on in which this is made.
        what: sends the largest elements of the changes, without a delay; None: weights are sent whole.
    """

    def __init__(self, replicas: Sequence[Sequence[Tensor]], when: EveryK, what: TopK | None = None) -> None:
        self.replicas, self.when, first = replicas, when, replicas[0]
        self.starts = [parameter.detach().clone() for parameter in first]
        self.velocities = [torch.zeros_like(start) for start in self.starts]
        num = when.num_fragments_of(len(first))
        chosen = balance([parameter.nbytes for parameter in first], [0] * num)
        self.fragments = [[i for i, of in enumerate(chosen) if of == fragment] for fragment in range(num)]
        self.steps = [steps_before(fragment, num, when.k_steps) for fragment in range(num)]
        self.begun: list[Any] = [None] * num
        peers = [echo(len(replicas)) for _ in replicas if what]
        self.sent = [i for i, start in enumerate(self.starts) if what and what.compresses("", start.numel(), 0)]
        self.exchanges = [what.exchange(each, when) for each in peers if what]
        mailbox = Mailbox(len(replicas))
        for each in peers:
            each.between = mailbox

    @torch.no_grad()
    def after_step(self) -> int:
        """Begin and apply what is due after a step of each replica; return how many averages were applied."""
        num = 0
        for fragment, members in enumerate(self.fragments):
            self.steps[fragment] += 1
            if self.begun[fragment] is not None and self.steps[fragment] >= self.when.delay_steps:
                num += self._apply(fragment)
            if self.steps[fragment] >= self.when.k_steps:
                now = [[replica[i].clone() for i in members] for replica in self.replicas]
                self.begun[fragment] = now
                self.steps[fragment] = 0
                num += 0 if self.when.delay_steps else self._apply(fragment)
        return num

    def _apply(self, fragment: int) -> int:
        members, snapshots = self.fragments[fragment], self.begun[fragment]
        means = [torch.stack(tensors).mean(0) for tensors in zip(*snapshots, strict=True)]
        starts = [self.starts[i] for i in members]
        if self.exchanges:  # of all tensors: there is one fragment
            pending = [
                exchange.prepare({str(i): replica[i] - self.starts[i] for i in self.sent}).send()
                for exchange, replica in zip(self.exchanges, snapshots, strict=True)
            ]
            for i, change in pending[0].wait().mean.dense().items():
                means[int(i)] = self.starts[int(i)] + change.view_as(means[int(i)])
        velocities = [self.velocities[i] for i in members] if self.when.outer != "none" else []
        self.when.outer_step_(starts, means, velocities, inner_lr=1.0)
        for replica, before in zip(self.replicas, snapshots, strict=True):
            now, copies = [replica[i] for i in members], [mean.clone() for mean in means]
            apply_means_(now, before, copies, [self.when.delay_steps > 0] * len(now), self.when.mixing)
        self.begun[fragment] = None
        return 1


def batches(data: Any, num_ranks: int, seed: int) -> Iterator[list[Any]]:
    """Yield for each step a batch of each rank, in the order of a seed, which is another in each epoch."""
    data.setup("fit")
    split, size = data.splits["train"], data.hparams["batch_size"]
    generator, order = torch.Generator().manual_seed(seed), torch.empty(0, dtype=torch.int64)
    while True:
        while len(order) < num_ranks * size:
            order = torch.cat([order, torch.randperm(len(split), generator=generator)])
        now, order = order[: num_ranks * size].view(num_ranks, size), order[num_ranks * size :]
        yield [torch.utils.data.default_collate([split[int(index)] for index in of_rank]) for of_rank in now]


def begin(model: Any, num_steps: int, *, by_muon: bool) -> tuple[Optimizer, Any]:
    """Return the module's optimizer and what steps its learning rate, in a run of so many steps.

    Args:
        by_muon: whether matrices are stepped by Muon, at the rate of AdamW.
    """
    if by_muon:
        muon, lr = MuonAdamW(model, weight_decay=0.0, exclude=("head.*",)), model.hparams["lr"]
        return muon, OneCycleLR(muon, max_lr=lr, total_steps=num_steps, cycle_momentum=False)
    model.trainer = SimpleNamespace(estimated_stepping_batches=num_steps)
    made = model.configure_optimizers()
    model.trainer = None
    for group in made["optimizer"].param_groups:
        group["fused"] = True
    return made["optimizer"], made["lr_scheduler"]["scheduler"]


def mean_of_buffers(models: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return the buffers of the mean of replicas; variances with those between the replicas' means."""
    buffers = [dict(model.named_buffers()) for model in models]
    stacked = {name: torch.stack([each[name].float() for each in buffers]) for name in buffers[0]}
    means = {name: each.mean(0) for name, each in stacked.items()}
    for name in [name for name in means if name.endswith("running_var")]:
        means[name] += stacked[name.removesuffix("var") + "mean"].var(0, correction=0)
    return means


@torch.no_grad()
def evaluate(models: Sequence[nn.Module], data: Any) -> float:
    """Return the loss of the mean of replicas on what is not trained on."""
    model: Any = deepcopy(models[0]).eval()
    for parameter, *others in zip(model.parameters(), *(each.parameters() for each in models), strict=True):
        parameter.copy_(torch.stack(others).mean(0))
    means = mean_of_buffers(models)
    for name, buffer in model.named_buffers():
        buffer.copy_(means[name])
    losses = [
        (float(model._loss_and_prediction(batch)[0]), len(batch[0]))
        for batch in chain(data.val_dataloader(), data.test_dataloader())
    ]
    return sum(loss * size for loss, size in losses) / sum(size for _, size in losses)


@cache
def trained(task: str, seed: int) -> nn.Module:
    """Return the model that a task starts from."""
    return train(runs(**(SIMULATED[task].goes_on or {}), seed=seed))[1][0]


def train(run: Row) -> tuple[Row, list[Any]]:
    """Train the replicas of a run; return losses, and the replicas: of ddp the one there is."""
    simulated, num_ranks, when = SIMULATED[run["task"]], run["ranks"], when_of(run)
    num_steps = round(simulated.num_steps * run["stretch"])
    torch.manual_seed(run["seed"])
    first = deepcopy(trained(run["task"], run["seed"])) if simulated.goes_on else simulated.task.make_model()
    first.hparams.update(simulated.task.make_model().hparams)  # what goes on has another learning rate
    models = [first, *(deepcopy(first) for _ in range(1, num_ranks))] if when else [first]
    stepped = [begin(model, num_steps, by_muon=run["muon"]) for model in models]
    averages, begin_step = None, round(run.get("begin", 0.0) * num_steps)
    replicas, what = [list(model.parameters()) for model in models], run.get("compression")
    data, losses, started, num = simulated.task.make_data(), list[float](), time.perf_counter(), 0
    for step, of_ranks in zip(range(num_steps), batches(data, num_ranks, run["seed"]), strict=False):
        if step == begin_step and when:
            averages = Averages(replicas, when, None if what is None else Compression(**what))
        lost = []
        for rank, batch in enumerate(of_ranks):
            loss = models[rank % len(models)]._loss_and_prediction(batch)[0]
            (loss * len(models) / num_ranks).backward()
            lost.append(float(loss.detach()))
        if not averages:
            average_gradients_(replicas)
        for optimizer, schedule in stepped:
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        losses.append(statistics.fmean(lost))
        num += averages.after_step() if averages else 0
        if run["moments"] and averages and num and (step + 1) % (run["moments"] * run["k"]) == 0:
            average_moments_([optimizer for optimizer, _ in stepped])
        if not math.isfinite(losses[-1]):
            break
    last = losses[-max(1, num_steps // 16) :]
    took_s = (time.perf_counter() - started) / num_ranks / len(losses)
    return {"val_loss": evaluate(models, data), "loss": statistics.fmean(last), "step_s": round(took_s, 4)}, models


@torch.no_grad()
def average_gradients_(replicas: Sequence[Sequence[Tensor]]) -> None:
    """Let all replicas have the mean gradient: a synchronous step."""
    for tensors in zip(*replicas, strict=True) if len(replicas) > 1 else ():
        mean = torch.stack([tensor.grad for tensor in tensors if tensor.grad is not None]).mean(0)
        for tensor in tensors:
            tensor.grad = mean.clone()


@torch.no_grad()
def average_moments_(optimizers: Sequence[Optimizer]) -> None:
    """Average Adam's second moments over the replicas (DES-LOC, arXiv 2505.22549)."""
    for states in zip(*(optimizer.state.values() for optimizer in optimizers), strict=True):
        mean = torch.stack([state["exp_avg_sq"] for state in states]).mean(0)
        for state in states:
            state["exp_avg_sq"].copy_(mean)


# What is run ---------------------------------------------------------------------------------------------------------


def runs(task: str, ranks: int, k: int = 1, **others: Any) -> Row:
    """Return a run: ddp, unless there is a k."""
    default = {
        "delay": 0,
        "outer": None,
        "stretch": 1.0,
        "seed": 0,
        "mixing": None,
        "fragments": 1,
        "moments": 0,
        "muon": False,
    }
    return {"task": task, "ranks": ranks, "k": k, **default, **others}


def grid() -> Iterator[Row]:
    """Yield all runs, those first that say most."""
    tasks, nesterov = SHORT, partial(runs, outer=OUTER)
    yield from (runs(task, 2) for task in tasks)
    for k, task, stretch in product((8, 16, 4), tasks, (1.0, 1.6)):
        yield nesterov(task, 2, k, delay=k - 1, stretch=stretch)
    for outer, task in product((None, (0.7, 0.9), (1.0, 0.3), (0.5, 0.8)), ("text", "resnet")):
        yield runs(task, 2, 8, delay=7, outer=outer)
    yield runs("longer", 2)
    yield from (run("longer", 2, 8, delay=7, stretch=s) for run, s in ((nesterov, 1.6), (nesterov, 1.0), (runs, 1.0)))
    yield nesterov("text", 2, 8, delay=7, fragments=4)  # streaming
    yield from (run for task in ("resnet", "text") for run in (runs(task, 1), nesterov(task, 1, 8)))  # one rank: SNOO
    yield nesterov("text", 2, 8, delay=7, fragments=4, mixing=0.5)
    for ranks, stretches in ((4, (1.6, 1.0)), (8, (1.6, 2.5))):
        yield runs("text", ranks)
        for k, stretch in product((8, 16), stretches):
            yield nesterov("text", ranks, k, delay=k - 1, stretch=stretch)
    yield from (nesterov("text", 8, 8, stretch=0.5, moments=moments) for moments in (0, 1))  # DES-LOC
    yield from (nesterov("text", 2, 16, muon=muon) for muon in (False, True))  # MuLoCo
    yield runs("text", 2, muon=True)
    yield from (runs(task, 2, 8, delay=7, stretch=1.6) for task in tasks)
    yield from (nesterov(task, 2, 8) for task in tasks)  # it waits
    for seed, task in product((1, 2), ("resnet", "continued", "text")):
        yield runs(task, 2, seed=seed)
        for k, stretch in product((8, 16, 4), (1.0, 1.6)):
            yield nesterov(task, 2, k, delay=k - 1, stretch=stretch, seed=seed)


# The table -----------------------------------------------------------------------------------------------------------


def cell_of(run: Row) -> tuple[Any, ...]:
    """Return what a factor is of: a run but for its steps and its seed."""
    return tuple((name, tuple(v) if isinstance(v := run[name], list) else v) for name in CELL)


CELL = ("task", "ranks", "k", "delay", "outer", "mixing", "fragments", "moments", "muon")


def factors(rows: Sequence[Row]) -> dict[tuple[Any, ...], tuple[dict[float, float], float | None]]:
    """Return for each method the loss to ddp's by the number of steps, and the factor of steps to ddp's loss.

    None: it is not reached with the most steps that were run, nor by the line through the last two numbers up to
    `MOST_FACTOR`.
    """
    dense = {(r["task"], r["ranks"], r["seed"]): r["val_loss"] for r in rows if r["k"] == 1 and not r["muon"]}
    ratios: dict[tuple[Any, ...], dict[float, list[float]]] = {}
    for row in rows:
        if (row["k"] > 1 or row["muon"]) and (key := (row["task"], row["ranks"], row["seed"])) in dense:
            of_cell = ratios.setdefault(cell_of(row), {})
            of_cell.setdefault(row["stretch"], []).append(row["val_loss"] / dense[key])
    found = {}
    for cell, by_stretch in ratios.items():
        means = {stretch: statistics.fmean(by_stretch[stretch]) for stretch in sorted(by_stretch)}
        found[cell] = means, factor_of(means)
    return found


def factor_of(ratios: dict[float, float]) -> float | None:
    """Return the number of steps at which a loss is `SLACK` times ddp's; see `factors`.

    Args:
        ratios: losses to ddp's, by the number of steps to ddp's, in ascending order.

    Examples:
        >>> factor_of({1.0: 1.0, 1.6: 0.9}), factor_of({1.0: 1.03})
        (1.0, None)
        >>> round(factor_of({1.0: 1.03, 1.6: 1.01}), 3), round(factor_of({1.0: 1.03, 1.6: 1.015}), 3)
        (1.6, 1.871)
    """
    points = [*ratios.items()]
    if points[0][1] <= SLACK:
        return points[0][0]
    for (few, above), (many, below) in pairwise(points):
        is_last = many == points[-1][0]
        if below < above and (below <= SLACK or is_last):
            factor = few * (many / few) ** ((above - SLACK) / (above - below))
            return factor if factor <= MOST_FACTOR else None
    return None


Point = tuple[int, int, float]
RULES: dict[str, Callable[[int, int], float]] = {
    "1 + a": lambda k, ranks: 1.0,
    "1 + a log2(k)": lambda k, ranks: math.log2(k),
    "1 + a (k - 1)": lambda k, ranks: k - 1.0,
    "1 + a log2(k) log2(N)": lambda k, ranks: math.log2(k) * math.log2(ranks),
}


def fit(points: Sequence[Point]) -> dict[str, tuple[float, float]]:
    """Return of each rule its a, and the root of the mean squared error.

    Args:
        points: k, the number of replicas N, and the factor.
    """
    found = {}
    for name, x in RULES.items():
        a = sum(x(*of) * (factor - 1) for *of, factor in points) / sum(x(*of) ** 2 for *of, _ in points)
        errors = [1 + a * x(*of) - factor for *of, factor in points]
        found[name] = a, math.sqrt(statistics.fmean(error**2 for error in errors))
    return found


def points_of(found: dict[Any, Any], *, is_hidden: bool = True) -> list[Point]:
    """Return k, replicas and factor of the cells that the rule is of: several, one outer optimizer, one fragment."""
    cells = [(dict(cell), factor) for cell, (_, factor) in found.items() if factor is not None]
    plain = {"outer": OUTER, "fragments": 1, "moments": 0, "mixing": None, "muon": False}
    delays = {True: lambda k: k - 1, False: lambda k: 0}[is_hidden]
    return [
        (cell["k"], cell["ranks"], factor)
        for cell, factor in cells
        if cell["ranks"] > 1
        and all(cell[name] == value for name, value in plain.items())
        and cell["delay"] == delays(cell["k"])
    ]


def to_markdown(rows: Sequence[Row]) -> str:
    """Return the table."""
    columns = ("task", "replicas", "k", "delay", "outer", *(f"{stretch:g}" for stretch in STRETCHES), "steps to loss")
    lines = ["| " + " | ".join(columns) + " |", "| --- " * len(columns) + "|"]
    for cell, (ratios, factor) in sorted(factors(rows).items(), key=lambda each: _order(dict(each[0]))):
        run = dict(cell)
        if ratios.keys().isdisjoint(STRETCHES):
            continue
        more = [f"{run['fragments']} fragments"] * (run["fragments"] > 1)
        more += [f"mixing {run['mixing']}"] * (run["mixing"] is not None)
        more += ["second moments averaged"] * (run["moments"] > 0) + ["Muon"] * run["muon"]
        outer = "none" if run["outer"] is None else "{} / {}".format(*run["outer"])
        shown = [f"{100 * (ratios[each] - 1):+.1f} %" if each in ratios else "" for each in STRETCHES]
        needed = f"{factor:.2f}" if factor else f"> {MOST_FACTOR:g}" if len(ratios) > 1 else ""
        cells = [SIMULATED[run["task"]].title, run["ranks"], run["k"], run["delay"], ", ".join([outer, *more])]
        lines.append("| " + " | ".join(map(str, [*cells, *shown, needed])) + " |")
    return "\n".join([*lines, ""])


def _order(run: Row) -> tuple[Any, ...]:
    return list(SIMULATED).index(run["task"]), run["ranks"], run["k"], -run["delay"], str(run["outer"]), str(run)


def report(results: Row) -> None:
    """Write the table, and the rules with their errors."""
    rows, found = results["rows"], factors(results["rows"])
    parts = [
        f"Replicas in one process ({results['environment']['cpu']}, torch {results['environment']['torch']}, "
        f"{results['environment']['date']}; `benchmarks/steps_to_loss.py`). Loss to ddp's with as many replicas and 1, "
        f"1.6 and 2.5 times its steps ({SIMULATED['text'].num_steps} where none are named), on data that is not "
        f"trained on; last column: times ddp's steps to at most {SLACK - 1:.0%} more than its loss, interpolated. "
        "Outer: rate / momentum of Nesterov. One replica: to training without an outer step.\n",
        to_markdown(rows),
    ]
    for is_hidden in (True, False):
        points = points_of(found, is_hidden=is_hidden)
        if len(points) > 2:
            rules = "; ".join(f"{name}: a = {a:.3f}, error {error:.2f}" for name, (a, error) in fit(points).items())
            delay = "k - 1" if is_hidden else "0"
            parts.append(
                f"Steps, times ddp's, over {len(points)} cells of N replicas, delay {delay}, outer "
                f"{OUTER[0]} / {OUTER[1]}: {rules}.\n"
            )
    for row in rows:
        others = {**{name: row[name] for name in row if name not in MEASURED}, "moments": 0}
        twin = next((other for other in rows if row["moments"] and others.items() <= other.items()), None)
        if twin is not None:
            parts.append(
                f"Second moments averaged with the weights (DES-LOC, arXiv 2505.22549), {row['ranks']} replicas, "
                f"k = {row['k']}, {round(SIMULATED[row['task']].num_steps * row['stretch'])} steps: loss "
                f"{row['val_loss']:.4f}, without {twin['val_loss']:.4f}.\n"
            )
    (RESULTS / "steps_to_loss.md").write_text("\n".join(parts))
    print("\n".join(parts))


def go_on(path: Path, asked: Iterable[Row], most: int | None = None) -> Row:
    """Run what a file of results lacks, each once, and write after each run; return the results.

    Args:
        path: the file.
        asked: settings of runs.
        most: so many runs at most.
    """
    be_quiet()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    results: Row = {"environment": describe_environment(link=None), "rows": []}
    if path.exists():
        results = json.loads(path.read_text())
    done = [{name: row[name] for name in row if name not in MEASURED} for row in results["rows"]]
    todo = [run for text, run in {json.dumps(run): run for run in asked}.items() if json.loads(text) not in done]
    for run in todo[:most]:
        row = {**run, **train(run)[0]}
        results["rows"].append(row)
        write(results, path)
        print(row, flush=True)
    return results


def main() -> None:
    """Run what is missing, and write after each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--most", type=int, help="so many runs at most")
    parser.add_argument("--replicas", type=int, nargs="+", help="runs of so many only")
    options = parser.parse_args()
    chosen = (run for run in grid() if options.replicas is None or run["ranks"] in options.replicas)
    results = go_on(RESULTS / "steps_to_loss.json", () if options.report else chosen, options.most)
    report(results)


MEASURED = ("val_loss", "loss", "step_s")

if __name__ == "__main__":
    main()
