"""SIGTERM, and SLURM's signal to save and requeue: a signal on one rank lets all ranks end or save after the same step.

Lightning handles a signal only on the rank that receives it: this rank ends, or saves, and the other ranks wait for it
in the next collective. Lightning 2.6 also broadcasts in the handler, and before each batch broadcasts whether rank 0
has received a signal. Here a signal sets a request, which travels in the status of a compressed step, of a synchronous
step of local SGD, or of an average. A step whose gradients DDP reduces has no status, nor has a step of a sharded model
on a single node: after every fourth such step a separate message is begun, and its result is read after the next step,
when it has arrived already.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_lowbw.comm.collectives import TensorWork, begin_all_reduce_
from lightning_lowbw.kernels.tensors import device_of
from lightning_lowbw.sync.checks import compare_batches
from lightning_lowbw.sync.status import SAVE, STOP, flags, read_flags
from lightning_lowbw.sync.synchronizer import Synchronizer

EVERY = 4  # steps to a message of its own, which takes a millisecond of a core: 5 % of a step of 15 ms


class Signals:
    """Defers signals, and handles them when all ranks have received the request, which the workers send.

    Args:
        workers: of the optimizers, at any time.
        ends: undoes changes at the end of the fit; Lightning's connector puts the handlers back.

    Attributes:
        save_is_due: whether the ranks have agreed to save and requeue, as SLURM's signal asked for.
    """

    def __init__(self, workers: Mapping[int, Synchronizer], ends: ExitStack) -> None:
        self._workers, self._ends = workers, ends
        self._asked: tuple[TensorWork, Synchronizer] | None = None  # a message that has been begun, and for which
        self._have_agreed = False  # whether a SIGTERM ends all ranks after the same step
        self.save_is_due = False

    @property
    def is_ending_all(self) -> bool:
        """Whether the exception that is handled now is that of a SIGTERM, which all ranks raise after the same step."""
        return self._have_agreed and isinstance(sys.exc_info()[1], SIGTERMException)

    def defer(self, trainer: pl.Trainer) -> None:
        """Let SIGTERM and SLURM's signal set a request from now on; may be called again."""
        self._have_agreed |= trainer.world_size == 1  # a SIGTERM ends the only rank
        if trainer.world_size == 1 or not self._workers:  # without a worker no message carries a request
            return
        loop = trainer.fit_loop.epoch_loop
        if hasattr(loop, "_broadcast_sigterm_tensor"):
            loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
            self._ends.callback(vars(loop).pop, "_broadcast_sigterm_tensor", None)
        if threading.current_thread() is not threading.main_thread():
            return
        if isinstance(trainer.strategy.launcher, _MultiProcessingLauncher):
            # A rank that ends without an error would let the process that has spawned it wait for its result for ever.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            return
        connector = trainer._signal_connector
        deferred = {
            connector._sigterm_notifier_fn: self._request_stop,
            connector._slurm_sigusr_handler_fn: self._request_save,
        }
        if connector.received_sigterm:  # on this rank, before the process group existed
            connector.received_sigterm = False
            self._request_stop()
        for signum in signal.valid_signals():
            handlers = getattr(signal.getsignal(signum), "signal_handlers", [])
            handlers[:] = [deferred.get(each, each) for each in handlers]

    def _request_stop(self, *_: Any) -> None:
        for worker in self._workers.values():
            worker.requests.asked |= STOP

    def _request_save(self, *_: Any) -> None:
        for worker in self._workers.values():
            worker.requests.asked |= SAVE

    # Requests of all ranks --------------------------------------------------------------------------------------

    def end_step(self, worker: Synchronizer, trainer: pl.Trainer) -> None:
        """Read the requests of all ranks; send the requests of this rank if the coming step has no status.

        Collective: all ranks, after each step of a method that communicates in every step. If DDP reduces the coming
        gradients, one all-reduce of five numbers is begun after every fourth step, and waited for after the next step.
        """
        if trainer.world_size == 1:
            return
        worker.requests.agreed |= self.settle()  # the step's status, if it had one, has brought requests, too
        is_ending = bool(worker.requests.agreed & STOP)
        self.read_requests(worker, trainer)
        worker.requests.agreed = 0  # a step without a status would repeat it
        has_status = worker.peers.are_shards and worker.peers.num_ranks > 1  # of shards, between nodes
        if worker.step % EVERY == 0 and worker.plan.reduce == "all" and not (has_status or is_ending):
            message = flags(worker.requests.asked, worker.params.device, batch=worker.batch)
            self._asked = begin_all_reduce_(message, op=dist.ReduceOp.MAX), worker

    def settle(self) -> int:
        """Wait for the message that has been begun, if any; return its requests.

        Collective: all ranks.
        """
        if self._asked is None:
            return 0
        work, worker = self._asked
        self._asked = None
        # On its own stream; otherwise the host would wait for the whole step that has been launched meanwhile.
        with device_of(work.tensor.device).aside("signals"):
            _, requests, is_same_batch = read_flags(work.wait())
        if not is_same_batch:
            compare_batches(worker.batch, worker.step, None)
        return requests

    def read_requests(self, worker: Synchronizer, trainer: pl.Trainer) -> None:
        """Read the requests to stop or to save from the last status of a worker."""
        connector, agreed = trainer._signal_connector, worker.requests.agreed
        if agreed & STOP and not connector.received_sigterm:
            rank_zero_info(f"A rank has received SIGTERM: all ranks end after optimizer step {worker.step}.")
            self._have_agreed = connector.received_sigterm = True  # Lightning raises it after the batch
        if agreed & SAVE:
            self.save_is_due = True
            for each in self._workers.values():  # of several optimizers only one has sent it
                each.requests.asked &= ~SAVE
        worker.requests.agreed &= ~SAVE  # else it would be read again when an average begins, which has no message yet

    def save(self, trainer: pl.Trainer) -> None:
        """Save and requeue, as SLURM's signal asked for.

        Collective: all ranks.
        """
        self.save_is_due = False
        trainer._signal_connector._slurm_sigusr_handler_fn(
            signal.SIGUSR1,
            None,  # type: ignore[arg-type]  # the frame, which it does not use
        )
