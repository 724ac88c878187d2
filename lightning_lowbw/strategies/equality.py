"""What is made equal on all ranks beside a method's exchanges; and the callback before all others, which asks for it.

What callbacks put into the weights, the metrics that they monitor, and the state of an optimizer that outlives a fit:
made equal where another fit begins, and refused elsewhere. Sparse and local steps make momenta and second moments each
rank's own. A synchronous step with them would move the weights of each rank differently, and nobody would notice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, Checkpoint, EarlyStopping
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_lowbw.comm.agreement import agree, differ, digest
from lightning_lowbw.comm.collectives import all_reduce_
from lightning_lowbw.comm.peers import Peers, mean_over
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.kernels.tensors import as_real
from lightning_lowbw.strategies.checks import callbacks_of
from lightning_lowbw.strategies.shared_buffers import IGNORED, buffers_of
from lightning_lowbw.sync.buffers import alike
from lightning_lowbw.sync.checks import plain_values
from lightning_lowbw.sync.local_view import DTensor
from lightning_lowbw.sync.synchronizer import Synchronizer

SHARDING = "ZeroRedundancyOptimizer"  # each rank has the state of its own parameters only; not imported for its name

_left: WeakKeyDictionary[Optimizer, list[RemovableHandle]] = WeakKeyDictionary()  # with a state of this rank's own
_loaded: WeakSet[Optimizer] = WeakSet()  # of these, those with another state: no hook may be removed by a hook


def _strategy_of(trainer: pl.Trainer) -> Any:
    return trainer.strategy


class FirstCallback(Callback):
    """The first in the list of callbacks, so that all others get the consensus, and metrics that agree."""

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        _strategy_of(trainer).begin_epoch()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        _strategy_of(trainer).end_batch()

    def on_validation_start(self, trainer: pl.Trainer, *_: Any) -> None:
        _strategy_of(trainer).begin_evaluation()

    def on_validation_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        _strategy_of(trainer).agree_on_evaluated()

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            _strategy_of(trainer).agree_on_metrics()

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        _strategy_of(trainer).end_epoch()

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        _strategy_of(trainer).leave_consensus()

    on_test_start = on_validation_start  # type: ignore[assignment]  # has no names of arguments, as the next ones
    on_test_batch_start = on_validation_batch_start  # type: ignore[assignment]
    # Of a rank without batches.
    on_validation_epoch_end = on_test_epoch_end = on_validation_batch_start  # type: ignore[assignment]


def weights_of(module: torch.nn.Module, peers: Peers) -> list[Tensor]:
    """Return the tensors of a module that are averaged: parameters, and floating buffers of one shape on all ranks.

    Not those that DDP ignores, nor parameters of a class of their own, such as frozen weights in few bits.

    Collective: all peers, blocking.
    """
    ignored = getattr(module, IGNORED, ())
    parameters = {name: p for name, p in module.named_parameters() if name not in ignored and type(p) is Parameter}
    buffers = alike(buffers_of(module), peers.group).values()
    floating = [each for each in buffers if each.is_floating_point() or each.is_complex()]
    return [*(p.detach() for p in parameters.values()), *floating]


def agree_on_weights_(tensors: Sequence[Tensor], peers: Peers, device: torch.device) -> int:
    """Average weights that differ after the last average: a callback (weight averaging) may have put in its own.

    In place:
        The tensors that differ.

    Collective: all peers, blocking; two numbers, and where these differ two for each tensor, and those that differ.

    Args:
        tensors: of the same shapes on all peers.
        peers: among which the weights should be equal.
        device: of the messages.

    Returns:
        The number of those that differed.
    """
    if peers.num_ranks == 1 or not tensors or not any(differ([tensors], peers.group, device)):
        return 0
    are_unequal = differ([[tensor] for tensor in tensors], peers.group, device)
    unequal = [tensor for tensor, is_unequal in zip(tensors, are_unequal, strict=True) if is_unequal]
    there = [tensor.to(device) for tensor in unequal]  # a callback may keep its average on the CPU
    for tensor, value in zip(unequal, mean_over(there, peers, device), strict=True):
        as_real(tensor).copy_(value)
    return len(unequal)


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


# The state of an optimizer that outlives a fit ------------------------------------------------------------------------


def agree_on_states_(workers: Iterable[Synchronizer], peers: Peers, device: torch.device) -> None:
    """Average the optimizers' states where they differ, as an earlier fit has left them; not where steps are local.

    In place:
        Floating tensors that differ.

    Collective: all peers, blocking; a digest, and as `agree_on_weights_`.

    Raises:
        DisagreementError: on all peers; the ranks have different entries, or different values that have no mean.
    """
    if peers.num_ranks == 1:
        return
    kinds: dict[str, object] = {}
    tensors: list[Tensor] = []
    for number, worker in enumerate(worker for worker in workers if not worker.is_local):
        names = {parameter: name for name, parameter in worker.by_name().items()}
        for path, value in _entries(worker.optimizer, names, f"optimizer {number}"):
            if not isinstance(value, Tensor):
                kinds[path] = plain_values({path: value}).get(path, type(value).__name__)
                continue
            local: Any = value.to_local() if isinstance(value, DTensor) else value
            has_mean = type(local) is Tensor and (local.is_floating_point() or local.is_complex())
            # Of integers, and of what is kept in few bits, a mean means nothing.
            kinds[path] = tuple(local.shape), str(local.dtype), "" if has_mean else _digest(local)
            if has_mean:
                tensors.append(local)
    agree(
        "optimizers' states at the start of the fit (an earlier one may have left them: then make a new optimizer)",
        kinds,
        peers.group,
    )
    num_averaged = agree_on_weights_(tensors, peers, device)
    if num_averaged:
        rank_zero_info(
            f"The ranks begin with optimizers of different states, as sparse or local steps of an earlier fit leave "
            f"them: {num_averaged} of {len(tensors)} tensors have been averaged."
        )


def _digest(tensor: Any) -> str:
    return digest([tensor if type(tensor) is Tensor else tensor.dequantize()])[:8]


def _entries(optimizer: Optimizer, names: Mapping[Any, str], path: str) -> Iterator[tuple[str, Any]]:
    """Yield what an optimizer keeps, and those that it wraps: tensors and other values, with where each is."""
    if any(each.__name__ == SHARDING for each in type(optimizer).__mro__):
        return
    own = getattr(optimizer, "state", {})
    for number, (key, value) in enumerate(dict(own).items()):
        yield from _leaves(value, f"{path}, {names.get(key, number) if isinstance(key, Tensor) else key}")
    for name, inner in _wrapped_by(optimizer):
        if getattr(inner, "state", None) is not own:
            yield from _entries(inner, names, f"{path}.{name}")


def _wrapped_by(optimizer: Optimizer) -> list[tuple[str, Optimizer]]:
    """Return the optimizers that a wrapper, such as SAM or Lookahead, steps in its own step."""
    return [(name, value) for name, value in vars(optimizer).items() if isinstance(value, Optimizer)]


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _leaves(each, f"{path}, {key}")
    elif isinstance(value, (list, tuple)):
        for number, each in enumerate(value):
            yield from _leaves(each, f"{path}, {number}")
    else:
        yield path, value


def leave_own_state(optimizer: Optimizer) -> None:
    """Refuse the next step of an optimizer whose state is this rank's own, until `take_over`, or until one is loaded.

    A fit under a strategy of this package takes over; stock DDP and a plain loop cannot know. A copy of the optimizer
    has no hooks.
    """
    for each in [optimizer, *(inner for _, inner in _wrapped_by(optimizer))]:
        take_over(each)
        _left[each] = [each.register_step_pre_hook(_refuse), each.register_load_state_dict_post_hook(_loaded.add)]


def take_over(optimizer: Optimizer) -> None:
    """Allow the steps of an optimizer again."""
    for each in [optimizer, *(inner for _, inner in _wrapped_by(optimizer))]:
        _loaded.discard(each)
        for handle in _left.pop(each, []):
            handle.remove()


def _refuse(optimizer: Optimizer, *_: Any) -> None:
    """The hook before a step.

    Raises:
        ConfigurationError: there are several ranks, and each has a state of its own.
    """
    has_ranks = dist.is_initialized() and dist.get_world_size() > 1
    if has_ranks and optimizer.state and optimizer not in _loaded:
        raise ConfigurationError(
            f"The state of this {type(optimizer).__name__} is each rank's own, as sparse or local steps of an earlier "
            "fit have left it, and the ranks' weights would part. Make a new optimizer, load one state on all ranks, "
            "or fit with a strategy of lightning_lowbw, which averages it."
        )
