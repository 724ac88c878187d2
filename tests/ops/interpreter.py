"""Runs tests in Triton's interpreter: `test_gpu` starts this as a process of its own."""

from __future__ import annotations

import types

import pytest


def replace_language_once() -> None:
    """Let `triton.language` mean what is interpreted for good, not anew in each call of a function of a kernel.

    That took half of the time. Where this Triton does it otherwise, nothing is changed.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    def see_all() -> None: ...

    if hasattr(interpreter, "_patch_lang"):
        interpreter._patch_lang(types.FunctionType(see_all.__code__, {"tl": tl, "core": tl.core}))
        interpreter._patch_lang = lambda _: types.SimpleNamespace(restore=lambda: None)


def main(name: str) -> int:
    """Run the tests of a file beside this one."""
    replace_language_once()
    return pytest.main(["-q", "-p", "no:cacheprovider", f"tests/ops/{name}.py"])
