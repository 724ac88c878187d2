"""The claim that counts: at 99.9 % sparsity the accuracy is that of dense training, to a point in ten epochs."""

from __future__ import annotations

import warnings

import lightning.pytorch as pl
import pytest

from lightning_lowbw import SparsityWarmup
from lightning_lowbw.tools.zoo.digits import DigitsClassifier, DigitsData
from tests.ranks import run_ranks
from tests.tiny import make_trainer

SEEDS = range(5)  # a test image is 0.28 points: with two, the processor decides
EPOCHS = 10


def accuracies(strategy: str) -> list[float]:
    """Train digits once per seed; return the test accuracies in percent."""
    warnings.filterwarnings("ignore", ".*will duplicate some samples|.*DistributedSampler")
    results = []
    for seed in SEEDS:
        pl.seed_everything(seed, verbose=False)
        warmup = [SparsityWarmup(begin_epoch=1, epochs=2)] if strategy == "dgc" else []
        trainer = make_trainer(
            strategy,  # type: ignore[arg-type]
            2,
            max_epochs=EPOCHS,
            callbacks=warmup,
            use_distributed_sampler=True,
            limit_val_batches=0,
        )
        model, data = DigitsClassifier(), DigitsData(batch_size=32)
        trainer.fit(model, data)
        results.append(100 * float(trainer.test(model, data, verbose=False)[0]["test_acc"]))
    return results


@pytest.mark.slow
def test_accuracy_at_one_in_a_thousand() -> None:
    dense, sparse = (run_ranks(accuracies, 2, name, timeout_s=600.0)[0] for name in ("ddp", "dgc"))
    mean_dense, mean_sparse = sum(dense) / len(dense), sum(sparse) / len(sparse)
    print(f"dense {mean_dense:.2f} {dense}, sparse {mean_sparse:.2f} {sparse}")  # noqa: T201 - shown when it fails
    assert mean_dense > 97.0
    assert mean_sparse >= mean_dense - 1.0  # measured: 0.4 +- 0.2 on an EPYC with AVX2
