"""docs/large_models.md: kinds of modules x strategies as they are found, and what a rank holds against the formula.

`pytest tests/strategies/test_large_models.py --rewrite-golden` writes the tables anew.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer

from lightning_lowbw import DGC, LocalSGD, Method, NarrowGradients, ShardedStrategy, Strategy
from lightning_lowbw.engine.presets import preset
from tests.engine.problem import each
from tests.ranks import run_ranks
from tests.strategies.sharded_models import Configured, Plain, shard_digest, train
from tests.tiny import Watcher

pytestmark = pytest.mark.slow  # it writes a page, and what it shows is shown by others

PAGE = Path(__file__).resolve().parents[2] / "docs" / "large_models.md"
RANKS_OF_A_NODE = 2
STEPS, SAVED_AT = 6, 4  # of each optimizer, where there are two, half


class Table:
    """A table of the page, between two comments."""

    def __init__(self, name: str, is_rewritten: bool) -> None:
        self.name, self.is_rewritten = name, is_rewritten

    def check(self, rows: list[str], num_rows: int) -> None:
        """Look for these rows on the page, which has `num_rows`; or write them, and then they have to be all."""
        begin, end = f"<!-- {self.name}: written by {Path(__file__).name} -->\n", "<!-- end -->\n"
        head, _, rest = PAGE.read_text().partition(begin)
        written, _, tail = rest.partition(end)
        if self.is_rewritten:
            PAGE.write_text(head + begin + "\n".join(rows) + "\n" + end + tail)
        else:
            missing = set(rows) - set(written.splitlines())
            assert len(written.splitlines()) == num_rows
            assert not missing, f"pytest {Path(__file__).name} --rewrite-golden writes {PAGE.name} anew"


@pytest.fixture
def table(request: pytest.FixtureRequest) -> Callable[[str], Table]:
    return lambda name: Table(name, request.config.getoption("--rewrite-golden"))


# Kinds of modules -----------------------------------------------------------------------------------------------------


class ByStep(Plain):
    """Draws its data by the step, for a loader begins anew in the middle of an epoch."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * self.trainer.global_step + self.global_rank)
        x, y = torch.randn(4, 16, generator=generator), torch.randint(0, 5, (4,), generator=generator)
        loss = super().training_step((x, y), batch_idx)
        self.losses.append(float(loss.detach()))
        return loss

    def build(self) -> None:
        super().build()
        self.losses: list[float] = []


class Sharding(ByStep, Configured):
    """With a `configure_model` that shards it."""


class Adapter(nn.Module):
    """A frozen layer, and what is trained beside it: x W + x A B."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, 8, bias=False)
        self.b = nn.Linear(8, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


class LoRA(ByStep):
    """Adapters on the layers of a frozen model."""

    def build(self) -> None:
        super().build()
        for number in (0, 2):
            self.net[number] = Adapter(self.net[number])


class TwoOptimizers(ByStep):
    """Muon for the matrices, AdamW for the rest; in manual optimization."""

    def build(self) -> None:
        super().build()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizers = self.optimizers()
        assert isinstance(optimizers, list)
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        for optimizer in optimizers:
            optimizer.step()

    def configure_optimizers(self) -> list[Optimizer]:
        trained = [p for p in self.parameters() if p.requires_grad]
        matrices = [p for p in trained if p.dim() == 2]
        rest = [p for p in trained if p.dim() != 2]
        return [torch.optim.Muon(matrices, lr=0.01), AdamW(rest, lr=0.01)]


KINDS: dict[str, type[Plain]] = {
    "plain": ByStep,
    "`configure_model` with `fully_shard`": Sharding,
    "LoRA": LoRA,
    "Muon and AdamW": TwoOptimizers,
}
METHODS: dict[str, Method] = {
    "dgc": DGC(rampup_begin_step=2, sparsity=[0.9], min_numel=50),
    "int8": NarrowGradients("int8"),
    "hierarchical": preset("hierarchical"),
    "local_sgd": LocalSGD(k_steps=2, begin_step=0),
    "diloco": preset("diloco").replace(k_steps=2, begin_step=0),
    "sparse_loco": preset("sparse_loco").replace(k_steps=2, begin_step=0),
}
SHARDED = "_fsdp"
NAMES = [name + ending for ending in ("", SHARDED) for name in METHODS]
WITHOUT_THE_PAGE = ("dgc", "local_sgd", "dgc_fsdp", "sparse_loco_fsdp")  # the others are tried when it is written


def strategy_of(name: str) -> ShardedStrategy | Strategy:
    """Return the strategy of a name, with so few steps that something happens."""
    method = METHODS[name.removesuffix(SHARDED)]
    if name.endswith(SHARDED):
        return ShardedStrategy(method, topology=RANKS_OF_A_NODE)
    return Strategy(method, topology=RANKS_OF_A_NODE if name == "hierarchical" else "flat")


def try_(kind: str, name: str, path: str) -> tuple[str, str]:
    """Return "yes" or why not, and a digest of this rank's weights."""
    cls = KINDS[kind]
    optimizer = functools.partial(AdamW, lr=0.01)
    try:
        model = cls(optimizer)
        saves = Watcher(path, (SAVED_AT,))
        own = dist.get_rank()
        trainer = train(strategy_of(name), model, STEPS, 4, own, callbacks=[saves], max_steps=STEPS)
        steps = trainer.global_step
        again = cls(optimizer)
        train(strategy_of(name), again, STEPS, 4, own, ckpt_path=path.format(SAVED_AT), max_steps=STEPS)
    except (TypeError, RuntimeError) as error:
        return f"no: {str(error).rpartition('(')[2].partition(':')[0]}", ""
    assert steps == STEPS
    assert all(loss == loss for loss in model.losses)
    assert shard_digest(again) == shard_digest(model), (kind, name)
    return "yes", shard_digest(model)


def test_kinds_of_modules_and_strategies(table: Callable[[str], Table], tmp_path: Path) -> None:
    """Each cell is trained, saved, resumed to the bit, and compared between ranks that hold the same."""
    kinds = table("kinds")
    names = NAMES if kinds.is_rewritten else WITHOUT_THE_PAGE
    cases = [
        (kind, name, str(tmp_path / f"{number}-{name}-{{}}.ckpt"))
        for number, kind in enumerate(KINDS)
        for name in names
    ]
    by_rank = run_ranks(each, 4, try_, cases, timeout_s=300.0)
    cells: dict[tuple[str, str], str] = {}
    for (kind, name, _), *results in zip(cases, *by_rank, strict=True):
        said, digests = {result[0] for result in results}, [result[1] for result in results]
        assert len(said) == 1, said
        distance = RANKS_OF_A_NODE if name.endswith(SHARDED) else 1
        assert all(one == other for one, other in zip(digests, digests[distance:], strict=False)), (kind, name)
        cells[kind, name] = said.pop()
    lines = [f"| | {' | '.join(KINDS)} |", f"| --- |{' --- |' * len(KINDS)}"]
    lines += [f"| `{name}` | {' | '.join(cells[kind, name] for kind in KINDS)} |" for name in names]
    kinds.check(lines, 2 + len(NAMES))


# Memory ---------------------------------------------------------------------------------------------------------------

WIDTH, DEPTH = 256, 6


class Wide(Configured):
    """Layers of equal size, each sharded by itself."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x))

    def configure_model(self) -> None:
        if self.net is not None:
            return
        torch.default_generator.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))
        self.head = nn.Linear(WIDTH, 5)
        for layer in (*self.net, self.head):
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])


class Weigh(pl.Callback):
    """Count the bytes of all tensors between two steps, without gradients."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step == STEPS - 1:
            for parameter in module.parameters():
                parameter.grad = None
            self.held = bytes_held()


def bytes_held() -> int:
    gc.collect()
    storages: dict[int, int] = {}
    for found in gc.get_objects():
        if isinstance(found, Tensor) and not isinstance(found, DTensor) and found.device.type == "cpu":
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def weigh(name: str, kind: str) -> tuple[int, int]:
    """Return the bytes that a rank holds, and the parameters of the model."""
    before = bytes_held()
    model, weigher = Wide(OPTIMIZERS[kind]), Weigh()
    train(strategy_of(name), model, STEPS, 4, dist.get_rank(), callbacks=[weigher])
    return weigher.held - before, sum(p.numel() for p in model.parameters())


OPTIMIZERS: dict[str, Any] = {
    "SGD with momentum": functools.partial(SGD, lr=0.01, momentum=0.9),
    "AdamW": functools.partial(AdamW, lr=0.001),
}
OF_OPTIMIZER = {"SGD with momentum": 4, "AdamW": 8}  # bytes per parameter in float32
OF_METHOD = {"hierarchical": 0, "dgc": 4, "int8": 4, "local_sgd": 0, "diloco": 8, "sparse_loco": 8}


def test_memory_is_that_of_the_formula(table: Callable[[str], Table]) -> None:
    """Weights, the optimizer's state and the method's, each divided by the ranks of a node: to a tenth."""
    memory = table("memory")
    names = OF_METHOD if memory.is_rewritten else ("dgc", "sparse_loco")
    cases = [(name + SHARDED, kind) for name in names for kind in OF_OPTIMIZER]
    lines = ["| name | optimizer | bytes per parameter x ranks of a node | found |", "| --- | --- | --- | --- |"]
    for (name, kind), *results in zip(cases, *run_ranks(each, 4, weigh, cases, timeout_s=120.0), strict=True):
        parts = [4, OF_OPTIMIZER[kind], OF_METHOD[name.removesuffix(SHARDED)]]
        found = max(held * RANKS_OF_A_NODE / numel for held, numel in results)
        assert sum(parts) - 0.1 <= found <= 1.1 * sum(parts), (name, kind, found)
        shown = " + ".join(str(part) for part in parts if part)
        lines.append(f"| `{name}` | {kind} | {shown} = {sum(parts)} | {found:.1f} |")
    memory.check(lines, 2 + len(OF_METHOD) * len(OF_OPTIMIZER))
