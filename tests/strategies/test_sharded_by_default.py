"""Models without `configure_model`: how the layers are gathered, ties, layers that are unfrozen, and buffers."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_lowbw import ShardedStrategy, Strategy
from lightning_lowbw.engine.method import Method
from lightning_lowbw.engine.presets import LocalSGD, preset
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.strategies.sharding import _groups
from tests.engine.problem import message_of
from tests.ranks import run_ranks
from tests.strategies.sharded_models import Listed, Plain, distance, shard_digest, train, whole
from tests.tiny import Watcher, sgd

STEPS = 5
METHODS = {"dense": preset("hierarchical"), "local_sgd": LocalSGD(k_steps=2, begin_step=0)}


# Which layers are gathered together -----------------------------------------------------------------------------------


def test_layers_that_share_a_parameter_are_one_group() -> None:
    a, b, c = (nn.Linear(4, 4) for _ in range(3))
    outer = nn.Sequential(c, nn.Linear(4, 4))
    assert _groups([c, a, b, outer]) == [[c], [a], [b], [outer]]
    b.weight = a.weight
    assert _groups([c, a, b, outer]) == [[c], [a, b], [outer]]
    outer[1].weight = a.weight
    assert _groups([c, b, a, outer]) == [[c], [b, a, outer]]
    outer[1].weight = c.weight  # c is left to what is around it
    assert _groups([c, a, b, outer]) == [[a, b], [outer]]
    shared = nn.Linear(4, 4)
    left, right = nn.Sequential(shared), nn.Sequential(shared, nn.ReLU())
    assert _groups([shared, left, right]) == [[shared], [left], [right]]
    assert _groups([left, right]) == [[left, right]]


def test_inner_groups_come_first() -> None:
    one, two = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    one[0].weight = two[0].weight
    assert _groups([one, two, one[0], two[0]]) == [[one[0], two[0]], [one], [two]]


# Ties -----------------------------------------------------------------------------------------------------------------


class Siblings(Plain):
    """An embedding and a head that are one, each a layer of the module itself."""

    def build(self) -> None:
        torch.default_generator.manual_seed(0)
        self.embedding = nn.Linear(16, 16, bias=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2))
        self.out = nn.Linear(16, 16)
        self.out.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = x + block(x)
        return self.out(x)[:, :5]


class InBlocks(Siblings):
    """Layers of a list that are one, as in ALBERT, and an embedding that is that of a child."""

    def build(self) -> None:
        super().build()
        self.blocks[1][0].weight = self.blocks[0][0].weight
        self.body = nn.Sequential(self.embedding, nn.Linear(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.body(x))


class ByOwnParameter(Siblings):
    """A parameter of the module itself, which is one with that of a layer."""

    def build(self) -> None:
        super().build()
        self.own = self.out.bias

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.own[:5]


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


class ByFunction(Siblings):
    """The head is the embedding's weight, and a loss uses that as well."""

    def build(self) -> None:
        super().build()
        del self.out

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.linear(x, self.embedding.weight)[:, :5]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + 0.1 * self.embedding.weight.square().sum()


class ByLists(Siblings):
    """Parameters in a list and in a dictionary of the module itself."""

    def build(self) -> None:
        super().build()
        self.scales = nn.ParameterList([nn.Parameter(torch.full((5,), 1.5)) for _ in range(2)])
        self.shifts = nn.ParameterDict({"a": nn.Parameter(torch.zeros(5))})

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scales[0] * self.scales[1] + self.shifts["a"]


class LookingIn(ByHand):
    """Calls layers on their own: before the first step, and after batches."""

    @torch.no_grad()
    def on_fit_start(self) -> None:
        self.out(self.embedding(torch.ones(2, 16)))

    @torch.no_grad()
    def on_train_start(self) -> None:
        self.embedding(torch.ones(2, 16))

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        self.embedding(torch.ones(2, 16))


TIED = {
    "siblings": Siblings,
    "blocks": InBlocks,
    "own": ByOwnParameter,
    "by hand": ByHand,
    "looking in": LookingIn,
    "function": ByFunction,
    "lists": ByLists,
}


def fit(method: Method, module: type[Plain], is_sharded: bool, **kwargs: Any) -> dict[str, Tensor]:
    model = module(sgd)
    strategy = ShardedStrategy(method, topology=2) if is_sharded else Strategy(method)
    train(strategy, model, STEPS, dist.get_world_size(), dist.get_rank(), **kwargs)
    return whole(model)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("how", TIED)
def test_parameters_that_are_one_stay_one(how: str, name: str) -> None:
    """Trained as by two ranks that hold all, each with the data of a node."""
    sharded = run_ranks(fit, 4, METHODS[name], TIED[how], True)
    expected = run_ranks(fit, 2, METHODS[name], TIED[how], False)
    for weights in sharded:
        assert distance(weights, expected[0]) < 1e-5


class OfPart(ByHand):
    """A loss that uses one of two layers that are gathered together."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        super().training_step(batch, batch_idx)
        self.manual_backward(self.embedding(batch[0]).square().mean())


class Between(Siblings):
    """Calls one of two layers that are gathered together between a backward pass and its step."""

    @torch.no_grad()
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.embedding(torch.ones(2, 16))


def fit_in_vain(module: type[Plain]) -> str | None:
    return message_of(lambda: fit(METHODS["dense"], module, True), ConfigurationError)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (OfPart, "'embedding.weight': FSDP has not reduced its gradient"),
        (Between, "'embedding.weight' is still gathered after the step"),
    ],
)
def test_half_of_what_is_gathered_together_is_an_error(module: type[Plain], words: str) -> None:
    for message in run_ranks(fit_in_vain, 4, module, timeout_s=60):
        assert words in str(message)


# What stays gathered --------------------------------------------------------------------------------------------------


class Looking(Listed):
    """Counts the layers that are gathered at the end of the forward pass."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.gathered = [name for name, p in self.named_parameters() if not isinstance(p, DTensor)]
        return loss


def look(module: type[Looking]) -> list[str]:
    model = module(sgd)
    train(ShardedStrategy(METHODS["dense"], topology=2), model, STEPS, 4, dist.get_rank())
    return model.gathered


def test_layers_of_a_list_are_gathered_one_at_a_time() -> None:
    """Those of the module itself stay until the backward pass, for a loss that uses their weights."""
    for gathered in run_ranks(look, 4, Looking):
        assert {name.partition(".")[0] for name in gathered} == {"frozen", "head"}


class Unfreezing(BaseFinetuning):
    """Unfreezes the frozen layer in the second epoch."""

    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        self.freeze(pl_module.frozen)

    def finetune_function(self, pl_module: pl.LightningModule, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.frozen, optimizer, lr=0.05)


class Following(Plain):
    """A copy of a layer follows it, as in BYOL."""

    def build(self) -> None:
        super().build()
        self.target = nn.Linear(32, 5).requires_grad_(False)
        self.target.load_state_dict(self.head.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.net(x + self.frozen(x))
        return self.head(hidden) + self.target(hidden)

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        for own, followed in zip(self.target.parameters(), self.head.parameters(), strict=True):
            own.lerp_(followed, 0.1)


def unfreeze(is_sharded: bool) -> tuple[dict[str, Tensor], bool]:
    model = Plain(sgd)
    before = model.frozen.weight.detach().clone()
    strategy = ShardedStrategy(METHODS["dense"], topology=2) if is_sharded else Strategy(METHODS["dense"])
    callbacks = [Unfreezing()]
    train(strategy, model, STEPS, dist.get_world_size(), dist.get_rank(), max_epochs=3, callbacks=callbacks)
    weights = whole(model)
    return weights, torch.equal(weights["frozen.weight"], before)


def test_a_layer_that_is_unfrozen_is_trained() -> None:
    expected, is_same = run_ranks(unfreeze, 2, False)[0]
    assert not is_same
    for weights, _ in run_ranks(unfreeze, 4, True):
        assert distance(weights, expected) < 1e-5


def test_a_copy_follows_a_layer() -> None:
    expected = run_ranks(fit, 2, METHODS["dense"], Following, False)[0]
    for weights in run_ranks(fit, 4, METHODS["dense"], Following, True):
        assert distance(weights, expected) < 1e-5


def fit_twice(looks: bool) -> str:
    """Train two fits, with or without a forward pass between them."""
    model = Listed(sgd)
    for _ in range(2):
        train(ShardedStrategy(METHODS["dense"], topology=2), model, STEPS, 4, dist.get_rank())
        if looks:
            with torch.no_grad():
                model(torch.ones(2, 16))
    train(ShardedStrategy(METHODS["dense"], topology=2), model, STEPS, 4, dist.get_rank())
    return shard_digest(model)


def test_a_forward_pass_between_two_fits() -> None:
    assert run_ranks(fit_twice, 4, True) == run_ranks(fit_twice, 4, False)


# Buffers --------------------------------------------------------------------------------------------------------------


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


def train_normed(method: Method, path: str) -> tuple[dict[str, list[Tensor]], Tensor, list[str]]:
    model, resumed = Normed(sgd), Normed(sgd)
    options = {"val": True, "max_epochs": 3}
    callbacks = [Watcher(path, (2 * STEPS,))]
    train(ShardedStrategy(method, topology=2), model, STEPS, 4, dist.get_rank(), callbacks=callbacks, **options)
    saved = path.format(2 * STEPS)
    train(ShardedStrategy(method, topology=2), resumed, STEPS, 4, dist.get_rank(), ckpt_path=saved, **options)
    assert torch.equal(model.norm.running_mean, resumed.norm.running_mean)
    return model.seen, model.norm.running_mean, [shard_digest(model), shard_digest(resumed)]


@pytest.mark.parametrize("name", METHODS)
def test_validation_and_the_end_have_the_same_statistics_on_all_ranks(name: str, tmp_path: Any) -> None:
    results = run_ranks(train_normed, 4, METHODS[name], str(tmp_path / "{}.ckpt"))
    first, final, _ = results[0]
    for rank, (seen, running_mean, digests) in enumerate(results):
        assert digests[0] == digests[1]
        assert torch.equal(running_mean, final)
        for ours, theirs in zip(seen["validation"], first["validation"], strict=True):
            assert torch.equal(ours, theirs)
        pairs = zip(seen["training"], first["training"], strict=True)  # each goes on with its own
        assert rank == 0 or not all(torch.equal(ours, theirs) for ours, theirs in pairs)
    if name == "dense":  # those of rank 0
        assert torch.equal(first["training"][STEPS], first["validation"][0])
