"""A step past Lightning: in dense steps as under ddp, refused on all ranks in others."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from lightning_lowbw import AutoStrategy, ConfigurationError, DGCStrategy, HierarchicalStrategy, LocalSGDStrategy
from tests.measured import give_measured, make_measured
from tests.ranks import run_ranks
from tests.strategies.watching import STEPS
from tests.tiny import MIN_NUMEL, TwoOptimizers, make_data, make_trainer, weights_of

SPARSE: dict[str, Any] = {"sparsity": [0.9], "min_numel": MIN_NUMEL}
SLOW = make_measured(0.1, 1.0, 0.2, float16=0.6, int8=0.4)  # the choice would be sparse
STRATEGIES: dict[str, Any] = {
    "ddp": DDPStrategy,
    "hierarchical": lambda: HierarchicalStrategy(topology=1),
    "dgc auto": lambda: DGCStrategy(min_numel=MIN_NUMEL),
    "lowbw": AutoStrategy,
    "dgc": lambda: DGCStrategy(**SPARSE),
    "dgc, dense at first": lambda: DGCStrategy(rampup_begin_step=3, **SPARSE),
    "local_sgd": lambda: LocalSGDStrategy(k_steps=2, begin_step=3),
}


class Bypasses(TwoOptimizers):
    """Steps both optimizers itself, past Lightning, as libraries do that keep optimizers of their own."""

    def __init__(self, has_closure: bool = False) -> None:
        super().__init__()
        self.has_closure = has_closure

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizers: Any = self.optimizers(use_pl_optimizer=False)
        self.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        for optimizer in optimizers:
            optimizer.step(lambda: None) if self.has_closure else optimizer.step()


def bypass(name: str, has_closure: bool = False) -> tuple[str, list[int], str, list[str]]:
    num_ranks, strategy, model = dist.get_world_size(), STRATEGIES[name](), Bypasses(has_closure)
    message = ""
    with pytest.MonkeyPatch.context() as monkeypatch:
        _, said = give_measured(monkeypatch, SLOW)
        try:
            make_trainer(strategy, num_ranks, max_epochs=2).fit(model, make_data(num_ranks, STEPS))
        except ConfigurationError as error:
            message = str(error)
    steps = [worker.step for worker in strategy.workers] if name != "ddp" else []
    return weights_of(model), steps, message, said


@pytest.mark.parametrize("name", ["hierarchical", "dgc auto", "lowbw"])
def test_dense_steps_past_lightning_are_those_of_ddp(name: str) -> None:
    (weights, steps, message, said), other = run_ranks(bypass, 2, name)
    assert weights == other[0] == run_ranks(bypass, 2, "ddp")[0][0]
    assert steps == [2 * STEPS] * 2, "schedules count them"
    assert message == ""
    assert len(said) == (name != "hierarchical")
    assert all("past Lightning" in each for each in said)


@pytest.mark.parametrize(("name", "last"), [("dgc", 0), ("dgc, dense at first", 3), ("local_sgd", 3)])
def test_others_are_an_error_on_all_ranks(name: str, last: int) -> None:
    for _, steps, message, _ in run_ranks(bypass, 2, name):
        assert "not by Lightning" in message
        assert "strategy='ddp'" in message
        assert steps == [last] * 2


def test_a_closure_past_lightning_is_an_error_on_all_ranks() -> None:
    """What has to be exchanged is known only after it."""
    for _, steps, message, _ in run_ranks(bypass, 2, "hierarchical", True):
        assert "not by Lightning" in message
        assert steps == [0, 0]
