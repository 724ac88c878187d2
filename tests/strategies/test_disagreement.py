"""Ranks that were given different things, and models that cannot be trained, are refused before the first step.

And what a rank decides by a metric of its own is decided by all alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, LearningRateFinder, ModelCheckpoint
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset

import lightning_lowbw as lowbw
from lightning_lowbw.comm.agreement import digest
from lightning_lowbw.strategies.keywords import DDP_KEYWORDS
from tests.ranks import on_ranks
from tests.strategies.fits import make, refusal, same, train
from tests.tiny import Tiny, make_data, make_trainer, sgd, trained, weights_of

STEPS = 6


class Wrong(Tiny):
    """A module that is not the same on all ranks, or cannot be trained."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        if what == "sparse":
            self.words = nn.Embedding(100, 16, sparse=True)
        if what == "max_norm":
            self.words = nn.Embedding(100, 16, max_norm=0.1)

    def forward(self, x: Tensor) -> Tensor:
        if self.what == "max_norm":  # changes the rows that this rank looks up
            x = x + self.words(torch.arange(len(x)) + 10 * dist.get_rank())
        return super().forward(x)

    def configure_optimizers(self) -> Any:
        if self.what == "momentum":
            return sgd(self.parameters(), momentum=0.9 + 0.05 * dist.get_rank())
        if self.what == "number" and dist.get_rank() == 1:
            return []
        if self.what == "shared":
            self.automatic_optimization = False
            return [sgd(self.wide.parameters()), sgd([*self.wide.parameters(), *self.head.parameters()])]
        if self.what == "twice":  # torch only warns
            return sgd([*trained(self), self.wide.weight])
        return super().configure_optimizers()


# The strategy of a rank, and words of the error.
REFUSED: dict[str, tuple[Callable[[int], Any], str]] = {
    "config": (
        lambda rank: make("dgc", {"sparsity": (0.9 + 0.01 * rank,)}),
        "sparsity|rank 0 has (0.9,)|1 has (0.91,)",
    ),
    "ddp": (lambda rank: make("dgc", bucket_cap_mb=1 + rank), "bucket_cap_mb|rank 1 has 2"),
    "resume": (lambda rank: make("dgc", resume=("exact", "weights and optimizer")[rank]), "resume|rank 0 has 'exact'"),
    "class": (
        lambda rank: lowbw.ShardedStrategy(lowbw.DGC(), topology=1) if rank else lowbw.DGCStrategy(),
        "class: rank 0 has 'DGCStrategy', rank 1 has 'ShardedStrategy'",
    ),
    "momentum": (lambda _: make("dgc"), "momentum|0.9|0.95"),
    "number": (lambda _: make("local_sgd"), "optimizers"),
    "sparse": (lambda _: make("dgc"), "'words'|sparse=False"),
    "shared": (lambda _: make("dgc"), "in two optimizers"),
    "twice": (lambda _: make("int8"), "twice in one"),
    "max_norm": (lambda _: make("int8"), "checksums|max_norm"),
}
OF_ONE_RANK = ("sparse", "shared", "twice")  # which would be wrong on one rank, too


def refused(strategy: Any, model: Tiny, *args: Any, **options: Any) -> str:
    """Return the error before the first step."""
    message = refusal(strategy, model, *args, **options)
    assert model.trainer.global_step == 0
    return message


@on_ranks(2)
def test_refused_on_all_ranks_before_the_first_step() -> None:
    for what, (strategy, words) in REFUSED.items():
        error = lowbw.ConfigurationError if what in OF_ONE_RANK else lowbw.DisagreementError
        model = Wrong(what)
        with pytest.raises(error) as caught:
            train(strategy(dist.get_rank()), model, 2)
        assert (caught.type, model.trainer.global_step) == (error, 0)
        assert all(word in str(caught.value) for word in words.split("|")), str(caught.value)


# A setting, and its value on each of the two ranks.
SETTINGS: list[tuple[str, tuple[Any, Any]]] = [
    ("max_steps", (4, 6)),
    ("max_epochs", (1, 2)),
    ("accumulate_grad_batches", (1, 2)),
    ("val_check_interval", (1, 2)),
    ("limit_val_batches", (0, 1)),
    ("num_sanity_val_steps", (0, 1)),
    ("gradient_clip_val", (0.5, 0.6)),
    ("precision", ("32-true", "bf16-mixed")),
    ("max_time", ("00:01:00:00", "00:02:00:00")),
    ("callbacks", ([], [EarlyStopping("val_loss")])),
    ("callbacks", ([], [LearningRateFinder()])),  # would train
    ("callbacks", ([], [lowbw.SparsityWarmup(begin_step=2)])),  # of this package
    ("enable_checkpointing", (False, True)),
]


@pytest.mark.fault
@on_ranks(2, timeout_s=60.0)
def test_settings_of_the_trainer_that_differ_are_named_on_all_ranks() -> None:
    for name, values in SETTINGS:
        options = {"max_epochs": 2, name: values[dist.get_rank()]}
        message = refused("dgc, warm-up", Tiny(), 4, 1, error=lowbw.DisagreementError, **options)
        if name in ("callbacks", "enable_checkpointing"):
            assert "callbacks: rank 0 has [], rank 1 has [" in message
            assert (type(values[1][0]).__name__ if name == "callbacks" else "ModelCheckpoint") in message
        else:
            assert f"Trainer({name}): rank 0" in message
        if name in ("max_steps", "gradient_clip_val", "accumulate_grad_batches"):
            assert f"rank 0 has {values[0]}, rank 1 has {values[1]}" in message


@pytest.mark.fault
@on_ranks(2, timeout_s=60.0)
def test_a_checkpoint_that_one_rank_alone_resumes_is_refused_on_all(tmp_path: Path) -> None:
    """Given to rank 0; then rank 1 finds the last one, in a folder of its own."""
    path, rank = f"{tmp_path}/some.ckpt", dist.get_rank()
    train("dgc, warm-up", data=4).save_checkpoint(path)
    for one, given in ((0, path), (1, "last")):
        if given == "last" and rank == one:
            torch.save(torch.load(path, weights_only=False), tmp_path / "last.ckpt")
        callbacks = [ModelCheckpoint(tmp_path / ("" if rank == one else str(rank)), "some", save_last=True)]
        options = {"max_epochs": 2, "callbacks": callbacks, "enable_checkpointing": True}
        options["resume"] = given if rank == one or given == "last" else None
        message = refusal("dgc, warm-up", data=4, error=lowbw.DisagreementError, **options)
        having = ["'a checkpoint'" if rank == one else "'no checkpoint'" for rank in (0, 1)]
        assert f"ckpt_path: rank 0 has {having[0]}, rank 1 has {having[1]}" in message


class Reloading(Tiny):
    """Each epoch has other data; the numbers of batches differ in the second one."""

    def train_dataloader(self) -> Any:
        return make_data(2, 3 - self.trainer.current_epoch * dist.get_rank())


@pytest.mark.fault
@pytest.mark.parametrize("name", ["int8", "local_sgd", "local_sgd, sharded"])
@on_ranks(2, timeout_s=60)
def test_numbers_of_batches_that_differ_are_refused(name: str) -> None:
    strategy = strategy_of(name)
    message = refused(strategy, Tiny(), 3 - dist.get_rank(), max_steps=2, error=lowbw.DisagreementError)
    assert "rank 0 has 3, rank 1 has 2" in message
    assert "limit_train_batches=2" in message
    assert "a stream that repeats, and max_steps" in message


@on_ranks(2, timeout_s=60)
def test_data_that_are_loaded_anew_are_compared_again() -> None:
    model, options = Reloading(), {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3}
    trainer = make_trainer("local_sgd", 2, **options)
    message = refusal(fit=lambda: trainer.fit(model), error=lowbw.DisagreementError)
    assert "rank 0 has 3, rank 1 has 2" in message
    assert trainer.global_step == 3


@pytest.mark.fault
@pytest.mark.skipif("init_sync" not in DDP_KEYWORDS, reason="this release of torch synchronises always")
@on_ranks(2)
def test_other_weights_are_found_where_nobody_makes_them_equal() -> None:
    models = Tiny(), Tiny()
    for model in models:
        torch.nn.init.constant_(model.head.bias, dist.get_rank())
    train(make("dense", init_sync=True), models[0], 1)
    message = refused(make("dense", init_sync=False), models[1], error=lowbw.DisagreementError)
    assert "weights of head.bias (init_sync=False): rank 0 has" in message
    assert "head.weight" not in message


class UsesSparse(Wrong):
    def __init__(self) -> None:
        super().__init__("sparse")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        words = torch.arange(dist.get_rank(), 100, 7 + batch_idx)
        return super().training_step(batch, batch_idx) + self.words(words).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("num_ranks", [1, 2])
@on_ranks()
def test_methods_that_exchange_no_gradients_take_sparse_ones(num_ranks: int) -> None:
    """With begin_step=0 every step is local; with k_steps=1, or on one rank, which steps as DDP does, none is."""
    model = UsesSparse()
    if num_ranks == 2:
        train(lowbw.LocalSGDStrategy(2, begin_step=0), model, 4)
        same(weights_of(model))
    assert "has sparse gradients" in refusal(lowbw.LocalSGDStrategy(3 - num_ranks, begin_step=0), UsesSparse(), 4)


# What a rank decides by a metric of its own is decided by all alike ---------------------------------------------------


class Biased(Tiny):
    """Each rank logs a number of its own, without sync_dist; the learning rate follows it."""

    def __init__(self, interval: str = "epoch") -> None:
        super().__init__()
        self.interval = interval

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.log("own", float((2 * self.global_rank - 1) * batch_idx))  # falls on rank 0, rises on rank 1
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        epoch = self.trainer.current_epoch
        values = [[5.0, 1.0], [1.0, 3.0], [4.0, 4.5], [5.0, 5.0]][min(epoch, 3)]  # means 3, 2, 4.25, 5
        self.log("val_own", torch.tensor(values[self.global_rank]))

    def configure_optimizers(self) -> Any:
        optimizer = sgd(trained(self))
        scheduler = ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
        monitor = "val_own" if self.interval == "epoch" else "own"
        return [optimizer], [{"scheduler": scheduler, "monitor": monitor, "interval": self.interval}]


def strategy_of(name: str) -> Any:
    return make(name, **({"topology": 1} if "sharded" in name else {}))


@pytest.mark.fault
@pytest.mark.parametrize("name", ["dgc", "local_sgd", "int8, sharded"])
@on_ranks(2)
def test_monitored_metrics_are_means_over_ranks(name: str, tmp_path: Path) -> None:
    model, best = Biased(), ModelCheckpoint(tmp_path, monitor="val_own", filename="{epoch}")
    stop = EarlyStopping("val_own", patience=1)
    options = {"callbacks": [best, stop], "max_epochs": 6, "enable_checkpointing": True}
    trainer = train(strategy_of(name), model, 3, 1, **options)
    assert (Path(best.best_model_path).name, float(best.best_model_score)) == ("epoch=1.ckpt", 2.0)
    assert (stop.stopped_epoch, trainer.current_epoch) == (2, 3)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.005)
    same(digest([getattr(p, "_local_tensor", p) for p in model.parameters()]))


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Batches whose number is not known."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


@pytest.mark.parametrize(("name", "is_stream"), [("dgc", False), ("dgc", True), ("int8, sharded", True)])
@on_ranks(2)
def test_learning_rates_that_part_between_two_epochs_are_an_error(name: str, is_stream: bool) -> None:
    data = make_data(2, 6)
    if is_stream:
        data = DataLoader(Stream(data), batch_size=None)
    message = same(refusal(strategy_of(name), Biased("step"), data, error=lowbw.DisagreementError))
    assert "after step 6" in message
    assert "sync_dist=True" in message
    assert "param group 0, lr: rank 0 has" in message


class Short(IterableDataset[Any]):
    """Ends before the length that it says."""

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Any:
        return iter([(torch.zeros(8, 16), torch.zeros(8, dtype=torch.long))] * (STEPS - 2))


@on_ranks(2)
def test_a_stream_that_ends_before_its_length_is_told() -> None:
    data = DataLoader(Short(), batch_size=None)
    for name, said in (("dgc", STEPS), ("local_sgd", STEPS - 1)):
        message = refusal(name, data=data, limit_train_batches=said)
        assert f"says {said} batches, and iter() gave {STEPS - 2} on rank {dist.get_rank()}" in message
    train("dgc", data=data, limit_train_batches=STEPS - 2)
