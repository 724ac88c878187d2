"""On a GPU: NCCL with one rank per device, and several ranks on one device through gloo."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_lowbw import DGC, DGCStrategy, LocalSGD, QuantizedGradients
from lightning_lowbw.comm.agreement import digest
from lightning_lowbw.comm.peers import make_peers
from lightning_lowbw.sync.local import LocalSync
from tests.gpu.nccl import through_nccl_on_one_device
from tests.gpu.nearness import check_near
from tests.ranks import run_ranks
from tests.sync.problem import Nodes
from tests.tiny import sgd

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


METHODS: dict[str, Any] = {
    "dgc": DGC(rampup_begin_step=2, rampup_step=4, sparsity=(0.5, 0.99)),
    "dgc bfloat16": DGC(rampup_begin_step=2, rampup_step=4, sparsity=(0.5, 0.99), value_dtype="bfloat16"),
    "int8": QuantizedGradients("int8"),
    "local": LocalSGD(k_steps=3),
    "local bfloat16": LocalSGD(k_steps=3, compression="bfloat16"),
    "local delayed": LocalSGD(k_steps=4, delay_steps=2, outer="nesterov"),
}


def train(device: str, name: str, nodes: Nodes = ()) -> tuple[list[torch.Tensor], str]:
    """Train in a plain loop, all ranks on one device, gloo between them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 4)).to(device)
    optimizer = sgd(model.parameters())
    method = METHODS[name]
    worker = method.attach(optimizer, model.named_parameters(), topology=nodes or "flat")
    for step in range(10):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        x = torch.randn(16, 32, generator=generator).to(device)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        with worker.stepping():
            worker.exchange()
            optimizer.step()
    if isinstance(worker, LocalSync):
        worker.finish()
    return [p.detach().cpu() for p in model.parameters()], digest(model.parameters())


@pytest.mark.parametrize("name", list(METHODS))
def test_cuda_tensors_through_gloo(name: str) -> None:
    check_training(name, run_ranks(train, 2, "cuda", name), run_ranks(train, 2, "cpu", name))


def check_training(name: str, on_gpu: list[Any], on_cpu: list[Any]) -> None:
    assert len({weights for _, weights in on_gpu}) == 1
    # Integers are of one scale per block, which noise moves; nearest ones differ then by a whole unit.
    is_rounded = METHODS[name].compresses_gradients or name == "int8"
    check_near(on_gpu[0][0], on_cpu[0][0], rtol=1e-3, atol=1e-4, selects=is_rounded)


# Two levels -----------------------------------------------------------------------------------------------------

NODES: dict[str, Nodes] = {"blocks": ((0, 1), (2, 3)), "crossed": ((0, 3), (1, 2))}


def reduce_on_two_levels(device: str, nodes: Nodes, algorithm: Any) -> tuple[list[torch.Tensor], int]:
    """Sum over four ranks, with sizes that do not divide by two among them, several begun at once."""
    exchange, pending = make_peers(nodes, algorithm=algorithm), []
    for numel in (1, 5, 1000, 100_001):
        generator = torch.Generator().manual_seed(100 * numel + dist.get_rank())
        buffer = torch.randn(numel, generator=generator).to(device)
        pending.append((exchange.begin_all_reduce_(buffer), buffer))
    for work, _ in pending:
        work.wait()
    return [buffer.cpu() for _, buffer in pending], exchange.ledger.inter_bytes


def through_nccl(store: str, function: Any, *args: Any) -> Any:
    """Call a function with one device per rank, and NCCL instead of gloo between them."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    dist.destroy_process_group()
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    return function("cuda", *args)


def check_sums(on_gpu: list[Any], on_cpu: list[Any]) -> None:
    for sums, inter_bytes in on_gpu:
        assert inter_bytes == on_cpu[0][1] or inter_bytes == 0  # with "leader" the others send nothing
        for mine, first, expected in zip(sums, on_gpu[0][0], on_cpu[0][0], strict=True):
            assert mine.equal(first)
            torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("algorithm", ["sharded", "leader"])
@pytest.mark.parametrize("name", list(NODES))
def test_all_reduce_on_two_levels_through_gloo(name: str, algorithm: str) -> None:
    on_gpu = run_ranks(reduce_on_two_levels, 4, "cuda", NODES[name], algorithm)
    check_sums(on_gpu, run_ranks(reduce_on_two_levels, 4, "cpu", NODES[name], algorithm))


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs two nodes of two devices")
@pytest.mark.parametrize("algorithm", ["sharded", "leader"])
def test_all_reduce_on_two_levels_through_nccl(algorithm: str, tmp_path: Path) -> None:
    arguments = (NODES["crossed"], algorithm)
    on_gpu = run_ranks(through_nccl, 4, str(tmp_path / "store"), reduce_on_two_levels, *arguments)
    check_sums(on_gpu, run_ranks(reduce_on_two_levels, 4, "cpu", *arguments))


@pytest.mark.parametrize("name", ["dgc", "local"])
def test_methods_on_two_levels_through_gloo(name: str) -> None:
    on_gpu = run_ranks(train, 4, "cuda", name, NODES["crossed"])
    check_training(name, on_gpu, run_ranks(train, 4, "cpu", name, NODES["crossed"]))


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs two nodes of two devices")
@pytest.mark.parametrize("name", ["dgc", "local"])
def test_methods_on_two_levels_through_nccl(name: str, tmp_path: Path) -> None:
    on_gpu = run_ranks(through_nccl, 4, str(tmp_path / "store"), train, name, NODES["blocks"])
    check_training(name, on_gpu, run_ranks(train, 4, "cpu", name, NODES["blocks"]))


def sum_of_ones(device: str) -> float:
    ones = torch.ones(1, device=device)
    dist.all_reduce(ones)
    return float(ones)


@pytest.mark.parametrize(
    ("name", "num_ranks", "nodes"),
    [
        ("dgc", 2, ()),
        ("dgc", 6, ()),
        ("dgc", 4, NODES["blocks"]),
        ("local", 2, ()),
        ("local delayed", 2, ()),
        ("int8", 2, ()),
    ],
)
def test_ranks_on_one_device_through_nccl(name: str, num_ranks: int, nodes: Nodes, tmp_path: Path) -> None:
    on_one_device = partial(run_ranks, through_nccl_on_one_device, num_ranks, fresh=True)
    try:
        sums = on_one_device(str(tmp_path / "probe"), sum_of_ones, timeout_s=60.0)
    except AssertionError as error:
        pytest.skip(f"no NCCL between ranks of one device: {error}")
    assert sums == [num_ranks] * num_ranks
    on_gpu = on_one_device(str(tmp_path / "store"), train, name, nodes)
    check_training(name, on_gpu, run_ranks(train, num_ranks, "cpu", name, nodes))


# In Lightning ---------------------------------------------------------------------------------------------------


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 512), nn.Tanh(), nn.Linear(512, 4))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return sgd(self.parameters())


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_all_gpus_through_nccl(precision: str) -> None:
    """With a single GPU the exchange is idle, but hook, scaler and clipping are those of CUDA."""
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(256, 32)), batch_size=16)
    trainer = pl.Trainer(
        strategy=DGCStrategy(rampup_begin_step=2, sparsity=[0.99], start_method="spawn"),
        accelerator="gpu",
        devices=torch.cuda.device_count(),
        precision=precision,  # type: ignore[arg-type]
        gradient_clip_val=1.0,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    model = Module()
    before = [p.detach().clone() for p in model.parameters()]
    try:
        trainer.fit(model, data)
    finally:
        os.environ.pop("MASTER_PORT", None)  # set by Lightning's launcher
    assert any((a != b.cpu()).any() for a, b in zip(before, model.parameters(), strict=True))
