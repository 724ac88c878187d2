"""Models sharded inside nodes of two ranks: the same trainings as without shards, and what Lightning and modules do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_lowbw import ShardedStrategy, Strategy
from lightning_lowbw.method import Method
from lightning_lowbw.presets import DGC, LocalSGD, preset
from tests.ranks import on_ranks, run_ranks
from tests.strategies.fits import gathered, refusal, same, saving
from tests.strategies.sharded_models import Configured, Listed, Plain, data, distance, shard_digest, train_shards, whole
from tests.tiny import make_trainer, sgd

STEPS = 6
DENSE, LOCAL = preset("hierarchical"), LocalSGD(k_steps=4, begin_step=0)


# Modules without `configure_model` ----------------------------------------------------------------------------------


class Siblings(Plain):
    """An embedding and a head that are one, each a layer of the module itself."""

    def build(self) -> None:
        torch.default_generator.manual_seed(0)
        self.embedding = nn.Linear(16, 16, bias=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2))
        self.out = nn.Linear(16, 16)
        self.out.weight = self.embedding.weight
        self.blocks[1][0].weight = self.blocks[0][0].weight  # as in ALBERT

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = x + block(x)
        return self.out(x)[:, :5]


class ByOwnParameter(Siblings):
    """Parameters of the module itself, of which one is one with that of a layer; lists, and a loss by a function."""

    def build(self) -> None:
        super().build()
        self.own = self.out.bias
        self.scales = nn.ParameterList([nn.Parameter(torch.full((5,), 1.5)) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x) + self.own[:5]) * self.scales[0] * self.scales[1]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + 0.1 * self.embedding.weight.square().sum()


class ByHand(Siblings):
    """Two steps in each batch."""

    automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        for _ in range(2):
            loss = super().training_step(batch, batch_idx)
            optimizer.zero_grad()  # type: ignore[union-attr]
            self.manual_backward(loss)
            optimizer.step()  # type: ignore[union-attr]


class Unfreezing(BaseFinetuning):
    """Unfreezes the frozen layer in the second epoch."""

    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        self.freeze(pl_module.frozen)

    def finetune_function(self, pl_module: pl.LightningModule, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.frozen, optimizer, lr=0.05)


class Unfrozen(Plain):
    def configure_callbacks(self) -> list[pl.Callback]:
        return [Unfreezing()]


# A node trains as one participant does that holds the whole model ---------------------------------------------------


# By name: the method, the module, and other arguments of the Trainer. The bits of other methods are in tests/golden.
CASES: dict[str, tuple[Method, type[Plain], dict[str, Any]]] = {
    "delayed diloco": (LocalSGD(3, 0, outer="nesterov", delay_steps=1), Configured, {"gradient_clip_val": 0.05}),
    "own parameter": (LocalSGD(2, 0), ByOwnParameter, {}),
    "tied siblings, by hand": (DENSE, ByHand, {}),
    "unfrozen": (DENSE, Unfrozen, {"max_epochs": 2}),
}


def fit_all(are_sharded: bool) -> dict[str, tuple[dict[str, Tensor], str]]:
    """Train on equal shares of the same batches; return the weights, and digests of this rank's shards."""
    found = {}
    for name, (method, module, options) in CASES.items():
        model = (Plain if issubclass(module, Configured) and not are_sharded else module)(sgd)
        train_shards(method if are_sharded else Strategy(method), model, STEPS, **options)
        found[name] = whole(model), shard_digest(model)
    return found


def test_a_node_is_one_participant() -> None:
    expected, found = run_ranks(fit_all, 2, False)[0], run_ranks(fit_all, 4, True)
    for name in CASES:
        assert all(distance(each[name][0], expected[name][0]) < 2e-5 for each in found), name
        digests = [each[name][1] for each in found]
        assert digests[0] == digests[2] != digests[1] == digests[3]


# How layers are gathered --------------------------------------------------------------------------------------------


class OfPart(ByHand):
    """A loss that uses one of the layers which the module itself gathers, while its training_step has not ended."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        self.manual_backward(self.embedding(batch[0]).square().mean())


@on_ranks(4, timeout_s=60)
def test_what_fsdp_does_not_reduce_is_an_error() -> None:
    message = refusal(DENSE, OfPart(sgd), STEPS, fit=train_shards)
    assert "FSDP has not reduced its gradient" in message


class Looking(Listed):
    """Notes which layers are gathered at the end of the forward pass."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.gathered = {name.partition(".")[0] for name, p in self.named_parameters() if not isinstance(p, DTensor)}
        return loss


@on_ranks(4)
def test_layers_of_a_list_are_gathered_one_at_a_time() -> None:
    """Children stay until the backward pass, for a loss that uses their weights; and not until the next fit."""
    digests = []
    for looks in (True, False):  # whether there is a forward pass between two fits
        model = Looking(sgd)
        for number in range(2):
            if looks and number:
                with torch.no_grad():
                    model(torch.ones(2, 16))
            train_shards(DENSE, model, STEPS)
        assert model.gathered == {"frozen", "head"} or not looks
        digests.append(shard_digest(model))
    assert digests[0] == digests[1]


class Normed(Listed):
    """Keeps running statistics, and notes what validation and the training see of them."""

    def build(self) -> None:
        super().build()
        self.norm = nn.BatchNorm1d(5)
        self.seen: dict[str, list[Tensor]] = {"training": [], "validation": []}

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))

    def on_train_batch_start(self, *_: Any) -> None:
        self.seen["training"].append(self.norm.running_mean.clone())

    def on_validation_start(self) -> None:
        self.seen["validation"].append(self.norm.running_mean.clone())


@on_ranks(4)
def test_validation_and_the_end_have_the_same_statistics_on_all_ranks(tmp_path: Path) -> None:
    model, resumed, path = Normed(sgd), Normed(sgd), f"{tmp_path}/some.ckpt"
    options = {"val": True, "max_epochs": 2, "limit_val_batches": 1}
    train_shards(LOCAL, model, STEPS, callbacks=[saving(path, (STEPS,))], **options)
    train_shards(LOCAL, resumed, STEPS, resume=path, **options)
    assert shard_digest(model) == shard_digest(resumed)
    assert torch.equal(model.norm.running_mean, resumed.norm.running_mean)
    same([model.norm.running_mean.tolist(), *(each.tolist() for each in model.seen["validation"])])
    trained = gathered([each.tolist() for each in model.seen["training"]])
    assert all(other != trained[0] for other in trained[1:]), "a rank has not gone on with its own"


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


@on_ranks(4, timeout_s=120.0)
def test_modules_of_all_kinds(tmp_path: Path) -> None:
    """Train, and save on the way."""
    for kind, (cls, method, options) in KINDS.items():
        model, path = cls(sgd), f"{tmp_path}/{kind}"
        train_shards(method, model, 4, callbacks=[saving(path, (2,))], **options)
        own = [p.to_local() for p in model.parameters() if isinstance(p, DTensor) and p.requires_grad]
        assert all(bool(shard.isfinite().all()) for shard in own), kind
        digests = gathered(shard_digest(model))
        assert digests[:2] == digests[2:], kind
        assert Path(path).exists(), kind


# What is sent, and when ---------------------------------------------------------------------------------------------


# Whoever looks ------------------------------------------------------------------------------------------------------


class Sampling(pl.Callback):
    """Run a forward pass after some steps, as callbacks do that show what a model makes."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        with torch.no_grad():
            module(torch.ones(4, 16))


@pytest.mark.parametrize(("module", "method"), [(Listed, SPARSE), (Configured, LOCAL)], ids=["gradients", "weights"])
@on_ranks(4)
def test_training_is_the_same_with_validation(module: type[Plain], method: Method, tmp_path: Path) -> None:
    """And with forward passes of a callback, and on from the end of an epoch; FSDP keeps weights that it gathered."""
    path, validated = f"{tmp_path}/{{}}.ckpt", {"val": True, "num_sanity_val_steps": 1, "val_check_interval": 2}
    validated["limit_val_batches"] = 2
    resumed = {"resume": path.format(STEPS)}
    digests = []
    for options in ({}, {**validated, "callbacks": [Sampling(), saving(path, (STEPS,))]}, {**validated, **resumed}):
        model = module(sgd)
        train_shards(method, model, STEPS, max_epochs=2, **options)
        digests.append(shard_digest(model))
    assert digests == [digests[0]] * 3


@on_ranks(4)
def test_validation_and_checkpoints_see_the_consensus(tmp_path: Path) -> None:
    """Between two averages, where the checkpoint is saved, too."""
    model, again, path = Configured(sgd), Configured(sgd), f"{tmp_path}/some.ckpt"
    train_shards(LOCAL, model, STEPS, val=True, callbacks=[saving(path, (STEPS,))])
    trainer = make_trainer(ShardedStrategy(LOCAL, topology=2), 4)
    trainer.validate(again, data(STEPS, 4, dist.get_rank()), ckpt_path=path, verbose=False)
    assert model.val_losses == again.val_losses
