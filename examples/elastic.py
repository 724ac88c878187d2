"""Train in groups that come, go and are slow: each is a Lightning run of its own, and they average now and then.

1. Once, on a machine that stays:
         lowbw-lighthouse --bind 10.8.0.1:29510
2. On each machine:
         export TORCHFT_LIGHTHOUSE=http://10.8.0.1:29510
3. On each machine, now or later:
         python -m lightning_lowbw.elastic.run --nproc-per-node 1 --max-restarts 100 examples/elastic.py --group site_a
Kill a group: the other groups go on; it starts again and takes their state. At the end all have the same weights.
On one machine: 127.0.0.1 for both addresses, in several terminals. A group of two processes: --nproc-per-node 2; the
groups need not be alike. A group of several machines: docs/elastic.md.
"""

from __future__ import annotations

import argparse
import os
import socket
import zlib

from lightning.pytorch import Trainer, seed_everything
from torch.nn.utils import parameters_to_vector

import lightning_lowbw as lowbw
from lightning_lowbw.tools.zoo import DigitsClassifier, DigitsData


def main() -> None:
    """Train a small classifier with those who are there, and say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--group", default=socket.gethostname(), help="another name for each")
    parser.add_argument("--min-replicas", type=int, default=1)
    parser.add_argument("--round-s", type=float, default=2.0, help="seconds after which a round ends")
    parser.add_argument("--max-steps", type=int, default=2000)
    options = parser.parse_args()

    seed_everything(1, workers=True, verbose=False)  # all groups begin with the same weights
    strategy = lowbw.ElasticStrategy(
        lowbw.LocalSGD(begin_step=0, outer="nesterov"),
        group=options.group,
        round_s=options.round_s,  # however many steps each group has taken: no group waits for a slow one
        min_replicas=options.min_replicas,
    )
    trainer = Trainer(
        strategy=strategy,
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        max_steps=options.max_steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model, data = DigitsClassifier(), DigitsData()
    trainer.fit(model, datamodule=data)
    (found,) = trainer.validate(model, datamodule=data, verbose=False)
    if trainer.is_global_zero:
        (worker,) = strategy.workers
        weights = zlib.crc32(parameters_to_vector(model.parameters()).detach().cpu().numpy().tobytes())
        print(f"{options.group}: {trainer.global_step} steps, {worker.num_averages} rounds, ", end="")
        print(f"accuracy {found['val_acc']:.3f}, checksum of the weights {weights:08x}")


if __name__ == "__main__":
    main()
