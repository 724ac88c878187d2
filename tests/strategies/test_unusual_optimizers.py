"""Optimizers with two sets of weights, and those that communicate in their step: right with gradients, else refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, OnExceptionCheckpoint
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from lightning_lowbw import (
    DGC,
    ConfigurationError,
    Hierarchical,
    LocalSGD,
    LocalSGDStrategy,
    PowerSGD,
    QuantizedGradients,
    Strategy,
)
from tests.ranks import run_ranks
from tests.strategies.fits import SPARSE, adamw, gathered
from tests.tiny import Tiny, Watcher, amp_with_scaler, make_data, make_trainer, weights_of

with warnings.catch_warnings():  # of torch about itself
    warnings.simplefilter("ignore")
    from torch.distributed.optim import ZeroRedundancyOptimizer

STEPS = 6


class ScheduleFree(Optimizer):
    """schedulefree.SGDScheduleFree without warm-up and decay: y is in the model while it trains, x in eval mode."""

    def __init__(self, params: Any, lr: float = 0.5, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": False})

    def _switch(self, mode: bool) -> None:
        for group in self.param_groups:
            weight = 1 - group["beta"] if mode else 1 - 1 / group["beta"]
            for p in group["params"]:
                if group["train_mode"] != mode and "z" in self.state[p]:
                    p.data.lerp_(self.state[p]["z"], weight)
            group["train_mode"] = mode

    def train(self) -> None:
        self._switch(True)

    def eval(self) -> None:
        self._switch(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            assert group["train_mode"]
            group["k"] += 1
            c = 1 / group["k"]
            for p in group["params"]:
                if p.grad is not None:
                    z = self.state[p].setdefault("z", p.clone())
                    p.lerp_(z, c).add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - c) - 1))
                    z.sub_(p.grad, alpha=group["lr"])
        return loss


class Share(Optimizer):
    """Each rank makes the updates of some parameters, for all ranks: as Dion, NorMuon and distributed Shampoo do."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for number, p in enumerate(group["params"]):
                update = torch.zeros_like(p) if p.grad is None else p.grad.clone()
                dist.broadcast(update, number % dist.get_world_size())
                p.sub_(update, alpha=group["lr"])
        return loss


def zero(parameters: Any) -> Optimizer:
    return ZeroRedundancyOptimizer(parameters, AdamW, lr=0.01)


AVERAGING: list[Callable[[], Any]] = [
    lambda: LocalSGDStrategy(k_steps=3, begin_step=0),
    lambda: LocalSGDStrategy(k_steps=3, begin_step=100),  # refused in the first step, which is synchronous
    lambda: LocalSGDStrategy(k_steps=3, begin_step=0, compression=SPARSE),
    lambda: Strategy(LocalSGD(3, 0, outer="nesterov", num_fragments=2, delay_steps=1)),
]


def refuse(optimizer: Callable[..., Optimizer], options: list[dict[str, Any]]) -> list[str]:
    """Return the errors of fits, which all ranks have to raise, and how far these came."""
    messages = []
    for each in AVERAGING:
        for kwargs in options:
            model = Tiny(optimizer)
            before = weights_of(model)
            trainer = make_trainer(each(), dist.get_world_size(), **kwargs)
            with pytest.raises(ConfigurationError) as caught:
                trainer.fit(model, make_data(dist.get_world_size(), STEPS))
            assert trainer.global_step == 0
            messages.append(str(caught.value))
            assert optimizer is zero or weights_of(model) == before
    return messages


@pytest.mark.fault(
    "an optimizer with two sets of weights (schedule-free), with a method that averages weights",
    "refused before the first step, on all ranks; the error names the optimizer and what to do",
)
def test_a_second_set_of_weights_is_refused_where_weights_are_averaged() -> None:
    first, second = run_ranks(refuse, 2, ScheduleFree, [{}])
    assert first == second
    assert all("ScheduleFree has train() and eval()" in each for each in first)


@pytest.mark.fault(
    "an optimizer that shares its work between the ranks, and gathers the results in its step (ZeRO, Dion), with a "
    "method that averages weights",
    "refused in the first step, on all ranks, before anything is sent; the error names the optimizer and what to do",
)
@pytest.mark.parametrize("optimizer", [Share, zero])
def test_collectives_in_a_step_are_refused_where_weights_are_averaged(optimizer: Any) -> None:
    options: list[dict[str, Any]] = [{}, {"accumulate_grad_batches": 2}]
    first, second = run_ranks(refuse, 2, optimizer, options)
    assert first == second
    name = "Share" if optimizer is Share else "ZeroRedundancyOptimizer"
    assert all(f"{name} communicates in its step" in each for each in first)


class Normed(Callback):
    """Communicates in a hook between the closure and the optimizer's own step, as a logger of norms may."""

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        dist.all_reduce(torch.zeros(1))


def communicate_elsewhere() -> None:
    for kwargs in ({}, {"plugins": [amp_with_scaler()]}):
        model = Tiny(adamw)
        trainer = make_trainer(LocalSGDStrategy(k_steps=3, begin_step=0), 2, callbacks=[Normed()], **kwargs)
        trainer.fit(model, make_data(2, STEPS))
        assert len(set(gathered(weights_of(model)))) == 1
    model = Tiny(Share, poison=(dist.get_rank(), 0))  # a GradScaler leaves out the first step
    trainer = make_trainer(LocalSGDStrategy(k_steps=3, begin_step=0), 2, plugins=[amp_with_scaler()])
    with pytest.raises(ConfigurationError, match="communicates in its step"):
        trainer.fit(model, make_data(2, STEPS))
    assert trainer.global_step == 1


def test_other_collectives_are_allowed() -> None:
    run_ranks(communicate_elsewhere, 2)


def loop(optimizer: Optimizer, model: nn.Module, closure: Callable[[], Tensor], has_closure: bool) -> None:
    LocalSGD(k_steps=2, begin_step=0).attach(optimizer, model.named_parameters())
    if not has_closure:
        closure()
    optimizer.step(*([closure] if has_closure else []))


def attach() -> list[str]:
    """The same in a plain loop, with and without a closure."""
    messages = []
    for make in (Share, lambda p: ScheduleFree(p)):
        for has_closure in (True, False):
            model = nn.Linear(4, 4)
            for parameter in model.parameters():
                nn.init.ones_(parameter)
            optimizer = make(model.parameters())

            def closure() -> Tensor:
                optimizer.zero_grad()  # noqa: B023
                loss: Tensor = model(torch.ones(1, 4)).sum()  # noqa: B023
                loss.backward()
                return loss

            with pytest.raises(ConfigurationError) as caught:
                loop(optimizer, model, closure, has_closure)
            messages.append(str(caught.value))
    model = nn.Linear(4, 4)
    LocalSGD(k_steps=2, begin_step=0).attach(optimizer := SGD(model.parameters(), 0.1), model.named_parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return messages


def test_a_plain_loop_refuses_them_too() -> None:
    first, second = run_ranks(attach, 2)
    assert first == second
    assert ["communicates" in each for each in first] == [True, True, False, False]


# With gradients ------------------------------------------------------------------------------------------------------

GRADIENTS: dict[str, Callable[[], Any]] = {
    "dense": lambda: Strategy(DGC(rampup_begin_step=100)),
    "dgc": lambda: Strategy(DGC(sparsity=[0.9], min_numel=100)),
    "int8": lambda: Strategy(QuantizedGradients("int8")),
    "powersgd": lambda: Strategy(PowerSGD()),
    "hierarchical": lambda: Strategy(Hierarchical()),
}


class Modes(Tiny):
    """Calls eval and train of its optimizer in one of the places that people use."""

    def __init__(self, place: str) -> None:
        super().__init__(ScheduleFree)
        self.place, self.validated = place, list[str]()

    def on_train_start(self) -> None:
        self._set("train", self.place)

    def on_validation_start(self) -> None:
        self._set("eval", "start")

    def on_validation_end(self) -> None:
        self._set("train", "start")

    def on_validation_model_eval(self) -> None:
        super().on_validation_model_eval()
        self._set("eval", "model_eval")

    def on_validation_model_train(self) -> None:
        super().on_validation_model_train()
        self._set("train", "model_eval")

    def on_validation_epoch_start(self) -> None:
        self._set("eval", "epoch")

    def on_train_epoch_start(self) -> None:
        self._set("train", "epoch")

    def _set(self, mode: str, place: str) -> None:
        if self.place == place:
            getattr(self.trainer.optimizers[0], mode)()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.validated.append(weights_of(self))


def switch(name: str) -> None:
    traces = []
    for place in ("", "start", "model_eval", "epoch"):
        model, after = Modes(place or "start"), list[str]()

        class Look(Callback):
            def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
                after.append(weights_of(module))  # noqa: B023

        options = {"callbacks": [Look()], "max_epochs": 2, "num_sanity_val_steps": 0}
        data = make_data(2, 1) if place else None
        make_trainer(GRADIENTS[name](), 2, **options).fit(model, make_data(2, STEPS), data)
        assert all(len(set(each)) == 1 for each in zip(*gathered(model.validated), strict=True))
        assert all(len(set(each)) == 1 for each in zip(*gathered(after), strict=True))
        traces.append(after)
    assert traces[1] == traces[2] == traces[3]  # rounding alone: y -> x -> y
    assert traces[0][:STEPS] == traces[1][:STEPS]


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_second_set_of_weights_is_equal_on_all_ranks_with_gradients(name: str) -> None:
    run_ranks(switch, 2, name)


def share_and_save(name: str, folder: str) -> None:
    model = Tiny(Share)
    make_trainer(GRADIENTS[name](), 2).fit(model, make_data(2, STEPS))
    assert len(set(gathered(weights_of(model)))) == 1
    whole, again, first = (Tiny(zero) for _ in range(3))
    make_trainer(GRADIENTS[name](), 2, max_steps=2 * STEPS, max_epochs=-1).fit(whole, make_data(2, STEPS))
    path = f"{folder}/{{}}.ckpt"
    make_trainer(GRADIENTS[name](), 2, callbacks=[Watcher(path, (STEPS,))]).fit(first, make_data(2, STEPS))
    trainer = make_trainer(GRADIENTS[name](), 2, max_steps=2 * STEPS, max_epochs=-1)
    trainer.fit(again, make_data(2, STEPS), ckpt_path=path.format(STEPS))
    assert trainer.global_step == 2 * STEPS
    assert gathered(weights_of(whole)) == gathered(weights_of(again))


class Fail(Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            raise RuntimeError("a fault of the user's")


def fail(folder: str) -> list[str]:
    callbacks = [Fail(), OnExceptionCheckpoint(folder)]
    trainer = make_trainer(GRADIENTS["int8"](), 2, callbacks=callbacks, enable_checkpointing=True)
    with pytest.raises(RuntimeError, match="of the user's"), warnings.catch_warnings(record=True) as caught:
        trainer.fit(Tiny(zero), make_data(2, STEPS))
    return [str(each.message) for each in caught if "is not written" in str(each.message)]


def test_nothing_is_gathered_while_an_exception_ends_the_fit(tmp_path: Path) -> None:
    first, _ = run_ranks(fail, 2, str(tmp_path))
    assert len(first) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.fault(
    "a checkpoint with ZeroRedundancyOptimizer, with a method that exchanges gradients", "saved and resumed as by ddp"
)
@pytest.mark.parametrize("name", ["dense", "dgc", "int8", "hierarchical"])
def test_an_optimizer_that_communicates_trains_and_resumes_with_gradients(name: str, tmp_path: Path) -> None:
    run_ranks(share_and_save, 2, name, str(tmp_path))
