"""int8 and int4 gradients against a simulation: the same weights and residuals, to the bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from lightning_lowbw import NarrowGradients
from lightning_lowbw.engine.gradients import GradientWorker
from tests.engine.problem import (
    AWKWARD,
    NODES,
    Nodes,
    backward,
    coefficients,
    each,
    from_memory,
    in_memory,
    make_parameters,
    make_weight,
    node_of,
)
from tests.narrow_oracle import OracleNarrow
from tests.ranks import run_ranks

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
TOPOLOGIES: dict[str, Nodes] = {
    "two ranks": ((0,), (1,)),
    "four ranks": ((0,), (1,), (2,), (3,)),
    "two levels": NODES["blocks"],
    "crossed": NODES["crossed"],
}


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
    worker = NarrowGradients(dtype).attach(optimizer, parameters.items(), topology=nodes)
    assert isinstance(worker, GradientWorker)
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
    assert worker.narrow is not None
    residuals = {name: residual.clone() for name, residual in worker.narrow.residuals.items()}
    return {"weights": [p.detach() for p in parameters.values()], "residuals": residuals, "taken": taken}


def part_of(flat: Tensor, local_rank: int, num_local: int) -> Tensor:
    """Return the part of a tensor that a rank of a node exchanges."""
    size = -(-flat.numel() // num_local)
    return flat[local_rank * size : (local_rank + 1) * size]


def by_definition(bits: int, kind: str, nodes: Nodes, form: str) -> tuple[list[Tensor], list[OracleNarrow]]:
    """Train with the oracle's mean; a node's signal is the mean of its ranks'."""
    weights = {name: make_weight(name, shape) for name, shape in SHAPES.items()}
    optimizer = OPTIMIZERS[kind](list(weights.values()))
    num_local = len(nodes[0])
    oracles = [OracleNarrow(len(nodes), bits) for _ in range(num_local)]
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
            parts = [[part_of(signal, local_rank, num_local) for signal in of_node.values()] for of_node in signals]
            longest = sum(part_of(weight.reshape(-1), 0, num_local).numel() for weight in weights.values())
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
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_training_is_that_of_the_definition(topology: str, dtype: str) -> None:
    nodes = TOPOLOGIES[topology]
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
