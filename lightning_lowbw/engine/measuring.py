"""Predicts the time of a method: the link and the work are measured, the exchange is predicted from both."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Parameter
from torch.optim import SGD

from lightning_lowbw.engine.auto import DENSITIES, Measured, Run, sparse_seconds
from lightning_lowbw.engine.auto_method import NARROW
from lightning_lowbw.engine.gradients import GradientWorker
from lightning_lowbw.engine.method import Method
from lightning_lowbw.ops.reference import Segment
from lightning_lowbw.what.narrow_values import make_narrow_format
from lightning_lowbw.what.selection import Selection
from lightning_lowbw.what.top_k import TopK
from lightning_lowbw.when.every_step import EveryStep
from lightning_lowbw.where.agreement import failing_together
from lightning_lowbw.where.ledger import all_gather_rounds, all_reduce_bytes, all_reduce_rounds, narrow_mean_bytes
from lightning_lowbw.where.link import Link, choose
from lightning_lowbw.where.peers import Peers
from lightning_lowbw.where.probe import measure_link

SAMPLE = 1 << 18  # elements on which selecting and encoding is timed
LARGE = SAMPLE << 4  # on a GPU these, too: what takes longer depends on their number, and the rest are launches
SMALL_NUMEL, NUM_SMALL_STEPS = 64, 6  # of a step of which only the number of tensors counts


def measure(
    what: TopK,
    peers: Peers,
    device: torch.device,
    sparse: Sequence[int],
    others: Sequence[int],
    *,
    step_s: float,
    dense_s: float | None = None,
) -> Measured:
    """Return the times of steps, on this rank.

    Collective: all ranks.

    Args:
        what: the payload of sparse steps.
        peers: who takes part.
        device: where the gradients are.
        sparse: the elements of this rank's part of each sparse tensor.
        others: those of each other tensor.
        step_s: seconds of an optimizer step without communication.
        dense_s: those of a dense one; predicted if left out.
    """
    with failing_together():
        work_s = [seconds_of_work(what, density, peers.num_participants, device) for density in DENSITIES]
    link = measure_link(peers.between.group, device)
    fixed_s = seconds_of_small_tensors(what, peers, device, len(sparse), len(others)) if sparse else 0.0
    exchange_s = [fixed_s + exchange_seconds(what, peers, sparse, sum(others), density, link) for density in DENSITIES]
    average_s = _all_reduce_seconds(sum(sparse) + sum(others), peers.num_participants, link)
    return Measured(
        step_s=step_s,
        dense_s=step_s + average_s if dense_s is None else dense_s,
        sparse_s=sparse_seconds(exchange_s, [seconds * sum(sparse) / SAMPLE for seconds in work_s]),
        link=link,
        average_s=average_s,
    )


def with_narrow(measured: Measured, numel: int, num_participants: int, device: torch.device) -> Measured:
    """Add the predicted times of gradients with this number of elements in few bits per value.

    Collective: all ranks.
    """
    link, narrow_s = measured.link, {}
    for name in NARROW:
        nbytes = narrow_mean_bytes(numel, num_participants, make_narrow_format(name))
        with failing_together():
            fixed_s, sample_s = seconds_of_narrow_work(name, device)
        work_s = fixed_s + sample_s * numel / SAMPLE
        # A control message, then an all-to-all, whose messages are sent at the same time, and an all-gather.
        rounds = all_reduce_rounds(num_participants) + 1 + all_gather_rounds(num_participants)
        narrow_s[name] = link.time_s(rounds, nbytes) + work_s
    return replace(measured, narrow_s=narrow_s)


def exchange_seconds(what: TopK, peers: Peers, sparse: Sequence[int], others: int, density: float, link: Link) -> float:
    """Return the seconds of the exchange of a sparse step on a link; arguments as of `measure`."""
    seconds = _all_reduce_seconds(others, peers.num_participants, link)
    if not sparse:
        return seconds
    counts = [what.num_sent(numel, density) for numel in sparse]
    k, num = sum(counts), peers.num_participants
    choice = choose(sparse, k, num, 8 * what.codec.nbytes(counts, sparse) / k, link)
    return seconds + choice.times_s[what.collective(num, is_two_level=peers.is_two_level)]


def _all_reduce_seconds(numel: int, num_ranks: int, link: Link) -> float:
    return link.time_s(all_reduce_rounds(num_ranks), all_reduce_bytes(4 * numel, num_ranks))


def agreed(measured: Measured, run: Run, peers: Peers, device: torch.device) -> tuple[Measured, Run]:
    """Return the same on all ranks: the times of the slowest rank, and the shortest run.

    Collective: all ranks, an all-reduce.
    """
    link = measured.link
    by_name: list[Mapping[Any, float]] = [measured.sparse_s, measured.narrow_s]
    times = [measured.step_s, measured.dense_s, link.latency_s, measured.average_s]
    times += [seconds for each in by_name for seconds in each.values()]
    lengths = [math.inf if length is None else length for length in (run.num_steps, run.steps_per_epoch)]
    least = torch.tensor(
        [link.bandwidth_bytes_per_s, *lengths, run.is_pretrained, *(-seconds for seconds in times)],
        dtype=torch.float64,
        device=device,
    )
    peers.all_reduce_(least, dist.ReduceOp.MIN)
    bandwidth, num_steps, steps_per_epoch, is_pretrained, *negative = least.tolist()
    slowest = iter([-seconds for seconds in negative])
    step_s, dense_s, latency_s, average_s = islice(slowest, 4)
    sparse_s, narrow_s = ({key: next(slowest) for key in each} for each in by_name)
    return (
        Measured(step_s, dense_s, sparse_s, Link(latency_s, bandwidth), narrow_s, average_s),
        Run(
            num_done=run.num_done,
            num_steps=int(num_steps) if math.isfinite(num_steps) else None,
            steps_per_epoch=int(steps_per_epoch) if math.isfinite(steps_per_epoch) else None,
            is_pretrained=bool(is_pretrained),
            is_adam=run.is_adam,
        ),
    )


def seconds_of_small_tensors(what: TopK, peers: Peers, device: torch.device, num_sparse: int, num_others: int) -> float:
    """Return the fixed seconds of the exchange of a sparse step: its messages, and the work for each tensor.

    Collective: all ranks; a few sparse steps of tensors of a few elements. Enters no ledger.

    Args:
        what: the payload.
        peers: who takes part.
        device: where the gradients are.
        num_sparse: how many tensors are sent sparse.
        num_others: how many are not.
    """
    numels = {f"sparse {number}": SMALL_NUMEL for number in range(num_sparse)}
    numels |= {f"other {number}": 1 for number in range(num_others)}
    named = [(name, Parameter(torch.zeros(numel, device=device))) for name, numel in numels.items()]
    optimizer = SGD([parameter for _, parameter in named], lr=0.0, momentum=0.9)
    small = replace(what, min_numel=SMALL_NUMEL, exclude=(), chunk=None)
    seconds = []
    with peers.ledger.paused():
        worker = GradientWorker(Method(when=EveryStep(0, 1, (0.5,)), what=small), optimizer, named, peers)
        for _ in range(NUM_SMALL_STEPS):
            for _, parameter in named:
                parameter.grad = torch.ones_like(parameter)
            started = time.perf_counter()
            worker.exchange(applies=True)
            float(named[0][1].detach().flatten()[0])  # on CUDA, waits for it
            seconds.append(time.perf_counter() - started)
            worker.after_step()
    return statistics.median(seconds[1:])


def seconds_of_work(what: TopK, density: float, num_participants: int, device: torch.device) -> float:
    """Return how long it takes to select, encode and decode `SAMPLE` elements, without communication.

    What does not depend on their number is left out; `seconds_of_small_tensors` measures it.

    Args:
        what: the payload.
        density: the fraction that is selected.
        num_participants: messages that are decoded.
        device: where the gradients are.
    """
    return _fixed_and_of_sample(partial(_time_work, what, density, num_participants, device), device)[1]


def _time_work(what: TopK, density: float, num_participants: int, device: torch.device, numel: int) -> float:
    generator = torch.Generator(device).manual_seed(0)
    residual, gradient = torch.randn(2, numel, generator=generator, device=device)
    fields = what.selected(numel, density)
    segment = Segment(residual=residual, momentum_buffer=None, gradient=gradient, weight=None, **fields)
    selection, seconds = Selection(), []
    for _ in range(3):  # the threshold has settled by then
        started = time.perf_counter()
        ((positions, values),) = selection.compress_({"": segment}, masking=False)
        message = what.codec.encode([(positions, values)], [numel], [residual])
        counts = [positions.numel()]
        decoded = what.codec.decode(message.unsqueeze(0).expand(num_participants, -1).contiguous(), counts, [numel])
        float(decoded[1].flatten()[0])  # on CUDA, waits for it
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def seconds_of_narrow_work(value_dtype: str, device: torch.device) -> tuple[float, float]:
    """Return how long it takes to write and read elements in few bits, as `where.narrow` does.

    Args:
        value_dtype: one of `what.narrow_values.NARROW_NAMES`.
        device: where the gradients are.

    Returns:
        What any number of elements takes, and what each `SAMPLE` of them takes.
    """
    return _fixed_and_of_sample(partial(_time_narrow_work, value_dtype, device), device)


def _fixed_and_of_sample(time_of: Callable[[int], float], device: torch.device) -> tuple[float, float]:
    """Return the seconds of any number of elements, and of `SAMPLE`, from those of some numbers.

    On a CPU the first are not seen; on a GPU `SAMPLE` takes hardly more than its launches.
    """
    if device.type == "cpu":
        return 0.0, time_of(SAMPLE)
    few_s, many_s = time_of(SAMPLE), time_of(LARGE)
    sample_s = max(0.0, many_s - few_s) / (LARGE / SAMPLE - 1)
    return max(0.0, few_s - sample_s), sample_s


def _time_narrow_work(value_dtype: str, device: torch.device, numel: int) -> float:
    value_format, seconds = make_narrow_format(value_dtype), []
    generator = torch.Generator(device).manual_seed(0)
    signal, residual = torch.randn(2, 1, numel, generator=generator, device=device)
    message = torch.empty((1, value_format.nbytes(numel)), dtype=torch.uint8, device=device)
    for _ in range(3):
        started = time.perf_counter()
        values = residual + signal
        value_format.write_(message, numel, 0, values)
        residual.copy_(values)
        for _ in range(2):  # the messages of the others, and the means
            signal.copy_(value_format.read(message, numel, 0, numel))
        float(signal[0, 0])  # on CUDA, waits for it
        seconds.append(time.perf_counter() - started)
    return min(seconds)
