"""A small network that is trained with momentum SGD on ranks, and by the paper in one process."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_lowbw import DGC
from lightning_lowbw.engine.gradients import GradientWorker
from lightning_lowbw.where.topology import part_of
from tests.engine.problem import Nodes
from tests.oracle import OracleDGC

STEPS = 12
BEGIN = 4
STAIRS = (0.5, 0.9, 0.97)
MIN_NUMEL = 100
SGD = dict[str, float | bool]
Clip = dict[str, float]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 20), nn.Tanh(), nn.Linear(20, 3)).double().float()


def make_gradients(model: nn.Module, rank: int, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(8, 12, generator=generator)
    y = torch.randint(0, 3, (8,), generator=generator)
    loss = nn.functional.cross_entropy(model(x) * 5, y)
    return list(torch.autograd.grad(loss, list(model.parameters())))


def train_on_ranks(
    nodes: Nodes, optimizer: SGD, clip: Clip, knobs: dict[str, bool], dtype: str = "float32"
) -> tuple[nn.Module, GradientWorker]:
    """Train in a plain loop; nodes of one rank are one level."""
    model = make_model()
    sgd = torch.optim.SGD(model.parameters(), **optimizer)  # type: ignore[arg-type]
    method = DGC(
        rampup_begin_step=BEGIN,
        rampup_step=6,
        sparsity=STAIRS,
        min_numel=MIN_NUMEL,
        selection="exact",
        value_dtype=dtype,
        **knobs,
    )
    worker = method.attach(sgd, model.named_parameters(), topology=nodes)
    assert isinstance(worker, GradientWorker)

    def clip_gradients() -> None:
        if "norm" in clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip["norm"] * worker.clip_factor)
        if "value" in clip:
            nn.utils.clip_grad_value_(model.parameters(), clip["value"])

    for step in range(STEPS):
        for parameter, gradient in zip(model.parameters(), make_gradients(model, dist.get_rank(), step), strict=True):
            parameter.grad = gradient
        if worker.clips_before_exchange:
            worker.prepare()
            clip_gradients()
        else:
            worker.exchange()
            clip_gradients()
        sgd.step()
    return model, worker


def train_by_the_paper(
    nodes: Nodes, optimizer: SGD, clip: Clip, knobs: dict[str, bool]
) -> tuple[list[Tensor], list[list[OracleDGC]]]:
    """Train one rank of the paper per node and part, which has that part of the node's mean gradient.

    Returns:
        The weights; and the oracles, by local rank and tensor.
    """
    model, num_nodes, num_local = make_model(), len(nodes), len(nodes[0])
    knobs = {key.replace("momentum_masking", "masking"): value for key, value in knobs.items()}
    weights = [parameter.detach() for parameter in model.parameters()]
    oracles = [
        [
            OracleDGC(num_nodes, min_numel=1 if is_large(weight) else weight.numel() + 1, **knobs, **optimizer)  # type: ignore[arg-type]
            for weight in weights
        ]
        for _ in range(num_local)
    ]
    for step in range(STEPS):
        gradients = []
        for node in nodes:
            by_rank = [make_gradients(model, rank, step) for rank in node]
            gradients.append([sum(own) / len(node) for own in zip(*by_rank, strict=True)])
        if step < BEGIN:  # clipped after the mean
            mean = [sum(own) / num_nodes for own in zip(*gradients, strict=True)]
            gradients = [_clipped(mean, clip, 1.0)] * num_nodes
        else:
            gradients = [_clipped(own, clip, math.sqrt(num_nodes)) for own in gradients]
        for local_rank, of_part in enumerate(oracles):
            for number, (oracle, weight) in enumerate(zip(of_part, weights, strict=True)):
                part = part_of(weight.numel(), local_rank, num_local)
                own_weight = [weight.view(-1)[part]]
                own_gradients = [[of_node[number].reshape(-1)[part]] for of_node in gradients]
                if not own_weight[0].numel():
                    continue
                if step < BEGIN:
                    oracle.dense_step(own_weight, own_gradients)
                else:
                    stair = min(int((step - BEGIN) * len(STAIRS) / 6), len(STAIRS) - 1)
                    oracle.sparse_step(own_weight, own_gradients, 1 - STAIRS[stair])
    return weights, oracles


def is_large(weight: Tensor) -> bool:
    return weight.numel() >= MIN_NUMEL


def _clipped(gradients: list[Tensor], clip: Clip, factor: float) -> list[Tensor]:
    """Clip a whole gradient, as torch does."""
    if "norm" in clip:
        norm = math.sqrt(sum(float((g * g).sum()) for g in gradients))
        gradients = [g * min(1.0, clip["norm"] * factor / (norm + 1e-6)) for g in gradients]
    if "value" in clip:
        gradients = [g.clamp(-clip["value"], clip["value"]) for g in gradients]
    return gradients
