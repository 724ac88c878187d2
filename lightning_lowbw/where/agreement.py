"""Detects ranks with different settings before the training, and lets all ranks fail together."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lowbw.errors import ConfigurationError, DisagreementError
from lightning_lowbw.ops.reference import as_real

MAX_DIFFERENCES = 8  # lines of an error message

T = TypeVar("T")


def agree(topic: str, facts: Mapping[str, object], group: dist.ProcessGroup | None = None) -> None:
    """Check that all ranks state the same facts.

    Collective: all ranks, blocking; sends a digest, and the facts themselves only where the digests differ.

    Args:
        topic: what the facts are about, for the message.
        facts: plain values; compared by `repr`.
        group: the process group; None is the world.

    Raises:
        DisagreementError: on all ranks; names each fact that differs, with the values by rank.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return
    stated = {name: repr(value) for name, value in facts.items()}
    digest = hashlib.sha256(repr(sorted(stated.items())).encode()).hexdigest()
    digests = gather(digest, group)
    if len(set(digests)) == 1:
        return
    by_rank = gather(stated, group)
    differences = []
    for name in dict.fromkeys(name for facts_of_rank in by_rank for name in facts_of_rank):
        values = [facts_of_rank.get(name, "nothing") for facts_of_rank in by_rank]
        if len(set(values)) > 1:
            differences.append(f"  {name}: " + ", ".join(f"rank {rank} has {v}" for rank, v in enumerate(values)))
    shown = differences[:MAX_DIFFERENCES]
    if len(differences) > len(shown):
        shown.append(f"  and {len(differences) - len(shown)} more")
    raise DisagreementError(f"The ranks disagree about the {topic}; make it the same everywhere:\n" + "\n".join(shown))


@contextmanager
def failing_together(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Run a block that may raise on some ranks only, and raise on all of them if it did.

    Collective: all ranks, at the end of the block. The block itself must not communicate.

    Raises:
        Exception: the block's own error on the rank where it was raised; `ConfigurationError` on the others, with
            the ranks and messages.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:  # noqa: BLE001 - it is raised again below, after it has been sent to the others
        error = raised
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        messages = gather(None if error is None else f"{type(error).__name__}: {error}", group)
        failed = [f"  rank {rank}: {message}" for rank, message in enumerate(messages) if message is not None]
        if failed and error is None:
            raise ConfigurationError("Other ranks cannot go on:\n" + "\n".join(failed))
    if error is not None:
        raise error


def checksum(tensors: Iterable[Tensor]) -> Tensor | int:
    """Return the sum of the bits of some tensors, read as integers; stays on their device. Cheaper than `digest`."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        real = as_real(tensor)
        bits = real.detach().view(integers[real.itemsize])
        # In its own type, or it would first be copied in 64 bits.
        sums.setdefault(real.device, []).append(bits.sum(dtype=bits.dtype))
    return sum(torch.stack(each).long().sum() for each in sums.values())


def digest(tensors: Iterable[Tensor]) -> str:
    """Return a digest of the exact bits of some tensors: equal on two ranks if and only if their replicas are."""
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return a plain value of each rank, in their order.

    Collective: all ranks of the group, blocking; none where torch.distributed is not initialised, which is one rank.

    Args:
        value: of this rank.
        group: the process group; None is the world.
    """
    if not dist.is_initialized():
        return [value]
    gathered = [value] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered
