"""The method on real gloo ranks, in a plain PyTorch loop, against the paper's equations in one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_lowbw import DGC
from lightning_lowbw.comm.agreement import digest
from tests.oracle import OracleDGC
from tests.ranks import run_ranks

STEPS = 12
BEGIN = 4
STAIRS = (0.5, 0.9, 0.97)
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


def train_on_ranks(optimizer: SGD, clip: dict[str, float], selection: str, masking: bool) -> tuple[list[Tensor], str]:
    model = make_model()
    sgd = torch.optim.SGD(model.parameters(), **optimizer)  # type: ignore[arg-type]
    method = DGC(
        rampup_begin_step=BEGIN,
        rampup_step=6,
        sparsity=STAIRS,
        min_numel=100,
        selection=selection,
        momentum_masking=masking,
        value_dtype="float32",
    )
    worker = method.attach(sgd, model.named_parameters())
    rank = torch.distributed.get_rank()
    for step in range(STEPS):
        for parameter, gradient in zip(model.parameters(), make_gradients(model, rank, step), strict=True):
            parameter.grad = gradient
        with worker.stepping():
            sparse = worker.is_sparse
            worker.exchange(clip=lambda: clip_(model, clip, worker.clip_factor) if worker.is_sparse else None)
            if not sparse:
                clip_(model, clip, 1.0)
            sgd.step()
    return [parameter.detach() for parameter in model.parameters()], digest(model.parameters())


def train_by_the_paper(num_ranks: int, optimizer: SGD, clip: dict[str, float], masking: bool) -> list[Tensor]:
    model = make_model()
    weights = [parameter.detach() for parameter in model.parameters()]
    oracle = OracleDGC(
        num_ranks,
        clip_norm=clip.get("norm"),
        clip_value=clip.get("value"),
        min_numel=100,
        masking=masking,
        **optimizer,  # type: ignore[arg-type]
    )
    for step in range(STEPS):
        gradients = [make_gradients(model, rank, step) for rank in range(num_ranks)]
        with torch.no_grad():
            if step < BEGIN:
                oracle.dense_step(weights, gradients)
            else:
                stair = min(int((step - BEGIN) * len(STAIRS) / 6), len(STAIRS) - 1)
                oracle.sparse_step(weights, gradients, 1 - STAIRS[stair])
    return weights


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
    results = run_ranks(train_on_ranks, num_ranks, optimizer, clip, "exact", masking)
    expected = train_by_the_paper(num_ranks, optimizer, clip, masking)
    assert len({digest for _, digest in results}) == 1  # replicas are equal to the bit
    for weight, reference in zip(results[0][0], expected, strict=True):
        torch.testing.assert_close(weight, reference, rtol=1e-5, atol=2e-6)
    start = [parameter.detach() for parameter in make_model().parameters()]
    assert max(float((a - b).abs().max()) for a, b in zip(start, expected, strict=True)) > 0.01  # it did train
