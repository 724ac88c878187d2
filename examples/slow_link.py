"""Measure the step time on a slow link: an ordinary Lightning script, for the throttled nodes of the lab.

.venv/bin/lowbw-lab --nodes 2 --inter 100mbit -- .venv/bin/python examples/slow_link.py --strategy ddp
.venv/bin/lowbw-lab --nodes 2 --inter 100mbit -- .venv/bin/python examples/slow_link.py --strategy dgc
"""

from __future__ import annotations

import argparse
import os
import time

from lightning.pytorch import Trainer, seed_everything

import lightning_lowbw as lowbw
from lightning_lowbw.tools.zoo import ByteLanguageModel, StdlibText


def main() -> None:
    """Train a small language model for some steps and say how long they took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="dgc", choices=["ddp", "dgc"])
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    seed_everything(0, workers=True, verbose=False)
    warmup = [lowbw.SparsityWarmup(begin_step=10, steps=20, sparsity=[0.96, 0.99])]
    trainer = Trainer(
        strategy=options.strategy,
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        max_steps=options.steps,
        limit_val_batches=0,
        gradient_clip_val=0.5,
        callbacks=[lowbw.TrafficMonitor(), *(warmup if options.strategy == "dgc" else [])],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    started = time.perf_counter()
    trainer.fit(ByteLanguageModel(lr=0.03), StdlibText())
    if trainer.is_global_zero:
        metrics = trainer.callback_metrics
        seconds = time.perf_counter() - started
        print(
            f"{options.strategy}: {options.steps} steps in {seconds:.1f} s, loss {metrics['train_loss']:.2f}, ", end=""
        )
        print(f"{metrics['traffic/bytes_sent'] / 1e3:.1f} kB sent in the last step")


if __name__ == "__main__":
    main()
