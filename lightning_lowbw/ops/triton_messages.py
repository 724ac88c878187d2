"""Device code of `gpu` for messages: positions and values packed, unpacked, and averaged. See `triton_kernels`."""

# mypy: ignore-errors
# No `from __future__ import annotations`: Triton reads the annotations as objects.

import triton.language as tl

from lightning_lowbw.ops.table import Arrived, Field
from lightning_lowbw.ops.triton_kernels import kernel, rounded

FIELD_COLUMNS = tl.constexpr(len(Field._fields))
FIELD_NUM_SENT = tl.constexpr(Field._fields.index("num_sent"))
FIELD_FIRST = tl.constexpr(Field._fields.index("first"))
FIELD_WIDTH = tl.constexpr(Field._fields.index("width"))
FIELD_UNARY = tl.constexpr(Field._fields.index("unary"))
FIELD_UNARY_END = tl.constexpr(Field._fields.index("unary_end"))
FIELD_LOW = tl.constexpr(Field._fields.index("low"))
FIELD_NUMEL = tl.constexpr(Field._fields.index("numel"))

ARRIVED_COLUMNS = tl.constexpr(len(Arrived._fields))
ARRIVED_OUT = tl.constexpr(Arrived._fields.index("out"))
ARRIVED_WEIGHT = tl.constexpr(Arrived._fields.index("weight"))
ARRIVED_GROUP = tl.constexpr(Arrived._fields.index("group"))
ARRIVED_FIRST = tl.constexpr(Arrived._fields.index("first"))
ARRIVED_NUM_SENT = tl.constexpr(Arrived._fields.index("num_sent"))
ARRIVED_SHIFT = tl.constexpr(Arrived._fields.index("shift"))
ARRIVED_RATE = tl.constexpr(Arrived._fields.index("rate"))
ARRIVED_FIRST_TILE = tl.constexpr(Arrived._fields.index("first_tile"))


@kernel
def pack_kernel(
    fields, positions, values, residuals, words, sent_values, limit,
    V: tl.constexpr, IS_SENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the positions of selected elements in Elias-Fano code, as `what.positions.pack` does, and their values.

    The values are rounded to V, and written where `sent_values` begins; or, with IS_SENT, that is what has been made
    of them. What is rounded away is added to the residuals, whose addresses are `residuals`: 0 for none.

    Grid: (blocks of the longest, tensors): a grid may be long in its first axis only. Elements share words, which are
    zeros before: bits are or-ed in.
    """
    tensor = tl.program_id(1)
    row = fields + tensor * FIELD_COLUMNS
    elements = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = elements < tl.load(row + FIELD_NUM_SENT)
    places = tl.load(row + FIELD_FIRST) + elements
    position = tl.load(positions + places, mask=inside, other=0)
    width = tl.load(row + FIELD_WIDTH)
    one = tl.load(row + FIELD_UNARY) + elements + (position >> width)
    bit = (tl.full([BLOCK], 1, tl.int64) << (one & 31)).to(tl.uint32).to(tl.int32, bitcast=True)
    tl.atomic_or(words + (one >> 5), bit, mask=inside, sem="relaxed")
    low = tl.load(row + FIELD_LOW) + elements * width
    # At most 30 bits, from any bit of a word on: of two words.
    bits = (position & ((tl.full([BLOCK], 1, tl.int64) << width) - 1)) << (low & 31)
    first = (bits & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
    second = (bits >> 32).to(tl.int32)
    tl.atomic_or(words + (low >> 5), first, mask=inside & (first != 0), sem="relaxed")
    tl.atomic_or(words + (low >> 5) + 1, second, mask=inside & (second != 0), sem="relaxed")
    exact = tl.load(values + places, mask=inside, other=0.0)
    if IS_SENT:
        value = tl.load(sent_values + places, mask=inside, other=0.0)
    else:
        value = rounded(tl.minimum(tl.maximum(exact, -limit), limit), V)
        tl.store(sent_values + places, value.to(V), mask=inside)
    address = tl.load(residuals + tensor)
    unsent = address.to(tl.pointer_type(tl.float32)) + position
    has_residual = inside & (address != 0)
    tl.store(unsent, tl.load(unsent, mask=has_residual, other=0.0) + (exact - value), mask=has_residual)


@kernel
def unpack_kernel(
    fields, messages, positions, values, damaged,
    message_words: tl.int64, num_elements: tl.int64, first_value: tl.int64,
    V: tl.constexpr, HAS_VALUES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Read the positions of a tensor in a message, as `what.positions.unpack` does; with HAS_VALUES the values too.

    Grid: (tensors, messages). A message has `message_words` words, and `num_elements` elements, of which the values
    begin at the `first_value`-th V of it. A position outside of its tensor becomes the nearest one inside, one that is
    missing 0, because what comes next writes there; `damaged`, one byte, becomes 1 then.
    """
    row = fields + tl.program_id(0) * FIELD_COLUMNS
    number = tl.program_id(1).to(tl.int64)
    words = messages + number * message_words
    first = tl.load(row + FIELD_FIRST)
    count = tl.load(row + FIELD_NUM_SENT)
    width = tl.load(row + FIELD_WIDTH)
    unary = tl.load(row + FIELD_UNARY)
    unary_end = tl.load(row + FIELD_UNARY_END)
    positions += number * num_elements + first
    bits = tl.arange(0, 32)
    found = tl.full([], 0, tl.int32)
    num_outside = tl.full([], 0, tl.int32)
    last = tl.load(row + FIELD_NUMEL) - 1
    first_low = tl.load(row + FIELD_LOW)
    for start in range(unary >> 5, (unary_end + 31) >> 5, BLOCK):
        lanes = start + tl.arange(0, BLOCK)
        word = tl.load(words + lanes, mask=lanes * 32 < unary_end, other=0)
        places = lanes[:, None] * 32 + bits[None, :]
        is_one = ((word[:, None] >> bits[None, :]) & 1) * ((places >= unary) & (places < unary_end)).to(tl.int32)
        per_word = tl.sum(is_one, 1)
        before = found + tl.cumsum(per_word, 0) - per_word
        element = before[:, None] + tl.cumsum(is_one, 1) - is_one
        is_read = (is_one != 0) & (element < count)
        low = first_low + element.to(tl.int64) * width
        lower = tl.load(words + (low >> 5), mask=is_read, other=0).to(tl.uint32, bitcast=True).to(tl.int64)
        has_upper = is_read & ((low & 31) + width > 32)
        upper = tl.load(words + (low >> 5) + 1, mask=has_upper, other=0).to(tl.uint32, bitcast=True).to(tl.int64)
        low_bits = (((upper << 32) | lower) >> (low & 31)) & ((tl.full([1, 1], 1, tl.int64) << width) - 1)
        high = places - unary - element
        position = (high.to(tl.int64) << width) | low_bits
        # Each unary bit is the tensor's own, so none is below 0: the last low bits alone can lead behind its end.
        num_outside += tl.sum(tl.sum((is_read & (position > last)).to(tl.int32), 1), 0)
        tl.store(positions + element, tl.minimum(position, last), mask=is_read)
        found += tl.sum(per_word, 0)
    for start in range(found.to(tl.int64), count, BLOCK):
        lanes = start + tl.arange(0, BLOCK)
        tl.store(positions + lanes, tl.zeros([BLOCK], tl.int64), mask=lanes < count)
    tl.store(damaged, 1, mask=(num_outside > 0) | (found != count))
    if HAS_VALUES:
        source = words.to(tl.pointer_type(V)) + first_value
        for start in range(0, count, BLOCK):
            lanes = start + tl.arange(0, BLOCK)
            value = tl.load(source + first + lanes, mask=lanes < count, other=0.0).to(tl.float32)
            tl.store(values + number * num_elements + first + lanes, value, mask=lanes < count)


@kernel
def apply_kernel(
    table, owners, positions, values, num_messages, num_elements: tl.int64, turns, scale,
    MESSAGES: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Average what all participants have sent for a tile of a tensor, in their order: `averages.average_many_`.

    No two programs write to one tile, and in a tile one participant comes after the other: all replicas get the same
    bits. With STEPS the weights are stepped by the means, and these have gone from `out`.

    Grid: (tiles,). `positions`, `values`: shape (groups, messages, elements).
    """
    tile = tl.program_id(0)
    tensor = tl.load(owners + tile)
    row = table + tensor * ARRIVED_COLUMNS
    out = tl.load(row + ARRIVED_OUT).to(tl.pointer_type(tl.float32))
    count = tl.load(row + ARRIVED_NUM_SENT)
    shift = tl.load(row + ARRIVED_SHIFT)
    start = (tile - tl.load(row + ARRIVED_FIRST_TILE)) << shift
    end = start + (tl.full([], 1, tl.int64) << shift)
    messages = tl.arange(0, MESSAGES)
    exists = messages < num_messages
    firsts = (tl.load(row + ARRIVED_GROUP) * num_messages + messages) * num_elements + tl.load(row + ARRIVED_FIRST)
    # The first element at or behind the start of the tile, and its end, of each message: two binary searches.
    begins = tl.zeros([MESSAGES], tl.int64)
    begins_size = tl.zeros([MESSAGES], tl.int64) + count
    ends = tl.zeros([MESSAGES], tl.int64)
    ends_size = begins_size
    for _ in range(turns):
        half = begins_size // 2
        position = tl.load(positions + firsts + begins + half, mask=exists & (begins_size > 0), other=0)
        is_before = (begins_size > 0) & (position < start)
        begins = tl.where(is_before, begins + half + 1, begins)
        begins_size = tl.where(is_before, begins_size - half - 1, half)
        half = ends_size // 2
        position = tl.load(positions + firsts + ends + half, mask=exists & (ends_size > 0), other=0)
        is_before = (ends_size > 0) & (position < end)
        ends = tl.where(is_before, ends + half + 1, ends)
        ends_size = tl.where(is_before, ends_size - half - 1, half)
    begins += firsts
    ends += firsts
    for message in range(num_messages):
        stop = tl.sum(tl.where(messages == message, ends, 0), 0)
        for element in range(tl.sum(tl.where(messages == message, begins, 0), 0), stop, BLOCK):
            lanes = element + tl.arange(0, BLOCK)
            position = tl.load(positions + lanes, mask=lanes < stop, other=0)
            tl.store(out + position, tl.zeros([BLOCK], tl.float32), mask=lanes < stop)
    for message in range(num_messages):
        tl.debug_barrier()  # the one before has been written
        stop = tl.sum(tl.where(messages == message, ends, 0), 0)
        for element in range(tl.sum(tl.where(messages == message, begins, 0), 0), stop, BLOCK):
            lanes = element + tl.arange(0, BLOCK)
            inside = lanes < stop
            position = tl.load(positions + lanes, mask=inside, other=0)
            addend = tl.load(values + lanes, mask=inside, other=0.0) * scale
            tl.store(out + position, tl.load(out + position, mask=inside, other=0.0) + addend, mask=inside)
    if STEPS:
        weight = tl.load(row + ARRIVED_WEIGHT).to(tl.pointer_type(tl.float32))
        rate = tl.load(row + ARRIVED_RATE).to(tl.int32).to(tl.float32, bitcast=True)
        for message in range(num_messages):
            tl.debug_barrier()
            stop = tl.sum(tl.where(messages == message, ends, 0), 0)
            for element in range(tl.sum(tl.where(messages == message, begins, 0), 0), stop, BLOCK):
                lanes = element + tl.arange(0, BLOCK)
                inside = lanes < stop
                position = tl.load(positions + lanes, mask=inside, other=0)
                mean = tl.load(out + position, mask=inside, other=0.0)
                before = tl.load(weight + position, mask=inside, other=0.0)
                # A position that comes again finds a zero, and changes nothing.
                tl.store(weight + position, tl.fma(mean, -rate, before), mask=inside)
                tl.store(out + position, tl.zeros([BLOCK], tl.float32), mask=inside)
