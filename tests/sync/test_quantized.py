"""Few bits per value: gradients against a simulation, to the bit; averages of weights; payloads that are replaced.

That nothing is lost, resumes and bytes are in `tests/contract`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from lightning_lowbw import ConfigurationError, LocalSGD, Method, QuantizedGradients
from lightning_lowbw.comm.agreement import digest
from lightning_lowbw.comm.topology import part_of
from lightning_lowbw.sync.gradient import GradientSync
from tests.quantized_oracle import OracleQuantized
from tests.ranks import run_ranks
from tests.sync.problem import (
    AWKWARD,
    FLAT,
    NODES,
    Nodes,
    backward,
    coefficients,
    each,
    from_memory,
    in_memory,
    make_parameters,
    make_weight,
    message_of,
    node_of,
    take_step,
)

STEPS, OVERFLOW = 5, 2
SHAPES = {name: AWKWARD[name] for name in ("scalar", "empty", "vector", "conv", "transposed")}
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "momentum": partial(SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": partial(Adam, lr=0.02),
    "adamw": partial(AdamW, lr=0.02),
    "rmsprop": partial(RMSprop, lr=0.01),
    "adagrad": partial(Adagrad, lr=0.05),
}
CLIP = 2.0
NUM_MICROBATCHES = 2
TOPOLOGIES: dict[str, Nodes] = {"two ranks": FLAT, "three ranks": ((0,), (1,), (2,)), "crossed": NODES["crossed"]}


def clip_(gradients: list[Tensor]) -> None:
    """Scale a mean gradient to its largest norm."""
    total = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
    assert total > CLIP
    for gradient in gradients:
        gradient.mul_(CLIP / total)


def train(dtype: str, kind: str, nodes: Nodes, form: str) -> dict[str, Any]:
    """Train; "clipped": after the exchange; "accumulated": two backward passes; "overflow": rank 1 in one step."""
    parameters = make_parameters(SHAPES)
    optimizer = OPTIMIZERS[kind](parameters.values())
    worker = QuantizedGradients(dtype).attach(optimizer, parameters.items(), topology=nodes)
    assert isinstance(worker, GradientSync)
    taken = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(NUM_MICROBATCHES if form == "accumulated" else 1):
            backward(parameters, 10 * step + number)
        if form == "overflow" and step == OVERFLOW and dist.get_rank() == 1:
            parameters["conv"].grad.fill_(torch.inf)  # type: ignore[union-attr]
        with worker.stepping():
            taken.append(worker.exchange(skip_nonfinite=form == "overflow"))
            if form == "clipped":
                clip_([parameter.grad for parameter in parameters.values() if parameter.grad is not None])
            if taken[-1]:
                optimizer.step()
    residuals = {name: residual.clone() for name, residual in worker.residuals.items()}
    return {"weights": [p.detach() for p in parameters.values()], "residuals": residuals, "taken": taken}


def by_definition(bits: int, kind: str, nodes: Nodes, form: str) -> tuple[list[Tensor], list[OracleQuantized]]:
    """Train with the oracle's mean; a node's signal is the mean of its ranks'."""
    weights = {name: make_weight(name, shape) for name, shape in SHAPES.items()}
    optimizer = OPTIMIZERS[kind](list(weights.values()))
    num_local = len(nodes[0])
    oracles = [OracleQuantized(len(nodes), bits) for _ in range(num_local)]
    for step in range(STEPS):
        if form == "overflow" and step == OVERFLOW:
            continue
        signals = []
        for node in nodes:
            of_ranks = [{name: gradient_of(name, weights[name], rank, step, form) for name in SHAPES} for rank in node]
            means_of_node = {name: sum(each[name] for each in of_ranks) / num_local for name in SHAPES}
            signals.append({name: in_memory(mean, name) for name, mean in means_of_node.items()})
        means: dict[str, list[Tensor]] = {name: [] for name in SHAPES}
        for local_rank, oracle in enumerate(oracles):
            parts = [[s[part_of(s.numel(), local_rank, num_local)] for s in of_node.values()] for of_node in signals]
            longest = sum(part_of(weight.numel(), 0, num_local).stop for weight in weights.values())
            rows = [torch.cat([*of_node, torch.zeros(longest)])[:longest].numpy() for of_node in parts]
            row = torch.from_numpy(oracle.mean([rows[node] for node in order_of(nodes, local_rank)]))
            for name, mean in zip(SHAPES, cut(row, parts[0]), strict=True):
                means[name].append(mean)
        for name, weight in weights.items():
            weight.grad = from_memory(torch.cat(means[name]), name, SHAPES[name])
        if form == "clipped":
            clip_([weight.grad for weight in weights.values() if weight.grad is not None])
        optimizer.step()
    return list(weights.values()), oracles


def order_of(nodes: Nodes, local_rank: int) -> list[int]:
    """Return the nodes in the order of the ranks that exchange a part."""
    return sorted(range(len(nodes)), key=lambda node: nodes[node][local_rank])


def cut(row: Tensor, parts: list[Tensor]) -> list[Tensor]:
    """Return the pieces of a row that are of the sizes of some tensors; what is left is filling."""
    sizes = [part.numel() for part in parts]
    return list(row[: sum(sizes)].split(sizes))


def gradient_of(name: str, weight: Tensor, rank: int, step: int, form: str) -> Tensor:
    numbers = range(NUM_MICROBATCHES if form == "accumulated" else 1)
    return sum((coefficients(name, weight, rank, 10 * step + number) + weight for number in numbers), torch.zeros(()))


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_training_is_that_of_the_definition(topology: str) -> None:
    nodes, dtype = TOPOLOGIES[topology], "int8" if topology == "two ranks" else "int4"
    forms = ["plain", "clipped", "accumulated", "overflow"]
    cases = [(kind, "plain") for kind in OPTIMIZERS] + [("adamw", form) for form in forms[1:]]
    by_rank = run_ranks(each, sum(map(len, nodes)), train, [(dtype, kind, nodes, form) for kind, form in cases])
    for number, (kind, form) in enumerate(cases):
        weights, oracles = by_definition(int(dtype[-1]), kind, nodes, form)
        for rank, results in enumerate(by_rank):
            result = results[number]
            assert result["taken"] == [form != "overflow" or step != OVERFLOW for step in range(STEPS)]
            for name, mine, expected in zip(SHAPES, result["weights"], weights, strict=True):
                assert mine.equal(expected), (kind, form, name)
            node = node_of(rank, nodes)
            local_rank = nodes[node].index(rank)
            kept = [result["residuals"][name] for name in SHAPES if name in result["residuals"]]
            expected_kept = oracles[local_rank].residuals[order_of(nodes, local_rank).index(node)]
            joined = torch.cat(kept)
            assert joined.equal(torch.from_numpy(np.asarray(expected_kept))[: len(joined)]), (kind, form)
            assert bool(joined.any())


# A payload that is replaced -------------------------------------------------------------------------------------------


def change_the_dtype(method: Method, dtype: str) -> tuple[list[int], str | None]:
    """Return the bytes of each step, from the fifth on with another dtype, and what is not replaced."""
    parameters = make_parameters({"large": (40, 50)})
    worker = method.attach(SGD(parameters.values(), lr=0.05), parameters.items())
    nbytes = [0]
    for step in range(6):
        if step == 4:
            worker.method = method.replace(value_dtype=dtype)
        take_step(worker, parameters, step)
        nbytes.append(worker.peers.ledger.sent_bytes)
    worker.method = Method(when=method.when)
    said = message_of(lambda: take_step(worker, parameters, 6), ConfigurationError)
    return [after - before for before, after in pairwise(nbytes)], said


def test_a_replaced_dtype_is_sent_and_another_payload_is_refused() -> None:
    methods = [QuantizedGradients("int8"), LocalSGD(2, 0, compression="int8")]
    cases = [(method, dtype) for method in methods for dtype in ("int8", "int4")]
    of_int8, of_int4, of_local_int8, of_local_int4 = run_ranks(each, 2, change_the_dtype, cases)[0]
    for (same, said), (changed, _) in ((of_int8, of_int4), (of_local_int8, of_local_int4)):
        assert changed[:4] == same[:4]
        assert changed[5] < 0.6 * same[5]
        assert "another payload needs a worker of its own" in str(said)


# Averages of weights --------------------------------------------------------------------------------------------------


def add_a_group() -> dict[str, Any]:
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
    return {
        "equal": digest(parameters.values()),
        "taken": sorted(worker.compressed.residuals),
        "is exact": abs(float(parameters["double"][0].detach()) - (1 - 8 * 1.5e-12)) < 1e-15,
        "averages": worker.num_averages,
    }


def test_float64_is_sent_whole_and_parameters_may_come_later_or_rest() -> None:
    first, second = run_ranks(add_a_group, 2)
    assert first == second
    assert first["taken"] == ["complex", "first", "late", "resting"]
    assert first["is exact"]
    assert first["averages"] == 4
