"""What cannot run is refused and what goes wrong is told, on all ranks; nothing is half done."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import LBFGS, SGD

from lightning_lowbw import DGC, ConfigurationError, Narrow, NonFiniteGradientError
from lightning_lowbw.engine import sparse_exchange
from lightning_lowbw.engine.gradients import GradientWorker
from lightning_lowbw.engine.method import Method
from lightning_lowbw.where.agreement import digest
from lightning_lowbw.where.collectives import Collectives, TensorWork
from tests.engine.problem import (
    Parameters,
    backward,
    each,
    in_memory,
    make_gradient_worker,
    make_parameters,
    message_of,
    take_step,
)
from tests.ranks import run_ranks

SHAPES = {"matrix": (30, 20), "conv": (8, 4, 3, 3), "bias": (7,)}
METHOD = DGC(sparsity=[0.9], min_numel=100)
CULPRIT = 1


def make_worker(method: Method = METHOD, **options: Any) -> tuple[GradientWorker, Parameters]:
    parameters = make_parameters(SHAPES)
    settings = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1, **options}
    return make_gradient_worker(method, SGD(parameters.values(), **settings), parameters), parameters


def everything(worker: GradientWorker, parameters: Parameters) -> str:
    """A digest of all that a step commits."""
    buffers = [state["momentum_buffer"] for state in worker.optimizer.state.values()]
    rounded = [] if worker.narrow is None else worker.narrow.residuals.values()
    return digest([*parameters.values(), *buffers, *worker.residuals.values(), *rounded])


# Gradients that are not finite ----------------------------------------------------------------------------------------


def poison(method: Method, value: float, name: str, skips: bool) -> dict[str, Any]:
    """Two good steps, one with a bad element on one rank, two good ones."""
    worker, parameters = make_worker(method)
    for step in range(2):
        take_step(worker, parameters, step)
    before, counted = everything(worker, parameters), worker.step
    groups = [dict(group) for group in worker.optimizer.param_groups]
    worker.optimizer.zero_grad()
    backward(parameters, 2)
    if dist.get_rank() == CULPRIT:
        gradient = parameters[name].grad
        assert gradient is not None
        gradient[(1,) * gradient.dim()] = value
    facts: dict[str, Any] = {"message": None, "taken": None}

    def exchange() -> None:
        with worker.stepping():
            worker.prepare()  # before clipping, which spreads a NaN to all tensors: whose fault it was is known then
            torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
            facts["taken"] = worker.exchange(skip_nonfinite=skips)

    facts["message"] = message_of(exchange, NonFiniteGradientError)
    facts["steps"] = worker.step - counted
    assert everything(worker, parameters) == before
    assert [dict(group) for group in worker.optimizer.param_groups] == groups
    for step in (3, 4):
        take_step(worker, parameters, step)
    assert everything(worker, parameters) != before
    assert all(parameter.isfinite().all() for parameter in parameters.values())
    facts["digest"] = digest(parameters.values())
    return facts


CASES = [(math.nan, "conv"), (math.inf, "matrix"), (-math.inf, "bias"), (math.nan, "bias")]
NARROW = Method(what=Narrow(value_dtype="int8"))


@pytest.mark.parametrize("method", [METHOD, DGC(rampup_begin_step=100), NARROW], ids=["sparse", "dense", "narrow"])
def test_a_bad_gradient_on_one_rank_is_told_on_all(method: Method) -> None:
    results = run_ranks(each, 3, poison, [(method, *case, False) for case in CASES])
    for (_, name), *by_rank in zip(CASES, *results, strict=True):
        assert len({facts["digest"] for facts in by_rank}) == 1
        for facts in by_rank:
            assert f"Step 2: the gradient of '{name}' on rank {CULPRIT} is not finite" in facts["message"]
            assert facts["steps"] == 0
            is_sparse = method == METHOD and name != "bias"
            assert ("give it a warm-up (there is none" in facts["message"]) == is_sparse


def test_a_bad_step_is_skipped_on_all_ranks_where_asked() -> None:
    results = run_ranks(each, 2, poison, [(METHOD, *case, True) for case in CASES])
    for by_rank in zip(*results, strict=True):
        assert len({facts["digest"] for facts in by_rank}) == 1
        for facts in by_rank:
            assert facts["message"] is None
            assert facts["taken"] is False
            assert facts["steps"] == 1  # as `trainer.global_step` counts


def test_a_bad_step_is_skipped_by_a_single_rank() -> None:
    """As the loop in the docstring of `Worker` has it, which then trains on one GPU, too."""
    parameters = make_parameters({"matrix": (3, 2), "table": (4, 2), "unused": (3,)})
    worker = METHOD.attach(SGD(parameters.values(), lr=0.1), parameters.items())
    for value, is_taken in ((1.0, True), (math.inf, False), (math.nan, False), (3e38, True)):
        for is_sparse in (False, True):  # on a single rank sparse ones are not refused
            parameters["matrix"].grad = torch.ones(3, 2)
            gradient = torch.zeros(4, 2).index_fill_(0, torch.tensor([2]), value)
            parameters["table"].grad = gradient.to_sparse() if is_sparse else gradient
            assert worker.exchange(skip_nonfinite=True) == is_taken
            assert worker.exchange()


def meet_large_gradients() -> str:
    """Finite, though their squares and their sum are not: no cause for alarm."""
    worker, parameters = make_worker(lr=1e-38, momentum=0.0, weight_decay=0.0)
    for parameter in parameters.values():
        parameter.grad = torch.full_like(parameter, 3e38)
    with worker.stepping():
        assert worker.exchange()
        worker.optimizer.step()
    assert all(parameter.isfinite().all() for parameter in parameters.values())
    return digest(parameters.values())


def test_large_gradients_are_finite() -> None:
    first, second = run_ranks(meet_large_gradients, 2)
    assert first == second


# A step that fails ----------------------------------------------------------------------------------------------------


def fail_inside_a_step() -> list[dict[str, Any]]:
    worker, parameters = make_worker()
    take_step(worker, parameters, 0)
    backward(parameters, 1)
    seen = []

    def step() -> None:
        with worker.stepping():
            worker.exchange()
            seen.append({key: worker.optimizer.param_groups[0][key] for key in ("momentum", "weight_decay")})
            raise KeyError("in the middle")

    assert message_of(step, KeyError) == "'in the middle'"
    seen.append({key: worker.optimizer.param_groups[0][key] for key in ("momentum", "weight_decay")})
    assert worker.step == 1
    assert worker.state_dict()["torn"] == "the optimizer's step after step 1", "others may have taken it"
    take_step(worker, parameters, 1)
    assert worker.state_dict()["torn"] == ""
    return seen


def test_the_users_values_come_back_though_the_step_raised() -> None:
    for inside, after in run_ranks(fail_inside_a_step, 2):
        assert inside == {"momentum": 0.0, "weight_decay": 0.0}
        assert after == {"momentum": 0.9, "weight_decay": 0.1}


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"min_numel": 1.5}, r"min_numel=1\.5: give a number of elements, an integer >= 1"),
        ({"min_numel": 0}, r"min_numel=0: "),
        ({"min_numel": True}, r"min_numel=True: "),
        ({"exclude": "*.bias"}, r"exclude='\*\.bias': give a list of parameter name patterns"),
        ({"exclude": [1]}, r"exclude=\[1\]: "),
        ({"exclude": None}, r"exclude=None: "),
        ({"exclude": 5}, r"exclude=5: "),
        ({"selection": "fast"}, r"selection='fast': choose one of sampled, exact"),
        ({"selection": None}, r"selection=None: "),
        ({"value_dtype": "int3"}, r"value_dtype='int3': choose one of float32, bfloat16, float16"),
        ({"value_dtype": torch.float16}, r"value_dtype=torch\.float16: choose one of"),
        ({"momentum_masking": "no"}, r"momentum_masking='no': give True, False or None"),
        ({"dense_dtype": "int2"}, r"dense_dtype='int2': choose one of float32, bfloat16, float16, int8, int4"),
        ({"correction": "frozen_variance"}, r"correction='frozen_variance': choose one of auto, error_feedback"),
        ({"correction": None}, r"correction=None: choose one of"),
        ({"density": 0.1, "sparsity": [0.9]}, r"both say how much is sent; give one"),
        ({"sparsty": [0.9]}, r"DGC has no sparsty: choose among .*rampup_step.*density"),
        ({"method": "dgc"}, r"DGC has no method: "),
        ({"momentum_masking": 1}, r"momentum_masking=1: "),
        ({"sparsity": [1.0]}, r"outside \[0, 1\)"),
        ({"sparsity": 0.999}, r"sparsity=0\.999: give a list of numbers"),
        ({"rampup_step": 0}, r"rampup_step=0: "),
        ({"rampup_begin_step": -1}, r"rampup_begin_step=-1: "),
    ],
)
def test_a_method_refuses(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        DGC(**arguments)


def attach_what_cannot_be_corrected() -> dict[str, str | None]:
    parameters = make_parameters(SHAPES)
    worker, others = make_worker()

    def dampen_later() -> None:
        worker.optimizer.param_groups[0]["dampening"] = 0.5
        take_step(worker, others, 0)

    def sparse_layout() -> None:
        embedding = torch.nn.Embedding(50, 10, sparse=True)
        worker = METHOD.attach(SGD(embedding.parameters(), lr=0.1), embedding.named_parameters())
        embedding(torch.tensor([1, 2])).sum().backward()
        with worker.stepping():
            worker.exchange()

    def attach(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
        return lambda: METHOD.attach(optimizer, parameters.items())

    def attach_twice() -> None:
        optimizer = SGD(parameters.values(), lr=0.1)
        attach(optimizer)()
        attach(optimizer)()

    attach(SGD(parameters.values(), lr=0.1, dampening=0.5))()  # without momentum it has no meaning
    attempts = {
        "LBFGS": attach(LBFGS(parameters.values())),
        "dampening": attach(SGD(parameters.values(), lr=0.1, momentum=0.9, dampening=0.1)),
        "dampening later": dampen_later,
        "sparse layout": sparse_layout,
        "twice": attach_twice,
    }
    return {name: message_of(attempt, ConfigurationError) for name, attempt in attempts.items()}


def test_what_cannot_be_corrected_is_refused_on_all_ranks() -> None:
    for messages in run_ranks(attach_what_cannot_be_corrected, 2):
        assert "strategy='ddp'" in (messages["LBFGS"] or "")
        assert "dampening=0.1" in (messages["dampening"] or "")
        assert "dampening=0.5" in (messages["dampening later"] or "")
        assert "sparse=False" in (messages["sparse layout"] or "")
        assert "'weight'" in (messages["sparse layout"] or "")
        assert "attached to this SGD already" in (messages["twice"] or "")


def meet_a_sparse_layout_on_one_rank(clips: bool) -> str | None:
    group = dist.new_group(timeout=timedelta(seconds=5))  # so that a rank left behind says so soon
    embedding = torch.nn.Embedding(50, 10, sparse=True)
    worker = METHOD.attach(SGD(embedding.parameters(), lr=0.1), embedding.named_parameters(), process_group=group)
    if dist.get_rank() == CULPRIT:  # the other rank's batch does not need this layer
        embedding(torch.tensor([1, 2])).sum().backward()

    def step() -> None:
        with worker.stepping():
            if clips:
                worker.prepare()
                torch.nn.utils.clip_grad_norm_(embedding.parameters(), 1.0)
            worker.exchange()

    return message_of(step, ConfigurationError)


def test_a_sparse_layout_on_one_rank_is_refused_on_all() -> None:
    for messages in run_ranks(each, 2, meet_a_sparse_layout_on_one_rank, [(False,), (True,)]):
        for message in messages:
            assert message is not None
            assert f"'weight' on rank {CULPRIT} is sparse" in message


TURN_DENSE: list[dict[str, Any]] = [{"rampup_begin_step": 100}, {"min_numel": 500}, {"exclude": ["mat*"]}]


REPLACED: list[dict[str, Any]] = [{"dense_dtype": "int8"}, {"correction": "error_feedback"}]


def turn_dense(changes: list[dict[str, Any]]) -> list[tuple[str | None, bool]]:
    worker, parameters = make_worker()
    for step in range(2):
        take_step(worker, parameters, step)
    before = everything(worker, parameters)
    results = []
    for change in changes:
        worker.method = METHOD.replace(**change)
        message = message_of(lambda: take_step(worker, parameters, 2), ConfigurationError)
        results.append((message, everything(worker, parameters) == before))
    worker.method = METHOD.replace(sparsity=[0.5])  # other densities are fine
    take_step(worker, parameters, 2)
    return results


def test_a_sparse_tensor_cannot_turn_dense() -> None:
    """Its residual would never be sent, and its velocity differs from rank to rank: replicas would drift."""
    for results in run_ranks(turn_dense, 2, [*TURN_DENSE, *REPLACED]):
        for change, (message, is_unchanged) in zip([*TURN_DENSE, *REPLACED], results, strict=True):
            assert message is not None, change
            assert is_unchanged
            if change in REPLACED:
                assert f"{next(iter(change))}=" in message
                assert "cannot change during a training" in message
                continue
            name = "conv" if "min_numel" in change else "matrix"
            expected = "Step 2 would be dense" if "rampup_begin_step" in change else f"Step 2 would send '{name}' dense"
            assert expected in message


# Smaller promises -----------------------------------------------------------------------------------------------------


def give_reduced_as_a_list() -> str:
    worker, parameters = make_worker(DGC(rampup_begin_step=5))
    backward(parameters, 0)
    before = digest([p.grad for p in parameters.values() if p.grad is not None])
    with worker.stepping():
        worker.prepare(reduced=list(parameters.values()))  # a list compares tensors by value
        worker.exchange()
    assert digest([p.grad for p in parameters.values() if p.grad is not None]) == before
    return before


def test_reduced_parameters_may_be_a_list() -> None:
    assert len(run_ranks(give_reduced_as_a_list, 2)) == 2


def select_exactly_later() -> list[bool]:
    parameters = make_parameters({"large": (300, 300)})
    worker = DGC(sparsity=[0.999]).attach(SGD(parameters.values(), lr=0.1), parameters.items())
    has_threshold = []
    for selection in ("sampled", "exact", "sampled"):
        worker.method = worker.method.replace(selection=selection)
        take_step(worker, parameters, worker.step)
        has_threshold.append(worker.state_dict()["exchange"]["thresholds"].get("large", 0.0) > 0)
    return has_threshold


def test_a_replaced_method_selects_as_it_says() -> None:
    assert run_ranks(select_exactly_later, 2) == [[True, False, True]] * 2


def keep_the_graph() -> list[bool]:
    worker, parameters = make_worker()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about reference cycles
        loss = sum((parameter**3).sum() for parameter in parameters.values())
        loss.backward(create_graph=True)  # type: ignore[union-attr]
    with worker.stepping():
        worker.exchange()
        worker.optimizer.step()
    buffers = [state["momentum_buffer"] for state in worker.optimizer.state.values()]
    return [tensor.requires_grad for tensor in (*worker.residuals.values(), *buffers)]


def test_gradients_of_gradients_leave_no_graph_behind() -> None:
    for requires_grad in run_ranks(keep_the_graph, 2):
        assert not any(requires_grad)


def freeze_after_backward() -> str:
    worker, parameters = make_worker()
    backward(parameters, 0)
    parameters["conv"].requires_grad_(False)
    with worker.stepping():
        worker.exchange()
        worker.optimizer.step()
    return digest(parameters.values())


def test_replicas_stay_equal_when_a_parameter_is_frozen_after_backward() -> None:
    first, second = run_ranks(freeze_after_backward, 2)
    assert first == second


def clip_large(value: float) -> tuple[bool, list[Tensor]]:
    worker, parameters = make_worker(momentum=0.0, weight_decay=0.0)
    worker.optimizer.zero_grad()
    backward(parameters, 0)
    worker.prepare()
    is_root_of_two = worker.clip_factor == math.sqrt(2)
    torch.nn.utils.clip_grad_norm_(parameters.values(), value * worker.clip_factor)
    with worker.stepping():
        worker.exchange()
    own = torch.cat(list(worker.residuals.values()))
    return is_root_of_two, [own, *(p.grad for p in parameters.values() if p.grad is not None)]


def test_clipping_comes_before_the_residual() -> None:
    for is_root_of_two, (residual, *gradients) in run_ranks(clip_large, 2, 1e-3):
        assert is_root_of_two
        assert 0 < residual.norm() <= 1e-3 * math.sqrt(2)
        assert sum(float(gradient.norm()) ** 2 for gradient in gradients) <= 2e-6


def exclude_a_giant(exclude: list[str]) -> str | None:
    sparse_exchange.MAX_NUMEL = 500  # the matrix has more
    worker, parameters = make_worker(METHOD.replace(exclude=exclude))
    return message_of(lambda: take_step(worker, parameters, 0), ConfigurationError)


def test_a_tensor_of_too_many_elements_may_be_excluded_as_the_message_says() -> None:
    for message in run_ranks(exclude_a_giant, 2, []):
        assert message is not None
        assert "exclude=['matrix']" in message
    assert run_ranks(exclude_a_giant, 2, ["matrix"]) == [None, None]


# The link is lost in the middle of an exchange ------------------------------------------------------------------------


class LinkLost(RuntimeError):
    pass


def lose_the_link(*_: Any, **__: Any) -> None:
    raise LinkLost


CUT = [(TensorWork, "wait"), (Collectives, "all_to_all"), (Collectives, "all_reduce_")]  # of one kind of exchange each


def fail_in_the_exchange(options: dict[str, Any]) -> tuple[str, int, str]:
    """Fail in the second step, and go on; momentum is 0, so that the residual is what has not been sent."""
    method = DGC(sparsity=[0.9], min_numel=100, selection="exact", **options)
    worker, parameters = make_worker(method, momentum=0.0, weight_decay=0.0)
    take_step(worker, parameters, 0)
    before = {name: v.clone() for name, v in worker.residuals.items()}
    weights = digest(parameters.values())
    worker.optimizer.zero_grad()
    backward(parameters, 1)
    gradients = {name: in_memory(p.grad, name).clone() for name, p in parameters.items() if p.grad is not None}

    def exchange() -> None:
        with worker.stepping():
            worker.exchange()

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in CUT:
            patch.setattr(owner, name, lose_the_link)
        assert message_of(exchange, LinkLost) is not None
    assert digest(parameters.values()) == weights
    for name, v in worker.residuals.items():
        torch.testing.assert_close(v, before[name] + gradients[name], rtol=1e-6, atol=1e-6)
    torn = worker.state_dict()["torn"]
    for step in (1, 2):
        take_step(worker, parameters, step)
    return torn, worker.step, worker.state_dict()["torn"] + digest(parameters.values())


@pytest.mark.parametrize(
    "options",
    [
        {"exchange": "all_gather", "value_dtype": "int8"},
        {"exchange": "reduce_scatter", "value_dtype": "float32"},
        {"exchange": "dense", "value_dtype": "float32"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_what_an_exchange_has_taken_is_put_back_when_it_fails(options: dict[str, Any]) -> None:
    first, second = run_ranks(fail_in_the_exchange, 2, options)
    assert first == second
    assert first[0] == "the exchange of gradients after step 1"
    assert first[1] == 3
