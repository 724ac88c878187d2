"""Plain loops on ranks that do not train the same: each error names what differs, on all ranks, and nothing hangs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adam, AdamW

from lightning_lowbw import DGC, DisagreementError, LocalSGD, Method
from tests.ranks import on_ranks
from tests.sync.problem import message_of, run_each

METHODS: dict[str, Method] = {
    "dgc": DGC(sparsity=[0.9], rampup_begin_step=4, min_numel=10),
    "local_sgd": LocalSGD(k_steps=3, begin_step=0),
}
STEPS = 5
SYNCHRONOUS = LocalSGD(k_steps=3, begin_step=2 * STEPS)  # until the end


def make(width: int = 12) -> nn.Sequential:
    torch.default_generator.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.Linear(width, 3))


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(6, 8, generator=generator)).square().mean().backward()
        optimizer.step()


def begin(method: Method) -> tuple[nn.Module, Any, Any]:
    """Begin with an optimizer that has entries of its own, which may differ between ranks."""
    model, rank = make(), dist.get_rank()
    own: Any = SGD(model.parameters(), lr=0.05, momentum=0.9)
    own.param_groups[0].update(device=f"cuda:{rank}", hooks=(len, max)[rank], tensor=torch.ones(2) * rank)
    own.state["k"] = torch.tensor([rank])
    for parameter in model.parameters():
        own.state[parameter]["scratch"] = torch.full_like(parameter, rank)
    buffers = dict(model.named_buffers()) if method.when.averages_weights else None
    return model, own, method.attach(own, model.named_parameters(), named_buffers=buffers)


# The ranks' models and optimizers -------------------------------------------------------------------------------------

DIFFERENCES = {
    "shape": ("model", "parameter 0.weight", "(12, 8)", "(14, 8)"),
    "names": ("model", "parameter 1.weight", "nothing"),
    "frozen": ("model", "parameter 0.bias", "trains", "frozen"),
    "buffers": ("running_mean: rank 0 has ((12,), torch.float32), rank 1 has ((12,), torch.float64)",),
    "class": ("optimizers", "SGD", "Adam"),
    "lr": ("optimizers", "optimizer 0, param group 0, lr: rank 0 has 0.1, rank 1 has 0.2"),
    "a tensor's lr": ("lr: rank 0 has 0.5, rank 1 has 1.0",),
    "phase": ("rank 1 has 'phase:1'",),
    "cuda": (),  # names of devices may differ
}


@pytest.mark.parametrize("what", DIFFERENCES)
@on_ranks()
def test_models_and_optimizers_that_differ_are_named(what: str) -> None:
    is_other = dist.get_rank() == 1
    model = make(width=14 if is_other and what == "shape" else 12)
    if is_other and what == "names":
        model = nn.Sequential(model[0], nn.Sequential(model[1], model[2]))
    if is_other and what == "frozen":
        model[0].requires_grad_(False)
    if is_other and what == "buffers":
        model[1].running_mean = model[1].running_mean.double()
    optimizer: Any = (Adam if is_other and what == "class" else SGD)(model.parameters(), lr=0.1)
    if what == "a tensor's lr":
        optimizer = AdamW(model.parameters(), lr=torch.tensor(0.5 * (1 + is_other)), foreach=False)
    if is_other and what == "lr":
        optimizer.param_groups[0]["lr"] = 0.2
    optimizer.param_groups[0]["policy"] = f"{what}:{int(is_other)}" if what in ("phase", "cuda") else ""
    buffers = dict(model.named_buffers())
    attach = partial(METHODS["local_sgd"].attach, optimizer, model.named_parameters(), named_buffers=buffers)
    message = message_of(attach, DisagreementError)
    assert all(word in str(message) for word in DIFFERENCES[what])
    assert bool(message) == bool(DIFFERENCES[what])


# The first step -------------------------------------------------------------------------------------------------------


def begin_with_other_weights(method: Method) -> list[str | None]:
    """Begin with another weight on one rank, and try again."""
    model, own, _ = begin(method)
    if dist.get_rank() == 1:
        with torch.no_grad():
            model[0].weight.copy_(model[0].weight.flip(0))  # type: ignore[index, operator]
    return [message_of(lambda: train(model, own, range(1)), DisagreementError) for _ in range(2)]


def go_on(method: Method, loads: str) -> str | None:
    """Train, and begin once more from what was saved; return what the first step says.

    Args:
        loads: "no worker", all but the worker's state; or the model on rank 0 alone, as with DDP, which would send it.
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
    return message_of(lambda: train(model, own, range(STEPS, STEPS + 1)), DisagreementError)


@pytest.mark.parametrize("name", METHODS)
def test_what_differs_at_the_first_step_is_told(name: str) -> None:
    """Weights; what was loaded; each time."""
    method = METHODS[name]
    calls: dict[str, Any] = {loads: partial(go_on, method, loads) for loads in ("no worker", "model of rank 0")}
    calls["others"] = partial(begin_with_other_weights, method)
    results = run_each(2, calls)
    for messages in results["others"]:
        assert all("all begin with the same weights" in str(message) for message in messages)
        assert all("checksum of 0.weight: rank 0 has" in str(message) for message in messages)
    differing = {"dgc": "the optimizer's momentum_buffer of 0.weight", "local_sgd": "0.weight"}
    for message in results["no worker"]:
        assert f"checksum of {differing[name]}: rank 0 has" in str(message)
        assert "each rank loads its own worker.state_dict()" in str(message)
    assert all("checksum of 0.weight: rank 0 has" in str(message) for message in results["model of rank 0"])


# The end --------------------------------------------------------------------------------------------------------------


CASES = [(method, (STEPS, STEPS + more), not more) for method in (METHODS["dgc"], SYNCHRONOUS) for more in (0, 1)]
CASES += [(METHODS["local_sgd"], steps, False) for steps in ((6, 7), (7, 8))]  # an average is after every third


@pytest.mark.parametrize(("method", "num_steps", "changes_weight"), CASES)
@on_ranks()
def test_weights_and_steps_that_differ_are_told(method: Method, num_steps: Any, changes_weight: bool) -> None:
    """Where one rank has taken more steps, or has another weight; synchronous steps are only counted."""
    model, own, worker = begin(method)
    if method == METHODS["local_sgd"]:
        train(model, own, range(num_steps[dist.get_rank()]))
    else:
        train(model, own, range(STEPS))
        worker.step = num_steps[dist.get_rank()]
    if dist.get_rank() == 1 and changes_weight:
        with torch.no_grad():
            model[0].weight[0, 0] += 1.0  # type: ignore[index]
    said = str(message_of(worker.finish, DisagreementError))
    first, second = num_steps
    steps = f"worker.step: rank 0 has {first}, rank 1 has {second}"
    assert ("checksum of 0.weight" if changes_weight else steps) in said
    assert "end of the training" in said
