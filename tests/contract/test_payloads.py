"""What every payload promises, on one rank: each payload of a row once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_lowbw import Quantized, TopK
from lightning_lowbw.compress.quantization import make_format
from lightning_lowbw.compress.selection import Selection
from lightning_lowbw.kernels.reference import Segment
from tests.contract.rows import ROWS
from tests.contract.volumes import NUMELS

SPARSE = {what: name for name, row in ROWS.items() if isinstance(what := row.method.what, TopK)}
NARROW = {what: name for name, row in ROWS.items() if isinstance(what := row.method.what, Quantized)}
SELECTING = {what.chunk: what for what in SPARSE}
NUMEL = 360 * 360  # above `SampledSelector.SMALL`
LARGE = [numel for numel in NUMELS.values() if numel]


def select_(what: TopK, residual: Tensor, gradient: Tensor, density: float | None) -> tuple[Tensor, Tensor]:
    """Accumulate, and take the largest elements out of the residual."""
    segment = Segment(
        residual=residual, gradient=gradient, momentum_buffer=None, weight=None, **what.selected(len(gradient), density)
    )
    (selected,) = Selection().compress_({"": segment}, masking=False)
    return selected


# Selection ------------------------------------------------------------------------------------------------------------


def row_scaled(numel: int) -> Tensor:
    """Rows of a weight matrix differ by six orders of magnitude; strided samples miss most of them."""
    side = int(numel**0.5)
    return (torch.randn(side, side) * torch.logspace(-3, 3, side)[:, None]).reshape(-1)


def ascending(numel: int) -> Tensor:
    """No two magnitudes are the same, nor near: among equal ones the position decides."""
    return torch.linspace(-4.0, 5.0, numel)


def permutation(numel: int, chunk: int) -> Tensor:
    """Return a permutation inside each chunk."""
    firsts = range(0, numel, chunk)
    return torch.cat([first + torch.randperm(min(chunk, numel - first)) for first in firsts])


@pytest.mark.parametrize("what", SELECTING.values(), ids=map(str, SELECTING))
@pytest.mark.parametrize("make", [torch.randn, row_scaled, ascending])
def test_selection_commutes_with_a_permutation(what: TopK, make: Callable[[int], Tensor]) -> None:
    """No position is favoured, whatever order the elements of a tensor, or of a chunk, lie in."""
    values, order = make(NUMEL), permutation(NUMEL, what.chunk or NUMEL)
    for density in (0.001, 0.04):
        positions, selected = select_(what, torch.zeros(NUMEL), values, density)
        of_permuted, permuted = select_(what, torch.zeros(NUMEL), values[order], density)
        assert len(positions) == what.num_sent(NUMEL, density)
        assert order[of_permuted].sort().values.equal(positions)
        assert permuted.sort().values.equal(selected.sort().values)


# The wire -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", SPARSE, ids=SPARSE.values())
def test_a_sparse_message_is_what_was_selected_in_the_bytes_of_the_formula(what: TopK) -> None:
    """Positions to the bit; sent values and what is kept of them are together what was there."""
    for density in (None, 0.1, 0.5):
        signals = [torch.randn(numel) for numel in LARGE]
        residuals = [torch.zeros(numel) for numel in LARGE]
        selected = [select_(what, each, signal, density) for each, signal in zip(residuals, signals, strict=True)]
        message = what.codec.encode(selected, LARGE, residuals)
        assert message.numel() == what.nbytes(LARGE, density)
        counts = [what.num_sent(numel, density) for numel in LARGE]
        positions, values = (each[0].split(counts) for each in what.codec.decode(message.unsqueeze(0), counts, LARGE))
        for signal, residual, (at, _), there, value in zip(
            signals, residuals, selected, positions, values, strict=True
        ):
            assert there.equal(at)
            # two levels may be far from a value: then to a rounding of the difference
            tolerance = 1e-6 if what.value_dtype == "int2" else 0.0
            again = residual.double().index_add_(0, there, value.double()).float()
            torch.testing.assert_close(again, signal, rtol=tolerance, atol=tolerance)
            assert what.value_dtype != "float32" or not residual[at].any()


@pytest.mark.parametrize("what", NARROW, ids=NARROW.values())
@pytest.mark.parametrize("numel", [1, 127, 128, 129, sum(LARGE)])
def test_a_narrow_message_is_what_it_says_in_the_bytes_of_the_formula(what: Quantized, numel: int) -> None:
    """What is sent and what is kept of it are together what was there, to a rounding."""
    value_format, signal = make_format(what.value_dtype), torch.randn(1, numel)
    message, kept = torch.empty((1, value_format.nbytes(numel)), dtype=torch.uint8), signal.clone()
    value_format.write_(message, numel, 0, kept)
    sent = value_format.read(message, numel, 0, numel)
    torch.testing.assert_close(sent + kept, signal, rtol=1e-6, atol=1e-7)
    assert float(kept.norm()) < 0.2 * float(signal.norm())
