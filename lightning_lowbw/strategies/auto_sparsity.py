"""`sparsity="auto"` and `strategy="lowbw"` in a fit: time some dense steps, measure the link, then choose.

The first replaces "auto" by numbers, the second may choose another method.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_lowbw.engine.auto import ASSUMED_STEPS, Measured, Run, in_time, plan, plan_anew, why_dense
from lightning_lowbw.engine.auto_method import code_of_ddp, pick
from lightning_lowbw.engine.gradients import GradientWorker
from lightning_lowbw.engine.link_watch import WATCHED_STEPS, LinkWatch
from lightning_lowbw.engine.measuring import agreed, measure, with_narrow
from lightning_lowbw.engine.method import Method
from lightning_lowbw.engine.worker import Worker
from lightning_lowbw.strategies.advice import num_steps_of, tell_notes, tell_what_stays_whole
from lightning_lowbw.strategies.choice import adopt, take
from lightning_lowbw.strategies.exclusions import check_corrections, left_out, numels_of
from lightning_lowbw.strategies.step_times import NUM_STEPS, StepTimes
from lightning_lowbw.strategies.words import in_words
from lightning_lowbw.what.top_k import TopK
from lightning_lowbw.when.every_step import EveryStep
from lightning_lowbw.where.agreement import failing_together, gather
from lightning_lowbw.where.link import Link
from lightning_lowbw.where.peers import Peers

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_lowbw.strategies.strategy import Strategy


class AutoSparsity:
    """Chooses the schedule, or the method, once in a run.

    Args:
        strategy: does nothing unless its method has `EveryStep(sparsity="auto")`.
        picks: whether another method than that may be chosen, see `engine.auto_method`.
        allow_local: with `picks`, whether local SGD may be.

    Attributes:
        times: of the first steps.
    """

    def __init__(self, strategy: Strategy, *, picks: bool = False, allow_local: bool = False) -> None:
        self._strategy, self._picks, self._allow_local = strategy, picks, allow_local
        self._given: Method | None = None  # with "auto" in it
        self._chosen: dict[str, Any] | None = None  # what replaces it; see `described`
        self._adopted: Method | None = None  # that, as a method
        self._timed: Measured | None = None  # the first steps, until there is a choice
        self._link_watch: LinkWatch | None = None
        self._epoch_of_watch = -1  # in which it has found a change last
        self._is_pretrained = self._is_resumed = False
        self.times = StepTimes(strategy)

    def begin_fit(self, trainer: pl.Trainer) -> None:
        """Forget what the last fit has chosen."""
        strategy = self._strategy
        if self._given is not None and strategy.method == self._adopted:
            take(strategy, self._given)
        when = strategy.method.when
        self._given = strategy.method if isinstance(when, EveryStep) and when.is_auto else None
        self._chosen, self._adopted = None, None
        self.times.is_timing = self._is_pretrained = self._is_resumed = False
        self._timed, self._link_watch, self._epoch_of_watch = None, None, -1

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
        """Load the choice from a checkpoint: a resumed run does not choose again, except in `_keep_or_choose_anew`.

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
        """Say what a resumed run keeps; choose again if that is dense steps, and they were chosen for a shorter run.

        Collective: all ranks.
        """
        assert self._chosen is not None
        self._is_resumed, name = False, type(self._strategy).__name__
        before = self._chosen.get("num_steps", math.nan)
        now = min(
            math.inf if math.isnan(steps) else steps for steps in gather(num_steps_of(trainer), "number of steps")
        )
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
        is_open = is_open and not strategy.regime.is_search(trainer)
        if is_open and not self._picks and not numels_of(strategy)[0]:
            rank_zero_info(
                f'{type(strategy).__name__}, sparsity="auto": whole gradients are sent, because no tensor that is '
                "trained has min_numel elements and is not excluded."
            )
            is_open = False
        is_timing = is_open and any(worker.peers.num_participants > 1 for worker in strategy.workers)
        if is_timing and not self._picks:
            with failing_together():
                check_corrections(strategy.workers)
        num_steps = num_steps_of(trainer) - trainer.global_step
        if is_timing and num_steps < NUM_STEPS and trainer.lightning_module.automatic_optimization:
            rank_zero_info(
                f"{type(strategy).__name__}: this run has {num_steps:.0f} more optimizer steps, and the first "
                f"{NUM_STEPS} send whole gradients and are measured: nothing will be compressed."
            )
        self.times.begin_training(trainer, is_timing=is_timing)

    def end_step(self, worker: Worker, trainer: pl.Trainer) -> None:
        """Time an optimizer step; after the last one that is timed, choose. Later, watch the link.

        Collective: all ranks, blocking, after that step, and after each window of `LinkWatch`; nothing else.
        """
        if not self.times.counts(worker):
            return
        if self._link_watch is not None:
            self._watch(worker, trainer)
        if self.times.end_step():
            self._timed = Measured(*self.times.medians(), sparse_s={}, link=Link(0.0, math.inf))
        if self._timed is not None and not may_learn_length(trainer):
            timed, self._timed = self._timed, None
            self._decide(timed, worker, trainer)

    def _decide(self, timed: Measured, worker: Worker, trainer: pl.Trainer) -> None:
        strategy = self._strategy
        measured, run = agreed(timed, self._run(trainer), worker.peers, strategy.root_device)
        chosen: Method | EveryStep | None = None
        reason = why_dense(measured.step_s, measured.dense_s, run, self._schedule.budget, or_else=self._picks)
        if any(gather(strategy._guard.has_allowed, "steps past Lightning")):
            reason = "whole gradients are sent, because the training calls step() past Lightning's optimizers"
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
            left_out=left_out(self._strategy, trainer, allow_local=self._allow_local),
            topology=self._strategy.method.where.topology,
        )

    def _watch(self, worker: Worker, trainer: pl.Trainer) -> None:
        """If the exchange takes much longer or shorter than predicted, measure and choose again.

        Changes at most once per epoch, and not while there are stairs.

        Collective: all ranks, after every `WATCHED_STEPS` steps.
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
        measured, run = agreed(measured, self._run(trainer), worker.peers, strategy.root_device)
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

    @property
    def _schedule(self) -> EveryStep:
        """The schedule with "auto" in it."""
        assert self._given is not None
        assert isinstance(self._given.when, EveryStep)
        return self._given.when

    def _run(self, trainer: pl.Trainer) -> Run:
        return self.times.run(trainer, is_pretrained=self._is_pretrained or self._schedule.pretrained)

    def _measure(self, step_s: float, dense_s: float) -> Measured:
        """Return the measured times, of steps and of the link, on this rank.

        Collective: all ranks.
        """
        measured = self._measure_exchange(step_s, dense_s)
        if not self._picks:
            return measured
        sparse, others = numels_of(self._strategy)
        return with_narrow(
            measured, sum(sparse) + sum(others), self._peers.num_participants, self._strategy.root_device
        )

    def _measure_exchange(self, step_s: float, dense_s: float | None = None) -> Measured:
        what = self._strategy.method.what
        assert isinstance(what, TopK)
        device = self._strategy.root_device
        return measure(what, self._peers, device, *numels_of(self._strategy), step_s=step_s, dense_s=dense_s)

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
            when = EveryStep(**chosen["when"])
            self._replace(dataclasses.replace(self._given, when=when))

    def _replace(self, method: Method) -> None:
        strategy = self._strategy
        if type(method.what) is type(strategy.method.what) and type(method.when) is type(strategy.method.when):
            strategy.reconfigure(method)
        else:
            adopt(strategy, method)
        self._adopted = method


def may_learn_length(trainer: pl.Trainer) -> bool:
    """Return whether the end of the first epoch will tell how long the run is, and it may be shorter than is assumed.

    The same on all ranks, whose epochs are equally long.
    """
    max_epochs = trainer.max_epochs or 0
    if math.isfinite(trainer.num_training_batches) or trainer.current_epoch or max_epochs < 2:
        return False
    is_long = (trainer.global_step + 1) * max_epochs >= ASSUMED_STEPS
    return math.isnan(num_steps_of(trainer)) and not is_long


def described(when: EveryStep | None, measured: Measured) -> dict[str, Any]:
    """Return a schedule, None for dense steps, with the predicted time of its exchange: in plain values."""
    if when is None:
        return {"when": None, "step_s": measured.step_s, "predicted_s": measured.dense_s - measured.step_s}
    numbers = {name: getattr(when, name) for name in ("rampup_begin_step", "rampup_step", "sparsity")}
    last = when.density(2**62)
    predicted_s = next(seconds for density, seconds in measured.sparse_s.items() if math.isclose(density, last))
    return {"when": numbers, "step_s": measured.step_s, "predicted_s": predicted_s}
