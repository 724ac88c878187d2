"""What all clients share: the strategy that a run is asked for, and the record of what became of it."""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import lightning_lowbw as lowbw
from lightning_lowbw.comm.agreement import digest

NUM_RANKS = 2
WAY, RECORD = "LOWBW_CLIENT_WAY", "LOWBW_CLIENT_RECORD"  # environment variables, which the ranks inherit
# By name, and the callbacks that come with it, of one of the two packages of Lightning. Left to itself "dgc" would find
# loopback fast, and stay dense.
WAYS: dict[str, Callable[[Any], list[Any]]] = {
    "ddp": lambda _: [],
    "dgc": lambda own: [own.TrafficMonitor(), own.SparsityWarmup(begin_step=20, steps=20, sparsity=[0.9, 0.99])],
    "local_sgd": lambda own: [own.TrafficMonitor()],
}


def names(ending: str = "") -> dict[str, str]:
    """Return the names of the strategies, with Lightning's ending, as they are typed in Python."""
    return {way: f'"{way}{ending}"' for way in WAYS}


class Trial:
    """One run of a client.

    Attributes:
        typed: what stands for the strategy in the client's code.

    Args:
        pl: `lightning.pytorch` or `pytorch_lightning`: the one that the project is built on.
        line: what a user types, with %s for the strategy.
        strategies: what stands for the strategy there, for each way to train.
        loss: the name under which the module logs its loss, where `training_step` returns none.
    """

    def __init__(
        self, pl: ModuleType, line: str, strategies: Mapping[str, str] | None = None, *, loss: str | None = None
    ) -> None:
        self._way = os.environ[WAY]
        self.typed = (strategies or names())[self._way]
        self._own: Any = (
            lowbw if pl.__name__ == "lightning.pytorch" else importlib.import_module("lightning_lowbw.mirror")
        )
        self._recorder = _make_recorder(pl, self._own.Strategy, line % self.typed, loss)

    @property
    def strategy(self) -> Any:
        """What the Trainer is given: the value of what was typed."""
        return eval(self.typed, {"lowbw": self._own})

    def options(self, *callbacks: Any) -> dict[str, Any]:
        """Return what the Trainer is given beside the strategy: two ranks on the CPU, and callbacks."""
        return {
            "accelerator": "cpu",
            "devices": NUM_RANKS,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "callbacks": [*callbacks, *WAYS[self._way](self._own), self._recorder],
        }


def _make_recorder(pl: ModuleType, base: type, typed: str, loss: str | None) -> Any:
    class Recorder(pl.Callback):  # type: ignore[misc,name-defined]
        """Write what this rank has seen into a file of its own, at the end of the fit."""

        def __init__(self) -> None:
            self.losses: list[float] = []

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            value = trainer.callback_metrics[loss] if loss else outputs["loss"]
            self.losses.append(float(value))

        def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
            strategy = trainer.strategy
            fifth = max(1, len(self.losses) // 5)
            record: dict[str, Any] = {
                "typed": typed,
                "strategy": repr(strategy) if isinstance(strategy, base) else type(strategy).__name__,
                "batches": len(self.losses),
                "first_loss": math.fsum(self.losses[:fifth]) / fifth,
                "loss": math.fsum(self.losses[-fifth:]) / fifth,
                "weights": digest(pl_module.parameters()),
                "elements": sum(each.numel() for each in pl_module.parameters() if each.requires_grad),
            }
            if isinstance(strategy, base):
                strategy.ledger.settle()
                record["dense_bytes"] = strategy.ledger.dense_bytes
                record["sent_bytes"] = strategy.ledger.sent_bytes
            Path(f"{os.environ[RECORD]}.{trainer.global_rank}").write_text(json.dumps(record))

    return Recorder()


def images(num: int, size: int, num_classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return noise with a slightly brighter square, whose place is the class."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, num_classes, (num,), generator=generator)
    pixels = torch.randn(num, 3, size, size, generator=generator)
    step = size // num_classes
    for image, label in zip(pixels, labels.tolist(), strict=True):
        image[:, label * step : (label + 1) * step, label * step : (label + 1) * step] += 0.5
    return pixels, labels
