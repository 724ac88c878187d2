"""Buffers of replicas: averages include the statistics of batch norm; the remaining buffers come from rank 0.

A module may replace a buffer by another tensor, so buffers are looked up by name in each average. Their shapes are
compared at the start of a fit, and again where a rank notices that a shape has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lowbw.comm.agreement import agree, differ
from lightning_lowbw.comm.collectives import broadcast_flat_
from lightning_lowbw.comm.peers import Peers, wide_dtype
from lightning_lowbw.kernels.tensors import as_real, checksum, copy_all_, differences, in_flats, upload

CHECK_EVERY = 100  # averages
BUFFER = "buffer "  # before the name of a buffer among the tensors of an average
MEAN, VARIANCE = "running_mean", "running_var"  # torch's names
IGNORED = "_ddp_params_and_buffers_to_ignore"  # torch's own name

Spec = tuple[tuple[int, ...], torch.dtype]  # shape and dtype


def specs_of(buffers: Mapping[str, Tensor]) -> dict[str, Spec]:
    """Return the shape and the dtype of each buffer."""
    return {name: (tuple(buffer.shape), buffer.dtype) for name, buffer in buffers.items()}


def agree_on_specs(buffers: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> dict[str, Spec]:
    """Return the shape and the dtype of each buffer, which are the same on all ranks.

    Collective: all ranks of the group, blocking; a digest, and the shapes if the digests differ.

    Raises:
        DisagreementError: on all ranks; names, shapes or dtypes of the buffers differ.
    """
    specs = specs_of(buffers)
    advice = (
        "give each buffer one shape on all ranks (in training, too), or name it in the module's "
        f"{IGNORED}, with which each rank keeps its own"
    )
    agree("shapes of buffers", dict(specs), group, advice=advice)
    return specs


def unequal(buffers: Mapping[str, Tensor], group: dist.ProcessGroup | None, device: torch.device) -> list[str]:
    """Return the names of the buffers that differ between ranks.

    Collective: all ranks of the group, blocking; an all-reduce of two numbers for each buffer, if there are any.

    Args:
        buffers: the buffers by name; with the same names and shapes on all ranks.
        group: the process group; None is the world.
        device: the device of the message.
    """
    are_unequal = differ([[buffer] for buffer in buffers.values()], group, device) if buffers else []
    return [name for name, is_unequal in zip(buffers, are_unequal, strict=True) if is_unequal]


class ReplicaBuffers:
    """The buffers of one replica: running statistics are averaged, the remaining buffers are copied from rank 0.

    An average sends only buffers that were found to differ between ranks. The ranks compare their buffers before the
    averages 1, 2, 4, 8 and so on, and before every hundredth.

    Args:
        now: returns the current buffers by name; ``X.running_var`` belongs to ``X.running_mean``.
        peers: the participants.

    Attributes:
        now: as given.
        differing: the names of the buffers that were found to differ between ranks; equal on all ranks.
        start: the anchor's buffers by name, equal on all ranks: the averaged buffers, from which changes are measured
            (float32 or wider), and the values of rank 0 after the last average.
        is_begun: whether the averaged buffers have a start.
        is_elastic: whether members come and go: then all floating buffers are averaged, and integers are not sent.
        num_averages: averages begun.
        specs: the shapes and dtypes on which all ranks have agreed, by name.
    """

    def __init__(self, now: Callable[[], Mapping[str, Tensor]], peers: Peers) -> None:
        self.now, self._peers, self.is_elastic = now, peers, peers.may_grow
        self.differing: frozenset[str] = frozenset()
        self.start: dict[str, Tensor] = {}
        self.is_begun = False
        self.num_averages = 0
        self.specs: dict[str, Spec] = {}

    # Names --------------------------------------------------------------------------------------------------------

    def changed(self) -> list[str]:
        """Return the names of the buffers of this rank that have another shape than was agreed on, are new or gone."""
        now = specs_of(self.now())
        return [name for name in (self.specs | now) if self.specs.get(name) != now.get(name)]

    def is_averaged(self, name: str) -> bool:
        """Return whether a buffer is averaged once it differs between ranks."""
        _, dtype = self.specs[name]
        return (dtype.is_floating_point or dtype.is_complex) and (self.is_elastic or name.endswith((MEAN, VARIANCE)))

    def _averaged(self, now: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the buffers that an average includes, in one order on all ranks."""
        names = [name for name in self.specs if name in self.differing and self.is_averaged(name)]
        return {name: now[name] for name in names if name in self.start and name in now}

    # Agreement ----------------------------------------------------------------------------------------------------

    def begin(self, device: torch.device) -> None:
        """Make the values from which the next changes are measured equal on all ranks.

        Collective: all ranks, the first time; as `compare`.
        """
        if not self.is_begun:
            self.is_begun = True
            self.compare(device)

    def begin_average(self, device: torch.device) -> None:
        """Count an average, and compare the buffers if it is time.

        Collective: all ranks; as `compare`.
        """
        self.num_averages += 1
        # Often at first, because the first averages show which buffers differ.
        is_due = self.num_averages % CHECK_EVERY == 0 or self.num_averages & (self.num_averages - 1) == 0
        if is_due and not self.differing.issuperset(self.specs):
            self.compare(device)

    def agree_on_shapes(self) -> None:
        """Take the shapes that the buffers have now, which must be the same on all ranks; see `agree_on_specs`."""
        self.specs = agree_on_specs(self.now(), self._peers.group)

    def compare(self, device: torch.device) -> None:
        """Find the buffers that differ between ranks.

        Collective: all ranks, blocking; a broadcast of the starts of statistics that differ and had none, and
        `agree_on_specs` if the shape of a buffer has changed on some rank.

        Wire:
            An all-reduce of two integers of 8 bytes for each buffer that is not known to differ, and of two more.

        Raises:
            DisagreementError: on all ranks; they have buffers of different shapes.
        """
        unequal = self._unequal(device)
        # If means differ, the variances get the variance between them.
        variances = {_renamed(name, MEAN, VARIANCE) for name in unequal}
        self.differing |= {*unequal, *variances.intersection(self.specs)}
        now = self.now()
        # Buffers that are equal start with their values; buffers that differ start with the values of rank 0, once.
        fresh = [name for name in self.specs if self.is_averaged(name) and name in now]
        fresh = [name for name in fresh if name not in self.differing or name not in self.start]
        starts = dict(zip(fresh, wide_copies([now[name] for name in fresh]), strict=True))
        broadcast_flat_([starts[name] for name in fresh if name in self.differing], self._peers.broadcast_)
        self.start = self.start | starts

    def _unequal(self, device: torch.device) -> list[str]:
        """Return the names of the buffers that differ between ranks and were not known to differ."""
        # The maxima of a checksum and of its negative show in one collective whether the checksums are equal.
        names, now = [name for name in self.specs if name not in self.differing], self.now()
        sums = [checksum([now[name]] if name in now else []) for name in names]
        bits = [torch.as_tensor(number, dtype=torch.int64, device=device) for number in sums]
        message = torch.stack([*upload([bool(self.changed())], torch.int64, device), *bits])
        extremes = torch.cat([message, -message])
        self._peers.all_reduce_(extremes, dist.ReduceOp.MAX)
        (has_changed, *most), (_, *least) = (half.tolist() for half in extremes.split(len(message)))
        if has_changed:  # on some rank
            self.agree_on_shapes()
            return self._unequal(device)
        return [name for name, high, low in zip(names, most, least, strict=True) if high != -low]

    # An average ---------------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Tensor]:
        """Return copies of the buffers that are averaged."""
        averaged = self._averaged(self.now())
        return dict(zip(averaged, wide_copies(list(averaged.values())), strict=True))

    def changes(self) -> dict[str, Tensor]:
        """Return the change since the last average of each buffer that is averaged, by names that no parameter has.

        For a running variance ``var + (mean - start of mean)^2``, so that the mean over ranks includes the variance
        between them.
        """
        averaged = self._averaged(self.now())
        starts, values = [self.start[name] for name in averaged], list(map(as_real, averaged.values()))
        moves = in_flats(lambda start, value: value - _finite_(start), starts, values)
        changes = dict(zip(averaged, moves, strict=True))
        variances, squares = _squares_of_means(changes)
        if variances:
            torch._foreach_add_(variances, squares)
        # In logical order: the order in memory may differ between ranks.
        return {f"{BUFFER}{name}": change.contiguous() for name, change in changes.items()}

    def apply(self, means: Mapping[str, Tensor], snapshots: Mapping[str, Tensor]) -> None:
        """Apply the means over ranks of `changes`.

        In place:
            The buffers; their means, which are used up.

        Args:
            means: the means by the names of `changes`; may contain means of parameters, too.
            snapshots: copies of the buffers when the average was begun, if local steps went on meanwhile; else empty.
        """
        changes = {name.removeprefix(BUFFER): mean for name, mean in means.items() if name.startswith(BUFFER)}
        if not changes:
            return
        variances, squares = _squares_of_means(changes)
        if variances:
            torch._foreach_sub_(variances, squares)
        starts = [self.start[name] for name in changes]
        values = in_flats(lambda start, change: _finite_(start).add_(change), starts, list(changes.values()))
        self.start = self.start | dict(zip(changes, values, strict=True))
        now = self.now()
        buffers = [as_real(now[name]) for name in changes]
        if snapshots:  # changes since the average was begun stay
            moves = differences(values, [snapshots[name] for name in changes])
            values = wide_copies(buffers)
            torch._foreach_add_(values, moves)
            variances, _ = _squares_of_means(dict(zip(changes, values, strict=True)))
            if variances:
                torch._foreach_clamp_min_(variances, 0.0)
        copy_all_(buffers, values)

    def take_first_(self) -> None:
        """Give all ranks the values of rank 0 of the buffers that differ and are not averaged.

        Collective: all ranks; one broadcast, blocking, if there are any.

        In place:
            The buffers.
        """
        now = self.now()
        taken = {name: now[name] for name in self.specs if name in self.differing and name in now}
        taken = {name: buffer for name, buffer in taken.items() if not self.is_averaged(name)}
        broadcast_flat_(taken.values(), self._peers.broadcast_)
        self.start = self.start | {name: buffer.detach().clone() for name, buffer in taken.items()}

    # State --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state that is equal on all ranks, without `start`; None before `begin`."""
        return {"differing": sorted(self.differing), "averages": self.num_averages} if self.is_begun else None

    def load_state_dict(self, state: Mapping[str, Any] | None, start: Mapping[str, Tensor]) -> None:
        """Load the state that `state_dict` returned; begin anew if it is None, as in a state for another world.

        Args:
            state: the returned state.
            start: the anchor's buffers; this object keeps them.
        """
        self.specs = {} if state is None else specs_of(self.now())  # all ranks have loaded one checkpoint
        self.is_begun = state is not None
        self.start = {} if state is None else dict(start)
        self.differing = frozenset(() if state is None else state["differing"])
        self.num_averages = 0 if state is None else state["averages"]


def _renamed(name: str, suffix: str, other: str) -> str:
    """Return the name of another buffer of the same layer; empty if the name does not end with the suffix."""
    return name.removesuffix(suffix) + other if name.endswith(suffix) else ""


def _squares_of_means(changes: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the changes of running variances, and the squared changes of their running means."""
    means = {name: _renamed(name, VARIANCE, MEAN) for name in changes}
    means = {name: mean for name, mean in means.items() if mean in changes}
    moves = [changes[mean] for mean in means.values()]
    return [changes[name] for name in means], list(torch._foreach_mul(moves, moves)) if moves else []


def _finite_(start: Tensor) -> Tensor:
    """Replace inf and NaN (an initial best loss) by 0, on all ranks alike, so that changes can be measured."""
    return start.nan_to_num_(0.0, 0.0, 0.0)


@torch.no_grad()
def wide_copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return a copy of each tensor's real view, in the dtype in which it is summed."""
    return in_flats(lambda flat: flat.to(wide_dtype(flat)), list(map(as_real, tensors)))
