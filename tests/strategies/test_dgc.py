"""The constructor `DGCStrategy`."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_lowbw import DGC, ConfigurationError, DGCStrategy, Strategy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparsty": [0.9]}, "Did you mean 'sparsity'"),
        ({"nonsense": 1}, "unknown keyword"),
        ({"ddp_comm_hook": print}, "hook of its own"),
        ({"mixed_precision": 1}, "hook of its own"),
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
        ({"sparsity": [0.9, 0.99]}, "rampup_step=1 for the 2 values .* Give the number of optimizer steps"),
        ({"rampup_begin_step": 9, "sparsity": [0.9, 0.99, 0.999]}, "for the 3 values .* no step for each"),
        ({"rampup": 100}, "Did you mean 'rampup_begin_step' or 'rampup_step'"),
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
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
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
