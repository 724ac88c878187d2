"""Keyword arguments for DDP, and the signatures that show them."""

from __future__ import annotations

import inspect
from typing import Any, get_type_hints

import pytest

from lightning_lowbw import (
    AdaptiveLocalSGDStrategy,
    AutoStrategy,
    ConfigurationError,
    DGCStrategy,
    HierarchicalStrategy,
    LocalSGDStrategy,
    QuantizedGradients,
    Strategy,
)
from lightning_lowbw.strategies.keywords import (
    ALL_KEYWORDS,
    DDP_KEYWORDS,
    OWNED,
    UNSUPPORTED,
    DDPKeywords,
    asked_of_buffers,
)

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
    with pytest.raises(ConfigurationError, match="Did you mean 'find_unused_parameters'"):
        strategy(**STRATEGIES[strategy], find_unused_parameter=True)


def test_type_checkers_know_all_keywords_of_this_release() -> None:
    """A new one of DDP works at once, and is to be added here."""
    assert set(DDP_KEYWORDS) <= set(get_type_hints(DDPKeywords))


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
