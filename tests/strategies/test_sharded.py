"""Models sharded inside nodes of two ranks: the same trainings as without shards, and what the nodes send."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from lightning_lowbw import (
    AveragingSchedule,
    NonFiniteGradientError,
    ShardedStrategy,
    SparsityWarmup,
    Strategy,
    TrafficMonitor,
)
from lightning_lowbw.engine.method import Method
from lightning_lowbw.engine.presets import DGC, LocalSGD, NarrowGradients, preset
from lightning_lowbw.what.top_k import SPARSE_LOCO, TopK
from lightning_lowbw.when.every_step import EveryStep
from lightning_lowbw.where.agreement import digest
from tests.engine.problem import each
from tests.ranks import run_ranks
from tests.strategies.sharded_models import Configured, Plain, data, distance, shard_digest, train, whole
from tests.tiny import Watcher, sgd

STEPS = 6
OPTIMIZERS: dict[str, Any] = {"sgd": sgd, "adamw": functools.partial(torch.optim.AdamW, lr=1e-2)}


def sharded(
    method: Method | str, module: type[Plain] = Plain, optimizer: str = "sgd", **trainer: Any
) -> tuple[dict[str, Tensor], str]:
    model = module(OPTIMIZERS[optimizer])
    strategy = method if isinstance(method, str) else ShardedStrategy(method, topology=2)
    train(strategy, model, STEPS, 4, dist.get_rank(), **trainer)
    return whole(model), shard_digest(model)


def alone(strategy: Any, optimizer: str = "sgd", module: type[Plain] = Plain, **trainer: Any) -> dict[str, Tensor]:
    """Train without shards, each rank on an equal share of the same batches."""
    model = module(OPTIMIZERS[optimizer])
    strategy = Strategy(strategy) if isinstance(strategy, Method) else strategy
    train(strategy, model, STEPS, dist.get_world_size(), dist.get_rank(), **trainer)
    return whole(model)


def check_equal(results: list[tuple[dict[str, Tensor], str]], expected: dict[str, Tensor], tolerance: float) -> None:
    for weights, _ in results:
        assert distance(weights, expected) < tolerance
    digests = [digest for _, digest in results]
    assert digests[0] == digests[2] != digests[1] == digests[3]


@pytest.mark.parametrize("module", [Plain, Configured])
@pytest.mark.parametrize("trainer", [{}, {"gradient_clip_val": 0.1}, {"accumulate_grad_batches": 2}], ids=str)
def test_dense_exchange_is_ddp(module: type[Plain], trainer: dict[str, Any]) -> None:
    results = run_ranks(functools.partial(sharded, **trainer), 4, preset("hierarchical"), module)
    expected = run_ranks(functools.partial(alone, **trainer), 4, "ddp")[0]
    check_equal(results, expected, 1e-6)


LOCAL = {
    "local_sgd": LocalSGD(k_steps=2),
    "diloco": LocalSGD(k_steps=2, begin_step=0, outer="nesterov"),
    "delayed": LocalSGD(k_steps=3, begin_step=0, delay_steps=1),
    "averaged momentum": LocalSGD(k_steps=2, begin_step=0, inner_momentum="average"),
    "all of the changes": LocalSGD(
        k_steps=2, begin_step=0, compression={**SPARSE_LOCO, "density": 0.999, "value_dtype": "float32", "min_numel": 1}
    ),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", LOCAL)
def test_a_node_is_one_worker_of_local_sgd(name: str, optimizer: str) -> None:
    """To rounding: each node trains on its batch as one rank does on the whole of it."""
    results = run_ranks(sharded, 4, LOCAL[name], Configured, optimizer)
    expected = run_ranks(alone, 2, LOCAL[name], optimizer)[0]
    check_equal(results, expected, 2e-5)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_node_is_one_participant_in_few_bits(optimizer: str) -> None:
    """bfloat16 on the wire: elements are rounded one by one, so that shards round as whole tensors do."""
    method = NarrowGradients("bfloat16")
    results = run_ranks(sharded, 4, method, Configured, optimizer)
    check_equal(results, run_ranks(alone, 2, method, optimizer)[0], 2e-3)


class ClipsByHand(Plain):
    """Manual optimization that clips after each of two backward passes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for _ in range(2):
            self.manual_backward(super().training_step(batch, batch_idx))
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        optimizer.step()


def test_the_mean_of_nodes_is_clipped_by_hand_as_without_shards() -> None:
    """Also in dense steps, in which nothing is reduced between nodes during backward."""
    expected = run_ranks(alone, 4, "ddp", "sgd", ClipsByHand)[0]
    for method in (NarrowGradients("bfloat16"), DGC(sparsity=[0.9], rampup_begin_step=100)):
        check_equal(run_ranks(sharded, 4, method, ClipsByHand), expected, 1e-4)


@pytest.mark.parametrize("trainer", [{}, {"gradient_clip_val": 0.05}], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_dgc_that_sends_nearly_all(optimizer: str, trainer: dict[str, Any]) -> None:
    """The corrections, the hand-over and clipping before the exchange, where shards choose what whole tensors do."""
    method = DGC(sparsity=[1e-6], rampup_begin_step=2, min_numel=1, value_dtype="float32", selection="exact")
    results = run_ranks(functools.partial(sharded, **trainer), 4, method, Configured, optimizer)
    expected = run_ranks(functools.partial(alone, **trainer), 2, method, optimizer)[0]
    check_equal(results, expected, 2e-5)


class Halved(Plain):
    """Each parameter that is trained is two: its first rows and its last, as two ranks have them."""

    def build(self) -> None:
        super().build()
        whole = Plain()
        self._whole = [whole]  # in a list, so that its parameters are not those of this module
        self.halves = nn.ParameterDict()
        for name, parameter in whole.named_parameters():
            if parameter.requires_grad:
                for number, part in enumerate(parameter.detach().chunk(2)):
                    self.halves[f"{name.replace('.', '/')} {number}"] = nn.Parameter(part.clone())
        del self.net, self.head

    def parts(self) -> dict[str, list[nn.Parameter]]:
        names = [name for name, parameter in self._whole[0].named_parameters() if parameter.requires_grad]
        return {name: [self.halves[f"{name.replace('.', '/')} {number}"] for number in range(2)] for name in names}

    def gathered(self) -> dict[str, Tensor]:
        return {name: torch.cat(both) for name, both in self.parts().items()}

    def on_train_start(self) -> None:  # which are small is judged by the whole
        for worker in self.trainer.strategy.workers:
            worker.whole_numels = {
                each: sum(p.numel() for p in both) for both in self.parts().values() for each in both
            }

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.func.functional_call(self._whole[0], self.gathered(), (x,))
        return result


def by_hand(method: Method, optimizer: str) -> dict[str, Tensor]:
    model = Halved(OPTIMIZERS[optimizer])
    train(Strategy(method), model, STEPS, 2, dist.get_rank())
    return {name: weight.detach() for name, weight in model.gathered().items()}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_each_shard_chooses_as_a_tensor_of_its_own(optimizer: str) -> None:
    """DGC at 90 %: what two unsharded ranks do with parameters that are halved by hand."""
    method = DGC(sparsity=[0.9], rampup_begin_step=2, min_numel=20, value_dtype="float32", selection="exact")
    results, expected = run_ranks(sharded, 4, method, Configured, optimizer), run_ranks(by_hand, 2, method, optimizer)
    for weights, _ in results:
        assert distance({name: weights[name] for name in expected[0]}, expected[0]) < 2e-5


# What else a module may do --------------------------------------------------------------------------------------------


class Recomputing(Configured):
    """Activation checkpointing."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.net, x + self.frozen(x), use_reentrant=False)
        return self.head(hidden)


class Meta(Configured):
    """Made without memory, and filled when it is sharded."""

    def make(self) -> None:
        with torch.device("meta"):
            super().make()

    def configure_model(self) -> None:
        super().configure_model()
        self.to_empty(device="cpu")
        torch.manual_seed(0)
        for layer in self.modules():
            if hasattr(layer, "reset_parameters"):
                layer.reset_parameters()


class Compiled(Configured):
    def make(self) -> None:
        super().make()
        for layer in (self.net[0], self.net[2]):
            layer.compile(backend="eager")


class HalfInside(Configured):
    """Computes in bfloat16 by FSDP's own policy, and keeps weights in float32."""

    def policy(self) -> dict[str, Any]:
        return {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}


MODULES: dict[str, tuple[type[Plain], dict[str, Any]]] = {
    "activation checkpointing": (Recomputing, {}),
    "meta device": (Meta, {}),
    "compiled blocks": (Compiled, {}),
    "mixed precision policy": (HalfInside, {}),
    "bf16-mixed": (Configured, {"precision": "bf16-mixed"}),
    "bf16-true": (Configured, {"precision": "bf16-true"}),
    "clipping by value": (Configured, {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}),
    "accumulation": (Configured, {"accumulate_grad_batches": 2}),
    "one shard has a NaN": (functools.partial(Configured, poison=(1, 4)), {}),  # type: ignore[dict-item]
}
SOME = {
    "dgc": DGC(sparsity=[0.9], rampup_begin_step=2, min_numel=50),
    "int8": NarrowGradients("int8"),
    "diloco": LocalSGD(k_steps=2, begin_step=0, outer="nesterov"),
}


def fit(kind: str, name: str) -> tuple[str, str, bool]:
    """Return what was raised, a digest of this rank's shards, and whether it trained."""
    cls, options = MODULES[kind]
    model = cls(functools.partial(SGD, lr=0.05, momentum=0.9))
    said = ""
    try:
        train(ShardedStrategy(SOME[name], topology=2), model, STEPS, 4, dist.get_rank(), **options)
    except NonFiniteGradientError as error:
        said = str(error)
    # A layer that is frozen stays gathered, and is no concern of the exchange.
    shards = [p.to_local() for p in model.parameters() if isinstance(p, DTensor) and p.requires_grad]
    return said, digest(shards), all(bool(shard.isfinite().all()) for shard in shards)


def test_modules_of_all_kinds() -> None:
    cases = [(kind, name) for kind in MODULES for name in SOME]
    for (kind, name), *results in zip(cases, *run_ranks(each, 4, fit, cases, timeout_s=120.0), strict=True):
        digests, said = [result[1] for result in results], {result[0] for result in results}
        if "NaN" not in kind:
            assert digests[:2] == digests[2:], (kind, name)
            assert said == {""}
            assert all(result[2] for result in results), (kind, name)
        else:
            (message,) = said
            assert "'net.0.weight'" in message
            assert "of node 0 (ranks [0, 1])" in message or "in the shard of rank 0" in message or "rank 1" in message


class Even(Plain):
    width = 64


class InParts(Even):
    """Tensor parallelism inside the node, and FSDP over the other dimension."""

    def configure_model(self) -> None:
        how = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(self.net, self.device_mesh["tensor_parallel"], how)
        for layer in (self.net[0], self.net[2], self.net, self.head, self.frozen):
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])


def in_parts(method: Method) -> tuple[dict[str, Tensor], str]:
    model = InParts(sgd)
    train(ShardedStrategy(method, topology=2, tensor_parallel_size=2), model, STEPS, 2, dist.get_rank() // 2)
    return whole(model), shard_digest(model)


@pytest.mark.parametrize("method", [preset("hierarchical"), LOCAL["local_sgd"]], ids=["hierarchical", "local_sgd"])
def test_tensor_parallelism_inside_the_node(method: Method) -> None:
    results = run_ranks(in_parts, 4, method)
    expected = run_ranks(alone, 2, "ddp" if method == preset("hierarchical") else method, "sgd", Even)[0]
    for weights, _ in results:
        assert distance(weights, expected) < 1e-5


def send(name: str) -> tuple[int, int]:
    model = Configured(sgd)
    strategy = ShardedStrategy(preset("int8") if name == "int8" else preset("hierarchical"), topology=2)
    train(strategy, model, STEPS, 4, dist.get_rank())
    trained = sum(p.to_local().numel() for p in model.parameters() if p.requires_grad and isinstance(p, DTensor))
    return strategy.ledger.sent_bytes, trained


def test_what_goes_between_the_nodes_is_a_shard_per_rank() -> None:
    """Dense: an all-reduce of the shard's float32 between two nodes sends each number once; int8 a quarter of it."""
    dense, few = run_ranks(send, 4, "dense"), run_ranks(send, 4, "int8")
    for (nbytes, numel), (narrow, _) in zip(dense, few, strict=True):
        assert 4 * numel <= nbytes / STEPS < 4 * numel + 100
        assert narrow < 0.35 * nbytes


class Traffic(pl.Callback):
    """Keep what `TrafficMonitor` has logged, and the method's schedule."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.when: list[Any] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.rows.append({name: float(each) for name, each in trainer.callback_metrics.items() if "traffic" in name})
        assert isinstance(trainer.strategy, ShardedStrategy)
        self.when = [worker.method.when for worker in trainer.strategy.workers]


def monitor(method: Method, callback: pl.Callback) -> tuple[list[dict[str, float]], list[Any]]:
    seen = Traffic()
    strategy = ShardedStrategy(method, topology=2)
    train(strategy, Configured(sgd), STEPS, 4, dist.get_rank(), callbacks=[callback, TrafficMonitor(), seen])
    return seen.rows, seen.when


def test_callbacks_set_the_schedule_and_read_the_traffic() -> None:
    warmup = SparsityWarmup(begin_step=2, steps=2, sparsity=[0.5, 0.9])
    for rows, when in run_ranks(monitor, 4, DGC(min_numel=1), warmup):
        assert when == [EveryStep(2, 2, (0.5, 0.9))]
        assert [round(row["traffic/density"], 4) for row in rows[:4]] == [1.0, 1.0, 0.5, 0.1]
        assert rows[1]["traffic/compression_ratio"] == pytest.approx(1.0, rel=0.2)
        assert rows[3]["traffic/compression_ratio"] > 2
        assert rows[0]["traffic/bytes_sent"] > 0
    schedule = AveragingSchedule(k_steps=2, begin_step=0)
    for rows, when in run_ranks(monitor, 4, LocalSGD(k_steps=8), schedule):
        assert [each.k_steps for each in when] == [2]
        assert [row["traffic/averages"] for row in rows[:4]] == [0.0, 1.0, 1.0, 2.0]


def look(path: str) -> tuple[list[float], list[float]]:
    """Return the losses of a validation between two averages, and those of the checkpoint that was saved there."""
    model = Configured(sgd)
    strategy = ShardedStrategy(LocalSGD(k_steps=4, begin_step=0), topology=2)
    train(strategy, model, STEPS, 4, dist.get_rank(), val=True, callbacks=[Watcher(path, (STEPS,))])
    again = Configured(sgd)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        strategy=ShardedStrategy(LocalSGD(), topology=2),
        accelerator="cpu",
        devices=4,
        use_distributed_sampler=False,
        **quiet,
    )
    trainer.validate(again, data(STEPS, 4, dist.get_rank()), ckpt_path=path.format(STEPS), verbose=False)
    return model.val_losses, again.val_losses


def test_validation_and_checkpoints_see_the_consensus(tmp_path: Path) -> None:
    for seen, saved in run_ranks(look, 4, str(tmp_path / "step-{}.ckpt")):
        assert seen == saved


class OneRow(Configured):
    """A single weight of one row: the second shard of a node has nothing of it."""

    rows = 1

    def configure_model(self) -> None:
        if self.net is None:
            self.net = nn.Linear(16, self.rows, bias=False)
            nn.init.constant_(self.net.weight, 0.1)
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch[0]).square().mean()
        return loss


def train_one_row(method: Method, path: str) -> tuple[float, list[bool]]:
    """Save after each of two steps."""
    model = OneRow(sgd)
    train(ShardedStrategy(method, topology=2), model, 2, 4, dist.get_rank(), callbacks=[Watcher(path, (1, 2))])
    return float(whole(model)["net.weight"].sum()), [Path(path.format(step)).exists() for step in (1, 2)]


def test_a_rank_without_any_elements_takes_part(tmp_path: Path) -> None:
    """Also in what all ranks exchange when the weights are saved right after an average."""
    for number, method in enumerate(
        (DGC(sparsity=[0.9], min_numel=1), LocalSGD(k_steps=2, begin_step=0, value_dtype="int8"))
    ):
        path = str(tmp_path / f"{number}-{{}}.ckpt")
        (weight, are_saved), *others = run_ranks(train_one_row, 4, method, path, timeout_s=60)
        assert are_saved == [True, True]
        assert others == [(weight, are_saved)] * 3


class ManyRows(OneRow):
    rows = 400


def limit_of(method: Method) -> int:
    strategy = ShardedStrategy(method, topology=2)
    train(strategy, ManyRows(sgd), 2, 4, dist.get_rank())
    return strategy.workers[0].small_numel


@pytest.mark.parametrize(
    "method", [DGC(sparsity=[0.9]), LocalSGD(k_steps=2, begin_step=0, compression=TopK())], ids=["dgc", "local"]
)
def test_which_tensors_are_small_is_judged_by_the_whole(method: Method) -> None:
    assert run_ranks(limit_of, 4, method) == [16 * 400] * 4
