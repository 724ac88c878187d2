"""`DDPStrategy` with a method that is called at three points of a Lightning step.

1. a DDP communication hook, on gloo as well as NCCL: all-reduce during backward, or pass the gradients through;
   gradients in few bits begin to be sent in hooks of the parameters (`sync/early.py`);
2. the end of the wrapped closure, or where Lightning clips, if the method clips first: check for faults, exchange;
3. after the step: the method's counters and averages, and the user's values back in the param groups.

Automatic and manual optimization, accumulation, several optimizers and every precision plugin go through these. If
gradients are exchanged in every step, weights are equal on all ranks, and buffers are in validation and checkpoints. If
weights are averaged after some steps, each rank trains alone in between and sends nothing; validation and checkpoints
see the last average, and the fit ends with one more average.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_lowbw.arguments import shows
from lightning_lowbw.comm.agreement import agree
from lightning_lowbw.comm.collectives import Level
from lightning_lowbw.comm.peers import Peers
from lightning_lowbw.comm.topology import TopologyChoice
from lightning_lowbw.method import Method, as_method
from lightning_lowbw.strategies import checkpoint as files
from lightning_lowbw.strategies import checks
from lightning_lowbw.strategies.base import BaseStrategy
from lightning_lowbw.strategies.communication_hook import CommunicationHook
from lightning_lowbw.strategies.fit import unwrapped
from lightning_lowbw.strategies.keywords import DDP_KEYWORDS, Needs, asked_of_buffers, given_keywords, written
from lightning_lowbw.strategies.shared_buffers import SharedBuffers, buffers_of, choose_buffers
from lightning_lowbw.strategies.traffic_monitor import bring_monitor
from lightning_lowbw.sync.buffers import IGNORED, agree_on_specs
from lightning_lowbw.sync.checks import plain_values
from lightning_lowbw.sync.gradient import GradientSync
from lightning_lowbw.sync.state import whole_momentum
from lightning_lowbw.sync.synchronizer import Synchronizer


class Strategy(BaseStrategy, DDPStrategy):
    """DDP in which a method does the communication.

    Args:
        method: the schedule, the payload and the topology; a `Method`, such as `DGC(...)` or `LocalSGD(...)` return,
            or a mapping, as `Method.describe` does.
        topology: instead of the method's own: "flat" or, for two levels, "auto" (by the launcher and the host names), a
            number of ranks per node, the ranks of each node, or a `Topology`.
        resume: what ``fit(ckpt_path=...)`` loads: "exact" also the folder beside the ``.ckpt``, which has each rank's
            own state; "weights and optimizer" the ``.ckpt`` alone, as when the folder is lost, or residuals do not fit
            another method.
        skip_nonfinite: whether all ranks skip a step in which the gradient of a rank has an inf or NaN, as under a
            GradScaler: schedulers and `global_step` count it. The tenth skipped step in a row is an error. A method
            that averages weights skips the local step of this rank (of this node) alone. Each other step then has one
            more round trip.
        skip_norm: skip also a step in which the norm of the gradient is above this value, before clipping: the norm of
            the mean if DDP has reduced it; in a local step the norm of the gradient with which this rank steps; else
            the largest norm of any rank's own gradient (any node's, on two levels; any shard's). None: no such limit.
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

    _reports = False  # whether it brings a TrafficMonitor

    @shows(DDP_KEYWORDS)
    def __init__(
        self,
        method: Mapping[str, Any] | Method,
        *,
        topology: TopologyChoice | None = None,
        resume: Needs = "exact",
        skip_nonfinite: bool = False,
        skip_norm: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**given_keywords(type(self), kwargs))
        options = {"resume": resume, "skip_nonfinite": skip_nonfinite, "skip_norm": skip_norm}
        self._hold(as_method(method, topology), options)
        checks.refuse(checks.refusals_of_replicas(self.method, self._ddp_kwargs))
        self.peers = self._worker_peers = Peers()

    def __repr__(self) -> str:
        return written(self, self._options | plain_values(self._ddp_kwargs))

    # Setting up -------------------------------------------------------------------------------------------------

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if self._is_fitting:
            self._begin_fit(plain_values(self._ddp_kwargs))

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if not self._is_fitting:
            agree_on_specs(buffers_of(trainer.lightning_module), None)  # rank 0's are broadcast
            super().setup(trainer)
            return
        # Each rank may have another path; `load` compares whether the files are of one save.
        source = "a checkpoint" if trainer.ckpt_path else "no checkpoint"
        agree("fit's ckpt_path ('last' finds a file on a rank's own disk)", {"ckpt_path": source})
        self._check_trainer(trainer)
        super().setup(trainer)
        self.fit.begin(trainer, self._hook, self._make_worker)
        if self._reports:
            bring_monitor(trainer)
        if not self.fit.is_needed:
            rank_zero_warn(
                f"{type(self).__name__} with one rank: there is no other rank to communicate with, so this trains "
                "as without it. Set Trainer(devices=..., num_nodes=...) for more."
            )

    def _check_trainer(self, trainer: pl.Trainer) -> None:
        """Raise ConfigurationError if a setting of the Trainer does not go together with averages of weights."""
        has_layer_sync = self._layer_sync is not None
        checks.refuse(checks.refusals_of_replicas(self.method, {}, trainer, has_layer_sync=has_layer_sync))

    @override
    def _make_worker(self, optimizer: Optimizer, module: pl.LightningModule, buffers: Any) -> Synchronizer:
        worker = self.method.make_synchronizer(optimizer, module.named_parameters(), self._worker_peers, buffers)
        if isinstance(worker, GradientSync):
            ignored = getattr(module, IGNORED, ())
            worker.compared = [parameter for name, parameter in module.named_parameters() if name not in ignored]
        return worker

    @override
    def configure_ddp(self) -> None:
        module = self.trainer.lightning_module
        checks.check_model(
            module,
            compares_weights=self._ddp_kwargs.get("init_sync") is False,
            takes_sparse=self.world_size > 1 and not self.method.exchanges_gradients,
        )
        self._make_peers(self._ddp_kwargs.get("process_group"))
        self.fit.buffers = SharedBuffers(module, asked_of_buffers(self._ddp_kwargs))
        super().configure_ddp()
        level: Level | None = "inter" if self.peers.is_two_level else None
        if self.world_size > 1:
            choose_buffers(self._ddp, self.fit.buffers, lambda: self.workers, self.ledger, level)

    def _make_peers(self, group: dist.ProcessGroup | None) -> None:
        """Find out which ranks share a node, and make the process groups.

        Collective: all ranks, blocking.

        Raises:
            ConfigurationError, DisagreementError: on all ranks; the topology does not fit the world.
        """
        method, name = self.method, type(self).__name__
        self.peers = self._worker_peers = method.make_peers(group, ledger=self.ledger, timeout=self._timeout)
        topology = self.peers.topology
        if not topology.is_flat:
            rank_zero_info(f"{name}: nodes {', '.join(str(list(node)) for node in topology.nodes)}.")
        if method.where.topology != "flat" and self.peers.num_ranks > 1 and not self.peers.is_two_level:
            ranks = "one rank on each node" if topology.is_flat else "all ranks are on one node"
            rank_zero_warn(
                f"{name}, topology={method.where.topology!r}: {ranks}, so there is one level only, and this trains as "
                f"{'with topology=' + repr('flat') if topology.is_flat else 'DDP'}."
            )
        if method.when.delay_steps:
            self._worker_peers = method.make_peers(group, ledger=self.ledger, timeout=self._timeout, is_hidden=True)

    @property
    def _ddp(self) -> DistributedDataParallel:
        """The model, in a fit."""
        assert isinstance(self.model, DistributedDataParallel)
        return self.model

    @override
    def _register_ddp_hooks(self) -> None:
        is_manual = not self.trainer.lightning_module.automatic_optimization
        self._hook = CommunicationHook(self._ddp, self.peers, self.method, is_manual=is_manual)
        self.fit.ends.callback(self._hook.release)

    @override
    def teardown(self) -> None:
        self.peers.close()
        self._worker_peers.close()
        super().teardown()

    # The step ---------------------------------------------------------------------------------------------------

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        is_reduced = self._ddp.require_backward_grad_sync  # into the gradients that have been made
        with nullcontext() if is_reduced else self.fit.step_hooks.sending_early():
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    # Checkpoints ------------------------------------------------------------------------------------------------

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state with whole velocities, so that any strategy resumes from it; a rank of a node keeps a part.

        Collective: the ranks of a node; all ranks if the optimizer shards its state, which rank 0 then gathers.
        """
        if self.is_interrupted:  # nothing is saved
            return {}
        state: dict[str, Any] = super().optimizer_state(optimizer)
        worker: Any = next((each for each in self.workers if each.optimizer is unwrapped(optimizer)), None)
        if worker is None or not self.fit.is_running:
            return state
        whole = whole_momentum(worker.correction, worker.peers)
        if not whole:  # Lightning returns the state of an optimizer that shards it on rank 0 only
            return state
        entries = dict(state["state"])  # new dictionaries: the given ones belong to the optimizer
        for index, parameter in enumerate(p for group in worker.optimizer.param_groups for p in group["params"]):
            if parameter in whole:
                entries[index] = {**entries.get(index, {}), worker.correction.velocity_key: whole[parameter]}
        return {**state, "state": entries}

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        trainer = self.trainer
        files.load(self.fit, self._layout, checkpoint, trainer.ckpt_path, needs=self._options["resume"])
        if self.fit.restore is not None and not trainer.lightning_module.automatic_optimization:
            self._ddp.require_forward_param_sync = False  # only the first forward pass of a fit broadcasts buffers

    @property
    @override
    def _layout(self) -> files.Layout:
        topology = self.peers.topology  # also of a single node, which has other state than flat ranks
        return files.Layout(self.method.kind, None if topology.is_flat else [list(node) for node in topology.nodes])
