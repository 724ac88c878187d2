"""Local SGD on two levels: a node is what a rank is on one, and trains with the mean gradient of its ranks."""

from __future__ import annotations

import functools
import time
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_lowbw import ConfigurationError, LocalSGD
from lightning_lowbw.engine.method import Method
from tests.engine.problem import AWKWARD, NODES, Nodes, make_weight
from tests.engine.replica_problem import (
    CLOSE,
    OPTIMIZERS,
    STEPS,
    attach,
    by_oracle,
    gradient_of,
    run_each,
    train,
)
from tests.local_oracle import mean_of
from tests.ranks import run_ranks

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fixed": ({"k_steps": 4, "begin_step": 0}, {"k": 4, "begin": 0}),
    "post_local": ({"k_steps": 3, "begin_step": 5}, {"k": 3, "begin": 5}),
    "fleet": ({"k_steps": 2, "begin_step": 1, "rule": "fleet"}, {"k": 2, "rule": "fleet"}),
    "diloco": (
        {"k_steps": 4, "begin_step": 0, "outer": "nesterov"},
        {"k": 4, "begin": 0, "outer": "nesterov", "outer_momentum": 0.9, "outer_lr": 0.7},
    ),
    "delayed": ({"k_steps": 5, "delay_steps": 3}, {"k": 5, "delay": 3}),
    "average": ({"k_steps": 4, "inner_momentum": "average"}, {"k": 4, "momentum": "average"}),
}


@functools.cache
def results_of(nodes: str, optimizer: str) -> dict[str, list[Any]]:
    """Start the ranks once for all cases."""
    groups = NODES[nodes]
    calls = {
        case: partial(train, LocalSGD(**choices), optimizer, nodes=groups, schedule_lr="rule" in choices)
        for case, (choices, _) in CASES.items()
    }
    return run_each(sum(map(len, groups)), calls)


@pytest.mark.parametrize(("nodes", "optimizer"), [("strided", "adamw"), ("three nodes", "sgd")])
@pytest.mark.parametrize("case", CASES)
def test_equals_one_rank_per_node(nodes: str, case: str, optimizer: str) -> None:
    groups, (choices, oracle_choices) = NODES[nodes], CASES[case]
    results = results_of(nodes, optimizer)[case]
    for tensor in AWKWARD:
        oracle = by_oracle(tensor, groups, optimizer, schedule_lr="rule" in choices, **oracle_choices)
        for number, node in enumerate(groups):
            for rank in node:
                torch.testing.assert_close(
                    results[rank]["own"][tensor], oracle.replicas[number].detach(), **CLOSE, msg=f"{tensor} {rank}"
                )
    for node in groups:  # whose ranks step together
        assert all(results[rank]["digests"] == results[node[0]]["digests"] for rank in node)
    assert len({result["digests"][oracle.averaged_at[0] - 2] for result in results}) == len(groups)
    if "rule" in choices:
        assert len(set(oracle.ks)) > 1, "the case adapts nothing"
        assert all(result["k"][-1] == oracle.ks[-1] for result in results)


# What is sent ------------------------------------------------------------------------------------------------------


def test_local_steps_send_nothing_between_nodes_and_narrow_averages_half() -> None:
    method = LocalSGD(k_steps=4, begin_step=0)
    calls = {
        "wide": partial(train, method, nodes=NODES["blocks"]),
        "narrow": partial(train, LocalSGD(k_steps=4, begin_step=0, value_dtype="bfloat16"), nodes=NODES["blocks"]),
    }
    results = run_each(4, calls)
    for result in (*results["wide"], *results["narrow"]):
        growth = [after - before for before, after in pairwise([0, *result["inter"]])]
        assert [step for step, more in enumerate(growth, start=1) if more] == [4, 8, 12, 16]
    for result, reference in zip(results["narrow"], results["wide"], strict=True):
        assert result["digests"][15] == results["narrow"][0]["digests"][15]
        assert result["inter"][-1] < 0.6 * reference["inter"][-1]
        for name, value in result["own"].items():
            torch.testing.assert_close(value, reference["own"][name], rtol=0, atol=0.02)


# A period inside the nodes -----------------------------------------------------------------------------------------


def test_a_period_inside_the_nodes() -> None:
    """Nodes of unequal size, too: the mean is over ranks."""
    nodes: Nodes = ((0, 1), (2,))
    method = LocalSGD(k_steps=4, begin_step=0, node_k_steps=2)
    results = run_ranks(partial(train, method, nodes=nodes), 3)
    for step in range(1, STEPS + 1):
        at = [result["digests"][step - 1] for result in results]
        assert (at[0] == at[1]) == (step % 2 == 0)
        assert (at[0] == at[2]) == (step % 4 == 0)
    replicas = [make_weight("matrix", AWKWARD["matrix"]).requires_grad_() for _ in range(3)]
    optimizers = [OPTIMIZERS["sgd"]([replica]) for replica in replicas]
    for step in range(STEPS):
        for rank, (replica, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            replica.grad = gradient_of("matrix", replica, rank, step)
            optimizer.step()
        with torch.no_grad():
            for group in ((0, 1, 2),) if (step + 1) % 4 == 0 else ((0, 1),) if step % 2 else ():
                mean = mean_of([replicas[rank] for rank in group])
                for rank in group:
                    replicas[rank].copy_(mean)
    for rank, result in enumerate(results):
        torch.testing.assert_close(result["own"]["matrix"], replicas[rank].detach(), **CLOSE)


def hide_and_average_in_node(delay_steps: int) -> list[float]:
    """Only step 3 moves the ranks apart; the average of step 4 is applied behind one inside the nodes."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    method = LocalSGD(k_steps=4, begin_step=0, node_k_steps=2, delay_steps=delay_steps)
    method.attach(optimizer, [("p", parameter)], topology=NODES["blocks"])
    for step in range(8):
        parameter.grad = torch.full((1,), -float(dist.get_rank()) if step == 3 else 0.0)
        optimizer.step()
    return [float(parameter.detach())]


def test_an_average_of_nodes_is_applied_over_one_inside_them() -> None:
    results = run_each(4, {f"delay {delay}": partial(hide_and_average_in_node, delay) for delay in range(4)})
    for delay, by_rank in results.items():
        assert by_rank == [[1.5]] * 4, delay


# Refusals ----------------------------------------------------------------------------------------------------------


def attach_to(nodes: Nodes, method: Method) -> str:
    try:
        attach(method, shapes={"a": (5, 5)}, nodes=nodes)
    except ConfigurationError as error:
        return str(error)
    return ""


def test_what_needs_parts_says_so_and_a_period_inside_nodes_needs_nodes() -> None:
    narrow, sparse = LocalSGD(value_dtype="bfloat16"), LocalSGD(compression={})
    unequal: Nodes = ((0, 1, 2), (3,))
    calls = {
        "narrow, unequal": partial(attach_to, unequal, narrow),
        "sparse, unequal": partial(attach_to, unequal, sparse),
        "whole, unequal": partial(attach_to, unequal, LocalSGD()),
        "no nodes": partial(attach_to, (), LocalSGD(node_k_steps=2)),
        "one node": partial(attach_to, ((0, 1, 2, 3),), LocalSGD(node_k_steps=2)),  # trains as everywhere else
        "a rank each": partial(attach_to, ((0,), (1,), (2,), (3,)), LocalSGD(node_k_steps=2)),
    }
    results = run_each(4, calls)
    words = ["node 1 has 1 (3)"] * 2 + ["", "node_k_steps=2", "", ""]
    for (case, messages), word in zip(results.items(), words, strict=True):
        assert all(word in message and bool(message) == bool(word) for message in messages), case


def two_hidden_optimizers() -> list[float]:
    weights = [torch.nn.Parameter(torch.zeros(100)) for _ in range(2)]
    workers = [
        LocalSGD(2, 0, delay_steps=1, topology=((0, 1), (2, 3))).attach(torch.optim.SGD([w], lr=1.0), [("w", w)])
        for w in weights
    ]
    for step in range(9):
        for sign, weight, worker in zip((1.0, -1.0), weights, workers, strict=True):
            weight.grad = torch.full((100,), sign)
            worker.optimizer.step()
            if (step + dist.get_rank()) % 2:  # ranks come to the second optimizer at different times
                time.sleep(0.005)
    return [float(weight[0]) for weight in weights]


def test_hidden_averages_of_two_optimizers_do_not_mix() -> None:
    assert run_ranks(two_hidden_optimizers, 4, timeout_s=30.0) == [[-9.0, 9.0]] * 4
