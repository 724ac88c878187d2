"""Streaming: each fragment has its own turn, and is otherwise local SGD as ever."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import Parameter

from lightning_lowbw import Compression, ConfigurationError, LocalSGD
from lightning_lowbw.engine.replicas import LocalSGDWorker
from lightning_lowbw.where.agreement import digest
from lightning_lowbw.where.collectives import Exchange
from lightning_lowbw.where.volume import all_reduce_bytes
from tests.engine.problem import AWKWARD, coefficients, make_parameters, make_weight
from tests.engine.test_replicas import CLOSE, OPTIMIZERS, loss_of
from tests.engine.test_replicas import train as train_plain
from tests.engine.test_two_levels import NODES, Nodes, exchange_of
from tests.local_oracle import OracleLocalSGD, mean_of
from tests.methods import test_sparse_local_sgd as sparse
from tests.ranks import run_ranks

STEPS = 17


def phase_of(fragment: int, num_fragments: int, k: int) -> int:
    return k - round((fragment + 1) * k / num_fragments)


def train(choices: dict[str, Any], optimizer: str, nodes: Nodes = ()) -> dict[str, Any]:
    parameters = make_parameters(AWKWARD)
    exchange = exchange_of(nodes, "sharded", "averages") if nodes else Exchange()
    method = LocalSGD(begin_step=0, **choices)
    worker = method.attach(OPTIMIZERS[optimizer](parameters.values()), parameters.items(), exchange)
    averages = []
    for step in range(STEPS):
        for name, parameter in parameters.items():
            parameter.grad = coefficients(name, parameter, dist.get_rank(), step) + parameter.detach()
        with worker.stepping():
            worker.exchange()
            worker.optimizer.step()
        averages.append(worker.num_averages)
    own = {name: p.detach().clone() for name, p in parameters.items()}
    worker.finish()  # for the next one, in the same process groups
    return {
        "own": own,
        "fragments": [[worker._name(p) for p in fragment.parameters] for fragment in worker._fragments],
        "averages": averages,
    }


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({"k_steps": 6, "num_fragments": 3}, {"k": 6}),
    "one per step": ({"k_steps": 4, "num_fragments": 4}, {"k": 4}),
    "uneven periods": ({"k_steps": 5, "num_fragments": 3, "delay_steps": 2}, {"k": 5, "delay": 2}),
    "mixed": ({"k_steps": 6, "num_fragments": 2, "delay_steps": 4, "mixing": 0.3}, {"k": 6, "delay": 4, "mixing": 0.3}),
    "streaming diloco": (
        {"k_steps": 5, "num_fragments": 2, "delay_steps": 2, "mixing": 0.5, "outer": "nesterov"},
        {"k": 5, "delay": 2, "mixing": 0.5, "outer": "nesterov", "outer_momentum": 0.9, "outer_lr": 0.7},
    ),
    "one fragment mixed": (
        {"k_steps": 4, "delay_steps": 1, "mixing": 0.0},
        {"k": 4, "delay": 1, "mixing": 0.0},
    ),
}


def check(results: list[dict[str, Any]], optimizer: str, groups: Sequence[Sequence[int]], case: str) -> None:
    choices, oracle_choices = CASES[case]
    num_fragments = choices.get("num_fragments", 1)
    names = results[0]["fragments"]
    assert sorted(name for members in names for name in members) == sorted(AWKWARD)
    assert all(result["fragments"] == names for result in results)
    landed = [0] * STEPS
    for fragment, members in enumerate(names):
        for name in members:
            phase = phase_of(fragment, num_fragments, choices["k_steps"])
            oracle = OracleLocalSGD(
                make_weight(name, AWKWARD[name]),
                len(groups),
                OPTIMIZERS[optimizer],
                begin=0,
                phase=phase,
                **oracle_choices,
            )
            for step in range(STEPS):
                gradients = [
                    mean_of([coefficients(name, replica, rank, step) + replica.detach() for rank in ranks])
                    for ranks, replica in zip(groups, oracle.replicas, strict=True)
                ]
                oracle.take_step(gradients, [loss_of(0, step)] * len(groups))
            for number, ranks in enumerate(groups):
                for rank in ranks:
                    torch.testing.assert_close(
                        results[rank]["own"][name], oracle.replicas[number].detach(), **CLOSE, msg=f"{name} {rank}"
                    )
        for step in oracle.averaged_at:
            landed = [n + (at >= step + oracle.delay) for at, n in enumerate(landed, start=1)]
    assert all(result["averages"] == landed for result in results)


def train_each(optimizer: str) -> list[dict[str, Any]]:
    return [train(choices, optimizer) for choices, _ in CASES.values()]


@functools.cache
def results_of(num_ranks: int, optimizer: str) -> dict[str, list[dict[str, Any]]]:
    """Start the ranks once for all cases."""
    by_rank = run_ranks(train_each, num_ranks, optimizer)
    return {case: list(results) for case, results in zip(CASES, zip(*by_rank, strict=True), strict=True)}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", CASES)
def test_each_fragment_equals_replicas_in_one_process(case: str, optimizer: str) -> None:
    num_ranks = 3 if case == "plain" else 2
    check(results_of(num_ranks, optimizer)[case], optimizer, [[rank] for rank in range(num_ranks)], case)


@pytest.mark.parametrize("case", ["plain", "streaming diloco"])
def test_on_two_levels(case: str) -> None:
    groups = NODES["strided"]
    check(run_ranks(train, 4, CASES[case][0], "sgd", groups), "sgd", groups, case)


def test_one_fragment_is_what_there_was() -> None:
    method = LocalSGD(k_steps=4, begin_step=0, num_fragments=1)
    assert (
        run_ranks(train_plain, 2, method, "sgd")[0]["digests"]
        == (run_ranks(train_plain, 2, LocalSGD(k_steps=4, begin_step=0), "sgd")[0]["digests"])
    )


@pytest.mark.parametrize("delay", [0, 2])
def test_sparse_fragments_are_to_the_bit(delay: int) -> None:
    choices = {"k_steps": 4, "num_fragments": 2, "delay_steps": delay, "compression": {"value_dtype": "int2"}}
    results = run_ranks(train_sparse, 2, sparse.with_base(choices))
    for fragment, members in enumerate(results[0]["fragments"]):
        for name in set(members) & set(sparse.SPARSE):
            phase = phase_of(fragment, 2, 4)
            oracle = sparse.by_oracle(name, "sgd", [[0], [1]], value_dtype="int2", phase=phase, delay=delay)
            for rank in (0, 1):
                assert torch.equal(results[rank]["own"][name], oracle.replicas[rank].detach())
                assert torch.equal(-results[rank]["residuals"][name], oracle.e[rank])


def train_sparse(choices: dict[str, Any]) -> dict[str, Any]:
    worker, parameters = sparse.attach(LocalSGD(begin_step=0, **choices), "sgd", None)
    sparse.train_on(worker, parameters, range(sparse.STEPS))
    return {
        "own": {name: p.detach().clone() for name, p in parameters.items()},
        "residuals": sparse.residuals_of(worker),
        "fragments": [[worker._name(p) for p in fragment.parameters] for fragment in worker._fragments],
    }


# What it is for ----------------------------------------------------------------------------------------------------


def send(num_fragments: int) -> list[int]:
    parameters = [Parameter(torch.zeros(1000 + number)) for number in range(24)]
    optimizer = torch.optim.SGD(parameters, lr=0.0)
    worker = LocalSGD(k_steps=8, begin_step=0, num_fragments=num_fragments).attach(optimizer, [])
    sent = [0]
    for _ in range(16):
        with worker.stepping():
            worker.exchange()
        sent.append(worker._exchange.ledger.sent_bytes)
    return [after - before for before, after in pairwise(sent)]


def test_the_peak_of_the_traffic_is_divided_by_the_number_of_fragments() -> None:
    whole, parts = run_ranks(send, 2, 1)[0], run_ranks(send, 2, 4)[0]
    control = all_reduce_bytes(4 * (8 + 2 * 2), 2)  # the numbers that ride with each average
    assert [step for step, nbytes in enumerate(whole, start=1) if nbytes] == [8, 16]
    assert [step for step, nbytes in enumerate(parts, start=1) if nbytes] == [2, 4, 6, 8, 10, 12, 14, 16]
    assert sum(parts) == sum(whole) + (8 - 2) * control
    assert max(parts) - control < 1.01 * (max(whole) - control) / 4


def share(num_fragments: int) -> list[int]:
    numels = [8192, 4096] + [100] * 20  # of which the small are sent whole: most of the bytes
    parameters = [Parameter(torch.zeros(numel)) for numel in numels]
    method = LocalSGD(k_steps=2, begin_step=0, num_fragments=num_fragments, compression=Compression())
    worker = method.attach(torch.optim.SGD(parameters, lr=0.0), [])
    sent = [0]
    for _ in range(2):
        with worker.stepping():
            worker.exchange()
        sent.append(worker._exchange.ledger.sent_bytes)
    return [after - before for before, after in pairwise(sent)]


def test_fragments_are_balanced_by_the_bytes_that_they_send() -> None:
    whole, parts = run_ranks(share, 2, 1)[0], run_ranks(share, 2, 2)[0]
    control = all_reduce_bytes(4 * (8 + 2 * 2), 2)
    assert max(parts) - control < 1.05 * (max(whole) - control) / 2


# tau from measured times -------------------------------------------------------------------------------------------


def choose_delay(numel: int, sleep_s: float) -> dict[str, Any]:
    parameters = [Parameter(torch.zeros(numel)), Parameter(torch.zeros(numel))]
    optimizer = torch.optim.SGD(parameters, lr=0.0)
    method = LocalSGD(k_steps=6, begin_step=0, num_fragments=2, delay_steps="auto")
    worker = method.attach(optimizer, [])
    delays, averages = [], []
    for step in range(30):
        with worker.stepping():
            worker.exchange()
            if step < 12:
                time.sleep(sleep_s * (1 + dist.get_rank()) / 2)
        delays.append(worker.delay_steps)
        averages.append(worker.num_averages)
    return {"delays": delays, "averages": averages, "shown": worker.metrics(True)["delay_steps"]}


@pytest.mark.parametrize(("numel", "sleep_s"), [(10, 0.1), (4_000_000, 0.0)])
def test_a_measured_delay(numel: int, sleep_s: float) -> None:
    first, second = run_ranks(choose_delay, 2, numel, sleep_s)
    assert first == second, "the ranks have chosen differently"
    # both fragments are timed in their second average, which the second ends in step 12
    assert first["delays"][:11] == [0] * 11
    (chosen,) = set(first["delays"][11:])
    assert chosen == 1 if sleep_s else 1 < chosen <= 5
    assert first["shown"] == chosen
    # begun in steps 15 and 18, they land later
    assert [step for step in range(13, 22) if first["averages"][step - 1] > first["averages"][step - 2]] == [
        step + chosen for step in (15, 18, 21) if step + chosen < 22
    ]


# State -------------------------------------------------------------------------------------------------------------


def attach(method: LocalSGD) -> tuple[LocalSGDWorker, dict[str, Parameter]]:
    parameters = make_parameters({"a": (40,), "b": (30, 2), "c": (17,)})
    return method.attach(OPTIMIZERS["sgd"](parameters.values()), parameters.items()), parameters


def train_on(worker: LocalSGDWorker, parameters: dict[str, Parameter], steps: range) -> list[str]:
    digests = []
    for step in steps:
        for name, parameter in parameters.items():
            parameter.grad = coefficients(name, parameter, dist.get_rank(), step) + parameter.detach()
        with worker.stepping():
            worker.exchange()
            worker.optimizer.step()
        digests.append(digest(parameters.values()))
    return digests


STREAMING = LocalSGD(k_steps=6, begin_step=0, num_fragments=3, delay_steps=3, compression=Compression(min_numel=1))


def resume(at: int, method: LocalSGD, states: list[Any] | None) -> Any:
    """Train on from a state, or up to it."""
    worker, parameters = attach(method)
    if states is None:
        train_on(worker, parameters, range(at))
        state = copy.deepcopy(worker.state_dict())
        with worker.consensus():
            shown = {name: p.detach().clone() for name, p in parameters.items()}
        return state, shown, train_on(worker, parameters, range(at, 20))
    state, shown, _ = states[dist.get_rank() % len(states)]
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(shown[name])
    try:
        worker.load_state_dict(copy.deepcopy(state))
    except ConfigurationError as error:
        return str(error)
    return train_on(worker, parameters, range(at, 20))


def resume_at_each(steps: Sequence[int], states: dict[int, list[Any]] | None) -> list[Any]:
    return [resume(at, STREAMING, None if states is None else states[at]) for at in steps]


def test_resume_with_several_averages_on_their_way() -> None:
    steps = (1, 3, 5, 8)
    by_rank = run_ranks(resume_at_each, 2, steps, None)
    states = {at: [of_rank[number] for of_rank in by_rank] for number, at in enumerate(steps)}
    for number, resumed in enumerate(zip(*run_ranks(resume_at_each, 2, steps, states), strict=True)):
        assert list(resumed) == [straight for _, _, straight in states[steps[number]]]


def test_another_number_of_ranks_begins_a_period() -> None:
    states = run_ranks(resume, 2, 8, STREAMING, None)
    merged = STREAMING.merge_states(copy.deepcopy([state for state, _, _ in states]))
    for number, fragment in enumerate(merged["fragments"]):
        for name, residual in fragment["payload"]["residuals"].items():
            kept = [state["fragments"][number]["payload"]["residuals"][name] for state, _, _ in states]
            # A message that is on its way is dropped: the weights have the change that it is about.
            for index, (state, _, _) in enumerate(states):
                flight = state["fragments"][number]["flight"]
                if flight is not None and name in flight["changes"]:
                    snapshot = flight["snapshots"][flight["parameters"].index(name)]
                    change = flight["changes"][name] - (snapshot - state["start"][name])
                    kept[index] = kept[index] + change.reshape(-1)
            torch.testing.assert_close(residual, mean_of(kept))
    assert sum(len(fragment["payload"]["residuals"]) for fragment in merged["fragments"]) == 3
    digests = run_ranks(resume, 3, 8, STREAMING, [(merged, states[0][1], None)])
    assert len({each[0] for each in digests}) == 3


def test_another_number_of_fragments_is_refused() -> None:
    states = run_ranks(resume, 2, 3, STREAMING, None)
    for message in run_ranks(resume, 2, 3, LocalSGD(k_steps=6, begin_step=0, num_fragments=2), states):
        assert "num_fragments=3, and this is 2" in message


def add_a_group() -> tuple[list[list[str]], str]:
    parameters = make_parameters({"a": (40,), "b": (30,)})
    optimizer = torch.optim.SGD(parameters.values(), lr=0.05)
    late = make_parameters({"late": (5,)})
    worker = LocalSGD(k_steps=4, begin_step=0, num_fragments=2).attach(optimizer, [*parameters.items(), *late.items()])
    train_on(worker, parameters, range(3))
    optimizer.add_param_group({"params": list(late.values())})
    train_on(worker, {**parameters, **late}, range(3, 8))
    return [[worker._name(p) for p in f.parameters] for f in worker._fragments], digest(late.values())


def test_parameters_that_come_later_join_a_fragment() -> None:
    (fragments, first), (_, second) = run_ranks(add_a_group, 2)
    assert fragments == [["a"], ["b", "late"]]
    assert first == second


@pytest.mark.parametrize(
    ("choices", "word"),
    [
        ({"num_fragments": 0}, "num_fragments=0"),
        ({"num_fragments": 9}, "k_steps=8"),
        ({"num_fragments": 2, "rule": "fleet"}, "fixed period"),
        ({"num_fragments": 2, "node_k_steps": 2}, "fixed period"),
        ({"mixing": 0.5}, "delay_steps"),
        ({"mixing": 1.5, "delay_steps": 1}, "mixing=1.5"),
        ({"delay_steps": "soon"}, "'auto'"),
        ({"delay_steps": "auto", "value_dtype": "bfloat16"}, "delay_steps > 0"),
    ],
)
def test_what_cannot_be_is_refused(choices: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigurationError, match=word):
        LocalSGD(**choices)


def test_more_fragments_than_tensors_are_refused() -> None:
    weight = Parameter(torch.zeros(2))
    with pytest.raises(ConfigurationError, match="1 tensors"):
        LocalSGD(num_fragments=2).attach(torch.optim.SGD([weight], lr=0.1), [("w", weight)])
