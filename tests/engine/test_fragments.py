"""Streaming: each fragment has its own turn, and is otherwise local SGD as ever."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning_lowbw.engine.merging import merge_states
from torch.nn import Parameter

from lightning_lowbw import Compression, ConfigurationError, LocalSGD
from lightning_lowbw.engine.method import Method
from lightning_lowbw.engine.presets import preset
from lightning_lowbw.engine.replicas import ReplicaWorker
from lightning_lowbw.where.agreement import digest
from lightning_lowbw.where.ledger import all_reduce_bytes
from tests.engine.problem import AWKWARD, NODES, Parameters, make_parameters, weights_of
from tests.engine.replica_problem import (
    CLOSE,
    OPTIMIZERS,
    SHAPES,
    SPARSE,
    SPARSE_STEPS,
    attach,
    by_oracle,
    by_sparse_oracle,
    flat_groups,
    run_each,
    set_weights,
    train,
    train_on,
    with_base,
)
from tests.local_oracle import mean_of
from tests.ranks import run_ranks

STEPS = 17


def phase_of(fragment: int, num_fragments: int, k: int) -> int:
    return k - round((fragment + 1) * k / num_fragments)


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
TWO_LEVELS = ("plain", "streaming diloco")


def check(results: list[dict[str, Any]], optimizer: str, groups: Sequence[Sequence[int]], case: str) -> None:
    choices, oracle_choices = CASES[case]
    num_fragments = choices.get("num_fragments", 1)
    names = results[0]["fragments"]
    assert sorted(name for members in names for name in members) == sorted(AWKWARD)
    assert all(result["fragments"] == names for result in results)
    applied = [0] * STEPS
    for fragment, members in enumerate(names):
        phase = phase_of(fragment, num_fragments, choices["k_steps"])
        for name in members:
            oracle = by_oracle(name, groups, optimizer, steps=STEPS, begin=0, phase=phase, **oracle_choices)
            for number, ranks in enumerate(groups):
                for rank in ranks:
                    torch.testing.assert_close(
                        results[rank]["own"][name], oracle.replicas[number].detach(), **CLOSE, msg=f"{name} {rank}"
                    )
        for step in oracle.averaged_at:
            applied = [n + (at >= step + oracle.delay) for at, n in enumerate(applied, start=1)]
    assert all(result["averages"] == applied for result in results)


def fragment_method(case: str) -> Method:
    return LocalSGD(begin_step=0, **CASES[case][0])


SPARSE_CHOICES = {delay: {"k_steps": 4, "num_fragments": 2, "delay_steps": delay} for delay in (0, 2)}


@functools.cache
def results_of(num_ranks: int, optimizer: str) -> dict[str, list[Any]]:
    """Start the ranks once for all cases."""
    calls = {case: partial(train, fragment_method(case), optimizer, steps=STEPS) for case in CASES}
    calls["one"] = partial(train, LocalSGD(k_steps=4, begin_step=0, num_fragments=1), optimizer, steps=STEPS)
    calls["none"] = partial(train, LocalSGD(k_steps=4, begin_step=0), optimizer, steps=STEPS)
    for delay, choices in SPARSE_CHOICES.items():
        method = LocalSGD(**with_base({**choices, "compression": {"value_dtype": "int2"}}))
        calls[f"sparse, delay {delay}"] = partial(train, method, optimizer, shapes=SHAPES, steps=SPARSE_STEPS)
    return run_each(num_ranks, calls)


@pytest.mark.parametrize(("optimizer", "num_ranks"), [("sgd", 3), ("adamw", 2)])
@pytest.mark.parametrize("case", CASES)
def test_each_fragment_equals_replicas_in_one_process(case: str, optimizer: str, num_ranks: int) -> None:
    check(results_of(num_ranks, optimizer)[case], optimizer, flat_groups(num_ranks), case)


def test_on_two_levels() -> None:
    groups = NODES["strided"]
    results = run_each(
        4, {case: partial(train, fragment_method(case), nodes=groups, steps=STEPS) for case in TWO_LEVELS}
    )
    for case in TWO_LEVELS:
        check(results[case], "sgd", groups, case)


def test_one_fragment_is_local_sgd() -> None:
    results = results_of(2, "adamw")
    assert results["one"][0]["digests"] == results["none"][0]["digests"]


@pytest.mark.parametrize("delay", SPARSE_CHOICES)
def test_sparse_fragments_are_to_the_bit(delay: int) -> None:
    results = results_of(2, "adamw")[f"sparse, delay {delay}"]
    for fragment, members in enumerate(results[0]["fragments"]):
        for name in set(members) & set(SPARSE):
            phase = phase_of(fragment, 2, 4)
            oracle = by_sparse_oracle(
                name, "adamw", flat_groups(2), value_dtype="int2", phase=phase, delay=delay, steps=SPARSE_STEPS
            )
            for rank in (0, 1):
                assert torch.equal(results[rank]["own"][name], oracle.replicas[rank].detach())
                assert torch.equal(-results[rank]["residuals"][name], oracle.e[rank])


# What it is for ----------------------------------------------------------------------------------------------------

CONTROL = all_reduce_bytes(4 * (6 + 2 * 2), 2)  # the control message of each average, on two ranks


def sent_by_step(numels: Sequence[int], steps: int, method: Method) -> list[int]:
    parameters = [Parameter(torch.zeros(numel)) for numel in numels]
    worker = method.attach(torch.optim.SGD(parameters, lr=0.0), [])
    sent = [0]
    for _ in range(steps):
        worker.optimizer.step()
        sent.append(worker.peers.ledger.sent_bytes)
    return [after - before for before, after in pairwise(sent)]


def test_the_peak_of_the_traffic_is_divided_by_the_number_of_fragments() -> None:
    numels = [1000 + number for number in range(24)]
    mixed = [8192, 4096] + [100] * 20  # of which the small are sent whole: most of the bytes
    calls = {f"whole {n}": partial(sent_by_step, numels, 16, LocalSGD(8, 0, num_fragments=n)) for n in (1, 4)}
    for n in (1, 2):
        sparse = LocalSGD(2, 0, num_fragments=n, compression=Compression())
        calls[f"sparse {n}"] = partial(sent_by_step, mixed, 2, sparse)
    results = {name: by_rank[0] for name, by_rank in run_each(2, calls).items()}
    whole, parts = results["whole 1"], results["whole 4"]
    assert [step for step, nbytes in enumerate(whole, start=1) if nbytes] == [8, 16]
    assert [step for step, nbytes in enumerate(parts, start=1) if nbytes] == [2, 4, 6, 8, 10, 12, 14, 16]
    assert sum(parts) == sum(whole) + (8 - 2) * CONTROL
    assert max(parts) - CONTROL < 1.01 * (max(whole) - CONTROL) / 4
    # Balanced by the bytes that are sent, not by elements.
    assert max(results["sparse 2"]) - CONTROL < 1.05 * (max(results["sparse 1"]) - CONTROL) / 2


def fragments_of(value_dtype: str) -> list[int]:
    """Return the bytes of float64 tensors, which are sent whole, by fragment."""
    parameters = [Parameter(torch.zeros(1600)), *(Parameter(torch.zeros(100, dtype=torch.float64)) for _ in range(4))]
    method = LocalSGD(k_steps=2, begin_step=0, num_fragments=2, value_dtype=value_dtype)
    worker: Any = method.attach(torch.optim.SGD(parameters, lr=0.1), [])
    return [sum(p.dtype == torch.float64 for p in fragment.parameters) for fragment in worker.fragments]


def test_narrow_fragments_are_balanced_by_the_bytes_that_they_send() -> None:
    """1600 values in 4 bits are as many bytes as 100 in float64, and in float32 as many as 800."""
    results = run_each(2, {name: partial(fragments_of, name) for name in ("float32", "int4")})
    assert results == {"float32": [[0, 4]] * 2, "int4": [[1, 3]] * 2}


# tau from measured times -------------------------------------------------------------------------------------------


def choose_delay(numel: int, sleep_s: float) -> dict[str, Any]:
    parameters = [Parameter(torch.zeros(numel)), Parameter(torch.zeros(numel))]
    optimizer = torch.optim.SGD(parameters, lr=0.0)
    method = LocalSGD(k_steps=6, begin_step=0, num_fragments=2, delay_steps="auto")
    worker: Any = method.attach(optimizer, [])
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
    # begun in steps 15 and 18, they are applied later
    assert [step for step in range(13, 22) if first["averages"][step - 1] > first["averages"][step - 2]] == [
        step + chosen for step in (15, 18, 21) if step + chosen < 22
    ]


def measure(states: Sequence[Any], steps: range) -> tuple[list[bool], Any]:
    """Return after which steps a delay has been chosen, and the state."""
    worker, parameters = start(LocalSGD(k_steps=4, begin_step=0, num_fragments=2, delay_steps="auto"))
    if states:
        worker.load_state_dict(merge_states(copy.deepcopy(states)))
    are_chosen = []
    for step in steps:
        train_on(worker, parameters, [step])
        are_chosen.append(worker.delay.chosen is not None)
    return are_chosen, copy.deepcopy(worker.state_dict())


def test_another_world_times_no_first_average() -> None:
    """Which pays for connections, also where the averages have a high number: each fragment is timed in its second."""
    first = run_ranks(measure, 2, [], range(16))
    again = run_ranks(measure, 3, [state for _, state in first], range(16, 32))
    assert {tuple(are_chosen) for are_chosen, _ in first + again} == {(False,) * 7 + (True,) * 9}


# A payload that is replaced ------------------------------------------------------------------------------------------


def replace_the_payload(at: int, is_recalled: bool) -> tuple[int, str]:
    """Send other bits from a step on; return how many averages are in progress then, and a digest of the consensus."""
    worker, parameters = start(STREAMING)
    train_on(worker, parameters, range(at))
    num_begun = sum(fragment.work is not None for fragment in worker.fragments)
    worker.method = STREAMING.replace(value_dtype="int4")
    train_on(worker, parameters, range(at, at + 1))
    if is_recalled:
        worker.recall()
    train_on(worker, parameters, range(at + 1, 20))
    with worker.consensus():
        return num_begun, digest(parameters.values())


def test_an_average_in_progress_is_read_as_it_was_sent() -> None:
    calls = {f"{at}, {is_recalled}": (at, is_recalled) for at in (8, 9, 10) for is_recalled in (False, True)}
    results = run_each(2, {name: partial(replace_the_payload, *case) for name, case in calls.items()})
    assert max(num_begun for (num_begun, _), _ in results.values()) == 2
    for first, second in results.values():
        assert first == second


# State -------------------------------------------------------------------------------------------------------------

FEW = {"a": (40,), "b": (30, 2), "c": (17,)}
STREAMING = LocalSGD(k_steps=6, begin_step=0, num_fragments=3, delay_steps=3, compression=Compression(min_numel=1))


def start(method: Method) -> tuple[ReplicaWorker, Parameters]:
    return attach(method, "sgd", FEW)


def stop(at: int) -> tuple[dict[str, Any], dict[str, torch.Tensor], list[str]]:
    worker, parameters = start(STREAMING)
    train_on(worker, parameters, range(at))
    state = copy.deepcopy(worker.state_dict())
    with worker.consensus():
        shown = weights_of(parameters)
    return state, shown, train_on(worker, parameters, range(at, 20))


def resume(at: int, method: Method, stopped: Sequence[Any]) -> list[str] | str:
    worker, parameters = start(method)
    state, shown, _ = stopped[dist.get_rank() % len(stopped)]
    set_weights(parameters, shown)
    try:
        worker.load_state_dict(copy.deepcopy(state))
    except ConfigurationError as error:
        return str(error)
    return train_on(worker, parameters, range(at, 20))


@functools.cache
def stopped_at() -> dict[str, list[Any]]:
    return run_each(2, {str(at): partial(stop, at) for at in (1, 3, 5, 8)})


def test_resume_with_several_averages_that_have_been_begun() -> None:
    stopped = stopped_at()
    fragments = [fragment["work"] for state, _, _ in stopped["8"] for fragment in state["fragments"]]
    assert sum(work is not None for work in fragments) >= 2, "the case has no average in progress"
    resumed = run_each(2, {at: partial(resume, int(at), STREAMING, states) for at, states in stopped.items()})
    for at, digests in resumed.items():
        assert digests == [straight for _, _, straight in stopped[at]]
    fewer = LocalSGD(k_steps=6, begin_step=0, num_fragments=2)
    for message in run_ranks(resume, 2, 3, fewer, stopped["3"]):
        assert "num_fragments=3, and this is 2" in message


def test_another_number_of_ranks_begins_a_period() -> None:
    states = stopped_at()["8"]
    merged = merge_states(copy.deepcopy([state for state, _, _ in states]))
    assert set(merged["residuals"]) == set(FEW)
    num_dropped = 0
    for name, residual in merged["residuals"].items():
        kept = [state["residuals"][name] for state, _, _ in states]
        # An average that has been begun is dropped: the weights have the change that it is about.
        for index, (state, _, _) in enumerate(states):
            for work in [fragment["work"] for fragment in state["fragments"] if fragment["work"] is not None]:
                if name in work["changes"]:
                    num_dropped += 1
                    snapshot = work["snapshots"][work["parameters"].index(name)]
                    change = work["changes"][name].reshape(-1) - (snapshot - state["start"][name]).reshape(-1)
                    kept[index] = kept[index] + change
        torch.testing.assert_close(residual, mean_of(kept))
    assert num_dropped
    digests = run_ranks(resume, 3, 8, STREAMING, [(merged, states[0][1], None)])
    assert len({each[0] for each in digests}) == 3


def add_a_group() -> tuple[list[list[str]], str]:
    parameters = make_parameters({"a": (40,), "b": (30,)})
    optimizer = torch.optim.SGD(parameters.values(), lr=0.05)
    late = make_parameters({"late": (5,)})
    worker: Any = LocalSGD(k_steps=4, begin_step=0, num_fragments=2).attach(
        optimizer, [*parameters.items(), *late.items()]
    )
    train_on(worker, parameters, range(3))
    optimizer.add_param_group({"params": list(late.values())})
    train_on(worker, {**parameters, **late}, range(3, 8))
    return [[worker.name_of(p) for p in f.parameters] for f in worker.fragments], digest(late.values())


def test_parameters_that_come_later_join_a_fragment() -> None:
    (fragments, first), (_, second) = run_ranks(add_a_group, 2)
    assert fragments == [["a"], ["b", "late"]]
    assert first == second


def streams(num_tensors: int, num_fragments: Any) -> tuple[int, int]:
    parameters = make_parameters({f"p{number}": (6,) for number in range(num_tensors)})
    optimizer = torch.optim.SGD(parameters.values(), lr=0.05)
    method = preset("streaming_diloco").replace(k_steps=5, num_fragments=num_fragments, delay_steps=1)
    worker: Any = method.attach(optimizer, parameters.items())
    train_on(worker, parameters, range(12))
    return len(worker.fragments), worker.num_averages


def test_a_preset_takes_no_more_fragments_than_there_are_tensors() -> None:
    for num_tensors, expected in ((1, 1), (3, 3), (6, 4)):
        for num_fragments, num_averages in run_ranks(streams, 2, num_tensors, "auto"):
            assert num_fragments == expected
            assert num_averages >= 2 * expected, "12 steps, each fragment every 5"
    with pytest.raises(AssertionError, match="num_fragments=4, and the optimizer has 3 tensors: give at most as many"):
        run_ranks(streams, 1, 3, 4)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_no_fragment_is_empty(optimizer: str) -> None:
    worker, _ = attach(LocalSGD(k_steps=4, num_fragments=4), optimizer)
    assert all(fragment.parameters for fragment in worker.fragments)
    assert sum(fragment.takes_buffers for fragment in worker.fragments) == 1
