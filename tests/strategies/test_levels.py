"""Two levels in Lightning: groups and their timeouts, checkpoints for other ranks, nodes of one rank, SLURM.

The bits of trainings on two levels, also after a resume, are in tests/golden.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import SLURMEnvironment
from torch.utils.data import DataLoader, TensorDataset

import lightning_lowbw as lowbw
from lightning_lowbw.comm.agreement import digest
from lightning_lowbw.comm.collectives import begin_all_reduce_
from lightning_lowbw.sync.state import merge_states
from tests.comm.test_collectives import timeout_of
from tests.programs import forget_launcher, free_port
from tests.ranks import on_ranks
from tests.strategies.fits import Noted, Silence, gathered, make, same, saving, train, warned
from tests.tiny import Tiny, make_trainer, weights_of

STEPS = 8
NODES = ((0, 2), (1, 3))


@on_ranks(4)
def test_parameters_that_only_one_rank_uses() -> None:
    model = Tiny(unused=True)
    never, rank_zero_only = model.never.weight.clone(), model.rank_zero_only.weight.clone()
    train(make("dgc, warm-up", topology=NODES, find_unused_parameters=True), model, STEPS)
    assert torch.equal(model.never.weight, never)
    assert not torch.equal(model.rank_zero_only.weight, rank_zero_only)
    same(weights_of(model))


@on_ranks(4)
def test_local_steps_ask_nobody_in_other_nodes() -> None:
    """What the levels do is not on the world's process group, and takes as long as the user's `timeout` at most."""
    strategy = make("local_sgd on two levels", {"delay_steps": 2, "begin_step": 1}, timeout=77)
    trainer = train(strategy, data=STEPS, callbacks=[lowbw.TrafficMonitor(prog_bar=False), Silence()])
    # The last step sent gradients inside the node, and the average comes with the end of the fit.
    assert float(trainer.callback_metrics["traffic/bytes_intra_node"]) > 0
    assert [timeout_of(each.group) for each in (strategy.peers.node, strategy.peers.between)] == [77, 77]


@on_ranks(4)
def save(path: str) -> None:
    train(make("dgc, warm-up", topology=NODES), Tiny(data_by_step=True), STEPS, callbacks=[saving(path, (5,))])


@on_ranks(2)
def go_on(path: str) -> None:
    """Go on with the mean of the ranks' residuals, and under DDP."""
    begun = Noted(lambda module: module.trainer.strategy.workers[0].state_dict()["residuals"], "on_train_start")
    for name, callbacks in (("dgc, warm-up", [begun]), ("ddp", [])):
        train(name, Tiny(data_by_step=True), STEPS, resume=path, callbacks=callbacks, max_steps=STEPS, max_epochs=-1)
    shards = (torch.load(shard, weights_only=True) for shard in sorted(Path(f"{path}.ranks").iterdir()))
    expected = merge_states(shard["workers"][0] for shard in shards)["residuals"]
    assert begun.values[0].keys() == expected.keys() > {"wide.weight"}
    for name, residual in begun.values[0].items():
        torch.testing.assert_close(residual, expected[name].view_as(residual))
        assert residual.any()


def test_a_checkpoint_goes_on_elsewhere(tmp_path: Path) -> None:
    """The file is plain: it has whole velocities."""
    path = f"{tmp_path}/some.ckpt"
    save(path=path)
    (state,) = torch.load(path, weights_only=True)["optimizer_states"]
    velocities = [entry["momentum_buffer"] for entry in state["state"].values()]
    assert [each.shape for each in velocities] == [p.shape for p in Tiny().parameters() if p.requires_grad]
    assert all(float(each.abs().max()) > 0 for each in velocities)
    go_on(path=path)


@on_ranks(2)
def test_one_level_only_is_said() -> None:
    """Nodes of one rank send nothing between nodes; one node trains as DDP. All ranks say GROUP_RANK=0."""
    for topology, words in ((1, "one rank on each node"), ("auto", "all ranks are on one node")):
        model, strategy = Tiny(), make("dgc, warm-up", topology=topology)
        trainer, said = warned(lambda: train(strategy, model, STEPS))  # noqa: B023
        said = [each for each in said if "one level only" in each]
        assert [words in each for each in said] == [True] * (dist.get_rank() == 0)
        assert trainer.strategy.ledger.inter_bytes == 0
    by_ddp = Tiny()
    train("ddp", by_ddp, STEPS)
    assert weights_of(model) == weights_of(by_ddp)


@on_ranks(2)
def test_float16_is_sent_between_nodes_as_it_is() -> None:
    """Rounded to bfloat16 these numbers become infinite in float16."""
    tensor = torch.full((3,), 65504.0 / 2, dtype=torch.float16)
    begin_all_reduce_(tensor, dtype=torch.bfloat16).wait()
    assert tensor.tolist() == [65504.0] * 3


@on_ranks(4)
def test_under_slurm() -> None:
    """Train as one of the four tasks of two nodes, with what SLURM says and nothing else."""
    rank, port = dist.get_rank(), gathered(free_port())[0]
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
    assert trainer.strategy._layout.nodes == [[0, 1], [2, 3]]
    same(digest(model.parameters()))
    assert trainer.strategy.ledger.inter_bytes > 0
