"""Few bits per value: gradients against a simulation, to the bit; averages of weights; payloads that are replaced.

That nothing is lost, resumes and bytes are in `tests/contract`.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, AdamW

from lightning_lowbw import ConfigurationError, LocalSGD, Method, QuantizedGradients
from lightning_lowbw.comm.agreement import digest
from lightning_lowbw.comm.peers import make_peers, part_of
from lightning_lowbw.comm.topology import Where
from lightning_lowbw.payloads import quantized
from lightning_lowbw.payloads.quantized import FORMATS, Quantized, QuantizedExchange
from tests.oracle import OracleFewBits, OracleQuantized
from tests.quantized import decode, encode
from tests.ranks import on_ranks, run_ranks
from tests.sync import problem
from tests.sync.problem import AWKWARD, NODES, THREE, Nodes, Signals

STEPS = 5
SHAPES = {name: AWKWARD[name] for name in ("scalar", "empty", "vector", "conv", "transposed")}
ADAMW = partial(AdamW, lr=0.02)
CASES: dict[str, tuple[str, Nodes, dict[str, problem.Shape]]] = {
    "three ranks": ("int8", THREE, SHAPES),
    "crossed": ("int4", NODES["crossed"], SHAPES),
    "fewer elements than ranks": ("int4", THREE, {"single": (1,)}),
}


class Definition:
    """The mean of each rank's part, by an oracle of its own, of nodes in the order of the ranks that exchange it."""

    def __init__(self, bits: int, nodes: Nodes) -> None:
        self.nodes, self.num_local = nodes, len(nodes[0])
        self.oracles = [OracleQuantized(len(nodes), bits) for _ in range(self.num_local)]

    def order(self, local_rank: int) -> list[int]:
        return sorted(range(len(self.nodes)), key=lambda node: self.nodes[node][local_rank])

    def mean(self, signals: Signals) -> dict[str, Tensor]:
        means: dict[str, list[Tensor]] = {name: [] for name in signals[0]}
        longest = sum(part_of(each.numel(), 0, self.num_local).stop for each in signals[0].values())
        for local_rank, oracle in enumerate(self.oracles):
            parts = [[s[part_of(s.numel(), local_rank, self.num_local)] for s in each.values()] for each in signals]
            rows = [torch.cat([*of_node, torch.zeros(longest)])[:longest].numpy() for of_node in parts]
            row = torch.from_numpy(oracle.mean([rows[node] for node in self.order(local_rank)]))
            sizes = [part.numel() for part in parts[0]]
            for name, mean in zip(means, row[: sum(sizes)].split(sizes), strict=True):
                means[name].append(mean)
        return {name: torch.cat(of_parts) for name, of_parts in means.items()}


@pytest.mark.parametrize("case", CASES)
def test_training_is_that_of_the_definition(case: str) -> None:
    dtype, nodes, shapes = CASES[case]
    definition = Definition(int(dtype[-1]), nodes)
    results = run_ranks(problem.train, sum(map(len, nodes)), QuantizedGradients(dtype), ADAMW, shapes, nodes, STEPS)
    weights = problem.train_by_means(definition.mean, ADAMW, shapes, nodes, STEPS)
    for rank, result in enumerate(results):
        for name, expected in weights.items():
            assert result["weights"][name].equal(expected), name
        node = problem.node_of(rank, nodes)
        local_rank = nodes[node].index(rank)
        kept = torch.cat([result["residuals"][name] for name in shapes if name in result["residuals"]])
        expected_kept = definition.oracles[local_rank].residuals[definition.order(local_rank).index(node)]
        assert kept.equal(torch.from_numpy(np.asarray(expected_kept))[: len(kept)])
        assert bool(kept.any())


@on_ranks()
def test_ranges_and_the_borders_of_tensors_change_nothing() -> None:
    bits, generator = list[str](), torch.Generator().manual_seed(dist.get_rank())
    signal = {str(numel): torch.randn(numel, generator=generator) for numel in (0, 1, 700, 3, 128, 2049)}
    for length in (1 << 18, 128):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(quantized, "RANGE", length)
            exchange = QuantizedExchange(Quantized(value_dtype="int4"), make_peers(Where()))
            for _ in range(2):  # the second one has residuals
                means = exchange.prepare({name: each.clone() for name, each in signal.items()}).send().wait().mean
                bits.append(digest([*means.dense().values(), *exchange.residuals.values()]))
    assert bits[:2] == bits[2:]


# A payload that is replaced -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [QuantizedGradients("int8"), LocalSGD(2, 0, compression="int8")])
@on_ranks()
def test_a_replaced_dtype_is_sent_and_another_payload_is_refused(method: Method) -> None:
    worker, parameters = problem.attach(method, shapes={"large": (40, 50)})
    sent = [0]
    for number, dtype in enumerate(("int8", "int4")):
        worker.use(method.replace(value_dtype=dtype))
        problem.train_on(worker, parameters, range(4 * number, 4 * number + 4))
        sent.append(worker.peers.ledger.sent_bytes)
    assert sent[2] - sent[1] < 0.6 * sent[1]
    with pytest.raises(ConfigurationError, match="another payload needs a worker of its own"):
        worker.use(Method(when=method.when))


@on_ranks()
def test_whether_averages_are_hidden_cannot_change() -> None:
    """Nor how many fragments there are; what they are of, and when, can."""
    method = LocalSGD(4, 0, compression="int8")
    worker, parameters = problem.attach(method, shapes={"large": (40, 50), "small": (7,)})
    problem.take_step(worker, parameters, 0)
    for change in ({"delay_steps": 3}, {"num_fragments": 2}):
        with pytest.raises(ConfigurationError, match=r"in place of 0, 1: .* or attach the method anew"):
            worker.use(method.replace(**change))
    with pytest.raises(ConfigurationError, match="averages of weights and exchanges of gradients"):
        worker.use(Method(what=method.what))
    worker.use(method.replace(k_steps=2))
    problem.take_step(worker, parameters, 1)
    assert worker.num_averages == 1


# Averages of weights --------------------------------------------------------------------------------------------------

ALONE = {"matrix": (30, 50)}  # a block is of values of one tensor
HIDDEN: dict[str, tuple[str, Nodes]] = {
    "2 ranks": ("int4", problem.FLAT),
    "3 ranks": ("int8", THREE),
    "2 nodes": ("int4", NODES["blocks"]),
}


@pytest.mark.parametrize("case", HIDDEN)
def test_hidden_averages_are_those_of_the_definition_to_the_bit(case: str) -> None:
    """A message to all: nobody answers while steps are taken."""
    dtype, nodes = HIDDEN[case]
    method, options = LocalSGD(4, 0, delay_steps=2, compression=dtype), {"k": 4, "delay": 2, "num_parts": len(nodes[0])}
    results = run_ranks(problem.train, sum(map(len, nodes)), method, ADAMW, ALONE, nodes, problem.STEPS)
    start = problem.make_weight("matrix", ALONE["matrix"])
    oracle = OracleFewBits(start, len(nodes), ADAMW, bits=int(dtype[-1]), **options)
    problem.take_steps_of(oracle, "matrix", nodes)
    assert oracle.rounds >= 2
    for rank, result in enumerate(results):
        node = problem.node_of(rank, nodes)
        assert result["weights"]["matrix"].equal(oracle.replicas[node].detach())
        kept = oracle.parts[nodes[node].index(rank)].residuals[node]
        assert result["residuals"]["matrix"].equal(torch.from_numpy(kept))


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
@on_ranks(8)
def test_hidden_averages_of_more_bytes_than_whole_ones_are_refused(dtype: str) -> None:
    weight = Parameter(torch.ones(50))
    with pytest.raises(ConfigurationError, match=r"among 8 participants.*Leave out delay_steps"):
        LocalSGD(2, 0, delay_steps=1, compression=dtype).attach(SGD([weight], lr=1.0), [("weight", weight)])


# The ends of what few bits can hold ---------------------------------------------------------------------------------


def round_trip(name: str, vectors: Tensor) -> Tensor:
    value_format = FORMATS[name]
    return decode(value_format, encode(value_format, vectors), vectors.shape[1])


def test_a_message_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="A message of 5 bytes; 4 were"):
        FORMATS["int8"].read(torch.zeros((1, 5), dtype=torch.uint8), 2, 0, 2)


@pytest.mark.parametrize("name", FORMATS)
def test_the_ends_of_float32(name: str) -> None:
    large, tiny = torch.full((1, 5), torch.finfo(torch.float32).max), torch.full((1, 5), 1e-45)
    assert round_trip(name, large).isfinite().all()
    assert float(round_trip(name, tiny).max()) <= 1e-44
    if name in ("int8", "int4"):
        torch.testing.assert_close(round_trip(name, large), large, rtol=2.0**-7, atol=0)


@pytest.mark.parametrize(("name", "value"), [("int8", float("nan")), ("int4", -float("inf"))])
def test_what_is_not_finite_is_seen_by_all(name: str, value: float) -> None:
    vectors = torch.randn(1, 300)
    vectors[0, 200] = value
    decoded = round_trip(name, vectors)
    assert not decoded[0, 200].isfinite()
    assert decoded[0, :128].isfinite().all()
