"""Two levels under every strategy in Lightning: a node trains as a rank does, and is saved and resumed."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_lowbw import (
    AdaptiveLocalSGDStrategy,
    DGCStrategy,
    DisagreementError,
    LocalSGDStrategy,
    SparsityWarmup,
    Strategy,
    TrafficMonitor,
)
from lightning_lowbw.comm.agreement import digest
from tests.programs import forget_launcher, free_port
from tests.ranks import run_ranks
from tests.strategies.fits import Silence
from tests.tiny import BATCH, MIN_NUMEL, Tiny, Watcher, make_data, make_trainer

STEPS = 8
NODES = [[0, 2], [1, 3]]  # rank n of two with a double batch has the data of node n
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
DGC: dict[str, Any] = {
    "rampup_begin_step": 2,
    "rampup_step": 4,
    "sparsity": (0.5, 0.95),
    "min_numel": MIN_NUMEL,
}
STRATEGIES: dict[str, Any] = {
    "dgc": (DGCStrategy, DGC),
    # The sparse phase, of which every element is sent: a node chooses in parts, which else are not those of a rank.
    "whole": (DGCStrategy, {**DGC, "sparsity": (1e-4,), "rampup_step": 1}),
    "hidden": (LocalSGDStrategy, {"k_steps": 3, "delay_steps": 2}),
    "adaptive": (AdaptiveLocalSGDStrategy, {"init_k_steps": 2}),
}


def make(name: str, **kwargs: Any) -> Strategy:
    cls, arguments = STRATEGIES[name]
    strategy = cls(**arguments, **kwargs)
    assert isinstance(strategy, Strategy)
    return strategy


def fit(strategy: DDPStrategy, batch: int = BATCH, *, unused: bool = False, **options: Any) -> dict[str, Any]:
    num_ranks = dist.get_world_size()
    model = Tiny(unused=unused, data_by_step=False)
    model.norm = nn.Identity()  # what it normalises by would be a rank's own
    # As much for two ranks as for four: of x and y alike.
    dataset = make_data(num_ranks, STEPS * 4 // num_ranks).dataset
    trainer = make_trainer(strategy, num_ranks, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, DataLoader(dataset, batch_size=batch, shuffle=False))
    ledger = getattr(strategy, "ledger", None)
    return {
        "weights": {name: p.detach().clone() for name, p in model.named_parameters()},
        "digest": digest(model.parameters()),
        "inter": ledger and ledger.inter_bytes,
        "intra": ledger and ledger.intra_bytes,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "warnings": [str(warning.message) for warning in caught],
    }


def fit_named(name: str, kwargs: dict[str, Any], options: dict[str, Any], batch: int = BATCH) -> dict[str, Any]:
    return fit(make(name, **kwargs), batch, **options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("whole", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}),
        ("adaptive", {"gradient_clip_val": 0.3}),
    ],
)
def test_a_node_trains_as_a_rank_with_all_its_data(name: str, options: dict[str, Any]) -> None:
    by_node = run_ranks(fit_named, 2, name, {}, options, 2 * BATCH)
    results = run_ranks(fit_named, 4, name, {"topology": NODES, "bucket_cap_mb": 0.001}, options)
    assert len({result["digest"] for result in results}) == 1
    for key, value in results[0]["weights"].items():
        torch.testing.assert_close(value, by_node[0]["weights"][key], **CLOSE)
    assert all(result["inter"] > 0 and result["intra"] > 0 for result in results)


def fit_unused() -> dict[str, Any]:
    return fit(make("dgc", topology=NODES, find_unused_parameters=True), unused=True)


def test_parameters_that_only_one_rank_uses() -> None:
    results = run_ranks(fit_unused, 4)
    assert len({result["digest"] for result in results}) == 1
    start = dict(Tiny(unused=True).named_parameters())
    assert torch.equal(results[0]["weights"]["never.weight"], start["never.weight"])
    assert not torch.equal(results[0]["weights"]["rank_zero_only.weight"], start["rank_zero_only.weight"])


def test_local_steps_ask_nobody_in_other_nodes() -> None:
    """What the levels do is not on the world's process group."""
    options = {"callbacks": [TrafficMonitor(prog_bar=False), Silence()]}
    results = run_ranks(fit_named, 4, "hidden", {"topology": 2}, options)
    assert len({result["digest"] for result in results}) == 1
    # The last step sent gradients inside the node, and the average comes with the end of the fit.
    assert results[0]["metrics"]["traffic/bytes_intra_node"] > 0


# Saving and resuming --------------------------------------------------------------------------------------------


def save_and_go_on(name: str, folder: str, resume: str | None, topology: Any) -> Any:
    num_ranks = dist.get_world_size()
    model = Tiny(data_by_step=True)
    options: dict[str, Any] = {"max_steps": STEPS, "max_epochs": -1}
    callbacks = [Watcher(folder + "/{}.ckpt", (5,))] if folder else []
    strategy = DDPStrategy() if name == "ddp" else make(name, topology=topology)
    trainer = make_trainer(strategy, num_ranks, callbacks=callbacks, **options)
    trainer.fit(model, make_data(num_ranks, STEPS), ckpt_path=resume)
    (optimizer,) = trainer.optimizers
    momentum = [state["momentum_buffer"] for state in optimizer.state.values()]
    return digest(model.parameters()), digest(model.buffers()), digest(momentum), trainer.global_step


def test_resume_to_the_bit_and_elsewhere(tmp_path: Path) -> None:
    whole = run_ranks(save_and_go_on, 4, "dgc", str(tmp_path), None, NODES)
    path = str(tmp_path / "5.ckpt")
    again = run_ranks(save_and_go_on, 4, "dgc", "", path, NODES)
    assert again == whole
    # The file is plain: it has whole velocities, and goes on under any strategy.
    checkpoint = torch.load(path, weights_only=True)
    (state,) = checkpoint["optimizer_states"]
    weights = [p for p in Tiny().parameters() if p.requires_grad]
    assert [entry["momentum_buffer"].shape for entry in state["state"].values()] == [p.shape for p in weights]
    assert all(float(entry["momentum_buffer"].abs().max()) > 0 for entry in state["state"].values())
    for other in ("dgc", "ddp"):
        results = run_ranks(save_and_go_on, 2, other, "", path, "flat")
        assert len({result[0] for result in results}) == 1
        assert all(result[3] == STEPS for result in results)


def fit_without_optimizer() -> str:
    model = Tiny()
    if dist.get_rank() == 1:

        def nothing() -> list[Any]:
            return []

        model.configure_optimizers = nothing  # type: ignore[method-assign, assignment]
    with pytest.raises(DisagreementError) as caught:
        make_trainer(make("hidden", topology=2), 4).fit(model, make_data(4, STEPS))
    return str(caught.value)


def test_ranks_with_other_optimizers_fail_together() -> None:
    assert all("optimizers" in message for message in run_ranks(fit_without_optimizer, 4))


def fit_on_one_level() -> tuple[list[str], int, set[str]]:
    """Return what is warned of, what is sent between nodes, and the weights on one node and under DDP."""
    each_alone, on_one_node = fit(make("dgc", topology=1)), fit(make("dgc", topology="auto"))  # all say GROUP_RANK=0
    warned = [each for each in [*each_alone["warnings"], *on_one_node["warnings"]] if "one level only" in each]
    return warned, each_alone["inter"], {on_one_node["digest"], fit(DDPStrategy())["digest"]}


def test_one_level_only_is_said() -> None:
    (warned, inter, weights), (others, *_) = run_ranks(fit_on_one_level, 2)
    assert ("one rank on each node" in warned[0], "all ranks are on one node" in warned[1]) == (True, True)
    assert (len(warned), others, inter, len(weights)) == (2, [], 0, 1)


# Launchers ------------------------------------------------------------------------------------------------------


def train_under_slurm(port: int) -> tuple[list[tuple[int, ...]], str, bool]:
    """Train as one of the four tasks of two nodes, with what SLURM says and nothing else."""
    rank = dist.get_rank()
    forget_launcher()
    os.environ.update(
        SLURM_JOB_ID="7",
        SLURM_JOB_NAME="train",
        SLURM_NTASKS="4",
        SLURM_NTASKS_PER_NODE="2",
        SLURM_NNODES="2",
        SLURM_NODELIST="127.0.0.1",
        SLURM_PROCID=str(rank),
        SLURM_LOCALID=str(rank % 2),
        SLURM_NODEID=str(rank // 2),
        MASTER_PORT=str(port),
    )
    data = TensorDataset(torch.randn(64, 16), torch.zeros(64, dtype=torch.long))
    warmup = SparsityWarmup(begin_step=0, steps=1, sparsity=[0.999])
    options: dict[str, Any] = {"num_nodes": 2, "max_steps": 4, "max_epochs": -1, "callbacks": [warmup]}
    trainer = make_trainer("dgc_hierarchical", 2, **options)  # type: ignore[arg-type]
    model = Tiny(data_by_step=True)
    trainer.fit(model, DataLoader(data, batch_size=4))
    strategy = trainer.strategy
    assert isinstance(strategy.cluster_environment, SLURMEnvironment)
    return strategy._nodes, digest(model.parameters()), strategy.ledger.inter_bytes > 0


def test_under_slurm() -> None:
    results = run_ranks(train_under_slurm, 4, free_port())
    assert results == results[:1] * 4
    nodes, _, has_sent = results[0]
    assert (nodes, has_sent) == ([[0, 1], [2, 3]], True)
