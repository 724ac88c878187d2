"""What deep gradient compression promises in a plain PyTorch loop: any shape, known volumes, and parameters that come
and go. The equations themselves are in test_dgc_oracle.py; optimizers, failures and states in files of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD

from lightning_lowbw import DGC
from lightning_lowbw.engine.gradients import GradientWorker
from lightning_lowbw.engine.method import Method
from lightning_lowbw.what.selection import num_selected
from lightning_lowbw.where.agreement import digest
from lightning_lowbw.where.ledger import all_gather_bytes, all_reduce_bytes
from tests.engine.problem import (
    AWKWARD,
    CLOSE,
    DENSE_THEN_SPARSE,
    DENSITIES,
    by_the_paper,
    coefficients,
    each,
    make_parameters,
    make_weight,
    take_step,
    weights_of,
)
from tests.oracle import OracleDGC
from tests.ranks import run_ranks

# Shapes, dtypes and density -------------------------------------------------------------------------------------------


def train_awkward_shapes(method: Method, dtype: torch.dtype, momentum: float) -> dict[str, Any]:
    parameters = make_parameters(AWKWARD, dtype)
    strides = {name: parameter.stride() for name, parameter in parameters.items()}
    worker = method.attach(SGD(parameters.values(), lr=0.05, momentum=momentum), parameters.items())
    num_empty: dict[int, dict[str, int]] = {}
    digests = []
    for step in DENSITIES:
        take_step(worker, parameters, step)
        digests.append(digest(parameters.values()))
        num_empty[step] = {name: int((residual == 0).sum()) for name, residual in worker.residuals.items()}
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


@pytest.mark.parametrize(("num_ranks", "begin"), [(2, 0), (2, 2), (3, 2)])
def test_awkward_shapes_train_by_the_paper(num_ranks: int, begin: int) -> None:
    """With velocities that torch made in the dense phase, and with those that the first exchange makes."""
    method = DENSE_THEN_SPARSE.replace(rampup_begin_step=begin)
    results = run_ranks(train_awkward_shapes, num_ranks, method, torch.float32, 0.9)
    assert len({tuple(facts["digests"]) for facts in results}) == 1  # replicas are equal after every step
    densities = {step: method.when.density(step) for step in DENSITIES}
    for name, shape in AWKWARD.items():
        expected = by_the_paper(name, shape, OracleDGC(num_ranks, lr=0.05, momentum=0.9), densities)
        torch.testing.assert_close(results[0]["weights"][name].contiguous(), expected.contiguous(), **CLOSE)
        assert expected.numel() == 0 or not expected.equal(make_weight(name, shape))


def test_exactly_k_of_each_tensor_are_sent() -> None:
    """k counts per tensor, at every stair; what was sent is the only place where the residual is zero."""
    for facts in run_ranks(train_awkward_shapes, 2, DENSE_THEN_SPARSE, torch.float32, 0.9):
        for step, density in DENSITIES.items():
            numels = {name: make_weight(name, shape).numel() for name, shape in AWKWARD.items()}
            expected = {name: num_selected(numel, density) for name, numel in numels.items() if numel}
            assert facts["num_empty"][step] == (expected if density < 1 else {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_dtypes_of_parameters_and_of_the_wire(dtype: torch.dtype) -> None:
    values = ["float32", "bfloat16", "float16", "int8"]
    methods = [DENSE_THEN_SPARSE.replace(value_dtype=each, selection="sampled") for each in values]
    tolerance = 0.1 if dtype == torch.bfloat16 else 0.02
    for by_rank in zip(*run_ranks(each, 2, train_awkward_shapes, [(m, dtype, 0.9) for m in methods]), strict=True):
        assert len({tuple(facts["digests"]) for facts in by_rank}) == 1
        for facts in by_rank:
            assert facts["residual_dtypes"] == {torch.float64 if dtype == torch.float64 else torch.float32}
            assert 0 < facts["residual_norm"] < float("inf")
        for name, shape in AWKWARD.items():
            weight = by_rank[0]["weights"][name]
            assert weight.dtype == dtype
            assert weight.isfinite().all()
            if weight.numel() >= 100:
                # Rounding lets a few other elements be selected than in full precision.
                expected = by_the_paper(name, shape, OracleDGC(2, lr=0.05, momentum=0.9), DENSITIES)
                assert ((weight.float() - expected).abs() < tolerance).float().mean() > 0.93
                assert ((make_weight(name, shape) - expected).abs() > 2 * tolerance).float().mean() > 0.5


def average_in_double() -> list[Tensor]:
    wide, narrow = Parameter(torch.zeros(3, dtype=torch.float64)), Parameter(torch.zeros(2, dtype=torch.bfloat16))
    worker = DGC().attach(SGD([wide, narrow], lr=1.0), [("wide", wide), ("narrow", narrow)])
    wide.grad = torch.tensor([1 + 2.0**-40, 2.0**-300, 1e200], dtype=torch.float64)
    narrow.grad = torch.full((2,), 1.0 + dist.get_rank(), dtype=torch.bfloat16)
    with worker.stepping():
        worker.exchange()
    return [wide.grad, narrow.grad]


def test_dense_tensors_keep_their_precision() -> None:
    for wide, narrow in run_ranks(average_in_double, 2):
        assert wide.tolist() == [1 + 2.0**-40, 2.0**-300, 1e200]
        assert narrow.tolist() == [1.5, 1.5]


def train_complex() -> tuple[Tensor, Tensor]:
    """Beside plain SGD on the mean gradient of all ranks, which each rank can compute here."""
    results = []
    for compresses in (True, False):
        parameter = Parameter(torch.view_as_complex(make_weight("complex", (40, 2))))
        others = Parameter(make_weight("matrix", (30, 20)))
        optimizer = SGD([parameter, others], lr=0.05, momentum=0.9, weight_decay=0.1)
        worker = DENSE_THEN_SPARSE.replace(rampup_begin_step=1).attach(optimizer, [("w", parameter), ("m", others)])
        for step in range(4):
            mine = (torch.view_as_complex(coefficients("complex", torch.empty(40, 2), r, step)) for r in range(2))
            gradients = list(mine)
            others.grad = torch.ones_like(others)
            if compresses:
                parameter.grad = gradients[dist.get_rank()]
                with worker.stepping():
                    worker.exchange()
                    optimizer.step()
            else:
                parameter.grad = (gradients[0] + gradients[1]) / 2
                optimizer.step()
        results.append(parameter.detach())
        assert "w" not in worker.residuals
    return results[0], results[1]


def test_complex_parameters_are_sent_dense() -> None:
    for trained, expected in run_ranks(train_complex, 2):
        torch.testing.assert_close(trained, expected, **CLOSE)


# Volumes --------------------------------------------------------------------------------------------------------------

LAYERS = {"body": (40, 30), "head": (300, 3), "bias": (30,), "excluded.weight": (50, 50), "gain": ()}


def measure_traffic(method: Method) -> list[dict[str, float]]:
    parameters = make_parameters(LAYERS)
    worker = method.attach(SGD(parameters.values(), lr=0.1, momentum=0.9), parameters.items())
    ledger = worker.peers.ledger
    measured = []
    for step in range(6):
        before, coming = replace(ledger), worker.density
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            take_step(worker, parameters, step)
        calls = {event.key: event.count for event in profile.key_averages() if event.key.startswith("gloo:")}
        assert worker.last_density == coming
        measured.append(
            {
                "density": coming,
                "sent_bytes": ledger.sent_bytes - before.sent_bytes,
                "received_bytes": ledger.received_bytes - before.received_bytes,
                "dense_bytes": ledger.dense_bytes - before.dense_bytes,
                "steps": ledger.steps - before.steps,
                **calls,
            }
        )
    return measured


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("value_dtype", ["float32", "float16", "int4"])
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
            density = method.when.density(step)
            sparse = [] if density == 1 else [numels["body"], numels["head"]]
            counts = [num_selected(numel, density) for numel in sparse]
            words = total - sum(sparse) + len(LAYERS) + 2 * num_ranks  # all tensors are float32: one bucket
            expected = all_reduce_bytes(4 * words, num_ranks)
            if counts:
                expected += all_gather_bytes(method.what.codec.nbytes(counts, sparse), num_ranks)
            assert facts == {
                "density": density,
                "sent_bytes": expected,
                "received_bytes": expected,
                "dense_bytes": all_reduce_bytes(4 * total, num_ranks),
                "steps": 1,
                "gloo:all_reduce": 1,
                **({"gloo:all_gather": 1} if counts else {}),
                **({"gloo:all_gather": 4} if step == 0 else {}),  # whether all begin alike
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
    method = DENSE_THEN_SPARSE.replace(min_numel=100)
    worker = method.attach(SGD(parameters.values(), lr=0.05, momentum=0.9, weight_decay=0.1), parameters.items())
    elsewhere = () if dist.get_rank() == 0 else ("on_rank_0", "dense_on_rank_0")
    digests = []
    for step in DENSITIES:
        pausing = [parameters[name] for name in PAUSED] if step in PAUSE else []
        before = [everything_about(worker, parameter) for parameter in pausing]
        take_step(worker, parameters, step, unused=("never", *elsewhere, *(PAUSED if step in PAUSE else ())))
        assert [everything_about(worker, parameter) for parameter in pausing] == before
        assert all(parameter.grad is None for parameter in pausing)
        gradients = [p.grad for name, p in parameters.items() if p.grad is not None]
        assert len(gradients) == len(parameters) - 1 - len(pausing)
        digests.append((digest(parameters.values()), digest(gradients)))
    never = parameters["never"]
    assert never.grad is None
    assert "never" not in worker.residuals
    assert never not in worker.optimizer.state
    return {"digests": digests, "weights": weights_of(parameters)}


def everything_about(worker: GradientWorker, parameter: Parameter) -> str:
    residual = [worker.residuals[name] for name in [worker.name_of(parameter)] if name in worker.residuals]
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
        torch.testing.assert_close(weights[name], expected, **CLOSE)


CHANGING = {"first": (20, 10), "frozen": (20, 10), "dense_frozen": (7,), "added": (15, 10), "stopped": (15, 10)}
UNFREEZE, ADD, STOP = 3, 5, 6


def train_through_changes() -> dict[str, Any]:
    parameters = make_parameters(CHANGING)
    added = parameters["added"]
    optimizer = SGD([p for p in parameters.values() if p is not added], lr=0.05, momentum=0.9)
    method = DENSE_THEN_SPARSE.replace(min_numel=100)
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
        assert ("frozen" in worker.residuals) == (step >= UNFREEZE)
    assert [group["momentum"] for group in optimizer.param_groups] == [0.9, 0.5]
    assert set(worker.state_dict()["residuals"]) == {"first", "frozen", "stopped", "optimizer.4"}
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
    worker = DENSE_THEN_SPARSE.replace(rampup_begin_step=0).attach(
        SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters()
    )
    for step in range(4):
        worker.optimizer.zero_grad()
        x = torch.randint(0, 30, (16,), generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        torch.nn.functional.cross_entropy(model(x), (x + 1) % 30).backward()
        with worker.stepping():
            worker.exchange()
            worker.optimizer.step()
    return list(worker.state_dict()["residuals"]), digest(model.parameters()), worker.residual_norm()


def test_a_tied_parameter_is_one() -> None:
    (names, first, norm), (_, second, _) = run_ranks(train_tied, 2)
    assert names == ["embedding.weight"]
    assert first == second
    assert norm > 0
