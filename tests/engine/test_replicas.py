"""Local SGD on real ranks, against replicas in one process."""

from __future__ import annotations

import functools
import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lightning_lowbw import ConfigurationError, DisagreementError, LocalSGD, NonFiniteGradientError
from lightning_lowbw.where.agreement import digest
from lightning_lowbw.where.mean import BUCKET_BYTES
from tests.engine.problem import AWKWARD, backward, make_parameters, make_weight
from tests.engine.replica_problem import (
    CLOSE,
    OPTIMIZERS,
    STEPS,
    attach,
    by_oracle,
    flat_groups,
    run_each,
    take_step,
    train,
    train_on,
)
from tests.ranks import run_ranks

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fixed": ({"k_steps": 4, "begin_step": 0}, {"k": 4, "begin": 0}),
    "post_local": ({"k_steps": 3, "begin_step": 5}, {"k": 3, "begin": 5}),
    "fleet": ({"k_steps": 2, "begin_step": 1, "rule": "fleet"}, {"k": 2, "rule": "fleet"}),
    "adacomm": ({"k_steps": 8, "begin_step": 1, "rule": "adacomm"}, {"k": 8, "rule": "adacomm"}),
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


@functools.cache
def results_of(num_ranks: int, optimizer: str) -> dict[str, list[Any]]:
    """Start the ranks once for all cases."""
    return run_each(
        num_ranks,
        {
            case: partial(train, LocalSGD(**choices), optimizer, schedule_lr="rule" in choices)
            for case, (choices, _) in CASES.items()
        },
    )


@pytest.mark.parametrize(("optimizer", "num_ranks"), [("sgd", 3), ("adamw", 2)])
@pytest.mark.parametrize("case", CASES)
def test_equals_replicas_in_one_process(case: str, optimizer: str, num_ranks: int) -> None:
    choices, oracle_choices = CASES[case]
    schedule_lr = "rule" in choices
    results = results_of(num_ranks, optimizer)[case]
    for name in AWKWARD:
        oracle = by_oracle(name, flat_groups(num_ranks), optimizer, schedule_lr=schedule_lr, **oracle_choices)
        for rank, result in enumerate(results):
            torch.testing.assert_close(result["own"][name], oracle.replicas[rank].detach(), **CLOSE)
    averages = [0, *results[0]["averages"]]
    averaged_at = [step for step in range(1, STEPS + 1) if averages[step] > averages[step - 1]]
    assert averaged_at == [step + oracle.delay for step in oracle.averaged_at if step + oracle.delay <= STEPS]
    assert all(result["k"] == results[0]["k"] for result in results)
    if schedule_lr:
        assert len(set(oracle.ks)) > 1, "the case adapts nothing"
        assert results[0]["k"][-1] == oracle.ks[-1]
    if not oracle.delay:
        for step in averaged_at:
            assert len({result["digests"][step - 1] for result in results}) == 1, "replicas differ after an average"
        assert len({result["digests"][averaged_at[0] - 2] for result in results}) == num_ranks, "not local before it"


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
        torch.optim.SGD([weight], lr=0.1), [("weight", weight)], named_buffers=buffers
    )
    for step in range(2 * delay + 2 + delay):
        with worker.stepping():
            worker.exchange()
            if step == 0:
                buffers["norm.running_mean"].copy_(torch.tensor([1000.0 + rank, 2.0 * rank]))
                buffers["norm.running_var"].copy_(torch.tensor([0.5, 1.0 + rank]))
                buffers["norm.num_batches_tracked"].fill_(5 + rank)
    return buffers


def test_buffers_are_averaged_with_the_variance_between_ranks() -> None:
    results = run_each(3, {f"delay {delay}": partial(average_buffers, delay) for delay in (0, 2)})
    for buffers in [*results["delay 0"], *results["delay 2"]]:
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
    seen: dict[str, Tensor] = {}
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
    weight = Parameter(torch.ones(4, dtype=torch.bfloat16))
    worker = LocalSGD(k_steps=2, begin_step=0).attach(torch.optim.SGD([weight], lr=0.0), [("w", weight)])
    for _ in range(2):
        weight.grad = torch.zeros_like(weight)
        with worker.stepping():
            worker.exchange()
            worker.optimizer.step()
            weight.data.fill_(1.0 + rank / 128)
    return weight.detach()


def average_much() -> tuple[int, list[bool]]:
    """Tensors larger than a bucket, of several dtypes, some empty."""
    shapes = {"big": (BUCKET_BYTES // 4 + 1,), "small": (3,), "empty": (0,)}
    rank = dist.get_rank()
    parameters = [Parameter(torch.full(shape, float(rank))) for shape in shapes.values()]
    parameters += [Parameter(torch.full((5,), float(rank), dtype=d)) for d in (torch.float64, torch.float16)]
    parameters += [Parameter(torch.full((2,), complex(rank, -rank)))]
    worker = LocalSGD(k_steps=2, begin_step=0).attach(
        torch.optim.SGD(parameters, lr=0.0), [(str(i), p) for i, p in enumerate(parameters)]
    )
    for _ in range(2):
        with worker.stepping():
            worker.exchange()
    good = [bool((p == (complex(1, -1) if p.is_complex() else 1)).all()) for p in parameters]
    return worker.num_averages, good


def test_dtypes_and_sizes_of_all_kinds() -> None:
    results = run_each(3, {"half": half_precision, "much": average_much})
    for weight in results["half"]:
        assert weight.tolist() == [1.0 + 1 / 128] * 4, "half types are not summed in float32"
    for num_averages, good in results["much"]:
        assert num_averages == 1
        assert all(good)


# Adaptive rules ----------------------------------------------------------------------------------------------------


def adapt_in_trouble(trouble: str) -> list[int]:
    parameters = make_parameters({"a": (3,)})
    method = LocalSGD(k_steps=2, begin_step=0, rule="fleet")
    worker: Any = method.attach(torch.optim.SGD(parameters.values(), lr=0.1), parameters.items())
    ks = []
    for step in range(12):
        (group,) = worker.optimizer.param_groups
        if trouble == "lr 0":
            group["lr"] = 0.0 if step >= 4 else 0.1
        loss = {"nan": math.nan, "inf": math.inf, "negative": -1.0, "zero": 0.0}.get(trouble, 1.0)
        is_bad = step >= 4 and dist.get_rank() == 1  # on one rank only
        worker.observe_loss(torch.tensor(loss if is_bad else 1.0))
        parameters["a"].grad = torch.zeros(3)
        worker.optimizer.step()
        ks.append(worker.k_steps)
    return ks


def test_numbers_that_make_no_sense_leave_k_as_it_is() -> None:
    troubles = ("nan", "inf", "negative", "zero", "lr 0")
    for trouble, results in run_each(2, {each: partial(adapt_in_trouble, each) for each in troubles}).items():
        assert results == [[2] * 12] * 2, trouble


def adapt_without_loss() -> str:
    parameters = make_parameters({"a": (3,)})
    worker = LocalSGD(k_steps=1, begin_step=0, rule="adacomm").attach(
        torch.optim.SGD(parameters.values(), lr=0.1), parameters.items()
    )
    try:
        worker.optimizer.step()
    except ConfigurationError as error:
        return str(error)
    return ""


def test_an_adaptive_rule_without_a_loss_says_so_on_all_ranks() -> None:
    for message in run_ranks(adapt_without_loss, 2):
        assert "training_step" in message


def smooth_losses() -> tuple[float, list[int]]:
    """Four steps of a loss of 0.25, of which k follows; then 4, 4, 4, 1."""
    parameters = make_parameters({"a": (3,)})
    method = LocalSGD(k_steps=4, begin_step=0, rule="fleet")
    worker: Any = method.attach(torch.optim.SGD(parameters.values(), lr=0.1), parameters.items())
    ks, seen = [], math.nan
    for number, loss in enumerate([0.25] * 4 + [4.0, 4.0, 4.0, 1.0]):
        parameters["a"].grad = torch.zeros(3)
        worker.observe_loss(torch.tensor(loss / 2))  # of two micro batches
        worker.observe_loss(torch.tensor(loss / 2))
        worker.optimizer.step()
        ks.append(worker.k_steps)
        if number == 6:
            seen = float(worker.loss.mean())
    return seen, ks


def test_the_loss_is_smoothed_over_the_period_and_late_steps_weigh_more() -> None:
    weights = [0.9**age for age in (3, 2, 1, 0)]
    loss = sum(weight * each for weight, each in zip(weights, (4.0, 4.0, 4.0, 1.0), strict=True)) / sum(weights)
    k = math.ceil(math.sqrt(4 * loss / 0.25))
    assert k == 8  # with a decay of 0.5 it were 7
    assert run_ranks(smooth_losses, 2) == [(4.0, [4] * 7 + [k])] * 2


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
        worker.optimizer.step()
    return local


def test_the_first_decay_of_the_learning_rate_begins_the_local_phase_on_all_ranks() -> None:
    first, second = run_ranks(detect_lr_decay, 2)
    assert first == second == [False] * 5 + [True] * 3


# Samples and requests ----------------------------------------------------------------------------------------------


def weigh_samples() -> float:
    weight = Parameter(torch.zeros(()))
    worker: Any = LocalSGD(k_steps=2, begin_step=3).attach(torch.optim.SGD([weight], lr=1.0), [("w", weight)])
    worker.weighs_samples = True
    for step in range(5):
        worker.num_samples += 100.0 * (1 + dist.get_rank()) if step < 3 else 4.0 - dist.get_rank()
        weight.grad = torch.tensor(-1.0 - dist.get_rank())
        worker.optimizer.step()
    return float(weight)


def test_samples_of_synchronous_steps_do_not_weigh() -> None:
    # three steps of 1.5, then two of 1 (8 samples) or of 2 (6 samples)
    assert run_ranks(weigh_samples, 2) == [pytest.approx(4.5 + (8 * 2 + 6 * 4) / 14)] * 2


def come_to_the_end() -> dict[str, Any]:
    """Ranks average, also where none has trained since the last average."""
    worker, parameters = attach(LocalSGD(k_steps=4, begin_step=0), shapes={"a": (3,)})
    worker.weighs_samples = True
    for step in range(2):
        worker.num_samples += 1.0
        take_step(worker, parameters, step)
    worker.average()
    worker.stop_requested = worker.save_requested = dist.get_rank() == 1
    worker.average()
    requests = worker.stop_agreed, worker.save_agreed, worker.save_requested
    return {"requests": requests, "averages": worker.num_averages}


def test_what_ranks_tell_each_other_arrives_also_where_nobody_has_trained() -> None:
    for result in run_ranks(come_to_the_end, 2):
        assert result["requests"] == (True, True, False)
        assert result["averages"] == 1, "an average of nothing is none"


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


def fall_out_of_step() -> str:
    worker, parameters = attach(LocalSGD(k_steps=4, begin_step=0), shapes={"a": (3,)})
    train_on(worker, parameters, range(1))  # in which ranks at different steps would be told
    worker.step += dist.get_rank()
    try:
        train_on(worker, parameters, range(1, 4))
    except DisagreementError as error:
        return str(error)
    return ""


def test_a_rank_that_diverges_or_is_at_another_step_is_named_on_all_ranks() -> None:
    results = run_each(2, {"diverged": diverge, "out of step": fall_out_of_step})
    for kind, message in results["diverged"]:
        assert kind == "NonFiniteGradientError"
        assert "rank 1" in message
        assert "'b'" in message
    for message in results["out of step"]:
        assert "optimizer steps: rank 0 has 4, rank 1 has 5" in message
