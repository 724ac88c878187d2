"""Checks of what the user has given that several values and methods have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from torch import Tensor
from torch.nn import Parameter

from lightning_lowbw.errors import ConfigurationError

Value = TypeVar("Value")


def from_mapping(kind: type[Value], arguments: Mapping[str, Any], subject: str) -> Value:
    """Return the value, a dataclass, of a mapping of its arguments.

    Args:
        kind: the dataclass.
        arguments: by name.
        subject: of the error's sentence.

    Raises:
        ConfigurationError: an argument is unknown, or out of range.
    """
    names = [each.name for each in fields(kind)]  # type: ignore[arg-type]
    unknown = [str(name) for name in arguments if name not in names]
    if unknown:
        raise ConfigurationError(f"{subject} has no {', '.join(unknown)}: choose among {', '.join(names)}.")
    return kind(**arguments)


def names_of(named_parameters: Iterable[tuple[str, Parameter]]) -> dict[Parameter, str]:
    """Return the name of each parameter.

    Raises:
        ConfigurationError: they are not pairs, as of `model.parameters()`.
    """
    try:
        pairs = list(named_parameters)
    except TypeError as error:
        raise ConfigurationError(
            f"named_parameters is a {type(named_parameters).__name__}: pass model.named_parameters()."
        ) from error
    for pair in pairs:
        if isinstance(pair, Tensor) or len(pair) != 2 or not isinstance(pair[0], str):
            raise ConfigurationError(
                f"named_parameters gives a {type(pair).__name__} where a pair of name and parameter is expected: pass "
                "model.named_parameters()."
            )
    return {parameter: name for name, parameter in pairs}


def is_number(value: object) -> bool:
    """Return whether a value is a real number; True and False are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
