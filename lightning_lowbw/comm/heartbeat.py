"""Finds lost ranks after a collective has failed: whose heartbeat has stopped, and who has said why it fails.

torch's error contains the address of a neighbour that may only have failed as a consequence. So a thread of each rank
writes a number and what the rank is doing into the rendezvous store, twice a second. A process that has ended or is
stopped does not; one that waits in a collective does.
"""

from __future__ import annotations

import atexit
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

BEAT_S = 0.5
ANSWER_S = 2.0  # within which a rank's heart must beat
STORE_S = 10.0  # within which the store must have been asked about all ranks

T = TypeVar("T")


@dataclass(frozen=True)
class Answers:
    """What is known of the other ranks.

    Attributes:
        present: what the ranks that still run are doing.
        failed: the reasons of ranks that have failed and left a note.
        silent: those whose heartbeat has stopped.
        places: of all ranks.
    """

    present: dict[int, str]
    failed: dict[int, str]
    silent: list[int]
    places: dict[int, str]


class Heartbeat:
    """Writes this rank's heartbeat, and reads those of the others.

    Args:
        phase: returns what this rank is doing; called from a thread.

    Attributes:
        heard: the reasons of ranks that have failed, which are known without the store: it may end with their process.
    """

    def __init__(self, phase: Callable[[], str]) -> None:
        self.heard = Answers({}, {}, [], {})
        self._phase = phase
        self._thread: threading.Thread | None = None
        self._is_over: threading.Event | None = None  # made when it begins: it cannot be pickled

    @property
    def has_begun(self) -> bool:
        """Whether there is one; not with a rendezvous that has no server, as a file, or that is slow."""
        return self._thread is not None

    def begin(self, place: str) -> None:
        """Begin, if the store answers. Another exchange between all ranks must follow before any asks.

        Args:
            place: node, host and process of this rank, for messages.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1 or self.has_begun:
            return
        server = _server()
        if server is None:
            return
        self._rank, self._num_ranks, self.heard = dist.get_rank(), dist.get_world_size(), Answers({}, {}, [], {})
        self._host, self._port = server.host, server.port
        try:
            store = self._connect()
            store.delete_key(f"end/{self._rank}")  # of an earlier fit, or of processes before a restart
            for name, value in (("beat", "0 the set-up of the fit"), ("failed", ""), ("place", place)):
                store.set(f"{name}/{self._rank}", value)
            num_failed = store.add("failed", 0)
        except RuntimeError:  # a store that is slow: no reason not to train
            return
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._beat, args=(store, num_failed, self._is_over), daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread that is in the store aborts the process as it ends

    def note(self, reason: str, *, tells: bool) -> None:
        """Leave the reason why this rank fails; with `tells` wait until the others have heard it."""

        def leave() -> None:
            store = self._connect()
            store.set(f"failed/{self._rank}", reason)
            if tells:
                store.add("failed", 1)
                time.sleep(2 * BEAT_S)  # the store may be in this process, and end with it

        if self.has_begun:
            _within(ANSWER_S, leave)

    def ask(self) -> Answers | None:
        """Return what is known of the other ranks; None if the store does not answer. Takes `STORE_S` at most."""
        return _within(STORE_S, lambda: self._ask(self._connect())) if self.has_begun else None

    def come_to_end(self) -> Answers | None:
        """Say that this rank has ended its training, and wait for the others.

        Returns:
            What they do, if some do not come within `ANSWER_S` seconds; None if all do, or the store does not answer.
        """

        def come() -> Answers | None:
            store = self._connect()
            store.set(f"end/{self._rank}", "")
            try:
                store.wait([f"end/{rank}" for rank in range(self._num_ranks)], timedelta(seconds=ANSWER_S))
            except RuntimeError:
                return self._ask(store)
            return None

        return _within(STORE_S, come) if self.has_begun else None

    def close(self) -> None:
        """End the thread."""
        thread, is_over, self._thread, self._is_over = self._thread, self._is_over, None, None
        atexit.unregister(self.close)
        if thread is not None and is_over is not None:
            is_over.set()
            thread.join(ANSWER_S)

    def _connect(self) -> dist.Store:
        """Return a connection of one's own: one that waits is taken."""
        timeout = timedelta(seconds=ANSWER_S)
        client = dist.TCPStore(self._host, self._port, None, False, timeout=timeout, wait_for_workers=False)
        return dist.PrefixStore("lightning_lowbw", client)

    def _beat(self, store: dist.Store, num_failed: int, is_over: threading.Event) -> None:
        try:
            for number in itertools.count(1):
                if is_over.wait(BEAT_S):
                    return
                store.set(f"beat/{self._rank}", f"{number} {self._phase()}")
                if store.add("failed", 0) != num_failed:  # one number, whatever the number of ranks
                    failed = self._failed(store)
                    self.heard = Answers({}, failed, [], self._read(store, "place"))
        except RuntimeError:  # the store has gone
            return

    def _ask(self, store: dist.Store) -> Answers:
        first, last = self._read(store, "beat"), time.monotonic() + ANSWER_S
        while True:
            beats, failed = self._read(store, "beat"), self._failed(store)
            others = [rank for rank in beats if rank != self._rank and rank not in failed]
            silent = [rank for rank in others if beats[rank] == first[rank]]
            if not silent or time.monotonic() > last:
                present = {rank: beats[rank].partition(" ")[2] for rank in others if rank not in silent}
                return Answers(present, failed, silent, self._read(store, "place"))
            time.sleep(BEAT_S / 5)

    def _failed(self, store: dist.Store) -> dict[int, str]:
        """Return the reasons of the other ranks that have failed."""
        reasons = self._read(store, "failed")
        return {rank: reason for rank, reason in reasons.items() if reason and rank != self._rank}

    def _read(self, store: dist.Store, name: str) -> dict[int, str]:
        values = store.multi_get([f"{name}/{rank}" for rank in range(self._num_ranks)])
        return {rank: value.decode() for rank, value in enumerate(values)}


def _server() -> dist.TCPStore | None:
    """Return the store that the ranks have met at, if others can connect to it."""
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, dist.TCPStore) else None


def _within(seconds: float, function: Callable[[], T]) -> T | None:
    """Return what a function returns, None if it fails or takes longer: a store may have gone without a word."""
    results: list[T] = []

    def run() -> None:
        try:
            results.append(function())
        except RuntimeError:
            return

    thread = threading.Thread(target=run, name="lightning_lowbw store", daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None
