"""What each optimizer of torch does with each method on two ranks: benchmarks/results/optimizers.md, from short runs.

`pytest tests/sync/test_optimizers.py --rewrite-golden` runs them all, and writes the table anew.
"""

from __future__ import annotations

import importlib
import io
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_lowbw import ConfigurationError, LocalSGD, Method, QuantizedGradients
from lightning_lowbw.comm.agreement import digest
from lightning_lowbw.presets import DGC
from lightning_lowbw.sync.gradient import GradientSync
from lightning_lowbw.sync.local import LocalSync
from lightning_lowbw.sync.synchronizer import Synchronizer

DOCUMENT = Path(__file__).with_name("results") / "optimizers.md"
STEPS, STOP, K_STEPS = 13, 8, 3  # the stop is in mid-interval, the end one step after an average
COLUMNS: dict[str, Method] = {
    "dgc": DGC(sparsity=[0.9], min_numel=100),
    "int8": QuantizedGradients(),
    "local_sgd": LocalSGD(K_STEPS),
    "sparse_loco": LocalSGD(K_STEPS, 0, compression={"min_numel": 100, "chunk": 64}),
}
BEGIN, END = "<!-- optimizers: written by benchmarks/optimizers.py -->\n", "<!-- end -->\n"
ABSENT = "not installed"
WORDS = {"momentum": "momentum correction", "own_variance": "Adam's correction", "error_feedback": "error feedback"}
# The name of a row: the class in torch.optim, and its arguments.
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {"lr": 0.1}),
    "SGD, momentum": ("SGD", {"lr": 0.03, "momentum": 0.9, "weight_decay": 0.001}),
    "SGD, Nesterov": ("SGD", {"lr": 0.03, "momentum": 0.9, "nesterov": True}),
    "SGD, dampening": ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    "Adam": ("Adam", {"lr": 0.01}),
    "Adam, amsgrad": ("Adam", {"lr": 0.01, "amsgrad": True}),
    "AdamW": ("AdamW", {"lr": 0.01}),
    "NAdam": ("NAdam", {"lr": 0.01}),
    "RAdam": ("RAdam", {"lr": 0.03}),
    "Adamax": ("Adamax", {"lr": 0.01}),
    "Adagrad": ("Adagrad", {"lr": 0.03}),
    "Adadelta": ("Adadelta", {"lr": 3.0}),
    "RMSprop": ("RMSprop", {"lr": 0.003}),
    "Rprop": ("Rprop", {"lr": 0.003}),
    "ASGD": ("ASGD", {"lr": 0.1}),
    "Adafactor": ("Adafactor", {"lr": 0.03}),
    "Muon, AdamW for vectors": ("Muon", {"lr": 0.02}),
    "SparseAdam, sparse embedding": ("SparseAdam", {"lr": 0.01}),
    "LBFGS": ("LBFGS", {"lr": 0.1}),
    "AdamW8bit (torchao)": ("AdamW8bit", {"lr": 0.01}),
    "AdamW4bit (torchao)": ("AdamW4bit", {"lr": 0.01}),
}
QUANTIZED_WIDTH = 512  # torchao keeps the state of tensors with fewer than 4,096 elements in float32


class Model(nn.Module):
    """Two matrices and two vectors, with a target that it can fit; an embedding on request."""

    def __init__(self, has_embedding: bool, width: int = 32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.inner, self.outer = nn.Linear(12, width), nn.Linear(width, 4)
        self.embedding = nn.Embedding(50, 12, sparse=True) if has_embedding else None
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.2, generator=generator)
        self.target = torch.randn(12, 4, generator=generator)

    def loss(self, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(number)
        x, y = torch.randn(32, 12, generator=generator), 0
        y = x @ self.target
        if self.embedding is not None:
            x = x + self.embedding(torch.randint(0, 50, (32,), generator=generator))
        return nn.functional.mse_loss(self.outer(torch.tanh(self.inner(x))), y)


def make(row: str) -> tuple[Model, list[Optimizer]]:
    kind, options = ROWS[row]
    in_few_bits = not hasattr(torch.optim, kind)
    model = Model(kind == "SparseAdam", QUANTIZED_WIDTH if in_few_bits else 32)
    first, rest = list(model.parameters()), list[nn.Parameter]()
    if kind == "Muon":
        first, rest = [p for p in first if p.ndim == 2], [p for p in first if p.ndim != 2]
    elif model.embedding is not None:
        first, rest = [model.embedding.weight], [p for p in first if p is not model.embedding.weight]
    library = importlib.import_module("torchao.optim") if in_few_bits else torch.optim
    optimizers: list[Optimizer] = [getattr(library, kind)(first, **options)]
    return model, [*optimizers, torch.optim.AdamW(rest, lr=0.01)] if rest else optimizers


def attach(row: str, column: str) -> tuple[Model, list[Synchronizer]]:
    model, optimizers = make(row)
    named = list(model.named_parameters())
    return model, [COLUMNS[column].attach(optimizer, named) for optimizer in optimizers]


def train(model: Model, workers: list[Synchronizer], steps: Iterable[int]) -> None:
    for number in steps:
        for worker in workers:
            worker.optimizer.zero_grad()
        model.loss(100 * number + dist.get_rank()).backward()
        for worker in workers:
            worker.optimizer.step()


def saved(model: Model, workers: list[Synchronizer]) -> io.BytesIO:
    file = io.BytesIO()
    states = [(worker.state_dict(), worker.optimizer.state_dict()) for worker in workers]
    torch.save((model.state_dict(), states), file)
    file.seek(0)
    return file


def everything(model: Model, workers: list[Synchronizer]) -> str:
    """Return a digest of this rank's weights and of its optimizers' states."""
    states = [entry for worker in workers for entry in worker.optimizer.state_dict()["state"].values()]
    tensors = [each for entry in states for each in entry.values() if isinstance(each, Tensor)]
    return digest([*model.parameters(), *(each if type(each) is Tensor else each.dequantize() for each in tensors)])


def cell(row: str, column: str) -> str:
    """Return what happens, in words; what must not happen begins with "fails"."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of error feedback
            model, workers = attach(row, column)
            before = [float(model.loss(-number)) for number in range(1, 5)]
            train(model, workers, range(STOP))
            file = saved(model, workers)
            train(model, workers, range(STOP, STEPS))
            straight = everything(model, workers)
            other, resumed = attach(row, column)
            weights, states = torch.load(file, weights_only=True)
            other.load_state_dict(weights)
            for worker, (own, of_optimizer) in zip(resumed, states, strict=True):
                worker.optimizer.load_state_dict(of_optimizer)
                worker.load_state_dict(own)
            train(other, resumed, range(STOP, STEPS))
    except ConfigurationError as error:
        return str(error).split(". ")[0].split(": use ")[0].rstrip(".") + "."
    if everything(other, resumed) != straight:
        return "fails: another result after a resume"
    for worker in workers:
        if isinstance(worker, LocalSync):
            worker.finish()
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest(model.parameters()))
    if len(set(digests)) > 1:
        return "fails: replicas differ"
    after = [float(model.loss(-number)) for number in range(1, 5)]
    if not sum(after) < 0.95 * sum(before):
        return f"fails: loss {sum(before):.3f}, then {sum(after):.3f}"
    first = workers[0]
    if not isinstance(first, GradientSync) or first.compressed is None:
        return "trains"
    return WORDS[first.correction.kind] if first.residuals else "fails: nothing was kept back"


def column_of(column: str) -> dict[str, str]:
    """Return what happens with each optimizer, by row."""
    found = {}
    for row in ROWS:
        try:
            found[row] = cell(row, column)
        except ModuleNotFoundError:
            found[row] = ABSENT
        except Exception as e:  # noqa: BLE001 - whatever it is belongs into the report
            found[row] = f"fails: {type(e).__name__} {e}"
    return found


def read() -> dict[str, dict[str, str]]:
    """Return what the document says, by row and column."""
    _, _, rest = DOCUMENT.read_text().partition(BEGIN)
    lines = rest.partition(END)[0].splitlines()[2:]
    cells = [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]
    return {row: dict(zip(COLUMNS, of_row, strict=True)) for row, *of_row in cells}


def write(found: dict[str, dict[str, str]]) -> None:
    """Write the table into the document, in the order of the rows."""
    head, _, rest = DOCUMENT.read_text().partition(BEGIN)
    columns = " | ".join(f"`{column}`" for column in COLUMNS)
    lines = [f"| optimizer | {columns} |", f"|{' --- |' * (len(COLUMNS) + 1)}"]
    for row in ROWS:
        lines.append(f"| {' | '.join([row, *(found.get(row, {}).get(column, '') for column in COLUMNS)])} |")
    DOCUMENT.write_text(head + BEGIN + "\n".join(lines) + "\n" + END + rest.partition(END)[2])
