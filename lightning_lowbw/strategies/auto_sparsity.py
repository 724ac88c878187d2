"""`sparsity="auto"` and `strategy="lowbw"` in a fit: time some dense steps, measure the link, then choose.

The first replaces "auto" by numbers, the second may choose another method.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.optim import Adam, AdamW

from lightning_lowbw.engine.auto import Measured, Run, in_time, plan, plan_anew, why_dense
from lightning_lowbw.engine.auto_method import code_of_ddp, pick
from lightning_lowbw.engine.gradients import GradientWorker
from lightning_lowbw.engine.link_watch import WATCHED_STEPS, LinkWatch
from lightning_lowbw.engine.measuring import agreed, measure, with_narrow
from lightning_lowbw.engine.method import Method
from lightning_lowbw.engine.slots import numels_by_kind
from lightning_lowbw.engine.worker import Worker
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.strategies.advice import num_steps_of, steps_per_epoch_of, tell_notes, tell_what_stays_whole
from lightning_lowbw.strategies.choice import adopt, take
from lightning_lowbw.strategies.words import in_words
from lightning_lowbw.what.top_k import TopK
from lightning_lowbw.when.every_step import EveryStep
from lightning_lowbw.where.agreement import failing_together, gather
from lightning_lowbw.where.link import Link
from lightning_lowbw.where.peers import Peers

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import Callback

    from lightning_lowbw.strategies.strategy import Strategy

NUM_UNTIMED, NUM_TIMED = 2, 4  # optimizer steps; the first ones allocate
NUM_STEPS = 1 + NUM_UNTIMED + NUM_TIMED  # of the first only the end is known


class AutoSparsity:
    """Chooses the schedule, or the method, once in a run.

    Args:
        strategy: does nothing unless its method has `EveryStep(sparsity="auto")`.
        picks: whether another method than that may be chosen, see `engine.auto_method`.
        allow_local: with `picks`, whether local SGD may be.

    Attributes:
        is_timing: whether steps are timed now; then the host waits for a CUDA device after backward.
    """

    def __init__(self, strategy: Strategy, *, picks: bool = False, allow_local: bool = False) -> None:
        self._strategy, self._picks, self._allow_local = strategy, picks, allow_local
        self._given: Method | None = None  # with "auto" in it
        self._chosen: dict[str, Any] | None = None  # what replaces it; see `described`
        self._adopted: Method | None = None  # that, as a method
        self._callbacks: list[Callback] = []  # the Trainer's, in this fit
        self._link_watch: LinkWatch | None = None
        self._epoch_of_watch = -1  # in which it has found a change last
        self.is_timing = self._is_pretrained = self._is_resumed = False
        self._restart()

    def begin_fit(self, trainer: pl.Trainer) -> None:
        """Forget what the last fit has chosen."""
        strategy = self._strategy
        self._callbacks = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        if self._given is not None and strategy.method == self._adopted:
            take(strategy, self._given)
        when = strategy.method.when
        self._given = strategy.method if isinstance(when, EveryStep) and when.is_auto else None
        self._chosen, self._adopted = None, None
        self.is_timing = self._is_pretrained = self._is_resumed = False
        self._link_watch, self._epoch_of_watch = None, -1

    def state_dict(self) -> dict[str, Any] | None:
        """Return what has been chosen, for the checkpoint; None where nothing has been."""
        return self._chosen

    @property
    def measures(self) -> bool:
        """Whether sparse steps may be timed in this fit: at its start, or when the link has changed."""
        return self._given is not None

    @property
    def has_chosen_dense(self) -> bool:
        """Whether all steps stay dense."""
        return self._chosen is not None and self._chosen.get("when", self._chosen.get("method")) is None

    def load_state_dict(self, chosen: Mapping[str, Any] | None, *, is_foreign: bool = False) -> None:
        """Load the choice from a checkpoint: a resumed run does not choose again, but for `_keep_or_choose_anew`.

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
            self._is_resumed = True

    def _keep_or_choose_anew(self, trainer: pl.Trainer) -> None:
        """Say what a resumed run keeps, unless that are dense steps that were chosen for a shorter run.

        Collective: all ranks.
        """
        assert self._chosen is not None
        self._is_resumed, name = False, type(self._strategy).__name__
        before = self._chosen.get("num_steps", math.nan)
        now = min(math.inf if math.isnan(steps) else steps for steps in gather(num_steps_of(trainer)))
        if self.has_chosen_dense and now > before:
            rank_zero_info(
                f"{name}: whole gradients were chosen for a run of {before:.0f} steps, and this one has "
                f"{'no known end' if now == math.inf else f'{now:.0f}'}: it measures and chooses again."
            )
            self._chosen, self._link_watch = None, None
            return
        kept = "whole gradients in every step, as with DDP" if self._adopted is None else in_words(self._adopted)
        rank_zero_info(
            f"{name}: {kept}, as chosen before the checkpoint was saved. A resumed run does not choose again; to "
            "change it, write it down, as in lightning_lowbw.DGCStrategy(sparsity=[0.999])."
        )

    def begin_training(self, trainer: pl.Trainer) -> None:
        """Begin to time, where there is something to choose.

        Collective: all ranks, after a resume.
        """
        if self._is_resumed:
            self._keep_or_choose_anew(trainer)
        strategy, when = self._strategy, self._strategy.method.when
        is_open = isinstance(when, EveryStep) and when.is_auto and self._chosen is None  # else a callback has set it
        # A search for a learning rate has callbacks of its own; the run comes after it.
        is_open = is_open and trainer.callbacks is self._callbacks  # type: ignore[attr-defined]
        if is_open and not self._picks and not self._numels()[0]:
            rank_zero_info(
                f'{type(strategy).__name__}, sparsity="auto": whole gradients are sent, because no tensor that is '
                "trained has min_numel elements and is not excluded."
            )
            is_open = False
        self.is_timing = is_open and any(worker.peers.num_participants > 1 for worker in strategy.workers)
        if self.is_timing and not self._picks:
            with failing_together():
                self._check_corrections()
        num_steps = num_steps_of(trainer) - trainer.global_step
        if self.is_timing and num_steps < NUM_STEPS and trainer.lightning_module.automatic_optimization:
            rank_zero_info(
                f"{type(strategy).__name__}: this run has {num_steps:.0f} more optimizer steps, and the first "
                f"{NUM_STEPS} send whole gradients and are measured: nothing will be compressed."
            )
        self._restart()
        self._first_step = trainer.global_step
        self._first_batch = trainer.fit_loop.epoch_loop.total_batch_idx + 1

    def _restart(self) -> None:
        self._worker: Worker | None = None  # whose steps are timed: that of the first optimizer that steps
        self._num_steps = self._first_step = self._first_batch = 0
        self._last: tuple[float, float] | None = None  # the clock, and the seconds waited so far
        self._times: list[tuple[float, float]] = []  # seconds of a step, and those without what was waited

    def restart_clock(self) -> None:
        """Do not count the time since the last step, such as validation or a checkpoint."""
        self._last = (time.perf_counter(), self._strategy.ledger.exposed_s)

    def end_step(self, worker: Worker, trainer: pl.Trainer) -> None:
        """Time an optimizer step; after the last one that is timed, choose. Later, watch the link.

        Collective: all ranks, blocking, after that step, and after each window of `LinkWatch`; nothing else.
        """
        self._worker = self._worker or worker
        if worker is not self._worker:
            return
        self._num_steps += 1
        if self._link_watch is not None:
            self._watch(worker, trainer)
        if not self.is_timing:
            return
        if self._strategy.root_device.type == "cuda":
            torch.cuda.synchronize(self._strategy.root_device)
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
        strategy = self._strategy
        timed = Measured(*self._timed(), sparse_s={}, link=Link(0.0, math.inf))
        measured, run = agreed(timed, self._run(worker, trainer), worker.peers, strategy.root_device)
        chosen: Method | EveryStep | None = None
        reason = why_dense(measured.step_s, measured.dense_s, run, self._schedule.budget, or_else=self._picks)
        if reason is not None and self._picks:
            reason += f". To write it down: {code_of_ddp(strategy.method.where.topology)}"
        if reason is None:
            own = self._measure(measured.step_s, measured.dense_s)
            measured, run = agreed(own, run, worker.peers, strategy.root_device)
            chosen, reason = self._chosen_by(measured, run, trainer)
        name = type(strategy).__name__
        rank_zero_info(f"{name}: {reason}." if self._picks else f'{name}, sparsity="auto": {reason}.')
        if isinstance(chosen, Method):
            self._choose({"method": chosen.describe()})
            strategy.regime.begin_training(trainer)
        else:
            self._choose({**described(chosen, measured), "num_steps": num_steps_of(trainer)})
            if chosen is not None:
                tell_notes(strategy.workers)
                tell_what_stays_whole(strategy.workers)

    def _chosen_by(self, measured: Measured, run: Run, trainer: pl.Trainer) -> tuple[Method | EveryStep | None, str]:
        """Return the method, of DGC its schedule alone, or None for dense steps; and why.

        Collective: all ranks, where local SGD is allowed.
        """
        if not self._picks:
            return plan(measured, run, self._schedule.budget)
        return pick(
            measured,
            run,
            self._schedule.budget,
            allow_local=self._allow_local,
            left_out=self._left_out(trainer),
            topology=self._strategy.method.where.topology,
        )

    def _watch(self, worker: Worker, trainer: pl.Trainer) -> None:
        """If the exchange takes much longer or shorter than predicted, measure and choose again.

        Changes at most once per epoch, and not while there are stairs.

        Collective: all ranks, after every so many steps.
        """
        assert self._chosen is not None
        assert self._link_watch is not None
        strategy, when = self._strategy, self._strategy.method.when
        assert isinstance(worker, GradientWorker)
        assert isinstance(when, EveryStep)
        if strategy.method not in (self._adopted, self._given):  # another one has been set meanwhile
            self._link_watch = None
            return
        density = when.density(2**62)
        if worker.last_density != density or trainer.current_epoch == self._epoch_of_watch:
            self._link_watch.restart()
            return
        seconds = self._link_watch.observe(worker.peers, strategy.root_device)
        if seconds is None:
            return
        measured = self._measure_exchange(self._chosen["step_s"])
        measured, run = agreed(measured, self._run(worker, trainer), worker.peers, strategy.root_device)
        if run.num_left < WATCHED_STEPS:
            return
        chosen: EveryStep | None
        if density < 1.0:
            chosen, reason = plan_anew(measured, run, self._schedule.budget, when.rampup_begin_step)
        else:
            chosen, reason = plan(measured, run, self._schedule.budget)
        if chosen is None or chosen.density(2**62) == density:  # the wait has another reason, such as a slower rank
            self._link_watch = LinkWatch(seconds, self._schedule.budget * self._chosen["step_s"])
            return
        self._epoch_of_watch = trainer.current_epoch
        rank_zero_info(
            f'{type(strategy).__name__}, sparsity="auto": the exchange takes {in_time(seconds)} of a step, and was '
            f"predicted to take {in_time(self._link_watch.predicted_s)}; {reason}."
        )
        self._choose(described(chosen, measured))
        for each in strategy.workers:
            if isinstance(each, GradientWorker) and each.sparse is not None and each.sparse.link is not None:
                each.sparse.link = measured.link

    def _left_out(self, trainer: pl.Trainer) -> list[str]:
        """Return the methods that have not been measured for this training, or cannot be used; with the reasons.

        Collective: all ranks, where local SGD is allowed.
        """
        strategy, left_out = self._strategy, list[str]()
        workers = [worker for worker in strategy.workers if isinstance(worker, GradientWorker)]
        unknown = {type(each.optimizer).__name__ for each in workers if not each.correction.is_complete}
        if unknown:
            left_out.append(f"dgc: its accuracy is measured with SGD, Adam and AdamW, not with {', '.join(unknown)}")
        elif not self._numels()[0]:
            left_out.append("dgc: no tensor that is trained has min_numel elements")
        else:
            try:
                self._check_corrections()
            except ConfigurationError as error:
                left_out.append(f"dgc: {str(error).split('. ')[0]}")
        if not self._allow_local:
            return left_out
        others = {type(each.optimizer).__name__ for each in workers} - {"SGD"}
        if others:
            left_out.append(f"local_sgd: its accuracy is measured with SGD, not with {', '.join(sorted(others))}")
        elif strategy._layer_sync is not None:
            left_out.append("local_sgd: sync_batchnorm=True communicates in every forward pass")
        elif strategy._ddp_kwargs.get("broadcast_buffers"):
            left_out.append("local_sgd: broadcast_buffers=True communicates in every forward pass")
        elif len({*(lengths := gather(trainer.num_training_batches))}) > 1 or math.inf in lengths:
            left_out.append("local_sgd: the ranks have different or unknown numbers of batches")
        return left_out

    def _check_corrections(self) -> None:
        for worker in self._strategy.workers:
            if isinstance(worker, GradientWorker):
                worker.correction.check()

    @property
    def _schedule(self) -> EveryStep:
        """The schedule with "auto" in it."""
        assert self._given is not None
        assert isinstance(self._given.when, EveryStep)
        return self._given.when

    def _run(self, worker: Worker, trainer: pl.Trainer) -> Run:
        total = self._num_steps_of(trainer)
        num_done = trainer.global_step + 1  # it does not count this one yet
        share = self._num_steps / max(1, num_done - self._first_step)  # of the Trainer's steps, that of this optimizer
        left = (total - num_done) * min(1.0, share)
        return Run(
            num_done=worker.step,
            num_steps=worker.step + max(0, int(left)) if math.isfinite(left) else None,
            steps_per_epoch=steps_per_epoch_of(trainer),
            is_pretrained=self._is_pretrained or self._schedule.pretrained,
            is_adam=isinstance(worker.optimizer, (Adam, AdamW)),
        )

    def _num_steps_of(self, trainer: pl.Trainer) -> float:
        """Return the steps of the run, of all optimizers, as `trainer.global_step` counts them."""
        total, most = num_steps_of(trainer), trainer.max_steps
        if trainer.lightning_module.automatic_optimization or total == most:
            return total
        # Lightning counts batches, with any number of steps in each.
        num_batches = trainer.fit_loop.epoch_loop.total_batch_idx + 1 - self._first_batch
        total *= (trainer.global_step + 1 - self._first_step) / max(1, num_batches)
        return min(total, most) if most >= 0 else total

    def _numels(self) -> tuple[list[int], list[int]]:
        """Return the elements of this rank's part of each sparse tensor, and of each other one."""
        what = self._strategy.method.what
        assert isinstance(what, TopK)
        sparse, others = list[int](), list[int]()
        for worker in self._strategy.workers:
            whole, rest = numels_by_kind(worker, what)
            parts = [worker.peers.part(numel) for numel in whole]
            sparse += [part.stop - part.start for part in parts]
            others += rest
        return sparse, others

    def _timed(self) -> tuple[float, float]:
        """Return the seconds of a step without communication, and of a dense one, on this rank."""
        dense_s, step_s = (statistics.median(times) for times in zip(*self._times[NUM_UNTIMED:], strict=True))
        return max(step_s, 1e-6), dense_s

    def _measure(self, step_s: float, dense_s: float) -> Measured:
        """Return the measured times, of steps and of the link, on this rank.

        Collective: all ranks.
        """
        measured = self._measure_exchange(step_s, dense_s)
        if not self._picks:
            return measured
        sparse, others = self._numels()
        return with_narrow(
            measured, sum(sparse) + sum(others), self._peers.num_participants, self._strategy.root_device
        )

    def _measure_exchange(self, step_s: float, dense_s: float | None = None) -> Measured:
        what = self._strategy.method.what
        assert isinstance(what, TopK)
        device = self._strategy.root_device
        return measure(what, self._peers, device, *self._numels(), step_s=step_s, dense_s=dense_s)

    @property
    def _peers(self) -> Peers:
        return self._strategy.workers[0].peers

    def _choose(self, chosen: dict[str, Any]) -> None:
        """Replace "auto" by the choice; without one all steps stay dense.

        Collective: all ranks.
        """
        assert self._given is not None
        self._chosen = chosen
        if "method" in chosen:
            self._replace(dataclasses.replace(Method(**chosen["method"]), where=self._given.where))
            return
        # Dense steps are not watched on CUDA, where their waits are not measured. If it has picked DDP, others may be
        # excluded.
        measures_dense = self._strategy.root_device.type != "cuda" and not self._picks
        if chosen["when"] is not None or measures_dense:
            self._link_watch = LinkWatch(chosen["predicted_s"], self._schedule.budget * chosen["step_s"])
        if chosen["when"] is not None:
            when = EveryStep(**chosen["when"], overlap=self._schedule.overlap)
            what = self._given.what
            if isinstance(what, TopK) and what.keep_momentum is None and what.correction == "auto":
                what = dataclasses.replace(what, keep_momentum=True)
            self._replace(dataclasses.replace(self._given, when=when, what=what))

    def _replace(self, method: Method) -> None:
        strategy = self._strategy
        if type(method.what) is type(strategy.method.what) and type(method.when) is type(strategy.method.when):
            strategy.reconfigure(method)
        else:
            adopt(strategy, method)
        self._adopted = method


def described(when: EveryStep | None, measured: Measured) -> dict[str, Any]:
    """Return a schedule, None for dense steps, with the predicted time of its exchange: in plain values."""
    if when is None:
        return {"when": None, "step_s": measured.step_s, "predicted_s": measured.dense_s - measured.step_s}
    numbers = {name: getattr(when, name) for name in ("rampup_begin_step", "rampup_step", "sparsity")}
    last = when.density(2**62)
    predicted_s = next(seconds for density, seconds in measured.sparse_s.items() if math.isclose(density, last))
    return {"when": numbers, "step_s": measured.step_s, "predicted_s": predicted_s}
