"""The state of an optimizer that outlives a fit: made equal on all ranks where another begins, and refused elsewhere.

Sparse and local steps make momenta and second moments each rank's own. A synchronous step with them would move the
weights of each rank differently, and nobody would notice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_lowbw.comm.agreement import agree, digest
from lightning_lowbw.comm.peers import Peers
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.strategies.callback_agreement import agree_on_weights_
from lightning_lowbw.sync.checks import plain_values
from lightning_lowbw.sync.local_view import DTensor
from lightning_lowbw.sync.synchronizer import Synchronizer

SHARDING = "ZeroRedundancyOptimizer"  # each rank has the state of its own parameters only; not imported for its name

_left: WeakKeyDictionary[Optimizer, list[RemovableHandle]] = WeakKeyDictionary()  # with a state of this rank's own
_loaded: WeakSet[Optimizer] = WeakSet()  # of these, those with another state: no hook may be removed by a hook


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
