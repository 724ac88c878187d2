"""Train a transformer with AdamW on the same text twice, with ddp and with sparse_loco, and compare the bytes sent.

Run it:  python examples/text_sparse_loco.py
         python examples/text_sparse_loco.py --devices 4 --k-steps 30
"""

from __future__ import annotations

import argparse
import os
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread per rank; read when torch is imported

import torch
from lightning.pytorch import Callback, Trainer, seed_everything

import lightning_lowbw as lowbw
from lightning_lowbw.tools.zoo import ByteLanguageModel, StdlibText


class Sent(Callback):
    """Add up what the TrafficMonitor before it has logged: the bytes that this rank has sent."""

    nbytes = 0.0

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.nbytes += float(trainer.callback_metrics["traffic/bytes_sent"])


def train(strategy: Any, options: argparse.Namespace, has_gpus: bool) -> None:
    """Train from the same seed on the same tokens; say how well, and for how much."""
    seed_everything(1, workers=True, verbose=False)
    model, data, sent = ByteLanguageModel(optimizer="adamw", lr=options.lr), StdlibText(batch_size=8), Sent()
    trainer = Trainer(
        accelerator="gpu" if has_gpus else "cpu",
        devices=options.devices,
        strategy=strategy,
        max_steps=options.max_steps,
        callbacks=[lowbw.TrafficMonitor(), sent],
        val_check_interval=options.max_steps,  # once, after the last average: showing equal replicas sends nothing
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, datamodule=data)
    if trainer.is_global_zero:
        name = strategy if isinstance(strategy, str) else "sparse_loco"
        bits = 8 * sent.nbytes / sum(p.numel() for p in model.parameters()) / trainer.global_step
        print(f"{name}: loss {trainer.callback_metrics['val_loss']:.3f} after {trainer.global_step} steps; ", end="")
        print(f"each rank has sent {sent.nbytes / 1e6:.2f} MB, {bits:.4f} bits per parameter and step", flush=True)


def main() -> None:
    has_gpus = torch.cuda.device_count() > 1
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=torch.cuda.device_count() if has_gpus else 2)
    parser.add_argument("--k-steps", type=int, default=15)
    parser.add_argument(
        "--max-steps", type=int, default=600, help="a multiple of k: else the end costs a whole average"
    )
    parser.add_argument("--lr", type=float, default=2e-3)
    options = parser.parse_args()
    # As "sparse_loco", except its k.
    sparse = lowbw.LocalSGDStrategy(options.k_steps, begin_step=0, compression=lowbw.Compression())
    for strategy in ("ddp", sparse):
        train(strategy, options, has_gpus)


if __name__ == "__main__":
    main()
