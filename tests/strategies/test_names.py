"""The strategies' constructors, their keywords for DDP, and the names for `Trainer(strategy=...)`."""

from __future__ import annotations

import inspect
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

import lightning_lowbw as lowbw
from lightning_lowbw.strategies.keywords import ALL_KEYWORDS, DDP_KEYWORDS, OWNED, UNSUPPORTED, asked_of_buffers
from tests.ranks import on_ranks
from tests.strategies.fits import gathered, same
from tests.tiny import weights_of

# Keywords of DDP ------------------------------------------------------------------------------------------------------

STRATEGIES: dict[type[lowbw.Strategy], dict[str, Any]] = {
    lowbw.DGCStrategy: {},
    lowbw.LocalSGDStrategy: {},
    lowbw.AdaptiveLocalSGDStrategy: {},
    lowbw.HierarchicalStrategy: {},
    lowbw.AutoStrategy: {},
    lowbw.Strategy: {"method": lowbw.QuantizedGradients()},
}


def test_defaults_are_no_choices() -> None:
    """LightningCLI gives all arguments of a parent class, those too that the strategies refuse."""
    defaults = {name: parameter.default for name, parameter in ALL_KEYWORDS.items()}
    assert {"ddp_comm_state", "mixed_precision", "find_unused_parameters", "timeout"} <= set(defaults)
    built = lowbw.DGCStrategy(**defaults)
    assert built._ddp_kwargs == {}
    assert repr(built) == repr(lowbw.DGCStrategy())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_signature_names_all_that_is_accepted(strategy: type[lowbw.Strategy]) -> None:
    parameters = inspect.signature(strategy).parameters
    assert all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values())
    assert set(DDP_KEYWORDS) <= set(parameters)
    assert not set(parameters) & (OWNED | UNSUPPORTED)
    assert not [name for name, parameter in parameters.items() if isinstance(parameter.annotation, str)]
    given = {name: each.default for name, each in parameters.items() if each.default is not each.empty}
    assert repr(strategy(**STRATEGIES[strategy], **given)) == repr(strategy(**STRATEGIES[strategy]))
    with pytest.raises(lowbw.ConfigurationError, match=r"unknown keyword\. Allowed: .*find_unused_parameters"):
        strategy(**STRATEGIES[strategy], find_unused_parameter=True)


@pytest.mark.parametrize(
    ("keywords", "asked"),
    [
        *[({}, None), ({"broadcast_buffers": False}, False)],
        *[({"broadcast_buffers": True, "forward_sync_buffers": each}, each is None) for each in (False, None)],
    ],
)
def test_either_keyword_says_whether_buffers_are_sent(keywords: dict[str, bool | None], asked: bool | None) -> None:
    assert asked_of_buffers(keywords) is asked


# Arguments ------------------------------------------------------------------------------------------------------------


def test_numbers_stay_what_they_are() -> None:
    """Without any it is "auto"; after a dense phase of the user's own 99.9 %."""
    assert lowbw.DGCStrategy(sparsity=[0.999]).method == lowbw.DGC()
    schedule = {"rampup_begin_step": 100}
    assert lowbw.DGCStrategy(**schedule).method == lowbw.DGC(**schedule) == lowbw.DGC(sparsity=[0.999], **schedule)


def test_the_adaptive_strategy_hands_on_what_it_does_not_name() -> None:
    knobs: dict[str, Any] = {"max_k_steps": 9, "rule": "qsr", "qsr_alpha": 0.1, "outer": "slowmo", "topology": 2}
    assert lowbw.AdaptiveLocalSGDStrategy(2, **knobs).method == lowbw.LocalSGD(k_steps=2, **knobs)
    for changes in ({"max_k_steps": 4}, {"k_steps": 2, "max_k_steps": 40}, {"k_steps": 40}):
        method = lowbw.AveragingSchedule(**changes).method(lowbw.LocalSGD(k_steps=2, rule="fleet", max_k_steps=64))
        assert {name: getattr(method.when, name) for name in changes} == changes


# Names ----------------------------------------------------------------------------------------------------------------


def test_a_trainer_takes_a_name() -> None:
    """What each stands for: tests/architecture/test_layers.py, and the cards in docs/methods."""
    strategy = pl.Trainer(strategy="int8_spawn", accelerator="cpu", devices=2, logger=False, barebones=True).strategy
    assert isinstance(strategy, lowbw.Strategy)
    assert strategy.method.what == lowbw.Quantized(value_dtype="int8")


@on_ranks(2)
def test_the_plain_loop_runs_with_fabric() -> None:
    fabric = Fabric(strategy="ddp", accelerator="cpu", devices=2)
    fabric.launch()
    torch.manual_seed(0)
    model = torch.nn.Linear(256, 128).to(fabric.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    worker = lowbw.DGC(sparsity=[0.99]).attach(optimizer, model.named_parameters())
    losses = []
    for batch in fabric.setup_dataloaders(DataLoader(torch.randn(64, 256), batch_size=8)):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        fabric.backward(loss)
        optimizer.step()
        losses.append(float(loss))
    assert worker.step == 4
    first, second = gathered(losses)
    assert first != second  # each rank has its own share
    same(weights_of(model))
