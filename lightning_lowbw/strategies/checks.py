"""The settings of a Trainer; refusals, agreement between ranks outside of the exchange, and warnings."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Checkpoint,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_lowbw.comm.agreement import agree, digest, failing_together, gather
from lightning_lowbw.comm.collectives import all_reduce_
from lightning_lowbw.errors import ConfigurationError, DisagreementError
from lightning_lowbw.method import Method
from lightning_lowbw.namespaces import counterpart_of, package_of
from lightning_lowbw.strategies.keywords import asked_of_buffers
from lightning_lowbw.strategies.shared_buffers import buffers_of
from lightning_lowbw.sync.buffers import IGNORED, agree_on_specs
from lightning_lowbw.sync.checks import (
    agree_on_end,
    agree_on_model,
    agree_on_optimizers,
    plain_values,
    warn_if_incomplete,
)
from lightning_lowbw.sync.gradient import GradientSync
from lightning_lowbw.sync.local import LocalSync
from lightning_lowbw.sync.synchronizer import Synchronizer

C = TypeVar("C", bound=pl.Callback)

# Lightning's callbacks that keep an average of the weights over steps.
AVERAGING: tuple[type[pl.Callback], ...] = (
    StochasticWeightAveraging,
    *([pl.callbacks.WeightAveraging] if hasattr(pl.callbacks, "WeightAveraging") else []),  # not before Lightning 2.6
)
# Callbacks of all packages that do so, by the names of their classes.
NAMED_AVERAGING = re.compile(r"(EMA|Ema|SWA)(Callback|Weights?)?|.*(ExponentialMovingAverage|WeightAverag).*")
# Callbacks that communicate, or decide what does.
COLLECTIVE: tuple[type[pl.Callback], ...] = (Checkpoint, EarlyStopping, BatchSizeFinder, LearningRateFinder, *AVERAGING)

NOT_BROADCAST = frozenset({torch.int16, torch.uint16, torch.uint32, torch.uint64})  # by gloo, nor by NCCL
STEPS_OF_HIDDEN = 0.15  # per log2(k) log2(participants); benchmarks/results/steps_to_loss.md, 2 to 8 participants
MUCH = 0.5  # of the trained elements; below it a warning
# The Trainer's settings: ranks with different settings would wait in different collectives, or train apart.
SETTINGS = (
    "max_epochs",
    "min_epochs",
    "max_steps",
    "min_steps",
    "limit_train_batches",
    "limit_val_batches",
    "overfit_batches",
    "val_check_interval",
    "check_val_every_n_epoch",
    "num_sanity_val_steps",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "precision",
)


def callbacks_in(trainer: pl.Trainer) -> list[Any]:
    """Return the trainer's own list of callbacks."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    return callbacks


def callbacks_of(trainer: pl.Trainer, *classes: type[C]) -> list[C]:
    """Return the trainer's callbacks of some classes."""
    return [each for each in callbacks_in(trainer) if isinstance(each, classes)]


def accumulates_by_schedule(trainer: pl.Trainer) -> bool:
    """Return whether a callback sets, by the epoch, how many batches' gradients are accumulated for a step."""
    schedulers = callbacks_of(trainer, GradientAccumulationScheduler)
    return any(each.going_to_accumulate_grad_batches() for each in schedulers)


def steps_per_epoch_of(trainer: pl.Trainer, alternative: str) -> int:
    """Return the optimizer steps of an epoch.

    Collective: all ranks, blocking.

    Args:
        trainer: in a fit.
        alternative: how to give the same in steps, for the message.

    Raises:
        ConfigurationError: on all ranks; the number cannot be known.
    """
    num_batches, unknown = float(trainer.num_training_batches), ""
    if not trainer.lightning_module.automatic_optimization:
        unknown = "in manual optimization only the module knows them"
    elif accumulates_by_schedule(trainer):
        unknown = "GradientAccumulationScheduler changes them"
    elif num_batches == math.inf:
        unknown = "the training data has no length"
    with failing_together():
        if unknown:
            raise ConfigurationError(f"The steps per epoch are not known: {unknown}. Give it in steps: {alternative}.")
    # The largest: callbacks ask before `agree_on_length` compares the numbers.
    return max(gather(math.ceil(num_batches / trainer.accumulate_grad_batches), "number of steps per epoch"))


def num_steps_of_fit(trainer: pl.Trainer, workers: Sequence[Synchronizer]) -> float:
    """Return the number of a fit's last step, as each worker counts: from 0 in each fit that does not resume.

    Infinite where there is no limit, or it is not known: Lightning counts the steps of several optimizers together.
    """
    num_steps, before = float(trainer.estimated_stepping_batches), trainer.global_step - sum(w.step for w in workers)
    # -1: Lightning has no limit. A schedule of accumulation is left out of Lightning's number.
    if num_steps < 0 or len(workers) > 1 or (accumulates_by_schedule(trainer) and trainer.max_epochs != -1):
        return math.inf
    return num_steps - before


def resolved(method: Method, trainer: pl.Trainer, workers: Sequence[Synchronizer]) -> Method | None:
    """Return a method whose `begin_step` is a number of steps, in place of a fraction of the run; None if it is none.

    Collective: all ranks, if it is a fraction.

    Raises:
        ConfigurationError: on all ranks; the length of the run is not known.
    """
    begin = method.when.begin_step
    if not isinstance(begin, float):
        return None
    num_steps = max(gather(num_steps_of_fit(trainer, workers), "number of steps"))
    if num_steps == math.inf:
        raise ConfigurationError(
            f"begin_step={begin} of a run whose number of steps is not known (with several optimizers it never is): "
            "give a number of steps of one optimizer."
        )
    step = round(begin * num_steps)
    of_batches = not trainer.lightning_module.automatic_optimization and trainer.max_steps == -1  # Lightning's number
    told = ", if each batch takes one" if of_batches else ""
    rank_zero_info(f"{type(trainer.strategy).__name__}: synchronous up to step {step} of {num_steps:.0f}{told}.")
    return method.replace(begin_step=step)


def settings_of(trainer: pl.Trainer) -> dict[str, object]:
    """Return the Trainer's settings on which all ranks must agree, with settings of callbacks that communicate."""
    shared = callbacks_of(trainer, *COLLECTIVE)
    shared += [each for each in callbacks_in(trainer) if getattr(each, "sets_method", False)]  # of this package
    timers = [(each.time_remaining(), each.time_elapsed()) for each in callbacks_of(trainer, Timer)]
    return {
        # A `val_check_interval` may be a time.
        **{f"Trainer({name})": getattr(trainer, name, None) for name in SETTINGS},
        # None if it only measures; the elapsed time alone differs between ranks.
        "Trainer(max_time)": [None if left is None else round(left + elapsed) for left, elapsed in timers],
        "callbacks": [each.state_key for each in shared],
        "GradientAccumulationScheduler": [
            each.scheduling for each in callbacks_of(trainer, GradientAccumulationScheduler)
        ],
    }


def agree_on_length(trainer: pl.Trainer) -> bool:
    """Refuse numbers of batches that are known and differ. Unknown numbers are not compared, as under DDP.

    Collective: all ranks, blocking.

    Returns:
        Whether it is known that all ranks end an epoch at the same batch.

    Raises:
        DisagreementError: on all ranks.
    """
    lengths = gather(float(trainer.num_training_batches), "number of batches")  # infinity where it is not known
    known = {length for length in lengths if length < math.inf}
    if len(known) > 1:
        counts = ", ".join(f"rank {rank} has {length:.0f}" for rank, length in enumerate(lengths))
        raise DisagreementError(
            f"The ranks have different numbers of batches per epoch: {counts}. All ranks need the same number: set "
            f"Trainer(limit_train_batches={min(known):.0f}), or divide the data equally, as Lightning's "
            "DistributedSampler does, or give a stream that repeats, and max_steps. Between the groups of a name that "
            "ends with _elastic the numbers may differ."
        )
    return math.inf not in lengths


def refuse_early_end(trainer: pl.Trainer) -> None:
    """Refuse the end of an epoch before the number of batches that the data gave as their length.

    Raises:
        ConfigurationError: on each rank whose epoch has ended so; the other ranks may be in a step.
    """
    fetcher = trainer.fit_loop._data_fetcher
    if fetcher is not None and fetcher.done and fetcher.length is not None and fetcher.fetched < fetcher.length:
        raise ConfigurationError(
            f"len() of the training data says {fetcher.length} batches, and iter() gave {fetcher.fetched} on rank "
            f"{trainer.global_rank}: the other ranks may wait for a step of this rank. Let __len__ return the number "
            f"that all ranks have, or set Trainer(limit_train_batches={fetcher.fetched})."
        )


def check_model(module: torch.nn.Module, compares_weights: bool = False, takes_sparse: bool = False) -> None:
    """Check, before DDP wraps the model, that it can be trained and is the same on all ranks.

    Collective: all ranks, blocking.

    Args:
        module: the module that is fitted.
        compares_weights: whether the weights must be equal already, because no broadcast makes them equal.
        takes_sparse: whether gradients may have torch's sparse layout, because none is exchanged.

    Raises:
        ConfigurationError, DisagreementError: on all ranks.
    """
    with failing_together():
        if not takes_sparse:
            refuse_sparse_gradients(module)
        for name, buffer in buffers_of(module).items():
            if buffer.dtype in NOT_BROADCAST:
                raise ConfigurationError(
                    f"Buffer {name!r} is of {buffer.dtype}, which DDP cannot broadcast: register it as int32 or int64, "
                    "or name it in the module's _ddp_params_and_buffers_to_ignore, so that each rank keeps its own."
                )
    agree_on_model(module.named_parameters(), compares_weights=compares_weights)
    agree_on_specs(buffers_of(module), None)


def check_optimizers(optimizers: Sequence[Optimizer], module: torch.nn.Module) -> None:
    """Check that the optimizers are the same on all ranks, and that each parameter is in one, once.

    Collective: all ranks, blocking.

    Args:
        optimizers: the optimizers that `configure_optimizers` returned.
        module: the user's.

    Raises:
        ConfigurationError, DisagreementError: on all ranks.
    """
    trained = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    with failing_together():
        for optimizer in optimizers:
            if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
                raise ConfigurationError(
                    f"{type(optimizer).__name__} has not called torch.optim.Optimizer.__init__, as wrappers for "
                    "differential privacy do not: their step would add noise to a gradient after it has been sent. "
                    "Use strategy='ddp'."
                )
        if len({*trained}) < len(trained):
            raise ConfigurationError(
                "A parameter is in two optimizers, or twice in one: its gradient would be exchanged twice. Give each "
                "parameter to one optimizer, once."
            )
        named, all_trained = dict(module.named_parameters()), {p for p in trained if p.requires_grad}
        if own := [name for name in getattr(module, IGNORED, ()) if named.get(name) in all_trained]:
            raise ConfigurationError(
                f"{IGNORED} names {own[0]!r}, which an optimizer of configure_optimizers trains: its gradients or "
                "weights would be averaged, and not be each rank's own. Train it with an optimizer that is not "
                "returned, which the module steps itself; or use strategy='ddp'."
            )
    agree_on_optimizers(optimizers, named.items())


def agree_on_hyperparameters(trainer: pl.Trainer) -> None:
    """Check that learning rates and the like are the same on all ranks, whose weights would part otherwise.

    Collective: all ranks, blocking.

    Raises:
        DisagreementError: on all ranks.
    """
    topic = (
        f"optimizers after step {trainer.global_step} (a scheduler may follow a metric whose value differs by rank: "
        "log the metric with sync_dist=True)"
    )
    agree_on_optimizers(trainer.optimizers, trainer.lightning_module.named_parameters(), topic=topic)


def agree_on_states(workers: Sequence[Synchronizer]) -> None:
    """Check that each optimizer has one state on all ranks, unless the coming step is local.

    Sparse and local steps of an earlier fit leave each rank a state of its own. A synchronous step with such a state
    would move the weights of each rank differently, and nobody would notice.

    Collective: the peers of the workers, blocking; a digest.

    Raises:
        DisagreementError: on all ranks; names the entries that differ.
    """
    found: dict[str, object] = {}
    for number, worker in enumerate(workers):
        optimizer = worker.optimizer
        if worker.plan.is_local or hasattr(optimizer, "consolidate_state_dict"):  # as ZeRO, which shards its state
            continue
        for name, parameter in worker.params.by_name().items():
            for key, value in optimizer.state.get(parameter, {}).items():
                found[f"optimizer {number}, {name}, {key}"] = _comparable(value)
    agree(
        "states of the optimizers at the start of the fit (sparse and local steps of an earlier fit leave each rank a "
        "state of its own: return a new optimizer from configure_optimizers, or load one state on all ranks)",
        found,
        workers[0].peers.group if workers else None,
    )


def _comparable(value: Any) -> object:
    """Return a value that ranks can compare: a digest of a tensor, a plain value, or the name of a class."""
    local: Any = value.to_local() if isinstance(value, DTensor) else value
    if isinstance(local, Tensor):
        return digest([local if type(local) is Tensor else local.dequantize()])[:8]
    return plain_values({"": value}).get("", type(value).__name__)


def agree_on_weights(module: torch.nn.Module, workers: Iterable[Synchronizer]) -> None:
    """Check, after the last step, that all ranks have the same weights where they must.

    A worker that exchanges gradients compares all parameters that are trained, a replica the parameters of its
    optimizer. Shards are not compared: if one shard raised, the ranks with the other shards would go on.

    Collective: the peers of the workers, blocking.

    Raises:
        DisagreementError: on all ranks.
    """
    ignored = getattr(module, IGNORED, ())
    for worker in workers:
        if worker.parameters_agree and not worker.peers.are_shards:
            compared = worker.params.by_name()
            if isinstance(worker, GradientSync):
                compared |= {name: each for name, each in module.named_parameters() if each.requires_grad}
                compared = {name: each for name, each in compared.items() if name not in ignored}
            agree_on_end(worker.step, compared, worker.peers.group)


def agree_on_monitored(trainer: pl.Trainer, device: torch.device) -> None:
    """Replace the metrics that callbacks and schedulers monitor by their mean over ranks: all ranks then decide alike.

    Collective: all ranks, blocking.
    """
    names = _monitored(trainer)
    if not names:
        return
    metrics = trainer.callback_metrics
    sums = torch.zeros(len(names), 2, dtype=torch.float64)
    for index, name in enumerate(names):
        if name in metrics:
            sums[index] = torch.tensor([float(metrics[name]), 1.0], dtype=torch.float32)
    sums = sums.to(device)
    all_reduce_(sums)
    results = trainer._results
    for name, (total, count) in zip(names, sums.tolist(), strict=True):
        if not count:
            continue
        mean = torch.tensor(total / count, device=device)
        for _, metric in () if results is None else results.valid_items():
            assert results is not None
            if name in results._forked_name(metric, on_step=False) and metric._computed is not None:
                metric._computed = mean.to(metric._computed.dtype) if isinstance(metric._computed, Tensor) else mean
        trainer._logger_connector._callback_metrics[name] = mean.to(torch.float32)


def _monitored(trainer: pl.Trainer) -> list[str]:
    names = {getattr(callback, "monitor", None) for callback in callbacks_of(trainer, Checkpoint, EarlyStopping)}
    names |= {config.monitor for config in trainer.lr_scheduler_configs if config.reduce_on_plateau}
    return sorted(str(name) for name in names if name)


def refuse(refusals: Iterable[tuple[object, str]]) -> None:
    """Raise ConfigurationError with the message of the first condition that is true."""
    for condition, message in refusals:
        if condition:
            raise ConfigurationError(message)


def refusals_of_replicas(
    method: Method, ddp_kwargs: Mapping[str, Any], trainer: pl.Trainer | None = None, *, has_layer_sync: bool = False
) -> list[tuple[object, str]]:
    """Return which keywords of DDP, and settings of the Trainer, cannot be used with averages of weights."""
    if not method.when.averages_weights:
        return []
    pruning = [] if trainer is None else callbacks_of(trainer, ModelPruning)
    averaging = [] if trainer is None else _averaging(trainer)
    return [
        (
            asked_of_buffers(ddp_kwargs),
            "broadcast_buffers=True (or forward_sync_buffers=True) sends the buffers of rank 0 in every forward pass; "
            "local SGD averages them with the parameters. Leave it out.",
        ),
        (
            ddp_kwargs.get("static_graph"),
            "static_graph=True: DDP learns the graph in steps that it reduces, and local steps are not. Leave it out.",
        ),
        (
            has_layer_sync,
            "Trainer(sync_batchnorm=True) communicates in every forward pass, and local SGD must send nothing between "
            "averages, which include batch norm's statistics. Leave it out.",
        ),
        (
            averaging,
            f"{' and '.join(averaging)} with a method that averages the weights after some steps: in between each rank "
            "has weights of its own, and its moving average would be its own, too. Leave the callback out, or take a "
            "method that exchanges gradients, such as 'dgc', 'int8' or 'lowbw'.",
        ),
        (
            any(each._prune_on_train_epoch_end for each in pruning),
            "ModelPruning(prune_on_train_epoch_end=True): at the end of an epoch each rank has weights of its own, and "
            "would prune different weights. Give prune_on_train_epoch_end=False, which prunes the last average after "
            "each validation, or a method that exchanges gradients, such as 'dgc'.",
        ),
        (
            getattr(trainer, "_val_check_time_interval", None) is not None,  # since Lightning 2.6
            "Trainer(val_check_interval=...) is a time, and each rank has a clock of its own: between averages one "
            "would validate while another trains on. Give a number of batches.",
        ),
    ]


def _averaging(trainer: pl.Trainer) -> list[str]:
    """Return the names of the callbacks that keep an average of the weights over steps."""
    classes = dict.fromkeys(type(each) for each in callbacks_in(trainer))
    return [cls.__name__ for cls in classes if any(NAMED_AVERAGING.fullmatch(base.__name__) for base in cls.__mro__)]


def warn_of_dropped_changes(trainer: pl.Trainer) -> None:
    """Warn that changes of the weights were dropped, which were made while the model had the last average."""
    rank_zero_warn(
        f"{type(trainer.strategy).__name__}: the weights were changed while the model had the last average, in a "
        "validation or a save. These changes are dropped, and the training goes on from the weights before. "
        "That is right for a module that normalises its weights in forward; a moving average of the weights "
        "needs a method that exchanges gradients, such as 'dgc' or 'int8'."
    )


def warn_if_seen_twice(trainer: pl.Trainer, workers: Sequence[LocalSync]) -> None:
    """Warn if validation, a plateau rule or early stopping comes more often than averages of the weights."""
    if all(worker.peers.num_ranks == 1 for worker in workers):
        return
    k_steps = max(1, workers[0].method.when.k_steps // max(len(worker.fragments) for worker in workers))
    accumulated = max(1, trainer.accumulate_grad_batches)
    epoch = trainer.num_training_batches / accumulated
    steps = dict[str, float]()
    if getattr(trainer, "enable_validation", False) and trainer.val_check_batch is not None:
        every = trainer.check_val_every_n_epoch
        if every is not None and trainer.val_check_batch >= trainer.num_training_batches:
            steps["validation"] = epoch * every
        else:
            steps["validation"] = trainer.val_check_batch / accumulated
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau:
            steps["a plateau rule"] = config.frequency * (1 if config.interval == "step" else epoch)
    if any(each._check_on_train_epoch_end for each in callbacks_of(trainer, EarlyStopping)):
        steps["early stopping"] = epoch
    often = {name: num_steps for name, num_steps in steps.items() if num_steps < k_steps}
    if often:
        each = " and ".join(f"{name} comes every {num_steps:g} steps" for name, num_steps in often.items())
        rank_zero_warn(
            f"{type(trainer.strategy).__name__}: {each}, and the weights are averaged every {k_steps} steps: between "
            f"two averages it sees the same weights again. Let it come every {k_steps} steps or later, or give a "
            "lower k_steps."
        )


def refusals_of_shards(method: Method) -> list[tuple[object, str]]:
    """Return the settings of a method that a sharded model does not allow, with the reasons."""
    when, where = method.when, method.where
    rule, fragments = (getattr(when, name, None) for name in ("rule", "num_fragments"))
    narrows = where.algorithm not in (None, "sharded") or where.inter_dtype != "float32"
    reasons = [
        (
            when.is_auto,
            "sparsity='auto' measures steps of DDP. Give the numbers: DGC(sparsity=[0.99], rampup_begin_step=100)",
        ),
        (
            rule in ("fleet", "adacomm"),
            f"rule={rule!r} follows the loss, which differs between the shards of a node. Take 'fixed' or 'qsr'",
        ),
        (
            fragments not in (None, 1),
            f"num_fragments={fragments!r}: parts are balanced by bytes, which differ between shards. Leave it out",
        ),
        (
            narrows,
            f"{where}: each rank exchanges its shard. Leave algorithm out; for fewer bits take QuantizedGradients",
        ),
    ]
    return [(condition, f"With a sharded model, {reason}.") for condition, reason in reasons]


def refuse_sparse_gradients(module: torch.nn.Module) -> None:
    """Raise ConfigurationError where a layer has gradients of torch's sparse layout."""
    for name, layer in module.named_modules():
        if isinstance(layer, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and layer.sparse:
            raise ConfigurationError(
                f"{type(layer).__name__} {name!r} has sparse gradients; only dense ones are exchanged. "
                "Build it with sparse=False: methods that compress send few elements of the dense gradient, too. "
                "Methods that average weights take sparse gradients if no step is synchronous (begin_step=0, "
                "k_steps > 1), between several ranks on one level."
            )


def warn_of_schedule(method: Method, trainer: pl.Trainer, workers: Sequence[Synchronizer]) -> None:
    """Warn if the run ends before its method has done anything but DDP; log what sparse steps or hidden averages do."""
    if all(worker.peers.num_participants == 1 and not worker.peers.may_grow for worker in workers):
        return
    begin, after = method.when.begin_step, 1
    if method.when.averages_weights:
        fragments = max(len(worker.fragments) for worker in workers)  # type: ignore[attr-defined]  # all are replicas
        after = max(1, method.when.k_steps // fragments)
        does, instead = "average", ", and after it each rank alone"
        k, num = method.when.k_steps, max(worker.peers.num_participants for worker in workers)
        if method.when.delay_steps and num > 1:
            factor = 1.0 + STEPS_OF_HIDDEN * math.log2(k) * math.log2(num)
            rank_zero_info(
                f"Hidden averages every {k} steps of {num} participants: train about {factor:.3g} times as many steps "
                "as with ddp; the learning rate's schedule and max_steps are yours."
            )
    elif method.compresses_gradients and not method.when.is_auto:
        does, instead = "compressed step", ""
        _tell_of_sparse_steps(workers)  # type: ignore[arg-type]  # of a method that compresses gradients all are
    else:
        return
    if begin + after > (num_steps := num_steps_of_fit(trainer, workers)) and not getattr(trainer, "fast_dev_run", 0):
        rank_zero_warn(
            f"This run has {num_steps:.0f} optimizer steps, and the first {does} would come with step {begin + after}: "
            f"up to step {begin} it trains as DDP{instead}. Begin earlier, or train longer."
        )


def _tell_of_sparse_steps(workers: Sequence[GradientSync]) -> None:
    """Log a change of an optimizer's arithmetic; warn if that is not complete, or if most elements are sent whole."""
    sparse, others = list[int](), list[int]()  # elements of each tensor
    for worker in workers:
        by_kind = worker.params.numels_by_kind(worker.method.what)
        sparse += by_kind[0]
        others += by_kind[1]
        if not worker.correction.is_complete and worker.peers.rank == 0:
            warn_if_incomplete(worker.optimizer, worker.method.when)
        if by_kind[0] and (note := worker.correction.note()):
            rank_zero_info(note)
    total = sum(sparse) + sum(others)
    if sum(sparse) < MUCH * total:
        rank_zero_warn(
            f"{len(sparse)} of {len(sparse) + len(others)} tensors, {sum(sparse) / total:.1%} of the {total:,} "
            "elements that are trained, are sent sparse. The other tensors have less than min_numel elements or are in "
            "exclude, and are sent whole. Change these two knobs to compress more."
        )


def check_package(thing: object, trainer: object) -> None:
    """Check that an object belongs to the Trainer's package of Lightning.

    Args:
        thing: a strategy, or a callback.
        trainer: the Trainer, or another object of its package.

    Raises:
        ConfigurationError: it belongs to the other package.
    """
    own, needed = package_of(thing), package_of(trainer)
    if own != needed and own and needed:
        raise ConfigurationError(
            f"{type(thing).__name__} is built on {own}, and the Trainer is one of {needed}. Import "
            f"{counterpart_of(thing, needed)} instead, or derive the class from it."
        )
