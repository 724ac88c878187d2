"""Plain loops: `optimizer.step()` is all there is to call, in each of its forms, and no rank ever trains alone."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_lowbw import (
    DGC,
    ConfigurationError,
    EveryStep,
    Hierarchical,
    LocalSGD,
    Method,
    Narrow,
    NonFiniteGradientError,
    TopK,
    Where,
)
from lightning_lowbw.engine.checks import check_current_device
from lightning_lowbw.engine.gradients import GradientWorker
from lightning_lowbw.where.agreement import digest
from tests.engine.problem import (
    AWKWARD,
    DENSE_THEN_SPARSE,
    DENSITIES,
    FLAT,
    NODES,
    Nodes,
    Parameters,
    backward,
    coefficients,
    each,
    make_parameters,
    make_weight,
    message_of,
    take_step,
)
from tests.ranks import run_ranks

SHAPES = {name: AWKWARD[name] for name in ("matrix", "conv", "vector", "scalar")}
METHOD = DENSE_THEN_SPARSE.replace(min_numel=18)  # the vector and the scalar are sent dense
INT8 = Method(what=Narrow(value_dtype="int8"))
CLIP = 0.5


# Half types between nodes ---------------------------------------------------------------------------------------------


def train_in_bfloat16(nodes: Nodes) -> dict[str, Any]:
    """Weights at the end, those by hand, and the bytes between nodes of each step."""
    rank, num_ranks, found = dist.get_rank(), dist.get_world_size(), {}
    for name, method in {
        "hierarchical": Hierarchical(inter_dtype="bfloat16", topology=nodes),
        "warm-up": Method(
            when=EveryStep(2), what=TopK(min_numel=1), where=Where(topology=nodes, inter_dtype="bfloat16")
        ),
        "float32": Hierarchical(topology=nodes),
    }.items():
        parameters = make_parameters({"matrix": AWKWARD["matrix"]})
        weight, expected = parameters["matrix"], make_weight("matrix", AWKWARD["matrix"])
        worker, sent = method.attach(SGD([weight], lr=0.5), parameters.items()), [0]
        for step in range(2):
            step_alone(worker, parameters, step)  # type: ignore[arg-type]
            weight.grad = None
            sent.append(worker.peers.ledger.inter_bytes)
            own = [(coefficients("matrix", expected, each, step) + expected) * (1.0 / num_ranks) for each in range(4)]
            parts = [sum(own[each] for each in node) for node in nodes]
            if name != "float32":
                parts = [part.bfloat16() for part in parts]  # type: ignore[union-attr]
            expected = expected - 0.5 * (parts[0] + parts[1]).float()  # type: ignore[union-attr, operator]
        found[name] = (weight.equal(expected) or float((weight - expected).abs().max()), sent[2] - sent[1], rank)
    return found


def test_half_types_between_nodes_are_sent_in_plain_loops_too() -> None:
    """The control message beside them is exact, and has a message of its own."""
    numel = 600 // 2  # of a rank's part, sent to one other node
    for found in run_ranks(train_in_bfloat16, 4, NODES["blocks"]):
        assert found["float32"][0] is True
        assert found["hierarchical"][:2] == found["warm-up"][:2]
        assert found["hierarchical"][0] is True
        assert found["float32"][1] - found["hierarchical"][1] == 2 * numel


# One step in each of its forms ----------------------------------------------------------------------------------------


def step_alone(worker: GradientWorker, parameters: Parameters, step: int) -> None:
    backward(parameters, step)
    worker.optimizer.step()


def step_with_a_closure(worker: GradientWorker, parameters: Parameters, step: int) -> None:
    def closure() -> float:
        worker.optimizer.zero_grad()
        backward(parameters, step)
        return 1.5

    assert worker.optimizer.step(closure) == 1.5  # type: ignore[arg-type]


def step_with_a_named_closure(worker: GradientWorker, parameters: Parameters, step: int) -> None:
    worker.optimizer.step(closure=lambda: backward(parameters, step))  # type: ignore[arg-type]


def exchange_inside_a_closure(worker: GradientWorker, parameters: Parameters, step: int) -> None:
    def closure() -> None:
        backward(parameters, step)
        worker.exchange()

    worker.optimizer.step(closure)  # type: ignore[arg-type]


def exchange_by_hand(worker: GradientWorker, parameters: Parameters, step: int) -> None:
    backward(parameters, step)
    assert worker.exchange()
    worker.optimizer.step()


def prepare_by_hand(worker: GradientWorker, parameters: Parameters, step: int) -> None:
    backward(parameters, step)
    worker.prepare()
    worker.optimizer.step()


def step_inside(worker: GradientWorker, parameters: Parameters, step: int) -> None:
    backward(parameters, step)
    with worker.stepping():
        worker.optimizer.step()


FORMS: dict[str, Callable[[GradientWorker, Parameters, int], None]] = {
    "stepping": take_step,
    "alone": step_alone,
    "closure": step_with_a_closure,
    "named closure": step_with_a_named_closure,
    "inside a closure": exchange_inside_a_closure,
    "by hand": exchange_by_hand,
    "prepared": prepare_by_hand,
    "step in stepping": step_inside,
}


def train(form: str, method: Method, kind: str, nodes: Nodes) -> dict[str, Any]:
    parameters = make_parameters(SHAPES)
    options: dict[str, Any] = {"momentum": 0.9, "weight_decay": 0.1} if kind == "SGD" else {}
    optimizer = getattr(torch.optim, kind)(parameters.values(), lr=0.05, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        worker = method.attach(optimizer, parameters.items(), topology=nodes)
    assert isinstance(worker, GradientWorker)
    densities, settings = [], []
    for step in DENSITIES:
        optimizer.zero_grad()
        FORMS[form](worker, parameters, step)
        densities.append(worker.last_density)
        settings.append({name: optimizer.param_groups[0][name] for name in options})
    assert worker.step == worker.peers.ledger.steps == len(DENSITIES)
    assert settings == [options] * len(DENSITIES)
    residuals = [*worker.residuals.values(), *({} if worker.narrow is None else worker.narrow.residuals).values()]
    return {"digest": digest([*parameters.values(), *residuals]), "densities": densities}


CASES = [(METHOD, "SGD", FLAT), (METHOD, "AdamW", FLAT), (METHOD, "RMSprop", FLAT), (INT8, "SGD", FLAT)]


@pytest.mark.parametrize("cases", [CASES, [(METHOD, "SGD", NODES["blocks"])]], ids=["flat", "two levels"])
def test_all_forms_of_a_step_are_the_same_to_the_bit(cases: list[tuple[Method, str, Nodes]]) -> None:
    """And the warm-up ends in all of them."""
    num_ranks = sum(map(len, cases[0][-1]))
    for rank in run_ranks(each, num_ranks, train, [(form, *case) for case in cases for form in FORMS]):
        results = iter(rank)
        for method, _, _ in cases:
            of_case = {form: next(results) for form in FORMS}
            assert len({result["digest"] for result in of_case.values()}) == 1, of_case
            for result in of_case.values():
                assert result["densities"] == ([1.0] * 8 if method is INT8 else list(DENSITIES.values()))
    assert DENSITIES[0] == 1.0 != DENSITIES[7]


# Optimizers that call the closure more than once ----------------------------------------------------------------------


class TwoGradients(SGD):
    """Steps with the sum of two gradients, the second of which is that of other weights."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (parameter,) = self.param_groups[0]["params"]
        with torch.enable_grad():
            closure()
        first = parameter.grad.clone()
        parameter.add_(1.0)
        with torch.enable_grad():
            closure()
        parameter.sub_(1.0).sub_(first + parameter.grad, alpha=self.param_groups[0]["lr"])


def train_with_two_gradients(method: Method) -> list[Tensor]:
    parameters = make_parameters({"matrix": (30, 20)})
    optimizer = TwoGradients(parameters.values(), lr=0.05)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        method.attach(optimizer, parameters.items())
    for step in range(4):

        def closure() -> None:
            optimizer.zero_grad()
            backward(parameters, step)  # noqa: B023

        optimizer.step(closure)
    return [parameter.detach() for parameter in parameters.values()]


def test_each_gradient_of_a_closure_is_exchanged() -> None:
    methods = [Method(), DGC(sparsity=[0.5], min_numel=1)]
    (first, sparse), (second, other) = run_ranks(each, 2, train_with_two_gradients, [(method,) for method in methods])
    assert torch.equal(first[0], second[0])
    assert torch.equal(sparse[0], other[0])
    weight = make_weight("matrix", (30, 20))
    for step in range(4):
        c = sum(coefficients("matrix", weight, rank, step) for rank in range(2)) / 2
        weight = weight - 0.05 * ((c + weight) + (c + weight + 1.0))
    torch.testing.assert_close(first[0], weight, rtol=1e-5, atol=1e-6)


# Steps that fail ------------------------------------------------------------------------------------------------------


def go_on_after_errors() -> dict[str, Any]:
    """A bad gradient, a closure that raises, a step that raises: the next step exchanges as if they had not been."""
    parameters = make_parameters(SHAPES)
    optimizer = SGD(parameters.values(), lr=0.05, momentum=0.9)
    worker = DGC(sparsity=[0.9], min_numel=18).attach(optimizer, parameters.items())
    assert isinstance(worker, GradientWorker)
    facts: dict[str, Any] = {}

    def bad() -> None:
        backward(parameters, 0)
        if dist.get_rank() == 1:
            parameters["matrix"].grad.fill_(torch.nan)  # type: ignore[union-attr]
        optimizer.step()

    def closure_that_raises() -> None:
        raise KeyError("closure")

    facts["bad"] = message_of(bad, NonFiniteGradientError)
    facts["closure"] = message_of(lambda: optimizer.step(closure_that_raises), KeyError)  # type: ignore[arg-type]
    optimizer.zero_grad()
    backward(parameters, 0)
    hook = optimizer.register_step_pre_hook(lambda *_: {}["hook"])  # after that of the worker, which has exchanged
    facts["hook"] = message_of(optimizer.step, KeyError)
    hook.remove()
    facts["step"] = worker.step
    before = digest(parameters.values())
    for step in range(1, 3):
        optimizer.zero_grad()
        step_alone(worker, parameters, step)
    facts["momentum"] = optimizer.param_groups[0]["momentum"]
    facts["moved"] = digest(parameters.values()) != before
    return {**facts, "digest": digest(parameters.values()), "steps": worker.step}


def test_a_step_that_fails_leaves_no_rank_alone() -> None:
    first, second = run_ranks(go_on_after_errors, 2)
    assert first == second
    assert "'matrix' on rank 1" in first["bad"]
    assert (first["closure"], first["hook"]) == ("'closure'", "'hook'")
    assert (first["step"], first["steps"], first["momentum"], first["moved"]) == (0, 2, 0.9, True)


def skip_with_a_scaler() -> dict[str, Any]:
    """As the docstring of `Worker` has it, with a step that one rank alone would skip."""
    parameters = make_parameters(SHAPES)
    optimizer = SGD(parameters.values(), lr=0.05, momentum=0.9)
    worker = DGC(sparsity=[0.9], min_numel=18).attach(optimizer, parameters.items())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    taken = []
    for step in range(4):
        optimizer.zero_grad()
        loss = torch.zeros(())
        for name, parameter in parameters.items():
            loss = loss + (parameter * coefficients(name, parameter, dist.get_rank(), step)).sum()
        scaler.scale(loss).backward()
        if step == 2 and dist.get_rank() == 1:
            parameters["conv"].grad.fill_(torch.inf)  # type: ignore[union-attr]
        before = digest(parameters.values())
        with worker.stepping():
            scaler.unscale_(optimizer)
            if worker.exchange(skip_nonfinite=True):
                scaler.step(optimizer)
        scaler.update()
        taken.append(digest(parameters.values()) != before)
    return {"taken": taken, "digest": digest(parameters.values()), "step": worker.step}


def test_a_step_may_be_left_out_on_all_ranks() -> None:
    first, second = run_ranks(skip_with_a_scaler, 2)
    assert first == second
    assert first["taken"] == [True, True, False, True]
    assert first["step"] == 4


# Optimizers of others -------------------------------------------------------------------------------------------------


class Noting(SGD):
    """An optimizer as users write them: a step of its own around torch's, with one more argument."""

    def step(self, closure: Any = None, note: str = "") -> Any:  # type: ignore[override]
        self.note = note
        return super().step(closure)


def step_with_a_subclass(method: Method) -> dict[str, Any]:
    SGD(plain_parameters(), lr=0.1)  # from now on torch calls its own hooks in both `step` functions
    parameters = make_parameters(SHAPES)
    optimizer = Noting(parameters.values(), lr=0.05, momentum=0.9)
    worker = method.attach(optimizer, parameters.items())
    for step in range(3):
        optimizer.zero_grad()
        backward(parameters, step)
        optimizer.step(note="plain")
        optimizer.step(lambda: backward(parameters, 0), "closure")
    return {"step": worker.step, "note": optimizer.note, "digest": digest(parameters.values())}


def test_a_step_that_calls_torchs_is_one_step() -> None:
    first, second = run_ranks(step_with_a_subclass, 2, DGC(rampup_begin_step=3, sparsity=[0.9], min_numel=18))
    assert first == second
    assert (first["step"], first["note"]) == (6, "closure")


def step_with_schedulers() -> tuple[int, float, str]:
    parameters = make_parameters(SHAPES)
    optimizer = SGD(parameters.values(), lr=1.0)
    before = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    worker = METHOD.attach(optimizer, parameters.items())
    after = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as where `step` seems not to have been called
        for step in range(3):
            backward(parameters, step)
            optimizer.step()
            before.step()
            after.step()
    return worker.step, optimizer.param_groups[0]["lr"], digest(parameters.values())


def test_schedulers_may_be_made_before_and_after_attach() -> None:
    """Both they and `attach` wrap `step`."""
    first, second = run_ranks(step_with_schedulers, 2)
    assert first == second
    assert first[:2] == (3, 0.5**6)


class Failing(SGD):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        if self.param_groups[0].get("fails"):
            raise RuntimeError("out of luck")
        return super().step(closure)


def fail_with_a_scaler() -> dict[str, Any]:
    parameters = make_parameters(SHAPES)
    optimizer = Failing(parameters.values(), lr=0.05, momentum=0.9)
    worker = DGC(sparsity=[0.9], min_numel=18).attach(optimizer, parameters.items())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    groups: list[float] = []
    for step in range(3):
        optimizer.zero_grad()
        backward(parameters, step)
        scaler.scale(torch.zeros(()))
        optimizer.param_groups[0]["fails"] = step == 1
        if step == 1:
            with pytest.raises(RuntimeError, match="out of luck"):
                scaler.step(optimizer)
            groups = [group["momentum"] for group in optimizer.param_groups]
            assert not any(hasattr(optimizer, name) for name in ("grad_scale", "found_inf"))
        else:
            scaler.step(optimizer)
        scaler.update()
    return {"step": worker.step, "momentum": groups, "digest": digest(parameters.values())}


def test_a_step_that_raises_leaves_the_optimizer_as_it_was() -> None:
    first, second = run_ranks(fail_with_a_scaler, 2)
    assert first == second
    assert (first["step"], first["momentum"]) == (2, [0.9])


def average_a_sparse_gradient() -> str:
    layer = torch.nn.Embedding(10, 4, sparse=True)
    worker = LocalSGD(k_steps=2, begin_step=5).attach(SGD(layer.parameters(), lr=0.1), layer.named_parameters())
    if dist.get_rank() == 0:  # the other rank has none
        layer(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigurationError) as caught:
        worker.optimizer.step()
    return str(caught.value)


def test_a_sparse_gradient_that_would_be_averaged_is_refused_on_all_ranks() -> None:
    for message in run_ranks(average_a_sparse_gradient, 2):
        assert "nn.Embedding(sparse=False)" in message


# Attaching ------------------------------------------------------------------------------------------------------------


def plain_parameters() -> list[Parameter]:
    return [Parameter(torch.zeros(3))]


@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
def test_an_optimizer_has_one_worker(kind: type[Optimizer]) -> None:
    optimizer = kind(plain_parameters(), lr=0.1)  # type: ignore[call-arg]
    named = [("weight", optimizer.param_groups[0]["params"][0])]
    DGC().attach(optimizer, named)
    with pytest.raises(ConfigurationError, match=r"attached to this .* already"):
        INT8.attach(optimizer, named)
    other = kind(plain_parameters(), lr=0.1)  # type: ignore[call-arg]
    INT8.attach(other, [("weight", other.param_groups[0]["params"][0])])


def test_an_optimizer_that_is_gone_is_forgotten() -> None:
    optimizer = SGD(plain_parameters(), lr=0.1)
    DGC().attach(optimizer, [("weight", optimizer.param_groups[0]["params"][0])])
    reference = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert reference() is None, "something keeps it, with its state"


def test_names_are_asked_for() -> None:
    parameters = plain_parameters()
    with pytest.raises(ConfigurationError, match=r"pass model\.named_parameters\(\)"):
        DGC().attach(SGD(parameters, lr=0.1), parameters)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"named_parameters is a Linear: pass model\.named_parameters\(\)"):
        DGC().attach(SGD(parameters, lr=0.1), torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"takes a torch optimizer first, and got a list"):
        DGC().attach([("weight", parameters[0])], SGD(parameters, lr=0.1))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="none of the optimizer's parameters is among these"):
        DGC().attach(SGD(parameters, lr=0.1), torch.nn.Linear(2, 2).named_parameters())


def test_a_group_may_be_empty() -> None:
    weight = plain_parameters()[0]
    optimizer = SGD([{"params": []}, {"params": [weight]}], lr=0.1)
    assert DGC().attach(optimizer, [("weight", weight)]).parameters() == [weight]


def test_a_launched_rank_without_a_process_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    parameters = plain_parameters()
    with pytest.raises(ConfigurationError, match=r"each rank would train alone.*init_process_group"):
        DGC().attach(SGD(parameters, lr=0.1), [("weight", parameters[0])])


def warned_by_attach(method: Method, environment: dict[str, str]) -> list[str]:
    parameters = plain_parameters()
    with warnings.catch_warnings(record=True) as caught, pytest.MonkeyPatch.context() as monkeypatch:
        warnings.simplefilter("always")
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        method.attach(SGD(parameters, lr=0.1), [("weight", parameters[0])])
    assert {each.filename for each in caught} <= {__file__}
    return [str(each.message) for each in caught]


def test_a_rank_alone_is_told() -> None:
    alone, started = ("attach {}: there is no other rank to communicate with", "is 2, so other processes were started")
    for method in (DGC(), LocalSGD(), Hierarchical()):
        (message,) = warned_by_attach(method, {})
        assert message.startswith(alone.format("without a process group"))
        assert started not in message
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        (message,) = warned_by_attach(DGC(), {name: "2"})
        assert f" {name} {started}, and each trains alone." in message
    ((message,),) = run_ranks(warned_by_attach, 1, DGC(), {"WORLD_SIZE": "2"})  # each made a group of its own
    assert message.startswith(alone.format("with one rank"))
    assert f"WORLD_SIZE {started}" in message


def test_a_density_that_was_given_as_a_sparsity_is_told() -> None:
    (message,), other = run_ranks(warned_by_attach, 2, DGC(sparsity=[0.001]), {})
    assert message.startswith("sparsity=[0.001]: 99.9 % of the elements are sent.")
    assert other == []


def warn_of_one_node() -> list[str]:
    parameters = plain_parameters()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        DGC(topology=((0, 1),)).attach(SGD(parameters, lr=0.1), [("weight", parameters[0])])
    return [str(warning.message) for warning in caught if "topology" in str(warning.message)]


def test_one_node_is_said() -> None:
    first, second = run_ranks(warn_of_one_node, 2)
    assert "this trains as DDP" in first[0]
    assert second == []


def warn_of_error_feedback() -> str:
    parameters = plain_parameters()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        DGC().attach(torch.optim.RMSprop(parameters), [("weight", parameters[0])])
    return caught[0].filename if caught else ""


def test_the_warning_about_an_optimizer_names_the_users_line() -> None:
    assert run_ranks(warn_of_error_feedback, 2) == [__file__, ""]


def test_nccl_with_another_current_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    check_current_device(torch.device("cuda", 0), None)
    with pytest.raises(ConfigurationError, match=r"torch\.cuda\.set_device\(1\)"):
        check_current_device(torch.device("cuda", 1), None)
