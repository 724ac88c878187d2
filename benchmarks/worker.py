"""One rank of a measurement: trains with each contestant in turn, again and again, and times a window of steps.

Started by slow_link.py inside the lab. Rank 0 writes the records.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import logging
import math
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.contestants import BY_NAME, Contestant
from benchmarks.models import WORKLOADS, Timed, Workload, loader
from lightning_lowbw.kernels import dispatch
from lightning_lowbw.strategies.base import SETTLE_S
from lightning_lowbw.strategies.strategy import Strategy
from lightning_lowbw.tools.lab.network import INTERFACE, read_sent_bytes


class Window(pl.Callback):
    """Time `num_steps` steps after `num_untimed_steps`, and count what the interface sent meanwhile."""

    def __init__(self, num_untimed_steps: int, num_steps: int) -> None:
        self.num_untimed_steps, self.num_steps = num_untimed_steps, num_steps
        self.step_s = self.sent_bytes = self.ledger_bytes = 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.num_untimed_steps:
            dist.barrier()
            self.started_s, self.sent_before = time.perf_counter(), read_sent_bytes(INTERFACE)
            self.ledger_before = _ledger_bytes(trainer)
        if trainer.global_step == self.num_untimed_steps + self.num_steps:
            self.step_s = (time.perf_counter() - self.started_s) / self.num_steps
            dist.barrier()  # what the other ranks still send belongs to the window, too
            self.sent_bytes = (read_sent_bytes(INTERFACE) - self.sent_before) / self.num_steps
            self.ledger_bytes = (_ledger_bytes(trainer) - self.ledger_before) / self.num_steps


def _ledger_bytes(trainer: pl.Trainer) -> float:
    """Return what this rank sent; of a strategy on two levels, what it sent to other nodes."""
    strategy = trainer.strategy
    if not isinstance(strategy, Strategy):
        return float("nan")
    ledger = strategy.ledger
    return float(ledger.inter_bytes if ledger.intra_bytes else ledger.sent_bytes)


def measure(contestant: Contestant, workload: Workload, num_steps: int) -> dict[str, Any]:
    """Train a fresh model for a few steps with one contestant; return what the window saw."""
    gc.collect()  # the last contestant's trainer and model, which refer to each other
    num_untimed_steps = contestant.num_untimed_steps
    window = Window(num_untimed_steps, num_steps)
    trainer = pl.Trainer(
        strategy=contestant.make(),
        accelerator="cpu",
        devices=1 if contestant.is_alone else int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=1 if contestant.is_alone else int(os.environ["GROUP_WORLD_SIZE"]),
        max_steps=num_untimed_steps + num_steps,
        callbacks=[window],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    with contextlib.ExitStack() as stack:
        if not contestant.is_compiled:
            stack.enter_context(mock.patch.object(dispatch, "_disabled", {"cpu"}))
        trainer.fit(Timed(workload), loader(workload, num_untimed_steps + num_steps))
    # Of the node. On one level in rings: what its last rank sends.
    by_rank: list[float] = [0.0] * int(os.environ["WORLD_SIZE"])
    dist.all_gather_object(by_rank, window.ledger_bytes)
    has_levels = isinstance(trainer.strategy, Strategy) and trainer.strategy.ledger.intra_bytes > 0
    of_node = sum(by_rank[: int(os.environ["LOCAL_WORLD_SIZE"])]) if has_levels else by_rank[0]
    ledger_bytes = None if math.isnan(of_node) else of_node
    return {"step_s": window.step_s, "interface_bytes": window.sent_bytes, "ledger_bytes": ledger_bytes}


def main() -> None:
    """Read the job, measure, write the records."""
    job = json.loads(Path(sys.argv[1]).read_text())
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(job["threads"])
    dist.init_process_group("gloo")  # for who trains alone as well: all measure at the same time
    workload = WORKLOADS[job["workload"]]
    if job["batch"] is not None:
        workload = dataclasses.replace(workload, batch=job["batch"])
    records = []
    for repetition in range(job["repetitions"]):
        for entry in job["contestants"]:
            contestant = BY_NAME[entry["name"]]
            record = measure(contestant, workload, entry["num_steps"])
            records.append({"method": contestant.name, "repetition": repetition, **entry, **record})
            if os.environ["RANK"] == "0":
                Path(sys.argv[2]).write_text(json.dumps(records))
    time.sleep(SETTLE_S)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
