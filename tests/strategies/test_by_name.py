"""What is said where a strategy's name decides something, in Lightning, in Fabric and in other libraries."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, RandomSampler, TensorDataset

from lightning_lowbw import DGC, ConfigurationError, LocalSGDStrategy
from lightning_lowbw.strategies.checks import whole_data_sampler_of
from tests.ranks import run_ranks
from tests.tiny import Tiny, make_trainer, weights_of

# Samplers -------------------------------------------------------------------------------------------------------------


class Shards(DistributedSampler[Any]):
    """One of another library."""


def test_which_samplers_draw_from_all_of_the_data() -> None:
    data: Dataset[Any] = TensorDataset(torch.zeros(8))
    everything = RandomSampler(data)  # type: ignore[arg-type]
    assert whole_data_sampler_of(DataLoader(data, batch_size=2)) is not None
    assert whole_data_sampler_of(DataLoader(data, sampler=everything)) is everything
    in_batches = DataLoader(data, sampler=BatchSampler(everything, 2, False), batch_size=None)
    assert whole_data_sampler_of(in_batches) is everything
    mine = Shards(data, num_replicas=2, rank=0)
    for loader in (
        DataLoader(data, sampler=mine),
        DataLoader(data, sampler=BatchSampler(mine, 2, False), batch_size=None),
        DataLoader(data, batch_sampler=[[0, 1], [2, 3]]),
        [torch.zeros(2)],
    ):
        assert whole_data_sampler_of(loader) is None


def warnings_about_data(strategy: Any, sampler: Any) -> list[str]:
    data = TensorDataset(torch.zeros(32, 16), torch.zeros(32, dtype=torch.long))
    kwargs = {} if sampler is None else {"sampler": sampler(data, num_replicas=2, rank=dist.get_rank())}
    trainer = make_trainer(strategy, dist.get_world_size(), max_steps=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Tiny(), DataLoader(data, batch_size=8, **kwargs))
    return [str(each.message) for each in caught if "draws from all of" in str(each.message)]


def test_data_that_is_not_distributed_is_warned_about() -> None:
    (warning,), on_other_ranks = run_ranks(warnings_about_data, 2, "diloco", None)
    assert "Each of the 2 ranks draws from all of its training data: the sampler is a SequentialSampler" in warning
    assert "does not do so with 'diloco': pass the class, strategy=lightning_lowbw.LocalSGDStrategy(...)" in warning
    assert on_other_ranks == []
    assert run_ranks(warnings_about_data, 2, "diloco", Shards) == [[], []]
    # Who has passed the class shares out the data himself: no library has misread a name.
    assert run_ranks(warnings_about_data, 2, LocalSGDStrategy(), None) == [[], []]


# Fabric ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("dgc", "DGC"),
        ("diloco_hierarchical_spawn_find_unused_parameters_true", "LocalSGD"),
        ("int8", "QuantizedGradients"),
        ("lowbw", "DGC"),
    ],
)
def test_fabric_names_the_plain_loop(name: str, method: str) -> None:
    with pytest.raises(
        ConfigurationError, match=rf"Fabric\(strategy='{name}'\).*lightning_lowbw\.{method}\(\.\.\.\)\."
    ):
        Fabric(strategy=name, accelerator="cpu", devices=2)


def loop_with_fabric() -> tuple[list[float], str]:
    fabric = Fabric(strategy="ddp", accelerator="cpu", devices=2)
    fabric.launch()
    torch.manual_seed(0)
    model = torch.nn.Linear(256, 128).to(fabric.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    worker = DGC(sparsity=[0.99]).attach(optimizer, model.named_parameters())
    data = fabric.setup_dataloaders(DataLoader(torch.randn(64, 256), batch_size=8))
    losses = []
    for batch in data:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        fabric.backward(loss)
        optimizer.step()
        losses.append(float(loss))
    assert worker.step == 4
    return losses, weights_of(model)


def test_the_plain_loop_runs_with_fabric() -> None:
    (losses, weights), (others, same) = run_ranks(loop_with_fabric, 2)
    assert losses != others  # each rank has its own share
    assert weights == same
