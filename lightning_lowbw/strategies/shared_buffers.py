"""Buffers of methods that exchange gradients in every step: rank 0 sends them, as under DDP, at the lowest price.

Validation, the end of an epoch and of the fit, and checkpoints have the buffers of rank 0, and the training goes on
with these values, as after each broadcast of DDP. In manual optimization and with FSDP a forward pass broadcasts no
buffers: then rank 0 sends only the running statistics, which no training step reads, so that a validation does not
change the training.

In a dense step DDP broadcasts all buffers before the forward pass. Before a compressed step they may be larger than the
gradients (4 MB of a moving average; 213 KB of statistics in ResNet-50): then rank 0 sends the buffers that differed
between ranks after the first two such steps, without the running statistics of batch norm.

Shapes are compared at the start of a fit, and wherever the ranks compare their buffers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_lowbw.comm.collectives import Level, TrafficLedger, broadcast_, broadcast_flat_
from lightning_lowbw.sync.buffers import IGNORED, agree_on_specs, unequal
from lightning_lowbw.sync.synchronizer import Synchronizer

NUM_COMPARED = 2  # compressed steps before which the ranks compare their buffers


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that DDP would broadcast, by name."""
    ignored = getattr(module, IGNORED, ())
    strided = {name: buffer for name, buffer in module.named_buffers() if buffer.layout == torch.strided}
    return {name: buffer for name, buffer in strided.items() if name not in ignored}


def statistics_of(module: nn.Module) -> frozenset[str]:
    """Return the names of the buffers of layers that keep running statistics."""
    return frozenset(
        f"{name}.{key}" if name else key
        for name, layer in module.named_modules()
        if isinstance(layer, _NormBase)
        for key, _ in layer.named_buffers(recurse=False)
    )


class SharedBuffers:
    """The choice of the buffers that rank 0 sends, and of the steps after which the ranks compare their buffers.

    Args:
        module: the module that is fitted.
        asked: whether the user wants DDP's broadcast in every forward pass; None if they have not said so.
        in_forward: whether forward passes broadcast.

    Attributes:
        may_compare: whether the ranks compare their buffers after one of the coming steps.
        is_check_due: whether the ranks compare their buffers before the next batch.
    """

    def __init__(self, module: nn.Module, asked: bool | None, *, in_forward: bool = True) -> None:
        self._asked, self._in_forward = asked, in_forward
        self.may_compare = asked is None and in_forward
        # Names of buffers that no training step reads.
        self._statistics = frozenset[str]() if asked is False else statistics_of(module)
        self._unequal: list[str] | None = None  # names of the buffers that the ranks change differently, if known
        self._num_compared = 0
        self.is_check_due = False

    def state_dict(self) -> dict[str, Any]:
        """Return what the ranks have found; equal on all ranks."""
        return {"unequal": self._unequal, "num_compared": self._num_compared}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self._unequal, self._num_compared = state["unequal"], state["num_compared"]
        self.may_compare &= self._num_compared < NUM_COMPARED

    def own(self, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the buffers that a rank keeps in its shard of a checkpoint; the statistics are in the ``.ckpt``."""
        return {name: buffer for name, buffer in buffers.items() if name not in self._statistics}

    def to_broadcast(self, buffers: Mapping[str, Tensor], workers: Collection[Synchronizer]) -> list[Tensor]:
        """Return the buffers that rank 0 sends before a forward pass; none in steps that are all local."""
        if workers and all(worker.plan.is_local for worker in workers):
            return []
        if self._asked is not None or not _is_compressed(workers):
            return list(buffers.values())
        chosen = buffers.keys() - self._statistics if self._unequal is None else self._unequal
        return [buffer for name, buffer in buffers.items() if name in chosen]

    def note_step(self, workers: Collection[Synchronizer]) -> None:
        """Note that a step has ended, before whose forward pass DDP may have broadcast."""
        self.is_check_due |= self.may_compare and _is_compressed(workers)

    def compare(self, module: nn.Module, device: torch.device) -> None:
        """Find buffers that the ranks change differently: rank 0 sends them before compressed steps, too.

        Collective: all ranks, after the same steps.

        Raises:
            DisagreementError: on all ranks; they have buffers of different shapes.
        """
        self.is_check_due, known = False, self._unequal or []
        self._num_compared += 1
        self.may_compare = self._num_compared < NUM_COMPARED
        buffers = _agreed(module)
        unknown = {name: b for name, b in buffers.items() if name not in self._statistics and name not in known}
        new = unequal(unknown, None, device)
        self._unequal = [*known, *new]
        if new:
            nbytes = sum(buffers[name].nbytes for name in self._unequal if name in buffers)
            rank_zero_info(
                f"The ranks change these buffers differently: {', '.join(new)}. Before each forward pass rank 0 sends "
                f"its buffers, as under DDP ({nbytes:,} bytes for all such buffers). "
                "broadcast_buffers=False leaves this out: then each rank keeps its own."
            )

    @torch.no_grad()
    def share_(self, module: pl.LightningModule, ledger: TrafficLedger, device: torch.device) -> None:
        """Replace the buffers that differ by the values of rank 0, before a validation or a save reads them.

        Collective: all ranks, blocking; the comparison of shapes, `unequal`, and a broadcast if buffers differ.
        """

        def send_(flat: Tensor) -> None:
            broadcast_(flat)
            ledger.record(flat.nbytes)

        if self._asked is False:
            return
        if self.is_check_due:  # before they are made equal
            self.compare(module, device)
        buffers = _agreed(module)
        if not (module.automatic_optimization and self._in_forward):
            buffers = {name: buffer for name, buffer in buffers.items() if name in self._statistics}
        broadcast_flat_([buffers[name] for name in unequal(buffers, None, device)], send_)


def _agreed(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of a module, which have the same shapes on all ranks; see `agree_on_specs`."""
    buffers = buffers_of(module)
    agree_on_specs(buffers, None)
    return buffers


def _is_compressed(workers: Collection[Synchronizer]) -> bool:
    """Return whether gradients of the coming step are not sent whole."""
    return any(worker.plan.reduce != "all" and not worker.plan.is_local for worker in workers)


def choose_buffers(
    model: DistributedDataParallel,
    shared: SharedBuffers,
    workers: Callable[[], Collection[Synchronizer]],
    ledger: TrafficLedger,
    level: Level | None,
) -> None:
    """Let DDP broadcast only the chosen buffers before a forward pass, in one message, and count them.

    Args:
        model: asks for a broadcast before the forward passes of stock DDP.
        shared: chooses the buffers.
        workers: returns the workers of the fit.
        ledger: gets the bytes that are sent, and the bytes that DDP would have sent.
        level: of the topology that a message to all ranks crosses, if there is one.
    """
    # Not the model itself: as a cycle it would live on after the fit, until some thread collects it, while the backward
    # pass of the next fit may call the hooks of its reducer.
    owner = weakref.ref(model)

    def broadcast_chosen(buffers: Sequence[Tensor], *args: int) -> None:
        ddp = owner()
        assert ddp is not None

        def send_(message: Tensor) -> None:
            DistributedDataParallel._distributed_broadcast_coalesced(ddp, [message], *args)
            dense = sum(buffer.nbytes for buffer in buffers)
            ledger.record(message.nbytes, level)
            ledger.dense_bytes += dense
            ledger.dense_inter_bytes += dense if level == "inter" else 0

        broadcast_flat_(shared.to_broadcast(ddp.named_module_buffers, workers()), send_)

    model._distributed_broadcast_coalesced = broadcast_chosen  # type: ignore[method-assign]


def buffers_by_optimizer(
    module: torch.nn.Module, optimizers: list[Optimizer]
) -> dict[int, Callable[[], Mapping[str, Tensor]]]:
    """Return, by id of the optimizer, what returns the current buffers of the layers that the optimizer trains.

    The first optimizer has all other buffers.
    """
    owner = {
        p: number for number, each in enumerate(optimizers) for group in each.param_groups for p in group["params"]
    }
    owners = {
        prefix: next((owner[p] for p in layer.parameters(recurse=False) if p in owner), 0)
        for prefix, layer in module.named_modules()
    }

    def buffers_now(number: int) -> dict[str, Tensor]:
        named = buffers_of(module).items()
        return {name: each for name, each in named if owners.get(name.rpartition(".")[0], 0) == number}

    return {id(optimizer): partial(buffers_now, number) for number, optimizer in enumerate(optimizers)}
