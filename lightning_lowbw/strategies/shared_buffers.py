"""Buffers where gradients are exchanged: those of rank 0, as under DDP, at the lowest price.

Whoever looks at them (in validation, at the end of an epoch or of the fit, in a checkpoint) finds those of rank 0 on
all ranks, and the training goes on with them, as it does before each forward pass of DDP. Where a forward pass
broadcasts none, in manual optimization and with FSDP, that holds for running statistics alone: a training step does not
read them, so that a validation changes nothing. In a dense step DDP broadcasts all before the forward pass. In a
compressed one they may be more than the gradients (4 MB of a moving average; 213 KB of statistics in ResNet-50): then
those are broadcast which the ranks have been found to change differently, without the running statistics of batch norm,
which no training step reads.

Modules resize buffers, and ranks may do so differently. So what is sent has the shapes that all ranks have agreed on
(`sync.buffers`), and says of which buffers rank 0 has others by now.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, ItemsView, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import groupby

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_lowbw.comm.collectives import Level, TrafficLedger, broadcast_, broadcast_flat_
from lightning_lowbw.kernels.tensors import as_real, constant, device_of, download
from lightning_lowbw.sync.buffers import Layout, Spec, is_check_due, spec_of, unequal
from lightning_lowbw.sync.synchronizer import Synchronizer

IGNORED = "_ddp_params_and_buffers_to_ignore"  # torch's own name


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


@contextmanager
def ignoring(module: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Let DDP, when it is made, and Lightning's first broadcast leave out buffers whose shapes differ between ranks."""
    before = getattr(module, IGNORED, None)
    setattr(module, IGNORED, [*(before or ()), *names])
    try:
        yield
    finally:
        if before is None:
            delattr(module, IGNORED)
        else:
            setattr(module, IGNORED, before)


class SharedBuffers:
    """Which buffers are those of rank 0 where gradients are exchanged, and when that is checked.

    Args:
        asked: whether the user wants DDP's broadcast in every forward pass; None if they have not said so.
        in_forward: whether forward passes broadcast.

    Attributes:
        layout: which buffers all ranks have in one shape.
        unequal: the names of the buffers that the ranks have been found to change differently; None: not known.
        is_check_due: whether the ranks compare their buffers before the next batch.
    """

    def __init__(self, asked: bool | None, *, in_forward: bool = True) -> None:
        self._asked, self._in_forward = asked, in_forward
        self._statistics: frozenset[str] = frozenset()  # names of buffers that no training step reads
        self.layout = Layout()
        self.unequal: list[str] | None = None
        self.is_check_due = False
        self._is_steady = True  # whether no buffer of rank 0 has changed its shape
        # Reads of each buffer in the last message whether rank 0 had it in that shape.
        self._fits: Callable[[], list[float]] = list

    def begin(self, module: nn.Module, *, is_fit: bool) -> None:
        """Forget the last fit, and compare the shapes of the buffers.

        Collective: all ranks.
        """
        self.layout = Layout(None if is_fit else self.layout.told)
        self.layout.agree(buffers_of(module), None)
        if is_fit:
            self.unequal, self.is_check_due, self._is_steady, self._fits = None, False, True, list
            self._statistics = frozenset() if self._asked is False else statistics_of(module)

    def own(self, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return those that a rank keeps in its shard of a checkpoint: not those that are in the ``.ckpt``."""
        return {name: buffer for name, buffer in buffers.items() if name not in self._statistics}

    def to_broadcast(self, workers: Collection[Synchronizer]) -> list[str]:
        """Return the names of those that rank 0 sends before a forward pass; none in steps that are all local."""
        if workers and all(worker.is_local for worker in workers):
            return []
        names = list(self.layout.specs)
        if self._asked is not None or not _is_compressed(workers):
            return names
        chosen = {*names} - self._statistics if self.unequal is None else self.unequal
        return [name for name in names if name in chosen]

    def broadcast_(
        self,
        module: nn.Module,
        found: Mapping[str, Tensor],
        choose: Callable[[], list[str]],
        send_: Callable[[Tensor], object],
        device: torch.device,
    ) -> int:
        """Take over the buffers of rank 0, of those that it has in the agreed shape.

        If a buffer of rank 0 has another shape, all ranks compare theirs, and it sends those anew. The first time on a
        GPU they do so before the next forward pass only, because they would wait for the device in each.

        Collective: all ranks; see `Layout.agree`.

        In place:
            The buffers.

        Args:
            module: that is trained.
            found: its buffers, those that DDP has looked up.
            choose: returns the names of those that are to be sent.
            send_: overwrites bytes with those of rank 0.
            device: of the message.

        Returns:
            The bytes of the buffers that were sent, without the byte beside each.
        """
        nbytes = 0
        while True:
            if not all(self._fits()):
                self._is_steady = False
                self.layout.agree(buffers_of(module), None)
            self._fits, names = list, choose()
            if not names:
                return nbytes
            buffers = found if found.keys() >= {*names} else buffers_of(module)
            message = _send_({name: self.layout.specs[name] for name in names}, buffers, send_, device)
            nbytes += message.nbytes - len(names)
            self._fits = download(message[-len(names) :])
            if (self._is_steady and device.type != "cpu") or all(self._fits()):
                return nbytes

    def note_step(self, num_steps: int, workers: Collection[Synchronizer]) -> None:
        """Note that a step has ended, before whose forward pass DDP may have broadcast."""
        if self._asked is None and self._in_forward and _is_compressed(workers):
            # Often at first, because then it shows which differ.
            self.is_check_due |= self.unequal is None or is_check_due(num_steps)

    def compare(self, module: nn.Module, device: torch.device) -> None:
        """Find buffers that the ranks change differently: from now on they are broadcast in compressed steps, too.

        Collective: all ranks, after the same steps.
        """
        self.is_check_due, known = False, self.unequal or []
        buffers = self._agreed(module)
        unknown = {name: b for name, b in buffers.items() if name not in self._statistics and name not in known}
        new = unequal(unknown, None, device)
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
        buffers = self._agreed(module)
        if not (module.automatic_optimization and self._in_forward):
            buffers = {name: buffer for name, buffer in buffers.items() if name in self._statistics}
        share_(buffers, ledger, device)

    def _agreed(self, module: nn.Module) -> dict[str, Tensor]:
        """Compare shapes; return the buffers that all ranks have in one."""
        buffers = buffers_of(module)
        self.layout.agree(buffers, None)
        return self.layout.fitting(buffers)


def _is_compressed(workers: Collection[Synchronizer]) -> bool:
    """Return whether gradients of the coming step are not sent whole."""
    return any(not (worker.reduces_in_backward or worker.is_local) for worker in workers)


@torch.no_grad()
def share_(buffers: Mapping[str, Tensor], ledger: TrafficLedger, device: torch.device) -> None:
    """Take over the buffers of rank 0 that differ.

    Collective: all ranks, blocking; as `unequal`, and a broadcast for each dtype of those that differ.

    Args:
        buffers: of the same shapes on all ranks.
        ledger: gets what is sent.
        device: of the messages.
    """

    def send_(flat: Tensor) -> None:
        broadcast_(flat)
        ledger.record(flat.nbytes)

    broadcast_flat_([buffers[name] for name in unequal(buffers, None, device)], send_)


def _send_(
    specs: Mapping[str, Spec], buffers: Mapping[str, Tensor], send_: Callable[[Tensor], object], device: torch.device
) -> Tensor:
    """Send buffers in one message: their bytes, and then a byte for each, whether rank 0 has it in the agreed shape.

    In place:
        The buffers that have that shape, here and on rank 0.

    Returns:
        The message; without a wait for the device.
    """
    order = _order(tuple(specs.items()))
    sizes = [size for _, _, size in order]
    are_here = tuple(name in buffers and spec_of(buffers[name]) == spec for name, spec, _ in order)
    own = [
        as_real(buffers[name]) if is_here else torch.zeros(size, dtype=torch.uint8, device=device)
        for (name, _, size), is_here in zip(order, are_here, strict=True)
    ]
    alike = [list(of_dtype) for _, of_dtype in groupby(own, key=lambda tensor: tensor.dtype)]
    rows = [_flatten_dense_tensors(tensors).view(torch.uint8) for tensors in alike]
    mine = torch.cat([*rows, constant(are_here, torch.uint8, device)])
    message = mine.clone()
    send_(message)
    flags = message[-len(order) :]
    if not (device_of(device).is_synchronous and all(flags.tolist())):
        fits = flags.repeat_interleave(constant(tuple(sizes), torch.int64, device), output_size=sum(sizes))
        torch.where(fits.bool(), message[: sum(sizes)], mine[: sum(sizes)], out=message[: sum(sizes)])
    arrived = message[: sum(sizes)].split([row.numel() for row in rows])
    for tensors, row in zip(alike, arrived, strict=True):  # what is not here has nowhere to go, and is not looked at
        torch._foreach_copy_(tensors, _unflatten_dense_tensors(row.view(tensors[0].dtype), tensors))
    return message


@lru_cache(maxsize=8)
def _order(specs: tuple[tuple[str, Spec], ...]) -> list[tuple[str, Spec, int]]:
    """Return names, specs and bytes: those of one dtype together, and each begins at a multiple of its own size."""
    ordered = sorted(specs, key=lambda each: (-each[1][1].itemsize, str(each[1][1])))
    return [(name, (shape, dtype), math.prod(shape) * dtype.itemsize) for name, (shape, dtype) in ordered]


def choose_buffers(
    model: DistributedDataParallel,
    shared: SharedBuffers,
    choose: Callable[[], list[str]],
    ledger: TrafficLedger,
    level: Level | None,
) -> None:
    """Let DDP broadcast only the chosen buffers before a forward pass, in agreed shapes, and count them.

    Args:
        model: asks for a broadcast before the forward passes of stock DDP.
        shared: knows the shapes.
        choose: returns the names of those that are to be sent.
        ledger: gets what is sent, and what DDP would have sent.
        level: of the topology that a message to all ranks crosses, if there is one.
    """
    # Not the model itself: as a cycle it would live on after the fit, until some thread collects it, while the backward
    # pass of the next fit may call the hooks of its reducer.
    owner, device = weakref.ref(model), next(model.parameters()).device

    def ddp() -> DistributedDataParallel:
        found = owner()
        assert found is not None
        return found

    def broadcast_chosen(buffers: Sequence[Tensor], *args: int) -> None:
        def send_(message: Tensor) -> None:
            DistributedDataParallel._distributed_broadcast_coalesced(ddp(), [message], *args)

        nbytes = shared.broadcast_(ddp().module, ddp().named_module_buffers, choose, send_, device)
        if nbytes:
            ledger.record(nbytes, level)
            dense = sum(buffer.nbytes for buffer in buffers)
            ledger.dense_bytes += dense
            ledger.dense_inter_bytes += dense if level == "inter" else 0

    def will_sync() -> bool:  # a rank that has no buffer any more waits for the message, too
        return ddp().require_forward_param_sync and ddp().broadcast_buffers and bool(shared.layout.specs)

    model._distributed_broadcast_coalesced = broadcast_chosen  # type: ignore[method-assign]
    model.will_sync_module_buffers = will_sync  # type: ignore[method-assign]


class LayerBuffers(Mapping[str, Tensor]):
    """The buffers of some layers of a module by name, as they are when they are looked up.

    Args:
        module: that is trained.
        has: whether the layer with a name is one of these.
    """

    def __init__(self, module: torch.nn.Module, has: Callable[[str], bool]) -> None:
        self._module, self._has = module, has

    def _now(self) -> dict[str, Tensor]:
        return {name: each for name, each in buffers_of(self._module).items() if self._has(name.rpartition(".")[0])}

    def __getitem__(self, name: str) -> Tensor:
        return self._now()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())

    @override
    def items(self) -> ItemsView[str, Tensor]:  # in one pass over the module
        return self._now().items()


def buffers_by_optimizer(module: torch.nn.Module, optimizers: list[Optimizer]) -> dict[int, Mapping[str, Tensor]]:
    """Return, by id of the optimizer, the buffers of layers whose parameters it trains; all others with the first."""
    owner = {
        p: number for number, each in enumerate(optimizers) for group in each.param_groups for p in group["params"]
    }
    owners = {
        prefix: next((owner[p] for p in layer.parameters(recurse=False) if p in owner), 0)
        for prefix, layer in module.named_modules()
    }

    def of(number: int) -> LayerBuffers:
        return LayerBuffers(module, lambda prefix: owners.get(prefix, 0) == number)

    return {id(optimizer): of(number) for number, optimizer in enumerate(optimizers)}
