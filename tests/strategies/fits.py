"""What the tests of several strategies have in common: strategies by name, fits, and callbacks that watch them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

import lightning_lowbw as lowbw
from lightning_lowbw.comm.agreement import digest
from tests.sync.problem import everywhere, same_on_all
from tests.tiny import MIN_NUMEL, Tiny, make_data, make_trainer

STEPS = 9
gathered, same = everywhere, same_on_all


SPARSE = {"density": 1 / 8, "chunk": 64, "min_numel": 100}  # the tiny layers
_sparse = partial(lowbw.DGC, sparsity=[0.9], min_numel=MIN_NUMEL)
METHODS: dict[str, lowbw.Method] = {
    "dgc": _sparse(),
    "dgc, dense at first": _sparse(rampup_begin_step=3),
    "dgc, warm-up": lowbw.DGC(rampup_begin_step=2, rampup_step=4, sparsity=(0.5, 0.95), min_numel=MIN_NUMEL),
    "dgc, auto": lowbw.DGC(sparsity="auto", min_numel=MIN_NUMEL),
    "dense": lowbw.DGC(rampup_begin_step=10**6),
    "int8": lowbw.QuantizedGradients("int8"),
    "powersgd": lowbw.PowerSGD(),
    "hierarchical": lowbw.Hierarchical(),
    "local_sgd": lowbw.LocalSGD(3, 0),
    "post-local": lowbw.LocalSGD(3, 2),
    "diloco": lowbw.LocalSGD(3, 0, outer="nesterov", outer_lr=0.7),
    "sparse_loco": lowbw.LocalSGD(3, 0, compression=SPARSE),
    "delayed": lowbw.LocalSGD(4, 0, compression=SPARSE, delay_steps=3),
    "streaming": lowbw.LocalSGD(4, 0, outer="nesterov", num_fragments=2, delay_steps=2),
}


adamw = partial(torch.optim.AdamW, lr=1e-2)


def make(name: str, changes: dict[str, Any] | None = None, **keywords: Any) -> Any:
    """Return a strategy.

    Args:
        name: "ddp", or one of `METHODS`, perhaps with " on two levels" or ", sharded", over nodes of two ranks.
        changes: of the method.
    """
    if name == "ddp":
        return DDPStrategy(**keywords)
    is_sharded, base = name.endswith(", sharded"), name.removesuffix(", sharded").removesuffix(" on two levels")
    method = METHODS[base].replace(**changes or {})
    if base != name:
        keywords = {"topology": 2, **keywords}
    return (lowbw.ShardedStrategy if is_sharded else lowbw.Strategy)(method, **keywords)


def train(
    strategy: Any, model: Any = None, data: Any = STEPS, val: Any = 0, *, resume: str | None = None, **options: Any
) -> pl.Trainer:
    """Fit a model on this rank.

    Args:
        strategy: or its name for `make`.
        model: a `Tiny` unless it is given.
        data: of the training, or in how many batches of it.
        val: the same of the validation.
        options: of the Trainer.
    """
    num_ranks = dist.get_world_size()
    trainer = make_trainer(make(strategy) if isinstance(strategy, str) else strategy, num_ranks, **options)
    made = [make_data(num_ranks, each) if isinstance(each, int) and each else each for each in (data, val)]
    loaders = [None if each == 0 else each for each in made]
    trainer.fit(Tiny() if model is None else model, *loaders, ckpt_path=resume)
    return trainer


def train_by_step(
    strategy: Any, path: str = "", save_at: Any = (), resume: Any = None, *, model: Any = None, **options: Any
) -> pl.Trainer:
    """Train so that a resume can be exact: data and dropout follow the step and the rank, not the epoch."""
    torch.manual_seed(7 + dist.get_rank() if resume is None else 99)
    model, steps = Tiny(dropout=0.3, data_by_step=True) if model is None else model, options.pop("steps", 10)
    watching = [saving(path, tuple(save_at)), *options.pop("callbacks", ())]
    options = {"callbacks": watching, "max_steps": steps, "max_epochs": -1, **options}
    return train(strategy, model, steps, resume=resume, **options)


def refusal(*args: Any, error: Any = lowbw.ConfigurationError, fit: Any = train, **options: Any) -> str:
    """Return what `train`, or another function, says when it refuses."""
    with pytest.raises(error) as caught:
        fit(*args, **options)
    return str(caught.value)


def warned(function: Callable[[], Any]) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = function()
    return result, [str(each.message) for each in caught]


def weights(module: nn.Module) -> str:
    return digest([*module.parameters(), *module.buffers()])


def state_of(trainer: Any) -> dict[str, Any]:
    """Return digests of all that a step depends on, on this rank."""
    (worker,) = trainer.strategy.workers
    states = [value for state in worker.optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return {
        "weights": weights(trainer.lightning_module),
        "residuals": digest(worker.state_dict()["residuals"].values()),
        "optimizer": digest([value.float() for value in states]),
        "steps": (worker.step, getattr(worker, "num_averages", 0)),
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in worker.optimizer.param_groups],
    }


def whole_weights(module: nn.Module) -> str:
    """Return a digest of what the parameters have on all ranks of a node."""
    return digest([getattr(p, "full_tensor", p.detach)().detach() for p in module.parameters()])


class At(pl.Callback):
    """Calls a function of the Trainer and the module in a hook, where some steps have been taken.

    Args:
        ranks: on these alone.
    """

    def __init__(self, steps: Any, call: Any, hook: str = "on_train_batch_end", ranks: Any = None) -> None:
        def called(trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
            is_due = trainer.global_step in (steps if isinstance(steps, tuple) else (steps,))
            if is_due and (ranks is None or trainer.global_rank in ranks):
                call(trainer, module)

        setattr(self, hook, called)


def saving(path: str, steps: tuple[int, ...]) -> At:
    """Return a callback that saves after some steps, to a path that may have a place for the number."""
    return At(steps, lambda trainer, _: trainer.save_checkpoint(path.format(trainer.global_step)))


LOOKS = ("on_validation_start", "on_validation_end", "on_train_end")  # where all ranks are shown the same


class Noted(pl.Callback):
    """Notes something of the module in some hooks: after each batch, unless they are given."""

    def __init__(self, of: Callable[[Any], Any] = weights, *hooks: str) -> None:
        self.values: list[Any] = []

        def note(trainer: pl.Trainer, module: pl.LightningModule, *_: Any, **__: Any) -> None:
            self.values.append(of(module))

        for hook in hooks or ("on_train_batch_end",):
            setattr(self, hook, note)


def traffic() -> Noted:
    """Return a callback whose values are what is logged of the traffic after each step."""

    def logged(module: pl.LightningModule) -> dict[str, float]:
        metrics = module.trainer.callback_metrics.items()
        return {name: float(value) for name, value in metrics if name.startswith("traffic/")}

    return Noted(logged)


class Silence(pl.Callback):
    """Fails where something is sent to all ranks in a batch without an average; the last of the callbacks."""

    def on_train_batch_start(self, *_: Any) -> None:
        self.before = num_collectives()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        # In the first step DDP rebuilds its buckets, once.
        if trainer.global_step > 1 and not any(worker.has_communicated for worker in trainer.strategy.workers):
            assert num_collectives() == self.before, f"sent after step {trainer.global_step}"


def num_collectives() -> int:
    """Return how many have been issued on the group of the world, also by C++."""
    return torch.distributed.distributed_c10d._get_default_group()._get_sequence_number_for_group()
