"""`sparsity="auto"` in a fit: time some dense steps, measure the link, then put numbers in the place of "auto"."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_lowbw.engine.auto import DENSITIES, Measured, Run, plan, sparse_seconds
from lightning_lowbw.engine.sparse_exchange import asked_for, predict
from lightning_lowbw.ops.reference import Segment
from lightning_lowbw.strategies.advice import num_steps_of
from lightning_lowbw.what.selection import Selection
from lightning_lowbw.what.top_k import TopK
from lightning_lowbw.when.every_step import EveryStep
from lightning_lowbw.where.link import Link
from lightning_lowbw.where.peers import Peers
from lightning_lowbw.where.probe import measure_link
from lightning_lowbw.where.volume import all_reduce_bytes, all_reduce_rounds

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_lowbw.strategies.strategy import Strategy

NUM_UNTIMED, NUM_TIMED = 2, 4  # optimizer steps; the first ones allocate
SAMPLE = 1 << 18  # elements on which selecting and encoding is timed


class AutoSparsity:
    """Chooses the schedule, once in a run.

    Args:
        strategy: whose method has `EveryStep(sparsity="auto")`, or not: then nothing is done.

    Attributes:
        is_timing: whether steps are timed now, for which a CUDA device is waited for after backward.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._given: EveryStep | None = None  # the schedule with "auto" in it
        self._chosen: dict[str, Any] | None = None  # the schedule that was chosen; {} for dense
        self.is_timing = False
        self._is_pretrained = False
        self._times: list[tuple[float, float]] = []  # after each step: the clock, and the seconds waited so far

    def begin_fit(self) -> None:
        """Forget what the last fit has chosen."""
        strategy = self._strategy
        if self._given is not None:
            strategy.method = dataclasses.replace(strategy.method, when=self._given)
        when = strategy.method.when
        self._given = when if isinstance(when, EveryStep) and when.is_auto else None
        self._chosen, self._is_pretrained, self.is_timing, self._times = None, False, False, []

    def state_dict(self) -> dict[str, Any] | None:
        """Return what has been chosen, for the checkpoint; None where nothing has been."""
        return self._chosen

    def load_state_dict(self, chosen: Mapping[str, Any] | None) -> None:
        """Take over what a checkpoint says; a run that goes on does not choose anew.

        Args:
            chosen: as of `state_dict`.
        """
        if self._given is not None and chosen is not None:
            self._choose(dict(chosen))

    def begin_training(self) -> None:
        """Begin to time, where there is something to choose."""
        when, workers = self._strategy.method.when, self._strategy.workers
        is_open = isinstance(when, EveryStep) and when.is_auto and self._chosen is None  # else a callback has set it
        self.is_timing = is_open and any(worker.peers.num_senders > 1 for worker in workers)
        self._is_pretrained = workers[0].step > 0  # of a checkpoint by another method

    def end_step(self, trainer: pl.Trainer) -> None:
        """Time an optimizer step; after the last one that is timed, choose.

        Collective: all ranks, blocking, after that step; nothing else.
        """
        if not self.is_timing:
            return
        if self._strategy.root_device.type == "cuda":
            torch.cuda.synchronize(self._strategy.root_device)
        self._times.append((time.perf_counter(), self._strategy.ledger.exposed_s))
        if len(self._times) > NUM_UNTIMED + NUM_TIMED:
            self.is_timing = False
            self._decide(trainer)

    def _decide(self, trainer: pl.Trainer) -> None:
        when = self._strategy.method.when
        assert isinstance(when, EveryStep)
        peers = self._strategy.workers[0].peers
        measured, run = agreed(self._measure(), self._run(trainer, when), peers, self._strategy.root_device)
        chosen, reason = plan(measured, run, when.budget)
        rank_zero_info(f'{type(self._strategy).__name__}, sparsity="auto": {reason}.')
        self._choose({} if chosen is None else {**dataclasses.asdict(chosen), "overlap": when.overlap})

    def _run(self, trainer: pl.Trainer, when: EveryStep) -> Run:
        batches, total = float(trainer.num_training_batches), num_steps_of(trainer)
        return Run(
            num_done=self._strategy.workers[0].step,
            num_steps=int(total) if math.isfinite(total) else None,
            steps_per_epoch=math.ceil(batches / trainer.accumulate_grad_batches) if math.isfinite(batches) else None,
            is_pretrained=self._is_pretrained or when.pretrained,
        )

    def _measure(self) -> Measured:
        """Return what has been timed, and what is measured now, on this rank.

        Collective: all ranks.
        """
        (start_s, waited_s), (end_s, waited_in_all_s) = self._times[NUM_UNTIMED], self._times[-1]
        dense_s = (end_s - start_s) / NUM_TIMED
        step_s = max(dense_s - (waited_in_all_s - waited_s) / NUM_TIMED, 1e-6)
        method, device = self._strategy.method, self._strategy.root_device
        what, peers = method.what, self._strategy.workers[0].peers
        assert isinstance(what, TopK)
        link = measure_link(peers.between.group, device)
        work_s = [seconds_of_work(what, density, peers.num_senders, device) for density in DENSITIES]
        sizes = [
            (name, parameter.numel())
            for each in self._strategy.workers
            for name, parameter in each.by_name().items()
            if parameter.requires_grad
        ]
        sparse = [peers.part(numel).stop - peers.part(numel).start for name, numel in sizes if what.takes(name, numel)]
        small = sum(numel for name, numel in sizes if not what.takes(name, numel))
        kind, num_senders, exchange_s = asked_for(what, peers), peers.num_senders, []
        small_s = link.time_s(all_reduce_rounds(num_senders), all_reduce_bytes(4 * small, num_senders))
        for density in DENSITIES:
            choice = predict(what, sparse, density, num_senders, link)
            exchange_s.append(small_s + choice.times_s[choice.name if kind == "auto" else kind])
        return Measured(
            step_s=step_s,
            dense_s=dense_s,
            sparse_s=sparse_seconds(exchange_s, [seconds * sum(sparse) / SAMPLE for seconds in work_s]),
            link=link,
        )

    def _choose(self, chosen: dict[str, Any]) -> None:
        """Replace "auto" by what has been chosen; without numbers all steps stay dense.

        Collective: all ranks.
        """
        self._chosen = chosen
        if chosen:
            self._strategy.reconfigure(dataclasses.replace(self._strategy.method, when=EveryStep(**chosen)))


def agreed(measured: Measured, run: Run, peers: Peers, device: torch.device) -> tuple[Measured, Run]:
    """Return the same on all ranks: what the slowest measures, of the shortest run.

    Collective: all ranks, an all-reduce.
    """
    link, sparse_s = measured.link, [measured.sparse_s[density] for density in DENSITIES]
    times = [measured.step_s, measured.dense_s, link.latency_s, *sparse_s]
    lengths = [math.inf if length is None else length for length in (run.num_steps, run.steps_per_epoch)]
    least = torch.tensor(
        [link.bandwidth_bytes_per_s, *lengths, run.is_pretrained, *(-seconds for seconds in times)],
        dtype=torch.float64,
        device=device,
    )
    peers.all_reduce_(least, dist.ReduceOp.MIN)
    bandwidth, num_steps, steps_per_epoch, is_pretrained, *negative = least.tolist()
    step_s, dense_s, latency_s, *sparse_s = (-seconds for seconds in negative)
    return (
        Measured(step_s, dense_s, dict(zip(DENSITIES, sparse_s, strict=True)), Link(latency_s, bandwidth)),
        Run(
            num_done=run.num_done,
            num_steps=int(num_steps) if math.isfinite(num_steps) else None,
            steps_per_epoch=int(steps_per_epoch) if math.isfinite(steps_per_epoch) else None,
            is_pretrained=bool(is_pretrained),
        ),
    )


def seconds_of_work(what: TopK, density: float, num_senders: int, device: torch.device) -> float:
    """Return how long it takes to select, encode and decode the elements of `SAMPLE`, without communication.

    Args:
        what: the payload.
        density: the fraction that is selected.
        num_senders: messages that are decoded.
        device: where the gradients are.
    """
    generator = torch.Generator(device).manual_seed(0)
    residual, gradient = torch.randn(2, SAMPLE, generator=generator, device=device)
    layout, selection = what.layout(SAMPLE, density), Selection(what.selection)
    segment = Segment(
        residual=residual,
        momentum_buffer=None,
        gradient=gradient,
        weight=None,
        k=layout.k if what.chunk else layout.k_last,
        chunk=what.chunk,
        k_last=layout.k_last if what.chunk else 0,
    )
    seconds = []
    for _ in range(3):  # the threshold has settled by then
        started = time.perf_counter()
        ((positions, values),) = selection.compress_({"": segment}, masking=False)
        message = what.codec.encode([(positions, values)], [SAMPLE], [residual])
        counts = [positions.numel()]
        decoded = what.codec.decode(message.unsqueeze(0).expand(num_senders, -1).contiguous(), counts, [SAMPLE])
        float(decoded[1].flatten()[0])  # on CUDA, waits for it
        seconds.append(time.perf_counter() - started)
    return min(seconds)
