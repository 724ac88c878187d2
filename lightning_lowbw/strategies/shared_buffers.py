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

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from lightning_lowbw.engine.gradients import CHECK_EVERY_STEPS
from lightning_lowbw.where.agreement import differ
from lightning_lowbw.where.collectives import broadcast_flat_
from lightning_lowbw.where.ledger import Level, TrafficLedger


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


def is_check_due(num_steps: int) -> bool:
    """Return whether buffers are compared after so many steps: often at first, because then it shows which differ."""
    return num_steps % CHECK_EVERY_STEPS == 0 or num_steps & (num_steps - 1) == 0


def unequal(buffers: Mapping[str, Tensor], device: torch.device) -> list[str]:
    """Return the names of the buffers that differ between ranks.

    Collective: all ranks, blocking; an all-reduce of two numbers for each buffer, if there are any.
    """
    are_unequal = differ([[buffer] for buffer in buffers.values()], None, device) if buffers else []
    return [name for name, is_unequal in zip(buffers, are_unequal, strict=True) if is_unequal]


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
