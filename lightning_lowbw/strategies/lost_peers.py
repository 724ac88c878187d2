"""Names ranks that are lost, after a failed collective; and ranks that train on, at the end of a fit."""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from types import FrameType

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from lightning_lowbw.comm.heartbeat import ANSWER_S, Answers, Heartbeat
from lightning_lowbw.comm.topology import NODE_VARIABLES
from lightning_lowbw.errors import DisagreementError

# Messages of torch about a lost or late peer; general words count only if torch raises the error.
OF_BACKEND = re.compile(r"\bgloo\b|NCCL")
IS_LOST = re.compile(rf"{OF_BACKEND.pattern}|Connection (closed|reset|refused)|Broken pipe|[Tt]imed? ?out")
IS_OTHER = re.compile("DataLoader|CUDA error")
FROM_TORCH = ("torch.", "lightning_lowbw.")  # modules
LOST = "a peer was lost"
NO_GRAPH = "returned a loss that depends on no parameter, which a dense step needs of all ranks"
OTHER_SIZE = "Received data size doesn't match"  # gloo's last words before it ends the process
WITHOUT_STORE = (
    "the lost rank is not known: the store where the ranks have met does not answer either. It is in the process of "
    "rank 0, or of the launcher on its node: look at the output there."
)
FIT = "_call_and_handle_interrupt"  # of Lightning, the outermost
# By the name of a function on the stack, the innermost first.
PHASES = {
    "exchange": "the exchange of gradients",
    "average": "an average of weights",
    "average_due": "an average of weights",
    "save_checkpoint": "saving a checkpoint",
    "load_checkpoint": "loading a checkpoint",
    "backward": "the backward pass",
    "training_step": "training_step",
    "validation_step": "validation",
    "on_validation_start": "validation",
    "on_validation_end": "validation",
    "_run_sanity_check": "validation",
    "optimizer_step": "the optimizer's step",
    "on_train_epoch_end": "the end of an epoch",
    "come_to_end": "the end of the fit",
    "setup": "the set-up of the fit",
    "setup_environment": "the set-up of the fit",
    "teardown": "the end of the fit",
}
IN_A_STEP = {PHASES[name] for name in ("exchange", "backward", "training_step", "optimizer_step")}


class LostPeers:
    """Finds lost ranks, during a fit."""

    def __init__(self) -> None:
        self._num_steps: Callable[[], int] | None = None  # optimizer steps that this rank has taken
        self._heartbeat = Heartbeat(self._phase)

    def begin_fit(self, num_steps: Callable[[], int]) -> None:
        """Begin the heartbeat. Another exchange between all ranks must follow.

        Args:
            num_steps: returns the optimizer steps that this rank has taken; called from a thread.
        """
        self._num_steps = num_steps
        number = next((os.environ[name] for name in NODE_VARIABLES if name in os.environ), None)
        node = "" if number is None else f"node {number}, "
        self._heartbeat.begin(f"{node}host {socket.gethostname()}, pid {os.getpid()}")

    def explain_(self, exception: BaseException) -> None:
        """Add the lost ranks to an exception, if they are its cause; leave a note about any other exception for the
        other ranks.

        In place:
            The exception's message; torch's own becomes its cause. Takes a few seconds at most.
        """
        if not self._heartbeat.has_begun:
            return
        message = str(exception)
        phase = self._phase(frame for frame, _ in traceback.walk_tb(exception.__traceback__))
        if not _is_of_lost_peer(exception):
            self._heartbeat.note(
                f"{type(exception).__name__} in {phase}: {message.splitlines()[0] if message else ''}", tells=True
            )
            return
        self._heartbeat.note(f"{LOST} in {phase}", tells=False)
        answers, heard = self._heartbeat.ask(), self._heartbeat.heard
        if answers is None and any(not reason.startswith(LOST) for reason in heard.failed.values()):
            answers = heard
        told = WITHOUT_STORE if answers is None else self._told(answers)
        cause = RuntimeError(message)
        cause.__cause__ = exception.__cause__
        exception.args = (f"Rank {dist.get_rank()}, in {phase}: {told}",)
        exception.__cause__ = cause

    def come_to_end(self, own: int, timeout: timedelta | None) -> None:
        """Wait in the store until all ranks have ended their training, where it may be seen that some train on.

        Their next exchange would meet what this rank communicates at the end of the fit, and gloo ends a process that
        receives a message of another size.

        Args:
            own: optimizer steps that this rank has taken.
            timeout: the longest wait; the collectives that follow have it, too.

        Raises:
            DisagreementError: on this rank; the others then find it failed.
        """
        last = time.monotonic() + (timeout or default_pg_timeout).total_seconds()
        while (answers := self._heartbeat.come_to_end()) is not None and not (answers.failed or answers.silent):
            going = [f"rank {rank} is in {phase}" for rank, phase in answers.present.items() if _trains_on(phase, own)]
            if going:
                raise DisagreementError(
                    f"Rank {dist.get_rank()} has ended its training after step {own}, and {', '.join(going)}. All "
                    "ranks must have the same number of batches; Trainer(limit_train_batches=...) gives it to them."
                )
            if time.monotonic() > last:
                return

    def close(self) -> None:
        """End the heartbeat."""
        self._heartbeat.close()
        self._num_steps = None

    def _told(self, answers: Answers) -> str:
        own = {rank: reason for rank, reason in answers.failed.items() if not reason.startswith(LOST)}
        gone = [
            *(f"rank {rank} ({answers.places[rank]}) has failed: {reason}" for rank, reason in own.items()),
            *(
                f"rank {rank} ({answers.places[rank]}) is gone or stopped: no answer within {ANSWER_S:g} s"
                for rank in answers.silent
            ),
        ]
        if gone:
            told = "; ".join(gone).rstrip(".")
            told += ". Look at the output there; then start all ranks again, from the last checkpoint."
            if answers.silent:
                told += (
                    f' If it ends in "{OTHER_SIZE}", the ranks were at different places: they have different numbers '
                    "of batches (Trainer(limit_train_batches=...) makes them equal), or one alone has saved a "
                    f"checkpoint, stopped, left out a step, or {NO_GRAPH}."
                )
            return told
        there = [
            *(f"rank {rank} in {phase}" for rank, phase in answers.present.items()),
            *(f"rank {rank}: {reason}" for rank, reason in answers.failed.items()),
        ]
        if not answers.present:
            return (
                f"all other ranks have lost a peer, too ({'; '.join(there)}). If that is another place than this one, "
                "the ranks have different numbers of batches (Trainer(limit_train_batches=...) makes them equal), or "
                "one has taken another branch. If it is the same place, this rank was stopped, or cut off from the "
                "others. Then start all again."
            )
        return (
            f"all other ranks answer ({'; '.join(there)}), so the network failed, or they did not come within the "
            f"timeout. Ranks in other places than this one have taken another branch, have {NO_GRAPH}, or are slow: "
            "give a longer timeout=... (seconds) to the strategy."
        )

    def _phase(self, frames: Iterable[FrameType] | None = None) -> str:
        """Return what the main thread is doing, by the functions on its stack, or by the given frames."""
        if frames is None:
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
            frames = reversed([each for each, _ in traceback.walk_stack(frame)])
        names = [frame.f_code.co_name for frame in frames]
        if FIT in names:  # what calls it may have any name
            names = names[names.index(FIT) :]
        phase = next((PHASES[name] for name in reversed(names) if name in PHASES), "the training")
        step = "" if self._num_steps is None else f" after step {self._num_steps()}"
        return f"{phase}{step}"


def _trains_on(phase: str, num_steps: int) -> bool:
    """Return whether a rank is in a step after this number of steps, by its `_phase`."""
    what, _, step = phase.rpartition(" after step ")
    return what in IN_A_STEP and int(step) >= num_steps


def _is_of_lost_peer(exception: BaseException) -> bool:
    """Return whether an exception is torch's about a peer, not another one, for example of the user's data."""
    message = str(exception)
    if not isinstance(exception, RuntimeError) or not IS_LOST.search(message) or IS_OTHER.search(message):
        return False
    if isinstance(exception, dist.DistError) or OF_BACKEND.search(message):
        return True
    raised_by = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(exception.__traceback__)]
    return bool(raised_by) and raised_by[-1].startswith(FROM_TORCH)
