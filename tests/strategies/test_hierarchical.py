"""Two levels in Lightning: DDP within rounding, replicas equal to the bit, and no order of events that hangs."""

from __future__ import annotations

import random
import time
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_lowbw import HierarchicalStrategy, Topology, TrafficMonitor
from lightning_lowbw.comm.agreement import digest
from lightning_lowbw.comm.collectives import all_reduce_bytes
from tests.ranks import run_ranks
from tests.tiny import Tiny, amp_with_scaler, make_data, make_trainer

STEPS = 8


def fit(kwargs: dict[str, Any] | None, trainer_options: dict[str, Any]) -> dict[str, Any]:
    num_ranks = dist.get_world_size()
    model = Tiny()
    strategy = DDPStrategy() if kwargs is None else HierarchicalStrategy(**kwargs)
    trainer = make_trainer(strategy, num_ranks, **trainer_options)
    trainer.fit(model, make_data(num_ranks, STEPS))
    ledger = getattr(strategy, "ledger", None)
    return {
        "weights": {name: p.detach().clone() for name, p in model.named_parameters()},
        "digest": digest(model.parameters()),
        "inter": ledger and ledger.inter_bytes,
    }


@pytest.mark.parametrize(
    ("kwargs", "options"),
    [
        ({"topology": Topology(((0, 1, 2), (3,)))}, {}),  # nobody has asked for parts
        (
            {"topology": Topology(((0, 2), (1, 3))), "bucket_cap_mb": 0.001, "gradient_as_bucket_view": True},
            {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
        ),
    ],
)
def test_equal_to_ddp_within_rounding(kwargs: dict[str, Any], options: dict[str, Any]) -> None:
    dense = run_ranks(fit, 4, None, options)
    results = run_ranks(fit, 4, kwargs, options)
    assert len({result["digest"] for result in results}) == 1
    assert sum(result["inter"] for result in results) > 0
    for name, value in results[0]["weights"].items():
        torch.testing.assert_close(value, dense[0]["weights"][name], rtol=1e-4, atol=1e-5)


class Deep(Tiny):
    """Many small buckets, and ranks that dawdle in other places each time."""

    def __init__(self) -> None:
        super().__init__()
        self.many = nn.ModuleList(nn.Linear(32, 32) for _ in range(16))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.wider(torch.relu(self.norm(self.wide(x)))))
        for layer in self.many:
            hidden = torch.tanh(layer(hidden))
            if hidden.requires_grad:
                hidden.register_hook(self.dawdle)
        return self.head(hidden)

    def dawdle(self, gradient: Tensor) -> None:
        if random.random() < 0.2:
            time.sleep(0.002 * random.random())


def fit_deep(algorithm: Any) -> tuple[str, list[float]]:
    num_ranks = dist.get_world_size()
    random.seed(dist.get_rank())
    model = Deep()
    strategy = HierarchicalStrategy(2, algorithm, bucket_cap_mb=0.005, broadcast_buffers=False)
    trainer = make_trainer(strategy, num_ranks, callbacks=[TrafficMonitor(prog_bar=False)])
    trainer.fit(model, make_data(num_ranks, STEPS))
    return digest(model.parameters()), [float(trainer.callback_metrics["traffic/bytes_inter_node"])]


@pytest.mark.parametrize("algorithm", ["sharded", "leader"])
def test_many_buckets_in_any_order_of_events(algorithm: str) -> None:
    results = run_ranks(fit_deep, 4, algorithm)
    assert len({weights for weights, _ in results}) == 1
    numel = sum(p.numel() for p in Deep().parameters() if p.requires_grad)
    total = sum(sent for _, (sent,) in results)
    assert total == pytest.approx(2 * all_reduce_bytes(4 * numel, 2), rel=0.01)  # each of two nodes: once


class Large(pl.LightningModule):
    """Its gradient in each batch is given, by node."""

    def __init__(self, gradients: list[tuple[float, float]]) -> None:
        super().__init__()
        self.weight, self.gradients = nn.Parameter(torch.zeros(10)), gradients

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.weight.sum() * self.gradients[batch_idx][self.global_rank // 2]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=2.0**-20)


def fit_large(gradients: list[tuple[float, float]], precision: str) -> tuple[list[float], float]:
    """Return the weights, in units of the learning rate, and the scale at the end."""
    options: dict[str, Any] = {"precision": precision}
    if precision == "16-mixed":
        options = {"plugins": [amp_with_scaler(init_scale=2.0**16)]}
    model = Large(gradients)
    trainer = make_trainer(HierarchicalStrategy(2, inter_dtype="bfloat16"), 4, **options)
    trainer.fit(model, DataLoader(torch.zeros(len(gradients), 1)))
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return (model.weight.detach() * -(2.0**20)).tolist(), scaler.get_scale() if scaler else 1.0


@pytest.mark.parametrize(
    ("precision", "gradients", "mean", "scale"),
    [
        ("32-true", [(1.4e5, -1.4e5), (7e4, 7e4)], 7e4, 1.0),
        ("16-mixed", [(1.4e5, -1.4e5), (float("inf"), 1.0), (7e4, 7e4)], 7e4, 2.0**15),  # the inf skips on all ranks
        ("16-true", [(65504.0, 65504.0)], 65504.0, 1.0),  # which bfloat16 rounds up
    ],
)
def test_large_gradients_in_half_types_between_nodes(
    precision: str, gradients: list[tuple[float, float]], mean: float, scale: float
) -> None:
    for weights, last_scale in run_ranks(fit_large, 4, gradients, precision):
        assert weights == pytest.approx([mean] * 10, rel=2.0**-8)
        assert last_scale == scale
