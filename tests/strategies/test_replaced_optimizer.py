"""Optimizers that are put in the place of others in mid-fit, as finetuning-scheduler does; and modules without one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from lightning_lowbw import (
    DGC,
    ConfigurationError,
    DGCStrategy,
    HierarchicalStrategy,
    LocalSGD,
    LocalSGDStrategy,
    PowerSGD,
    QuantizedGradients,
    ShardedStrategy,
    Strategy,
)
from lightning_lowbw.comm.agreement import digest
from tests.ranks import run_ranks
from tests.strategies.fits import gathered
from tests.tiny import MIN_NUMEL, ManualTiny, Tiny, make_data, make_trainer, sgd

STEPS, AT = 8, 5
SPARSE: dict[str, Any] = {"sparsity": [0.9], "min_numel": MIN_NUMEL}
STRATEGIES: dict[str, Callable[[], Any]] = {
    "dgc": lambda: DGCStrategy(**SPARSE),
    "dgc, dense at first": lambda: DGCStrategy(rampup_begin_step=3, **SPARSE),
    "dgc, auto": lambda: DGCStrategy(min_numel=MIN_NUMEL),
    "dgc on two levels": lambda: DGCStrategy(topology=2, **SPARSE),
    "hierarchical": lambda: HierarchicalStrategy(topology=2),
    "int8": lambda: Strategy(QuantizedGradients("int8")),
    "powersgd": lambda: Strategy(PowerSGD()),
    "local_sgd": lambda: LocalSGDStrategy(k_steps=3, begin_step=0),
    "post-local": lambda: LocalSGDStrategy(k_steps=3, begin_step=2),
    "diloco": lambda: Strategy(LocalSGD(k_steps=3, begin_step=0, outer="nesterov", outer_lr=0.7)),
    "local_sgd on two levels": lambda: LocalSGDStrategy(k_steps=3, begin_step=0, topology=2),
    "dgc, sharded": lambda: ShardedStrategy(DGC(**SPARSE), topology=2),
    "local_sgd, sharded": lambda: ShardedStrategy(LocalSGD(k_steps=3, begin_step=0), topology=2),
}
Make = Callable[[pl.LightningModule], list[Optimizer]]


def rmsprop(parameters: Iterable[Tensor]) -> Optimizer:
    return RMSprop(parameters, lr=1e-3)


def trained(module: pl.LightningModule) -> list[Tensor]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def local(tensor: Tensor) -> Tensor:
    return getattr(tensor, "to_local", tensor.detach)().detach()


def whole(tensor: Tensor) -> Tensor:
    return getattr(tensor, "full_tensor", tensor.detach)().detach()


class Seen(Tiny):
    """Keeps this rank's weights, and what its workers keep back, where each batch begins."""

    def __init__(self, optimizer: Callable[[Any], Optimizer] = sgd) -> None:
        super().__init__(optimizer)
        self.weights: list[dict[str, Tensor]] = []
        self.residuals: list[dict[str, Tensor]] = []

    def note(self) -> None:
        self.weights.append({name: local(p).clone() for name, p in self.named_parameters()})
        self.residuals.append(kept_by(self.trainer.strategy))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.note()
        return super().training_step(batch, batch_idx)


def kept_by(strategy: Any) -> dict[str, Tensor]:
    return {
        name: residual.clone()
        for worker in strategy.workers
        if worker.compressed is not None
        for name, residual in worker.compressed.residuals.items()
    }


class Replace(pl.Callback):
    """Puts optimizers in place of others in a hook, where a batch has a number."""

    def __init__(self, make: Make, hook: str = "on_train_batch_start", at: tuple[int, ...] = (AT,)) -> None:
        self.make, self.at, self.done = make, at, 0
        self.before: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})

        def replace(trainer: pl.Trainer, module: Any, *_: Any) -> None:
            if self.done < len(self.at) and trainer.fit_loop.epoch_loop.total_batch_idx + 1 >= self.at[self.done]:
                self.done += 1
                if isinstance(module, Seen) and hook == "on_train_batch_start":
                    module.note()
                    self.before = module.weights.pop(), module.residuals.pop()
                trainer.strategy.optimizers = self.make(module)

        setattr(self, hook, replace)


def adam(module: pl.LightningModule) -> list[Optimizer]:
    return [Adam(trained(module), lr=1e-2)]


def rate_of(kind: Callable[[Any], Optimizer]) -> float:
    return float(kind([torch.zeros(1, requires_grad=True)]).param_groups[0]["lr"])


def replace_once(name: str, kind: Callable[[Any], Optimizer], make: Make) -> dict[str, Any]:
    """Return the digest of the weights, and how far what the batch began with was from what it is to be."""
    num_ranks, model, replace = dist.get_world_size(), Seen(kind), Replace(make)
    trainer = make_trainer(STRATEGIES[name](), num_ranks, callbacks=[replace])
    trainer.fit(model, make_data(num_ranks, STEPS))
    strategy: Any = trainer.strategy
    before, kept = replace.before
    now, left = model.weights[AT - 1], model.residuals[AT - 1]
    error = 0.0
    of_all = gathered((dist.get_rank(), before, kept))
    if "sharded" in name:  # those with the same shards
        of_all = [each for each in of_all if each[0] % 2 == dist.get_rank() % 2]
    if strategy.replicas:
        for key, weight in now.items():
            error = max(error, float((weight - torch.stack([each[1][key] for each in of_all]).mean(0)).abs().max()))
    elif left:  # error feedback: they go on
        assert left.keys() == kept.keys()
        assert all(bool(each.any()) for each in left.values())
        error = max(float((left[key] - kept[key]).abs().max()) for key in left)
    else:
        num_parts = 2 if "levels" in name else 1
        for key in kept:
            unsent = torch.stack([torch.cat([each[2][key] for each in of_all[i : i + num_parts]])
                                  for i in range(0, len(of_all), num_parts)]).mean(0)  # fmt: skip
            expected = before[key] - rate_of(kind) * unsent.view_as(before[key])
            assert unsent.abs().max() > 0
            error = max(error, float((now[key] - expected).abs().max()))
    return {
        "weights": digest([whole(p) for p in model.parameters()]),
        "error": error,
        "steps": [worker.step for worker in strategy.workers],
        "kept": len(kept),
        "classes": [type(worker.optimizer).__name__ for worker in strategy.workers],
    }


@pytest.mark.fault(
    "a callback puts another optimizer in place of the first",
    "what has not been sent is applied, averaged or goes on; the new one trains on, on all ranks in the same step",
)
@pytest.mark.parametrize(
    ("name", "kind", "num_ranks"),
    [
        ("dgc", sgd, 2),
        ("dgc", AdamW, 2),
        ("dgc on two levels", sgd, 4),
        ("dgc, sharded", sgd, 4),
        ("local_sgd", sgd, 2),
        ("local_sgd on two levels", sgd, 4),
        ("local_sgd, sharded", sgd, 4),
        ("post-local", sgd, 2),
        ("diloco", AdamW, 2),
        ("int8", sgd, 2),
        ("powersgd", sgd, 2),
    ],
)
def test_what_is_kept_for_a_replaced_optimizer_is_applied_averaged_or_goes_on(
    name: str, kind: Callable[[Any], Optimizer], num_ranks: int
) -> None:
    ranks = run_ranks(replace_once, num_ranks, name, kind, adam)
    for each in ranks:
        assert each["weights"] == ranks[0]["weights"]
        assert each["error"] < 1e-6
        assert each["steps"] == [STEPS]
        assert each["classes"] == ["Adam"]


def error_feedback() -> tuple[dict[str, Any], str]:
    """Of top-k: for SGD gradients go on; the residuals of Adam's correction are no gradients."""
    goes_on = replace_once("dgc", rmsprop, lambda module: [SGD(trained(module), lr=0.01)])
    with pytest.raises(ConfigurationError) as caught:
        replace_once("dgc", rmsprop, adam)
    return goes_on, str(caught.value)


def test_gradients_that_error_feedback_keeps_go_on_where_the_new_optimizer_takes_gradients() -> None:
    for goes_on, message in run_ranks(error_feedback, 2):
        assert goes_on["error"] == 0
        assert goes_on["kept"] > 0
        assert message.startswith("Adam has taken the place of RMSprop, of whose gradients some have not been sent")


def only(*names: str) -> Make:
    return lambda module: [sgd(p for name, p in module.named_parameters() if name.startswith(names))]


def two(module: pl.LightningModule) -> list[Optimizer]:
    parts = (("wide.", "norm."), ("wider", "head"))
    return [sgd(p for name, p in module.named_parameters() if name.startswith(part)) for part in parts]


def two_then_one(module: pl.LightningModule) -> list[Optimizer]:
    return two(module) if module.trainer.current_epoch == 0 else adam(module)


def after_another_change(module: Any) -> list[Optimizer]:
    """As finetuning-scheduler does: what the old optimizer has trained has left its groups before."""
    module.trainer.optimizers[0].param_groups[0]["params"] = list(module.head.parameters())
    return adam(module)


class Manual(ManualTiny):
    """Steps all optimizers that there are."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        found = self.optimizers()
        optimizers: list[Any] = found if isinstance(found, list) else [found]
        self.zero_grad()
        loss = Tiny.training_step(self, batch, batch_idx)
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
        return loss


class Head(Tiny):
    """Trains the head only."""

    def configure_optimizers(self) -> Optimizer:
        return sgd(self.head.parameters())


class Freezes(Replace):
    """Freezes all but the head, of which alone the next optimizer is."""

    def __init__(self) -> None:
        def make(module: Any) -> list[Optimizer]:
            for name, parameter in module.named_parameters():
                parameter.requires_grad_(name.startswith("head"))
            return [sgd(module.head.parameters())]

        super().__init__(make)


class WithScheduler(Tiny):
    def configure_optimizers(self) -> Any:
        optimizer: Any = super().configure_optimizers()
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}]


RELATIVES: dict[str, Callable[[], tuple[Tiny, pl.Callback]]] = {
    "fewer parameters": lambda: (Tiny(), Freezes()),
    "more parameters": lambda: (Head(), Replace(lambda module: [sgd(trained(module))])),
    "twice": lambda: (Tiny(), Replace(adam, at=(3, 6))),
    "at the end of a batch": lambda: (Tiny(), Replace(adam, "on_train_batch_end")),
    "at the end of a validation": lambda: (Tiny(), Replace(adam, "on_validation_end")),
    "manual optimization": lambda: (Manual(), Replace(lambda module: [sgd(trained(module))])),
    "two instead of one": lambda: (Manual(), Replace(two)),
    "two, then one": lambda: (
        Manual(),
        Replace(lambda m: two(m) if m.trainer.current_epoch == 0 else adam(m), at=(3, 9)),
    ),
    "with other groups at the end": lambda: (Tiny(), Replace(after_another_change)),
    "of a scheduler": lambda: (WithScheduler(), Replace(adam)),
    "in the step, after which it counts": lambda: (Tiny(), Replace(adam, "on_before_optimizer_step")),
}


def relatives(name: str) -> dict[str, Any]:
    found, num_ranks = {}, dist.get_world_size()
    for relative, make in RELATIVES.items():
        model, callback = make()
        trainer = make_trainer(STRATEGIES[name](), num_ranks, callbacks=[callback], max_epochs=2)
        trainer.fit(model, make_data(num_ranks, STEPS), make_data(num_ranks, 1))
        strategy: Any = trainer.strategy
        assert callback.done == len(callback.at), relative  # type: ignore[attr-defined]
        assert [id(each.optimizer) for each in strategy.workers] == [id(each) for each in strategy.optimizers], relative
        assert {each.step for each in strategy.workers} == {2 * STEPS}, relative
        found[relative] = digest(model.parameters())
    return found


@pytest.mark.parametrize("name", ["dgc", "dgc, dense at first", "int8", "powersgd", "local_sgd", "diloco"])
def test_optimizers_are_replaced_in_any_hook_before_a_batch(name: str) -> None:
    first, second = run_ranks(relatives, 2, name)
    assert first == second


def test_a_choice_that_is_open_times_the_new_optimizer() -> None:
    for classes, chosen in run_ranks(choose, 2):
        assert classes == ["Adam"]
        assert chosen


def choose() -> tuple[list[str], bool]:
    trainer = make_trainer(STRATEGIES["dgc, auto"](), 2, callbacks=[Replace(adam, at=(4,))])
    trainer.fit(Tiny(), make_data(2, 20))
    strategy: Any = trainer.strategy
    return [type(worker.optimizer).__name__ for worker in strategy.workers], strategy.auto.chosen is not None


class InTrainingStep(Manual):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 2:
            self.trainer.strategy.optimizers = adam(self)
        return super().training_step(batch, batch_idx)


def refuse(name: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        make_trainer(STRATEGIES[name](), 2).fit(InTrainingStep(), make_data(2, STEPS))
    return str(caught.value)


@pytest.mark.parametrize("name", ["dgc", "local_sgd"])
def test_one_that_is_replaced_in_a_batch_is_refused(name: str) -> None:
    for message in run_ranks(refuse, 2, name):
        assert message.startswith("This Adam is not one that configure_optimizers returned")
        assert "before a batch begins" in message


class FromTheStart(Tiny):
    """On a resume begins with the optimizer that has been saved."""

    def __init__(self, is_resumed: bool) -> None:
        super().__init__(rmsprop if is_resumed else sgd, data_by_step=True)


def save_and_resume(name: str, folder: str) -> tuple[str, str]:
    """An optimizer is replaced at the end of an epoch, and saved before its first step."""
    ends = []
    for is_resumed in (False, True):
        model, saves = FromTheStart(is_resumed), ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
        replace = Replace(lambda module: [rmsprop(trained(module))], "on_train_epoch_end")
        callbacks = [saves] if is_resumed else [replace, saves]
        trainer = make_trainer(STRATEGIES[name](), 2, callbacks=callbacks, max_epochs=2, enable_checkpointing=True)
        path = f"{folder}/epoch=0.ckpt" if is_resumed else None
        trainer.fit(model, make_data(2, STEPS), ckpt_path=path)
        ends.append(digest([*model.parameters(), *model.buffers()]))
    return ends[0], ends[1]


@pytest.mark.parametrize("name", ["dgc", "int8", "local_sgd"])
def test_a_save_after_it_resumes_with_the_new_one(name: str, tmp_path: Path) -> None:
    ranks = run_ranks(save_and_resume, 2, name, str(tmp_path))
    assert ranks[0] == ranks[1]
    assert ranks[0][0] == ranks[0][1]


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


def nothing(name: str, folder: str) -> list[Any]:
    num_ranks, found = dist.get_world_size(), []
    for is_empty in (False, True):
        model = Nothing(is_empty)
        trainer = make_trainer(STRATEGIES[name](), num_ranks, max_epochs=2, enable_progress_bar=True)
        trainer.fit(model, make_data(num_ranks, 2), make_data(num_ranks, 1))
        trainer.save_checkpoint(f"{folder}/{name}.ckpt")
        assert not trainer.strategy.workers  # type: ignore[attr-defined]
        found += [digest(whole(p) for p in model.parameters()), digest(model.buffers())]
    model = Nothing(is_empty=False)
    replace = Replace(lambda module: [sgd(trained(module))], at=(3,))
    make_trainer(STRATEGIES[name](), num_ranks, callbacks=[replace]).fit(model, make_data(num_ranks, STEPS))
    found.append(digest(whole(p) for p in model.parameters()))
    return found


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [
        ("dgc", 2),
        ("dgc, auto", 2),
        ("int8", 2),
        ("local_sgd", 2),
        ("diloco", 2),
        ("local_sgd on two levels", 4),
        ("dgc, sharded", 4),
    ],
)
def test_without_parameters_in_an_optimizer_there_is_nothing_to_do(name: str, num_ranks: int, tmp_path: Path) -> None:
    ranks = run_ranks(nothing, num_ranks, name, str(tmp_path))
    assert all(each == ranks[0] for each in ranks)
    before, _, empty, _, trained_at_last = ranks[0]
    assert before == empty != trained_at_last
