"""Buffers where gradients are exchanged: those of rank 0, as under DDP, at the lowest price.

Whoever looks at them (in validation, at the end of an epoch or of the fit, in a checkpoint) finds those of rank 0 on
all ranks, and the training goes on with them, as it does before each forward pass of DDP. Where a forward pass
broadcasts none, in manual optimization and with FSDP, that holds for running statistics alone: a training step does not
read them, so that a validation changes nothing. In a dense step DDP broadcasts all before the forward pass. In a
compressed one they may be more than the gradients (4 MB of a moving average; 213 KB of statistics in ResNet-50): then
those are broadcast which the ranks have been found to change differently, without the running statistics of batch norm,
which no training step reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from lightning_lowbw.comm.agreement import differ
from lightning_lowbw.comm.collectives import Level, TrafficLedger, broadcast_flat_
from lightning_lowbw.sync.gradient import CHECK_EVERY_STEPS


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that DDP would broadcast, by name."""
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
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


def unequal(buffers: Mapping[str, Tensor], device: torch.device) -> list[str]:
    """Return the names of the buffers that differ between ranks.

    Collective: all ranks, blocking; an all-reduce of two numbers for each buffer, if there are any.
    """
    are_unequal = differ([[buffer] for buffer in buffers.values()], None, device) if buffers else []
    return [name for name, is_unequal in zip(buffers, are_unequal, strict=True) if is_unequal]


class SharedBuffers:
    """Which buffers are those of rank 0 where gradients are exchanged, and when that is checked.

    Args:
        asked: whether the user wants DDP's broadcast in every forward pass; None if they have not said so.

    Attributes:
        unequal: the names of the buffers that the ranks have been found to change differently; None: not known.
        is_check_due: whether the ranks compare their buffers before the next batch.
    """

    def __init__(self, asked: bool | None) -> None:
        self._asked = asked
        self._statistics: frozenset[str] = frozenset()  # names of buffers that no training step reads
        self.unequal: list[str] | None = None
        self.is_check_due = False

    def begin_fit(self, module: nn.Module) -> None:
        """Forget the last fit."""
        self.unequal, self.is_check_due = None, False
        self._statistics = frozenset() if self._asked is False else statistics_of(module)

    def own(self, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return those that a rank keeps in its shard of a checkpoint: not those that are in the ``.ckpt``."""
        return {name: buffer for name, buffer in buffers.items() if name not in self._statistics}

    def to_broadcast(self, buffers: Mapping[str, Tensor], *, is_compressed: bool) -> list[Tensor]:
        """Return those that rank 0 sends before a forward pass."""
        if self._asked is not None or not is_compressed:
            return list(buffers.values())
        chosen = buffers.keys() - self._statistics if self.unequal is None else self.unequal
        return [buffer for name, buffer in buffers.items() if name in chosen]

    def note_step(self, num_steps: int, *, is_compressed: bool) -> None:
        """Note that a step has ended, before whose forward pass DDP may have broadcast."""
        if self._asked is None and is_compressed:  # often at first, because then it shows which differ
            is_due = num_steps % CHECK_EVERY_STEPS == 0 or num_steps & (num_steps - 1) == 0
            self.is_check_due |= self.unequal is None or is_due

    def compare(self, module: nn.Module, device: torch.device) -> None:
        """Find buffers that the ranks change differently: from now on they are broadcast in compressed steps, too.

        Collective: all ranks, after the same steps.
        """
        self.is_check_due, known = False, self.unequal or []
        buffers = buffers_of(module)
        unknown = {name: b for name, b in buffers.items() if name not in self._statistics and name not in known}
        new = unequal(unknown, device)
        self.unequal = [*known, *new]
        if new:
            nbytes = sum(buffers[name].nbytes for name in self.unequal if name in buffers)
            rank_zero_info(
                f"The ranks change these buffers differently: {', '.join(new)}. Before each forward pass they get "
                f"those of rank 0, as under DDP ({nbytes:,} bytes, all such buffers together). "
                "broadcast_buffers=False leaves this out: then each rank keeps its own."
            )

    def share_(self, module: pl.LightningModule, ledger: TrafficLedger, device: torch.device) -> None:
        """Replace the buffers by those of rank 0, because somebody may look at them.

        Collective: all ranks.
        """
        if self._asked is False:
            return
        if self.is_check_due:  # before they are made equal
            self.compare(module, device)
        buffers = buffers_of(module)
        if not module.automatic_optimization:
            buffers = {name: buffer for name, buffer in buffers.items() if name in self._statistics}
        share_(buffers, ledger, device)


@torch.no_grad()
def share_(buffers: Mapping[str, Tensor], ledger: TrafficLedger, device: torch.device) -> None:
    """Take over the buffers of rank 0 that differ.

    Collective: all ranks, blocking; as `unequal`, and a broadcast for each dtype of those that differ.
    """

    def broadcast_(flat: Tensor) -> None:
        dist.broadcast(flat, src=0)
        ledger.record(flat.nbytes)

    broadcast_flat_([buffers[name] for name in unequal(buffers, device)], broadcast_)


def choose_buffers(
    model: DistributedDataParallel,
    choose: Callable[[Mapping[str, Tensor]], list[Tensor]],
    ledger: TrafficLedger,
    level: Level | None,
) -> None:
    """Let DDP broadcast only the chosen buffers before a forward pass, and count them.

    Args:
        model: asks for a broadcast before the forward passes of stock DDP.
        choose: of all buffers, by name.
        ledger: gets what is sent, and what DDP would have sent.
        level: of the topology that a message to all ranks crosses, if there is one.
    """
    broadcast = model._distributed_broadcast_coalesced

    def broadcast_chosen(buffers: Sequence[Tensor], *args: int) -> None:
        chosen = choose(model.named_module_buffers)
        if chosen:
            broadcast(chosen, *args)
            ledger.record(sum(buffer.nbytes for buffer in chosen), level)
            nbytes = sum(buffer.nbytes for buffer in buffers)
            ledger.dense_bytes += nbytes
            ledger.dense_inter_bytes += nbytes if level == "inter" else 0

    model._distributed_broadcast_coalesced = broadcast_chosen  # type: ignore[method-assign]
