"""Plain loops on ranks that do not train the same: each error names what differs, on all ranks, and nothing hangs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adam, AdamW

from lightning_lowbw import DGC, ConfigurationError, DisagreementError, LocalSGD, Method, QuantizedGradients
from lightning_lowbw.comm.agreement import digest
from tests.ranks import run_ranks
from tests.sync.problem import message_of, run_each

METHODS: dict[str, Method] = {
    "dgc": DGC(sparsity=[0.9], rampup_begin_step=4, min_numel=10),
    "int8": QuantizedGradients(),
    "local_sgd": LocalSGD(k_steps=3, begin_step=0),
}
STEPS = 5
SYNCHRONOUS = LocalSGD(k_steps=3, begin_step=2 * STEPS)  # until the end


def make(seed: int = 0, width: int = 12) -> nn.Sequential:
    torch.default_generator.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.Linear(width, 3))


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(6, 8, generator=generator)).square().mean().backward()
        optimizer.step()


def begin(method: Method, model: nn.Module | None = None) -> tuple[nn.Module, Any, Any]:
    model = make() if model is None else model
    own = SGD(model.parameters(), lr=0.05, momentum=0.9)
    buffers = dict(model.named_buffers()) if method.averages_weights else None
    return model, own, method.attach(own, model.named_parameters(), named_buffers=buffers)


# The ranks' models and optimizers -------------------------------------------------------------------------------------

DIFFERENCES = {
    "shape": ("model", "parameter 0.weight", "(12, 8)", "(14, 8)"),
    "names": ("model", "parameter 1.weight", "nothing"),
    "frozen": ("model", "parameter 0.bias", "trains", "frozen"),
    "buffers": ("running_mean: rank 0 has ((12,), 'torch.float32'), rank 1 has ((12,), 'torch.float64')",),
    "class": ("optimizers", "SGD", "Adam"),
    "lr": ("optimizers", "optimizer 0, param group 0, lr: rank 0 has 0.1, rank 1 has 0.2"),
    "a tensor's lr": ("lr: rank 0 has 0.5, rank 1 has 1.0",),
    "phase": ("rank 1 has 'phase:1'",),
    "cuda": (),  # names of devices may differ
}


def attach_differently(method: Method, what: str) -> str | None:
    is_other = dist.get_rank() == 1
    model = make(width=14 if is_other and what == "shape" else 12)
    if is_other and what == "names":
        model = nn.Sequential(model[0], nn.Sequential(model[1], model[2]))
    if is_other and what == "frozen":
        model[0].requires_grad_(False)
    if is_other and what == "buffers":
        model[1].double()
    optimizer: Any = (Adam if is_other and what == "class" else SGD)(model.parameters(), lr=0.1)
    if what == "a tensor's lr":
        optimizer = AdamW(model.parameters(), lr=torch.tensor(0.5 * (1 + is_other)), foreach=False)
    if is_other and what == "lr":
        optimizer.param_groups[0]["lr"] = 0.2
    optimizer.param_groups[0]["policy"] = f"{what}:{int(is_other)}" if what in ("phase", "cuda") else ""
    buffers = dict(model.named_buffers()) if method.averages_weights else None
    attach = partial(method.attach, optimizer, model.named_parameters(), named_buffers=buffers)
    return message_of(attach, DisagreementError)


@pytest.mark.parametrize("name", METHODS)
def test_models_and_optimizers_that_differ_are_named(name: str) -> None:
    differences = {what: words for what, words in DIFFERENCES.items() if what != "buffers" or name == "local_sgd"}
    results = run_each(2, {what: partial(attach_differently, METHODS[name], what) for what in differences})
    for what, words in differences.items():
        for message in results[what]:
            assert all(word in str(message) for word in words), what
            assert bool(message) == bool(words)


# The first step -------------------------------------------------------------------------------------------------------

CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "value": lambda weight: weight + 1.0,
    "signs": torch.neg,
    "rows": lambda weight: weight.flip(0),
}


def begin_with(method: Method, change: str) -> list[str | None]:
    """Begin with another weight on one rank, and try again."""
    model, own, _ = begin(method)
    if dist.get_rank() == 1:
        with torch.no_grad():
            model[0].weight.copy_(CHANGES[change](model[0].weight.clone()))  # type: ignore[index]
    return [message_of(lambda: train(model, own, range(1)), DisagreementError) for _ in range(2)]


def go_on(method: Method, loads: str) -> str | None:
    """Train, and begin once more from what was saved: what the first step says, or where it ends.

    Args:
        loads: "all"; or all but the worker's state; or the model on rank 0 alone, as with DDP, which would send it.
    """
    model, own, worker = begin(method)
    train(model, own, range(6 if loads == "model of rank 0" else STEPS))  # after the sixth is an average
    states = [worker.state_dict(), own.state_dict(), {name: p.clone() for name, p in model.state_dict().items()}]
    worker.finish()
    model, own, worker = begin(method)
    if loads != "model of rank 0" or dist.get_rank() == 0:
        model.load_state_dict(states[2])
    own.load_state_dict(states[1])
    if loads != "no worker":
        worker.load_state_dict(states[0])
    message = message_of(lambda: train(model, own, range(STEPS, 2 * STEPS)), DisagreementError)
    if message is None:
        worker.finish()
    return message or digest(model.parameters())


def load_that_of_rank_zero(method: Method) -> str | None:
    model, own, worker = begin(method)
    train(model, own, range(STEPS))
    states = [worker.state_dict()]
    worker.finish()
    dist.broadcast_object_list(states, 0)
    _, _, other = begin(method)
    return message_of(lambda: other.load_state_dict(states[0]), ConfigurationError)


class Scratch(SGD):
    """Keeps entries of its own in the state, and options that are those of a rank."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.param_groups[0].update(device=f"cuda:{dist.get_rank()}", hooks=(object(),), tensor=torch.ones(2))
        self.state["k"] = torch.tensor([dist.get_rank()])  # type: ignore[index]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["scratch"] = torch.full_like(parameter, dist.get_rank())


def train_with_scratch(method: Method) -> str:
    model = make()
    own = Scratch(model.parameters())
    worker = method.attach(own, model.named_parameters(), named_buffers=model.named_buffers())  # type: ignore[arg-type]
    train(model, own, range(STEPS))
    worker.finish()
    return digest(model.parameters())


@pytest.mark.parametrize("name", METHODS)
def test_what_differs_at_the_first_step_is_told(name: str) -> None:
    """Weights; what was loaded; each time. Each rank's own states may differ, and what an optimizer keeps beside."""
    method = METHODS[name]
    calls: dict[str, Any] = {change: partial(begin_with, method, change) for change in CHANGES}
    calls |= {loads: partial(go_on, method, loads) for loads in ("all", "no worker", "model of rank 0")}
    calls |= {"other": partial(load_that_of_rank_zero, method), "scratch": partial(train_with_scratch, method)}
    results = run_each(2, calls)
    for change in CHANGES:
        for messages in results[change]:
            assert all("all begin with the same weights" in str(message) for message in messages)
            assert all("checksum of 0.weight: rank 0 has" in str(message) for message in messages)
    assert results["all"][0] == results["all"][1]
    assert results["scratch"][0] == results["scratch"][1]
    differing = {"dgc": "the optimizer's momentum_buffer of 0.weight", "local_sgd": "0.weight"}
    for message in results["no worker"] if name in differing else ():
        assert f"checksum of {differing[name]}: rank 0 has" in str(message)
        assert "each rank loads its own worker.state_dict()" in str(message)
    assert all("checksum of 0.weight: rank 0 has" in str(message) for message in results["model of rank 0"])
    first, second = results["other"]
    assert first is None
    assert "The state is that of rank 0 of 2, and this is rank 1 of 2" in second
    assert "merge_states" in second


# The end --------------------------------------------------------------------------------------------------------------


def end_apart(num_steps: list[int]) -> str | None:
    model, own, worker = begin(METHODS["local_sgd"])
    train(model, own, range(num_steps[dist.get_rank()]))
    return message_of(worker.finish, DisagreementError)


@pytest.mark.parametrize("num_steps", [[6, 7], [7, 6], [7, 8]], ids=str)
def test_local_steps_that_one_rank_has_more_are_told_at_the_end(num_steps: list[int]) -> None:
    """An average is after every third; the ranks then stand before the same one."""
    for message in run_ranks(end_apart, 2, num_steps, timeout_s=60.0):
        assert f"worker.step: rank 0 has {num_steps[0]}, rank 1 has {num_steps[1]}" in str(message)


def end_differently(method: Method, what: str) -> str | None:
    model, own, worker = begin(method)
    train(model, own, range(STEPS))
    if dist.get_rank() == 1 and what == "weights":
        with torch.no_grad():
            model[0].weight[0, 0] += 1.0  # type: ignore[index]
    elif dist.get_rank() == 1:
        worker.step += 1
    return message_of(worker.finish, DisagreementError)


def test_weights_and_steps_that_differ_are_told_at_the_end() -> None:
    named = {"weights": "checksum of 0.weight", "steps": "worker.step"}
    methods = [METHODS["dgc"], METHODS["int8"], SYNCHRONOUS]
    calls = {f"{m.what} {what}": partial(end_differently, m, what) for m in methods for what in named}
    for name, messages in run_each(2, calls).items():
        for message in messages:
            assert "end of the training" in str(message)
            assert f"{named[name.split()[-1]]}: rank 0 has" in str(message)
