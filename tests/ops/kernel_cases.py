"""What the Triton kernels must do; `test_gpu` runs this in Triton's interpreter, `tests/gpu` on a GPU.

Compared to the bit. Where torch fuses a multiply with an add, and Triton's interpreter does not, the factor is a power
of two: there it rounds the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_lowbw.ops import averages, dispatch, gpu, reference
from lightning_lowbw.ops.averages import Arrival
from lightning_lowbw.ops.gpu import APPLY_BLOCK, SELECT_BLOCK
from lightning_lowbw.ops.reference import SecondMoment, Segment
from lightning_lowbw.ops.table import BLOCK, Kind, Workspace
from lightning_lowbw.ops.trial import Uses
from lightning_lowbw.what.codec import SparseCodec
from lightning_lowbw.what.positions import num_words
from lightning_lowbw.what.selection import SampledSelector, Selection
from lightning_lowbw.what.values import VALUE_NAMES
from tests.ops.bits import equal_bits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
WIRE_DTYPES = [FLOAT32, BFLOAT16, FLOAT16]
# (numel, k): one block and less, its borders, several; from all elements down to one in a thousand
SIZES = [(1, 1), (7, 3), (200, 1), (BLOCK - 1, 5), (BLOCK, 3), (BLOCK + 1, 4), (BLOCK + 8, 600), (3 * BLOCK + 13, 6)]
LARGE = (2 * BLOCK, 4)
KERNELS = tuple(
    f"{n}_kernel" for n in ["correct", "order", "plan", "digits", "choose", "count", "take", "pack", "unpack", "apply"]
)


def make(
    numel: int,
    k: int,
    gradient: torch.dtype = FLOAT32,
    momentum_buffer: torch.dtype | None = FLOAT32,
    weight: torch.dtype | None = None,
    **factors: Any,
) -> Segment:
    def draw(dtype: torch.dtype) -> Tensor:
        return torch.randn(numel).to(dtype).to(DEVICE)

    return Segment(
        residual=draw(FLOAT32),
        momentum_buffer=None if momentum_buffer is None else draw(momentum_buffer),
        gradient=draw(gradient),
        weight=None if weight is None else draw(weight),
        k=k,
        **factors,
    )


def make_second_moment(numel: int, dtype: torch.dtype = FLOAT32, amsgrad: bool = False) -> SecondMoment:
    square = torch.rand(numel).to(dtype).to(DEVICE)
    largest = torch.rand(numel).to(dtype).to(DEVICE) if amsgrad else None
    return SecondMoment(square=square, largest=largest, beta2=0.99, share=0.5, eps=1e-8, corrections=(0.5, 0.1))


def redraw(segments: Sequence[Segment]) -> None:
    """Replace the state by one of the same distribution, as that of a long run is: thresholds go on fitting."""
    for tensor in state(segments):
        tensor.normal_()


def state(segments: Sequence[Segment]) -> list[Tensor]:
    buffers = [segment.momentum_buffer for segment in segments if segment.momentum_buffer is not None]
    return [*(segment.residual for segment in segments), *buffers]


def missed(workspace: Workspace) -> list[int]:
    """Return the tensors whose threshold did not fit in the last step, so that all of them was looked through."""
    counts = zip(workspace.rows, workspace.counts.tolist(), strict=True)
    return [number for number, (row, count) in enumerate(counts) if not row.k <= count <= row.capacity]


def check(segments: Sequence[Segment], workspace: Workspace, masking: bool = True) -> Tensor:
    """Compress; compare all results with the reference; return the positions."""
    twins = copy.deepcopy(list(segments))
    positions, values = gpu.compress_many_(segments, masking=masking, workspace=workspace)
    expected = reference.compress_many_(twins, masking=masking)
    assert equal_bits(positions, expected[0])
    assert equal_bits(values, expected[1])
    assert all(a.equal(b) for a, b in zip(state(segments), state(twins), strict=True))
    assert all(a.gradient.equal(b.gradient) for a, b in zip(segments, twins, strict=True))
    return positions


def cubic(numel: int) -> Tensor:
    """A heavy tail: what exceeds x falls as x ** -3."""
    return torch.rand(numel).pow(-1 / 3) * torch.randn(numel).sign()


class CountingSelector(SampledSelector):
    """A CPU's that never sorts, whatever the size; counts the samples it draws."""

    num_estimates = 0

    def _sorts(self, *_: Any) -> bool:
        return False

    def _estimate(self, sample: Tensor, numel: int, k: int) -> float:
        self.num_estimates += 1
        return super()._estimate(sample, numel, k)


# compress_many_ -------------------------------------------------------------------------------------------------------

FORMS: dict[str, dict[str, Any]] = {
    "momentum": {"momentum": 0.9},
    "error feedback": {"momentum_buffer": None},
    "nesterov": {"momentum": 0.5, "nesterov": True},
    "nesterov without momentum": {"momentum_buffer": None, "nesterov": True},
    "decay": {"momentum": 0.9, "weight": FLOAT32, "weight_decay": 2.0**-6},
    "decay of nothing": {"momentum": 0.9, "weight": FLOAT32, "weight_decay": 0.0},
    "decay ahead": {"momentum": 0.9, "weight": FLOAT32, "weight_decay": 2.0**-6, "ahead": 2.0**-5},
    "climbing": {"momentum": 0.9, "weight": FLOAT32, "weight_decay": 2.0**-6, "sign": -1.0},
    "all": {
        "momentum": 0.5,
        "nesterov": True,
        "sign": -1.0,
        "weight": FLOAT32,
        "weight_decay": 2.0**-6,
        "ahead": 2.0**-5,
    },
    "bfloat16": {"momentum": 0.75, "gradient": BFLOAT16, "momentum_buffer": BFLOAT16},
    "float16": {"momentum": 0.75, "gradient": FLOAT16, "momentum_buffer": FLOAT16},
    "bfloat16 gradient": {"momentum": 0.9, "gradient": BFLOAT16},
    "float16 gradient": {"momentum": 0.9, "gradient": FLOAT16},
    "all bfloat16": {
        **dict.fromkeys(("gradient", "momentum_buffer", "weight"), BFLOAT16),
        "momentum": 0.5,
        "nesterov": True,
        "weight_decay": 2.0**-6,
        "sign": -1.0,
    },
}


@pytest.mark.parametrize("form", ["momentum", "all", "all bfloat16"])
def test_awkward_sizes(form: str) -> None:
    """Two steps: the first samples all thresholds, the second starts from steered ones."""
    segments = [make(numel, k, **FORMS[form]) for numel, k in SIZES]
    workspace = Workspace()
    for _ in range(2):
        check(segments, workspace)


def test_all_forms_at_once() -> None:
    """Of several kinds, in an order that lays their blocks otherwise than the tensors themselves."""
    segments = [make(*LARGE, **form) for form in FORMS.values()]
    odd = torch.randn(LARGE[0] + 1).to(DEVICE)[1:]  # does not start at 16 bytes
    segments += [replace(segments[0], residual=odd, momentum_buffer=None), make(*LARGE, momentum=0.9)]
    workspace = Workspace()
    for _ in range(2):
        check(segments, workspace)
        redraw(segments)
    assert missed(workspace) == []
    assert len(workspace.launches) == len({*workspace.kinds}) == 6


@pytest.mark.parametrize("masking", [False, True])
def test_taking(masking: bool) -> None:
    """Wide and narrow velocities and none."""
    segments = [
        make(*LARGE, momentum=0.75),
        make(*LARGE, momentum=0.75, gradient=BFLOAT16, momentum_buffer=BFLOAT16),
        make(*LARGE, momentum_buffer=None),
    ]
    workspace = Workspace()
    check(segments, workspace, masking)
    check(segments, workspace, masking)


def test_of_an_infinity_the_largest_finite_number_is_taken() -> None:
    segment = make(*LARGE, momentum=0.5)
    segment.gradient[700] = -float("inf")
    check([segment], Workspace())
    assert segment.residual[700] == -float("inf")


def test_a_whole_tensor_and_a_single_one() -> None:
    check([make(BLOCK, BLOCK, momentum=0.9)], Workspace())


def test_general_factors_to_rounding() -> None:
    """A fused multiply-add differs in the last bits; of what it gives the k largest are taken all the same."""
    numel, k = LARGE
    segment = make(numel, k, weight=FLOAT32, momentum=0.9, nesterov=True, weight_decay=1e-4)
    (twin,) = copy.deepcopy([segment])
    positions, values = gpu.compress_many_([segment], masking=False, workspace=Workspace())
    corrected = segment.residual.index_put((positions,), values)
    assert positions.equal(corrected.abs().topk(k).indices.sort().values)
    assert twin.weight is not None
    gradient = twin.gradient.add(twin.weight, alpha=1e-4)
    reference.correct_(twin.residual, twin.momentum_buffer, gradient, momentum=0.9, nesterov=True)
    torch.testing.assert_close(corrected, twin.residual, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(segment.momentum_buffer, twin.momentum_buffer, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_adam_to_rounding(amsgrad: bool, dtype: torch.dtype) -> None:
    """Beside a tensor of SGD; the k largest are those of the kernel's own residual."""
    numel, k = LARGE
    adam = make(
        numel, k, dtype, dtype, dtype, momentum=0.7, dampening=0.7, weight_decay=2.0**-6, ahead=2.0**-5, sign=-1.0
    )
    adam = replace(adam, second_moment=make_second_moment(numel, dtype, amsgrad))
    segments = [adam, make(numel, k, momentum=0.5)]
    twins, workspace = copy.deepcopy(segments), Workspace()
    positions, values = gpu.compress_many_(segments, masking=False, workspace=workspace)
    for segment, twin, at, sent in zip(segments, twins, positions.split(k), values.split(k), strict=True):
        assert reference.accumulate_(twin, 0.0) is not None
        corrected = segment.residual.index_put((at,), sent)
        assert at.equal(corrected.abs().topk(k).indices.sort().values)
        one_unit = {"rtol": 1e-6, "atol": 1e-6} if dtype == FLOAT32 else {"rtol": 2.0**-7, "atol": 1e-6}
        torch.testing.assert_close(corrected, twin.residual, rtol=10 * one_unit["rtol"], atol=1e-6)
        moments = [] if twin.second_moment is None else twin.second_moment.tensors
        mine = [] if segment.second_moment is None else segment.second_moment.tensors
        for a, b in zip([segment.momentum_buffer, *mine], [twin.momentum_buffer, *moments], strict=True):
            torch.testing.assert_close(a, b, **one_unit)
    assert workspace.launches[0][0].is_adam != workspace.launches[1][0].is_adam


def test_faults() -> None:
    """What is not finite counts as zero, and sets the flag of its tensor; without a flag nobody looks."""
    fault = torch.zeros(3, dtype=torch.bool, device=DEVICE)
    forms = [{"momentum": 0.5}, {"momentum": 0.5, "gradient": BFLOAT16}, {"momentum": 0.5}]
    segments = [replace(make(BLOCK + 5, 9, **form), fault=fault[i]) for i, form in enumerate(forms)]
    segments[0].gradient[[3, BLOCK + 4]] = torch.tensor([float("nan"), float("inf")], device=DEVICE)
    segments[1].gradient[7] = -float("inf")
    twins = [replace(each, gradient=each.gradient.nan_to_num(0.0, 0.0, 0.0)) for each in copy.deepcopy(segments)]
    positions, values = gpu.compress_many_(segments, masking=True, workspace=Workspace())
    expected = reference.compress_many_(twins, masking=True)
    assert positions.equal(expected[0])
    assert values.equal(expected[1])
    assert all(a.equal(b) for a, b in zip(state(segments), state(twins), strict=True))
    assert fault.tolist() == [True, True, False]
    assert all(bool(tensor.isfinite().all()) for tensor in state(segments))


@pytest.mark.parametrize(("grid", "threshold"), [(1.0, 3.0), (0.25, 2.25)])
def test_of_equal_magnitudes_the_first_are_taken(grid: float, threshold: float) -> None:
    segments = [replace(make(2 * BLOCK + 5, 30), momentum_buffer=None) for _ in range(2)]
    for segment in segments:
        segment.residual.div_(grid).round_().mul_(grid)
        segment.gradient.zero_()
    segments[1].residual.copy_(torch.where(segments[1].residual > 0, 2.0, 0.5))
    segments[1].residual[10:50] = -3.0  # 40 of the same, enough for k = 30, and room for them
    workspace = Workspace()
    workspace.update(segments)
    workspace.thresholds.copy_(torch.tensor([threshold, 3.0]))  # what a sample would give lies among the ties too
    check(segments, workspace)
    assert missed(workspace) == []


def test_ties_of_many_candidates() -> None:
    """More than a program looks at at a time: 100 larger ones, all at the end, and the first 2124 of 2500 others."""
    segment = replace(make(64 * BLOCK, SELECT_BLOCK + 176), momentum_buffer=None)
    segment.gradient.zero_()
    segment.residual.clamp_(-0.9, 0.9)[::10][:2500] = -1.0
    segment.residual[-100:] = 2.0
    workspace = Workspace()
    workspace.update([segment])
    workspace.thresholds.fill_(1.0)
    check([segment], workspace)
    assert missed(workspace) == []


def test_a_dead_tensor_and_one_that_is_nearly() -> None:
    """Fewer than k elements are not zero: which of the zeros pads the message, and that nothing is masked there."""
    numel, k = LARGE[0], 10
    dead, nearly = (make(numel, k, momentum=0.5) for _ in range(2))
    for segment in (dead, nearly):
        segment.residual.zero_()
        segment.gradient.zero_()
    assert dead.momentum_buffer is not None
    dead.momentum_buffer.zero_()
    assert nearly.momentum_buffer is not None
    nearly.momentum_buffer[:-3] = 0
    nearly.residual[5] = -2.0
    nearly.residual[7], nearly.momentum_buffer[7] = 1.0, -2.0  # v = 0, u = -1: sent as padding, if at all
    workspace = Workspace()
    positions, values = gpu.compress_many_([dead, nearly], masking=True, workspace=workspace)
    for part in positions.split(k):
        assert bool((part.diff() > 0).all())  # distinct and ascending
    assert not values[:k].any()
    assert sorted(set(positions[k:][values[k:] != 0].tolist())) == [5, numel - 3, numel - 2, numel - 1]
    assert not nearly.residual.any()
    assert nearly.momentum_buffer.nonzero().flatten().tolist() == [7]
    dead.gradient.normal_()
    check([dead, nearly], workspace)  # alive again
    check([dead, nearly], workspace)


@pytest.mark.parametrize("threshold", [1e-3, 1e30, float("inf"), float("nan"), 0.0])
def test_a_wrong_threshold_costs_time_only(threshold: float) -> None:
    """Too low: more candidates than there is room for. Too high: fewer than k. One of two tensors each."""
    segments = [make(*LARGE, momentum=0.9) for _ in range(3)]
    workspace = Workspace()
    check(segments, workspace)
    redraw(segments)
    workspace.thresholds[1] = threshold
    check(segments, workspace)
    assert missed(workspace) == [1]
    redraw(segments)
    check(segments, workspace)
    assert missed(workspace) == []


def test_as_many_candidates_as_there_is_room_for() -> None:
    """One more is too many; k are enough, one less is not."""
    numel, k = LARGE
    segments = [replace(make(numel, k), momentum_buffer=None) for _ in range(4)]
    workspace = Workspace()
    workspace.update(segments)
    capacity = workspace.rows[0].capacity
    assert capacity < numel // 2
    for segment, count in zip(segments, (capacity, capacity + 1, k, k - 1), strict=True):
        segment.gradient.zero_()
        segment.residual.tanh_().mul_(0.9)[torch.randperm(numel)[:count].to(DEVICE)] = 1.0 + torch.rand(count).to(
            DEVICE
        )
    workspace.thresholds.fill_(1.0)
    check(segments, workspace)
    assert missed(workspace) == [1, 3]


def test_more_tensors_than_a_program_looks_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "TENSORS", 4)
    segments, workspace = [make(numel, 3) for numel in (9, 5, 300, 7, BLOCK + 1, 3, 8, 50, 20, 4)], Workspace()
    for _ in range(2):
        check(segments, workspace)
        redraw(segments)


def test_thresholds_are_found_and_steered() -> None:
    """Two digits of all magnitudes tell how many reach what: the count that follows is near the one that is wanted."""
    numel, k = 16 * BLOCK, 40
    segment = replace(make(numel, k), momentum_buffer=None)
    workspace = Workspace()
    check([segment], workspace)
    assert missed(workspace) == [0]  # no threshold was known
    aim = workspace.rows[0].aim
    for _ in range(2):
        segment.residual.normal_()
        check([segment], workspace)
        assert missed(workspace) == []
        assert abs(int(workspace.counts) - aim) < 6 * aim**0.5
    workspace.thresholds.mul_(1.05)
    segment.residual.normal_()
    high, selector = float(workspace.thresholds), SampledSelector()
    corrected = segment.residual + segment.gradient
    check([segment], workspace)
    assert k < int(workspace.counts) < 0.95 * aim
    assert float(workspace.thresholds) < high
    # As a CPU's, which aims at fewer.
    selector.SMALL, selector.SURPLUS, selector.threshold = 0, aim / k, high  # type: ignore[misc]
    selector(corrected, k)
    assert float(workspace.thresholds) == pytest.approx(selector.threshold, rel=1e-5)


@pytest.mark.parametrize(("tail", "momentum"), [(torch.randn, 0.6), (cubic, 0.0)])
def test_thresholds_follow_a_training(tail: Callable[[int], Tensor], momentum: float) -> None:
    """Error feedback cuts the tail off in each step: what comes lies close behind the last step's k-th magnitude."""
    segments = [make(3 * BLOCK, k, momentum=momentum) for k in (12, 100)]
    twins, selectors = copy.deepcopy(segments), [CountingSelector() for _ in segments]
    for tensor in (*state(segments), *state(twins)):
        tensor.zero_()
    workspace, num_missed = Workspace(), [0, 0]
    for step in range(12):
        for number, (segment, twin) in enumerate(zip(segments, twins, strict=True)):
            segment.gradient.copy_(tail(segment.gradient.numel()))
            u = twin.momentum_buffer
            positions = selectors[number].accumulate_(replace(twin, gradient=segment.gradient))
            assert u is not None
            twin.residual[positions] = u[positions] = 0
        gpu.compress_many_(segments, masking=True, workspace=workspace)
        for number in missed(workspace):
            num_missed[number] += 1
        if step > 8:  # the velocity no longer grows
            assert missed(workspace) == []
            for count, row in zip(workspace.counts.tolist(), workspace.rows, strict=True):
                assert row.k <= count <= row.capacity
                assert 0.5 * row.aim < count < 3 * row.aim
    for count, selector in zip(num_missed, selectors, strict=True):
        # On a CPU there is room for 16 k candidates; of the second tensor here for less than 4 k.
        assert count <= selector.num_estimates + 6


def test_tensors_come_and_go() -> None:
    """Another k, another order, one more, one less, gradients elsewhere, other factors: with one workspace."""
    a, b, c = (make(*LARGE, momentum=0.9) for _ in range(3))
    workspace = Workspace()
    check([a, b], workspace)
    known = workspace.thresholds.tolist()
    workspace.update([c, b, a])
    assert workspace.thresholds.tolist() == [0.0, known[1], known[0]]
    check([c, b, a], workspace)
    check([replace(c, k=9), a], workspace)
    check([a, b, c], workspace)
    for changed in ({"gradient": torch.randn_like(a.gradient)}, {"momentum": 0.5}, {"momentum_buffer": None}):
        a = replace(a, **changed)
        before = workspace.table, workspace.factors
        check([a, b, c], workspace)
        after = workspace.table, workspace.factors
        assert any(one is not other for one, other in zip(before, after, strict=True))
        check([a, b, c], workspace)
        assert workspace.table is after[0]
        assert workspace.factors is after[1]


@pytest.mark.skipif(DEVICE != "cpu", reason="the order of programs is not ours to choose on a GPU")
def test_the_order_in_which_blocks_run_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import interpreter_builder as builder

    run_at = builder.set_grid_idx
    monkeypatch.setattr(builder, "set_grid_idx", lambda x, y, z: run_at(builder.grid_dim[0] - 1 - x, y, z))
    segments, workspace = [make(*size, momentum=0.9) for size in [(4 * BLOCK + 100, 40), LARGE]], Workspace()
    for _ in range(2):
        redraw(segments)
        check(segments, workspace)
    assert workspace.block_bases[0] > 0  # it was the other way round
    assert missed(workspace) == []


def module_of(kernel: str) -> ModuleType:
    from lightning_lowbw.ops import triton_kernels, triton_messages

    return triton_kernels if hasattr(triton_kernels, kernel) else triton_messages


class Launched:
    """Stands for a kernel, and counts."""

    def __init__(self, count: Count, name: str, kernel: Any) -> None:
        self.count, self.name, self.kernel = count, name, kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.count.launched.append(self.name)
            self.count.is_inside = True
            self.kernel[grid](*args, **kwargs)
            self.count.is_inside = False

        return launch


class Count(TorchDispatchMode):
    """Counts the kernels' launches, and the operations of torch beside them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.launched: list[str] = []
        self.num_operations = self.num_waits = 0
        self.is_inside = False  # Triton's interpreter moves tensors about
        for name in KERNELS:
            module = module_of(name)
            monkeypatch.setattr(module, name, Launched(self, name, getattr(module, name)))

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_operations += not self.is_inside
        self.num_waits += not self.is_inside and "_local_scalar_dense" in str(operation)
        return operation(*args, **(kwargs or {}))


def test_the_number_of_launches_does_not_depend_on_the_number_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a step that finds the thresholds and in one that knows them."""
    seen = []
    for num_tensors in (2, 6):
        segments, workspace = [make(*LARGE, momentum=0.9) for _ in range(num_tensors)], Workspace()
        workspace.update(segments)
        for _ in range(2):
            with monkeypatch.context() as patch, Count(patch) as count:
                gpu.compress_many_(segments, masking=True, workspace=workspace)
            redraw(segments)
            assert count.num_waits == 0
            seen.append((len(count.launched), count.num_operations))
    assert seen[:2] == seen[2:]
    assert [num_launches for num_launches, _ in seen[:2]] == [11, 11]


@pytest.mark.parametrize(
    "changes",
    [
        {"gradient": torch.randn(LARGE[0], 2)[:, 0]},
        {"gradient": torch.randn(LARGE[0], dtype=torch.float64)},
        {"weight": torch.randn(LARGE[0] + 1)},
        {"residual": torch.randn(LARGE[0]).bfloat16()},
        {"second_moment": make_second_moment(LARGE[0]), "momentum_buffer": None},
        {"k": 0},
        {"chunk": 64},
    ],
)
def test_what_the_kernels_do_not_take(changes: dict[str, Any]) -> None:
    on_device = {name: each.to(DEVICE) if isinstance(each, Tensor) else each for name, each in changes.items()}
    segment = replace(make(*LARGE), **on_device)
    with pytest.raises(ValueError, match=r"contiguous|must be|leave this one to the reference"):
        gpu.compress_many_([segment], masking=True, workspace=Workspace())


# Messages -------------------------------------------------------------------------------------------------------------

# (numel, k): one of one, all, none beside others, low bits that straddle words, more than a program looks at at a time
WIRE_SIZES = [[(1, 1)], [(70, 70)], [(5, 0), (1000, 3), (33, 31)], [(BLOCK + 1, 4), (300, 1), (64, 64), (9, 2)]]
WIRE_SIZES += [[(1 << 30, 37), (100_000, 1500)]]


def draw_parts(sizes: list[tuple[int, int]]) -> list[tuple[Tensor, Tensor]]:
    positions = [torch.randint(numel, (4 * k,)).unique()[:k] if k < numel // 2 else torch.randperm(numel)[:k].sort()[0]
                 for numel, k in sizes]  # fmt: skip
    return [(each.to(DEVICE), torch.randn(each.numel()).mul_(1e3).to(DEVICE)) for each in positions]


@pytest.mark.parametrize("value_dtype", VALUE_NAMES)
@pytest.mark.parametrize("sizes", WIRE_SIZES, ids=str)
def test_messages_are_those_of_a_cpu(
    sizes: list[tuple[int, int]], value_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bytes, the same of them again, and the same put back into the residuals."""
    codec, parts, numels = SparseCodec(value_dtype), draw_parts(sizes), [numel for numel, _ in sizes]
    counts = [positions.numel() for positions, _ in parts]
    small = min(max(numels), 1 << 20)  # that of 2^30 elements has no memory: its residual is looked at where it is
    residuals = [torch.ones(min(numel, small), device=DEVICE) for numel in numels]
    twins = [each.clone() for each in residuals]
    has_room = small == max(numels)
    monkeypatch.setattr(gpu, "is_available", lambda device: False)
    expected = codec.encode(parts, numels, twins if has_room else None)
    monkeypatch.setattr(gpu, "is_available", lambda device: True)
    message = codec.encode(parts, numels, residuals if has_room else None)
    assert message.equal(expected)
    assert all(a.equal(b) for a, b in zip(residuals, twins, strict=True))
    rows = torch.stack([message, message]).repeat(1, 2)[:, : message.numel()]  # as among those of other sizes
    found = codec.decode(rows, counts, numels)
    monkeypatch.setattr(gpu, "is_available", lambda device: False)
    assert all(equal_bits(a, b) for a, b in zip(found, codec.decode(rows, counts, numels), strict=True))


def test_damaged_messages_stay_inside_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a CPU raises, the flag is set, and only there; what comes out can be used as an index."""
    sizes = [(1000, 3), (7, 0), (40, 33), (300, 70)]
    codec, parts, numels = SparseCodec("bfloat16"), draw_parts(sizes), [numel for numel, _ in sizes]
    counts, chance = [k for _, k in sizes], torch.Generator().manual_seed(0)
    monkeypatch.setattr(gpu, "is_available", lambda device: False)
    whole = codec.encode(parts, numels).cpu()
    words_bytes = 4 * num_words(counts, numels)
    num_refused = 0
    for number in range(24):
        message = whole.clone()
        places = torch.randint(words_bytes, (number % 6,), generator=chance)
        message[places] = torch.randint(256, places.shape, generator=chance, dtype=torch.uint8)
        if number in (22, 23):  # no position, and only positions
            message[:words_bytes] = 255 * (number % 2)
        row, is_refused = message.unsqueeze(0), False
        try:
            expected = codec.decode(row, counts, numels)[0]
        except ValueError:
            is_refused = True
        with monkeypatch.context() as kernels:
            kernels.setattr(gpu, "is_available", lambda device: True)
            flag = torch.zeros((), dtype=torch.bool, device=DEVICE)
            positions, values = (each.cpu() for each in codec.decode(row.to(DEVICE), counts, numels, flag))
            assert bool(flag) == is_refused
            assert positions.shape == values.shape == (1, sum(counts))
            for numel, mine in zip(numels, positions[0].split(counts), strict=True):
                assert ((mine >= 0) & (mine < numel)).all()
            if is_refused:
                with pytest.raises(ValueError, match="A damaged message: its positions are too many, too few, or"):
                    codec.decode(row.to(DEVICE), counts, numels)
            else:
                assert positions.equal(expected)
        num_refused += is_refused
    assert 8 < num_refused < 22


def test_a_position_behind_the_end_becomes_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a tensor with as many bits, and a few elements more."""
    codec, positions = SparseCodec("float32"), torch.tensor([1, 2, 1010])
    monkeypatch.setattr(gpu, "is_available", lambda device: False)
    message = codec.encode([(positions, torch.ones(3))], [1023]).to(DEVICE)
    monkeypatch.setattr(gpu, "is_available", lambda device: True)
    flag = torch.zeros((), dtype=torch.bool, device=DEVICE)
    for numel, expected in ((1023, 1010), (1011, 1010), (1010, 1009), (1000, 999)):
        found, _ = codec.decode(message.unsqueeze(0), [3], [numel], flag)
        assert found.tolist() == [[1, 2, expected]]
        assert bool(flag) == (numel < 1011)


@pytest.mark.parametrize("num_messages", [1, 3])
@pytest.mark.parametrize("steps", [False, True])
def test_average(steps: bool, num_messages: int) -> None:
    """Positions that several have sent and others, the first and last among them; summed in one order."""
    numels, counts = [1, 50, 3000, 70, 3000], [1, 20, APPLY_BLOCK + 3, 70, 2]
    first, rows = [0, 1, 21, 0, 70], [0, 0, 0, 1, 1]
    shape = 2, num_messages, sum(counts)
    positions = torch.zeros(shape, dtype=torch.int64)
    values = torch.randn(shape) * 1000.0 ** torch.arange(num_messages).view(-1, 1)
    for numel, count, start, row in zip(numels, counts, first, rows, strict=True):
        for message in range(num_messages):
            positions[row, message, start : start + count] = torch.randperm(numel)[:count].sort().values
    positions, values = positions.to(DEVICE), values.to(DEVICE)

    def draw() -> list[Arrival]:
        outs = [torch.full((numel,), float("nan"), device=DEVICE) for numel in numels]
        weights = [torch.linspace(1, 2, numel, device=DEVICE) if steps else None for numel in numels]
        columns = zip(outs, rows, first, counts, weights, strict=True)
        return [Arrival(*each, 2.0**-number) for number, each in enumerate(columns)]

    def results(arrivals: list[Arrival]) -> list[Tensor]:
        return [each.out if each.weight is None else each.weight for each in arrivals]

    found, expected, other = draw(), draw(), draw()
    gpu.average_many_(found, positions, values)
    averages.average_many_(expected, positions, values)
    assert all(equal_bits(a, b) for a, b in zip(results(found), results(expected), strict=True))
    if num_messages > 1:  # else the order would not have been tested
        gpu.average_many_(other, positions.flip(1), values.flip(1))
        assert not all(a.equal(b) for a, b in zip(results(other), results(expected), strict=True))


def test_averages_are_wide_and_contiguous() -> None:
    positions, values = torch.zeros(1, 1, 1, dtype=torch.int64, device=DEVICE), torch.ones(1, 1, 1, device=DEVICE)
    for out in (torch.ones(4, device=DEVICE).bfloat16(), torch.ones(4, 2, device=DEVICE)[:, 0]):
        with pytest.raises(ValueError, match="float32 and contiguous"):
            gpu.average_many_([Arrival(out, 0, 0, 1)], positions, values)


# Before the training, and in a selection ------------------------------------------------------------------------------


def test_the_kernels_are_tried_before_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them runs, and what they compute is compared."""
    monkeypatch.setattr(gpu, "is_available", lambda device: True)
    with monkeypatch.context() as patch, Count(patch) as count:
        assert dispatch.prepare(torch.device(DEVICE)) is None
    assert set(count.launched) == set(KERNELS)


@pytest.mark.parametrize("value_dtype", [*WIRE_DTYPES, None])
@pytest.mark.parametrize("is_adam", [False, True])
def test_a_trial_of_any_kind(is_adam: bool, value_dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The specification agrees with the kernels: otherwise all ranks would go without."""
    monkeypatch.setattr(gpu, "is_available", lambda device: True)
    dtypes = [(FLOAT32,) * 3, (BFLOAT16,) * 3, (FLOAT16,) * 3]
    dtypes += [] if is_adam else [(BFLOAT16, FLOAT32, BFLOAT16), (FLOAT16, FLOAT32, FLOAT16)]
    uses = Uses(
        kinds=tuple(
            Kind(*each, is_adam=is_adam, is_aligned=is_aligned) for each in dtypes for is_aligned in (True, False)
        ),
        value_dtypes=(value_dtype,),
        num_messages=(1, 3) if value_dtype is None else (),
    )
    assert dispatch.prepare(torch.device(DEVICE), uses) is None


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_that_does_not_compile_is_told_and_all_are_disabled(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            raise RuntimeError("Failed to find C compiler.\n  more\n")

    device = torch.device(DEVICE)
    monkeypatch.setattr(gpu, "_is_supported", lambda device: True)
    monkeypatch.setattr(gpu, "_faults", [])
    with monkeypatch.context() as patch:
        patch.setattr(module_of(name), name, Broken())
        reason = dispatch.prepare(device)
    assert reason == f"The kernels of Triton do not work on {DEVICE}: RuntimeError: Failed to find C compiler."
    assert gpu.is_available(device)  # the ranks agree first
    gpu.disable(reason)
    assert not gpu.is_available(device)


def test_a_kernel_that_computes_something_else_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "is_available", lambda device: True)
    monkeypatch.setattr(gpu, "average_many_", lambda arrivals, positions, values: arrivals[0].out.fill_(9.0))
    reason = dispatch.prepare(torch.device(DEVICE))
    assert reason is not None
    assert "something else than plain torch" in reason


@pytest.mark.parametrize("masking", [False, True])
def test_a_selection_by_kernels_is_the_one_without(masking: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of one element, none, all sent, chunked and wide among them: which go without the kernels."""
    one, whole, large, other = make(1, 1), make(7, 7), make(*LARGE, momentum=0.75), make(*LARGE, nesterov=True)
    narrow = make(*LARGE, momentum=0.5, gradient=BFLOAT16, momentum_buffer=BFLOAT16)
    segments = {
        "one": one,
        "whole": whole,
        "empty": make(0, 0),
        "large": large,
        "chunked": replace(make(1000, 3), chunk=300, k_last=2),
        "narrow": narrow,
        "dampened": make(*LARGE, momentum=0.5, dampening=0.5),
        "wide": replace(make(*LARGE), gradient=torch.randn(LARGE[0], dtype=torch.float64, device=DEVICE)),
        "other": other,
    }
    twins = copy.deepcopy(segments)
    with_kernels, without = Selection(), Selection()
    for _ in range(3):
        monkeypatch.setattr(gpu, "is_available", lambda device: True)
        found = with_kernels.compress_(segments, masking=masking)
        monkeypatch.setattr(gpu, "is_available", lambda device: False)
        expected = without.compress_(twins, masking=masking)
        for pair, twin in zip(found, expected, strict=True):
            assert all(equal_bits(a, b) for a, b in zip(pair, twin, strict=True))
        assert all(a.equal(b) for a, b in zip(state([*segments.values()]), state([*twins.values()]), strict=True))
        for segment, twin in zip(segments.values(), twins.values(), strict=True):
            segment.gradient.normal_()
            twin.gradient.copy_(segment.gradient)
    assert list(with_kernels._workspaces) == [("one", "whole", "large", "narrow", "dampened", "other")]
    thresholds = with_kernels.thresholds
    assert thresholds["large"] > 0


def test_a_tensor_is_in_one_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups that begin during backward have one each; where the groups change, the old ones go."""
    monkeypatch.setattr(gpu, "is_available", lambda device: True)
    a, b, c = (make(*LARGE) for _ in range(3))
    selection = Selection()
    selection.compress_({"a": a}, masking=True)
    selection.compress_({"b": b, "c": c}, masking=True)
    assert set(selection._workspaces) == {("a",), ("b", "c")}
    selection.compress_({"a": a, "b": b}, masking=True)
    assert set(selection._workspaces) == {("a", "b")}
    selection.thresholds = {"a": 1.0}
    assert selection.thresholds == {"a": 1.0}
    assert not selection._workspaces
