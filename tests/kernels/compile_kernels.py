"""Compile all kernels for GPUs that need not be there, and name their wide loads and stores: run by `test_gpu`."""

from __future__ import annotations

import sys
from typing import Any

import torch

from lightning_lowbw.kernels import gpu, table

TARGETS = {70: "float32", 80: "float32", 90: "bfloat16"}  # compute capability, times ten: the oldest and two in use
OLDEST = min(TARGETS)  # only the longest kernels are compiled for it
WARP_SIZE = 32
POINTERS = {
    name: f"*{type_name}"
    for type_name, names in {
        "i64": "table block_ends ends fields residuals sent_positions",
        "i32": "owners counts counting block_counts block_bases positions ordered_positions kth left bins num_greater "
        "num_ties ends_greater ends_ties num_ones words messages spans",
        "fp32": "factors thresholds last_kth values ordered_values sent_values",
        "u8": "message received answer flags",
    }.items()
    for name in names.split()
}
FLOATS = {"limit", "scale", "largest", "tiny", "share"}


def assembly(kernel: Any, capability: int, constants: dict[str, Any], **options: int) -> str:
    """Return the PTX of a kernel; its machine code is made too."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {**POINTERS, **dict.fromkeys(FLOATS, "fp32"), **dict.fromkeys(constants, "constexpr")}
    if "words" in kernel.arg_names or "chunk" in kernel.arg_names:  # selected positions
        types["positions"] = "*i64"
    if "codes" in kernel.arg_names:
        types["limit"] = "i32"  # the bits of a scale
    types = {each.name: types.get(each.name, each.annotation_type or "i32") for each in kernel.params}
    assert all(param.is_constexpr or param.do_not_specialize for param in kernel.params)
    source = ASTSource(kernel, types, constants, {})
    compiled = triton.compile(source, GPUTarget("cuda", capability, WARP_SIZE), {**gpu.OPTIONS, **options})
    assert compiled.asm["cubin"]
    return str(compiled.asm["ptx"])


def main() -> None:
    """Write a line per kernel."""
    import triton.language as tl

    from lightning_lowbw.kernels import triton_kernels

    for capability, dtype_name in TARGETS.items():
        dtype = getattr(tl, dtype_name)
        kinds = {"G": dtype, "U": dtype, "W": dtype, "BLOCK": table.GPU_BLOCK}
        blocks = {"BLOCK": gpu.SELECT_BLOCK, "TENSORS": gpu.TENSORS}
        digits = [
            {"SHIFT": shift, "BITS": bits, "IS_FIRST": turn == 0, "WIDTH": gpu.BINS}
            for turn, (shift, bits) in enumerate(gpu.DIGITS)
        ]
        wide_options = {"num_warps": 8}
        for name, kernel, constants, options in (
            *(
                (f"correct{' for Adam' * is_adam}, {'un' * (not is_aligned)}aligned,", triton_kernels.correct_kernel,
                 {**kinds, "ADAM": is_adam, "ALIGNED": is_aligned}, wide_options)
                for is_adam in (False, True) for is_aligned in (True, False)
            ),
            ("order,", triton_kernels.order_kernel, {"BLOCK": gpu.ORDER_BLOCK}, {"num_warps": 1}),
            ("plan,", triton_kernels.plan_kernel, blocks, {}),
            ("digits, first,", triton_kernels.digits_kernel, {**digits[0], **blocks}, {}),
            ("digits, last,", triton_kernels.digits_kernel, {**digits[-1], **blocks}, {}),
            ("choose, first,", triton_kernels.choose_kernel, digits[0], {}),
            ("choose, last,", triton_kernels.choose_kernel, digits[-1], {}),
            ("count,", triton_kernels.count_kernel, blocks, {}),
            ("take,", triton_kernels.take_kernel, blocks, {}),
            ("ones,", triton_kernels.ones_kernel, {"BLOCK": gpu.WORDS_BLOCK}, {}),
            *(
                (f"{name}, {bits} bits,", kernel, {"V": dtype, "BITS": bits, **sizes}, {}) for bits in (0, 8, 2)
                for name, kernel, sizes in (
                    ("pack", triton_kernels.pack_kernel, {"BLOCK": gpu.PACK_BLOCK}),
                    ("unpack", triton_kernels.unpack_kernel, {"BLOCK": gpu.WORDS_BLOCK, "TENSORS": gpu.TENSORS}),
                )
            ),
            ("chunks,", triton_kernels.chunks_kernel, {"BLOCK": 4096}, {"num_warps": 8}),
            *(
                (f"apply, {over_senders},", triton_kernels.apply_kernel,
                 {"W": dtype, "MESSAGES": 64, "STEPS": True, "SENDERS": over_senders, "BLOCK": gpu.APPLY_BLOCK}, {})
                for over_senders in (False, True)
            ),
            *(
                (f"{name}, {code},", kernel, {**gpu._constants(code), "BLOCKS": gpu.BLOCKS, **more}, {})
                for code in (8, 4, torch.bfloat16, torch.float16)
                for name, kernel, more in (
                    ("encode", triton_kernels.encode_kernel, {}),
                    ("combine", triton_kernels.combine_kernel, {}),
                    ("decode", triton_kernels.decode_kernel, {"SHARES": False}),
                    ("decode shares", triton_kernels.decode_kernel, {"SHARES": True}),
                )
            ),
        ):  # fmt: skip
            if capability == OLDEST and kernel not in (triton_kernels.correct_kernel, triton_kernels.take_kernel):
                continue
            ptx = assembly(kernel, capability, constants, **options)
            wide = [name for name in ("ld.global.v4.b32", "st.global.v4.b32") if name in ptx]
            sys.stdout.write(f"sm_{capability} {dtype} {name} {' '.join(wide)}\n")


if __name__ == "__main__":
    main()
