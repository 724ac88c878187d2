"""Ranks that share a GPU, and weights that were trained there beside those of a CPU."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

FEW = 1e-3  # of the elements; with AdamW gradients that differ by 3e-6 of their size let up to 6e-4 differ, on a CPU


def init_process_group(backend: str, store: str, rank: int, num_ranks: int, *, is_bound: bool) -> None:
    """Make the world of ranks on GPUs; where they have to share one, NCCL allows it if each claims a host of its own.

    Args:
        store: a file that is not there yet.
        is_bound: whether to a device, as Lightning does: then groups are split off from the world's communicator.
    """
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    if num_ranks > torch.cuda.device_count():
        # Between "hosts" NCCL goes through sockets: no InfiniBand, no links between GPUs.
        os.environ.update(NCCL_HOSTID=f"{os.getpid()}", NCCL_SOCKET_IFNAME="lo", NCCL_NET="Socket")
    options: dict[str, Any] = {"device_id": device} if is_bound else {}
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=num_ranks, **options)


def check_near(mine: Sequence[Tensor], expected: Sequence[Tensor], *, rtol: float, atol: float, selects: bool) -> None:
    """Check that all weights agree; with a method that selects or rounds, all but a few.

    The gradients of two devices differ by some 3e-6 of their size. Where two magnitudes at the border of the selection
    differ by less, each device sends the other element, and these two weights differ by a whole step, however small
    the noise is; so does a value between two integers. Such elements are counted: a tolerance that covers them would
    cover every fault.
    """
    assert all(bool(each.isfinite().all()) for each in mine)
    pairs = list(zip(mine, expected, strict=True))
    num_apart = sum(int((~torch.isclose(a, b, rtol=rtol, atol=atol)).sum()) for a, b in pairs)
    num_allowed = 4 + round(FEW * sum(a.numel() for a in mine)) if selects else 0
    assert num_apart <= num_allowed, f"{num_apart} elements differ, {num_allowed} may"
