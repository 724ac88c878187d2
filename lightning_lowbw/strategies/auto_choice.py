"""`sparsity="auto"` and `strategy="lowbw"` in a fit: times the first steps, then says with which method to go on."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_lowbw.arguments import code_of
from lightning_lowbw.comm.agreement import gather
from lightning_lowbw.comm.collectives import TrafficLedger, all_reduce_bytes
from lightning_lowbw.comm.link import Link, measure_link
from lightning_lowbw.comm.peers import Peers
from lightning_lowbw.compress.payload import Payload
from lightning_lowbw.cost_model import (
    DENSITIES,
    EVERY_STEP,
    Candidate,
    Measured,
    Run,
    choose,
    ddp,
    ms,
    slowest,
    why_dense,
    written,
)
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.kernels.tensors import device_of
from lightning_lowbw.method import Method
from lightning_lowbw.schedules.every_step import EveryStep
from lightning_lowbw.strategies.checks import num_steps_of_fit, numels_of
from lightning_lowbw.sync.gradient import GradientSync
from lightning_lowbw.sync.synchronizer import Synchronizer

NUM_UNTIMED, NUM_TIMED = 2, 4  # optimizer steps; the first ones allocate
NUM_STEPS = 1 + NUM_UNTIMED + NUM_TIMED  # of the first only the end is known
WRONG, LEAST_STEPS = 2.0, 20  # a prediction is named where it is wrong by this factor, over so many steps
SAMPLE, SAMPLE_OF_GPU = 1 << 18, 1 << 22  # elements that are exchanged to measure; of fewer a GPU shows launches only
SMALL_NUMEL = 64  # of tensors of which only the number counts
NUM_EXCHANGES = 4  # of each kind; the first one allocates, and finds its threshold
OF_AUTO = ("ddp", "dgc")  # the candidates of `sparsity="auto"`


class AutoChoice:
    """The choice of a fit; of several optimizers the first that steps is timed, and the others step in between.

    Args:
        names: of `cost_model.CANDIDATES`.

    Attributes:
        chosen: what has been chosen in place of "auto"; None before that.
        is_timing: whether steps are timed now; then the host waits for a CUDA device after backward.
        dense_s: seconds of a dense step, measured before the choice; None until then, and in a fit that resumes one.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self.begin_fit()

    def begin_fit(self) -> None:
        """Forget the last fit."""
        self.chosen: Candidate | None = None
        self.is_timing = False
        self.dense_s: float | None = None
        self._optimizer: Optimizer | None = None  # whose steps are timed
        self._last: tuple[float, float] | None = None  # the clock, and the seconds waited so far
        self._times: list[tuple[float, float]] = []  # seconds of a step, and those without what was waited
        self._end = math.inf  # the number of the fit's last step
        self._num_steps, self._seconds = 0, 0.0  # of the steps after the choice, and after a warm-up

    def is_open(self, method: Method) -> bool:
        """Return whether there is a choice to come, for which sparse exchanges may be timed."""
        return self.chosen is None and method.when.is_auto

    def state_dict(self) -> dict[str, Any] | None:
        """Return the choice in plain values, for a checkpoint; None where there is none."""
        if self.chosen is None:
            return None
        return {"name": self.chosen.name, "method": self.chosen.method.describe(), "last_s": self.chosen.last_s}

    def load_state_dict(self, state: Mapping[str, Any] | None, given: Method) -> Method | None:
        """Load the choice of a checkpoint, which is kept; return the method to continue with, None for the present."""
        if state is None or state["name"] not in self._names or not self.is_open(given):
            return None
        method = Method(**{**state["method"], "where": given.where})
        self.chosen = Candidate(state["name"], method, state["last_s"], state["last_s"])
        rank_zero_info(
            f"{self.chosen.name}, {code_of(method)}, as chosen before the checkpoint was saved. A resumed run does not "
            "choose again; to change it, write it down, as in lightning_lowbw.DGCStrategy(sparsity=[0.999])."
        )
        return method

    def begin_training(
        self, method: Method, workers: Sequence[Synchronizer], trainer: pl.Trainer, *, is_search: bool
    ) -> None:
        """Begin to time, where there is something to choose.

        Args:
            method: the one to begin with.
            workers: of the optimizers.
            trainer: of the fit.
            is_search: whether a tuner tries steps, and the fit comes after it.
        """
        self._optimizer, self._last, self._times = None, None, []
        self.is_timing = self.is_open(method) and not is_search
        self.is_timing = self.is_timing and any(worker.peers.num_participants > 1 for worker in workers)
        self._end = num_steps_of_fit(trainer, workers)

    def begin_renewed(self) -> None:
        """Time the steps of another optimizer, which may have taken the place of the one that was timed."""
        self._optimizer, self._last, self._times = None, None, []

    def restart_clock(self, ledger: TrafficLedger) -> None:
        """Do not count the time since the last step, such as validation or a checkpoint."""
        self._last = (time.perf_counter(), ledger.exposed_s)

    def end_step(self, worker: GradientSync, workers: Sequence[GradientSync], trainer: pl.Trainer) -> Method | None:
        """Time an optimizer step; return the method to continue with after the last one that decides, else None.

        Collective: all ranks, blocking, after that step; nothing else.

        Args:
            worker: whose optimizer has stepped.
            workers: all of them.
            trainer: of the fit.
        """
        if not self.is_timing and self.chosen is None:
            return None
        # Of several optimizers one is timed: from its step to its next one is a batch, with the steps of the others.
        if worker.optimizer is not (self._optimizer or worker.optimizer):
            return None
        self._optimizer = worker.optimizer
        if self.is_timing:
            device_of(worker.device).synchronize(all_streams=True)
        before = self._last
        self.restart_clock(worker.peers.ledger)
        if before is None or self._last is None:
            return None
        seconds, waited = (now - then for now, then in zip(self._last, before, strict=True))
        if self.is_timing:
            self._times.append((seconds, seconds - waited))
            if len(self._times) == NUM_UNTIMED + NUM_TIMED:
                self.is_timing, self.chosen = False, self._choose(worker, workers, trainer)
                self._last = None  # the next step has the choice in it
                return self.chosen.method
        elif worker.step > worker.method.when.end_of_warm_up:
            self._num_steps, self._seconds = self._num_steps + 1, self._seconds + seconds
        return None

    def _choose(self, worker: GradientSync, workers: Sequence[GradientSync], trainer: pl.Trainer) -> Candidate:
        """Measure, where that matters; return what to continue with, and log why.

        Collective: all ranks, blocking; they may have other times and lengths.
        """
        given: Any = worker.method  # of now: it may have been replaced while steps were timed
        timed, ends = zip(*gather((medians(self._times), self._end), "times of steps"), strict=True)
        measured = slowest(timed)
        self.dense_s = measured.dense_s
        run = Run(worker.step, min(ends), given.when.pretrained, isinstance(worker.optimizer, (Adam, AdamW)))
        why = why_dense(measured, run, given.when.budget)
        if why is None:
            here = measure(given.what, self._names, numels_of(workers), worker.peers, worker.device, measured)
            measured = slowest(gather(here, "times of exchanges"))
            refused = refusals(workers, is_dgc_asked_for=self._names == OF_AUTO)
            found, sentence = choose(measured, run, given, self._names, refused)
        else:
            found = ddp(measured, run, given)
            sentence = f"{measured}: {found.name}, because {why}. To write it down: {written(found.method)}"
        rank_zero_info(f"{type(trainer.strategy).__name__}: {sentence}.")
        return found

    @property
    def mean_s(self) -> float | None:
        """Seconds of a step after the choice and the warm-up; None where too few have been timed."""
        return self._seconds / self._num_steps if self._num_steps >= LEAST_STEPS else None

    def end_training(self, strategy: str) -> None:
        """Log it if steps have taken much longer or shorter than predicted."""
        seconds = self.mean_s
        if self.chosen is None or seconds is None:
            return
        predicted_s = self.chosen.last_s
        if max(seconds / predicted_s, predicted_s / seconds) > WRONG:
            rank_zero_info(
                f"{strategy}: a step took {ms(seconds)}, and {ms(predicted_s)} was predicted when {self.chosen.name} "
                "was chosen. The link, or other work on the machine, may have changed; a fit that does not resume "
                "chooses anew."
            )


def medians(times: Sequence[tuple[float, float]]) -> Measured:
    """Return the times of a dense step, and of one without communication."""
    dense_s, step_s = (statistics.median(each) for each in zip(*times[NUM_UNTIMED:], strict=True))
    return Measured(max(step_s, 1e-6), dense_s, {}, Link(0.0, math.inf))


def refusals(workers: Sequence[GradientSync], *, is_dgc_asked_for: bool) -> dict[str, str]:
    """Return which candidates cannot be used in this training, or have not been measured for it, with the reasons.

    Args:
        workers: of the optimizers.
        is_dgc_asked_for: whether the user has named it, and is warned of optimizers that it has no correction for.
    """
    unknown = {type(each.optimizer).__name__ for each in workers if not each.correction.is_complete}
    if unknown and not is_dgc_asked_for:
        return {"dgc": f"its accuracy is measured with SGD, Adam and AdamW, not with {', '.join(unknown)}"}
    if not numels_of(workers)[0]:
        return {"dgc": "no tensor that is trained has min_numel elements and is not excluded"}
    try:
        for worker in workers:
            worker.correction.check()
    except ConfigurationError as error:
        return {"dgc": str(error).split(". ")[0]}
    return {}


# Measurements ---------------------------------------------------------------------------------------------------------


def measure(
    what: Payload,
    names: Sequence[str],
    numels: tuple[Sequence[int], Sequence[int]],
    peers: Peers,
    device: torch.device,
    timed: Measured,
) -> Measured:
    """Return `timed` with the link and the exchanges in it, on this rank.

    A few exchanges of a sample are timed; a whole one takes as much longer as it has more elements, and at least what
    its bytes take on the link, because a link may let a sample pass that it would not let a model pass.

    Collective: all ranks. Enters no ledger.

    Args:
        what: the payload of sparse steps.
        names: of the candidates.
        numels: the elements of each tensor that is sent sparse in sparse steps, and of each other one.
        peers: who takes part.
        device: where the gradients are.
        timed: the times of steps.
    """
    link, (sparse, others) = measure_link(peers.between.group, device), numels
    sample = SAMPLE if device.type == "cpu" else SAMPLE_OF_GPU
    tensors = [*[SMALL_NUMEL] * len(sparse), *[1] * len(others)]
    exchange_s: dict[float | str, float] = {}

    def dense_s(numel: int) -> float:
        return link.seconds(all_reduce_bytes(4 * numel // peers.num_local_ranks, peers.num_participants))

    def per_element_s(few: tuple[float, int], many: tuple[float, int], numel: float) -> float:
        return max(many[0] - few[0], link.seconds(many[1] - few[1]), 0.0) / numel

    for name in names:
        if name in EVERY_STEP:
            (few,) = time_exchanges(EVERY_STEP[name](), tensors, peers, device)
            (many,) = time_exchanges(EVERY_STEP[name](), [*tensors, sample], peers, device)
            exchange_s[name] = few[0] + (sum(sparse) + sum(others)) * per_element_s(few, many, sample)
        elif name == "dgc" and sparse:
            # The pass over all gradients takes no longer than the optimizer's step that it replaces: what counts is the
            # number of elements that are sent.
            least, most = DENSITIES[0], DENSITIES[-1]
            stairs = EveryStep(0, 2 * NUM_EXCHANGES, (1.0 - most, 1.0 - least))
            method = Method(when=stairs, what=what.sample(SMALL_NUMEL))
            many, few = time_exchanges(method, [*tensors, sample], peers, device, num_stairs=2)
            sent_s = sum(sparse) * per_element_s(few, many, sample * (most - least))
            exchange_s |= {density: few[0] + dense_s(sum(others)) + density * sent_s for density in DENSITIES}
    return Measured(timed.step_s, timed.dense_s, exchange_s, link)


def time_exchanges(
    method: Method, numels: Sequence[int], peers: Peers, device: torch.device, num_stairs: int = 1
) -> list[tuple[float, int]]:
    """Return the seconds and bytes of an exchange of gradients, for each stair of the schedule.

    Collective: all ranks.
    """
    named = [(str(number), Parameter(torch.zeros(numel, device=device))) for number, numel in enumerate(numels)]
    generator = torch.Generator(device).manual_seed(0)  # the training's own goes on as if nothing had been measured
    noise = torch.randn(max(numels), generator=generator, device=device)
    found: list[tuple[float, int]] = []
    with peers.ledger.paused():
        worker = method.make_synchronizer(SGD([each for _, each in named], lr=0.0, momentum=0.9), named, peers)
        for _ in range(num_stairs * NUM_EXCHANGES):
            for _, parameter in named:
                parameter.grad = noise[: parameter.numel()].clone()
            before, started = _slow_bytes(peers), time.perf_counter()
            worker.exchange(applies=True)
            float(named[-1][1].detach()[0])  # on CUDA, waits for it
            found.append((time.perf_counter() - started, _slow_bytes(peers) - before))
            worker.after_step()
    return [min(found[first + 1 : first + NUM_EXCHANGES]) for first in range(0, len(found), NUM_EXCHANGES)]


def _slow_bytes(peers: Peers) -> int:
    return peers.ledger.of_slow_network[0]
