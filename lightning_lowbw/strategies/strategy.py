"""`DDPStrategy` with a method that is called at three points of a Lightning step.

1. a DDP communication hook, on gloo as well as NCCL: all-reduce during backward, or pass the gradients through;
2. the end of the wrapped closure: check for faults, clip, exchange;
3. after the step: the method's counters and averages, and the user's values back in the param groups.

Automatic and manual optimization, accumulation, several optimizers and every precision plugin go through these. Where
gradients are exchanged in every step, weights are equal on all ranks, and so are buffers where somebody looks at them.
Where weights are averaged after some steps, each rank trains alone in between and sends nothing; validation,
checkpoints and the end see the consensus.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_lowbw.arguments import code_of, shows
from lightning_lowbw.comm.agreement import agree, failing_together
from lightning_lowbw.comm.collectives import Level, TrafficLedger
from lightning_lowbw.comm.peers import Peers
from lightning_lowbw.comm.topology import TopologyChoice
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.method import Method, as_method
from lightning_lowbw.strategies import checks
from lightning_lowbw.strategies.auto_choice import OF_AUTO, AutoChoice
from lightning_lowbw.strategies.base import buffers_by_optimizer
from lightning_lowbw.strategies.callback_agreement import agree_on_weights_, weights_of
from lightning_lowbw.strategies.checkpoint import CheckpointedStrategy
from lightning_lowbw.strategies.gradient_hook import GradientHook, Reduction
from lightning_lowbw.strategies.keywords import DDP_KEYWORDS, Needs, asked_of_buffers, given_keywords
from lightning_lowbw.strategies.shared_buffers import IGNORED, SharedBuffers, choose_buffers, ignoring
from lightning_lowbw.strategies.step_hooks import clips_before_exchange
from lightning_lowbw.strategies.traffic_monitor import bring_monitor
from lightning_lowbw.strategies.uneven import Uneven
from lightning_lowbw.sync.checks import agree_on_end, plain_values
from lightning_lowbw.sync.gradient import GradientSync
from lightning_lowbw.sync.local import LocalSync
from lightning_lowbw.sync.synchronizer import Synchronizer


class Strategy(CheckpointedStrategy, DDPStrategy):
    """DDP in which a method does the communication.

    Args:
        method: when the ranks communicate, what they send, and to whom; a `Method`, such as `DGC(...)` or
            `LocalSGD(...)` return, or a mapping, as `Method.describe` does.
        topology: instead of the method's own: "flat" or, for two levels, "auto" (by the launcher and the host names), a
            number of ranks per node, the ranks of each node, or a `Topology`.
        resume: what ``fit(ckpt_path=...)`` loads: "exact" also the folder beside the ``.ckpt``, which has each rank's
            own state; "weights and optimizer" the ``.ckpt`` alone, as when the folder is lost, or residuals do not fit
            another method.
        **kwargs: keyword arguments of Lightning's `DDPStrategy` and of torch's `DistributedDataParallel`, checked
            against their signatures.

    Attributes:
        method: the configuration; see `reconfigure`.
        ledger: the traffic of this rank since the start of the fit.

    Raises:
        ConfigurationError: a value is out of range, or a keyword is unknown or cannot be combined with a communication
            hook.

    Examples:
        >>> from lightning_lowbw import LocalSGD
        >>> Strategy(LocalSGD(k_steps=4), topology=2)
        Strategy(Method(when=EveryK(k_steps=4), where=Where(topology=2)))
    """

    _candidates: Sequence[str] = OF_AUTO  # of what is chosen in place of "auto"
    _reports = False  # whether it brings a TrafficMonitor
    _needs_ranks = True  # whether there is nothing to communicate with one rank

    @shows(DDP_KEYWORDS)
    def __init__(
        self,
        method: Mapping[str, Any] | Method,
        *,
        topology: TopologyChoice | None = None,
        resume: Needs = "exact",
        **kwargs: Any,
    ) -> None:
        super().__init__(**given_keywords(type(self), kwargs))
        self.method = as_method(method, topology)
        self.ledger = TrafficLedger()
        self._options = {"resume": resume}
        self._workers = {}
        self._reduced_by_ddp: frozenset[torch.nn.Parameter] = frozenset()
        self._make_parts()
        self._check_method()

    @override
    def _make_parts(self) -> None:
        super()._make_parts()
        self.peers = self._worker_peers = Peers()
        self.buffers = SharedBuffers(asked_of_buffers(self._ddp_kwargs))
        self.uneven = Uneven()
        self.auto = AutoChoice(self._candidates)
        self._hook = GradientHook()
        self._begin_state()

    def _check_method(self) -> None:
        """Raise ConfigurationError where the method does not go together with another argument."""
        if not self.method.averages_weights:
            return
        if asked_of_buffers(self._ddp_kwargs):
            raise ConfigurationError(
                "broadcast_buffers=True (or forward_sync_buffers=True) sends the buffers of rank 0 in every forward "
                "pass; local SGD averages them with the parameters. Leave it out."
            )
        if self._ddp_kwargs.get("static_graph"):
            raise ConfigurationError(
                "static_graph=True: DDP learns the graph in steps that it reduces, and local steps are not. Leave it "
                "out."
            )

    def __repr__(self) -> str:
        defaults = inspect.signature(type(self)).parameters | inspect.signature(Strategy).parameters
        chosen = {name: value for name, value in self._options.items() if value != defaults[name].default}
        options = [f"{name}={value!r}" for name, value in {**chosen, **plain_values(self._ddp_kwargs)}.items()]
        return f"{type(self).__name__}({', '.join([code_of(self.method), *options])})"

    # Setting up -------------------------------------------------------------------------------------------------

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if self.trainer.state.fn == TrainerFn.FITTING:
            self._agree_on_fit(plain_values(self._ddp_kwargs))

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            # Each may have a path of its own; that they are of one save is compared where the shards are loaded.
            found = "a checkpoint" if trainer.ckpt_path else "no checkpoint"
            agree("fit's ckpt_path ('last' finds what is on a rank's own disk)", {"ckpt_path": found})
            self._check_trainer(trainer)
            self.ledger = TrafficLedger()
            self._workers.clear()
            self.signals.begin_fit()
            self._begin_state()
            super().setup(trainer)
            self._make_workers()
            checks.check_optimizers(self.optimizers, list(trainer.lightning_module.named_parameters()))
            if self.world_size > 1 or not self._needs_ranks:
                self._guard.watch(trainer.lightning_module)
            self._begin_checkpoints()
            self._clipping.install(self.precision_plugin, self.worker_of, self._check_clipping, self._end_hooks)
            if self._reports:
                bring_monitor(trainer)
            if self.world_size == 1 and self._needs_ranks:
                rank_zero_warn(
                    f"{type(self).__name__} with one rank: there is no other rank to communicate with, so this trains "
                    "as without it. Set Trainer(devices=..., num_nodes=...) for more."
                )
        else:
            self.buffers.begin(trainer.lightning_module, is_fit=False)
            with ignoring(trainer.lightning_module, self.buffers.layout.apart):
                super().setup(trainer)
        self._insert_first_callback(trainer)

    def _check_trainer(self, trainer: pl.Trainer) -> None:
        """Raise ConfigurationError if a setting of the Trainer does not go together with averages of weights."""
        if not self.method.averages_weights:
            return
        if self._layer_sync is not None:
            raise ConfigurationError(
                "Trainer(sync_batchnorm=True) communicates in every forward pass, and local SGD must send nothing "
                "between averages, which include batch norm's statistics. Leave it out."
            )
        if any(each._prune_on_train_epoch_end for each in checks.callbacks_of(trainer, ModelPruning)):
            raise ConfigurationError(
                "ModelPruning(prune_on_train_epoch_end=True): at the end of an epoch each rank has weights of its own, "
                "and would prune others. Give prune_on_train_epoch_end=False, which prunes the consensus after each "
                "validation, or a method that exchanges gradients, such as 'dgc'."
            )
        if getattr(trainer, "_val_check_time_interval", None) is not None:  # since Lightning 2.6
            raise ConfigurationError(
                "Trainer(val_check_interval=...) is a time, and each rank has a clock of its own: between averages one "
                "would validate while others train on. Give a number of batches."
            )

    @override
    def _begin_state(self) -> None:
        super()._begin_state()
        self._has_stepped = True  # since the last batch; what follows is not accumulated to it
        self._has_equal_epochs = False
        self.auto.begin_fit()

    @property
    @override
    def _equals(self) -> Peers:
        return Peers(None, self.ledger)

    @override
    def _make_workers(self, kept: Mapping[int, Synchronizer] = MappingProxyType({})) -> None:
        module, optimizers = self.lightning_module, self._trained_optimizers
        assert module is not None
        named_parameters = list(module.named_parameters())
        with failing_together():
            buffers = buffers_by_optimizer(module, optimizers) if self.method.averages_weights else {}
            for optimizer in optimizers:
                key = id(optimizer)
                if key in kept:
                    self._workers[key] = kept[key]
                    continue
                worker = self._workers[key] = self._make_worker(optimizer, named_parameters, buffers.get(key))
                if isinstance(worker, LocalSync):
                    worker.buffers.layout.told = self.buffers.layout.told

    def _make_worker(
        self, optimizer: Optimizer, named_parameters: list[tuple[str, torch.nn.Parameter]], buffers: Any
    ) -> Synchronizer:
        return self.method.make_synchronizer(optimizer, named_parameters, self._worker_peers, buffers)

    def adopt(self, method: Method) -> None:
        """Continue with another method that exchanges gradients, after a step that has left no residuals.

        Collective: all ranks, which have chosen the same.
        """
        before = self.workers
        self.signals.settle()  # a rank repeats its request
        self.method = method
        self._workers.clear()
        self._make_workers()
        for worker, old in zip(self.workers, before, strict=True):
            worker.inherit(old, ())

    @override
    def configure_ddp(self) -> None:
        assert self.model is not None
        checks.check_model(
            self.model,
            compares_weights=self._ddp_kwargs.get("init_sync") is False,
            takes_sparse=self.world_size > 1 and not self.method.exchanges_gradients,
        )
        self._make_peers(self._ddp_kwargs.get("process_group"))
        # Parameters that are frozen now and unfrozen later are not DDP's; the exchange takes care of them.
        self._reduced_by_ddp = frozenset(p for p in self.model.parameters() if p.requires_grad)
        module = self.trainer.lightning_module
        self.buffers.begin(module, is_fit=True)
        with ignoring(module, self.buffers.layout.apart):
            super().configure_ddp()
        level: Level | None = "inter" if self.peers.is_two_level else None
        if self.world_size > 1:
            choose_buffers(self._ddp, self.buffers, lambda: self._buffers_to_broadcast(), self.ledger, level)

    def _make_peers(self, group: dist.ProcessGroup | None) -> None:
        """Find out which ranks share a node, and make the process groups.

        Collective: all ranks, blocking.

        Raises:
            ConfigurationError, DisagreementError: on all ranks; the topology does not fit the world.
        """
        method, name = self.method, type(self).__name__
        self.peers = self._worker_peers = method.make_peers(group, ledger=self.ledger, timeout=self._timeout)
        topology = self.peers.topology
        if topology is not None:
            rank_zero_info(f"{name}: nodes {', '.join(str(list(node)) for node in topology.nodes)}.")
        if method.where.topology != "flat" and self.peers.num_ranks > 1 and not self.peers.is_two_level:
            ranks = "one rank on each node" if topology is None else "all ranks are on one node"
            rank_zero_warn(
                f"{name}, topology={method.where.topology!r}: {ranks}, so there is one level only, and this trains as "
                f"{'with topology=' + repr('flat') if topology is None else 'DDP'}."
            )
        if method.hides_averages:
            self._worker_peers = method.make_peers(group, ledger=self.ledger, timeout=self._timeout, is_hidden=True)

    @property
    def _ddp(self) -> DistributedDataParallel:
        """The model, in a fit."""
        assert isinstance(self.model, DistributedDataParallel)
        return self.model

    @override
    def _register_ddp_hooks(self) -> None:
        assert self.lightning_module is not None
        is_manual = not self.lightning_module.automatic_optimization
        self._hook.register(self._ddp, self.peers, is_manual=is_manual)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self.signals.defer(self.trainer)
        self._agree_on_states(self.workers)
        self._start_workers(self.world_size, measures=self.auto.is_open(self.method))
        if not self.replicas:
            self._has_equal_epochs = checks.agree_on_length(self.trainer)
            self.auto.begin_training(self.method, self.workers, self.trainer, is_search=self.is_search(self.trainer))
        elif self.world_size > 1:
            self.uneven.begin_training(self.trainer)
            for worker in self.replicas:
                worker.begin_local()
            self._choose_backward_sync()

    @override
    def _begin_renewed(self) -> None:
        self._prepare_workers(self.world_size, measures=self.auto.is_open(self.method))
        for worker in self.replicas if self.world_size > 1 else ():
            worker.begin_local()
        self.auto.begin_renewed()
        self._choose_backward_sync()

    @override
    def teardown(self) -> None:
        if self.is_consensus_shown and not self.is_interrupted:  # a resume with no batch left to train
            self._keep_consensus()
        self.peers.close()
        self._worker_peers.close()
        self._hook.release()
        super().teardown()

    # The step ---------------------------------------------------------------------------------------------------

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if self.replicas:
            if self.world_size > 1:
                self.uneven.begin_batch(self.trainer, self.replicas)
                self._choose_backward_sync()  # Lightning turns it on after each training_step of manual optimization
            return
        if self.buffers.is_check_due:
            self.buffers.compare(self.trainer.lightning_module, self.root_device)
        self._choose_backward_sync()
        self._hook.is_timing = self.auto.is_timing
        if self.trainer.lightning_module.automatic_optimization and not self._ddp.require_backward_grad_sync:
            # DDP then also leaves out its broadcast of buffers in the next forward pass, as while accumulating. In
            # manual optimization Lightning's DDP broadcasts none.
            self._ddp.require_forward_param_sync = self._has_stepped
        self._has_stepped = False

    def _choose_backward_sync(self) -> None:
        """Let DDP fill no buckets and search for no unused parameters where it reduces nothing."""
        ddp, averages = self._ddp, bool(self.replicas)
        if averages and ddp.require_backward_grad_sync and not all(each.reduces_in_backward for each in self.workers):
            # DDP would rebuild its buckets, with a broadcast, in the next forward pass; now all ranks are here.
            ddp.reducer._rebuild_buckets()
        # Optimizers in different phases, as when one steps less often, reduce their own gradients before they step.
        reductions = {self._reduction_of(worker) for worker in self.workers} or {"all"}
        self._hook.reduction = reductions.pop() if len(reductions) == 1 else None
        ddp.require_backward_grad_sync = bool(ddp.static_graph) or self._hook.reduction is not None

    def _reduction_of(self, worker: Synchronizer) -> Reduction | None:
        """Return over which ranks DDP may reduce a worker's gradients in the coming step.

        Not inside the node if it would search for unused parameters, which communicates with all ranks; then the worker
        takes the mean of the node.
        """
        if worker.reduces_in_backward:
            return "all"
        return "node" if worker.reduces_in_node and not self._ddp.find_unused_parameters else None

    @property
    def _is_compressed(self) -> bool:
        """Whether gradients of the coming step are not sent whole."""
        return any(not worker.reduces_in_backward for worker in self.workers)

    def _buffers_to_broadcast(self) -> list[str]:
        """Return the names of the buffers that rank 0 sends to all before the coming forward pass."""
        if self.replicas and not any(each.reduces_in_backward for each in self.workers):
            return []
        return self.buffers.to_broadcast(is_compressed=self._is_compressed and not self.replicas)

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        super().pre_backward(closure_loss)
        for worker in self.replicas:
            worker.observe_loss(closure_loss.detach())

    @override
    def _end_closure(self, worker: Synchronizer) -> None:
        self._has_stepped = True
        super()._end_closure(worker)

    @override
    def _exchange_unscaled(self, worker: Synchronizer, *, is_after_hooks: bool = False) -> None:
        self.ledger.exposed_s += self._hook.wait_s()
        super()._exchange_unscaled(worker, is_after_hooks=is_after_hooks)

    @override
    def _exchange(self, worker: Synchronizer, skip_nonfinite: bool = False) -> bool:
        """Check for faults, clip, exchange; return whether the step is to be taken."""
        reduced = self._reduced_by_ddp if self._has_reduced(worker) else frozenset()
        self._hook.forget(worker.params)
        worker.list_gradients(reduced=reduced)
        clips = clips_before_exchange(worker, self.trainer)
        # Clipping spreads a NaN, and a step that is skipped must leave the residuals as they are. In all other steps
        # `exchange` checks, in the pass that accumulates the gradients; here it would read all of them once more.
        if clips or skip_nonfinite:
            worker.check_gradients()
        if clips:
            self._clipping.clip(self.trainer, worker.optimizer)
        applies = not (
            worker.reduces_in_backward  # then the optimizer steps
            or skip_nonfinite
            or self._guard.is_gradient_seen(self.trainer, worker.optimizer)
        )
        is_taken = worker.exchange(skip_nonfinite=skip_nonfinite, applies=applies)
        if is_taken and not skip_nonfinite:  # else in `optimizer_step`
            worker.step_exchanged()
        return is_taken

    def _has_reduced(self, worker: Synchronizer) -> bool:
        """Return whether the gradients of the coming step are means already: not after a plain `loss.backward()`."""
        if self._reduction_of(worker) is None:
            return False
        is_automatic = self.trainer.lightning_module.automatic_optimization
        return is_automatic or self._hook.have_reduced(self._reduced_by_ddp.intersection(worker.parameters()))

    @override
    def _has_mean(self, worker: Synchronizer) -> bool:
        return worker.reduces_in_backward and self._has_reduced(worker)

    @override
    def _end_step(self, worker: Synchronizer) -> None:
        """Read what other ranks request, and prepare the next step."""
        if isinstance(worker, LocalSync):
            if self.world_size > 1 and worker.has_met:
                self.signals.read_requests(worker, self.trainer)
                self.uneven.end_step(self.trainer, worker)
        else:
            self.signals.end_step(worker, self.trainer)
            method = self.auto.end_step(worker, self.workers, self.trainer)
            if method is not None:
                self.adopt(method)
                self._start_workers(self.world_size)
            if self.trainer.lightning_module.automatic_optimization:  # else Lightning's DDP broadcasts none
                self.buffers.note_step(worker.step, is_compressed=self._is_compressed)
        self._choose_backward_sync()  # in manual optimization the next backward pass is of the same batch

    # What the first callback calls ------------------------------------------------------------------------------

    @override
    def begin_epoch(self) -> None:
        """Begin an epoch, whose data may have changed."""
        if self.replicas:
            self.uneven.begin_epoch(self.trainer, self.replicas)
        elif self._has_equal_epochs:  # before a step: schedulers may have followed what an epoch's end has logged
            checks.agree_on_hyperparameters(self.trainer)

    @override
    def end_batch(self) -> None:
        """Save if it was requested, and let a rank whose data have ended begin them anew."""
        if self.replicas:
            self.uneven.end_batch(self.trainer)
        self.signals.save_if_due(self.trainer)

    @override
    def show_consensus(self) -> None:
        """Put what is equal on all ranks into the model, until the next batch, or the end of a save."""
        module = self.lightning_module
        if not self.replicas:
            is_fit = self._workers or (module is not None and self.trainer.state.fn == TrainerFn.FITTING)
            if is_fit and not self._is_fit_over:
                self.buffers.share_(self.trainer.lightning_module, self.ledger, self.root_device)
            return
        if module is None or module._trainer is None or self.is_consensus_shown:
            return
        if self.is_interrupted or self._is_fit_over:  # others may be elsewhere: each keeps its own weights
            if not all(worker.parameters_agree for worker in self.replicas):
                rank_zero_warn("The training was interrupted between two averages: these are the weights of rank 0.")
            return
        self._agree_on_averages()
        self._show_mean()

    def _agree_on_averages(self) -> None:
        """Average over ranks what callbacks have averaged over steps: they are validated and saved."""
        for callback in checks.callbacks_of(self.trainer, *checks.AVERAGING):
            average = getattr(callback, "_average_model", None)  # not before it begins
            if average is not None:
                agree_on_weights_(weights_of(average, self._equals), self._equals, self.root_device)

    @override
    def end_epoch(self) -> None:
        """Agree on monitored metrics."""
        if self.replicas:
            self.uneven.end_epoch(self.trainer)
            self.agree_on_metrics()
        elif self._has_equal_epochs:  # else the others may be in a step
            self.agree_on_metrics()
            self.show_consensus()

    @override
    def leave_consensus(self) -> None:
        if self.replicas:
            super().leave_consensus()

    # The end, validation and checkpoints ------------------------------------------------------------------------

    @override
    def on_train_end(self) -> None:
        if self.replicas:
            agree_on_weights_(weights_of(self.trainer.lightning_module, self._equals), self._equals, self.root_device)
        else:
            self.signals.settle()
            self._check_late_faults()
            checks.agree_on_hyperparameters(self.trainer)
            self._check_unowned()
            ignored = getattr(self.trainer.lightning_module, IGNORED, ())
            for worker in self.workers:
                own = {name: parameter for name, parameter in worker.by_name().items() if name not in ignored}
                agree_on_end(worker.step, own, None)
                if isinstance(worker, GradientSync):  # of a node's velocities each rank has had a part
                    for parameter, velocity in worker.whole_momentum().items():
                        worker.optimizer.state[parameter][worker.correction.velocity_key] = velocity
            self.show_consensus()
            self.auto.end_training(type(self).__name__)
        super().on_train_end()

    @override
    def _check_late_faults(self) -> None:
        for worker in self.workers:
            if isinstance(worker, GradientSync) and not (self._is_fit_over or self.is_interrupted):
                worker.check_late_faults()

    @override
    def on_validation_end(self) -> None:
        super().on_validation_end()
        if not self.method.averages_weights:
            self.auto.restart_clock(self.ledger)
        elif is_overridden("on_validation_model_eval", self.trainer.lightning_module):
            self._hide_mean()  # its counterpart takes out what was put in before the consensus was shown

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        module = self.lightning_module
        trainer = None if module is None else module._trainer
        self._renew_before_save()
        if not self.replicas:
            self._check_late_faults()
        elif trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            self.show_consensus()
            if not self._is_fit_over:
                self._agree_on_weights()
        return self._copied(super().lightning_module_state_dict())

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return it with whole velocities, of which each rank of a node keeps a part: any strategy resumes from it.

        Collective: the ranks of a node; all, where the optimizer shards its state, which rank 0 then gathers.
        """
        if self._is_out_of_reach:
            return {}
        state: dict[str, Any] = super().optimizer_state(optimizer)
        worker = self._workers.get(id(getattr(optimizer, "optimizer", optimizer)))
        if self.is_interrupted or self._is_fit_over or not isinstance(worker, GradientSync):
            return state
        whole = worker.whole_momentum()
        if not whole:  # of an optimizer that shards its state Lightning returns nothing but on rank 0
            return state
        entries = dict(state["state"])  # new dictionaries: those of the state are the optimizer's own
        for index, parameter in enumerate(p for group in worker.optimizer.param_groups for p in group["params"]):
            if parameter in whole:
                entries[index] = {**entries.get(index, {}), worker.correction.velocity_key: whole[parameter]}
        return {**state, "state": entries}

    @property
    def _is_out_of_reach(self) -> bool:
        """Whether other ranks have parts of the optimizer's state, and cannot be asked while an exception unwinds."""
        return self.is_interrupted and any(hasattr(each.optimizer, "consolidate_state_dict") for each in self.workers)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        if self._is_out_of_reach and "optimizer_states" in checkpoint:
            rank_zero_warn(
                f"{filepath} is not written: an exception has ended the training of this rank, and the optimizer's "
                "state is shared between all ranks. Go on from the checkpoint before."
            )
            return
        self._save(checkpoint, filepath, functools.partial(super().save_checkpoint, storage_options=storage_options))
        if not self.method.averages_weights:
            self.auto.restart_clock(self.ledger)
        elif not self._is_evaluated:
            self._hide_mean()

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        self._load_shards(checkpoint, self.trainer.ckpt_path)

    @property
    @override
    def _nodes(self) -> list[list[int]] | None:
        topology = self.peers.topology  # also of a single node, which has other state than flat ranks
        return None if topology is None else [list(node) for node in topology.nodes]

    @override
    def _chosen(self) -> Mapping[str, Any] | None:
        return self.auto.state_dict()

    @override
    def _load_chosen(self, chosen: Mapping[str, Any] | None) -> None:
        method = self.auto.load_state_dict(chosen, self.method)
        if method is not None:
            self.adopt(method)

    @override
    def _own_buffers(self, buffers: dict[str, Tensor]) -> dict[str, Tensor]:
        return super()._own_buffers(buffers) if self.replicas else self.buffers.own(buffers)

    @override
    def _shard(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        return {**super()._shard(metadata), "unequal_buffers": self.buffers.unequal}

    @property
    @override
    def _apart(self) -> frozenset[str]:
        return super()._apart | self.buffers.layout.apart

    @override
    def _restore(self, shard: Mapping[str, Any]) -> None:
        super()._restore(shard)
        self.buffers.unequal = shard["unequal_buffers"]
        self.buffers.layout.leave_out(shard.get("apart", ()))
        if not self.trainer.lightning_module.automatic_optimization:  # of a fit the first forward pass alone broadcasts
            self._ddp.require_forward_param_sync = False
