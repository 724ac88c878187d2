"""Tries the compiled kernels before the training, on all ranks together, because they round differently than torch.

A node without a C compiler would otherwise fail alone at its first compressed step, hours later. The trial is one
exchange among echoes of this rank, on a few small tensors. It compiles what the training launches.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lightning_lowbw.comm.agreement import gather
from lightning_lowbw.comm.echoes import echo
from lightning_lowbw.comm.peers import Peers
from lightning_lowbw.comm.topology import Where
from lightning_lowbw.kernels import dispatch
from lightning_lowbw.kernels.table import GPU_BLOCK, JoinedTable
from lightning_lowbw.kernels.tensors import CPU
from lightning_lowbw.namespaces import LOGGER
from lightning_lowbw.payloads.params import LEAST_NUMEL
from lightning_lowbw.payloads.payload import Payload
from lightning_lowbw.payloads.top_k import SampledSelector
from lightning_lowbw.schedules.every_step import EveryStep
from lightning_lowbw.sync.gradient import GradientSync
from lightning_lowbw.sync.synchronizer import Synchronizer
from lightning_lowbw.sync.table import Gathered

_logger = logging.getLogger(LOGGER)
PATIENCE_S = 2.0  # seconds until rank 0 logs that kernels are being compiled
COMPILING = "Kernels are compiled or loaded, here or on another rank. Compiled ones are kept for the next start."
LONGEST_CAUSE = 200  # characters of an exception that reach the message: a compiler prints pages
RATE = 0.5
UNTRIED = ("params", "param_names", "lr")  # keys of a param group that do not select another kernel


def prepare_kernels(
    workers: Sequence[Synchronizer], group: dist.ProcessGroup | None = None, *, also: Sequence[Payload] = ()
) -> str | None:
    """Compile and try the kernels that a training uses; if they fail on one rank, all ranks use plain torch.

    Collective: all ranks of the group, blocking.

    Args:
        workers: the workers of the optimizers, all with one method.
        group: the process group; None is the world.
        also: payloads whose exchanges are timed, too.

    Returns:
        None, or one sentence with the rank and the reason why plain torch is used instead; logged on rank 0.
    """
    device, peers, payloads = _device_of(workers[0]), workers[0].peers, [workers[0].method.what, *also]
    if peers.num_participants == 1 and not peers.may_grow:
        return None
    is_first = not dist.is_initialized() or dist.get_rank(group) == 0
    saying = threading.Timer(PATIENCE_S, _logger.info, [COMPILING])
    if is_first:
        saying.start()
    try:
        used = [payload for payload in payloads if payload.uses_kernels(device)]
        reasons = gather(what_fails(workers, used, device) if used else None, "kernels", group)
    finally:
        saying.cancel()
    failed = [f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason is not None]
    if not failed:
        return None
    dispatch.disable(device)
    sentence = f"All ranks compress in plain torch, which is slower. {failed[0]}"
    if is_first:
        _logger.warning(sentence)
    return sentence


def what_fails(workers: Sequence[Synchronizer], payloads: Sequence[Payload], device: torch.device) -> str | None:
    """Return why the kernels cannot be used on this rank; None if they compute the same as plain torch."""
    if (reason := dispatch.what_is_missing(device)) is not None or not dispatch.has_kernels(device):
        return reason
    peers = workers[0].peers
    # More participants may join a group that has one participant.
    numbers = (2, 4, 8) if peers.may_grow and peers.num_participants == 1 else (max(2, peers.num_participants),)
    # An aligned size; an unaligned one; a tensor that is sent whole; one large enough for a threshold on a CPU.
    numels = [GPU_BLOCK, GPU_BLOCK + 1, 9] + [SampledSelector.SMALL + 1] * (not dispatch.uses_triton(device))
    try:
        for number, payload, worker in ((n, each, worker) for n in numbers for each in payloads for worker in workers):
            found = _exchanged(worker, payload, number, numels)
            with dispatch.plain_torch(device):
                expected = _exchanged(worker, payload, number, numels)
            _compare(found, expected)
    except Exception as error:  # noqa: BLE001 - a compiler may fail in any way; all ranks are told
        cause = next(iter(str(error).strip().splitlines()), "")[:LONGEST_CAUSE].rstrip(": .")
        return f"The compiled kernels do not work on {device}: {type(error).__name__}: {cause}."
    return None


def _device_of(worker: Synchronizer) -> torch.device:
    """Return the device on which a worker compresses; an elastic group does so on the host."""
    return CPU if worker.peers.may_grow else worker.params.device


def _compare(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        close = 1e-4 if other.dtype == torch.float32 else 0.03  # of the largest value
        if not torch.allclose(one, other, rtol=0.0, atol=close * float(other.abs().max())):
            raise ArithmeticError("they compute something else than plain torch")


def _exchanged(worker: Synchronizer, payload: Payload, num_participants: int, numels: Sequence[int]) -> list[Tensor]:
    """Run one exchange of small tensors among echoes; return, for each, the update plus the residual.

    This sum does not depend on which of several nearly equal elements are sent. The worker does not change.
    """
    payload, device, method = payload.sample(LEAST_NUMEL), _device_of(worker), worker.method
    peers = echo(num_participants)
    numbers = [torch.arange(1, numel + 1, device=device) for numel in numels]
    gradients = [(0.5 + each * 7919 % 8191 / 8192) * (each % 3 - 0.5).sign() for each in numbers]
    named = {str(number): gradient for number, gradient in enumerate(gradients)}
    if Gathered.takes(gradients):  # as for whole tensors, and for means inside a node
        gathered = Gathered(named, JoinedTable())
        gathered.write_(gathered.joined)
    exchange = payload.exchange(peers, method.when)
    assert exchange is not None
    signal = {name: gradient.clone() for name, gradient in named.items()}
    mean = exchange.prepare(signal).send().wait().mean
    if method.when.averages_weights:
        means = mean.dense()
    else:
        means = {name: torch.zeros_like(each) for name, each in signal.items()}
        mean.step_({name: (signal[name], weight, -1.0) for name, weight in means.items()})
    results = [each + exchange.residuals[name] for name, each in means.items()]
    if method.when.averages_weights or type(payload) is not type(method.what):
        return results
    return results + _stepped(worker, payload, peers, gradients)


def _stepped(worker: Synchronizer, payload: Payload, peers: Peers, gradients: Sequence[Tensor]) -> list[Tensor]:
    """Take steps with the options of the user's optimizer: once the kernels step the weights, once they do not."""
    kinds: dict[tuple[torch.dtype, str], dict[str, Any]] = {}
    for group in worker.optimizer.param_groups:
        options = {key: value for key, value in group.items() if key not in UNTRIED}
        kinds |= {(each.dtype, str(options)): options for each in group["params"] if each.is_floating_point()}
    method: Any = worker.method
    schedule = EveryStep(sparsity=(0.9,)) if payload.takes_density else EveryStep()
    method, results = replace(method, what=payload, when=schedule, where=Where()), list[Tensor]()
    for applies in (False, True):
        groups = [
            {**options, "lr": RATE, "params": [Parameter(torch.zeros_like(each, dtype=dtype)) for each in gradients]}
            for (dtype, _), options in kinds.items()
        ]
        optimizer = copy.copy(worker.optimizer)
        vars(optimizer).update(param_groups=groups, state=defaultdict(dict))
        parameters = [parameter for group in groups for parameter in group["params"]]
        twin = GradientSync(method, optimizer, [(str(n), each) for n, each in enumerate(parameters)], peers)
        for number, parameter in enumerate(parameters):
            parameter.grad = gradients[number % len(gradients)].to(parameter.dtype, copy=True)
        with twin.stepping():
            twin.exchange(applies=applies)
        for number, parameter in enumerate(parameters):
            there = parameter.detach() if parameter.grad is None else -RATE * parameter.grad
            kept = twin.residuals.get(str(number))
            results.append(there if kept is None else there - (RATE * kept).to(there.dtype))
    return results
