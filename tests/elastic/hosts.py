"""A process of a group of `test_separate_machines`: python hosts.py STRATEGY GROUP TIMEOUT, started by torchrun."""

from __future__ import annotations

import os
import sys

from lightning.pytorch import seed_everything

import lightning_lowbw as lowbw
from tests.elastic.test_strategy import K_STEPS, STEPS, Scheduled, data_of
from tests.tiny import make_trainer


def main() -> None:
    """Train, and say how this process has ended."""
    strategy, group, timeout = sys.argv[1:]
    seed_everything(1, verbose=False)
    method = lowbw.LocalSGD(k_steps=K_STEPS, begin_step=0)
    made = getattr(lowbw, strategy)(method, group=group, min_replicas=1, timeout=float(timeout))
    of_host = int(os.environ["LOCAL_WORLD_SIZE"])
    num_nodes = int(os.environ["WORLD_SIZE"]) // of_host
    options = {"max_steps": 100_000, "max_epochs": -1, "limit_val_batches": 0, "num_nodes": num_nodes}
    try:
        make_trainer(made, of_host, **options).fit(Scheduled(0, sleep_s=0.1), data_of(STEPS))
    except Exception as error:
        sys.stdout.write(f"a process has ended with {type(error).__name__}\n")
        raise


if __name__ == "__main__":
    main()
