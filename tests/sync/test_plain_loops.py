"""Plain loops: `optimizer.step()` is all there is to call, in each of its forms, and no rank ever trains alone."""

from __future__ import annotations

import gc
import sys
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, RMSprop
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_lowbw import DGC, ConfigurationError, LocalSGD, Method, PowerSGD, QuantizedGradients, TopK
from lightning_lowbw.comm.agreement import digest
from tests.contract.training import count
from tests.ranks import on_ranks, run_ranks
from tests.sync import problem
from tests.sync.problem import AWKWARD, FLAT, NODES, Nodes, backward, take_step

SHAPES = {name: AWKWARD[name] for name in ("matrix", "conv", "vector", "scalar", "empty")}
METHOD = problem.DENSE_THEN_SPARSE.replace(min_numel=18)  # the vector and the scalar are sent dense
DECAYED: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}
STEPS = 5

# One step in each of its forms ----------------------------------------------------------------------------------------


def alone(worker: Any, parameters: problem.Parameters, step: int) -> None:
    backward(parameters, step)
    worker.optimizer.step()


def with_a_closure(worker: Any, parameters: problem.Parameters, step: int) -> None:
    def closure() -> float:
        worker.optimizer.zero_grad()
        backward(parameters, step)
        return 1.5

    assert worker.optimizer.step(closure) == 1.5


def exchanged_inside_a_closure(worker: Any, parameters: problem.Parameters, step: int) -> None:
    def closure() -> None:
        backward(parameters, step)
        worker.exchange()

    worker.optimizer.step(closure)


def exchanged_by_hand(worker: Any, parameters: problem.Parameters, step: int) -> None:
    backward(parameters, step)
    assert worker.exchange()
    worker.optimizer.step()


def prepared_by_hand(worker: Any, parameters: problem.Parameters, step: int) -> None:
    backward(parameters, step)
    worker.prepare()
    worker.optimizer.step()


FORMS: list[Callable[[Any, problem.Parameters, int], None]] = [
    *(take_step, alone, with_a_closure, exchanged_inside_a_closure, exchanged_by_hand, prepared_by_hand)
]
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd": partial(SGD, **DECAYED),
    "a tensor's rate": partial(SGD, lr=torch.tensor(0.05), momentum=0.9, nesterov=True, weight_decay=0.1),
    "adamw": partial(AdamW, lr=0.02, weight_decay=0.3),
    "adam": partial(Adam, lr=0.02, weight_decay=0.01, amsgrad=True),
    "rmsprop": partial(RMSprop, lr=0.002),
}
CASES: dict[str, tuple[Method, str, Nodes]] = {
    "a tensor's rate": (METHOD, "a tensor's rate", FLAT),
    "rmsprop": (METHOD, "rmsprop", FLAT),
    "senders": (METHOD.replace(mean_over="senders", value_dtype="int8"), "adamw", FLAT),
    "two levels": (METHOD, "adam", NODES["strided"]),
    "int8": (QuantizedGradients(), "sgd", FLAT),
    "local": (LocalSGD(k_steps=3, begin_step=2), "sgd", FLAT),
}


def train(name: str, form: int) -> dict[str, Any]:
    method, kind, nodes = CASES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        worker, parameters = problem.attach(method, OPTIMIZERS[kind], SHAPES, nodes)
    digests, absent = [], []
    for step in range(STEPS):
        worker.optimizer.zero_grad()
        FORMS[form](worker, parameters, step)
        digests.append(digest([*parameters.values(), *worker.state_dict()["residuals"].values()]))
        absent.append([name for name, parameter in parameters.items() if parameter.grad is None])
    assert worker.step == STEPS
    worker.finish()
    return {"digests": digests, "absent": absent, "end": digest(parameters.values())}


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_all_forms_of_a_step_are_the_same_to_the_bit(num_ranks: int) -> None:
    """Sparse ones need no dense gradient, where the optimizer would only subtract it, and nobody has asked for one."""
    names = [name for name, (_, _, nodes) in CASES.items() if sum(map(len, nodes)) == num_ranks]
    cases = [(name, form) for name in names for form in range(len(FORMS))]
    results = problem.run_each(num_ranks, {case: partial(train, *case) for case in cases})
    for (name, number), of_form in results.items():
        method, kind, _ = CASES[name]
        is_direct = isinstance(method.what, TopK) and not method.when.averages_weights and kind != "rmsprop"
        is_direct &= FORMS[number] in (alone, with_a_closure, prepared_by_hand)
        expected = ["matrix", "conv"] if is_direct else []
        assert len({result["end"] for result in of_form}) == 1, name
        for result, explicit in zip(of_form, results[name, 0], strict=True):
            assert result["digests"] == explicit["digests"], (name, number)
            assert result["absent"] == [[]] * 2 + [expected] * (STEPS - 2), (name, number)


def watch(hook: str) -> list[dict[str, Tensor | None]]:
    """Return what a hook of the optimizer's step sees; with "" what an exchange by hand gives."""
    parameters, seen = problem.make_parameters(SHAPES), list[dict[str, Tensor | None]]()
    optimizer = SGD(parameters.values(), **DECAYED)
    worker = METHOD.attach(optimizer, parameters.items())

    def look(*_: Any) -> None:
        seen.append({name: None if p.grad is None else p.grad.clone() for name, p in parameters.items()})

    register: dict[str, Any] = {"pre": optimizer.register_step_pre_hook, "post": optimizer.register_step_post_hook}
    register["all optimizers"] = register_optimizer_step_pre_hook
    handle = register[hook](look) if hook else None
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(parameters, step)
        with worker.stepping():
            if not hook:
                worker.exchange()
                look()
            optimizer.step()
    if handle is not None:
        handle.remove()
    return seen


def test_hooks_after_the_step_see_dense_gradients_and_those_before_it_a_ranks_own() -> None:
    """In dense steps both see the means."""
    by_hook = problem.run_each(2, {hook: partial(watch, hook) for hook in ("", "post", "pre", "all optimizers")})
    both = [*zip(*by_hook.values(), strict=True)]
    for expected, after, *before in both:
        for step, theirs in enumerate(expected):
            for seen in (after, *(before if step < 2 else ())):
                assert all(gradient.equal(seen[step][name]) for name, gradient in theirs.items())  # type: ignore[union-attr, arg-type]
    for mine, others in zip(both[0][2:], both[1][2:], strict=True):
        for step in range(2, STEPS):
            assert not mine[step]["matrix"].equal(others[step]["matrix"])  # type: ignore[union-attr, arg-type]


@on_ranks()
def test_a_step_that_calls_no_hooks_is_refused_where_hooks_come_first() -> None:
    parameters = problem.make_parameters(SHAPES)
    optimizer = SGD(parameters.values(), **DECAYED)
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign, misc, assignment]
    DGC(sparsity=[0.5], min_numel=18).attach(optimizer, parameters.items())
    optimizer.register_step_pre_hook(lambda *_: None)
    backward(parameters, 0)
    with pytest.raises(ConfigurationError, match="has been replaced by one that calls no hooks"):
        optimizer.step()


# Optimizers of others -------------------------------------------------------------------------------------------------


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


def train_with_two_gradients(method: Method) -> str | None:
    """Return a digest of the weights, or the error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        worker, parameters = problem.attach(method, partial(TwoGradients, lr=0.05), {"matrix": (30, 20)})

    def closure() -> None:
        worker.optimizer.zero_grad()
        backward(parameters, 0)

    said = problem.message_of(partial(worker.optimizer.step, closure), ConfigurationError)
    return said or digest(parameters.values())


def test_an_optimizer_may_call_the_closure_twice_where_nothing_is_kept_back() -> None:
    """SAM: what is not sent of the first gradient would be applied later, and is that of other weights."""
    methods = [Method(), DGC(sparsity=[0.5], min_numel=1), DGC(rampup_begin_step=9), QuantizedGradients(), PowerSGD()]
    calls = {method: partial(train_with_two_gradients, method) for method in methods}
    for method, (said, other) in problem.run_each(2, calls).items():
        assert said == other
        assert ("TwoGradients has called its closure twice in step 0" in str(said)) == (method != Method())


class Noting(SGD):
    """An optimizer as users write them: a step of its own around torch's, with one more argument."""

    def step(self, closure: Any = None, note: str = "") -> Any:  # type: ignore[override]
        self.note = note
        if self.param_groups[0].get("fails"):
            raise RuntimeError("out of luck")
        return super().step(closure)


@on_ranks()
def test_an_optimizer_may_have_a_step_of_its_own() -> None:
    """Also with schedulers, which wrap `step`, too; and with a GradScaler, in a step that raises."""
    parameters = problem.make_parameters(SHAPES)
    optimizer = Noting(parameters.values(), lr=0.05, momentum=0.9)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]
    worker = DGC(rampup_begin_step=3, sparsity=[0.9], min_numel=18).attach(optimizer, parameters.items())
    schedulers.append(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as where `step` seems not to have been called
        for step in range(3):
            optimizer.step(lambda step=step: backward(parameters, step), "closure")  # type: ignore[misc]
            for scheduler in schedulers:
                scheduler.step()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    backward(parameters, 3)
    scaler.scale(torch.zeros(()))
    optimizer.param_groups[0]["fails"] = True
    with pytest.raises(RuntimeError, match="out of luck"):
        scaler.step(optimizer)
    assert not any(hasattr(optimizer, name) for name in ("grad_scale", "found_inf"))
    assert (worker.step, optimizer.note, optimizer.param_groups[0]["lr"]) == (3, "", 0.05 * 0.5**6)


@pytest.mark.parametrize("method", [METHOD, LocalSGD(2, 0)])
@on_ranks()
def test_steps_that_are_left_out(method: Method) -> None:
    """A closure that raises on all ranks is no step; one that all leave out counts inside of `stepping`."""
    worker, parameters = problem.attach(method, shapes={"a": (50, 4)})

    def closure() -> float:
        raise KeyError("the data are gone")

    for step in range(4):
        with pytest.raises(KeyError, match="the data are gone"):
            worker.optimizer.step(closure)
        worker.optimizer.zero_grad()
        backward(parameters, step)
        with worker.stepping():
            if worker.exchange() and step != 1:
                worker.optimizer.step()
    worker.finish()
    assert worker.step == 4
    problem.same_on_all(digest(parameters.values()))


@pytest.mark.parametrize("method", [METHOD, LocalSGD(3, 0), LocalSGD(3, 0, compression={})])
@on_ranks()
def test_frozen_weights_are_never_sent(method: Method) -> None:
    """The optimizer has them, too, as many write it. Also in a look in mid-interval, and at the end."""
    worker, parameters = problem.attach(method, shapes={"frozen": (1000, 1000), "adapter": (16, 4)})
    parameters["frozen"].requires_grad_(False)
    volumes = list[int]()
    count(volumes)
    for step in range(STEPS):
        take_step(worker, parameters, step)
    if method.when.averages_weights:
        with worker.consensus():
            pass
    worker.finish()
    assert 0 < sum(volumes) < 20_000


# Attaching ------------------------------------------------------------------------------------------------------------


def one_parameter() -> tuple[Parameter, SGD]:
    weight = Parameter(torch.zeros(3))
    return weight, SGD([weight], lr=0.1)


def test_an_optimizer_has_one_worker_and_is_not_kept_alive() -> None:
    for method in (DGC(), LocalSGD()):
        weight, optimizer = one_parameter()
        method.attach(optimizer, [("weight", weight)])
        with pytest.raises(ConfigurationError, match=r"attached to this SGD already.*exchange twice"):
            QuantizedGradients().attach(optimizer, [("weight", weight)])
        reference = weakref.ref(optimizer)
        del optimizer
        gc.collect()
        assert reference() is None, "something keeps it, with its state"
    weight = one_parameter()[0]
    worker = DGC().attach(SGD([{"params": []}, {"params": [weight]}], lr=0.1), [("weight", weight)])
    assert list(worker.params) == [weight]


def test_what_cannot_be_attached_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, optimizer = one_parameter()
    named: Any = [("weight", weight)]
    linear = torch.nn.Linear(2, 2)
    cases: list[tuple[Any, Any, Any, str]] = [
        (DGC(), optimizer, [weight], r"pass model\.named_parameters\(\)"),
        (LocalSGD(), optimizer, linear, r"pass model\.named_parameters\(\)"),
        (DGC(), optimizer, linear.named_parameters(), "none of the optimizer's parameters is among these"),
        (LocalSGD(), torch.optim.LBFGS([weight]), named, "LBFGS.*strategy='ddp'"),
        (LocalSGD(num_fragments=2), optimizer, named, "1 tensors"),
        (DGC(exclude=["other"]), optimizer, named, "'other' matches no parameter"),
        (DGC(), SGD([weight], lr=0.1, momentum=0.9, dampening=0.1), named, r"dampening=0\.1"),
        (DGC(), AdamW([weight], differentiable=True), named, "differentiable=True"),
        (DGC(sparsity="auto"), optimizer, named, r"plain loop.*Give the numbers"),
    ]
    for method, first, second, message in cases:
        with pytest.raises(ConfigurationError, match=message):
            method.attach(first, second)
    LocalSGD(begin_step=0.5).attach(optimizer, named)
    with pytest.raises(ConfigurationError, match="number of steps"):
        optimizer.step()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match=r"each rank would train alone.*init_process_group"):
        DGC().attach(*one_parameter()[::-1])  # type: ignore[arg-type]


def warned_by_attach(method: Method, environment: dict[str, str], kind: Any = SGD, name: str = "weight") -> list[str]:
    weight = Parameter(torch.zeros(3))
    optimizer = kind([weight], lr=0.1)
    with warnings.catch_warnings(record=True) as caught, pytest.MonkeyPatch.context() as monkeypatch:
        warnings.simplefilter("always")
        for variable, value in environment.items():
            monkeypatch.setenv(variable, value)
        method.attach(optimizer, [(name, weight)])
    assert {each.filename for each in caught} <= {__file__}
    return [str(each.message) for each in caught]


def test_what_attach_warns_of() -> None:
    """A rank alone; a density that was given as a sparsity; one node; no correction. Rank 0 says it."""
    alone, started = "attach {}: there is no other rank to communicate with", "is 2, so other processes were started"
    (message,) = warned_by_attach(LocalSGD(), {})
    assert message.startswith(alone.format("without a process group"))
    assert started not in message
    (message,) = warned_by_attach(DGC(), {"SLURM_STEP_NUM_TASKS": "2"})
    assert f" SLURM_STEP_NUM_TASKS {started}, and each trains alone." in message
    ((message,),) = run_ranks(warned_by_attach, 1, DGC(), {"WORLD_SIZE": "2"})  # each made a group of its own
    assert message.startswith(alone.format("with one rank"))
    assert f"WORLD_SIZE {started}" in message
    cases = [(DGC(sparsity=[0.001]), {}), (DGC(topology=((0, 1),)), {}), (DGC(), {}, RMSprop)]
    cases.append((DGC(), {}, SGD, "module.weight"))
    calls = {number: partial(warned_by_attach, *case) for number, case in enumerate(cases)}
    (of_density, of_node, of_feedback, of_names), others = zip(*problem.run_each(2, calls).values(), strict=True)
    assert of_density[0].startswith("sparsity=[0.001]: 99.9 % of the elements are sent.")
    assert "this trains as DDP" in of_node[0]
    assert "RMSprop: gradients are compressed with error feedback only" in of_feedback[0]
    assert "begin with 'module.', as in DistributedDataParallel" in of_names[0]
    assert not any(others)


# The end --------------------------------------------------------------------------------------------------------------


ENDS = [*((3, end) for end in ("", "consensus", "finish", "state_dict", "raise")), (4, "")]


@pytest.mark.parametrize(("num_steps", "end"), ENDS)
@on_ranks()
def test_a_loop_that_leaves_replicas_apart_says_so(num_steps: int, end: str) -> None:
    """Once: where the worker is forgotten between two averages."""
    worker, parameters = problem.attach(LocalSGD(2, 0), shapes={"a": (5,)})
    for step in range(num_steps):
        alone(worker, parameters, step)
    if end == "consensus":
        with worker.consensus():
            pass
    elif end == "raise":
        sys.last_type = RuntimeError  # as Python does for an exception that ends it
    elif end:
        getattr(worker, end)()
    with problem.listening() as said:
        del worker, parameters
        gc.collect()
    vars(sys).pop("last_type", None)
    assert len(said) == ((num_steps, end) == (3, "") and dist.get_rank() == 0)
    for message in said:
        assert "ended after step 3, between two averages" in message
        assert "worker.finish()" in message
