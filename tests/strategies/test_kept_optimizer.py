"""Optimizers that a module keeps for another fit; tests/test_refusals.py has the fits that are refused."""

from __future__ import annotations

from typing import Any

import pytest
from torch.optim import Optimizer

from lightning_lowbw.comm.agreement import digest
from tests.ranks import on_ranks
from tests.strategies.fits import adamw, same, train
from tests.tiny import Tiny


class Keeps(Tiny):
    """Makes its optimizer once."""

    kept: Any = None

    def configure_optimizers(self) -> Optimizer:
        self.kept = self.kept or super().configure_optimizers()
        return self.kept


@pytest.mark.parametrize("first", ["int8", "dense", "ddp"])
@on_ranks(2)
def test_a_state_that_is_equal_on_all_ranks_is_left_alone(first: str) -> None:
    """Fits that leave the state equal are followed by any other fit."""
    model = Keeps(adamw)
    for name in (first, "ddp", "dense", "post-local"):
        train(name, model, 2)
    same(digest(model.parameters()))


@on_ranks(2)
def test_local_steps_go_on_with_a_state_of_each_rank() -> None:
    model = Keeps(adamw)
    for _ in range(2):
        train("local_sgd", model, 4)
    same(digest(model.parameters()))
