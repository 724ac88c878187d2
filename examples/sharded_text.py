"""Train a transformer that is sharded inside each node, and compare the traffic between nodes and the step times.

Run it on two throttled nodes of two ranks each; afterwards a table:

.venv/bin/lowbw-lab --nodes 2 --ranks-per-node 2 --inter 100mbit -- .venv/bin/python examples/sharded_text.py
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread per rank; read when torch is imported

from lightning.pytorch import Callback, Trainer, seed_everything
from torch.distributed.fsdp import fully_shard

import lightning_lowbw as lowbw
from lightning_lowbw.tools.zoo import ByteLanguageModel, StdlibText


class ShardedModel(ByteLanguageModel):
    """Gathers one block at a time."""

    def configure_model(self) -> None:  # once more for validation
        mesh = self.device_mesh["data_parallel"]
        for layer in (*self.blocks, self.byte_embedding, self.norm, self.head):
            if not hasattr(layer, "unshard"):
                fully_shard(layer, mesh=mesh)


class Meter(Callback):
    """Collect the seconds of each step, and the bytes that this rank sent between nodes."""

    def __init__(self) -> None:
        self.times = [time.perf_counter()]
        self.nbytes = 0.0

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.times.append(time.perf_counter())
        self.nbytes = float(trainer.strategy.ledger.sent_bytes)  # type: ignore[attr-defined]


def train(name: str, method: lowbw.Method, options: argparse.Namespace) -> str:
    """Train from the same seed on the same text; return a row of the table."""
    seed_everything(0, workers=True, verbose=False)
    meter = Meter()
    trainer = Trainer(
        strategy=lowbw.ShardedStrategy(method, topology=2),
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        max_steps=options.steps,
        callbacks=[meter],
        val_check_interval=options.steps,  # once, in the end
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = ShardedModel(d_model=options.width, optimizer="adamw")
    trainer.fit(model, StdlibText(batch_size=8))
    seconds = [after - before for before, after in itertools.pairwise(meter.times)][options.steps // 2 :]
    per_step, loss = meter.nbytes / options.steps / 1e3, float(trainer.callback_metrics["val_loss"])
    return f"| {name} | {statistics.mean(seconds):.3f} | {per_step:,.1f} | {loss:.3f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=256)
    options = parser.parse_args()
    begin = options.steps // 10
    methods = {
        "hierarchical_fsdp (HSDP)": lowbw.Hierarchical(),
        "int8_fsdp": lowbw.QuantizedGradients("int8"),
        "dgc, 1 %": lowbw.DGC(sparsity=[0.99], rampup_begin_step=begin),
        "sparse_loco, k = 10": lowbw.LocalSGD(k_steps=10, begin_step=0, compression=lowbw.Compression()),
    }
    rows = [train(name, method, options) for name, method in methods.items()]
    if os.environ.get("RANK", "0") == "0":
        print("| between nodes | s per step | kB per step and rank | validation loss |\n| --- | --- | --- | --- |")
        print("\n".join(rows), flush=True)


if __name__ == "__main__":
    main()
