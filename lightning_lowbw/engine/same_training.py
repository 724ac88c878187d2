"""Checks that the ranks train the same model with the same optimizers, from the same weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_lowbw.errors import DisagreementError
from lightning_lowbw.where.agreement import agree, checksum, digest, failing_together

if TYPE_CHECKING:
    from lightning_lowbw.engine.worker import Worker

PLAIN = (bool, int, float, str, type(None))  # what can be compared between ranks
# What torch's optimizers keep, of which a method makes each rank's its own; other entries may be scratch space.
MOMENTS = ("momentum_buffer", "exp_avg", "exp_avg_sq")


def plain_values(values: Mapping[str, object]) -> dict[str, object]:
    """Return those of some named values that can be compared between ranks; tensors of one number as that."""
    numbers = {
        name: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        for name, value in values.items()
    }
    return {name: value for name, value in numbers.items() if _is_plain(value)}


def _is_plain(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return isinstance(value, PLAIN) and not (isinstance(value, str) and _is_device(value))


def _is_device(text: str) -> bool:
    """Whether a text is a device with its number, of which each rank has its own."""
    try:
        return torch.device(text).index is not None
    except RuntimeError:
        return False


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
    with failing_together(group):  # a lazy layer has no shape yet
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
    *,
    topic: str = "optimizers",
) -> None:
    """Check that the optimizers, their param groups and the plain values in these are the same on all ranks.

    Collective: all ranks of the group, blocking.

    Args:
        optimizers: of the model.
        named_parameters: of the model.
        group: None is the world.
        topic: what these are, for the message.

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
    agree(topic, facts, group)


def agree_on_beginning(worker: Worker) -> None:
    """Check, at the first step after `attach` or after a state was loaded, that the ranks are at the same one.

    Their weights are equal, except between two averages. At step 0 the optimizers' states are, too: a method makes them
    different later, and then each rank needs its own `worker.state_dict()` to go on.

    Collective: all ranks of the worker, blocking.

    Raises:
        DisagreementError: on all ranks.
    """
    group = worker.peers.group
    with failing_together(group):
        facts: dict[str, object] = {"worker.step": worker.step}
        if worker.parameters_agree:
            facts |= _checksums("checksum of {}", worker.by_name())
        if worker.step == 0 and not worker.is_exchanged:  # by hand, with this rank's own gradients in the state
            entries = {name: worker.optimizer.state.get(p) for name, p in worker.by_name().items()}
            for moment in MOMENTS:
                of_moment = {name: e[moment] for name, e in entries.items() if isinstance(e, Mapping) and moment in e}
                facts |= _checksums(f"checksum of the optimizer's {moment} of {{}}", of_moment)
    agree(
        "first step (all begin with the same weights; to resume, each rank loads its own worker.state_dict(), after "
        "the model and the optimizer)",
        facts,
        group,
    )


def _checksums(title: str, tensors: Mapping[str, object]) -> dict[str, object]:
    """Return a checksum of each plain tensor by name; waits for a GPU once."""
    plain = {n: t for n, t in tensors.items() if isinstance(t, Tensor) and t.layout == torch.strided}
    if not plain:
        return {}
    device = next(iter(plain.values())).device
    sums = torch.stack([torch.as_tensor(checksum([tensor]), device=device) for tensor in plain.values()])
    return {title.format(name): number for name, number in zip(plain, sums.tolist(), strict=True)}


def raise_at_other_batches(
    worker: Worker, group: dist.ProcessGroup | None, facts: Mapping[str, object] = MappingProxyType({})
) -> NoReturn:
    """Say which rank is where: some have left out a step, or taken one more, and would mix batches or hang.

    Collective: all ranks of the group, blocking; all have found that they are at different places.

    Args:
        worker: that communicates.
        group: None is the world.
        facts: more about this rank's place.

    Raises:
        DisagreementError: on all ranks.
    """
    topic = (
        "batch (of the run) of an optimizer step. A rank in a later one has left out optimizer.step(), and all must "
        "take the same steps. Before the exchange .grad is a rank's own: never branch on it, to skip a step or to clip"
    )
    agree(topic, {"batch": worker.batch, "optimizer steps": worker.step, **facts}, group)
    raise DisagreementError(f"Step {worker.step}: the ranks were at different batches, and are not any more.")


def agree_on_end(worker: Worker) -> None:
    """Check, after the last step, that the ranks have taken the same steps, and have the same weights.

    Collective: all ranks of the worker, blocking.

    Raises:
        DisagreementError: on all ranks.
    """
    checksums = _checksums("checksum of {}", worker.by_name())
    agree("end of the training", {"worker.step": worker.step, **checksums}, worker.peers.group)
