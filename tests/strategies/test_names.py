"""The strategies' constructors, their keywords for DDP, and the names for `Trainer(strategy=...)`."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import lightning_lowbw as lowbw
from lightning_lowbw.strategies.keywords import DDP_KEYWORDS, OWNED, UNSUPPORTED, asked_of_buffers

# Keywords of DDP ------------------------------------------------------------------------------------------------------

STRATEGIES: dict[type[lowbw.Strategy], dict[str, Any]] = {
    lowbw.DGCStrategy: {},
    lowbw.LocalSGDStrategy: {},
    lowbw.AdaptiveLocalSGDStrategy: {},
    lowbw.HierarchicalStrategy: {},
    lowbw.AutoStrategy: {},
    lowbw.Strategy: {"method": lowbw.QuantizedGradients()},
}


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
