"""Values in param groups count when torch's optimizer would read them, and stay as the user's code has written them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from lightning_lowbw import Method, ShardedStrategy, Strategy
from lightning_lowbw.comm.agreement import digest
from lightning_lowbw.presets import DGC, LocalSGD
from tests.ranks import on_ranks
from tests.strategies.fits import same, train, whole_weights
from tests.strategies.sharded_models import Plain, shard_digest
from tests.tiny import MIN_NUMEL, ManualTiny, Tiny, amp_with_scaler, weights_of

STEPS = 5
SPARSE = DGC(rampup_begin_step=2, sparsity=[0.8], min_numel=MIN_NUMEL)
OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": partial(Adam, lr=0.01, weight_decay=0.1),
    "adamw": partial(AdamW, lr=0.01, weight_decay=0.1),
    "rmsprop": partial(RMSprop, lr=0.001, momentum=0.9, weight_decay=0.1),
}


def write(optimizer: Optimizer, step: int) -> None:
    """Write other values into all groups for each step."""
    for group in optimizer.param_groups:
        group["lr"] = 0.01 / (1 + step)
        group["weight_decay"] = 0.3 * (step % 3)
        if "momentum" in group:
            group["momentum"] = 0.5 + 0.05 * step
        if "betas" in group:
            group["betas"] = (0.5 + 0.02 * step, 0.9 + 0.01 * step)


def writing(base: Any, hook: str) -> Any:
    """Return a subclass of a module or a callback that writes at the begin of a hook."""

    def write_first(self: Any, *args: Any, **kwargs: Any) -> None:
        trainer = self.trainer if issubclass(base, pl.LightningModule) else args[0]
        write(trainer.optimizers[0], trainer.global_step)
        getattr(base, hook)(self, *args, **kwargs)

    return type("Writing", (base,), {hook: write_first})


def with_hook(base: Any, place: str) -> Any:
    """Return a subclass of a module whose optimizer has a hook that writes."""

    def configure_optimizers(self: Any) -> Optimizer:
        optimizer = base.configure_optimizers(self)
        if place == "hook before the step":
            optimizer.register_step_pre_hook(lambda *_: write(optimizer, self.trainer.global_step))
        else:
            write(optimizer, 0)
            optimizer.register_step_post_hook(lambda *_: write(optimizer, self.trainer.global_step + 1))
        return optimizer

    return type("WithHook", (base,), {"configure_optimizers": configure_optimizers})


class Left(pl.Callback):
    """Checks that written values are still in the groups when a step is over."""

    def __init__(self, is_ahead: bool) -> None:
        self.is_ahead = is_ahead

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        written = [{**group, "params": None} for group in trainer.optimizers[0].param_groups]
        write(trainer.optimizers[0], trainer.global_step - (not self.is_ahead))
        assert written == [{**group, "params": None} for group in trainer.optimizers[0].param_groups]


def fit_at(optimizer: str, place: str, kind: str) -> str:
    base, callbacks = ManualTiny if kind == "manual" else Tiny, [Left(place == "hook after the step")]
    if place.startswith("callback's "):
        callbacks.insert(0, writing(pl.Callback, place.removeprefix("callback's "))())
    else:
        base = with_hook(base, place) if place.startswith("hook") else writing(base, place)
    module, plugins = base(optimizer=OPTIMIZERS[optimizer]), [amp_with_scaler()] if kind == "scaler" else []
    strategy = Strategy(SPARSE, topology=2 if kind == "nodes" else None)
    train(strategy, module, STEPS, callbacks=callbacks, plugins=plugins)
    return same(weights_of(module))  # type: ignore[no-any-return]


BEFORE, AT_LAST = "callback's on_train_batch_start", "on_before_optimizer_step"
PLACES = [
    *(BEFORE, AT_LAST, "on_before_zero_grad", "optimizer_step", "configure_gradient_clipping", f"callback's {AT_LAST}"),
    *("hook before the step", "hook after the step"),
]
# By hand a module of manual optimization clips nothing, and forgets gradients before it makes new ones.
CASES = {
    2: [
        *[("sgd", place, "flat") for place in PLACES],
        *[(optimizer, place, "flat") for optimizer in ("adamw", "rmsprop") for place in (BEFORE, AT_LAST, PLACES[-1])],
        *[("sgd", place, "scaler") for place in (BEFORE, AT_LAST, f"callback's {AT_LAST}", PLACES[4])],
        *[("adamw", place, "manual") for place in (BEFORE, AT_LAST, "hook before the step")],
    ],
    4: [("adam", place, "nodes") for place in (BEFORE, AT_LAST, f"callback's {AT_LAST}")],
}


@pytest.mark.fault
@pytest.mark.parametrize("num_ranks", CASES)
@on_ranks()
def test_values_written_before_a_step_count_in_it_and_stay(num_ranks: int) -> None:
    found = {case: fit_at(*case) for case in CASES[num_ranks]}
    for (optimizer, place, kind), weights in found.items():
        assert weights == found[optimizer, BEFORE, kind], (optimizer, place, kind)
    assert len({*found.values()}) >= len({optimizer for optimizer, _, _ in found})


@on_ranks(2)
def test_of_a_sharded_model_too() -> None:
    for optimizer in ("sgd", "adamw"):
        digests = set()
        for hook in ("on_train_batch_start", AT_LAST):
            module = writing(Plain, hook)(OPTIMIZERS[optimizer])
            train(ShardedStrategy(SPARSE, topology=1), module, STEPS)
            digests.add(shard_digest(module))
        assert len(digests) == 1


# Steps without a large gradient on one rank, or without any gradient for torch's optimizer ---------------------------


class OnOneRank(Tiny):
    """Rank 1 has a gradient of a small tensor alone."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) if self.global_rank == 0 else self.head.bias.sum()


@on_ranks(2)
def test_a_rank_without_a_large_gradient_and_a_fused_optimizer_without_any_step_alike() -> None:
    fused = Tiny(partial(AdamW, lr=0.01, fused=True))
    for module, min_numel, plugins in ((fused, 1, [amp_with_scaler()]), (OnOneRank(OPTIMIZERS["sgd"]), MIN_NUMEL, [])):
        before = weights_of(module)
        train(Strategy(DGC(sparsity=[0.5], min_numel=min_numel)), module, STEPS, plugins=plugins)
        assert same(weights_of(module)) != before


# A step that is compiled ----------------------------------------------------------------------------------------------


def fit_compiled(method: Method, compiles: bool) -> list[float]:
    class Compiled(Plain):
        def configure_optimizers(self) -> Optimizer:
            few = [*self.net[0].parameters(), *self.head.parameters()]  # compiled one by one
            optimizer = AdamW(few, lr=torch.tensor(0.01))
            if compiles:
                optimizer.step = torch.compile(optimizer.step, backend="eager")  # type: ignore[method-assign]
            return optimizer

    module = Compiled()
    train(Strategy(method), module, STEPS)
    return same([float(parameter.detach().double().sum()) for parameter in module.parameters()])  # type: ignore[no-any-return]


@on_ranks(2, timeout_s=240.0)
def test_a_compiled_step_is_the_step() -> None:
    """The learning rate is a tensor, as in torch's tutorial; the exchange is not traced."""
    for method in (SPARSE, LocalSGD(k_steps=3, begin_step=2)):
        assert fit_compiled(method, True) == pytest.approx(fit_compiled(method, False), abs=1e-4)


class Nothing(Tiny):
    """Has no optimizer, or one of no tensors."""

    def __init__(self, is_empty: bool) -> None:
        super().__init__()
        self.is_empty = is_empty

    def configure_optimizers(self) -> Any:
        if not self.is_empty:
            return None
        optimizer = SGD([torch.zeros(1)], lr=0.1)
        optimizer.param_groups[0]["params"].clear()
        return optimizer


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [
        *[(name, 2) for name in ("dgc", "dgc, auto", "diloco")],
        ("dgc, sharded", 4),
    ],
)
@on_ranks()
def test_without_parameters_in_an_optimizer_there_is_nothing_to_do(name: str, num_ranks: int, tmp_path: Path) -> None:
    ends = []
    for is_empty in (False, True):
        model = Nothing(is_empty)
        trainer: Any = train(name, model, 2, 1, max_epochs=2, enable_progress_bar=True)
        trainer.save_checkpoint(f"{tmp_path}/{name}.ckpt")
        assert not trainer.strategy.workers
        same(digest(model.buffers()))
        ends.append(same(whole_weights(model)))
    assert ends[0] == ends[1]
