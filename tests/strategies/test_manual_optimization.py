"""Manual optimization: the user's code calls backward and step, and may do so in its own way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_lowbw import (
    ConfigurationError,
    DGCStrategy,
    DisagreementError,
    HierarchicalStrategy,
    LocalSGD,
    LocalSGDStrategy,
    QuantizedGradients,
    ShardedStrategy,
    Strategy,
)
from lightning_lowbw.comm.agreement import digest
from tests.ranks import run_ranks
from tests.tiny import MIN_NUMEL, ManualTiny, Tiny, TwoOptimizers, Watcher, make_data, make_trainer, since_lightning_2_5

DENSE_AT_FIRST: dict[str, Any] = {"rampup_begin_step": 4, "sparsity": [0.9], "min_numel": MIN_NUMEL}
STRATEGIES: dict[str, Any] = {
    "dgc": lambda: DGCStrategy(**DENSE_AT_FIRST),
    "dgc on two levels": lambda: DGCStrategy(topology=2, **DENSE_AT_FIRST),
    "hierarchical": lambda: HierarchicalStrategy(topology=2),
    "int8": lambda: Strategy(QuantizedGradients("int8")),
    "local_sgd": lambda: LocalSGDStrategy(k_steps=4, begin_step=0),
    "local_sgd, synchronous at first": lambda: LocalSGDStrategy(k_steps=2, begin_step=4),
    "sharded": lambda: ShardedStrategy(LocalSGD(k_steps=2, begin_step=2), topology=2),
}
STEPS = 6


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


def train(name: str) -> list[tuple[str, list[Tensor]]]:
    results = []
    for is_plain in (False, True):
        model = Manual(is_plain)
        make_trainer(STRATEGIES[name](), dist.get_world_size()).fit(model, make_data(dist.get_world_size(), STEPS))
        weights = [getattr(p, "full_tensor", p.detach)().detach() for p in model.parameters()]
        results.append((digest(weights), weights))
    return results


@pytest.mark.fault(
    "plain `loss.backward()` in manual optimization",
    "the same means as after `manual_backward`: the weights stay equal",
)
@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [("dgc", 2), ("dgc on two levels", 4), ("local_sgd, synchronous at first", 2), ("sharded", 4)],
)
def test_a_plain_backward_is_as_good_as_manual_backward(name: str, num_ranks: int) -> None:
    ranks = run_ranks(train, num_ranks, name)
    for (first, expected), *others in zip(*ranks, strict=True):
        assert {first} == {each for each, _ in others}, "the ranks have different weights"
        for weight, reference in zip(expected, ranks[0][0][1], strict=True):
            torch.testing.assert_close(weight, reference, rtol=1e-5, atol=1e-6)


def stop_and_resume(folder: str) -> tuple[str, str]:
    ends = []
    for path in (None, f"{folder}/3"):
        model, watcher = ManualTiny(data_by_step=True), Watcher(f"{folder}/{{}}", (3,) if path is None else ())
        trainer = make_trainer(LocalSGDStrategy(k_steps=2, begin_step=STEPS), 2, callbacks=[watcher])
        trainer.fit(model, make_data(2, STEPS), ckpt_path=path)
        ends.append(digest([*model.parameters(), *model.buffers()]))
    return ends[0], ends[1]


@since_lightning_2_5
def test_a_resume_keeps_each_rank_s_buffers(tmp_path: Path) -> None:
    """Batch norm's are of a rank's own data, also in synchronous steps."""
    for whole, resumed in run_ranks(stop_and_resume, 2, str(tmp_path)):
        assert resumed == whole


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


def leave_out_a_step(name: str, does_backward: bool) -> tuple[str, int]:
    num_ranks = dist.get_world_size()
    trainer = make_trainer(STRATEGIES[name](), num_ranks)
    with pytest.raises(DisagreementError) as caught:
        trainer.fit(LeavesOut(does_backward), make_data(num_ranks, 2 * STEPS))
    return str(caught.value), trainer.strategy.workers[0].step  # type: ignore[attr-defined]


@pytest.mark.fault(
    "a rank leaves out `optimizer.step()` in manual optimization", "an error on all ranks, with the batch of each"
)
@pytest.mark.parametrize(
    ("name", "num_ranks", "does_backward"),
    [
        ("dgc", 2, False),
        ("hierarchical", 4, False),
        ("local_sgd", 2, False),
        ("int8", 2, True),  # in others DDP's all-reduce meets another message
    ],
)
def test_a_step_that_a_rank_leaves_out_is_found(name: str, num_ranks: int, does_backward: bool) -> None:
    """In that step or, where DDP reduces it or steps are local, in the next one that communicates."""
    for message, step in run_ranks(leave_out_a_step, num_ranks, name, does_backward, fresh=True):
        assert "batch: rank 0 has" in message
        assert "A rank in a later one has left out optimizer.step()" in message
        assert 3 <= step <= 8


class Bypasses(TwoOptimizers):
    """Steps both optimizers itself, past Lightning, as libraries do that keep optimizers of their own."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizers: Any = self.optimizers(use_pl_optimizer=False)
        self.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        for optimizer in optimizers:
            optimizer.step()


def bypass() -> tuple[str, list[int]]:
    strategy = STRATEGIES["dgc"]()
    with pytest.raises(ConfigurationError) as caught:
        make_trainer(strategy, 2).fit(Bypasses(), make_data(2, STEPS))
    return str(caught.value), [worker.step for worker in strategy.workers]


def test_a_step_past_lightning_is_refused_on_all_ranks() -> None:
    for message, steps in run_ranks(bypass, 2):
        assert "not by Lightning" in message
        assert "strategy='ddp'" in message
        assert steps == [0, 0]
