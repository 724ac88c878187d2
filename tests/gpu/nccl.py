"""NCCL between ranks that share a device."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist


def through_nccl_on_one_device(store: str, function: Any, *args: Any) -> Any:
    """Call a function with NCCL between ranks of one device, which it allows where each claims a host of its own."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    os.environ.update(NCCL_HOSTID=f"rank {rank}", NCCL_SOCKET_IFNAME="lo")
    torch.cuda.set_device(0)
    dist.destroy_process_group()
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    return function("cuda", *args)
