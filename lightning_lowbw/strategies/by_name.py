"""Errors and warnings for libraries, including Lightning, that behave differently for other names than "ddp"."""

from __future__ import annotations

from typing import TYPE_CHECKING

import lightning.pytorch as pl
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

if TYPE_CHECKING:
    from lightning_lowbw.strategies.strategy import Strategy

SEARCH = "_find_unused_parameters"
UNFINISHED = "Expected to have finished reduction in the prior iteration"  # DDP, of a backward pass
CANNOT_REPLACE = "Trying to inject custom `Sampler`"  # Lightning, of a DataLoader of a class it does not know
NO_MESH = "'NoneType' object is not subscriptable"  # Python, of self.device_mesh["data_parallel"]
WHOLE_DATA = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def name_of(trainer: pl.Trainer) -> str | None:
    """Return the name that a Trainer was given its strategy by; None where that was an object."""
    given = trainer._accelerator_connector._strategy_flag
    return given if isinstance(given, str) else None


def explain_(exception: BaseException, strategy: Strategy) -> None:
    """Add advice to an error that is caused by the strategy's name, or in which Lightning would name stock DDP.

    In place:
        The exception's message.
    """
    module = strategy.lightning_module
    message = exception.args[0] if exception.args else None
    trainer = None if module is None else module._trainer  # none in the process that has started the ranks
    if module is None or trainer is None or not isinstance(message, str):
        return
    cls, name = type(strategy).__name__, name_of(trainer)
    if UNFINISHED in message:
        trained = {key: p.grad for key, p in module.named_parameters() if p.requires_grad}
        unused = [key for key, gradient in trained.items() if gradient is None]
        shown = f" ({', '.join(unused)})" if 0 < len(unused) < len(trained) else ""
        by_name = f"strategy='{name.partition(SEARCH)[0]}{SEARCH}_true' or " if name else ""
        message = (
            "In a dense step DDP waits for the gradients of all parameters, and the loss that training_step returned "
            f"does not depend on some{shown}. If that is intended, let DDP search for them: {by_name}"
            f"strategy={cls}(find_unused_parameters=True)."
        )
    elif CANNOT_REPLACE in message and name is not None:
        message = f"{message} {what_to_pass(cls, name)}"
    elif NO_MESH in message and is_overridden("configure_model", module) and module.device_mesh is None:
        message = (
            f"{message} (configure_model asks for self.device_mesh, which only a sharded model has: "
            "strategy='dgc_fsdp' or the like, or lightning_lowbw.ShardedStrategy)"
        )
    elif name is not None and draws_batches(trainer):
        message = (
            f"{message} (Perhaps because the sampler of the training data gives whole batches, and Lightning has made "
            f"a DistributedSampler of it. {what_to_pass(cls, name)})"
        )
    exception.args = (message, *exception.args[1:])


def warn_if_not_distributed(trainer: pl.Trainer, strategy: Strategy) -> None:
    """Warn if all ranks train on all of the data, because a library does not know the strategy's name."""
    name = name_of(trainer)
    if name is None or strategy.world_size == 1:
        return
    for loader in CombinedLoader(trainer.train_dataloader).flattened:
        sampler = whole_data_sampler_of(loader)
        if sampler is not None:
            rank_zero_warn(
                f"Each of the {strategy.world_size} ranks draws from all of its training data: the sampler is a "
                f"{type(sampler).__name__}, and Trainer(use_distributed_sampler=False) leaves it so. If all ranks have "
                f"the same data, give it a DistributedSampler. {what_to_pass(type(strategy).__name__, name)}"
            )
            return


def what_to_pass(cls: str, name: str) -> str:
    """Return the advice for a library that has not made the data distributed."""
    keywords = "find_unused_parameters=True" if name.endswith(f"{SEARCH}_true") else "..."
    return (
        "A library that distributes its data only if the strategy's name contains 'ddp', as scvi-tools does, "
        f"does not do so with {name!r}: pass the class, strategy=lightning_lowbw.{cls}({keywords}), which is a "
        "DDPStrategy."
    )


def draws_batches(trainer: pl.Trainer) -> bool:
    """Return whether Lightning has put its DistributedSampler around a sampler that gives batches, not elements."""
    loaders = CombinedLoader(trainer.train_dataloader).flattened if trainer.train_dataloader is not None else []
    samplers = [loader.sampler for loader in loaders if isinstance(loader, DataLoader)]
    wrapped = [
        getattr(each.dataset, "_sampler", None) for each in samplers if isinstance(each, DistributedSamplerWrapper)
    ]
    return any(isinstance(each, BatchSampler) for each in wrapped)


def whole_data_sampler_of(loader: object) -> object | None:
    """Return the sampler of a loader if it is one of torch's that draw from all of a dataset; else None."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    sampler: object = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    while type(sampler) is BatchSampler:
        sampler = sampler.sampler
    return sampler if type(sampler) in WHOLE_DATA else None
