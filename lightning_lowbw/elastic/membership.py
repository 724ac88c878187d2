"""The members of a round: the interface between the averaging and the engine that finds the members."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist

from lightning_lowbw.errors import DisagreementError

Share = Callable[[], Mapping[str, Any]]  # returns the state for a member that is behind; see `Membership.serve`
GivesUp = Callable[[bool], bool]  # see `Membership.quorum`
Settings = Mapping[str, str]  # what has to be the same on all members, by name
MAX_DIFFERENCES = 8  # lines of an error


class Row(NamedTuple):
    """The numbers and strings of a member that all members compare before a round.

    Attributes:
        rounds: completed rounds; 0 for a member that has to take the state of another member.
        step: completed optimizer steps.
        tokens: tokens of its work, on all its processes.
        faults: number of its processes that have left an inf or NaN.
        anchor: checksum of its anchor.
        state_bytes: size of the state that a member that is behind takes, for all processes of a group.
        settings: digest of its `Settings`.
        run: the training to which its rounds belong; before the first round, the training that it would begin.
        is_new: whether it has not been in a round since it was started.
        has_ended: whether it has ended its training and only waits for members that take its state.
        is_late: whether it has taken the state of another member since its last round. If it is behind again, the
            members wait for it.
    """

    rounds: int = 0
    step: int = 0
    tokens: float = 0.0
    faults: float = 0.0
    anchor: float = 0.0
    state_bytes: float = 0.0
    settings: str = ""
    run: str = ""
    is_new: bool = True
    has_ended: bool = False
    is_late: bool = False


@dataclass(frozen=True)
class Quorum:
    """The members of a round.

    Attributes:
        step: completed rounds, by `rounds_of` the members; the same on all after they have taken the state.
        rank: rank of this group among the members.
        members: names in the order of their ranks; the same on all members.
        healed: the state of a member with `step` rounds if this group had another number of rounds; else None. Only the
            first process of the group may have the tensors.
        rows: rows of the members, in the order of their ranks; None if a member takes a state, so that its row is out
            of date. A group that takes the state may be the only member; the other groups run a round without it.
    """

    step: int
    rank: int
    members: tuple[str, ...]
    healed: Mapping[str, Any] | None = None
    rows: tuple[Row, ...] | None = None

    @property
    def is_for_round(self) -> bool:
        """Whether no member takes a state or has ended."""
        return self.rows is not None and not any(row.has_ended for row in self.rows)

    @property
    def have_one_anchor(self) -> bool:
        """Whether all members measure their work from the same weights."""
        return len({row.anchor for row in self.rows or ()}) == 1


class Membership(Protocol):
    """Finds the members of each round, and ends the round for all or for none.

    A round is `quorum`, any number of calls of `collective`, and `commit`. If a group has several processes, each of
    them calls these methods and meets the processes with its rank in the other groups.
    """

    def state_of_others(self, row: Row, settings: Settings, gives_up: GivesUp) -> Mapping[str, Any] | None:
        """Return the current state of a member that trains, which does not wait; None if there is no such member.

        While such a member lives, this is repeated after every failure, so that no second training begins.

        Args:
            row: as for `quorum`.
            settings: as for `quorum`.
            gives_up: as for `quorum`; then None is returned.

        Raises:
            DisagreementError: a member that trains refuses this group.
            ConfigurationError: no member that trains can be reached.
        """
        ...

    def serve(self, shared: Share | None) -> None:
        """Let members that are behind take the state at any time; None: the state is about to change.

        Args:
            shared: called in another thread, at any time until the next call of `serve`. It returns "tensors" by name,
                which may be the tensors of the training, and plain values, among these "num_averages" and "run".
        """
        ...

    def quorum(self, row: Row, settings: Settings, gives_up: GivesUp) -> Quorum | None:
        """Wait for the members of the next round, at least `min_replicas`; None if this group has given up.

        Args:
            row: row of this group; the same on all its processes.
            settings: settings of this group, whose digest is in the row.
            gives_up: returns whether to stop waiting. It is asked about once a second and told whether this group
                receives a state, which ends by itself if nothing arrives. One process decides for its group.

        Raises:
            DisagreementError: this group is refused; the other groups go on.
        """
        ...

    def collective(self, begin: Callable[[dist.ProcessGroup], Any]) -> None:
        """Begin a collective of the members, and wait for it.

        Args:
            begin: takes the group of the members, and returns the work of one collective.

        Raises:
            RuntimeError: a member is lost or hangs; `commit` will return False on this member. The tensors of the
                collective may still change.
        """
        ...

    def commit(self, is_ok: bool = True) -> bool:
        """Return whether the round counts: no process of this group has failed in it. Other groups may differ.

        Args:
            is_ok: whether this process wants the round to count.
        """
        ...

    def note(self, longest_s: float) -> None:
        """Note that this group is at work: at a batch, or at the end of a step.

        A group that notes nothing for many times `longest_s`, and a minute, hangs, and the other groups go on without
        it. This does not apply while it waits in `quorum`.

        Args:
            longest_s: the time of the longest step; infinity if the group waits for other groups.
        """
        ...

    def close(self) -> None:
        """Leave; after the transfer in progress if the training has ended, else within seconds."""
        ...


# What members compare -------------------------------------------------------------------------------------------------


def digest_of(settings: Settings) -> str:
    """Return a digest of settings, in any order."""
    return hashlib.sha256(repr(sorted(settings.items())).encode()).hexdigest()[:16]


def deciders(rows: Mapping[str, Row]) -> list[str]:
    """Return the members whose settings count: all that have been in a round, or else all with the most rounds."""
    incumbents = [name for name, row in rows.items() if not row.is_new]
    most = max(row.rounds for row in rows.values())
    return incumbents or [name for name, row in rows.items() if row.rounds == most]


def run_of(rows: Mapping[str, Row]) -> str:
    """Return the training that goes on, or begins."""
    return max((rows[name] for name in deciders(rows)), key=lambda row: row.rounds).run


def rounds_of(rows: Mapping[str, Row]) -> int:
    """Return the rounds of the members whose state counts; a member with a checkpoint of more rounds takes it, too."""
    return max(rows[name].rounds for name in deciders(rows)) or max(row.rounds for row in rows.values())


def refusals(rows: Mapping[str, Row]) -> dict[str, str]:
    """Return the members that cannot take part, each with the name of a member that it differs from; the same on all.

    If the members that decide have no majority, no member can take part.
    """
    judges = deciders(rows)
    digests = [rows[name].settings for name in judges]
    usual = max(digests, key=digests.count)
    judge = judges[digests.index(usual)]
    refused = {name: judge for name, row in rows.items() if row.settings != usual}
    if 2 * digests.count(usual) <= len(digests):
        other = next(name for name in judges if name in refused)
        return {**dict.fromkeys(rows, other), **refused}
    run = run_of({name: row for name, row in rows.items() if name not in refused})
    judge = next(name for name in judges if rows[name].run == run)
    return refused | {name: judge for name, row in rows.items() if row.rounds and row.run != run}


def raise_refused(own: Row, own_settings: Settings, row: Row, settings: Settings | None, name: str) -> None:
    """Raise DisagreementError with the differences from another member, whose row, settings and name are given last."""
    if own.settings == row.settings:
        raise DisagreementError(
            f"This group is in run {own.run!r}, of {own.rounds} rounds; group {name!r} trains in run {row.run!r}. To "
            "take part in that one, start without a checkpoint of the first. To go on with the first, end all groups, "
            "and start them again: the others, too, with a checkpoint of it, or with none."
        )
    if settings is None:
        raise DisagreementError(f"This group has other settings than group {name!r}, which could not be read there.")
    names = [key for key in {**own_settings, **settings} if own_settings.get(key) != settings.get(key)]
    lines = [f"  {key}: {own_settings.get(key, 'nothing')} here, {settings.get(key, 'nothing')} there" for key in names]
    if len(lines) > MAX_DIFFERENCES:
        lines[MAX_DIFFERENCES:] = [f"  and {len(lines) - MAX_DIFFERENCES} more"]
    raise DisagreementError(
        f"This group has other settings than group {name!r}, and cannot take part. Make them the same:\n"
        + "\n".join(lines)
    )
