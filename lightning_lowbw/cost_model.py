"""The cost model, and the rule of `sparsity="auto"` and `strategy="lowbw"`, which chooses by it.

The rule, as users know it:

1. The first steps are dense. All steps are dense if a dense exchange fits into the budget, a share of a step, or if the
   rest of the run would wait less than `LEAST_WAIT_S` for dense exchanges. Then nothing else is measured.
2. Deep gradient compression takes the largest density of `DENSITIES` whose exchange fits into the budget, but no
   density at which an element is sent fewer than 30 times (with Adam and AdamW 60) in the rest of the run.
3. Deep gradient compression begins with dense steps, for 5 % of the run; then come stairs a factor of 4 apart, for
   20 %. With trained weights there is no such warm-up. If bfloat16 is a candidate, too, and faster than DDP, the dense
   steps are in bfloat16.
4. The candidates are ordered by how much they change the training. The choice is the first candidate whose predicted
   mean step exceeds the shortest by at most the budget.
5. All ranks make the same choice, once; a resumed run keeps it, unless all steps are dense in float32. On two levels
   the steps before the choice are DDP's own, and so are all steps if all are dense by the first rule; other dense steps
   are summed on two levels.

Why 30 and 60: top-k costs accuracy because it delays elements. The cost falls with the number of times that an element
is sent, density times steps: 10 times cost 0.4 % of the loss, 0.8 times 2.5 % (benchmarks/results/auto.md). The warm-up
is a share of the steps, not of the time: on a slow link a share of the time would be a dozen steps, and sparse steps so
early cost the most.

The cost model (`cost_of`), for M nodes of G ranks, W = M G, each node with one link to the other nodes:

    step     = step alone + max(0, beside backward - overlap * step alone) + exchange afterwards / k
    exchange = bytes of a node / bandwidth + rounds * latency + bytes inside the node / bandwidth there + work

| collective | bytes of a node | rounds |
| --- | --- | --- |
| ring all-reduce of B bytes, in buckets | 2 (W - 1) / W * B | 2 (W - 1) for each bucket |
| ring all-gather of m bytes of each rank | (W - 1) m | W - 1; on gloo 1, all at once |
| all-to-all of m bytes from each rank to each | G (W - G) m | 1 |

Tensors that are sent whole, B bytes in total, are in the first message of a payload: (W - 1) B further bytes, and no
further round. Larger ones are all-reduced at the same time (`comm.peers.is_apart`).

Flat rings cross the link of a node once. In an all-to-all W - G senders meet at each node: the messages for all its
ranks pass through its link. On two levels M participants exchange each of G parts: B is the size of the node's tensors,
m the size of a part's message, and each rank of a node sends its own part. Whole gradients and the sum inside the node
run during the backward pass. When flat, so does the first message of gradients in few bits, except its last group, if
messages may begin there (`Cluster.begins_early`). All other messages come after the backward pass, every k steps, or
are hidden by `delay_steps`; work is not hidden. Work is memory read and written: `SENT_BYTES` per element that TopK
sends, `READ_BYTES` per element of each rank's message, and `WORK_BYTES` per element, twice with an outer optimizer;
`PASS_BYTES` for gradients by TopK, whose pass replaces the optimizer's, `SEARCH_BYTES` for averages by TopK.

A Lightning strategy (`strategies.auto_choice`) measures the link and a dense step, and adds the computing time of the
payloads to these seconds, from exchanges of a sample without a network. The overlap is the part of the dense exchange
for which the dense step did not wait. Not in the model: lost packets, stragglers, other traffic, the host's time (on an
H100 about 43 ms of a step with powersgd, docs/quick_start.md).
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
from lightning_lowbw.method import Method
from lightning_lowbw.payloads.params import small_numel
from lightning_lowbw.payloads.payload import FLOAT_BYTES, Message, Shapes
from lightning_lowbw.payloads.top_k import TopK
from lightning_lowbw.payloads.whole import Whole
from lightning_lowbw.presets import QuantizedGradients
from lightning_lowbw.schedules.every_step import EveryStep
from lightning_lowbw.sync.early import share_begun_early

HALF_DDP = "bfloat16"  # DDP that sums its buckets in bfloat16, as its users do on a slow network
DENSITIES = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256)
LEAST_TIMES_SENT = 30
LEAST_TIMES_SENT_ADAM = 60  # with 48, text from scratch lost 0.8 % in 800 steps; with 97, nothing
LEAST_WAIT_S = 2.5  # a choice saves at least a fifth, about the time of a measurement on most links
DENSE_SHARE, STAIRS_SHARE = 0.05, 0.20  # shares of the steps that are left
STAIR = 2  # from one stair to the next, as an index into DENSITIES
MOST_STAIR = 0.3  # the paper's first is 0.25
MOST_STAIR_ADAM = 0.2  # with 0.256, text from scratch lost 0.6 % in 5,000 steps; with dense steps instead, nothing


@dataclass(frozen=True)
class Measured:
    """The times of steps. For a choice they must be equal on all ranks.

    Attributes:
        step_s: seconds of an optimizer step without communication.
        dense_s: seconds of a dense step.
        exchange_s: predicted seconds that an exchange adds to `step_s`, by density or by the name of a payload.
        link: the link for which `exchange_s` was predicted.
    """

    step_s: float
    dense_s: float
    exchange_s: Mapping[float | str, float]
    link: Link

    def of(self, names: Sequence[str]) -> Measured:
        """Return a copy without the exchanges of methods outside of `names`."""
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
    """The run for which a method is chosen.

    Attributes:
        num_done: optimizer steps taken.
        num_steps: optimizer steps of the whole run; infinite if not known.
        is_pretrained: whether the run starts from trained weights, which need no warm-up.
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
    """A method with its predicted times.

    Attributes:
        name: the name in `CANDIDATES`; on two levels "ddp" is "hierarchical" unless `algorithm` is "flat".
        method: the method.
        mean_s: seconds of a step, on average to the end of the run.
        why: the reason for its numbers.
    """

    name: str
    method: Method
    mean_s: float
    why: str = ""


def why_dense(measured: Measured, run: Run, budget: float) -> str | None:
    """Return why all steps are dense on any link, so that it is not measured; None if the link matters.

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
    """Return the candidate to continue with, and one sentence with the reason.

    If all steps are dense by the first rule, they stay DDP's own, and nothing else is compared.

    Args:
        measured: the times on the slowest rank; by the first rule without `exchange_s`.
        run: the run.
        given: the method with "auto": its budget, its payload for sparse steps, its topology.
        names: names in `CANDIDATES`, in the same order.
        refused: names of candidates that are refused, and why.

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
    if (why := why_dense(measured, run, budget)) is not None:
        if given.where.topology != "flat":
            given = replace(given, where=replace(given.where, algorithm="flat"))
        found = _ddp(measured, run, given)
        return found, f"{measured}: {found.name}, because {why}. To write it down: {written(found.method)}"
    results = {name: refused.get(name) or CANDIDATES[name](measured, run, given) for name in names}
    candidates = [each for each in results.values() if isinstance(each, Candidate)]
    least_s = min(each.mean_s for each in candidates)
    chosen = next(each for each in candidates if each.mean_s <= (1.0 + budget) * least_s)
    why = f" ({chosen.why})" if chosen.why else ""
    parts = [f"{measured}: {chosen.name}, {ms(chosen.mean_s)} a step{why}"]
    parts += [f"{each.name} would take {ms(each.mean_s)}" for each in candidates if each is not chosen]
    parts += [f"not {name}, because {why}" for name, why in results.items() if isinstance(why, str)]
    return chosen, f"{'; '.join(parts)}. To write it down: {written(chosen.method)}"


def written(method: Method) -> str:
    """Return the code that selects a method, after ``import lightning_lowbw as lowbw``."""
    where = method.where
    if method.kind == "whole" and "flat" in (where.topology, where.algorithm):
        name = "ddp" if where.inter_dtype == "float32" else HALF_DDP
        return f'strategy="{name}"'
    return f"strategy=lowbw.Strategy({code_of(method, 'lowbw.')})"


def _ddp(measured: Measured, run: Run, given: Method) -> Candidate:
    """Return the candidate with whole gradients in each step."""
    name = "ddp" if "flat" in (given.where.topology, given.where.algorithm) else "hierarchical"
    return Candidate(name, Method(where=given.where), measured.dense_s)


def _every_step(name: str, measured: Measured, run: Run, given: Method) -> Candidate:
    """Return the candidate of a payload that costs the same in every step."""
    return Candidate(name, EVERY_STEP[name](run.num_done, given), measured.step_s + measured.exchange_s[name])


def _dgc(measured: Measured, run: Run, given: Method) -> Candidate | str:
    """Return the candidate of deep gradient compression, or why no density is possible."""
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
    return Candidate("dgc", replace(given, when=when, where=where), mean_s, why)


def _warm_up(run: Run, density: float) -> tuple[list[float], int, int]:
    """Return the stairs of densities (the last stair stays), and the number of dense steps and of steps per stair."""
    if run.is_pretrained:
        return [density], 0, 0
    # The stairs before the last density: from the densest down, each a quarter of the stair before.
    above = DENSITIES[DENSITIES.index(density) + STAIR :: STAIR][::-1]
    before = [stair for stair in above if stair <= (MOST_STAIR_ADAM if run.is_adam else MOST_STAIR)]
    per_stair = round(STAIRS_SHARE * run.num_left / len(above)) if above else 0
    num_dense = round(DENSE_SHARE * run.num_left) + (len(above) - len(before)) * per_stair  # also for omitted stairs
    return ([*before, density], num_dense, per_stair) if before and per_stair else ([density], num_dense, 0)


# Methods that cost the same in every step from the choice on; made from the steps taken and the given method.
EVERY_STEP: dict[str, Callable[[int, Method], Method]] = {
    HALF_DDP: lambda _, given: Method(where=replace(given.where, inter_dtype="bfloat16")),
    "int8": lambda num_done, given: replace(QuantizedGradients(rampup_begin_step=num_done), where=given.where),
}
# Ordered by how much they change the training. The user sees a reason that takes the place of a candidate.
CANDIDATES: dict[str, Callable[[Measured, Run, Method], Candidate | str]] = {
    "ddp": _ddp,
    **{name: partial(_every_step, name) for name in EVERY_STEP},
    "dgc": _dgc,
}


def ms(seconds: float) -> str:
    """Return a number of seconds as milliseconds: "110 ms", "8,300 ms"."""
    return f"{number(seconds * 1e3)} ms"


def number(value: float) -> str:
    """Return a number with three digits, or with all digits before the point: "0.0123", "1.5", "1,770"."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


def slowest(measured: Sequence[Measured]) -> Measured:
    """Return the times by which all ranks choose: each is the longest time of any rank."""
    return Measured(
        max(each.step_s for each in measured),
        max(each.dense_s for each in measured),
        {name: max(each.exchange_s[name] for each in measured) for name in measured[0].exchange_s},
        min((each.link for each in measured), key=lambda link: link.bandwidth_bytes_per_s),
    )


# The cost model -------------------------------------------------------------------------------------------------------

MOST_OVERLAP = 0.5  # share of a step: the overlap of a GPU, as in `check.OF_GPU`
WORK_BYTES = 32  # memory traffic per element: copied into a message, added, divided, copied back
# Memory traffic per element of a pass over residuals, set by benchmarks/results/plan_clock.md.
PASS_BYTES = 16  # gradients: beyond the traffic of the optimizer's own pass
SEARCH_BYTES = 96  # averages: the change of the weight, the residual, the search in a chunk, the anchor
# By benchmarks/results/ops_cpu.md, at 6.4 %: 55 ns per element that a rank sends, 12 ns per element of a message.
SENT_BYTES, READ_BYTES = 440, 100
FAST = Link(latency_s=1e-5, bandwidth_bytes_per_s=25e9)  # PCIe


@dataclass(frozen=True)
class Cluster:
    """The nodes of a training, and their links.

    Args:
        num_nodes: M.
        ranks_per_node: G.
        link: the link of a node to the other nodes.
        inside: the link of a rank to the other ranks of its node.
        memory_bytes_per_s: the memory bandwidth of a rank's device.
        overlap: the share of a step during which DDP already sends gradients.
        begins_early: whether gradients in few bits are sent during the backward pass, too: under a Trainer with
            automatic optimization whose hooks leave gradients alone. A plain loop sends them after the backward pass.
        gathers_in_ring: whether an all-gather is a ring, as NCCL's is and gloo's is not.
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
    """The cost of a method, per step on average.

    Attributes:
        seconds: the time added to a step.
        node_bytes: the bytes that a node sends to other nodes in a step.
        memory_bytes: the memory that each rank needs in addition to DDP's.
    """

    seconds: float
    node_bytes: float
    memory_bytes: float


def cost_of(method: Method, shapes: Shapes, cluster: Cluster, step_s: float, extra: Shapes = ()) -> Cost:
    """Return the cost of a method's exchange after its warm-up, by the equations at the top of the module.

    Args:
        method: the method. Any topology but "flat" means two levels.
        shapes: the shapes of the trained tensors.
        cluster: the nodes and links.
        step_s: seconds of a step without communication.
        extra: shapes of further trained tensors, which are sent whole whatever their sizes.

    Example:
        >>> two_nodes = Cluster(2, 1, Link(latency_s=0.0, bandwidth_bytes_per_s=125e6))
        >>> cost_of(Method(), [(1000, 1000)], two_nodes, step_s=0.1)
        Cost(seconds=0.032032, node_bytes=4000000.0, memory_bytes=0.0)
    """
    if cluster.num_nodes == 1:  # its ranks take the place of nodes
        cluster = replace(cluster, num_nodes=cluster.ranks_per_node, ranks_per_node=1, link=cluster.inside)
    when, what, inside = method.when, method.what, cluster.inside
    is_flat = method.where.topology == "flat" or (what.sends_all and method.where.algorithm == "flat")
    num_local = 1 if is_flat else cluster.ranks_per_node
    between = Between(cluster, num_local)
    if when.stairs:
        what = what.at(1.0 - when.stairs[-1]) if when.stairs[-1] else Whole()
    numels = [*map(math.prod, shapes)]
    numel, small = sum(numels), small_numel(numels)
    # All other tensors are sent whole: in a message of the compressed tensors, or in an all-reduce.
    compressed = [shape for shape in shapes if what.compresses("", math.prod(shape), small)]
    numel += sum(map(math.prod, extra))
    num_whole = numel - sum(map(math.prod, compressed))
    messages = what.messages(compressed, between.num_ranks, num_local, when=when)
    narrow = method.where.narrow_dtype if what.sends_all else None
    whole_bytes = (FLOAT_BYTES if narrow is None else narrow.itemsize) * num_whole
    is_beside = messages and not (when.averages_weights and num_whole)
    beside = between.beside(messages[0], whole_bytes) if is_beside else between.all_reduce(max(1, whole_bytes))
    sent = sum(map(between.of, messages), beside)
    exchange_s = cluster.link.seconds(sent.node_bytes, sent.rounds) + inside.seconds(sent.inside_bytes)
    # Residuals of all elements, or of this rank's part.
    residuals = 0.0 if what.sends_all else 1.0 / num_local if what.keeps_parts else 1.0
    has_outer = when.outer != "none"
    work_bytes: float = WORK_BYTES * (1 + has_outer) * numel
    if isinstance(what, TopK):
        work_bytes = (SEARCH_BYTES if when.averages_weights else PASS_BYTES * residuals) * numel
        each_bytes = SENT_BYTES * residuals + READ_BYTES * between.num_ranks
        work_bytes += each_bytes * sum(what.nums_sent([*map(math.prod, compressed)]))
    work_s = (between.num_ranks > 1) * work_bytes / cluster.memory_bytes_per_s
    # The part of the exchange during the backward pass counts as far as it exceeds the overlap.
    in_node = _ring_all_reduce(FLOAT_BYTES * numel, num_local)
    beside_s = inside.seconds(in_node.node_bytes, in_node.rounds)
    if what.sends_all and not when.averages_weights:
        beside_s, exchange_s, work_s = beside_s + exchange_s + work_s, 0.0, 0.0
    elif what.can_be_early and cluster.begins_early and num_local == 1 and not when.averages_weights and any(numels):
        early_s = share_begun_early(numels) * cluster.link.seconds(between.of(messages[0]).node_bytes)
        beside_s, exchange_s = beside_s + early_s, exchange_s - early_s
    added_s = max(0.0, beside_s - cluster.overlap * step_s)
    # After the backward pass: once in k steps, and all but the work is hidden by delay_steps steps.
    added_s += (work_s + max(0.0, exchange_s - when.delay_steps * step_s)) / when.k_steps
    # A hidden average has two copies. Changes are measured from an anchor; an outer optimizer has a velocity, too.
    has_anchor = has_outer or (when.averages_weights and not what.sends_all)
    kept_bytes = FLOAT_BYTES * numel * (2 * (when.delay_steps > 0) + has_outer + has_anchor + residuals)
    return Cost(added_s, sent.node_bytes / when.k_steps, kept_bytes)


@dataclass(frozen=True)
class Traffic:
    """The traffic of an exchange: bytes of a node to other nodes, rounds, and bytes of a rank inside its node."""

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
    """The ranks that exchange messages: all ranks, or on two levels the ranks that have the same part in all nodes.

    Args:
        cluster: the nodes and links.
        num_local: the number of parts that a node sends at the same time, each by another rank; 1 when flat.
    """

    cluster: Cluster
    num_local: int

    @property
    def num_ranks(self) -> int:
        """The participants."""
        return self.cluster.num_nodes * self.cluster.ranks_per_node // self.num_local

    def of(self, message: Message) -> Traffic:
        """Return the traffic of a payload's message on this cluster."""
        traffic: Traffic = getattr(self, message.collective)(message.nbytes)
        return traffic

    def all_reduce(self, nbytes: int) -> Traffic:
        """Return the traffic of an all-reduce in buckets, of `nbytes` from each participant."""
        return _ring_all_reduce(nbytes, self.num_ranks)

    def beside(self, message: Message, nbytes: int) -> Traffic:
        """Return the traffic of whole tensors, of `nbytes`: in a message, or all-reduced at the same time."""
        num_ranks, num_bytes = self.num_ranks, all_reduce_bytes(nbytes, self.num_ranks)
        if message.collective == "all_reduce":
            return Traffic(num_bytes)
        if is_apart(nbytes, num_ranks):
            return Traffic(num_bytes, all_reduce_rounds(num_ranks) - self.of(message).rounds)
        return Traffic(all_gather_bytes(nbytes, num_ranks))

    def all_gather(self, nbytes: int) -> Traffic:
        """Return the traffic of an all-gather of a part's messages."""
        rounds = all_gather_rounds(self.num_ranks, is_ring=self.cluster.gathers_in_ring)
        return Traffic(self.num_local * all_gather_bytes(nbytes, self.num_ranks), rounds)

    def all_to_all(self, nbytes: int) -> Traffic:
        """Return the traffic of a message to each other rank; messages to other nodes use the link."""
        on_node = self.cluster.ranks_per_node
        outside = self.num_ranks - (1 if self.num_local > 1 else on_node)
        return Traffic(on_node * outside * nbytes, int(self.num_ranks > 1))

    def gather_in_node(self, nbytes: int) -> Traffic:
        """Return the traffic of an all-gather, inside a node, of the messages that its ranks have received."""
        return Traffic(0, 0, all_gather_bytes(nbytes, self.num_local))


def predict(
    shapes: Shapes, extra: Shapes, cluster: Cluster, step_s: float, given: Method, dense_s: float | None = None
) -> Measured:
    """Return the times on a cluster, predicted by the cost model.

    Args:
        shapes: the shapes of the trained tensors that sparse steps compress.
        extra: the shapes of the remaining trained tensors.
        cluster: the nodes and links.
        step_s: seconds of a step without communication.
        given: as in `choose`.
        dense_s: seconds of a dense step, if they have been measured: the overlap then follows from them, instead of
            the cluster's.
    """
    whole = Method(where=given.where)
    if dense_s is not None:
        unhidden_s = cost_of(whole, shapes, replace(cluster, overlap=0.0), step_s, extra).seconds
        hidden_s = unhidden_s - (dense_s - step_s)  # or the link was faster than when it was measured
        cluster = replace(cluster, overlap=min(max(0.0, hidden_s / step_s), MOST_OVERLAP))
    methods: dict[float | str, Method] = {name: make(0, given) for name, make in EVERY_STEP.items()}
    add_s = {name: cost_of(method, [*shapes, *extra], cluster, step_s).seconds for name, method in methods.items()}
    if shapes:
        for density in DENSITIES:
            method = replace(given, when=EveryStep(sparsity=(1.0 - density,))).replace(min_numel=1, exclude=())
            add_s[density] = cost_of(method, shapes, cluster, step_s, extra).seconds
    whole_s = cost_of(whole, shapes, cluster, step_s, extra).seconds
    dense_s = step_s + whole_s if dense_s is None else dense_s
    # If the wait was longer than predicted, scale: half the bytes wait for about half of the measured time.
    add_s[HALF_DDP] *= (dense_s - step_s) / whole_s if whole_s > 0 else 1.0
    return Measured(step_s, dense_s, add_s, cluster.link)
