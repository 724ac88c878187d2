"""Buffers that a module replaces, resizes, registers or deletes: handled as ever in one shape, else left alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.ranks import on_ranks
from tests.strategies.fits import gathered, make, same, train, train_by_step, warned
from tests.tiny import Tiny, make_data

STEPS = 4
AVERAGES = ["local_sgd", "diloco", "sparse_loco", "streaming", "post-local", "local_sgd on two levels"]
GRADIENTS = ["dgc, warm-up", "int8", "powersgd", "int8 on two levels"]


def strategy(name: str, **keywords: Any) -> Any:
    changes = {"k_steps": 2, **({"delay_steps": 1} if name == "streaming" else {})}
    return make(name, changes if name in AVERAGES else {}, **keywords, **({"topology": 1} if "levels" in name else {}))


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


@pytest.mark.parametrize("name", [*AVERAGES, *GRADIENTS])
@pytest.mark.fault
@on_ranks(2)
def test_a_bank_that_ranks_fill_differently_stays_their_own_and_disturbs_no_other(name: str) -> None:
    """Stock ddp reads rank 0's bytes into a bank of another size, and shifts all buffers after it."""
    model, rank = Grows(), dist.get_rank()
    _, said = warned(lambda: train(strategy(name), model, STEPS, 1, max_epochs=2, num_sanity_val_steps=0))
    assert model.trainer.global_step == 2 * STEPS
    assert model.bank.tolist() == [0.0, *[1.0 + rank] * (2 * STEPS * (1 + rank))]
    said = [each for each in said if "different shapes" in each]
    assert ["bank (rank 0: (" in each and "alike" not in each for each in said] == [True] * (1 - rank)
    first, second = same(model.seen)
    assert [len(first), len(second)] == [4 + 1 + STEPS, 4 + 1 + 2 * STEPS]
    if name in AVERAGES:
        assert second[-1] == 3.0  # the mean
        assert first[0] > 0.0
    else:
        assert {*second[5:]} == {2.0}, "not those of rank 0"
        assert first[0] == 0.0


def register(model: Any, rank: int) -> None:
    model.register_buffer("late", torch.full((2,), 1.0 + rank))


def delete(model: Any, rank: int) -> None:
    del model.here


def mask(model: Any, rank: int) -> None:
    model.mask = torch.tensor([True, bool(rank), False, True])


def resize(model: Any, rank: int) -> None:
    model.here.resize_(5).fill_(1.0 + rank)


def fill(model: Any, rank: int) -> None:
    model.cache = torch.full((2,), 1.0 + rank)


# By what is changed, perhaps on rank 1 alone: in which step, or in the validation; how; which buffer; and what a rank
# has of it at the end, None where it has not: 1 + rank as a mean or as rank 0 has it.
CHANGES: dict[str, tuple[int | None, Callable[[Any, int], None], str, Callable[[int, float], list[Any] | None]]] = {
    "registered": (3, register, "late", lambda rank, mean: [mean] * 2),
    "registered on one rank": (3, register, "late", lambda rank, mean: [2.0] * 2 if rank else None),
    "deleted": (3, delete, "here", lambda rank, mean: None),
    "deleted on one rank": (3, delete, "here", lambda rank, mean: None if rank else [0.0] * 3),
    "a mask resized": (3, mask, "mask", lambda rank, mean: [True, False, False, True]),
    "resized in place": (3, resize, "here", lambda rank, mean: [mean] * 5),
    "created lazily": (0, fill, "cache", lambda rank, mean: [mean] * 2),
    "resized in validation": (None, resize, "here", lambda rank, mean: [mean] * 5),
}
ON_ONE = " on one rank"
UNEXPECTED = "registered on one rank", "deleted", "resized in validation"


class Changes(Tiny):
    """Changes a buffer in a way, when the step or the hook for it comes."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.at, self.change, *_ = CHANGES[what]
        self.is_on_all = not what.endswith(ON_ONE)
        self.register_buffer("here", torch.zeros(3))
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
        self.register_buffer("wave", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("narrow", torch.zeros(2, dtype=torch.float16))
        self.register_buffer("cache", None, persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.wave += 1 + self.global_rank * 1j
        self.narrow = self.narrow + self.global_rank
        if self.global_step == self.at and (self.is_on_all or self.global_rank):
            self.change(self, self.global_rank)
        return super().training_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        if self.at is None and self.global_step == STEPS:
            self.change(self, self.global_rank)


def change(name: str, what: str, accumulate: int = 1) -> None:
    model, options = Changes(what), {"max_epochs": 2, "num_sanity_val_steps": 0, "accumulate_grad_batches": accumulate}
    warned(lambda: train(strategy(name), model, STEPS * accumulate, 1, **options))
    assert model.trainer.global_step == 2 * STEPS
    ends = {name: buffer.tolist() for name, buffer in model.named_buffers()}
    buffer, expected = CHANGES[what][2:]
    assert ends.get(buffer) == expected(dist.get_rank(), 1.5 if name in AVERAGES else 1.0), what
    same({each: value for each, value in ends.items() if each != buffer or not what.endswith(ON_ONE)})


@pytest.mark.parametrize("name", ["local_sgd", "streaming", "post-local", "dgc, warm-up", "int8"])
@on_ranks(2, timeout_s=240.0)
def test_buffers_that_are_registered_deleted_or_resized_end_as_all_ranks_have_them(name: str) -> None:
    """All of it with means of weights and with gradients; with the others what is not as ranks or steps expect it."""
    for what in CHANGES if name in ("local_sgd", "dgc, warm-up") else UNEXPECTED:
        change(name, what)
    if name == "dgc, warm-up":
        change(name, "resized in place", accumulate=2)


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


@pytest.mark.parametrize("name", ["local_sgd", "streaming", "dgc, warm-up"])
@on_ranks(2)
def test_a_resume_gives_each_rank_its_own_bank_and_the_same_bits(name: str, tmp_path: Path) -> None:
    path, ends = f"{tmp_path}/some.ckpt", []
    for saves, resume in (((5,), None), ((), path)):
        model = Bank()
        warned(lambda: train_by_step(strategy(name), path, saves, resume, model=model, steps=12))  # noqa: B023
        ends.append([model.bank.tolist(), model.mean.tolist(), [p.tolist() for p in model.parameters()]])
    assert len(ends[0][0]) == 1 + 12 * (1 + dist.get_rank())
    assert ends[0] == ends[1]


@pytest.mark.parametrize("name", ["local_sgd", "dgc, warm-up"])
@on_ranks(2)
def test_the_first_broadcasts_of_ddp_leave_out_what_has_other_sizes(name: str) -> None:
    """Fit and validate with a bank that has other sizes on the ranks from the first fit on."""
    model, rank = Grows(), dist.get_rank()
    for epochs in (1, 2):
        options = {"max_epochs": epochs, "num_sanity_val_steps": 0}
        trainer, _ = warned(lambda: train(strategy(name), model, 3, 1, **options))  # noqa: B023
    trainer.validate(model, make_data(2, 1), verbose=False)
    assert model.bank.tolist() == [0.0, *[1.0 + rank] * (9 * (1 + rank))]


@on_ranks(2)
def test_without_broadcasts_each_rank_keeps_its_own() -> None:
    model = Grows()
    warned(lambda: train(strategy("int8", broadcast_buffers=False), model, 3))
    first, second = gathered(model.mean.tolist())
    assert first == [0.0] * 4
    assert second[0] == pytest.approx(2.71)
