"""`ShardedStrategy`: a model that is sharded over the ranks of each node, and a method that works between nodes."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_lowbw.arguments import code_of, is_count
from lightning_lowbw.engine.local_view import LocalTensors, LocalView
from lightning_lowbw.engine.method import Method, as_method
from lightning_lowbw.engine.worker import Worker
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.strategies import checks, shards
from lightning_lowbw.strategies.keywords import as_timeout
from lightning_lowbw.strategies.lost_peers import LostPeers
from lightning_lowbw.strategies.scaling import exchange_unscaled_
from lightning_lowbw.strategies.sharded_arguments import between_nodes, check_offload, refuse_keywords
from lightning_lowbw.strategies.sharded_checkpoint import ShardedCheckpoints
from lightning_lowbw.strategies.sharded_regime import ShardedRegime
from lightning_lowbw.strategies.sharded_setup import begin_schedules, check_callbacks, make_workers, tell_nodes
from lightning_lowbw.strategies.sharding import (
    DefaultSharding,
    check_reduced,
    check_resharded,
    check_sharded,
    equalise_,
    reshard_,
)
from lightning_lowbw.strategies.signals import Signals
from lightning_lowbw.strategies.step_hooks import Clipping, StepGuard, clips_before_exchange
from lightning_lowbw.where.agreement import agree, failing_together
from lightning_lowbw.where.collectives import Collectives
from lightning_lowbw.where.ledger import TrafficLedger
from lightning_lowbw.where.node_mesh import NodeMesh, make_node_mesh
from lightning_lowbw.where.peers import Peers
from lightning_lowbw.where.topology import Topology, TopologyChoice, check_choice, resolve


class ShardedStrategy(ShardedCheckpoints, ModelParallelStrategy):
    """FSDP2 inside each node, a method between nodes: for models that do not fit on one GPU.

    Each node holds the model once, sharded over its ranks: by the module's own `configure_model`, written as for
    Lightning's `ModelParallelStrategy` (``fully_shard(layer, mesh=self.device_mesh["data_parallel"])``), or by a
    default where it has none. After FSDP's reduce-scatter each rank has its shard of the node's mean gradient; the
    method exchanges this, or the shard of the weights, with the ranks that have the same shard in other nodes. N, the
    number of participants, is that of the nodes.

    Args:
        method: when the nodes communicate, and what they send; a `Method`, such as `DGC(...)` or `LocalSGD(...)`
            return, or a mapping. k is that of each shard.
        topology: which ranks share a node: "auto" (by the launcher and the host names), a number of ranks per node,
            the ranks of each node, or a `Topology`. None: the method's own, or "auto". Nodes are of one size.
        tensor_parallel_size: ranks of a node that share a tensor-parallel part; the node's
            ``device_mesh["tensor_parallel"]``. The others are data-parallel.
        blocks: for a module without `configure_model`: class names of the layers that are gathered one at a time. None
            given: the layers in each `nn.ModuleList` and `nn.Sequential`.
        save_distributed_checkpoint: as of `ModelParallelStrategy`: a folder in which each rank writes its shards, or
            one file, for which rank 0 gathers all weights in its memory.
        offload_state: whether the state of a method that averages weights (the last consensus, the outer momentum,
            residuals) is in pinned memory of the host between averages, and on the device only during an average.
        resume: as of `Strategy`.
        process_group_backend: of torch.distributed; None: by the device.
        timeout: seconds that a collective may take, or a timedelta.

    Attributes:
        method: the configuration.
        ledger: the traffic of this rank between nodes since the start of the fit.

    Raises:
        ConfigurationError: a value is out of range, or the method cannot be used with shards, with the reason; at the
            start of the fit, on all ranks: the topology does not fit the world, or the model is not sharded inside
            nodes.

    Example:
        >>> from lightning_lowbw import LocalSGD
        >>> ShardedStrategy(LocalSGD(k_steps=4), topology=8)
        ShardedStrategy(Method(when=EveryK(k_steps=4)), topology=8)
    """

    def __init__(
        self,
        method: Mapping[str, Any] | Method,
        *,
        topology: TopologyChoice | None = None,
        tensor_parallel_size: int = 1,
        blocks: Sequence[str] = (),
        save_distributed_checkpoint: bool = True,
        offload_state: bool = False,
        resume: shards.Needs = "exact",
        process_group_backend: str | None = None,
        timeout: timedelta | float | None = default_pg_timeout,
        **unknown: Any,
    ) -> None:
        refuse_keywords(unknown, ShardedStrategy)
        if not is_count(tensor_parallel_size):
            raise ConfigurationError(f"tensor_parallel_size={tensor_parallel_size!r}: give an integer >= 1.")
        super().__init__(
            tensor_parallel_size=tensor_parallel_size,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=None if timeout is None else as_timeout(timeout),
        )
        given = as_method(method, topology)
        own = given.where.topology
        self.topology = topology if topology is not None else own if own != "flat" else "auto"
        if check_choice(self.topology) is None and self.topology == "flat":
            raise ConfigurationError(
                "topology='flat': a model is sharded over the ranks of a node. Give 'auto', a number of ranks per "
                "node, the ranks of each node such as [[0, 1], [2, 3]], or a Topology."
            )
        self.method = between_nodes(given)
        check_offload(offload_state, self.method)
        self.offload_state = offload_state
        self.ledger = TrafficLedger()
        self._options: dict[str, Any] = {
            "tensor_parallel_size": tensor_parallel_size,
            "blocks": blocks if isinstance(blocks, str) else tuple(blocks),
            "save_distributed_checkpoint": save_distributed_checkpoint,
            "offload_state": offload_state,
            "resume": resume,
        }
        self._workers = {}
        self._views: dict[int, LocalView] = {}  # by id of the worker
        self._tensors = LocalTensors()
        self._groups: NodeMesh | None = None
        self._make_parts()

    def _make_parts(self) -> None:
        super()._make_parts()
        self.regime: ShardedRegime = ShardedRegime(self)
        self.signals = Signals(self._workers)
        self._clipping = Clipping()
        self._exchanged: set[Worker] = set()  # to clip the mean by hand, since the last backward pass
        self._has_new_gradients = self._is_exchanged_by_clipping = False
        self._default = DefaultSharding(self._options["blocks"])
        self._guard = StepGuard()
        self.lost_peers = LostPeers()

    def __repr__(self) -> str:
        defaults = inspect.signature(ShardedStrategy).parameters
        chosen = {name: value for name, value in self._options.items() if value != defaults[name].default}
        shown = ", ".join(f"{name}={value!r}" for name, value in {"topology": self.topology, **chosen}.items())
        return f"{type(self).__name__}({code_of(self.method)}, {shown})"

    @property
    def groups(self) -> NodeMesh:
        """The mesh of this rank's node, and this rank's coordinate; from the start of a fit on."""
        if self._groups is None:
            raise RuntimeError("The nodes are known when a fit, a validation or the like has begun.")
        return self._groups

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return dict(self.groups.sampler_arguments(self.global_rank))

    # Setting up -------------------------------------------------------------------------------------------------

    @override
    def setup_environment(self) -> None:
        self._setup_distributed()
        assert self.lightning_module is not None
        fitting = self.trainer.state.fn == TrainerFn.FITTING
        if fitting:
            trainer = self.trainer
            self.lost_peers.begin_fit(lambda: trainer.global_step)
            agree("strategy", {"class": type(self).__name__})
        settings = checks.settings_of(self.trainer) if fitting else {}
        with failing_together():
            if fitting:
                check_callbacks(self.trainer)
            choice = repr(check_choice(self.topology) or self.topology)
        everything = {**self.method.facts(), **self._options, "topology": choice}
        checks.agree_on_configuration(type(self).__name__, everything, settings)
        topology = resolve(self.topology, self.world_size) or Topology.blocks(self.world_size, 1)
        self._groups = make_node_mesh(
            topology, self.global_rank, self.root_device.type, self._options["tensor_parallel_size"], self._timeout
        )
        self._device_mesh = self.groups.mesh
        self._data_parallel_size, self._tensor_parallel_size = self.groups.sizes
        self.lightning_module._device_mesh = self._device_mesh
        reshard_(self.lightning_module)  # a forward pass since the last fit has gathered weights
        with failing_together():
            self._default.install(self.lightning_module, self.root_device)
        if fitting:
            tell_nodes(self, topology)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            self.ledger = TrafficLedger()
            self._workers.clear()
            self._views.clear()
            self._tensors = LocalTensors()
            self._has_new_gradients = False
            self._exchanged.clear()
            self.signals.begin_fit()
            self.regime.begin_fit()
            assert self.model is not None
            checks.check_model(self.model)
            with failing_together():
                check_sharded(self.model, self.groups)
        super().setup(trainer)
        self._default.begin()
        if not fitting:
            return
        peers = Peers(self.groups.peers, self.ledger, nodes=self.groups.nodes)
        with torch.no_grad():
            equalise_(trainer.lightning_module, self._tensors, Collectives(self.groups.peers, TrafficLedger()))
        for optimizer, view, worker in make_workers(self, self._tensors, peers):
            self._workers[id(optimizer)], self._views[id(worker)] = worker, view
        checks.check_optimizers(self.optimizers, list(trainer.lightning_module.named_parameters()))
        self._begin_checkpoints()
        self._clipping.install(self.precision_plugin, self.worker_of, self._make_mean)
        self.regime.set_up(trainer)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        agree("data", {"number of batches per epoch": self.trainer.num_training_batches})
        self._guard.watch(self.optimizers)  # not before: what loads their state takes an empty step
        self.signals.defer(self.trainer)
        begin_schedules(self)

    @override
    def on_exception(self, exception: BaseException) -> None:
        self.lost_peers.explain_(exception)
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        self.regime.tear_down()
        self.signals.restore()
        self._clipping.restore()
        self._guard.release()
        self._default.restore()
        if self.lightning_module is not None:
            reshard_(self.lightning_module)  # whoever looks at the weights finds all of them sharded
        self.lost_peers.close()
        for worker in self.workers:
            worker.to(torch.device("cpu"))
        is_interrupted = self.is_interrupted
        super().teardown()
        if not is_interrupted:
            self.barrier()

    @override
    def on_train_end(self) -> None:
        self.regime.end_training()
        super().on_train_end()

    @override
    def on_validation_end(self) -> None:
        super().on_validation_end()
        self.regime.end_validation()

    # The step ---------------------------------------------------------------------------------------------------

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self.note_batch()
        self._restore_random_numbers()
        self.regime.view.hide()  # the last consensus view may not have ended

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        super().pre_backward(closure_loss)
        self._has_new_gradients = True
        self._exchanged.clear()

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        if self.groups.sizes != (1, 1):
            assert self.lightning_module is not None
            check_reduced(self.lightning_module)

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        worker = self.worker_of(optimizer)
        view = self._views[id(worker)]

        def exchanging_closure() -> Any:
            result = closure()
            self._end_closure(worker)
            return result

        with self._guard.allowing(view.optimizer), worker.stepping():
            try:
                result = super().optimizer_step(optimizer, exchanging_closure, model, **kwargs)
            finally:
                view.release()
        assert self.lightning_module is not None
        reshard_(self.lightning_module)  # what a forward pass without a backward pass has gathered is no longer right
        if self.groups.sizes != (1, 1):
            check_resharded(self.lightning_module)
        self.signals.read_requests(worker, self.trainer)
        return result

    @torch.no_grad()
    def _end_closure(self, worker: Worker) -> None:
        """Replace the gradients of the optimizer that steps by those it steps with."""
        if worker.is_local:  # Lightning alone clips and scales, by the norm of all shards together
            worker.exchange()
            return
        if worker in self._exchanged:
            self._exchanged.remove(worker)
            return
        has_new, self._has_new_gradients = self._has_new_gradients, False
        if self.trainer.lightning_module.automatic_optimization and not has_new:
            self._views[id(worker)].optimizer.zero_grad(set_to_none=True)  # sent already
            return
        self._exchange_unscaled(worker)

    @torch.no_grad()
    def _exchange_unscaled(self, worker: Worker) -> None:
        optimizer = self._views[id(worker)].optimizer
        exchange_unscaled_(self.precision_plugin, optimizer, functools.partial(self._exchange, worker))

    def _exchange(self, worker: Worker, skip_nonfinite: bool = False) -> bool:
        """Check for faults, clip, exchange; return whether the step is to be taken."""
        view = self._views[id(worker)]
        view.refresh()
        view.take_gradients()
        worker.list_gradients(by_clipping=self._is_exchanged_by_clipping)
        worker.check_gradients()  # in each step, because a shard accumulates only what is finite in all
        self.regime.agree_in_node(worker)
        if clips_before_exchange(worker, self.trainer):
            self._clipping.clip(self.trainer, view.optimizer)  # by the norm of the node's gradient, all shards together
        applies = not (skip_nonfinite or self._guard.is_gradient_seen(self.trainer, view.optimizer))
        is_taken = worker.exchange(skip_nonfinite=skip_nonfinite, applies=applies)
        view.give_gradients()
        return is_taken

    def _make_mean(self, worker: Worker) -> bool:
        """Exchange gradients that are clipped by hand; return whether the step is to be taken."""
        is_of_rank = worker.is_local or worker.clips_before_exchange
        if self.trainer.lightning_module.automatic_optimization or is_of_rank:
            return True
        if worker not in self._exchanged:
            self._is_exchanged_by_clipping = True
            try:
                self._exchange_unscaled(worker)
            finally:
                self._is_exchanged_by_clipping = False
            self._exchanged.add(worker)
            self.signals.read_requests(worker, self.trainer)
        return worker.is_taken

    # Validation and checkpoints ---------------------------------------------------------------------------------

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self.is_interrupted:  # the shards of others are not to be had; `save_checkpoint` says so
            return {}
        return self.regime.state_dict(super().lightning_module_state_dict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self.is_interrupted:
            return {}
        raw = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        with self._guard.allowing(raw):  # of an optimizer without a state, torch takes an empty step
            state: dict[str, Any] = super().optimizer_state(optimizer)
        return state

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        if self.is_interrupted:
            rank_zero_warn(
                f"{filepath} is not written: an exception has ended the training of this rank, and the shards of the "
                "others cannot be gathered. Go on from the checkpoint before."
            )
            return
        write = functools.partial(super().save_checkpoint, storage_options=storage_options)
        self._save(checkpoint, filepath, write)
        self.regime.end_save()

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, *args: Any, **kwargs: Any) -> dict[str, Any]:
        with failing_together():
            if self.is_global_zero:
                shards.put_back(os.fspath(checkpoint_path), shards.folder_of(checkpoint_path))
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        if self.trainer.state.fn == TrainerFn.FITTING and "global_step" in checkpoint:
            for view in self._views.values():
                view.refresh()
            with torch.no_grad():
                self._load_shards(checkpoint, checkpoint_path)
        return checkpoint
