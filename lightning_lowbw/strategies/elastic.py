"""A strategy whose nodes come, go and are slow: each node is a Lightning run of its own; they average at times."""

from __future__ import annotations

import os
import socket
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.utilities.data import extract_batch_size
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer
from typing_extensions import override

from lightning_lowbw.arguments import arguments_of, is_count, is_number, shows
from lightning_lowbw.comm.agreement import failing_together
from lightning_lowbw.comm.topology import Topology
from lightning_lowbw.elastic.group import Group
from lightning_lowbw.elastic.membership import Membership
from lightning_lowbw.elastic.sync import ElasticSync, check_elastic
from lightning_lowbw.elastic.torchft_membership import TIMEOUT_S, TorchftMembership
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.method import Method
from lightning_lowbw.strategies import checkpoint as files
from lightning_lowbw.strategies import checks
from lightning_lowbw.strategies.base import BaseStrategy
from lightning_lowbw.strategies.fit import Fit, unwrapped
from lightning_lowbw.strategies.fsdp import ShardedStrategy
from lightning_lowbw.strategies.keywords import STRATEGY_KEYWORDS
from lightning_lowbw.strategies.strategy import Strategy
from lightning_lowbw.sync.local_view import LocalView


class _Elastic(BaseStrategy):
    """The common part of the strategies of a group, above the strategy that trains inside the group."""

    _group: Group | None = None
    _timeout: timedelta | None

    def __init__(
        self,
        method: Mapping[str, Any] | Method,
        *,
        k_steps: int | None = None,
        round_s: float | None = None,
        num_tokens: Callable[[Any], float] | None = None,
        min_replicas: int = 1,
        grace_s: float = 20.0,
        max_change_ratio: float | None = 10.0,
        group: str | None = None,
        lighthouse: str | None = None,
        gbit_per_s: float = 0.1,
        timeout_s: float = TIMEOUT_S,
        **kwargs: Any,
    ) -> None:
        super().__init__(method, **kwargs)  # type: ignore[arg-type]  # of the strategy inside the group
        if k_steps is not None:
            if round_s is not None:
                raise ConfigurationError(
                    f"k_steps={k_steps} and round_s={round_s}: a round ends after steps or after seconds. Give one."
                )
            self.fit = Fit(self.method.replace(k_steps=k_steps), self._candidates)
        check_elastic(self.method)
        self._of_membership: dict[str, Any] = {
            "lighthouse": lighthouse,
            "min_replicas": min_replicas,
            "gbit_per_s": gbit_per_s,
            "timeout_s": timeout_s,
        }
        for name, value in {"round_s": round_s, "grace_s": grace_s, **self._of_membership}.items():
            if name.endswith("_s") and (name, value) != ("round_s", None) and not (is_number(value) and value > 0):
                raise ConfigurationError(f"{name}={value!r}: give a number above 0.")
        if not (max_change_ratio is None or (is_number(max_change_ratio) and max_change_ratio > 1)):
            raise ConfigurationError(f"max_change_ratio={max_change_ratio!r}: give a number above 1, or None.")
        if not is_count(min_replicas):
            raise ConfigurationError(f"min_replicas={min_replicas!r}: give a number of groups, an integer >= 1.")
        self.group = group or socket.gethostname()
        self.round_s, self.grace_s, self.max_change_ratio = round_s, grace_s, max_change_ratio
        self._num_tokens = num_tokens or extract_batch_size
        self._options |= {"round_s": round_s, "grace_s": grace_s, "max_change_ratio": max_change_ratio, "group": group}
        self._options |= self._of_membership

    @property
    def _replica(self) -> ElasticSync:
        worker: Any
        (worker,) = self.workers
        assert isinstance(worker, ElasticSync)
        return worker

    @property
    @override
    def _layout(self) -> files.Layout:
        layout = super()._layout
        return replace(layout, kind=layout.kind.replace("replicas", "elastic"))

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        # With the default, the seed of all groups, they would train on the same batches.
        seed = int(os.environ.get("PL_GLOBAL_SEED", 0)) + zlib.crc32(f"{self.group}".encode())
        return {**super().distributed_sampler_kwargs, "seed": seed}

    def _check_run(self, trainer: pl.Trainer) -> None:
        if trainer.max_steps < 0 or trainer.max_epochs not in (None, -1) or checks.callbacks_of(trainer, Timer):
            raise ConfigurationError(
                f"Trainer(max_steps={trainer.max_steps}, max_epochs={trainer.max_epochs}), or max_time, or a Timer: "
                "the groups have epochs and clocks of their own, and end with the same round. Give max_steps only."
            )

    def _make_group(self, *, is_sharded: bool) -> Group:
        """Return the processes of this group; the first one, its leader, finds the other groups.

        Collective: all processes of the group.
        """
        self._group = Group(self.ledger, is_sharded=is_sharded, timeout=self._timeout)
        with failing_together():
            if self._group.rank == 0:
                self._group.membership = self.make_membership(self._group.is_whole)
        return self._group

    def make_membership(self, is_whole: Callable[[], bool]) -> Membership:
        """Return the membership that finds the groups; an engine other than torchft overrides this.

        Args:
            is_whole: returns whether all processes of this group live.
        """
        return TorchftMembership(name=self.group, is_whole=is_whole, **self._of_membership)

    def _make_elastic(self, optimizer: Optimizer, named: Any, buffers: Any, shapes: Any = None) -> ElasticSync:
        assert self._group is not None
        if len(self.optimizers) > 1:
            raise ConfigurationError("Several optimizers: an elastic training has one. Return one.")
        return ElasticSync(self.method, optimizer, named, self._group, buffers, round_s=self.round_s, shapes=shapes)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self.group = self.broadcast(self.group)  # the hosts of a group have other names

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if self._is_fitting:
            self._check_run(trainer)
        super().setup(trainer)
        if self._is_fitting:
            if not self.workers:
                raise ConfigurationError("No optimizer: an elastic training has one. Return one.")
            self.fit.settle = self._settle

    @override
    def reconfigure(self, method: Method) -> None:
        if self.workers:
            raise ConfigurationError("All groups have one method. To change it, end all groups, and start them again.")
        super().reconfigure(method)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self.fit.hide_anchor()  # of a checkpoint
        worker = self._replica
        worker.last_step, worker.share = self.trainer.max_steps, self._schedules
        worker.settings = {"Trainer(max_steps)": self.trainer.max_steps, "schedulers": self._named_schedulers()}
        worker.max_change_ratio = self.max_change_ratio
        worker.should_stop = lambda: self.trainer.received_sigterm
        if self._timeout is not None:
            worker.max_wait_s = self._timeout.total_seconds()  # no collective waits between groups, which would end
        worker.join()  # takes the weights of another group, or waits for a first round
        self.fit.view.look()
        self._follow(worker, is_in_step=False)
        if self.world_size > 1:
            self.fit.signals.read_requests(worker, self.trainer)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self._replica.tokens += float(self._num_tokens(batch))  # the weight of this group in the next mean

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if self.workers:
            self._replica.begin_batch()
        return super().batch_to_device(batch, device, dataloader_idx)

    def _settle(self) -> None:
        """Apply the round that is hidden, if there is one."""
        if self._replica.settle():
            self._follow(self._replica, is_in_step=False)

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(*args, **kwargs)
        worker = self._replica
        if worker.has_communicated:
            self._follow(worker, is_in_step=True)
            for logger in self.trainer.loggers if worker.round_metrics else ():
                logger.log_metrics(worker.round_metrics, step=worker.step)
            worker.round_metrics = {}
        return result

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self._replica.end(self.grace_s)

    # Steps and schedulers -----------------------------------------------------------------------------------------

    def _named_schedulers(self) -> list[str]:
        """Return the names of the schedulers.

        Raises:
            ConfigurationError: a scheduler would not take the same steps on all groups.
        """
        configs = self.trainer.lr_scheduler_configs
        for config in configs:
            if (config.interval, config.frequency, config.reduce_on_plateau) != ("step", 1, False):
                raise ConfigurationError(
                    f"{type(config.scheduler).__name__} does not take a step with each step of the optimizer, and the "
                    "learning rates of the groups would differ. Return {'scheduler': ..., 'interval': 'step'}, and no "
                    "frequency and no monitor."
                )
        return [type(config.scheduler).__name__ for config in configs]

    def _schedules(self) -> dict[str, Any]:
        """Return the states of the schedulers, for a group that is behind, and the steps that they have taken."""
        optimizer, step = unwrapped(self.optimizers[0]), self._step_progress.completed
        states = [config.scheduler.state_dict() for config in self.trainer.lr_scheduler_configs]
        return {"schedulers": states, "lrs": [group.get("lr") for group in optimizer.param_groups], "step": step}

    def _follow(self, worker: ElasticSync, *, is_in_step: bool) -> None:
        """Count the steps of the fastest group, and let the schedulers take them.

        Args:
            is_in_step: whether Lightning counts one, and lets the schedulers take it, after this.
        """
        healed, progress = worker.healed, self._step_progress
        schedulers = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        step, num_steps = worker.step - is_in_step, worker.num_skipped
        if healed is not None:
            for scheduler, state in zip(schedulers, healed["schedulers"], strict=True):
                scheduler.load_state_dict(state)  # state of the group whose weights this one has taken
            for group, lr in zip(unwrapped(self.optimizers[0]).param_groups, healed["lrs"], strict=True):
                if "lr" in group:
                    group["lr"] = lr
            num_steps = step - healed["step"]
        for scheduler in schedulers:
            for _ in range(num_steps):
                scheduler.step()
        progress.completed, progress.ready = step, worker.step

    @property
    def _step_progress(self) -> Any:
        """Lightning's count of optimizer steps."""
        loop = self.trainer.fit_loop.epoch_loop
        if self.trainer.lightning_module.automatic_optimization:
            return loop.automatic_optimization.optim_progress.optimizer.step.total
        return loop.manual_optimization.optim_step_progress.total


class ElasticStrategy(_Elastic, Strategy):
    """Local SGD between groups that come, go and are slow; each group is one Lightning run.

    A group is one process, or several processes on one host or on several; the groups need not be alike. Lightning sees
    one group, with its own sampler, loggers and checkpoints; give each group a `default_root_dir` of its own. In each
    step the processes of a group reduce their gradients, as DDP does; for models that do not fit on one GPU see
    `ElasticShardedStrategy`. After a round the groups that are there average their changes, weighted by samples; only
    the first process of each group, its leader, communicates with other groups, and the shared state is in the memory
    of its host: 24 bytes per trained parameter in a round. A round does not wait for a missing group. A group that is
    slow, comes back or is new takes the state of another group; a group that joins begins in the current round of the
    other groups. All groups begin with the same weights, so give one seed; Lightning's own sampler shuffles differently
    in each group. The running statistics of batch norm are the leader's.

    If a group fails in an exchange, it cannot know whether its round has counted. It then drops its work of this round;
    the other groups keep their work.

    Steps and schedulers follow the fastest group. The training ends for all groups with the same round, in which the
    fastest group has taken ``Trainer(max_steps=...)``. Validation, checkpoints and the end of the fit have the weights
    after the last round, which are the same on all groups. Each group resumes from its own checkpoint; if all groups
    start again, the checkpoint with the most rounds counts.

    Args:
        method: averages weights, with begin_step=0: `LocalSGD(k_steps=8, begin_step=0)`.
        k_steps: local steps of a round; None: the value of the method.
        round_s: seconds after which a round ends instead, with as many steps as each group has taken.
        num_tokens: returns the weight of a batch in the means; None: its number of samples, as Lightning finds it.
        min_replicas: groups that a round needs; with fewer, all groups wait and say so once a minute. With 1, a group
            that is alone with the lighthouse trains on, and the other groups take its state when they come.
        max_change_ratio: a group whose weights have moved so many times as far in a local step as the median of the
            groups (of two groups: as its own median) is left out of a mean, with a warning on all, after five rounds.
            None: no group is left out.
        grace_s: seconds for which a group that has ended waits for other groups; longer than the join_timeout_ms of the
            lighthouse.
        group: name of this group. No other group has it, and the group keeps it after a restart.
        lighthouse: address of torchft's lighthouse, where groups meet, as "http://10.8.0.1:29510"; None: the address
            in the environment's TORCHFT_LIGHTHOUSE.
        gbit_per_s: the slowest uplink of a group; it makes `timeout_s` longer if the state is large.
        timeout_s: the shortest timeout of a collective between groups. `timeout` is another limit, see below.
        **kwargs: as for `Strategy`, without `topology`. A group that has taken part in a round and waits for other
            groups ends with an error after `timeout` (30 minutes).

    Raises:
        ConfigurationError: a value is out of range, or the method communicates in every step.

    Examples:
        >>> from lightning_lowbw import LocalSGD
        >>> ElasticStrategy(LocalSGD(begin_step=0), k_steps=20).method.when.k_steps
        20
    """

    @shows(arguments_of(_Elastic) | STRATEGY_KEYWORDS)
    def __init__(self, method: Mapping[str, Any] | Method, **kwargs: Any) -> None:
        super().__init__(method, **kwargs)

    @override
    def _make_peers(self, group: dist.ProcessGroup | None) -> None:
        self.peers = self._worker_peers = self._make_group(is_sharded=False)

    @override
    def _check_run(self, trainer: pl.Trainer) -> None:
        super()._check_run(trainer)
        if any(isinstance(parameter, DTensor) for parameter in trainer.lightning_module.parameters()):
            raise ConfigurationError(
                "The model is sharded, and here each process of a group has the whole model. Leave fully_shard out, or "
                "take ElasticShardedStrategy, or a name that ends with _elastic_fsdp."
            )

    @override
    def _make_worker(self, optimizer: Optimizer, module: pl.LightningModule, buffers: Any) -> Any:
        return self._make_elastic(optimizer, module.named_parameters(), buffers)


class ElasticShardedStrategy(_Elastic, ShardedStrategy):
    """FSDP2 inside each group, local SGD between groups that come, go and are slow.

    The model is sharded over all processes of a group, as `ShardedStrategy` does it on a node; groups as in
    `ElasticStrategy`. In a round each process copies its shard to the host and sends it to the leader of its group,
    whose host holds the whole model: 24 bytes per trained parameter in a round.

    Args:
        method: as in `ElasticStrategy`.
        **kwargs: as in `ElasticStrategy`, with the keywords of `ShardedStrategy` in the place of DDP's. The keyword
            `topology` is not among them.

    Raises:
        ConfigurationError: as in `ElasticStrategy`; or the model is not sharded over all processes of the group, along
            the first dimension of each parameter.

    Examples:
        >>> from lightning_lowbw import LocalSGD
        >>> ElasticShardedStrategy(LocalSGD(begin_step=0), k_steps=20).method.when.k_steps
        20
    """

    @shows(arguments_of(_Elastic) | {k: v for k, v in arguments_of(ShardedStrategy).items() if k != "topology"})
    def __init__(self, method: Mapping[str, Any] | Method, **kwargs: Any) -> None:
        super().__init__(method, **kwargs)

    @override
    def _find_topology(self) -> Topology:
        return Topology.blocks(self.world_size, self.world_size)

    @override
    def _make_sync(self, optimizer: Optimizer, view: LocalView, named: Any, buffers: Any) -> Any:
        module, shard_of = self.trainer.lightning_module, self._view.tensors.of
        sharded = [parameter for parameter in module.parameters() if isinstance(parameter, DTensor)]
        for parameter in sharded:
            if parameter.placements != (Shard(0),):
                raise ConfigurationError(
                    f"A parameter of shape {[*parameter.shape]} is placed as {parameter.placements}. An elastic group "
                    "has shards along the first dimension, as fully_shard makes them by default: leave "
                    "shard_placement_fn out."
                )
        self.fit.ends.callback(self._make_group(is_sharded=True).close)
        worker = self._make_elastic(view.local, named, buffers, {shard_of(each): each.shape for each in sharded})
        worker.forget = lambda: optimizer.state.clear()
        return worker
