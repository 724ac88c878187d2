"""The arithmetic on one tensor, against the equations and to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_lowbw.kernels import reference
from lightning_lowbw.kernels.reference import Constants
from tests.kernels.bits import equal_bits


def hard_values() -> Tensor:
    """Values of all magnitudes, subnormal ones and zeros among them, and the largest."""
    spread = torch.randn(500) * 10.0 ** torch.empty(500).uniform_(-45, 7)
    positive = torch.tensor([torch.finfo(torch.float32).max, 1e-40, 3e-42, 1.4e-45, 1 + 2.0**-23])
    return torch.cat([spread, positive, -positive, torch.tensor([0.0, -0.0])])


# correct_ -------------------------------------------------------------------------------------------------------------


def test_correct_nesterov_is_the_papers_form() -> None:
    """u = m (u + g); v = v + u + g, where the paper's u is m times torch's buffer; over several steps."""
    momentum = 0.9
    momentum_buffer, residual = torch.randn(2, 40, dtype=torch.float64).unbind(0)
    u, v = momentum * momentum_buffer, residual.clone()
    for _ in range(5):
        gradient = torch.randn(40, dtype=torch.float64)
        reference.correct_(residual, momentum_buffer, gradient, Constants(momentum=momentum, nesterov=True))
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
        reference.correct_(residual, momentum_buffer, weight.grad, Constants(momentum=0.9, nesterov=nesterov))
        sgd.step()
    torch.testing.assert_close(residual, -weight.detach(), rtol=0, atol=1e-13)
    torch.testing.assert_close(momentum_buffer, sgd.state[weight]["momentum_buffer"], rtol=0, atol=1e-13)


def test_correct_with_a_narrow_velocity() -> None:
    """Nothing of the velocity is rounded away on the way into the residual."""
    momentum_buffer, gradient, residual = torch.randn(40).bfloat16(), torch.randn(40).bfloat16(), torch.randn(40)
    u, v = momentum_buffer * 0.9 + gradient, residual.clone()
    reference.correct_(residual, momentum_buffer, gradient, Constants(momentum=0.9))
    assert equal_bits(momentum_buffer, u)
    assert equal_bits(residual, v + u.float())


# take_ ----------------------------------------------------------------------------------------------------------------


def test_take_loses_nothing() -> None:
    """The sent values have the bits of the residual, and no other element has changed."""
    residual = hard_values()
    corrected = residual.clone()
    positions = torch.randperm(residual.numel())[: residual.numel() * 3 // 4].sort().values
    values = reference.take_(residual, torch.randn_like(residual), positions)
    assert equal_bits(values, corrected[positions])
    others = torch.ones(residual.numel(), dtype=torch.bool)
    others[positions] = False
    assert equal_bits(residual[others], corrected[others])
    assert not residual[positions].any()


def test_take_of_infinities() -> None:
    """The sent values are finite; the residual tells that the sum has overflowed."""
    largest, infinity = torch.finfo(torch.float32).max, float("inf")
    residual = torch.tensor([infinity, -infinity, largest, -largest])
    values = reference.take_(residual, None, torch.arange(4))
    assert values.tolist() == [largest, -largest, largest, -largest]
    assert residual.tolist() == [infinity, -infinity, 0.0, 0.0]


def test_masking_clears_the_velocity_of_sent_elements() -> None:
    """A zero, the padding of a dead tensor, masks nothing."""
    residual = torch.tensor([0.0, 3.0, -0.0, 2.0, 1.0])
    momentum_buffer = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    values = reference.take_(residual, momentum_buffer, torch.arange(4))
    assert values.tolist() == [0.0, 3.0, 0.0, 2.0]
    assert momentum_buffer.tolist() == [1.0, 0.0, 3.0, 0.0, 5.0]
    assert residual.tolist() == [0.0, 0.0, 0.0, 0.0, 1.0]


def test_all_tensors_lie_behind_one_another() -> None:
    values, more = torch.tensor([1.0, 3.0]), torch.arange(6.0)
    segments = [reference.Segment(residual=values, gradient=torch.zeros(2), k=1)]
    segments += [reference.Segment(residual=more, gradient=torch.zeros(6), k=1, chunk=4, k_last=1)]
    positions, values = reference.compress_many_(segments, masking=True)
    assert positions.tolist() == [1, 3, 5]
    assert values.tolist() == [3.0, 3.0, 5.0]
    assert segments[1].residual.tolist() == [0.0, 1.0, 2.0, 0.0, 4.0, 0.0]
    assert [segment.num_sent for segment in segments] == [1, 2]


# accumulate_ ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("has_buffer", "ahead"), [(False, 0.0), (True, 0.02)])
def test_decay_then_correction_then_comparison(has_buffer: bool, ahead: float) -> None:
    v, u, gradient, w = torch.randn(4, 1000).unbind(0)
    buffer = u.clone() if has_buffer else None
    expected_v, expected_u = v.clone(), None if buffer is None else buffer.clone()
    constants = Constants(momentum=0.9, nesterov=True)
    reference.correct_(expected_v, expected_u, -gradient + 0.1 * (w - ahead / 0.1 * v), constants)
    given = {"residual": v, "momentum_buffer": buffer, "gradient": gradient, "weight": w, "k": 1, "ahead": ahead}
    segment = reference.Segment(**given, momentum=0.9, nesterov=True, weight_decay=0.1, sign=-1.0)  # type: ignore[arg-type]
    positions = reference.accumulate_(segment, 1.0)
    torch.testing.assert_close(v, expected_v)
    torch.testing.assert_close(buffer, expected_u)
    assert positions is not None
    assert positions.tolist() == (v.abs() >= 1.0).nonzero().flatten().tolist()


def test_the_decay_is_not_lost_in_a_narrow_gradient() -> None:
    v, ones = torch.zeros(3), torch.ones(3, dtype=torch.bfloat16)
    reference.accumulate_(reference.Segment(residual=v, gradient=ones, weight=ones, k=1, weight_decay=1e-4), 0.0)
    torch.testing.assert_close(v, torch.full((3,), 1.0001))


@pytest.mark.parametrize("amsgrad", [False, True])
def test_adams_step_is_accumulated(amsgrad: bool) -> None:
    v, u, gradient, square, largest = torch.rand(5, 1000).unbind(0)
    moments = {"square": square.clone(), "largest": largest.clone() if amsgrad else None}
    moment = reference.SecondMoment(**moments, beta2=0.99, share=0.5, eps=1e-8, corrections=(0.7, 0.3))  # type: ignore[arg-type]
    q = 0.99 * square + 0.5 * (1 - 0.99) * gradient**2
    expected_u = 0.9 * u + (1 - 0.9) * gradient
    root = torch.maximum(largest, q) if amsgrad else q
    expected_v = v + expected_u / 0.7 / ((root / 0.3).sqrt() + 1e-8)
    given = {"residual": v, "momentum_buffer": u, "gradient": gradient, "second_moment": moment}
    reference.accumulate_(reference.Segment(**given, k=1, momentum=0.9, dampening=0.9), 0.0)  # type: ignore[arg-type]
    torch.testing.assert_close(moment.square, q)
    torch.testing.assert_close(u, expected_u)
    torch.testing.assert_close(v, expected_v)


# scatter_mean_ --------------------------------------------------------------------------------------------------------


def part(**values: float) -> tuple[Tensor, Tensor]:
    """A sparse vector from `i3=1.5`: 1.5 at position 3."""
    return torch.tensor([int(name[1:]) for name in values], dtype=torch.int64), torch.tensor(list(values.values()))


def test_equal_positions_add_up_and_n_counts_the_silent() -> None:
    out = torch.full((5,), float("nan"))  # overwritten, whatever was there
    reference.scatter_mean_(out, [part(i0=4.0, i3=1.0), part(i0=8.0, i4=-2.0), part(), part(i3=3.0)])
    assert out.tolist() == [3.0, 0.0, 0.0, 1.0, -0.5]


def test_the_sum_runs_in_rank_order() -> None:
    generator = torch.Generator().manual_seed(1)
    columns = torch.randn(7, 1000, generator=generator) * 10.0 ** torch.randint(-4, 4, (7, 1000), generator=generator)
    parts = [(torch.arange(1000), column) for column in columns]
    out, backwards = torch.empty(2, 1000).unbind(0)
    reference.scatter_mean_(out, parts)
    reference.scatter_mean_(backwards, parts[::-1])
    expected = torch.zeros(1000)
    for column in columns:
        expected = expected + column * (1.0 / 7)
    assert equal_bits(out, expected)
    assert not equal_bits(backwards, out)  # else the order would not have been tested


def test_no_overflow_on_the_way_to_the_mean() -> None:
    out = torch.empty(2)
    reference.scatter_mean_(out, [part(i1=3e38), part(i1=3e38)])
    assert out.tolist() == [0.0, torch.tensor(3e38).item()]


def test_a_zero_comes_from_no_sender() -> None:
    out = torch.empty(2)
    reference.scatter_mean_(out, [part(i0=0.0, i1=3.0), part(i0=4.0, i1=5.0)], over_senders=True)
    assert out.tolist() == [4.0, 4.0]


def test_scales_are_the_same_where_torch_only_traces() -> None:
    with FakeTensorMode():
        traced = reference.largest_scale_bits(8)
    assert traced == reference.largest_scale_bits(8) > 0
