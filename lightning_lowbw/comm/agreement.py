"""Detects ranks with different settings before the training, and lets all ranks fail together."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lowbw.comm.collectives import all_reduce_
from lightning_lowbw.errors import ConfigurationError, DisagreementError
from lightning_lowbw.kernels.tensors import checksum

MAX_DIFFERENCES = 8  # lines of an error message

T = TypeVar("T")


def agree(
    topic: str,
    settings: Mapping[str, object],
    group: dist.ProcessGroup | None = None,
    *,
    advice: str = "make it the same everywhere",
) -> None:
    """Check that all ranks state the same settings.

    Collective: all ranks, blocking; sends a digest, and the settings themselves only if the digests differ.

    Args:
        topic: what the settings are about, for the message.
        settings: plain values; compared by `repr`.
        group: the process group; None is the world.
        advice: what to do about a difference, for the message.

    Raises:
        DisagreementError: on all ranks; names each setting that differs, with its value on each rank.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return
    stated = {name: repr(value) for name, value in settings.items()}
    digest = hashlib.sha256(repr(sorted(stated.items())).encode()).hexdigest()  # 64 bytes, however many settings
    digests = gather(digest, "settings", group)
    if len(set(digests)) == 1:
        return
    by_rank = gather(stated, "settings that differ", group)
    differences = []
    for name in dict.fromkeys(name for settings_of_rank in by_rank for name in settings_of_rank):
        values = [settings_of_rank.get(name, "nothing") for settings_of_rank in by_rank]
        if len(set(values)) > 1:
            differences.append(f"  {name}: " + ", ".join(f"rank {rank} has {v}" for rank, v in enumerate(values)))
    shown = differences[:MAX_DIFFERENCES]
    if len(differences) > len(shown):
        shown.append(f"  and {len(differences) - len(shown)} more")
    raise DisagreementError(f"The ranks disagree about the {topic}; {advice}:\n" + "\n".join(shown))


@contextmanager
def failing_together(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Run a block that may raise on some ranks only, and raise an error on every rank if it did.

    Collective: all ranks, at the end of the block. The block itself must not communicate.

    Raises:
        Exception: the block's own error on the rank where it was raised; on the other
            ranks `ConfigurationError`, with the ranks and messages.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:  # noqa: BLE001 - it is raised again below, after it has been sent to the other ranks
        error = raised
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        messages = gather(None if error is None else f"{type(error).__name__}: {error}", "errors", group)
        failed = [f"  rank {rank}: {message}" for rank, message in enumerate(messages) if message is not None]
        if failed and error is None:
            raise ConfigurationError("Other ranks cannot go on:\n" + "\n".join(failed))
    if error is not None:
        raise error


def differ(lists: Sequence[Sequence[Tensor]], group: dist.ProcessGroup | None, device: torch.device) -> list[bool]:
    """Return which lists of tensors differ between ranks, by their checksums.

    Collective: all ranks of the group, blocking; two numbers for each list, which no ledger counts.

    Args:
        lists: the tensors; their shapes are equal on all ranks.
        group: the process group; None is the world.
        device: the device of the message.
    """
    bits = torch.stack([torch.as_tensor(checksum(tensors), dtype=torch.int64, device=device) for tensors in lists])
    extremes = torch.stack([bits, -bits])  # the maximum of -x is the minimum of x: both in one all-reduce
    all_reduce_(extremes, group, dist.ReduceOp.MAX)
    return (extremes[0] != -extremes[1]).tolist()


def digest(tensors: Iterable[Tensor]) -> str:
    """Return a digest of the exact bits of some tensors: equal on two ranks if and only if their replicas are."""
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def gather(value: T, topic: str, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return a plain value of each rank, in their order.

    Collective: all ranks of the group, blocking; no communication if there is one rank, or torch.distributed is not
    initialised.

    Args:
        value: the value of this rank.
        topic: what the value is; the same on all ranks.
        group: the process group; None is the world.

    Raises:
        DisagreementError: on all ranks; some ranks are at another call of this function, and have sent its value.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [value]
    gathered = [(topic, value)] * dist.get_world_size(group)
    dist.all_gather_object(gathered, (topic, value), group=group)
    if any(other != topic for other, _ in gathered):  # ranks at two calls would receive each other's values
        topics = ", ".join(f"rank {rank} its {other}" for rank, (other, _) in enumerate(gathered))
        raise DisagreementError(
            f"The ranks do different things at the same time. They have sent: {topics}. Give all ranks the same number "
            "of batches, the same callbacks, settings and code."
        )
    return [value for _, value in gathered]
