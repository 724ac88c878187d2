"""The dense phase is DDP to the bit; in the sparse one its buckets, searches and dense gradients are left out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.overrides import distributed as lightning_ddp
from torch import Tensor
from torch.nn.parallel import distributed as torch_ddp
from torch.optim import Optimizer

from lightning_lowbw import AveragingSchedule, SparsityWarmup
from lightning_lowbw.comm.collectives import all_reduce_bytes
from lightning_lowbw.comm.topology import Where
from lightning_lowbw.strategies.communication_hook import CommunicationHook
from tests.ranks import on_ranks
from tests.strategies.fits import Noted, make, same, train
from tests.tiny import ManualTiny, Tiny, amp_with_scaler, make_data, make_trainer, trained, weights_of

STEPS = 8
MANY_BUCKETS = {"bucket_cap_mb": 0.005}  # rebuilt after the first iteration, in the order of the gradients
DDP_OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "many buckets": {**MANY_BUCKETS, "gradient_as_bucket_view": True},
    "static graph": {"static_graph": True, "broadcast_buffers": True},
    "no buffers": {"broadcast_buffers": False},
    "find unused": {"find_unused_parameters": True},  # and there are some
    "find unused, many buckets": {**MANY_BUCKETS, "find_unused_parameters": True},
}
ACCUMULATE = {"accumulate_grad_batches": 3}  # no_sync; the last step of the epoch has two batches only
TRAINER_OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "accumulate, clip norm": {**ACCUMULATE, "gradient_clip_val": 0.3},
    "bf16, clip value": {"precision": "bf16-mixed", "gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"},
    "16 scaled": {"amp": True},
}


def fit(name: str, ddp: str = "default", trainer: str = "default") -> str:
    options = dict(TRAINER_OPTIONS[trainer])
    if options.pop("amp", False):
        options["plugins"] = [amp_with_scaler()]
    model = Tiny(unused="find_unused_parameters" in DDP_OPTIONS[ddp])
    fitted = train(make(name, **DDP_OPTIONS[ddp]), model, STEPS, **options)
    assert fitted.global_step == -(-STEPS // options.get("accumulate_grad_batches", 1))
    return same(weights_of(model))  # type: ignore[no-any-return]


@on_ranks(3)
def test_dense_phase_is_ddp() -> None:
    for option in DDP_OPTIONS:
        assert fit("ddp", option) == fit("dense", option), option


@on_ranks(2)
def test_dense_phase_is_ddp_with_every_trainer_option() -> None:
    digests = set()
    for option in TRAINER_OPTIONS:
        expected = fit("ddp", trainer=option)
        digests.add(expected)
        assert fit("dense", trainer=option) == expected, option
    assert len(digests) == len(TRAINER_OPTIONS)  # the options do something


# torch's own reducer fails on a static graph whose first backward is under no_sync, with stock DDP too.
@pytest.mark.parametrize(("option", "fitted"), [("static graph", "default"), ("many buckets", "accumulate, clip norm")])
@on_ranks(2)
def test_sparse_phase_does_not_depend_on_buckets(option: str, fitted: str) -> None:
    assert fit("dgc, warm-up", option, fitted) == fit("dgc, warm-up", "default", fitted)


class Counter(pl.Callback):
    """Counts what DDP does in each step, and notes which of them are dense."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.are_dense: list[bool] = []

    def counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)  # DDP looks at the annotations of its hook
        def counting(*args: Any) -> Any:
            self.counts[-1] += 1
            return function(*args)

        return counting

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.counts.append(0)
        self.are_dense.append(any(worker.plan.reduce == "all" for worker in trainer.strategy.workers))

    def check(self, num_dense: int) -> None:
        """Check that something was done in exactly the dense steps."""
        assert self.are_dense == [True] * num_dense + [False] * (len(self.counts) - num_dense)
        assert [count > 0 for count in self.counts] == self.are_dense


class GradientsByHand(Tiny):
    """With gradients that `backward` writes in every other batch, or sums over several backward passes."""

    def __init__(self, every: int = 1) -> None:
        super().__init__()
        self.every, self.num = every, 0

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.num += 1
        if self.num % self.every:
            loss.backward()
            return
        parameters, losses = trained(self), (0.25 * loss, 0.75 * loss)
        if self.every == 1:  # as in PCGrad
            gradients = []
            for each in losses:
                self.zero_grad()
                each.backward(retain_graph=True)
                gradients.append([parameter.grad for parameter in parameters])
        else:  # as in TorchJD
            gradients = [torch.autograd.grad(each, parameters, retain_graph=True) for each in losses]
        for parameter, first, second in zip(parameters, *gradients, strict=True):
            parameter.grad = first + second


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("name", ["dense", "hierarchical", "dgc, dense at first"])
@on_ranks(2)
def test_gradients_that_backward_writes_by_hand_are_exchanged(name: str, every: int) -> None:
    models = Tiny(), GradientsByHand(every)
    for model in models:
        train(name, model)
    same(weights_of(models[1]))
    if name != "dgc, dense at first":  # rounding errors choose other elements
        torch.testing.assert_close(dict(models[1].named_parameters()), dict(models[0].named_parameters()))


@pytest.mark.parametrize("options", [{}, {"static_graph": True}])
@pytest.mark.parametrize("make_module", [Tiny, ManualTiny])
@on_ranks(2)
def test_in_sparse_steps_no_bucket_is_filled(make_module: Callable[[], Tiny], options: Any) -> None:
    """Each would cost a copy of the gradient, and nothing is reduced."""
    counter = Counter()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(CommunicationHook, "reduce", counter.counted(CommunicationHook.reduce))
        monkeypatch.setattr(Where, "narrow_dtype", torch.float32)  # else DDP would not call the hook
        train(make("dgc, dense at first", **options), make_module(), 6, callbacks=[counter])
    counter.check(3)


@on_ranks(2)
def test_where_ddp_reduces_by_itself_it_calls_no_hook_and_its_wait_and_bytes_are_counted() -> None:
    trainer: Any = train("dense", Tiny(), 6)
    numel = sum(each.numel() for each in trainer.lightning_module.parameters() if each.requires_grad)
    ledger, hooks = trainer.strategy.ledger, list[CommunicationHook]()
    of_buffers = ledger.sent_bytes - 6 * all_reduce_bytes(4 * numel, 2)
    assert 6 <= of_buffers / sum(each.nbytes for each in trainer.lightning_module.buffers()) < 8
    assert 0 < ledger.exposed_s < 10
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(CommunicationHook, "release", lambda hook: hooks.append(hook))
        monkeypatch.setattr(CommunicationHook, "reduce", None)
        train("dense", Tiny(), 3)
    assert len(hooks[0]._clocks) == 1  # of the parameter whose gradient came last


# Parameters that the loss does not depend on: DDP searches for them in dense steps, and in no other -------------------

# By name: what gives both phases to a short run, and how many steps are dense then.
NAMES: dict[str, tuple[list[pl.Callback], int]] = {
    "dgc": ([SparsityWarmup(begin_step=3, steps=1, sparsity=[0.9])], 3),
    "int8": ([], 0),
    "local_sgd": ([AveragingSchedule(k_steps=6, begin_step=3)], 3),
    "hierarchical": ([], STEPS),
}


def check_searches(strategy: Any, make_model: Any, callbacks: list[Any], num_dense: int) -> None:
    counter, model = Counter(), make_model(unused=True)
    never, rank_zero_only = model.never.weight, model.rank_zero_only.weight
    before = never.clone(), rank_zero_only.clone()
    with pytest.MonkeyPatch.context() as monkeypatch:
        for module in (torch_ddp, lightning_ddp):
            monkeypatch.setattr(module, "_find_tensors", counter.counted(module._find_tensors))
        make_trainer(strategy, 2, callbacks=[*callbacks, counter]).fit(model, make_data(2, STEPS))
    assert torch.equal(never, before[0])  # not decayed either
    assert not torch.equal(rank_zero_only, before[1])
    counter.check(num_dense)
    same(weights_of(model))


@pytest.mark.parametrize("make_model", [Tiny, ManualTiny])
@on_ranks(2)
def test_only_dense_steps_search(make_model: Callable[..., Tiny]) -> None:
    for name, (callbacks, num_dense) in NAMES.items():
        check_searches(f"{name}_find_unused_parameters_true", make_model, callbacks, num_dense)
    for name in ("dgc", "local_sgd"):  # without dense steps nothing need be asked for
        check_searches(make(name), make_model, [], 0)


# Code that is known to look at the gradients of a sparse step gets them dense; else they are never made ---------------

NUM_LOOKS, FIRST_SPARSE = 6, 2
SPARSE = ("wide.weight", "wider.weight", "head.weight")
Gradients = dict[str, "Tensor | None"]


def gradients_of(module: pl.LightningModule) -> Gradients:
    named = {name: p.grad for name, p in module.named_parameters() if p.requires_grad}
    return {name: None if gradient is None else gradient.clone() for name, gradient in named.items()}


class Seeing(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Gradients] = []

    def look(self, *_: Any) -> None:
        self.seen.append(gradients_of(self))


class WithLateHook(Seeing):
    """Sees the gradients of the last step before they are forgotten."""

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        self.look()


class WithOptimizerHook(Seeing):
    def configure_optimizers(self) -> Optimizer:
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(self.look)
        return optimizer


class Manual(ManualTiny, Seeing):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.look()
        return loss


@on_ranks(2)
def test_onlookers_get_dense_gradients_and_change_nothing() -> None:
    """A callback after the batch is not known to look, and finds nothing: a gradient that was applied is gone.

    A look before the optimizer's step is at the gradient of this rank: tests/sync/test_plain_loops.py.
    """
    ends, seen, unseen = list[str](), list[list[Gradients]](), Noted(gradients_of)
    for make_module in (WithOptimizerHook, WithLateHook, Manual, Seeing):
        module = make_module()
        train("dgc, warm-up", module, NUM_LOOKS, callbacks=[unseen] if make_module is Seeing else [])
        ends.append(same(weights_of(module)))
        seen.append(module.seen)
    assert len({*ends}) == 1
    expected, late, manual, _ = seen
    for gradients in expected[FIRST_SPARSE:]:
        for gradient in map(gradients.get, SPARSE):
            assert gradient is not None
            assert 0 < gradient.count_nonzero() < 0.9 * gradient.numel(), "neither a rank's own nor nothing"
    # Before the first step there is nothing to be forgotten, and the gradient of the last step is not forgotten.
    for found, due in ((late[1:], expected[:-1]), (manual, expected)):
        for first, second in zip(found, due, strict=True):
            assert all(torch.equal(first[name], gradient) for name, gradient in second.items())
    for number, gradients in enumerate(unseen.values):
        absent = {name for name, gradient in gradients.items() if gradient is None}
        assert absent == (set(SPARSE) if number >= FIRST_SPARSE else set())
