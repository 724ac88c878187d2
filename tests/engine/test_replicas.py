"""Local SGD in a plain loop on real ranks, against replicas in one process."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lightning_lowbw import DGC, ConfigurationError, DisagreementError, LocalSGD, NonFiniteGradientError
from lightning_lowbw.engine.replicas import LocalSGDWorker
from lightning_lowbw.what.top_k import Compression
from lightning_lowbw.where.agreement import digest
from lightning_lowbw.where.collectives import Exchange
from lightning_lowbw.where.mean import BUCKET_BYTES
from lightning_lowbw.where.volume import all_reduce_bytes
from tests.engine.problem import AWKWARD, backward, coefficients, make_parameters, make_weight
from tests.local_oracle import OracleLocalSGD
from tests.ranks import run_ranks

STEPS = 19
OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": partial(torch.optim.AdamW, lr=0.05, eps=1e-3),
}
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 2e-5}


def loss_of(rank: int, step: int) -> float:
    return 4.0 / (1 + step) + 0.1 * rank


def lr_of(step: int) -> float:
    """Warm-up, then two decays."""
    return 0.05 * min(1.0, (step + 1) / 5) * (0.1 if step >= 16 else 0.5 if step >= 11 else 1.0)


def train(
    method: LocalSGD,
    optimizer: str,
    steps: int = STEPS,
    *,
    schedule_lr: bool = False,
    shapes: dict[str, tuple[int, ...]] = AWKWARD,
) -> dict[str, Any]:
    parameters = make_parameters(shapes)
    worker = method.attach(OPTIMIZERS[optimizer](parameters.values()), parameters.items())
    ks, digests, averages = [], [], []
    for step in range(steps):
        take_step(worker, parameters, step, schedule_lr)
        ks.append(worker.k_steps)
        averages.append(worker.num_averages)
        digests.append(digest(parameters.values()))
    own = {name: p.detach().clone() for name, p in parameters.items()}
    return {"own": own, "k": ks, "digests": digests, "averages": averages, "ledger": worker._exchange.ledger}


def take_step(worker: LocalSGDWorker, parameters: dict[str, Parameter], step: int, schedule_lr: bool = False) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    worker.optimizer.zero_grad()
    backward(parameters, step)
    if schedule_lr:
        for group in worker.optimizer.param_groups:
            group["lr"] = lr_of(step)
    worker.observe_loss(torch.tensor(loss_of(rank, step)))
    with worker.stepping():
        worker.exchange()
        worker.optimizer.step()


def by_oracle(name: str, num_ranks: int, optimizer: str, schedule_lr: bool = False, **choices: Any) -> OracleLocalSGD:
    oracle = OracleLocalSGD(make_weight(name, AWKWARD[name]), num_ranks, OPTIMIZERS[optimizer], **choices)
    for step in range(STEPS):
        if schedule_lr:
            for each in oracle.optimizers:
                each.param_groups[0]["lr"] = lr_of(step)
        gradients = [
            coefficients(name, replica, rank, step) + replica.detach() for rank, replica in enumerate(oracle.replicas)
        ]
        oracle.take_step(gradients, [loss_of(rank, step) for rank in range(num_ranks)])
    return oracle


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fixed": ({"k_steps": 4, "begin_step": 0}, {"k": 4, "begin": 0}),
    "post_local": ({"k_steps": 3, "begin_step": 5}, {"k": 3, "begin": 5}),
    "fleet": (
        {"k_steps": 2, "begin_step": 1, "rule": "fleet"},
        {"k": 2, "rule": "fleet"},
    ),
    "adacomm": (
        {"k_steps": 8, "begin_step": 1, "rule": "adacomm"},
        {"k": 8, "rule": "adacomm"},
    ),
    "qsr": (
        {"k_steps": 2, "begin_step": 1, "rule": "qsr", "qsr_alpha": 0.08, "max_k_steps": 5},
        {"k": 2, "rule": "qsr", "alpha": 0.08, "max_k": 5},
    ),
    "slowmo": (
        {"k_steps": 4, "outer": "slowmo", "outer_momentum": 0.6, "outer_lr": 0.9},
        {"k": 4, "outer": "slowmo", "outer_momentum": 0.6, "outer_lr": 0.9},
    ),
    "diloco": (
        {"k_steps": 4, "begin_step": 0, "outer": "nesterov"},
        {"k": 4, "begin": 0, "outer": "nesterov", "outer_momentum": 0.9, "outer_lr": 0.7},
    ),
    "delayed": ({"k_steps": 5, "delay_steps": 3}, {"k": 5, "delay": 3}),
    "delayed diloco": (
        {"k_steps": 5, "delay_steps": 2, "outer": "nesterov"},
        {"k": 5, "delay": 2, "outer": "nesterov", "outer_momentum": 0.9, "outer_lr": 0.7},
    ),
    "average": ({"k_steps": 4, "inner_momentum": "average"}, {"k": 4, "momentum": "average"}),
    "reset": ({"k_steps": 4, "inner_momentum": "reset"}, {"k": 4, "momentum": "reset"}),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_equals_replicas_in_one_process(case: str, optimizer: str, num_ranks: int) -> None:
    choices, oracle_choices = CASES[case]
    schedule_lr = "rule" in choices
    results = run_ranks(partial(train, LocalSGD(**choices), optimizer, schedule_lr=schedule_lr), num_ranks)
    for name in AWKWARD:
        oracle = by_oracle(name, num_ranks, optimizer, schedule_lr, **oracle_choices)
        for rank, result in enumerate(results):
            torch.testing.assert_close(result["own"][name], oracle.replicas[rank].detach(), **CLOSE)
    averaged_at = [
        step + 1
        for step in range(STEPS)
        if results[0]["averages"][step] > (results[0]["averages"][step - 1] if step else 0)
    ]
    assert averaged_at == [step + oracle.delay for step in oracle.averaged_at if step + oracle.delay <= STEPS]
    assert all(result["k"] == results[0]["k"] for result in results)
    if schedule_lr:
        assert len(set(oracle.ks)) > 1, "the case adapts nothing"
        assert results[0]["k"][-1] == oracle.ks[-1]
    if not oracle.delay:
        for step in averaged_at:
            assert len({result["digests"][step - 1] for result in results}) == 1, "replicas differ after an average"
        assert len({result["digests"][averaged_at[0] - 2] for result in results}) == num_ranks, "not local before it"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_k_of_1_is_the_mean_gradient_in_every_step(optimizer: str) -> None:
    results = run_ranks(partial(train, LocalSGD(k_steps=1), optimizer), 2)
    for name in AWKWARD:
        oracle = by_oracle(name, 2, optimizer, begin=STEPS)
        for result in results:
            torch.testing.assert_close(result["own"][name], oracle.replicas[0].detach(), **CLOSE)
    assert results[0]["digests"] == results[1]["digests"]


def test_one_rank_is_plain_training() -> None:
    (result,) = run_ranks(partial(train, LocalSGD(k_steps=3), "sgd"), 1)
    for name in AWKWARD:
        oracle = by_oracle(name, 1, "sgd", begin=STEPS)
        torch.testing.assert_close(result["own"][name], oracle.replicas[0].detach(), rtol=0, atol=0)
    assert result["ledger"].sent_bytes == 0


def test_bytes_are_those_of_one_all_reduce_every_k_steps() -> None:
    num_ranks, shapes = 3, {"a": (64, 64), "b": (100,)}
    results = run_ranks(partial(train, LocalSGD(k_steps=4, begin_step=0), "sgd", 12, shapes=shapes), num_ranks)
    numel = 64 * 64 + 100 + 8 + 2 * num_ranks
    for result in results:
        assert result["ledger"].sent_bytes == 3 * all_reduce_bytes(4 * numel, num_ranks)
        assert result["ledger"].dense_bytes == 12 * all_reduce_bytes(4 * (64 * 64 + 100), num_ranks)


# Narrow values -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value_dtype", ["bfloat16", "float16"])
def test_half_the_bytes_and_nothing_is_lost_for_long(value_dtype: str) -> None:
    shapes = {"a": (64, 64), "b": (101,)}
    method = LocalSGD(k_steps=2, begin_step=0, value_dtype=value_dtype)
    narrow = run_ranks(partial(train, method, "sgd", 40, shapes=shapes), 2)
    wide = run_ranks(partial(train, LocalSGD(k_steps=2, begin_step=0), "sgd", 40, shapes=shapes), 2)
    assert narrow[0]["digests"][-1] == narrow[1]["digests"][-1]
    assert narrow[0]["ledger"].sent_bytes < 0.52 * wide[0]["ledger"].sent_bytes
    for name in shapes:  # a relative rounding of 2^-8 of the change, once: not 20 times
        scale = float((wide[0]["own"][name] - make_weight(name, shapes[name])).abs().max())
        assert float((narrow[0]["own"][name] - wide[0]["own"][name]).abs().max()) < 2**-7 * scale


# Buffers -----------------------------------------------------------------------------------------------------------


def average_buffers(delay: int) -> dict[str, Tensor]:
    rank = dist.get_rank()
    weight = Parameter(torch.zeros(3))
    buffers = {
        "norm.running_mean": torch.tensor([1000.0, 0.0]),
        "norm.running_var": torch.tensor([1e-3, 1.0]),
        "norm.num_batches_tracked": torch.tensor(0),
        "mask": torch.tensor([0.0, -math.inf]),
        "third": torch.tensor([1 / 3]),
    }
    worker = LocalSGD(k_steps=2 * delay + 2, begin_step=0, delay_steps=delay).attach(
        torch.optim.SGD([weight], lr=0.1), [("weight", weight)], None, buffers
    )
    for step in range(2 * delay + 2 + delay):
        with worker.stepping():
            worker.exchange()
            if step == 0:
                buffers["norm.running_mean"].copy_(torch.tensor([1000.0 + rank, 2.0 * rank]))
                buffers["norm.running_var"].copy_(torch.tensor([0.5, 1.0 + rank]))
                buffers["norm.num_batches_tracked"].fill_(5 + rank)
    return buffers


@pytest.mark.parametrize("delay", [0, 2])
def test_buffers_are_averaged_with_the_variance_between_ranks(delay: int) -> None:
    for buffers in run_ranks(average_buffers, 3, delay):
        torch.testing.assert_close(buffers["norm.running_mean"], torch.tensor([1001.0, 2.0]))
        # mean of variances + variance of means: of 0, 1, 2 that is 2/3, of 0, 2, 4 it is 8/3
        torch.testing.assert_close(buffers["norm.running_var"], torch.tensor([0.5 + 2 / 3, 2 + 8 / 3]))
        assert int(buffers["norm.num_batches_tracked"]) == 7
        assert buffers["mask"].tolist() == [0.0, -math.inf]
        assert buffers["third"].tolist() == torch.tensor([1 / 3]).tolist()  # to the bit, on three ranks


# Awkward parameters ------------------------------------------------------------------------------------------------


def freeze_and_unfreeze() -> dict[str, Tensor]:
    parameters = make_parameters({"a": (5, 3), "late": (4,), "early": (6,), "never": (7,)})
    parameters["late"].requires_grad_(False)
    worker = LocalSGD(k_steps=4, begin_step=0).attach(OPTIMIZERS["sgd"](parameters.values()), parameters.items())
    seen = {}
    for step in range(8):
        if step == 2:
            parameters["early"].requires_grad_(False)
        if step == 5:
            parameters["late"].requires_grad_(True)
        worker.optimizer.zero_grad()
        backward(parameters, step, unused=["never"])
        with worker.stepping():
            worker.exchange()
            worker.optimizer.step()
        if step in (3, 4):
            seen |= {f"{name} {step}": p.detach().clone() for name, p in parameters.items()}
    return {**seen, **{name: p.detach() for name, p in parameters.items()}}


def test_frozen_parameters_do_not_move_and_those_that_did_are_averaged() -> None:
    first, second, third = run_ranks(freeze_and_unfreeze, 3)
    assert torch.equal(first["late 4"], make_weight("late", (4,)))  # to the bit, on three ranks
    for name in ("a", "late", "early", "never"):
        assert torch.equal(first[name], second[name])
        assert torch.equal(first[name], third[name])
    assert not torch.equal(first["late"], make_weight("late", (4,)))
    assert torch.equal(first["early 3"], second["early 3"])  # frozen in mid-interval
    assert torch.allclose(first["never"], make_weight("never", (7,)), rtol=1e-6)


def half_precision() -> Tensor:
    rank = dist.get_rank()
    weight = Parameter(torch.full((4,), 1.0 + rank / 128, dtype=torch.bfloat16))
    worker = LocalSGD(k_steps=1 + 1, begin_step=0).attach(torch.optim.SGD([weight], lr=0.0), [("w", weight)])
    for _ in range(2):
        weight.grad = torch.zeros_like(weight)
        with worker.stepping():
            worker.exchange()
            worker.optimizer.step()
    return weight.detach()


def test_half_types_are_summed_in_float32() -> None:
    for weight in run_ranks(half_precision, 3):
        assert weight.tolist() == [1.0 + 1 / 128] * 4


# Adaptive rules in trouble -----------------------------------------------------------------------------------------


def adapt_in_trouble(trouble: str) -> list[int]:
    parameters = make_parameters({"a": (3,)})
    method = LocalSGD(k_steps=2, begin_step=0, rule="fleet")
    worker = method.attach(torch.optim.SGD(parameters.values(), lr=0.1), parameters.items())
    ks = []
    for step in range(12):
        (group,) = worker.optimizer.param_groups
        if trouble == "lr 0":
            group["lr"] = 0.0 if step >= 4 else 0.1
        loss = {"nan": math.nan, "inf": math.inf, "negative": -1.0, "zero": 0.0}.get(trouble, 1.0)
        is_bad = step >= 4 and dist.get_rank() == 1  # on one rank only
        worker.observe_loss(torch.tensor(loss if is_bad else 1.0))
        parameters["a"].grad = torch.zeros(3)
        with worker.stepping():
            worker.exchange()
            worker.optimizer.step()
        ks.append(worker.k_steps)
    return ks


@pytest.mark.parametrize("trouble", ["nan", "inf", "negative", "zero", "lr 0"])
def test_numbers_that_make_no_sense_leave_k_as_it_is(trouble: str) -> None:
    first, second = run_ranks(adapt_in_trouble, 2, trouble)
    assert first == second
    assert set(first) == {2}


def adapt_without_loss() -> str:
    parameters = make_parameters({"a": (3,)})
    worker = LocalSGD(k_steps=1, begin_step=0, rule="adacomm").attach(
        torch.optim.SGD(parameters.values(), lr=0.1), parameters.items()
    )
    try:
        with worker.stepping():
            worker.exchange()
    except ConfigurationError as error:
        return str(error)
    return ""


def test_an_adaptive_rule_without_a_loss_says_so_on_all_ranks() -> None:
    for message in run_ranks(adapt_without_loss, 2):
        assert "training_step" in message


def detect_lr_decay() -> list[bool]:
    parameters = make_parameters({"a": (3,)})
    method = LocalSGD(k_steps=4, begin_step="first_lr_decay")
    worker = method.attach(torch.optim.SGD(parameters.values(), lr=0.1), parameters.items())
    local = []
    for step in range(8):
        # warm-up, a plateau, and a decay that rank 1 is late to hear of
        lr = [0.05, 0.1, 0.1, 0.1, 0.01, 0.01, 0.01, 0.01][step]
        worker.optimizer.param_groups[0]["lr"] = 0.1 if step == 4 and dist.get_rank() == 1 else lr
        backward(parameters, step)
        local.append(worker.is_local)
        with worker.stepping():
            worker.exchange()
            worker.optimizer.step()
    return local


def test_the_first_decay_of_the_learning_rate_begins_the_local_phase_on_all_ranks() -> None:
    first, second = run_ranks(detect_lr_decay, 2)
    assert first == second == [False] * 5 + [True] * 3


# Faults ------------------------------------------------------------------------------------------------------------


def diverge() -> tuple[str, str]:
    parameters = make_parameters({"a": (3,), "b": (4, 4)})
    worker = LocalSGD(k_steps=2, begin_step=0).attach(OPTIMIZERS["sgd"](parameters.values()), parameters.items())
    before = ""
    try:
        for step in range(2):
            backward(parameters, step)
            if dist.get_rank() == 1:
                parameters["b"].grad[2, 2] = math.nan  # type: ignore[index]
            with worker.stepping():
                worker.exchange()
                worker.optimizer.step()
                before = digest(parameters.values())
    except NonFiniteGradientError as error:
        assert digest(parameters.values()) == before, "something was averaged"
        return type(error).__name__, str(error)
    return "", ""


def test_a_rank_that_diverges_is_named_on_all_ranks() -> None:
    for kind, message in run_ranks(diverge, 2):
        assert kind == "NonFiniteGradientError"
        assert "rank 1" in message
        assert "'b'" in message


def fall_out_of_step() -> str:
    parameters = make_parameters({"a": (3,)})
    worker = LocalSGD(k_steps=4, begin_step=0).attach(OPTIMIZERS["sgd"](parameters.values()), parameters.items())
    worker.step = dist.get_rank()
    try:
        for step in range(4):
            backward(parameters, step)
            with worker.stepping():
                worker.exchange()
                worker.optimizer.step()
    except DisagreementError as error:
        return str(error)
    return ""


def test_ranks_at_different_steps_are_found_out() -> None:
    for message in run_ranks(fall_out_of_step, 2):
        assert "4 on rank 0, 5 on rank 1" in message


# Consensus and state -----------------------------------------------------------------------------------------------

STATEFUL: dict[str, dict[str, Any]] = {
    "plain": {"k_steps": 4},
    "adaptive": {"k_steps": 3, "rule": "adacomm"},
    "slowmo": {"k_steps": 4, "outer": "slowmo"},
    "delayed": {"k_steps": 5, "delay_steps": 4, "outer": "nesterov"},
    "narrow": {"k_steps": 3, "value_dtype": "bfloat16"},
    "streaming": {"k_steps": 4, "num_fragments": 2, "delay_steps": 3, "mixing": 0.5, "outer": "nesterov"},
    "sparse": {"k_steps": 3, "compression": Compression(density=1 / 8, chunk=64, min_numel=100)},
    "sparse delayed": {"k_steps": 5, "delay_steps": 4, "compression": Compression(chunk=None, min_numel=100)},
}
SOME_SHAPES = {"conv": AWKWARD["conv"], "matrix": AWKWARD["matrix"], "vector": (17,)}


def attach(method: LocalSGD, optimizer: str) -> tuple[LocalSGDWorker, dict[str, Parameter]]:
    parameters = make_parameters(SOME_SHAPES)
    buffers = {"n.running_mean": torch.zeros(2), "n.running_var": torch.ones(2), "n.count": torch.tensor(0)}
    worker = method.attach(OPTIMIZERS[optimizer](parameters.values()), parameters.items(), None, buffers)
    return worker, parameters


def bits_of(worker: LocalSGDWorker, parameters: dict[str, Parameter]) -> str:
    moments = [v for s in worker.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    return digest([*parameters.values(), *worker._buffers.floating.values(), *worker._buffers.counts, *moments])


def train_on(worker: LocalSGDWorker, parameters: dict[str, Parameter], steps: range, look: bool = False) -> list[str]:
    bits = []
    for step in steps:
        for name, buffer in worker._buffers.floating.items():  # as a forward pass does
            buffer.add_(0.1 * (step + 1 + dist.get_rank() + len(name)))
        take_step(worker, parameters, step)
        if look and step > 0:  # the first step is synchronous: buffers are as in DDP
            own = digest(parameters.values())
            with worker.consensus():
                shown = digest([*parameters.values(), *worker._buffers.floating.values(), *worker._buffers.counts])
                gathered: list[str] = [""] * dist.get_world_size()
                dist.all_gather_object(gathered, shown)
                assert len(set(gathered)) == 1, "not a consensus"
                assert worker.is_consensus or shown != own
        bits.append(bits_of(worker, parameters))
    return bits


def look_often(choices: dict[str, Any], optimizer: str, look: bool) -> list[str]:
    return train_on(*attach(LocalSGD(**choices), optimizer), range(14), look)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", STATEFUL)
def test_looking_at_the_consensus_changes_nothing(case: str, optimizer: str) -> None:
    num_ranks = 3 if case == "plain" else 2
    looked = run_ranks(look_often, num_ranks, STATEFUL[case], optimizer, True)
    assert looked == run_ranks(look_often, num_ranks, STATEFUL[case], optimizer, False)


def look_in_inference_mode() -> list[str]:
    worker, parameters = attach(LocalSGD(k_steps=4, begin_step=0), "sgd")
    bits = []
    for step in range(9):
        bits += train_on(worker, parameters, range(step, step + 1))
        with torch.inference_mode():  # as Lightning evaluates, but not on gloo
            worker.show_consensus()
            worker.hide_consensus()
    return bits


def test_looking_in_inference_mode_changes_nothing() -> None:
    assert run_ranks(look_in_inference_mode, 2) == [
        train[:9] for train in run_ranks(look_often, 2, {"k_steps": 4, "begin_step": 0}, "sgd", False)
    ]


def weigh_samples() -> float:
    weight = Parameter(torch.zeros(()))
    worker = LocalSGD(k_steps=2, begin_step=3).attach(torch.optim.SGD([weight], lr=1.0), [("w", weight)])
    worker.weighs_samples = True
    for step in range(5):
        worker.num_samples += 100.0 * (1 + dist.get_rank()) if step < 3 else 4.0 - dist.get_rank()
        weight.grad = torch.tensor(-1.0 - dist.get_rank())
        with worker.stepping():
            worker.exchange()
            worker.optimizer.step()
    return float(weight)


def test_samples_of_synchronous_steps_do_not_weigh() -> None:
    # three steps of 1.5, then two of 1 (8 samples) or of 2 (6 samples)
    assert run_ranks(weigh_samples, 2) == [pytest.approx(4.5 + (8 * 2 + 6 * 4) / 14)] * 2


def stop_and_resume(choices: dict[str, Any], optimizer: str, at: int) -> tuple[list[str], list[str]]:
    worker, parameters = attach(LocalSGD(**choices), optimizer)
    train_on(worker, parameters, range(at))
    state = copy.deepcopy(worker.state_dict())
    weights = {name: p.detach().clone() for name, p in parameters.items()}
    buffers = {name: b.clone() for name, b in worker._buffers.floating.items()}
    straight = train_on(worker, parameters, range(at, 16))

    worker, parameters = attach(LocalSGD(**choices), optimizer)
    with torch.no_grad():
        if not state["own"]:  # a plain checkpoint has them
            for name, parameter in parameters.items():
                parameter.copy_(weights[name])
            for name, buffer in worker._buffers.floating.items():
                buffer.copy_(buffers[name])
    worker.load_state_dict(state)
    worker.check_schedule()
    return straight, train_on(worker, parameters, range(at, 16))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", STATEFUL)
@pytest.mark.parametrize("at", [1, 6, 7, 9])
def test_resume_continues_bit_for_bit(case: str, optimizer: str, at: int) -> None:
    for straight, resumed in run_ranks(stop_and_resume, 2, STATEFUL[case], optimizer, at):
        assert straight == resumed


def state_in_mid_interval() -> tuple[dict[str, Any], dict[str, Tensor]]:
    worker, parameters = attach(LocalSGD(k_steps=4, begin_step=0, outer="slowmo"), "adamw")
    train_on(worker, parameters, range(6))
    state = copy.deepcopy(worker.state_dict())
    with worker.consensus():
        return state, {name: p.detach().clone() for name, p in parameters.items()}


def start_from(state: dict[str, Any], weights: dict[str, Tensor]) -> dict[str, Any]:
    worker, parameters = attach(LocalSGD(k_steps=4, begin_step=0, outer="slowmo"), "adamw")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    worker.load_state_dict(copy.deepcopy(state))
    first = {name: p.detach().clone() for name, p in parameters.items()}
    train_on(worker, parameters, range(6, 10))
    return {"first": first, "averages": worker.num_averages, "after": digest(parameters.values())}


def test_another_number_of_ranks_starts_from_the_consensus() -> None:
    results = run_ranks(state_in_mid_interval, 2)
    states, weights = [state for state, _ in results], results[0][1]
    merged = LocalSGD(k_steps=4).merge_states(copy.deepcopy(states))
    for index, entry in merged["optimizer"]["state"].items():
        for name in ("exp_avg", "exp_avg_sq"):
            mean = sum(state["optimizer"]["state"][index][name] for state in states) / 2
            torch.testing.assert_close(entry[name], mean)
    continued = run_ranks(start_from, 3, merged, weights)
    for result in continued:
        assert all(torch.equal(result["first"][name], weights[name]) for name in weights)
        assert result["averages"] == 2
    assert len({result["after"] for result in continued}) == 1


# Configuration -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choices", "word"),
    [
        ({"k_steps": 0}, "k_steps=0"),
        ({"k_steps": True}, "k_steps=True"),
        ({"begin_step": -1}, "begin_step=-1"),
        ({"begin_step": 1.5}, "begin_step=1.5"),
        ({"begin_step": "soon"}, "first_lr_decay"),
        ({"rule": "best"}, "fleet"),
        ({"rule": "fleet", "k_steps": 32}, "max_k_steps=16"),
        ({"outer": "adam"}, "slowmo"),
        ({"outer_lr": 0.7}, "outer_lr=0.7"),
        ({"outer": "slowmo", "outer_momentum": 1.0}, "outer_momentum=1.0"),
        ({"outer": "nesterov", "outer_lr": "0.7"}, "outer_lr='0.7'"),
        ({"inner_momentum": "mean"}, "inner_momentum='mean'"),
        ({"delay_steps": 8}, "delay_steps=8"),
        ({"delay_steps": 1, "value_dtype": "bfloat16"}, "delay_steps > 0"),
        ({"value_dtype": "int8"}, "value_dtype='int8'"),
        ({"qsr_alpha": 0.0}, "qsr_alpha=0.0"),
    ],
)
def test_what_cannot_be_is_refused(choices: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigurationError, match=word):
        LocalSGD(**choices)


def test_optimizers_that_cannot_be_averaged_are_refused() -> None:
    weight = Parameter(torch.zeros(2))
    with pytest.raises(ConfigurationError, match="LBFGS"):
        LocalSGD().attach(torch.optim.LBFGS([weight]), [("w", weight)])
    with pytest.raises(ConfigurationError, match="Adagrad"):
        LocalSGD(inner_momentum="average").attach(torch.optim.Adagrad([weight]), [("w", weight)])
    worker = LocalSGD(begin_step=0.5).attach(torch.optim.SGD([weight], lr=0.1), [("w", weight)])
    with pytest.raises(ConfigurationError, match="number of steps"), worker.stepping():
        pass


@pytest.mark.parametrize("method", [LocalSGD(), DGC()])
def test_parameters_without_names_are_refused(method: LocalSGD | DGC) -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigurationError, match=r"model.named_parameters\(\)"):
        method.attach(torch.optim.SGD(model.parameters(), lr=0.1), model.parameters())  # type: ignore[arg-type]


def average_much() -> tuple[int, list[bool]]:
    """Tensors larger than a bucket, of several dtypes, some empty."""
    shapes = {"big": (BUCKET_BYTES // 4 + 1,), "small": (3,), "empty": (0,)}
    rank = dist.get_rank()
    parameters = [Parameter(torch.full(shape, float(rank))) for shape in shapes.values()]
    parameters += [Parameter(torch.full((5,), float(rank), dtype=d)) for d in (torch.float64, torch.float16)]
    parameters += [Parameter(torch.full((2,), complex(rank, -rank)))]
    exchange = Exchange()
    worker = LocalSGD(k_steps=2, begin_step=0).attach(
        torch.optim.SGD(parameters, lr=0.0), [(str(i), p) for i, p in enumerate(parameters)], exchange
    )
    for _ in range(2):
        with worker.stepping():
            worker.exchange()
    good = [bool((p == (complex(0.5, -0.5) if p.is_complex() else 0.5)).all()) for p in parameters]
    return worker.num_averages, good


def test_buckets_hold_any_mixture() -> None:
    for num_averages, good in run_ranks(average_much, 2):
        assert num_averages == 1
        assert all(good)
