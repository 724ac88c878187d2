"""What only the Triton kernels do; `test_gpu` runs this in Triton's interpreter, `tests/gpu` on a GPU.

`backend_cases` runs there as well.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from lightning_lowbw.comm.peers import fill_
from lightning_lowbw.kernels import dispatch, gpu, reference
from lightning_lowbw.kernels.gpu import SELECT_BLOCK
from lightning_lowbw.kernels.table import GPU_BLOCK, JoinedRow, JoinedTable, Workspace
from lightning_lowbw.kernels.tensors import copy_all_
from lightning_lowbw.payloads.codec import SparseCodec, layout_of
from lightning_lowbw.payloads.top_k import SampledSelector
from lightning_lowbw.sync.kernels import what_fails
from lightning_lowbw.sync.table import Gathered
from tests.kernels.backend_cases import draw_vector
from tests.kernels.bits import BFLOAT16, FLOAT16, FLOAT32, equal_bits
from tests.kernels.segments import FORMS, LARGE, check, draw_parts, make, redraw
from tests.kernels.workers import METHODS, make_worker

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def missed(workspace: Workspace) -> list[int]:
    """Return the tensors whose threshold did not fit in the last step, and which were searched as a whole."""
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
    """More than a program looks at in a turn: 100 larger elements at the end, and the first 2124 of 2500 ties."""
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
    """The digits of all magnitudes give a threshold: the number of candidates that follows is near the aim."""
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
    """Tensors begin and end in any block, several in one; all or none of their elements are sent; whole and in part."""
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
    """A GPU returns positions inside the tensors, and raises no error: too large positions become the last."""
    counts, numels = [3, 0, 33, 70], [1000, 7, 40, 300]
    codec, chance, num_refused = SparseCodec("bfloat16"), torch.Generator().manual_seed(0), 0
    monkeypatch.setattr(dispatch, "uses_triton", lambda device: True)
    whole = codec.encode(draw_parts(list(zip(numels, counts, strict=True))), numels)
    words_bytes = 4 * layout_of(tuple(counts), tuple(numels)).num_words
    for number in range(14):
        message = whole.clone()
        places = torch.randint(words_bytes, (number % 6,), generator=chance).to(DEVICE)
        message[places] = torch.randint(256, places.shape, generator=chance, dtype=torch.uint8).to(DEVICE)
        if number in (12, 13):  # no position, and only positions
            message[:words_bytes] = 255 * (number % 2)
        positions, values = (each.cpu() for each in codec.decode(message.unsqueeze(0), counts, numels))
        assert positions.shape == values.shape == (1, sum(counts))
        for numel, mine in zip(numels, positions[0].split(counts), strict=True):
            assert ((mine >= 0) & (mine < numel)).all()
        with monkeypatch.context() as plain:
            plain.setattr(dispatch, "uses_triton", lambda device: False)
            try:
                assert positions.equal(codec.decode(message.unsqueeze(0).cpu(), counts, numels)[0])
            except ValueError:
                num_refused += 1
    assert 4 < num_refused < 12
    message = SparseCodec("float32").encode(
        [(torch.tensor([1, 2, 1010], device=DEVICE), torch.ones(3, device=DEVICE))], [1023]
    )
    for numel, expected in ((1023, 1010), (1011, 1010), (1010, 1009), (1000, 999)):
        found, _ = SparseCodec("float32").decode(message.unsqueeze(0), [3], [numel])
        assert found.tolist() == [[1, 2, expected]]


# Tensors as one vector ------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")  # by numpy, in Triton's interpreter
@pytest.mark.parametrize("dtypes", [(FLOAT32,), (FLOAT32, BFLOAT16, FLOAT16)], ids=["float32", "mixed"])
def test_what_is_sent_whole_is_gathered_and_written(dtypes: tuple[torch.dtype, ...]) -> None:
    """As `fill_`, `are_not_finite` and `copy_all_` do, to the bit; also where the tensors have moved."""
    table = JoinedTable()
    for _ in range(2):
        parts = draw_vector(dtypes, 1.0)
        tensors, beside = [signal for _, signal in parts], [whole.clone() for whole, _ in parts]
        named = {str(number): each for number, each in enumerate(tensors)}
        gathered = Gathered(named, table)
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
        assert Gathered(named, table).flags.equal(reference.are_not_finite(tensors))


def test_the_table_of_a_vector_follows_what_changes() -> None:
    """If nothing changes, it is kept."""
    device, table, last = torch.device(DEVICE), JoinedTable(), None
    a, b, more = (torch.ones(numel, device=DEVICE) for numel in (5, GPU_BLOCK, 9))
    for tensors in ((a, b), (a.clone(), b), (b, a), (b, a, more), (b, a.to(FLOAT16), more), (more,)):
        starts, numel = accumulate(map(torch.numel, tensors), initial=0), sum(map(torch.numel, tensors))
        places = zip(tensors, starts, strict=False)
        given = [JoinedRow.of(each, slice(0, each.numel()), start, each) for each, start in places]
        assert table.update(given, device).table is not last
        last = table.table
        assert table.update(given, device).table is last
        fresh = JoinedTable().update(given, device)
        assert fresh.table.equal(last)
        for shape in ((1, numel), (3, numel // 3 + 1)):
            assert table.spans(*shape).equal(fresh.spans(*shape))
            assert table.spans(*shape) is table.spans(*shape)


# Before the training --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("optimizer", "name"), [*(("momentum", each) for each in METHODS), ("Adam", "dgc")])
def test_the_trial_before_a_training(optimizer: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The specification agrees with the kernels: otherwise all ranks would use plain torch."""
    monkeypatch.setattr(dispatch, "_has_kernels", lambda device: True)
    worker, device = make_worker(METHODS[name], optimizer, DEVICE), torch.device(DEVICE)
    assert what_fails([worker], [worker.method.what], device) is None
    assert dispatch.uses_triton(device)
