"""`sparsity="auto"` and `strategy="lowbw"` in a fit: times the first steps, then says with which method to go on."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.optim import Adam, AdamW, Optimizer

from lightning_lowbw.comm.agreement import gather
from lightning_lowbw.comm.collectives import TrafficLedger, is_gloo
from lightning_lowbw.comm.echoes import echo
from lightning_lowbw.comm.link import Link, measure_link
from lightning_lowbw.comm.peers import Peers
from lightning_lowbw.cost_model import (
    DENSITIES,
    EVERY_STEP,
    FAST,
    HALF_DDP,
    Candidate,
    Cluster,
    Measured,
    Run,
    choose,
    predict,
    slowest,
    why_dense,
    written,
)
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.kernels.tensors import device_of
from lightning_lowbw.method import Method
from lightning_lowbw.payloads.payload import Shapes
from lightning_lowbw.strategies.checks import num_steps_of_fit
from lightning_lowbw.strategies.step_hooks import leaves_as_made, takes_as_made
from lightning_lowbw.sync.gradient import GradientSync
from lightning_lowbw.sync.synchronizer import Synchronizer

NUM_UNTIMED, NUM_TIMED = 2, 4  # optimizer steps; the first ones allocate
NUM_STEPS = 1 + NUM_UNTIMED + NUM_TIMED  # of the first only the end is known
SAMPLE, SAMPLE_OF_GPU = 512, 2048  # rows of the matrix whose exchange is timed; of a smaller a GPU shows launches only
SMALL = 64  # rows of a matrix that stands for one tensor, if only the number of tensors counts
NUM_EXCHANGES = 4  # of each kind
OF_AUTO = ("ddp", "dgc")  # the candidates of `sparsity="auto"`
DENSE = ("ddp", "hierarchical")  # not kept by a resume, which may have more steps left


class AutoChoice:
    """The choice of a fit. With several optimizers it times the first that steps; the other optimizers step in between.

    Args:
        names: of `cost_model.CANDIDATES`.

    Attributes:
        chosen: the candidate that replaces "auto"; None before the choice.
        is_timing: whether steps are timed now; then the host waits for a CUDA device after backward.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self.chosen: Candidate | None = None
        self.is_timing = False
        self._optimizer: Optimizer | None = None  # whose steps are timed
        self._last: tuple[float, float] | None = None  # the clock, and the seconds waited so far
        self._times: list[tuple[float, float]] = []  # seconds of a step, with and without the time spent waiting
        self._end = math.inf  # the number of the fit's last step

    def is_open(self, method: Method) -> bool:
        """Return whether there is a choice to come, for which sparse exchanges may be timed."""
        return self.chosen is None and method.when.is_auto

    def state_dict(self) -> dict[str, Any] | None:
        """Return the choice in plain values, for a checkpoint; None if a resume chooses."""
        if self.chosen is None or self.chosen.name in DENSE:
            return None
        return {"name": self.chosen.name, "method": self.chosen.method.describe()}

    def load_state_dict(self, state: Mapping[str, Any] | None, given: Method) -> Method | None:
        """Load the choice of a checkpoint, which is kept; return the method to continue with, None for the present."""
        if state is None or state["name"] not in self._names or not self.is_open(given):
            return None
        saved = state["method"]["where"]
        where = replace(given.where, inter_dtype=saved["inter_dtype"], algorithm=saved["algorithm"])
        method = Method(**{**state["method"], "where": where})
        self.chosen = Candidate(state["name"], method, math.nan)
        rank_zero_info(
            f"{self.chosen.name}, {written(method)}, as chosen before the checkpoint was saved. A resumed run does not "
            "choose again; to change it, write it down, as in lowbw.DGCStrategy(sparsity=[0.999])."
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
        if self.is_timing:
            self._end = num_steps_of_fit(trainer, workers)

    def restart_clock(self, ledger: TrafficLedger) -> None:
        """Do not count the time since the last step, such as validation or a checkpoint."""
        self._last = (time.perf_counter(), ledger.exposed_s)

    def end_step(self, worker: GradientSync, workers: Sequence[GradientSync], trainer: pl.Trainer) -> Method | None:
        """Time an optimizer step; return the method to continue with after the last one that decides, else None.

        Collective: all ranks, blocking, after that step; nothing else.

        Args:
            worker: whose optimizer has stepped.
            workers: all workers of the fit.
            trainer: of the fit.
        """
        # Only one optimizer is timed: from its step to its next step is a batch, with the other optimizers' steps.
        if worker.optimizer is not (self._optimizer or worker.optimizer):
            return None
        self._optimizer = worker.optimizer
        device_of(worker.params.device).synchronize(all_streams=True)
        before = self._last
        self.restart_clock(worker.peers.ledger)
        if before is None or self._last is None:
            return None
        seconds, waited = (now - then for now, then in zip(self._last, before, strict=True))
        self._times.append((seconds, seconds - waited))
        if len(self._times) < NUM_UNTIMED + NUM_TIMED:
            return None
        self.is_timing, self.chosen = False, self._choose(worker, workers, trainer)
        return self.chosen.method

    def _choose(self, worker: GradientSync, workers: Sequence[GradientSync], trainer: pl.Trainer) -> Candidate:
        """Measure, where that matters; return what to continue with, and log why.

        Collective: all ranks, blocking; they may have other times and lengths.
        """
        started = time.perf_counter()
        given: Any = worker.method  # of now: it may have been replaced while steps were timed
        timed, ends = zip(*gather((medians(self._times), self._end), "times of steps"), strict=True)
        measured = slowest(timed)
        run = Run(worker.step, min(ends), given.when.pretrained, isinstance(worker.optimizer, (Adam, AdamW)))
        refused: dict[str, str] = {}
        if why_dense(measured, run, given.when.budget) is None:
            begins_early = takes_as_made(trainer) and leaves_as_made(trainer)
            here = measure(
                *(given, self._names, shapes_of(workers), worker.peers, worker.params.device, measured),
                begins_early=begins_early,
            )
            measured = slowest(gather(here, "times of exchanges"))
            refused = refusals(workers, is_dgc_asked_for=self._names == OF_AUTO)
        found, sentence = choose(measured, run, given, self._names, refused)
        took_s = time.perf_counter() - started
        rank_zero_info(f"{type(trainer.strategy).__name__}, chosen in {took_s:.2g} s: {sentence}.")
        return found


def medians(times: Sequence[tuple[float, float]]) -> Measured:
    """Return the times of a dense step, and of one without communication."""
    dense_s, step_s = (statistics.median(each) for each in zip(*times[NUM_UNTIMED:], strict=True))
    return Measured(max(step_s, 1e-6), dense_s, {}, Link(0.0, math.inf))


def shapes_of(workers: Sequence[GradientSync]) -> tuple[Shapes, Shapes]:
    """Return the shapes of the tensors that are sent sparse in sparse steps, and of the other ones that are trained."""
    found = [worker.params.by_kind(worker.method.what) for worker in workers]
    sparse, others = (
        [tuple(each.shape) for of_worker in kind for each in of_worker] for kind in zip(*found, strict=True)
    )
    return sparse, others


def refusals(workers: Sequence[GradientSync], *, is_dgc_asked_for: bool) -> dict[str, str]:
    """Return which candidates cannot be used in this training, or have not been measured for it, with the reasons.

    Args:
        workers: of the optimizers.
        is_dgc_asked_for: whether the user has named it, and is warned of optimizers that it has no correction for.
    """
    unknown = {type(each.optimizer).__name__ for each in workers if not each.correction.is_complete}
    if unknown and not is_dgc_asked_for:
        return {"dgc": f"its accuracy is measured with SGD, Adam and AdamW, not with {', '.join(unknown)}"}
    if not shapes_of(workers)[0]:
        return {"dgc": "no tensor that is trained has min_numel elements and is not excluded"}
    try:
        for worker in workers:
            worker.correction.check()
    except ConfigurationError as error:
        return {"dgc": str(error).split(". ")[0]}
    return {}


# Measurements ---------------------------------------------------------------------------------------------------------


def measure(
    given: Method,
    names: Sequence[str],
    shapes: tuple[Shapes, Shapes],
    peers: Peers,
    device: torch.device,
    timed: Measured,
    *,
    begins_early: bool,
) -> Measured:
    """Return `timed` with the link and the exchanges in it, on this rank.

    The link is measured once; the time of an exchange on it follows from its bytes and rounds (`cost_model.predict`).
    The computation of an exchange is timed without a network. So the number of candidates costs no round trip.

    Collective: all ranks. Enters no ledger.

    Args:
        given: as of `cost_model.choose`.
        names: of the candidates.
        shapes: of the tensors that are sent sparse in sparse steps, and of all other tensors.
        peers: the ranks that take part.
        device: where the gradients are.
        timed: the times of steps.
        begins_early: see `cost_model.Cluster`; of this rank.
    """
    link, inside = measure_link(peers.between.group, device), FAST
    if peers.num_local_ranks > 1:
        inside = measure_link(peers.node.group, device)
    of_node = replace(link, bandwidth_bytes_per_s=peers.num_local_ranks * link.bandwidth_bytes_per_s)
    cluster = Cluster(
        *(peers.num_participants, peers.num_local_ranks, of_node, inside),
        memory_bytes_per_s=math.inf,
        begins_early=begins_early,
        gathers_in_ring=not is_gloo(peers.between.group, device),
    )
    predicted = predict(*shapes, cluster, timed.step_s, given, timed.dense_s)
    work_s = time_work(given, names, shapes, peers, device)
    exchange_s = {key: predicted.exchange_s[key] + seconds for key, seconds in work_s.items()}
    return Measured(timed.step_s, timed.dense_s, exchange_s, link)


def time_work(
    given: Method, names: Sequence[str], shapes: tuple[Shapes, Shapes], peers: Peers, device: torch.device
) -> dict[float | str, float]:
    """Return the seconds that a rank computes in an exchange of each candidate; nothing is communicated.

    Args:
        given: as of `measure`, as are the following.
        names: of the candidates.
        shapes: of the tensors.
        peers: the ranks that would take part; a node exchanges a tensor in parts.
        device: where the gradients are.
    """
    numels = [sum(map(math.prod, each)) / peers.num_local_ranks for each in shapes]
    echoes, sample = echo(peers.num_participants), SAMPLE if device.type == "cpu" else SAMPLE_OF_GPU
    work_s: dict[float | str, float] = {}

    def time_s(method: Method, *sizes: int) -> float:
        return time_exchange(method, [SMALL] * sum(map(len, shapes)) + [*sizes], echoes, device)

    for name in names:
        if name == "dgc" and shapes[0]:
            # The pass over all gradients takes no longer than the optimizer's step that it replaces: what counts is the
            # number of elements that are sent.
            least, most = DENSITIES[0], DENSITIES[-1]
            what = given.what.sample(SMALL * SMALL)
            few_s, many_s = (time_s(Method(what=what.at(density)), sample) for density in (least, most))
            of_sent_s = max(0.0, many_s - few_s) / (sample * sample * (most - least))
            work_s |= {density: few_s + density * numels[0] * of_sent_s for density in DENSITIES}
        elif name == HALF_DDP:
            work_s[name] = sum(numels) / (sample * sample) * time_rounding(sample * sample, device)
        elif name in EVERY_STEP:
            few_s, many_s = time_s(EVERY_STEP[name](0, given)), time_s(EVERY_STEP[name](0, given), sample)
            work_s[name] = few_s + sum(numels) / (sample * sample) * max(0.0, many_s - few_s)
    return work_s


def time_exchange(method: Method, sizes: Sequence[int], peers: Peers, device: torch.device) -> float:
    """Return the seconds of an exchange of square matrices; among echoes the seconds of its computation."""
    exchange = method.what.exchange(peers, method.when)
    assert exchange is not None
    generator = torch.Generator(device).manual_seed(0)  # the training's own goes on as if nothing had been measured
    noise = torch.randn(max(sizes) ** 2, generator=generator, device=device)
    weights = {str(number): torch.zeros(size, size, device=device) for number, size in enumerate(sizes)}

    def run() -> None:
        signal = {name: noise[: weight.numel()].clone().view_as(weight) for name, weight in weights.items()}
        mean = exchange.prepare(signal).send().wait().mean
        mean.step_({name: (signal[name].view(-1), weight.view(-1), 0.0) for name, weight in weights.items()})

    return least_s(run, device)


def time_rounding(numel: int, device: torch.device) -> float:
    """Return the seconds that rounding elements to bfloat16 and back takes."""
    values = torch.zeros(numel, device=device)
    return least_s(lambda: values.copy_(values.to(torch.bfloat16)), device)


def least_s(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the fastest of some runs but the first, which allocates, and finds thresholds."""
    clock = []
    for _ in range(NUM_EXCHANGES):
        run()
        device_of(device).synchronize()
        clock.append(time.perf_counter())
    return min(after - before for before, after in itertools.pairwise(clock))
