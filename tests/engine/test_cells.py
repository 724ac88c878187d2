"""Cells every step that have no name of their own: chunks, means over senders, decay, whole gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_lowbw import DGC, EveryStep, Method, TopK
from lightning_lowbw.engine.gradients import GradientWorker
from lightning_lowbw.where.agreement import digest
from lightning_lowbw.where.topology import part_of
from tests.engine.problem import (
    AWKWARD,
    CLOSE,
    FLAT,
    NODES,
    Nodes,
    coefficients,
    each,
    from_memory,
    in_memory,
    make_parameters,
    make_weight,
    take_step,
    weights_of,
)
from tests.ranks import run_ranks

STEPS, LR, MOMENTUM, DECAY = 8, 0.05, 0.9, 0.01
SHAPES = {**AWKWARD, "large": (70, 64)}
EXACT: dict[str, Any] = {"selection": "exact", "value_dtype": "float32", "min_numel": 1}
THREE: Nodes = ((0,), (1,), (2,))


def train(method: Method, nodes: Nodes) -> dict[str, Any]:
    parameters = make_parameters(SHAPES)
    sgd = torch.optim.SGD(parameters.values(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    worker = method.attach(sgd, parameters.items(), topology=nodes)
    assert isinstance(worker, GradientWorker)
    for step in range(STEPS):
        take_step(worker, parameters, step)
    return {
        "digest": digest(parameters.values()),
        "weights": weights_of(parameters),
        "residuals": {name: residual.clone() for name, residual in worker.residuals.items()},
    }


class SlowTopK:
    """One tensor, all participants: momentum correction, then the largest of each chunk; element by element."""

    def __init__(self, num_participants: int, what: TopK) -> None:
        self.num_participants, self.what = num_participants, what
        self.u: list[Tensor] = []
        self.v: list[Tensor] = []

    def step(self, weight: Tensor, gradients: list[Tensor]) -> None:
        """Step a flat weight in place."""
        what, numel = self.what, weight.numel()
        total, senders = torch.zeros(numel), torch.zeros(numel)
        if not self.u:
            self.u, self.v = ([torch.zeros(numel) for _ in gradients] for _ in range(2))
        for gradient, u, v in zip(gradients, self.u, self.v, strict=True):
            v.mul_(what.decay)
            u.mul_(MOMENTUM).add_(gradient + DECAY * (weight - LR * v))
            v.add_(u)
            size = what.chunk or numel
            for start in range(0, numel, size):
                chunk = v[start : start + size]
                count = max(1, round(chunk.numel() * what.density))
                if what.chunk and chunk.numel() < size:  # of a rest as many as of a whole chunk, or of one of 4096
                    count = max(count, round(min(size, 4096) * what.density))
                sent = chunk.abs().topk(min(count, chunk.numel())).indices + start
                total[sent] += v[sent]
                senders[sent] += (v[sent] != 0).float()
                v[sent] = u[sent] = 0.0
        mean = total / (senders.clamp(min=1.0) if what.mean_over == "senders" else self.num_participants)
        weight -= LR * mean


def by_the_slow_twin(what: TopK, nodes: Nodes) -> tuple[dict[str, Tensor], dict[tuple[str, int], SlowTopK]]:
    weights, num_local = {name: in_memory(make_weight(name, s), name) for name, s in SHAPES.items()}, len(nodes[0])
    twins = {(name, local): SlowTopK(len(nodes), what) for name in SHAPES for local in range(num_local)}
    for step in range(STEPS):
        for name, weight in weights.items():
            like = torch.empty(SHAPES[name])
            random = [[in_memory(coefficients(name, like, rank, step), name) for rank in n] for n in nodes]
            own = [sum(c + weight for c in of_node) / len(of_node) for of_node in random]
            for local_rank in range(num_local):
                part = part_of(weight.numel(), local_rank, num_local)
                if part.stop > part.start:
                    twins[name, local_rank].step(weight[part], [g[part] for g in own])
    return {name: from_memory(weight, name, SHAPES[name]) for name, weight in weights.items()}, twins


PAYLOADS = [
    TopK(density=0.1, chunk=64, **EXACT),
    TopK(density=0.05, chunk=256, mean_over="senders", **EXACT),
    TopK(density=0.1, mean_over="senders", **EXACT),
    TopK(density=0.1, decay=0.8, **EXACT),
    TopK(density=0.2, chunk=16, decay=0.0, **EXACT),
]


@pytest.mark.parametrize("nodes", [FLAT, THREE, NODES["strided"]], ids=["2 ranks", "3 ranks", "two levels"])
def test_every_step_equals_the_slow_twin(nodes: Nodes) -> None:
    cases = [(Method(what=what), nodes) for what in PAYLOADS]
    for what, *results in zip(PAYLOADS, *run_ranks(each, sum(map(len, nodes)), train, cases), strict=True):
        assert len({result["digest"] for result in results}) == 1
        expected, twins = by_the_slow_twin(what, nodes)
        for name, weight in expected.items():
            torch.testing.assert_close(results[0]["weights"][name].contiguous(), weight, **CLOSE)
            for number, node in enumerate(nodes):
                for local_rank, rank in enumerate(node):
                    if twins[name, local_rank].v:
                        kept = twins[name, local_rank].v[number]
                        torch.testing.assert_close(results[rank]["residuals"][name], kept, rtol=1e-4, atol=1e-4)


def test_sampled_selection_and_few_bits_keep_replicas_equal() -> None:
    """Chunks in two bits, as SparseLoCo sends them, every step; medians of norms."""
    payloads = [
        TopK(density=1 / 16, chunk=64, value_dtype="int2", min_numel=1, mean_over="senders", decay=0.95),
        TopK(density=1 / 16, chunk=64, value_dtype="int8", min_numel=1, clip_to_median=True),
        TopK(density=1 / 16, chunk=64, value_dtype="float16", min_numel=1, exchange="reduce_scatter"),
        TopK(density=1 / 16, value_dtype="float32", min_numel=1, exchange="dense", decay=0.9),
    ]
    for results in zip(*run_ranks(each, 3, train, [(Method(what=what), THREE) for what in payloads]), strict=True):
        assert len({result["digest"] for result in results}) == 1
        for name, weight in results[0]["weights"].items():
            assert weight.isfinite().all()
            assert weight.numel() < 100 or not torch.equal(weight, make_weight(name, SHAPES[name]))


def train_whole(nodes: Nodes) -> dict[str, Tensor]:
    """Beside plain SGD on the mean gradient, which each rank can compute."""
    results: dict[str, Tensor] = train(Method(), nodes)["weights"]
    return results


@pytest.mark.parametrize("nodes", [THREE, NODES["blocks"]], ids=["flat", "two levels"])
def test_whole_gradients_are_the_mean(nodes: Nodes) -> None:
    num_ranks = sum(map(len, nodes))
    plain = make_parameters(SHAPES)
    sgd = torch.optim.SGD(plain.values(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    for step in range(STEPS):
        for name, parameter in plain.items():
            weight = parameter.detach()
            mean = sum(coefficients(name, weight, rank, step) + weight for rank in range(num_ranks)) / num_ranks
            parameter.grad = torch.empty_like(weight).copy_(mean)
        sgd.step()
    for weights in run_ranks(train_whole, num_ranks, nodes):
        for name, parameter in plain.items():
            torch.testing.assert_close(weights[name], parameter.detach(), **CLOSE)


def train_with_the_payloads_own_density() -> bool:
    stairs = DGC(sparsity=[0.9], rampup_begin_step=2, **EXACT)
    own = Method(when=EveryStep(rampup_begin_step=2), what=TopK(density=1 - 0.9, **EXACT))
    return train(stairs, FLAT)["digest"] == train(own, FLAT)["digest"]


def test_stairs_and_the_payloads_own_density_are_two_ways_to_say_the_same() -> None:
    assert run_ranks(train_with_the_payloads_own_density, 2) == [True, True]
