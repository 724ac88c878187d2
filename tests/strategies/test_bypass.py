"""A step past Lightning is refused on all ranks."""

from __future__ import annotations

from torch import Tensor

from tests.ranks import run_ranks
from tests.strategies.watching import STEPS, meet_an_error
from tests.tiny import Tiny


class Bypasses(Tiny):
    """Steps the optimizer itself, past Lightning: DDP has averaged the gradients by then, DGC has not."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def test_a_step_past_lightning_is_an_error_on_all_ranks() -> None:
    for message, step in run_ranks(meet_an_error, 2, Bypasses, STEPS):
        assert "not by Lightning" in message
        assert step == 0
