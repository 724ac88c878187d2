"""Compress between nodes only: ranks of a node sum their gradients densely, and DGC treats each node as one worker.

On one machine, four ranks as two nodes of two:
         python examples/two_nodes.py
On two machines (--node-rank 1 on the second); the launcher knows which ranks share a node:
         torchrun --nnodes 2 --node-rank 0 --nproc-per-node 2 --master-addr HOST examples/two_nodes.py
And other methods on two levels:
         python examples/two_nodes.py --method local_sgd          average nodes every 8 steps
         python examples/two_nodes.py --method hierarchical       dense, each node sends its gradient once
"""

from __future__ import annotations

import argparse
import os

from lightning.pytorch import Trainer, seed_everything

import lightning_lowbw as lowbw
from lightning_lowbw.tools.zoo import DigitsClassifier, DigitsData

METHODS = {"dgc": lowbw.DGCStrategy, "local_sgd": lowbw.LocalSGDStrategy, "hierarchical": lowbw.HierarchicalStrategy}


def main() -> None:
    """Train a small classifier and say what has crossed which network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="dgc", choices=METHODS)
    parser.add_argument("--max-epochs", type=int, default=10)
    options = parser.parse_args()

    num_nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    # Trainer(strategy="dgc_hierarchical") is the same as topology="auto".
    strategy = METHODS[options.method](topology="auto" if num_nodes > 1 else 2)
    callbacks: list = [lowbw.TrafficMonitor()]
    if options.method == "dgc":
        callbacks.append(lowbw.SparsityWarmup(begin_epoch=1, epochs=2, sparsity=[0.9, 0.99]))
    seed_everything(1, workers=True, verbose=False)
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2 if num_nodes > 1 else 4,
        num_nodes=num_nodes,
        max_epochs=options.max_epochs,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(DigitsClassifier(), datamodule=DigitsData())
    if trainer.is_global_zero:
        ledger, steps = strategy.ledger, trainer.global_step
        print(f"{options.method}: accuracy {trainer.callback_metrics['val_acc']:.3f} after {steps} steps; per step")
        print(f"rank 0 sent {ledger.intra_bytes / steps / 1e3:.1f} kB inside its node, ", end="")
        print(f"{ledger.inter_bytes / steps / 1e3:.1f} kB to other nodes; ", end="")
        print(f"DDP would send {ledger.dense_bytes / steps / 1e3:.1f} kB")


if __name__ == "__main__":
    main()
