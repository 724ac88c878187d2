"""Device code of `gpu`, which launches it. Imported there inside of functions: Triton is not on every machine.

Every kernel runs over all tensors at once. A table in device memory, one row per tensor (`table.Row`), holds their
addresses and sizes, so the number of launches does not depend on the number of tensors. Triton's interpreter runs the
same code on a CPU.
"""

# mypy: ignore-errors
# No `from __future__ import annotations`: Triton reads the annotations as objects.

import triton
import triton.language as tl

from lightning_lowbw.ops.table import Row

NUM_COLUMNS = tl.constexpr(len(Row._fields))
RESIDUAL = tl.constexpr(Row._fields.index("residual"))
MOMENTUM_BUFFER = tl.constexpr(Row._fields.index("momentum_buffer"))
GRADIENT = tl.constexpr(Row._fields.index("gradient"))
WEIGHT = tl.constexpr(Row._fields.index("weight"))
MOMENTUM_ITEMSIZE = tl.constexpr(Row._fields.index("momentum_itemsize"))
IS_NESTEROV = tl.constexpr(Row._fields.index("is_nesterov"))
NUMEL = tl.constexpr(Row._fields.index("numel"))
K = tl.constexpr(Row._fields.index("k"))
AIM = tl.constexpr(Row._fields.index("aim"))
CAPACITY = tl.constexpr(Row._fields.index("capacity"))
STRIDE = tl.constexpr(Row._fields.index("stride"))
FIRST_BLOCK = tl.constexpr(Row._fields.index("first_block"))
FIRST_CANDIDATE = tl.constexpr(Row._fields.index("first_candidate"))
FIRST_OUTPUT = tl.constexpr(Row._fields.index("first_output"))


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """Round float32 to a narrower dtype and back, to nearest even.

    bfloat16 by hand: Triton's interpreter cuts it off instead.
    """
    if dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        result = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    else:
        result = x.to(dtype).to(tl.float32)
    return result


@triton.jit
def pointers(row, column, offsets, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """Return pointers to elements of a tensor of a row; ALIGNED: see `table.Kind`."""
    result = tl.load(row + column).to(tl.pointer_type(dtype)) + offsets
    if ALIGNED:
        # What comes from a table could start anywhere: without hints there are no loads of 16 bytes.
        result = tl.multiple_of(result, 16)
    return result


@triton.jit
def corrected(row, factors, offsets, inside, G: tl.constexpr, U: tl.constexpr, W: tl.constexpr, ALIGNED: tl.constexpr):
    """Return v and u after `reference.correct_`, with its roundings; G, U, W: dtypes of gradient, buffer, weight."""
    momentum = tl.load(factors)
    weight_decay = tl.load(factors + 1)
    sign = tl.load(factors + 2)
    # Where there is no buffer or no weight, its address is 0: it reads as zeros.
    has_buffer = tl.load(row + MOMENTUM_BUFFER) != 0
    has_weight = tl.load(row + WEIGHT) != 0
    g = tl.load(pointers(row, GRADIENT, offsets, G, ALIGNED), mask=inside, other=0.0).to(tl.float32)
    w = tl.load(pointers(row, WEIGHT, offsets, W, ALIGNED), mask=inside & has_weight, other=0.0).to(tl.float32)
    u = tl.load(pointers(row, MOMENTUM_BUFFER, offsets, U, ALIGNED), mask=inside & has_buffer, other=0.0)
    v = tl.load(pointers(row, RESIDUAL, offsets, tl.float32, ALIGNED), mask=inside, other=0.0)
    # Multiply and add are fused where torch's own add with alpha does so, and nowhere else (see `gpu.OPTIONS`).
    g = tl.fma(w, weight_decay, g * sign)  # in float32: c w is lost in a narrow G
    u = rounded(rounded(u.to(tl.float32) * momentum, U) + g, U)
    v = tl.where(tl.load(row + IS_NESTEROV) != 0, tl.fma(u, momentum, v + g), v + u)
    return v, u


@triton.jit
def sample_kernel(
    table, factors, tensors, samples, width,
    G: tl.constexpr, U: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write corrected magnitudes at strided positions: samples[i] of tensor tensors[i]; zeros behind its end.

    Grid: (tensors, width / BLOCK).
    """
    number = tl.program_id(0)
    tensor = tl.load(tensors + number)
    row = table + tensor * NUM_COLUMNS
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    offsets = lanes.to(tl.int64) * tl.load(row + STRIDE)
    v, _u = corrected(row, factors + tensor * 3, offsets, offsets < tl.load(row + NUMEL), G, U, W, False)
    tl.store(samples + number.to(tl.int64) * width + lanes, tl.abs(v))


@triton.jit(do_not_specialize=["first"])
def correct_kernel(
    table, factors, thresholds, owners, counts, block_counts, block_bases, positions, values, first,
    G: tl.constexpr, U: tl.constexpr, W: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Correct a block in place, and append its candidates to those of its tensor.

    The blocks of a tensor append in any order; `block_bases` and `block_counts` say where each has come to lie.
    `counts` goes on counting when the capacity is used up.

    Grid: (blocks of one group, the first of which is `first`,).
    """
    block = first + tl.program_id(0)
    tensor = tl.load(owners + block)
    row = table + tensor * NUM_COLUMNS
    # int64: the last block of the largest tensor ends beyond int32
    offsets = (block - tl.load(row + FIRST_BLOCK)) * BLOCK + tl.arange(0, BLOCK)
    numel = tl.load(row + NUMEL)
    if ALIGNED:
        numel = tl.multiple_of(numel, 8)  # no load is cut in two by the end
    inside = offsets < numel
    v, u = corrected(row, factors + tensor * 3, offsets, inside, G, U, W, ALIGNED)
    tl.store(pointers(row, RESIDUAL, offsets, tl.float32, ALIGNED), v, mask=inside)
    has_buffer = tl.load(row + MOMENTUM_BUFFER) != 0
    tl.store(pointers(row, MOMENTUM_BUFFER, offsets, U, ALIGNED), u.to(U), mask=inside & has_buffer)

    threshold = tl.load(thresholds + tensor)
    threshold = tl.where(threshold > 0, threshold, float("inf"))  # 0: none is known
    is_candidate = inside & (tl.abs(v) >= threshold)
    ones = is_candidate.to(tl.int32)
    count = tl.sum(ones, 0)
    base = tl.atomic_add(counts + tensor, count, sem="relaxed")
    tl.store(block_counts + block, count)
    tl.store(block_bases + block, base)
    slots = base + tl.cumsum(ones, 0) - 1
    fits = is_candidate & (slots < tl.load(row + CAPACITY))
    targets = tl.load(row + FIRST_CANDIDATE) + slots
    tl.store(positions + targets, offsets.to(tl.int32), mask=fits)
    tl.store(values + targets, v, mask=fits)


@triton.jit
def order_kernel(
    table, owners, counts, block_counts, block_bases, block_ends, positions, values, ordered_positions,
    ordered_values, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy candidates into the order of their positions, which no longer depends on the order of the appends.

    Grid: (all blocks,). `block_ends` is the running sum of `block_counts`.
    """
    block = tl.program_id(0)
    tensor = tl.load(owners + block)
    row = table + tensor * NUM_COLUMNS
    if tl.load(counts + tensor) <= tl.load(row + CAPACITY):
        count = tl.load(block_counts + block)
        first_block = tl.load(row + FIRST_BLOCK)
        before = tl.load(block_ends + first_block) - tl.load(block_counts + first_block)
        source = tl.load(row + FIRST_CANDIDATE) + tl.load(block_bases + block)
        target = tl.load(row + FIRST_CANDIDATE) + tl.load(block_ends + block) - count - before
        for start in range(0, count, BLOCK):
            lanes = start + tl.arange(0, BLOCK)
            inside = lanes < count
            position = tl.load(positions + source + lanes, mask=inside, other=0)
            tl.store(ordered_positions + target + lanes, position, mask=inside)
            value = tl.load(values + source + lanes, mask=inside, other=0.0)
            tl.store(ordered_values + target + lanes, value, mask=inside)


@triton.jit
def take_kernel(
    table, tensors, counts, thresholds, positions, values, sent_positions, sent_values, limit,
    V: tl.constexpr, MASKING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Take the k largest of a tensor's candidates (`reference.take_`) and steer its threshold by their number: along
    the power law through the threshold and the k-th magnitude, as `what.selection.SampledSelector` does.

    The k-th magnitude is found by its bits, four at a time: floats that are not negative are in the order of
    their bits. A tensor that has too few or too many candidates is left as it is.

    Grid: (tensors,); candidates are in the order of their positions.
    """
    tensor = tl.load(tensors + tl.program_id(0))
    row = table + tensor * NUM_COLUMNS
    count = tl.load(counts + tensor)
    k = tl.load(row + K)
    if (count >= k) & (count <= tl.load(row + CAPACITY)):
        positions += tl.load(row + FIRST_CANDIDATE)
        values += tl.load(row + FIRST_CANDIDATE)
        digits = tl.arange(0, 16).to(tl.uint32)
        kth = tl.full([], 0, tl.uint32)
        for turn in range(8):
            shift = 28 - 4 * turn
            trials = kth + (digits << shift)
            reached = tl.zeros([16], tl.int32)
            for start in range(0, count, BLOCK):
                lanes = start + tl.arange(0, BLOCK)
                inside = lanes < count
                bits = tl.abs(tl.load(values + lanes, mask=inside, other=0.0)).to(tl.uint32, bitcast=True)
                reached += tl.sum(((bits[:, None] >= trials[None, :]) & inside[:, None]).to(tl.int32), 0)
            # The first trial, the digit 0, is always reached by k.
            kth += (tl.sum((reached >= k).to(tl.int32), 0) - 1).to(tl.uint32) << shift
        greater = tl.full([], 0, tl.int32)
        for start in range(0, count, BLOCK):
            lanes = start + tl.arange(0, BLOCK)
            inside = lanes < count
            bits = tl.abs(tl.load(values + lanes, mask=inside, other=0.0)).to(tl.uint32, bitcast=True)
            greater += tl.sum((inside & (bits > kth)).to(tl.int32), 0)

        residual = tl.load(row + RESIDUAL).to(tl.pointer_type(tl.float32))
        buffer = tl.load(row + MOMENTUM_BUFFER)
        itemsize = tl.load(row + MOMENTUM_ITEMSIZE)
        num_taken = tl.load(row + FIRST_OUTPUT)
        num_ties = tl.full([], 0, tl.int32)
        for start in range(0, count, BLOCK):
            lanes = start + tl.arange(0, BLOCK)
            inside = lanes < count
            position = tl.load(positions + lanes, mask=inside, other=0)
            exact = tl.load(values + lanes, mask=inside, other=0.0)
            bits = tl.abs(exact).to(tl.uint32, bitcast=True)
            is_tie = inside & (bits == kth)
            tie = num_ties + tl.cumsum(is_tie.to(tl.int32), 0)
            is_taken = (inside & (bits > kth)) | (is_tie & (tie <= k - greater))
            slots = num_taken + tl.cumsum(is_taken.to(tl.int32), 0) - 1
            value = rounded(tl.minimum(tl.maximum(exact, -limit), limit), V)
            tl.store(sent_positions + slots, position.to(tl.int64), mask=is_taken)
            tl.store(sent_values + slots, value.to(V), mask=is_taken)
            tl.store(residual + position, exact - value, mask=is_taken)
            if MASKING:
                is_sent = is_taken & (value != 0)
                wide = buffer.to(tl.pointer_type(tl.int32)) + position
                narrow = buffer.to(tl.pointer_type(tl.int16)) + position
                tl.store(wide, tl.zeros([BLOCK], tl.int32), mask=is_sent & (itemsize == 4))
                tl.store(narrow, tl.zeros([BLOCK], tl.int16), mask=is_sent & (itemsize == 2))
            num_ties += tl.sum(is_tie.to(tl.int32), 0)
            num_taken += tl.sum(is_taken.to(tl.int32), 0)

        least = kth.to(tl.float32, bitcast=True)
        threshold = tl.load(thresholds + tensor)
        if (count > k) & (threshold > 0) & (least > threshold):
            reached = count.to(tl.float32)
            exponent = tl.log2(least / threshold) / tl.log2(reached / k.to(tl.float32))
            surplus = tl.log2(reached / tl.load(row + AIM).to(tl.float32))
            tl.store(thresholds + tensor, threshold * tl.exp2(exponent * surplus))


@triton.jit(do_not_specialize=["numel"])
def scatter_kernel(addresses, owners, positions, values, numel, scale, BLOCK: tl.constexpr):
    """Add one rank's values, times `scale`, to float32 tensors. Positions in a tensor are distinct: no two lanes of
    this launch meet, and launches run one after the other."""
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < numel
    address = tl.load(addresses + tl.load(owners + lanes, mask=inside, other=0), mask=inside, other=0)
    position = tl.load(positions + lanes, mask=inside, other=0)
    targets = address.to(tl.pointer_type(tl.float32)) + position
    addend = tl.load(values + lanes, mask=inside, other=0.0).to(tl.float32) * scale
    tl.store(targets, tl.load(targets, mask=inside, other=0.0) + addend, mask=inside)
