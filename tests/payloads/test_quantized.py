"""Few bits per value: gradients against a simulation, to the bit; averages of weights; payloads that are replaced.

That nothing is lost, resumes and bytes are in `tests/contract`.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, AdamW

from lightning_lowbw import ConfigurationError, LocalSGD, Method, QuantizedGradients
from lightning_lowbw.comm.agreement import digest
from lightning_lowbw.comm.peers import Peers, make_peers, part_of
from lightning_lowbw.comm.topology import Where
from lightning_lowbw.payloads import quantized
from lightning_lowbw.payloads.quantized import Quantized, QuantizedExchange
from tests.oracle import OracleFewBits, OracleQuantized
from tests.ranks import on_ranks, run_ranks
from tests.sync import problem
from tests.sync.problem import AWKWARD, NODES, THREE, Nodes, Signals, each

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


def exchange_with(value_dtype: str, peers: Peers, residuals: list[Tensor]) -> QuantizedExchange:
    """Return an exchange that keeps these residuals, under the names "0", "1" and so on."""
    exchange = QuantizedExchange(Quantized(value_dtype=value_dtype), peers)
    exchange.residuals.load({str(number): residual for number, residual in enumerate(residuals)})
    return exchange


def mean_of(exchange: QuantizedExchange, signals: list[Tensor]) -> list[Tensor]:
    signal = {str(number): tensor.clone() for number, tensor in enumerate(signals)}
    return list(exchange.prepare(signal).send().wait().mean.dense().values())


@on_ranks()
def test_ranges_and_the_borders_of_tensors_change_nothing_and_nothing_is_lost() -> None:
    bits, numels = list[bytes](), (0, 1, 700, 3, 128, 2049)
    for length in (1 << 18, 128):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(quantized, "RANGE", length)
            generator = torch.Generator().manual_seed(dist.get_rank())
            signals = [torch.randn(numel, generator=generator) for numel in numels]
            exchange = exchange_with("int4", make_peers(Where()), [torch.full_like(signal, 1e-3) for signal in signals])
            means = mean_of(exchange, signals)
        residuals = list(exchange.residuals.values())
        of_ranks = torch.stack([torch.cat(signals) + 1e-3, torch.cat(residuals)])
        dist.all_reduce(of_ranks)
        asked, kept = of_ranks / 2
        torch.testing.assert_close(torch.cat(means) + kept, asked, rtol=1e-5, atol=1e-5)
        bits.append(torch.cat([*means, *residuals]).numpy().tobytes())
    assert bits[0] == bits[1]


# A payload that is replaced -------------------------------------------------------------------------------------------


def change_the_dtype(method: Method, dtype: str) -> tuple[list[int], str | None]:
    """Return the bytes of each step, from the fifth on with another dtype, and what is not replaced."""
    parameters = problem.make_parameters({"large": (40, 50)})
    worker = method.attach(SGD(parameters.values(), lr=0.05), parameters.items())
    nbytes = [0]
    for step in range(6):
        if step == 4:
            worker.method = method.replace(value_dtype=dtype)
        problem.take_step(worker, parameters, step)
        nbytes.append(worker.peers.ledger.sent_bytes)
    worker.method = Method(when=method.when)
    said = problem.message_of(lambda: problem.take_step(worker, parameters, 6), ConfigurationError)
    return [after - before for before, after in pairwise(nbytes)], said


def test_a_replaced_dtype_is_sent_and_another_payload_is_refused() -> None:
    methods = [QuantizedGradients("int8"), LocalSGD(2, 0, compression="int8")]
    cases = [(method, dtype) for method in methods for dtype in ("int8", "int4")]
    of_int8, of_int4, of_local_int8, of_local_int4 = run_ranks(each, 2, change_the_dtype, cases)[0]
    for (same, said), (changed, _) in ((of_int8, of_int4), (of_local_int8, of_local_int4)):
        assert changed[:4] == same[:4]
        assert changed[5] < 0.6 * same[5]
        assert "another payload needs a worker of its own" in str(said)


@on_ranks()
def test_whether_averages_are_hidden_cannot_change() -> None:
    """Nor how many fragments there are; what they are of, and when, can."""
    parameters = problem.make_parameters({"large": (40, 50), "small": (7,)})
    method = LocalSGD(4, 0, compression="int8")
    worker = method.attach(SGD(parameters.values(), lr=0.05), parameters.items())
    problem.take_step(worker, parameters, 0)
    for change in ({"delay_steps": 3}, {"num_fragments": 2}):
        worker.method = method.replace(**change)
        with pytest.raises(ConfigurationError, match=r"in place of 0, 1: .* or attach the method anew"):
            problem.take_step(worker, parameters, 1)
    worker.method = Method(what=method.what)
    with pytest.raises(ConfigurationError, match="averages of weights and exchanges of gradients"):
        problem.take_step(worker, parameters, 1)
    worker.method = method.replace(k_steps=2)
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


@pytest.mark.filterwarnings("ignore:2 parameters, such as 'double', are float64, complex or views with gaps")
@on_ranks()
def test_float64_and_complex_numbers_are_sent_whole_and_parameters_may_come_later_or_rest() -> None:
    parameters = {"first": Parameter(torch.ones(50)), "double": Parameter(torch.ones(8, dtype=torch.float64))}
    parameters |= {"complex": Parameter(torch.ones(9, dtype=torch.complex64)), "resting": Parameter(torch.ones(20))}
    late = Parameter(torch.ones(30))
    optimizer = SGD(parameters.values(), lr=1.0)
    worker: Any = LocalSGD(2, 0, compression="int8").attach(optimizer, [*parameters.items(), ("late", late)])
    for step in range(8):
        if step == 3:
            parameters["late"] = late
            optimizer.add_param_group({"params": [late]})
        parameters["resting"].requires_grad_(step not in (4, 5))
        for parameter in parameters.values():
            parameter.grad = torch.full_like(parameter, 1e-12 * (1 + dist.get_rank()))
        if not parameters["resting"].requires_grad:
            parameters["resting"].grad = None
        optimizer.step()
    problem.same_on_all(digest(parameters.values()))
    assert sorted(worker.state_dict()["residuals"]) == ["first", "late", "resting"]
    assert abs(float(parameters["double"][0].detach()) - (1 - 8 * 1.5e-12)) < 1e-15, "it is not exact"
    assert worker.num_averages == 4
