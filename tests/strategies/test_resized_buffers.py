"""Buffers that a module replaces, resizes, registers or deletes: handled as ever in one shape, else left alone."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lowbw import LocalSGD, Method, PowerSGD, QuantizedGradients, Strategy
from tests.ranks import run_ranks
from tests.strategies.fits import SPARSE
from tests.sync.problem import each
from tests.tiny import Tiny, make_data, make_strategy, make_trainer

STEPS = 6
AVERAGES: dict[str, Method] = {
    "local_sgd": LocalSGD(k_steps=2, begin_step=0),
    "diloco": LocalSGD(k_steps=2, begin_step=0, outer="nesterov"),
    "sparse_loco": LocalSGD(k_steps=2, begin_step=0, compression=SPARSE),
    "streaming_diloco": LocalSGD(k_steps=2, begin_step=0, outer="nesterov", num_fragments=2, delay_steps=1),
    "post_local": LocalSGD(k_steps=2, begin_step=2),
    "two levels": LocalSGD(k_steps=2, begin_step=0, topology=1),
}
GRADIENTS: dict[str, Any] = {
    "ddp": None,
    "dgc": None,
    "int8": QuantizedGradients("int8"),
    "powersgd": PowerSGD(),
    "hierarchical": QuantizedGradients("int8", topology=1),
}


def strategy_of(name: str) -> Any:
    if name in AVERAGES:
        return Strategy(AVERAGES[name])
    if name in ("ddp", "dgc"):
        return make_strategy(name)
    return Strategy(GRADIENTS[name])


class Grows(Tiny):
    """A bank that each rank fills at its own pace, one that all fill alike, and two buffers that keep their shape."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(1))
        self.register_buffer("alike", torch.zeros(1))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("flag", torch.tensor([False, True]))
        self.seen: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.bank = torch.cat([self.bank, torch.full((1 + self.global_rank,), 1.0 + self.global_rank)])
        self.alike = torch.cat([self.alike, torch.full((1,), 2.0 + 2 * self.global_rank)])
        self.mean = 0.9 * self.mean + self.global_rank  # another tensor
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append([*self.mean.tolist(), *self.alike.tolist()])


def grow(name: str) -> dict[str, Any]:
    model = Grows()
    options: dict[str, Any] = {"max_epochs": 2, "num_sanity_val_steps": 0}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(strategy_of(name), dist.get_world_size(), **options)
        trainer.fit(model, make_data(2, STEPS), make_data(2, 1))
    said = [str(each.message) for each in caught if "different shapes" in str(each.message)]
    return {"bank": model.bank.tolist(), "seen": model.seen, "said": said, "step": trainer.global_step}


@pytest.mark.parametrize("name", [*AVERAGES, "dgc", "int8", "powersgd", "hierarchical"])
@pytest.mark.fault(
    "a buffer that each rank fills at its own pace",
    "each rank keeps its own, a warning names it once; buffers of one shape are handled as ever",
)
def test_a_bank_that_ranks_fill_differently_stays_their_own_and_disturbs_no_other(name: str) -> None:
    """Stock ddp reads rank 0's bytes into a bank of another size, and shifts all buffers after it."""
    first, second = run_ranks(grow, 2, name)
    for rank, found in enumerate((first, second)):
        assert found["step"] == 2 * STEPS
        assert found["bank"] == [0.0, *[1.0 + rank] * (2 * STEPS * (1 + rank))]
    assert len(first["said"]) == 1
    assert "bank (rank 0: (" in first["said"][0]
    assert "alike" not in first["said"][0]
    assert second["said"] == []
    assert first["seen"] == second["seen"], "somebody saw other buffers"
    assert [len(each) for each in first["seen"]] == [4 + 1 + STEPS, 4 + 1 + 2 * STEPS]
    if name in AVERAGES:
        assert first["seen"][1][-1] == 3.0  # the mean
        assert first["seen"][0][0] > 0.0
    else:
        assert {*first["seen"][1][5:]} == {2.0}, "not those of rank 0"
        assert first["seen"][0][0] == 0.0


class Changes(Tiny):
    """Changes a buffer in a way, when the step or the hook for it comes."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.register_buffer("here", torch.zeros(3))
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
        self.register_buffer("wave", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("narrow", torch.zeros(2, dtype=torch.float16))
        self.register_buffer("cache", None, persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rank, is_first = self.global_rank, self.global_step == 3
        self.wave += 1 + rank * 1j
        self.narrow = self.narrow + rank
        if self.what == "registered" and is_first:
            self.register_buffer("late", torch.full((2,), 1.0 + rank))
        if self.what == "registered on one rank" and is_first and rank:
            self.register_buffer("late", torch.full((2,), 7.0))
        if self.what == "deleted" and is_first:
            del self.here
        if self.what == "deleted on one rank" and is_first and rank:
            del self.here
        if self.what == "a mask resized" and is_first:
            self.mask = torch.tensor([True, bool(rank), False, True])
        if self.what == "resized in place" and is_first:
            self.here.resize_(5).fill_(1.0 + rank)
        if self.what == "created lazily" and self.cache is None:
            self.cache = torch.full((2,), 1.0 + rank)
        return super().training_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        if self.what == "resized in validation" and self.global_step == STEPS:
            self.here.resize_(6).fill_(1.0 + self.global_rank)


CHANGES = (
    "registered",
    "registered on one rank",
    "deleted",
    "deleted on one rank",
    "a mask resized",
    "resized in place",
    "created lazily",
    "resized in validation",
)


def change(name: str, what: str, accumulate: int = 1) -> dict[str, Any]:
    model = Changes(what)
    options: dict[str, Any] = {"max_epochs": 2, "num_sanity_val_steps": 0, "accumulate_grad_batches": accumulate}
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        trainer = make_trainer(strategy_of(name), dist.get_world_size(), **options)
        trainer.fit(model, make_data(2, STEPS * accumulate), make_data(2, 1))
    assert trainer.global_step == 2 * STEPS
    return {name: buffer.tolist() for name, buffer in model.named_buffers()}


@pytest.mark.parametrize("name", ["local_sgd", "streaming_diloco", "post_local", "dgc", "int8"])
def test_buffers_that_are_registered_deleted_or_resized_end_as_all_ranks_have_them(name: str) -> None:
    calls = [(name, what) for what in CHANGES]
    is_mean = name in AVERAGES
    for (_, what), first, second in zip(calls, *run_ranks(each, 2, change, calls, timeout_s=240.0), strict=True):
        ours = {"late", "here"} if what.endswith("on one rank") else set()
        assert {n: b for n, b in first.items() if n not in ours} == {
            n: b for n, b in second.items() if n not in ours
        }, what
        if what == "registered":
            assert first["late"] == [1.5 if is_mean else 1.0] * 2
        if what == "registered on one rank":
            assert "late" not in first
            assert second["late"] == [7.0] * 2
        if what == "deleted":
            assert "here" not in first
        if what == "deleted on one rank":
            assert first["here"] == [0.0] * 3
            assert "here" not in second
        if what == "a mask resized":
            assert first["mask"] == [True, False, False, True]  # rank 0's
        if what == "created lazily":
            assert first["cache"] == [1.5 if is_mean else 1.0] * 2
        if what == "resized in place":
            assert first["here"] == [1.5 if is_mean else 1.0] * 5
        if what == "resized in validation":
            assert first["here"] == [1.5 if is_mean else 1.0] * 6


def test_a_bank_under_accumulation() -> None:
    for first, second in zip(*run_ranks(each, 2, change, [("dgc", "resized in place", 2)]), strict=True):
        assert first == second


class Bank(Tiny):
    """A bank of its own on each rank, that the training reads; it takes the shape that a checkpoint has."""

    def __init__(self) -> None:
        super().__init__(data_by_step=True)
        self.register_buffer("bank", torch.zeros(1))
        self.register_buffer("mean", torch.zeros(2))

    def _load_from_state_dict(self, state: dict[str, Tensor], prefix: str, *args: Any) -> None:
        self.bank = torch.zeros_like(state[f"{prefix}bank"])
        super()._load_from_state_dict(state, prefix, *args)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.bank = torch.cat([self.bank, torch.full((1 + self.global_rank,), float(self.global_step))])
        self.mean = 0.9 * self.mean + self.global_rank
        return super().training_step(batch, batch_idx) * (1.0 + 0.01 * self.bank.mean() + 0.01 * self.mean.sum())


def resume(name: str, path: str) -> list[Any]:
    found = []
    for ckpt_path in (None, path):
        model = Bank()

        class Save(pl.Callback):
            def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, resumes: Any = ckpt_path) -> None:
                if trainer.global_step == 5 and not resumes:
                    trainer.save_checkpoint(path)

        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            trainer = make_trainer(strategy_of(name), 2, callbacks=[Save()], max_steps=12, max_epochs=-1)
            trainer.fit(model, make_data(2, 12), ckpt_path=ckpt_path)
        found.append([model.bank.tolist(), model.mean.tolist(), [p.tolist() for p in model.parameters()]])
    return found


@pytest.mark.parametrize("name", ["local_sgd", "streaming_diloco", "dgc"])
def test_a_resume_gives_each_rank_its_own_bank_and_the_same_bits(name: str, tmp_path: Path) -> None:
    for rank, (whole, resumed) in enumerate(run_ranks(resume, 2, name, str(tmp_path / "some.ckpt"))):
        assert len(whole[0]) == 1 + 12 * (1 + rank)
        assert whole == resumed


def fit_twice(name: str) -> tuple[list[float], list[float]]:
    """Fit and validate with a bank that has other sizes on the ranks from the first fit on."""
    model = Grows()
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        for epochs in (1, 2):
            trainer = make_trainer(strategy_of(name), 2, max_epochs=epochs, num_sanity_val_steps=0)
            trainer.fit(model, make_data(2, 3), make_data(2, 1))
        trainer.validate(model, make_data(2, 1), verbose=False)
    return model.bank.tolist(), model.mean.tolist()


@pytest.mark.parametrize("name", ["local_sgd", "dgc"])
def test_the_first_broadcasts_of_ddp_leave_out_what_has_other_sizes(name: str) -> None:
    for rank, (bank, _) in enumerate(run_ranks(fit_twice, 2, name)):
        assert bank == [0.0, *[1.0 + rank] * (9 * (1 + rank))]


def fit_without_broadcast() -> list[float]:
    model = Grows()
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        strategy = Strategy(QuantizedGradients("int8"), broadcast_buffers=False)
        make_trainer(strategy, 2).fit(model, make_data(2, 3))
    return model.mean.tolist()


def test_without_broadcasts_each_rank_keeps_its_own() -> None:
    first, second = run_ranks(fit_without_broadcast, 2)
    assert first == [0.0] * 4
    assert second[0] == pytest.approx(2.71)
