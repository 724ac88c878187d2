"""Checks before the first step: settings that must be equal on all ranks, and models that cannot be trained."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, Checkpoint, EarlyStopping, LearningRateFinder, Timer
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_lowbw.comm.agreement import agree, failing_together, gather
from lightning_lowbw.errors import ConfigurationError, DisagreementError
from lightning_lowbw.strategies.advice import accumulation_schedulers, callbacks_of
from lightning_lowbw.strategies.callback_agreement import AVERAGING
from lightning_lowbw.sync.checks import agree_on_model, agree_on_optimizers

# Callbacks that communicate, or decide what does.
COLLECTIVE: tuple[type[pl.Callback], ...] = (Checkpoint, EarlyStopping, BatchSizeFinder, LearningRateFinder, *AVERAGING)

LENGTH = "limit_train_batches"
# Of the Trainer: ranks with different ones would wait for each other in different collectives, or train apart.
SETTINGS = (
    "max_epochs",
    "min_epochs",
    "max_steps",
    "min_steps",
    LENGTH,
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

WHOLE_DATA = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def settings_of(trainer: pl.Trainer, *, takes_uneven: bool = False) -> dict[str, object]:
    """Return the Trainer's settings on which all ranks must agree, those of its callbacks that communicate included.

    Args:
        trainer: of this rank.
        takes_uneven: whether ranks may have different numbers of batches.
    """
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    shared = callbacks_of(trainer, *COLLECTIVE)
    shared += [each for each in callbacks if getattr(each, "sets_method", False)]  # of this package
    names = [name for name in SETTINGS if not (takes_uneven and name == LENGTH)]
    return {
        **{f"Trainer({name})": getattr(trainer, name, None) for name in names},  # a `val_check_interval` may be a time
        "Trainer(max_time)": [_duration_of(each) for each in callbacks_of(trainer, Timer)],
        "callbacks": [each.state_key for each in shared],
        "GradientAccumulationScheduler": [each.scheduling for each in accumulation_schedulers(trainer)],
    }


def _duration_of(timer: Timer) -> int | None:
    """Return the seconds that a timer allows; None if it only measures, as the time differs between ranks."""
    remaining = timer.time_remaining()
    return None if remaining is None else round(remaining + timer.time_elapsed())


def agree_on_configuration(
    strategy: str, method: Mapping[str, object], others: Mapping[str, object] = MappingProxyType({})
) -> None:
    """Check that all ranks were given the same strategy and method, and the same other facts.

    Collective: all ranks, blocking.

    Raises:
        DisagreementError: on all ranks.
    """
    agree(f"configuration of {strategy}", {"class": strategy, **method, **others})


def agree_on_resume(trainer: pl.Trainer) -> None:
    """Check that all ranks resume from a checkpoint, or none does; the others would not load their state with them.

    Each may have a path of its own. That the checkpoints are of one save is compared where the shards are loaded.

    Collective: all ranks, blocking.

    Raises:
        DisagreementError: on all ranks.
    """
    found = "a checkpoint" if trainer.ckpt_path else "no checkpoint"
    agree("fit's ckpt_path ('last' finds what is on a rank's own disk)", {"ckpt_path": found})


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

    Args:
        module: the one that is fitted.
        compares_weights: whether the weights must be equal already, because no broadcast makes them equal.
        takes_sparse: whether gradients may have torch's sparse layout, because none is exchanged.

    Collective: all ranks, blocking.

    Raises:
        ConfigurationError: on all ranks; a layer has gradients of torch's sparse layout.
        DisagreementError: on all ranks; as `agree_on_model`.
    """
    if not takes_sparse:
        with failing_together():
            refuse_sparse_gradients(module)
    agree_on_model(module.named_parameters(), compares_weights=compares_weights)


def check_optimizers(optimizers: Sequence[Optimizer], named_parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Check that the optimizers are the same on all ranks, and that no parameter is in two of them.

    Collective: all ranks, blocking.

    Raises:
        ConfigurationError: on all ranks; two optimizers have a parameter in common.
        DisagreementError: on all ranks; as `agree_on_optimizers`.
    """
    with failing_together():
        refuse_shared_parameters(optimizers)
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
                "ranks on one level, without inner_momentum='average'."
            )


def refuse_shared_parameters(optimizers: Sequence[Optimizer]) -> None:
    """Raise ConfigurationError where two optimizers have a parameter in common."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    if len({p for group in groups for p in group["params"]}) < sum(len(group["params"]) for group in groups):
        raise ConfigurationError(
            "Two optimizers have a parameter in common: its gradient would be exchanged twice. Give each parameter to "
            "one optimizer."
        )


def warn_if_not_distributed(trainer: pl.Trainer, strategy: str) -> None:
    """Warn if all ranks train on all of the data, because a library does not know the strategy's name.

    Args:
        trainer: of this rank.
        strategy: the name of its class.
    """
    name = trainer._accelerator_connector._strategy_flag  # an object, where the class was passed
    if not isinstance(name, str) or trainer.world_size == 1:
        return
    samplers = [whole_data_sampler_of(loader) for loader in CombinedLoader(trainer.train_dataloader).flattened]
    for sampler in [each for each in samplers if each is not None][:1]:
        rank_zero_warn(
            f"Each of the {trainer.world_size} ranks draws from all of its training data: the sampler is a "
            f"{type(sampler).__name__}, and Trainer(use_distributed_sampler=False) leaves it so. If all ranks have the "
            "same data, give it a DistributedSampler. A library that distributes its data only if the strategy's name "
            f"contains 'ddp', as scvi-tools does, does not do so with {name!r}: pass the class, "
            f"strategy=lightning_lowbw.{strategy}(...), which is a DDPStrategy."
        )


def whole_data_sampler_of(loader: object) -> object | None:
    """Return the sampler of a loader if it is one of torch's that draw from all of a dataset; else None."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    sampler: object = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    while type(sampler) is BatchSampler:
        sampler = sampler.sampler
    return sampler if type(sampler) in WHOLE_DATA else None
