"""When replicas are averaged: what does not go together is refused, with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_lowbw import ConfigurationError
from lightning_lowbw.when.every_k import EveryK


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"k_steps": 0}, "k_steps=0: give a number of optimizer steps, an integer >= 1"),
        ({"k_steps": True}, "k_steps=True"),
        ({"begin_step": -1}, "begin_step=-1: .*an integer >= 0"),
        ({"begin_step": 1.5}, "begin_step=1.5: .*between 0 and 1"),
        ({"begin_step": "soon"}, "begin_step='soon': .* 'first_lr_decay'"),
        ({"rule": "best"}, "rule='best': choose one of fixed, fleet, adacomm, qsr"),
        ({"rule": "fleet", "k_steps": 32}, "max_k_steps=16 is below the first k of 32"),
        ({"max_k_steps": 4}, r"max_k_steps=4 with rule='fixed', .*or set rule to 'fleet' or 'adacomm' or 'qsr'"),
        ({"qsr_alpha": 0.3}, "qsr_alpha=0.3 with rule='fixed'"),
        ({"rule": "fleet", "qsr_alpha": 0.3}, "qsr_alpha=0.3 with rule='fleet', .*leave it out, or set rule to 'qsr'"),
        ({"rule": "qsr", "qsr_alpha": 0.0}, "qsr_alpha=0.0: give a number > 0"),
        ({"outer": "adam"}, "outer='adam': choose one of none, slowmo, nesterov"),
        ({"outer_lr": 0.7}, "outer_lr=0.7 without an outer optimizer"),
        ({"outer": "slowmo", "outer_momentum": 1.0}, r"outer_momentum=1.0: give a number in \[0, 1\)"),
        ({"outer": "nesterov", "outer_lr": "0.7"}, "outer_lr='0.7': give a number > 0"),
        ({"outer": "slowmo", "k_steps": 1}, "outer='slowmo' with k_steps=1, which is DDP"),
        ({"inner_momentum": "reset", "k_steps": 1}, "inner_momentum='reset' with k_steps=1, which is DDP"),
        ({"inner_momentum": "mean"}, "inner_momentum='mean': choose one of local, average, reset"),
        ({"node_k_steps": 0}, "node_k_steps=0: give an integer >= 1"),
        ({"num_fragments": 0}, "num_fragments=0: give an integer >= 1, or 'auto'"),
        ({"num_fragments": 9}, "num_fragments=9 with k_steps=8: give at most one fragment per step"),
        ({"num_fragments": "auto", "rule": "fleet"}, "num_fragments='auto' requires a fixed period"),
        ({"num_fragments": 2, "node_k_steps": 2}, "num_fragments=2 requires a fixed period"),
        ({"delay_steps": 8}, "delay_steps=8 with k_steps=8: give an integer from 0 to k_steps - 1, or 'auto'"),
        ({"delay_steps": "soon"}, "delay_steps='soon' with k_steps=8"),
        ({"delay_steps": 1, "inner_momentum": "average"}, "delay_steps=1 with inner_momentum='average'"),
        ({"mixing": 0.5}, "mixing=0.5 is for averages that are applied later: give delay_steps"),
        ({"mixing": 1.5, "delay_steps": 1}, r"mixing=1.5: give a number in \[0, 1\], or None"),
    ],
)
def test_what_cannot_be_is_refused(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        EveryK(**choices)


def test_it_compares_and_prints_by_what_was_given() -> None:
    schedule = EveryK(k_steps=4, outer="nesterov", delay_steps="auto")
    assert schedule == EveryK(delay_steps="auto", outer="nesterov", k_steps=4) != EveryK(k_steps=4)
    assert eval(repr(schedule)) == schedule
    assert schedule.schedule.k_steps == 4
    assert schedule.outer_optimizer.name == "nesterov"
    assert EveryK(k_steps=1).schedule.is_always_synchronous
    assert not EveryK(k_steps=1, rule="adacomm", outer="slowmo").schedule.is_always_synchronous


def test_averages_inside_nodes_need_nodes() -> None:
    with pytest.raises(ConfigurationError, match="node_k_steps=2 averages inside nodes"):
        EveryK(node_k_steps=2).check_levels(False)
    EveryK(node_k_steps=2).check_levels(True)
    EveryK().check_levels(False)
