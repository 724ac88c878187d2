"""Detects ranks with different settings before the training, and lets all ranks fail together."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lowbw.errors import ConfigurationError, DisagreementError
from lightning_lowbw.kernels.reference import as_real
from lightning_lowbw.kernels.tensors import flat_in_order

MAX_DIFFERENCES = 8  # lines of an error message
CHUNK, CHUNK_OF_CPU = 1 << 22, 1 << 16  # elements that a checksum takes at a time: few launches, or within the cache

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
    digests = gather(digest, "settings", group)
    if len(set(digests)) == 1:
        return
    by_rank = gather(stated, "settings that differ", group)
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
        messages = gather(None if error is None else f"{type(error).__name__}: {error}", "errors", group)
        failed = [f"  rank {rank}: {message}" for rank, message in enumerate(messages) if message is not None]
        if failed and error is None:
            raise ConfigurationError("Other ranks cannot go on:\n" + "\n".join(failed))
    if error is not None:
        raise error


def checksum(tensors: Iterable[Tensor]) -> Tensor | int:
    """Return a hash of the bits of some tensors in their order in memory, on their device. Cheaper than `digest`.

    An element in another place, a matrix with the other sign, or roundings that add up to nothing change it, which the
    sum of the bits would not show.

    Returns:
        int64, a scalar; 0 where there are no elements.
    """
    alike: dict[tuple[torch.device, int], list[Tensor]] = {}
    for tensor in tensors:
        real = as_real(tensor.detach())
        size = min(real.itemsize, 4)
        bits = flat_in_order(real, real).view({1: torch.int8, 2: torch.int16, 4: torch.int32}[size])
        alike.setdefault((real.device, size), []).append(bits)
    hashes: dict[torch.device, list[Tensor]] = {}
    for (device, _), flats in alike.items():
        length = min(CHUNK_OF_CPU if device.type == "cpu" else CHUNK, sum(flat.numel() for flat in flats))
        weights = _weights(length, torch.int32, device)
        together, mixed = torch.empty_like(weights), torch.empty_like(weights)  # once: small blocks would fragment
        for parts in _chunks(flats, length):
            num = sum(part.numel() for part in parts)
            is_one = len(parts) == 1 and parts[0].dtype == torch.int32
            chunk = parts[0] if is_one else torch.cat(parts, out=together[:num])
            # Else two signs that have changed would cancel.
            torch.bitwise_right_shift(chunk, 15, out=mixed[:num]).bitwise_xor_(chunk).mul_(weights[:num])
            hashes.setdefault(device, []).append(mixed[:num].sum(dtype=torch.int32))
    total: Tensor | int = 0
    for device, each in hashes.items():
        total = total + (torch.stack(each).long() * _weights(len(each), torch.int64, device)).sum()
    return total ^ (total >> 32)


def _chunks(flats: Iterable[Tensor], length: int) -> Iterator[list[Tensor]]:
    """Yield all elements in lists of at most so many; small tensors together, for fewer launches."""
    waiting: list[Tensor] = []
    num_waiting = 0
    for part in (part for flat in flats for part in flat.split(max(1, length)) if part.numel()):
        if num_waiting + part.numel() > length:
            yield waiting
            waiting, num_waiting = [], 0
        waiting.append(part)
        num_waiting += part.numel()
    if waiting:
        yield waiting


def _weights(num: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return odd numbers without a pattern, one for each place: the same on all ranks."""
    numbers = torch.arange(1, num + 1, dtype=dtype, device=device)
    for factor in (0x2C1B3C6D, 0x297A2D39):  # of a well-known hash of integers
        numbers = numbers.mul_(factor)
        numbers = numbers ^ (numbers >> 15)
    return numbers | 1


def differ(lists: Sequence[Sequence[Tensor]], group: dist.ProcessGroup | None, device: torch.device) -> list[bool]:
    """Return which lists of tensors differ between ranks, by their checksums.

    Collective: all ranks of the group, blocking; two numbers for each list, which are in no ledger.

    Args:
        lists: of the same shapes on all ranks.
        group: the process group; None is the world.
        device: of the message.
    """
    bits = torch.stack([torch.as_tensor(checksum(each), dtype=torch.int64, device=device) for each in lists])
    extremes = torch.stack([bits, -bits])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    return (extremes[0] != -extremes[1]).tolist()


def digest(tensors: Iterable[Tensor]) -> str:
    """Return a digest of the exact bits of some tensors: equal on two ranks if and only if their replicas are."""
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def gather(value: T, topic: str, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return a plain value of each rank, in their order.

    Collective: all ranks of the group, blocking; none where torch.distributed is not initialised, which is one rank.

    Args:
        value: of this rank.
        topic: what the value is; the same on all ranks.
        group: the process group; None is the world.

    Raises:
        DisagreementError: on all ranks; some are at another call of this function, and have sent something else.
    """
    if not dist.is_initialized():
        return [value]
    gathered = [(topic, value)] * dist.get_world_size(group)
    dist.all_gather_object(gathered, (topic, value), group=group)
    if any(other != topic for other, _ in gathered):
        topics = ", ".join(f"rank {rank} its {other}" for rank, (other, _) in enumerate(gathered))
        raise DisagreementError(
            f"The ranks do different things at the same time. They have sent: {topics}. Give all ranks the same "
            "callbacks, the same settings, and the same code."
        )
    return [each for _, each in gathered]
