"""The frame of all strategies: `DDPStrategy` with three seams into a Lightning step.

1. a DDP communication hook, on gloo as well as NCCL: all-reduce during backward, or pass the gradients through;
2. the end of the wrapped closure: the method exchanges the gradients of the optimizer that steps;
3. after the step: the method's counters, and the user's values back in the param groups.

Automatic and manual optimization, accumulation, several optimizers and every precision plugin go through these.
"""
# No `from __future__ import annotations` here: DDP checks the hook's annotations, which must be real objects.

import contextlib
import difflib
import functools
import inspect
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_lowbw.engine.protocol import Method, Worker
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.strategies import shards
from lightning_lowbw.where.agreement import agree, failing_together
from lightning_lowbw.where.collectives import Exchange
from lightning_lowbw.where.hierarchy import Algorithm, Hierarchy, TopologyChoice, check_choice, resolve
from lightning_lowbw.where.ledger import TrafficLedger
from lightning_lowbw.where.volume import all_reduce_bytes

# The hook is this package's; and what DDP would do beside the hook, unseen by it.
OWNED = frozenset({"ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period"})
UNSUPPORTED = frozenset({"delay_all_reduce_named_params", "param_to_hook_all_reduce", "mixed_precision", "device_mesh"})
SETTLE_S = 0.02
PLAIN = (bool, int, float, str, tuple, type(None))  # what can be compared between ranks
SET_BY_LIGHTNING = frozenset({"self", "module", "device_ids", "output_device", "dim", "kwargs"})


class LowBandwidthStrategy(DDPStrategy):
    """DDP whose gradient exchange is a method's.

    Args:
        method: the configuration; a plain value.
        topology: "flat" or, for two levels, "auto" (asks the launcher and the host names), a number of ranks per node,
            the ranks of each node, or a `Topology`.
        algorithm: of dense all-reduces on two levels; None takes "sharded" where nodes are of one size, else "leader".
        inter_dtype: None, or what these send between nodes.
        **kwargs: keyword arguments of `DDPStrategy` and `DistributedDataParallel`, checked against their signatures.

    Raises:
        ConfigurationError: a keyword is unknown, or cannot be combined with a communication hook.
    """

    strategy_name: str
    # Names to register instead of the strategy's own, with the arguments of each: names are all that
    # Trainer(strategy="...") can tell.
    presets: Mapping[str, Mapping[str, Any]] = {}

    def __init__(
        self,
        method: Method,
        *,
        topology: TopologyChoice = "flat",
        algorithm: Algorithm | None = None,
        inter_dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        _check_keywords(type(self), kwargs)
        check_choice(topology)
        super().__init__(**kwargs)
        self.method = method
        self._topology, self._algorithm, self._inter_dtype = topology, algorithm, inter_dtype
        self._hierarchy: Hierarchy | None = None
        self.ledger = TrafficLedger()
        self._workers: dict[int, Worker] = {}  # by id of the optimizer
        self._step_hooks: list[RemovableHandle] = []
        self._stepping: Worker | None = None  # whose optimizer is being stepped
        self._reduced_by_ddp: frozenset[torch.nn.Parameter] = frozenset()
        self._own_buffers: dict[str, Tensor] = {}  # while others are shown
        self._num_backwards = 0
        self._num_backwards_exchanged: dict[int, int] = {}
        self._last_launch_s: float | None = None  # when the last bucket of a dense backward was sent
        self._clip_gradients: Callable[..., None] | None = None  # the precision plugin's own
        self._resume_path: _PATH | None = None
        self._rng_state: Mapping[str, Any] | None = None
        self._precision_state: dict[str, Any] | None = None
        self._run_id = ""
        self._shards_written: dict[str, list[str]] = {}  # by folder, the latest last
        self._saved_as: dict[str, _PATH] = {}  # rank 0's path, by this rank's own
        self._num_saves = 0

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        presets = dict(cls.presets or {cls.strategy_name: {}})
        if "hierarchical" not in presets:
            presets |= {f"{name}_hierarchical": {**preset, "topology": "auto"} for name, preset in presets.items()}
        for preset, arguments in presets.items():
            for suffix, start_method in (("", "popen"), ("_spawn", "spawn"), ("_fork", "fork"), ("_notebook", "fork")):
                name = preset + suffix
                if name not in strategy_registry.available_strategies():
                    description = f"{cls.__name__} with {arguments or 'defaults'}, `start_method` '{start_method}'"
                    strategy_registry.register(
                        name, cls, description=description, start_method=start_method, **arguments
                    )

    @property
    def workers(self) -> list[Worker]:
        """The method's workers, in the order of the optimizers, of the present fit or the last one."""
        return list(self._workers.values())

    def reconfigure(self, method: Method) -> None:
        """Replace the method's configuration, for the steps to come.

        Collective: all ranks.

        Raises:
            DisagreementError: on all ranks.
        """
        agree(f"configuration of strategy {self.strategy_name!r}", method.describe())
        self.method = method
        for worker in self.workers:
            worker.method = method

    # Setting up -------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if is_fitting:
            self._forget_last_fit()
        super().setup(trainer)
        if not is_fitting:
            return
        assert isinstance(self.model, DistributedDataParallel)
        assert self.lightning_module is not None
        exchange = Exchange(self.model.process_group, self.ledger, hierarchy=self._hierarchy)
        named_parameters = list(self.lightning_module.named_parameters())
        with failing_together():
            for optimizer in self.optimizers:
                self._workers[id(optimizer)] = self._attach(optimizer, named_parameters, exchange)
            _refuse_shared_parameters(self.optimizers)
        for optimizer in self.optimizers:
            self._step_hooks.append(optimizer.register_step_pre_hook(self._refuse_bypass))
        agree("optimizers", _facts_about_optimizers(self.optimizers, dict(named_parameters)))
        self._run_id = self.broadcast(uuid.uuid4().hex[:12])
        self._move_clipping()
        if exchange.num_ranks == 1:
            rank_zero_warn(
                f"{type(self).__name__} with one rank: there is nobody to exchange gradients with, so this "
                "trains as without it. Set Trainer(devices=..., num_nodes=...) for more."
            )

    def _attach(
        self, optimizer: Optimizer, named_parameters: list[tuple[str, torch.nn.Parameter]], exchange: Exchange
    ) -> Worker:
        return self.method.attach(optimizer, named_parameters, exchange)

    def _forget_last_fit(self) -> None:
        self.ledger = TrafficLedger()
        self._workers.clear()
        self._num_backwards_exchanged.clear()
        self._num_backwards = 0
        self._own_buffers.clear()
        self._rng_state = self._precision_state = None

    @override
    def configure_ddp(self) -> None:
        # Before the wrap: DDP's own complaint about models that differ does not say where.
        assert self.lightning_module is not None
        with failing_together():
            _refuse_sparse_gradients(self.lightning_module)
        ddp = {name: value for name, value in self._ddp_kwargs.items() if isinstance(value, PLAIN)}
        agree(
            f"configuration of strategy {self.strategy_name!r}",
            {"class": type(self).__name__, **self.method.describe(), **ddp},
        )
        agree("model", _facts_about_model(self.lightning_module))
        self._hierarchy = self._make_hierarchy()
        super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        self._choose_buffers(self.model)

    def _make_hierarchy(self) -> Hierarchy | None:
        """Return the two levels; None where ranks are all alike.

        Collective: all ranks.
        """
        choice = {"topology": self._topology, "algorithm": self._algorithm, "inter_dtype": self._inter_dtype}
        agree("topology", choice)
        topology = resolve(self._topology, self.world_size)
        if topology is None or self.world_size == 1:
            return None
        with failing_together():
            algorithm = self._algorithm or ("sharded" if topology.has_equal_nodes else "leader")
            if algorithm == "sharded":
                _ = topology.ranks_per_node  # raises where they differ
        if topology.num_nodes == self.world_size:
            rank_zero_warn(
                f"{type(self).__name__}, topology={self._topology!r}: one rank on each node, so there is one "
                "level only, and this trains as with topology='flat'."
            )
            return None
        if topology.num_nodes == 1:
            rank_zero_warn(
                f"{type(self).__name__}, topology={self._topology!r}: all ranks are on one node, so there is "
                "one level only, and no slow network between nodes: this trains as DDP."
            )
        rank_zero_info(f"{self.strategy_name}: nodes {', '.join(str(list(node)) for node in topology.nodes)}.")
        return Hierarchy(topology, algorithm, self._inter_dtype, self.ledger)

    @override
    def _register_ddp_hooks(self) -> None:
        # Stock Lightning registers hooks on CUDA only, and says nothing elsewhere.
        assert isinstance(self.model, DistributedDataParallel)
        self.model.register_comm_hook(state=None, hook=self._gradient_hook)

    @override
    def teardown(self) -> None:
        self._restore_clipping()
        if self._hierarchy is not None:
            self._hierarchy.close()
        while self._step_hooks:
            self._step_hooks.pop().remove()
        for worker in self.workers:
            worker.to(torch.device("cpu"))
        module = self.lightning_module
        trainer = None if module is None else module._trainer
        super().teardown()
        if trainer is not None and not trainer.interrupted:  # no collective while an exception unwinds
            # At exit gloo's thread must not hold the last reference to a tensor of Python's, for it would ask a dying
            # interpreter for leave to drop it, and abort; in stock DDP, too. A barrier holds no tensor, but the work
            # before it if that has not been let go yet.
            time.sleep(SETTLE_S)
            self.barrier()

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        for worker in self.workers:  # after a resume, and after the callbacks have set the schedule
            worker.check_schedule()

    # Seam 1: the gradient hook ----------------------------------------------------------------------------------

    def _gradient_hook(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """All-reduce a bucket as DDP does, all-reduce it inside the node, or pass it on to the method.

        By parameter, where optimizers are in different phases.
        """
        buffer = bucket.buffer()
        for worker in self.workers:
            worker.begin(bucket.parameters())
        reductions = {self._reduction(worker) for worker in self.workers} or {self._all_reduce}
        if len(reductions) == 1:
            (reduction,) = reductions
            return _done(buffer) if reduction is None else reduction(buffer)
        by_parameter = {
            parameter: self._reduction(worker)
            for worker in self.workers
            for group in worker.optimizer.param_groups
            for parameter in group["params"]
        }
        pending = [_done(buffer)]
        for reduction in (self._all_reduce, self._all_reduce_in_node):
            views = [
                view
                for parameter, view in zip(bucket.parameters(), bucket.gradients(), strict=True)
                if by_parameter.get(parameter, self._all_reduce) == reduction
            ]
            if views:
                pending.append(_reduce_views(views, reduction))
        return torch.futures.collect_all(pending).then(_first_value)

    def _reduction(self, worker: Worker) -> Callable[[Tensor], torch.futures.Future[Tensor]] | None:
        """Return how a bucket of a worker's gradients is reduced in the coming step; None: not at all."""
        if worker.reduces_in_backward:
            return self._all_reduce
        return self._all_reduce_in_node if worker.reduces_in_node else None

    def _all_reduce(self, buffer: Tensor) -> torch.futures.Future[torch.Tensor]:
        assert isinstance(self.model, DistributedDataParallel)
        group = self.model.process_group
        num_ranks = dist.get_world_size(group)
        nbytes = all_reduce_bytes(buffer.nbytes, num_ranks)
        self.ledger.dense_bytes += nbytes
        buffer.mul_(1.0 / num_ranks)  # the reducer multiplies; a division has other bits unless N is a power of two
        if self._hierarchy is not None and self._hierarchy.topology.num_nodes > 1:
            future = self._hierarchy.all_reduce(buffer, exact=False)
            self._note_launch()
            return future
        self.ledger.record(nbytes)
        work = dist.all_reduce(buffer, group=group, async_op=True)
        self._note_launch()
        return work.get_future().then(lambda future: future.value()[0])

    def _all_reduce_in_node(self, buffer: Tensor) -> torch.futures.Future[torch.Tensor]:
        assert self._hierarchy is not None
        buffer.mul_(1.0 / self._hierarchy.node.num_ranks)
        future = self._hierarchy.all_reduce_in_node(buffer)
        self._note_launch()
        return future

    def _note_launch(self) -> None:
        self._last_launch_s = time.perf_counter()

    # Seams 2 and 3: the end of the closure, and after the step --------------------------------------------------

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        self._num_backwards += 1

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        worker = self._worker_of(optimizer)

        def exchanging_closure() -> Any:
            result = closure()
            self._exchange(worker)
            return result

        outer, self._stepping = self._stepping, worker
        try:
            with worker.stepping():
                return super().optimizer_step(optimizer, exchanging_closure, model, **kwargs)
        finally:
            self._stepping = outer

    def _worker_of(self, optimizer: Optimizer) -> Worker:
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        if id(optimizer) not in self._workers:
            raise ConfigurationError(
                f"This {type(optimizer).__name__} is not one that configure_optimizers returned; strategy "
                f"{self.strategy_name!r} exchanges gradients for those only."
            )
        return self._workers[id(optimizer)]

    def _refuse_bypass(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Refuse a step that Lightning does not know of: its gradients have not been exchanged."""
        if self._stepping is None or self._stepping.optimizer is not optimizer:
            raise ConfigurationError(
                f"{type(optimizer).__name__}.step() was called past Lightning, so the gradients of the ranks were not "
                "exchanged. Call step() of what self.optimizers() returns."
            )

    @torch.no_grad()
    def _exchange(self, worker: Worker) -> None:
        """Exchange the gradients of the optimizer that steps: unscale, clip, communicate, scale."""
        optimizer, module = worker.optimizer, self.lightning_module
        assert module is not None
        if worker.is_local:  # its own gradient, in the hands of Lightning alone
            worker.exchange(reduced=self._reduced(worker))
            return
        if self._last_launch_s is not None:
            if self.root_device.type == "cpu":
                self.ledger.exposed_s += time.perf_counter() - self._last_launch_s
            self._last_launch_s = None
        if module.automatic_optimization:
            if self._num_backwards_exchanged.get(id(optimizer)) == self._num_backwards:
                # A step without a backward (the batch norm epoch of StochasticWeightAveraging): the gradients are
                # those of the last exchange. Sent again they would count twice.
                if not worker.reduces_in_backward:
                    optimizer.zero_grad(set_to_none=True)
                return
            self._num_backwards_exchanged[id(optimizer)] = self._num_backwards

        def clip() -> None:
            if not worker.reduces_in_backward and module.automatic_optimization:
                assert self._clip_gradients is not None
                trainer = module.trainer
                self._clip_gradients(
                    module,
                    optimizer,
                    trainer.gradient_clip_val,
                    gradient_clip_algorithm=trainer.gradient_clip_algorithm,
                )

        reduced, scaler = self._reduced(worker), self._scaler()
        if scaler is None:
            worker.exchange(clip=clip if self._clips() else None, reduced=reduced, num_backwards=self._num_backwards)
            return
        # A residual outlives the scale of its step, so gradients are exchanged unscaled; the plugin unscales them
        # once more. The scale is a power of two by default, which makes the round trip exact.
        scale = scaler.get_scale()
        _scale_gradients(optimizer, 1.0 / scale)
        if worker.exchange(clip=clip, reduced=reduced, skip_nonfinite=True, num_backwards=self._num_backwards):
            _scale_gradients(optimizer, scale)
        else:  # on all ranks: let the scaler of each find it, skip the step and back off
            parameter = next(p for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
            parameter.grad = torch.full_like(parameter, float("inf"))

    @override
    def _setup_model(self, model: torch.nn.Module) -> DistributedDataParallel:
        # Parameters that are frozen now and unfrozen later are not DDP's; the exchange takes care of them.
        self._reduced_by_ddp = frozenset(p for p in model.parameters() if p.requires_grad)
        return super()._setup_model(model)

    def _reduced(self, worker: Worker) -> frozenset[torch.nn.Parameter]:
        """Return the parameters whose gradients the backward pass has reduced, where it is to do so."""
        return self._reduced_by_ddp

    def _scaler(self) -> Any:
        """Return the GradScaler that is in use, if any."""
        scaler = getattr(self.precision_plugin, "scaler", None)
        return scaler if scaler is not None and scaler.is_enabled() else None

    # Clipping ---------------------------------------------------------------------------------------------------

    def _clips(self) -> bool:
        """Whether the user has asked for clipping, of Lightning or of their own."""
        module = self.lightning_module
        assert module is not None
        return bool(module.trainer.gradient_clip_val) or is_overridden("configure_gradient_clipping", module)

    def _move_clipping(self) -> None:
        """Let gradient clipping act before the exchange in the sparse phase, on this rank's own gradient.

        Clipping the result would crush elements that carry the gradients of hundreds of steps. The module's
        `configure_gradient_clipping` is called as ever, once per step; norms are multiplied by the method's factor.
        """
        plugin = self.precision_plugin
        clip_gradients, original = plugin.clip_gradients, plugin._clip_gradients

        def clip_by_the_methods_factor(
            optimizer: Any,
            clip_val: int | float = 0.0,
            gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
        ) -> None:
            worker = self._worker_of(optimizer)
            if gradient_clip_algorithm == GradClipAlgorithmType.NORM:
                clip_val = clip_val * worker.clip_factor
            clip_gradients(optimizer, clip_val, gradient_clip_algorithm)

        def clip_unless_done(model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            worker = self._worker_of(optimizer)
            if worker.reduces_in_backward or worker.is_local:
                original(model, optimizer, *args, **kwargs)

        self._clip_gradients = original
        plugin.clip_gradients = clip_by_the_methods_factor  # type: ignore[method-assign]
        plugin._clip_gradients = clip_unless_done  # type: ignore[method-assign]

    def _restore_clipping(self) -> None:
        if self._clip_gradients is not None:
            del self.precision_plugin.clip_gradients, self.precision_plugin._clip_gradients
            self._clip_gradients = None

    # Buffers ----------------------------------------------------------------------------------------------------

    def _choose_buffers(self, model: DistributedDataParallel) -> None:
        """Let DDP broadcast in each forward pass what the method says, instead of all buffers."""
        everything = list(model.modules_buffers)
        will_sync_buffers = model.will_sync_module_buffers

        def choose_then_ask() -> bool:
            model.modules_buffers = self._buffers_to_broadcast(everything)
            return will_sync_buffers()

        model.will_sync_module_buffers = choose_then_ask  # type: ignore[method-assign]

    def _buffers_to_broadcast(self, everything: list[Tensor]) -> list[Tensor]:
        """Return the buffers that rank 0 sends to all before the coming forward pass."""
        return everything

    def _buffers(self) -> dict[str, Tensor]:
        assert self.lightning_module is not None
        return dict(self.lightning_module.named_buffers())

    # Checkpoints ------------------------------------------------------------------------------------------------

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        if self._workers and "optimizer_states" in checkpoint:  # not one of weights only
            filepath = self._path_of_rank_zero(filepath)
            self._num_saves += 1  # in step on all ranks: Lightning saves on all of them
            folder = shards.folder_of(filepath)
            metadata = {
                "num_ranks": self.world_size,
                "folder": folder.replace("\\", "/").rsplit("/", 1)[-1],
                "save_id": f"{self._run_id}-{self._num_saves}",
                "method": self.method.describe()["method"],
                "nodes": self._nodes(),
            }
            shard = {
                "save_id": metadata["save_id"],
                "workers": [worker.state_dict() for worker in self.workers],
                "rng": shards.rng_state(self.root_device),
                "precision": self.precision_plugin.state_dict(),  # a GradScaler's; ranks that step alone scale alone
                "buffers": {
                    name: self._own_buffers.get(name, buffer).cpu().clone() for name, buffer in self._buffers().items()
                },
            }
            # First the shards: where the checkpoint is, this node's shards are too.
            path = shards.shard_path(folder, self.global_rank, metadata)
            self.checkpoint_io.save_checkpoint(shard, path)
            self._drop_old_shards(folder, path)
            checkpoint = {**checkpoint, shards.METADATA_KEY: metadata}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def _nodes(self) -> list[list[int]] | None:
        """Return the ranks of each node where there are two levels."""
        levels = self._hierarchy if self._hierarchy is not None and self._hierarchy.topology.num_nodes > 1 else None
        return None if levels is None else [list(node) for node in levels.topology.nodes]

    def _path_of_rank_zero(self, filepath: _PATH) -> _PATH:
        """Return where rank 0 saves: names with metrics in them differ between ranks, and only rank 0 writes the file.

        Collective: all ranks; not while an exception unwinds, where they need not all be here.
        """
        assert self.lightning_module is not None
        if self.world_size == 1 or self.lightning_module.trainer.interrupted:
            return filepath
        path = self.broadcast(filepath)
        self._saved_as[str(filepath)] = path
        return path

    def _drop_old_shards(self, folder: str, path: str) -> None:
        """Delete this rank's shards of saves to the same place, but the last: its checkpoint is still the one there."""
        written = self._shards_written.setdefault(folder, [])
        written.append(path)
        while len(written) > 2:
            with contextlib.suppress(FileNotFoundError):
                self.checkpoint_io.remove_checkpoint(written.pop(0))

    @override
    def remove_checkpoint(self, filepath: _PATH) -> None:
        super().remove_checkpoint(filepath)
        filepath = self._saved_as.pop(str(filepath), filepath)
        self._shards_written.pop(shards.folder_of(filepath), None)
        if self.local_rank == 0:  # of each node: disks need not be shared
            with contextlib.suppress(FileNotFoundError):  # another node was faster
                self.checkpoint_io.remove_checkpoint(shards.folder_of(filepath))

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self._resume_path = checkpoint_path
        return super().load_checkpoint(checkpoint_path, *args, **kwargs)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        metadata = checkpoint.get(shards.METADATA_KEY)
        if metadata is None or metadata["method"] != self.method.describe()["method"]:
            for worker in self.workers:
                worker.step = checkpoint["global_step"] // max(1, len(self.workers))
            rank_zero_info(
                f"The checkpoint was not written by this method: {type(self).__name__} starts with the "
                "weights, the optimizer and the step in it, and with nothing else."
            )
            return
        assert self._resume_path is not None
        same_ranks = metadata["num_ranks"] == self.world_size and metadata.get("nodes") == self._nodes()
        load = functools.partial(shards.load, self.checkpoint_io, self._resume_path, metadata)
        with failing_together():
            if same_ranks:
                shard, path = load(self.global_rank)
                self._shards_written[shards.folder_of(self._resume_path)] = [path]
            for number, worker in enumerate(self.workers):
                if same_ranks:
                    worker.load_state_dict(shard["workers"][number])
                else:
                    states = (load(rank)[0]["workers"][number] for rank in range(metadata["num_ranks"]))
                    worker.load_state_dict(self.method.merge_states(states))
        if same_ranks:
            self._rng_state, self._precision_state = shard["rng"], shard.get("precision")
            for name, buffer in self._buffers().items():
                if name in shard["buffers"] and buffer.shape == shard["buffers"][name].shape:
                    buffer.copy_(shard["buffers"][name])
        else:
            rank_zero_info(
                f"The checkpoint was written by {metadata['num_ranks']} ranks{_on(metadata.get('nodes'))}, "
                f"{self.world_size}{_on(self._nodes())} go on: each starts with the mean of what these had of "
                "their own."
            )

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if self._rng_state is not None:  # only now: what Lightning does before the first batch draws numbers too
            shards.set_rng_state(self._rng_state, self.root_device)
            if self._precision_state:
                self.precision_plugin.load_state_dict(self._precision_state)
            self._rng_state = self._precision_state = None


def _done(buffer: Tensor) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future


def _reduce_views(
    views: list[Tensor], reduction: Callable[[Tensor], torch.futures.Future[Tensor]]
) -> torch.futures.Future[Tensor]:
    def copy_back(future: torch.futures.Future[Tensor]) -> Tensor:
        for view, mean in zip(views, future.value().split([view.numel() for view in views]), strict=True):
            view.copy_(mean.view(view.shape))
        return future.value()

    return reduction(torch.cat([view.reshape(-1) for view in views])).then(copy_back)


def _first_value(futures: torch.futures.Future[list[torch.futures.Future[Tensor]]]) -> Tensor:
    values = [future.value() for future in futures.value()]  # raises what one of them has raised
    return values[0]


def _on(nodes: list[list[int]] | None) -> str:
    return "" if nodes is None else f" on nodes {nodes}"


def _check_keywords(strategy: type, kwargs: Mapping[str, Any]) -> None:
    classes = (strategy, DDPStrategy, DistributedDataParallel)
    known = {name for cls in classes for name in inspect.signature(cls).parameters}
    allowed = known - OWNED - UNSUPPORTED - SET_BY_LIGHTNING
    for name in kwargs:
        if name in OWNED | UNSUPPORTED:
            raise ConfigurationError(
                f"{strategy.__name__}({name}=...): this strategy has a communication hook of its own, with which "
                f"{name} does not go together. Leave it out, or use strategy='ddp'."
            )
        if name not in allowed:
            close = difflib.get_close_matches(name, allowed, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ConfigurationError(
                f"{strategy.__name__}({name}=...): unknown keyword.{hint} Allowed: {', '.join(sorted(allowed))}."
            )


def _refuse_sparse_gradients(module: torch.nn.Module) -> None:
    for name, layer in module.named_modules():
        if isinstance(layer, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and layer.sparse:
            raise ConfigurationError(
                f"{type(layer).__name__} {name!r} has sparse gradients; only dense ones are exchanged. "
                "Build it with sparse=False: what is sent is sparse all the same."
            )


def _refuse_shared_parameters(optimizers: list[Optimizer]) -> None:
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    if len({p for group in groups for p in group["params"]}) < sum(len(group["params"]) for group in groups):
        raise ConfigurationError("Two optimizers have a parameter in common: its gradient would be exchanged twice.")


def _facts_about_model(module: torch.nn.Module) -> dict[str, object]:
    return {
        f"parameter {name}": (tuple(p.shape), str(p.dtype), p.stride(), "trains" if p.requires_grad else "frozen")
        for name, p in module.named_parameters()
    }


def _facts_about_optimizers(optimizers: list[Optimizer], parameters: Mapping[str, Tensor]) -> dict[str, object]:
    names = {id(parameter): name for name, parameter in parameters.items()}
    facts: dict[str, object] = {"optimizers": [type(optimizer).__name__ for optimizer in optimizers]}
    for number, optimizer in enumerate(optimizers):
        for index, group in enumerate(optimizer.param_groups):
            prefix = f"optimizer {number}, param group {index}"
            facts[f"{prefix}, parameters"] = [names.get(id(p), tuple(p.shape)) for p in group["params"]]
            for key, value in group.items():
                if isinstance(value, PLAIN):
                    facts[f"{prefix}, {key}"] = value
    return facts


def _scale_gradients(optimizer: Optimizer, factor: float) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
