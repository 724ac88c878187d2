"""What `ShardedStrategy` does apart from the exchange: the hooks of a fit; see `regime.Regime` for that of DDP."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lightning_lowbw.engine.faults import (
    OF_LAST,
    OF_WEIGHTS,
    Kind,
    error_of,
    first_reported,
    last_fault,
    numbers_of,
    weight_fault,
)
from lightning_lowbw.engine.gradients import GradientWorker
from lightning_lowbw.engine.kept import forget
from lightning_lowbw.engine.replicas import ReplicaWorker
from lightning_lowbw.engine.worker import Worker
from lightning_lowbw.ops.table import upload
from lightning_lowbw.strategies.consensus_view import ConsensusView, agree_on_monitored
from lightning_lowbw.where.agreement import checksum
from lightning_lowbw.where.mean import MeanWork

if TYPE_CHECKING:
    from lightning_lowbw.strategies.sharded import ShardedStrategy


class ShardedMoments:
    """The consensus view, and the messages between the shards of a node before they communicate with their peers.

    A rank's peers have the same shard in other nodes. They do not receive what another shard of the node has found (a
    gradient with an inf or NaN, a signal); so the ranks of a node exchange it first.

    Attributes:
        view: of the consensus.
    """

    def __init__(self, strategy: ShardedStrategy) -> None:
        self._strategy = strategy
        self.view = ConsensusView()
        self._callback = FirstCallback(self)

    @property
    def own_buffers(self) -> dict[str, Tensor]:
        """Buffers of this rank by name, while the model has others."""
        return self.view.own_buffers

    @property
    def _replicas(self) -> list[ReplicaWorker]:
        return [worker for worker in self._strategy.workers if isinstance(worker, ReplicaWorker)]

    def set_up(self, trainer: pl.Trainer) -> None:
        """Let the callback be the first, so that all others see the consensus, and metrics that agree."""
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        if self._strategy.workers and self._callback not in callbacks:
            callbacks.insert(0, self._callback)
        for worker in self._replicas:
            worker.meet = self.agree_in_world

    def tear_down(self) -> None:
        """Restore Lightning's objects."""
        module = self._strategy.lightning_module
        trainer = None if module is None else module._trainer
        if trainer is not None and self._callback in trainer.callbacks:  # type: ignore[attr-defined]
            trainer.callbacks.remove(self._callback)  # type: ignore[attr-defined]

    # Messages between shards ------------------------------------------------------------------------------------

    def agree_in_node(self, worker: Worker) -> None:
        """Exchange requests, and faults of the gradients, with the other shards of the node.

        Collective: the ranks of the node, blocking; three numbers.
        """
        fault = worker.fault if isinstance(worker, GradientWorker) else None
        requests = upload([float(worker.stop_requested), float(worker.save_requested)], torch.float32, worker.device)
        nothing = torch.zeros((), dtype=torch.float32, device=worker.device)
        numbers = torch.cat([(nothing if fault is None else fault.float()).reshape(1), requests])
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self._strategy.groups.node)
        if fault is not None:
            assert isinstance(worker, GradientWorker)
            worker.fault = numbers[0]
        worker.stop_requested, worker.save_requested = (bool(each) for each in numbers[1:].tolist())
        if worker.peers.num_ranks == 1:
            worker.agree_on(worker.requests)

    def agree_in_world(self, worker: ReplicaWorker) -> None:
        """Exchange requests, and faults of the weights, between all ranks before an average.

        Collective: all ranks, blocking; three numbers.

        Raises:
            NonFiniteGradientError, ValueError: on all ranks; names the rank and the parameter.
        """
        parameters = [each for each in worker.parameters() if each.requires_grad]
        fault = weight_fault(worker, parameters)
        requests = upload([float(worker.stop_requested), float(worker.save_requested)], torch.float32, worker.device)
        numbers = torch.cat([fault.float().reshape(1), requests])
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
        num_faulty, stop, save = numbers.tolist()
        if num_faulty:
            number, rank = _first_in_world(fault, numbers_of(OF_WEIGHTS, len(parameters)))
            node = self._strategy.groups.topology.node_of(rank)
            raise error_of(worker, number, rank, OF_WEIGHTS, parameters, worker.step, node)
        worker.stop_requested, worker.save_requested = bool(stop), bool(save)

    def check_kept(self) -> None:
        """Report the faults that the last step has found after its control message; see `engine.kept`.

        Collective: all ranks, blocking; one number for each optimizer whose gradients are exchanged. `show` does it for
        the others.

        Raises:
            NonFiniteGradientError, ValueError: on all ranks; names the rank and the parameter.
        """
        for worker in () if self._strategy.is_interrupted else self._strategy.workers:
            if isinstance(worker, GradientWorker) and worker.peers.num_ranks > 1:
                _check_kept(worker)

    # The consensus view -----------------------------------------------------------------------------------------

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Enclose the loading of a rank's own state: until the first batch the model keeps the checkpoint's weights."""
        module = self._strategy.lightning_module
        assert module is not None
        if not self._replicas:
            yield
            return
        with self.view.loading(self._replicas, module):
            yield

    def show(self) -> None:
        """Put the consensus into the model's shards, until the next batch, the end of validation or of a save."""
        module = self._strategy.lightning_module
        workers = self._replicas
        if not workers or module is None or module._trainer is None or self.view.is_shown:
            return
        if not module.trainer.interrupted:
            for worker in workers:
                if not worker.consensus_view.is_there:
                    self.agree_in_world(worker)
                elif worker.narrow is not None and worker.peers.num_ranks > 1:
                    _check_kept(worker)
        self.view.show(workers, module)

    def state_dict(self, take: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the weights for a checkpoint."""
        module = self._strategy.lightning_module
        trainer = None if module is None else module._trainer
        if trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            self.check_kept()
            self.show()
        return self.view.copied(take())

    def end_validation(self) -> None:
        """Called after validation, after all other callbacks."""
        if not self._strategy.trainer.sanity_checking:  # after which there may be nothing to train
            self.view.hide()

    def end_save(self) -> None:
        """Called when a checkpoint has been written."""
        if not self._strategy.trainer.validating:
            self.view.hide()

    def end_batch(self, trainer: pl.Trainer) -> None:
        """Save after SLURM's signal; called after each batch, before the callbacks."""
        if self._strategy.signals.save_is_due:
            self._strategy.signals.save(trainer)

    def end_validating(self, trainer: pl.Trainer) -> None:
        """Average monitored metrics, because each node has its own data."""
        if self._replicas and not trainer.sanity_checking:
            agree_on_monitored(trainer, self._strategy.root_device)

    def leave_consensus(self) -> None:
        """Leave the consensus in the model, before the callbacks' `on_train_end`."""
        self.show()
        self.view.keep()
        for worker in self._replicas:
            worker.finish()

    def end_training(self) -> None:
        """Average weights that differ between nodes after the last average: a callback may have put in its own.

        Collective: all ranks, blocking, as `check_kept`; the peers; two numbers, and the shards where they differ.
        """
        self.check_kept()
        for worker in self._replicas:
            shards = [each.detach() for each in worker.parameters() if each.numel()]
            if worker.peers.num_ranks == 1 or not shards:
                continue
            bits = torch.as_tensor(checksum(shards), dtype=torch.int64, device=worker.device)
            extremes = torch.stack([bits, -bits])
            worker.peers.all_reduce_(extremes, dist.ReduceOp.MAX)
            if int(extremes[0]) != -int(extremes[1]):
                beside = torch.zeros(1, dtype=torch.float32, device=worker.device)
                means = MeanWork(shards, beside, 1.0 / worker.peers.num_ranks, worker.peers).wait()[0]
                for shard, mean in zip(shards, means, strict=True):
                    shard.copy_(mean)


def _check_kept(worker: Worker) -> None:
    """Do what `engine.kept.check_kept` does, for all ranks: also those with other shards than the peers."""
    fault = last_fault(worker)
    most = fault.float().reshape(1)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    if float(most):
        parameters = worker.parameters()
        number, rank = _first_in_world(fault, numbers_of(OF_LAST, len(parameters)))
        raise error_of(worker, number, rank, OF_LAST, parameters, worker.step)
    forget(worker)


def _first_in_world(fault: Tensor, numbers: Mapping[Kind, range]) -> tuple[int, int]:
    """Return `first_reported` of all ranks.

    Collective: all ranks, blocking; one of them has a fault.
    """
    told: list[Any] = [0] * dist.get_world_size()
    dist.all_gather_object(told, int(fault))
    first = first_reported(told, numbers)
    assert first is not None
    return first


class FirstCallback(Callback):
    """Is the first in the list of callbacks."""

    def __init__(self, moments: ShardedMoments) -> None:
        self._moments = moments

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._moments.end_batch(trainer)

    def on_validation_start(self, *_: Any) -> None:
        self._moments.show()

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._moments.end_validating(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._moments.end_validating(trainer)

    def on_train_end(self, *_: Any) -> None:
        self._moments.leave_consensus()
