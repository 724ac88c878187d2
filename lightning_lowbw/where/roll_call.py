"""Finds lost ranks after a collective has failed: all ranks are called, and those that still run answer.

torch's error contains the address of a neighbour that may only have failed as a consequence. So on each rank a thread
waits on a key of the rendezvous store; nothing is sent until a rank has an error, and sets the key. A process that has
ended or is stopped does not answer; one that waits in a collective does.

A rank that fails tells the others before it ends: the store may be in its process, and end with it.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

ANSWER_S = 2.0  # within which a rank answers
SOON_S = 0.01  # within which the store says that a key is there
STORE_S = 10.0  # within which the store must have been asked about all ranks
FOREVER = timedelta(days=365)

T = TypeVar("T")


@dataclass(frozen=True)
class Answers:
    """The answers of the other ranks.

    Attributes:
        present: what the ranks that answer are doing.
        failed: the reasons of ranks that have failed and left a note.
        silent: those that do not answer.
        places: of all of these, and of this rank.
    """

    present: dict[int, str]
    failed: dict[int, str]
    silent: list[int]
    places: dict[int, str]


class RollCall:
    """Answers calls of other ranks, and calls them.

    Args:
        phase: returns what this rank is doing; called from a thread.

    Attributes:
        address: of the store.
        heard: what the ranks that had failed have said of it by themselves.
    """

    def __init__(self, phase: Callable[[], str]) -> None:
        self.address, self.heard = "", Answers({}, {}, [], {})
        self._phase = phase
        self._thread: threading.Thread | None = None
        self._is_over = False

    @property
    def has_begun(self) -> bool:
        """Whether this rank answers, and can call; not with a rendezvous that has no server, as a file, or is slow."""
        return self._thread is not None

    def begin(self, place: str) -> None:
        """Begin to answer, if the store does. Another exchange between all ranks must follow before any calls.

        Args:
            place: node, host and process of this rank, for messages.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1 or self.has_begun:
            return
        store = _server()
        if store is None:
            return
        self._rank, self._num_ranks, self._is_over = dist.get_rank(), dist.get_world_size(), False
        self.heard = Answers({}, {}, [], {})
        self._host, self._port = store.host, store.port
        self.address = f"{self._host}:{self._port}"
        try:
            own = self._connect()
            for key in ("call", "here", "end"):  # of an earlier fit, or of processes before a restart
                own.delete_key(f"{key}/{self._rank}")
            own.set(f"failed/{self._rank}", "")
            own.set(f"place/{self._rank}", place)
        except RuntimeError:  # a store that is slow: no reason not to train
            return
        self._thread = threading.Thread(target=self._answer, args=(own,), name="lightning_lowbw roll call", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread that still waits in the store aborts the process as it ends

    def note(self, reason: str, *, tells: bool) -> None:
        """Leave the reason why this rank fails, for ranks that call later, and with `tells` for all the others now."""
        if self.has_begun:
            _within(ANSWER_S, lambda: self._note(reason, tells))

    def call(self) -> Answers | None:
        """Return which ranks answer; None if the store does not. Takes at most `STORE_S` seconds."""
        return _within(STORE_S, self._call) if self.has_begun else None

    def come_to_end(self) -> Answers | None:
        """Say that this rank has ended its training, and wait for the others.

        Returns:
            What they do, if some do not come within `ANSWER_S` seconds; None if all do, or the store does not answer.
        """
        return _within(STORE_S, self._come_to_end) if self.has_begun else None

    def close(self) -> None:
        """End the thread."""
        thread, self._thread, self._is_over = self._thread, None, True
        atexit.unregister(self.close)
        if thread is not None and thread.is_alive():
            _within(ANSWER_S, lambda: self._connect().set(f"call/{self._rank}", ""))
            thread.join(ANSWER_S)

    def _connect(self) -> dist.Store:
        """Return a connection of one's own: one that waits is taken."""
        timeout = timedelta(seconds=ANSWER_S)
        client = dist.TCPStore(self._host, self._port, None, False, timeout=timeout, wait_for_workers=False)
        return dist.PrefixStore("lightning_lowbw", client)

    def _answer(self, store: dist.Store) -> None:
        call = f"call/{self._rank}"
        try:
            while True:
                store.wait([call], FOREVER)
                if self._is_over:
                    return
                store.delete_key(call)
                failed = self._failed(store)
                self.heard = Answers({}, failed, [], {rank: _read(store, f"place/{rank}") for rank in failed})
                store.set(f"here/{self._rank}", self._phase())
        except RuntimeError:  # the store has gone: nobody can call any more
            return

    def _note(self, reason: str, tells: bool) -> None:
        store = self._connect()
        store.set(f"failed/{self._rank}", reason)
        if tells:
            failed = self._failed(store)
            self._ring(store, [rank for rank in self._others if rank not in failed])

    def _ring(self, store: dist.Store, ranks: list[int]) -> None:
        """Call ranks, and wait until they have answered, for `ANSWER_S` seconds at most."""
        for rank in ranks:
            store.delete_key(f"here/{rank}")  # an earlier answer
            store.set(f"call/{rank}", "")
        _has(store, [f"here/{rank}" for rank in ranks], ANSWER_S)

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self._num_ranks) if rank != self._rank]

    def _failed(self, store: dist.Store) -> dict[int, str]:
        """Return the reasons of the other ranks that have failed."""
        reasons = {rank: _read(store, f"failed/{rank}") for rank in self._others}
        return {rank: reason for rank, reason in reasons.items() if reason}

    def _come_to_end(self) -> Answers | None:
        store = self._connect()
        store.set(f"end/{self._rank}", "")
        is_complete = _has(store, [f"end/{rank}" for rank in range(self._num_ranks)], ANSWER_S)
        return None if is_complete else self._call()

    def _call(self) -> Answers:
        store = self._connect()
        failed = self._failed(store)
        called = [rank for rank in self._others if rank not in failed]
        self._ring(store, called)
        answered = [rank for rank in called if _has(store, [f"here/{rank}"], SOON_S)]
        failed = self._failed(store)
        return Answers(
            present={rank: _read(store, f"here/{rank}") for rank in answered if rank not in failed},
            failed=failed,
            silent=[rank for rank in called if rank not in answered and rank not in failed],
            places={rank: _read(store, f"place/{rank}") for rank in range(self._num_ranks)},
        )


def _server() -> dist.TCPStore | None:
    """Return the store that the ranks have met at, if others can connect to it."""
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, dist.TCPStore) else None


def _has(store: dist.Store, keys: list[str], seconds: float) -> bool:
    """Return whether all keys are there, or come in time."""
    try:
        if keys:
            store.wait(keys, timedelta(seconds=seconds))
    except RuntimeError:
        return False
    return True


def _read(store: dist.Store, key: str) -> str:
    return str(store.get(key).decode())


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
