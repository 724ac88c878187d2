"""Ranks in a Trainer, each a node of its own: on GPUs, or one that they share, through NCCL and gloo; one on a CPU."""

from __future__ import annotations

import os
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_lowbw import DGCStrategy, HierarchicalStrategy, LocalSGDStrategy, QuantizedGradients, Strategy
from lightning_lowbw.comm.agreement import digest
from tests.gpu.problem import check_near, init_process_group
from tests.ranks import run_ranks
from tests.tiny import make_trainer

STEPS = 8
SPARSE: dict[str, Any] = {"rampup_begin_step": 2, "sparsity": [0.9], "min_numel": 100}
HALVES, CROSSED = ((0, 1), (2, 3)), ((0, 3), (1, 2))

STRATEGIES: dict[str, Any] = {
    "dgc": partial(DGCStrategy, **SPARSE),
    "dgc, int4 values": partial(DGCStrategy, **SPARSE, value_dtype="int4"),
    "dgc, two levels": partial(DGCStrategy, **SPARSE, topology=HALVES),
    "int8": partial(Strategy, QuantizedGradients("int8")),
    "int4, two levels": partial(Strategy, QuantizedGradients("int4"), topology=HALVES),
    "dgc, two crossed levels, bfloat16 values": partial(
        DGCStrategy, **SPARSE, topology=CROSSED, value_dtype="bfloat16"
    ),
    "dgc, six ranks": partial(DGCStrategy, **SPARSE),
    "local_sgd": partial(LocalSGDStrategy, k_steps=3, begin_step=1),
    "local_sgd, two crossed levels": partial(LocalSGDStrategy, k_steps=3, begin_step=1, topology=CROSSED),
    "local_sgd in bfloat16": partial(LocalSGDStrategy, k_steps=3, begin_step=1, compression="bfloat16"),
    "dense, two crossed levels, by leaders": partial(HierarchicalStrategy, CROSSED, "leader"),
    "local_sgd, hidden": partial(LocalSGDStrategy, k_steps=4, begin_step=0, delay_steps=2),
}


class Module(pl.LightningModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layers = nn.Sequential(nn.Linear(32, 512), nn.BatchNorm1d(512), nn.Tanh(), nn.Linear(512, 4))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.kind == "AdamW":
            return torch.optim.AdamW(self.parameters(), lr=1e-3)
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)


def fit(store: str, backend: str, name: str, optimizer: str, precision: Any, clip: float | None) -> tuple[Any, ...]:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK=str(rank))
    is_cuda = backend != "cpu"
    if is_cuda:  # as Lightning does, which binds the process group to the device
        dist.destroy_process_group()
        init_process_group(backend, store, rank, num_ranks, is_bound=True)
    torch.manual_seed(0)
    model = Module(optimizer)
    strategy = STRATEGIES[name](process_group_backend=backend if is_cuda else "gloo")
    devices = {"accelerator": "gpu", "devices": [rank % torch.cuda.device_count()]} if is_cuda else {"devices": 1}
    options = {"precision": precision, "gradient_clip_val": clip, "use_distributed_sampler": True, **devices}
    trainer = make_trainer(strategy, 1, num_nodes=num_ranks, **options)
    x = torch.randn(16 * STEPS * num_ranks, 32, generator=torch.Generator().manual_seed(1))
    trainer.fit(model, DataLoader(TensorDataset(x), batch_size=16))
    weights = [parameter.detach().cpu() for parameter in model.parameters()]
    return trainer.global_step, strategy.ledger.sent_bytes, digest(model.parameters()), weights


def check(results: list[tuple[Any, ...]]) -> list[torch.Tensor]:
    for steps, sent_bytes, digest_of_rank, _ in results:
        assert steps == STEPS
        assert sent_bytes > 0
        assert digest_of_rank == results[0][2]
    return results[0][3]


ON_GPU = [(name, *each) for name in STRATEGIES for each in (("SGD", "nccl"), ("AdamW", "gloo"))]


@pytest.mark.parametrize(
    ("name", "optimizer", "backend"),
    [("dgc, two levels", "SGD", "cpu"), *(pytest.param(*each, marks=pytest.mark.gpu) for each in ON_GPU)],
)
def test_strategies_exchange(name: str, optimizer: str, backend: str, tmp_path: Path) -> None:
    num_ranks = 4 if "levels" in name else 6 if "six" in name else 2
    clip = None if optimizer == "AdamW" else 1.0
    arguments = (name, optimizer, "32-true", clip)
    weights = check(run_ranks(fit, num_ranks, str(tmp_path / "store"), backend, *arguments))
    if backend != "cpu":
        on_cpu = check(run_ranks(fit, num_ranks, "", "cpu", *arguments))
        check_near(weights, on_cpu, rtol=1e-3, atol=1e-3, selects=not name.startswith("local"))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize(("name", "backend"), [*product(("dgc", "int8", "local_sgd"), ("nccl",)), ("dgc", "gloo")])
def test_precisions_exchange(name: str, backend: str, precision: str, tmp_path: Path) -> None:
    results = run_ranks(fit, 2, str(tmp_path / "store"), backend, name, "SGD", precision, 1.0)
    assert all(weights.isfinite().all() for weights in check(results))
