"""Twins of `reference` for many tensors on a GPU: a fixed number of kernel launches, and no wait for the device.

`compress_many_`, whatever the number of tensors: correct and collect candidates (one launch per `Kind`), order them,
find the k-th magnitudes digit by digit, take. Thresholds and counts stay on the device; the host never waits. There is
one pass over all tensors: it reads the gradient, and reads and writes velocity and residual, 20 bytes per element of
float32, 24 with weight decay, 28 with Adam's second moment. If a threshold does not fit, the same kernels search the
whole tensor instead of its candidates, which reads five times 4 bytes per element more.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_lowbw.kernels.reference import (
    SCALED,
    Arrival,
    Code,
    Segment,
    largest_integer,
    largest_scale_bits,
    scales_end,
)
from lightning_lowbw.kernels.table import BINS, DIGITS, GPU_BLOCK, JoinedTable, Workspace, num_blocks_of
from lightning_lowbw.kernels.tensors import constant, upload

SELECT_BLOCK = GPU_BLOCK  # elements that a program of the selection processes at a time; `table` has room for no more
PROGRAMS_PER_PROCESSOR = 16  # of the selection, whose number of blocks the host does not know
LONGEST_CHUNK = 1 << 14  # elements that a program searches at once
TENSORS = 256  # tensors that a program looks at in one turn, to find its own
PACK_BLOCK = 1024  # elements that a program packs
WORDS_BLOCK = 64  # words that a program unpacks, 32 bits of each side by side
APPLY_BLOCK = 256  # elements of one participant in a tile that a program applies at a time
SENT_PER_TILE, LEAST_TILE_SHIFT = 128, 10  # elements of one participant: more elements are sent in more tiles
# Launches for means of 16 bits, each with a sixteenth of the elements in float32, but LEAST_RANGE at least.
NUM_RANGES, LEAST_RANGE = 16, 1 << 22
BLOCKS = GPU_BLOCK // SCALED  # blocks with one scale that a program codes
ORDER_BLOCK = 64  # candidates that a program copies at a time; in a block there are a handful
# Torch rounds twice in u.mul_(m).add_(g), so a multiply and an add must not become one instruction.
OPTIONS: dict[str, Any] = {"enable_fp_fusion": False}


class CodedValues(NamedTuple):
    """How the values of all tensors are coded, and where they are in a message.

    Attributes:
        code: a float type; or, for levels, the bits of a level and its sign.
        first: the place of the first float, in units of its own size; for levels the word with the first extremes.
        first_code: the byte where the codes of levels begin.
    """

    code: Code
    first: int
    first_code: int


def _kernels() -> Any:
    """Return the module of the kernels, which imports Triton: not every machine has it."""
    from lightning_lowbw.kernels import triton_kernels

    return triton_kernels


def compress_many_(segments: Sequence[Segment], *, masking: bool, workspace: Workspace) -> tuple[Tensor, Tensor]:
    """Correct, select and take all tensors at once; see `reference.compress_many_`.

    The reference selects the same elements. A threshold, `workspace.thresholds`, finds the candidates in the pass that
    corrects; it aims at twice k candidates, and the exact number of candidates and the k-th magnitude steer it. If
    there are too few or too many candidates, the whole tensor is searched. A tensor with a density above about a
    fiftieth is always searched, because the room for candidates is bounded (`table.MOST_ROOM`).

    Deviation: of a residual that has overflowed, which its fault tells, the largest finite number is sent.

    In place:
        the residuals, momentum buffers, second moments and faults; `workspace`.

    Args:
        segments: at least one, all on one device, with elements, and not cut into chunks; k is at least 1.
        masking: see `reference.take_`.
        workspace: the state between steps.

    Returns:
        See `reference.compress_many_`.
    """
    device = segments[0].residual.device
    with torch.cuda.device_of(segments[0].residual):
        workspace.update(segments)
        num_sent = sum(segment.num_sent for segment in segments)
        positions = torch.empty(num_sent, dtype=torch.int64, device=device)
        values = torch.empty(num_sent, dtype=torch.float32, device=device)
        _correct(workspace)
        _take(workspace, positions, values, masking)
    return positions, values


def _correct(w: Workspace) -> None:
    """Correct all tensors in place, and write down their candidates in the order of their positions."""
    kernels = _kernels()
    for kind, first, num_blocks in w.launches:
        types = zip("GUW", map(kernels.type_of, (kind.gradient, kind.momentum_buffer, kind.weight)), strict=True)
        kernels.correct_kernel[(num_blocks,)](
            w.table, w.factors, w.thresholds, w.owners, w.counting, w.block_counts, w.block_bases, w.positions,
            w.values, first, **dict(types), ADAM=kind.is_adam, ALIGNED=kind.is_aligned, BLOCK=GPU_BLOCK, num_warps=8,
            **OPTIONS,
        )  # fmt: skip
    block_ends = w.block_counts.cumsum(0)
    kernels.order_kernel[(w.owners.numel(),)](
        w.table, w.owners, w.counting, w.block_counts, w.block_bases, block_ends, w.positions, w.values,
        w.ordered_positions, w.ordered_values, BLOCK=ORDER_BLOCK, num_warps=1,
    )  # fmt: skip


def _take(w: Workspace, positions: Tensor, values: Tensor, masking: bool) -> None:
    """Take the k largest of each tensor."""
    kernels, num_tensors = _kernels(), w.num_tensors
    blocks = {"BLOCK": SELECT_BLOCK, "TENSORS": TENSORS}
    source = (w.table, w.counts, w.ordered_positions, w.ordered_values, w.ends, w.kth)
    grid = (min(w.owners.numel(), PROGRAMS_PER_PROCESSOR * _num_processors(w.table.device)),)
    kernels.plan_kernel[(1,)](w.table, w.counting, w.counts, w.ends, w.kth, w.left, num_tensors, **blocks)
    for turn, (shift, bits) in enumerate(DIGITS):
        digit = {"SHIFT": shift, "BITS": bits, "IS_FIRST": turn == 0, "WIDTH": BINS}
        kernels.digits_kernel[grid](*source, w.bins, num_tensors, **digit, **blocks)
        kernels.choose_kernel[(num_tensors,)](
            w.table, w.counts, w.thresholds, w.last_kth, w.kth, w.left, w.bins, **digit
        )
    kernels.count_kernel[grid](*source, *w.found, num_tensors, **blocks)
    # One flat scan: only differences inside of a row are read. Along rows it would run on a block for each row.
    ends = w.found.view(-1).cumsum(0, dtype=torch.int32).view_as(w.found)
    kernels.take_kernel[grid](
        *source, w.left, *w.found, *ends, positions, values, int(masking), num_tensors, **blocks, **OPTIONS,
    )  # fmt: skip


@cache
def _num_processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


def largest(values: Tensor, k: int, chunk: int, k_last: int) -> Tensor:
    """Return the positions of the k largest |values| of each chunk; see `reference.largest`: one launch."""
    num_full, rest = divmod(values.numel(), chunk)
    positions = torch.empty(num_full * k + (k_last if rest else 0), dtype=torch.int64, device=values.device)
    with torch.cuda.device_of(values):
        _kernels().chunks_kernel[(-(-values.numel() // chunk),)](
            values, positions, values.numel(), chunk, k, k_last, BLOCK=_next_power_of_2(chunk), num_warps=8
        )
    return positions


def _next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


def pack(
    positions: Tensor,
    values: Tensor,
    fields: Tensor,
    layout: tuple[int, int],
    longest: int,
    message: Tensor,
    coded: CodedValues,
    residuals: Sequence[Tensor] | None,
) -> None:
    """Write positions and values into a message: one launch. Twin of `payloads.codec.pack`.

    In place:
        `message`: the positions, and values that are floats; the residuals, to which rounding errors are added.

    Args:
        positions: int64, shape (elements,); see `payloads.codec.pack`.
        values: float32, of the same shape.
        fields: table of `Field`: int64, shape (tensors, columns).
        layout: low bits of an element, and bits of the unary part.
        longest: elements of the tensor that has most.
        message: int32, zeros, except levels, which have been written.
        coded: how values are coded, and where.
        residuals: one per tensor: float32, contiguous; None: rounding errors are lost.
    """
    addresses = [0] * len(fields) if residuals is None else [residual.data_ptr() for residual in residuals]
    with torch.cuda.device_of(positions):
        _kernels().pack_kernel[(-(-longest // PACK_BLOCK), len(fields))](
            fields, positions, values, constant(tuple(addresses), torch.int64, positions.device), message,
            coded.first, coded.first_code, *layout, torch.finfo(_types(coded.code)[0]).max,
            **_constants(coded.code), BLOCK=PACK_BLOCK, **OPTIONS,
        )  # fmt: skip


def unpack(
    messages: Tensor,
    fields: Tensor,
    layout: tuple[int, int],
    window: tuple[int, int],
    num_elements: int,
    coded: CodedValues,
) -> tuple[Tensor, Tensor]:
    """Read positions and values of some tensors in several messages. Twin of `payloads.codec.unpack`.

    Positions outside of their tensors, for which its twin raises an error, are clamped: the next kernel writes there.

    Args:
        messages: int32, shape (messages, words), whose rows are contiguous.
        fields: see `pack`; for the tensors that are read.
        layout: see `pack`.
        window: where in the unary part their bits begin and end.
        num_elements: elements of all these tensors together, in each message.
        coded: how the values of all tensors are coded, and where they are.

    Returns:
        int32 and float32, both of shape (messages, num_elements).
    """
    shape = len(messages), num_elements
    positions = torch.empty(shape, dtype=torch.int32, device=messages.device)
    values = torch.empty(shape, dtype=torch.float32, device=messages.device)
    if not num_elements:
        return positions, values
    num_blocks = -(-(-(-window[1] // 32) - window[0] // 32) // WORDS_BLOCK)
    grid, stride = (num_blocks, len(messages)), messages.stride(0)
    num_ones = torch.empty(num_blocks * len(messages), dtype=torch.int32, device=messages.device)
    with torch.cuda.device_of(messages):
        _kernels().ones_kernel[grid](messages, num_ones, stride, *window, BLOCK=WORDS_BLOCK)
        _kernels().unpack_kernel[grid](
            fields, messages, num_ones, num_ones.cumsum(0), positions, values, stride,
            num_elements, coded.first, coded.first_code, *layout, *window, len(fields), **_constants(coded.code),
            BLOCK=WORDS_BLOCK, TENSORS=TENSORS,
        )  # fmt: skip
    return positions, values


def average_many_(
    arrivals: Sequence[Arrival], positions: Tensor, values: Tensor, *, over_senders: bool = False
) -> None:
    """Average the elements of all participants for several tensors, or step weights by the mean: one launch.

    See `reference.average_many_`; the same bits, but for the sign of a zero. Means of 16 bits take about `NUM_RANGES`
    launches, which sum in one workspace. Over senders the values are used up. torch's `index_add_` on CUDA is
    deterministic as well here, because its atomic adds never collide; but it needs launches per participant and tensor.
    """
    outs, groups, firsts, counts, weights, rates = zip(*arrivals, strict=True)
    dtype, device, steps = outs[0].dtype, positions.device, weights[0] is not None
    _, num_messages, num_elements = positions.shape
    # By the order of magnitude: a warm-up changes the density.
    shapes = tuple(zip(map(Tensor.numel, outs), (1 << count.bit_length() for count in counts), strict=True))
    owners = _tile_owners(shapes, device)
    ranges, addresses = [(0, len(owners), 0)], [each.data_ptr() for each in outs]
    if is_half := dtype != torch.float32:
        ranges, places, most = _ranges(shapes)
        workspace = torch.empty(most, dtype=torch.float32, device=device)
        addresses = [workspace.data_ptr() + workspace.itemsize * place for place in places]
        weights, rates = outs, (-1.0,) * len(outs)  # of zeros
    bits = {rate: int.from_bytes(struct.pack("<f", rate), "little", signed=True) for rate in set(rates)}
    stepped = [weight.data_ptr() for weight in weights] if steps or is_half else [0] * len(outs)
    # In the order of `table.ArrivalRow`.
    columns = addresses, stepped, groups, firsts, counts, *zip(*_tiles(shapes)[0], strict=True), map(bits.get, rates)
    turns = max(counts).bit_length()
    with torch.cuda.device_of(positions):
        if not steps:
            torch._foreach_zero_(outs)
        # Gradients mostly lie where they have been before, as does the workspace.
        table = constant(tuple(zip(*columns, strict=True)), torch.int64, device)
        for first_tile, num_tiles, first_place in ranges:
            _kernels().apply_kernel[(num_tiles,)](
                table, owners, positions, values, num_messages, num_elements, turns,
                1.0 if over_senders else 1.0 / num_messages, first_tile, first_place,
                W=_kernels().type_of(dtype), MESSAGES=_next_power_of_2(num_messages),
                STEPS=steps or is_half, SENDERS=over_senders, BLOCK=APPLY_BLOCK, **OPTIONS,
            )  # fmt: skip


@lru_cache(maxsize=64)
def _tiles(shapes: tuple[tuple[int, int], ...]) -> tuple[list[tuple[int, int]], list[int]]:
    """Return for each tensor the size of its tiles (as a shift) and its first tile; and its number of tiles.

    Args:
        shapes: for each tensor its elements, and about how many elements are sent.
    """
    shifts = [max(LEAST_TILE_SHIFT, (numel * SENT_PER_TILE // count).bit_length() - 1) for numel, count in shapes]
    numbers = [-(-numel // (1 << shift)) for (numel, _), shift in zip(shapes, shifts, strict=True)]
    return list(zip(shifts, accumulate(numbers, initial=0), strict=False)), numbers


@lru_cache(maxsize=64)
def _ranges(shapes: tuple[tuple[int, int], ...]) -> tuple[list[tuple[int, int, int]], list[int], int]:
    """Return ranges of tiles (the first tile, the number of tiles, the elements before them), the elements before each
    tensor, and the elements of the largest range."""
    tiles, numbers = _tiles(shapes)
    *places, total = accumulate((numel for numel, _ in shapes), initial=0)
    of_tensors = zip(places, tiles, numbers, strict=True)
    starts = [place + (tile << shift) for place, (shift, _), number in of_tensors for tile in range(number)] + [total]
    ranges, first, most = [], 0, max(LEAST_RANGE, total // NUM_RANGES)
    while starts[first] < total:
        end = max(first + 1, bisect_right(starts, starts[first] + most) - 1)
        ranges.append((first, end - first, starts[first]))
        first = end
    return ranges, places, max(starts[first + number] - place for first, number, place in ranges)


@lru_cache(maxsize=64)
def _tile_owners(shapes: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    numbers = _tiles(shapes)[1]
    return upload([owner for owner, number in enumerate(numbers) for _ in range(number)], torch.int32, device)


def encode_(table: JoinedTable, message: Tensor, size: int, code: Code, flags: Tensor) -> None:
    """Write signals plus residuals, all tensors as one vector, into a message; keep the rounding errors: one launch.

    Twin of `payloads.quantized.InRanges`.

    In place:
        The message; the residuals, if the table has some; the flags of tensors with an inf or NaN, and the last flag if
        a residual has one.

    Args:
        table: the signals and residuals; beyond the end of the vector are zeros.
        message: uint8, shape (rows, bytes of `size` values), with rows next to each other.
        size: elements of a row.
        code: of the values.
        flags: bool, shape (tensors + 1,).
    """
    with torch.cuda.device_of(message):
        _kernels().encode_kernel[num_blocks_of(size), len(message)](
            table.table, table.spans(len(message), size), message, flags.view(torch.uint8), len(table.rows), size,
            message.stride(0), *_numbers(size, code), **_constants(code), BLOCKS=BLOCKS, **OPTIONS,
        )  # fmt: skip


def combine_(
    table: JoinedTable, received: Tensor, answer: Tensor, row: int, size: int, code: Code, flags: Tensor
) -> None:
    """Average the messages about a row of the vector, in their order, and write the mean: one launch.

    In place:
        The answer: uint8, one row. The residuals of the row, to which rounding errors are added times the number of
        messages, because residuals enter the mean divided by it; the last flag.

    Args:
        received: uint8, shape (messages, bytes of a row).
        row: of the vector.
        table, size, code, flags: see `encode_`.
    """
    with torch.cuda.device_of(answer):
        _kernels().combine_kernel[num_blocks_of(size), 1](
            table.table, table.spans(len(received), size), received, answer, flags.view(torch.uint8), len(table.rows),
            len(received), row, size, received.stride(0), *_numbers(size, code), **_constants(code), BLOCKS=BLOCKS,
            **OPTIONS,
        )  # fmt: skip


def decode_(table: JoinedTable, messages: Tensor, size: int, code: Code, *, num_messages: int) -> None:
    """Read the rows of a vector, or the mean of several messages about each row, into the signals: one launch.

    Args:
        messages: uint8, shape (rows times num_messages, bytes of a row); the messages about a row are adjacent.
        code: see `encode_`; also float32.
        num_messages: about each row.
        table, size: see `encode_`.
    """
    num_rows = len(messages) // num_messages
    with torch.cuda.device_of(messages):
        _kernels().decode_kernel[num_blocks_of(size), num_rows](
            table.table, table.spans(num_rows, size), messages, num_messages, 1.0 / num_messages, size,
            messages.stride(0), scales_end(size), **_constants(code), SHARES=num_messages > 1, BLOCKS=BLOCKS, **OPTIONS,
        )  # fmt: skip


def _numbers(size: int, code: Code) -> tuple[int, float, int, float]:
    """Return where integers begin, the largest number, the bits of the largest scale, and the least unit."""
    if isinstance(code, torch.dtype):
        return 0, torch.finfo(code).max, 0, 0.0
    return scales_end(size), float(largest_integer(code)), largest_scale_bits(code), torch.finfo(torch.float32).tiny


def _types(code: Code) -> tuple[torch.dtype, int]:
    """Return the dtype of values that are floats, and the bits of integers and levels; 0 for floats."""
    return (code, 0) if isinstance(code, torch.dtype) else (torch.float32, code)


def _constants(code: Code) -> dict[str, Any]:
    """Return what the kernels of a code are compiled for."""
    dtype, bits = _types(code)
    return {"V": _kernels().type_of(dtype), "BITS": bits}
