"""Two levels under every strategy in Lightning: a node trains as a rank does, and is saved and resumed.

Dense steps: DDP within rounding, replicas equal to the bit, and no order of events that hangs.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import SLURMEnvironment
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_lowbw as lowbw
from lightning_lowbw.comm.agreement import digest
from lightning_lowbw.comm.collectives import all_reduce_bytes
from lightning_lowbw.sync.state import merge_states
from tests.comm.test_collectives import timeout_of
from tests.programs import forget_launcher, free_port
from tests.ranks import on_ranks, run_ranks
from tests.strategies.fits import Noted, Silence, gathered, make, same, saving, train, warned, weights
from tests.tiny import BATCH, Tiny, amp_with_scaler, make_data, make_trainer, weights_of

STEPS = 8
NODES = ((0, 2), (1, 3))  # rank n of two with a double batch has the data of node n
IN_BUCKETS = {"topology": NODES, "bucket_cap_mb": 0.001, "gradient_as_bucket_view": True}


def fit(strategy: Any, model: Tiny | None = None, **options: Any) -> tuple[dict[str, Tensor], Any]:
    """Train without batch norm, whose statistics would be each rank's own; on as much data for two ranks as for four.

    Returns:
        The weights, and the Trainer.
    """
    model, num_ranks = Tiny() if model is None else model, dist.get_world_size()
    model.norm = nn.Identity()
    data = make_data(num_ranks, STEPS * 4 // num_ranks).dataset
    trainer = train(strategy, model, DataLoader(data, batch_size=BATCH * 4 // num_ranks, shuffle=False), **options)
    same(weights_of(model))
    return {name: p.detach().clone() for name, p in model.named_parameters()}, trainer


def strategy_of(name: str, **keywords: Any) -> Any:
    if name == "adaptive":
        return lowbw.AdaptiveLocalSGDStrategy(init_k_steps=2, **keywords)
    # The sparse phase sends every element: a node selects in parts, and would select other elements than a rank.
    return make("dgc", {"rampup_begin_step": 2, "sparsity": (1e-4,)}, **keywords)


def fit_named(name: str, keywords: dict[str, Any], options: dict[str, Any]) -> tuple[dict[str, Tensor], int, int]:
    found, trainer = fit(strategy_of(name, **keywords), **options)
    ledger = trainer.strategy.ledger
    return found, ledger.inter_bytes, ledger.intra_bytes


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("whole", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}),
        ("adaptive", {"gradient_clip_val": 0.3}),
    ],
)
def test_a_node_trains_as_a_rank_with_all_its_data(name: str, options: dict[str, Any]) -> None:
    expected, *_ = run_ranks(fit_named, 2, name, {}, options)[0]
    for found, *traffic in run_ranks(fit_named, 4, name, IN_BUCKETS, options):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert min(traffic) > 0


@on_ranks(4)
def test_parameters_that_only_one_rank_uses() -> None:
    model = Tiny(unused=True)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    found, _ = fit(make("dgc, warm-up", topology=NODES, find_unused_parameters=True), model)
    assert torch.equal(found["never.weight"], start["never.weight"])
    assert not torch.equal(found["rank_zero_only.weight"], start["rank_zero_only.weight"])


@on_ranks(4)
def test_local_steps_ask_nobody_in_other_nodes() -> None:
    """What the levels do is not on the world's process group, and takes as long as the user's `timeout` at most."""
    strategy = make("local_sgd on two levels", {"delay_steps": 2, "begin_step": 1}, timeout=77)
    _, trainer = fit(strategy, callbacks=[lowbw.TrafficMonitor(prog_bar=False), Silence()])
    # The last step sent gradients inside the node, and the average comes with the end of the fit.
    assert float(trainer.callback_metrics["traffic/bytes_intra_node"]) > 0
    assert [timeout_of(each.group) for each in (strategy.peers.node, strategy.peers.between)] == [77, 77]


# Saving and resuming --------------------------------------------------------------------------------------------


def go_on(strategy: Any, **options: Any) -> tuple[str, str]:
    model = Tiny(data_by_step=True)
    trainer = train(strategy, model, STEPS, max_steps=STEPS, max_epochs=-1, **options)
    assert trainer.global_step == STEPS
    same(weights_of(model))
    return weights(model), digest([state["momentum_buffer"] for state in trainer.optimizers[0].state.values()])


@on_ranks(4)
def resume_to_the_bit(path: str) -> None:
    whole = go_on(make("dgc, warm-up", topology=NODES), callbacks=[saving(path, (5,))])
    dist.barrier()
    assert go_on(make("dgc, warm-up", topology=NODES), resume=path) == whole


@on_ranks(2)
def resume_elsewhere(path: str) -> None:
    """Go on with the mean of the ranks' residuals, and under DDP."""
    begun = Noted(lambda module: module.trainer.strategy.workers[0].state_dict()["residuals"], "on_train_start")
    go_on(make("dgc, warm-up"), resume=path, callbacks=[begun])
    shards = (torch.load(shard, weights_only=True) for shard in sorted(Path(f"{path}.ranks").iterdir()))
    expected = merge_states(shard["workers"][0] for shard in shards)["residuals"]
    assert begun.values[0].keys() == expected.keys() > {"wide.weight"}
    for name, residual in begun.values[0].items():
        torch.testing.assert_close(residual, expected[name].view_as(residual))
        assert residual.any()
    go_on(make("ddp"), resume=path)


def test_resume_to_the_bit_and_elsewhere(tmp_path: Path) -> None:
    """The file is plain: it has whole velocities, and goes on under any strategy."""
    path = f"{tmp_path}/some.ckpt"
    resume_to_the_bit(path=path)
    (state,) = torch.load(path, weights_only=True)["optimizer_states"]
    velocities = [entry["momentum_buffer"] for entry in state["state"].values()]
    assert [each.shape for each in velocities] == [p.shape for p in Tiny().parameters() if p.requires_grad]
    assert all(float(each.abs().max()) > 0 for each in velocities)
    resume_elsewhere(path=path)


@on_ranks(2)
def test_one_level_only_is_said() -> None:
    """Nodes of one rank send nothing between nodes; one node trains as DDP. All ranks say GROUP_RANK=0."""
    for topology, words in ((1, "one rank on each node"), ("auto", "all ranks are on one node")):
        strategy = make("dgc, warm-up", topology=topology)
        (found, trainer), said = warned(lambda: fit(strategy))  # noqa: B023
        said = [each for each in said if "one level only" in each]
        assert [words in each for each in said] == [True] * (dist.get_rank() == 0)
        assert trainer.strategy.ledger.inter_bytes == 0
    torch.testing.assert_close(found, fit("ddp")[0], rtol=0, atol=0)


# Dense steps ----------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("algorithm", ["sharded", "leader"])
@on_ranks(4)
def test_many_buckets_in_any_order_of_events(algorithm: Any) -> None:
    random.seed(dist.get_rank())
    model = Deep()
    strategy = lowbw.HierarchicalStrategy(2, algorithm, bucket_cap_mb=0.005, broadcast_buffers=False)
    trainer = train(strategy, model, STEPS, callbacks=[lowbw.TrafficMonitor(prog_bar=False)])
    same(weights_of(model))
    numel = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(gathered(float(trainer.callback_metrics["traffic/bytes_inter_node"])))
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


@pytest.mark.parametrize(
    ("precision", "gradients", "mean", "scale"),
    [
        ("32-true", [(1.4e5, -1.4e5), (7e4, 7e4)], 7e4, 1.0),
        ("16-mixed", [(1.4e5, -1.4e5), (float("inf"), 1.0), (7e4, 7e4)], 7e4, 2.0**15),  # the inf skips on all ranks
        ("16-true", [(65504.0, 65504.0)], 65504.0, 1.0),  # which bfloat16 rounds up
    ],
)
@on_ranks(4)
def test_large_gradients_in_half_types_between_nodes(precision: str, gradients: Any, mean: float, scale: float) -> None:
    """The weights in units of the learning rate, and the scale at the end."""
    options: dict[str, Any] = {"precision": precision}
    if precision == "16-mixed":
        options = {"plugins": [amp_with_scaler(init_scale=2.0**16)]}
    model, loader = Large(gradients), DataLoader(torch.zeros(len(gradients), 1))
    trainer: Any = train(lowbw.HierarchicalStrategy(2, inter_dtype="bfloat16"), model, loader, **options)
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    assert (model.weight.detach() * -(2.0**20)).tolist() == pytest.approx([mean] * 10, rel=2.0**-8)
    assert (scaler.get_scale() if scaler else 1.0) == scale


# Launchers ------------------------------------------------------------------------------------------------------


def train_under_slurm(port: int) -> None:
    """Train as one of the four tasks of two nodes, with what SLURM says and nothing else."""
    rank = dist.get_rank()
    forget_launcher()
    of_slurm = {"JOB_ID": 7, "JOB_NAME": "train", "NTASKS": 4, "NTASKS_PER_NODE": 2, "NNODES": 2, "PROCID": rank}
    of_slurm |= {"NODELIST": "127.0.0.1", "LOCALID": rank % 2, "NODEID": rank // 2}
    os.environ.update({f"SLURM_{name}": str(value) for name, value in of_slurm.items()}, MASTER_PORT=str(port))
    loader = DataLoader(TensorDataset(torch.randn(64, 16), torch.zeros(64, dtype=torch.long)), batch_size=4)
    warmup = lowbw.SparsityWarmup(begin_step=0, steps=1, sparsity=[0.999])
    options: dict[str, Any] = {"num_nodes": 2, "max_steps": 4, "max_epochs": -1, "callbacks": [warmup]}
    trainer: Any = make_trainer("dgc_hierarchical", 2, **options)  # type: ignore[arg-type]
    model = Tiny(data_by_step=True)
    trainer.fit(model, loader)
    assert isinstance(trainer.strategy.cluster_environment, SLURMEnvironment)
    assert trainer.strategy._nodes == [[0, 1], [2, 3]]
    same(digest(model.parameters()))
    assert trainer.strategy.ledger.inter_bytes > 0


def test_under_slurm() -> None:
    run_ranks(train_under_slurm, 4, free_port())
