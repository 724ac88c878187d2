"""DGC for Adam and AdamW on real gloo ranks, against its equations in one process; on one level and on two."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Adam, AdamW

from lightning_lowbw import DGC, Method
from lightning_lowbw.comm.agreement import digest
from tests.oracle import OracleAdam
from tests.ranks import on_ranks
from tests.sync import problem
from tests.sync.problem import AWKWARD, EXACT, FLAT, NODES, Nodes

BEGIN, STEPS, LR, MIN_NUMEL = 4, 10, 0.01, 100
SHAPES = {**AWKWARD, "large": (40, 30)}
Case = tuple[str, dict[str, Any], dict[str, Any]]


def method_for(**changes: Any) -> Method:
    stairs = {"rampup_begin_step": BEGIN, "rampup_step": 4, "sparsity": [0.5, 0.9]}
    return DGC(**{**stairs, **EXACT, "min_numel": MIN_NUMEL, **changes})


def of_optimizer(worker: Any, parameters: Any) -> tuple[set[float], str]:
    """Return the counts of steps, and a digest of the second moments."""
    states = [worker.optimizer.state[parameter] for parameter in parameters.values()]
    return {float(state["step"]) for state in states}, digest([state["exp_avg_sq"] for state in states])


def by_the_equations(kind: str, options: Any, changes: dict[str, Any], nodes: Nodes = FLAT) -> dict[str, Tensor]:
    options = {key: value for key, value in options.items() if key in ("betas", "eps", "weight_decay", "amsgrad")}
    if kind == "AdamW":
        options = {"weight_decay": 0.01, **options}  # torch's default
    options |= {"is_decoupled": kind == "AdamW", "masking": changes.get("momentum_masking", False), "lr": LR}
    densities = {step: method_for(**changes).when.density(step) for step in range(STEPS)}
    min_numel = changes.get("min_numel", MIN_NUMEL)
    return problem.by_the_paper(SHAPES, nodes, densities, min_numel=min_numel, make_oracle=OracleAdam, **options)[0]


CASES: list[Case] = [
    ("AdamW", {"eps": 1e-3}, {"rampup_begin_step": 0, "min_numel": 1}),
    ("AdamW", {"weight_decay": 0.1, "betas": (0.8, 0.95)}, {"momentum_masking": True}),
    ("Adam", {"weight_decay": 0.05, "betas": (0.0, 0.95)}, {}),
    ("Adam", {"amsgrad": True, "eps": 1e-3}, {}),
    ("AdamW", {"fused": True, "maximize": True}, {}),
]


@pytest.mark.parametrize(
    ("nodes", "cases"), [(FLAT, CASES), (NODES["blocks"], [CASES[0], CASES[3]])], ids=["flat", "two levels"]
)
def test_equals_the_equations(nodes: Nodes, cases: list[Case]) -> None:
    calls = {}
    for number, (kind, options, changes) in enumerate(cases):
        make, sign = partial(getattr(torch.optim, kind), lr=LR, **options), -1.0 if "maximize" in options else 1.0
        training = partial(problem.train, method_for(**changes), make, SHAPES, nodes, STEPS)
        calls[number] = partial(training, sign=sign, look=of_optimizer)
    for case, results in zip(cases, problem.run_each(sum(map(len, nodes)), calls).values(), strict=True):
        assert len({result["digests"][-1] for result in results}) == 1
        for name, weight in by_the_equations(*case, nodes).items():
            there = results[0]["weights"][name].contiguous()
            torch.testing.assert_close(there, weight, rtol=1e-4, atol=2e-5, msg=f"{case} {name}")
        assert all(result["seen"][-1][0] == {STEPS} for result in results), "also of parts of no elements"
        for node in nodes:  # whose ranks keep the second moments of all parts
            assert len({results[rank]["seen"][-1][1] for rank in node}) == 1


def attach_and_listen(beta1: float) -> list[str]:
    with problem.listening(level=logging.INFO) as said:
        problem.attach(method_for(), partial(AdamW, betas=(beta1, 0.99)))
    return [each for each in said if "beta1" in each]


def test_a_lowered_beta1_is_told_once() -> None:
    found = problem.run_each(2, {beta1: partial(attach_and_listen, beta1) for beta1 in (0.9, 0.7)})
    assert "beta1=0.9 is lowered to 0.7" in found[0.9][0][0]
    assert [found[0.9][1], *found[0.7]] == [[]] * 3


@on_ranks()
def test_amsgrad_is_that_of_the_param_group() -> None:
    first, second = problem.make_parameters({"first": (40, 30), "second": (40, 30)}).items()
    optimizer = Adam([{"params": [first[1]], "amsgrad": True}, {"params": [second[1]]}], lr=LR)
    problem.take_step(method_for(rampup_begin_step=0).attach(optimizer, [first, second]), dict([first, second]), 0)
    assert ["max_exp_avg_sq" in optimizer.state[parameter] for _, parameter in (first, second)] == [True, False]
