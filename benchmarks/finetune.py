"""Fine-tuning of a pretrained model: accuracy at equal steps, seconds per step on two links, seconds to ddp's accuracy.

    python -m venv .venv-finetune    # then, in it: pip install -e . -r benchmarks/finetune.txt
    .venv-finetune/bin/python benchmarks/finetune.py             # hours on two cores; goes on where it was stopped
    .venv-finetune/bin/python benchmarks/finetune.py --tasks lora --seeds 1    # some rows
    .venv-finetune/bin/python benchmarks/finetune.py --time      # seconds per step, half an hour of a quiet machine
    .venv-finetune/bin/python benchmarks/finetune.py --report    # the tables of what there is

The model is all-MiniLM-L6-v2 of sentence-transformers, which a package on PyPI holds. The texts are docstrings of
installed packages, read by `ast`, their classes the sub-packages from which most of them come; a file is in the
training part or in the validation part. `scratch` is a language model of 11M parameters that begins at random weights,
on the text of the standard library. Two nodes of one rank, a core each.

The link changes what `dgc` and `lowbw` choose, and nothing else in the weights. So these choose first, in the lab, on
each link; then accuracy and loss are from runs without a throttle, with what was chosen at 100 Mb/s. With `--time` the
methods of a link take turns in the lab, 20 steps or more each, and one run begins on the link, too: its first
validation is compared with that of the run without a throttle.
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import statistics
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import lightning_lowbw as lowbw
from benchmarks.beside_ddp.tasks import be_quiet, make_trainer
from benchmarks.contestants import COMMON, HookStrategy, power_sgd
from benchmarks.harness import RESULTS, describe_environment, run_in_lab
from lightning_lowbw.presets import preset
from lightning_lowbw.strategies.auto_choice import NUM_STEPS
from lightning_lowbw.tools.lab import parse_rate
from lightning_lowbw.tools.lab.network import INTERFACE, read_sent_bytes
from lightning_lowbw.tools.zoo import ByteLanguageModel, StdlibText

Row = dict[str, Any]
PATH = RESULTS / "finetune.json"
CACHE = Path(__file__).resolve().parents[1] / "build" / "finetune"
NUM_NODES = 2
LINKS: dict[str, tuple[str, float]] = {"100 Mb/s, 50 ms": ("100mbit", 50.0), "1 Gb/s, 0.5 ms": ("1gbit", 0.5)}
CHOICE_LINK = "100 Mb/s, 50 ms"
NUM_TIMED = 20
# What may be missing where ddp's accuracy, or loss, counts as reached.
POINTS, SLACK = 0.5, 0.01
STRETCHED = ", 1.6"  # in the name of a method that takes more steps

PACKAGES = "torch numpy scipy sklearn matplotlib pandas networkx sympy hydra lightning torchmetrics transformers peft"
MIN_CHARACTERS, NUM_CLASSES, NUM_TOKENS = 60, 20, 32
MOST_TEXTS = 1000  # of a class: one of them has two fifths of all
NUM_VALIDATED = 1000
STOCK: dict[str, Any] = {**COMMON, "gradient_as_bucket_view": True}


# What is trained ------------------------------------------------------------------------------------------------------


def docstrings() -> Iterator[tuple[str, str, str]]:
    """Yield docstrings of installed packages: the text, its file, and its sub-package."""
    for package in PACKAGES.split():
        spec = importlib.util.find_spec(package)
        assert spec is not None, f"{package}: benchmarks/finetune.txt names what is to be installed"
        assert spec.submodule_search_locations is not None
        root = Path(next(iter(spec.submodule_search_locations)))
        for path in sorted(root.glob("*/**/*.py")):
            place = path.relative_to(root)
            if "tests" in place.parts or "testing" in place.parts:
                continue
            try:
                tree = ast.parse(path.read_text())
            except (SyntaxError, UnicodeDecodeError):
                continue
            for node in ast.walk(tree):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    text = " ".join((ast.get_docstring(node) or "").split())
                    if len(text) > MIN_CHARACTERS:
                        yield text, f"{package}/{place}", f"{package}.{place.parts[0]}"


def prepare() -> Row:
    """Write the model's folder and the tokens, once; return what is known of the data."""
    about = CACHE / "about.json"
    if about.exists():
        found: Row = json.loads(about.read_text())
        return found
    from all_minilm_l6_v2 import extract_model
    from transformers import AutoTokenizer

    folder = Path(extract_model(str(CACHE)))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = list(dict.fromkeys(docstrings()))
    classes = [name for name, _ in Counter(name for *_, name in texts).most_common(NUM_CLASSES)]
    texts.sort(key=lambda each: zlib.crc32(each[0].encode()))  # any order that is the same everywhere
    texts = [each for name in classes for each in [each for each in texts if each[2] == name][:MOST_TEXTS]]
    encoded = tokenizer([text for text, *_ in texts], truncation=True, padding="max_length", max_length=NUM_TOKENS)
    labels = torch.tensor([classes.index(name) for *_, name in texts])
    is_validated = torch.tensor([zlib.crc32(file.encode()) % 5 == 0 for _, file, _ in texts])
    tensors = torch.tensor(encoded["input_ids"]), torch.tensor(encoded["attention_mask"]), labels
    parts = {name: [each[mask] for each in tensors] for name, mask in (("train", ~is_validated), ("val", is_validated))}
    order = torch.randperm(len(parts["val"][0]), generator=torch.Generator().manual_seed(0))[:NUM_VALIDATED]
    parts["val"] = [each[order] for each in parts["val"]]
    torch.save({"folder": str(folder), **parts}, CACHE / "tokens.pt")
    usual = int(parts["train"][2].bincount().argmax())
    found = {
        "classes": classes,
        "num_texts": len(texts),
        "num_train": len(parts["train"][0]),
        "num_val": len(parts["val"][0]),
        "usual_accuracy": float((parts["val"][2] == usual).float().mean()),
        "versions": {name: importlib.metadata.version(name) for name in ("transformers", "peft", "tokenizers")},
    }
    about.write_text(json.dumps(found))
    return found


@cache
def tokens() -> Row:
    """Return the folder of the model, and the tensors of both parts."""
    found: Row = torch.load(CACHE / "tokens.pt")
    return found


class Encoder(pl.LightningModule):
    """MiniLM with the mean of its last states, and a linear head.

    Args:
        kind: "whole", "lora" (adapters of rank 8 on all linear layers), or "frozen" (the head alone is trained).
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        from transformers import AutoModel

        self.kind = kind
        self.encoder: Any = AutoModel.from_pretrained(tokens()["folder"], add_pooling_layer=False)
        self.head = nn.Linear(self.encoder.config.hidden_size, NUM_CLASSES)
        if kind == "frozen":
            self.encoder.requires_grad_(False)
        if kind == "lora":
            from peft import LoraConfig, get_peft_model

            self.encoder = get_peft_model(
                self.encoder, LoraConfig(r=8, target_modules=["query", "key", "value", "dense"])
            )

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        states = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        weight = mask.unsqueeze(-1).float()
        logits: Tensor = self.head((states * weight).sum(1) / weight.sum(1))
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, mask, labels = batch
        return functional.cross_entropy(self(ids, mask), labels)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        ids, mask, labels = batch
        logits = self(ids, mask)
        self.log("val_loss", functional.cross_entropy(logits, labels), sync_dist=True)
        self.log("val_acc", (logits.argmax(-1) == labels).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        lr = 5e-5 if self.kind == "whole" else 1e-3
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=lr, weight_decay=0.01, fused=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def texts() -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return both parts in batches: of 8 and of 50 texts."""
    found = tokens()
    train, val = TensorDataset(*found["train"]), TensorDataset(*found["val"])
    return DataLoader(train, 8, shuffle=True, drop_last=True), DataLoader(val, 50)


class Scratch(ByteLanguageModel):
    """The package's language model over bytes, with 6 layers of width 384."""

    def __init__(self) -> None:
        super().__init__(384, 6, optimizer="adamw", lr=5e-4, schedule="one_cycle")


def crops() -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return both parts in batches of 4 crops of 64 bytes."""
    data = StdlibText(batch_size=4, num_train=64_000, num_eval=1024)
    data.setup("fit")
    return data.train_dataloader(), data.val_dataloader()


@dataclass(frozen=True)
class Task:
    """What is trained.

    Attributes:
        make: makes the module.
        data: returns the loaders of both parts.
        num_steps: optimizer steps.
        every: steps between two validations.
        is_pretrained: whether it begins with trained weights.
    """

    title: str
    make: Callable[[], pl.LightningModule]
    data: Callable[[], tuple[DataLoader[Any], DataLoader[Any]]]
    num_steps: int
    every: int
    is_pretrained: bool = True


TASKS = {
    "minilm": Task("MiniLM, all weights", lambda: Encoder("whole"), texts, 300, 100),
    "lora": Task("MiniLM, LoRA of rank 8", lambda: Encoder("lora"), texts, 300, 100),
    "frozen": Task("MiniLM, frozen", lambda: Encoder("frozen"), texts, 300, 100),
    "scratch": Task("language model from scratch", Scratch, crops, 2000, 200, is_pretrained=False),
}


# Methods --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """A method, as a user writes it.

    Attributes:
        make: makes the strategy, for a number of steps.
        tasks: for which it is measured.
        stretch: optimizer steps, times the task's.
        num_seeds: at most.
        period: steps after which its communication repeats.
        is_choosing: whether it chooses on the link.
    """

    make: Callable[[int], Any]
    tasks: tuple[str, ...] = ("minilm",)
    stretch: float = 1.0
    num_seeds: int = 3
    period: int = 1
    is_choosing: bool = False


def named(name: str, **changes: Any) -> Callable[[int], Any]:
    """Return what makes the strategy of a name, with changes of its knobs."""
    return lambda _: lowbw.Strategy(preset(name).replace(**changes), **COMMON)


STREAMING = named("streaming_diloco")
WAYS = {
    "ddp": Way(lambda _: DDPStrategy(**STOCK), tuple(TASKS)),
    "ddp, fp16 hook": Way(lambda _: HookStrategy(ddp_comm_hook=default_hooks.fp16_compress_hook, **STOCK), num_seeds=1),
    "ddp, PowerSGD rank 4 hook after a tenth": Way(lambda steps: power_sgd(4, steps // 10), num_seeds=1),
    "bfloat16": Way(named("bfloat16"), num_seeds=1),
    "int8": Way(named("int8"), ("minilm", "lora", "scratch")),
    "dgc": Way(lambda _: lowbw.DGCStrategy(**COMMON), ("minilm", "scratch"), is_choosing=True),
    "dgc, pretrained": Way(lambda _: lowbw.DGCStrategy(pretrained=True, **COMMON), is_choosing=True),
    "dgc, 25.6 %": Way(lambda _: lowbw.DGCStrategy(sparsity=[0.744], **COMMON), num_seeds=1),
    "dgc, 6.4 %": Way(lambda _: lowbw.DGCStrategy(sparsity=[0.936], **COMMON)),
    "dgc, 1 %": Way(lambda _: lowbw.DGCStrategy(sparsity=[0.99], **COMMON), num_seeds=1),
    "lowbw": Way(lambda _: lowbw.AutoStrategy(**COMMON), is_choosing=True),
    "lowbw, pretrained": Way(lambda _: lowbw.AutoStrategy(pretrained=True, **COMMON), is_choosing=True),
    "powersgd, rank 4 after a tenth": Way(
        lambda steps: lowbw.Strategy(lowbw.PowerSGD(4, start_step=steps // 10), **COMMON), num_seeds=1
    ),
    "local_sgd, k = 8": Way(named("local_sgd", k_steps=8), period=8),
    "streaming_diloco": Way(STREAMING, period=16),
    "streaming_diloco, 1.6 times the steps": Way(STREAMING, ("minilm", "scratch"), 1.6, period=16),
    "sparse_loco": Way(named("sparse_loco"), ("minilm", "lora"), period=15),
    # Where the points of sparse_loco go: its period, its density, its two bits, the rounds that there are.
    "sparse_loco, 1.6 times the steps": Way(named("sparse_loco"), stretch=1.6, num_seeds=1, period=15),
    "sparse_loco, k = 5": Way(named("sparse_loco", k_steps=5), num_seeds=1, period=5),
    "sparse_loco, density 1/8": Way(named("sparse_loco", density=1 / 8), period=15),
    "sparse_loco, density 1/2": Way(named("sparse_loco", density=1 / 2), num_seeds=1, period=15),
    "local_sgd, k = 15": Way(named("local_sgd", k_steps=15), num_seeds=1, period=15),
}
AGAIN = "ddp again"  # the same, to see the noise of the clock


def chosen_name(chosen: Row) -> str:
    """Return one name for equal methods."""
    return json.dumps(chosen, sort_keys=True)


def steady(chosen: Row) -> lowbw.Method:
    """Return a method without its warm-up: the steps that follow it."""
    when = {**chosen["when"], "rampup_begin_step": 0}
    if stairs := when["sparsity"]:
        when |= {"rampup_step": 1, "sparsity": stairs[-1:]}
        chosen = {**chosen, "where": {**chosen["where"], "inter_dtype": "float32"}}  # that of dense steps
    return lowbw.Method(**{**chosen, "when": when})


# One rank -------------------------------------------------------------------------------------------------------------


class Log(pl.Callback):
    """Keep the clock of each step, and each validation; stop early if that is asked for."""

    def __init__(self, stop_after: int | None) -> None:
        self.stop_after, self.clock, self.validated = stop_after, [time.perf_counter()], list[Row]()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.clock.append(time.perf_counter())
        if len(self.clock) - 1 == self.stop_after:
            trainer.should_stop = True

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        numbers = {name: round(float(value), 5) for name, value in trainer.callback_metrics.items()}
        self.validated.append({"step": trainer.global_step, **numbers})


def train(task: Task, strategy: Any, seed: int, num_steps: int, stop_after: int | None, *, validates: bool) -> Row:
    """Train on this rank, with the other one; return validations, the clock and bytes."""
    pl.seed_everything(seed, workers=True, verbose=False)
    log, model = Log(stop_after), task.make()
    trainer = make_trainer(strategy, num_steps, log, None, NUM_NODES, task.every)
    loaders, before = task.data(), read_sent_bytes(INTERFACE)
    if validates and seed == 0:
        trainer.validate(model, loaders[1], verbose=False)  # of a head without training
    trainer.fit(model, *(loaders if validates else loaders[:1]))
    if validates and stop_after is None and num_steps % task.every:
        trainer.validate(model, loaders[1], verbose=False)
    method = getattr(trainer.strategy, "method", None)
    return {
        "validated": log.validated,
        "clock": [round(each - log.clock[0], 4) for each in log.clock[1:]],
        "sent_bytes": read_sent_bytes(INTERFACE) - before,
        "num_trained": sum(each.numel() for each in model.parameters() if each.requires_grad),
        "chosen": None if method is None else method.describe(),
    }


def train_rank(job: Row, path: Path) -> None:
    """One rank: train what the job lists; rank 0 writes the rows."""
    be_quiet()
    torch.set_num_threads(1)
    rows = []
    for given in job["runs"]:
        way, task = WAYS[given["method"].replace(AGAIN, "ddp")], TASKS[given["task"]]
        num_steps = round(task.num_steps * way.stretch)
        if given["chosen"] is None:  # where the first tenth is dense, the timed steps come after it
            strategy = way.make(NUM_TIMED if given["what"] == "time" else num_steps)
        else:
            method = steady(given["chosen"]) if given["what"] == "time" else lowbw.Method(**given["chosen"])
            strategy = lowbw.Strategy(method, **COMMON)
        begun, num_timed = way.period + 4, -(-NUM_TIMED // way.period) * way.period
        ends = {"run": None, "begin": task.every, "choice": NUM_STEPS + 2, "time": begun + num_timed}
        validates = given["what"] in ("run", "begin")
        row = train(task, strategy, given["seed"], num_steps, ends[given["what"]], validates=validates)
        if given["what"] == "time":
            row["step_s"] = (row["clock"][-1] - row["clock"][begun - 1]) / num_timed
        rows.append({**row, "given": given["chosen"], **{k: v for k, v in given.items() if k != "chosen"}})
        if os.environ["RANK"] == "0":
            path.write_text(json.dumps(rows))
            last = row["validated"][-1] if row["validated"] else row.get("step_s", "")
            print(
                f"{job['link']}: {given['what']} {given['task']}, {given['method']}, {given['seed']}: {last}",
                flush=True,
            )
    dist.barrier()


# All rows -------------------------------------------------------------------------------------------------------------


def run(results: Row, link: str, runs: list[Row]) -> None:
    """Start the ranks in a lab with this link, and keep their rows."""
    if not runs:
        return
    rate, rtt_ms = LINKS.get(link, (None, 0.0))
    rates = [None if rate is None else parse_rate(rate)] * NUM_NODES
    rows = run_in_lab(rates, [__file__, "--rank"], job={"link": link, "runs": runs}, what=link, rtt_ms=rtt_ms)
    results["rows"] += [{"link": link, "cpu": describe_environment()["cpu"], **row} for row in rows]
    PATH.write_text(json.dumps(results) + "\n")


def choice_of(results: Row, task: str, name: str, link: str) -> Row | None:
    """Return what a method has chosen for a task on a link; None if it does not choose, or has not."""
    rows = of_kind(results, "choice", task, link)
    found: Row | None = next((row["chosen"] for row in rows if row["method"] == name), None)
    return found


def of_kind(results: Row, what: str, task: str, link: str) -> list[Row]:
    """Return the rows of a kind, a task and a link."""
    return [row for row in results["rows"] if (row["what"], row["task"], row["link"]) == (what, task, link)]


def measure(results: Row, tasks: list[str], num_seeds: int, names: list[str]) -> None:
    """Train what is missing, a row at a time: the choices, then seed by seed."""
    for task, link in itertools.product(tasks, LINKS):
        done = [row["method"] for row in of_kind(results, "choice", task, link)]
        asked = [n for n, way in WAYS.items() if way.is_choosing and task in way.tasks and n not in done and n in names]
        base = {"what": "choice", "task": task, "seed": 0, "chosen": None}
        run(results, link, [{**base, "method": name} for name in asked])
    for seed, task, name in itertools.product(range(num_seeds), tasks, names):
        way = WAYS[name]
        if task not in way.tasks or seed >= way.num_seeds:
            continue
        given = choice_of(results, task, name, CHOICE_LINK)
        key = (way.stretch, None if given is None else chosen_name(given))
        same = [
            row
            for row in of_kind(results, "run", task, "none")
            if row["seed"] == seed
            and (WAYS[row["method"]].stretch, row["given"] and chosen_name(row["given"])) == key
            and (given is not None or row["method"] == name)
        ]
        if not same:
            run(results, "none", [{"what": "run", "task": task, "seed": seed, "chosen": given, "method": name}])


def measure_time(results: Row, tasks: list[str], names: list[str]) -> None:
    """Time 20 steps of each method on each link, in turn, in one group of processes for a link."""
    for task, link in itertools.product(tasks, LINKS):
        done = [row["method"] for row in of_kind(results, "time", task, link)]
        todo = [name for name in (*names, AGAIN) if name not in done and STRETCHED not in name]
        runs = [
            {"what": "time", "task": task, "seed": 0, "method": name, "chosen": choice_of(results, task, way, link)}
            for name in todo
            if task in WAYS[way := name.replace(AGAIN, "ddp")].tasks
        ]
        run(results, link, runs)
    if "minilm" in tasks and not of_kind(results, "begin", "minilm", CHOICE_LINK):
        run(results, CHOICE_LINK, [{"what": "begin", "task": "minilm", "seed": 0, "method": "int8", "chosen": None}])


# The tables -----------------------------------------------------------------------------------------------------------


def runs_of(results: Row, task: str, name: str) -> dict[int, Row]:
    """Return the runs of a method by their seeds: those of the same choice, if it chooses."""
    way, runs = WAYS[name], of_kind(results, "run", task, "none")
    if not way.is_choosing:
        return {row["seed"]: row for row in runs if row["method"] == name}
    key = chosen_name(choice_of(results, task, name, CHOICE_LINK) or {})
    return {row["seed"]: row for row in runs if row["given"] and chosen_name(row["given"]) == key}


def curve_of(run: Row) -> dict[int, Row]:
    """Return the validations of a run by their steps."""
    return {each["step"]: each for each in run["validated"]}


def mean_curve(runs: dict[int, Row], what: str) -> list[tuple[int, float]]:
    """Return the mean over seeds of what was validated, at each step of a validation."""
    curves = [curve_of(run) for run in runs.values()]
    return [(s, statistics.fmean(curve[s][what] for curve in curves)) for s in curves[0] if all(s in c for c in curves)]


def steps_to(curve: list[tuple[int, float]], target: float) -> float | None:
    """Return the steps after which a curve is above a target, on a line between two validations."""
    for (before, low), (after, high) in itertools.pairwise(curve):
        if high >= target:
            return before + (after - before) * max(0.0, (target - low) / (high - low))
    return None


def in_words(chosen: Row | None) -> str:
    """Return what was chosen: "ddp", "bfloat16", "int8", "dgc, 6.4 %"."""
    if chosen is None:
        return ""
    method = lowbw.Method(**chosen)
    if isinstance(method.what, lowbw.TopK) and method.when.stairs:
        return f"dgc, {100 * (1 - method.when.stairs[-1]):.3g} %"
    whole = "ddp" if method.where.inter_dtype == "float32" else method.where.inter_dtype
    return method.what.value_dtype if isinstance(method.what, lowbw.Quantized) else whole


def in_table(columns: list[str], rows: list[list[str]]) -> str:
    """Return a table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def what_counts(task: Task) -> tuple[str, int]:
    """Return what is compared with ddp, and the sign of what is better: accuracy, or the loss of a language model."""
    return ("val_acc", 1) if task.is_pretrained else ("val_loss", -1)


def accuracies(results: Row, task: str) -> str:
    """Return the table of accuracy and loss at the end of the runs."""
    kind, dense, rows = TASKS[task], runs_of(results, task, "ddp"), []
    for name, way in WAYS.items():
        runs = runs_of(results, task, name)
        if seeds := sorted(runs.keys() & dense.keys()):
            last = round(kind.num_steps * way.stretch)
            ends = [(curve_of(runs[seed])[last], curve_of(dense[seed])[kind.num_steps]) for seed in seeds]
            points = [100 * (mine["val_acc"] - theirs["val_acc"]) for mine, theirs in ends]
            losses = [mine["val_loss"] / theirs["val_loss"] - 1 for mine, theirs in ends]
            spread = f" ({min(points):+.1f} to {max(points):+.1f})" if points[1:] else ""
            rows.append(
                [
                    f"{name}{chosen_by(results, task, name)}",
                    f"{last}",
                    f"{len(seeds)}",
                    f"{statistics.fmean(mine['val_acc'] for mine, _ in ends):.1%}",
                    "" if name == "ddp" else f"{statistics.fmean(points):+.1f}{spread}",
                    f"{statistics.fmean(mine['val_loss'] for mine, _ in ends):.3f}",
                    "" if name == "ddp" else f"{statistics.fmean(losses):+.1%}",
                ]
            )
    return in_table(["method", "steps", "seeds", "accuracy", "points to ddp", "loss", "loss to ddp"], rows)


def seconds(results: Row, task: str) -> str:
    """Return the table of seconds per step, and to ddp's accuracy; empty if nothing is timed."""
    kind, dense, rows = TASKS[task], runs_of(results, task, "ddp"), []
    what, sign = what_counts(kind)
    times = {link: {row["method"]: row["step_s"] for row in of_kind(results, "time", task, link)} for link in LINKS}
    timed = {name for link in LINKS for name in times[link]}
    for name in [*(name for name in WAYS if name.split(STRETCHED)[0] in timed), *([AGAIN] if AGAIN in timed else [])]:
        runs = runs_of(results, task, name.replace(AGAIN, "ddp"))
        if not runs.keys() & dense.keys():
            continue
        goal = sign * statistics.fmean(curve_of(dense[s])[kind.num_steps][what] for s in runs.keys() & dense.keys())
        target = goal - (POINTS / 100 if kind.is_pretrained else SLACK * abs(goal))
        num_steps = steps_to([(step, sign * each) for step, each in mean_curve(runs, what)], target)
        cells = ["not reached" if num_steps is None else f"{num_steps:.0f}"]
        for link in LINKS:
            step_s, ddp_s = (times[link].get(each, math.nan) for each in (name.split(STRETCHED)[0], "ddp"))
            method = choice_of(results, task, name, link) or next(iter(runs.values())).get("chosen")
            dense_s = (ddp_s - step_s) * (method["when"].get("rampup_begin_step", 0) if method else 0)
            cells += [
                f"{step_s:.2f}",
                f"{ddp_s / step_s:.2f}",
                "" if num_steps is None else f"{dense_s + num_steps * step_s:,.0f}",
            ]
        rows.append([f"{name}{chosen_by(results, task, name)}", *cells])
    columns = ["method", "steps to ddp's"]
    columns += [f"{each} at {link}" for link in LINKS for each in ("s per step", "x ddp", "s to ddp's")]
    return in_table(columns, rows) if rows else ""


def chosen_by(results: Row, task: str, name: str) -> str:
    """Return in brackets what a method has chosen on each link."""
    if name not in WAYS or not WAYS[name].is_choosing:
        return ""
    return f" ({'; '.join(in_words(choice_of(results, task, name, link)) for link in LINKS)})"


def page(results: Row) -> str:
    """Return the tables of what there is."""
    about, where = results["about"], results["environment"]
    versions = ", ".join(f"{name} {each}" for name, each in about["versions"].items())
    runs, timed, choices = (
        " and ".join(dict.fromkeys(row.get("cpu", where["cpu"]) for row in results["rows"] if row["what"] == what))
        for what in ("run", "time", "choice")
    )
    machine = f"{runs}, {where['num_cpus']} cores, torch {where['torch']}, {versions}, {where['date']}"
    num_train, num_val, usual = (about[name] for name in ("num_train", "num_val", "usual_accuracy"))
    parts = [
        f"Two nodes of one rank (`benchmarks/finetune.py`; {machine}; seconds: {timed}; choices: {choices}). "
        "all-MiniLM-L6-v2 with a new head is trained on "
        f"{num_train:,} docstrings of {NUM_CLASSES} sub-packages, {NUM_TOKENS} tokens each, 2 x 8 in a step, by AdamW "
        "(weight decay 0.01, a rate of 5e-5 after 20 steps, 1e-3 where the encoder is frozen or has adapters), and "
        f"validated on {num_val:,} docstrings of other files; {usual:.1%} of these are of one class.\n\n"
        "Accuracy and loss are from runs without a throttle, at equal steps unless the row says otherwise, with what "
        f"`dgc` and `lowbw` had chosen at {CHOICE_LINK}. In brackets: the choice there, and that at "
        f'{list(LINKS)[1]}. "Points to ddp" are differences of runs with the same seed: their mean, the least and '
        "the largest. \"Steps to ddp's\": after these the mean of the runs has the last accuracy of ddp's runs with"
        f' equal seeds, less {POINTS} points, or their loss and {SLACK:.0%}; "s to ddp\'s" are these steps times the '
        f"seconds per step, a mean of {NUM_TIMED} or more after the warm-up; dense steps before it take as long as "
        "ddp's.\n"
    ]
    begun = of_kind(results, "begin", "minilm", CHOICE_LINK)
    if begun:
        there = begun[0]["validated"][-1]
        here = curve_of(runs_of(results, "minilm", begun[0]["method"])[0])[there["step"]]
        parts.append(
            f"A link changes no weight: after {there['step']} steps the loss of {begun[0]['method']} is "
            f"{there['val_loss']:.5f} at {CHOICE_LINK}, and {here['val_loss']:.5f} without a throttle.\n"
        )
    for name, task in TASKS.items():
        if dense := runs_of(results, name, "ddp"):
            ends = [curve_of(run)[task.num_steps]["val_acc"] for run in dense.values()]
            begins = [curve_of(run)[0]["val_acc"] for run in dense.values() if 0 in curve_of(run)]
            parts.append(
                f"## {task.title}\n\n{dense[0]['num_trained'] / 1e6:.3g}M trained parameters. ddp's seeds end at "
                f"{', '.join(f'{each:.1%}' for each in ends)}; before the training accuracy is {begins[0]:.1%}.\n\n"
                + "\n".join([accuracies(results, name), seconds(results, name)])
            )
    return "\n".join(parts)


def main() -> None:
    """Train what is missing, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--only", nargs="+", default=list(WAYS), choices=list(WAYS), help="some methods")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--time", action="store_true", help="seconds per step in the lab; needs a quiet machine")
    parser.add_argument("--report", action="store_true", help="tables of what there is")
    options = parser.parse_args()
    about = prepare()
    results: Row = json.loads(PATH.read_text()) if PATH.exists() else {"rows": []}
    results |= {"about": about, "environment": results.get("environment") or describe_environment()}
    if options.time:
        measure_time(results, options.tasks, options.only)
    elif not options.report:
        measure(results, options.tasks, options.seeds, options.only)
    PATH.with_suffix(".md").write_text(page(results))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        train_rank(json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3]))
    else:
        main()
