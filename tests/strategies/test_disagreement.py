"""Ranks that were given different things, and models that cannot be trained, are refused before the first step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from lightning_lowbw import (
    DGC,
    ConfigurationError,
    DGCStrategy,
    DisagreementError,
    LocalSGDStrategy,
    QuantizedGradients,
    ShardedStrategy,
    SparsityWarmup,
    Strategy,
)
from lightning_lowbw.strategies.keywords import DDP_KEYWORDS
from tests.ranks import run_ranks
from tests.tiny import Tiny, make_data, make_strategy, make_trainer, sgd, weights_of


class Wrong(Tiny):
    """A module that is not the same on all ranks, or cannot be trained."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        if what == "shape":
            self.extra = nn.Linear(4, 4 + dist.get_rank())
        if what == "sparse":
            self.words = nn.Embedding(100, 16, sparse=True)

    def configure_optimizers(self) -> Any:
        if self.what == "momentum":
            return sgd(self.parameters(), momentum=0.9 + 0.05 * dist.get_rank())
        if self.what == "shared":
            self.automatic_optimization = False
            return [sgd(self.wide.parameters()), sgd([*self.wide.parameters(), *self.head.parameters()])]
        return super().configure_optimizers()


STRATEGIES: dict[str, Callable[[int], DDPStrategy]] = {  # of a rank
    "config": lambda rank: make_strategy("dgc", sparsity=[0.9 + 0.01 * rank]),
    "ddp": lambda rank: make_strategy("dgc", bucket_cap_mb=1 + rank),
    "resume": lambda rank: make_strategy("dgc", resume="weights and optimizer" if rank else "exact"),
    "exclude": lambda _: make_strategy("dgc", exclude=["embedding.*"]),
    "class": lambda rank: ShardedStrategy(DGC(), topology=1) if rank else DGCStrategy(),  # type: ignore[dict-item, return-value]
}
REFUSED: dict[str, tuple[type[Exception], list[str]]] = {
    "config": (DisagreementError, ["sparsity", "rank 0 has (0.9,)", "rank 1 has (0.91,)"]),
    "ddp": (DisagreementError, ["bucket_cap_mb", "rank 1 has 2"]),
    "resume": (DisagreementError, ["resume", "rank 0 has 'exact'"]),
    "class": (DisagreementError, ["class: rank 0 has 'DGCStrategy', rank 1 has 'ShardedStrategy'"]),
    "shape": (DisagreementError, ["model", "extra.weight", "(4, 4)", "(5, 4)"]),
    "momentum": (DisagreementError, ["momentum", "0.9", "0.95"]),
    "exclude": (ConfigurationError, ["'embedding.*' matches no parameter", "wide.weight"]),
    "sparse": (ConfigurationError, ["'words'", "sparse=False"]),
    "shared": (ConfigurationError, ["parameter in common"]),
}


def refuse_all() -> list[tuple[str, str, int]]:
    found = []
    for what in REFUSED:
        make = STRATEGIES.get(what, lambda _: make_strategy("dgc"))
        trainer = make_trainer(make(dist.get_rank()), 2)
        with pytest.raises(ConfigurationError) as caught:
            trainer.fit(Wrong(what), make_data(2, 2))
        found.append((type(caught.value).__name__, str(caught.value), trainer.global_step))
    return found


def test_refused_on_all_ranks_before_the_first_step() -> None:
    for found in run_ranks(refuse_all, 2):
        for (name, message, steps), (error, words) in zip(found, REFUSED.values(), strict=True):
            assert (name, steps) == (error.__name__, 0)
            assert all(word in message for word in words), message


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
    ("callbacks", ([], [SparsityWarmup(begin_step=2)])),  # of this package
    ("enable_checkpointing", (False, True)),
]


def differ_in_settings() -> list[tuple[str, str, int]]:
    found = []
    for name, values in SETTINGS:
        trainer = make_trainer(make_strategy("dgc"), 2, **{"max_epochs": 2, name: values[dist.get_rank()]})  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError) as caught:
            trainer.fit(Tiny(), make_data(2, 4), make_data(2, 1))
        found.append((type(caught.value).__name__, str(caught.value), trainer.global_step))
    return found


@pytest.mark.fault(
    "settings of the Trainer that differ between ranks",
    "refused before the first step, on all ranks, with the values of each",
)
def test_settings_of_the_trainer_that_differ_are_named_on_all_ranks() -> None:
    for found in run_ranks(differ_in_settings, 2, timeout_s=60.0):
        for (kind, message, step), (name, values) in zip(found, SETTINGS, strict=True):
            assert (kind, step) == (DisagreementError.__name__, 0), name
            if name in ("callbacks", "enable_checkpointing"):
                callback = type(values[1][0]).__name__ if name == "callbacks" else "ModelCheckpoint"
                assert "callbacks: rank 0 has [], rank 1 has [" in message
                assert callback in message
            else:
                assert f"Trainer({name}): rank 0" in message
            if name in ("max_steps", "gradient_clip_val", "accumulate_grad_batches"):
                assert f"rank 0 has {values[0]}, rank 1 has {values[1]}" in message


def resume_on_one_rank(folder: str) -> list[str]:
    """Give rank 0 alone the checkpoint; then let rank 1 alone find the last one, in a folder of its own."""
    path, found = f"{folder}/some.ckpt", []
    trainer = make_trainer(make_strategy("dgc"), 2)
    trainer.fit(Tiny(), make_data(2, 4))
    trainer.save_checkpoint(path)
    own = f"{folder}/{dist.get_rank()}"
    for one, given in ((0, path), (1, "last")):
        is_mine = dist.get_rank() == one
        callbacks = [ModelCheckpoint(folder if is_mine else own, "some", save_last=True)]
        if given == "last" and is_mine:
            torch.save(torch.load(path, weights_only=False), f"{folder}/last.ckpt")
        trainer = make_trainer(make_strategy("dgc"), 2, max_epochs=2, callbacks=callbacks, enable_checkpointing=True)
        with pytest.raises(DisagreementError) as caught:
            trainer.fit(Tiny(), make_data(2, 4), ckpt_path=given if is_mine or given == "last" else None)
        found.append(str(caught.value))
    return found


@pytest.mark.fault(
    "a checkpoint that only some ranks are given, or find",
    "refused before the first step, on all ranks; the error names the ranks that have one",
)
def test_a_checkpoint_that_one_rank_alone_resumes_is_refused_on_all(tmp_path: Path) -> None:
    for first, second in run_ranks(resume_on_one_rank, 2, str(tmp_path), timeout_s=60.0):
        assert "ckpt_path: rank 0 has 'a checkpoint', rank 1 has 'no checkpoint'" in first
        assert "ckpt_path: rank 0 has 'no checkpoint', rank 1 has 'a checkpoint'" in second


def fit_unequal() -> str:
    """Train on three batches on rank 0, and on two on rank 1."""
    with pytest.raises(DisagreementError) as caught:
        make_trainer(Strategy(QuantizedGradients()), 2).fit(Tiny(), make_data(2, 3 - dist.get_rank()))
    return str(caught.value)


@pytest.mark.fault(
    "numbers of batches that differ between ranks, with a method that communicates in every step",
    "without `max_steps` refused before the first step, on all ranks, with the numbers of each and what to do",
)
def test_unequal_numbers_of_batches_are_refused_where_all_steps_communicate() -> None:
    for message in run_ranks(fit_unequal, 2, timeout_s=60):
        assert "rank 0 has 3, rank 1 has 2" in message
        assert "limit_train_batches=2" in message


def begin_from_other_weights() -> list[str]:
    found = []
    for init_sync in (True, False):
        model = Tiny()
        if dist.get_rank() == 1:
            torch.nn.init.ones_(model.head.bias)
        trainer = make_trainer(make_strategy("dense", init_sync=init_sync), 2)
        try:
            trainer.fit(model, make_data(2, 1))
        except DisagreementError as error:
            found.append(str(error))
    return found


@pytest.mark.fault(
    "initial weights that differ between ranks, `init_sync=False`",
    "refused before the first step, on all ranks; the parameters are named",
)
@pytest.mark.skipif("init_sync" not in DDP_KEYWORDS, reason="this release of torch synchronises always")
def test_other_weights_are_found_where_nobody_makes_them_equal() -> None:
    for (message,) in run_ranks(begin_from_other_weights, 2):
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


def train_sparse(k_steps: int) -> str:
    model = UsesSparse()
    trainer = make_trainer(LocalSGDStrategy(k_steps, begin_step=0), dist.get_world_size())
    try:
        trainer.fit(model, make_data(2, 4))
    except ConfigurationError as error:
        return str(error)
    return weights_of(model)


def test_methods_that_exchange_no_gradients_take_sparse_ones() -> None:
    """With begin_step=0 every step is local; with k_steps=1 none is."""
    first, second = run_ranks(train_sparse, 2, 2)
    assert first == second
    assert "sparse gradients" not in first
    refused = [*run_ranks(train_sparse, 2, 1), *run_ranks(train_sparse, 1, 2)]  # one rank steps as DDP does
    assert all("has sparse gradients" in message for message in refused)
