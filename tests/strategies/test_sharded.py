"""Models sharded inside nodes of two ranks: the same trainings as without shards, and what Lightning and modules do."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from lightning_lowbw import NonFiniteGradientError, ShardedStrategy, SparsityWarmup, Strategy
from lightning_lowbw.compress.top_k import SPARSE_LOCO
from lightning_lowbw.method import Method
from lightning_lowbw.presets import DGC, LocalSGD, preset
from lightning_lowbw.schedules.every_step import EveryStep
from tests.ranks import run_ranks
from tests.strategies.sharded_models import Configured, Listed, Plain, data, distance, shard_digest, train, whole
from tests.sync.problem import each
from tests.tiny import Watcher, make_trainer, sgd

STEPS = 6
OPTIMIZERS: dict[str, Any] = {"sgd": sgd, "adamw": functools.partial(AdamW, lr=1e-2)}


# A node trains as one participant does that holds the whole model ---------------------------------------------------


ALL_CHANGES = {**SPARSE_LOCO, "density": 0.999, "value_dtype": "float32", "min_numel": 1}
NEARLY_ALL = DGC(sparsity=[1e-6], rampup_begin_step=2, min_numel=1, value_dtype="float32")
CLIP = {"gradient_clip_val": 0.05}
# By name: the method, the module, the optimizer, other arguments of the Trainer; what trains as it does without shards
# ("ddp" by four ranks, else the method by two); and how closely.
Case = tuple[Method, type[Plain], str, dict[str, Any], "str | None", float]
CASES: dict[str, Case] = {
    "dense": (preset("hierarchical"), Plain, "sgd", {**CLIP, "accumulate_grad_batches": 2}, "ddp", 1e-6),
    "delayed diloco": (LocalSGD(3, 0, outer="nesterov", delay_steps=1), Configured, "sgd", CLIP, None, 2e-5),
    "all changes": (LocalSGD(2, 0, compression=ALL_CHANGES), Configured, "adamw", {}, None, 2e-5),
    "dgc, clipped": (NEARLY_ALL, Configured, "adamw", CLIP, None, 2e-5),
}


def fit(name: str, is_sharded: bool) -> tuple[dict[str, Tensor], str]:
    """Train on an equal share of the same batches; return the weights, and a digest of this rank's shards."""
    method, module, optimizer, trainer, stock, _ = CASES[name]
    model = (module if is_sharded else Plain)(OPTIMIZERS[optimizer])
    strategy = ShardedStrategy(method, topology=2) if is_sharded else stock or Strategy(method)
    train(strategy, model, STEPS, dist.get_world_size(), dist.get_rank(), **trainer)
    return whole(model), shard_digest(model)


@pytest.fixture(scope="module")
def fitted() -> dict[tuple[str, bool], Any]:
    found: dict[tuple[str, bool], Any] = {}
    for num_ranks, cases in (
        (4, [(name, True) for name in CASES] + [(name, False) for name in CASES if CASES[name][4]]),
        (2, [(name, False) for name in CASES if not CASES[name][4]]),
    ):
        results = run_ranks(each, num_ranks, fit, cases, timeout_s=180.0)
        found |= dict(zip(cases, zip(*results, strict=True), strict=True))
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_node_is_one_participant(name: str, fitted: dict[tuple[str, bool], Any]) -> None:
    expected = fitted[name, False][0][0]
    for weights, _ in fitted[name, True]:
        assert distance(weights, expected) < CASES[name][5]
    digests = [digest for _, digest in fitted[name, True]]
    assert digests[0] == digests[2] != digests[1] == digests[3]


# What else a module may do ------------------------------------------------------------------------------------------


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


SPARSE = DGC(sparsity=[0.9], rampup_begin_step=2, min_numel=50)
DILOCO = LocalSGD(k_steps=2, begin_step=0, outer="nesterov")
KINDS: dict[str, tuple[type[Plain], Method, dict[str, Any]]] = {
    "meta device": (Meta, DILOCO, {}),
    "bf16-true, averages": (Configured, DILOCO, {"precision": "bf16-true"}),
    "empty shards": (OneRow, DGC(sparsity=[0.9], min_numel=1), {}),
    "empty shards, averages": (OneRow, LocalSGD(k_steps=2, begin_step=0, compression="int8"), {}),
}


def fit_kind(kind: str, path: str) -> tuple[str, bool]:
    """Train, and save on the way; return a digest of this rank's shards, and whether they are finite."""
    cls, method, options = KINDS[kind]
    model = cls(sgd)
    train(ShardedStrategy(method, topology=2), model, 4, 4, dist.get_rank(), callbacks=[Watcher(path, (2,))], **options)
    own = [p.to_local() for p in model.parameters() if isinstance(p, DTensor) and p.requires_grad]
    return shard_digest(model), all(bool(shard.isfinite().all()) for shard in own)


def test_modules_of_all_kinds(tmp_path: Path) -> None:
    cases = [(kind, str(tmp_path / f"{number}-{{}}.ckpt")) for number, kind in enumerate(KINDS)]
    for (kind, path), *results in zip(cases, *run_ranks(each, 4, fit_kind, cases, timeout_s=120.0), strict=True):
        assert results[:2] == results[2:], kind
        assert all(is_finite for _, is_finite in results), kind
        assert Path(path.format(2)).exists(), kind


def fit_poisoned(method: Method) -> str:
    with pytest.raises(NonFiniteGradientError) as caught:
        train(ShardedStrategy(method, topology=2), Configured(sgd, poison=(1, 4)), STEPS, 4, dist.get_rank())
    return str(caught.value)


def test_a_nan_in_one_shard_is_named_on_all_ranks() -> None:
    first, *others = run_ranks(each, 4, fit_poisoned, [(SPARSE,), (DILOCO,)])
    assert all(other == first for other in others)
    for message in first:
        assert "'net.0.weight'" in message
        assert "on node 0 (ranks [0, 1])" in message or "in the shard of rank " in message


# What is sent, and when ---------------------------------------------------------------------------------------------


class ManyRows(OneRow):
    rows = 400


def send(method: Method, module: type[Plain], callbacks: list[pl.Callback]) -> tuple[int, int, int, Any]:
    """Return the bytes sent, the elements of this rank's shards, how large a small tensor is, and the schedule."""
    model, strategy = module(sgd), ShardedStrategy(method, topology=2)
    train(strategy, model, STEPS, 4, dist.get_rank(), callbacks=callbacks)
    numel = sum(p.to_local().numel() for p in model.parameters() if p.requires_grad and isinstance(p, DTensor))
    (worker,) = strategy.workers
    return strategy.ledger.sent_bytes, numel, worker.params.small_numel, worker.method.when


def test_a_shard_per_rank_is_sent_between_nodes() -> None:
    """Dense: an all-reduce between two nodes sends each number once. Which tensor is small is judged by the whole."""
    warmup = SparsityWarmup(begin_step=2, steps=2, sparsity=[0.5, 0.9])
    cases = [(preset("hierarchical"), Configured, []), (DGC(sparsity=[0.9]), ManyRows, [warmup])]
    for dense, sparse in run_ranks(each, 4, send, cases):
        assert 4 * dense[1] <= dense[0] / STEPS < 4 * dense[1] + 100
        assert sparse[2:] == (16 * 400, EveryStep(2, 2, (0.5, 0.9)))


# Whoever looks ------------------------------------------------------------------------------------------------------


LOCAL = LocalSGD(k_steps=4, begin_step=0)


class Sampling(pl.Callback):
    """Run a forward pass after some steps, as callbacks do that show what a model makes."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        with torch.no_grad():
            module(torch.ones(4, 16))


def fit_and_look(module: type[Plain], method: Method, folder: str) -> dict[str, str]:
    """Train without validation; with it, and with forward passes of a callback; and on from the end of an epoch."""

    def fit(**kwargs: Any) -> str:
        model = module(sgd)
        train(ShardedStrategy(method, topology=2), model, STEPS, 4, dist.get_rank(), **{"max_epochs": 2, **kwargs})
        return shard_digest(model)

    path, validated = f"{folder}/{{}}.ckpt", {"val": True, "num_sanity_val_steps": 1, "val_check_interval": 2}
    return {
        "unwatched": fit(),
        "sampled": fit(**validated, callbacks=[Sampling(), Watcher(path, (STEPS,))]),
        "resumed": fit(**validated, ckpt_path=path.format(STEPS)),
    }


@pytest.mark.parametrize(("module", "method"), [(Listed, SPARSE), (Configured, LOCAL)], ids=["gradients", "weights"])
def test_training_is_the_same_with_validation(module: type[Plain], method: Method, tmp_path: Path) -> None:
    """Although FSDP keeps the weights that a validation has gathered."""
    for found in run_ranks(fit_and_look, 4, module, method, str(tmp_path)):
        assert found == dict.fromkeys(found, found["unwatched"])


class FrozenAfterBackward(Configured):
    def on_train_batch_start(self, *_: Any) -> None:
        self.head.weight.requires_grad_(True)

    def on_after_backward(self) -> None:
        self.head.weight.requires_grad_(False)


def freeze_with_gradients() -> str:
    model = FrozenAfterBackward(sgd)
    train(ShardedStrategy(LOCAL, topology=2), model, STEPS, 4, dist.get_rank())
    return shard_digest(model)


def test_a_frozen_parameter_that_has_a_gradient_is_not_stepped() -> None:
    first, second, *other_node = run_ranks(freeze_with_gradients, 4)
    assert other_node == [first, second]


def look(path: str) -> tuple[list[float], list[float]]:
    """Return the losses of a validation between two averages, and those of the checkpoint that was saved there."""
    model, again = Configured(sgd), Configured(sgd)
    callbacks = [Watcher(path, (STEPS,))]
    train(ShardedStrategy(LOCAL, topology=2), model, STEPS, 4, dist.get_rank(), val=True, callbacks=callbacks)
    trainer = make_trainer(ShardedStrategy(LOCAL, topology=2), 4)  # type: ignore[arg-type]
    trainer.validate(again, data(STEPS, 4, dist.get_rank()), ckpt_path=path.format(STEPS), verbose=False)
    return model.val_losses, again.val_losses


def test_validation_and_checkpoints_see_the_consensus(tmp_path: Path) -> None:
    for seen, saved in run_ranks(look, 4, str(tmp_path / "{}.ckpt")):
        assert seen == saved
