"""Compile all kernels for GPUs that need not be there, and name their wide loads and stores: run by `test_gpu`."""

from __future__ import annotations

import sys
from typing import Any

from lightning_lowbw.ops import gpu

TARGETS = {70: "float32", 90: "bfloat16"}  # compute capability, times ten: the oldest and a recent one
WARP_SIZE = 32
POINTERS = {
    name: f"*{type_name}"
    for type_name, names in {
        "i64": "table tensors block_ends sent_positions addresses",
        "i32": "owners counts block_counts block_bases positions ordered_positions",
        "fp32": "factors thresholds samples values ordered_values sent_values",
    }.items()
    for name in names.split()
}
SCALARS = {"first": "i32", "width": "i32", "numel": "i32", "limit": "fp32", "scale": "fp32"}


def assembly(kernel: Any, capability: int, constants: dict[str, Any], **options: int) -> str:
    """Return the PTX of a kernel; its machine code is made too."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {**POINTERS, **SCALARS, **dict.fromkeys(constants, "constexpr")}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name in POINTERS}
    source = ASTSource(kernel, {name: types[name] for name in kernel.arg_names}, constants, aligned)
    compiled = triton.compile(source, GPUTarget("cuda", capability, WARP_SIZE), {**gpu.OPTIONS, **options})
    assert compiled.asm["cubin"]
    return str(compiled.asm["ptx"])


def main() -> None:
    """Write a line per kernel."""
    import triton.language as tl

    from lightning_lowbw.ops import triton_kernels

    for capability, dtype_name in TARGETS.items():
        dtype = getattr(tl, dtype_name)
        kinds = {"G": dtype, "U": dtype, "W": dtype, "BLOCK": gpu.BLOCK}
        take = {"V": dtype, "MASKING": True, "BLOCK": gpu.SELECT_BLOCK}
        for name, kernel, constants, options in (
            ("correct, aligned,", triton_kernels.correct_kernel, {**kinds, "ALIGNED": True}, {"num_warps": 8}),
            ("correct, unaligned,", triton_kernels.correct_kernel, {**kinds, "ALIGNED": False}, {"num_warps": 8}),
            ("sample,", triton_kernels.sample_kernel, kinds, {}),
            ("order,", triton_kernels.order_kernel, {"BLOCK": gpu.ORDER_BLOCK}, {"num_warps": 1}),
            ("take,", triton_kernels.take_kernel, take, {"num_warps": 16}),
            ("scatter,", triton_kernels.scatter_kernel, {"BLOCK": gpu.SELECT_BLOCK}, {}),
        ):
            ptx = assembly(kernel, capability, constants, **options)
            wide = [name for name in ("ld.global.v4.b32", "st.global.v4.b32") if name in ptx]
            sys.stdout.write(f"sm_{capability} {dtype} {name} {' '.join(wide)}\n")


if __name__ == "__main__":
    main()
