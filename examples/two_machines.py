"""Train on two machines with one GPU each; after seven steps `lowbw` chooses, and logs the reason.

1. On both machines: the interface that `ip -brief address` shows
         export NCCL_SOCKET_IFNAME=eno1 GLOO_SOCKET_IFNAME=eno1
2. On both machines, with the address of the first one; on the second one --node-rank=1
         torchrun --nnodes=2 --nproc-per-node=1 --node-rank=0 --master-addr=ADDRESS --master-port=29500 \
             examples/two_machines.py
Once with --strategy ddp, to compare. On one machine, with a link of 100 Mb/s between two CPU cores:
         lowbw-lab --nodes 2 --inter 100mbit -- python examples/two_machines.py
"""

from __future__ import annotations

import argparse
import os
import time

from lightning.pytorch import Trainer, seed_everything

import lightning_lowbw as lowbw
from lightning_lowbw.tools.zoo import ByteLanguageModel, StdlibText


def main() -> None:
    """Train a small language model, and say how long a step took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="lowbw", choices=lowbw.names())
    parser.add_argument("--max-steps", type=int, default=300)
    options = parser.parse_args()

    seed_everything(0, workers=True, verbose=False)
    trainer = Trainer(
        strategy=options.strategy,
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),  # torchrun's --nnodes
        max_steps=options.max_steps,
        callbacks=[lowbw.TrafficMonitor()],  # the last line of the log: bytes and waits
        logger=False,
        enable_checkpointing=False,
    )
    started_s = time.perf_counter()
    trainer.fit(ByteLanguageModel(lr=0.03), StdlibText())
    if trainer.is_global_zero:
        seconds, loss = time.perf_counter() - started_s, trainer.callback_metrics["train_loss"]
        print(f"{options.strategy}: {trainer.global_step} steps in {seconds:.1f} s, loss {loss:.2f}")


if __name__ == "__main__":
    main()
