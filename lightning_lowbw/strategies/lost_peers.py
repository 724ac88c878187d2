"""Names lost ranks after a collective has failed: whose heartbeat has stopped, and who has said why it fails.

torch's error contains the address of a neighbour that may only have failed as a consequence. So a thread of each rank
writes a number and what the rank is doing into the rendezvous store, twice a second. A process that has ended or is
stopped does not; one that waits in a collective does.

Gloo ends a collective when a rank has gone. NCCL leaves the others in it until a timeout of minutes: there the thread
aborts the communicators, where this rank has not failed as well a moment after it has heard of the failure.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_lowbw.comm.topology import NODE_VARIABLES
from lightning_lowbw.namespaces import LOGGER

_logger = logging.getLogger(LOGGER)
BEAT_S = 0.5
ANSWER_S = 2.0  # within which a rank's heart must beat
STORE_S = 10.0  # within which the store must have been asked about all ranks

# Messages of torch about a lost or late peer; general words count only if torch raises the error.
OF_BACKEND = re.compile(r"\bgloo\b|NCCL")
IS_LOST = re.compile(rf"{OF_BACKEND.pattern}|Connection (closed|reset|refused)|Broken pipe|[Tt]imed? ?out")
IS_OTHER = re.compile("DataLoader|CUDA error")
FROM_TORCH = ("torch.", "lightning_lowbw.")  # modules
LOST = "a peer was lost"
EQUAL_BATCHES = "different numbers of batches (Trainer(limit_train_batches=...) makes them equal)"
NO_GRAPH = "returned a loss that depends on no parameter, which a dense step needs of all ranks"
OTHER_SIZE = "Received data size doesn't match"  # gloo's last words before it ends the process
WITHOUT_STORE = (
    "the lost rank is not known: the store where the ranks have met does not answer either. It is in the process of "
    "rank 0, or of the launcher on its node: look at the output there."
)
FIT = "_call_and_handle_interrupt"  # of Lightning, the outermost
# Functions that tell what a rank is doing, the innermost on the stack.
PHASES = (
    *("exchange", "average", "average_due", "save_checkpoint", "load_checkpoint"),
    *("backward", "training_step", "validation_step", "on_validation_start", "on_validation_end", "optimizer_step"),
    *("on_train_epoch_end", "on_train_end", "setup", "setup_environment", "teardown"),
)

T = TypeVar("T")


@dataclass(frozen=True)
class Answers:
    """What is known of the other ranks.

    Attributes:
        present: what the ranks that still run are doing.
        failed: the reasons of ranks that have failed and left a note.
        silent: those whose heartbeat has stopped.
        places: node, host and process of all ranks.
    """

    present: dict[int, str]
    failed: dict[int, str]
    silent: list[int]
    places: dict[int, str]

    def in_words(self) -> str:
        """Return which ranks are lost; or where all are, if none is."""
        reasons = {rank: reason for rank, reason in self.failed.items() if not reason.startswith(LOST)}
        gone = [f"rank {rank} ({self.places[rank]}) has failed: {reason}" for rank, reason in reasons.items()]
        silence = f"is gone or stopped: no answer within {ANSWER_S:g} s"
        gone += [f"rank {rank} ({self.places[rank]}) {silence}" for rank in self.silent]
        if gone:
            told = "; ".join(gone).rstrip(".")
            told += ". Look at the output there; then start all ranks again (of an elastic group: its own), from the "
            told += "last checkpoint."
            if self.silent:
                told += (
                    f' If it ends in "{OTHER_SIZE}", the ranks were at different places: they have {EQUAL_BATCHES}, or '
                    f"one alone has saved a checkpoint, stopped, left out a step, or {NO_GRAPH}."
                )
            return told
        places = [f"rank {rank} in {phase}" for rank, phase in self.present.items()]
        there = "; ".join([*places, *(f"rank {rank}: {reason}" for rank, reason in self.failed.items())])
        if not self.present:
            return (
                f"all other ranks have lost a peer, too ({there}). If that is another place than this one, the ranks "
                f"have {EQUAL_BATCHES}, or one has taken another branch. If it is the same place, this rank was "
                "stopped, or cut off from the others. Then start all again."
            )
        return (
            f"all other ranks answer ({there}), so the network failed, or they did not come within the timeout. Ranks "
            f"in other places than this one have taken another branch, have {NO_GRAPH}, or are slow: give a longer "
            "timeout=... (seconds) to the strategy."
        )


class LostPeers:
    """Finds lost ranks, during a fit.

    Attributes:
        heard: the reasons of ranks that have failed, which are known without the store: it may end with their process.
    """

    def __init__(self) -> None:
        self.heard = Answers({}, {}, [], {})
        self._num_steps: Callable[[], int] | None = None  # optimizer steps that this rank has taken
        self._thread: threading.Thread | None = None  # None with a rendezvous that has no server, or is slow
        self._is_over: threading.Event | None = None  # made when it begins: it cannot be pickled
        self._has_failed = self._has_aborted = False

    def begin_fit(self, num_steps: Callable[[], int]) -> None:
        """Begin the heartbeat, if the store answers. Another exchange between all ranks must follow before any asks.

        Args:
            num_steps: returns the optimizer steps that this rank has taken; called from a thread.
        """
        self._num_steps, self._has_failed, self._has_aborted = num_steps, False, False
        if not dist.is_initialized() or dist.get_world_size() == 1 or self._thread is not None:
            return
        server = _server()
        if server is None:
            return
        self._rank, self._num_ranks, self.heard = dist.get_rank(), dist.get_world_size(), Answers({}, {}, [], {})
        self._host, self._port = server.host, server.port
        number = next((os.environ[name] for name in NODE_VARIABLES if name in os.environ), None)
        node = "" if number is None else f"node {number}, "
        place = f"{node}host {socket.gethostname()}, pid {os.getpid()}"
        try:
            store = self._connect()
            for name, value in (("beat", "0 the set-up of the fit"), ("failed", ""), ("place", place)):
                store.set(f"{name}/{self._rank}", value)
            num_failed = store.add("failed", 0)
        except RuntimeError:  # a store that is slow: no reason not to train
            return
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._beat, args=(store, num_failed, self._is_over), daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread that is in the store aborts the process as it ends

    def explain_(self, exception: BaseException) -> None:
        """Add the lost ranks to an exception, if they are its cause; leave a note about any other exception for the
        other ranks.

        In place:
            The exception's message; torch's own becomes its cause. Takes a few seconds at most.
        """
        if self._thread is None:
            return
        self._has_failed = True
        message = str(exception)
        phase = self._phase(frame for frame, _ in traceback.walk_tb(exception.__traceback__))
        if not self._has_aborted and not _is_of_lost_peer(exception):  # what an aborted collective leaves is noise
            first_line = message.splitlines()[0] if message else ""
            self._note(f"{type(exception).__name__} in {phase}: {first_line}", tells=True)
            return
        self._note(f"{LOST} in {phase}", tells=False)
        answers = self._ask()
        if answers is None and any(not reason.startswith(LOST) for reason in self.heard.failed.values()):
            answers = self.heard
        told = WITHOUT_STORE if answers is None else answers.in_words()
        cause = RuntimeError(message)
        cause.__cause__ = exception.__cause__
        exception.args = (f"Rank {dist.get_rank()}, in {phase}: {told}",)
        exception.__cause__ = cause

    def close(self) -> None:
        """End the heartbeat."""
        thread, is_over, self._thread, self._is_over, self._num_steps = self._thread, self._is_over, None, None, None
        atexit.unregister(self.close)
        if thread is not None and is_over is not None:
            is_over.set()
            thread.join(ANSWER_S)

    # The store ----------------------------------------------------------------------------------------------------

    def _note(self, reason: str, *, tells: bool) -> None:
        """Leave the reason why this rank fails; with `tells` wait until the others have heard it."""

        def leave() -> None:
            store = self._connect()
            store.set(f"failed/{self._rank}", reason)
            if tells:
                store.add("failed", 1)
                time.sleep(2 * BEAT_S)  # the store may be in this process, and end with it

        _within(ANSWER_S, leave)

    def _ask(self) -> Answers | None:
        """Return what is known of the other ranks; None if the store does not answer. Takes `STORE_S` at most."""

        def ask() -> Answers:
            store = self._connect()
            first, last = self._read(store, "beat"), time.monotonic() + ANSWER_S
            while True:
                beats, failed = self._read(store, "beat"), self._failed(store)
                others = [rank for rank in beats if rank != self._rank and rank not in failed]
                silent = [rank for rank in others if beats[rank] == first[rank]]
                if not silent or time.monotonic() > last:
                    present = {rank: beats[rank].partition(" ")[2] for rank in others if rank not in silent}
                    return Answers(present, failed, silent, self._read(store, "place"))
                time.sleep(BEAT_S / 5)

        return _within(STORE_S, ask)

    def _beat(self, store: dist.Store, num_failed: int, is_over: threading.Event) -> None:
        try:
            for number in itertools.count(1):
                if is_over.wait(BEAT_S):
                    return
                store.set(f"beat/{self._rank}", f"{number} {self._phase()}")
                if store.add("failed", 0) != num_failed:  # one number, whatever the number of ranks
                    failed, is_first = self._failed(store), not self.heard.failed
                    self.heard = Answers({}, failed, [], self._read(store, "place"))
                    if failed and is_first:
                        threading.Thread(target=self._abort, args=(is_over,), daemon=True).start()
        except RuntimeError:  # the store has gone
            return

    def _abort(self, is_over: threading.Event) -> None:
        """End the collectives of NCCL in which this rank waits for one that has failed."""
        backends = _nccl_backends()
        if not backends or is_over.wait(ANSWER_S) or self._has_failed:  # all ranks may raise the same error
            return
        self._has_aborted = True
        _logger.error(f"Rank {self._rank} ends its communication: {self.heard.in_words()}")
        for backend in backends:  # at once: to abort one waits for the device, where kernels of the others wait
            threading.Thread(target=backend.abort, daemon=True).start()

    def _connect(self) -> dist.Store:
        """Return a connection of one's own: one that waits is taken."""
        timeout = timedelta(seconds=ANSWER_S)
        client = dist.TCPStore(self._host, self._port, None, False, timeout=timeout, wait_for_workers=False)
        return dist.PrefixStore("lightning_lowbw", client)

    def _failed(self, store: dist.Store) -> dict[int, str]:
        """Return the reasons of the other ranks that have failed."""
        reasons = self._read(store, "failed")
        return {rank: reason for rank, reason in reasons.items() if reason and rank != self._rank}

    def _read(self, store: dist.Store, name: str) -> dict[int, str]:
        values = store.multi_get([f"{name}/{rank}" for rank in range(self._num_ranks)])
        return {rank: value.decode() for rank, value in enumerate(values)}

    def _phase(self, frames: Iterable[FrameType] | None = None) -> str:
        """Return what the main thread is doing, by the functions on its stack, or by the given frames."""
        if frames is None:
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
            frames = reversed([each for each, _ in traceback.walk_stack(frame)])
        names = [frame.f_code.co_name for frame in frames]
        if FIT in names:  # what calls it may have any name
            names = names[names.index(FIT) :]
        phase = next((f"{name}()" for name in reversed(names) if name in PHASES), "the training")
        return phase if self._num_steps is None else f"{phase} after step {self._num_steps()}"


def _server() -> dist.TCPStore | None:
    """Return the store that the ranks have met at, if others can connect to it."""
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, dist.TCPStore) else None


def _nccl_backends() -> list[Any]:
    """Return those of all process groups, where torch can abort them (from 2.6 on).

    `_abort_process_group` would also take the groups away: then one rank alone would go on to train.
    """
    nccl: Any = getattr(dist, "ProcessGroupNCCL", None)
    if not hasattr(nccl, "abort"):
        return []
    backends = []
    for group in list(dist.distributed_c10d._world.pg_map):
        with contextlib.suppress(RuntimeError):  # it has none for this type of device
            backends.append(group._get_backend(torch.device("cuda")))
    return [backend for backend in backends if isinstance(backend, nccl)]


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


def _is_of_lost_peer(exception: BaseException) -> bool:
    """Return whether an exception is torch's about a peer, not another one, for example of the user's data."""
    message = str(exception)
    if not isinstance(exception, RuntimeError) or not IS_LOST.search(message) or IS_OTHER.search(message):
        return False
    if isinstance(exception, dist.DistError) or OF_BACKEND.search(message):
        return True
    raised_by = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(exception.__traceback__)]
    return bool(raised_by) and raised_by[-1].startswith(FROM_TORCH)
