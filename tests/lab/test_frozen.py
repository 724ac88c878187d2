"""What of a frozen model goes over the network, counted on a node's interface."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist

from lightning_lowbw.lab import Network, launch
from lightning_lowbw.lab.counters import read_sent_bytes
from lightning_lowbw.lab.network import INTERFACE
from tests.lab.namespaces import needs_lab
from tests.strategies.adapted import METHODS, SAVED_AT, STEPS, DropsFrozen, fit

pytestmark = [*needs_lab, pytest.mark.slow]


class Count(pl.Callback):
    """Count what the interface sends from the first batch to the end of the fit, with a checkpoint on the way."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_start(self, *_: Any) -> None:
        if not hasattr(self, "before"):
            dist.barrier()
            self.before = read_sent_bytes(INTERFACE)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == SAVED_AT:
            trainer.save_checkpoint(self.path)

    def on_fit_end(self, *_: Any) -> None:
        dist.barrier()
        self.sent = read_sent_bytes(INTERFACE) - self.before


def count(folder: str) -> None:
    """Train small and large frozen models with each method; print what was sent."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for name, method in METHODS.items():
        for width in (64, 1024):
            counter = Count(f"{folder}/{name}{width}.ckpt")
            model = DropsFrozen(width)
            fit(method, model, callbacks=[counter])
            if dist.get_rank() == 0:
                frozen = 4 * sum(p.numel() for p in model.parameters() if not p.requires_grad)
                trained = 4 * sum(p.numel() for p in model.parameters() if p.requires_grad)
                sys.stdout.write(f"sent {name} {frozen} {trained} {counter.sent}\n")
                sys.stdout.flush()
    dist.destroy_process_group()


def test_frozen_weights_are_never_sent(tmp_path: Path) -> None:
    """Counted on the interface of a node, from the first batch to the end of the fit."""
    command = [sys.executable, "-c", f"import {__name__} as t; t.count({str(tmp_path)!r})"]
    output = tmp_path / "output"
    with Network([None, None]) as network, output.open("w+b") as file:
        assert launch(network, command, timeout_s=120.0, output=file).status == 0, output.read_text()
    lines = [line.split()[1:] for line in output.read_text().splitlines() if line.startswith("sent ")]
    assert [line[0] for line in lines] == [name for name in METHODS for _ in range(2)]
    for name, *numbers in lines:
        frozen, trained, sent = (int(number) for number in numbers)
        assert sent < 60_000 + 2 * STEPS * trained, name  # agreements; at most the trained weights every step
        if frozen > 4e6:
            assert sent < frozen / 5, name
