"""Lightning's counters of batches and steps: what they say, and how other ranks take them over."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch import Tensor


def is_over(trainer: pl.Trainer) -> bool:
    """Return whether this rank is at the end of the training."""
    must_stop = trainer.should_stop and trainer.fit_loop._can_stop_early
    return must_stop or 0 <= trainer.max_steps <= trainer.global_step


def ends_epoch(trainer: pl.Trainer) -> bool:
    """Return whether this rank has no batch after the one in progress."""
    return trainer.fit_loop.epoch_loop._num_ready_batches_reached() or is_over(trainer)


def batches_of(trainer: pl.Trainer) -> Any:
    """Return the progress of the epoch: Lightning's counts of batches, and whether the one in progress is the last."""
    return trainer.fit_loop.epoch_loop.batch_progress


def _counters(trainer: pl.Trainer) -> dict[str, Any]:
    """Return what counts batches and steps, and what follows from these counts."""
    loop = trainer.fit_loop.epoch_loop
    counters: dict[str, Any] = {
        "batches": loop.batch_progress,
        "scheduler steps": loop.scheduler_progress,
        "automatic optimization": loop.automatic_optimization.optim_progress,
        "manual optimization": loop.manual_optimization.optim_step_progress,
    }
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    return counters | {f"scheduler {number}": scheduler for number, scheduler in enumerate(schedulers)}


def counters_of(trainer: pl.Trainer) -> dict[str, Any]:
    """Return this rank's counters of batches and steps, its schedulers' state, and the options of its param groups."""
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    options = [
        {name: v.detach().cpu() if isinstance(v, Tensor) else v for name, v in group.items() if name != "params"}
        for group in groups
    ]
    return {
        "counters": {name: counter.state_dict() for name, counter in _counters(trainer).items()},
        "logged": trainer.fit_loop.epoch_loop._batches_that_stepped,
        "options": options,
    }


def set_counters(trainer: pl.Trainer, state: dict[str, Any]) -> None:
    """Take over what `counters_of` returned on another rank."""
    for name, counter in _counters(trainer).items():
        counter.load_state_dict(state["counters"][name])
    trainer.fit_loop.epoch_loop._batches_that_stepped = state["logged"]
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    for group, options in zip(groups, state["options"], strict=True):
        for name, value in options.items():
            if isinstance(group.get(name), Tensor):
                group[name].copy_(value)
            else:
                group[name] = value
