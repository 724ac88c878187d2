"""What a rank decides by a metric of its own is decided by all alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset

from lightning_lowbw import (
    DGCStrategy,
    DisagreementError,
    LocalSGDStrategy,
    QuantizedGradients,
    ShardedStrategy,
)
from lightning_lowbw.comm.agreement import digest
from tests.ranks import run_ranks
from tests.tiny import MIN_NUMEL, Tiny, make_data, make_trainer, sgd

STRATEGIES: dict[str, Any] = {
    "dgc": lambda: DGCStrategy(sparsity=[0.9], min_numel=MIN_NUMEL),
    "local_sgd": lambda: LocalSGDStrategy(k_steps=4),
    "sharded": lambda: ShardedStrategy(QuantizedGradients("int8"), topology=1),
}


class Biased(Tiny):
    """Each rank logs a number of its own, without sync_dist; the learning rate follows it."""

    def __init__(self, interval: str = "epoch") -> None:
        super().__init__()
        self.interval = interval

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.log("own", float((2 * self.global_rank - 1) * batch_idx))  # falls on rank 0, rises on rank 1
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        epoch = self.trainer.current_epoch
        values = [[5.0, 1.0], [1.0, 3.0], [4.0, 4.5], [5.0, 5.0]][min(epoch, 3)]  # means 3, 2, 4.25, 5
        self.log("val_own", torch.tensor(values[self.global_rank]))

    def configure_optimizers(self) -> Any:
        optimizer = sgd([p for p in self.parameters() if p.requires_grad])
        scheduler = ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
        monitor = "val_own" if self.interval == "epoch" else "own"
        return [optimizer], [{"scheduler": scheduler, "monitor": monitor, "interval": self.interval}]


def fit(name: str, folder: str) -> dict[str, Any]:
    num_ranks, model = dist.get_world_size(), Biased()
    best = ModelCheckpoint(folder, monitor="val_own", filename="{epoch}")
    stop = EarlyStopping("val_own", patience=1)
    trainer = make_trainer(
        STRATEGIES[name](), num_ranks, callbacks=[best, stop], max_epochs=6, enable_checkpointing=True
    )
    trainer.fit(model, make_data(num_ranks, 3), make_data(num_ranks, 1))
    return {
        "path": Path(best.best_model_path).name,
        "score": float(best.best_model_score or 0),
        "stopped": stop.stopped_epoch,
        "epochs": trainer.current_epoch,
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "weights": digest([getattr(p, "_local_tensor", p) for p in model.parameters()]),
    }


@pytest.mark.fault(
    "a checkpoint, an end or a learning rate by a metric that is each rank's own",
    "the mean over the ranks decides: the same checkpoint, end, rates and weights",
)
@pytest.mark.parametrize("name", STRATEGIES)
def test_monitored_metrics_are_means_over_ranks(name: str, tmp_path: Path) -> None:
    first, second = run_ranks(fit, 2, name, str(tmp_path))
    assert first == second
    del first["weights"]
    assert first == {"path": "epoch=1.ckpt", "score": 2.0, "stopped": 2, "epochs": 3, "lr": pytest.approx(0.005)}


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Batches whose number is not known."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


def fit_by_steps(name: str, is_stream: bool) -> str:
    num_ranks = dist.get_world_size()
    data = make_data(num_ranks, 6)
    if is_stream:
        data = DataLoader(Stream(data), batch_size=None)
    with pytest.raises(DisagreementError) as caught:
        make_trainer(STRATEGIES[name](), num_ranks).fit(Biased("step"), data)
    return str(caught.value)


@pytest.mark.parametrize(("name", "is_stream"), [("dgc", False), ("dgc", True), ("sharded", True)])
def test_learning_rates_that_part_between_two_epochs_are_an_error(name: str, is_stream: bool) -> None:
    first, second = run_ranks(fit_by_steps, 2, name, is_stream)
    assert first == second
    assert "after step 6" in first
    assert "sync_dist=True" in first
    assert "param group 0, lr: rank 0 has" in first
