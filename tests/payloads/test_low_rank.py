"""PowerSGD against a simulation of the paper."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, AdamW

from lightning_lowbw import LowRank, PowerSGD, merge_states
from lightning_lowbw.comm.agreement import digest
from lightning_lowbw.comm.peers import Peers
from lightning_lowbw.payloads import low_rank
from lightning_lowbw.payloads.low_rank import LowRankExchange
from tests.ranks import on_ranks, run_ranks
from tests.sync import problem
from tests.sync.problem import AWKWARD, FLAT, MOMENTUM, NODES, Make, Nodes, Signals

STEPS = 6
SHAPES = {name: AWKWARD[name] for name in ("scalar", "empty", "vector", "cube", "conv", "matrix", "transposed")}
SHAPES |= {"twin": SHAPES["matrix"], "third": SHAPES["matrix"]}  # matrices of one shape are multiplied together
ADAMW = partial(AdamW, lr=0.02, eps=1e-3)

# The paper ------------------------------------------------------------------------------------------------------------


def orthogonalize(columns: Tensor) -> Tensor:
    """Gram-Schmidt."""
    done: list[Tensor] = []
    for column in columns.T:
        rest = column - sum((column @ other * other for other in done), torch.zeros_like(column))
        done.append(rest / rest.norm())
    return torch.stack(done, 1)


class Paper:
    """Algorithms 1 and 2 on a list of nodes, in float64; momentum and decay are left to the optimizer behind it."""

    def __init__(self, rank: int, num_nodes: int) -> None:
        self.rank, self.starts = rank, dict[str, Tensor]()
        self.residuals: list[dict[str, Tensor]] = [{} for _ in range(num_nodes)]

    def mean(self, signals: Signals) -> dict[str, Tensor]:
        return {name: self.mean_of(name, [each[name].double() for each in signals]) for name in SHAPES}

    def mean_of(self, name: str, flat: list[Tensor]) -> Tensor:
        """The rows of a matrix are its first dimension in memory; a vector is a row."""
        num_rows = 1 if len(SHAPES[name]) < 2 else SHAPES[name][name == "transposed"]
        num_columns = flat[0].numel() // num_rows
        rank = min(self.rank, num_rows, num_columns)
        if 2 * (num_rows + num_columns) * rank >= num_rows * num_columns:  # does not pay
            return torch.stack(flat).mean(0)
        if name not in self.starts:
            generator = torch.Generator().manual_seed(len(self.starts))
            self.starts[name] = torch.randn(num_columns, rank, generator=generator).double()
        matrices = [
            each.view(num_rows, num_columns) + kept.get(name, 0.0)
            for each, kept in zip(flat, self.residuals, strict=True)
        ]
        left = orthogonalize(torch.stack([matrix @ self.starts[name] for matrix in matrices]).mean(0))
        self.starts[name] = torch.stack([matrix.T @ left for matrix in matrices]).mean(0)
        mean = left @ self.starts[name].T
        for matrix, kept in zip(matrices, self.residuals, strict=True):
            kept[name] = matrix - mean
        return mean.reshape(-1)


CASES: list[tuple[int, Make, Nodes, torch.dtype]] = [
    (1, MOMENTUM, FLAT, torch.float32),
    (4, ADAMW, FLAT, torch.float32),
    (2, MOMENTUM, FLAT, torch.bfloat16),
    (2, MOMENTUM, NODES["crossed"], torch.float32),
]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_training_is_that_of_the_paper(num_ranks: int) -> None:
    cases = [case for case in CASES if sum(map(len, case[2])) == num_ranks]
    calls = {}
    for size, make, nodes, dtype in cases:
        training = partial(problem.train, PowerSGD(size), make, SHAPES, nodes, STEPS, dtype=dtype)
        calls[size, make, nodes, dtype] = training
    for (size, make, nodes, dtype), by_rank in problem.run_each(num_ranks, calls).items():
        paper = Paper(size, len(nodes))
        weights = problem.train_by_means(paper.mean, make, SHAPES, nodes, STEPS, dtype)
        close = 2e-4 if dtype == torch.float32 else 0.05
        assert len({result["digests"][-1] for result in by_rank}) == 1
        for rank, result in enumerate(by_rank):
            for name, weight in result["weights"].items():
                torch.testing.assert_close(weight, weights[name], rtol=close, atol=close)
            kept = paper.residuals[problem.node_of(rank, nodes)]
            assert result["residuals"].keys() == kept.keys() >= {"matrix", "transposed"}
            for name, residual in result["residuals"].items():
                torch.testing.assert_close(residual, kept[name].float().reshape(-1), rtol=close, atol=close)


# Orthogonal columns ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_columns_become_those_of_a_decomposition_but_for_signs(rank: int) -> None:
    """Matrices of any size and magnitude, padded together or not, with columns nearly the same, beside NaN."""
    batches = [torch.randn(4, 40, rank) * torch.tensor([1e-25, 1.0, 1e25, torch.nan])[:, None, None]]
    batches += [torch.randn(2, rank, rank), torch.randn(1, low_rank.PADDED // rank + 1, rank), torch.randn(1, 9, rank)]
    batches[0][1] = batches[0][1, :, :1] + 1e-3 * batches[0][1]
    for given, found in zip(batches, low_rank.orthogonal(batches), strict=True):
        given, found = given[:3], found[:3]  # without the NaN
        expected = torch.linalg.qr(given.double()).Q
        signs = (found * expected).sum(1, keepdim=True).sign()
        torch.testing.assert_close(found.double(), signs * expected, rtol=0, atol=1e-6)
        eye = torch.eye(rank, dtype=torch.float64).expand(len(given), rank, rank)
        torch.testing.assert_close(found.double().mT @ found.double(), eye, rtol=0, atol=1e-6)


def test_a_column_that_depends_on_the_columns_before_it_is_the_spares() -> None:
    """Or zero: only rounding is left, in any direction. No matrix of zeros becomes NaN."""
    columns, spare = torch.randn(1, 40, 4), torch.randn(1, 40, 4)
    columns[:, :, 2] = columns[:, :, :2] @ torch.tensor([3.0, -0.1])
    for given, is_lost in ((columns, [2]), (columns * 0, [0, 1, 2, 3])):
        (alone,), (beside,) = low_rank.orthogonal([given]), low_rank.orthogonal([given], [spare])
        assert [place for place in range(4) if not alone[0, :, place].any()] == is_lost
        assert beside[0, :, is_lost].equal(spare[0, :, is_lost])
        kept = [place for place in range(4) if place not in is_lost]
        assert beside[0, :, kept].equal(alone[0, :, kept])
        assert beside.isfinite().all()


def test_a_gradient_of_zeros_does_not_end_the_exchange_of_what_comes_later() -> None:
    """Its factors are zeros, and a start of zeros would be orthogonalised to the same first columns for ever."""
    exchange = LowRankExchange(LowRank(rank=2), Peers())
    sent, matrix = torch.zeros(32, 32), torch.zeros(32, 32)
    matrix[2:, 2:] = torch.randn(30, 30, generator=torch.Generator().manual_seed(0))
    for step in range(30):
        sent += exchange.prepare({"matrix": matrix * min(step, 1)}).send().wait().mean.dense()["matrix"].view(32, 32)
    assert sent.norm() > 0.5 * 29 * matrix.norm()


# Tensors that come and go ---------------------------------------------------------------------------------------------

LR = 0.1


def train_through_changes(most: int) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """Add tensors, freeze one, and send more columns, which do not pay for two tensors.

    Args:
        most: elements that are multiplied together.

    Returns:
        The weights; the weights without residuals; and the state.
    """
    low_rank.BATCH_OF_CPU = most  # put back by `run_ranks`
    shapes = {"vector": (17,), "matrix": (30, 20), "twin": (30, 20), "square": (16, 16), "third": (30, 20)}
    parameters = problem.make_parameters(shapes)
    parameters["complex"] = Parameter(problem.make_weight("complex", (8, 9), torch.complex64))
    late = problem.make_parameters({"optimizer.6": (9, 9), "optimizer.7": (16, 16)})
    asked = {**problem.weights_of(parameters), **problem.weights_of(late)}
    optimizer = SGD(parameters.values(), lr=LR)
    worker = PowerSGD(1).attach(optimizer, parameters.items())
    for step in range(6):
        if step == 2:
            parameters |= late
            optimizer.add_param_group({"params": list(late.values())})
        if step == 4:
            worker.use(worker.method.replace(rank=3))
        for name, parameter in parameters.items():
            parameter.requires_grad_(name != "matrix" or step not in (2, 3))
            parameter.grad = None
            if parameter.requires_grad:
                of_ranks = [problem.coefficients(name, parameter, rank, step) for rank in range(2)]
                parameter.grad = of_ranks[dist.get_rank()]
                asked[name] -= LR * sum(of_ranks) / 2
        optimizer.step()
    worker.finish()
    return problem.weights_of(parameters), asked, worker.state_dict()


@pytest.mark.parametrize("most", [1, 1300])
def test_tensors_may_come_and_go_and_the_rank_may_change(most: int) -> None:
    """One by one, and two tensors of a shape together; one of the two may come later."""
    results = run_ranks(train_through_changes, 2, most)
    kept = merge_states(state for _, _, state in results)["residuals"]
    assert kept.keys() == {"matrix", "twin", "third", "square", "optimizer.7"}
    assert len({digest(weights.values()) for weights, _, _ in results}) == 1
    for name, weight in results[0][0].items():
        there = weight - LR * kept[name].view_as(weight) if name in kept else weight
        torch.testing.assert_close(there, results[0][1][name], rtol=1e-4, atol=1e-5)


def train_matrix() -> list[str]:
    """Return digests of the weights."""
    return problem.train(PowerSGD(1), partial(SGD, lr=LR), {"matrix": (30, 20)}, steps=3)["digests"]  # type: ignore[no-any-return]


@on_ranks()
def test_autocast_does_not_round_the_factors() -> None:
    expected = train_matrix()
    with torch.autocast("cpu"):  # as in Lightning's manual optimization
        assert train_matrix() == expected


@on_ranks()
def test_products_are_exact_where_less_is_allowed() -> None:
    """As far as a CPU can tell: the setting is changed for the products alone."""
    seen, product, before = set[str](), torch.baddbmm, torch.get_float32_matmul_precision()

    def noting(*args: Tensor) -> Tensor:
        seen.add(torch.get_float32_matmul_precision())
        return product(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "baddbmm", noting)
        torch.set_float32_matmul_precision("medium")
        try:
            train_matrix()
            assert torch.get_float32_matmul_precision() == "medium"
        finally:
            torch.set_float32_matmul_precision(before)
    assert seen == {"highest"}
