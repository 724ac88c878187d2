"""A module that inductor has compiled, torch.compile's default: one graph, and the replicas stay equal."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from benchmarks.surface import Model, Run
from tests.ranks import run_ranks


class Plain(Model):
    """Without lists, of which each length would be another graph."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        pass


def fit(column: str, folder: str) -> tuple[int, int]:
    """Train in the steps of the page of Lightning's features; return the number of graphs, and of breaks in them."""
    model = Plain()
    begun = [parameter.detach().clone() for parameter in model.parameters()]
    Run(column, Path(folder)).fit(torch.compile(model))  # type: ignore[arg-type]
    assert not any(map(torch.equal, begun, model.parameters()))
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@pytest.mark.slow  # the first compilation takes a minute
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("column", ["dgc", "int8", "hierarchical", "local_sgd", "sparse_loco"])
def test_inductor_compiles_one_graph(column: str, tmp_path: Path) -> None:
    assert run_ranks(fit, 2, column, str(tmp_path), timeout_s=300.0, fresh=True) == [(1, 0)] * 2
