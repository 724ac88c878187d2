"""Plain loops on ranks that do not train the same: each error names what differs, on all ranks, and nothing hangs."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adam, AdamW

from lightning_lowbw import DGC, ConfigurationError, DisagreementError, LocalSGD, Method
from lightning_lowbw.engine.presets import preset
from lightning_lowbw.where.agreement import digest
from tests.engine.problem import message_of
from tests.ranks import run_ranks

METHODS: dict[str, Method] = {
    "dgc": DGC(sparsity=[0.9], rampup_begin_step=4, min_numel=10),
    "int8": preset("int8"),
    "local_sgd": LocalSGD(k_steps=3, begin_step=0),
}
SYNCHRONOUS = "local_sgd, synchronous until the end"
STEPS = 5


def make(seed: int = 0, width: int = 12) -> nn.Sequential:
    torch.default_generator.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.Linear(width, 3))


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(6, 8, generator=generator)).square().mean().backward()
        optimizer.step()


# The ranks' models and optimizers -------------------------------------------------------------------------------------


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
    if is_other and what == "lr":
        optimizer.param_groups[0]["lr"] = 0.2
    buffers = dict(model.named_buffers()) if method.averages_weights else None
    return message_of(
        lambda: method.attach(optimizer, model.named_parameters(), named_buffers=buffers), DisagreementError
    )


DIFFERENCES = {
    "shape": ("model", "parameter 0.weight", "(12, 8)", "(14, 8)"),
    "names": ("model", "parameter 1.weight", "nothing"),
    "frozen": ("model", "parameter 0.bias", "trains", "frozen"),
    "class": ("optimizers", "SGD", "Adam"),
    "lr": ("optimizers", "optimizer 0, param group 0, lr: rank 0 has 0.1, rank 1 has 0.2"),
}


@pytest.mark.parametrize("name", METHODS)
def test_models_and_optimizers_that_differ_are_named(name: str) -> None:
    for what, words in DIFFERENCES.items():
        for message in run_ranks(attach_differently, 2, METHODS[name], what):
            for word in words:
                assert word in message, message


def test_buffers_that_are_averaged_and_differ_are_named() -> None:
    for message in run_ranks(attach_differently, 2, METHODS["local_sgd"], "buffers"):
        assert "running_mean: rank 0 has ((12,), 'torch.float32'), rank 1 has ((12,), 'torch.float64')" in message


# The first step -------------------------------------------------------------------------------------------------------


KINDS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: AdamW(parameters, lr=0.01),
}


def begin(name: str, optimizer: str, seed: int = 0) -> tuple[nn.Sequential, Any, Any]:
    method = LocalSGD(k_steps=3, begin_step=2 * STEPS) if name == SYNCHRONOUS else METHODS[name]
    model = make(seed)
    own = KINDS[optimizer](model.parameters())
    buffers = dict(model.named_buffers()) if method.averages_weights else None
    return model, own, method.attach(own, model.named_parameters(), named_buffers=buffers)


def resume(name: str, optimizer: str, has_worker: bool) -> tuple[str, str]:
    """Save on each rank and go on, and once more from what is saved, with or without the state of the worker."""
    model, own, worker = begin(name, optimizer)
    train(model, own, range(STEPS))
    file = io.BytesIO()
    with worker.consensus() if METHODS[name].averages_weights and has_worker else nullcontext():
        torch.save([model.state_dict(), own.state_dict(), worker.state_dict()], file)
    train(model, own, range(STEPS, 2 * STEPS))
    worker.finish()
    expected = digest(model.parameters())
    model, own, worker = begin(name, optimizer)
    file.seek(0)
    of_model, of_optimizer, of_worker = torch.load(file)
    model.load_state_dict(of_model)
    own.load_state_dict(of_optimizer)
    if has_worker:
        worker.load_state_dict(of_worker)
    try:
        train(model, own, range(STEPS, 2 * STEPS))
    except DisagreementError as error:
        return expected, str(error)
    worker.finish()
    return expected, digest(model.parameters())


@pytest.mark.parametrize("optimizer", KINDS)
@pytest.mark.parametrize("name", METHODS)
def test_each_ranks_own_states_resume_to_the_bit(name: str, optimizer: str) -> None:
    for expected, resumed in run_ranks(resume, 2, name, optimizer, True):
        assert expected == resumed


@pytest.mark.parametrize(
    ("name", "what"), [("dgc", "the optimizer's momentum_buffer of 0.weight"), ("local_sgd", "0.weight")]
)
def test_a_resume_without_the_workers_states_is_told_where_ranks_differ(name: str, what: str) -> None:
    for _, message in run_ranks(resume, 2, name, "sgd", False):
        assert f"checksum of {what}: rank 0 has" in message
        assert "each rank loads its own worker.state_dict()" in message


def end_apart(num_steps: list[int]) -> str | None:
    model, own, worker = begin("local_sgd", "sgd")
    train(model, own, range(num_steps[dist.get_rank()]))
    return message_of(worker.finish, DisagreementError)


@pytest.mark.parametrize("num_steps", [[6, 7], [7, 6], [7, 8]], ids=str)
def test_local_steps_that_one_rank_has_more_are_told_at_the_end(num_steps: list[int]) -> None:
    """An average is after every third; the ranks then stand before the same one."""
    for message in run_ranks(end_apart, 2, num_steps, timeout_s=60.0):
        assert f"worker.step: rank 0 has {num_steps[0]}, rank 1 has {num_steps[1]}" in str(message)


def load_that_of_rank_zero(name: str) -> str | None:
    model, own, worker = begin(name, "sgd")
    train(model, own, range(STEPS))
    states = [worker.state_dict()]
    worker.finish()
    dist.broadcast_object_list(states, 0)
    _, _, other = begin(name, "sgd")
    return message_of(lambda: other.load_state_dict(states[0]), ConfigurationError)


@pytest.mark.parametrize("name", METHODS)
def test_the_state_of_another_rank_is_refused(name: str) -> None:
    first, second = run_ranks(load_that_of_rank_zero, 2, name)
    assert first is None
    assert "The state is that of rank 0 of 2, and this is rank 1 of 2" in second
    assert "merge_states" in second


def begin_differently(name: str) -> str | None:
    model, own, _ = begin(name, "sgd", seed=dist.get_rank())
    return message_of(lambda: train(model, own, range(1)), DisagreementError)


@pytest.mark.parametrize("name", METHODS)
def test_weights_that_differ_are_told_at_the_first_step(name: str) -> None:
    for message in run_ranks(begin_differently, 2, name):
        assert "all begin with the same weights" in message
        assert "checksum of 0.weight: rank 0 has" in message


def load_on_rank_zero(name: str) -> str | None:
    """Load the model on rank 0 alone, as with DDP, which would send it; and all else on all ranks."""
    model, own, worker = begin(name, "sgd")
    train(model, own, range(6))  # an average of local SGD is the last
    states = [worker.state_dict(), own.state_dict(), {name: p.clone() for name, p in model.state_dict().items()}]
    worker.finish()
    model, own, worker = begin(name, "sgd")
    if dist.get_rank() == 0:
        model.load_state_dict(states[2])
    own.load_state_dict(states[1])
    worker.load_state_dict(states[0])
    return message_of(lambda: train(model, own, range(1)), DisagreementError)


@pytest.mark.parametrize("name", METHODS)
def test_weights_that_are_loaded_on_one_rank_are_told(name: str) -> None:
    for message in run_ranks(load_on_rank_zero, 2, name):
        assert "checksum of 0.weight: rank 0 has" in str(message)


SAME_SUM: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "signs": torch.neg,
    "rows": lambda weight: weight.flip(0),
}


def begin_with(name: str, change: str) -> str | None:
    model, own, _ = begin(name, "sgd")
    if dist.get_rank() == 1:
        with torch.no_grad():
            model[0].weight.copy_(SAME_SUM[change](model[0].weight.clone()))
    return message_of(lambda: train(model, own, range(1)), DisagreementError)


@pytest.mark.parametrize("change", SAME_SUM)
@pytest.mark.parametrize("name", METHODS)
def test_weights_that_differ_by_sign_or_order_are_told(name: str, change: str) -> None:
    for message in run_ranks(begin_with, 2, name, change):
        assert "checksum of 0.weight: rank 0 has" in str(message)


def swap_layers(name: str) -> list[str | None]:
    """Begin with two layers swapped on one rank, and try again."""
    model = make()
    extra = nn.Linear(3, 3), nn.Linear(3, 3)
    pairs = extra if dist.get_rank() == 0 else extra[::-1]
    model = nn.Sequential(*model, *pairs)
    own = KINDS["sgd"](model.parameters())
    METHODS[name].attach(own, model.named_parameters())
    return [message_of(lambda: train(model, own, range(1)), DisagreementError) for _ in range(2)]


def test_layers_in_another_order_are_told_each_time() -> None:
    for messages in run_ranks(swap_layers, 2, "local_sgd"):
        assert all("checksum of 3.weight" in str(message) for message in messages)


class Scratch(SGD):
    """Keeps entries of its own in the state, and options that are those of a rank."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.param_groups[0].update(device=f"cuda:{dist.get_rank()}", hooks=(object(),), tensor=torch.ones(2))
        self.state["k"] = torch.tensor([dist.get_rank()])  # type: ignore[index]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["scratch"] = torch.full_like(parameter, dist.get_rank())


def train_with_scratch(name: str) -> str:
    model = make()
    own = Scratch(model.parameters())
    buffers = model.named_buffers()  # an iterator, too
    worker: Any = METHODS[name].attach(own, model.named_parameters(), named_buffers=buffers)  # type: ignore[arg-type]
    train(model, own, range(STEPS))
    worker.finish()
    return digest(model.parameters())


@pytest.mark.parametrize("name", METHODS)
def test_what_a_rank_may_have_for_itself(name: str) -> None:
    first, second = run_ranks(train_with_scratch, 2, name)
    assert first == second


def attach_with_rates(rate: float) -> str | None:
    model = make()
    own = AdamW(model.parameters(), lr=torch.tensor(rate * (1 + dist.get_rank())), foreach=False)
    return message_of(lambda: METHODS["dgc"].attach(own, model.named_parameters()), DisagreementError)


def test_rates_that_are_tensors_are_compared() -> None:
    for message in run_ranks(attach_with_rates, 2, 0.5):
        assert "lr: rank 0 has 0.5, rank 1 has 1.0" in str(message)


def attach_with_policy(word: str) -> str | None:
    model = make()
    own = AdamW(model.parameters())
    own.param_groups[0]["policy"] = f"{word}:{dist.get_rank()}"
    return message_of(lambda: METHODS["dgc"].attach(own, model.named_parameters()), DisagreementError)


@pytest.mark.parametrize(("word", "is_told"), [("phase", True), ("cuda", False)])
def test_only_names_of_devices_may_differ(word: str, is_told: bool) -> None:
    for message in run_ranks(attach_with_policy, 2, word):
        assert (message is not None and "rank 1 has 'phase:1'" in message) == is_told


# The end --------------------------------------------------------------------------------------------------------------


def end_differently(name: str, what: str) -> str | None:
    model, own, worker = begin(name, "sgd")
    train(model, own, range(STEPS))
    if dist.get_rank() == 1:
        if what == "weights":
            with torch.no_grad():
                model[0].weight[0, 0] += 1.0
        else:
            worker.step += 1
    return message_of(worker.finish, DisagreementError)


@pytest.mark.parametrize(("what", "named"), [("weights", "checksum of 0.weight"), ("steps", "worker.step")])
@pytest.mark.parametrize("name", ["dgc", "int8", SYNCHRONOUS])
def test_weights_and_steps_that_differ_are_told_at_the_end(name: str, what: str, named: str) -> None:
    for message in run_ranks(end_differently, 2, name, what):
        assert "end of the training" in message
        assert f"{named}: rank 0 has" in message
