"""What deep gradient compression promises in a plain PyTorch loop: shapes, volumes, parameters that come and go,
optimizers. The equations themselves are in test_dgc_oracle.py, failures and states in files of their own."""

from __future__ import annotations

import pickle
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import OneCycleLR

from lightning_lowbw import DGC
from lightning_lowbw.comm.agreement import digest
from lightning_lowbw.comm.ledger import TrafficLedger
from lightning_lowbw.core.schedule import num_selected
from lightning_lowbw.core.volume import all_gather_bytes, all_reduce_bytes
from lightning_lowbw.methods.dgc import DGCWorker
from tests.methods.problem import AWKWARD, Parameters, backward, by_the_paper, make_parameters, make_weight, take_step
from tests.oracle import OracleDGC
from tests.ranks import run_ranks

CLOSE = {"rtol": 2e-5, "atol": 5e-6}
DENSE_THEN_SPARSE = DGC(rampup_begin_step=2, rampup_step=4, sparsity=[0.5, 0.9], min_numel=1, selection="exact")
DENSITIES = {step: DENSE_THEN_SPARSE.schedule.density(step) for step in range(8)}


def weights_of(parameters: Parameters) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def momentum_buffers(worker: DGCWorker) -> list[Tensor]:
    return [state["momentum_buffer"] for state in worker.optimizer.state.values()]


# Shapes, dtypes and density -------------------------------------------------------------------------------------------


def train_awkward_shapes(method: DGC, dtype: torch.dtype, momentum: float) -> dict[str, Any]:
    parameters = make_parameters(AWKWARD, dtype)
    strides = {name: parameter.stride() for name, parameter in parameters.items()}
    worker = method.attach(SGD(parameters.values(), lr=0.05, momentum=momentum), parameters.items())
    num_empty: dict[int, dict[str, int]] = {}
    digests = []
    for step in DENSITIES:
        take_step(worker, parameters, step)
        digests.append(digest(parameters.values()))
        num_empty[step] = {
            name: int((worker.residuals[p] == 0).sum()) for name, p in parameters.items() if is_in(worker, p)
        }
    assert {name: p.stride() for name, p in parameters.items()} == strides
    for parameter, state in worker.optimizer.state.items():
        if momentum:
            assert state["momentum_buffer"].stride() == parameter.stride()
    return {
        "weights": weights_of(parameters),
        "digests": digests,
        "num_empty": num_empty,
        "residual_dtypes": {residual.dtype for residual in worker.residuals.values()},
        "residual_norm": worker.residual_norm(),
    }


def is_in(worker: DGCWorker, parameter: Parameter) -> bool:
    return parameter in worker.residuals


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_awkward_shapes_train_by_the_paper(num_ranks: int) -> None:
    results = run_ranks(train_awkward_shapes, num_ranks, DENSE_THEN_SPARSE, torch.float32, 0.9)
    assert len({tuple(facts["digests"]) for facts in results}) == 1  # replicas are equal after every step
    for name, shape in AWKWARD.items():
        expected = by_the_paper(name, shape, OracleDGC(num_ranks, lr=0.05, momentum=0.9), DENSITIES)
        torch.testing.assert_close(results[0]["weights"][name].contiguous(), expected.contiguous(), **CLOSE)
        assert expected.numel() == 0 or not expected.equal(make_weight(name, shape))


def test_exactly_k_of_each_tensor_are_sent() -> None:
    """k counts per tensor, at every stair; what was sent is the only place where the residual is zero."""
    for facts in run_ranks(train_awkward_shapes, 2, DENSE_THEN_SPARSE, torch.float32, 0.9):
        for step, density in DENSITIES.items():
            numels = {name: make_weight(name, shape).numel() for name, shape in AWKWARD.items()}
            expected = {name: num_selected(numel, density) for name, numel in numels.items() if numel}
            assert facts["num_empty"][step] == (expected if density < 1 else {})


@pytest.mark.parametrize("value_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_dtypes_of_parameters_and_of_the_wire(value_dtype: str, dtype: torch.dtype) -> None:
    method = replace(DENSE_THEN_SPARSE, value_dtype=value_dtype, selection="sampled")
    results = run_ranks(train_awkward_shapes, 2, method, dtype, 0.9)
    assert len({tuple(facts["digests"]) for facts in results}) == 1
    for facts in results:
        assert facts["residual_dtypes"] == {torch.float32}
        assert 0 < facts["residual_norm"] < float("inf")
    tolerance = 0.15 if dtype == torch.bfloat16 else 0.02
    for name, shape in AWKWARD.items():
        weight = results[0]["weights"][name]
        assert weight.dtype == dtype
        assert weight.isfinite().all()
        if dtype == torch.float64 and value_dtype == "float32":
            expected = by_the_paper(name, shape, OracleDGC(2, lr=0.05, momentum=0.9), DENSITIES)
            # The weights of another precision may select other elements in the end, but nearly all are the same.
            close = (weight - expected).abs() < tolerance
            assert close.float().mean() > 0.95 or not expected.numel()


# Volumes --------------------------------------------------------------------------------------------------------------

LAYERS = {"body": (40, 30), "head": (300, 3), "bias": (30,), "excluded.weight": (50, 50), "gain": ()}


def measure_traffic(method: DGC) -> list[dict[str, int]]:
    parameters = make_parameters(LAYERS)
    worker = method.attach(SGD(parameters.values(), lr=0.1, momentum=0.9), parameters.items())
    ledger = worker._exchange.ledger
    measured = []
    for step in range(6):
        before = replace(ledger)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            take_step(worker, parameters, step)
        calls = {event.key: event.count for event in profile.key_averages() if event.key.startswith("gloo:")}
        measured.append(
            {
                "sent_bytes": ledger.sent_bytes - before.sent_bytes,
                "received_bytes": ledger.received_bytes - before.received_bytes,
                "dense_bytes": ledger.dense_bytes - before.dense_bytes,
                "steps": ledger.steps - before.steps,
                **calls,
            }
        )
    return measured


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("value_dtype", ["float32", "float16"])
def test_measured_bytes_are_the_formulas(num_ranks: int, value_dtype: str) -> None:
    """As the docstring of `exchange` says; one all-reduce per step, in sparse steps one all-gather, nothing else."""
    method = DGC(
        rampup_begin_step=2,
        rampup_step=2,
        sparsity=[0.9, 0.99],
        min_numel=900,
        exclude=["excluded.*"],
        value_dtype=value_dtype,
    )
    numels = {name: make_weight(name, shape).numel() for name, shape in LAYERS.items()}
    total = sum(numels.values())
    for measured in run_ranks(measure_traffic, num_ranks, method):
        for step, facts in enumerate(measured):
            density = method.schedule.density(step)
            sparse = [] if density == 1 else [numels["body"], numels["head"]]
            counts = [num_selected(numel, density) for numel in sparse]
            words = total - sum(sparse) + len(LAYERS) + num_ranks
            expected = all_reduce_bytes(4 * words, num_ranks)
            if counts:
                expected += all_gather_bytes(method.codec.nbytes(counts), num_ranks)
            assert facts == {
                "sent_bytes": expected,
                "received_bytes": expected,
                "dense_bytes": all_reduce_bytes(4 * total, num_ranks),
                "steps": 1,
                "gloo:all_reduce": 1,
                **({"gloo:all_gather": 1} if counts else {}),
            }


# Parameters that come and go ------------------------------------------------------------------------------------------

USES = {
    "always": (20, 10),
    "pausing": (20, 10),
    "dense_pausing": (7,),
    "on_rank_0": (20, 10),
    "dense_on_rank_0": (7,),
    "never": (20, 10),
}
PAUSED = ("pausing", "dense_pausing")
PAUSE = (4, 5)


def train_with_unused_parameters() -> dict[str, Any]:
    parameters = make_parameters(USES)
    method = replace(DENSE_THEN_SPARSE, min_numel=100)
    worker = method.attach(SGD(parameters.values(), lr=0.05, momentum=0.9, weight_decay=0.1), parameters.items())
    elsewhere = () if dist.get_rank() == 0 else ("on_rank_0", "dense_on_rank_0")
    digests = []
    for step in DENSITIES:
        pausing = [parameters[name] for name in PAUSED] if step in PAUSE else []
        before = [_everything_about(worker, parameter) for parameter in pausing]
        take_step(worker, parameters, step, unused=("never", *elsewhere, *(PAUSED if step in PAUSE else ())))
        assert [_everything_about(worker, parameter) for parameter in pausing] == before
        assert all(parameter.grad is None for parameter in pausing)
        gradients = [p.grad for name, p in parameters.items() if p.grad is not None]
        assert len(gradients) == len(parameters) - 1 - len(pausing)
        digests.append((digest(parameters.values()), digest(gradients)))
    never = parameters["never"]
    assert never.grad is None
    assert never not in worker.residuals
    assert never not in worker.optimizer.state
    return {"digests": digests, "weights": weights_of(parameters)}


def _everything_about(worker: DGCWorker, parameter: Parameter) -> str:
    residual = [worker.residuals[parameter]] if parameter in worker.residuals else []
    return digest([parameter, worker.optimizer.state[parameter]["momentum_buffer"], *residual])


def test_unused_parameters() -> None:
    """On all ranks: left alone, to the bit. On some ranks: all ranks receive what the others send."""
    results = run_ranks(train_with_unused_parameters, 3)
    assert results[0]["digests"] == results[1]["digests"] == results[2]["digests"]
    weights = results[0]["weights"]
    while_running = {step: density for step, density in DENSITIES.items() if step not in PAUSE}
    for name, shape in USES.items():
        if name == "never":
            assert weights[name].equal(make_weight(name, shape))
            continue
        expected = by_the_paper(
            name,
            shape,
            OracleDGC(3, lr=0.05, momentum=0.9, weight_decay=0.1, min_numel=100),
            while_running if name in PAUSED else DENSITIES,
            users=[0] if name.endswith("on_rank_0") else None,
        )
        torch.testing.assert_close(weights[name], expected, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")


CHANGING = {"first": (20, 10), "frozen": (20, 10), "dense_frozen": (7,), "added": (15, 10), "stopped": (15, 10)}
UNFREEZE, ADD, STOP = 3, 5, 6


def train_through_changes() -> dict[str, Any]:
    parameters = make_parameters(CHANGING)
    added = parameters["added"]
    optimizer = SGD([p for p in parameters.values() if p is not added], lr=0.05, momentum=0.9)
    method = replace(DENSE_THEN_SPARSE, min_numel=100)
    # "added" is not the model's: a loss's own parameter, say.
    worker = method.attach(optimizer, [(name, p) for name, p in parameters.items() if p is not added])
    digests = []
    for step in DENSITIES:
        for name in ("frozen", "dense_frozen"):
            parameters[name].requires_grad_(step >= UNFREEZE)
        parameters["stopped"].requires_grad_(step < STOP)
        if step == ADD:
            optimizer.add_param_group({"params": [added], "lr": 0.2, "momentum": 0.5, "nesterov": True})
        before = weights_of(parameters)
        take_step(worker, parameters, step)
        digests.append(digest(parameters.values()))
        moved = {name for name, parameter in parameters.items() if not parameter.equal(before[name])}
        assert moved == (
            {"first"}
            | ({"frozen", "dense_frozen"} if step >= UNFREEZE else set())
            | ({"added"} if step >= ADD else set())
            | ({"stopped"} if step < STOP else set())
        )
        assert (parameters["frozen"] in worker.residuals) == (step >= UNFREEZE)
    assert [group["momentum"] for group in optimizer.param_groups] == [0.9, 0.5]
    names = set(worker.state_dict()["tensors"])
    assert names == {"first", "frozen", "stopped", "optimizer.4"}
    return {"digests": digests, "weights": weights_of(parameters)}


def test_frozen_unfrozen_and_added_parameters() -> None:
    results = run_ranks(train_through_changes, 2)
    assert results[0]["digests"] == results[1]["digests"]
    first_steps = {"frozen": UNFREEZE, "dense_frozen": UNFREEZE, "added": ADD}
    for name, shape in CHANGING.items():
        settings = {"lr": 0.2, "momentum": 0.5, "nesterov": True} if name == "added" else {"lr": 0.05, "momentum": 0.9}
        first, end = first_steps.get(name, 0), STOP if name == "stopped" else len(DENSITIES)
        expected = by_the_paper(
            name,
            shape,
            OracleDGC(2, min_numel=100, **settings),  # type: ignore[arg-type]
            {step: density for step, density in DENSITIES.items() if first <= step < end},
        )
        torch.testing.assert_close(results[0]["weights"][name], expected, **CLOSE)


class Tied(torch.nn.Module):
    """Input and output embedding are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(30, 8)
        self.output = torch.nn.Linear(8, 30, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.output(self.embedding(x))
        return y


def train_tied() -> tuple[list[str], str, float]:
    model = Tied()
    worker = replace(DENSE_THEN_SPARSE, rampup_begin_step=0).attach(
        SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters()
    )
    for step in range(4):
        worker.optimizer.zero_grad()
        x = torch.randint(0, 30, (16,), generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        torch.nn.functional.cross_entropy(model(x), (x + 1) % 30).backward()
        with worker.stepping():
            worker.exchange()
            worker.optimizer.step()
    return list(worker.state_dict()["tensors"]), digest(model.parameters()), worker.residual_norm()


def test_a_tied_parameter_is_one() -> None:
    (names, first, norm), (_, second, _) = run_ranks(train_tied, 2)
    assert names == ["embedding.weight"]
    assert first == second
    assert norm > 0


# Optimizers -----------------------------------------------------------------------------------------------------------

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
        method = replace(DENSE_THEN_SPARSE, min_numel=18)  # the vector and the scalar are sent dense
        worker = method.attach(SGD(parameters.values(), **base, **options), parameters.items())
        for step in DENSITIES:
            take_step(worker, parameters, step, sign=sign)
        trained[name] = weights_of(parameters)
    return trained


@pytest.mark.parametrize("base", BASE_OPTIONS, ids=str)
def test_implementations_of_sgd_and_its_direction_make_no_difference(base: dict[str, Any]) -> None:
    trained = run_ranks(train_variants, 2, base)[0]
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


def account_for_mass(optimizer_name: str, method: DGC) -> dict[str, Any]:
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
    residuals = {name: worker.residuals[p].double() for name, p in parameters.items() if p in worker.residuals}
    messages = [str(warning.message) for warning in caught]
    return {
        "own": own,
        "applied": applied,
        "residuals": residuals,
        "warnings": messages,
        "digest": digest(parameters.values()),
    }


@pytest.mark.parametrize(
    ("optimizer_name", "value_dtype"),
    [("AdamW", "float32"), ("AdamW", "bfloat16"), ("SGD", "float32"), ("SGD", "float16"), ("RMSprop", "float32")],
)
def test_error_feedback_loses_no_mass(optimizer_name: str, value_dtype: str) -> None:
    """2 x (applied mean gradients) + residuals of both ranks == all gradients of both ranks, exactly."""
    first, second = run_ranks(account_for_mass, 2, optimizer_name, replace(FEEDBACK, value_dtype=value_dtype))
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
    if optimizer_name == "SGD":
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
    method = replace(DENSE_THEN_SPARSE, min_numel=100)
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
    assert set(workers[0].residuals) == {parameters["critic"]}
    assert set(workers[1].residuals) == {parameters["generator"]}
    steps = [worker.step for worker in workers]
    return digest(parameters.values()), steps, [worker._exchange.ledger.steps for worker in workers]


def test_two_optimizers_count_their_own_steps() -> None:
    results = run_ranks(train_two_optimizers, 2)
    assert results[0][0] == results[1][0]
    assert all(steps == ledger_steps == [8, 4] for _, steps, ledger_steps in results)


# Limits: no compression, one rank -------------------------------------------------------------------------------------


class Perceptron(torch.nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(torch.nn.Linear(6, 20), torch.nn.Tanh(), torch.nn.Linear(20, 3))


def train_perceptron(kind: str, options: dict[str, Any], method: DGC | None) -> list[Tensor]:
    """With DDP, or with a method of density 1."""
    model = Perceptron()
    wrapped = DistributedDataParallel(model) if method is None else model
    optimizer = getattr(torch.optim, kind)(model.parameters(), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        worker = None if method is None else method.attach(optimizer, model.named_parameters())
    for step in range(5):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        optimizer.zero_grad()
        x = torch.randn(8, 6, generator=generator)
        torch.nn.functional.cross_entropy(wrapped(x), torch.randint(0, 3, (8,), generator=generator)).backward()
        if worker is None:
            optimizer.step()
        else:
            with worker.stepping():
                worker.exchange()
                optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def train_with_and_without(cases: list[tuple[str, dict[str, Any]]], methods: list[DGC]) -> list[bool]:
    equal = []
    for kind, options in cases:
        reference = train_perceptron(kind, options, None)
        for method in methods:
            trained = train_perceptron(kind, options, method)
            equal.append(all(a.equal(b) for a, b in zip(trained, reference, strict=True)))
    return equal


def test_density_1_is_ddp() -> None:
    """Before the first sparse step and on a dense stair; to the bit on two ranks, where a sum has one order."""
    cases = [("SGD", options) for options in BASE_OPTIONS] + [("AdamW", {"lr": 0.01})]
    dense = [DGC(rampup_begin_step=100, min_numel=1), DGC(sparsity=[0.0], min_numel=1)]
    assert run_ranks(train_with_and_without, 2, cases, dense) == [[True] * 8] * 2
    sparse = [DGC(sparsity=[0.9], min_numel=1)]
    assert run_ranks(train_with_and_without, 2, cases, sparse)[0] == [False] * 4


def train_alone() -> dict[str, Any]:
    facts = {}
    for kind in ("SGD", "AdamW"):
        for base in BASE_OPTIONS if kind == "SGD" else [{"lr": 0.01}]:
            trained = []
            for compresses in (True, False):
                parameters = make_parameters(AWKWARD)
                optimizer = getattr(torch.optim, kind)(parameters.values(), **base)
                worker = replace(DENSE_THEN_SPARSE, rampup_begin_step=0).attach(optimizer, parameters.items())
                for step in range(4):
                    if compresses:
                        take_step(worker, parameters, step)
                        assert worker.density == worker.last_density == worker.clip_factor == 1.0
                        assert not worker.is_sparse
                    else:
                        optimizer.zero_grad()
                        backward(parameters, step)
                        optimizer.step()
                if compresses:
                    assert worker._exchange.ledger == TrafficLedger(steps=4)
                    assert worker.residuals == {}
                trained.append(digest(parameters.values()))
            facts[f"{kind} {base}"] = trained
    return facts


def test_one_rank_is_plain_training_without_communication() -> None:
    """Without a process group and with one of a single rank; warnings are errors here, so there was none."""
    for facts in (train_alone(), run_ranks(train_alone, 1)[0]):
        assert len(facts) == 4
        for compressed, plain in facts.values():
            assert compressed == plain


# The method as a value ------------------------------------------------------------------------------------------------


def test_a_method_is_a_value() -> None:
    method = DGC(sparsity=[0.75, 0.999], rampup_step=10, exclude=["*.bias"])
    assert method == DGC(sparsity=(0.75, 0.999), rampup_step=10, exclude=("*.bias",))
    assert method != DGC()
    assert hash(method) == hash(replace(method))
    assert pickle.loads(pickle.dumps(method)) == method
    assert eval(repr(method)) == method
    assert replace(method, rampup_begin_step=5).schedule.is_dense(4)
    description = method.describe()
    assert description == {
        "method": "dgc",
        "rampup_begin_step": 0,
        "rampup_step": 10,
        "sparsity": (0.75, 0.999),
        "momentum_masking": True,
        "min_numel": 16384,
        "exclude": ("*.bias",),
        "selection": "sampled",
        "value_dtype": "float32",
    }
    settings = {name: value for name, value in description.items() if name != "method"}
    assert DGC(**settings) == method  # type: ignore[arg-type]
