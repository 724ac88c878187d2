"""Optimizers that are put in the place of others in mid-fit, as finetuning-scheduler does; and modules without one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from lightning_lowbw.comm.agreement import digest
from tests.ranks import on_ranks
from tests.strategies.fits import gathered, refusal, same, train, weights, whole_weights
from tests.tiny import Tiny, TwoOptimizers, sgd, trained

STEPS, AT = 7, 5
Make = Callable[[Any], list[Optimizer]]
rmsprop = partial(RMSprop, lr=1e-3)


def held_by(module: pl.LightningModule) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return this rank's weights, and what its workers keep back."""
    workers: list[Any] = [each for each in module.trainer.strategy.workers if each.compressed is not None]
    kept = {name: residual.clone() for each in workers for name, residual in each.compressed.residuals.items()}
    weights = {name: getattr(p, "to_local", p.detach)().detach().clone() for name, p in module.named_parameters()}
    return weights, kept


class Seen(Tiny):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if batch_idx == AT - 1:
            self.begun = held_by(self)
        return super().training_step(batch, batch_idx)


class Replace(pl.Callback):
    """Puts optimizers in place of others in a hook, where a batch has a number."""

    def __init__(self, make: Make, hook: str = "on_train_batch_start", at: tuple[int, ...] = (AT,)) -> None:
        self.at, self.done = at, 0

        def replace(trainer: pl.Trainer, module: Any, *_: Any) -> None:
            if self.done < len(self.at) and trainer.fit_loop.epoch_loop.total_batch_idx + 1 >= self.at[self.done]:
                self.done += 1
                self.before = held_by(module)
                trainer.strategy.optimizers = make(module)

        setattr(self, hook, replace)


def adam(module: pl.LightningModule) -> list[Optimizer]:
    return [Adam(trained(module), lr=1e-2)]


def one(module: pl.LightningModule) -> list[Optimizer]:
    return [sgd(trained(module))]


def replace_once(name: str, kind: Callable[[Any], Optimizer], make: Make = adam) -> tuple[float, dict[str, Tensor]]:
    """Return how far what the batch began with was from what it is to be, and what had been kept."""
    model, replace = Seen(kind), Replace(make)
    strategy: Any = train(name, model, STEPS, callbacks=[replace]).strategy
    same(whole_weights(model))
    assert [(each.step, type(each.optimizer)) for each in strategy.workers] == [(STEPS, type(make(model)[0]))]
    (before, kept), (now, left) = replace.before, model.begun
    of_all = gathered((dist.get_rank(), before, kept))
    if "sharded" in name:  # those with the same shards
        of_all = [each for each in of_all if each[0] % 2 == dist.get_rank() % 2]
    if strategy.replicas:
        assert any(not torch.equal(each[1][key], before[key]) for each in of_all for key in before)
        expected = {key: torch.stack([each[1][key] for each in of_all]).mean(0) for key in now}
    elif left:  # error feedback: they go on
        assert all(bool(each.any()) for each in left.values())
        now, expected = left, kept
    else:
        size, expected = 2 if "levels" in name else 1, {}  # of a node, whose ranks have parts
        rate = kind([torch.zeros(1, requires_grad=True)]).param_groups[0]["lr"]
        nodes = [of_all[first : first + size] for first in range(0, len(of_all), size)]
        for key in kept:
            unsent = torch.stack([torch.cat([each[2][key] for each in node]) for node in nodes]).mean(0)
            assert unsent.abs().max() > 0
            expected[key] = before[key] - rate * unsent.view_as(before[key])
    return max((float((now[key] - expected[key]).abs().max()) for key in expected), default=0.0), kept


@pytest.mark.fault
@pytest.mark.parametrize(
    ("name", "kind", "num_ranks"),
    [
        *[(name, sgd, 2) for name in ("dgc", "local_sgd", "post-local", "int8", "powersgd")],
        *[("dgc", AdamW, 2), ("diloco", AdamW, 2)],
        *[(f"{name}{where}", sgd, 4) for name in ("dgc", "local_sgd") for where in (" on two levels", ", sharded")],
    ],
)
@on_ranks()
def test_what_is_kept_for_a_replaced_optimizer_is_not_lost(name: str, kind: Any, num_ranks: int) -> None:
    assert replace_once(name, kind)[0] < 1e-6


@on_ranks(2)
def test_gradients_that_error_feedback_keeps_go_on_where_the_new_optimizer_takes_gradients() -> None:
    """Of top-k: for SGD gradients go on; the residuals of Adam's correction are no gradients."""
    error, kept = replace_once("dgc", rmsprop, lambda module: [SGD(trained(module), lr=0.01)])
    assert error == 0
    assert kept
    message = refusal("dgc", Seen(rmsprop), STEPS, callbacks=[Replace(adam)])
    assert message.startswith("Adam has taken the place of RMSprop, of whose gradients some have not been sent")


def two(module: pl.LightningModule) -> list[Optimizer]:
    parts = (("wide.", "norm."), ("wider", "head"))
    return [sgd(p for name, p in module.named_parameters() if name.startswith(part)) for part in parts]


def after_another_change(module: Any) -> list[Optimizer]:
    """As finetuning-scheduler does: what the old optimizer has trained has left its groups before."""
    module.trainer.optimizers[0].param_groups[0]["params"] = list(module.head.parameters())
    return adam(module)


def after_freezing(module: Any) -> list[Optimizer]:
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name.startswith("head"))
    return one(module)


class Manual(TwoOptimizers):
    """Steps all optimizers that there are; one at first."""

    every = 1
    configure_optimizers = Tiny.configure_optimizers


class Head(Tiny):
    """Trains the head only."""

    def configure_optimizers(self) -> Optimizer:
        return sgd(self.head.parameters())


class WithScheduler(Tiny):
    def configure_optimizers(self) -> Any:
        optimizer: Any = super().configure_optimizers()
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}]


RELATIVES: dict[str, tuple[type[Tiny], Callable[[], Replace]]] = {
    "fewer parameters": (Tiny, lambda: Replace(after_freezing)),
    "more parameters": (Head, lambda: Replace(one)),
    "twice": (Tiny, lambda: Replace(adam, at=(3, 6))),
    "at the end of a batch": (Tiny, lambda: Replace(adam, "on_train_batch_end")),
    "at the end of a validation": (Tiny, lambda: Replace(adam, "on_validation_end")),
    "manual optimization": (Manual, lambda: Replace(one)),
    "two instead of one": (Manual, lambda: Replace(two)),
    "two, then one": (Manual, lambda: Replace(lambda m: adam(m) if m.trainer.current_epoch else two(m), at=(3, 9))),
    "with other groups at the end": (Tiny, lambda: Replace(after_another_change)),
    "of a scheduler": (WithScheduler, lambda: Replace(adam)),
    "in the step, after which it counts": (Tiny, lambda: Replace(adam, "on_before_optimizer_step")),
}


@pytest.mark.parametrize("name", ["dgc", "dgc, dense at first", "int8", "powersgd", "local_sgd", "diloco"])
@on_ranks(2)
def test_optimizers_are_replaced_in_any_hook_before_a_batch(name: str) -> None:
    """All of it with gradients and with weights; of the other methods what makes workers of other parameters."""
    for relative in RELATIVES if name in ("dgc", "local_sgd") else ("more parameters", "twice", "two, then one"):
        make_model, make_callback = RELATIVES[relative]
        model, callback = make_model(), make_callback()
        strategy: Any = train(name, model, STEPS, 1, callbacks=[callback], max_epochs=2).strategy
        assert callback.done == len(callback.at), relative
        assert [id(each.optimizer) for each in strategy.workers] == [id(each) for each in strategy.optimizers], relative
        assert {each.step for each in strategy.workers} == {2 * STEPS}, relative
        same(digest(model.parameters()))


@on_ranks(2)
def test_a_choice_that_is_open_times_the_new_optimizer() -> None:
    strategy: Any = train("dgc, auto", data=20, callbacks=[Replace(adam, at=(4,))]).strategy
    assert [type(worker.optimizer) for worker in strategy.workers] == [Adam]
    assert strategy.auto.chosen is not None


class InTrainingStep(Manual):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        if batch_idx == 2:
            self.trainer.strategy.optimizers = adam(self)
        super().training_step(batch, batch_idx)


@pytest.mark.parametrize("name", ["dgc", "local_sgd"])
@on_ranks(2)
def test_one_that_is_replaced_in_a_batch_is_refused(name: str) -> None:
    message = refusal(name, InTrainingStep(), STEPS)
    assert message.startswith("This Adam is not one that configure_optimizers returned")
    assert "before a batch begins" in message


@pytest.mark.parametrize("name", ["dgc", "int8", "local_sgd"])
@on_ranks(2)
def test_a_save_after_it_resumes_with_the_new_one(name: str, tmp_path: Path) -> None:
    """Replaced at the end of an epoch, and saved before its first step; a resume begins with the one that was saved."""
    ends = []
    for is_resumed in (False, True):
        model, saves = Tiny(rmsprop if is_resumed else sgd, data_by_step=True), ModelCheckpoint(tmp_path, "{epoch}")
        replace = Replace(lambda module: [rmsprop(trained(module))], "on_train_epoch_end")
        options: dict[str, Any] = {"max_epochs": 2, "enable_checkpointing": not is_resumed}
        options |= {"resume": f"{tmp_path}/epoch=0.ckpt"} if is_resumed else {"callbacks": [replace, saves]}
        saves.save_top_k = -1
        train(name, model, STEPS, **options)
        ends.append(same(weights(model)))
    assert ends[0] == ends[1]


class Nothing(Tiny):
    """Has no optimizer, or one of no tensors; until a callback puts one in."""

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
        *[(name, 2) for name in ("dgc", "dgc, auto", "int8", "local_sgd", "diloco")],
        *[("local_sgd on two levels", 4), ("dgc, sharded", 4)],
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
    model = Nothing(is_empty=False)
    train(name, model, STEPS, callbacks=[Replace(one, at=(3,))])
    assert ends[0] == ends[1] != same(whole_weights(model))
