"""Stop and go on in another world, with another method or model: what is kept is the same, or it is said why not.

That the same ranks resume to the bit is in `tests/contract`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD, AdamW

import lightning_lowbw as lowbw
from lightning_lowbw.comm.agreement import digest
from lightning_lowbw.sync.gradient import GradientSync
from lightning_lowbw.sync.state import merge_states
from tests.ranks import on_ranks
from tests.sync import problem
from tests.sync.problem import (
    ADAMW,
    BASE,
    FLAT,
    NODES,
    OF_REPLICAS,
    THREE,
    Nodes,
    Parameters,
    attach,
    with_base,
)

SHAPES = {"large": (40, 30), "conv": (8, 4, 3, 3), "single": (1,), "bias": (7,)}
LR = 0.05
GRADIENTS: dict[str, tuple[lowbw.Method, Any]] = {
    "dgc": (lowbw.DGC(sparsity=[0.95], min_numel=1, value_dtype="float32"), partial(SGD, lr=LR)),
    "dgc momentum": (lowbw.DGC(sparsity=[0.95], min_numel=100), partial(SGD, lr=LR, momentum=0.9)),
    "dgc adamw": (lowbw.DGC(sparsity=[0.95], min_numel=100), partial(AdamW, lr=LR)),
    "int8": (lowbw.QuantizedGradients(), partial(SGD, lr=LR)),
    "powersgd": (lowbw.PowerSGD(1), partial(SGD, lr=LR)),
}
REPLICAS = {
    "sparse": lowbw.LocalSGD(4, 0, compression=lowbw.Compression(**BASE)),
    "int4": lowbw.LocalSGD(4, 0, compression="int4"),
    "slowmo": lowbw.LocalSGD(4, 0, outer="slowmo"),
    "streaming": lowbw.LocalSGD(4, 0, outer="nesterov", num_fragments=2, delay_steps=2, compression={"min_numel": 1}),
}
STOP = 6


def begin(name: str, nodes: Nodes) -> tuple[Any, Parameters]:
    topology: Any = nodes if len(nodes[0]) > 1 else "flat"
    if name in REPLICAS:
        return attach(REPLICAS[name], ADAMW, OF_REPLICAS, topology)
    return attach(*GRADIENTS[name], SHAPES, topology)


def stop(name: str, nodes: Nodes) -> tuple[dict[str, Any], dict[str, Any], dict[str, Tensor]]:
    """Return the state of each rank; of the optimizer and of the weights what a checkpoint has."""
    worker, parameters = begin(name, nodes)
    problem.train_on(worker, parameters, range(STOP))
    state, of_optimizer = copy.deepcopy(worker.state_dict()), copy.deepcopy(worker.optimizer.state_dict())
    worker.finish()
    states: list[tuple[Any, Any]] = [({}, {})] * dist.get_world_size()
    dist.all_gather_object(states, (state, worker.state_dict()))
    before, after = (merge_states(each)["residuals"] for each in zip(*states, strict=True))
    for key, residual in after.items():  # also of an average that was in progress
        torch.testing.assert_close(residual, before[key], rtol=1e-5, atol=1e-6)
    return state, of_optimizer, problem.weights_of(parameters)


def go_on(name: str, nodes: Nodes, state: Any, of_optimizer: Any, weights: dict[str, Tensor]) -> dict[str, Any]:
    worker, parameters = begin(name, nodes)
    problem.set_weights(parameters, weights)
    if name in GRADIENTS:
        worker.optimizer.load_state_dict(copy.deepcopy(of_optimizer))
    worker.load_state_dict(copy.deepcopy(state))  # which the ranks have in shared memory
    again = copy.deepcopy(worker.state_dict())
    problem.train_on(worker, parameters, range(STOP, STOP + 4))
    worker.finish()
    moved = {key: not each.equal(weights[key]) for key, each in parameters.items() if each.numel()}
    return {"state": again, "moved": all(moved.values()), "after": digest(parameters.values()), "step": worker.step}


@pytest.mark.parametrize(
    ("before", "after"), [(THREE, NODES["blocks"]), (NODES["crossed"], FLAT)], ids=["3 to nodes", "nodes to 2"]
)
def test_another_world_keeps_the_mean_of_what_was_unsent(before: Nodes, after: Nodes) -> None:
    names = [*(name for name in GRADIENTS if name != "dgc"), *REPLICAS]
    stopped = problem.run_each(sum(map(len, before)), {name: partial(stop, name, before) for name in names})
    merged = {name: merge_states(copy.deepcopy([state for state, _, _ in stopped[name]])) for name in names}
    calls = {name: partial(go_on, name, after, merged[name], *stopped[name][0][1:]) for name in names}
    for name, results in problem.run_each(sum(map(len, after)), calls).items():
        states, whole = [state for state, _, _ in stopped[name]], merged[name]
        assert bool(whole["residuals"]) == (name != "slowmo")
        for key, mean in whole["residuals"].items():
            # With `LowRank` each rank of a node keeps the whole tensor.
            nodes = tuple((node[0],) for node in before) if name == "powersgd" else before
            kept = problem.mean_of_nodes([state["residuals"][key] for state in states], nodes)
            torch.testing.assert_close(mean, kept, rtol=1e-5, atol=1e-6, msg=f"{name} {key}")
            assert mean.any() or mean.numel() < 20
        again = merge_states([result["state"] for result in results])
        for kind in ("residuals", "velocities", "local"):
            for key, value in whole.get(kind, {}).items():
                there = again[kind][key]
                if kind == "local":  # of G^2 / N
                    factor = len(before) / len(after)
                    value, there = value["exp_avg_sq"] * factor, there["exp_avg_sq"]
                torch.testing.assert_close(there, value, rtol=1e-5, atol=1e-7, msg=f"{name} {kind} {key}")
        for index, entry in whole.get("optimizer", {"state": {}})["state"].items():  # of replicas: the mean
            for moment in ("exp_avg", "exp_avg_sq"):
                mean = sum(state["optimizer"]["state"][index][moment] for state in states) / len(states)
                torch.testing.assert_close(entry[moment], mean)
        assert len({result["after"] for result in results}) == 1, "replicas differ at the end"
        assert all(result["moved"] and result["step"] == STOP + 4 for result in results), name


# One participant ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", ["flat", ((0, 1),)], ids=["one rank", "one node"])
def test_one_participant_takes_no_residuals(nodes: Any) -> None:
    """A single participant sends nothing: what was kept would be lost."""
    stopped = problem.run_each(2, {name: partial(stop, name, FLAT) for name in ("dgc", "int8")})
    for name, results in stopped.items():
        merged = merge_states([state for state, _, _ in results])
        said = problem.run_each(1 if nodes == "flat" else 2, {name: partial(refused_alone, name, merged, nodes)})
        others = "ranks" if nodes == "flat" else "nodes"
        assert all(f"Resume on at least two {others}" in each for each in said[name]), said


def refused_alone(name: str, state: dict[str, Any], nodes: Any) -> str:
    worker, parameters = attach(*GRADIENTS[name], SHAPES, nodes)
    worker.load_state_dict(state)
    return str(problem.message_of(partial(problem.take_step, worker, parameters, 0), lowbw.ConfigurationError))


# What is not merged, or not loaded ------------------------------------------------------------------------------------


def state_of(step: int = 3, **parts: Any) -> dict[str, Any]:
    """Return the state of a worker that has kept only so much; residuals have the shape of the parameter."""
    residuals = parts.pop("residuals", {})
    usual = {"local_rank": (0, 1), "nodes": None, "num_participants": 2, "small_numel": 1, "exchange": None}
    usual |= {"correction": "momentum", "payload": "TopK", "velocities": {}, "local": {}}
    state: dict[str, Any] = {
        **usual,
        "step": step,
        "shapes": {name: tuple(residual.shape) for name, residual in residuals.items()},
        "orders": {name: tuple(range(residual.dim())) for name, residual in residuals.items()},
        "residuals": {name: residual.reshape(-1) for name, residual in residuals.items()},
    }
    return {**state, **parts}


def twice(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the states of two ranks that have kept the same."""
    return [{**state, "rank": (rank, 2)} for rank in range(2)]


@pytest.mark.parametrize(
    ("ranks", "steps", "message"),
    [
        ([], [], "given nothing"),
        ([(2, 4), (0, 4)], [4, 4], "given rank 2 of 4 after step 4, rank 0 of 4 after step 4"),
        ([(0, 2), (0, 2)], [4, 4], "given rank 0 of 2 after step 4, rank 0 of 2 after step 4"),
        ([(0, 2), (1, 2)], [3, 9], "given rank 0 of 2 after step 3, rank 1 of 2 after step 9"),
    ],
)
def test_only_states_of_all_ranks_at_one_step_are_merged(ranks: list[Any], steps: list[int], message: str) -> None:
    states = [state_of(step, rank=rank) for rank, step in zip(ranks, steps, strict=True)]
    with pytest.raises(lowbw.ConfigurationError, match=rf"{message}.*\. Give it worker.state_dict\(\) of each rank"):
        merge_states(states)


def test_merging_keeps_dtypes_and_copies_and_takes_states_only() -> None:
    velocities = [{"w": torch.tensor([1.0 + 2 * number, 2.0]).bfloat16()} for number in range(2)]
    residuals = [{"w": torch.tensor([1.0, -2.0 * number], dtype=torch.float64)} for number in range(2)]
    states = [state_of(4, rank=(n, 2), residuals=residuals[n], velocities=velocities[n]) for n in range(2)]
    merged = merge_states(states)
    for kind, dtype, values in (("residuals", torch.float64, [1.0, -1.0]), ("velocities", torch.bfloat16, [2.0, 2.0])):
        assert merged[kind]["w"].dtype == dtype
        assert merged[kind]["w"].tolist() == values
    merged["residuals"]["w"].zero_()
    assert states[0]["residuals"]["w"].tolist() == [1.0, 0.0]
    first, second = {0: {"m": torch.tensor([1.0])}}, {0: {"m": torch.tensor([3.0])}, 1: {"m": torch.ones(1)}}
    for state, entries in zip(states, (first, second), strict=True):  # one rank has used the second parameter
        state |= {"num_averages": 1, "start": {}, "fragments": [], "residuals": {}, "optimizer": {"state": entries}}
    for _ in range(2):  # the states stay as they are
        means = merge_states(states)["optimizer"]["state"]
        assert {index: float(entry["m"]) for index, entry in means.items()} == {0: 2.0, 1: 1.0}
    for given in ("state", merged):
        with pytest.raises(lowbw.ConfigurationError, match=f"given a {type(given).__name__} that is no state"):
            merge_states([given])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("renamed", (40, 30), r"'renamed' of shape \(40, 30\), and here it is missing"),
        ("large", (30, 40), r"'large' of shape \(30, 40\), and here it has shape \(40, 30\)"),
        ("conv", (8, 4, 9), r"'conv' of shape \(8, 4, 9\), and here it has shape \(8, 4, 3, 3\)"),
        ("conv", (8, 4, 3, 3), r"\(0, 1, 2, 3\), and it now lies in memory in the order \(0, 2, 3, 1\)"),
    ],
)
def test_the_state_of_another_model_is_refused(name: str, shape: tuple[int, ...], message: str) -> None:
    worker, _ = begin("dgc", FLAT)
    with pytest.raises(lowbw.ConfigurationError, match=message):
        worker.load_state_dict(state_of(residuals={name: problem.make_weight(name, shape)}))


def test_what_another_payload_or_correction_keeps_is_refused() -> None:
    """It would never be sent, or means something else."""
    parameters = problem.make_parameters(SHAPES)
    dgc, narrow = lowbw.DGC(min_numel=1), lowbw.QuantizedGradients()
    of_int8 = {"payload": "Quantized", "correction": "error_feedback"}
    cases: list[tuple[lowbw.Method, Any, dict[str, Any], str]] = [
        (dgc, SGD, of_int8, "Quantized has not sent, and with TopK they"),
        (narrow, SGD, {}, "TopK has not sent, and with Quantized"),
        (lowbw.Method(), SGD, {}, "TopK has not sent, and with Whole"),
        (dgc, AdamW, {}, "'momentum' had not sent, .* with AdamW, which is 'own_variance'"),
    ]
    for method, kind, changes, message in cases:
        worker = method.attach(kind(parameters.values(), lr=0.1), parameters.items())
        with pytest.raises(lowbw.ConfigurationError, match=message):
            worker.load_state_dict(state_of(**changes, residuals={"large": torch.ones(SHAPES["large"])}))
        assert worker.step == 0
        worker.load_state_dict(state_of(**changes))  # in the dense phase they do not differ
        assert worker.step == 3


OTHERWISE: dict[str, tuple[dict[str, Any], dict[str, Any], int, str]] = {
    "whole": (with_base({}), {}, 6, "and with Whole() they never would be"),
    "narrow": (with_base({}), {"compression": "bfloat16"}, 6, ""),
    "other tensors": (with_base({}), with_base({"compression": {"min_numel": 700}}), 6, "min_numel=700"),
    "in mid-round": ({}, with_base({}), 6, ""),
    "outer in mid-round": ({}, {"outer": "nesterov"}, 6, ""),
    "fragments": ({"num_fragments": 2}, {}, 6, "num_fragments=2, and this is 1"),
    "no averages": ({}, {"k_steps": 1}, 6, "no average would ever make them equal"),
    "after a round": ({}, with_base({}), 8, ""),
    "other bits": (with_base({}), with_base({"k_steps": 3, "compression": {"value_dtype": "int8"}}), 6, ""),
    "less delay": (with_base({"delay_steps": 3}), with_base({"delay_steps": 0}), 6, ""),
}


@pytest.mark.parametrize("name", OTHERWISE)
@on_ranks()
def test_what_a_state_keeps_is_not_dropped_by_another_method(name: str) -> None:
    """It is resumed, or it is said why not."""
    first, second, at, words = OTHERWISE[name]
    base: dict[str, Any] = {"k_steps": 4, "begin_step": 0}
    worker, parameters = attach(lowbw.LocalSGD(**base | first), shapes=OF_REPLICAS)
    problem.train_on(worker, parameters, range(at))
    state = copy.deepcopy(worker.state_dict())
    worker.finish()
    worker, shown = attach(lowbw.LocalSGD(**base | second), shapes=OF_REPLICAS)
    problem.set_weights(shown, problem.weights_of(parameters))
    before, refusals = digest(shown.values()), (lowbw.ConfigurationError, lowbw.DisagreementError)
    said = problem.message_of(partial(worker.load_state_dict, state), refusals)
    assert said is None or digest(shown.values()) == before, "a refused state changes nothing"
    if said is None:
        said = problem.message_of(partial(problem.train_on, worker, shown, range(at, problem.STEPS)), refusals)
    assert words in str(said) if words else said is None


@pytest.mark.parametrize("name", ["dgc", "int4"])
@on_ranks(4)
def test_the_state_of_another_rank_or_topology_is_refused(name: str) -> None:
    worker, parameters = begin(name, NODES["blocks"])
    problem.train_on(worker, parameters, range(STOP))
    own, rank = copy.deepcopy(worker.state_dict()), dist.get_rank()
    states = [own]
    dist.broadcast_object_list(states, 0)
    worker.finish()
    crossed, _ = begin(name, NODES["crossed"])
    of_first, of_own = (
        str(problem.message_of(partial(crossed.load_state_dict, state), lowbw.ConfigurationError))
        for state in (*states, own)
    )
    assert rank == 0 or f"The state is that of rank 0 of 4, and this is rank {rank} of 4" in of_first
    assert "on nodes [[0, 1], [2, 3]], and the ranks are now on nodes [[0, 3], [1, 2]]" in of_own


# Layouts, and what is small -------------------------------------------------------------------------------------------


@on_ranks()
def test_what_is_kept_is_that_of_its_parameter() -> None:
    worker, parameters = begin("dgc", FLAT)
    problem.take_step(worker, parameters, 0)
    parameters["conv"].data = parameters["conv"].data.contiguous()
    with pytest.raises(lowbw.ConfigurationError, match=r"format of 'conv' has changed.*model\.to\(memory_format="):
        problem.take_step(worker, parameters, 1)


def test_what_is_small_is_decided_once_and_kept_over_a_resume() -> None:
    """A layer that is unfrozen later is most of the model then; what has been sent sparse must stay so."""
    small, large = problem.make_parameters({"adapter": (50, 40)}), problem.make_parameters({"layer": (2048, 2048)})
    parameters = {**small, **large}
    large["layer"].requires_grad_(False)
    method = lowbw.DGC(sparsity=(0.99,))
    attach_anew = lambda: method.attach(SGD(parameters.values(), lr=0.1), parameters.items())  # noqa: E731
    worker = attach_anew()
    assert isinstance(worker, GradientSync)
    assert worker.params.numels_by_kind(method.what) == ([2000], [])  # type: ignore[arg-type]
    state = worker.state_dict()
    large["layer"].requires_grad_(True)
    resumed = attach_anew()
    assert resumed.params.small_numel == 16384
    for saved in (state, merge_states(twice(state))):
        resumed.load_state_dict(saved)
    for each_worker in (worker, resumed):
        assert each_worker.params.numels_by_kind(method.what) == ([2000, 2048**2], [])  # type: ignore[arg-type]
    assert attach_anew().params.numels_by_kind(method.what) == ([2048**2], [2000])  # type: ignore[arg-type]


# What is saved --------------------------------------------------------------------------------------------------------


def test_param_groups_are_saved_as_plain_values_and_functions_stay_those_of_the_program(tmp_path: Path) -> None:
    """No file may hold a function that is loaded as plain values."""
    worker, _ = attach(REPLICAS["sparse"], shapes=OF_REPLICAS)
    for group in worker.optimizer.param_groups:
        group.update(lr=np.float64(0.05), betas=(np.float32(0.5), 0.9), schedule=[len], note="of the first run")
    torch.save(worker.state_dict(), tmp_path / "shard.pt")
    state = torch.load(tmp_path / "shard.pt", weights_only=True)
    resumed, _ = attach(REPLICAS["sparse"], shapes=OF_REPLICAS)
    for group in resumed.optimizer.param_groups:
        group["schedule"] = [max]
    resumed.load_state_dict(state)
    for group in resumed.optimizer.param_groups:
        assert (group["lr"], group["betas"]) == (0.05, (0.5, 0.9))
        assert (group["schedule"], group["note"]) == ([max], "of the first run")


@on_ranks()
def test_looking_in_inference_mode_changes_nothing() -> None:
    bits: list[list[str]] = [[], []]
    for looks in (False, True):
        worker, parameters = attach(REPLICAS["slowmo"], ADAMW, OF_REPLICAS)
        for step in range(9):
            bits[looks] += problem.train_on(worker, parameters, [step])
            with torch.inference_mode():  # as Lightning evaluates, but not on gloo
                if looks:
                    worker.replica.show()
                    worker.replica.hide()
        worker.finish()
    assert bits[0] == bits[1]
