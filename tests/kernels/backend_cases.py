"""What every fast backend must do: the same bits as the reference.

Here numba's; `test_gpu` runs this in Triton's interpreter, and `tests/gpu` on a GPU. Torch fuses a multiply with an
add, and Triton's interpreter does not: with a power of two as the factor, both round the same.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_lowbw.comm.echoes import echo
from lightning_lowbw.kernels import dispatch, gpu, reference
from lightning_lowbw.kernels.reference import Arrival, SecondMoment, Segment
from lightning_lowbw.kernels.table import GPU_BLOCK
from lightning_lowbw.payloads.codec import SparseCodec
from lightning_lowbw.payloads.quantized import Quantized, QuantizedExchange
from lightning_lowbw.payloads.top_k import SampledSelector, Selection
from tests.kernels.bits import BFLOAT16, DEVICE, FLOAT16, FLOAT32, IS_TRITON, equal_bits
from tests.kernels.segments import (
    DECAY,
    FORMS,
    LARGE,
    check,
    compress,
    draw_parts,
    make,
    memory,
    redraw,
    state,
    tensors_of,
)

# (numel, k): one block and less, its borders, several; from all elements down to one in a thousand
SIZES = [(1, 1), (200, 1), (GPU_BLOCK, 3), (GPU_BLOCK + 1, 4), (GPU_BLOCK + 8, 600), (3 * GPU_BLOCK + 13, 6)]
pytestmark = pytest.mark.skipif(not IS_TRITON and dispatch.compiled_for() is None, reason="needs numba")


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a backend take tensors that are small enough for a test."""
    monkeypatch.setattr(dispatch, "uses_triton", lambda device: IS_TRITON)
    monkeypatch.setattr(SampledSelector, "SMALL", 0)


@pytest.mark.parametrize("form", ["all", "all bfloat16"])
def test_awkward_sizes(form: str) -> None:
    """Two steps: the first samples all thresholds, the second starts from steered ones."""
    segments, of_backend = [make(numel, k, **FORMS[form]) for numel, k in SIZES], memory()
    for _ in range(2):
        check(segments, of_backend)


def test_all_forms_at_once() -> None:
    segments = [make(*LARGE, **form) for form in FORMS.values()]
    odd = torch.randn(LARGE[0] + 1).to(DEVICE)[1:]  # does not start at 16 bytes
    segments += [replace(segments[0], residual=odd, momentum_buffer=None), make(*LARGE, momentum=0.9)]
    of_backend = memory()
    for masking in (True, False):
        check(segments, of_backend, masking)
        redraw(segments)


@pytest.mark.filterwarnings("ignore:overflow encountered")  # by numpy, in Triton's interpreter
def test_inf_and_nan_count_as_zeros_and_set_the_fault() -> None:
    """A gradient without a fault is not checked."""
    forms = [{"momentum": 0.5}, {"momentum": 0.5, "gradient": BFLOAT16}, {"momentum": 0.5, **DECAY}, {}]
    faults = torch.zeros(4, dtype=torch.bool, device=DEVICE).unbind()
    segments = [replace(make(GPU_BLOCK + 5, 9, **form), fault=faults[i]) for i, form in enumerate(forms)]  # type: ignore[arg-type]
    segments.append(make(*LARGE, momentum=0.5))
    segments[0].gradient[[3, GPU_BLOCK + 4]] = torch.tensor([float("nan"), float("inf")], device=DEVICE)
    segments[1].gradient[7] = segments[4].gradient[700] = -float("inf")
    segments[3].residual[9], segments[3].gradient[9] = 3e38, 3e38  # their sum overflows
    check(segments, memory())
    assert [bool(fault) for fault in faults] == [True, True, False, True]
    assert segments[4].residual[700] == -float("inf")


def check_to_rounding(segments: list[Segment], unit: float) -> None:
    """Compare with the reference to rounding; the k largest are the largest of the backend's own residual."""
    twins, k = copy.deepcopy(segments), LARGE[1]
    positions, values = compress(segments, memory(), masking=False)
    for segment, twin, at, sent in zip(segments, twins, positions.split(k), values.split(k), strict=True):
        reference.accumulate_(twin, 0.0)
        corrected = segment.residual.index_put((at,), sent)
        assert at.equal(corrected.abs().topk(k).indices.sort().values)
        torch.testing.assert_close(corrected, twin.residual, rtol=10 * unit, atol=unit and 1e-6)
        for a, b in zip(tensors_of(segment)[1:], tensors_of(twin)[1:], strict=True):
            torch.testing.assert_close(a, b, rtol=unit, atol=unit and 1e-6)


def test_general_factors() -> None:
    """To the bit, except in Triton's interpreter."""
    factors = {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-4, "ahead": 3e-3}
    check_to_rounding([make(*LARGE, weight=FLOAT32, **factors)], 1e-6 if IS_TRITON else 0.0)


@pytest.mark.parametrize(("amsgrad", "dtype"), [(True, FLOAT32), (False, BFLOAT16)])
def test_adam_to_rounding(amsgrad: bool, dtype: torch.dtype) -> None:
    """Beside a tensor of SGD."""
    square, largest = (torch.rand(LARGE[0]).to(dtype).to(DEVICE) for _ in range(2))
    moment = {"beta2": 0.99, "share": 0.5, "eps": 1e-8, "corrections": (0.5, 0.1)}
    adam = SecondMoment(square=square, largest=largest if amsgrad else None, **moment)  # type: ignore[arg-type]
    factors = {"momentum": 0.7, "dampening": 0.7, "weight_decay": 2.0**-6, "ahead": 2.0**-5, "sign": -1.0}
    segment = replace(make(*LARGE, dtype, dtype, dtype, **factors), second_moment=adam)
    check_to_rounding([segment, make(*LARGE, momentum=0.5)], 1e-6 if dtype == FLOAT32 else 2.0**-7)


def test_a_dead_tensor_and_one_that_is_nearly() -> None:
    """Fewer than k elements are not zero: the zeros that pad the message mask nothing."""
    dead, nearly = (make(LARGE[0], 10, momentum=0.5) for _ in range(2))
    for tensor in state([dead, nearly]):
        tensor.zero_()
    assert nearly.momentum_buffer is not None
    nearly.residual[5], nearly.momentum_buffer[-3:] = -2.0, 1.0
    nearly.residual[7], nearly.momentum_buffer[7] = 1.0, -2.0  # v = 0, u = -1: sent as padding, if at all
    of_backend = memory()
    check([dead, nearly], of_backend)
    assert nearly.momentum_buffer.nonzero().flatten().tolist() == [7]
    dead.gradient.normal_()
    for _ in range(2):  # alive again
        check([dead, nearly], of_backend)


# Messages -------------------------------------------------------------------------------------------------------------


# (numel, k): all, none between two tensors, low bits that straddle words
WIRE_SIZES = [(70, 70), (5, 0), (1000, 3), (33, 31), (GPU_BLOCK + 1, 4), (300, 1), (64, 64), (9, 2)]
LONG = [(1 << 30, 37), (100_000, 1500)]  # more than a program looks at at a time


@pytest.mark.parametrize(
    ("value_dtype", "sizes"),
    [*((name, WIRE_SIZES) for name in ("float32", "bfloat16", "int4", "int2")), ("int8", [(1, 1)]), ("bfloat16", LONG)],
    ids=str,
)
def test_messages_are_those_of_plain_torch(
    value_dtype: str, sizes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bytes, the same elements decoded, and the same rounding errors in the residuals."""
    codec, parts, numels = SparseCodec(value_dtype), draw_parts(sizes), [numel for numel, _ in sizes]
    counts = [positions.numel() for positions, _ in parts]
    has_room = max(numels) <= 1 << 20  # there is no memory for a residual of 2^30 elements
    residuals = [torch.ones(numel, device=DEVICE) for numel in numels] if has_room else None
    twins = copy.deepcopy(residuals)
    message = codec.encode(parts, numels, residuals)
    rows = torch.stack([message, message]).repeat(1, 2)[:, : message.numel()]  # rows with gaps between them
    some = slice(len(counts) // 2, len(counts))
    found = [*codec.decode(rows, counts, numels), *codec.decode(rows, counts, numels, tensors=some)]
    monkeypatch.setattr(dispatch, "uses_triton", lambda device: False)
    monkeypatch.setattr(dispatch, "_disabled", {"cpu"})
    assert message.equal(codec.encode(parts, numels, twins))
    assert all(a.equal(b) for a, b in zip(residuals or [], twins or [], strict=True))
    expected = [*codec.decode(rows, counts, numels), *codec.decode(rows, counts, numels, tensors=some)]
    assert all(equal_bits(a, b) for a, b in zip(found, expected, strict=True))
    assert all(row.long().equal(torch.cat([positions for positions, _ in parts])) for row in found[0])


@pytest.mark.parametrize(
    ("over_senders", "dtype", "steps", "num_messages"),
    [(False, FLOAT32, False, 1), (False, FLOAT32, True, 3), (True, FLOAT32, False, 3), (False, BFLOAT16, False, 3)],
    ids=str,
)
def test_average(
    over_senders: bool, dtype: torch.dtype, steps: bool, num_messages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions that one or several participants have sent, the first and last among them; summed in one order."""
    monkeypatch.setattr(gpu, "LEAST_RANGE", 3000)  # of 16 bits: some tensors, or tiles of one
    numels, counts = [1, 50, 9000, 70, 30_000], [1, 20, gpu.APPLY_BLOCK + 3, 70, 2]
    first, rows = [0, 1, 21, 0, 70], [0, 0, 0, 1, 1]
    shape = 2, num_messages, sum(counts)
    positions = torch.zeros(shape, dtype=torch.int32)
    values = torch.randn(shape) * 1000.0 ** torch.arange(num_messages).view(-1, 1)
    values[..., ::5] = 0.0
    for numel, count, start, row in zip(numels, counts, first, rows, strict=True):
        for message in range(num_messages):
            positions[row, message, start : start + count] = torch.randperm(numel)[:count].sort().values
    positions, values = positions.to(DEVICE), values.to(DEVICE)

    def average(module: Any, order: Sequence[int]) -> list[Tensor]:
        outs = [torch.full((numel,), float("nan"), dtype=dtype, device=DEVICE) for numel in numels]
        weights = [torch.linspace(1, 2, numel, device=DEVICE) if steps else None for numel in numels]
        columns = zip(outs, rows, first, counts, weights, strict=True)
        arrivals = [Arrival(*each, 2.0**-number) for number, each in enumerate(columns)]
        module.average_many_(arrivals, positions[:, order], values[:, order], over_senders=over_senders)
        return outs if not steps else weights  # type: ignore[return-value]

    in_order, backwards = range(num_messages), range(num_messages)[::-1]
    expected = average(reference, list(in_order))
    found = average(dispatch.averages_for(DEVICE), list(in_order))
    assert all(equal_bits(a, b) for a, b in zip(found, expected, strict=True))
    if num_messages > 1 and dtype == FLOAT32:  # else the order would not have been tested
        turned = average(dispatch.averages_for(DEVICE), list(backwards))
        assert not all(a.equal(b) for a, b in zip(turned, expected, strict=True))


# Chunks ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("chunk", "k", "k_last"), [(1, 1, 0), (64, 3, 2), (300, 300, 1), (4096, 64, 5)])
def test_the_largest_of_each_chunk(chunk: int, k: int, k_last: int) -> None:
    """If magnitudes are equal, the first elements."""
    segments = [replace(make(2 * chunk + 7 * k_last, k), chunk=chunk, k_last=k_last) for _ in range(3)]
    for segment in segments[1:]:
        segment.residual.round_()
        segment.gradient.zero_()
    segments[2].residual.zero_()
    check(segments, Selection())


# Tensors as one vector ------------------------------------------------------------------------------------------------

NUMELS = [3, 130, 1, 2 * GPU_BLOCK + 7, 64, 900, 5, GPU_BLOCK, 1]  # many in one block, and one over several blocks
Parts = list[tuple[Tensor, Tensor]]  # a tensor, and its signal in the middle


def draw_vector(dtypes: tuple[torch.dtype, ...], scale: float) -> Parts:
    """Return signals that begin anywhere, with magnitudes from tiny to large, zeros and halves."""
    parts = []
    for number, numel in enumerate(NUMELS):
        dtype = dtypes[number % len(dtypes)]
        whole = (torch.randn(numel + 3) * 10.0 ** torch.randint(-6, 4, (numel + 3,)) * scale).to(dtype).to(DEVICE)
        whole[::5] = 0.0
        parts.append((whole, whole[2 : 2 + numel]))
    parts[3][1][:600] = (torch.arange(600) % 255 - 127) / 2  # with a scale of about 1
    return parts


NOT_FINITE: dict[str, list[tuple[int, int, float]]] = {
    "": [],
    "three": [(0, 1, float("inf")), (3, 9, float("nan")), (7, 5, -float("inf"))],
}


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")  # by numpy, in Triton's interpreter
@pytest.mark.parametrize("not_finite", NOT_FINITE)
@pytest.mark.parametrize("value_dtype", ["int8", "int4", "bfloat16", "float16"])
@pytest.mark.parametrize("dtypes", [(FLOAT32,), (FLOAT32, BFLOAT16, FLOAT16)], ids=["float32", "mixed"])
def test_an_exchange_in_few_bits(
    dtypes: tuple[torch.dtype, ...], value_dtype: str, not_finite: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rounds among echoes have the bits of plain torch: residuals, means, and which signals are not finite."""
    tiny = 1e-28 if BFLOAT16 in dtypes or value_dtype == "bfloat16" else 1e-38  # the interpreter: no subnormal bfloat16
    for num_participants, scale in ((2, 1.0), (3, tiny), (4, 6.0)):
        both = [QuantizedExchange(Quantized(value_dtype=value_dtype), echo(num_participants)) for _ in range(2)]
        for _ in range(2):
            parts, found = draw_vector(dtypes, scale), list[list[Tensor]]()
            for number, place, value in NOT_FINITE[not_finite]:
                parts[number][1][place] = value
            bad = [number for number, (_, signal) in enumerate(parts) if not signal.isfinite().all()]
            for exchange, uses_kernels in zip(both, (True, False), strict=True):
                monkeypatch.setattr(dispatch, "uses_triton", lambda device, is_on=uses_kernels and IS_TRITON: is_on)
                monkeypatch.setattr(dispatch, "_disabled", set() if uses_kernels else {"cpu"})
                mine = copy.deepcopy(parts)
                prepared = exchange.prepare({str(number): signal for number, (_, signal) in enumerate(mine)})
                means = prepared.send().wait().mean.dense()
                assert prepared.faults is None or prepared.faults[1].nonzero().flatten().tolist() == bad
                assert (prepared.faults is not None) == (uses_kernels and IS_TRITON)
                assert exchange.fault is not None
                kept = [*exchange.residuals.values(), exchange.fault]
                found.append([*means.values(), *kept, *(whole for whole, _ in mine)])
            for one, other in zip(*found, strict=True):  # a NaN has many bits
                assert equal_bits(
                    *(each.nan_to_num(9.0) if each.is_floating_point() else each for each in (one, other))
                )
