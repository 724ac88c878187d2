"""Runs tests in Triton's interpreter: `test_gpu` starts this as a process of its own."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest


def speed_up() -> None:
    """Let `triton.language` mean what is interpreted for good, not anew in each call of a function of a kernel; and
    look up numpy's types once.

    That took half of the time, and a tenth. Where this Triton does it otherwise, nothing is changed.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    def see_all() -> None: ...

    if hasattr(interpreter, "_patch_lang"):
        interpreter._patch_lang(types.FunctionType(see_all.__code__, {"tl": tl, "core": tl.core}))
        interpreter._patch_lang = lambda _: types.SimpleNamespace(restore=lambda: None)
    if hasattr(interpreter, "_get_np_dtype"):
        interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)


def _by_name(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    known: dict[str, Any] = {}

    def find(dtype: Any) -> Any:
        if dtype.name not in known:
            known[dtype.name] = function(dtype)
        return known[dtype.name]

    return find


def main(name: str) -> int:
    """Run the tests of a file beside this one."""
    speed_up()
    return pytest.main(["-q", "-p", "no:cacheprovider", f"tests/ops/{name}.py"])
