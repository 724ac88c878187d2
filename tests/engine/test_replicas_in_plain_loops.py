"""Local SGD in loops that only call `optimizer.step()`: it exchanges and averages, as the explicit form does."""

from __future__ import annotations

import functools
import gc
import logging
import sys
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_lowbw import DGC, ConfigurationError, LocalSGD
from lightning_lowbw.engine.method import Method
from lightning_lowbw.namespaces import LOGGER
from lightning_lowbw.where.agreement import digest
from tests.engine.problem import AWKWARD, NODES, Nodes, Said, backward, each, message_of
from tests.engine.replica_problem import attach, loss_of, run_each
from tests.ranks import run_ranks

STEPS = 13
SHAPES = {name: AWKWARD[name] for name in ("vector", "conv", "matrix", "single")}
CASES: dict[str, tuple[Method, Nodes]] = {
    "at once": (LocalSGD(k_steps=4, begin_step=0), ()),
    "after a synchronous phase": (LocalSGD(k_steps=3, begin_step=5), ()),
    "one": (LocalSGD(k_steps=1), ()),
    "adaptive": (LocalSGD(k_steps=3, begin_step=0, rule="adacomm"), ()),
    "delayed": (LocalSGD(k_steps=4, begin_step=0, delay_steps=2, outer="nesterov"), ()),
    "fragments": (LocalSGD(k_steps=4, begin_step=0, num_fragments=2, delay_steps=1, mixing=0.5), ()),
    "narrow": (LocalSGD(k_steps=4, begin_step=0, value_dtype="int8"), ()),
    "sparse": (LocalSGD(k_steps=4, begin_step=0, compression={"min_numel": 64, "chunk": 64}), ()),
    "two levels": (LocalSGD(k_steps=4, begin_step=2), NODES["strided"]),
    "two levels, sparse": (
        LocalSGD(k_steps=4, begin_step=0, node_k_steps=2, compression={"min_numel": 64, "chunk": 64}),
        NODES["strided"],
    ),
}
AVERAGES = {
    **dict.fromkeys(CASES, 3),
    "after a synchronous phase": 2,
    "one": 0,
    "adaptive": 8,
    "delayed": 2,
    "fragments": 6,
    "two levels": 2,
}


def take_step(worker: Any, parameters: Any, step: int, form: str) -> float | None:
    optimizer = worker.optimizer

    def closure() -> float:
        optimizer.zero_grad()
        backward(parameters, step)
        loss = loss_of(dist.get_rank(), step)
        worker.observe_loss(torch.tensor(loss))
        return loss

    if form == "closure":
        return optimizer.step(closure)
    closure()
    if form == "plain":
        optimizer.step()
    elif form == "by hand":  # with the gradient that is stepped with, as for clipping
        worker.exchange()
        optimizer.step()
    else:
        with worker.stepping():
            worker.prepare()
            worker.exchange()
            optimizer.step()
    return None


FORMS = ("explicit", "plain", "closure", "by hand")


def train(method: Method, nodes: Nodes, optimizer: str, form: str) -> dict[str, Any]:
    worker, parameters = attach(method, optimizer, SHAPES, nodes)
    digests, returned = [], []
    for step in range(STEPS):
        returned.append(take_step(worker, parameters, step, form))
        digests.append(digest(parameters.values()))
    result = {"digests": digests, "averages": worker.num_averages, "steps": worker.step, "returned": returned}
    worker.finish()
    return result


@functools.cache
def results_of(num_ranks: int) -> dict[str, list[Any]]:
    """Start the ranks once for all cases."""
    cases = {case: values for case, values in CASES.items() if (sum(map(len, values[1])) or 2) == num_ranks}
    calls = {
        f"{case}, {form}": partial(train, *values, "adamw" if case == "narrow" else "sgd", form)
        for case, values in cases.items()
        for form in FORMS
    }
    return run_each(num_ranks, calls)


@pytest.mark.parametrize("case", CASES)
def test_a_step_of_the_optimizer_is_all_there_is_to_call(case: str) -> None:
    num_ranks = sum(map(len, CASES[case][1])) or 2
    results = results_of(num_ranks)
    for form in FORMS:
        for result, explicit in zip(results[f"{case}, {form}"], results[f"{case}, explicit"], strict=True):
            assert result["digests"] == explicit["digests"], form
            assert result["steps"] == STEPS
            assert result["averages"] == AVERAGES[case]
    for rank, result in enumerate(results[f"{case}, closure"]):
        assert result["returned"] == [loss_of(rank, step) for step in range(STEPS)]


def raise_in_a_step() -> dict[str, Any]:
    """A step that raises on all ranks is not counted, and leaves nothing behind."""
    worker, parameters = attach(LocalSGD(k_steps=2, begin_step=0), shapes={"a": (5,)})
    for form in ("explicit", "closure"):

        def closure() -> float:
            raise RuntimeError("the data are gone")

        if form == "closure":
            with pytest.raises(RuntimeError, match="data are gone"):
                worker.optimizer.step(closure)
        else:
            with pytest.raises(RuntimeError, match="data are gone"), worker.stepping():
                closure()
        assert worker.step == 0
    for step in range(4):
        take_step(worker, parameters, step, "plain")
    return {"step": worker.step, "averages": worker.num_averages, "bits": digest(parameters.values())}


def skip_steps() -> dict[str, Any]:
    """A step that all ranks leave out, as a GradScaler does, counts inside of `stepping`."""
    worker, parameters = attach(LocalSGD(k_steps=2, begin_step=0), shapes={"a": (5,)})
    for step in range(4):
        worker.optimizer.zero_grad()
        backward(parameters, step)
        with worker.stepping():
            if worker.exchange() and step != 1:
                worker.optimizer.step()
    return {"step": worker.step, "averages": worker.num_averages, "bits": digest(parameters.values())}


def test_steps_that_raise_or_are_left_out() -> None:
    for case, (first, second) in run_each(2, {"raise": raise_in_a_step, "skip": skip_steps}).items():
        assert first == second, case
        assert (first["step"], first["averages"]) == (4, 2), case


def lower_gradients() -> bool:
    """Not attached, a synchronous step by hand exchanges once, and the optimizer's step not again."""
    worker, parameters = attach(LocalSGD(k_steps=4, begin_step=8), shapes={"a": (5,)})
    backward(parameters, 0)
    worker.exchange()
    mean = parameters["a"].grad
    assert mean is not None
    mean.mul_(0.0)
    before = parameters["a"].detach().clone()
    worker.optimizer.param_groups[0]["weight_decay"] = 0.0
    worker.optimizer.step()
    return torch.equal(before, parameters["a"].detach())


def test_gradients_may_be_changed_between_the_exchange_and_the_step() -> None:
    assert run_ranks(lower_gradients, 2) == [True, True]


# What is refused ---------------------------------------------------------------------------------------------------


def test_optimizers_that_cannot_be_averaged_are_refused() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(ConfigurationError, match="LBFGS"):
        LocalSGD().attach(torch.optim.LBFGS([weight]), [("w", weight)])
    with pytest.raises(ConfigurationError, match="Adagrad"):
        LocalSGD(inner_momentum="average").attach(torch.optim.Adagrad([weight]), [("w", weight)])
    optimizer = torch.optim.SGD([weight], lr=0.1)
    LocalSGD(begin_step=0.5).attach(optimizer, [("w", weight)])
    with pytest.raises(ConfigurationError, match="number of steps"):
        optimizer.step()
    with pytest.raises(ConfigurationError, match="exchange twice"):
        LocalSGD().attach(optimizer, [("w", weight)])
    with pytest.raises(ConfigurationError, match="1 tensors"):
        LocalSGD(num_fragments=2).attach(torch.optim.SGD([weight], lr=0.1), [("w", weight)])


@pytest.mark.parametrize("method", [LocalSGD(), DGC()])
def test_parameters_without_names_are_refused(method: Method) -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigurationError, match=r"model.named_parameters\(\)"):
        method.attach(torch.optim.SGD(model.parameters(), lr=0.1), model.parameters())  # type: ignore[arg-type]


def end_with(num_steps: int, end: str) -> list[str]:
    """Train, end the loop in a way, and let the worker be forgotten; return what is said then."""
    said, logger = Said(), logging.getLogger(LOGGER)
    worker, parameters = attach(LocalSGD(k_steps=2, begin_step=0), shapes={"a": (5,)})
    for step in range(num_steps):
        take_step(worker, parameters, step, "plain")
    if end == "consensus":
        with worker.consensus():
            pass
    elif end == "raise":
        sys.last_type = RuntimeError  # as Python does for an exception that ends it
    elif end:
        getattr(worker, end)()
    logger.addHandler(said)
    del worker, parameters
    gc.collect()
    logger.removeHandler(said)
    vars(sys).pop("last_type", None)
    return said.messages


def test_a_loop_that_leaves_replicas_apart_says_so() -> None:
    apart, quiet = [(3, "")], [(3, "consensus"), (3, "finish"), (3, "state_dict"), (3, "raise"), (4, "")]
    first, second = run_ranks(each, 2, end_with, [*apart, *quiet])
    assert [len(said) for said in first] == [1, 0, 0, 0, 0, 0]
    assert "ended after step 3, between two averages" in first[0][0]
    assert "worker.finish()" in first[0][0]
    assert not any(second)  # said once


class Wrapped(DistributedDataParallel):
    """As Horovod's and other libraries' are."""


def attach_to_a_wrapped_model(kind: str) -> list[str | None]:
    """What is said at once, after a wrapper that comes later, of one that is gone, of one of other ranks."""
    methods = [DGC(), LocalSGD(k_steps=2, begin_step=0)]
    said: list[str | None] = []
    for method in methods:
        model = torch.nn.Linear(3, 2)
        wrapped: Any = {"ddp": DistributedDataParallel, "subclass": Wrapped}[kind](model)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        attaching = partial(method.attach, sgd, model.named_parameters())
        said.append(message_of(attaching, ConfigurationError))
        wrapped.itself = wrapped
        del wrapped
        attaching()
        wrapped = DistributedDataParallel(model)
        wrapped(torch.ones(1, 3)).sum().backward()
        said.append(message_of(sgd.step, ConfigurationError))
    own = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    wrapped = DistributedDataParallel(torch.nn.Linear(3, 2), process_group=own)
    DGC().attach(torch.optim.SGD(wrapped.parameters(), lr=0.1), wrapped.named_parameters())
    return said


@pytest.mark.parametrize("kind", ["ddp", "subclass"])
def test_a_model_in_ddp_is_refused(kind: str) -> None:
    for said in run_ranks(attach_to_a_wrapped_model, 2, kind):
        assert all("this would train as DDP" in (message or "") for message in said)
