"""PowerSGD against a simulation of the paper, and against torch's communication hook."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

from lightning_lowbw import LowRank, NonFiniteGradientError, PowerSGD, merge_states
from lightning_lowbw.comm.agreement import digest
from tests.ranks import run_ranks
from tests.sync.problem import (
    AWKWARD,
    FLAT,
    NODES,
    Nodes,
    backward,
    coefficients,
    each,
    from_memory,
    in_memory,
    make_parameters,
    make_weight,
    message_of,
    node_of,
)

STEPS = 6
SHAPES = {name: AWKWARD[name] for name in ("scalar", "empty", "vector", "cube", "conv", "matrix", "transposed")}
Make = Callable[..., Optimizer]
MOMENTUM, ADAMW = partial(SGD, lr=0.05, momentum=0.9, weight_decay=0.01), partial(AdamW, lr=0.02, eps=1e-3)

# The paper ------------------------------------------------------------------------------------------------------------


def orthogonalize(columns: Tensor) -> Tensor:
    """Gram-Schmidt."""
    done: list[Tensor] = []
    for column in columns.T:
        rest = column - sum((column @ other * other for other in done), torch.zeros_like(column))
        done.append(rest / rest.norm())
    return torch.stack(done, 1)


def first_start(number: int, num_columns: int, rank: int) -> Tensor:
    """Return Q of the first exchange of the matrix with this number."""
    return torch.randn(num_columns, rank, generator=torch.Generator().manual_seed(number))


class Paper:
    """Algorithms 1 and 2 on a list of ranks, in float64; momentum and decay are left to the optimizer behind it."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank, self.starts = rank, dict[str, Tensor]()
        self.residuals: list[dict[str, Tensor]] = [{} for _ in range(num_ranks)]

    def mean(self, name: str, signals: list[Tensor]) -> Tensor:
        """Return the mean of a matrix of which each rank has one."""
        num_rows, num_columns = signals[0].shape
        rank = min(self.rank, num_rows, num_columns)
        if 2 * (num_rows + num_columns) * rank >= num_rows * num_columns:  # does not pay
            return torch.stack(signals).mean(0)
        if name not in self.starts:
            self.starts[name] = first_start(len(self.starts), num_columns, rank).double()
        matrices = [each + kept.get(name, 0.0) for each, kept in zip(signals, self.residuals, strict=True)]
        left = orthogonalize(torch.stack([matrix @ self.starts[name] for matrix in matrices]).mean(0))
        self.starts[name] = torch.stack([matrix.T @ left for matrix in matrices]).mean(0)
        mean = left @ self.starts[name].T
        for matrix, kept in zip(matrices, self.residuals, strict=True):
            kept[name] = matrix - mean
        return mean


def as_matrix(tensor: Tensor, name: str) -> Tensor:
    """Return a tensor as it lies in memory: rows of its first dimension there; a vector is a row."""
    num_rows = 1 if tensor.dim() < 2 else tensor.shape[name == "transposed"]
    return in_memory(tensor, name).view(num_rows, tensor.numel() // num_rows)


def by_the_paper(rank: int, make: Make, nodes: Nodes, dtype: torch.dtype) -> tuple[dict[str, Tensor], Paper]:
    weights = {name: make_weight(name, shape, dtype) for name, shape in SHAPES.items()}
    optimizer, paper = make(list(weights.values())), Paper(rank, len(nodes))
    for step in range(STEPS):
        for name, weight in weights.items():
            of_ranks = [[coefficients(name, weight, each, step) + weight for each in node] for node in nodes]
            of_nodes = [torch.stack(each).double().mean(0) for each in of_ranks]
            mean = paper.mean(name, [as_matrix(each, name) for each in of_nodes])
            weight.grad = from_memory(mean.reshape(-1), name, SHAPES[name]).to(dtype)
        optimizer.step()
    return weights, paper


def train(rank: int, make: Make, nodes: Nodes, dtype: torch.dtype) -> dict[str, Any]:
    parameters = make_parameters(SHAPES, dtype)
    optimizer = make(parameters.values())
    worker = PowerSGD(rank).attach(optimizer, parameters.items(), topology=nodes)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(parameters, step)
        optimizer.step()
    worker.finish()
    weights = {name: parameter.detach() for name, parameter in parameters.items()}
    return {"weights": weights, "residuals": dict(worker.compressed.residuals)}  # type: ignore[union-attr]


FOUR: Nodes = ((0,), (1,), (2,), (3,))
CASES: list[tuple[int, Make, Nodes, torch.dtype]] = [
    (1, MOMENTUM, FLAT, torch.float32),
    (2, ADAMW, FLAT, torch.float32),
    (4, MOMENTUM, FLAT, torch.float32),
    (2, MOMENTUM, FLAT, torch.bfloat16),
    (2, MOMENTUM, FOUR, torch.float32),
    (2, MOMENTUM, NODES["crossed"], torch.float32),
    (1, ADAMW, NODES["blocks"], torch.float32),
]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_training_is_that_of_the_paper(num_ranks: int) -> None:
    cases = [case for case in CASES if sum(map(len, case[2])) == num_ranks]
    by_rank = run_ranks(each, num_ranks, train, cases)
    for number, (size, make, nodes, dtype) in enumerate(cases):
        weights, paper = by_the_paper(size, make, nodes, dtype)
        close = 2e-4 if dtype == torch.float32 else 0.05
        assert len({digest(results[number]["weights"].values()) for results in by_rank}) == 1
        for rank, results in enumerate(by_rank):
            for name, weight in results[number]["weights"].items():
                torch.testing.assert_close(weight, weights[name], rtol=close, atol=close)
            kept = paper.residuals[node_of(rank, nodes)]
            assert results[number]["residuals"].keys() == kept.keys() >= {"matrix", "transposed"}
            for name, residual in results[number]["residuals"].items():
                torch.testing.assert_close(residual, kept[name].float().reshape(-1), rtol=close, atol=close)


# torch's hook ---------------------------------------------------------------------------------------------------------

DENSE_STEPS = 2  # the least that the hook allows


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 4))


def loss_of(model: nn.Module, seed: int, size: int = 16) -> Tensor:
    inputs = torch.randn(size, 24, generator=torch.Generator().manual_seed(seed))
    loss: Tensor = nn.functional.mse_loss(model(inputs), inputs[:, :4].sin())
    return loss


def hooked(model: nn.Module, rank: int, *, from_our_start: bool) -> nn.Module:
    """Return the model in DDP with torch's hook."""
    state = powerSGD_hook.PowerSGDState(None, rank, start_powerSGD_iter=DENSE_STEPS)
    factors = {p: found for p in model.parameters() if (found := LowRank(rank=rank).factors(p.shape))}
    starts = {p: first_start(i, m, columns) for i, (p, (_, m, columns)) in enumerate(factors.items())}

    def hook(state: Any, bucket):  # type: ignore[no-untyped-def]  # its annotation would have to be torch's class
        if from_our_start and state.iter == DENSE_STEPS:
            state.q_memory_dict[0] = torch.cat([starts[p].reshape(-1) for p in bucket.parameters() if p in starts])
            state.p_memory_dict[0] = torch.empty(sum(n * columns for n, _, columns in factors.values()))
        return powerSGD_hook.powerSGD_hook(state, bucket)

    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(state, hook)
    return wrapped


def fit(rank: int, num_steps: int, by: str) -> tuple[list[Tensor], float]:
    """Return the weights, and the loss of a larger batch."""
    model = trained = make_model()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    if by == "ours":
        PowerSGD(rank, start_step=DENSE_STEPS).attach(optimizer, model.named_parameters())
    else:
        trained = hooked(model, rank, from_our_start=by == "the hook from our start")
    for step in range(num_steps):
        optimizer.zero_grad()
        loss_of(trained, 10 * step + dist.get_rank()).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()], float(loss_of(model, -1, 500))


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_it_trains_as_torch_s_hook(rank: int) -> None:
    """To rounding from the same start; from another one to about the same loss."""
    cases = [(rank, 8, "ours"), (rank, 8, "the hook from our start"), (rank, 80, "ours"), (rank, 80, "the hook")]
    for (ours, before), (theirs, _), (_, loss), (_, their_loss) in run_ranks(each, 2, fit, cases):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        assert loss == pytest.approx(their_loss, rel=0.1)
        assert loss < 0.5 * before


# Other worlds, faults, and tensors that come and go -------------------------------------------------------------------

LR = 0.1


class Training:
    """Plain SGD with a worker; `asked` are the weights that it would have if nothing was kept back."""

    def __init__(self, saved: dict[str, Any] | None = None, nodes: Nodes | str = "flat") -> None:
        self.parameters = make_parameters({"vector": (17,), "matrix": (30, 20), "square": (16, 16)})
        self.parameters["complex"] = Parameter(make_weight("complex", (8, 9), torch.complex64))
        if saved is not None:
            self.parameters = {name: Parameter(weight) for name, weight in saved["weights"].items()}
        self.asked = saved["asked"] if saved else {name: p.detach().clone() for name, p in self.parameters.items()}
        self.optimizer = SGD(self.parameters.values(), lr=LR)
        self.worker = PowerSGD(1).attach(self.optimizer, self.parameters.items(), topology=nodes)
        if saved is not None:
            self.worker.load_state_dict(saved["state"])

    def train(self, num_steps: int, frozen: tuple[str, ...] = ()) -> None:
        for step in range(self.worker.step, self.worker.step + num_steps):
            for name, parameter in self.parameters.items():
                parameter.requires_grad_(name not in frozen)
                if name not in frozen:
                    of_ranks = [coefficients(name, parameter, each, step) for each in range(dist.get_world_size())]
                    parameter.grad = of_ranks[dist.get_rank()]
                    self.asked[name] -= LR * sum(of_ranks) / len(of_ranks)
            self.optimizer.step()

    def result(self) -> dict[str, Any]:
        self.worker.finish()
        weights = {name: parameter.detach() for name, parameter in self.parameters.items()}
        return {"weights": weights, "asked": self.asked, "state": self.worker.state_dict()}


def merged(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Check that weights are equal, and lack what is kept and no more; return what another world begins with."""
    state = merge_states(result["state"] for result in results)
    assert len({digest(result["weights"].values()) for result in results}) == 1
    for name, weight in results[0]["weights"].items():
        kept = state["residuals"].get(name, torch.zeros(2)).view(weight.dtype)
        kept = kept.view_as(weight) if name in state["residuals"] else kept[0]
        torch.testing.assert_close(weight - LR * kept, results[0]["asked"][name], rtol=1e-4, atol=1e-5)
    return {**results[0], "state": state}


def train_on(saved: dict[str, Any] | None, nodes: Nodes | str) -> dict[str, Any]:
    training = Training(saved, nodes)
    training.train(3)
    return training.result()


def test_another_world_goes_on_with_what_was_kept() -> None:
    saved = merged(run_ranks(train_on, 2, None, "flat"))
    saved = merged(run_ranks(train_on, 4, saved, NODES["crossed"]))
    saved = merged(run_ranks(train_on, 3, saved, "flat"))
    assert saved["state"]["residuals"].keys() == {"matrix", "square", "complex"}
    assert not merged(run_ranks(train_on, 1, saved, "flat"))["state"]["residuals"]  # applied by its first step


def change() -> dict[str, Any]:
    """Add a tensor, freeze one, and send more columns, which pay for two tensors only."""
    training = Training()
    training.train(2)
    training.parameters["optimizer.4"] = make_parameters({"late": (9, 9)})["late"]
    training.optimizer.add_param_group({"params": [training.parameters["optimizer.4"]]})
    training.asked["optimizer.4"] = training.parameters["optimizer.4"].detach().clone()
    training.train(2, frozen=("matrix",))
    training.worker.method = training.worker.method.replace(rank=3)
    training.train(2)
    return training.result()


def test_tensors_may_come_and_go_and_the_rank_may_change() -> None:
    assert merged(run_ranks(change, 2))["state"]["residuals"].keys() == {"matrix", "square"}


def fail(value: float) -> tuple[str | None, str | None]:
    training = Training()
    training.train(2)
    if dist.get_rank() == 1:
        training.parameters["matrix"].grad.fill_(value)  # type: ignore[union-attr]
    at_once = message_of(training.optimizer.step, NonFiniteGradientError)
    return at_once, message_of(training.worker.check_late_faults, NonFiniteGradientError)


def test_nan_and_overflow_on_one_rank_raise_on_all() -> None:
    for at_once, _ in run_ranks(fail, 2, math.nan):
        assert "'matrix' on rank 1 is not finite" in str(at_once)
    for at_once, late in run_ranks(fail, 2, 3e38):
        assert at_once is None
        assert "too large for float32" in str(late)
