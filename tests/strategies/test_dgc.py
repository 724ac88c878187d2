"""The constructor `DGCStrategy`."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_lowbw import ConfigurationError, DGCStrategy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparsty": [0.9]}, "Did you mean 'sparsity'"),
        ({"nonsense": 1}, "unknown keyword"),
        ({"ddp_comm_hook": print}, "hook of its own"),
        ({"mixed_precision": None}, "hook of its own"),
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
        ({"rampup_begin_step": 1.5}, "integer >= 0"),
        ({"selection": "random"}, "sampled, exact"),
        ({"value_dtype": "int3"}, "float32, bfloat16, float16"),
        ({"min_numel": 0}, "integer >= 1"),
        ({"exclude": "bias"}, "list of parameter name patterns"),
        ({"momentum_masking": 1}, "True, False or None"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        DGCStrategy(**options)
