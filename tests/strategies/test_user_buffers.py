"""What a module does to its buffers in hooks lasts, as under ddp, also while the buffers of others are shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch.nn.parallel import DistributedDataParallel

from lightning_lowbw import QuantizedGradients, Strategy
from lightning_lowbw.comm.agreement import digest
from lightning_lowbw.strategies import shared_buffers
from tests.ranks import run_ranks
from tests.tiny import Tiny, make_data, make_trainer


class Hooks(Tiny):
    """Sets a buffer when an epoch begins, and three after each validation; writes down what the training sees."""

    def __init__(self) -> None:
        super().__init__(data_by_step=True)
        self.register_buffer("temperature", torch.tensor(-1.0))
        self.register_buffer("best", torch.tensor(100.0))
        self.register_buffer("patience", torch.tensor(0))
        self.seen: list[list[float]] = []

    def on_train_epoch_start(self) -> None:
        self.temperature.fill_(float(self.current_epoch))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.append(
            [float(each) for each in (self.temperature, self.best, self.patience, self.norm.running_mean[0])]
        )
        return super().training_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        self.best.fill_(7.0 + self.global_step)
        self.patience += 1
        self.norm.running_mean.fill_(50.0 + self.global_step)


class Save(Callback):
    """Saves when the first validation ends, and when the first epoch does."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(f"{self.folder}/validated.ckpt")

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(f"{self.folder}/epoch.ckpt")


def set_in_hooks(strategy: str, folder: str) -> list[list[list[float]]]:
    """Return what a fit has seen of the buffers, and fits that were resumed after its validation and its epoch."""
    num_ranks, seen = dist.get_world_size(), []
    options: dict[str, Any] = {"max_epochs": 2, "val_check_interval": 3, "num_sanity_val_steps": 0}
    for resume in (None, f"{folder}/validated.ckpt", f"{folder}/epoch.ckpt"):
        model, callbacks = Hooks(), [] if resume else [Save(folder)]
        trainer = make_trainer(strategy, num_ranks, callbacks=callbacks, **options)  # type: ignore[arg-type]
        trainer.fit(model, make_data(num_ranks, 5), make_data(num_ranks, 1), ckpt_path=resume)
        seen.append(model.seen)
    return seen


@pytest.mark.parametrize("strategy", ["int8", "local_sgd"])  # compressed from the first step on; with local steps
def test_what_hooks_set_stays_and_is_in_the_checkpoint(strategy: str, tmp_path: Path) -> None:
    for whole, after_validation, after_epoch in run_ranks(set_in_hooks, 2, strategy, str(tmp_path)):
        assert [temperature for temperature, *_ in whole] == [0.0] * 5 + [1.0] * 5
        assert [patience for _, _, patience, _ in whole] == [0.0] * 3 + [1.0] * 5 + [2.0] * 2
        assert whole[3][1:] == [10.0, 1.0, 53.0]
        assert after_validation == whole[3:]
        assert after_epoch == whole[5:]


class Buffers(Tiny):
    """Has buffers that all ranks change alike, differently, or from step 5 on, beside those of batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ema", torch.ones(100))
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("late", torch.ones(5))
        self.seen: list[str] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.ema.lerp_(self.wide.bias.detach().mean().expand(100), 0.1)
        self.scale.add_(self.global_rank)
        self.late.add_(self.global_rank * (self.global_step >= 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen.append(digest([self.ema, self.scale]))
        return super().forward(x * self.scale.sum().sigmoid())


def count_broadcasts(options: dict[str, Any]) -> tuple[list[int], list[int], list[str], list[str]]:
    """Return the bytes of buffers before each forward pass, by DDP and the ledger; the buffers seen; what was said."""
    sent: list[int] = []
    broadcast = DistributedDataParallel._distributed_broadcast_coalesced

    def watched(model: DistributedDataParallel, tensors: list[torch.Tensor], *args: Any) -> None:
        if model.training:
            sent.append(sum(tensor.nbytes for tensor in tensors))
        broadcast(model, tensors, *args)

    num_ranks, model, said, counted = dist.get_world_size(), Buffers(), list[str](), list[int]()

    class Count(Callback):
        def on_before_backward(self, trainer: pl.Trainer, *_: Any) -> None:
            counted.append(trainer.strategy.ledger.sent_bytes)  # type: ignore[attr-defined]

        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            counted.append(-trainer.strategy.ledger.sent_bytes)  # type: ignore[attr-defined]

    strategy = Strategy(QuantizedGradients("int8"), **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DistributedDataParallel, "_distributed_broadcast_coalesced", watched)
        patch.setattr(shared_buffers, "rank_zero_info", said.append)
        make_trainer(strategy, num_ranks, callbacks=[Count()]).fit(model, make_data(num_ranks, 10))
    return sent, [start + end for start, end in zip(counted[::2], counted[1::2], strict=True)], model.seen, said


def test_buffers_that_ranks_change_differently_are_broadcast_and_counted() -> None:
    """Not batch norm's statistics, nor what all ranks compute alike; this is looked at after steps 1, 2, 4 and 8."""
    results = run_ranks(count_broadcasts, 2, {})
    assert results[0][2] == results[1][2], "the training has read different buffers"
    for sent, counted, _, _ in results:
        assert counted == [4 * 108] + [4 * 3] * 7 + [4 * 8] * 2
        # And of each buffer a byte, whether rank 0 has it in that shape.
        assert sent == [nbytes + num for nbytes, num in zip(counted, [3] + [1] * 7 + [2] * 2, strict=True)]
    first, second = results[0][3]
    assert "differently: scale. " in first
    assert "12 bytes" in first
    assert "differently: late. " in second
    assert "32 bytes" in second
    assert "broadcast_buffers=False" in second


def test_all_buffers_are_broadcast_or_none_where_that_is_asked() -> None:
    (everything, *_), _ = run_ranks(count_broadcasts, 2, {"broadcast_buffers": True})
    assert min(everything) > 4 * 108
    assert run_ranks(count_broadcasts, 2, {"broadcast_buffers": False})[0][0] == []
