"""Compiles kernels at the start of the training, on all ranks or on none, because they round differently."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from lightning_lowbw.comm.agreement import gather
from lightning_lowbw.compress.top_k import LEAST_NUMEL
from lightning_lowbw.kernels import dispatch
from lightning_lowbw.kernels.dispatch import NO_KERNELS, Uses
from lightning_lowbw.kernels.table import DTYPES, Kind
from lightning_lowbw.namespaces import LOGGER
from lightning_lowbw.sync.synchronizer import Synchronizer

_logger = logging.getLogger(LOGGER)
PATIENCE_S = 2.0  # after which rank 0 says what it is doing, or waits for
COMPILING = "Kernels are compiled or loaded, here or on another rank. Compiled ones are kept for the next start."


def prepare_kernels(device: torch.device, uses: Uses, group: dist.ProcessGroup | None = None) -> str | None:
    """Compile each kernel that a training uses and run it once; if this fails on one rank, no rank uses them.

    Otherwise a node without a C compiler would fail alone at its first sparse step, hours later, and the others would
    wait.

    Collective: all ranks of the group, blocking.

    Args:
        device: of the parameters.
        uses: of the Triton kernels; see `uses_of`.
        group: the process group; None is the world.

    Returns:
        None, or one sentence with the rank and the reason why plain torch is used instead; logged on rank 0.
    """
    is_first = not dist.is_initialized() or dist.get_rank(group) == 0
    saying = threading.Timer(PATIENCE_S, _logger.info, [COMPILING])
    if is_first:
        saying.start()
    try:
        reasons = gather(dispatch.prepare(device, uses), "kernels", group)
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


def uses_of(workers: Sequence[Synchronizer], *, measures: bool = False) -> Uses:
    """Return what compressed steps, or averages, of some workers need of the Triton kernels, at any density.

    What changes this later is compiled when it is used: parameters of another dtype that are added to an optimizer, a
    momentum that is 0 now in a model of narrow dtype.

    Args:
        workers: of the optimizers, all with one method.
        measures: whether sparse steps of tensors in float32 are timed, to choose a schedule (`cost_model`).
    """
    what, when, peers = workers[0].method.what, workers[0].method.when, workers[0].peers
    uses = what.uses(peers.num_participants, peers.num_local_ranks, when=when)
    is_alone = peers.num_participants == 1 and not peers.may_grow
    # int8 is timed, too.
    codes = tuple(dict.fromkeys([*(() if is_alone else uses.codes), *(8,) * measures]))
    if not uses.value_dtypes or is_alone:
        return replace(NO_KERNELS, codes=codes)
    # An ordered set is a dict here: the same order on all ranks.
    kinds = dict.fromkeys(kind for worker in workers if uses.kinds for kind in _kinds_of(worker))
    if measures:
        kinds[_kind_of(torch.float32)] = None
    parameters = (each for worker in workers for each in worker.parameters() if not when.averages_weights)
    mean_dtypes = dict.fromkeys(each.dtype for each in parameters if each.dtype in DTYPES)
    return replace(
        uses,
        kinds=tuple(kind._replace(is_aligned=is_aligned) for kind in kinds for is_aligned in (True, False)),
        mean_dtypes=tuple(mean_dtypes),
        codes=codes,
    )


def _kinds_of(worker: Synchronizer) -> Iterable[Kind]:
    """Yield the kinds of a worker's tensors, whatever their alignment: that of a gradient may change in each step."""
    correction = worker.correction
    if correction is None:
        yield _kind_of(torch.float32)  # changes of the weights
        return
    for group in worker.optimizer.param_groups:
        for parameter in group["params"]:
            # Which tensors are small is known at the first step: of those that are trained then.
            name, numel = worker.name_of(parameter), worker.params.numel_of(parameter)
            if parameter.dtype in DTYPES and worker.method.what.compresses(name, numel, LEAST_NUMEL):
                has_velocity = correction.has_velocity(correction.constants(group))
                yield _kind_of(parameter.dtype, has_velocity=has_velocity, is_adam=correction.has_second_moment)


def _kind_of(dtype: torch.dtype, *, has_velocity: bool = False, is_adam: bool = False) -> Kind:
    return Kind(dtype, dtype if has_velocity else torch.float32, dtype, is_adam=is_adam, is_aligned=True)
