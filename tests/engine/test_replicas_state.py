"""Local SGD: looking at the consensus changes nothing, and a resume continues to the bit."""

from __future__ import annotations

import copy
import functools
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lowbw import ConfigurationError, LocalSGD
from lightning_lowbw.engine.method import Method
from lightning_lowbw.engine.replicas import ReplicaWorker
from lightning_lowbw.engine.state import merge
from lightning_lowbw.what.top_k import Compression
from lightning_lowbw.where.agreement import digest
from tests.engine.problem import AWKWARD, Parameters, weights_of
from tests.engine.replica_problem import attach, run_each, set_weights, take_step
from tests.ranks import run_ranks

SHAPES = {"conv": AWKWARD["conv"], "matrix": AWKWARD["matrix"], "vector": (17,)}
STATEFUL: dict[str, dict[str, Any]] = {
    "adaptive": {"k_steps": 3, "rule": "adacomm"},
    "delayed": {"k_steps": 5, "delay_steps": 4, "outer": "nesterov"},
    "streaming": {"k_steps": 4, "num_fragments": 2, "delay_steps": 3, "mixing": 0.5, "outer": "nesterov"},
    "sparse delayed": {"k_steps": 5, "delay_steps": 4, "compression": Compression(chunk=None, min_numel=100)},
}
STOPS = (1, 6, 7, 9)
STEPS = 16


def start(method: Method, optimizer: str) -> tuple[ReplicaWorker, Parameters]:
    buffers = {"n.running_mean": torch.zeros(2), "n.running_var": torch.ones(2), "n.count": torch.tensor(0)}
    return attach(method, optimizer, SHAPES, named_buffers=buffers)


def bits_of(worker: ReplicaWorker, parameters: Parameters) -> str:
    moments = [v for s in worker.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    buffers = worker.averaging.buffers
    return digest([*parameters.values(), *buffers.floating.values(), *buffers.counts, *moments])


def train_on(worker: ReplicaWorker, parameters: Parameters, steps: range, look: bool = False) -> list[str]:
    bits, buffers = [], worker.averaging.buffers
    for step in steps:
        for name, buffer in buffers.floating.items():  # as a forward pass does
            buffer.add_(0.1 * (step + 1 + dist.get_rank() + len(name)))
        take_step(worker, parameters, step)
        if look and step > 0:  # the first step is synchronous: buffers are as in DDP
            own = digest(parameters.values())
            with worker.consensus():
                shown = digest([*parameters.values(), *buffers.floating.values(), *buffers.counts])
                gathered: list[str] = [""] * dist.get_world_size()
                dist.all_gather_object(gathered, shown)
                assert len(set(gathered)) == 1, "not a consensus"
                assert worker.consensus_view.is_there or shown != own
        bits.append(bits_of(worker, parameters))
    return bits


def train_look_and_resume(method: Method, optimizer: str) -> dict[str, list[str]]:
    """Return the bits of each step: straight, with looks, and resumed after some steps."""
    worker, parameters = start(method, optimizer)
    bits: dict[str, list[str]] = {"straight": []}
    saved = {}
    for step in range(STEPS):
        if step in STOPS:
            buffers = {name: buffer.clone() for name, buffer in worker.averaging.buffers.floating.items()}
            saved[step] = copy.deepcopy(worker.state_dict()), weights_of(parameters), buffers
        bits["straight"] += train_on(worker, parameters, range(step, step + 1))
    worker.finish()
    worker, parameters = start(method, optimizer)
    bits["looked"] = train_on(worker, parameters, range(STEPS), look=True)
    worker.finish()
    for stop, (state, weights, buffers) in saved.items():
        worker, parameters = start(method, optimizer)
        if not state["own"]:  # a plain checkpoint has them
            set_weights(parameters, weights)
            for name, buffer in worker.averaging.buffers.floating.items():
                buffer.copy_(buffers[name])
        worker.load_state_dict(state)
        worker.check_schedule()
        bits[f"resumed after {stop}"] = [*bits["straight"][:stop], *train_on(worker, parameters, range(stop, STEPS))]
        worker.finish()
    return bits


@functools.cache
def bits_by_case() -> dict[str, list[dict[str, list[str]]]]:
    """Start the ranks once for all cases."""
    calls = {case: partial(train_look_and_resume, LocalSGD(**STATEFUL[case]), "adamw") for case in STATEFUL}
    return run_each(3, calls)


@pytest.mark.parametrize("case", STATEFUL)
def test_looking_changes_nothing_and_a_resume_continues_bit_for_bit(case: str) -> None:
    """Where it matters how far an average or a rule is; the others are in tests/contract."""
    for by_way in bits_by_case()[case]:
        assert len(set(by_way["straight"])) == STEPS
        for way, bits in by_way.items():
            assert bits == by_way["straight"], way


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
    merged = merge(copy.deepcopy(states))
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
