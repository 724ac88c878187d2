"""Runs tests in Triton's interpreter: `test_gpu` starts this as a process of its own."""

from __future__ import annotations

import functools
import inspect
import math
import types
from collections.abc import Callable
from typing import Any

import pytest


def speed_up() -> None:
    """Do once what the interpreter does in each operation. All that it computes and checks stays.

    Its own bookkeeping takes three quarters of the time. Another version of Triton, if it differs, is left as it is.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    def see_all() -> None: ...

    if hasattr(interpreter, "_patch_lang"):  # `triton.language` stays the interpreter's for good
        interpreter._patch_lang(types.FunctionType(see_all.__code__, {"tl": tl, "core": tl.core}))
        interpreter._patch_lang = lambda _: types.SimpleNamespace(restore=lambda: None)
    if hasattr(interpreter, "_get_np_dtype"):
        interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    if _takes(tl.tensor.__init__, "self", "handle", "type"):
        _describe_shapes_once(tl)
    semantic = getattr(getattr(tl, "semantic", None), "TritonSemantic", None)
    if _takes(getattr(semantic, "binary_op_sanitize_overflow_impl", None), "self", "lhs", "rhs", "binary_op"):
        semantic.binary_op_sanitize_overflow_impl = _assert_no_overflow
    if _takes(getattr(semantic, "broadcast_impl_value", None), "self", "lhs", "rhs"):
        semantic.broadcast_impl_value = _unless_of_one_shape(semantic.broadcast_impl_value)


def _takes(function: Any, *names: str) -> bool:
    return function is not None and tuple(inspect.signature(function).parameters) == names


def _by_name(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    known: dict[str, Any] = {}

    def find(dtype: Any) -> Any:
        if dtype.name not in known:
            known[dtype.name] = function(dtype)
        return known[dtype.name]

    return find


def _describe_shapes_once(tl: Any) -> None:
    """Let tensors of one shape share what describes it."""

    @functools.cache
    def describe(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return tl.core.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(math.prod(shape))

    def init(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = describe(type.shape if type.is_block() else ())

    tl.tensor.__init__ = init


def _unless_of_one_shape(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    def broadcast_unless(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.shape is rhs.shape:  # one object for each shape: `_describe_shapes_once`
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    return broadcast_unless


def _assert_no_overflow(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
    """Compute in 64 bits and compare, with numpy alone."""
    import numpy as np

    of = lhs.type.scalar
    if of.int_bitwidth >= 64:
        return
    wide = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[binary_op.__name__]
    result = wide(lhs.handle.data.astype(np.int64), rhs.handle.data.astype(np.int64))
    fits = result.min() >= of.get_int_min_value() and result.max() <= of.get_int_max_value()
    assert fits, f"int{of.int_bitwidth} overflow in {binary_op.__name__}"


def main() -> int:
    """Run the tests of files beside this one."""
    speed_up()
    files = (f"tests/kernels/{name}.py" for name in ("backend_cases", "kernel_cases", "kernel_steps"))
    return pytest.main(["-q", "-p", "no:cacheprovider", *files])
