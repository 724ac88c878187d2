"""The cost model, and the rule of `sparsity="auto"` and `strategy="lowbw"`, which chooses by it.

The rule, as the user knows it:

1. The first steps are dense. If a dense exchange fits into the budget, a share of a step, all steps are; so they are if
   the rest of the run would wait less than `LEAST_WAIT_S` for it. Then nothing else is measured.
2. Deep gradient compression takes the largest density of `DENSITIES` whose exchange fits into the budget, but none at
   which an element is sent less than 30 times (with Adam and AdamW 60) in the rest of the run.
3. It begins dense for 5 % of the run; then come stairs a factor of 4 apart, for 20 %. Not with trained weights. Where
   bfloat16 is a candidate, too, and faster than DDP, the dense steps are in bfloat16.
4. Of the candidates, in the order of how much they change the training, the first is chosen whose mean step is
   predicted to take at most the budget longer than the shortest.
5. All ranks choose alike, once; a resumed run keeps the choice.
6. Candidates are compared at equal steps. What needs more of them is named, where it would be at about the same loss in
   less than half of the time.

The 30 and 60: top-k costs accuracy because it delays elements, the less the more often each is sent, density times
steps: 10 times cost 0.4 % of the loss, 0.8 times 2.5 % (benchmarks/results/auto.md). The warm-up is a share of the
steps, not of the time: on a slow link that would be a dozen steps, and sparse steps so early cost the most.

The cost model (`cost_of`), for M nodes of G ranks, W = M G, each node with one link to the others:

    step     = step alone + max(0, beside backward - overlap * step alone) + exchange afterwards / k
    exchange = bytes of a node / bandwidth + rounds * latency + bytes inside the node / bandwidth there + work

| collective | bytes of a node | rounds |
| --- | --- | --- |
| ring all-reduce of B bytes, in buckets | 2 (W - 1) / W * B | 2 (W - 1) for each bucket |
| ring all-gather of m bytes of each rank | (W - 1) m | W - 1; on gloo 1, all at once |
| all-to-all of m bytes from each rank to each | G (W - G) m | 1 |

Tensors that are sent whole, of B bytes, go in the first of a payload's messages: (W - 1) B more, and no round; many are
all-reduced meanwhile (`comm.peers.is_apart`).

Flat rings cross the link of a node once. In an all-to-all W - G senders meet at each node: what all its ranks receive
passes through its link. On two levels M participants exchange each of G parts: B is that of the node, m that of a part,
and each rank of a node sends its own. Beside the backward pass run whole gradients, the sum inside the node, and when
flat the first message of gradients in few bits, but for the last of its groups, where anything of it may begin there
(`Cluster.begins_early`); the rest comes after it, every k steps, or is hidden by `delay_steps`. Work is memory read and
written: `WORK_BYTES` per element of a dense payload, and none for TopK, whose pass replaces the optimizer's.

A Lightning strategy (`strategies.auto_choice`) measures the link and a dense step, and adds to these seconds what the
payloads compute, from exchanges of a sample without a network. The overlap is what the dense step has not waited of its
exchange. Not in the model: lost packets, stragglers, other traffic, the host's time (on an H100 about 43 ms of a
step with powersgd, docs/quick_start.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from lightning_lowbw.arguments import code_of
from lightning_lowbw.comm.collectives import all_gather_bytes, all_gather_rounds, all_reduce_bytes, all_reduce_rounds
from lightning_lowbw.comm.link import Link
from lightning_lowbw.comm.peers import BUCKET_BYTES, is_apart
from lightning_lowbw.comm.topology import Where
from lightning_lowbw.compress.payload import FLOAT_BYTES, Message, Shapes, Whole
from lightning_lowbw.compress.top_k import small_numel
from lightning_lowbw.method import Method
from lightning_lowbw.presets import QuantizedGradients, preset
from lightning_lowbw.schedules.every_step import EveryStep
from lightning_lowbw.sync.early import share_begun_early

HIDDEN = "streaming_diloco"  # no step waits for it, and it needs more of them
HALF_DDP = "bfloat16"  # DDP that sums its buckets in it, as its users have it on a slow network
DENSITIES = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256)
LEAST_TIMES_SENT = 30
LEAST_TIMES_SENT_ADAM = 60  # with 48, text from scratch lost 0.8 % in 800 steps, with 97 nothing
LEAST_WAIT_S = 2.5  # of which a fifth is sure to be saved, and that is what measuring takes on most links
DENSE_SHARE, STAIRS_SHARE = 0.05, 0.20  # of the steps that are left
STAIR = 2  # from one stair to the next, in the densities above
MOST_STAIR = 0.3  # the paper's first is 0.25
MOST_STAIR_ADAM = 0.2  # with 0.256, text from scratch lost 0.6 % in 5,000 steps, with dense steps in its place nothing


@dataclass(frozen=True)
class Measured:
    """What steps take; for a choice it must be the same on all ranks.

    Attributes:
        step_s: seconds of an optimizer step without communication.
        dense_s: seconds of a dense one.
        exchange_s: predicted seconds that an exchange adds to the first: by density, or by the name of a payload.
        link: by which they were predicted.
        num_ranks: that exchange.
    """

    step_s: float
    dense_s: float
    exchange_s: Mapping[float | str, float]
    link: Link
    num_ranks: int = 2

    def of(self, names: Sequence[str]) -> Measured:
        """Return it without the exchanges of what is no candidate."""
        add_s = {key: seconds for key, seconds in self.exchange_s.items() if key not in EVERY_STEP or key in names}
        return replace(self, exchange_s=add_s)

    def __str__(self) -> str:
        """Return the measured numbers on which the choice is based."""
        shown = f"a step takes {ms(self.step_s)} without communication and {ms(self.dense_s)} with all gradients"
        if not self.exchange_s:
            return shown
        mbit_per_s = self.link.bandwidth_bytes_per_s * 8e-6
        return f"{shown}, the link carries {mbit_per_s:,.0f} Mb/s, latency {ms(self.link.latency_s)}"


@dataclass(frozen=True)
class Run:
    """What is known of the run.

    Attributes:
        num_done: optimizer steps taken.
        num_steps: of the whole run; infinite where it is not known.
        is_pretrained: whether it starts from trained weights, which need no warm-up.
        is_adam: whether the optimizer is Adam or AdamW.
    """

    num_done: int
    num_steps: float = math.inf
    is_pretrained: bool = False
    is_adam: bool = False

    @property
    def num_left(self) -> float:
        """Steps to come, at least 1."""
        return max(1, self.num_steps - self.num_done)


@dataclass(frozen=True)
class Candidate:
    """A method, and what it is predicted to take.

    Attributes:
        name: for the user: that in `CANDIDATES`; on two levels "ddp" is "hierarchical" unless `algorithm` is "flat".
        method: the method.
        mean_s: seconds of a step, on average to the end of the run.
        last_s: seconds of a step at the end of the run.
        why: what has decided its numbers.
    """

    name: str
    method: Method
    mean_s: float
    last_s: float
    why: str = ""


def why_dense(measured: Measured, run: Run, budget: float) -> str | None:
    """Return why all steps are dense whatever the link is, which is then not measured; None if the link matters.

    Examples:
        >>> why_dense(Measured(0.1, 0.13, {}, Link(0.0, 1.0)), Run(num_done=7, num_steps=57), budget=0.05)
        'all 50 steps that are left wait 1.5 s for gradients, and the link is measured from 2.5 s on'
    """
    wait_s = measured.dense_s - measured.step_s
    if wait_s <= budget * measured.step_s:
        return f"whole gradients add less than {100 * budget:.4g} % of a step"
    if run.num_left * wait_s < LEAST_WAIT_S:
        all_s = f"all {run.num_left:,.0f} steps that are left wait {run.num_left * wait_s:.2g} s for gradients"
        return f"{all_s}, and the link is measured from {LEAST_WAIT_S:g} s on"
    return None


def choose(
    measured: Measured, run: Run, given: Method, names: Sequence[str], refused: Mapping[str, str]
) -> tuple[Candidate, str]:
    """Return the candidate to continue with, and one sentence that says why.

    Args:
        measured: on the slowest rank.
        run: what is known of the run.
        given: the method with "auto" in it: its budget, its payload for sparse steps, its topology.
        names: of `CANDIDATES`, in their order.
        refused: by name, why others of these may not be taken.

    Examples:
        >>> from lightning_lowbw import TopK
        >>> slow = Measured(0.1, 0.9, {density: 2 * density for density in DENSITIES}, Link(1e-4, 125e6))
        >>> given = Method(when=EveryStep(sparsity="auto"), what=TopK())
        >>> found, reason = choose(slow, Run(7, 20_007, is_pretrained=True), given, ("ddp", "dgc"), {})
        >>> print(reason)
        a step takes 100 ms without communication and 900 ms with all gradients, the link carries 1,000 Mb/s, \
latency 0.1 ms: dgc, 104 ms a step (more would take over 5 % of a step); ddp would take 900 ms. To write it down: \
strategy=lowbw.Strategy(lowbw.Method(when=lowbw.EveryStep(rampup_begin_step=7, sparsity=(0.998,)), what=lowbw.TopK()))
    """
    budget, measured = given.when.budget, measured.of(names)
    found = {name: refused.get(name) or CANDIDATES[name](measured, run, given) for name in names}
    candidates = [each for each in found.values() if isinstance(each, Candidate)]
    least_s = min(each.mean_s for each in candidates)
    chosen = next(each for each in candidates if each.mean_s <= (1.0 + budget) * least_s)
    why = f" ({chosen.why})" if chosen.why else ""
    parts = [f"{measured}: {chosen.name}, {ms(chosen.mean_s)} a step{why}"]
    parts += [f"{each.name} would take {ms(each.mean_s)}" for each in candidates if each is not chosen]
    parts += [f"not {name}, because {why}" for name, why in found.items() if isinstance(why, str)]
    parts += sooner(measured, run, chosen)
    return chosen, f"{'; '.join(parts)}. To write it down: {written(chosen.method)}"


def steps_to_loss(method: Method, num_participants: int, num_steps: float) -> float | None:
    """Return how many optimizer steps a method needs to DDP's loss, times DDP's; None where that is not measured.

    Args:
        method: the method.
        num_participants: N.
        num_steps: of DDP.

    Examples:
        >>> steps_to_loss(Method(), 2, 500), steps_to_loss(preset("powersgd"), 2, 500)
        (1.0, None)
    """
    if not method.averages_weights:
        return method.what.steps_to_loss
    return method.when.steps_to_loss(num_participants, num_steps) if method.what.sends_all else None


def sooner(measured: Measured, run: Run, chosen: Candidate) -> list[str]:
    """Return in words what reaches about the same loss in less than half of the time, with more steps; else nothing."""
    factor = steps_to_loss(preset(HIDDEN), measured.num_ranks, run.num_steps)
    if HIDDEN not in measured.exchange_s or factor is None:
        return []
    hidden_s = factor * (measured.step_s + measured.exchange_s[HIDDEN])
    if 2.0 * hidden_s >= chosen.mean_s:
        return []
    hidden, as_chosen = (f"{number(seconds * run.num_left)} s" for seconds in (hidden_s, chosen.mean_s))
    asked = f'"{HIDDEN}" with max_steps={math.ceil(factor * run.num_steps)}'
    return [f"{asked} would take {hidden} instead of {as_chosen} to about this loss"]


def written(method: Method) -> str:
    """Return the code that selects a method, as it can be typed after ``import lightning_lowbw as lowbw``."""
    names = {Where(): "ddp", Where(inter_dtype=HALF_DDP): HALF_DDP} if method.kind == "whole" else {}
    where = method.where if method.where.topology != "flat" else replace(method.where, algorithm=None)
    if method.kind == "whole" and where.algorithm == "flat":
        where = replace(where, topology="flat", algorithm=None)
    named = f'"{names[where]}"' if where in names else f"lowbw.Strategy({code_of(method, 'lowbw.')})"
    return f"strategy={named}"


def ddp(measured: Measured, run: Run, given: Method) -> Candidate:
    """Return whole gradients in each step: nothing changes."""
    name = "ddp" if "flat" in (given.where.topology, given.where.algorithm) else "hierarchical"
    return Candidate(name, Method(where=given.where), measured.dense_s, measured.dense_s)


def _every_step(name: str, measured: Measured, run: Run, given: Method) -> Candidate:
    """Return a payload that costs the same in every step."""
    step_s = measured.step_s + measured.exchange_s[name]
    return Candidate(name, EVERY_STEP[name](run.num_done, given), step_s, step_s)


def _dgc(measured: Measured, run: Run, given: Method) -> Candidate | str:
    """Return deep gradient compression, which delays most elements; or why there is no density for it."""
    left, step_s, add_s = run.num_left, measured.step_s, measured.exchange_s
    if left == math.inf:
        return "the number of steps is not known: give Trainer(max_steps=...)"
    times_sent = LEAST_TIMES_SENT_ADAM if run.is_adam else LEAST_TIMES_SENT
    often = f"each element must be sent {times_sent} times on average, and {left:,.0f} steps are left"
    enough = [density for density in DENSITIES if density * left >= times_sent]
    if not enough:
        return often
    fitting = [density for density in enough if add_s[density] <= given.when.budget * step_s]
    density = max(fitting, default=enough[0])
    stairs, num_dense, per_stair = _warm_up(run, density)
    begin, lengths = run.num_done + num_dense, [num_dense, *[per_stair] * (len(stairs) - 1)]
    where, dense_s = given.where, measured.dense_s
    if num_dense and step_s + add_s.get(HALF_DDP, math.inf) < dense_s:
        where, dense_s = replace(where, inter_dtype=HALF_DDP), step_s + add_s[HALF_DDP]
    times_s = [dense_s, *(step_s + add_s[stair] for stair in stairs)]
    mean_s = sum(n * s for n, s in zip([*lengths, left - sum(lengths)], times_s, strict=True)) / left
    when = EveryStep(begin, max(1, per_stair) * len(stairs), tuple(round(1.0 - stair, 6) for stair in stairs))
    why = f"more would take over {100 * given.when.budget:.4g} % of a step" if fitting else often
    return Candidate("dgc", replace(given, when=when, where=where), mean_s, times_s[-1], why)


def _warm_up(run: Run, density: float) -> tuple[list[float], int, int]:
    """Return the stairs of densities (the last one stays), and the number of dense steps and of steps per stair."""
    if run.is_pretrained:
        return [density], 0, 0
    # The stairs before the last density: from the densest down, each a quarter of the one before.
    above = DENSITIES[DENSITIES.index(density) + STAIR :: STAIR][::-1]
    before = [stair for stair in above if stair <= (MOST_STAIR_ADAM if run.is_adam else MOST_STAIR)]
    per_stair = round(STAIRS_SHARE * run.num_left / len(above)) if above else 0
    num_dense = round(DENSE_SHARE * run.num_left) + (len(above) - len(before)) * per_stair  # in place of too high ones
    return ([*before, density], num_dense, per_stair) if before and per_stair else ([density], num_dense, 0)


# What costs the same in every step, from the first one after the choice on; of the steps taken and the given method.
EVERY_STEP: dict[str, Callable[[int, Method], Method]] = {
    HALF_DDP: lambda _, given: Method(where=replace(given.where, inter_dtype="bfloat16")),
    "int8": lambda num_done, given: replace(QuantizedGradients(rampup_begin_step=num_done), where=given.where),
}
# In the order of how much they change the training. A reason in place of a candidate is shown to the user.
CANDIDATES: dict[str, Callable[[Measured, Run, Method], Candidate | str]] = {
    "ddp": ddp,
    **{name: partial(_every_step, name) for name in EVERY_STEP},
    "dgc": _dgc,
}


def ms(seconds: float) -> str:
    """Return a number of seconds as milliseconds: "110 ms", "8,300 ms"."""
    return f"{number(seconds * 1e3)} ms"


def number(value: float) -> str:
    """Return a number with three digits, or all that are before the point: "0.0123", "1.5", "1,770"."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


def slowest(measured: Sequence[Measured]) -> Measured:
    """Return what all ranks choose by: each time that of the rank where it takes longest."""
    return Measured(
        max(each.step_s for each in measured),
        max(each.dense_s for each in measured),
        {name: max(each.exchange_s[name] for each in measured) for name in measured[0].exchange_s},
        min((each.link for each in measured), key=lambda link: link.bandwidth_bytes_per_s),
        measured[0].num_ranks,
    )


# The cost model -------------------------------------------------------------------------------------------------------

MOST_OVERLAP = 0.5  # of a step: that of a GPU, as in `check.OF_GPU`
WORK_BYTES = 32  # of memory per element: into a message, added, divided, out of it
FAST = Link(latency_s=1e-5, bandwidth_bytes_per_s=25e9)  # PCIe


@dataclass(frozen=True)
class Cluster:
    """Where a training runs.

    Args:
        num_nodes: M.
        ranks_per_node: G.
        link: of a node, to the others.
        inside: of a rank, to the others of its node.
        memory_bytes_per_s: of a rank's device.
        overlap: the share of a step beside which whole gradients are sent.
        begins_early: whether gradients in few bits are sent beside it, too: under a Trainer with automatic optimization
            whose hooks leave gradients alone; in a plain loop they are sent after the backward pass.
        gathers_in_ring: whether an all-gather is one, as of NCCL; gloo's is not.
    """

    num_nodes: int
    ranks_per_node: int
    link: Link
    inside: Link = FAST
    memory_bytes_per_s: float = 1e12
    overlap: float = 0.0
    begins_early: bool = False
    gathers_in_ring: bool = True


@dataclass(frozen=True)
class Cost:
    """What a method adds to a step.

    Attributes:
        seconds: added to the time of a step, on average.
        node_bytes: sent by a node to others in a step, on average.
        memory_bytes: kept by each rank, beyond what DDP keeps.
    """

    seconds: float
    node_bytes: float
    memory_bytes: float


def cost_of(method: Method, shapes: Shapes, cluster: Cluster, step_s: float, others: Shapes = ()) -> Cost:
    """Return the cost of a method's exchange, after its warm-up; the equations are those of the module.

    Args:
        method: of any topology but "flat": on two levels.
        shapes: of the tensors that are trained.
        cluster: where.
        step_s: seconds of a step without communication.
        others: more of them, which are sent whole whatever their sizes are.

    Example:
        >>> two_nodes = Cluster(2, 1, Link(latency_s=0.0, bandwidth_bytes_per_s=125e6))
        >>> cost_of(Method(), [(1000, 1000)], two_nodes, step_s=0.1)
        Cost(seconds=0.032032, node_bytes=4000000.0, memory_bytes=0.0)
    """
    if cluster.num_nodes == 1:  # its ranks are connected as nodes are elsewhere
        cluster = replace(cluster, num_nodes=cluster.ranks_per_node, ranks_per_node=1, link=cluster.inside)
    when, what, inside = method.when, method.what, cluster.inside
    is_flat = method.where.topology == "flat" or (what.sends_all and method.where.algorithm == "flat")
    num_local = 1 if is_flat else cluster.ranks_per_node
    between = Between(cluster, num_local)
    if when.stairs:
        what = what.at(1.0 - when.stairs[-1]) if when.stairs[-1] else Whole()
    numels = [*map(math.prod, shapes)]
    numel, small = sum(numels), small_numel(numels)
    # What is compressed; and what is not, in one of its messages or in an all-reduce.
    compressed = [shape for shape in shapes if what.compresses("", math.prod(shape), small)]
    numel += sum(map(math.prod, others))
    num_whole = numel - sum(map(math.prod, compressed))
    messages = what.messages(compressed, between.num_ranks, num_local, when=when)
    narrow = method.inter_dtype if what.sends_all else None
    whole_bytes = (FLOAT_BYTES if narrow is None else narrow.itemsize) * num_whole
    is_beside = messages and not (when.averages_weights and num_whole)
    beside = between.beside(messages[0], whole_bytes) if is_beside else between.all_reduce(max(1, whole_bytes))
    sent = sum(map(between.of, messages), beside)
    exchange_s = cluster.link.seconds(sent.node_bytes, sent.rounds) + inside.seconds(sent.inside_bytes)
    if between.num_ranks > 1 and not what.replaces_step:
        exchange_s += WORK_BYTES * numel / cluster.memory_bytes_per_s
    # What runs beside the backward pass, and what of it is longer than that.
    in_node = _ring_all_reduce(FLOAT_BYTES * numel, num_local)
    beside_s = inside.seconds(in_node.node_bytes, in_node.rounds)
    if what.sends_all and not when.averages_weights:
        beside_s, exchange_s = beside_s + exchange_s, 0.0
    elif what.can_be_early and cluster.begins_early and num_local == 1 and not when.averages_weights and any(numels):
        early_s = share_begun_early(numels) * cluster.link.seconds(between.of(messages[0]).node_bytes)
        beside_s, exchange_s = beside_s + early_s, exchange_s - early_s
    added_s = max(0.0, beside_s - cluster.overlap * step_s)
    # What comes after it: once in k steps, and hidden behind delay_steps of these.
    added_s += max(0.0, exchange_s - when.delay_steps * step_s) / when.k_steps
    # e: of all elements, or of this rank's part of them.
    residuals = 0.0 if what.sends_all else 1.0 / num_local if what.keeps_parts else 1.0
    kept_bytes = FLOAT_BYTES * numel * (when.num_copies(keeps_start=not what.sends_all) + residuals)
    return Cost(added_s, sent.node_bytes / when.k_steps, kept_bytes)


@dataclass(frozen=True)
class Traffic:
    """What an exchange sends: by a node to others, in so many rounds; and by a rank inside its node."""

    node_bytes: float
    rounds: int = 0
    inside_bytes: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        rounds, inside_bytes = self.rounds + other.rounds, self.inside_bytes + other.inside_bytes
        return Traffic(self.node_bytes + other.node_bytes, rounds, inside_bytes)


def _ring_all_reduce(nbytes: int, num_ranks: int) -> Traffic:
    return Traffic(all_reduce_bytes(nbytes, num_ranks), -(-nbytes // BUCKET_BYTES) * all_reduce_rounds(num_ranks))


@dataclass(frozen=True)
class Between:
    """Those that exchange messages: all ranks, or on two levels the ranks of all nodes that have the same part.

    Args:
        cluster: where.
        num_local: the parts that a node sends at the same time, each by one of its ranks; 1 when flat.
    """

    cluster: Cluster
    num_local: int

    @property
    def num_ranks(self) -> int:
        """The participants."""
        return self.cluster.num_nodes * self.cluster.ranks_per_node // self.num_local

    def of(self, message: Message) -> Traffic:
        """Return what a payload's message is on this cluster."""
        traffic: Traffic = getattr(self, message.collective)(message.nbytes)
        return traffic

    def all_reduce(self, nbytes: int) -> Traffic:
        """Sum so many bytes of each node, in buckets."""
        return _ring_all_reduce(nbytes, self.num_ranks)

    def beside(self, message: Message, nbytes: int) -> Traffic:
        """Send so many bytes of each node whole in a message, or all-reduce them meanwhile."""
        num_ranks, num_bytes = self.num_ranks, all_reduce_bytes(nbytes, self.num_ranks)
        if message.collective == "all_reduce":
            return Traffic(num_bytes)
        if is_apart(nbytes, num_ranks):
            return Traffic(num_bytes, all_reduce_rounds(num_ranks) - self.of(message).rounds)
        return Traffic(all_gather_bytes(nbytes, num_ranks))

    def all_gather(self, nbytes: int) -> Traffic:
        """Hand a part's message to all."""
        num_ranks, is_ring = self.num_ranks, self.cluster.gathers_in_ring
        rounds = all_gather_rounds(num_ranks, is_ring=is_ring)
        return Traffic(self.num_local * all_gather_bytes(nbytes, num_ranks), rounds)

    def all_to_all(self, nbytes: int) -> Traffic:
        """Send a message to each of the others, those of other nodes over the link."""
        on_node = self.cluster.ranks_per_node
        outside = self.num_ranks - (1 if self.num_local > 1 else on_node)
        return Traffic(on_node * outside * nbytes, int(self.num_ranks > 1))

    def gather_in_node(self, nbytes: int) -> Traffic:
        """Hand what each rank of a node has received to the others there."""
        return Traffic(0, 0, all_gather_bytes(nbytes, self.num_local))


def predict(
    shapes: Shapes, others: Shapes, cluster: Cluster, step_s: float, given: Method, dense_s: float | None = None
) -> Measured:
    """Return what would be measured on a cluster, by the cost model.

    Args:
        shapes: of the tensors that are trained and compressed in sparse steps.
        others: of those that are not.
        cluster: where.
        step_s: seconds of a step without communication.
        given: as of `choose`.
        dense_s: seconds of a dense step, where they have been measured: they say what of it is hidden, and the
            cluster's overlap is not used.
    """
    whole = Method(where=given.where)
    if dense_s is not None:
        unhidden_s = cost_of(whole, shapes, replace(cluster, overlap=0.0), step_s, others).seconds
        hidden_s = unhidden_s - (dense_s - step_s)  # or the link carries more than it did when it was measured
        cluster = replace(cluster, overlap=min(max(0.0, hidden_s / step_s), MOST_OVERLAP))
    methods: dict[float | str, Method] = {name: make(0, given) for name, make in EVERY_STEP.items()}
    add_s = {name: cost_of(method, [*shapes, *others], cluster, step_s).seconds for name, method in methods.items()}
    if shapes:
        for density in DENSITIES:
            method = replace(given, when=EveryStep(sparsity=(1.0 - density,))).replace(min_numel=1, exclude=())
            add_s[density] = cost_of(method, shapes, cluster, step_s, others).seconds
    num_ranks = Between(cluster, 1).num_ranks
    if given.where.topology == "flat" and steps_to_loss(preset(HIDDEN), num_ranks, 0) is not None:
        add_s[HIDDEN] = cost_of(preset(HIDDEN), [*shapes, *others], cluster, step_s).seconds
    whole_s = cost_of(whole, shapes, cluster, step_s, others).seconds
    dense_s = step_s + whole_s if dense_s is None else dense_s
    # Where more was waited than the model says, it is wrong: then half the bytes wait for about half of it.
    add_s[HALF_DDP] *= (dense_s - step_s) / whole_s if whole_s > 0 else 1.0
    return Measured(step_s, dense_s, add_s, cluster.link, num_ranks)
