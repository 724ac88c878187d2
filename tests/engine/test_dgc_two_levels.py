"""Deep gradient compression on two levels: shapes, bytes between nodes, states, and what is refused.

Its equations are in test_dgc_oracle.py and test_dgc_adam.py: on each part of a tensor those of one rank per node.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from lightning_lowbw.engine.merging import merge_states
from torch import Tensor

from lightning_lowbw import DGC, ConfigurationError, DisagreementError, EveryStep, Method, Narrow, TopK, Where
from lightning_lowbw.engine.gradients import GradientWorker
from lightning_lowbw.what.codec import SparseCodec
from lightning_lowbw.what.selection import num_selected
from lightning_lowbw.where.agreement import digest
from lightning_lowbw.where.ledger import all_gather_bytes, all_reduce_bytes
from lightning_lowbw.where.topology import part_of
from tests.engine.problem import (
    AWKWARD,
    FLAT,
    NODES,
    Nodes,
    backward,
    each,
    make_parameters,
    make_weight,
    message_of,
    take_step,
    weights_of,
)
from tests.ranks import run_ranks

SHAPES = {**AWKWARD, "large": (331, 257)}


def awkward(nodes: Nodes, selection: str) -> dict[str, Any]:
    parameters = make_parameters(SHAPES)
    sgd = torch.optim.SGD(parameters.values(), lr=0.05, momentum=0.9)
    worker = DGC(sparsity=[0.99], min_numel=1, selection=selection).attach(sgd, parameters.items(), topology=nodes)
    for step in range(6):
        take_step(worker, parameters, step, unused=("vector",) if dist.get_rank() == 0 else ())
    return {
        "digest": digest(parameters.values()),
        "weights": weights_of(parameters),
        "inter": worker.peers.ledger.inter_bytes,
    }


def test_awkward_shapes_and_the_bytes_between_nodes() -> None:
    """Tensors with fewer elements than a node has ranks, too, whose last parts are empty."""
    nodes = NODES["three nodes"]
    results = run_ranks(each, 6, awkward, [(nodes, "exact"), (nodes, "sampled")])
    assert len({result["digest"] for by_case in results for result in by_case}) == 1
    for name, weight in results[0][0]["weights"].items():
        assert not weight.numel() or not torch.equal(weight, make_weight(name, SHAPES[name]))
    numels = [numel for numel in (math.prod(shape) for shape in SHAPES.values()) if numel]
    parts = [part_of(numel, 0, 2).stop for numel in numels]  # the longer ones
    message = SparseCodec().nbytes([num_selected(part, 0.01) for part in parts], parts)
    control = 4 * math.ceil((len(SHAPES) + 2 * 6) / 2)  # of which each of the two ranks sends half
    for result, _ in results:
        assert result["inter"] == 6 * (all_gather_bytes(message, 3) + all_reduce_bytes(control, 3))


# States ---------------------------------------------------------------------------------------------------------------

RESUMED = {"a": (40, 30), "b": (7, 50), "c": (1,)}


def resume(nodes: Nodes, states: list[Any], first: int, last: int) -> Any:
    """Train from the states of others, or from the start; return own state, and the weights."""
    parameters = make_parameters(RESUMED)
    sgd = torch.optim.SGD(parameters.values(), lr=0.05, momentum=0.9)
    method = DGC(sparsity=[0.95], min_numel=1, selection="exact")
    worker = method.attach(sgd, parameters.items(), topology=nodes or "flat")
    assert isinstance(worker, GradientWorker)
    if states:
        same = len(states) == dist.get_world_size() and states[0][2] == nodes
        state, weights, _ = states[dist.get_rank()] if same else states[0]
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(weights[name])
        worker.load_state_dict(state if same else merge_states(state for state, _, _ in states))
    for step in range(first, last):
        take_step(worker, parameters, step)
    return worker.state_dict(), weights_of(parameters), nodes


def mean_unsent(states: list[Any]) -> dict[str, Tensor]:
    residuals: dict[str, Tensor] = merge_states(state for state, _, _ in states)["residuals"]
    return residuals


def test_a_state_survives_another_topology() -> None:
    """The unsent mean, 1/N sum v, is the same for the ranks of any other world."""
    nodes = NODES["blocks"]
    half = run_ranks(resume, 4, nodes, [], 0, 4)
    flat = run_ranks(resume, 2, (), [], 0, 4)
    moves: list[tuple[list[Any], Nodes, int]] = [(half, (), 3), (half, NODES["strided"], 4), (half, (), 1)]
    for states, other_nodes, num_ranks in [*moves, (flat, nodes, 4)]:
        cases = [(other_nodes, states, 4, 4), (other_nodes, states, 4, 6)]
        moved, trained = zip(*run_ranks(each, num_ranks, resume, cases), strict=True)
        unsent_there = mean_unsent(list(moved))
        for name, unsent in mean_unsent(states).items():
            torch.testing.assert_close(unsent_there[name], unsent, rtol=1e-6, atol=1e-7)
        # And it trains on: all replicas step, and alike.
        replicas = [weights for _, weights, _ in trained]
        for name, start in states[0][1].items():
            assert all(torch.equal(weights[name], replicas[0][name]) for weights in replicas)
            assert not torch.equal(replicas[0][name], start)


def one_node_goes_on(states: list[Any]) -> tuple[str, int]:
    parameters = make_parameters(RESUMED)
    sgd = torch.optim.SGD(parameters.values(), lr=0.05, momentum=0.9)
    method = DGC(sparsity=[0.95], min_numel=1, selection="exact", topology=((0, 1),))
    worker = method.attach(sgd, parameters.items())
    assert isinstance(worker, GradientWorker)
    worker.load_state_dict(merge_states(state for state, _, _ in states))
    assert worker.residuals
    for step in range(4, 7):
        optimizer_steps(worker, parameters, step)
    assert not worker.residuals
    return digest(parameters.values()), worker.peers.ledger.inter_bytes


def optimizer_steps(worker: GradientWorker, parameters: dict[str, torch.nn.Parameter], step: int) -> None:
    """As with DDP, which has reduced all gradients already."""
    worker.optimizer.zero_grad()
    backward(parameters, step)
    for parameter in parameters.values():
        dist.all_reduce(parameter.grad)
        parameter.grad /= 2  # type: ignore[operator]
    with worker.stepping():
        worker.prepare(reduced=list(parameters.values()))
        worker.exchange()
        worker.optimizer.step()


def test_one_node_has_nobody_to_send_to_and_steps_with_what_was_kept() -> None:
    half = run_ranks(resume, 4, NODES["blocks"], [], 0, 4)
    results = run_ranks(one_node_goes_on, 2, half)
    assert len({weights for weights, _ in results}) == 1
    assert results[0][1] == 0


# What is refused ------------------------------------------------------------------------------------------------------


def attach_to(nodes: Nodes, method: Method) -> str | None:
    parameters = make_parameters({"a": (5, 5)})
    method = Method(when=method.when, what=method.what, where=Where(topology=nodes))
    sgd = torch.optim.SGD(parameters.values(), lr=0.05)
    return message_of(lambda: method.attach(sgd, parameters.items()), ConfigurationError)


def test_what_needs_parts_says_so() -> None:
    unequal: Nodes = ((0, 1, 2), (3,))
    for messages in run_ranks(each, 4, attach_to, [(unequal, method) for method in (DGC(), Method(what=Narrow()))]):
        assert all("node 1 has 1 (3)" in (message or "") for message in messages)


def reach_the_exchange_out_of_step(topology: Any) -> str | None:
    parameters = make_parameters({"a": (40, 30)})
    sgd = torch.optim.SGD(parameters.values(), lr=0.05)
    where = Where(topology=topology, inter_dtype="float32" if topology == "flat" else "bfloat16")
    worker = Method(when=EveryStep(1), what=TopK(min_numel=1), where=where).attach(sgd, parameters.items())
    backward(parameters, 0)
    worker.batch = 300 + (dist.get_rank() == 3)
    worker.prepare()
    return message_of(worker.exchange, DisagreementError)


def test_ranks_out_of_step_are_found_out() -> None:
    """Half types between nodes round no number of the control message."""
    for messages in run_ranks(each, 4, reach_the_exchange_out_of_step, [(NODES["blocks"],), ("flat",)]):
        assert all(
            "batch: rank 0 has 300, rank 1 has 300, rank 2 has 300, rank 3 has 301" in (message or "")
            for message in messages
        )


def train_with_weights_that_differ(nodes: Nodes) -> str | None:
    parameters = make_parameters({"a": (40, 30)})
    if dist.get_rank() == 1:
        with torch.no_grad():
            parameters["a"][0, 0] += 1e-6
    worker = DGC(min_numel=1).attach(torch.optim.SGD(parameters.values(), lr=0.05), parameters.items(), topology=nodes)
    return message_of(lambda: take_step(worker, parameters, 0), DisagreementError)


def test_weights_that_differ_are_found_out() -> None:
    for message in run_ranks(train_with_weights_that_differ, 2, FLAT):
        assert "the weights differ between the ranks" in (message or "")
