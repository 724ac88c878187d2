"""What the Trainer says of a run; checks before the first step, and warnings of settings that cost accuracy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Checkpoint,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_lowbw.comm.agreement import failing_together, gather
from lightning_lowbw.compress.top_k import TopK
from lightning_lowbw.errors import ConfigurationError, DisagreementError
from lightning_lowbw.method import Method
from lightning_lowbw.namespaces import twins
from lightning_lowbw.schedules.every_k import MOST_FRAGMENTS, EveryK
from lightning_lowbw.strategies.shared_buffers import buffers_of
from lightning_lowbw.sync.checks import agree_on_model, agree_on_optimizers, warn_if_incomplete
from lightning_lowbw.sync.gradient import GradientSync
from lightning_lowbw.sync.synchronizer import Synchronizer

C = TypeVar("C", bound=pl.Callback)

# Callbacks that keep an average of the weights over steps, in `_average_model`.
AVERAGING: tuple[type[pl.Callback], ...] = (
    StochasticWeightAveraging,
    *([pl.callbacks.WeightAveraging] if hasattr(pl.callbacks, "WeightAveraging") else []),  # not before Lightning 2.6
)
# Callbacks that communicate, or decide what does.
COLLECTIVE: tuple[type[pl.Callback], ...] = (Checkpoint, EarlyStopping, BatchSizeFinder, LearningRateFinder, *AVERAGING)

NOT_BROADCAST = frozenset({torch.int16, torch.uint16, torch.uint32, torch.uint64})  # by gloo, nor by NCCL
MUCH = 0.5  # of the trained elements; below it a warning
# Of the Trainer: ranks with different ones would wait for each other in different collectives, or train apart.
SETTINGS = (
    "max_epochs",
    "min_epochs",
    "max_steps",
    "min_steps",
    "limit_train_batches",
    "limit_val_batches",
    "overfit_batches",
    "val_check_interval",
    "check_val_every_n_epoch",
    "num_sanity_val_steps",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "precision",
)


def callbacks_of(trainer: pl.Trainer, *classes: type[C]) -> list[C]:
    """Return the trainer's callbacks of some classes, of either package of Lightning."""
    both = tuple(twin for cls in classes for twin in twins(cls))
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    return [each for each in callbacks if isinstance(each, both)]


def accumulates_by_schedule(trainer: pl.Trainer) -> bool:
    """Return whether a callback sets, by the epoch, how many batches' gradients are accumulated for a step."""
    schedulers = callbacks_of(trainer, GradientAccumulationScheduler)
    return any(each.going_to_accumulate_grad_batches() for each in schedulers)


def steps_per_epoch_of(trainer: pl.Trainer, alternative: str) -> int:
    """Return the optimizer steps of an epoch; where ranks have different numbers, the largest.

    Collective: all ranks, blocking.

    Args:
        trainer: in a fit.
        alternative: how to give the same in steps, for the message.

    Raises:
        ConfigurationError: on all ranks; the number cannot be known.
    """
    num_batches, unknown = float(trainer.num_training_batches), ""
    if not trainer.lightning_module.automatic_optimization:
        unknown = "in manual optimization only the module knows them"
    elif accumulates_by_schedule(trainer):
        unknown = "GradientAccumulationScheduler changes them"
    elif num_batches == math.inf:
        unknown = "the training data has no length"
    with failing_together():
        if unknown:
            raise ConfigurationError(f"The steps per epoch are not known: {unknown}. Give it in steps: {alternative}.")
    return max(gather(math.ceil(num_batches / trainer.accumulate_grad_batches), "number of steps per epoch"))


def num_steps_of_fit(trainer: pl.Trainer, workers: Sequence[Synchronizer]) -> float:
    """Return the number of a fit's last step, as each worker counts: from 0 in each fit that does not resume.

    Infinite where there is no limit, or it is not known. In manual optimization as many as there are batches; an
    optimizer that leaves some out takes fewer.
    """
    num_steps, before = float(trainer.estimated_stepping_batches), trainer.global_step - sum(w.step for w in workers)
    # -1: Lightning has no limit. A schedule of accumulation is left out of Lightning's number.
    if num_steps < 0 or (accumulates_by_schedule(trainer) and trainer.max_epochs != -1):
        return math.inf
    if not trainer.lightning_module.automatic_optimization and num_steps == trainer.max_steps:  # of all optimizers
        num_steps /= max(1, len(workers))
    return num_steps - before / max(1, len(workers))


def settings_of(trainer: pl.Trainer) -> dict[str, object]:
    """Return the Trainer's settings on which all ranks must agree, those of its callbacks that communicate included."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    shared = callbacks_of(trainer, *COLLECTIVE)
    shared += [each for each in callbacks if getattr(each, "sets_method", False)]  # of this package
    timers = [(each.time_remaining(), each.time_elapsed()) for each in callbacks_of(trainer, Timer)]
    return {
        # A `val_check_interval` may be a time.
        **{f"Trainer({name})": getattr(trainer, name, None) for name in SETTINGS},
        # None if it only measures; the elapsed time alone differs between ranks.
        "Trainer(max_time)": [None if left is None else round(left + elapsed) for left, elapsed in timers],
        "callbacks": [each.state_key for each in shared],
        "GradientAccumulationScheduler": [
            each.scheduling for each in callbacks_of(trainer, GradientAccumulationScheduler)
        ],
    }


def agree_on_length(trainer: pl.Trainer) -> bool:
    """Refuse known numbers of batches that differ; with `max_steps` warn, because the training may end before.

    Collective: all ranks, blocking.

    Returns:
        Whether it is known that all ranks end an epoch at the same batch.

    Raises:
        DisagreementError: on all ranks.
    """
    lengths = gather(float(trainer.num_training_batches), "number of batches")  # infinity where it is not known
    shortest, longest = min(lengths), max(lengths)
    if shortest == longest or longest == math.inf:
        return longest < math.inf
    counts = ", ".join(f"rank {rank} has {length:.0f}" for rank, length in enumerate(lengths))
    message = (
        f"The ranks have different numbers of batches per epoch: {counts}. They communicate in every step, so those "
        f"with more would wait for the others. Set Trainer(limit_train_batches={shortest:.0f}), divide the data "
        "equally (as Lightning's DistributedSampler does), or train with a method that averages weights, such as "
        "'local_sgd', which takes unequal numbers."
    )
    if trainer.max_steps < 0:
        raise DisagreementError(message)
    rank_zero_warn(message)
    return False


def check_model(module: torch.nn.Module, compares_weights: bool = False, takes_sparse: bool = False) -> None:
    """Check, before DDP wraps the model, that it can be trained and is the same on all ranks.

    Collective: all ranks, blocking.

    Args:
        module: the one that is fitted.
        compares_weights: whether the weights must be equal already, because no broadcast makes them equal.
        takes_sparse: whether gradients may have torch's sparse layout, because none is exchanged.

    Raises:
        ConfigurationError, DisagreementError: on all ranks.
    """
    with failing_together():
        if not takes_sparse:
            refuse_sparse_gradients(module)
        for name, buffer in buffers_of(module).items():
            if buffer.dtype in NOT_BROADCAST:
                raise ConfigurationError(
                    f"Buffer {name!r} is of {buffer.dtype}, which DDP cannot broadcast: register it as int32 or int64, "
                    "or name it in the module's _ddp_params_and_buffers_to_ignore, so that each rank keeps its own."
                )
    agree_on_model(module.named_parameters(), compares_weights=compares_weights)


def check_optimizers(optimizers: Sequence[Optimizer], named_parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Check that the optimizers are the same on all ranks, and that no parameter is in two of them.

    Collective: all ranks, blocking.

    Raises:
        ConfigurationError, DisagreementError: on all ranks.
    """
    trained = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    with failing_together():
        for optimizer in optimizers:
            if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
                raise ConfigurationError(
                    f"{type(optimizer).__name__} has not called torch.optim.Optimizer.__init__, as wrappers for "
                    "differential privacy do not: what they add to a gradient in their step would come after it has "
                    "been sent. Use strategy='ddp'."
                )
        if len({*trained}) < len(trained):
            raise ConfigurationError(
                "Two optimizers have a parameter in common: its gradient would be exchanged twice. Give each parameter "
                "to one optimizer."
            )
    agree_on_optimizers(optimizers, named_parameters)


def agree_on_hyperparameters(trainer: pl.Trainer) -> None:
    """Check that learning rates and the like are the same on all ranks, whose weights would part otherwise.

    Collective: all ranks, blocking.

    Raises:
        DisagreementError: on all ranks.
    """
    topic = (
        f"optimizers after step {trainer.global_step} (a scheduler may follow a metric of which each rank has its own "
        "value: log that with sync_dist=True)"
    )
    agree_on_optimizers(trainer.optimizers, trainer.lightning_module.named_parameters(), topic=topic)


def refuse_sparse_gradients(module: torch.nn.Module) -> None:
    """Raise ConfigurationError where a layer has gradients of torch's sparse layout."""
    for name, layer in module.named_modules():
        if isinstance(layer, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and layer.sparse:
            raise ConfigurationError(
                f"{type(layer).__name__} {name!r} has sparse gradients; only dense ones are exchanged. "
                "Build it with sparse=False: methods that compress send few elements of it all the same. Methods that "
                "average weights take it where no step is synchronous (begin_step=0, k_steps > 1), between several "
                "ranks on one level."
            )


def numels_of(workers: Iterable[Synchronizer]) -> tuple[list[int], list[int]]:
    """Return the elements of each trained tensor that is sent sparse in sparse steps, and of each other one."""
    found = [worker.params.numels_by_kind(what) for worker in workers if isinstance(what := worker.method.what, TopK)]
    return [numel for sparse, _ in found for numel in sparse], [numel for _, others in found for numel in others]


def warn_of_schedule(method: Method, trainer: pl.Trainer, workers: Sequence[Synchronizer]) -> None:
    """Warn where the run ends before its method has done anything but DDP; tell what sparse steps do."""
    when = method.when
    if isinstance(when, EveryK):
        begin, does, instead = when.begin_step, "average", ", and after it each rank alone"
        after = max(1, when.k_steps // when.num_fragments_of(MOST_FRAGMENTS))
    elif method.compresses_gradients and not when.is_auto:
        begin, does, instead, after = when.rampup_begin_step, "compressed step", "", 1
        _tell_of_sparse_steps(workers)
    else:
        return
    if not isinstance(begin, int):
        if trainer.lightning_module.automatic_optimization and not trainer.lr_scheduler_configs:
            rank_zero_warn(
                f"begin_step={begin!r}, and the module has no learning-rate scheduler: the rate never falls, so this "
                "trains as DDP. Give a number of steps or a fraction of the run."
            )
    elif begin + after > (num_steps := num_steps_of_fit(trainer, workers)) and not getattr(trainer, "fast_dev_run", 0):
        rank_zero_warn(
            f"This run has {num_steps:.0f} optimizer steps, and the first {does} would come with step {begin + after}: "
            f"up to step {begin} it trains as DDP{instead}. Begin earlier, or train longer."
        )


def _tell_of_sparse_steps(workers: Sequence[Synchronizer]) -> None:
    """Log a change of an optimizer's arithmetic; warn if that is not complete, or if most elements are sent whole."""
    sparse, others = numels_of(workers)
    for worker in workers:
        if isinstance(worker, GradientSync):
            if not worker.correction.is_complete and worker.peers.rank == 0:
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
