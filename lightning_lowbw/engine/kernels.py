"""Compiles kernels at the start of the training, on all ranks or on none, because they round differently."""

from __future__ import annotations

import logging
import threading

import torch
import torch.distributed as dist

from lightning_lowbw.namespaces import LOGGER
from lightning_lowbw.ops import dispatch

_logger = logging.getLogger(LOGGER)
PATIENCE_S = 2.0  # after which rank 0 says what it is doing, or waits for
COMPILING = "Compiling kernels, here or on another rank. They are kept for the next start, where they can be written."


def prepare_kernels(device: torch.device, group: dist.ProcessGroup | None = None) -> str | None:
    """Compile each kernel of a device and run it once; if this fails on one rank, no rank uses them.

    Otherwise a node without a C compiler would fail alone at its first sparse step, hours later, and the others would
    wait.

    Collective: all ranks of the group, blocking.

    Args:
        device: of the parameters.
        group: the process group; None is the world.

    Returns:
        None, or one sentence with the rank and the reason why plain torch is used instead; logged on rank 0.
    """
    is_first = not dist.is_initialized() or dist.get_rank(group) == 0
    saying = threading.Timer(PATIENCE_S, _logger.info, [COMPILING])
    if is_first:
        saying.start()
    try:
        reasons = [dispatch.prepare(device)]
        if dist.is_initialized():
            reasons *= dist.get_world_size(group)
            dist.all_gather_object(reasons, reasons[0], group=group)
    finally:
        saying.cancel()
    failed = [f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason is not None]
    if not failed:
        return None
    dispatch.disable(device, failed[0])
    sentence = f"All ranks compress in plain torch, which is slower. {failed[0]}"
    if is_first:
        _logger.warning(sentence)
    return sentence
