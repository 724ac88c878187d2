"""Names for `Trainer(strategy=...)`."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist

from lightning_lowbw import Compression, Quantized, SparsityWarmup, Strategy
from tests.ranks import run_ranks
from tests.tiny import Tiny, make_data, make_trainer, weights_of


def by_name(sparsity: list[float] | None) -> tuple[str, str]:
    numbers = [] if sparsity is None else [SparsityWarmup(begin_step=0, steps=1, sparsity=sparsity)]
    trainer = make_trainer("dgc", dist.get_world_size(), callbacks=numbers)  # type: ignore[arg-type]
    model = Tiny()
    trainer.fit(model, make_data(dist.get_world_size(), 3))
    return type(trainer.strategy).__name__, weights_of(model)


@pytest.mark.parametrize("sparsity", [None, [0.999]])
def test_by_name(sparsity: list[float] | None) -> None:
    results = run_ranks(by_name, 2, sparsity)
    assert results[0] == results[1]
    assert results[0][0] == "DGCStrategy"


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("dgc", {"sparsity": "auto", "rampup_begin_step": 0, "budget": 0.05, "pretrained": False}),
        ("dgc_spawn", {"sparsity": "auto"}),
        ("dgc_hierarchical", {"sparsity": "auto"}),
        ("local_sgd", {"k_steps": 8, "begin_step": 1}),
        ("post_local_sgd", {"begin_step": "first_lr_decay"}),
        ("diloco_spawn", {"k_steps": 100, "begin_step": 0, "outer": "nesterov"}),
        ("streaming_diloco", {"k_steps": 100, "num_fragments": "auto", "delay_steps": 5, "mixing": 0.5}),
        ("sparse_loco_spawn", {"k_steps": 15, "begin_step": 0, "outer": "none", "what": Compression()}),
        ("adaptive_local_sgd", {"k_steps": 1, "rule": "fleet", "max_k_steps": 16}),
        ("int8", {"what": Quantized(value_dtype="int8"), "rampup_begin_step": 0}),
        ("int4_spawn", {"what": Quantized(value_dtype="int4"), "rampup_begin_step": 0}),
    ],
)
def test_strategies_by_name(name: str, method: dict[str, Any]) -> None:
    strategy = pl.Trainer(strategy=name, accelerator="cpu", devices=2, logger=False, barebones=True).strategy
    assert isinstance(strategy, Strategy)
    values = {"what": strategy.method.what, **vars(strategy.method.when)}
    assert {key: values[key] for key in method} == method
