"""A membership over gloo groups of their own, one for each round, which meet in a store: for threads or processes."""

from __future__ import annotations

import io
import os
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_lowbw.elastic.membership import GivesUp, Quorum, Row, Share, latest_of, raise_refused, refusals
from tests.gpu.problem import init_process_group


class KilledError(BaseException):
    """Ends a member that is killed."""


class PlainMembership:
    """Waits until all members that have joined and not left have come, at most for `grace_s`.

    Args:
        store: the store of all members.
        name: name of this member.
        min_replicas: smallest number of members of a quorum.
        grace_s: time for which the present members wait for missing members.
        kill_in: the round, counted from 1, and the collective in it, counted from 0, at which this member is killed.
        fail_in: as `kill_in`: collectives of this member that fail, and whether the other members have completed them.
    """

    def __init__(
        self,
        store: dist.Store,
        name: str,
        *,
        min_replicas: int = 2,
        grace_s: float = 5.0,
        kill_in: tuple[int, int] | None = None,
        fail_in: Mapping[tuple[int, int], bool] | None = None,
    ) -> None:
        self.store, self.name, self.min_replicas, self.grace_s = store, name, min_replicas, grace_s
        self.kill_in, self.fail_in = kill_in, fail_in or {}
        self.num_rounds, self.num_collectives = 0, 0
        self.history: list[Quorum] = []
        self.noted: list[float] = []
        self.has_failed = False
        self.group: Any = None
        self.shared: Share | None = None
        store.add("alive", 1)

    def state_of_others(self, row: Row, gives_up: GivesUp) -> None:
        """Return none: a member that is behind heals in its first quorum."""

    def serve(self, shared: Share | None) -> None:
        self.shared = shared

    def note(self) -> None:
        self.noted.append(time.monotonic())

    def quorum(self, row: Row, gives_up: GivesUp) -> Quorum | None:
        self.num_rounds, self.num_collectives, self.has_failed = self.num_rounds + 1, 0, False
        self.group = None
        while True:
            epoch = self._meet(row, gives_up)
            if epoch is None:
                continue
            if epoch < 0:
                return None
            rows = dict(sorted(pickle.loads(self.store.get(f"{epoch}/members"))))
            refused = refusals(rows)
            if self.name in refused:
                other = refused[self.name]
                raise_refused(row, rows[other], other)
            rows = {name: told for name, told in rows.items() if name not in refused}
            names, latest = tuple(rows), latest_of(rows)
            rank = names.index(self.name)
            if self.name not in latest:
                healed = torch.load(io.BytesIO(self.store.get(f"{epoch}/shared")), weights_only=True)
                self.history.append(Quorum(rank, names, healed=healed))
                return self.history[-1]
            if len(latest) == len(names):
                break
            if self.name == latest[0]:  # the members wait in the next quorum for the members that take the state
                file = io.BytesIO()
                assert self.shared is not None
                torch.save(self.shared(), file)
                self.store.set(f"{epoch}/shared", file.getvalue())
        if len(names) > 1:
            own = dist.PrefixStore(f"{epoch}/gloo", self.store)
            try:
                self.group = dist.ProcessGroupGloo(own, rank, len(names), timedelta(seconds=self.grace_s))
            except RuntimeError:  # a member has been killed meanwhile
                self.has_failed = True
        self.history.append(Quorum(rank, names, tuple(rows.values())))
        return self.history[-1]

    def _meet(self, row: Row, gives_up: GivesUp) -> int | None:
        """Come to the next round; return its number, None if it began without this member, -1 if that gave up."""
        store, epoch, came_s = self.store, self.store.add("epoch", 0), time.monotonic()
        index = store.add(f"{epoch}/count", 1)
        store.set(f"{epoch}/arrival{index}", pickle.dumps((self.name, row)))
        while True:
            if store.check([f"{epoch}/members"]):
                break
            if gives_up():
                store.add(f"{epoch}/count", -1)  # it may come again; no other member has come meanwhile
                return -1
            count, is_late = store.add(f"{epoch}/count", 0), time.monotonic() - came_s > self.grace_s
            if count >= max(self.min_replicas, 1 if is_late else store.add("alive", 0)):
                arrived = [pickle.loads(store.get(f"{epoch}/arrival{each}")) for each in range(1, count + 1)]
                if store.add(f"{epoch}/claimed", 1) == 1:
                    store.set(f"{epoch}/members", pickle.dumps(arrived))
                    store.add("epoch", 1)
            time.sleep(0.002)
        members = [name for name, _ in pickle.loads(store.get(f"{epoch}/members"))]
        while store.add("epoch", 0) <= epoch:
            time.sleep(0.002)
        return epoch if self.name in members else None

    def collective(self, begin: Callable[[dist.ProcessGroup], Any]) -> None:
        here = self.num_rounds, self.num_collectives
        self.num_collectives += 1
        if here == self.kill_in:
            self.close()
            raise KilledError
        try:
            if self.has_failed:
                raise RuntimeError("this round has failed")
            if self.fail_in.get(here, True):
                begin(self.group).wait()
            if here in self.fail_in:
                raise RuntimeError("the link of this member failed")
        except RuntimeError:
            self.has_failed = True
            self.group = None  # the other members, which wait for this one, fail
            raise

    def commit(self) -> bool:
        return not self.has_failed

    def close(self) -> None:
        self.group = None
        self.store.add("alive", -1)


def become_a_group(folder: str, ranks: int | Sequence[int] = 1, backend: str = "gloo") -> tuple[dist.Store, int]:
    """Leave the world, and make one of this group alone; return the store of all groups, and the number of this one.

    Args:
        ranks: of each group; one number if all have as many.
    """
    # As Lightning sets it where ranks share a machine: with more threads sums have other bits.
    os.environ["OMP_NUM_THREADS"] = "1"
    if isinstance(ranks, int):
        number, rank = divmod(dist.get_rank(), ranks)
    else:
        number, rank = [(group, each) for group, size in enumerate(ranks) for each in range(size)][dist.get_rank()]
        ranks = ranks[number]
    dist.destroy_process_group()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    path = f"{folder}/of group {number}"
    if backend == "gloo":
        dist.init_process_group("gloo", store=dist.FileStore(path, ranks), rank=rank, world_size=ranks)
    else:  # on the first GPU, whatever number its processes have
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank)}
        init_process_group(backend, path, rank, ranks, is_bound=True)
    return dist.FileStore(f"{folder}/of all", -1), number
