"""Payloads: a whole tensor, a whole tensor in few bits per value, or its largest elements.

`Whole` and `Narrow` are here, `TopK` has a module of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_lowbw.arguments import check_one_of, names_arguments
from lightning_lowbw.what.narrow_values import NARROW_NAMES


@names_arguments
@dataclass(frozen=True, kw_only=True)
class Whole:
    """Every element, in float32 (or wider, if the tensor is); nothing is kept back."""


@names_arguments
@dataclass(frozen=True, kw_only=True)
class Narrow:
    """Every element in few bits, with error feedback: rounding errors are added to the next message.

    Args:
        value_dtype: "bfloat16", "float16", "int8" or "int4"; the integers with a scale per block of 128 values.

    Raises:
        ConfigurationError: the dtype is none of these.
    """

    value_dtype: str = "int8"

    def __post_init__(self) -> None:
        check_one_of("value_dtype", self.value_dtype, NARROW_NAMES)
