"""Checks that the ranks train the same model with the same optimizers, from the same weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_lowbw.where.agreement import agree, checksum, digest

if TYPE_CHECKING:
    from lightning_lowbw.engine.worker import Worker

PLAIN = (bool, int, float, str, tuple, type(None))  # what can be compared between ranks


def plain_values(values: Mapping[str, object]) -> dict[str, object]:
    """Return those of some named values that can be compared between ranks."""
    return {name: value for name, value in values.items() if isinstance(value, PLAIN)}


def agree_on_model(
    named_parameters: Iterable[tuple[str, Parameter]],
    named_buffers: Iterable[tuple[str, Tensor]] = (),
    group: dist.ProcessGroup | None = None,
    *,
    compares_weights: bool = False,
) -> None:
    """Check that the model is the same on all ranks; DDP's own error about models that differ does not say where.

    Collective: all ranks of the group, blocking.

    Args:
        named_parameters: of the model.
        named_buffers: those that are averaged.
        group: None is the world.
        compares_weights: whether the weights must be equal already, because no broadcast makes them equal.

    Raises:
        DisagreementError: on all ranks; names, shapes, dtypes, layouts, what is frozen or weights differ.
    """
    parameters = list(named_parameters)
    facts: dict[str, object] = {
        f"parameter {name}": (tuple(p.shape), str(p.dtype), p.stride(), "trains" if p.requires_grad else "frozen")
        for name, p in parameters
    }
    facts |= {f"buffer {name}": (tuple(b.shape), str(b.dtype)) for name, b in named_buffers}
    if compares_weights:
        facts |= {f"weights of {name} (init_sync=False)": digest([p])[:8] for name, p in parameters}
    agree("model", facts, group)


def agree_on_optimizers(
    optimizers: Sequence[Optimizer],
    named_parameters: Iterable[tuple[str, Tensor]],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Check that the optimizers, their param groups and the plain values in these are the same on all ranks.

    Collective: all ranks of the group, blocking.

    Raises:
        DisagreementError: on all ranks.
    """
    names = {id(parameter): name for name, parameter in named_parameters}
    facts: dict[str, object] = {"optimizers": [type(optimizer).__name__ for optimizer in optimizers]}
    for number, optimizer in enumerate(optimizers):
        for index, of_group in enumerate(optimizer.param_groups):
            prefix = f"optimizer {number}, param group {index}"
            facts[f"{prefix}, parameters"] = [names.get(id(p), tuple(p.shape)) for p in of_group["params"]]
            facts |= {f"{prefix}, {key}": value for key, value in plain_values(of_group).items()}
    agree("optimizers", facts, group)


def agree_on_beginning(worker: Worker) -> None:
    """Check, at the first step after `attach`, that the ranks are at the same one.

    At step 0 their weights and the states of their optimizers are equal: a method makes them different later, and then
    each rank needs its own `worker.state_dict()` to go on.

    Collective: all ranks of the worker, blocking.

    Raises:
        DisagreementError: on all ranks.
    """
    facts: dict[str, object] = {"worker.step": worker.step}
    if worker.step == 0:
        facts["checksum of the weights"] = int(checksum(worker.parameters()))
        if not worker.is_exchanged:  # by hand, which has put this rank's own gradients into the state
            states = [value for entry in worker.optimizer.state.values() for value in entry.values()]
            facts["checksum of the optimizer's state"] = int(checksum(s for s in states if type(s) is Tensor))
    agree(
        "first step. All begin with the same weights; to resume, each rank loads its own worker.state_dict(), after "
        "the model and optimizer",
        facts,
        worker.peers.group,
    )


def agree_on_end(worker: Worker) -> None:
    """Check, after the last step, that the ranks have taken the same steps, and have the same weights.

    Collective: all ranks of the worker, blocking.

    Raises:
        DisagreementError: on all ranks.
    """
    weights = int(checksum(worker.parameters()))
    agree("end of the training", {"worker.step": worker.step, "checksum of the weights": weights}, worker.peers.group)
