"""Whole and half types, a GradScaler and clipping: ranks stay together, and nothing that is not finite is kept.

With autocast alone: tests/golden.
"""

from __future__ import annotations

import contextlib
import math
import re
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Subset

from lightning_lowbw import NonFiniteGradientError
from lightning_lowbw.comm.agreement import digest
from lightning_lowbw.strategies.step_hooks import exchange_unscaled_
from tests.ranks import on_ranks
from tests.strategies.fits import STEPS, gathered, make, refusal, same, train
from tests.tiny import BATCH, ManualTiny, Tiny, amp_with_scaler, make_data, sgd, weights_of

BAD = 5  # the batch in which rank 1 has an infinite loss, where a GradScaler skips
PRECISIONS = {"16-mixed": torch.float32, "bf16-true": torch.bfloat16, "64-true": torch.float64}


@pytest.mark.filterwarnings("ignore:[0-9]+ parameters, such as .* are float64, complex or views with gaps")
@pytest.mark.parametrize("name", ["dgc", "int8", "sparse_loco"])
@on_ranks(2)
def test_a_strategy_trains_in_each_precision(name: str) -> None:
    averages = name == "sparse_loco"
    for precision, dtype in PRECISIONS.items():
        is_scaled = precision == "16-mixed"
        model = Tiny(poison=(1, BAD) if is_scaled else None)
        strategy = make(name, {"rampup_begin_step": 2} if name == "dgc" else {"begin_step": 1} if averages else {})
        options = {"plugins": [amp_with_scaler()]} if is_scaled else {"precision": precision}
        trainer = train(strategy, model, **options)
        (worker,) = strategy.workers
        residuals = list(worker.state_dict()["residuals"].values())
        same((weights_of(model), getattr(worker, "num_averages", 0)))
        assert (trainer.global_step, worker.step) == (STEPS, STEPS), precision
        assert {p.dtype for p in model.parameters()} == {dtype}
        assert all(bool(tensor.isfinite().all()) for tensor in [*model.parameters(), *residuals]), precision
        # float64 is sent whole: no residuals.
        is_kept = dtype != torch.float64
        assert {residual.dtype for residual in residuals} == ({torch.float32} if is_kept else set()), precision
        if is_scaled:  # an inf skips the step on all ranks, and in local steps that of its rank
            scales = {*gathered(trainer.precision_plugin.scaler.get_scale())}
            assert scales == ({2.0**9, 2.0**10} if averages else {2.0**9})


# A GradScaler -------------------------------------------------------------------------------------------------------


# The second one unscales inside its step.
@pytest.mark.parametrize(("clip", "optimizer"), [(0.3, sgd), (None, partial(torch.optim.AdamW, lr=0.01, fused=True))])
@on_ranks(2)
def test_the_scale_does_not_reach_the_residual(clip: float | None, optimizer: Any) -> None:
    weights = []
    for init_scale in (1.0, 2.0**8):
        model, plugin = Tiny(optimizer).double().float(), amp_with_scaler(init_scale)
        plugin.forward_context = contextlib.nullcontext  # the scaler alone: fp16 would round otherwise
        train("dgc, warm-up", model, plugins=[plugin], gradient_clip_val=clip)
        weights.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-6, atol=1e-7)


NODE, PART = r"on node 0 \(ranks \[0, 1\]\)", r"in the shard of rank [01]"


@pytest.mark.parametrize(
    ("name", "place"),
    [("dgc on two levels", NODE), ("dgc, sharded", f"{NODE}|{PART}"), ("diloco, sharded", f"{NODE}|{PART}")],
)
@on_ranks(4)
def test_a_nonfinite_gradient_is_an_error_on_all_ranks(name: str, place: str) -> None:
    """The message names the tensor and the place. On one level: tests/sync/test_faults.py."""
    message = same(refusal(name, Tiny(poison=(1, 4)), error=NonFiniteGradientError))
    assert "'wide.weight'" in message
    assert re.search(place, message), message


def test_an_optimizer_without_gradients_has_nothing_to_scale() -> None:
    plugin, asked = amp_with_scaler(), list[bool]()
    plugin.scaler.scale(torch.ones(()))  # type: ignore[union-attr]
    exchange_unscaled_(plugin, sgd([torch.nn.Parameter(torch.ones(2))]), lambda skip: not asked.append(skip))
    assert asked == [True]


# Steps that are skipped without a GradScaler ------------------------------------------------------------------------


class Poisoned(Tiny):
    """With a gradient that is too large in some batches of rank 1, after DDP has reduced it."""

    def __init__(self, *bad: int, factor: float = math.inf) -> None:
        super().__init__()
        self.bad, self.factor = bad, factor

    def on_after_backward(self) -> None:
        if self.global_rank == 1 and self.trainer.global_step in self.bad:
            self.wide.weight.grad *= self.factor  # type: ignore[operator]


SKIPPING = ["dgc", "int8", "hierarchical", "local_sgd", "post-local", "streaming"]
OF_NODES = ["dgc on two levels", "dgc, sharded", "hierarchical, sharded", "diloco on two levels", "diloco, sharded"]


@pytest.mark.parametrize("keywords", [{"skip_nonfinite": True}, {"skip_norm": 100.0}])
@pytest.mark.parametrize(("num_ranks", "name"), [*((2, name) for name in SKIPPING), *((4, name) for name in OF_NODES)])
@on_ranks()
def test_a_bad_gradient_of_one_rank_skips_the_step(num_ranks: int, name: str, keywords: dict[str, Any]) -> None:
    """The ranks that step together skip it, whatever clipping makes of it: as if the batch were not there."""
    model, strategy = Poisoned(BAD, factor=math.inf if "skip_nonfinite" in keywords else 1e6), make(name, **keywords)
    clip = {} if name.endswith("sharded") else {"gradient_clip_val": 0.5}
    trainer = train(strategy, model, **clip)
    (worker,) = strategy.workers
    assert trainer.global_step == worker.step == STEPS
    assert gathered(worker.metrics(False)["skipped_steps"]) == num_ranks * [1.0]
    same(digest([each.full_tensor() if hasattr(each, "full_tensor") else each for each in model.parameters()]))
    if not (strategy.replicas or name.endswith("sharded")):
        loader, other = make_data(num_ranks, STEPS), Tiny()
        rows = [row for row in range(BATCH * STEPS) if row // BATCH != BAD]
        train(name, other, DataLoader(Subset(loader.dataset, rows), BATCH), **clip)
        assert weights_of(model) == weights_of(other)


@pytest.mark.parametrize("name", ["dgc", "hierarchical", "local_sgd"])
@on_ranks(2)
def test_the_tenth_skipped_step_in_a_row_is_an_error_on_all_ranks(name: str) -> None:
    message = refusal(make(name, skip_nonfinite=True), Poisoned(*range(2, 20)), 20, error=NonFiniteGradientError)
    assert "10 steps in a row were skipped" in same(message)


class DropsNaN(Poisoned):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        for parameter in self.parameters():
            parameter.grad = None if parameter.grad is None else parameter.grad.nan_to_num(0.0, 0.0, 0.0)
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")


@on_ranks(2)
def test_a_gradient_is_judged_after_a_modules_own_clipping() -> None:
    model = DropsNaN(BAD)
    train("dgc", model)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    same(weights_of(model))
    assert "on_after_backward is the hook" in refusal("int8", DropsNaN(BAD), error=NonFiniteGradientError)


# Clipping -----------------------------------------------------------------------------------------------------------


class ClipsInItsOwnWay(Tiny):
    """Before a sparse exchange this acts on the rank's own gradient, after a dense one on the mean as in DDP."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, bool, float]] = []

    def note(self, what: str) -> None:
        norm = math.sqrt(sum(float(p.grad.norm()) ** 2 for p in self.parameters() if p.grad is not None))
        self.seen.append((what, self.trainer.strategy.workers[0].plan.reduce != "all", norm))

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        self.note("clip")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.note("step")


@pytest.mark.parametrize(("name", "num_dense", "factor"), [("dgc, warm-up", 2, math.sqrt(2)), ("int8", 0, 1.0)])
@on_ranks(2)
def test_a_modules_own_clipping_is_of_the_local_gradient_or_the_mean(name: str, num_dense: int, factor: float) -> None:
    """Once per step, after the hook. DGC clips its own gradient before the exchange; int8, as DDP, the mean."""
    model = ClipsInItsOwnWay()
    train(name, model)
    for is_sparse, num_steps, expected in ((False, num_dense, 0.1), (True, STEPS - num_dense, 0.1 * factor)):
        seen = [(what, norm) for what, sparse, norm in model.seen if sparse == is_sparse]
        assert [what for what, _ in seen] == ["step", "clip"] * num_steps
        assert [norm for what, norm in seen if what == "clip"] == pytest.approx([expected] * num_steps, rel=1e-3)
    if name == "int8":
        same((model.seen, weights_of(model)))
        assert all(norm > 0.1 for what, _, norm in model.seen if what == "step")


class ClipsByHand(ManualTiny):
    def before_step(self, optimizer: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")


@on_ranks(2)
def test_a_mean_that_is_not_there_yet_cannot_be_clipped_by_hand() -> None:
    message = refusal("int8", ClipsByHand())
    assert message.startswith("clip_gradients in manual optimization, step 0: here the mean over ranks is clipped")
