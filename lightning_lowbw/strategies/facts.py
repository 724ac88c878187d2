"""Checks before the first step: settings that must be equal on all ranks, and models that cannot be trained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, Timer
from torch import Tensor
from torch.optim import Optimizer

from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.namespaces import twins
from lightning_lowbw.strategies.advice import accumulation_schedulers
from lightning_lowbw.where.agreement import agree, digest, failing_together

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
PLAIN = (bool, int, float, str, tuple, type(None))  # what can be compared between ranks


def plain_values(values: Mapping[str, object]) -> dict[str, object]:
    """Return those of some named values that can be compared between ranks."""
    return {name: value for name, value in values.items() if isinstance(value, PLAIN)}


def settings_of(trainer: pl.Trainer, *, takes_uneven: bool = False) -> dict[str, object]:
    """Return the Trainer's settings on which all ranks must agree, those of its callbacks that communicate included.

    Args:
        trainer: of this rank.
        takes_uneven: whether ranks may have different numbers of batches.
    """
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    shared = [each for each in callbacks if isinstance(each, twins(Checkpoint) + twins(EarlyStopping))]
    timers = [each for each in callbacks if isinstance(each, twins(Timer))]
    names = [name for name in SETTINGS if not (takes_uneven and name == LENGTH)]
    return {
        **{f"Trainer({name})": getattr(trainer, name, None) for name in names},  # a `val_check_interval` may be a time
        "Trainer(max_time)": [_duration_of(each) for each in timers],
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


def agree_on_model(module: torch.nn.Module, compares_weights: bool = False, takes_sparse: bool = False) -> None:
    """Check, before DDP wraps the model, that it can be trained and is the same on all ranks.

    DDP's own error about models that differ does not say where they do.

    Args:
        module: the one that is fitted.
        compares_weights: whether the weights must be equal already, because no broadcast makes them equal.
        takes_sparse: whether gradients may have torch's sparse layout, because none is exchanged.

    Collective: all ranks, blocking.

    Raises:
        ConfigurationError: on all ranks; a layer has gradients of torch's sparse layout.
        DisagreementError: on all ranks; names, shapes, dtypes, layouts, what is frozen or weights differ.
    """
    if not takes_sparse:
        with failing_together():
            refuse_sparse_gradients(module)
    facts: dict[str, object] = {
        f"parameter {name}": (tuple(p.shape), str(p.dtype), p.stride(), "trains" if p.requires_grad else "frozen")
        for name, p in module.named_parameters()
    }
    if compares_weights:
        facts |= {f"weights of {name} (init_sync=False)": digest([p])[:8] for name, p in module.named_parameters()}
    agree("model", facts)


def agree_on_optimizers(optimizers: Sequence[Optimizer], named_parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Check that the optimizers, their param groups and the plain values in these are the same on all ranks.

    Collective: all ranks, blocking.

    Raises:
        ConfigurationError: on all ranks; two optimizers have a parameter in common.
        DisagreementError: on all ranks.
    """
    with failing_together():
        refuse_shared_parameters(optimizers)
    names = {id(parameter): name for name, parameter in named_parameters}
    facts: dict[str, object] = {"optimizers": [type(optimizer).__name__ for optimizer in optimizers]}
    for number, optimizer in enumerate(optimizers):
        for index, group in enumerate(optimizer.param_groups):
            prefix = f"optimizer {number}, param group {index}"
            facts[f"{prefix}, parameters"] = [names.get(id(p), tuple(p.shape)) for p in group["params"]]
            facts |= {f"{prefix}, {key}": value for key, value in plain_values(group).items()}
    agree("optimizers", facts)


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
