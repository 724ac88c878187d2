"""A process that trains again and again, with looks, skipped steps, saves and resumes, holds no more than before."""

from __future__ import annotations

import gc
import os
import resource
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.ranks import run_ranks
from tests.strategies.fits import make, saving, train
from tests.tiny import Tiny, amp_with_scaler

STEPS, NUM_FITS = 30, 5  # of each fit
CHANGES: dict[str, dict[str, Any]] = {
    "dgc": {"rampup_begin_step": 10, "rampup_step": 20, "sparsity": (0.75, 0.95)},
    "sparse_loco": {"k_steps": 5, "begin_step": 1, "delay_steps": 2},
}


def held() -> dict[str, int]:
    """Return what a process holds."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    return {
        "tensors": len(tensors),
        "elements": sum(each.numel() for each in tensors),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "resident_kib": int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 1024,
    }


def fit_again_and_again(name: str, path: str) -> list[dict[str, int]]:
    """Return the counts of `held` after each fit. A fit resumes from the checkpoint of the fit before it."""
    holds = []
    for last in range(STEPS, STEPS * NUM_FITS + 1, STEPS):
        model, resume = Tiny(data_by_step=True, poison=(1, 3)), path if last > STEPS else None
        options: dict[str, Any] = {"max_steps": last, "max_epochs": -1, "val_check_interval": 10}
        options |= {"plugins": [amp_with_scaler()], "callbacks": [saving(path, (last,))]}
        train(make(name, CHANGES[name]), model, 20, 1, resume=resume, **options)
        holds.append(held())
    return holds


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux")
@pytest.mark.parametrize("name", ["dgc", "sparse_loco"])
def test_nothing_grows(name: str, tmp_path: Path) -> None:
    for _, *settled in run_ranks(fit_again_and_again, 2, name, f"{tmp_path}/some.ckpt"):  # the first fit loads
        # If a fit stayed alive, it would add half of the first value; a few numbers come and go with metrics.
        assert all(each[key] <= 1.25 * settled[0][key] for each in settled for key in each), settled
