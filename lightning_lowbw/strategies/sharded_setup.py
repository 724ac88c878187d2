"""The beginning of a fit of `ShardedStrategy`: its workers, what is said about the nodes, and the schedules."""

from __future__ import annotations

from typing import TYPE_CHECKING

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer

from lightning_lowbw.engine.checks import warn_if_mostly_sent
from lightning_lowbw.engine.kernels import prepare_kernels, uses_of
from lightning_lowbw.engine.local_view import LocalTensors, LocalView, local_parameters
from lightning_lowbw.engine.replicas import ReplicaWorker
from lightning_lowbw.engine.worker import Worker
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.strategies.advice import (
    tell_of_sparse_steps,
    warn_if_too_short,
)
from lightning_lowbw.strategies.base import buffers_by_optimizer
from lightning_lowbw.strategies.callback_agreement import averaging_callbacks
from lightning_lowbw.when.every_k import EveryK
from lightning_lowbw.when.every_step import EveryStep
from lightning_lowbw.where.agreement import failing_together
from lightning_lowbw.where.peers import Peers
from lightning_lowbw.where.topology import Topology

if TYPE_CHECKING:
    from lightning_lowbw.strategies.sharded import ShardedStrategy


def tell_nodes(strategy: ShardedStrategy, topology: Topology) -> None:
    """Log which ranks share a node, and warn if there is only one node, or one rank on each."""
    name, shown = type(strategy).__name__, ", ".join(str(list(node)) for node in topology.nodes)
    rank_zero_info(f"{name}: nodes {shown}; each holds the model once, sharded over its ranks.")
    if topology.num_nodes == 1:
        rank_zero_warn(
            f"{name}, topology={strategy.topology!r}: all ranks are on one node, so there is no slow network between "
            "nodes: this trains as FSDP."
        )
    elif topology.ranks_per_node == 1:
        rank_zero_warn(
            f"{name}, topology={strategy.topology!r}: one rank on each node, so each holds the whole model, and "
            "nothing is sharded. lightning_lowbw.Strategy does the same without FSDP."
        )


def check_callbacks(trainer: pl.Trainer) -> None:
    """Refuse callbacks that copy the module before it is sharded: they would average nothing, or fail in torch.

    Raises:
        ConfigurationError: there is one.
    """
    names = [type(each).__name__ for each in averaging_callbacks(trainer)]
    if names:
        raise ConfigurationError(
            f"{', '.join(names)}: it averages copies of whole weights, and here each rank has shards. Leave it out, or "
            "use a strategy that does not shard the model."
        )


def make_workers(
    strategy: ShardedStrategy, tensors: LocalTensors, peers: Peers
) -> list[tuple[Optimizer, LocalView, Worker]]:
    """Make a worker for each optimizer, which sees this rank's shards.

    Collective: all ranks.
    """
    module, method = strategy.lightning_module, strategy.method
    assert module is not None
    named = local_parameters(module.named_parameters(), tensors)
    numels = {tensors.of(parameter): parameter.numel() for parameter in module.parameters()}
    made: list[tuple[Optimizer, LocalView, Worker]] = []
    with failing_together():
        for optimizer in strategy.optimizers:
            view = LocalView(optimizer, tensors)
            buffers = None
            if method.averages_weights:
                buffers = buffers_by_optimizer(module, strategy.optimizers)[id(optimizer)]
            worker = method.make_worker(view.local, named, peers, buffers)
            worker.params.whole_numels = numels
            vars(worker).pop("small_numel", None)  # computed from the sizes of shards, for the fragments
            if isinstance(worker, ReplicaWorker):
                worker.is_offloaded = strategy.offload_state
            made.append((optimizer, view, worker))
    return made


def begin_schedules(strategy: ShardedStrategy) -> None:
    """Start the workers, when the length of the run is known; warn if the run ends before a phase begins."""
    trainer, is_search = strategy.trainer, strategy.regime.is_search(strategy.trainer)
    if isinstance(strategy.method.when, EveryK):
        strategy._resolve_begin()
        if not is_search:
            warn_if_too_short(strategy.method.when, trainer, strategy.workers)
    method = strategy.method
    for worker in strategy.workers:
        worker.check_schedule()
        warn_if_mostly_sent(method.what, method.when, worker.peers)
        if isinstance(worker, ReplicaWorker):
            worker.begin_local()
    if strategy.groups.topology.num_nodes > 1:
        if method.uses_kernels(strategy.root_device):
            prepare_kernels(strategy.root_device, uses_of(strategy.workers))
        if method.compresses_gradients and not is_search:
            assert isinstance(method.when, EveryStep)
            warn_if_too_short(method.when, trainer, strategy.workers)
            tell_of_sparse_steps(strategy.workers)
