"""Manual optimization: the user's code calls backward and step, and may do so in its own way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_lowbw import DisagreementError
from lightning_lowbw.comm.agreement import digest
from tests.ranks import on_ranks
from tests.strategies.fits import make, refusal, same, saving, train, weights
from tests.tiny import ManualTiny, Tiny

CHANGES: dict[str, dict[str, Any]] = {
    "dgc": {"rampup_begin_step": 4},
    "local_sgd": {"k_steps": 4},
    "post-local": {"k_steps": 2, "begin_step": 4},
}
STEPS = 6


def strategy(name: str) -> Any:
    return make(name, CHANGES.get(name.removesuffix(" on two levels")))


class Manual(Tiny):
    """Accumulates the gradients of two halves of a batch, in all steps as Lightning wants it or in each otherwise."""

    def __init__(self, is_plain: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.is_plain = is_plain
        self.norm = nn.Identity()  # type: ignore[assignment]  # statistics of batch norm would differ in halves

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        are_plain = [(True, True), (False, True), (True, False), (False, False)][batch_idx % 4]
        for x, y, is_plain in zip(*(each.chunk(2) for each in batch), are_plain, strict=True):
            loss = nn.functional.cross_entropy(self(x), y)
            loss.backward() if self.is_plain and is_plain else self.manual_backward(loss)
        optimizer.step()


@pytest.mark.fault
@pytest.mark.parametrize(
    ("name", "num_ranks"), [("dgc", 2), ("dgc on two levels", 4), ("post-local", 2), ("post-local, sharded", 4)]
)
@on_ranks()
def test_a_plain_backward_is_as_good_as_manual_backward(name: str, num_ranks: int) -> None:
    ends = []
    for is_plain in (False, True):
        model = Manual(is_plain)
        train(strategy(name), model, STEPS)
        ends.append([getattr(p, "full_tensor", p.detach)().detach() for p in model.parameters()])
        same(digest(ends[-1]))
    for weight, reference in zip(ends[1], ends[0], strict=True):
        torch.testing.assert_close(weight, reference, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_a_resume_keeps_each_rank_s_buffers(tmp_path: Path) -> None:
    """The statistics of batch norm are of a rank's own data, also in synchronous steps."""
    whole, resumed = ManualTiny(data_by_step=True), ManualTiny(data_by_step=True)
    path, synchronous = f"{tmp_path}/3", {"begin_step": STEPS}
    train(make("post-local", synchronous), whole, STEPS, callbacks=[saving(path, (3,))])
    train(make("post-local", synchronous), resumed, STEPS, resume=path)
    assert weights(whole) == weights(resumed)


class LeavesOut(Tiny):
    """Rank 1 leaves out a step in one batch, with its backward pass or without."""

    def __init__(self, does_backward: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.does_backward = does_backward

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        is_left_out = batch_idx == 3 and self.global_rank == 1
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        if not is_left_out or self.does_backward:
            self.manual_backward(loss)
        if not is_left_out:
            optimizer.step()


@pytest.mark.fault
@pytest.mark.parametrize(
    ("name", "num_ranks", "does_backward"),
    [
        ("dgc", 2, False),
        ("hierarchical on two levels", 4, False),
        ("local_sgd", 2, False),
        ("int8", 2, True),  # in others DDP's all-reduce meets another message
    ],
)
@on_ranks(fresh=True)
def test_a_step_that_a_rank_leaves_out_is_found(name: str, num_ranks: int, does_backward: bool) -> None:
    """In that step or, where DDP reduces it or steps are local, in the next one that communicates."""
    model = LeavesOut(does_backward)
    message = refusal(strategy(name), model, 2 * STEPS, error=DisagreementError)
    assert "batch: rank 0 has" in message
    assert "A rank in a later one has left out optimizer.step()" in message
    assert 3 <= model.trainer.strategy.workers[0].step <= 8  # type: ignore[attr-defined]
