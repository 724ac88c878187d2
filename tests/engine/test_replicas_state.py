"""The state of local SGD: for other numbers of ranks, of other models, and looked at where nothing may be written."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning_lowbw.engine.merging import merge_states
from torch import Tensor

from lightning_lowbw import ConfigurationError, LocalSGD
from lightning_lowbw.engine.method import Method
from lightning_lowbw.engine.replicas import ReplicaWorker
from lightning_lowbw.where.agreement import digest
from tests.engine.problem import AWKWARD, Parameters, weights_of
from tests.engine.replica_problem import attach, run_each, set_weights, take_step
from tests.ranks import run_ranks

SHAPES = {"conv": AWKWARD["conv"], "matrix": AWKWARD["matrix"], "vector": (17,)}


def start(method: Method, optimizer: str) -> tuple[ReplicaWorker, Parameters]:
    buffers = {"n.running_mean": torch.zeros(2), "n.running_var": torch.ones(2), "n.count": torch.tensor(0)}
    return attach(method, optimizer, SHAPES, named_buffers=buffers)


def bits_of(worker: ReplicaWorker, parameters: Parameters) -> str:
    moments = [v for s in worker.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    buffers = worker.averaging.buffers
    return digest([*parameters.values(), *buffers.floating.values(), *buffers.counts, *moments])


def train_on(worker: ReplicaWorker, parameters: Parameters, steps: range) -> list[str]:
    bits, buffers = [], worker.averaging.buffers
    for step in steps:
        for name, buffer in buffers.floating.items():  # as a forward pass does
            buffer.add_(0.1 * (step + 1 + dist.get_rank() + len(name)))
        take_step(worker, parameters, step)
        bits.append(bits_of(worker, parameters))
    return bits


def look_in_inference_mode(looks: bool) -> list[str]:
    worker, parameters = start(LocalSGD(k_steps=4, begin_step=0), "sgd")
    bits = []
    for step in range(9):
        bits += train_on(worker, parameters, range(step, step + 1))
        with torch.inference_mode():  # as Lightning evaluates, but not on gloo
            if looks:
                worker.consensus_view.show()
                worker.consensus_view.hide()
    return bits


def test_looking_in_inference_mode_changes_nothing() -> None:
    results = run_each(2, {str(looks): partial(look_in_inference_mode, looks) for looks in (False, True)})
    assert results["True"] == results["False"]


def state_in_mid_interval() -> tuple[dict[str, Any], dict[str, Tensor]]:
    worker, parameters = start(LocalSGD(k_steps=4, begin_step=0, outer="slowmo"), "adamw")
    train_on(worker, parameters, range(6))
    state = copy.deepcopy(worker.state_dict())
    with worker.consensus():
        assert worker.state_dict()["own"].keys() == state["own"].keys()
        assert all(torch.equal(own, state["own"][name]) for name, own in worker.state_dict()["own"].items())
        return state, weights_of(parameters)


def start_from(state: dict[str, Any], weights: dict[str, Tensor]) -> dict[str, Any]:
    worker, parameters = start(LocalSGD(k_steps=4, begin_step=0, outer="slowmo"), "adamw")
    set_weights(parameters, weights)
    worker.load_state_dict(copy.deepcopy(state))
    first = weights_of(parameters)
    train_on(worker, parameters, range(6, 10))
    return {"first": first, "averages": worker.num_averages, "after": digest(parameters.values())}


def test_another_number_of_ranks_starts_from_the_consensus() -> None:
    results = run_ranks(state_in_mid_interval, 2)
    states, weights = [state for state, _ in results], results[0][1]
    merged = merge_states(copy.deepcopy(states))
    for index, entry in merged["optimizer"]["state"].items():
        for name in ("exp_avg", "exp_avg_sq"):
            mean = sum(state["optimizer"]["state"][index][name] for state in states) / 2
            torch.testing.assert_close(entry[name], mean)
    continued = run_ranks(start_from, 3, merged, weights)
    for result in continued:
        assert all(torch.equal(result["first"][name], weights[name]) for name in weights)
        assert result["averages"] == 2
    assert len({result["after"] for result in continued}) == 1


def load_into_another_model(changes: dict[str, Any]) -> str:
    worker, parameters = start(LocalSGD(k_steps=4, begin_step=0), "sgd")
    train_on(worker, parameters, range(2))
    state = {**worker.state_dict(), **changes}
    for name in [name for name, value in changes.items() if value is None]:
        del state[name]
    other, _ = attach(LocalSGD(k_steps=4, begin_step=0), "sgd", {"matrix": (3, 3)})
    try:
        other.load_state_dict(state)
    except ConfigurationError as error:
        return str(error)
    return ""


def test_a_state_of_another_model_or_of_an_earlier_version_is_refused() -> None:
    cases: dict[str, Any] = {"model": {}, "model, after an average": {"own": {}}, "version": {"nodes": None}}
    results = run_each(2, {case: partial(load_into_another_model, changes) for case, changes in cases.items()})
    words = ["Resume with the model it was written with"] * 2 + ["earlier version"]
    for (case, messages), word in zip(results.items(), words, strict=True):
        assert all(word in message for message in messages), (case, messages)


def load_where_nothing_is_averaged() -> list[str]:
    parameter, messages = torch.nn.Parameter(torch.ones(4)), []
    worker = LocalSGD(4, 0).attach(torch.optim.SGD([parameter], lr=0.1), [("p", parameter)])
    parameter.grad = torch.full((4,), float(dist.get_rank()))
    worker.optimizer.step()
    for method in (LocalSGD(4, 0, topology=2), LocalSGD(1, 0)):
        other = torch.nn.Parameter(torch.ones(4))
        resumed = method.attach(torch.optim.SGD([other], lr=0.1), [("p", other)])
        with pytest.raises(ConfigurationError) as refused:
            resumed.load_state_dict(worker.state_dict())
        messages.append(str(refused.value))
        assert other.tolist() == [1.0] * 4
    return messages


def test_replicas_that_differ_are_not_resumed_where_they_would_never_be_averaged() -> None:
    for messages in run_ranks(load_where_nothing_is_averaged, 2):
        assert all("no average would ever make them equal" in message for message in messages)


class FewBits(Tensor):
    """A moment as libraries keep it in few bits: a subclass that knows only some of the functions."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.clone:
            raise NotImplementedError(func)
        return super().__torch_function__(func, types, args, kwargs or {})


def save_few_bits() -> tuple[bool, bool]:
    worker, parameters = start(LocalSGD(k_steps=4, begin_step=0), "sgd")
    moment = torch.arange(4.0).as_subclass(FewBits)
    worker.optimizer.state[parameters["vector"]]["moment"] = moment
    (kept,) = (s["moment"] for s in worker.state_dict()["optimizer"]["state"].values() if "moment" in s)
    plain = kept.as_subclass(Tensor)
    return type(kept) is FewBits and plain.tolist() == [0, 1, 2, 3], plain.data_ptr() == moment.data_ptr()


def test_an_optimizer_state_that_cannot_be_cloned_is_saved() -> None:
    assert run_ranks(save_few_bits, 2) == [(True, False)] * 2


def test_a_state_that_is_refused_changes_nothing() -> None:
    worker, _ = start(LocalSGD(k_steps=4, begin_step=0, num_fragments=2), "sgd")
    other, _ = start(LocalSGD(k_steps=4, begin_step=0), "sgd")
    before = worker.small_numel
    with pytest.raises(ConfigurationError, match="num_fragments=1, and this is 2"):
        worker.load_state_dict({**other.state_dict(), "small_numel": before + 1})
    assert worker.small_numel == before
