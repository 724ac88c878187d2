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
from torch.utils.data import DataLoader, Subset, TensorDataset

from lightning_lowbw import (
    AdaptiveLocalSGDStrategy,
    ConfigurationError,
    DGCStrategy,
    DisagreementError,
    HierarchicalStrategy,
    LocalSGDStrategy,
    NonFiniteGradientError,
    SparsityWarmup,
    Strategy,
    Topology,
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
    "local": (LocalSGDStrategy, {"k_steps": 3, "begin_step": 1}),
    "hidden": (LocalSGDStrategy, {"k_steps": 3, "delay_steps": 2}),
    "diloco": (LocalSGDStrategy, {"k_steps": 3, "begin_step": 0, "outer": "nesterov"}),
    "sparse": (LocalSGDStrategy, {"k_steps": 3, "compression": {"min_numel": 100}}),
    "adaptive": (AdaptiveLocalSGDStrategy, {"init_k_steps": 2}),
}


def make(name: str, **kwargs: Any) -> Strategy:
    cls, arguments = STRATEGIES[name]
    strategy = cls(**arguments, **kwargs)
    assert isinstance(strategy, Strategy)
    return strategy


def fit(
    strategy: DDPStrategy,
    options: dict[str, Any],
    batch: int = BATCH,
    *,
    path: str | None = None,
    unused: bool = False,
    batches: list[int] | None = None,
) -> dict[str, Any]:
    num_ranks = dist.get_world_size()
    model = Tiny(unused=unused, data_by_step=False)
    model.norm = nn.Identity()  # what it normalises by would be a rank's own
    # As much for two ranks as for four: of x and y alike.
    dataset = make_data(num_ranks, STEPS * 4 // num_ranks).dataset
    if batches is not None:
        dataset = Subset(dataset, range(BATCH * batches[dist.get_rank()]))
    trainer = make_trainer(strategy, num_ranks, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, DataLoader(dataset, batch_size=batch, shuffle=False), ckpt_path=path)
    ledger = getattr(strategy, "ledger", None)
    momentum = [state.get("momentum_buffer") for state in trainer.optimizers[0].state.values()]
    return {
        "weights": {name: p.detach().clone() for name, p in model.named_parameters()},
        "digest": digest(model.parameters()),
        "momentum": momentum,
        "inter": ledger and ledger.inter_bytes,
        "intra": ledger and ledger.intra_bytes,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "warnings": [str(warning.message) for warning in caught],
    }


def fit_named(name: str, kwargs: dict[str, Any], options: dict[str, Any], batch: int = BATCH, **more: Any) -> Any:
    return fit(make(name, **kwargs), dict(options), batch, **more)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("whole", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}),
        ("local", {"gradient_clip_val": 0.3}),
        ("diloco", {"accumulate_grad_batches": 2}),
        ("adaptive", {}),
    ],
)
def test_a_node_trains_as_a_rank_with_all_its_data(name: str, options: dict[str, Any]) -> None:
    by_node = run_ranks(fit_named, 2, name, {}, options, 2 * BATCH)
    for bucket_cap_mb in (25, 0.001):
        results = run_ranks(fit_named, 4, name, {"topology": NODES, "bucket_cap_mb": bucket_cap_mb}, options)
        assert len({result["digest"] for result in results}) == 1
        for key, value in results[0]["weights"].items():
            torch.testing.assert_close(value, by_node[0]["weights"][key], **CLOSE)
        assert all(result["inter"] > 0 and result["intra"] > 0 for result in results)


def test_parameters_that_only_one_rank_uses() -> None:
    kwargs = {"topology": NODES, "find_unused_parameters": True}
    results = run_ranks(fit_named_unused, 4, "dgc", kwargs)
    assert len({result["digest"] for result in results}) == 1
    start = dict(Tiny(unused=True).named_parameters())
    assert torch.equal(results[0]["weights"]["never.weight"], start["never.weight"])
    assert not torch.equal(results[0]["weights"]["rank_zero_only.weight"], start["rank_zero_only.weight"])


def fit_named_unused(name: str, kwargs: dict[str, Any]) -> Any:
    return fit(make(name, **kwargs), {}, unused=True)


@pytest.mark.parametrize("name", ["hidden", "sparse"])
def test_local_steps_ask_nobody_in_other_nodes(name: str) -> None:
    """What the levels do is not on the world's process group."""
    options = {"callbacks": [TrafficMonitor(prog_bar=False), Silence()]}
    results = run_ranks(fit_named, 4, name, {"topology": 2}, options)
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


@pytest.mark.parametrize("name", ["dgc", "local"])
def test_resume_to_the_bit_and_elsewhere(name: str, tmp_path: Path) -> None:
    whole = run_ranks(save_and_go_on, 4, name, str(tmp_path), None, NODES)
    path = str(tmp_path / "5.ckpt")
    again = run_ranks(save_and_go_on, 4, name, "", path, NODES)
    assert again == whole
    # The file is plain: it has whole velocities, and goes on under any strategy.
    checkpoint = torch.load(path, weights_only=True)
    (state,) = checkpoint["optimizer_states"]
    weights = [p for p in Tiny().parameters() if p.requires_grad]
    assert [entry["momentum_buffer"].shape for entry in state["state"].values()] == [p.shape for p in weights]
    assert all(float(entry["momentum_buffer"].abs().max()) > 0 for entry in state["state"].values())
    for other, num_ranks, topology in ((name, 2, "flat"), (name, 6, 3), ("ddp", 2, 0)):
        results = run_ranks(save_and_go_on, num_ranks, other, "", path, topology)
        assert len({result[0] for result in results}) == 1
        assert all(result[3] == STEPS for result in results)


def fit_poisoned() -> str:
    with pytest.raises(NonFiniteGradientError) as caught:
        make_trainer(make("dgc", topology=NODES), 4).fit(Tiny(poison=(3, 4)), make_data(4, STEPS))
    return str(caught.value)


def test_a_gradient_that_is_not_finite_names_the_node() -> None:
    assert all("on node 1 (ranks [1, 3])" in message for message in run_ranks(fit_poisoned, 4))


def fit_without_optimizer(name: str) -> str:
    model = Tiny()
    if dist.get_rank() == 1:

        def nothing() -> list[Any]:
            return []

        model.configure_optimizers = nothing  # type: ignore[method-assign, assignment]
    with pytest.raises(DisagreementError) as caught:
        make_trainer(make(name, topology=2), 4).fit(model, make_data(4, STEPS))
    return str(caught.value)


@pytest.mark.parametrize("name", ["dgc", "hidden"])
def test_ranks_with_other_optimizers_fail_together(name: str) -> None:
    assert all("optimizers" in message for message in run_ranks(fit_without_optimizer, 4, name))


# What does not fit ----------------------------------------------------------------------------------------------


def fit_trouble(name: str, kwargs_by_rank: list[dict[str, Any]], batches: list[int] | None) -> str:
    try:
        fit(make(name, **kwargs_by_rank[dist.get_rank() % len(kwargs_by_rank)]), {}, batches=batches)
    except (ConfigurationError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("name", "kwargs_by_rank", "word"),
    [
        ("dgc", [{"topology": 3}], "cannot be divided"),
        ("dgc", [{"topology": [[0, 1, 2], [3]]}], "node 0 has 3 (0, 1, 2), node 1 has 1 (3)"),
        ("dgc", [{"topology": [[0, 1], [2]]}], "has 3 ranks, the world 4"),
        ("local", [{"topology": 2}, {"topology": 4}], "rank 1 has 4"),
    ],
)
def test_topologies_that_do_not_fit(name: str, kwargs_by_rank: Any, word: str) -> None:
    for message in run_ranks(fit_trouble, 4, name, kwargs_by_rank, None):
        assert word in message


def test_nodes_of_unequal_size_where_the_method_allows_it() -> None:
    results = run_ranks(fit_named, 4, "local", {"topology": [[0, 1, 2], [3]]}, {})
    assert len({result["digest"] for result in results}) == 1
    assert sum(result["inter"] for result in results) > 0


@pytest.mark.parametrize("name", ["dgc", "local"])
def test_one_level_only_is_said(name: str) -> None:
    flat = run_ranks(fit_named, 2, name, {}, {})
    results = run_ranks(fit_named, 2, name, {"topology": 1}, {})
    who = STRATEGIES[name][0].__name__
    assert [each for each in results[0]["warnings"] if "on each node" in each] == [
        f"{who}, topology=1: one rank on each node, so there is one level only, and this trains as with "
        "topology='flat'."
    ]
    assert all((result["digest"], result["inter"]) == (flat[0]["digest"], 0) for result in results)
    results = run_ranks(fit_named, 2, name, {"topology": "auto"}, {})  # both say GROUP_RANK=0
    assert [each for each in results[0]["warnings"] if "on one node" in each] == [
        f"{who}, topology='auto': all ranks are on one node, so there is one level only, and this trains as DDP."
    ]
    dense = run_ranks(fit_stock, 2)
    assert {result["digest"] for result in results} == {dense[0]["digest"]}


def fit_stock() -> Any:
    return fit(DDPStrategy(), {})


def test_wrong_arguments_are_refused() -> None:
    for cls in (DGCStrategy, LocalSGDStrategy, AdaptiveLocalSGDStrategy, HierarchicalStrategy):
        for wrong in ("tree", 0, True, 1.5, [[0, 0]], [[0], [2]], [0, 1], [["a"]], [[0, 1.9], [2, 3]]):
            with pytest.raises(ConfigurationError):
                cls(topology=wrong)
        cls(topology=Topology.blocks(4, 2))


# Launchers ------------------------------------------------------------------------------------------------------


def train_under_slurm(name: str, port: int) -> tuple[list[tuple[int, ...]], str, bool]:
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
    numbers = [SparsityWarmup(begin_step=0, steps=1, sparsity=[0.999])] if "dgc" in name else []
    options: dict[str, Any] = {"num_nodes": 2, "max_steps": 4, "max_epochs": -1, "callbacks": numbers}
    trainer = make_trainer(name, 2, **options)  # type: ignore[arg-type]
    model = Tiny(data_by_step=True)
    trainer.fit(model, DataLoader(data, batch_size=4))
    strategy = trainer.strategy
    assert isinstance(strategy.cluster_environment, SLURMEnvironment)
    return strategy._nodes, digest(model.parameters()), strategy.ledger.inter_bytes > 0


@pytest.mark.parametrize("name", ["dgc_hierarchical", "hierarchical"])
def test_under_slurm(name: str) -> None:
    results = run_ranks(train_under_slurm, 4, name, free_port())
    assert results == results[:1] * 4
    nodes, _, has_sent = results[0]
    assert (nodes, has_sent) == ([[0, 1], [2, 3]], True)
