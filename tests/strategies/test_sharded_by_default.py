"""Models without `configure_model`: how the layers are gathered, ties, layers that are unfrozen, and buffers."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_lowbw import ConfigurationError, ShardedStrategy, Strategy
from lightning_lowbw.presets import LocalSGD, preset
from tests.ranks import run_ranks
from tests.strategies.sharded_models import Listed, Plain, distance, shard_digest, train, whole
from tests.sync.problem import each, message_of
from tests.tiny import Watcher, sgd

STEPS = 5
METHODS = {"dense": preset("hierarchical"), "local_sgd": LocalSGD(k_steps=2, begin_step=0)}


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


CASES: dict[str, tuple[type[Plain], str, bool]] = {
    "own parameter": (ByOwnParameter, "local_sgd", False),
    "tied siblings, by hand": (ByHand, "dense", False),
    "unfrozen": (Plain, "dense", True),
}


def fit(case: str) -> dict[str, Tensor]:
    """Train sharded on four ranks, or as two ranks that hold all, each with the data of a node."""
    module, name, unfreezes = CASES[case]
    model, num_ranks = module(sgd), dist.get_world_size()
    strategy = ShardedStrategy(METHODS[name], topology=2) if num_ranks == 4 else Strategy(METHODS[name])
    options: dict[str, Any] = {"max_epochs": 2, "callbacks": [Unfreezing()]} if unfreezes else {}
    train(strategy, model, STEPS, num_ranks, dist.get_rank(), **options)
    return whole(model)


def test_layers_train_as_without_shards() -> None:
    cases = [(case,) for case in CASES]
    expected = run_ranks(each, 2, fit, cases)[0]
    for of_rank in run_ranks(each, 4, fit, cases, timeout_s=120.0):
        for case, weights, others in zip(CASES, of_rank, expected, strict=True):
            assert distance(weights, others) < 1e-5, case


class OfPart(ByHand):
    """A loss that uses one of the layers which the module itself gathers, while its training_step has not ended."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        self.manual_backward(self.embedding(batch[0]).square().mean())


def fit_in_vain() -> str | None:
    strategy = ShardedStrategy(METHODS["dense"], topology=2)
    return message_of(lambda: train(strategy, OfPart(sgd), STEPS, 4, dist.get_rank()), ConfigurationError)


def test_what_fsdp_does_not_reduce_is_an_error() -> None:
    for message in run_ranks(fit_in_vain, 4, timeout_s=60):
        assert "FSDP has not reduced its gradient" in str(message)


class Looking(Listed):
    """Notes which layers are gathered at the end of the forward pass."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.gathered = {name.partition(".")[0] for name, p in self.named_parameters() if not isinstance(p, DTensor)}
        return loss


def fit_twice(looks: bool) -> tuple[str, set[str]]:
    """Train two fits, with or without a forward pass between them."""
    model = Looking(sgd)
    for number in range(2):
        if looks and number:
            with torch.no_grad():
                model(torch.ones(2, 16))
        train(ShardedStrategy(METHODS["dense"], topology=2), model, STEPS, 4, dist.get_rank())
    return shard_digest(model), model.gathered


def test_layers_of_a_list_are_gathered_one_at_a_time() -> None:
    """Children stay until the backward pass, for a loss that uses their weights; and not until the next fit."""
    for (looked, gathered), (unwatched, _) in run_ranks(each, 4, fit_twice, [(True,), (False,)]):
        assert gathered == {"frozen", "head"}
        assert looked == unwatched


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


def train_normed(path: str) -> tuple[dict[str, list[Tensor]], Tensor, list[str]]:
    model, resumed = Normed(sgd), Normed(sgd)
    method, share, options = METHODS["local_sgd"], (STEPS, 4, dist.get_rank()), {"val": True, "max_epochs": 2}
    train(ShardedStrategy(method, topology=2), model, *share, callbacks=[Watcher(path, (STEPS,))], **options)
    train(ShardedStrategy(method, topology=2), resumed, *share, ckpt_path=path, **options)
    assert torch.equal(model.norm.running_mean, resumed.norm.running_mean)
    return model.seen, model.norm.running_mean, [shard_digest(model), shard_digest(resumed)]


def test_validation_and_the_end_have_the_same_statistics_on_all_ranks(tmp_path: Any) -> None:
    results = run_ranks(train_normed, 4, str(tmp_path / "some.ckpt"))
    first, final, _ = results[0]
    for rank, (seen, running_mean, digests) in enumerate(results):
        assert digests[0] == digests[1]
        assert torch.equal(running_mean, final)
        for ours, theirs in zip(seen["validation"], first["validation"], strict=True):
            assert torch.equal(ours, theirs)
        pairs = zip(seen["training"], first["training"], strict=True)  # each goes on with its own
        assert rank == 0 or not all(torch.equal(ours, theirs) for ours, theirs in pairs)
