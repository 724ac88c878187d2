"""The constructors `LocalSGDStrategy` and `AdaptiveLocalSGDStrategy`."""

from __future__ import annotations

import inspect

import pytest

from lightning_lowbw import AdaptiveLocalSGDStrategy, AveragingSchedule, ConfigurationError, LocalSGD, LocalSGDStrategy


def test_wrong_arguments_are_refused() -> None:
    for wrong in (
        {"broadcast_buffers": True},
        {"uneven": "wait"},
        {"k_step": 4},
        {"ddp_comm_hook": print},
        {"compression": {"top_k": 64}},
    ):
        with pytest.raises(ConfigurationError):
            LocalSGDStrategy(**wrong)
    with pytest.raises(ConfigurationError, match="LocalSGD"):
        AdaptiveLocalSGDStrategy(rule="fixed")
    for wrong in ({"begin_epoch": 1, "begin_step": 2}, {"begin_epoch": -1}, {"k_steps": 0}):
        with pytest.raises(ConfigurationError):
            AveragingSchedule(**wrong)


def test_a_schedule_of_the_adaptive_strategy_may_limit_k() -> None:
    for changes in ({"max_k_steps": 4}, {"k_steps": 2, "max_k_steps": 40}, {"k_steps": 40}):
        method = AveragingSchedule(**changes).method(LocalSGD(k_steps=2, rule="fleet", max_k_steps=64))
        assert {name: getattr(method.when, name) for name in changes} == changes
    with pytest.raises(ConfigurationError, match="below the first k of 8"):
        AveragingSchedule(k_steps=8, max_k_steps=4)


def test_the_adaptive_strategy_hands_on_what_it_does_not_name() -> None:
    strategy = AdaptiveLocalSGDStrategy(
        2, max_k_steps=9, rule="qsr", qsr_alpha=0.1, outer="slowmo", delay_steps=1, topology=2
    )
    knobs = {"max_k_steps": 9, "rule": "qsr", "qsr_alpha": 0.1, "outer": "slowmo", "delay_steps": 1}
    assert strategy.method == LocalSGD(k_steps=2, topology=2, **knobs)
    parameters = inspect.signature(AdaptiveLocalSGDStrategy).parameters
    assert list(parameters)[:5] == ["init_k_steps", "max_k_steps", "begin_step", "rule", "qsr_alpha"]
    assert {"outer", "compression", "uneven", "topology", "bucket_cap_mb"} <= set(parameters)


@pytest.mark.parametrize(("wrong", "hint"), [("k_steps", "init_k_steps"), ("num_fragments", ""), ("delay", "")])
def test_the_adaptive_strategy_refuses_unknown_names(wrong: str, hint: str) -> None:
    with pytest.raises(ConfigurationError, match=f"unknown keyword.*{hint}"):
        AdaptiveLocalSGDStrategy(**{wrong: 4})
