"""Warnings at the start of a fit: settings that have no effect, or another effect than expected."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_lowbw.engine.checks import warn_if_incomplete
from lightning_lowbw.engine.gradients import GradientWorker
from lightning_lowbw.engine.replicas import ReplicaWorker
from lightning_lowbw.engine.worker import Worker
from lightning_lowbw.namespaces import twins
from lightning_lowbw.what.top_k import TopK
from lightning_lowbw.when.every_k import MOST_FRAGMENTS, EveryK
from lightning_lowbw.when.every_step import EveryStep

C = TypeVar("C", bound=pl.Callback)

MUCH = 0.5  # of the trained elements; below it a line is logged


def callbacks_of(trainer: pl.Trainer, *classes: type[C]) -> list[C]:
    """Return the trainer's callbacks of some classes, of either package of Lightning."""
    both = tuple(twin for cls in classes for twin in twins(cls))
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    return [each for each in callbacks if isinstance(each, both)]


def num_steps_of(trainer: pl.Trainer) -> float:
    """Return the number of optimizer steps of the run; NaN where it cannot be known."""
    num_steps = float(trainer.estimated_stepping_batches)
    if accumulates_by_schedule(trainer) and trainer.max_epochs != -1:  # which Lightning's number leaves out
        return math.nan
    return math.nan if num_steps < 0 else num_steps  # -1: Lightning has no limit


def accumulates_by_schedule(trainer: pl.Trainer) -> bool:
    """Return whether a callback sets, by the epoch, how many batches' gradients are accumulated for a step."""
    return any(each.going_to_accumulate_grad_batches() for each in accumulation_schedulers(trainer))


def accumulation_schedulers(trainer: pl.Trainer) -> list[GradientAccumulationScheduler]:
    """Return the callbacks that change the number of accumulated batches from epoch to epoch."""
    return callbacks_of(trainer, GradientAccumulationScheduler)


def steps_per_epoch_of(trainer: pl.Trainer) -> int | None:
    """Return the number of optimizer steps of an epoch; None where it is not known."""
    if accumulates_by_schedule(trainer):
        return None
    num_batches = float(trainer.num_training_batches)
    return math.ceil(num_batches / trainer.accumulate_grad_batches) if math.isfinite(num_batches) else None


def is_dry_run(trainer: pl.Trainer) -> bool:
    """Return whether only a few batches are tried (`fast_dev_run`): their number says nothing of the run."""
    return bool(getattr(trainer, "fast_dev_run", False))  # set by Lightning's debugging flags


def num_steps_of_fit(trainer: pl.Trainer, workers: Sequence[Worker]) -> float:
    """Return the number of a fit's last step, as the workers count: from 0 in each fit that does not resume."""
    before = trainer.global_step - sum(worker.step for worker in workers)
    return num_steps_of(trainer) - before / max(1, len(workers))


def warn_if_alone(strategy: str, num_ranks: int) -> None:
    """Warn if there is only one rank."""
    if num_ranks == 1:
        rank_zero_warn(
            f"{strategy} with one rank: there is no other rank to communicate with, so this trains as without it. Set "
            "Trainer(devices=..., num_nodes=...) for more."
        )


def warn_if_never_sparse(when: EveryStep, trainer: pl.Trainer, workers: Sequence[Worker]) -> None:
    """Warn where the run ends before the sparsity schedule begins."""
    num_steps = num_steps_of_fit(trainer, workers)
    if math.isnan(num_steps) or is_dry_run(trainer):
        return
    if when.density(int(min(num_steps, 2.0**62)) - 1, otherwise=0.0) == 1.0:
        rank_zero_warn(
            f"This run has {num_steps:.0f} optimizer steps, and the first sparse one would come after "
            f"{when.rampup_begin_step} or more (rampup_begin_step={when.rampup_begin_step}): nothing will be "
            "compressed. Let it begin earlier, or train longer."
        )


def tell_notes(workers: Iterable[Worker]) -> None:
    """Log a change of an optimizer's arithmetic in sparse steps; warn if it is not complete."""
    for worker in workers:
        if isinstance(worker, GradientWorker):
            what = worker.method.what
            if isinstance(what, TopK) and not worker.correction.is_complete and worker.peers.rank == 0:
                warn_if_incomplete(worker.optimizer, worker.when)
            has_sparse = not isinstance(what, TopK) or bool(worker.params.numels_by_kind(what)[0])
            if has_sparse and (note := worker.correction.note()):
                rank_zero_info(note)


def tell_what_stays_whole(workers: Iterable[Worker]) -> None:
    """Log it if less than half of the trained elements can be sent sparse; warn if none can."""
    sparse, others, least, excluded = list[int](), list[int](), 0, set[str]()
    for worker in workers:
        if isinstance(what := worker.method.what, TopK):
            of_sparse, of_others = worker.params.numels_by_kind(what)
            sparse, others, least = sparse + of_sparse, others + of_others, what.min_numel or worker.params.small_numel
            excluded |= set(what.exclude)
    total = sum(sparse) + sum(others)
    if total and sum(sparse) < MUCH * total:
        tell = rank_zero_info if sparse else rank_zero_warn
        or_excluded = f", or are excluded (exclude={sorted(excluded)})" if excluded else ""
        advice = f"With a smaller min_numel{' or less exclude' if excluded else ''} more is compressed"
        tell(
            f"{len(sparse)} of {len(sparse) + len(others)} tensors, {sum(sparse) / total:.1%} of the {total:,} "
            f"elements that are trained, are sent sparse. The others are sent whole: they have less than "
            f"min_numel={least} elements{or_excluded}. {advice}, at the cost of work for each tensor."
        )


def warn_if_never_local(when: EveryK, trainer: pl.Trainer, workers: Sequence[Worker]) -> None:
    """Warn where all steps of the run are synchronous, or it ends before the first average."""
    begin = when.begin_step
    if not isinstance(begin, int):
        if trainer.lightning_module.automatic_optimization and not trainer.lr_scheduler_configs:
            rank_zero_warn(
                f"begin_step={begin!r}, and the module has no learning-rate scheduler: the rate never falls, so this "
                "trains as DDP. Give a number of steps or a fraction of the run."
            )
        else:
            rank_zero_info(
                f"Steps are synchronous until the learning rate falls (begin_step={begin!r}); a run in which it never "
                "does trains as DDP."
            )
        return
    num_steps = num_steps_of_fit(trainer, workers)
    if when.schedule.is_always_synchronous or math.isnan(num_steps) or is_dry_run(trainer):
        return
    if begin >= num_steps:
        rank_zero_warn(
            f"This run has {num_steps:.0f} optimizer steps, and the first {begin} are synchronous (begin_step): it "
            "trains as DDP. Let the local phase begin earlier, or train longer."
        )
    elif begin + when.k_steps // when.num_fragments_of(MOST_FRAGMENTS) > num_steps:
        rank_zero_warn(
            f"This run has {num_steps:.0f} optimizer steps, and with begin_step={begin}, k_steps={when.k_steps} it is "
            "over before the first average: each rank trains alone, and only the end is averaged. Give a smaller "
            "k_steps, or train longer."
        )


def warn_if_replaced(module: nn.Module, workers: Iterable[ReplicaWorker]) -> bool:
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
