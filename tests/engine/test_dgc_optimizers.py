"""SGD in all its forms, other optimizers, and several of them."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import OneCycleLR

from lightning_lowbw import DGC
from lightning_lowbw.engine.method import Method
from lightning_lowbw.where.agreement import digest
from tests.engine.problem import (
    AWKWARD,
    CLOSE,
    DENSE_THEN_SPARSE,
    DENSITIES,
    backward,
    by_the_paper,
    each,
    from_memory,
    make_parameters,
    make_weight,
    take_step,
    weights_of,
)
from tests.oracle import OracleDGC
from tests.ranks import run_ranks

# SGD ------------------------------------------------------------------------------------------------------------------

GROUPS: dict[str, dict[str, Any]] = {
    "matrix": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1},
    "cube": {"lr": 0.02, "momentum": 0.5, "weight_decay": 0.0, "nesterov": True},
    "vector": {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.2},
    "conv": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
}


def train_groups() -> tuple[dict[str, Tensor], str]:
    parameters = make_parameters({name: AWKWARD[name] for name in GROUPS})
    groups = [{"params": [parameters[name]], **settings} for name, settings in GROUPS.items()]
    worker = DENSE_THEN_SPARSE.attach(SGD(groups), parameters.items())
    for step in DENSITIES:
        take_step(worker, parameters, step)
        seen = [{key: group[key] for key in settings} for group, settings in zip(groups, GROUPS.values(), strict=True)]
        assert seen == list(GROUPS.values())
    return weights_of(parameters), digest(parameters.values())


def test_each_param_group_has_its_own_settings() -> None:
    (weights, first), (_, second) = run_ranks(train_groups, 2)
    assert first == second
    for name, settings in GROUPS.items():
        expected = by_the_paper(name, AWKWARD[name], OracleDGC(2, **settings), DENSITIES)
        torch.testing.assert_close(weights[name].contiguous(), expected.contiguous(), **CLOSE)


BASE_OPTIONS: list[dict[str, Any]] = [
    {"lr": 0.05},
    {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1},
    {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
]
SHAPES = {name: AWKWARD[name] for name in ("matrix", "conv", "vector", "scalar")}


def train_variants(base: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
    variants: dict[str, tuple[dict[str, Any], float]] = {
        "default": ({}, 1.0),
        "foreach": ({"foreach": True}, 1.0),
        "single": ({"foreach": False}, 1.0),
        "fused": ({"fused": True}, 1.0),
        "maximize": ({"maximize": True}, -1.0),
        "maximize_foreach": ({"maximize": True, "foreach": True}, -1.0),
        "maximize_fused": ({"maximize": True, "fused": True}, -1.0),
    }
    trained = {}
    for name, (options, sign) in variants.items():
        parameters = make_parameters(SHAPES)
        method = DENSE_THEN_SPARSE.replace(min_numel=18)  # the vector and the scalar are sent dense
        worker = method.attach(SGD(parameters.values(), **base, **options), parameters.items())
        for step in DENSITIES:
            take_step(worker, parameters, step, sign=sign)
        trained[name] = weights_of(parameters)
    return trained


def test_implementations_of_sgd_and_its_direction_make_no_difference() -> None:
    for trained in run_ranks(each, 2, train_variants, [(base,) for base in BASE_OPTIONS])[0]:
        for variant, weights in trained.items():
            for name, shape in SHAPES.items():
                assert not weights[name].equal(make_weight(name, shape))
                if "fused" in variant:  # rounds a step in another way
                    torch.testing.assert_close(weights[name], trained["default"][name], **CLOSE)
                else:
                    assert weights[name].equal(trained["default"][name]), (variant, name)


def make_one_cycle(optimizer: SGD) -> OneCycleLR:
    return OneCycleLR(optimizer, max_lr=0.1, total_steps=12, cycle_momentum=True, base_momentum=0.5, max_momentum=0.95)


def train_one_cycle() -> tuple[dict[str, Tensor], list[tuple[float, float]]]:
    parameters = make_parameters(SHAPES)
    optimizer = SGD(parameters.values(), lr=0.01, momentum=0.9, weight_decay=0.1)
    scheduler = make_one_cycle(optimizer)
    worker = DENSE_THEN_SPARSE.attach(optimizer, parameters.items())
    seen = []
    for step in DENSITIES:
        group = optimizer.param_groups[0]
        before = dict(group)
        optimizer.zero_grad()
        backward(parameters, step)
        with worker.stepping():
            worker.exchange()
            inside = (group["momentum"], group["weight_decay"], group["lr"])
            assert inside == ((0.0, 0.0, before["lr"]) if worker.is_sparse else (before["momentum"], 0.1, before["lr"]))
            optimizer.step()
        assert dict(group) == before
        assert optimizer.state_dict()["param_groups"][0]["momentum"] == before["momentum"]
        seen.append((group["lr"], group["momentum"]))
        scheduler.step()
    return weights_of(parameters), seen


def test_a_scheduler_that_changes_momentum_every_step() -> None:
    (weights, seen), (others, _) = run_ranks(train_one_cycle, 2)
    assert len({momentum for _, momentum in seen}) == len(seen)  # it did change

    def before_step(oracle: OracleDGC, step: int) -> None:
        oracle.lr, oracle.momentum = seen[step]

    for name, shape in SHAPES.items():
        oracle = OracleDGC(2, lr=0.0, momentum=0.0, weight_decay=0.1)
        expected = by_the_paper(name, shape, oracle, DENSITIES, before_step=before_step)
        torch.testing.assert_close(weights[name].contiguous(), expected.contiguous(), **CLOSE)
        assert weights[name].equal(others[name])


MASS_STEPS = 7
FEEDBACK = DGC(sparsity=[0.9], min_numel=30, rampup_begin_step=1)
MASS_SHAPES = {"matrix": (30, 20), "conv": (8, 4, 3, 3), "bias": (7,)}


def account_for_mass(optimizer_name: str, method: Method) -> dict[str, Any]:
    """All gradients are small multiples of 1/64, so that every sum is exact, in whatever order."""
    parameters = make_parameters(MASS_SHAPES)
    kind = getattr(torch.optim, optimizer_name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        worker = method.attach(kind(parameters.values(), lr=0.01), parameters.items())
    generator = torch.Generator().manual_seed(dist.get_rank())
    own = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in MASS_SHAPES.items()}
    applied = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in MASS_SHAPES.items()}
    for _ in range(MASS_STEPS):
        for name, parameter in parameters.items():
            parameter.grad = torch.randint(-64, 65, parameter.shape, generator=generator) / 64
            own[name] += parameter.grad
        with worker.stepping():
            worker.exchange()
            for name, parameter in parameters.items():
                assert parameter.grad is not None
                applied[name] += parameter.grad
            worker.optimizer.step()
    residuals = {name: from_memory(v.double(), name, MASS_SHAPES[name]) for name, v in worker.residuals.items()}
    messages = [str(warning.message) for warning in caught]
    return {
        "own": own,
        "applied": applied,
        "residuals": residuals,
        "warnings": messages,
        "digest": digest(parameters.values()),
    }


def test_error_feedback_loses_no_mass() -> None:
    """2 x (applied mean gradients) + residuals of both ranks == all gradients of both ranks, exactly."""
    kinds = [
        ("AdamW", "float32"),
        ("AdamW", "bfloat16"),
        ("SGD", "float32"),
        ("SGD", "float16"),
        ("RMSprop", "float32"),
    ]
    cases = []
    for optimizer_name, value_dtype in kinds:
        correction = "error_feedback" if optimizer_name == "AdamW" else "auto"
        cases.append((optimizer_name, FEEDBACK.replace(value_dtype=value_dtype, correction=correction)))
    for (optimizer_name, _), first, second in zip(kinds, *run_ranks(each, 2, account_for_mass, cases), strict=True):
        assert first["digest"] == second["digest"]
        assert set(first["residuals"]) == {"matrix", "conv"}
        for name in MASS_SHAPES:
            assert first["applied"][name].equal(second["applied"][name])
            total = 2 * first["applied"][name]
            for facts in (first, second):
                if name in facts["residuals"]:
                    assert facts["residuals"][name].count_nonzero() > 0
                    total = total + facts["residuals"][name]
            assert total.equal(first["own"][name] + second["own"][name])
        assert second["warnings"] == []
        if optimizer_name in ("SGD", "AdamW"):  # complete, or what was asked for
            assert first["warnings"] == []
        else:
            (message,) = first["warnings"]
            assert optimizer_name in message
            assert "error feedback" in message


def train_two_optimizers() -> tuple[str, list[int], list[int]]:
    """As of a GAN: the second steps every other time; each exchanges its own parameters alone."""
    parameters = make_parameters({"critic": (20, 10), "generator": (30, 10), "bias": (7,)})
    ours = {"critic": parameters["critic"]}
    theirs = {"generator": parameters["generator"], "bias": parameters["bias"]}
    method = DENSE_THEN_SPARSE.replace(min_numel=100)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        workers = [
            method.attach(SGD(ours.values(), lr=0.05, momentum=0.9), parameters.items()),
            method.attach(AdamW(theirs.values(), lr=0.01), parameters.items()),
        ]
    for step in range(8):
        for worker, own in zip(workers, (ours, theirs), strict=True):
            if worker is workers[1] and step % 2:
                continue
            for parameter in parameters.values():
                parameter.grad = None
            backward(parameters, step)
            others = [parameter for parameter in parameters.values() if parameter not in set(own.values())]
            before = digest([p.grad for p in others if p.grad is not None])
            with worker.stepping():
                worker.exchange()
                assert digest([p.grad for p in others if p.grad is not None]) == before
                worker.optimizer.step()
    assert set(workers[0].residuals) == {"critic"}
    assert set(workers[1].residuals) == {"generator"}
    steps = [worker.step for worker in workers]
    return digest(parameters.values()), steps, [worker.peers.ledger.steps for worker in workers]


def test_two_optimizers_count_their_own_steps() -> None:
    results = run_ranks(train_two_optimizers, 2)
    assert results[0][0] == results[1][0]
    assert all(steps == ledger_steps == [8, 4] for _, steps, ledger_steps in results)
