"""What the values that a user may also give as a mapping of their arguments (Hydra does) have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

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


def is_number(value: object) -> bool:
    """Return whether a value is a real number; True and False are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
