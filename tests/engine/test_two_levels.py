"""On two levels a node is what a rank is on one: the same equations, with the mean gradient of the node."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lowbw import DGC, ConfigurationError, DisagreementError, LocalSGD, Topology
from lightning_lowbw.engine.gradients import DGCWorker
from lightning_lowbw.engine.replicas import LocalSGDWorker
from lightning_lowbw.what.codec import SparseCodec
from lightning_lowbw.what.selection import num_selected
from lightning_lowbw.where.agreement import digest
from lightning_lowbw.where.collectives import Exchange
from lightning_lowbw.where.hierarchy import Hierarchy
from lightning_lowbw.where.ledger import TrafficLedger
from lightning_lowbw.where.volume import all_gather_bytes, all_reduce_bytes
from tests.engine.problem import (
    AWKWARD,
    Nodes,
    backward,
    coefficients,
    exchange_of,
    make_parameters,
    make_weight,
    take_step,
)
from tests.engine.test_dgc_oracle import MIN_NUMEL, SGD, make_model, train_by_the_paper, train_on_ranks
from tests.engine.test_replicas import CASES, CLOSE, OPTIMIZERS, loss_of
from tests.engine.test_replicas import STEPS as LOCAL_STEPS
from tests.local_oracle import OracleLocalSGD, mean_of
from tests.ranks import run_ranks

NODES: dict[str, Nodes] = {
    "blocks": ((0, 1), (2, 3)),
    "strided": ((0, 2), (1, 3)),
    "crossed": ((0, 3), (1, 2)),  # the second ranks are in another order than the first
    "three nodes": ((0, 1), (2, 3), (4, 5)),
    "three each": ((0, 1, 2), (3, 4, 5)),
}


# Deep gradient compression --------------------------------------------------------------------------------------


def train(nodes: Nodes, optimizer: SGD, clip: dict[str, float], masking: bool, dtype: str) -> dict[str, Any]:
    model, worker = train_on_ranks(nodes, optimizer, clip, masking, dtype)
    state = worker.optimizer.state
    return {
        "weights": [parameter.detach() for parameter in model.parameters()],
        "digest": digest(model.parameters()),
        "kept": {worker._name(p): v.numel() for p, v in worker.residuals.items()},
        "velocities": {worker._name(p): u.numel() for p, u in worker._velocities.items()},
        "in optimizer": sorted(worker._name(p) for p, entry in state.items() if "momentum_buffer" in entry),
        "whole": {worker._name(p): u for p, u in worker.whole_momentum().items()},
    }


@pytest.mark.parametrize(
    ("name", "optimizer", "clip", "masking"),
    [
        ("blocks", {"lr": 0.1}, {}, True),
        ("blocks", {"lr": 0.1, "momentum": 0.9}, {}, False),
        ("strided", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05}, {}, True),
        ("crossed", {"lr": 0.1, "momentum": 0.9}, {}, True),
        ("three nodes", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.05}, {"norm": 0.1}, True),
        ("three each", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05}, {"value": 0.02}, True),
    ],
)
def test_dgc_is_that_of_one_rank_per_node(name: str, optimizer: SGD, clip: dict[str, float], masking: bool) -> None:
    nodes = NODES[name]
    results = run_ranks(train, sum(map(len, nodes)), nodes, optimizer, clip, masking, "float32")
    expected, oracle = train_by_the_paper(nodes, optimizer, clip, masking)
    assert len({result["digest"] for result in results}) == 1
    for weight, reference in zip(results[0]["weights"], expected, strict=True):
        torch.testing.assert_close(weight, reference, rtol=1e-5, atol=2e-6)
    # Memory: each rank of a node keeps a part of u and v.
    numels = {key: p.numel() for key, p in make_model().named_parameters() if p.numel() >= MIN_NUMEL}
    for node in nodes:
        for kept in ("kept", "velocities") if "momentum" in optimizer else ("kept",):
            total = {key: sum(results[rank][kept][key] for rank in node) for key in numels}
            assert total == numels
            assert max(max(results[rank][kept][key] * len(node) - numels[key] for key in numels) for rank in node) < 3
    for result in results:
        assert not set(result["in optimizer"]) & set(numels)
    if "momentum" in optimizer and not optimizer.get("nesterov"):  # the paper's Nesterov velocity is another one
        names = [key for key, _ in make_model().named_parameters()]
        for number, node in enumerate(nodes):
            for key in numels:
                for rank in node:
                    torch.testing.assert_close(
                        results[rank]["whole"][key], oracle.u[number, names.index(key)], rtol=1e-4, atol=1e-5
                    )


def test_dgc_with_half_values_keeps_what_they_round_away() -> None:
    """Owners and the others of a node round alike: replicas are equal, and near those that send float32."""
    optimizer: SGD = {"lr": 0.1, "momentum": 0.9}
    wide = run_ranks(train, 4, NODES["blocks"], optimizer, {}, True, "float32")
    half = run_ranks(train, 4, NODES["blocks"], optimizer, {}, True, "float16")
    assert len({result["digest"] for result in half}) == 1
    for weight, reference in zip(half[0]["weights"], wide[0]["weights"], strict=True):
        assert float((weight - reference).abs().mean()) < 1e-4  # but for elements of which another was chosen
        assert not torch.equal(weight, reference) or weight.numel() < MIN_NUMEL


def awkward(nodes: Nodes, selection: str) -> dict[str, Any]:
    parameters = make_parameters({**AWKWARD, "large": (331, 257)})
    sgd = torch.optim.SGD(parameters.values(), lr=0.05, momentum=0.9)
    method = DGC(sparsity=[0.99], min_numel=1, selection=selection)
    exchange = exchange_of(nodes)
    worker = method.attach(sgd, parameters.items(), exchange)
    for step in range(6):
        take_step(worker, parameters, step, unused=("vector",) if dist.get_rank() == 0 else ())
    return {
        "digest": digest(parameters.values()),
        "weights": {name: p.detach().clone() for name, p in parameters.items()},
        "inter": exchange.ledger.inter_bytes,
    }


def test_awkward_shapes_and_the_bytes_between_nodes() -> None:
    nodes = NODES["three nodes"]
    exact = run_ranks(awkward, 6, nodes, "exact")
    sampled = run_ranks(awkward, 6, nodes, "sampled")
    assert len({result["digest"] for result in (*exact, *sampled)}) == 1
    shapes = {**AWKWARD, "large": (331, 257)}
    numels = [int(torch.Size(shape).numel()) for shape in shapes.values()]
    counts = [num_selected(numel, 0.01) for numel in numels if numel]
    message = SparseCodec().nbytes(counts, [numel for numel in numels if numel])
    # Each of two ranks sends a half of the node's message, and of the flags: one per tensor, two per rank.
    flags = 4 * (len(numels) + 2 * 6)
    per_step = all_gather_bytes(-(-message // 2), 3) + all_reduce_bytes(flags // 2, 3)
    for result in exact:
        assert result["inter"] == pytest.approx(6 * per_step, rel=0.02)


def resume(nodes: Nodes, states: list[Any], first: int, last: int) -> Any:
    """Train from the states of others, or from the start; return own state, weights, and how many kept what."""
    shapes = {"a": (40, 30), "b": (7, 50)}
    parameters = make_parameters(shapes)
    sgd = torch.optim.SGD(parameters.values(), lr=0.05, momentum=0.9)
    method = DGC(sparsity=[0.95], min_numel=1, selection="exact")
    worker = method.attach(sgd, parameters.items(), exchange_of(nodes))
    if states:
        same = len(states) == dist.get_world_size() and states[0][2] == nodes
        state, weights, _ = states[dist.get_rank()] if same else states[0]
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(weights[name])
        worker.load_state_dict(state if same else method.merge_states(state for state, _, _ in states))
    for step in range(first, last):
        take_step(worker, parameters, step)
    return worker.state_dict(), {name: p.detach().clone() for name, p in parameters.items()}, nodes


def mean_unsent(states: list[Any]) -> dict[str, Tensor]:
    merged = DGC().merge_states(state for state, _, _ in states)
    return {name: entry["residual"] for name, entry in merged["tensors"].items()}


def test_resume_is_to_the_bit_and_survives_another_topology() -> None:
    nodes = NODES["blocks"]
    whole = run_ranks(resume, 4, nodes, [], 0, 8)
    half = run_ranks(resume, 4, nodes, [], 0, 4)
    again = run_ranks(resume, 4, nodes, half, 4, 8)
    for (state, weights, _), (other, expected, _) in zip(again, whole, strict=True):
        for name in weights:
            assert torch.equal(weights[name], expected[name])
            for key in ("residual", "momentum_buffer"):
                assert torch.equal(state["tensors"][name][key], other["tensors"][name][key])
    # The unsent mean, 1/N sum v, is the same for the ranks of any other world.
    flat = run_ranks(resume, 2, (), [], 0, 4)
    moves: list[tuple[list[Any], Nodes, int]] = [(half, (), 3), (half, NODES["strided"], 4), (half, (), 1)]
    for states, other_nodes, num_ranks in [*moves, (flat, nodes, 4)]:
        moved = mean_unsent(run_ranks(resume, num_ranks, other_nodes, states, 4, 4))
        for name, unsent in mean_unsent(states).items():
            torch.testing.assert_close(moved[name], unsent, rtol=1e-6, atol=1e-7)
        # And it trains on: all replicas step, and alike.
        replicas = [weights for _, weights, _ in run_ranks(resume, num_ranks, other_nodes, states, 4, 6)]
        for name, start in states[0][1].items():
            assert all(torch.equal(weights[name], replicas[0][name]) for weights in replicas)
            assert not torch.equal(replicas[0][name], start)


def one_node_goes_on(states: list[Any]) -> tuple[str, int]:
    shapes = {"a": (40, 30), "b": (7, 50)}
    parameters = make_parameters(shapes)
    sgd = torch.optim.SGD(parameters.values(), lr=0.05, momentum=0.9)
    method = DGC(sparsity=[0.95], min_numel=1, selection="exact")
    worker: DGCWorker = method.attach(sgd, parameters.items(), exchange_of(((0, 1),)))
    worker.load_state_dict(method.merge_states(state for state, _, _ in states))
    before = len(worker.residuals)
    for step in range(4, 7):
        take_step(worker, parameters, step)
    assert before
    assert not worker.residuals
    return digest(parameters.values()), worker._exchange.ledger.inter_bytes


def test_one_node_has_nobody_to_send_to_and_steps_with_what_was_kept() -> None:
    half = run_ranks(resume, 4, NODES["blocks"], [], 0, 4)
    results = run_ranks(one_node_goes_on, 2, half)
    assert len({weights for weights, _ in results}) == 1
    assert results[0][1] == 0


# Local SGD ------------------------------------------------------------------------------------------------------


def train_locally(nodes: Nodes, method: LocalSGD, optimizer: str, algorithm: Any = "sharded") -> dict[str, Any]:
    parameters = make_parameters(AWKWARD)
    exchange = exchange_of(nodes, algorithm, "averages")
    worker: LocalSGDWorker = method.attach(OPTIMIZERS[optimizer](parameters.values()), parameters.items(), exchange)
    digests, inter = [], []
    for step in range(LOCAL_STEPS):
        worker.optimizer.zero_grad()
        backward(parameters, step)
        worker.observe_loss(torch.tensor(loss_of(0, step)))
        with worker.stepping():
            worker.exchange()
            worker.optimizer.step()
        digests.append(digest(parameters.values()))
        inter.append(exchange.ledger.inter_bytes)
    own = {name: p.detach().clone() for name, p in parameters.items()}
    return {"own": own, "digests": digests, "inter": inter}


def by_oracle(name: str, nodes: Nodes, optimizer: str, **choices: Any) -> OracleLocalSGD:
    oracle = OracleLocalSGD(make_weight(name, AWKWARD[name]), len(nodes), OPTIMIZERS[optimizer], **choices)
    for step in range(LOCAL_STEPS):
        gradients = [
            mean_of([coefficients(name, replica, rank, step) + replica.detach() for rank in node])
            for node, replica in zip(nodes, oracle.replicas, strict=True)
        ]
        oracle.take_step(gradients, [loss_of(0, step)] * len(nodes))
    return oracle


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", ["fixed", "post_local", "fleet", "diloco", "delayed", "average"])
@pytest.mark.parametrize("name", ["strided", "three nodes"])
def test_local_sgd_is_that_of_one_rank_per_node(name: str, case: str, optimizer: str) -> None:
    nodes, (choices, oracle_choices) = NODES[name], CASES[case]
    results = run_ranks(partial(train_locally, nodes, LocalSGD(**choices), optimizer), sum(map(len, nodes)))
    for tensor in AWKWARD:
        oracle = by_oracle(tensor, nodes, optimizer, **oracle_choices)
        for number, node in enumerate(nodes):
            for rank in node:
                torch.testing.assert_close(
                    results[rank]["own"][tensor], oracle.replicas[number].detach(), **CLOSE, msg=f"{tensor} {rank}"
                )
    for node in nodes:  # whose ranks step together
        assert all(results[rank]["digests"] == results[node[0]]["digests"] for rank in node)
    assert len({result["digests"][oracle.averaged_at[0] - 2] for result in results}) == len(nodes)


def test_local_steps_send_nothing_between_nodes() -> None:
    results = run_ranks(train_locally, 4, NODES["blocks"], LocalSGD(k_steps=4, begin_step=0), "sgd")
    for result in results:
        growth = [after - before for before, after in zip([0, *result["inter"]], result["inter"], strict=False)]
        assert [step for step, more in enumerate(growth, start=1) if more] == [4, 8, 12, 16]


def test_a_period_inside_the_nodes() -> None:
    """Nodes of unequal size, too: the mean is over ranks."""
    nodes: Nodes = ((0, 1), (2,))
    method = LocalSGD(k_steps=4, begin_step=0, node_k_steps=2)
    results = run_ranks(train_locally, 3, nodes, method, "sgd", "leader")
    for step in range(1, LOCAL_STEPS + 1):
        at = [result["digests"][step - 1] for result in results]
        assert (at[0] == at[1]) == (step % 2 == 0)
        assert (at[0] == at[2]) == (step % 4 == 0)
    replicas = [make_weight("matrix", AWKWARD["matrix"]).requires_grad_() for _ in range(3)]
    optimizers = [OPTIMIZERS["sgd"]([replica]) for replica in replicas]
    for step in range(LOCAL_STEPS):
        for rank, (replica, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            replica.grad = coefficients("matrix", replica, rank, step) + replica.detach()
            optimizer.step()
        with torch.no_grad():
            for group in ((0, 1, 2),) if (step + 1) % 4 == 0 else ((0, 1),) if step % 2 else ():
                mean = mean_of([replicas[rank] for rank in group])
                for rank in group:
                    replicas[rank].copy_(mean)
    for rank, result in enumerate(results):
        torch.testing.assert_close(result["own"]["matrix"], replicas[rank].detach(), **CLOSE)


def hide_and_average_in_node(delay_steps: int) -> list[float]:
    """Only step 3 moves the ranks apart; the average of step 4 lands behind one inside the nodes."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    method = LocalSGD(k_steps=4, begin_step=0, node_k_steps=2, delay_steps=delay_steps)
    worker = method.attach(optimizer, [("p", parameter)], exchange_of(NODES["blocks"], "sharded", "averages"))
    for step in range(8):
        parameter.grad = torch.full((1,), -float(dist.get_rank()) if step == 3 else 0.0)
        with worker.stepping():
            worker.exchange()
            optimizer.step()
    return [float(parameter.detach())]


@pytest.mark.parametrize("delay_steps", [0, 1, 2, 3])
def test_an_average_of_nodes_lands_on_one_inside_them(delay_steps: int) -> None:
    assert run_ranks(hide_and_average_in_node, 4, delay_steps) == [[1.5]] * 4


def attach_through_leaders(nodes: Nodes, method: Any) -> str:
    parameters = make_parameters({"a": (5, 5)})
    sgd = torch.optim.SGD(parameters.values(), lr=0.05)
    try:
        method.attach(sgd, parameters.items(), exchange_of(nodes, "leader"))
    except ConfigurationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("method", [DGC(), LocalSGD(value_dtype="bfloat16")])
def test_what_needs_shards_says_so(method: Any) -> None:
    for nodes, word in ((NODES["blocks"], "sharded"), (((0, 1, 2), (3,)), "node 1 has 1 (3)")):
        for message in run_ranks(attach_through_leaders, 4, nodes, method):
            assert word in message


def out_of_step() -> str:
    parameters = make_parameters({"a": (40, 30)})
    sgd = torch.optim.SGD(parameters.values(), lr=0.05)
    ledger = TrafficLedger()
    hierarchy = Hierarchy(Topology(NODES["blocks"]), "sharded", torch.bfloat16, ledger)
    worker = DGC(min_numel=1).attach(sgd, parameters.items(), Exchange(None, ledger, hierarchy=hierarchy))
    backward(parameters, 0)
    try:
        worker.exchange(num_backwards=300 + (dist.get_rank() == 3))
    except DisagreementError as error:
        return str(error)
    return ""


def test_half_types_between_nodes_round_no_control_numbers() -> None:
    assert all("Step 0: " in message for message in run_ranks(out_of_step, 4))


def test_narrow_averages_send_half_between_nodes() -> None:
    wide = run_ranks(train_locally, 4, NODES["blocks"], LocalSGD(k_steps=4, begin_step=0), "sgd")
    method = LocalSGD(k_steps=4, begin_step=0, value_dtype="bfloat16")
    narrow = run_ranks(train_locally, 4, NODES["blocks"], method, "sgd")
    for result, reference in zip(narrow, wide, strict=True):
        assert result["digests"][15] == narrow[0]["digests"][15]
        assert result["inter"][-1] < 0.6 * reference["inter"][-1]
        for name, value in result["own"].items():
            torch.testing.assert_close(value, reference["own"][name], rtol=0, atol=0.02)
