"""Buffers: which of them all ranks have in one shape, which of these differ between ranks, and the mean of replicas'.

A module may replace a buffer, resize it in place, register or delete one. So buffers are looked up by name whenever
they are needed, and a rank sends only what fits the shapes that all have agreed on (`Layout`).
"""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lowbw.comm.agreement import differ, gather
from lightning_lowbw.comm.collectives import broadcast_flat_
from lightning_lowbw.comm.peers import Peers, wide_dtype
from lightning_lowbw.kernels.tensors import as_real, checksum, copy_all_, differences, in_flats, upload

CHECK_EVERY = 100  # averages, or steps; and often at first, because then it shows which buffers differ
BUFFER = "buffer "  # before the name of a buffer among the tensors of an average
COUNT = "num_batches_tracked"  # of the layers of torch that keep running statistics
MEAN, VARIANCE = "running_mean", "running_var"
NOTHING = torch.iinfo(torch.int64).min  # what a rank sends of integers that are those of another

Spec = tuple[tuple[int, ...], torch.dtype]  # shape and dtype


def is_check_due(number: int) -> bool:
    """Return whether the buffers are compared before the average (or after the step) with this number, from 1."""
    return number % CHECK_EVERY == 0 or number & (number - 1) == 0


def unequal(buffers: Mapping[str, Tensor], group: dist.ProcessGroup | None, device: torch.device) -> list[str]:
    """Return the names of the buffers that differ between ranks.

    Collective: all ranks of the group, blocking; an all-reduce of two numbers for each buffer, if there are any.

    Args:
        buffers: by the same names, of the same shapes on all ranks.
        group: the process group; None is the world.
        device: of the message.
    """
    are_unequal = differ([[buffer] for buffer in buffers.values()], group, device) if buffers else []
    return [name for name, is_unequal in zip(buffers, are_unequal, strict=True) if is_unequal]


class Layout:
    """Which buffers all ranks have in one shape: what can be sent without a word about its size.

    Attributes:
        specs: their shapes and dtypes by name, in one order on all ranks.
        apart: the names of those whose shapes differ between ranks, or have: from then on each rank keeps its own.
        told: the names that a warning has named; several layouts may have one set.
    """

    def __init__(self, told: set[str] | None = None) -> None:
        self.specs: dict[str, Spec] = {}
        self.apart: frozenset[str] = frozenset()
        self.told: set[str] = set() if told is None else told

    def take(self, buffers: Mapping[str, Tensor]) -> None:
        """Take the shapes of buffers that are known to be equal on all ranks."""
        self.specs = self._specs_of(buffers)

    def fitting(self, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the buffers that are as was agreed on, in the agreed order."""
        now = dict(buffers.items())
        return {name: now[name] for name, spec in self.specs.items() if name in now and spec_of(now[name]) == spec}

    def changed(self, buffers: Mapping[str, Tensor]) -> list[str]:
        """Return the names of the buffers that have other shapes than was agreed on, are new or are gone."""
        now = self._specs_of(buffers)
        return [name for name in (self.specs | now) if self.specs.get(name) != now.get(name)]

    def _specs_of(self, buffers: Mapping[str, Tensor]) -> dict[str, Spec]:
        return {name: spec_of(buffer) for name, buffer in buffers.items() if name not in self.apart}

    def agree(
        self,
        buffers: Mapping[str, Tensor],
        group: dist.ProcessGroup | None,
        unsent: Collection[str] = (),
        *,
        warns: bool = True,
    ) -> set[str]:
        """Compare the shapes of all ranks; on the first rank warn of those that differ.

        Collective: all ranks of the group, blocking; a digest, and the shapes where these differ.

        Args:
            buffers: of this rank.
            group: the process group; None is the world.
            unsent: the names of those of which this rank has sent nothing, because they had another shape then.
            warns: whether a warning names them.

        Returns:
            The names of those whose shape has changed since the last agreement, or that a rank has not sent.
        """
        row = self._specs_of(buffers), sorted(unsent)
        digests = gather(hashlib.sha256(repr((list(row[0].items()), row[1])).encode()).hexdigest(), "buffers", group)
        rows = [row] if len({*digests}) == 1 else gather(row, "shapes of buffers", group)
        (first, _), before = rows[0], self.specs
        self.specs = {name: spec for name, spec in first.items() if all(row.get(name) == spec for row, _ in rows)}
        apart = {name: None for row, _ in rows for name in row if name not in self.specs}
        self.apart |= apart.keys()
        new = {name: [row.get(name) for row, _ in rows] for name in apart if name not in self.told}
        self.told.update(new)
        if new and warns and (not dist.is_initialized() or dist.get_rank(group) == 0):
            _warn(new)
        changed = {name for name in (before | self.specs) if before.get(name) != self.specs.get(name)}
        return changed.union(*(names for _, names in rows))

    def leave_out(self, names: Iterable[str]) -> None:
        """Leave each rank its own of these; equal on all ranks."""
        self.apart |= {*names}
        self.specs = {name: spec for name, spec in self.specs.items() if name not in self.apart}

    def state_dict(self) -> dict[str, Any]:
        """Return it as primitives; equal on all ranks."""
        return {
            "specs": [[name, list(shape), str(dtype)] for name, (shape, dtype) in self.specs.items()],
            "apart": sorted(self.apart),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""
        dtypes = {name: getattr(torch, dtype.removeprefix("torch.")) for name, _, dtype in state["specs"]}
        self.specs = {name: (tuple(shape), dtypes[name]) for name, shape, _ in state["specs"]}
        self.apart = frozenset(state["apart"])


def spec_of(buffer: Tensor) -> Spec:
    """Return the shape and the dtype of a buffer."""
    return tuple(buffer.shape), buffer.dtype


def _warn(by_name: Mapping[str, Sequence[Spec | None]]) -> None:
    shown = [
        f"{name} ({', '.join(f'rank {rank}: {spec[0] if spec else None}' for rank, spec in enumerate(specs))})"
        for name, specs in by_name.items()
    ]
    warnings.warn(
        f"These buffers have different shapes on the ranks: {'; '.join(shown)}. From now on each rank keeps its own: "
        "they are neither sent nor averaged, and checkpoints have those of rank 0.",
        stacklevel=3,
    )


def alike(buffers: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """Return the buffers that all ranks have in one shape, in one order; see `Layout.agree`. Warns of none."""
    layout = Layout()
    layout.agree(buffers, group, warns=False)
    return layout.fitting(buffers)


# Where weights are averaged -------------------------------------------------------------------------------------------


class ReplicaBuffers:
    """The buffers of one replica: of floating ones the mean over ranks, of others those of rank 0.

    Of a batch norm's ``num_batches_tracked`` the largest is taken. Only buffers are sent that have been found to differ
    between ranks; this is looked at before the averages 1, 2, 4, 8 and so on, and before every hundredth.

    Args:
        named_buffers: by name, as they are when they are looked up; a batch norm's ``X.running_var`` belongs to its
            ``X.running_mean``.

    Attributes:
        named: as given.
        layout: what all ranks have in one shape.
        differing: the names of those that have been found to differ between ranks; equal on all.
        start: the values from which changes of the floating ones are measured, by name; equal on all ranks.
        is_begun: whether the ranks have agreed on these.
        num_averages: that have been begun.
        compares: whether the ranks find out what differs; else all floating buffers are sent, and no others.
    """

    def __init__(self, named_buffers: Mapping[str, Tensor]) -> None:
        self.named = named_buffers
        self.layout = Layout()
        self.differing: frozenset[str] = frozenset()
        self.start: dict[str, Tensor] = {}
        self.is_begun, self.compares = False, True
        self.num_averages = 0

    def for_view(self) -> ReplicaBuffers:
        """Return a copy, with which a consensus view leaves what the training compares and measures as it is."""
        other = copy.copy(self)  # no method below changes in place what both have
        other.layout = copy.copy(self.layout)
        return other

    # Which they are -----------------------------------------------------------------------------------------------

    def now(self) -> dict[str, Tensor]:
        """Return those that have the shape on which all ranks have agreed; before `begin` all.

        Whoever has another one by now is found with the next average.
        """
        return self.layout.fitting(self.named) if self.is_begun else dict(self.named.items())

    def changed(self) -> list[str]:
        """Return the names of the buffers that have other shapes than was agreed on, are new or are gone, here."""
        return self.layout.changed(self.named) if self.is_begun else []

    def unsent(self) -> list[str]:
        """Return the names of those that differ, and have another shape on this rank now."""
        now = self.now()
        return [name for name in self.differing if name not in now]

    @property
    def may_differ(self) -> bool:
        """Whether there are any of which the ranks may have different ones; equal on all ranks."""
        return self.is_begun and bool(self.layout.specs)

    def _averaged(self) -> list[str]:
        """Return the names of the floating ones that differ, in one order on all ranks."""
        return [name for name in self.layout.specs if name in self.differing and name in self.start]

    # Agreement ----------------------------------------------------------------------------------------------------

    def begin(self, peers: Peers, device: torch.device) -> None:
        """Make the values from which the next changes are measured equal on all ranks.

        Collective: all ranks, the first time; as `compare`.
        """
        if not self.is_begun:
            self.is_begun = True
            self.compare(peers, device)

    def begin_average(self, peers: Peers, device: torch.device) -> None:
        """Count an average, and compare the buffers if it is time.

        Collective: all ranks.
        """
        # Often at first: what differs shows with the first batches.
        self.num_averages += 1
        is_known = self.differing.issuperset(self.layout.specs)  # then the status tells of other shapes
        if self.compares and not is_known and is_check_due(self.num_averages):
            self.compare(peers, device)

    def compare(self, peers: Peers, device: torch.device, unsent: Collection[str] = ()) -> set[str]:
        """Find the buffers that differ between ranks, in shape or in value.

        What has another shape than before begins anew: its changes are measured from the values of rank 0.

        Collective: all ranks, blocking; a broadcast of those that begin anew and differ; see `Layout.agree`.

        Wire:
            An all-reduce of two integers of 8 bytes for each buffer that is not known to differ, and of two more.

        Args:
            peers: all ranks.
            device: of the messages.
            unsent: see `Layout.agree`.

        Returns:
            The names of those whose shape has changed, or that a rank has not sent.
        """
        changed, unequal = set[str](), None
        while unequal is None:
            has_changed = bool(self.layout.changed(self.named) or unsent)
            unequal = self._unequal(peers, device, has_changed) if self.compares else [] if not has_changed else None
            if unequal is None:  # a rank has other shapes
                changed |= self.layout.agree(self.named, peers.group, unsent)
                self.differing -= changed
                unsent = ()
        now, kept = self.now(), self.start.keys() - changed
        unknown = {name: buffer for name, buffer in now.items() if name not in self.differing}
        floating = [name for name, buffer in unknown.items() if buffer.is_floating_point() or buffer.is_complex()]
        unequal = unequal if self.compares else floating
        # Where means differ, a variance gets that between the ranks.
        variances = [_renamed(name, MEAN, VARIANCE) for name in unequal]
        self.differing |= {*unequal, *(name for name in variances if name in unknown)}
        # Of those that are equal what they are now is the start; of others that of rank 0, if there was none before.
        fresh = [name for name in floating if name not in self.differing or name not in kept]
        starts = dict(zip(fresh, wide_copies([now[name] for name in fresh]), strict=True))
        broadcast_flat_([starts[name] for name in fresh if name in self.differing], peers.broadcast_)
        self.start = {name: start for name, start in self.start.items() if name in kept} | starts
        return changed

    def _unequal(self, peers: Peers, device: torch.device, has_changed: bool) -> list[str] | None:
        """Return the names of those that differ in value, and were not known to; None if a rank has other shapes."""
        # The maximum of a checksum and of its negative tells whether all have one: with one collective.
        names, now = [name for name in self.layout.specs if name not in self.differing], self.now()
        sums = [checksum([now[name]] if name in now else []) for name in names]
        bits = [torch.as_tensor(number, dtype=torch.int64, device=device) for number in sums]
        message = torch.stack([*upload([has_changed], torch.int64, device), *bits])
        extremes = torch.cat([message, -message])
        peers.all_reduce_(extremes, dist.ReduceOp.MAX)
        (is_other, *most), (_, *least) = (half.tolist() for half in extremes.split(len(message)))
        if is_other:
            return None
        return [name for name, high, low in zip(names, most, least, strict=True) if high != -low]

    # An average ---------------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Tensor]:
        """Return copies of those that are averaged."""
        now = self.now()
        names = [name for name in self._averaged() if name in now]
        return dict(zip(names, wide_copies([now[name] for name in names]), strict=True))

    def changes(self) -> dict[str, Tensor]:
        """Return the change of each floating buffer that differs, since the last average; 0 of those in `unsent`.

        By names that no parameter has.

        For a running variance ``var + (mean - start of mean)^2``, so that the mean over ranks includes the variance
        between them.
        """
        now, names = self.now(), self._averaged()
        starts = {name: self.start[name] for name in names if name in now}
        moves = in_flats(
            lambda start, value: value - _finite_(start), list(starts.values()), [as_real(now[name]) for name in starts]
        )
        moved = dict(zip(starts, moves, strict=True))
        changes = {name: moved[name] if name in moved else torch.zeros_like(self.start[name]) for name in names}
        variances, squares = _squares_of_means(changes)
        if variances:
            torch._foreach_add_(variances, squares)
        # In logical order: that in memory may be another on other ranks.
        return {f"{BUFFER}{name}": change.contiguous() for name, change in changes.items()}

    def apply(
        self, means: Mapping[str, Tensor], snapshots: Mapping[str, Tensor], changed: Collection[str] = ()
    ) -> None:
        """Take over the mean over ranks of `changes`.

        In place:
            The buffers; their means, which are used up.

        Args:
            means: by the names of `changes`, also of others.
            snapshots: of the buffers when the average was begun, where they have changed since; else empty.
            changed: the names of those that not all ranks have sent, or whose shape has changed since.
        """
        # A mean and a variance belong together: one without the other would be of two distributions.
        pairs = {_renamed(name, *each) for name in changed for each in ((MEAN, VARIANCE), (VARIANCE, MEAN))}
        named = {name.removeprefix(BUFFER): mean for name, mean in means.items() if name.startswith(BUFFER)}
        changes = {name: mean for name, mean in named.items() if name not in changed and name not in pairs}
        if not changes:
            return
        variances, squares = _squares_of_means(changes)
        if variances:
            torch._foreach_sub_(variances, squares)
        starts = [self.start[name] for name in changes]
        values = in_flats(lambda start, change: _finite_(start).add_(change), starts, list(changes.values()))
        targets = dict(zip(changes, values, strict=True))
        self.start = self.start | targets
        buffers = {name: as_real(buffer) for name, buffer in self.now().items() if name in targets}
        values = [targets[name] for name in buffers]
        if snapshots and buffers:  # what has changed since the average was begun stays
            moves = differences(values, [snapshots[name] for name in buffers])
            values = wide_copies(list(buffers.values()))
            torch._foreach_add_(values, moves)
            variances, _ = _squares_of_means(dict(zip(buffers, values, strict=True)))
            if variances:
                torch._foreach_clamp_min_(variances, 0.0)
        copy_all_(list(buffers.values()), values)

    def agree_integers(self, peers: Peers, device: torch.device) -> None:
        """Make integer buffers that differ those of rank 0; of a count of batches take the largest.

        Of a rank that has one in another shape now nothing is taken, and it keeps its own.

        Collective: all ranks; one all-reduce, blocking, if there are any.

        In place:
            The buffers.
        """
        names, now = [n for n in self.layout.specs if n in self.differing and n not in self.start], self.now()
        if not names:
            return
        sizes = [torch.Size(self.layout.specs[name][0]).numel() for name in names]
        nothing = torch.full((sum(sizes),), NOTHING, dtype=torch.int64, device=device)
        values = [
            now[name].reshape(-1).to(torch.int64) if name in now else empty
            for name, empty in zip(names, nothing.split(sizes), strict=True)
        ]
        sent = [
            value if peers.rank == 0 or name.endswith(COUNT) else empty
            for name, value, empty in zip(names, values, nothing.split(sizes), strict=True)
        ]
        flat = torch.cat(sent)
        peers.all_reduce_(flat, dist.ReduceOp.MAX)
        flat = torch.where(flat == NOTHING, torch.cat(values), flat)  # rank 0 has none of this shape
        parts = {name: part for name, part in zip(names, flat.split(sizes), strict=True) if name in now}
        copy_all_([now[name] for name in parts], [part.view(now[name].shape) for name, part in parts.items()])

    # State --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any] | None:
        """Return what is equal on all ranks, apart from `start`; None before `begin`."""
        if not self.is_begun:
            return None
        return {"layout": self.layout.state_dict(), "differing": sorted(self.differing), "averages": self.num_averages}

    def load_state_dict(self, state: Mapping[str, Any] | None, start: Mapping[str, Tensor]) -> None:
        """Load what `state_dict` returned; of None, which is that of another world, begin anew.

        Args:
            state: as returned.
            start: for this object to keep.
        """
        self.is_begun = state is not None
        self.start, self.differing, self.num_averages = {}, frozenset(), 0
        self.layout.load_state_dict({"specs": [], "apart": []} if state is None else state["layout"])
        if state is not None:
            self.start, self.differing = dict(start), frozenset(state["differing"])
            self.num_averages = state["averages"]


def _renamed(name: str, suffix: str, other: str) -> str:
    """Return the name of another buffer of the same layer; empty if the name does not end so."""
    return name.removesuffix(suffix) + other if name.endswith(suffix) else ""


def _squares_of_means(changes: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the changes of running variances, and the squares of those of their running means."""
    means = {name: _renamed(name, VARIANCE, MEAN) for name in changes}
    means = {name: mean for name, mean in means.items() if mean in changes}
    moves = [changes[mean] for mean in means.values()]
    return [changes[name] for name in means], list(torch._foreach_mul(moves, moves)) if moves else []


def _finite_(start: Tensor) -> Tensor:
    """Make it what changes are measured from: 0 in place of inf and NaN (a best loss), on all ranks alike."""
    return start.nan_to_num_(0.0, 0.0, 0.0)


@torch.no_grad()
def wide_copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return a copy of each real view, in the dtype in which it is summed."""
    return in_flats(lambda flat: flat.to(wide_dtype(flat)), list(map(as_real, tensors)))
