"""The method on real gloo ranks, in a plain PyTorch loop, against the paper's equations in one process.

On one level and on two, where it is that of one rank per node on each part of a tensor.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_lowbw.where.agreement import digest
from lightning_lowbw.where.topology import part_of
from tests.engine.network import SGD, Clip, is_large, make_model, train_by_the_paper, train_on_ranks
from tests.engine.problem import NODES, Nodes
from tests.ranks import run_ranks

Case = tuple[SGD, Clip, dict[str, bool]]
MOMENTUM: SGD = {"lr": 0.1, "momentum": 0.9}
NESTEROV: SGD = {**MOMENTUM, "nesterov": True}
CASES: list[Case] = [
    ({"lr": 0.1}, {}, {}),
    (MOMENTUM, {}, {}),
    (MOMENTUM, {}, {"momentum_masking": False}),
    (NESTEROV, {}, {}),
    ({**MOMENTUM, "weight_decay": 0.05}, {}, {}),
    ({**NESTEROV, "weight_decay": 0.05}, {"norm": 0.1}, {}),
    ({**MOMENTUM, "weight_decay": 0.05}, {"value": 0.02}, {}),
    (MOMENTUM, {}, {"keep_momentum": True}),
    ({**NESTEROV, "momentum": 0.95}, {}, {"keep_momentum": True}),
]


def train(nodes: Nodes, cases: list[Case], dtype: str) -> list[dict[str, Any]]:
    results = []
    for optimizer, clip, knobs in cases:
        model, worker = train_on_ranks(nodes, optimizer, clip, knobs, dtype)
        state = {worker.name_of(parameter): entry for parameter, entry in worker.optimizer.state.items()}
        results.append(
            {
                "weights": [parameter.detach() for parameter in model.parameters()],
                "digest": digest(model.parameters()),
                "kept": {name: residual.numel() for name, residual in worker.residuals.items()},
                "velocities": {name: u.numel() for name, u in worker.state_dict()["velocities"].items()},
                "in optimizer": {name for name, entry in state.items() if "momentum_buffer" in entry},
                "whole": {worker.name_of(p): u for p, u in worker.whole_momentum().items()},
            }
        )
    return results


@pytest.mark.parametrize(
    ("nodes", "cases"),
    [
        (((0,), (1,)), CASES),
        (((0,), (1,), (2,)), CASES),
        (NODES["blocks"], CASES[1:3]),
        (NODES["strided"], [CASES[0], CASES[5]]),
        (NODES["crossed"], CASES[3:4]),
        (NODES["three nodes"], CASES[5:7]),
        (NODES["three each"], CASES[4:5]),
    ],
    ids=["2 ranks", "3 ranks", *NODES],
)
def test_equals_the_paper(nodes: Nodes, cases: list[Case]) -> None:
    by_rank = run_ranks(train, sum(map(len, nodes)), nodes, cases, "float32")
    parameters = {name: parameter.detach() for name, parameter in make_model().named_parameters()}
    for (optimizer, clip, knobs), *results in zip(cases, *by_rank, strict=True):
        expected, oracles = train_by_the_paper(nodes, optimizer, clip, knobs)
        assert len({result["digest"] for result in results}) == 1  # replicas are equal to the bit
        for weight, reference, start in zip(results[0]["weights"], expected, parameters.values(), strict=True):
            torch.testing.assert_close(weight, reference, rtol=1e-5, atol=2e-6)
            assert not is_large(start) or float((start - reference).abs().max()) > 0.01  # it did train
        large = {name: number for number, (name, p) in enumerate(parameters.items()) if is_large(p)}
        for node in nodes:
            check_parts(node, results, {name: parameters[name].numel() for name in large}, optimizer)
        has_oracle_velocity = "momentum" in optimizer and not optimizer.get("nesterov")  # the paper's is another one
        for number, node in enumerate(nodes) if has_oracle_velocity and len(nodes[0]) > 1 else ():
            for name, tensor in large.items():
                u = torch.cat([of_part[tensor].u[number, 0] for of_part in oracles])
                for rank in node:
                    torch.testing.assert_close(results[rank]["whole"][name].flatten(), u, rtol=1e-4, atol=1e-5)


def check_parts(node: tuple[int, ...], results: list[dict[str, Any]], numels: dict[str, int], optimizer: SGD) -> None:
    """Each rank of a node keeps its part of u and v; the optimizer keeps no u of its own beside it."""
    for local_rank, rank in enumerate(node):
        parts = {name: part_of(numel, local_rank, len(node)) for name, numel in numels.items()}
        expected = {name: part.stop - part.start for name, part in parts.items()}
        assert results[rank]["kept"] == expected
        assert results[rank]["velocities"] == (expected if "momentum" in optimizer else {})
        assert len(node) == 1 or not results[rank]["in optimizer"] & set(numels)
        assert set(results[rank]["whole"]) == (set(numels) if len(node) > 1 and "momentum" in optimizer else set())


def test_half_values_keep_what_they_round_away_on_two_levels() -> None:
    """All ranks of a node decode alike: replicas are equal, and near those that send float32."""
    wide = run_ranks(train, 4, NODES["blocks"], CASES[1:2], "float32")
    half = run_ranks(train, 4, NODES["blocks"], CASES[1:2], "float16")
    assert len({result["digest"] for (result,) in half}) == 1
    for weight, reference in zip(half[0][0]["weights"], wide[0][0]["weights"], strict=True):
        assert float((weight - reference).abs().mean()) < 1e-4  # except elements of which another was chosen
        assert not torch.equal(weight, reference) or not is_large(weight)
