"""Whole and half types, and a GradScaler: ranks stay together, and nothing that is not finite is kept for later.

With autocast alone: tests/golden.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

from lightning_lowbw import DGCStrategy, LocalSGDStrategy, QuantizedGradients, Strategy
from tests.ranks import run_ranks
from tests.strategies.fits import SPARSE
from tests.tiny import MIN_NUMEL, Tiny, amp_with_scaler, make_data, make_trainer, weights_of

STEPS = 8
BAD = 5  # the batch in which rank 1 has an infinite loss, where a GradScaler skips
PRECISIONS = {
    "16-mixed": torch.float32,
    "bf16-true": torch.bfloat16,
    "64-true": torch.float64,
}
STRATEGIES: dict[str, Any] = {
    "dgc": lambda: DGCStrategy(rampup_begin_step=2, sparsity=[0.9], min_numel=MIN_NUMEL),
    "int8": lambda: Strategy(QuantizedGradients("int8")),
    "sparse_loco": lambda: LocalSGDStrategy(k_steps=3, compression=SPARSE),
}


def fit(strategy: DDPStrategy, precision: str) -> dict[str, Any]:
    is_scaled = precision == "16-mixed"
    model = Tiny(poison=(1, BAD) if is_scaled else None)
    options: dict[str, Any] = {"plugins": [amp_with_scaler()]} if is_scaled else {"precision": precision}
    trainer = make_trainer(strategy, 2, **options)
    trainer.fit(model, make_data(2, STEPS))
    (worker,) = strategy.workers  # type: ignore[attr-defined]
    residuals = list(worker.state_dict()["residuals"].values())
    return {
        "weights": weights_of(model),
        "dtypes": {p.dtype for p in model.parameters()},
        "steps": (trainer.global_step, worker.step, getattr(worker, "num_averages", 0)),
        "residuals": {residual.dtype for residual in residuals},
        "are finite": all(bool(tensor.isfinite().all()) for tensor in [*model.parameters(), *residuals]),
        "scale": trainer.precision_plugin.scaler.get_scale() if is_scaled else 0.0,
    }


def fit_all(name: str) -> dict[str, dict[str, Any]]:
    return {precision: fit(STRATEGIES[name](), precision) for precision in PRECISIONS}


@pytest.mark.parametrize("name", list(STRATEGIES))
def test_a_strategy_trains_in_each_precision(name: str) -> None:
    first, second = run_ranks(fit_all, 2, name)
    for precision, dtype in PRECISIONS.items():
        mine, theirs = first[precision], second[precision]
        assert mine["weights"] == theirs["weights"], precision
        assert mine["steps"] == theirs["steps"], precision
        assert mine["steps"][:2] == (STEPS, STEPS), precision
        assert mine["dtypes"] == {dtype}
        # Averages of weights send float64 whole: nothing of it is kept back.
        is_kept = not (dtype == torch.float64 and STRATEGIES[name]().method.averages_weights)
        for result in (mine, theirs):
            assert result["are finite"], precision
            wide = torch.promote_types(dtype, torch.float32)
            assert result["residuals"] == ({wide} if is_kept else set()), precision
    scales = {first["16-mixed"]["scale"], second["16-mixed"]["scale"]}
    # An inf skips the step on all ranks, and in local steps that of its rank.
    assert scales == ({2.0**9} if not STRATEGIES[name]().method.averages_weights else {2.0**9, 2.0**10})
