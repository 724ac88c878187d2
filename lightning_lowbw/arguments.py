"""Checks of arguments that several values and methods share."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar

from torch.nn import Parameter

from lightning_lowbw.errors import ConfigurationError

Value = TypeVar("Value")
Called = TypeVar("Called", bound=Callable[..., Any])
LARGEST = 2**1023  # a float can hold it


def arguments_of(*functions: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters of functions or classes by name, with their types evaluated."""
    signatures = [inspect.signature(function, eval_str=True) for function in functions]
    return {name: parameter for signature in signatures for name, parameter in signature.parameters.items()}


def shows(passed_on: Mapping[str, inspect.Parameter]) -> Callable[[Called], Called]:
    """Decorate a function that passes its `**kwargs` on: its signature then shows these keywords.

    `help` and LightningCLI (for types, defaults and accepted names) read this signature.
    """

    def decorate(function: Called) -> Called:
        signature = inspect.signature(function, eval_str=True)
        *named, _ = signature.parameters.values()  # the last is **kwargs
        others = [parameter for name, parameter in passed_on.items() if name not in signature.parameters]
        keywords = [parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in others]
        function.__signature__ = signature.replace(parameters=[*named, *keywords])  # type: ignore[attr-defined]
        return function

    return decorate


def from_mapping(kind: type[Value], arguments: Mapping[str, Any], subject: str) -> Value:
    """Return the value, a dataclass, of a mapping of its arguments.

    Args:
        kind: the dataclass.
        arguments: the arguments by name.
        subject: the subject of the error's sentence.

    Raises:
        ConfigurationError: an argument is unknown, or out of range.
    """
    return kind(**sorted_into(subject, arguments, kind)[0])


def sorted_into(subject: str, arguments: Mapping[str, Any], *kinds: type) -> list[dict[str, Any]]:
    """Return the arguments that are fields of each of some dataclasses.

    Raises:
        ConfigurationError: none of the dataclasses has a field with the name of an argument.
    """
    names = [[field.name for field in fields(kind) if field.init] for kind in kinds]
    unknown = [str(name) for name in arguments if not any(name in of_kind for of_kind in names)]
    if unknown:
        allowed = ", ".join(name for of_kind in names for name in of_kind)
        raise ConfigurationError(f"{subject} has no {', '.join(unknown)}: choose among {allowed}.")
    return [{name: value for name, value in arguments.items() if name in of_kind} for of_kind in names]


def code_of(value: object, prefix: str = "") -> str:
    """Return the call that makes a dataclass, without arguments that have their default; for other values the `repr`.

    Args:
        value: the value, such as a `Method`.
        prefix: put before each class name, such as "lowbw.".
    """
    if not is_dataclass(value):
        return repr(value)
    given = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
    defaults = {field.name: field.default for field in fields(value) if field.default is not MISSING}
    shown = [f"{name}={code_of(knob, prefix)}" for name, knob in given.items() if knob != defaults.get(name, MISSING)]
    return f"{prefix}{type(value).__name__}({', '.join(shown)})"


def names_of(named_parameters: Iterable[tuple[str, Parameter]]) -> dict[Parameter, str]:
    """Return the name of each parameter.

    Raises:
        ConfigurationError: the elements are not pairs, as in `model.parameters()`.
    """
    pairs = list(named_parameters) if isinstance(named_parameters, Iterable) else [named_parameters]
    if not all(isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs):
        raise ConfigurationError("named_parameters has no pairs of name and parameter: pass model.named_parameters().")
    return {parameter: name for name, parameter in pairs}


def is_number(value: object) -> bool:
    """Return whether a value is a finite real number; True and False are not."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < LARGEST  # a float can hold it


def is_count(value: object, least: int = 1) -> bool:
    """Return whether a value is an integer of at least `least`; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_one_of(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise ConfigurationError if a value is none of the choices."""
    if value not in choices:
        raise ConfigurationError(f"{name}={value!r}: choose one of {', '.join(choices)}.")
