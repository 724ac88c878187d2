"""Ranks that were given different things, and models that cannot be trained, are refused before the first step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EarlyStopping,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from torch import nn

from lightning_lowbw import (
    DGC,
    AveragingSchedule,
    ConfigurationError,
    DGCStrategy,
    DisagreementError,
    LocalSGDStrategy,
    ShardedStrategy,
    SparsityWarmup,
    Strategy,
)
from lightning_lowbw.presets import preset
from lightning_lowbw.strategies.keywords import DDP_KEYWORDS
from tests.ranks import run_ranks
from tests.strategies.fits import meet_an_error
from tests.tiny import Tiny, make_data, make_strategy, make_trainer, sgd, weights_of


class Differs(Tiny):
    """A module that is not the same on all ranks."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        rank = dist.get_rank()
        if what == "shape":
            self.extra = nn.Linear(4, 4 + rank)
        if what == "frozen" and rank == 1:
            self.head.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        rank = dist.get_rank()
        if self.what == "momentum":
            return sgd(self.parameters(), momentum=0.9 + 0.05 * rank)
        if self.what == "optimizer" and rank == 1:
            return torch.optim.Adam(self.parameters())
        if self.what == "dampening":
            return sgd(self.parameters(), dampening=0.1)
        if self.what == "lbfgs":
            return torch.optim.LBFGS(self.parameters())
        return super().configure_optimizers()


def refuse(what: str, strategy: dict[str, Any]) -> tuple[str, str, int]:
    num_ranks = dist.get_world_size()
    model = Differs(what)
    if what == "config":
        strategy = {"sparsity": [0.9 + 0.01 * dist.get_rank()]}
    if what == "exclude":
        strategy = {"exclude": ["embedding.*"]}
    if what == "ddp":
        strategy = {"bucket_cap_mb": 1 + dist.get_rank()}
    trainer = make_trainer(make_strategy("dgc", **strategy), num_ranks)
    with pytest.raises(ConfigurationError) as caught:
        trainer.fit(model, make_data(num_ranks, 2))
    return type(caught.value).__name__, str(caught.value), trainer.global_step


@pytest.mark.parametrize(
    ("what", "error", "words"),
    [
        ("config", DisagreementError, ["sparsity", "rank 0 has (0.9,)", "rank 1 has (0.91,)"]),
        ("ddp", DisagreementError, ["bucket_cap_mb", "rank 1 has 2"]),
        ("shape", DisagreementError, ["model", "extra.weight", "(4, 4)", "(5, 4)"]),
        ("frozen", DisagreementError, ["head.weight", "frozen"]),
        ("momentum", DisagreementError, ["momentum", "0.9", "0.95"]),
        ("optimizer", DisagreementError, ["SGD", "Adam"]),
        ("dampening", ConfigurationError, ["dampening=0.1"]),
        ("lbfgs", ConfigurationError, ["LBFGS"]),
        ("exclude", ConfigurationError, ["'embedding.*' matches no parameter", "wide.weight"]),
    ],
)
def test_refused_on_all_ranks_before_the_first_step(what: str, error: type[Exception], words: list[str]) -> None:
    for name, message, steps in run_ranks(refuse, 2, what, {}):
        assert name == error.__name__
        assert steps == 0
        for word in words:
            assert word in message


SETTINGS: dict[str, tuple[Any, Any]] = {
    "max_steps": (4, 6),
    "max_epochs": (1, 2),
    "accumulate_grad_batches": (1, 2),
    "val_check_interval": (1, 2),
    "limit_val_batches": (0, 1),
    "num_sanity_val_steps": (0, 1),
    "gradient_clip_val": (0.5, 0.6),
    "precision": ("32-true", "bf16-mixed"),
    "max_time": ("00:01:00:00", "00:02:00:00"),
    "callbacks": ([], [EarlyStopping("val_loss")]),
    "enable_checkpointing": (False, True),
}


def differ_in_settings(names: list[str], strategy: str) -> list[tuple[str, str, int]]:
    found = []
    for name in names:
        options = {"max_epochs": 2, name: SETTINGS[name][dist.get_rank()]}
        trainer = make_trainer(make_strategy(strategy), 2, **options)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError) as caught:
            trainer.fit(Tiny(), make_data(2, 4), make_data(2, 1))
        found.append((type(caught.value).__name__, str(caught.value), trainer.global_step))
    return found


@pytest.mark.fault(
    "settings of the Trainer that differ between ranks",
    "refused before the first step, on all ranks, with the values of each",
)
def test_settings_of_the_trainer_that_differ_are_named_on_all_ranks() -> None:
    for found in run_ranks(differ_in_settings, 2, list(SETTINGS), "dgc", timeout_s=60.0):
        for (kind, message, step), (name, values) in zip(found, SETTINGS.items(), strict=True):
            assert (kind, step) == (DisagreementError.__name__, 0), name
            is_callback = name in ("callbacks", "enable_checkpointing")
            assert ("callbacks: rank 0 has [], rank 1 has [" if is_callback else f"Trainer({name}): rank 0") in message
            if name in ("max_steps", "gradient_clip_val", "accumulate_grad_batches"):
                assert f"rank 0 has {values[0]}, rank 1 has {values[1]}" in message


COLLECTIVE: dict[str, Callable[[], Any]] = {
    "StochasticWeightAveraging": lambda: StochasticWeightAveraging(0.1),
    "LearningRateFinder": LearningRateFinder,
    "BatchSizeFinder": BatchSizeFinder,
    "SparsityWarmup": lambda: SparsityWarmup(begin_step=2),
    "AveragingSchedule": lambda: AveragingSchedule(k_steps=2),
}


def have_a_callback_alone(strategy: str) -> list[str]:
    found = []
    for make in COLLECTIVE.values():
        callbacks = [make()] if dist.get_rank() == 1 else []
        trainer = make_trainer(make_strategy(strategy), 2, callbacks=callbacks)
        with pytest.raises(DisagreementError) as caught:
            trainer.fit(Tiny(), make_data(2, 4))
        found.append(str(caught.value))
    return found


@pytest.mark.parametrize("strategy", ["dgc", "local_sgd"])
def test_a_callback_that_communicates_and_only_one_rank_has_is_named_on_all(strategy: str) -> None:
    for messages in run_ranks(have_a_callback_alone, 2, strategy, timeout_s=60.0):
        for name, message in zip(COLLECTIVE, messages, strict=True):
            assert f"callbacks: rank 0 has [], rank 1 has ['{name}" in message


def resume_on_one_rank(strategy: str, folder: str) -> list[str]:
    """Give rank 0 alone the checkpoint; then let rank 1 alone find the last one, in a folder of its own."""
    path, found = f"{folder}/{strategy}.ckpt", []
    trainer = make_trainer(make_strategy(strategy), 2)
    trainer.fit(Tiny(), make_data(2, 4))
    trainer.save_checkpoint(path)
    own = f"{folder}/{dist.get_rank()}"
    for one, given in ((0, path), (1, "last")):
        is_mine = dist.get_rank() == one
        callbacks = [ModelCheckpoint(folder if is_mine else own, strategy, save_last=True)]
        if given == "last" and is_mine:
            torch.save(torch.load(path, weights_only=False), f"{folder}/last.ckpt")
        trainer = make_trainer(make_strategy(strategy), 2, max_epochs=2, callbacks=callbacks, enable_checkpointing=True)
        with pytest.raises(DisagreementError) as caught:
            trainer.fit(Tiny(), make_data(2, 4), ckpt_path=given if is_mine or given == "last" else None)
        found.append(str(caught.value))
    return found


@pytest.mark.fault(
    "a checkpoint that only some ranks are given, or find",
    "refused before the first step, on all ranks; the error names the ranks that have one",
)
@pytest.mark.parametrize("strategy", ["dgc", "dense"])
def test_a_checkpoint_that_one_rank_alone_resumes_is_refused_on_all(strategy: str, tmp_path: Path) -> None:
    for first, second in run_ranks(resume_on_one_rank, 2, strategy, str(tmp_path), timeout_s=60.0):
        assert "ckpt_path: rank 0 has 'a checkpoint', rank 1 has 'no checkpoint'" in first
        assert "ckpt_path: rank 0 has 'no checkpoint', rank 1 has 'a checkpoint'" in second


def fit_unequal(strategy: str, **kwargs: Any) -> str | int:
    """Train on three batches on rank 0, and on two on rank 1."""
    model, num_batches = Tiny(sgd), 3 - dist.get_rank()
    trainer = make_trainer(make_strategy(strategy) if strategy == "dgc" else Strategy(preset(strategy)), 2, **kwargs)
    try:
        trainer.fit(model, make_data(2, num_batches))
    except DisagreementError as error:
        return str(error)
    return trainer.global_step


@pytest.mark.fault(
    "numbers of batches that differ between ranks, with a method that communicates in every step",
    "without `max_steps` refused before the first step, on all ranks, with the numbers of each and what to do",
)
@pytest.mark.parametrize("strategy", ["dgc", "int8"])
def test_unequal_numbers_of_batches_are_refused_where_all_steps_communicate(strategy: str) -> None:
    for message in run_ranks(fit_unequal, 2, strategy, timeout_s=60):
        assert "rank 0 has 3, rank 1 has 2" in str(message)
        assert "limit_train_batches=2" in str(message)


@pytest.mark.parametrize("limit", [{"max_steps": 2}, {"limit_train_batches": 2}])
def test_unequal_numbers_of_batches_that_are_not_reached(limit: dict[str, int]) -> None:
    assert run_ranks(partial(fit_unequal, **limit), 2, "dgc") == [2, 2]


def begin_from_other_weights(strategy: str) -> list[str]:
    found = []
    for init_sync in (True, False):
        model = Tiny()
        if dist.get_rank() == 1:
            torch.nn.init.ones_(model.head.bias)
        trainer = make_trainer(make_strategy(strategy, init_sync=init_sync), 2)
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
    for (message,) in run_ranks(begin_from_other_weights, 2, "dense"):
        assert "weights of head.bias (init_sync=False): rank 0 has" in message
        assert "head.weight" not in message


class SparseEmbedding(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(100, 16, sparse=True)


def refuse_sparse() -> str:
    with pytest.raises(ConfigurationError) as caught:
        make_trainer(make_strategy("dgc"), dist.get_world_size()).fit(SparseEmbedding(), make_data(2, 2))
    return str(caught.value)


def test_sparse_gradients_are_refused() -> None:
    for message in run_ranks(refuse_sparse, 2):
        assert "'words'" in message
        assert "sparse=False" in message


class UsesSparse(SparseEmbedding):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        words = torch.arange(dist.get_rank(), 100, 7 + batch_idx)
        return super().training_step(batch, batch_idx) + self.words(words).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train_sparse(k_steps: int) -> str:
    model = UsesSparse()
    strategy = LocalSGDStrategy(k_steps, begin_step=0)
    make_trainer(strategy, dist.get_world_size()).fit(model, make_data(2, 4))
    return weights_of(model)


def test_methods_that_exchange_no_gradients_take_sparse_ones() -> None:
    """With begin_step=0 every step is local; with k_steps=1 none is."""
    assert len(set(run_ranks(train_sparse, 2, 2))) == 1
    with pytest.raises(AssertionError, match="has sparse gradients"):
        run_ranks(train_sparse, 2, 1)
    with pytest.raises(AssertionError, match="has sparse gradients"):  # one rank steps as DDP does
        run_ranks(train_sparse, 1, 2)


class Shares(Tiny):
    def configure_optimizers(self) -> Any:
        self.automatic_optimization = False
        return [sgd(self.wide.parameters()), sgd([*self.wide.parameters(), *self.head.parameters()])]


def test_two_optimizers_of_one_parameter_are_refused() -> None:
    for message, step in run_ranks(meet_an_error, 2, Shares, 2):
        assert "parameter in common" in message
        assert step == 0


def begin_with_other_strategies() -> str:
    rank = dist.get_rank()
    strategy = ShardedStrategy(DGC(), topology=1) if rank else DGCStrategy()
    with pytest.raises(DisagreementError) as caught:
        make_trainer(strategy, dist.get_world_size()).fit(Tiny(), make_data(2, 2))  # type: ignore[arg-type]
    return str(caught.value)


def test_strategies_of_other_classes_are_named() -> None:
    for message in run_ranks(begin_with_other_strategies, 2):
        assert "class: rank 0 has 'DGCStrategy', rank 1 has 'ShardedStrategy'" in message
