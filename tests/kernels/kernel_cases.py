"""What only the Triton kernels do; `test_gpu` runs this in Triton's interpreter, `tests/gpu` on a GPU.

What all backends do is in `backend_cases`, which runs there as well.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from lightning_lowbw.comm.echoes import echo
from lightning_lowbw.comm.peers import fill_
from lightning_lowbw.compress.codec import SparseCodec, layout_of
from lightning_lowbw.compress.selection import SampledSelector
from lightning_lowbw.kernels import dispatch, gpu, reference
from lightning_lowbw.kernels.gpu import SELECT_BLOCK
from lightning_lowbw.kernels.table import GPU_BLOCK, JoinedRow, JoinedTable, Workspace
from lightning_lowbw.kernels.tensors import copy_all_
from lightning_lowbw.sync.beside import Gathered
from lightning_lowbw.sync.kernels import what_fails
from lightning_lowbw.sync.quantized import Quantized, QuantizedExchange
from tests.kernels.bits import BFLOAT16, FLOAT16, FLOAT32, equal_bits
from tests.kernels.segments import FORMS, LARGE, check, draw_parts, make, redraw
from tests.kernels.workers import METHODS, make_worker

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def missed(workspace: Workspace) -> list[int]:
    """Return the tensors whose threshold did not fit in the last step, so that all of them was looked through."""
    counts = zip(workspace.rows, workspace.counts.tolist(), strict=True)
    return [number for number, (row, count) in enumerate(counts) if not row.k <= count <= row.capacity]


# compress_many_ -------------------------------------------------------------------------------------------------------


def test_kinds_lie_together_and_thresholds_fit() -> None:
    """In an order that lays their blocks otherwise than the tensors themselves."""
    names = ("momentum", "bfloat16", "decay of nothing", "float16 gradient", "error feedback")
    segments = [make(*LARGE, **FORMS[name]) for name in names]
    workspace = Workspace()
    for _ in range(2):
        check(segments, workspace)
        redraw(segments)
    assert missed(workspace) == []
    assert len(workspace.launches) == len({*workspace.kinds}) == 3


def test_ties_of_many_candidates() -> None:
    """More than a program looks at at a time: 100 larger ones, all at the end, and the first 2124 of 2500 others."""
    segment = replace(make(64 * GPU_BLOCK, SELECT_BLOCK + 176), momentum_buffer=None)
    segment.gradient.zero_()
    segment.residual.clamp_(-0.9, 0.9)[::10][:2500] = -1.0
    segment.residual[-100:] = 2.0
    workspace = Workspace()
    workspace.update([segment])
    workspace.thresholds.fill_(1.0)
    check([segment], workspace)
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
        large = 1.0 + torch.rand(count).to(DEVICE)
        segment.residual.tanh_().mul_(0.9)[torch.randperm(numel)[:count].to(DEVICE)] = large
    workspace.thresholds.fill_(1.0)
    check(segments, workspace)
    assert missed(workspace) == [1, 3]


def test_more_tensors_than_a_program_looks_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "TENSORS", 4)
    check([make(numel, 3) for numel in (9, 5, 300, 7, GPU_BLOCK + 1, 3, 8, 50, 20, 4)], Workspace())


def test_thresholds_are_found_and_steered() -> None:
    """Two digits of all magnitudes tell how many reach what: the count that follows is near the one that is wanted."""
    numel, k = 16 * GPU_BLOCK, 40
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
    high, selector, (twin,) = float(workspace.thresholds), SampledSelector(), copy.deepcopy([segment])
    last = float(workspace.last_kth)
    check([segment], workspace)
    assert k < int(workspace.counts) < 0.95 * aim
    # As a CPU's, which aims at fewer.
    selector.SMALL, selector.SURPLUS, selector.threshold = 0, aim / k, high  # type: ignore[misc]
    selector._last = k, last
    selector.accumulate_(twin)
    assert float(workspace.thresholds) == pytest.approx(selector.threshold, rel=1e-5)


def test_thresholds_follow_residuals_that_grow() -> None:
    """As they do from the first step on, where gradients agree: they fit before the growth is over."""
    segment, workspace, misses = make(8 * GPU_BLOCK, 40, momentum=0.9), Workspace(), []
    segment.residual.zero_()
    assert segment.momentum_buffer is not None
    segment.momentum_buffer.zero_()
    for step in range(6):
        check([segment], workspace)
        misses += [step] * len(missed(workspace))
    assert misses == [*range(len(misses))]
    assert len(misses) <= 4


def test_tensors_come_and_go() -> None:
    """Another k, another order, one more, one less, gradients elsewhere: with one workspace."""
    a, b, c = (make(*LARGE, momentum=0.9) for _ in range(3))
    workspace = Workspace()
    check([a, b], workspace)
    workspace.update([c, b, a])
    assert workspace.thresholds.tolist() == [0.0] * 3
    check([c, b, a], workspace)
    check([replace(c, k=9), a], workspace)
    check([a, b, c], workspace)
    a = replace(a, gradient=torch.randn_like(a.gradient))
    before = workspace.table
    check([a, b, c], workspace)
    after = workspace.table
    assert after is not before
    check([a, b, c], workspace)
    assert workspace.table is after


@pytest.mark.skipif(DEVICE != "cpu", reason="the order of programs is not ours to choose on a GPU")
def test_the_order_in_which_blocks_run_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import interpreter_builder as builder

    run_at = builder.set_grid_idx
    monkeypatch.setattr(builder, "set_grid_idx", lambda x, y, z: run_at(builder.grid_dim[0] - 1 - x, y, z))
    segments, workspace = [make(*size, momentum=0.9) for size in [(4 * GPU_BLOCK + 100, 40), LARGE]], Workspace()
    for _ in range(2):
        redraw(segments)
        check(segments, workspace)
    assert workspace.block_bases[0] > 0  # it was the other way round
    assert missed(workspace) == []


# Messages -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value_dtype", ["bfloat16", "int2"])
def test_a_message_of_many_blocks_of_words(value_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that begin and end in any of them, several in one, all and none of them sent; whole and in part."""
    monkeypatch.setattr(gpu, "WORDS_BLOCK", 2)
    monkeypatch.setattr(gpu, "TENSORS", 2)
    sizes = [(3, 3000), (0, 50), (130, 260), (1, 2), (64, 64), (2, 90), (1, 9), (7, 900), (200, 200), (0, 1), (5, 999)]
    codec, parts = SparseCodec(value_dtype), draw_parts(sizes)
    numels, counts = [n for _, n in sizes], [k for k, _ in sizes]
    message = torch.stack([codec.encode(parts, numels), codec.encode(draw_parts(sizes), numels)])
    for tensors in (slice(None), slice(1, 4), slice(8, None)):
        monkeypatch.setattr(dispatch, "uses_triton", lambda device: True)
        found = codec.decode(message, counts, numels, tensors)
        monkeypatch.setattr(dispatch, "uses_triton", lambda device: False)
        expected = codec.decode(message, counts, numels, tensors)
        assert all(equal_bits(a, b) for a, b in zip(found, expected, strict=True))


def test_damaged_messages_stay_inside_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a CPU raises, a GPU returns positions that can be used as an index."""
    sizes = [(1000, 3), (7, 0), (40, 33), (300, 70)]
    codec, parts, numels = SparseCodec("bfloat16"), draw_parts(sizes), [numel for numel, _ in sizes]
    counts, chance = [k for _, k in sizes], torch.Generator().manual_seed(0)
    monkeypatch.setattr(dispatch, "uses_triton", lambda device: False)
    whole = codec.encode(parts, numels).cpu()
    words_bytes = 4 * layout_of(tuple(counts), tuple(numels)).num_words
    num_refused = 0
    for number in range(14):
        message = whole.clone()
        places = torch.randint(words_bytes, (number % 6,), generator=chance)
        message[places] = torch.randint(256, places.shape, generator=chance, dtype=torch.uint8)
        if number in (12, 13):  # no position, and only positions
            message[:words_bytes] = 255 * (number % 2)
        row, is_refused = message.unsqueeze(0), False
        try:
            expected = codec.decode(row, counts, numels)[0]
        except ValueError:
            is_refused = True
        with monkeypatch.context() as kernels:
            kernels.setattr(dispatch, "uses_triton", lambda device: True)
            positions, values = (each.cpu() for each in codec.decode(row.to(DEVICE), counts, numels))
            assert positions.shape == values.shape == (1, sum(counts))
            for numel, mine in zip(numels, positions[0].split(counts), strict=True):
                assert ((mine >= 0) & (mine < numel)).all()
            assert is_refused or positions.equal(expected)
        num_refused += is_refused
    assert 4 < num_refused < 12


def test_a_position_behind_the_end_becomes_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a tensor with as many bits, and a few elements more."""
    codec, positions = SparseCodec("float32"), torch.tensor([1, 2, 1010])
    monkeypatch.setattr(dispatch, "uses_triton", lambda device: False)
    message = codec.encode([(positions, torch.ones(3))], [1023]).to(DEVICE)
    monkeypatch.setattr(dispatch, "uses_triton", lambda device: True)
    for numel, expected in ((1023, 1010), (1011, 1010), (1010, 1009), (1000, 999)):
        found, _ = codec.decode(message.unsqueeze(0), [3], [numel])
        assert found.tolist() == [[1, 2, expected]]


# Tensors as one vector ------------------------------------------------------------------------------------------------

NUMELS = [3, 130, 1, 2 * GPU_BLOCK + 7, 64, 900, 5, GPU_BLOCK, 1]  # many in one block, and one over several blocks
Parts = list[tuple[torch.Tensor, torch.Tensor]]  # a tensor, and its signal in the midst of it


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
            parts, found = draw_vector(dtypes, scale), list[list[torch.Tensor]]()
            for number, place, value in NOT_FINITE[not_finite]:
                parts[number][1][place] = value
            bad = [number for number, (_, signal) in enumerate(parts) if not signal.isfinite().all()]
            for exchange, uses_kernels in zip(both, (True, False), strict=True):
                monkeypatch.setattr(dispatch, "uses_triton", lambda device, uses_kernels=uses_kernels: uses_kernels)
                mine = copy.deepcopy(parts)
                prepared = exchange.prepare({str(number): signal for number, (_, signal) in enumerate(mine)})
                means = prepared.send().wait().mean.dense()
                assert prepared.faults is None or prepared.faults[1].nonzero().flatten().tolist() == bad
                assert (prepared.faults is not None) == uses_kernels
                assert exchange.fault is not None
                kept = [*exchange.residuals.values(), exchange.fault]
                found.append([*means.values(), *kept, *(whole for whole, _ in mine)])
            for one, other in zip(*found, strict=True):  # a NaN has many bits
                assert equal_bits(
                    *(each.nan_to_num(9.0) if each.is_floating_point() else each for each in (one, other))
                )


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")  # by numpy, in Triton's interpreter
@pytest.mark.parametrize("dtypes", [(FLOAT32,), (FLOAT32, BFLOAT16, FLOAT16)], ids=["float32", "mixed"])
def test_what_is_sent_whole_is_gathered_and_written(dtypes: tuple[torch.dtype, ...]) -> None:
    """As `fill_`, `are_not_finite` and `copy_all_` do, to the bit; also where the tensors have moved."""
    table = JoinedTable()
    for _ in range(2):
        parts = draw_vector(dtypes, 1.0)
        tensors, beside = [signal for _, signal in parts], [whole.clone() for whole, _ in parts]
        gathered = Gathered(tensors, table)
        joined, sizes = torch.empty(sum(map(torch.numel, tensors)), device=DEVICE), [*map(torch.numel, tensors)]
        fill_(joined, sizes, tensors, 1.0)
        assert equal_bits(gathered.joined + 0.0, joined + 0.0)  # of zeros the sign may differ
        assert all(equal_bits(whole, before) for (whole, _), before in zip(parts, beside, strict=True))
        assert not gathered.flags.any()
        mean, twins = joined * 0.7, [tensor.clone() for tensor in tensors]
        copy_all_(twins, [*mean.split(sizes)])
        gathered.write_(mean)
        assert all(map(equal_bits, tensors, twins))
        tensors[0][0], tensors[2][-1] = float("inf"), float("nan")
        assert Gathered(tensors, table).flags.equal(reference.are_not_finite(tensors))


def test_what_a_node_has_gathered_is_read_with_gaps_between_its_rows() -> None:
    """Of two ranks, the parts of the second are shorter."""
    longest, tensors = GPU_BLOCK + 15, [torch.zeros(numel, device=DEVICE, dtype=BFLOAT16) for numel in (2049, 7, 2058)]
    rows, table = torch.randn(2, longest, device=DEVICE), list[JoinedRow]()
    parts = [(slice(0, 1025), slice(0, 4), slice(0, 1029)), (slice(1025, 2049), slice(4, 7), slice(1029, 2058))]
    expected = [torch.zeros_like(tensor) for tensor in tensors]
    for number, of_rank in enumerate(parts):
        start = 0
        for tensor, part, mean in zip(tensors, of_rank, expected, strict=True):
            table.append(JoinedRow.of(tensor, part, number * longest + start))
            mean[part] = rows[number, start : start + part.stop - part.start].to(BFLOAT16)
            start += part.stop - part.start
    rooms = JoinedTable().update(table, torch.device(DEVICE))
    gpu.decode_(rooms, rows.view(torch.uint8), longest, FLOAT32, num_messages=1)
    assert all(equal_bits(a, b) for a, b in zip(tensors, expected, strict=True))


def test_the_table_of_a_vector_follows_what_changes() -> None:
    """And is kept where nothing does."""
    device, table = torch.device(DEVICE), JoinedTable()
    a, b, more = (torch.ones(numel, device=DEVICE) for numel in (5, GPU_BLOCK, 9))

    def rows(*tensors: torch.Tensor) -> list[JoinedRow]:
        starts = accumulate(map(torch.numel, tensors), initial=0)
        whole = ((each, slice(0, each.numel()), start) for each, start in zip(tensors, starts, strict=False))
        return [JoinedRow.of(tensor, part, start, tensor) for tensor, part, start in whole]

    last = None
    for tensors in ((a, b), (a.clone(), b), (b, a), (b, a, more), (b, a.to(FLOAT16), more), (more,)):
        given, numel = rows(*tensors), sum(map(torch.numel, tensors))
        assert table.update(given, device).table is not last
        last = table.table
        assert table.update(given, device).table is last
        fresh = JoinedTable().update(given, device)
        assert fresh.table.equal(last)
        for shape in ((1, numel), (3, numel // 3 + 1), (1, numel)):
            assert table.spans(*shape).equal(fresh.spans(*shape))
        assert table.spans(1, numel) is table.spans(1, numel)


# Before the training, and in a selection ------------------------------------------------------------------------------


@pytest.mark.parametrize(("optimizer", "name"), [*(("momentum", each) for each in METHODS), ("Adam", "dgc")])
def test_the_trial_before_a_training(optimizer: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The specification agrees with the kernels: otherwise all ranks would use plain torch."""
    monkeypatch.setattr(dispatch, "_has_kernels", lambda device: True)
    worker, device = make_worker(METHODS[name], optimizer, DEVICE), torch.device(DEVICE)
    assert what_fails([worker], [worker.method.what], device) is None
    assert dispatch.uses_triton(device)
