"""`sparsity="auto"` and `strategy="lowbw"` in a fit: time some dense steps, measure the link, then choose.

The first puts numbers in the place of "auto", the second may take another method.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_lowbw.engine.auto import DENSITIES, Measured, Run, plan, sparse_seconds
from lightning_lowbw.engine.gradients import GradientWorker
from lightning_lowbw.engine.method import Method
from lightning_lowbw.engine.auto_method import NARROW, pick
from lightning_lowbw.engine.sparse_exchange import asked_for, predict
from lightning_lowbw.engine.worker import Worker
from lightning_lowbw.ops.reference import Segment
from lightning_lowbw.strategies.advice import num_steps_of, steps_per_epoch_of
from lightning_lowbw.what.narrow_values import make_narrow_format
from lightning_lowbw.what.selection import Selection
from lightning_lowbw.what.top_k import TopK
from lightning_lowbw.when.every_step import EveryStep
from lightning_lowbw.where.agreement import failing_together
from lightning_lowbw.where.link import Link
from lightning_lowbw.where.peers import Peers
from lightning_lowbw.where.probe import measure_link
from lightning_lowbw.where.volume import all_gather_rounds, all_reduce_bytes, all_reduce_rounds, narrow_mean_bytes

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import Callback

    from lightning_lowbw.strategies.strategy import Strategy

NUM_UNTIMED, NUM_TIMED = 2, 4  # optimizer steps; the first ones allocate
NUM_STEPS = 1 + NUM_UNTIMED + NUM_TIMED  # of the first only the end is seen
SAMPLE = 1 << 18  # elements on which selecting and encoding is timed


class AutoSparsity:
    """Chooses the schedule, or the method, once in a run.

    Args:
        strategy: whose method has `EveryStep(sparsity="auto")`, or not: then nothing is done.
        picks: whether another method than that may be chosen, see `engine.auto_method`.
        allow_local: with `picks`, whether local SGD may be.

    Attributes:
        is_timing: whether steps are timed now, for which a CUDA device is waited for after backward.
    """

    def __init__(self, strategy: Strategy, *, picks: bool = False, allow_local: bool = False) -> None:
        self._strategy, self._picks, self._allow_local = strategy, picks, allow_local
        self._given: Method | None = None  # with "auto" in it
        self._chosen: dict[str, Any] | None = None  # what has taken its place; {} where all stays dense
        self._adopted: Method | None = None  # that, as a method
        self._callbacks: list[Callback] = []  # the Trainer's, in this fit
        self.is_timing = self._is_pretrained = False
        self._restart()

    def begin_fit(self, trainer: pl.Trainer) -> None:
        """Forget what the last fit has chosen."""
        strategy = self._strategy
        self._callbacks = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        if self._given is not None and self._chosen and strategy.method == self._adopted:
            strategy.take(self._given)
        when = strategy.method.when
        self._given = strategy.method if isinstance(when, EveryStep) and when.is_auto else None
        self._chosen, self._is_pretrained, self.is_timing = None, False, False

    def state_dict(self) -> dict[str, Any] | None:
        """Return what has been chosen, for the checkpoint; None where nothing has been."""
        return self._chosen

    def load_state_dict(self, chosen: Mapping[str, Any] | None, *, is_foreign: bool = False) -> None:
        """Take over what a checkpoint says: a run that goes on does not choose anew.

        Collective: all ranks.

        Args:
            chosen: as of `state_dict`.
            is_foreign: whether the checkpoint was written by another method.
        """
        if self._given is None:
            return
        self._is_pretrained = is_foreign
        if chosen is not None and (self._picks or "method" not in chosen):
            self._choose(dict(chosen))

    def begin_training(self, trainer: pl.Trainer) -> None:
        """Begin to time, where there is something to choose."""
        strategy, when = self._strategy, self._strategy.method.when
        is_open = isinstance(when, EveryStep) and when.is_auto and self._chosen is None  # else a callback has set it
        # A search for a learning rate has callbacks of its own; the run comes after it.
        is_open = is_open and trainer.callbacks is self._callbacks  # type: ignore[attr-defined]
        if is_open and not self._picks and not self._numels()[0]:
            rank_zero_info(
                f'{type(strategy).__name__}, sparsity="auto": all of every gradient is sent, for no tensor that is '
                "trained has min_numel elements and is not excluded."
            )
            is_open = False
        self.is_timing = is_open and any(worker.peers.num_senders > 1 for worker in strategy.workers)
        self._restart()
        self._first_step = trainer.global_step

    def _restart(self) -> None:
        self._worker: Worker | None = None  # whose steps are timed: that of the first optimizer that steps
        self._num_steps = self._first_step = 0
        self._last: tuple[float, float] | None = None  # the clock, and the seconds waited so far
        self._times: list[tuple[float, float]] = []  # seconds of a step, and those without what was waited

    def restart_clock(self) -> None:
        """Leave out what has gone by since the last step: validation, or a checkpoint that was written."""
        self._last = (time.perf_counter(), self._strategy.ledger.exposed_s)

    def end_step(self, worker: Worker, trainer: pl.Trainer) -> None:
        """Time an optimizer step; after the last one that is timed, choose.

        Collective: all ranks, blocking, after that step; nothing else.
        """
        self._worker = self._worker or worker
        if not self.is_timing or worker is not self._worker:
            return
        if self._strategy.root_device.type == "cuda":
            torch.cuda.synchronize(self._strategy.root_device)
        self._num_steps += 1
        before = self._last
        self.restart_clock()
        if before is None or self._last is None:
            return
        seconds, waited = (now - then for now, then in zip(self._last, before, strict=True))
        self._times.append((seconds, seconds - waited))
        if len(self._times) == NUM_UNTIMED + NUM_TIMED:
            self.is_timing = False
            self._decide(worker, trainer)

    def _decide(self, worker: Worker, trainer: pl.Trainer) -> None:
        name, when = type(self._strategy).__name__, self._schedule
        measured, run = agreed(self._measure(), self._run(worker, trainer), worker.peers, self._strategy.root_device)
        chosen: Method | EveryStep | None
        if self._picks:
            left_out = self._left_out()
            chosen, reason = pick(measured, run, when.budget, allow_local=self._allow_local, left_out=left_out)
            rank_zero_info(f"{name}: {reason}.")
        else:
            chosen, reason = plan(measured, run, when.budget)
            rank_zero_info(f'{name}, sparsity="auto": {reason}.')
        if isinstance(chosen, Method):
            self._choose({"method": chosen.describe()})
            self._strategy.regime.begin_training(trainer)
        elif chosen is not None:
            names = ("rampup_begin_step", "rampup_step", "sparsity")
            self._choose({name: getattr(chosen, name) for name in names})
        else:
            self._choose({})

    def _left_out(self) -> list[str]:
        """Return the methods that are not measured for what is trained, or cannot train it; with the reasons."""
        strategy, left_out = self._strategy, []
        workers = [worker for worker in strategy.workers if isinstance(worker, GradientWorker)]
        unknown = {type(each.optimizer).__name__ for each in workers if not each.correction.is_complete}
        if unknown:
            left_out.append(f"dgc: its accuracy is measured with SGD, Adam and AdamW, not with {', '.join(unknown)}")
        elif not self._numels()[0]:
            left_out.append("dgc: no tensor that is trained has min_numel elements")
        if not self._allow_local:
            return left_out
        others = {type(each.optimizer).__name__ for each in workers} - {"SGD"}
        if others:
            left_out.append(f"local_sgd: its accuracy is measured with SGD, not with {', '.join(sorted(others))}")
        elif strategy._layer_sync is not None:
            left_out.append("local_sgd: sync_batchnorm=True communicates in every forward pass")
        elif strategy._ddp_kwargs.get("broadcast_buffers"):
            left_out.append("local_sgd: broadcast_buffers=True communicates in every forward pass")
        return left_out

    @property
    def _schedule(self) -> EveryStep:
        """The schedule with "auto" in it."""
        assert self._given is not None
        assert isinstance(self._given.when, EveryStep)
        return self._given.when

    def _run(self, worker: Worker, trainer: pl.Trainer) -> Run:
        total = num_steps_of(trainer)
        num_done = trainer.global_step + 1  # it does not count this one yet
        share = self._num_steps / max(1, num_done - self._first_step)  # of the Trainer's steps, that of this optimizer
        left = (total - num_done) * min(1.0, share)
        return Run(
            num_done=worker.step,
            num_steps=worker.step + max(0, int(left)) if math.isfinite(left) else None,
            steps_per_epoch=steps_per_epoch_of(trainer),
            is_pretrained=self._is_pretrained or self._schedule.pretrained,
        )

    def _numels(self) -> tuple[list[int], int]:
        """Return the elements of this rank's part of each sparse tensor, and of all others together."""
        what = self._strategy.method.what
        assert isinstance(what, TopK)
        sparse, others = [], 0
        for worker in self._strategy.workers:
            for name, parameter in worker.by_name().items():
                if not parameter.requires_grad:
                    continue
                if parameter.is_floating_point() and what.takes(name, parameter.numel()):
                    part = worker.peers.part(parameter.numel())
                    sparse.append(part.stop - part.start)
                else:
                    others += parameter.numel()
        return sparse, others

    def _measure(self) -> Measured:
        """Return what has been timed, and what is measured now, on this rank.

        Collective: all ranks.
        """
        dense_s, step_s = (statistics.median(times) for times in zip(*self._times[NUM_UNTIMED:], strict=True))
        what, peers, device = self._strategy.method.what, self._strategy.workers[0].peers, self._strategy.root_device
        assert isinstance(what, TopK)
        sparse, others = self._numels()
        with failing_together():
            work_s = [seconds_of_work(what, density, peers.num_senders, device) for density in DENSITIES]
        link = measure_link(peers.between.group, device)
        kind, num_senders, exchange_s = asked_for(what, peers), peers.num_senders, []
        others_s = link.time_s(all_reduce_rounds(num_senders), all_reduce_bytes(4 * others, num_senders))
        for density in DENSITIES:
            choice = predict(what, sparse, density, num_senders, link)
            exchange_s.append(others_s + choice.times_s[choice.name if kind == "auto" else kind])
        measured = Measured(
            step_s=max(step_s, 1e-6),
            dense_s=dense_s,
            sparse_s=sparse_seconds(exchange_s, [seconds * sum(sparse) / SAMPLE for seconds in work_s]),
            link=link,
        )
        return self._with_other_methods(measured, sum(sparse) + others, num_senders) if self._picks else measured

    def _with_other_methods(self, measured: Measured, numel: int, num_senders: int) -> Measured:
        """Add what other exchanges take of so many elements."""
        link, rounds = measured.link, all_reduce_rounds(num_senders)
        narrow_s = {}
        for name in NARROW:
            nbytes = narrow_mean_bytes(numel, num_senders, make_narrow_format(name))
            with failing_together():
                work_s = seconds_of_narrow_work(name, self._strategy.root_device) * numel / SAMPLE
            # A control message, then an all-to-all, whose messages are on their way together, and an all-gather.
            narrow_s[name] = link.time_s(rounds + 1 + all_gather_rounds(num_senders), nbytes) + work_s
        average_s = link.time_s(rounds, all_reduce_bytes(4 * numel, num_senders))
        return dataclasses.replace(measured, narrow_s=narrow_s, average_s=average_s)

    def _choose(self, chosen: dict[str, Any]) -> None:
        """Put into the place of "auto" what has been chosen; where that is nothing, all steps stay dense.

        Collective: all ranks.
        """
        assert self._given is not None
        self._chosen = chosen
        if "method" in chosen:
            self._replace(dataclasses.replace(Method(**chosen["method"]), where=self._given.where))
        elif chosen:
            when = EveryStep(**chosen, overlap=self._schedule.overlap)
            self._replace(dataclasses.replace(self._given, when=when))

    def _replace(self, method: Method) -> None:
        strategy = self._strategy
        if type(method.what) is type(strategy.method.what) and type(method.when) is type(strategy.method.when):
            strategy.reconfigure(method)
        else:
            strategy.adopt(method)
        self._adopted = method


def agreed(measured: Measured, run: Run, peers: Peers, device: torch.device) -> tuple[Measured, Run]:
    """Return the same on all ranks: what the slowest measures, of the shortest run.

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
    fields = what.selected(SAMPLE, density)
    segment = Segment(residual=residual, momentum_buffer=None, gradient=gradient, weight=None, **fields)
    selection, seconds = Selection(what.selection), []
    for _ in range(3):  # the threshold has settled by then
        started = time.perf_counter()
        ((positions, values),) = selection.compress_({"": segment}, masking=False)
        message = what.codec.encode([(positions, values)], [SAMPLE], [residual])
        counts = [positions.numel()]
        decoded = what.codec.decode(message.unsqueeze(0).expand(num_senders, -1).contiguous(), counts, [SAMPLE])
        float(decoded[1].flatten()[0])  # on CUDA, waits for it
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def seconds_of_narrow_work(value_dtype: str, device: torch.device) -> float:
    """Return how long it takes to write and read `SAMPLE` elements in few bits, as `where.narrow` does.

    Args:
        value_dtype: one of `what.narrow_values.NARROW_NAMES`.
        device: where the gradients are.
    """
    value_format, seconds = make_narrow_format(value_dtype), []
    generator = torch.Generator(device).manual_seed(0)
    signal, residual = torch.randn(2, 1, SAMPLE, generator=generator, device=device)
    message = torch.empty((1, value_format.nbytes(SAMPLE)), dtype=torch.uint8, device=device)
    for _ in range(3):
        started = time.perf_counter()
        values = residual + signal
        value_format.write_(message, SAMPLE, 0, values)
        residual.copy_(values)
        for _ in range(2):  # what the others have sent, and the means
            signal.copy_(value_format.read(message, SAMPLE, 0, SAMPLE))
        float(signal[0, 0])  # on CUDA, waits for it
        seconds.append(time.perf_counter() - started)
    return min(seconds)
