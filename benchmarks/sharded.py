"""A transformer of 20M parameters, sharded inside two nodes of two ranks, on a link of 100 Mb/s between them.

    .venv/bin/python benchmarks/sharded.py             # in the lab; twenty minutes on two cores
    .venv/bin/python benchmarks/sharded.py --report    # only the table

The byte-level language model is trained dense for a while, on a link that is not throttled, and goes on from there with
each method for as many steps on the same batches. Writes benchmarks/results/sharded.json and .md. Bytes are those of a
node's interface, with all headers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import lightning.pytorch as pl
from torch.distributed.fsdp import fully_shard

import lightning_lowbw as lowbw
from benchmarks.harness import RESULTS, describe_environment, run_in_lab
from benchmarks.worker import INTERFACE
from lightning_lowbw.strategies.names import OF_SHARDS
from lightning_lowbw.tools.lab import parse_rate
from lightning_lowbw.tools.lab.network import read_sent_bytes
from lightning_lowbw.tools.zoo import ByteLanguageModel, StdlibText

NODES, RANKS_PER_NODE, RATE = 2, 2, "100mbit"
MODEL: dict[str, Any] = {"d_model": 512, "num_layers": 6, "num_heads": 8, "optimizer": "adamw"}
BATCH = 2
PRETRAINING, STEPS, UNTIMED = 200, 40, 5
PRETRAINING_LR, LR = 1e-3, 3e-4
METHODS: dict[str, lowbw.Method] = {
    "hierarchical_fsdp (HSDP)": lowbw.Hierarchical(),
    "int8_fsdp": lowbw.QuantizedGradients("int8"),
    "dgc_fsdp": lowbw.DGC(sparsity=[0.99]),
    "sparse_loco_fsdp": lowbw.LocalSGD(k_steps=10, begin_step=0, compression=lowbw.Compression()),
}
# In the table: these two do not have the numbers of the names.
LABELS = {"dgc_fsdp": "dgc, 1 %, no dense steps", "sparse_loco_fsdp": "sparse_loco, k = 10"}


class Model(ByteLanguageModel):
    """Gathers one block at a time."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in (*self.blocks, self.byte_embedding, self.norm, self.head):
            if not hasattr(layer, "unshard"):
                fully_shard(layer, mesh=mesh)


class Meter(pl.Callback):
    """Keep the time of each step, and what the node's interface sends from the first one on."""

    def on_train_start(self, *_: Any) -> None:
        self.times, self.before = [time.perf_counter()], read_sent_bytes(INTERFACE)

    def on_train_batch_end(self, *_: Any) -> None:
        self.times.append(time.perf_counter())

    def on_train_end(self, *_: Any) -> None:
        self.sent_bytes = read_sent_bytes(INTERFACE) - self.before


def train(name: str, folder: Path, steps: int, trained: int) -> dict[str, Any]:
    """Train on this rank with all others: dense from scratch, or on from there with a method."""
    goes_on = name in METHODS
    pl.seed_everything(0, workers=True, verbose=False)
    meter, path = Meter(), folder / "trained.ckpt"
    trainer = pl.Trainer(
        strategy=lowbw.ShardedStrategy(
            METHODS.get(name, lowbw.Hierarchical()), topology=RANKS_PER_NODE, save_distributed_checkpoint=False
        ),
        accelerator="cpu",
        devices=RANKS_PER_NODE,
        num_nodes=NODES,
        max_steps=trained + steps,
        max_epochs=-1,
        num_sanity_val_steps=0,
        limit_val_batches=16,
        check_val_every_n_epoch=None,
        val_check_interval=steps + 1,  # after the fit only
        callbacks=[meter],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model(**MODEL, lr=PRETRAINING_LR)
    if goes_on:
        model.on_train_start = lambda: [  # type: ignore[method-assign]
            group.update(lr=LR)
            for group in model.optimizers().param_groups  # type: ignore[union-attr]
        ]
    data = StdlibText(BATCH, num_train=BATCH * NODES * RANKS_PER_NODE * steps, seed=int(goes_on))
    trainer.fit(model, data, ckpt_path=str(path) if goes_on else None)
    if not goes_on:
        trainer.save_checkpoint(path)
    seconds = [late - early for early, late in itertools.pairwise(meter.times)][UNTIMED:]
    return {
        "method": name,
        "steps": steps,
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "step_s": statistics.median(seconds),
        "mean_step_s": statistics.mean(seconds),
        "node_bytes": meter.sent_bytes / steps,
        "val_loss": trainer.validate(model, data, verbose=False)[0]["val_loss"],
    }


def measure(name: str, rate: str | None, folder: Path, steps: int, trained: int = 0) -> dict[str, Any]:
    """Start the ranks in the lab."""
    job = {"name": name, "folder": str(folder), "steps": steps, "trained": trained}
    rates = [None if rate is None else parse_rate(rate)] * NODES
    row: dict[str, Any] = run_in_lab(rates, [__file__, "--job"], job=job, ranks_per_node=RANKS_PER_NODE)
    return row


def to_markdown(rows: list[dict[str, Any]]) -> str:
    """Return the table; all is compared with the dense exchange."""
    dense = rows[0]
    lines = [
        "| between nodes | s per step | HSDP's / its | MB per step and node | HSDP's / its | validation loss "
        "| to HSDP's |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        cells = [
            LABELS.get(row["method"], row["method"]),
            f"{row['mean_step_s']:.2f}",
            f"{dense['mean_step_s'] / row['mean_step_s']:.2f}",
            f"{row['node_bytes'] / 1e6:.3f}",
            f"{dense['node_bytes'] / row['node_bytes']:.0f}",
            f"{row['val_loss']:.4f}",
            f"{100 * (row['val_loss'] / dense['val_loss'] - 1):+.1f} %",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    dgc, sparse_loco = (OF_SHARDS[name].when for name in ("dgc", "sparse_loco"))
    assert isinstance(dgc, lowbw.EveryStep)
    assert isinstance(sparse_loco, lowbw.EveryK)
    remark = (
        "The names `dgc_fsdp` and `sparse_loco_fsdp` have other numbers "
        f"({dgc.rampup_begin_step} dense steps first; k = {sparse_loco.k_steps})."
    )
    return "\n".join([*lines, "", remark, ""])


def note(results: dict[str, Any]) -> str:
    """Return what the table is about."""
    environment, trained = results["environment"], results["trained"]
    return (
        f"{NODES} nodes of {RANKS_PER_NODE} ranks, {RATE} between nodes, {trained['num_parameters'] / 1e6:.1f}M "
        f"parameters, AdamW, {BATCH} crops of 64 bytes per rank. Trained dense for {PRETRAINING} steps to a validation "
        f"loss of {trained['val_loss']:.4f}, and on for {STEPS} steps with each method, the optimizer's state included "
        f"(`benchmarks/sharded.py`, {environment['num_cpus']} cores, torch {environment['torch']}, "
        f"{environment['date']}).\n\n"
    )


def write_table(results: dict[str, Any]) -> None:
    (RESULTS / "sharded.md").write_text(note(results) + to_markdown(results["rows"]))


def main() -> None:
    """Train and write after each method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="of all runs, for a look; writes nothing")
    parser.add_argument("--report", action="store_true", help="only put the results into the page")
    parser.add_argument("--job", type=Path, nargs=2, help=argparse.SUPPRESS)  # in the ranks
    options = parser.parse_args()
    if options.job is not None:
        for logger in ("lightning.pytorch", "lightning.fabric"):
            logging.getLogger(logger).setLevel(logging.ERROR)
        warnings.simplefilter("ignore")
        given, path = options.job
        job = json.loads(given.read_text())
        row = train(job["name"], Path(job["folder"]), job["steps"], job["trained"])
        if os.environ["RANK"] == "0":
            path.write_text(json.dumps(row))
        return
    if options.report:
        write_table(json.loads((RESULTS / "sharded.json").read_text()))
        return
    with tempfile.TemporaryDirectory() as name:
        trained = measure("trained", None, Path(name), options.steps or PRETRAINING)
        print(trained, flush=True)
        rows: list[dict[str, Any]] = []
        for method in METHODS:
            rows.append(measure(method, RATE, Path(name), options.steps or STEPS, options.steps or PRETRAINING))
            print(rows[-1], flush=True)
            if options.steps is None:
                results = {"trained": trained, "rows": rows, "environment": describe_environment()}
                (RESULTS / "sharded.json").write_text(json.dumps(results, indent=1) + "\n")
                write_table(results)
    print(to_markdown(rows))


if __name__ == "__main__":
    main()
