"""The method on real gloo ranks, in a plain PyTorch loop, against the paper's equations in one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_lowbw import DGC
from lightning_lowbw.engine.gradients import DGCWorker
from lightning_lowbw.where.agreement import digest
from tests.engine.problem import Nodes, exchange_of
from tests.oracle import OracleDGC
from tests.ranks import run_ranks

STEPS = 12
BEGIN = 4
STAIRS = (0.5, 0.9, 0.97)
MIN_NUMEL = 100
SGD = dict[str, float | bool]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 20), nn.Tanh(), nn.Linear(20, 3)).double().float()


def make_gradients(model: nn.Module, rank: int, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(8, 12, generator=generator)
    y = torch.randint(0, 3, (8,), generator=generator)
    loss = nn.functional.cross_entropy(model(x) * 5, y)
    return list(torch.autograd.grad(loss, list(model.parameters())))


def clip_(model: nn.Module, clip: dict[str, float], factor: float) -> None:
    if "norm" in clip:
        nn.utils.clip_grad_norm_(model.parameters(), clip["norm"] * factor)
    if "value" in clip:
        nn.utils.clip_grad_value_(model.parameters(), clip["value"])


def train_on_ranks(
    nodes: Nodes, optimizer: SGD, clip: dict[str, float], masking: bool, dtype: str = "float32"
) -> tuple[nn.Module, DGCWorker]:
    """Train in a plain loop; nodes of one rank are one level."""
    model = make_model()
    sgd = torch.optim.SGD(model.parameters(), **optimizer)  # type: ignore[arg-type]
    method = DGC(
        rampup_begin_step=BEGIN,
        rampup_step=6,
        sparsity=STAIRS,
        min_numel=MIN_NUMEL,
        selection="exact",
        momentum_masking=masking,
        value_dtype=dtype,
    )
    worker = method.attach(sgd, model.named_parameters(), exchange_of(nodes))
    for step in range(STEPS):
        for parameter, gradient in zip(model.parameters(), make_gradients(model, dist.get_rank(), step), strict=True):
            parameter.grad = gradient
        with worker.stepping():
            sparse = worker.is_sparse
            worker.exchange(clip=lambda: clip_(model, clip, worker.clip_factor) if worker.is_sparse else None)
            if not sparse:
                clip_(model, clip, 1.0)
            sgd.step()
    return model, worker


def train_by_the_paper(
    nodes: Nodes, optimizer: SGD, clip: dict[str, float], masking: bool
) -> tuple[list[Tensor], OracleDGC]:
    """Train one rank of the paper per node, which has the node's mean gradient."""
    model = make_model()
    weights = [parameter.detach() for parameter in model.parameters()]
    oracle = OracleDGC(
        len(nodes),
        clip_norm=clip.get("norm"),
        clip_value=clip.get("value"),
        min_numel=MIN_NUMEL,
        masking=masking,
        **optimizer,  # type: ignore[arg-type]
    )
    for step in range(STEPS):
        gradients = []
        for node in nodes:
            by_rank = [make_gradients(model, rank, step) for rank in node]
            gradients.append([sum(each) / len(node) for each in zip(*by_rank, strict=True)])
        with torch.no_grad():
            if step < BEGIN:
                oracle.dense_step(weights, gradients)
            else:
                stair = min(int((step - BEGIN) * len(STAIRS) / 6), len(STAIRS) - 1)
                oracle.sparse_step(weights, gradients, 1 - STAIRS[stair])
    return weights, oracle


def train(nodes: Nodes, optimizer: SGD, clip: dict[str, float], masking: bool) -> tuple[list[Tensor], str]:
    model, _ = train_on_ranks(nodes, optimizer, clip, masking)
    return [parameter.detach() for parameter in model.parameters()], digest(model.parameters())


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(
    ("optimizer", "clip", "masking"),
    [
        ({"lr": 0.1}, {}, True),
        ({"lr": 0.1, "momentum": 0.9}, {}, True),
        ({"lr": 0.1, "momentum": 0.9}, {}, False),
        ({"lr": 0.1, "momentum": 0.9, "nesterov": True}, {}, True),
        ({"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05}, {}, True),
        ({"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.05}, {"norm": 0.1}, True),
        ({"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05}, {"value": 0.02}, True),
    ],
)
def test_equals_the_paper(num_ranks: int, optimizer: SGD, clip: dict[str, float], masking: bool) -> None:
    nodes = tuple((rank,) for rank in range(num_ranks))
    results = run_ranks(train, num_ranks, nodes, optimizer, clip, masking)
    expected, _ = train_by_the_paper(nodes, optimizer, clip, masking)
    assert len({digest for _, digest in results}) == 1  # replicas are equal to the bit
    for weight, reference in zip(results[0][0], expected, strict=True):
        torch.testing.assert_close(weight, reference, rtol=1e-5, atol=2e-6)
    start = [parameter.detach() for parameter in make_model().parameters()]
    assert max(float((a - b).abs().max()) for a, b in zip(start, expected, strict=True)) > 0.01  # it did train
