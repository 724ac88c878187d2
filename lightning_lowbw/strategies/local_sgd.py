"""`Trainer(strategy="local_sgd")` and its kin: ranks train alone and average their weights, as a Lightning strategy.

Between two averages no collective is issued at all: neither by DDP (no reduction, no broadcast of buffers, no bitmap of
unused parameters), nor by Lightning (its broadcast of SIGTERM before every batch, its timers).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.callbacks import Callback, Checkpoint, EarlyStopping, ModelCheckpoint, Timer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_lowbw.engine.protocol import Worker
from lightning_lowbw.engine.replicas import AUTO, InnerMomentum, LocalSGD, LocalSGDWorker
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.ops.reference import as_real
from lightning_lowbw.strategies.base import LowBandwidthStrategy
from lightning_lowbw.what.outer import OuterName
from lightning_lowbw.what.top_k import Compression, as_compression
from lightning_lowbw.when.adaptive import FIRST_LR_DECAY, Rule
from lightning_lowbw.where.agreement import checksum
from lightning_lowbw.where.audit import CollectiveAudit
from lightning_lowbw.where.collectives import Exchange
from lightning_lowbw.where.hierarchy import Hierarchy, TopologyChoice
from lightning_lowbw.where.mean import MeanInFlight

Uneven = Literal["finish", "stop"]


class LocalSGDStrategy(LowBandwidthStrategy):
    """Step on this rank's own gradient; average parameters and buffers after every k-th step.

    Validation, checkpoints and the end of the fit see the consensus, the mean of the replicas; looking does not change
    the training. A ``.ckpt`` holds the consensus, the weights of each rank are beside it. Metrics that a
    `ModelCheckpoint`, an `EarlyStopping` or a scheduler monitors are averaged over ranks. Gradient clipping and AMP
    act on each rank alone. SIGTERM on any rank ends all of them at the next average.

    Args:
        k_steps: local steps between two averages. 1 is DDP.
        begin_step: synchronous steps (as DDP) before the first local one: a number of steps, a fraction of the run
            (float between 0 and 1), or "first_lr_decay".
        outer: "none", "slowmo" or "nesterov" (DiLoCo): what is done with the mean.
        outer_lr: by default 1 for "slowmo", 0.7 for "nesterov".
        outer_momentum: by default 0.5 for "slowmo", 0.9 for "nesterov".
        inner_momentum: an average leaves the optimizer's momentum "local", takes the "average", or does a "reset".
        delay_steps: local steps that hide an average: it is applied that many steps after it was begun, with the
            progress made meanwhile kept. "auto" measures how many that takes.
        num_fragments: the parameters are averaged in so many parts, at different steps (streaming): the peak of the
            traffic is divided by it.
        mixing: the share of its own weights that a rank keeps when a delayed average lands; None keeps the progress.
        value_dtype: "float32"; "bfloat16" or "float16" halve the bytes, with error feedback.
        compression: None, or a `Compression` (or a mapping of its arguments): only the largest elements of what the
            local steps have done are sent, in few bits, with error feedback (SparseLoCo).
        uneven: what ranks do that have more batches than others in an epoch: "finish" them, or "stop" at the next
            average. Replicas are then weighted by samples, and averaged at the end of each epoch.
        audit: fail where a collective is issued between two averages, and name it. Costs a look per step.
        topology: "flat", or two levels: "auto" (asks the launcher and the host names), a number of ranks per node, the
            ranks of each node, or a `Topology`. The ranks of a node then step together, on the mean of their gradients,
            and nodes are averaged after every k-th step.
        node_k_steps: above 1: on two levels the ranks of a node step alone, too, and average after so many steps.
        **kwargs: keyword arguments of Lightning's `DDPStrategy` and of torch's `DistributedDataParallel`.

    Raises:
        ConfigurationError: a value is out of range, or a keyword unknown.

    Source: as `lightning_lowbw.engine.replicas`.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> strategy = LocalSGDStrategy(k_steps=8, begin_step="first_lr_decay")
        >>> trainer = Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False, barebones=True)
    """

    strategy_name = "local_sgd"
    presets = {  # noqa: RUF012 - of the class, never written
        "local_sgd": {},
        "post_local_sgd": {"begin_step": FIRST_LR_DECAY},
        "diloco": {"k_steps": 100, "begin_step": 0, "outer": "nesterov"},
        "streaming_diloco": {
            "k_steps": 100,
            "begin_step": 0,
            "outer": "nesterov",
            "num_fragments": 4,
            "delay_steps": AUTO,
            "mixing": 0.5,
        },
        "sparse_loco": {"k_steps": 15, "begin_step": 0, "compression": Compression()},
    }
    method: LocalSGD

    def __init__(
        self,
        k_steps: int = 8,
        begin_step: int | float | str = 1,
        *,
        outer: OuterName = "none",
        outer_lr: float | None = None,
        outer_momentum: float | None = None,
        inner_momentum: InnerMomentum = "local",
        delay_steps: int | str = 0,
        num_fragments: int = 1,
        mixing: float | None = None,
        value_dtype: str = "float32",
        compression: Compression | Mapping[str, Any] | None = None,
        uneven: Uneven = "finish",
        audit: bool = False,
        topology: TopologyChoice = "flat",
        node_k_steps: int = 1,
        **kwargs: Any,
    ) -> None:
        method = LocalSGD(
            k_steps=k_steps,
            begin_step=begin_step,
            outer=outer,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            inner_momentum=inner_momentum,
            delay_steps=delay_steps,
            num_fragments=num_fragments,
            mixing=mixing,
            value_dtype=value_dtype,
            compression=as_compression(compression),
            node_k_steps=node_k_steps,
        )
        self._set_up(method, uneven, audit, topology, kwargs)

    def _set_up(
        self, method: LocalSGD, uneven: Uneven, audit: bool, topology: TopologyChoice, kwargs: dict[str, Any]
    ) -> None:
        if topology == "flat" and method.node_k_steps != 1:
            raise ConfigurationError(
                f"node_k_steps={method.node_k_steps} averages inside nodes: give a topology, such as 'auto'."
            )
        if uneven not in get_args(Uneven):
            raise ConfigurationError(f"uneven={uneven!r}: choose one of {', '.join(get_args(Uneven))}.")
        if not isinstance(audit, bool):
            raise ConfigurationError(f"audit={audit!r}: give True or False.")
        if kwargs.get("broadcast_buffers"):
            raise ConfigurationError(
                "broadcast_buffers=True sends the buffers of rank 0 in every forward pass; local SGD averages them "
                "with the parameters. Leave it out."
            )
        super().__init__(method, topology=topology, **kwargs)
        self._uneven_policy = uneven
        self._is_uneven = False
        self._has_ended_epoch = False
        self._val_check_batch: float | None = None  # the trainer's, in an epoch that was cut short
        self._audit = CollectiveAudit() if audit else None
        self._averages: Hierarchy | None = None
        self._may_communicate = True  # in this batch: callbacks that ask the other ranks may do so
        self._replaced: list[tuple[Any, str]] = []  # attributes of Lightning's objects, to be restored
        self._save_is_due = False
        self._is_showing = False
        self._losses: list[Tensor] = []  # since the last step of any optimizer
        self._looks = _Looks(self)

    @override
    def _forget_last_fit(self) -> None:
        super()._forget_last_fit()
        self._averages = None
        self._losses.clear()
        self._is_showing = self._has_ended_epoch = self._save_is_due = False
        self._val_check_batch = None

    @property
    def _local_workers(self) -> list[LocalSGDWorker]:
        return [worker for worker in self.workers if isinstance(worker, LocalSGDWorker)]

    # Setting up -------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if self._layer_sync is not None and trainer.state.fn == TrainerFn.FITTING:
            raise ConfigurationError(
                "Trainer(sync_batchnorm=True) communicates in every forward pass, and local SGD is to send nothing "
                "between averages, which take in batch norm's statistics. Leave it out."
            )
        super().setup(trainer)
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        if self._workers and self.world_size > 1 and self._looks not in callbacks:
            callbacks.insert(0, self._looks)  # the first to be called: all others see what it shows

    @override
    def _make_hierarchy(self) -> Hierarchy | None:
        hierarchy = super()._make_hierarchy()
        if hierarchy is not None and self.method.delay_steps:
            # A lane of its own: the gradients of the steps that hide an average do not wait for it.
            topology, algorithm = hierarchy.topology, hierarchy.algorithm
            self._averages = Hierarchy(topology, algorithm, None, self.ledger, "averages")
        return hierarchy

    @override
    def _attach(
        self, optimizer: Optimizer, named_parameters: list[tuple[str, Parameter]], exchange: Exchange
    ) -> LocalSGDWorker:
        assert self.lightning_module is not None
        buffers = _buffers_by_optimizer(self.lightning_module, self.optimizers)[id(optimizer)]
        if self._averages is not None:
            exchange = dataclasses.replace(exchange, hierarchy=self._averages)
        return self.method.attach(optimizer, named_parameters, exchange, buffers)

    @override
    def teardown(self) -> None:
        self._restore()
        module = self.lightning_module
        trainer = None if module is None else module._trainer
        if trainer is not None and self._looks in trainer.callbacks:  # type: ignore[attr-defined]
            trainer.callbacks.remove(self._looks)  # type: ignore[attr-defined]
        if self._averages is not None:
            self._averages.close()
        super().teardown()

    @override
    def on_train_start(self) -> None:
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        self._resolve_begin(trainer)
        super().on_train_start()
        if self.world_size == 1:
            return
        self._restore()
        self._warn_if_never_local(trainer)
        self._agree_on_data(trainer)
        self._defer_sigterm(trainer)
        self._defer_timers(trainer)
        for worker in self._local_workers:
            worker.begin_local()
        self._choose_backward_sync()
        if self._audit is not None:
            levels = (self._hierarchy, self._averages)
            self._audit.install(ignoring=[group for level in levels if level is not None for group in level.groups])

    def _resolve_begin(self, trainer: pl.Trainer) -> None:
        """Turn a fraction of the run into a step."""
        begin = self.method.begin_step
        if not isinstance(begin, float):
            return
        try:
            num_steps = trainer.estimated_stepping_batches
        except MisconfigurationException:
            num_steps = math.inf
        if not math.isfinite(num_steps):
            raise ConfigurationError(
                f"begin_step={begin} of a run whose number of steps is not known: give a number of steps."
            )
        self.reconfigure(dataclasses.replace(self.method, begin_step=round(begin * num_steps)))
        rank_zero_info(f"{self.strategy_name}: synchronous up to step {self.method.begin_step} of {num_steps:.0f}.")

    def _warn_if_never_local(self, trainer: pl.Trainer) -> None:
        begin = self.method.begin_step
        if (
            begin == FIRST_LR_DECAY
            and not trainer.lr_scheduler_configs
            and trainer.lightning_module.automatic_optimization
        ):
            rank_zero_warn(
                f"begin_step={begin!r}, and the module has no learning-rate scheduler: the rate never falls, so this "
                "trains as DDP. Give a number of steps or a fraction of the run."
            )
        elif isinstance(begin, int) and not self.method.schedule.is_always_synchronous:
            with contextlib.suppress(MisconfigurationException):  # the number of steps cannot be known
                num_steps = trainer.estimated_stepping_batches
                if begin >= num_steps:
                    rank_zero_warn(
                        f"This run has {num_steps:.0f} optimizer steps, and the first {begin} are synchronous "
                        f"(begin_step): it trains as DDP. Let the local phase begin earlier, or train longer."
                    )
                elif begin + self.method.k_steps // self.method.num_fragments > num_steps:
                    rank_zero_warn(
                        f"This run has {num_steps:.0f} optimizer steps, and with begin_step={begin}, "
                        f"k_steps={self.method.k_steps} it is over before the first average: each rank trains alone, "
                        "and only the end is averaged. Give a smaller k_steps, or train longer."
                    )

    def _restore(self) -> None:
        """Undo what `on_train_start` has replaced; a tuner in a callback starts the training twice."""
        if self._audit is not None:
            self._audit.uninstall()
        while self._replaced:
            owner, name = self._replaced.pop()
            vars(owner).pop(name, None)

    def _replace(self, owner: Any, name: str, value: Callable[..., Any]) -> None:
        setattr(owner, name, value)
        self._replaced.append((owner, name))

    def _defer_sigterm(self, trainer: pl.Trainer) -> None:
        """Let a SIGTERM, and SLURM's signal to save and requeue, wait for the next average, where all hear of it.

        Lightning (2.6) broadcasts before every batch whether rank 0 got a SIGTERM, which keeps all ranks in
        lock-step; and again in the signal handler, where nobody listens.
        """
        loop = trainer.fit_loop.epoch_loop
        if hasattr(loop, "_broadcast_sigterm_tensor"):
            self._replace(loop, "_broadcast_sigterm_tensor", lambda: None)
        connector = trainer._signal_connector

        def request_stop(signum: int, frame: Any) -> None:
            for worker in self._local_workers:
                worker.stop_requested = True

        def request_save(signum: int, frame: Any) -> None:
            for worker in self._local_workers:
                worker.save_requested = True

        if threading.current_thread() is not threading.main_thread():
            return
        deferred = {connector._sigterm_notifier_fn: request_stop, connector._slurm_sigusr_handler_fn: request_save}
        if connector.received_sigterm:  # on this rank, before there was anybody to tell
            connector.received_sigterm = False
            request_stop(signal.SIGTERM, None)
        for signum in signal.valid_signals():
            handlers = getattr(signal.getsignal(signum), "signal_handlers", [])
            handlers[:] = [deferred.get(each, each) for each in handlers]

    def _defer_timers(self, trainer: pl.Trainer) -> None:
        """Let callbacks that ask rank 0 for the time after every batch do so after an average only."""
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if self._audit is not None and isinstance(callback, Checkpoint):
                hook = functools.partial(self._as_a_look, callback.on_train_batch_end)
                self._replace(callback, "on_train_batch_end", hook)
            saves_by_time = isinstance(callback, ModelCheckpoint) and callback._train_time_interval is not None
            saves_by_step = isinstance(callback, ModelCheckpoint) and callback._every_n_train_steps > 0
            if self._is_uneven and (isinstance(callback, Timer) or saves_by_time or saves_by_step):
                raise ConfigurationError(
                    f"{type(callback).__name__} by time or by step needs all ranks in mid-epoch, and some have fewer "
                    "batches than others. Let it act at the end of an epoch, or make the data even."
                )
            if isinstance(callback, Timer) or saves_by_time:
                hook = functools.partial(self._if_communicating, callback.on_train_batch_end)
                self._replace(callback, "on_train_batch_end", hook)

    def _as_a_look(self, hook: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        assert self._audit is not None
        with self._audit.allowing():
            hook(*args, **kwargs)

    def _if_communicating(self, hook: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if self._may_communicate:
            hook(*args, **kwargs)

    # The step ---------------------------------------------------------------------------------------------------

    def _choose_backward_sync(self) -> None:
        """Let DDP reduce in synchronous steps, on two levels inside the node in local ones, and else do nothing."""
        model = self.model
        assert isinstance(model, DistributedDataParallel)
        synchronises = [worker.reduces_in_backward or self._reduces_in_node(worker) for worker in self.workers]
        if model.require_backward_grad_sync and not all(worker.reduces_in_backward for worker in self.workers):
            # Due in the next forward pass, and a broadcast: better now, while all ranks are here.
            with contextlib.nullcontext() if self._audit is None else self._audit.allowing():
                model.reducer._rebuild_buckets()
        model.require_backward_grad_sync = any(synchronises)

    def _reduces_in_node(self, worker: Worker) -> bool:
        """Whether DDP is to reduce inside the node: not where it asks the world which parameters were used."""
        assert isinstance(self.model, DistributedDataParallel)
        return worker.reduces_in_node and not self.model.find_unused_parameters

    @override
    def _reduced(self, worker: Worker) -> frozenset[Parameter]:
        has_reduced = worker.reduces_in_backward or self._reduces_in_node(worker)
        return super()._reduced(worker) if has_reduced else frozenset()

    @override
    def _buffers_to_broadcast(self, everything: list[Tensor]) -> list[Tensor]:
        return everything if any(worker.reduces_in_backward for worker in self.workers) else []

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        super().pre_backward(closure_loss)
        self._losses.append(closure_loss.detach())

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._hide()  # whoever asked for the consensus last has not said goodbye
        super().on_train_batch_start(batch, batch_idx)
        all_local = all(worker.is_local for worker in self.workers)
        self._may_communicate = not all_local
        if self.world_size > 1:
            self._choose_backward_sync()  # Lightning turns it on after each training_step of manual optimization
        if self._is_uneven:
            for worker in self._local_workers:
                worker.num_samples += _num_samples(batch)
        if self._audit is not None and all_local and self.world_size > 1:
            self._audit.check()
            self._audit.begin()

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        worker = self._worker_of(optimizer)
        assert isinstance(worker, LocalSGDWorker)
        num_averages, was_local = worker.num_averages, worker.is_local

        def checking_closure() -> Any:
            result = closure()
            for loss in self._losses:
                worker.observe_loss(loss)
            self._losses.clear()
            if was_local and self._audit is not None:
                self._audit.check()
            return result

        result = super().optimizer_step(optimizer, checking_closure, model, **kwargs)
        if self.world_size > 1:
            has_begun = worker.steps_since_average == 0
            has_communicated = has_begun or worker.num_averages != num_averages or not was_local
            if has_communicated and self._audit is not None:
                self._audit.pause()  # up to the next batch: callbacks may use the occasion
            self._choose_backward_sync()
            if has_communicated:
                self._may_communicate = True
                self._hear(worker)
        return result

    def _hear(self, worker: LocalSGDWorker) -> None:
        """Do what the ranks have agreed on with the last average."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if worker.stop_agreed:
            trainer._signal_connector.received_sigterm = True  # Lightning raises at the end of this batch, everywhere
        self._save_is_due |= worker.save_agreed
        if self._is_uneven and worker.num_finished and self._uneven_policy == "stop":
            self._end_epoch(trainer)
        if worker.is_over:
            trainer.should_stop = True

    # Uneven data ------------------------------------------------------------------------------------------------

    def _agree_on_data(self, trainer: pl.Trainer) -> None:
        """Find out whether all ranks have the same number of batches."""
        lengths: list[float] = [0.0] * self.world_size
        dist.all_gather_object(lengths, float(trainer.num_training_batches))
        self._is_uneven = len(set(lengths)) > 1 or math.inf in lengths
        for worker in self._local_workers:
            worker.weighs_samples = self._is_uneven
        if not self._is_uneven:
            return
        shown = ", ".join("unknown" if length == math.inf else f"{length:.0f}" for length in lengths)
        problem = None
        nodes = () if self._hierarchy is None else self._hierarchy.topology.nodes
        if any(len({lengths[rank] for rank in node}) > 1 or math.inf in lengths for node in nodes):
            problem = "the ranks of a node step together"
        elif len(self.workers) > 1 or not trainer.lightning_module.automatic_optimization:
            problem = "with several optimizers or manual optimization ranks cannot wait for each other"
        elif self.method.sends_changes or self.method.delay_steps:
            problem = "value_dtype, compression and delay_steps want equal weights"
        elif self.method.num_fragments > 1:
            problem = "num_fragments wants all ranks at each of its steps"
        elif not isinstance(self.method.begin_step, int):
            problem = f"begin_step={self.method.begin_step!r} is not known in advance; give a number of steps"
        elif trainer.val_check_batch not in (trainer.num_training_batches, math.inf):
            problem = "validation in the middle of an epoch needs all of them"
        elif (
            self.method.schedule.is_always_synchronous
            or self.method.begin_step >= min(lengths) / trainer.accumulate_grad_batches
        ):
            problem = "all steps of the shortest rank's first epoch are synchronous"
        if problem is not None:
            raise ConfigurationError(
                f"The ranks have different numbers of batches ({shown}), and {problem}. Use a DistributedSampler or "
                "Trainer(limit_train_batches=...) for even data."
            )
        rank_zero_info(
            f"{self.strategy_name}: the ranks have {shown} batches; those with more {self._uneven_policy}, replicas "
            "are weighted by samples and averaged at the end of each epoch."
        )

    def _end_epoch(self, trainer: pl.Trainer) -> None:
        """Make the batch in progress the last one of this epoch, and validate after it if that is due then."""
        progress = trainer.fit_loop.epoch_loop.batch_progress
        progress.is_last_batch = True
        if trainer.val_check_batch == trainer.num_training_batches and self._val_check_batch is None:
            self._val_check_batch = trainer.val_check_batch
            trainer.val_check_batch = progress.current.ready

    def _begin_epoch(self, trainer: pl.Trainer) -> None:
        self._has_ended_epoch = False
        if trainer.reload_dataloaders_every_n_epochs and trainer.current_epoch:  # type: ignore[attr-defined]
            self._agree_on_data(trainer)
        if self._val_check_batch is not None:
            trainer.val_check_batch, self._val_check_batch = self._val_check_batch, None

    def _wait_for_others(self) -> None:
        """At the end of this rank's epoch: take part in the averages of the others until all are there."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        is_over = self._must_stop(trainer) or 0 <= trainer.max_steps <= trainer.global_step
        if self._is_uneven and (trainer.fit_loop.epoch_loop._num_ready_batches_reached() or is_over):
            self._take_part_until_the_end(is_over)

    @staticmethod
    def _must_stop(trainer: pl.Trainer) -> bool:
        return trainer.should_stop and trainer.fit_loop._can_stop_early

    def _take_part_until_the_end(self, is_over: bool) -> None:
        (worker,) = self._local_workers
        if not worker.is_local:
            raise ConfigurationError(
                f"This rank is out of data after {worker.step} optimizer steps, and the first "
                f"{self.method.begin_step} are synchronous: give a smaller begin_step."
            )
        worker.num_finished = 0
        while worker.num_finished < self.world_size:
            worker.average(finished=True, over=is_over)
            self._hear(worker)
            if worker.stop_agreed:  # the others leave after this average, in mid-epoch
                raise SIGTERMException
        self._has_ended_epoch = True

    def _save_if_due(self) -> None:
        """Save and requeue, as SLURM's signal asked for; where data are uneven, at the end of the epoch."""
        if self._save_is_due and (self._has_ended_epoch or not self._is_uneven):
            self._save_is_due = False
            assert self.lightning_module is not None
            self.lightning_module.trainer._signal_connector._slurm_sigusr_handler_fn(
                signal.SIGUSR1,
                None,  # type: ignore[arg-type]  # the frame, of which it makes no use
            )

    # Looking ----------------------------------------------------------------------------------------------------

    def _show(self) -> None:
        """Put the consensus into the model, until `_hide`.

        Collective: all ranks, unless the replicas are equal; not while an exception unwinds, where the ranks need not
        all be here: then each has its own weights.
        """
        assert self.lightning_module is not None
        trainer = self.lightning_module._trainer
        if self._is_showing or trainer is None:
            return
        if self._audit is not None and not trainer.interrupted:
            self._audit.check()
            self._audit.pause()
        if trainer.interrupted:
            if not all(worker.parameters_agree for worker in self._local_workers):
                rank_zero_warn("The training was interrupted between two averages: these are the weights of rank 0.")
            return
        if self._is_uneven and not self._has_ended_epoch and not trainer.sanity_checking:
            raise ConfigurationError(
                "Validation and checkpoints in the middle of an epoch need all ranks, and some have fewer batches "
                "than others: do both at the end of the epoch."
            )
        if all(worker.is_consensus for worker in self._local_workers):
            return
        self._own_buffers = {name: buffer.clone() for name, buffer in self._buffers().items()}
        for worker in self._local_workers:
            worker.show_consensus()
        self._is_showing = True

    def _hide(self) -> None:
        if self._is_showing:
            for worker in self._local_workers:
                worker.hide_consensus()
            self._own_buffers = {}
            self._is_showing = False

    @override
    def on_validation_end(self) -> None:
        super().on_validation_end()
        self._hide()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._workers and self._is_fitting():
            self._show()
        state = super().lightning_module_state_dict()
        if self._is_showing:  # which ends before somebody else may have written it to disk
            state = {name: v.detach().clone() if isinstance(v, Tensor) else v for name, v in state.items()}
        return state

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        super().save_checkpoint(checkpoint, filepath, storage_options)
        assert self.lightning_module is not None
        if not self.lightning_module.trainer.validating:
            self._hide()

    def _is_fitting(self) -> bool:
        trainer = None if self.lightning_module is None else self.lightning_module._trainer
        return trainer is not None and trainer.state.fn == TrainerFn.FITTING

    def _finish(self) -> None:
        """Leave the consensus in the model, before the callbacks' `on_train_end`."""
        if self._is_uneven and not self._has_ended_epoch:  # somebody has stopped the training in mid-epoch
            self._take_part_until_the_end(is_over=True)
        self._show()
        self._is_showing = False
        self._own_buffers = {}
        for worker in self._local_workers:
            worker.finish()

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        assert self.lightning_module is not None
        if self.world_size == 1:
            return
        # A callback (stochastic weight averaging) may have put in weights of its own.
        tensors = [p.detach() for p in self.lightning_module.parameters()]
        tensors += [b for b in self.lightning_module.buffers() if b.is_floating_point() or b.is_complex()]
        bits = torch.as_tensor(checksum(tensors), dtype=torch.int64, device=self.root_device)
        extremes = torch.stack([bits, -bits])
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
        if int(extremes[0]) != -int(extremes[1]):
            exchange = Exchange(None, self.ledger)
            tail = torch.zeros(1, device=self.root_device)
            means, _ = MeanInFlight(tensors, tail, 1.0 / self.world_size, exchange).wait()
            for tensor, mean in zip(tensors, means, strict=True):
                as_real(tensor).copy_(mean)

    def _agree_on_monitored(self, trainer: pl.Trainer) -> None:
        """Replace the metrics that somebody monitors by their mean over ranks, so that all ranks decide alike."""
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        names = {getattr(each, "monitor", None) for each in callbacks if isinstance(each, (Checkpoint, EarlyStopping))}
        names |= {config.monitor for config in trainer.lr_scheduler_configs if config.reduce_on_plateau}
        wanted = sorted(str(name) for name in names if name)
        metrics = trainer.callback_metrics
        if not wanted:
            return
        sums = torch.zeros(len(wanted), 2, dtype=torch.float64)
        for index, name in enumerate(wanted):
            if name in metrics:
                sums[index] = torch.tensor([float(metrics[name]), 1.0])
        sums = sums.to(self.root_device)
        dist.all_reduce(sums)
        results = trainer._results
        for name, (total, count) in zip(wanted, sums.tolist(), strict=True):
            if not count:
                continue
            mean = torch.tensor(total / count, device=self.root_device)
            for _, metric in () if results is None else results.valid_items():
                assert results is not None
                if name in results._forked_name(metric, on_step=False) and metric._computed is not None:
                    metric._computed = mean.to(metric._computed.dtype) if isinstance(metric._computed, Tensor) else mean
            trainer._logger_connector._callback_metrics[name] = mean.to(torch.float32)


class AdaptiveLocalSGDStrategy(LocalSGDStrategy):
    """Local SGD whose period k follows the learning rate and the training loss.

    The loss is the mean over ranks and over the steps since the last average, and travels with the average itself.

    Args:
        init_k_steps: the first k.
        max_k_steps: the largest k.
        begin_step: as in `LocalSGDStrategy`.
        rule: "fleet", "adacomm" or "qsr", as in `lightning_lowbw.when.adaptive.PeriodSchedule`.
        qsr_alpha: for "qsr": k is the square of this over the learning rate.
        **kwargs: keyword arguments of `LocalSGDStrategy`, Lightning's `DDPStrategy` and `DistributedDataParallel`.

    Raises:
        ConfigurationError: a value is out of range, or a keyword unknown.

    Example:
        >>> AdaptiveLocalSGDStrategy(init_k_steps=2, rule="adacomm").method.k_steps
        2
    """

    strategy_name = "adaptive_local_sgd"
    presets = {"adaptive_local_sgd": {}}  # noqa: RUF012 - of the class, never written

    def __init__(
        self,
        init_k_steps: int = 1,
        max_k_steps: int = 16,
        begin_step: int | float | str = 1,
        *,
        rule: Rule = "fleet",
        qsr_alpha: float = 0.01,
        outer: OuterName = "none",
        outer_lr: float | None = None,
        outer_momentum: float | None = None,
        inner_momentum: InnerMomentum = "local",
        delay_steps: int | str = 0,
        mixing: float | None = None,
        value_dtype: str = "float32",
        compression: Compression | Mapping[str, Any] | None = None,
        uneven: Uneven = "finish",
        audit: bool = False,
        topology: TopologyChoice = "flat",
        node_k_steps: int = 1,
        **kwargs: Any,
    ) -> None:
        if rule == "fixed":
            raise ConfigurationError("rule='fixed': use LocalSGDStrategy(k_steps=...).")
        method = LocalSGD(
            k_steps=init_k_steps,
            begin_step=begin_step,
            rule=rule,
            max_k_steps=max_k_steps,
            qsr_alpha=qsr_alpha,
            outer=outer,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            inner_momentum=inner_momentum,
            delay_steps=delay_steps,
            mixing=mixing,
            value_dtype=value_dtype,
            compression=as_compression(compression),
            node_k_steps=node_k_steps,
        )
        self._set_up(method, uneven, audit, topology, kwargs)


class _Looks(Callback):
    """Stands first in the list of callbacks, so that all others see the consensus, and metrics that agree."""

    def __init__(self, strategy: LocalSGDStrategy) -> None:
        self._strategy = strategy

    def on_train_batch_end(self, *_: Any) -> None:
        self._strategy._wait_for_others()
        self._strategy._save_if_due()

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._strategy._begin_epoch(trainer)

    def on_validation_start(self, *_: Any) -> None:
        self._strategy._show()

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            self._strategy._agree_on_monitored(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self._strategy._audit is not None:
            self._strategy._audit.check()
            self._strategy._audit.pause()
        self._strategy._agree_on_monitored(trainer)

    def on_train_end(self, *_: Any) -> None:
        self._strategy._finish()


def _buffers_by_optimizer(module: torch.nn.Module, optimizers: list[Optimizer]) -> dict[int, dict[str, Tensor]]:
    """Return, by id of the optimizer, the buffers of layers whose parameters it trains; all others with the first."""
    owner = {p: id(optimizer) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    shares: dict[int, dict[str, Tensor]] = {id(optimizer): {} for optimizer in optimizers}
    seen: set[int] = set()
    for prefix, layer in module.named_modules():
        owners = [owner[p] for p in layer.parameters(recurse=False) if p in owner]
        for name, buffer in layer.named_buffers(recurse=False):
            if id(buffer) not in seen:
                seen.add(id(buffer))
                share = shares[owners[0] if owners else id(optimizers[0])]
                share[f"{prefix}.{name}" if prefix else name] = buffer
    return shares


def _num_samples(batch: Any) -> int:
    try:
        return extract_batch_size(batch)
    except MisconfigurationException:  # nothing in it has a size
        return 1
