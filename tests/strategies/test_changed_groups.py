"""Values in param groups count when torch's optimizer would read them, and stay as the user's code has written them."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from lightning_lowbw import ConfigurationError, Method, ShardedStrategy, Strategy
from lightning_lowbw.presets import DGC, LocalSGD, PowerSGD, QuantizedGradients
from tests.ranks import run_ranks
from tests.strategies.fits import fit, gathered
from tests.strategies.sharded_models import Plain, shard_digest
from tests.sync.problem import each
from tests.tiny import MIN_NUMEL, ManualTiny, Tiny, amp_with_scaler, weights_of

STEPS = 7
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


class Writing(Tiny):
    """Writes at one place of a step."""

    place = ""

    def write(self, place: str, ahead: int = 0) -> None:
        if self.place == place:
            write(self.trainer.optimizers[0], self.trainer.global_step + ahead)

    def configure_optimizers(self) -> Optimizer:
        optimizer = super().configure_optimizers()
        if self.place == "hook before the step":
            optimizer.register_step_pre_hook(lambda *_: self.write(self.place))
        if self.place == "hook after the step":
            write(optimizer, 0)
            optimizer.register_step_post_hook(lambda *_: self.write(self.place, 1))
        return optimizer

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.write("on_before_optimizer_step")

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        self.write("on_before_zero_grad")

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        self.write("optimizer_step")
        super().optimizer_step(epoch, batch_idx, optimizer, closure)

    def configure_gradient_clipping(self, optimizer: Optimizer, *_: Any, **__: Any) -> None:
        self.write("clipping")


class ManuallyWriting(ManualTiny, Writing):
    pass


class Callbacks(pl.Callback):
    """Writes at other places, and keeps what is in the groups when a step is over."""

    def __init__(self) -> None:
        self.left: list[Any] = []

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        module.write("batch start")

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        module.write("callback")

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        optimizer = trainer.optimizers[0]
        written = [{**group, "params": None} for group in optimizer.param_groups]
        write(optimizer, trainer.global_step - (module.place != "hook after the step"))
        self.left.append(written == [{**group, "params": None} for group in optimizer.param_groups])


PLACES = [
    *("batch start", "on_before_optimizer_step", "on_before_zero_grad", "optimizer_step", "clipping", "callback"),
    *("hook before the step", "hook after the step"),
]


def fit_at(optimizer: str, place: str, kind: str) -> tuple[str, list[bool]]:
    options: dict[str, Any] = {"plugins": [amp_with_scaler()]} if kind == "scaler" else {}
    module = (ManuallyWriting if kind == "manual" else Writing)(optimizer=OPTIMIZERS[optimizer])
    module.place = place
    callback = Callbacks()
    fit(
        module,
        STEPS,
        strategy=Strategy(SPARSE, topology=2 if kind == "nodes" else None),
        callbacks=[callback],
        **options,
    )
    digest = weights_of(module)
    assert gathered(digest) == [digest] * len(gathered(0))
    return digest, callback.left


# By hand a module of manual optimization clips nothing, and forgets gradients before it makes new ones.
CASES = [
    *[(optimizer, place, "flat") for optimizer in OPTIMIZERS for place in PLACES],
    *[("sgd", place, "scaler") for place in ("batch start", "on_before_optimizer_step", "callback", "clipping")],
    *[("adamw", place, "manual") for place in ("batch start", "on_before_optimizer_step", "hook before the step")],
]
ON_NODES = [("adam", place, "nodes") for place in ("batch start", "on_before_optimizer_step", "callback")]


@pytest.mark.fault(
    "values that a hook writes into the param groups before the step",
    "count in that step, and stay",
)
def test_values_written_before_a_step_count_in_it_and_stay() -> None:
    for num_ranks, cases in ((2, CASES), (4, ON_NODES)):
        (results, *others) = run_ranks(each, num_ranks, fit_at, cases)
        assert [results] * (num_ranks - 1) == others
        found = dict(zip(cases, results, strict=True))
        for (optimizer, place, kind), (digest, left) in found.items():
            assert digest == found[optimizer, "batch start", kind][0], (optimizer, place, kind)
            assert all(left), (optimizer, place, kind)
        assert len({digest for digest, _ in found.values()}) >= len({optimizer for optimizer, _, _ in cases})


# A sharded model ----------------------------------------------------------------------------------------------------


class WritingShards(Plain):
    place = "batch start"

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        if self.place == "on_before_optimizer_step":
            write(optimizer, self.trainer.global_step)

    def on_train_batch_start(self, *_: Any) -> None:
        if self.place == "batch start":
            write(self.trainer.optimizers[0], self.trainer.global_step)


def fit_shards(optimizer: str, place: str) -> str:
    module = WritingShards(OPTIMIZERS[optimizer])
    module.place = place
    fit(module, STEPS, strategy=ShardedStrategy(SPARSE, topology=1))
    return shard_digest(module)


def test_of_a_sharded_model_too() -> None:
    cases = [
        (optimizer, place) for optimizer in ("sgd", "adamw") for place in ("batch start", "on_before_optimizer_step")
    ]
    for first, second, third, fourth in run_ranks(each, 2, fit_shards, cases):
        assert first == second
        assert third == fourth


# An optimizer that calls its closure twice --------------------------------------------------------------------------


class Twice(Optimizer):
    """SAM without its perturbation."""

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        for _ in range(2):
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"])
        return loss


def fit_twice(method: Method, topology: int | None) -> str:
    module = Tiny(Twice)
    try:
        fit(module, STEPS, strategy=Strategy(method, topology=topology))
    except ConfigurationError as error:
        return str(error)
    return weights_of(module)


@pytest.mark.fault(
    "an optimizer that calls its closure twice in a step, as SAM, where a gradient is not sent whole",
    "refused on all ranks in the first step; what sends whole gradients, or averages weights, trains",
)
def test_a_closure_that_is_called_twice_is_refused_where_gradients_are_kept_back() -> None:
    refused = [(method, None) for method in (SPARSE, QuantizedGradients("int8"), PowerSGD(rank=1))]
    trained = [(Method(), None), (Method(), 1)]
    first, second = run_ranks(each, 2, fit_twice, [*refused, *trained])
    assert first == second
    assert all("Twice has called its closure twice in step 0" in message for message in first[:3])
    assert first[3] == first[4]


# Steps of which a rank, or torch's optimizer, sees nothing -----------------------------------------------------------


class OnOneRank(Tiny):
    """Rank 1 has a gradient of a small tensor alone."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) if self.global_rank == 0 else self.head.bias.sum()


def fit_sparse(kind: str) -> str:
    options: dict[str, Any] = {"plugins": [amp_with_scaler()]} if kind == "fused" else {}
    module = Tiny(partial(AdamW, lr=0.01, fused=True)) if kind == "fused" else OnOneRank(OPTIMIZERS["sgd"])
    method = DGC(sparsity=[0.5], min_numel=1 if kind == "fused" else MIN_NUMEL)
    before = weights_of(module)
    fit(module, STEPS, strategy=Strategy(method), **options)
    assert weights_of(module) != before
    return weights_of(module)


def test_a_rank_without_a_large_gradient_and_a_fused_optimizer_without_any_step_alike() -> None:
    first, second = run_ranks(each, 2, fit_sparse, [("fused",), ("one rank",)])
    assert first == second


# A step that is compiled ----------------------------------------------------------------------------------------------


def fit_compiled(method: Method, compiles: bool) -> list[float]:
    class Compiled(Plain):
        def configure_optimizers(self) -> Optimizer:
            optimizer = AdamW([p for p in self.parameters() if p.requires_grad], lr=torch.tensor(0.01))
            if compiles:
                optimizer.step = torch.compile(optimizer.step, backend="eager")  # type: ignore[method-assign]
            return optimizer

    module = Compiled()
    fit(module, STEPS, strategy=Strategy(method))
    return [float(parameter.detach().double().sum()) for parameter in module.parameters()]


def test_a_compiled_step_is_the_step() -> None:
    """Its rate in a tensor, as in torch's tutorial; the exchange is left out of what is traced."""
    methods = [SPARSE, QuantizedGradients("int8"), LocalSGD(k_steps=3, begin_step=2)]
    cases = [(method, compiles) for method in methods for compiles in (False, True)]
    first, second = run_ranks(each, 2, fit_compiled, cases, timeout_s=240.0)
    assert first == second
    for whole, compiled in zip(first[::2], first[1::2], strict=True):
        assert compiled == pytest.approx(whole, abs=1e-4)
