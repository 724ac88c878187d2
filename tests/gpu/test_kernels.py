"""The compiled kernels against the reference: all that the interpreter is asked, and what only a GPU can tell."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

from lightning_lowbw.kernels import dispatch, gpu
from lightning_lowbw.kernels.table import Workspace
from tests.kernels import backend_cases, kernel_cases
from tests.kernels.bits import equal_bits
from tests.kernels.kernel_cases import missed
from tests.kernels.segments import LARGE, check, make, redraw, state

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
pytest.importorskip("triton")

for module in (kernel_cases, backend_cases):
    globals().update({name: case for name, case in vars(module).items() if name.startswith(("test_", "_fast"))})


def test_is_available() -> None:
    assert dispatch.uses_triton(torch.device("cuda"))


def test_many_blocks_at_once() -> None:
    """Against the reference, and the same bits again: whatever the order of the appends was."""
    segments = [make(numel, numel // 1000, momentum=0.9) for numel in (1 << 20, 3_000_001, 65_536, 2_359_296)]
    twins, workspace, other = copy.deepcopy(segments), Workspace(), Workspace()
    for _ in range(3):
        redraw(segments)
        for mine, theirs in zip(state(segments), state(twins), strict=True):
            theirs.copy_(mine)
        check(segments, workspace)
        gpu.compress_many_(twins, masking=True, workspace=other)
        assert all(equal_bits(a, b) for a, b in zip(state(segments), state(twins), strict=True))
    assert missed(workspace) == []


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # said once when it is switched on
def test_no_wait_for_the_device() -> None:
    segments, workspace = [make(*LARGE, momentum=0.9) for _ in range(5)], Workspace()
    for _ in range(2):
        gpu.compress_many_(segments, masking=True, workspace=workspace)
        redraw(segments)
    try:
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            gpu.compress_many_(segments, masking=True, workspace=workspace)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert missed(workspace) == []
    assert not [warning for warning in caught if "synchroniz" in str(warning.message)]
