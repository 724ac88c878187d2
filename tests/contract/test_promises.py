"""What every method promises, in a plain loop on real ranks: one test a promise, one row a method."""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_lowbw import EveryK, EveryStep, LowRank, Method, Quantized, TopK, Whole
from lightning_lowbw.comm.agreement import digest
from lightning_lowbw.comm.collectives import TrafficLedger, all_reduce_bytes
from lightning_lowbw.sync.state import merge_states
from tests.contract.rows import ROWS, Row
from tests.contract.training import STEPS, STOPS, attach, backward_of, count, looked_at, step, trained
from tests.contract.volumes import FLOAT_BYTES, NUMEL, Volumes, wire_bytes
from tests.ranks import run_ranks
from tests.sync.problem import AWKWARD, CLOSE, Parameters, backward, in_memory, loss_of, make_parameters, weights_of

EVERY_ROW = pytest.mark.parametrize("name", list(ROWS))


@EVERY_ROW
def test_replicas_are_equal_after_each_synchronisation(name: str) -> None:
    row = ROWS[name]
    results = trained(name)
    ends = {result.weights[-1] for result in results}
    assert len(ends) == 1, "the ranks end with different weights"
    assert all(result.has_moved for result in results)
    by_step = [len({result.weights[number] for result in results}) for number in range(STEPS)]
    if row.method.when.averages_weights:
        assert max(by_step) > 1, "no step was local"
    else:
        assert by_step == [1] * STEPS, "replicas differ after a step"


@EVERY_ROW
def test_the_ledger_has_the_bytes_of_each_collective(name: str) -> None:
    """By the formulas of the collectives and the tensors that they were given, in the steps and in `finish`."""
    for result in trained(name):
        assert result.sent_bytes == result.given_bytes > 0
        assert result.dense_bytes == STEPS * all_reduce_bytes(FLOAT_BYTES * NUMEL, ROWS[name].num_ranks)


@EVERY_ROW
def test_measured_bytes_are_those_of_the_payload_s_formula(name: str) -> None:
    row = ROWS[name]
    for result in trained(name):
        turns = turns_of(row.method.when, result.k_steps) if isinstance(row.method.when, EveryK) else []
        expected = wire_bytes(row, STEPS, turns, result.fragments)
        is_late = row.method.when.delay_steps and row.method.where.topology != "flat"  # counted when they have arrived
        assert result.wire_bytes[-1 if is_late else 0 :] == expected[-1 if is_late else 0 :]


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if not row.method.when.averages_weights])
def test_a_step_waits_only_for_messages_that_depend_on_one_another(name: str) -> None:
    """Status and whole tensors go in the first one; a second one has means of what the first has brought."""
    row = ROWS[name]
    what, num_nodes = row.method.what, Volumes(row).num_participants
    num = 2 if isinstance(what, LowRank) or (isinstance(what, Quantized) and num_nodes > 2) else 1
    for result in trained(name):
        assert result.num_messages[row.method.when.begin_step :] == [num] * (STEPS - row.method.when.begin_step)


PLAIN_LR = 0.05
KEPT_WHOLE: dict[str, Any] = {"decay": 1.0, "mean_over": "ranks"}  # else residuals fade, or a sum is divided otherwise
CONSERVED = [name for name, row in ROWS.items() if getattr(row.method.when, "outer", "none") == "none"]


def flat_in_rows(tensor: Tensor, _: str) -> Tensor:
    return tensor.reshape(-1)


def step_plainly(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """Train by plain SGD; return the weights, what this rank's steps have asked of them (both flat, in the order of the
    residuals) and the state of the method."""
    row = ROWS[name]
    in_order = flat_in_rows if row.method.when.averages_weights else in_memory
    method = row.method.replace(**KEPT_WHOLE) if isinstance(row.method.what, TopK) else row.method
    worker, parameters, _ = attach(Row(method, functools.partial(torch.optim.SGD, lr=PLAIN_LR), row.num_ranks))
    asked = {key: in_order(parameter.detach().double(), key) for key, parameter in parameters.items()}
    for number in range(STEPS):
        backward_of(worker, parameters, number)
        for key, parameter in parameters.items():
            assert parameter.grad is not None
            asked[key] = asked[key] - PLAIN_LR * in_order(parameter.grad.double(), key)
        worker.optimizer.step()
    state = worker.state_dict()  # where an average is in progress, it is not applied any more
    worker.finish()
    return {key: in_order(each.detach(), key) for key, each in parameters.items()}, asked, state


@pytest.mark.parametrize("name", CONSERVED)
def test_what_is_applied_and_what_is_kept_is_all_there_was(name: str) -> None:
    """Sent + residual == signal, in the mean of the participants: nothing is lost, and nothing is applied twice."""
    results = run_ranks(step_plainly, ROWS[name].num_ranks, name)
    merged = merge_states(state for _, _, state in results)
    of_kept = 1.0 if ROWS[name].method.when.averages_weights else -PLAIN_LR  # changes of weights are kept, or gradients
    for key, weight in results[0][0].items():
        there = weight.double() + of_kept * merged["residuals"].get(key, torch.zeros(())).double()
        asked = torch.stack([each[key] for _, each, _ in results]).mean(0)
        torch.testing.assert_close(there, asked, rtol=1e-5, atol=2e-6)
    keeps_back = not isinstance(ROWS[name].method.what, Whole)
    assert any(each.any() for each in merged["residuals"].values()) == keeps_back


AVERAGING = [name for name, row in ROWS.items() if row.method.when.averages_weights]


def turns_of(when: EveryK, k_steps: list[int]) -> list[tuple[int, int, int]]:
    """Return, in order, after which step an average is begun, of which fragment, and after which step it is applied.

    Steps are counted from 1.

    Args:
        k_steps: the period in use in each step.
    """
    turns = []
    assert isinstance(when.begin_step, int)
    assert isinstance(when.delay_steps, int)
    assert isinstance(when.num_fragments, int)
    for fragment in range(when.num_fragments):
        last = when.begin_step + round((fragment + 1) * when.k_steps / when.num_fragments) - when.k_steps
        for now in range(when.begin_step + 1, STEPS + 1):
            if now - last == k_steps[now - 1]:
                turns.append((now, fragment, now + when.delay_steps))
                last = now
    return sorted(turns)


@pytest.mark.parametrize("name", AVERAGING)
def test_the_average_number_j_comes_after_step_begin_plus_j_times_k(name: str) -> None:
    """Of each fragment, with its own begin, and a delay later; with another rule than "fixed" by the k it reports."""
    when, results = ROWS[name].method.when, trained(name)
    assert isinstance(when, EveryK)
    assert isinstance(when.begin_step, int)
    ks = results[0].k_steps
    assert all(result.k_steps == ks for result in results)
    assert ks[: when.begin_step + 1] == [1] * when.begin_step + [when.k_steps]
    assert (len(set(ks[when.begin_step :])) == 1) == (when.rule == "fixed"), "the rule adapts nothing"
    turns = turns_of(when, ks)
    expected = [sum(applied <= now for _, _, applied in turns) for now in range(1, STEPS + 1)]
    assert all(result.num_averages == expected for result in results)
    if when.delay_steps == 0 and when.num_fragments == 1:  # else no replica is ever the same as the others
        due = [now <= when.begin_step or now in {begun for begun, _, _ in turns} for now in range(1, STEPS + 1)]
        assert [len({result.weights[number] for result in results}) == 1 for number in range(STEPS)] == due


@EVERY_ROW
def test_looking_changes_nothing(name: str) -> None:
    for (result, _), expected in zip(looked_at(name), trained(name), strict=True):
        assert (result.weights, result.everything) == (expected.weights, expected.everything)


@pytest.mark.parametrize("name", AVERAGING)
def test_all_ranks_are_shown_the_last_average(name: str) -> None:
    when, shown = ROWS[name].method.when, [result.shown for result, _ in looked_at(name)]
    assert all(each == shown[0] for each in shown)
    assert isinstance(when, EveryK)
    assert isinstance(when.begin_step, int)
    averages = trained(name)[0].num_averages
    changes = [number < when.begin_step or averages[number] > averages[number - 1] for number in range(1, STEPS)]
    assert [now != before for before, now in pairwise(shown[0])] == changes


@EVERY_ROW
@pytest.mark.parametrize("stop", STOPS)
def test_a_run_that_is_stopped_in_mid_interval_resumes_to_the_bit(name: str, stop: int) -> None:
    """Once with another default dtype: what the package allocates says what it is."""
    when = ROWS[name].method.when
    for (_, resumed), straight in zip(looked_at(name), trained(name), strict=True):
        turns = turns_of(when, straight.k_steps) if isinstance(when, EveryK) else []
        if any(begun <= stop < applied for begun, _, applied in turns):  # an average in progress is begun anew
            assert len(resumed[stop]) == len(straight.everything[stop:])
        else:
            assert resumed[stop] == straight.everything[stop:]


def plain(name: str) -> list[str]:
    parameters = make_parameters(AWKWARD)
    optimizer = ROWS[name].optimizer(parameters.values())
    digests = []
    for number in range(STEPS):
        optimizer.zero_grad()
        backward(parameters, number)
        optimizer.step()
        digests.append(digest(parameters.values()))
    return digests


def train_alone(name: str) -> list[str]:
    """Train on one rank, with or without a process group; return digests of the weights."""
    worker, parameters, buffers = attach(ROWS[name])
    volumes, digests = list[int](), []
    if dist.is_initialized():
        count(volumes)
    for number in range(STEPS):
        assert worker.plan.clip_factor == 1.0
        step(worker, parameters, buffers, number)
        assert worker.metrics(True).get("density", 1.0) == 1.0
        digests.append(digest(parameters.values()))
    worker.finish()
    state = worker.state_dict()
    assert not volumes
    assert worker.peers.ledger == TrafficLedger(steps=STEPS)
    assert not state["residuals"]
    return digests


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if not row.method.acts_alone])
def test_one_rank_is_plain_training(name: str) -> None:
    assert run_ranks(train_alone, 1, name) == [plain(name)]
    assert train_alone(name) == plain(name)


class Problem(torch.nn.Module):
    """The problem as a module, for DDP."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__()
        self.by_name = parameters
        for name, parameter in parameters.items():
            self.register_parameter(name, parameter)

    def forward(self, number: int) -> Tensor:
        return loss_of(self.by_name, number)


DDP_STEPS = 5  # to be sparse in, or local


def limits_of(row: Row) -> list[Method]:
    """Return the methods beside a row's in which nothing is compressed, and no step is local."""
    method = row.method
    if isinstance(method.what, TopK) and isinstance(method.when, EveryStep):
        dense_stair = method.replace(rampup_begin_step=0, rampup_step=1, sparsity=(0.0,))
        return [method.replace(rampup_begin_step=STEPS), dense_stair]
    if isinstance(method.what, Whole):
        return [Method(when=EveryK(k_steps=1), where=method.where) if method.when.averages_weights else method]
    return []  # few bits have no such limit, and Method refuses k_steps=1 where changes are sent


def train_beside_ddp(name: str) -> tuple[dict[str, Tensor], list[dict[str, Tensor]], str]:
    twins = make_parameters(AWKWARD)
    wrapped, optimizer = DistributedDataParallel(Problem(twins)), ROWS[name].optimizer(twins.values())
    for number in range(DDP_STEPS):
        optimizer.zero_grad()
        wrapped(number).backward()
        optimizer.step()
    limits = []
    for method in limits_of(ROWS[name]):
        worker, parameters, buffers = attach(Row(method, ROWS[name].optimizer, ROWS[name].num_ranks))
        for number in range(DDP_STEPS):
            step(worker, parameters, buffers, number)
        limits.append(weights_of(parameters))
    return weights_of(twins), limits, digest(twins.values())


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if limits_of(row)])
def test_density_1_and_k_steps_1_are_ddp(name: str) -> None:
    """With every optimizer. To the bit on two ranks, where a sum has one order."""
    results = run_ranks(train_beside_ddp, ROWS[name].num_ranks, name)
    for expected, limits, of_ddp in results:
        for weights in limits:
            for key, weight in weights.items():
                tolerance = {"rtol": 0.0, "atol": 0.0} if ROWS[name].num_ranks == 2 else CLOSE
                torch.testing.assert_close(weight, expected[key], **tolerance)
        if ROWS[name].method not in limits_of(ROWS[name]):
            assert trained(name)[0].weights[DDP_STEPS - 1] != of_ddp, "the method itself is DDP"
