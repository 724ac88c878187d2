"""Who takes part in a round: the one interface between the averaging and whatever finds the members."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

T = TypeVar("T")
Share = Callable[[], Mapping[str, Any]]  # returns what a member that is behind is given


@dataclass(frozen=True)
class Quorum:
    """The members of a round.

    Attributes:
        step: outer steps completed, the highest of the members; after healing, of all.
        rank: of this group among the members.
        members: their names, in the order of their ranks; the same on all. A group that restarts keeps its name.
        healed: the shared state of a member with this step, if this group had completed fewer; else None.
        rows: what each member has told, in the order of their ranks; None if one has healed, and tells otherwise now.
    """

    step: int
    rank: int
    members: tuple[str, ...]
    healed: Mapping[str, Any] | None = None
    rows: tuple[Sequence[float], ...] | None = None


class Membership(Protocol):
    """Finds the members of each round, and ends the round for all or for none.

    A round: `quorum`, any number of `collective`, `commit`. Where the group has several processes, each calls it, and
    meets the processes with its rank in the other groups.
    """

    def quorum(self, step: int, row: Sequence[float], shared: Share, gives_up: Callable[[], bool]) -> Quorum | None:
        """Wait for the members of the next round, at least `min_replicas`; None if this group has given up.

        Args:
            step: outer steps that this group has completed.
            row: numbers that this group tells the members; the same on all its processes.
            shared: returns what members that are behind are given: tensors and plain values, by name.
            gives_up: whether to wait no longer, asked about once a second; of one process it holds for its group.
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

    def close(self) -> None:
        """Leave."""
        ...
