"""The members of a round: the interface between the averaging and the engine that finds the members."""

from __future__ import annotations

import base64
import json
import statistics
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist

from lightning_lowbw.comm.agreement import MAX_DIFFERENCES
from lightning_lowbw.errors import DisagreementError

Share = Callable[[], Mapping[str, Any]]  # returns the state for a member that is behind; see `Membership.serve`
GivesUp = Callable[[], bool]  # see `Membership.quorum`


class Row(NamedTuple):
    """The numbers and strings of a member that all members compare before a round.

    Attributes:
        rounds: completed rounds; 0 for a member that has to take the state of another member.
        step: completed optimizer steps.
        tokens: tokens of its work, of all its processes.
        anchor: checksum of its anchor.
        state_bytes: size of the state that a member that is behind takes.
        settings: what has to be the same on all members, as `settings_text` returns it.
        run: the training to which its rounds belong; before the first round, the training that it would begin.
        is_new: whether it has not been in a round since it was started.
        has_ended: whether it has ended its training and only waits for members that take its state.
        change: norm of the change of its weights in this round, per local step; 0: not known.
        usual: the median of its last such norms; 0 in its first rounds.
        max_ratio: a change so many times the usual one is left out; 0: none. The same for all members.
        wait_s: seconds for which its last round waited for other members.
        is_late: whether it has taken the state of another member since its last round. If it is behind again, the
            members wait for it.
    """

    rounds: int = 0
    step: int = 0
    tokens: float = 0.0
    anchor: float = 0.0
    state_bytes: float = 0.0
    settings: str = ""
    run: str = ""
    is_new: bool = True
    has_ended: bool = False
    change: float = 0.0
    usual: float = 0.0
    max_ratio: float = 0.0
    wait_s: float = 0.0
    is_late: bool = False


@dataclass(frozen=True)
class Quorum:
    """The members of a round, or the state that this group has taken instead of a round.

    Attributes:
        rank: rank of this group among the members.
        members: names in the order of their ranks; the same on all members.
        rows: rows of the members, in the order of their ranks.
        healed: the state of a member, if this group was behind; then `rows` is empty, and there are other members only
            if these wait for this group.
    """

    rank: int
    members: tuple[str, ...]
    rows: tuple[Row, ...] = ()
    healed: Mapping[str, Any] | None = None

    @property
    def weights(self) -> list[float]:
        """The weight of each member in the mean, by its tokens; empty without work, or after the training.

        A member whose change is much larger than the median of all members, of two members than its own usual one,
        has the weight 0.
        """
        changes = [row.change for row in self.rows if row.tokens and row.usual]
        tokens = []
        for row in self.rows:
            usual = statistics.median(changes) if len(changes) > 2 else row.usual
            tokens.append(row.tokens * (not (row.usual and 0 < row.max_ratio * usual < row.change)))
        tokens = tokens if any(tokens) else [row.tokens for row in self.rows]
        has_ended = any(row.has_ended for row in self.rows)
        return [each / sum(tokens) for each in tokens] if any(tokens) and not has_ended else []


class Membership(Protocol):
    """Finds the members of each round, and ends the round for all or for none.

    A round is `quorum`, any number of calls of `collective`, and `commit`; called by the leader of a group.
    """

    def state_of_others(self, row: Row, gives_up: GivesUp) -> Mapping[str, Any] | None:
        """Return the current state of a member that trains, which does not wait; None if there is no such member.

        While such a member lives, this is repeated after every failure, so that no second training begins.

        Args:
            row: as for `quorum`.
            gives_up: as for `quorum`; then None is returned.

        Raises:
            DisagreementError: a member that trains refuses this group.
        """
        ...

    def serve(self, shared: Share | None) -> None:
        """Let members that are behind take the state at any time; None: the state is about to change.

        Args:
            shared: called in another thread, at any time until the next call of `serve`. It returns "tensors" by name,
                which may be the tensors of the training, and plain values, among these "num_averages" and "run".
        """
        ...

    def quorum(self, row: Row, gives_up: GivesUp) -> Quorum | None:
        """Wait for the members of the next round, at least `min_replicas`; None if this group has given up.

        The members have the same state. A group that is behind takes the state of a member, see `latest_of`.

        Args:
            row: row of this group.
            gives_up: returns whether to stop waiting. It is asked about once a second, also while this group waits in
                `collective`.

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

    def commit(self) -> bool:
        """Return whether the round counts: it has not failed here. Other groups may differ."""
        ...

    def note(self) -> None:
        """Note that this group is at work: at a batch, or as it waits for a hidden round.

        A group that notes nothing for two minutes hangs, and the other groups go on without it. This does not apply
        while it waits in `quorum`.
        """
        ...

    def close(self) -> None:
        """Leave; after the transfer in progress if the training has ended, else within seconds."""
        ...


# What members compare -------------------------------------------------------------------------------------------------


def settings_text(settings: Mapping[str, object]) -> str:
    """Return settings as text, in any order: a row has them, and a model has thousands of parameters."""
    told = {name: f"{value}" for name, value in sorted(settings.items())}
    return base64.b64encode(zlib.compress(json.dumps(told).encode())).decode()


def judge_of(rows: Mapping[str, Row]) -> str:
    """Return the member that decides: the one with the most rounds of all that have been in a round, or else of all.

    If several members have as many, the first name decides.
    """
    incumbents = [name for name, row in rows.items() if not row.is_new] or [*rows]
    return min(incumbents, key=lambda name: (-rows[name].rounds, name))


def latest_of(rows: Mapping[str, Row]) -> list[str]:
    """Return the members that are not behind: they have the rounds that count, and the anchor of most such members."""
    rounds = rows[judge_of(rows)].rounds  # more rounds in a checkpoint do not count
    latest = {name: row for name, row in rows.items() if row.rounds == rounds}
    anchors = [row.anchor for row in sorted(latest.values(), key=lambda row: row.is_new)]
    usual = max(anchors, key=anchors.count)
    return [name for name, row in latest.items() if row.anchor == usual]


def refusals(rows: Mapping[str, Row]) -> dict[str, str]:
    """Return the members that cannot take part, each with the member that decides, from which it differs.

    The result is the same on all members. Before the first average the members also compare their weights.
    """
    name = judge_of(rows)
    judge, have_begun = rows[name], any(row.rounds for row in rows.values())

    def differs(row: Row) -> bool:
        begins_elsewhere = row.run != judge.run if row.rounds else not have_begun and row.anchor != judge.anchor
        return row.settings != judge.settings or begins_elsewhere

    return {each: name for each, row in rows.items() if differs(row)}


def raise_refused(own: Row, other: Row, name: str) -> None:
    """Raise DisagreementError with the differences from another member, whose row and name are given."""
    if own.settings == other.settings and not own.rounds:
        raise DisagreementError(
            f"The groups begin with different weights: their checksum is {own.anchor:.0f} here and {other.anchor:.0f} "
            f"in group {name!r}. Begin with the same weights: seed_everything with one number, or load one file."
        )
    if own.settings == other.settings:
        raise DisagreementError(
            f"This group is in run {own.run!r}, of {own.rounds} rounds; group {name!r} trains in run {other.run!r}. To "
            f"take part in run {other.run!r}, start without a checkpoint of run {own.run!r}. To go on with run "
            f"{own.run!r}, end all groups, and start them again, each with a checkpoint of that run, or with none."
        )
    here, there = (json.loads(zlib.decompress(base64.b64decode(row.settings))) for row in (own, other))
    names = [key for key in here | there if here.get(key) != there.get(key)]
    lines = [f"  {key}: {here.get(key, 'nothing')} here, {there.get(key, 'nothing')} there" for key in names]
    raise DisagreementError(
        f"This group has other settings than group {name!r}, and cannot take part. Make them the same:\n"
        + "\n".join(lines[:MAX_DIFFERENCES])
    )
