"""Device code of `gpu`, which launches it. Imported there inside of functions: Triton is not on every machine.

Every kernel runs over all tensors at once. A table in device memory, one row per tensor (`table.TableRow`), holds their
addresses and sizes, so the number of launches does not depend on the number of tensors. Triton's interpreter runs the
same code on a CPU.
"""

# mypy: ignore-errors
# No `from __future__ import annotations`: Triton reads the annotations as objects.

import inspect

import triton
import triton.language as tl

from lightning_lowbw.kernels import reference, table
from lightning_lowbw.kernels.reference import Factors
from lightning_lowbw.kernels.table import ArrivalRow, Field, JoinedRow, TableRow


def columns(of):
    """Return the numbers of a table's columns, in their order, and how many there are."""
    return [tl.constexpr(number) for number in range(len(of._fields) + 1)]


# fmt: off
(RESIDUAL, MOMENTUM_BUFFER, GRADIENT, WEIGHT, SQUARE, LARGEST, FAULT, MOMENTUM_ITEMSIZE, IS_NESTEROV, NUMEL, K, AIM,
 CAPACITY, FIRST_BLOCK, FIRST_CANDIDATE, FIRST_OUTPUT, NUM_COLUMNS) = columns(TableRow)
(MOMENTUM, WEIGHT_DECAY, AHEAD, SIGN, UNDAMPED, BETA2, OF_SQUARE, SLOPE, LEAST, NUM_FACTORS) = columns(Factors)
FIELD_NUM_SENT, FIELD_FIRST, FIELD_START, FIELD_NUMEL, FIELD_FIRST_BLOCK, FIELD_COLUMNS = columns(Field)
(ARRIVAL_OUT, ARRIVAL_WEIGHT, ARRIVAL_GROUP, ARRIVAL_FIRST, ARRIVAL_NUM_SENT, ARRIVAL_SHIFT, ARRIVAL_FIRST_TILE,
 ARRIVAL_RATE, ARRIVAL_COLUMNS) = columns(ArrivalRow)
JOINED_SIGNAL, JOINED_RESIDUAL, JOINED_START, JOINED_NUMEL, JOINED_DTYPE, JOINED_COLUMNS = columns(JoinedRow)
# fmt: on

LEVELS_SHIFT = tl.constexpr(table.LEVELS_SHIFT)
FOLLOWED = tl.constexpr(table.FOLLOWED)
LARGEST_FINITE = tl.constexpr((2 - 2.0**-23) * 2.0**127)  # of float32


def type_of(dtype):
    """Return Triton's name of a dtype of torch."""
    return getattr(tl, str(dtype).removeprefix("torch."))


def kernel(function):
    """Let Triton compile a kernel for each set of constexprs and dtypes, and for nothing else.

    By default it also does so for integers that are 1 or a multiple of 16, and for pointers to 16 bytes. Those of
    messages change with the density: a kernel would be compiled in the middle of a training, on one rank alone perhaps.
    """
    parameters = inspect.signature(function).parameters.values()
    return triton.jit(function, do_not_specialize=[p.name for p in parameters if p.annotation is not tl.constexpr])


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
        # An address from a table could be any number: without hints there are no loads of 16 bytes.
        result = tl.multiple_of(result, 16)
    return result


@kernel
def correct_kernel(
    table, factors, thresholds, owners, counts, block_counts, block_bases, positions, values, first,
    G: tl.constexpr, U: tl.constexpr, W: tl.constexpr, ADAM: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Do `reference.accumulate_` to a block, with its roundings, and append its candidates to its tensor's candidates.

    The blocks of a tensor append in any order; `block_bases` and `block_counts` say where each has come to lie.
    `counts` goes on counting when the capacity is used up.

    G, U, W: dtypes of gradient, buffer (and second moment), weight; ADAM: whether there are second moments.

    Grid: (blocks of one kind,), from `first` on.
    """
    block = first + tl.program_id(0)
    tensor = tl.load(owners + block)
    row = table + tensor * NUM_COLUMNS
    factors += tensor * NUM_FACTORS
    # int64: the last block of the largest tensor ends beyond int32
    offsets = (block - tl.load(row + FIRST_BLOCK)) * BLOCK + tl.arange(0, BLOCK)
    numel = tl.load(row + NUMEL)
    if ALIGNED:
        numel = tl.multiple_of(numel, 8)  # no load is cut in two by the end
    inside = offsets < numel
    momentum = tl.load(factors + MOMENTUM)
    # A missing buffer, weight or flag has the address 0: it reads as zeros, and is not written. Another part
    # (`reference.OtherPart`) has no residual.
    has_residual = tl.load(row + RESIDUAL) != 0
    has_buffer = tl.load(row + MOMENTUM_BUFFER) != 0
    has_weight = tl.load(row + WEIGHT) != 0
    has_fault = tl.load(row + FAULT) != 0
    g = tl.load(pointers(row, GRADIENT, offsets, G, ALIGNED), mask=inside, other=0.0).to(tl.float32)
    w = tl.load(pointers(row, WEIGHT, offsets, W, ALIGNED), mask=inside & has_weight, other=0.0).to(tl.float32)
    u = tl.load(pointers(row, MOMENTUM_BUFFER, offsets, U, ALIGNED), mask=inside & has_buffer, other=0.0)
    v = tl.load(pointers(row, RESIDUAL, offsets, tl.float32, ALIGNED), mask=inside & has_residual, other=0.0)
    is_bad = (has_fault | (has_residual == 0)) & ((tl.abs(g) == float("inf")) | (g != g))
    g = tl.where(is_bad, 0.0, g)
    # Multiply and add are fused where torch's own add with alpha does so, and nowhere else (see `gpu.OPTIONS`).
    g = tl.fma(w, tl.load(factors + WEIGHT_DECAY), g * tl.load(factors + SIGN))  # in float32: c w is lost in a narrow G
    ahead = tl.fma(v, -tl.load(factors + AHEAD), g)
    u = rounded(tl.fma(ahead, tl.load(factors + UNDAMPED), rounded(u.to(tl.float32) * momentum, U)), U)
    if ADAM:
        has_largest = tl.load(row + LARGEST) != 0
        square_pointers = pointers(row, SQUARE, offsets, U, ALIGNED)
        q = tl.load(square_pointers, mask=inside, other=0.0).to(tl.float32) * tl.load(factors + BETA2)
        q += tl.load(factors + OF_SQUARE) * g * g
        tl.store(square_pointers, rounded(q, U).to(U), mask=inside)
        largest_pointers = pointers(row, LARGEST, offsets, U, ALIGNED)
        largest = tl.load(largest_pointers, mask=inside & has_largest, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, rounded(q, U))
        tl.store(largest_pointers, largest.to(U), mask=inside & has_largest)
        q = tl.where(has_largest, largest, q)
        s = tl.sqrt_rn(q) * tl.load(factors + SLOPE) + tl.load(factors + LEAST)
        v += tl.div_rn(u, tl.where(inside, s, 1.0))
    else:
        v = tl.where(tl.load(row + IS_NESTEROV) != 0, tl.fma(u, momentum, v + ahead), v + u)
    num_bad = tl.sum((is_bad | (tl.abs(v) == float("inf")) | (v != v)).to(tl.int32), 0)
    tl.store(tl.load(row + FAULT).to(tl.pointer_type(tl.int8)), 1, mask=(num_bad > 0) & has_fault)
    tl.store(pointers(row, RESIDUAL, offsets, tl.float32, ALIGNED), v, mask=inside & has_residual)
    tl.store(pointers(row, MOMENTUM_BUFFER, offsets, U, ALIGNED), u.to(U), mask=inside & has_buffer)

    threshold = tl.load(thresholds + tensor)
    threshold = tl.where(threshold > 0, threshold, float("inf"))  # 0: none is known
    is_candidate = inside & has_residual & (tl.abs(v) >= threshold)
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


@kernel
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
def has_candidates(row, count):
    """Return whether a tensor's largest elements are among its candidates; else the whole tensor is searched."""
    return (count >= tl.load(row + K)) & (count <= tl.load(row + CAPACITY))


@kernel
def plan_kernel(table, counting, counts, ends, kth, left, num_tensors, BLOCK: tl.constexpr, TENSORS: tl.constexpr):
    """Divide the selection into blocks: the first `ends[t]` blocks belong to the tensors up to t.

    Grid: (1,). `counts` becomes `counting`, which becomes zeros for the next step. `kth` and `left` become the start of
    `choose_kernel`: no digit is known, and k elements are wanted. A turn looks at TENSORS tensors: so another number of
    tensors needs no other variant.
    """
    total = tl.full([], 0, tl.int64)
    for start in range(0, num_tensors, TENSORS):
        tensors = start + tl.arange(0, TENSORS)
        exists = tensors < num_tensors
        rows = table + tensors * NUM_COLUMNS
        count = tl.load(counting + tensors, mask=exists, other=0)
        tl.store(counts + tensors, count, mask=exists)
        tl.store(counting + tensors, 0, mask=exists)
        k = tl.load(rows + K, mask=exists, other=0)
        is_short = (count >= k) & (count <= tl.load(rows + CAPACITY, mask=exists, other=0))
        length = tl.where(is_short, count, tl.load(rows + NUMEL, mask=exists, other=0))
        num_blocks = (length + BLOCK - 1) // BLOCK
        tl.store(ends + tensors, total + tl.cumsum(num_blocks, 0), mask=exists)
        total += tl.sum(num_blocks, 0)
        tl.store(kth + tensors, 0, mask=exists)
        tl.store(left + tensors, k.to(tl.int32), mask=exists)


@triton.jit
def owner_of(work, ends, num_tensors, TENSORS: tl.constexpr):
    """Return the tensor of a block of the selection, the first block of this tensor, and the end of its blocks."""
    num_before = tl.zeros([TENSORS], tl.int32)
    firsts = tl.zeros([TENSORS], tl.int64)
    after = tl.full([TENSORS], 9223372036854775807, tl.int64)
    for start in range(0, num_tensors, TENSORS):
        tensors = start + tl.arange(0, TENSORS)
        end = tl.load(ends + tensors, mask=tensors < num_tensors, other=9223372036854775807)
        num_before += (end <= work).to(tl.int32)
        firsts = tl.maximum(firsts, tl.where(end <= work, end, 0))
        after = tl.minimum(after, tl.where(end <= work, 9223372036854775807, end))
    return tl.sum(num_before, 0), tl.max(firsts, 0), tl.min(after, 0)


@triton.jit
def own_share(ends, num_tensors):
    """Return the first block of the selection that this program takes, and the end of its adjacent blocks."""
    total = tl.load(ends + num_tensors - 1)
    share = (total + tl.num_programs(0) - 1) // tl.num_programs(0)
    start = tl.program_id(0) * share
    return start, tl.minimum(start + share, total)


@triton.jit
def looked_at(block, row, count, positions, values, BLOCK: tl.constexpr):
    """Return the positions and values of a block of the tensor's candidates, or of the whole tensor; and a mask.

    `block` is counted in its tensor.
    """
    is_short = has_candidates(row, count)
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < tl.where(is_short, count, tl.load(row + NUMEL))
    candidates = tl.load(row + FIRST_CANDIDATE) + offsets
    residual = tl.load(row + RESIDUAL).to(tl.pointer_type(tl.float32)) + offsets
    short = tl.load(values + candidates, mask=inside & is_short, other=0.0)
    whole = tl.load(residual, mask=inside & (is_short == 0), other=0.0)
    position = tl.load(positions + candidates, mask=inside & is_short, other=0)
    return tl.where(is_short, position, offsets), tl.where(is_short, short, whole), inside


@triton.jit
def magnitude_bits(values):
    """Return |values| as integers: floats that are not negative are in the order of their bits."""
    return tl.abs(values).to(tl.int32, bitcast=True)


@kernel
def digits_kernel(
    table, counts, positions, values, ends, kth, bins, num_tensors,
    SHIFT: tl.constexpr, BITS: tl.constexpr, IS_FIRST: tl.constexpr, BLOCK: tl.constexpr, TENSORS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Count the digits of magnitudes, BITS bits from bit SHIFT on, if their higher bits are equal to the bits of `kth`.

    All elements have a first digit, and the first digits are much the same: a program adds up the histograms of its
    blocks before it writes them. Few elements have the known digits, and they differ in the next digit: each is added
    by itself, without a histogram of 2^BITS bins in every block; or all elements of a block at once if their digits are
    equal, as with zeros.

    Grid: (any number,). `bins`: shape (tensors, WIDTH), zeros before.
    """
    digits = tl.arange(0, 1 << BITS)
    start, stop = own_share(ends, num_tensors)
    tensor, first, end = tl.full([], 0, tl.int32), tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    found = tl.zeros([1 << BITS], tl.int32)
    for work in range(start, stop):
        if work >= end:
            if IS_FIRST:
                tl.atomic_add(bins + tensor * WIDTH + digits, found, mask=found > 0, sem="relaxed")
                found = tl.zeros([1 << BITS], tl.int32)
            tensor, first, end = owner_of(work, ends, num_tensors, TENSORS)
        row = table + tensor * NUM_COLUMNS
        count = tl.load(counts + tensor)
        _, value, inside = looked_at(work - first, row, count, positions, values, BLOCK)
        bits = magnitude_bits(value)
        if IS_FIRST:
            found += tl.histogram(tl.where(inside, bits >> SHIFT, 0), 1 << BITS)
            found -= tl.where(digits == 0, BLOCK - tl.sum(inside.to(tl.int32), 0), 0)
        else:
            inside = inside & ((bits ^ tl.load(kth + tensor)) >> (SHIFT + BITS) == 0)
            digit = (bits >> SHIFT) & ((1 << BITS) - 1)
            least = tl.min(tl.where(inside, digit, 1 << BITS), 0)
            most = tl.max(tl.where(inside, digit, -1), 0)
            if least == most:
                tl.atomic_add(bins + tensor * WIDTH + least, tl.sum(inside.to(tl.int32), 0), sem="relaxed")
            elif least < most:
                ones = tl.full([BLOCK], 1, tl.int32)
                tl.atomic_add(bins + tensor * WIDTH + digit, ones, mask=inside, sem="relaxed")
    if IS_FIRST:
        tl.atomic_add(bins + tensor * WIDTH + digits, found, mask=found > 0, sem="relaxed")


@kernel
def choose_kernel(
    table, counts, thresholds, last_kth, kth, left, bins,
    SHIFT: tl.constexpr, BITS: tl.constexpr, IS_FIRST: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Find a digit of the k-th magnitude of a tensor, and how many of the elements with this digit are to be taken.

    The first turn estimates a new threshold if the tensor's threshold did not fit: the histogram tells how many
    elements reach which magnitude. The last turn, SHIFT 0, steers a threshold that did fit, as
    `payloads.top_k.SampledSelector` does: along the power law through the threshold and the k-th magnitude, and by
    the growth of the k-th magnitude since the last step (`last_kth`).

    Grid: (tensors,). Leaves zeros in `bins`.
    """
    tensor = tl.program_id(0)
    row = table + tensor * NUM_COLUMNS
    digits = tl.arange(0, 1 << BITS)
    own_bins = tl.multiple_of(bins + tensor * WIDTH + digits, 16)  # an allocation of its own, in rows of 8 KiB
    found = tl.load(own_bins)
    tl.store(own_bins, tl.zeros([1 << BITS], tl.int32))
    reached = tl.sum(found, 0) - tl.cumsum(found, 0) + found  # elements with this digit or a larger one
    wanted = tl.load(left + tensor)
    # The digit 0 is always reached by as many as are wanted.
    digit = tl.sum((reached >= wanted).to(tl.int32), 0) - 1
    above = tl.sum(tl.where(digits > digit, found, 0), 0)
    least = tl.load(kth + tensor) | (digit << SHIFT)
    tl.store(left + tensor, wanted - above)
    tl.store(kth + tensor, least)
    count = tl.load(counts + tensor)
    k = tl.load(row + K)
    aim = tl.load(row + AIM).to(tl.float32)
    is_short = has_candidates(row, count)
    if IS_FIRST:
        # Among the elements of one digit, the number that reaches x falls as a power of x.
        of_aim = tl.maximum(tl.sum((reached >= aim).to(tl.int32), 0) - 1, 0)
        low = (of_aim << SHIFT).to(tl.float32, bitcast=True)
        high = ((of_aim + 1) << SHIFT).to(tl.float32, bitcast=True)
        at_low = tl.sum(tl.where(digits >= of_aim, found, 0), 0).to(tl.float32)
        at_high = tl.maximum(tl.sum(tl.where(digits > of_aim, found, 0), 0).to(tl.float32), 0.5)
        share = tl.log2(tl.maximum(at_low / aim, 1.0)) / tl.log2(tl.maximum(at_low / at_high, 1.0001))
        share = tl.minimum(tl.maximum(share, 0.0), 1.0)
        is_known = (low > 0) & (high < float("inf")) & (aim <= tl.load(row + NUMEL))
        fresh = low * tl.exp2(share * tl.log2(tl.where(is_known, high, 1.0) / tl.where(is_known, low, 1.0)))
        tl.store(thresholds + tensor, tl.where(is_known, fresh, 0.0), mask=is_short == 0)
    if SHIFT == 0:
        threshold = tl.load(thresholds + tensor)
        magnitude = least.to(tl.float32, bitcast=True)
        if is_short & (count > k) & (threshold > 0) & (magnitude > threshold):
            many = count.to(tl.float32)
            exponent = tl.log2(magnitude / threshold) / tl.log2(many / k.to(tl.float32))
            threshold *= tl.exp2(exponent * tl.log2(many / aim))
        before = tl.load(last_kth + tensor)
        tl.store(last_kth + tensor, magnitude)
        if (before > 0) & (magnitude > 0):
            growth = tl.minimum(tl.maximum(magnitude / before, 0.5), 2.0)
            threshold *= tl.exp2(tl.log2(growth) * FOLLOWED)
        tl.store(thresholds + tensor, threshold)


@kernel
def count_kernel(
    table, counts, positions, values, ends, kth, num_greater, num_ties, num_tensors,
    BLOCK: tl.constexpr, TENSORS: tl.constexpr,
):  # fmt: skip
    """Count, in each block of the selection, the magnitudes above the k-th and those equal to it.

    Grid: as `digits_kernel`.
    """
    start, stop = own_share(ends, num_tensors)
    tensor, first, end = tl.full([], 0, tl.int32), tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    for work in range(start, stop):
        if work >= end:
            tensor, first, end = owner_of(work, ends, num_tensors, TENSORS)
        row = table + tensor * NUM_COLUMNS
        _, value, inside = looked_at(work - first, row, tl.load(counts + tensor), positions, values, BLOCK)
        bits, least = magnitude_bits(value), tl.load(kth + tensor)
        tl.store(num_greater + work, tl.sum((inside & (bits > least)).to(tl.int32), 0))
        tl.store(num_ties + work, tl.sum((inside & (bits == least)).to(tl.int32), 0))


@kernel
def take_kernel(
    table, counts, positions, values, ends, kth, left, num_greater, num_ties, ends_greater, ends_ties,
    sent_positions, sent_values, masking, num_tensors, BLOCK: tl.constexpr, TENSORS: tl.constexpr,
):  # fmt: skip
    """Take the k largest elements of every tensor, in the order of their positions: `reference.take_`.

    Grid: as `digits_kernel`. `ends_greater`, `ends_ties`: running sums of what `count_kernel` has counted.
    `masking`: 0 or 1; where velocities are not cleared at high densities it changes during a warm-up.
    """
    start, stop = own_share(ends, num_tensors)
    tensor, first, end = tl.full([], 0, tl.int32), tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    for work in range(start, stop):
        if work >= end:
            tensor, first, end = owner_of(work, ends, num_tensors, TENSORS)
        row = table + tensor * NUM_COLUMNS
        position, exact, inside = looked_at(work - first, row, tl.load(counts + tensor), positions, values, BLOCK)
        bits, least = magnitude_bits(exact), tl.load(kth + tensor)
        is_greater = (inside & (bits > least)).to(tl.int32)
        is_tie = (inside & (bits == least)).to(tl.int32)
        both = tl.cumsum(is_greater | (is_tie << 16), 0)  # BLOCK is less than 2^16
        before = tl.load(num_greater + first) - tl.load(ends_greater + first)
        greater = before + tl.load(ends_greater + work) - tl.load(num_greater + work)
        greater += (both & 0xFFFF) - is_greater  # how many come before each
        before = tl.load(num_ties + first) - tl.load(ends_ties + first)
        ties = before + tl.load(ends_ties + work) - tl.load(num_ties + work) + (both >> 16) - is_tie
        num_ties_taken = tl.load(left + tensor)
        is_taken = (is_greater != 0) | ((is_tie != 0) & (ties < num_ties_taken))
        slots = tl.load(row + FIRST_OUTPUT) + greater + tl.minimum(ties, num_ties_taken)
        value = tl.minimum(tl.maximum(exact, -LARGEST_FINITE), LARGEST_FINITE)
        tl.store(sent_positions + slots, position.to(tl.int64), mask=is_taken)
        tl.store(sent_values + slots, value, mask=is_taken)
        residual = tl.load(row + RESIDUAL).to(tl.pointer_type(tl.float32))
        tl.store(residual + position, exact - value, mask=is_taken)
        if masking != 0:
            buffer = tl.load(row + MOMENTUM_BUFFER)
            itemsize = tl.load(row + MOMENTUM_ITEMSIZE)
            is_sent = is_taken & (value != 0)
            wide = buffer.to(tl.pointer_type(tl.int32)) + position
            narrow = buffer.to(tl.pointer_type(tl.int16)) + position
            tl.store(wide, tl.zeros([BLOCK], tl.int32), mask=is_sent & (itemsize == 4))
            tl.store(narrow, tl.zeros([BLOCK], tl.int16), mask=is_sent & (itemsize == 2))


@kernel
def chunks_kernel(values, positions, numel: tl.int64, chunk: tl.int64, k, k_last, BLOCK: tl.constexpr):
    """Write the positions of the k largest magnitudes of a chunk, of the last one k_last: `reference.largest`.

    Grid: (chunks,).
    """
    number = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    size = tl.minimum(chunk, numel - number * chunk)
    wanted = tl.where(size == chunk, k, k_last)
    inside = lanes < size
    places = number * chunk + lanes
    bits = tl.where(inside, magnitude_bits(tl.load(values + places, mask=inside, other=0.0)), -1)
    # The bits of the k-th largest, from the highest on: the largest number that at least k magnitudes reach.
    least = tl.full([], 0, tl.int32)
    for bit in range(31):
        trial = least | (1 << (30 - bit))
        least = tl.where(tl.sum((bits >= trial).to(tl.int32), 0) >= wanted, trial, least)
    is_greater = (bits > least).to(tl.int32)
    is_tie = (bits == least).to(tl.int32)
    num_ties = wanted - tl.sum(is_greater, 0)
    is_taken = (is_greater != 0) | ((is_tie != 0) & (tl.cumsum(is_tie, 0) <= num_ties))
    taken = is_taken.to(tl.int32)
    tl.store(positions + number * k + tl.cumsum(taken, 0) - taken, places, mask=is_taken)


# Messages: positions and values packed, unpacked, and averaged --------------------------------------------------------


@triton.jit
def level_of(words, extremes, first_code, element, inside, BITS: tl.constexpr):
    """Return values that are a sign and a level, as `payloads.codec.LevelFormat.decode` does.

    `extremes`: the words with the extremes of the elements' blocks; `first_code`: the byte of the message where the
    codes begin.
    """
    both = tl.load(words + extremes, mask=inside, other=0)
    lowest, highest = (both << 16) >> 16, both >> 16
    has_zero, lowest = lowest < 0, tl.abs(lowest)
    octets = words.to(tl.pointer_type(tl.uint8)) + first_code
    octet = tl.load(octets + ((element * BITS) >> 3), mask=inside, other=0).to(tl.int32)
    code = octet >> ((element * BITS) & 7).to(tl.int32)
    level = code & ((1 << (BITS - 1)) - 1)
    step = ((highest - lowest) << 16) // ((1 << (BITS - 1)) - 1)
    bits = tl.where(has_zero & (level == 0), 0, step * level + (lowest << 16))
    magnitude = bits.to(tl.float32, bitcast=True)
    return tl.where((code >> (BITS - 1)) & 1 != 0, -magnitude, magnitude)


@kernel
def pack_kernel(
    fields, positions, values, residuals, words, first_value: tl.int64, first_code: tl.int64, width: tl.int64,
    unary_bits: tl.int64, limit, V: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the positions of selected elements in Elias-Fano code, as `payloads.codec.pack` does, and their values.

    The values are rounded to V, and written from the `first_value`-th V of the message on; levels of BITS bits have
    been written before. Rounding errors are added to the residuals, whose addresses are `residuals`: 0 for none.

    Grid: (blocks of the longest, tensors): a grid may be long in its first axis only. Elements share words, which are
    zeros before: bits are or-ed in.
    """
    tensor = tl.program_id(1)
    row = fields + tensor * FIELD_COLUMNS
    elements = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = elements < tl.load(row + FIELD_NUM_SENT)
    places = tl.load(row + FIELD_FIRST) + elements
    position = tl.load(positions + places, mask=inside, other=0)
    whole = position + tl.load(row + FIELD_START)
    one = places + (whole >> width)
    bit = (tl.full([BLOCK], 1, tl.int64) << (one & 31)).to(tl.uint32).to(tl.int32, bitcast=True)
    tl.atomic_or(words + (one >> 5), bit, mask=inside, sem="relaxed")
    low = unary_bits + places * width
    # At most 30 bits, from any bit of a word on: of two words.
    bits = (whole & ((tl.full([BLOCK], 1, tl.int64) << width) - 1)) << (low & 31)
    first = (bits & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
    second = (bits >> 32).to(tl.int32)
    tl.atomic_or(words + (low >> 5), first, mask=inside & (first != 0), sem="relaxed")
    tl.atomic_or(words + (low >> 5) + 1, second, mask=inside & (second != 0), sem="relaxed")
    exact = tl.load(values + places, mask=inside, other=0.0)
    if BITS != 0:
        of_block = tl.load(row + FIELD_FIRST_BLOCK) + (elements >> LEVELS_SHIFT)
        value = level_of(words, first_value + of_block, first_code, places, inside, BITS)
    else:
        value = rounded(tl.minimum(tl.maximum(exact, -limit), limit), V)
        tl.store(words.to(tl.pointer_type(V)) + first_value + places, value.to(V), mask=inside)
    address = tl.load(residuals + tensor)
    unsent = address.to(tl.pointer_type(tl.float32)) + position
    has_residual = inside & (address != 0)
    tl.store(unsent, tl.load(unsent, mask=has_residual, other=0.0) + (exact - value), mask=has_residual)


@triton.jit
def ones_of(words, first_bit, end_bit, BLOCK: tl.constexpr):
    """Return the places of a block's bits, int64, and which are ones between two places, int32: shape (BLOCK, 32)."""
    lanes = (first_bit >> 5) + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words + lanes, mask=lanes * 32 < end_bit, other=0)
    bits = tl.arange(0, 32)[None, :]
    places = lanes[:, None] * 32 + bits
    return places, ((word[:, None] >> bits) & 1) * ((places >= first_bit) & (places < end_bit)).to(tl.int32)


@kernel
def ones_kernel(
    messages, num_ones, message_words: tl.int64, first_bit: tl.int64, end_bit: tl.int64, BLOCK: tl.constexpr
):
    """Count the ones in each block of words, so that `unpack_kernel` knows the number of ones before a block.

    Grid: see `unpack_kernel`.
    """
    message = tl.program_id(1).to(tl.int64)
    _, is_one = ones_of(messages + message * message_words, first_bit, end_bit, BLOCK)
    tl.store(num_ones + message * tl.num_programs(0) + tl.program_id(0), tl.sum(tl.sum(is_one, 1), 0))


@kernel
def unpack_kernel(
    fields, messages, num_ones, ends, positions, values, message_words: tl.int64, num_elements: tl.int64,
    first_value: tl.int64, first_code: tl.int64, width: tl.int64, unary_bits: tl.int64, first_bit: tl.int64,
    end_bit: tl.int64, num_tensors, V: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, TENSORS: tl.constexpr,
):  # fmt: skip
    """Read the positions of some tensors in several messages, as `payloads.codec.unpack` does, and the values.

    Grid: (blocks of words, messages). The bits from `first_bit` to `end_bit` of the unary part belong to these tensors,
    with `num_elements` ones; `ends` is the running sum of `num_ones`, which `ones_kernel` has counted. A message has
    `message_words` words. A position outside of its tensor becomes the nearest one inside, and a missing position
    becomes 0, because the next kernel writes there.
    """
    block, message = tl.program_id(0), tl.program_id(1).to(tl.int64)
    num_blocks = tl.num_programs(0)
    words = messages + message * message_words
    places, is_one = ones_of(words, first_bit, end_bit, BLOCK)
    own = message * num_blocks
    before_message = tl.load(ends + own) - tl.load(num_ones + own)
    end = tl.load(ends + own + block) - before_message
    begin = end - tl.load(num_ones + own + block)
    per_word = tl.sum(is_one, 1)
    in_block = (tl.cumsum(per_word, 0) - per_word)[:, None] + tl.cumsum(is_one, 1) - is_one
    is_read = (is_one != 0) & (begin + in_block < num_elements)
    first = tl.load(fields + FIELD_FIRST)
    element = first + begin + in_block  # among the elements of all tensors
    low = unary_bits + element * width
    lower = tl.load(words + (low >> 5), mask=is_read, other=0).to(tl.uint32, bitcast=True).to(tl.int64)
    has_upper = is_read & ((low & 31) + width > 32)
    upper = tl.load(words + (low >> 5) + 1, mask=has_upper, other=0).to(tl.uint32, bitcast=True).to(tl.int64)
    low_bits = (((upper << 32) | lower) >> (low & 31)) & ((tl.full([1, 1], 1, tl.int64) << width) - 1)
    whole = ((places - element) << width) | low_bits
    target = message * num_elements + begin + in_block
    if BITS == 0:
        value = tl.load(words.to(tl.pointer_type(V)) + first_value + element, mask=is_read, other=0.0)
        tl.store(values + target, value.to(tl.float32), mask=is_read)
    # The tensors that have elements here; mostly one.
    num_before = tl.zeros([TENSORS], tl.int32)
    num_begun = tl.zeros([TENSORS], tl.int32)
    for start in range(0, num_tensors, TENSORS):
        tensors = start + tl.arange(0, TENSORS)
        exists = tensors < num_tensors
        rows = fields + tensors * FIELD_COLUMNS
        of_first = tl.load(rows + FIELD_FIRST, mask=exists, other=9223372036854775807)
        num_sent = tl.load(rows + FIELD_NUM_SENT, mask=exists, other=0)
        num_before += (of_first + num_sent <= first + begin).to(tl.int32)
        num_begun += (of_first < first + end).to(tl.int32)
    for tensor in range(tl.sum(num_before, 0), tl.sum(num_begun, 0)):
        row = fields + tensor * FIELD_COLUMNS
        of_first = tl.load(row + FIELD_FIRST)
        is_own = is_read & (element >= of_first) & (element < of_first + tl.load(row + FIELD_NUM_SENT))
        position = whole - tl.load(row + FIELD_START)
        last = tl.load(row + FIELD_NUMEL) - 1
        tl.store(positions + target, tl.minimum(tl.maximum(position, 0), last).to(tl.int32), mask=is_own)
        if BITS != 0:
            of_block = tl.load(row + FIELD_FIRST_BLOCK) + ((element - of_first) >> LEVELS_SHIFT)
            value = level_of(words, first_value + of_block, first_code, element, is_own, BITS)
            tl.store(values + target, value, mask=is_own)
    if block == num_blocks - 1:
        for missing in range(end, num_elements, BLOCK):
            lanes = missing + tl.arange(0, BLOCK)
            tl.store(positions + message * num_elements + lanes, tl.zeros([BLOCK], tl.int32), mask=lanes < num_elements)
            tl.store(values + message * num_elements + lanes, tl.zeros([BLOCK], tl.float32), mask=lanes < num_elements)


@kernel
def apply_kernel(
    table, owners, positions, values, num_messages, num_elements: tl.int64, turns, scale, first_tile,
    first_place: tl.int64, W: tl.constexpr, MESSAGES: tl.constexpr, STEPS: tl.constexpr, SENDERS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Average the elements that participants sent for a tile of a tensor, in their order: `reference.average_many_`.

    No two programs write to one tile, and in a tile one participant comes after the other: all replicas get the same
    bits. With STEPS the weights, of dtype W, are stepped by the means, and `out` becomes zeros. With SENDERS the values
    are divided by the number of participants that sent the element, which is counted in `out`; else they are multiplied
    by `scale`.

    Grid: (tiles,), from `first_tile` on. `out` has memory for these tiles alone: it begins `first_place` elements
    before the address in the table. `positions`, `values`: shape (groups, messages, elements).
    """
    tile = first_tile + tl.program_id(0)
    tensor = tl.load(owners + tile)
    row = table + tensor * ARRIVAL_COLUMNS
    out = tl.load(row + ARRIVAL_OUT).to(tl.pointer_type(tl.float32)) - first_place
    weight = tl.load(row + ARRIVAL_WEIGHT).to(tl.pointer_type(W))
    rate = tl.load(row + ARRIVAL_RATE).to(tl.int32).to(tl.float32, bitcast=True)
    count = tl.load(row + ARRIVAL_NUM_SENT)
    shift = tl.load(row + ARRIVAL_SHIFT)
    start = (tile - tl.load(row + ARRIVAL_FIRST_TILE)) << shift
    end = start + (tl.full([], 1, tl.int64) << shift)
    messages = tl.arange(0, MESSAGES)
    exists = messages < num_messages
    firsts = (tl.load(row + ARRIVAL_GROUP) * num_messages + messages) * num_elements + tl.load(row + ARRIVAL_FIRST)
    # The first element at or behind the start of the tile, and its end, of each message: two binary searches at once.
    is_end = tl.arange(0, 2)[:, None] == 1
    border = tl.where(is_end, end, start)
    found = tl.zeros([2, MESSAGES], tl.int64)
    size = found + count
    for _ in range(turns):
        half = size // 2
        position = tl.load(positions + firsts + found + half, mask=exists & (size > 0), other=0)
        is_before = (size > 0) & (position < border)
        size = tl.where(is_before, size - half - 1, half)
        found = tl.where(is_before, found + half + 1, found)
    begins = firsts + tl.sum(tl.where(is_end, 0, found), 0)
    ends = firsts + tl.sum(tl.where(is_end, found, 0), 0)
    for phase in tl.static_range(0, 6):  # clear; of senders count, divide, clear; add; step
        if phase == 0 or phase == 4 or (SENDERS and phase < 4) or (STEPS and phase == 5):
            for message in range(num_messages):
                tl.debug_barrier()  # the one before has been written
                stop = tl.sum(tl.where(messages == message, ends, 0), 0)
                for element in range(tl.sum(tl.where(messages == message, begins, 0), 0), stop, BLOCK):
                    lanes = element + tl.arange(0, BLOCK)
                    inside = lanes < stop
                    position = tl.load(positions + lanes, mask=inside, other=0)
                    mean = tl.load(out + position, mask=inside, other=0.0)
                    value = tl.load(values + lanes, mask=inside, other=0.0)
                    if phase == 1:
                        mean += (value != 0).to(tl.float32)
                    elif phase == 2:
                        tl.store(values + lanes, tl.math.div_rn(value, tl.maximum(mean, 1.0)), mask=inside)
                    elif phase == 4:
                        mean += value * scale
                    else:
                        if phase == 5:
                            before = tl.load(weight + position, mask=inside, other=0.0).to(tl.float32)
                            # A position that comes again finds a zero, and changes nothing.
                            after = rounded(tl.fma(mean, -rate, before), W)
                            tl.store(weight + position, after.to(W), mask=inside)
                        mean = tl.zeros([BLOCK], tl.float32)
                    tl.store(out + position, mean, mask=inside)


# Tensors as one vector, in few bits per value, see `payloads.quantized` --------------------------------------------

SCALED = tl.constexpr(reference.SCALED)  # values of a block
INFINITE = tl.constexpr(0x7F800000)  # the bits of infinity; of NaN larger ones
FLOAT32, BFLOAT16, FLOAT16 = (tl.constexpr(number) for number in range(len(table.DTYPES)))


@triton.jit
def places_of(size, first_row, BLOCKS: tl.constexpr):
    """Return the blocks of a program in its row of the vector; and the columns of their values there, shape (BLOCKS,
    SCALED), a mask of the columns that exist, and the places of the values in the vector."""
    blocks = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    columns = blocks[:, None] * SCALED + tl.arange(0, SCALED)[None, :]
    return blocks, columns, columns < size, (first_row + tl.program_id(1)) * size + columns


@triton.jit
def span_of(spans, first_row):
    """Return the first tensor of a program, and the tensor behind its last; mostly there is one."""
    span = spans + 2 * ((first_row + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0))
    return tl.load(span), tl.load(span + 1)


@triton.jit
def offsets_in(row, places, exists):
    """Return the offsets of places of the vector in a tensor, and a mask of the places inside the tensor."""
    offsets = places - tl.load(row + JOINED_START)
    return offsets, exists & (offsets >= 0) & (offsets < tl.load(row + JOINED_NUMEL))


@triton.jit
def load_signal(row, offsets, inside):
    """Return elements of a tensor as float32: a table has tensors of several dtypes, and no kernel for each."""
    address, dtype = tl.load(row + JOINED_SIGNAL), tl.load(row + JOINED_DTYPE)
    wide = tl.load(address.to(tl.pointer_type(tl.float32)) + offsets, mask=inside & (dtype == FLOAT32), other=0.0)
    brain = tl.load(address.to(tl.pointer_type(tl.bfloat16)) + offsets, mask=inside & (dtype == BFLOAT16), other=0.0)
    half = tl.load(address.to(tl.pointer_type(tl.float16)) + offsets, mask=inside & (dtype == FLOAT16), other=0.0)
    return tl.where(dtype == FLOAT32, wide, tl.where(dtype == BFLOAT16, brain.to(tl.float32), half.to(tl.float32)))


@triton.jit
def store_signal(row, offsets, values, inside):
    """Write elements of a tensor, rounded to its dtype."""
    address, dtype = tl.load(row + JOINED_SIGNAL), tl.load(row + JOINED_DTYPE)
    tl.store(address.to(tl.pointer_type(tl.float32)) + offsets, values, mask=inside & (dtype == FLOAT32))
    brain = rounded(values, tl.bfloat16).to(tl.bfloat16)
    tl.store(address.to(tl.pointer_type(tl.bfloat16)) + offsets, brain, mask=inside & (dtype == BFLOAT16))
    half = tl.where(dtype == FLOAT16, values, 0.0).to(tl.float16)
    tl.store(address.to(tl.pointer_type(tl.float16)) + offsets, half, mask=inside & (dtype == FLOAT16))


@triton.jit
def num_not_finite(values):
    """Return how many values of two dimensions are infinite or NaN."""
    return tl.sum(tl.sum(((tl.abs(values) == float("inf")) | (values != values)).to(tl.int32), 1), 0)


@triton.jit
def write_dense(
    values, message, blocks, columns, size, codes, largest, limit, tiny, V: tl.constexpr, BITS: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Write values into a row of a message, in bytes, as `payloads.quantized` does; return their rounding errors.

    Beyond the size the values are zeros. Integers begin at the byte `codes`, behind the scales, which are bfloat16 and
    may begin at an odd byte. `largest`: integer, or number of a half type; `limit`: the bits of the largest scale.
    """
    if BITS == 0:
        sent = tl.where(values == values, tl.minimum(tl.maximum(values, -largest), largest), values)
        sent = rounded(sent, V)
        tl.store(message.to(tl.pointer_type(V)) + columns, sent.to(V), mask=columns < size)
        unsent = values - sent
    else:
        # As integers, the bits of magnitudes are in their order, infinity and NaN included.
        highest = tl.max(magnitude_bits(values), 1)
        scale = tl.math.div_rn(highest.to(tl.float32, bitcast=True), tl.zeros([BLOCKS], tl.float32) + largest)
        bits = scale.to(tl.int32, bitcast=True)
        is_finite = bits < INFINITE
        narrow = tl.where(is_finite, tl.minimum((bits + 0xFFFF) >> 16, limit), bits >> 16)
        tl.store(message + 2 * blocks, (narrow & 0xFF).to(tl.uint8), mask=blocks * SCALED < size)
        tl.store(message + 2 * blocks + 1, (narrow >> 8).to(tl.uint8), mask=blocks * SCALED < size)
        scale = tl.where(is_finite, (narrow << 16).to(tl.float32, bitcast=True), 1.0)[:, None]
        unit, is_finite = tl.maximum(scale, tiny) + tl.zeros_like(values), is_finite[:, None]
        # The nearest integers, of two the even one. 1.5 * 2^23: a number added to it loses its fraction.
        quotients = tl.minimum(tl.maximum(tl.math.div_rn(values, unit), -largest - 1.0), largest + 1.0)
        numbers = tl.minimum(tl.maximum((quotients + 12582912.0) - 12582912.0, -largest), largest)
        numbers = tl.where(is_finite, numbers, 0.0)
        unsent = tl.where(is_finite, values - numbers * scale, float("nan"))
        numbers = numbers.to(tl.int32)
        if BITS == 8:
            tl.store(message + codes + columns, (numbers & 0xFF).to(tl.uint8), mask=columns < size)
        else:
            low, high = tl.split(tl.reshape(numbers & 0xF, [BLOCKS, SCALED // 2, 2]))
            pairs = blocks[:, None] * (SCALED // 2) + tl.arange(0, SCALED // 2)[None, :]
            tl.store(message + codes + pairs, (low | (high << 4)).to(tl.uint8), mask=2 * pairs < size)
    return unsent


@triton.jit
def read_dense(message, blocks, columns, size, codes, V: tl.constexpr, BITS: tl.constexpr):
    """Return what `write_dense` has written: float32, shape (BLOCKS, SCALED)."""
    exists = columns < size
    if BITS == 0:
        values = tl.load(message.to(tl.pointer_type(V)) + columns, mask=exists, other=0.0).to(tl.float32)
    else:
        low = tl.load(message + 2 * blocks, mask=blocks * SCALED < size, other=0).to(tl.int32)
        high = tl.load(message + 2 * blocks + 1, mask=blocks * SCALED < size, other=0).to(tl.int32)
        bits = ((low | (high << 8)) << 16)[:, None]
        is_finite = (bits & 0x7FFFFFFF) < INFINITE
        scale = tl.where(is_finite, bits.to(tl.float32, bitcast=True), 0.0)
        if BITS == 8:
            numbers = tl.load(message + codes + columns, mask=exists, other=0).to(tl.int32)
        else:
            both = tl.load(message + codes + columns // 2, mask=exists, other=0).to(tl.int32)
            numbers = (both >> (4 * (columns & 1)).to(tl.int32)) & 0xF
        half = 1 << (BITS - 1)  # keeps the sign
        numbers = (numbers ^ half) - half
        values = tl.where(is_finite, numbers.to(tl.float32) * scale, float("nan"))
    return values


@kernel
def encode_kernel(
    table, spans, message, flags, num_tensors, size: tl.int64, row_bytes: tl.int64, codes: tl.int64, largest, limit,
    tiny, V: tl.constexpr, BITS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Write signals plus residuals, all tensors as one vector, and keep rounding errors: `gpu.encode_`.

    Grid: (groups of BLOCKS blocks, rows of the message). `flags`, zeros before: for each tensor whether its signal has
    an inf or NaN; and, last, whether one is left in a residual.
    """
    blocks, columns, exists, places = places_of(size, 0, BLOCKS)
    first, stop = span_of(spans, 0)
    values = tl.zeros([BLOCKS, SCALED], tl.float32)
    for tensor in range(first, stop):
        row = table + tensor * JOINED_COLUMNS
        offsets, inside = offsets_in(row, places, exists)
        signal = load_signal(row, offsets, inside)
        residual = tl.load(row + JOINED_RESIDUAL)
        kept = tl.load(residual.to(tl.pointer_type(tl.float32)) + offsets, mask=inside & (residual != 0), other=0.0)
        values = tl.where(inside, kept + signal, values)
        tl.store(flags + tensor, 1, mask=num_not_finite(signal) > 0)
    message += tl.program_id(1) * row_bytes
    unsent = write_dense(values, message, blocks, columns, size, codes, largest, limit, tiny, V, BITS, BLOCKS)
    tl.store(flags + num_tensors, 1, mask=num_not_finite(unsent) > 0)
    for tensor in range(first, stop):
        row = table + tensor * JOINED_COLUMNS
        offsets, inside = offsets_in(row, places, exists)
        residual = tl.load(row + JOINED_RESIDUAL)
        tl.store(residual.to(tl.pointer_type(tl.float32)) + offsets, unsent, mask=inside & (residual != 0))


@kernel
def combine_kernel(
    table, spans, received, answer, flags, num_tensors, num_messages, first_row: tl.int64, size: tl.int64,
    row_bytes: tl.int64, codes: tl.int64, largest, limit, tiny, V: tl.constexpr, BITS: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Average the messages about this rank's row of the vector, and write the mean: `gpu.combine_`.

    Grid: (groups of BLOCKS blocks, 1). The last flag: see `encode_kernel`.
    """
    blocks, columns, exists, places = places_of(size, first_row, BLOCKS)
    values = tl.zeros([BLOCKS, SCALED], tl.float32)
    for message in range(num_messages):
        values += read_dense(received + message * row_bytes, blocks, columns, size, codes, V, BITS)
    num = tl.zeros([BLOCKS, SCALED], tl.float32) + num_messages
    values = tl.math.div_rn(values, num)
    unsent = write_dense(values, answer, blocks, columns, size, codes, largest, limit, tiny, V, BITS, BLOCKS)
    unsent = unsent * num  # a residual enters the mean divided by their number
    tl.store(flags + num_tensors, 1, mask=num_not_finite(unsent) > 0)
    first, stop = span_of(spans, first_row)
    for tensor in range(first, stop):
        row = table + tensor * JOINED_COLUMNS
        offsets, inside = offsets_in(row, places, exists)
        residual = tl.load(row + JOINED_RESIDUAL).to(tl.pointer_type(tl.float32)) + offsets
        tl.store(residual, tl.load(residual, mask=inside, other=0.0) + unsent, mask=inside)


@kernel
def decode_kernel(
    table, spans, message, num_messages, share, size: tl.int64, row_bytes: tl.int64, codes: tl.int64, V: tl.constexpr,
    BITS: tl.constexpr, SHARES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Read the rows of a vector, or the mean of several messages about each row (SHARES): `gpu.decode_`.

    Grid: (groups of BLOCKS blocks, rows of the vector).
    """
    blocks, columns, exists, places = places_of(size, 0, BLOCKS)
    message += tl.program_id(1) * num_messages * row_bytes
    if SHARES:  # whose sum does not overflow
        values = tl.zeros([BLOCKS, SCALED], tl.float32)
        for number in range(num_messages):
            values += read_dense(message + number * row_bytes, blocks, columns, size, codes, V, BITS) * share
    else:
        values = read_dense(message, blocks, columns, size, codes, V, BITS)
    first, stop = span_of(spans, 0)
    for tensor in range(first, stop):
        row = table + tensor * JOINED_COLUMNS
        offsets, inside = offsets_in(row, places, exists)
        store_signal(row, offsets, values, inside)
