"""The strategies' constructors, their keywords for DDP, and the names for `Trainer(strategy=...)`."""

from __future__ import annotations

import inspect
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

from lightning_lowbw import (
    DGC,
    AdaptiveLocalSGDStrategy,
    AutoStrategy,
    AveragingSchedule,
    Compression,
    ConfigurationError,
    DGCStrategy,
    HierarchicalStrategy,
    LocalSGD,
    LocalSGDStrategy,
    Quantized,
    QuantizedGradients,
    Strategy,
)
from lightning_lowbw.strategies.keywords import (
    ALL_KEYWORDS,
    DDP_KEYWORDS,
    OWNED,
    UNSUPPORTED,
    asked_of_buffers,
)
from tests.ranks import run_ranks
from tests.tiny import weights_of

# Keywords of DDP ------------------------------------------------------------------------------------------------------

STRATEGIES: dict[type[Strategy], dict[str, Any]] = {
    DGCStrategy: {},
    LocalSGDStrategy: {},
    AdaptiveLocalSGDStrategy: {},
    HierarchicalStrategy: {},
    AutoStrategy: {},
    Strategy: {"method": QuantizedGradients()},
}


def test_keywords_of_ddp_go_through() -> None:
    strategy = DGCStrategy(find_unused_parameters=True, bucket_cap_mb=5, process_group_backend="gloo")
    assert strategy._ddp_kwargs == {"find_unused_parameters": True, "bucket_cap_mb": 5}
    assert strategy.process_group_backend == "gloo"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_defaults_are_no_choices(strategy: type[Strategy]) -> None:
    """LightningCLI gives all arguments of a parent class, those too that the strategies refuse."""
    defaults = {name: parameter.default for name, parameter in ALL_KEYWORDS.items()}
    assert {"ddp_comm_state", "mixed_precision", "find_unused_parameters", "timeout"} <= set(defaults)
    built = strategy(**STRATEGIES[strategy], **defaults)
    assert built._ddp_kwargs == {}
    assert repr(built) == repr(strategy(**STRATEGIES[strategy]))


@pytest.mark.parametrize("name", sorted(OWNED | UNSUPPORTED))
def test_what_the_hook_cannot_be_combined_with_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"DGCStrategy\({name}=7\).*Leave it out, or use strategy='ddp'"):
        DGCStrategy(**{name: 7})  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_signature_names_all_that_is_accepted(strategy: type[Strategy]) -> None:
    parameters = inspect.signature(strategy).parameters
    assert all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values())
    assert set(DDP_KEYWORDS) <= set(parameters)
    assert not set(parameters) & (OWNED | UNSUPPORTED)
    assert not [name for name, parameter in parameters.items() if isinstance(parameter.annotation, str)]
    given = {name: each.default for name, each in parameters.items() if each.default is not each.empty}
    assert repr(strategy(**STRATEGIES[strategy], **given)) == repr(strategy(**STRATEGIES[strategy]))
    with pytest.raises(ConfigurationError, match=r"unknown keyword\. Allowed: .*find_unused_parameters"):
        strategy(**STRATEGIES[strategy], find_unused_parameter=True)


@pytest.mark.parametrize(
    ("keywords", "asked"),
    [
        ({}, None),
        ({"broadcast_buffers": False}, False),
        ({"forward_sync_buffers": True}, True),
        ({"broadcast_buffers": True, "forward_sync_buffers": False}, False),
        ({"broadcast_buffers": True, "forward_sync_buffers": None}, True),
    ],
)
def test_either_keyword_says_whether_buffers_are_sent(keywords: dict[str, bool | None], asked: bool | None) -> None:
    assert asked_of_buffers(keywords) is asked


# Arguments ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_ids": [0]}, "unknown keyword"),
        ({"sparsity": [1.0]}, r"outside \[0, 1\)"),
        ({"sparsity": [-0.1]}, r"outside \[0, 1\)"),
        ({"sparsity": [float("nan")]}, r"outside \[0, 1\)"),
        ({"sparsity": []}, "at least one"),
        ({"sparsity": 0.999}, "give a list"),
        ({"sparsity": [0.9, 0.0]}, "0.0 follows 0.9"),
        ({"sparsity": [0.9, 1e-17]}, "follows 0.9"),
        ({"sparsity": "0"}, "give a list"),
        ({"rampup_step": 0}, "integer >= 1"),
        ({"rampup_begin_step": -1}, "integer >= 0"),
        ({"sparsity": [0.9, 0.99]}, "rampup_step=1 for the 2 values .* Give the number of optimizer steps"),
        ({"rampup_begin_step": 9, "sparsity": [0.9, 0.99, 0.999]}, "for the 3 values .* no step for each"),
        ({"rampup_begin_step": 1.5}, "integer >= 0"),
        ({"value_dtype": "int3"}, "float32, bfloat16, float16"),
        ({"min_numel": 0}, "integer >= 1"),
        ({"exclude": "bias"}, "list of parameter name patterns"),
        ({"rampup_begin_step": 2, "pretrained": True}, r"^pretrained=True with .* is for sparsity='auto'"),
        ({"rampup_step": 300}, r"rampup_step=300 with sparsity=\[0.999\]: a warm-up needs several values"),
        ({"rampup_step": 300, "sparsity": [0.99]}, r"sparsity=\[0.99\]: a warm-up needs several values"),
        ({"sparsity": "automatic"}, r"list of numbers in \[0, 1\), for instance \[0\.999\], or 'auto'"),
        ({"sparsity": "auto", "rampup_begin_step": 100}, "these are chosen, too"),
        ({"rampup_begin_step": False}, "integer >= 0"),
        ({"sparsity": [0.1, 0.01, 0.001], "rampup_step": 3}, "the fraction kept back, not the one sent"),
    ],
)
def test_bad_arguments_of_dgc(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        DGCStrategy(**options)


def test_the_sparsity_is_chosen_by_default() -> None:
    assert DGCStrategy().method == Strategy(DGC(sparsity="auto")).method == DGCStrategy(sparsity="auto").method
    assert DGCStrategy(pretrained=True).method == DGC(sparsity="auto", pretrained=True)


def test_after_a_dense_phase_of_the_users_own_it_is_99_9_percent() -> None:
    schedule = {"rampup_begin_step": 100}
    assert DGCStrategy(**schedule).method == DGC(**schedule) == DGC(sparsity=[0.999], **schedule)


def test_numbers_stay_what_they_are() -> None:
    assert DGCStrategy(sparsity=[0.999]).method == DGC()
    stairs = {"sparsity": [0.75, 0.999], "rampup_step": 2}
    assert DGCStrategy(**stairs).method == DGC(**stairs)


@pytest.mark.parametrize(
    "wrong",
    [
        {"broadcast_buffers": True},
        {"static_graph": True},
        {"k_step": 4},
        {"compression": {"top_k": 64}},
    ],
)
def test_bad_arguments_of_local_sgd(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        LocalSGDStrategy(**wrong)


def test_the_adaptive_strategy_hands_on_what_it_does_not_name() -> None:
    knobs: dict[str, Any] = {"max_k_steps": 9, "rule": "qsr", "qsr_alpha": 0.1, "outer": "slowmo", "topology": 2}
    assert AdaptiveLocalSGDStrategy(2, **knobs).method == LocalSGD(k_steps=2, **knobs)
    for changes in ({"max_k_steps": 4}, {"k_steps": 2, "max_k_steps": 40}, {"k_steps": 40}):
        method = AveragingSchedule(**changes).method(LocalSGD(k_steps=2, rule="fleet", max_k_steps=64))
        assert {name: getattr(method.when, name) for name in changes} == changes


# Names ----------------------------------------------------------------------------------------------------------------


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
