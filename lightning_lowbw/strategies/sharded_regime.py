"""What `ShardedStrategy` does apart from the exchange: the hooks of a fit that it calls."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_lowbw.engine.checks import raise_at_other_batches
from lightning_lowbw.engine.gradients import GradientWorker
from lightning_lowbw.engine.replicas import ReplicaWorker
from lightning_lowbw.engine.status import any_of, first_fault, flags, read_flags
from lightning_lowbw.engine.worker import Worker, raise_fault
from lightning_lowbw.strategies.callback_agreement import agree_on_weights_
from lightning_lowbw.strategies.checks import agree_on_hyperparameters
from lightning_lowbw.strategies.consensus_view import ConsensusView
from lightning_lowbw.strategies.regime import Viewing
from lightning_lowbw.strategies.sharding import reshard_
from lightning_lowbw.strategies.shared_buffers import share_, statistics_of
from lightning_lowbw.where.collectives import broadcast_flat_

if TYPE_CHECKING:
    from lightning_lowbw.strategies.sharded import ShardedStrategy


class ShardedView(ConsensusView):
    """A view of shards: the next forward pass gathers them anew when they have other values.

    The ranks of a node have buffers of their own, too: those of its first rank are the node's.
    """

    def __init__(self, strategy: ShardedStrategy) -> None:
        super().__init__()
        self._strategy = strategy

    @override
    def show(self, workers: list[ReplicaWorker], module: pl.LightningModule, *, is_interrupted: bool) -> None:
        reshard_(module)
        if workers:
            super().show(workers, module, is_interrupted=is_interrupted)
            for worker in self._shown:
                self._take_those_of_first_rank(worker)
            self._remember_shown(module)
        elif not is_interrupted:
            self.share_statistics(module)

    def share_statistics(self, module: pl.LightningModule) -> None:
        """Take over the running statistics of rank 0; FSDP leaves each rank its own buffers.

        Collective: all ranks.
        """
        names = statistics_of(module)
        statistics = {name: buffer for name, buffer in module.named_buffers() if name in names}
        share_(statistics, self._strategy.ledger, self._strategy.root_device)

    def _take_those_of_first_rank(self, worker: ReplicaWorker) -> None:
        node, buffers = self._strategy.groups.node, worker.buffers
        every = (*buffers.floating.values(), *buffers.counts)
        broadcast_flat_(every, lambda flat: dist.broadcast(flat, group=node, group_src=0))
        worker.note_shown()

    @override
    def hide(self) -> None:
        module = self._strategy.lightning_module
        if self.is_shown and module is not None:
            reshard_(module)
        super().hide()


class ShardedRegime(Viewing):
    """The consensus view, and the messages between the shards of a node before they communicate with their peers.

    A rank's peers have the same shard in other nodes. They do not receive what another shard of the node has found (a
    gradient with an inf or NaN, a signal); so the ranks of a node exchange it first.
    """

    def __init__(self, strategy: ShardedStrategy) -> None:
        super().__init__(strategy)
        self.view: ShardedView = ShardedView(strategy)

    @override
    def set_up(self, trainer: pl.Trainer) -> None:
        super().set_up(trainer)
        for worker in self.strategy.replicas:
            worker.meet = self.agree_in_world

    # Messages between shards ------------------------------------------------------------------------------------

    def agree_in_node(self, worker: Worker) -> None:
        """Exchange requests, and faults of the gradients, with the other shards of the node.

        Collective: the ranks of the node, blocking; five numbers.
        """
        fault = worker.fault if isinstance(worker, GradientWorker) else None
        message = flags(worker.requests, worker.device, fault, worker.batch)
        dist.all_reduce(message, op=dist.ReduceOp.MAX, group=self.strategy.groups.node)
        if fault is not None:
            assert isinstance(worker, GradientWorker)
            worker.fault = message[0]
        _, worker.requests, is_same_batch = read_flags(message)
        if not is_same_batch:
            raise_at_other_batches(worker.batch, worker.step, self.strategy.groups.node)
        if worker.peers.num_ranks == 1:
            worker.agree_on(worker.requests)

    def agree_in_world(self, worker: ReplicaWorker) -> None:
        """Exchange requests, and faults of the weights, between all ranks before an average.

        Collective: all ranks, blocking; five numbers.

        Raises:
            NonFiniteGradientError, ValueError: on all ranks; names the rank and the parameter.
        """
        parameters = [each for each in worker.parameters() if each.requires_grad]
        nonfinite = worker.nonfinite_weights(parameters)
        fault = any_of([*worker.late_flags(), *nonfinite.values()], worker.device)
        message = flags(worker.requests, worker.device, fault, worker.batch)
        dist.all_reduce(message, op=dist.ReduceOp.MAX)
        is_faulty, requests, is_same_batch = read_flags(message)
        if not is_same_batch:
            raise_at_other_batches(worker.batch, worker.step, None)
        if is_faulty:
            own = worker.describe_late_fault() or worker.describe_weights(nonfinite, worker.step)
            raise_fault(first_fault(own, worker.fault_group))
        worker.requests = requests

    def check_late_faults(self) -> None:
        """Report the faults that the last step has found after its control message; see `engine.late_faults`.

        Collective: all ranks, blocking; five numbers for each optimizer whose gradients are exchanged. `show` does it
        for the others.

        Raises:
            NonFiniteGradientError, ValueError: on all ranks; names the rank and the parameter.
        """
        for worker in () if self.is_fit_over or self.strategy.is_interrupted else self.strategy.workers:
            if isinstance(worker, GradientWorker) and worker.peers.num_ranks > 1:
                _check_late_faults(worker)

    # The consensus view -----------------------------------------------------------------------------------------

    @override
    def show(self) -> None:
        module = self.strategy.lightning_module
        workers = self.strategy.replicas
        if not self.strategy.workers or module is None or module._trainer is None or self.is_fit_over:
            return
        if self.view.is_shown:
            return
        is_interrupted = self.strategy.is_interrupted
        if not is_interrupted:
            for worker in workers:
                if not worker.is_consensus:
                    self.agree_in_world(worker)
                elif worker.peers.num_ranks > 1 and worker.method.sends_changes:
                    _check_late_faults(worker)  # also ranks whose shards are empty, and which have no flag
        self.view.show(workers, module, is_interrupted=is_interrupted)

    def state_dict(self, take: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        module = self.strategy.lightning_module
        trainer = None if module is None else module._trainer
        if trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            self.check_late_faults()
            self.show()
        return self.view.copied(take())

    @override
    def end_batch(self, trainer: pl.Trainer) -> None:
        reshard_(trainer.lightning_module)  # callbacks may change weights, or unfreeze layers
        super().end_batch(trainer)

    @override
    def end_validation(self) -> None:
        super().end_validation()
        module = self.strategy.lightning_module
        assert module is not None
        reshard_(module)

    @override
    def agree_on_metrics(self, trainer: pl.Trainer) -> None:
        super().agree_on_metrics(trainer)
        if not self.strategy.replicas:
            agree_on_hyperparameters(trainer)

    @override
    def end_epoch(self, trainer: pl.Trainer) -> None:
        if self.strategy.replicas:
            super().end_epoch(trainer)
        elif math.isfinite(trainer.num_training_batches):  # else the others may be in a step
            super().end_epoch(trainer)
            self.view.share_statistics(trainer.lightning_module)

    def end_training(self) -> None:
        """Average weights that differ between nodes after the last average: a callback may have put in its own.

        Collective: all ranks, blocking, as `check_late_faults`; the peers, as `agree_on_weights_`.
        """
        self.strategy.lost_peers.come_to_end(self.strategy.trainer.global_step, self.strategy._timeout)
        self.check_late_faults()
        if not self.strategy.replicas:
            agree_on_hyperparameters(self.strategy.trainer)
        for worker in self.strategy.replicas:
            shards = [each.detach() for each in worker.parameters() if each.numel()]
            agree_on_weights_(shards, worker.peers, worker.device)


def _check_late_faults(worker: Worker) -> None:
    """Do what `Worker.check_late_faults` does, for all ranks: also those with other shards than the peers."""
    message = flags(0, worker.device, any_of(worker.late_flags(), worker.device))
    dist.all_reduce(message, op=dist.ReduceOp.MAX)
    is_faulty, _, _ = read_flags(message)
    if is_faulty:
        raise_fault(first_fault(worker.describe_late_fault(), worker.fault_group))
    worker.forget_late_faults()
