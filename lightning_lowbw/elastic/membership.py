"""Who takes part in a round: the one interface between the averaging and whatever finds the members."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch.distributed as dist

from lightning_lowbw.errors import DisagreementError

T = TypeVar("T")
Share = Callable[[], Mapping[str, Any]]  # returns what a member that is behind is given: see `Membership.serve`
GivesUp = Callable[[bool], bool]  # see `Membership.quorum`
Settings = Mapping[str, str]  # what has to be the same on all members, by name
MAX_DIFFERENCES = 8  # lines of an error


class Row(NamedTuple):
    """What a member tells all others before a round, and all compare: numbers and strings.

    Attributes:
        rounds: completed; 0 also of a member that is to be healed.
        step: optimizer steps completed.
        tokens: of its work, on all its processes.
        faults: its processes that have left an inf or NaN.
        anchor: checksum of its anchor.
        state_bytes: of what a member that is behind is given, to all processes of a group.
        settings: digest of its `Settings`.
        run: the training to which its rounds belong; before the first round, which one it would begin.
        is_new: whether it has not been in a round since it was started.
        has_ended: whether it only waits for others to take its state.
        unreached: members that it could not connect to in its last attempt, by what they are called until a restart.
        is_late: whether it has taken the state of another member, and rounds have ended meanwhile, or one is exchanged.
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
    unreached: Sequence[str] = ()
    is_late: bool = False


@dataclass(frozen=True)
class Quorum:
    """The members of a round.

    Attributes:
        step: outer steps completed, by `rounds_of` the members; after healing, of all.
        rank: of this group among the members.
        members: their names, in the order of their ranks; the same on all. A group that restarts keeps its name.
        healed: the shared state of a member with this step, if this group had completed others; else None. Tensors may
            be on the group's first process only.
        rows: what each member has told, in the order of their ranks; None if one has healed, and tells otherwise now.
            Who has healed may be alone: then the others have a round meanwhile.
    """

    step: int
    rank: int
    members: tuple[str, ...]
    healed: Mapping[str, Any] | None = None
    rows: tuple[Row, ...] | None = None

    @property
    def is_for_round(self) -> bool:
        """Whether no member heals or has ended."""
        return self.rows is not None and not any(row.has_ended for row in self.rows)

    @property
    def have_one_anchor(self) -> bool:
        """Whether all members measure their work from the same weights."""
        return len({row.anchor for row in self.rows or ()}) == 1


class Membership(Protocol):
    """Finds the members of each round, and ends the round for all or for none.

    A round: `quorum`, any number of `collective`, `commit`. Where the group has several processes, each calls it, and
    meets the processes with its rank in the other groups.
    """

    def state_of_others(self, row: Row, settings: Settings, gives_up: GivesUp) -> Mapping[str, Any] | None:
        """Return the shared state of a member that trains, as it is now, without its waiting; None if there is none.

        While one lives it is asked again, whatever fails: no second training begins beside the first.

        Args:
            row: as of `quorum`.
            settings: as of `quorum`.
            gives_up: as of `quorum`; then None is returned.

        Raises:
            DisagreementError: a member that trains refuses this group.
            ConfigurationError: no member that trains can be reached.
        """
        ...

    def serve(self, shared: Share | None) -> None:
        """Let members that are behind have the state after a round, at any time; None: it is about to change.

        Args:
            shared: called in another thread, at any time until the next call; returns "tensors" by name, which may be
                those of the training, and plain values, among these "num_averages" and "run".
        """
        ...

    def quorum(self, row: Row, settings: Settings, gives_up: GivesUp) -> Quorum | None:
        """Wait for the members of the next round, at least `min_replicas`; None if this group has given up.

        Args:
            row: what this group tells the members; the same on all its processes.
            settings: of which the row has the digest.
            gives_up: whether to wait no longer, asked about once a second, given whether the state of a member is
                coming, which ends by itself where nothing comes; of one process it holds for its group.

        Raises:
            DisagreementError: this group is refused; the others go on.
        """
        ...

    def collective(self, fn: Callable[[dist.ProcessGroup], T]) -> T:
        """Call `fn` with the group of the members; what it communicates it waits for.

        Raises:
            RuntimeError: a member is lost, or hangs; `commit` will return False on this member.
        """
        ...

    def commit(self, is_ok: bool = True) -> bool:
        """Return whether the round counts: no process of this group has failed in it. Other groups may differ.

        Args:
            is_ok: whether this process wants it to count.
        """
        ...

    def note(self, longest_s: float) -> None:
        """Note that this group is at work: with a batch, or at the end of a step.

        Who notes nothing for many times as long, and a minute, hangs, and the others go on without it; not while it
        waits in `quorum`.

        Args:
            longest_s: which a step has taken; infinity: it waits for others.
        """
        ...

    def close(self) -> None:
        """Leave; after a transfer that is in progress, if the training has ended, else soon."""
        ...


# What members compare -------------------------------------------------------------------------------------------------


def digest_of(settings: Settings) -> str:
    """Return a digest of settings, in any order."""
    return hashlib.sha256(repr(sorted(settings.items())).encode()).hexdigest()[:16]


def deciders(rows: Mapping[str, Row]) -> list[str]:
    """Return those whose settings count: who have been in a round; else those with the most rounds, of checkpoints."""
    incumbents = [name for name, row in rows.items() if not row.is_new]
    most = max(row.rounds for row in rows.values())
    return incumbents or [name for name, row in rows.items() if row.rounds == most]


def run_of(rows: Mapping[str, Row]) -> str:
    """Return the training that goes on, or begins."""
    return max((rows[name] for name in deciders(rows)), key=lambda row: row.rounds).run


def rounds_of(rows: Mapping[str, Row]) -> int:
    """Return the rounds of those whose state counts, which all others take, also those with a checkpoint of more."""
    return max(rows[name].rounds for name in deciders(rows)) or max(row.rounds for row in rows.values())


def refusals(rows: Mapping[str, Row]) -> dict[str, str]:
    """Return who cannot take part in a round, each with the name of one that it differs from; the same on all.

    Where those that decide are divided, without a majority, nobody can.
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
    """Raise DisagreementError of what is not as with another member, whose row, settings and name are given last."""
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
