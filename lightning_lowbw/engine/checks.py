"""Errors and warnings of the drivers: payloads that do not fit the peers, the model or the optimizer."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.what.payloads import Narrow, Whole
from lightning_lowbw.what.top_k import TopK
from lightning_lowbw.when.every_step import EveryStep
from lightning_lowbw.where.peers import Peers

if TYPE_CHECKING:
    from lightning_lowbw.engine.gradients import GradientWorker
    from lightning_lowbw.engine.worker import Worker

Payload = Whole | Narrow | TopK

LAUNCHED = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")  # by torchrun, srun, mpirun
LITTLE_KEPT = 0.5  # of the elements: what is less than that is hardly meant to be kept back, and the rest to be sent


def check_two_levels(what: TopK) -> None:
    """Check that a payload goes with nodes of several ranks."""
    if what.exchange not in ("auto", "all_gather"):
        raise ConfigurationError(
            f"exchange={what.exchange!r} does not exist on two levels (a topology, a name that ends in _hierarchical). "
            "There give 'auto' or 'all_gather'."
        )


def check_replaced(what: Payload, made_for: Payload) -> None:
    """Check that a payload that replaces another interprets the residuals in the same way."""
    if type(what) is not type(made_for):
        raise ConfigurationError(f"{what} in place of {made_for}: another payload needs a worker of its own.")
    for name in ("correction", "dense_dtype") if isinstance(what, TopK) else ():
        given, own = getattr(what, name), getattr(made_for, name)
        if given != own:
            raise ConfigurationError(
                f"{name}={given!r} in place of {own!r}: it cannot change during a training. Attach the method anew."
            )


def check_current_device(device: torch.device, group: dist.ProcessGroup | None) -> None:
    """Check that NCCL will take the GPU of the parameters where it is not told a tensor: the current device.

    Raises:
        ConfigurationError: it is another one.
    """
    if device.type != "cuda" or not dist.is_initialized() or dist.get_backend(group) != "nccl":
        return
    current = torch.cuda.current_device()
    if device.index != current:
        raise ConfigurationError(
            f"The parameters are on {device}, and the current device of this process is cuda:{current}, which NCCL "
            f"would use, too. Call torch.cuda.set_device({device.index}) before init_process_group."
        )


def check_not_in_ddp(parameters: Collection[Parameter], group: dist.ProcessGroup | None) -> None:
    """Check that no `DistributedDataParallel` all-reduces the gradients that a method is to exchange.

    DDP leaves no mark on parameters that Python can see, and their names say nothing for sure. So its living instances
    are searched for; one whose process group has only some of the method's ranks, as inside of nodes, is legal.

    Args:
        parameters: of an optimizer.
        group: of the method; None is the world.

    Raises:
        ConfigurationError: there is one.
    """
    if dist.is_initialized() and _is_in_ddp(parameters, group):
        gc.collect()  # it may be gone, and not collected yet
        if _is_in_ddp(parameters, group):
            raise ConfigurationError(
                "The parameters are those of a model in DistributedDataParallel, which all-reduces whole gradients "
                "during backward: this would train as DDP. Train the model itself, and delete the wrapper; all ranks "
                "must begin with the same weights."
            )


def _is_in_ddp(parameters: Collection[Parameter], group: dist.ProcessGroup | None) -> bool:
    ours, kinds, ranks = set(parameters), [DistributedDataParallel], _ranks_of(group)
    for kind in kinds:
        kinds += kind.__subclasses__()
    # Each instance refers to its class. This is one pass in C over all objects, some 0.1 s for a million.
    return any(
        not ours.isdisjoint(each.parameters()) and len(ranks) > 1 and ranks <= _ranks_of(each.process_group)
        for each in gc.get_referrers(*kinds)
        if type(each) in kinds and hasattr(each, "process_group")
    )


def _ranks_of(group: dist.ProcessGroup | None) -> set[int]:
    try:
        return set(dist.get_process_group_ranks(dist.group.WORLD if group is None else group))
    except (KeyError, ValueError):  # of a world that has been destroyed
        return set()


def warn_if_alone(peers: Peers) -> None:
    """Warn if there is only one rank, in a plain loop; of a strategy `strategies.advice` says it."""
    if peers.num_ranks > 1:
        return
    found = [f"{name} is {number}" for name in LAUNCHED if (number := os.environ.get(name, "1")) not in ("", "1")]
    started = f" {found[0]}, so other processes were started, and each trains alone." if found else ""
    missing = "with one rank" if dist.is_initialized() else "without a process group"
    warnings.warn(
        f"attach {missing}: there is no other rank to communicate with, so this trains as without it.{started} Start "
        "several ranks, as with torchrun, and call torch.distributed.init_process_group in each before attach.",
        stacklevel=3,  # the caller of `Method.attach`
    )


def warn_if_mostly_sent(worker: Worker) -> None:
    """Warn, on rank 0, if most of the elements are sent: perhaps a density was given as a sparsity, or the reverse."""
    what, when, peers = worker.method.what, worker.method.when, worker.peers
    if not isinstance(what, TopK) or peers.num_participants == 1 or peers.rank > 0:
        return
    stairs = when.stairs if isinstance(when, EveryStep) else ()
    kept = [each for each in stairs if 0.0 < each < LITTLE_KEPT]  # 0 is a dense stair, and says so
    if kept:
        given, few = f"sparsity={list(stairs)}", f"sparsity={[round(1.0 - each, 12) for each in kept]}"
        sent, dense = [1.0 - each for each in kept], ", and for a dense stair 0"
    elif not stairs and what.density > 1.0 - LITTLE_KEPT:
        given, few = f"density={what.density}", f"density={round(1.0 - what.density, 12)}"
        sent, dense = [what.density], ""
    else:
        return
    warnings.warn(
        f"{given}: {_in_percent(sent)} of the elements are sent. Sparsity is the fraction that is kept back, density "
        f"the fraction that is sent. To send {_in_percent([1.0 - each for each in sent])} give {few}{dense}.",
        stacklevel=3,  # the caller of `Method.attach`
    )


def _in_percent(fractions: Sequence[float]) -> str:
    return ", ".join(f"{100.0 * each:.4g} %" for each in fractions)


def warn_if_incomplete(worker: GradientWorker) -> None:
    """Warn, on rank 0, if sparse steps use error feedback without a correction, and the user has not chosen that."""
    what, peers = worker.method.what, worker.peers
    is_asked_for = not isinstance(what, TopK) or what.correction == "error_feedback"
    if worker.correction.is_complete or is_asked_for or peers.num_participants == 1 or peers.rank > 0:
        return
    advice = "" if worker.when.rampup_begin_step else "; a dense phase (rampup_begin_step > 0) helps"
    warnings.warn(
        f"{type(worker.optimizer).__name__}: gradients are compressed with error feedback only. What is kept back "
        f"reaches this optimizer late and in bursts, which costs some accuracy for Adam-type optimizers{advice}. "
        "torch.optim.SGD, Adam and AdamW have corrections.",
        stacklevel=3,  # the caller of `Method.attach`
    )
