"""What the Trainer says of the run; and warnings at its start, of settings that cost accuracy, or hours for nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_lowbw.compress.top_k import TopK
from lightning_lowbw.namespaces import twins
from lightning_lowbw.schedules.every_k import MOST_FRAGMENTS, EveryK
from lightning_lowbw.schedules.every_step import EveryStep
from lightning_lowbw.sync.checks import warn_if_incomplete
from lightning_lowbw.sync.gradient import GradientSync
from lightning_lowbw.sync.local import LocalSync
from lightning_lowbw.sync.synchronizer import Synchronizer

C = TypeVar("C", bound=pl.Callback)

MUCH = 0.5  # of the trained elements; below it a warning


def callbacks_of(trainer: pl.Trainer, *classes: type[C]) -> list[C]:
    """Return the trainer's callbacks of some classes, of either package of Lightning."""
    both = tuple(twin for cls in classes for twin in twins(cls))
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    return [each for each in callbacks if isinstance(each, both)]


def accumulation_schedulers(trainer: pl.Trainer) -> list[GradientAccumulationScheduler]:
    """Return the callbacks that change the number of accumulated batches from epoch to epoch."""
    return callbacks_of(trainer, GradientAccumulationScheduler)


def accumulates_by_schedule(trainer: pl.Trainer) -> bool:
    """Return whether a callback sets, by the epoch, how many batches' gradients are accumulated for a step."""
    return any(each.going_to_accumulate_grad_batches() for each in accumulation_schedulers(trainer))


def num_steps_of(trainer: pl.Trainer) -> float:
    """Return the number of optimizer steps of the run; infinite where it has no limit or is not known."""
    num_steps = float(trainer.estimated_stepping_batches)
    if accumulates_by_schedule(trainer) and trainer.max_epochs != -1:  # which Lightning's number leaves out
        return math.inf
    return math.inf if num_steps < 0 else num_steps  # -1: Lightning has no limit


def steps_per_epoch_of(trainer: pl.Trainer) -> int | None:
    """Return the number of optimizer steps of an epoch; None where it is not known."""
    if accumulates_by_schedule(trainer):
        return None
    num_batches = float(trainer.num_training_batches)
    return math.ceil(num_batches / trainer.accumulate_grad_batches) if math.isfinite(num_batches) else None


def num_steps_of_fit(trainer: pl.Trainer, workers: Sequence[Synchronizer]) -> float:
    """Return the number of a fit's last step, as each worker counts: from 0 in each fit that does not resume.

    In manual optimization as many as there are batches; an optimizer that leaves some out takes fewer.
    """
    num_steps, before = num_steps_of(trainer), trainer.global_step - sum(worker.step for worker in workers)
    if not trainer.lightning_module.automatic_optimization and num_steps == trainer.max_steps:  # of all optimizers
        num_steps /= max(1, len(workers))
    return num_steps - before / max(1, len(workers))


def warn_if_alone(strategy: str, num_ranks: int) -> None:
    """Warn if there is only one rank."""
    if num_ranks == 1:
        rank_zero_warn(
            f"{strategy} with one rank: there is no other rank to communicate with, so this trains as without it. Set "
            "Trainer(devices=..., num_nodes=...) for more."
        )


def warn_if_too_short(when: EveryStep | EveryK, trainer: pl.Trainer, workers: Sequence[Synchronizer]) -> None:
    """Warn where the run ends before its method has done anything but DDP."""
    instead, begin = "", when.rampup_begin_step if isinstance(when, EveryStep) else when.begin_step
    if not isinstance(begin, int):
        if trainer.lightning_module.automatic_optimization and not trainer.lr_scheduler_configs:
            rank_zero_warn(
                f"begin_step={begin!r}, and the module has no learning-rate scheduler: the rate never falls, so this "
                "trains as DDP. Give a number of steps or a fraction of the run."
            )
        return
    first, does, num_steps = begin + 1, "compressed step", num_steps_of_fit(trainer, workers)
    if isinstance(when, EveryK):
        first, does = begin + max(1, when.k_steps // when.num_fragments_of(MOST_FRAGMENTS)), "average"
        instead = ", and after it each rank alone"
    if first > num_steps and not getattr(trainer, "fast_dev_run", False):
        rank_zero_warn(
            f"This run has {num_steps:.0f} optimizer steps, and the first {does} would come with step {first}: up to "
            f"step {begin} it trains as DDP{instead}. Begin earlier, or train longer."
        )


def numels_of(workers: Iterable[Synchronizer]) -> tuple[list[int], list[int]]:
    """Return the elements of each trained tensor that is sent sparse in sparse steps, and of each other one."""
    found = [worker.params.numels_by_kind(what) for worker in workers if isinstance(what := worker.method.what, TopK)]
    return [numel for sparse, _ in found for numel in sparse], [numel for _, others in found for numel in others]


def tell_of_sparse_steps(workers: Sequence[Synchronizer]) -> None:
    """Log a change of an optimizer's arithmetic; warn if that is not complete, or if most elements are sent whole."""
    sparse, others = numels_of(workers)
    for worker in workers:
        if isinstance(worker, GradientSync):
            if isinstance(worker.method.what, TopK) and not worker.correction.is_complete and worker.peers.rank == 0:
                warn_if_incomplete(worker.optimizer, worker.when)
            if numels_of([worker])[0] and (note := worker.correction.note()):
                rank_zero_info(note)
    total = sum(sparse) + sum(others)
    if sum(sparse) < MUCH * total:
        rank_zero_warn(
            f"{len(sparse)} of {len(sparse) + len(others)} tensors, {sum(sparse) / total:.1%} of the {total:,} "
            "elements that are trained, are sent sparse. The others have less than min_numel elements or are in "
            "exclude, and are sent whole. Change these to compress more."
        )


def warn_if_replaced(module: nn.Module, workers: Iterable[LocalSync]) -> bool:
    """Warn of buffers that other tensors have taken the place of: those are not averaged; return whether there are."""
    buffers = {name: buffer for worker in workers for name, buffer in worker.buffers.floating.items()}
    now = dict(module.named_buffers())
    replaced = [name for name, buffer in buffers.items() if now.get(name) is not buffer]
    if replaced:
        rank_zero_warn(
            f"These buffers have been replaced since the fit began, and are not averaged: {', '.join(replaced)}. Each "
            "rank has its own, and validation and checkpoints have that of rank 0. Change a buffer in place: "
            "self.x.copy_(...) instead of self.x = ..."
        )
    return bool(replaced)
