"""One rank of the demo: an ordinary Lightning script that trains on handwritten digits and writes its measurements.

Its only lines for a slow network are in `TRAINER_ARGUMENTS`. It is started as torchrun starts a script.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer, seed_everything

from lightning_lowbw.callbacks.traffic_monitor import TrafficMonitor
from lightning_lowbw.lab.counters import read_sent_bytes
from lightning_lowbw.strategies import DGCStrategy
from lightning_lowbw.zoo import DigitsClassifier, DigitsData

# What a user writes for each strategy.
# The sparsity is a number, so that each run sends the same: "auto" goes by the times it measures.
TRAINER_ARGUMENTS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "dgc": {"strategy": DGCStrategy(sparsity=[0.999])},
}
MAX_EPOCHS = 15
SEED = 1
LOOPBACK = "lo"


class Recorder(Callback):
    """Keep the loss, the time and the bytes of each step, and what the interface sent during all of them."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.loss: list[float] = []
        self.sent_bytes: list[float] = []
        self.interface_bytes: int | None = None

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        # Not at the start of the training: the strategy compiles its kernels after that, a quarter of a minute once.
        if trainer.current_epoch > 0:
            return
        trainer.strategy.barrier()
        self._interface_bytes_before = _read_interface()
        self._started_s = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.seconds.append(time.perf_counter() - self._started_s)
        self.loss.append(outputs["loss"].item())
        self.sent_bytes.append(float(trainer.callback_metrics["traffic/bytes_sent"]))

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        trainer.strategy.barrier()  # what the other ranks still send belongs to the training, too
        before, now = self._interface_bytes_before, _read_interface()
        self.interface_bytes = None if before is None or now is None else now - before

    def teardown(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        # gloo sometimes aborts at exit if a reduction came last; the strategies of this package do this themselves
        trainer.strategy.barrier()


def _read_interface() -> int | None:
    return read_sent_bytes(os.environ.get("GLOO_SOCKET_IFNAME", LOOPBACK))


def train(strategy: str, max_steps: int, output: Path) -> None:
    """Train, test, and write the record on rank zero."""
    seed_everything(SEED, workers=True, verbose=False)
    model, data, recorder = DigitsClassifier(), DigitsData(), Recorder()
    trainer = Trainer(
        callbacks=[TrafficMonitor(), recorder],
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        max_epochs=MAX_EPOCHS,
        max_steps=max_steps,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **TRAINER_ARGUMENTS[strategy],
    )
    trainer.fit(model, data)
    tested = trainer.test(model, data, verbose=False)[0]
    if trainer.is_global_zero:
        names = ("seconds", "loss", "sent_bytes", "interface_bytes")
        record = {"test_accuracy": tested["test_acc"], **{name: getattr(recorder, name) for name in names}}
        output.write_text(json.dumps(record))


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", required=True, choices=sorted(TRAINER_ARGUMENTS))
    parser.add_argument("--max-steps", type=int, default=-1, help="end after this number of steps")
    parser.add_argument("--output", type=Path, required=True, help="JSON file for the record")
    options = parser.parse_args()
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*does not have many workers")  # the data is in memory
    warnings.filterwarnings("ignore", message=".*LeafSpec")  # between Lightning 2.6 and torch 2.13
    train(options.strategy, options.max_steps, options.output)


if __name__ == "__main__":
    main()
