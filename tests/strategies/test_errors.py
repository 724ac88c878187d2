"""Bad input is refused on all ranks, before training where it can be known, and nothing hangs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_lowbw import ConfigurationError, DGCStrategy, DisagreementError
from tests.ranks import run_ranks
from tests.tiny import Tiny, make_data, make_strategy, make_trainer, sgd


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparsty": [0.9]}, "Did you mean 'sparsity'"),
        ({"nonsense": 1}, "unknown keyword"),
        ({"ddp_comm_hook": print}, "hook of its own"),
        ({"mixed_precision": None}, "hook of its own"),
        ({"device_ids": [0]}, "unknown keyword"),
        ({"sparsity": [1.0]}, r"outside \[0, 1\)"),
        ({"sparsity": [-0.1]}, r"outside \[0, 1\)"),
        ({"sparsity": [float("nan")]}, r"outside \[0, 1\)"),
        ({"sparsity": []}, "at least one"),
        ({"sparsity": 0.999}, "give a list"),
        ({"sparsity": [0.9, 0.0]}, "dense stair"),
        ({"sparsity": [0.9, 1e-17]}, "dense stair"),
        ({"sparsity": "0"}, "give a list"),
        ({"rampup_step": 0}, "integer >= 1"),
        ({"rampup_begin_step": -1}, "integer >= 0"),
        ({"rampup_begin_step": 1.5}, "integer >= 0"),
        ({"selection": "random"}, "sampled, exact"),
        ({"value_dtype": "int3"}, "float32, bfloat16, float16"),
        ({"min_numel": 0}, "integer >= 1"),
        ({"exclude": "bias"}, "list of parameter name patterns"),
        ({"momentum_masking": 1}, "True, False or None"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        DGCStrategy(**options)


def test_keywords_of_ddp_go_through() -> None:
    strategy = DGCStrategy(find_unused_parameters=True, bucket_cap_mb=5, process_group_backend="gloo")
    assert strategy._ddp_kwargs == {"find_unused_parameters": True, "bucket_cap_mb": 5}
    assert strategy.process_group_backend == "gloo"


class Differs(Tiny):
    """A module that is not the same on all ranks."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        rank = dist.get_rank()
        if what == "shape":
            self.extra = nn.Linear(4, 4 + rank)
        if what == "frozen" and rank == 1:
            self.head.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        rank = dist.get_rank()
        if self.what == "momentum":
            return sgd(self.parameters(), momentum=0.9 + 0.05 * rank)
        if self.what == "optimizer" and rank == 1:
            return torch.optim.Adam(self.parameters())
        if self.what == "dampening":
            return sgd(self.parameters(), dampening=0.1)
        if self.what == "lbfgs":
            return torch.optim.LBFGS(self.parameters())
        return super().configure_optimizers()


def refuse(what: str, strategy: dict[str, Any]) -> tuple[str, str, int]:
    num_ranks = dist.get_world_size()
    model = Differs(what)
    if what == "config":
        strategy = {"sparsity": [0.9 + 0.01 * dist.get_rank()]}
    if what == "exclude":
        strategy = {"exclude": ["embedding.*"]}
    if what == "ddp":
        strategy = {"bucket_cap_mb": 1 + dist.get_rank()}
    trainer = make_trainer(make_strategy("dgc", **strategy), num_ranks)
    with pytest.raises(ConfigurationError) as caught:
        trainer.fit(model, make_data(num_ranks, 2))
    return type(caught.value).__name__, str(caught.value), trainer.global_step


@pytest.mark.parametrize(
    ("what", "error", "words"),
    [
        ("config", DisagreementError, ["sparsity", "rank 0 has (0.9,)", "rank 1 has (0.91,)"]),
        ("ddp", DisagreementError, ["bucket_cap_mb", "rank 1 has 2"]),
        ("shape", DisagreementError, ["model", "extra.weight", "(4, 4)", "(5, 4)"]),
        ("frozen", DisagreementError, ["head.weight", "frozen"]),
        ("momentum", DisagreementError, ["momentum", "0.9", "0.95"]),
        ("optimizer", DisagreementError, ["SGD", "Adam"]),
        ("dampening", ConfigurationError, ["dampening=0.1"]),
        ("lbfgs", ConfigurationError, ["LBFGS"]),
        ("exclude", ConfigurationError, ["'embedding.*' matches no parameter", "wide.weight"]),
    ],
)
def test_refused_on_all_ranks_before_the_first_step(what: str, error: type[Exception], words: list[str]) -> None:
    for name, message, steps in run_ranks(refuse, 2, what, {}):
        assert name == error.__name__
        assert steps == 0
        for word in words:
            assert word in message


class SparseEmbedding(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(100, 16, sparse=True)


def refuse_sparse() -> str:
    with pytest.raises(ConfigurationError) as caught:
        make_trainer(make_strategy("dgc"), dist.get_world_size()).fit(SparseEmbedding(), make_data(2, 2))
    return str(caught.value)


def test_sparse_gradients_are_refused() -> None:
    for message in run_ranks(refuse_sparse, 2):
        assert "'words'" in message
        assert "sparse=False" in message


class FailsOnRankOne(Tiny):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 3 and self.global_rank == 1:
            raise RuntimeError("this rank has had enough")
        return super().training_step(batch, batch_idx)


def fail() -> str:
    with pytest.raises(RuntimeError) as caught:
        make_trainer(make_strategy("dgc"), dist.get_world_size()).fit(FailsOnRankOne(), make_data(2, 8))
    return str(caught.value)


def test_an_error_on_one_rank_unwinds_without_a_collective() -> None:
    """The rank that failed leaves at once; its peers are ended by their launcher, or by the closed connection."""
    with pytest.raises(AssertionError, match="Rank 1 left"):
        run_ranks(fail_and_leave, 2, timeout_s=30.0)


def fail_and_leave() -> None:
    if dist.get_rank() == 1:
        raise AssertionError(f"Rank 1 left: {fail()}")
    make_trainer(make_strategy("dgc"), dist.get_world_size()).fit(FailsOnRankOne(), make_data(2, 8))
