"""The arithmetic on one tensor, against the equations and to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_lowbw.ops.averages import scatter_mean_
from lightning_lowbw.ops.reference import Segment, compress_many_, correct_, flat, largest, take_
from tests.ops.bits import equal_bits

CHANNELS_LAST = (3, 4, 5, 2)


def hard_values() -> Tensor:
    """Values of all magnitudes, subnormal ones and zeros among them, and the largest."""
    spread = torch.randn(500) * 10.0 ** torch.empty(500).uniform_(-45, 7)
    positive = torch.tensor([torch.finfo(torch.float32).max, 1e-40, 3e-42, 1.4e-45, 1 + 2.0**-23])
    return torch.cat([spread, positive, -positive, torch.tensor([0.0, -0.0])])


# correct_ -------------------------------------------------------------------------------------------------------------


def test_correct_is_equation_7() -> None:
    momentum_buffer, residual, gradient = torch.randn(3, 7, 11).unbind(0)
    u, v = momentum_buffer.clone(), residual.clone()
    before = gradient.clone()
    correct_(residual, momentum_buffer, gradient, momentum=0.9, nesterov=False)
    assert equal_bits(momentum_buffer, 0.9 * u + before)
    assert equal_bits(residual, v + (0.9 * u + before))
    assert equal_bits(gradient, before)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.99])
def test_correct_nesterov_is_the_papers_form(momentum: float) -> None:
    """u = m (u + g); v = v + u + g, where the paper's u is m times torch's buffer; over several steps."""
    momentum_buffer, residual = torch.randn(2, 40, dtype=torch.float64).unbind(0)
    u, v = momentum * momentum_buffer, residual.clone()
    for _ in range(5):
        gradient = torch.randn(40, dtype=torch.float64)
        correct_(residual, momentum_buffer, gradient, momentum=momentum, nesterov=True)
        u = momentum * (u + gradient)
        v = v + u + gradient
        torch.testing.assert_close(momentum * momentum_buffer, u, rtol=0, atol=1e-13)
        torch.testing.assert_close(residual, v, rtol=0, atol=1e-13)


@pytest.mark.parametrize("nesterov", [False, True])
def test_correct_accumulates_what_torch_would_step_with(nesterov: bool) -> None:
    """With nothing ever sent, v is the sum of the updates of torch's own SGD."""
    weight = torch.nn.Parameter(torch.zeros(30, dtype=torch.float64))
    sgd = torch.optim.SGD([weight], lr=1.0, momentum=0.9, nesterov=nesterov)
    residual, momentum_buffer = torch.zeros(2, 30, dtype=torch.float64).unbind(0)
    for _ in range(4):
        weight.grad = torch.randn(30, dtype=torch.float64)
        correct_(residual, momentum_buffer, weight.grad, momentum=0.9, nesterov=nesterov)
        sgd.step()
    torch.testing.assert_close(residual, -weight.detach(), rtol=0, atol=1e-13)
    torch.testing.assert_close(momentum_buffer, sgd.state[weight]["momentum_buffer"], rtol=0, atol=1e-13)


def test_correct_without_a_buffer_is_error_feedback() -> None:
    residual, gradient = torch.randn(2, 50).unbind(0)
    expected = residual + gradient
    correct_(residual, None, gradient, momentum=0.0, nesterov=False)
    assert equal_bits(residual, expected)


def test_correct_with_narrow_and_permuted_memory() -> None:
    """A bfloat16 channels_last parameter: the residual is float32 and contiguous, positions are logical ones."""
    momentum_buffer = torch.randn(CHANNELS_LAST).bfloat16().contiguous(memory_format=torch.channels_last)
    gradient = torch.randn(CHANNELS_LAST).bfloat16()
    residual = torch.randn(CHANNELS_LAST)
    u, v = momentum_buffer.clone(memory_format=torch.contiguous_format), residual.clone()
    correct_(residual, momentum_buffer, gradient, momentum=0.9, nesterov=False)
    u = u * 0.9 + gradient
    assert equal_bits(momentum_buffer, u)
    assert momentum_buffer.is_contiguous(memory_format=torch.channels_last)
    assert residual.dtype == torch.float32
    assert equal_bits(residual, v + u.float())  # nothing of the buffer is rounded away on the way into v


# take_ ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [False, True])
def test_take_loses_nothing(momentum: bool) -> None:
    """What is sent has the bits that were there, and nothing else has changed."""
    residual = hard_values()
    corrected = residual.clone()
    momentum_buffer = torch.randn_like(residual) if momentum else None
    indices = torch.randperm(residual.numel())[: residual.numel() * 3 // 4].sort().values
    values = take_(residual, momentum_buffer, indices, masking=True)
    assert equal_bits(values, corrected[indices])
    others = torch.ones(residual.numel(), dtype=torch.bool)
    others[indices] = False
    assert equal_bits(residual[others], corrected[others])
    assert not residual[indices].any()


def test_take_of_infinities() -> None:
    """What is sent stays finite; what is left tells that the sum has overflowed."""
    largest, infinity = torch.finfo(torch.float32).max, float("inf")
    residual = torch.tensor([infinity, -infinity, largest, -largest])
    values = take_(residual, None, torch.arange(4), masking=True)
    assert values.tolist() == [largest, -largest, largest, -largest]
    assert residual.tolist() == [infinity, -infinity, 0.0, 0.0]


@pytest.mark.parametrize("masking", [False, True])
def test_masking_clears_the_velocity_of_what_was_sent(masking: bool) -> None:
    residual, momentum_buffer = torch.randn(2, 4, 6).unbind(0)
    residual = residual.contiguous()
    before = momentum_buffer.clone()
    indices = torch.tensor([0, 5, 23])
    take_(residual, momentum_buffer, indices, masking=masking)
    assert residual.view(-1)[indices].tolist() == [0.0, 0.0, 0.0]
    assert residual.count_nonzero() == residual.numel() - 3
    expected = before.clone()
    if masking:
        expected.view(-1)[indices] = 0
    assert equal_bits(momentum_buffer, expected)


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_what_goes_out_as_zero_masks_nothing(zero: float) -> None:
    """Padding of a dead tensor: its velocity goes on."""
    residual = torch.tensor([zero, 3.0, zero, 2.0])
    momentum_buffer = torch.tensor([1.0, 2.0, 3.0, 4.0])
    values = take_(residual, momentum_buffer, torch.arange(4), masking=True)
    assert values.tolist() == [0.0, 3.0, 0.0, 2.0]
    assert momentum_buffer.tolist() == [1.0, 0.0, 3.0, 0.0]
    assert residual.tolist() == [0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_masking_finds_the_logical_positions(memory_format: torch.memory_format) -> None:
    momentum_buffer = torch.randn(CHANNELS_LAST).contiguous(memory_format=memory_format)
    before = momentum_buffer.clone()
    residual = torch.randn(CHANNELS_LAST)
    indices = torch.tensor([0, 1, 17, 60, 119])
    take_(residual, momentum_buffer, indices, masking=True)
    sent = torch.zeros(before.numel(), dtype=torch.bool)
    sent[indices] = True
    assert momentum_buffer.is_contiguous(memory_format=memory_format)
    assert (momentum_buffer == 0).reshape(-1).equal(sent)
    assert (residual == 0).reshape(-1).equal(sent)
    assert equal_bits(momentum_buffer.reshape(-1)[~sent], before.reshape(-1)[~sent])


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1)])
def test_take_of_a_single_element(shape: tuple[int, ...]) -> None:
    residual, momentum_buffer = torch.full(shape, 3.0), torch.full(shape, 2.0)
    values = take_(residual, momentum_buffer, torch.tensor([0]), masking=True)
    assert values.tolist() == [3.0]
    assert float(residual) == float(momentum_buffer) == 0.0


# largest, compress_many_ ----------------------------------------------------------------------------------------------


def segment_of(values: Tensor, k: int, chunk: int | None = None, k_last: int = 0) -> Segment:
    """A step that adds nothing."""
    gradient = torch.zeros_like(values)
    return Segment(
        residual=values, momentum_buffer=None, gradient=gradient, weight=None, k=k, chunk=chunk, k_last=k_last
    )


def test_the_largest_of_a_tensor_and_of_each_chunk() -> None:
    values = torch.tensor([1.0, -5.0, 3.0, 0.5, 9.0, -7.0, 8.0, 2.0, 0.1, -0.2])
    assert largest(segment_of(values, 3)).tolist() == [4, 5, 6]
    assert largest(segment_of(values, 1, chunk=4, k_last=2)).tolist() == [1, 4, 8, 9]
    assert largest(segment_of(values, 1, chunk=5)).tolist() == [4, 6]
    assert largest(segment_of(values, 2, chunk=100, k_last=1)).tolist() == [4]  # there is no whole chunk
    assert segment_of(values, 1, chunk=4, k_last=2).num_sent == 4


def test_of_equal_magnitudes_the_first() -> None:
    assert largest(segment_of(torch.tensor([1.0, -2.0, 2.0, -2.0, 2.0]), 2)).tolist() == [1, 2]


@pytest.mark.parametrize("k", [0, 1])
def test_nothing_and_a_single_element(k: int) -> None:
    assert largest(segment_of(torch.ones(k), k)).tolist() == [0] * k


def test_all_tensors_lie_behind_one_another() -> None:
    segments = [segment_of(torch.tensor([1.0, 3.0]), 1), segment_of(torch.arange(6.0), 1, chunk=4, k_last=1)]
    positions, values = compress_many_(segments, masking=True)
    assert positions.tolist() == [1, 3, 5]
    assert values.tolist() == [3.0, 3.0, 5.0]
    assert segments[1].residual.tolist() == [0.0, 1.0, 2.0, 0.0, 4.0, 0.0]


# scatter_mean_ --------------------------------------------------------------------------------------------------------


def part(**values: float) -> tuple[Tensor, Tensor]:
    """A sparse vector from `i3=1.5`: 1.5 at position 3."""
    return torch.tensor([int(name[1:]) for name in values], dtype=torch.int64), torch.tensor(list(values.values()))


def test_equal_positions_add_up_and_n_counts_the_silent() -> None:
    out = torch.full((5,), float("nan"))  # overwritten, whatever was there
    scatter_mean_(out, [part(i0=4.0, i3=1.0), part(i0=8.0, i4=-2.0), part(), part(i3=3.0)])
    assert out.tolist() == [3.0, 0.0, 0.0, 1.0, -0.5]


def test_padding_at_position_zero_leaves_the_value_of_another_rank() -> None:
    out = torch.empty(3)
    scatter_mean_(out, [part(i0=6.0), part(i0=0.0)])
    assert out.tolist() == [3.0, 0.0, 0.0]


def test_the_sum_runs_in_rank_order() -> None:
    generator = torch.Generator().manual_seed(1)
    columns = torch.randn(7, 1000, generator=generator) * 10.0 ** torch.randint(-4, 4, (7, 1000), generator=generator)
    parts = [(torch.arange(1000), column) for column in columns]
    out, again, backwards = torch.empty(3, 1000).unbind(0)
    scatter_mean_(out, parts)
    scatter_mean_(again, parts)
    scatter_mean_(backwards, parts[::-1])
    expected = torch.zeros(1000)
    for column in columns:
        expected = expected + column * (1.0 / 7)
    assert equal_bits(out, expected)
    assert equal_bits(again, out)
    assert not equal_bits(backwards, out)  # else the order would not have been tested


def test_one_sender_keeps_its_bits() -> None:
    values = hard_values()
    out = torch.empty_like(values)
    scatter_mean_(out, [(torch.arange(values.numel()), values)])
    assert out.equal(values)


def test_no_overflow_on_the_way_to_the_mean() -> None:
    out = torch.empty(2)
    scatter_mean_(out, [part(i1=3e38), part(i1=3e38)])
    assert out.tolist() == [0.0, torch.tensor(3e38).item()]


@pytest.mark.parametrize("value_dtype", [torch.bfloat16, torch.float16])
def test_narrow_values_are_averaged_in_full_precision(value_dtype: torch.dtype) -> None:
    values = torch.randn(3, 20).to(value_dtype)
    out = torch.empty(20)
    scatter_mean_(out, [(torch.arange(20), row) for row in values])
    torch.testing.assert_close(out, values.float().mean(0), rtol=1e-6, atol=1e-7)


def test_nobody_sent_anything() -> None:
    out = torch.ones(4)
    scatter_mean_(out, [part(), part()])
    assert out.tolist() == [0.0, 0.0, 0.0, 0.0]
    empty = torch.empty(0)
    scatter_mean_(empty, [part()])
    assert empty.numel() == 0


# flat -----------------------------------------------------------------------------------------------------------------


def test_flat_is_a_view_in_logical_order() -> None:
    contiguous = torch.arange(24.0).view(2, 3, 2, 2)
    assert flat(contiguous).data_ptr() == contiguous.data_ptr()
    assert flat(contiguous.contiguous(memory_format=torch.channels_last)).equal(torch.arange(24.0))
    assert flat(torch.tensor(5.0)).tolist() == [5.0]


# On a GPU -------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_gpu_computes_the_same_bits() -> None:
    residual, momentum_buffer, gradient = torch.randn(3, 1000).unbind(0)
    indices = torch.randperm(1000)[:100].sort().values
    results = []
    for device in ("cpu", "cuda"):
        v, u, g, i = (tensor.to(device, copy=True) for tensor in (residual, momentum_buffer, gradient, indices))
        correct_(v, u, g, momentum=0.5, nesterov=False)  # 0.5: a fused multiply-add rounds the same
        values = take_(v, u, i, masking=True)
        out = torch.empty(1000, device=device)
        scatter_mean_(out, [(i, values), (i, values)])
        results.append([tensor.cpu() for tensor in (v, u, values, out)])
    assert all(equal_bits(on_gpu, on_cpu) for on_cpu, on_gpu in zip(*results, strict=True))
