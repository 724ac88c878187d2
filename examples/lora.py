"""Fine-tune adapters (LoRA) of a frozen language model between two sites: only they are exchanged and saved.

The model has random weights, so nothing is downloaded. Besides this package: pip install transformers peft
On two sites, started as examples/two_machines.py, with the interface and the address of the VPN. On one machine:
         lowbw-lab --nodes 2 --inter 20mbit -- python examples/lora.py
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread per rank; read when torch is imported

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

import lightning_lowbw as lowbw
from lightning_lowbw.tools.zoo import StdlibText


class Adapted(LightningModule):
    """GPT-2 over bytes, frozen, with adapters of rank 8 on its layers."""

    strict_loading = False  # the frozen weights are not in a checkpoint

    def __init__(self, width: int) -> None:
        super().__init__()
        config = GPT2Config(vocab_size=256, n_positions=64, n_embd=width, n_layer=4, n_head=width // 64)
        lora = LoraConfig(r=8, target_modules=["c_attn", "c_fc", "c_proj"], fan_in_fan_out=True)
        self.model = get_peft_model(GPT2LMHeadModel(config), lora)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self._loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), sync_dist=True)

    def _loss(self, batch: Any) -> torch.Tensor:
        logits = self.model(batch[0].long()).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten().long())

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {name: tensor for name, tensor in super().state_dict(*args, **kwargs).items() if "lora_" in name}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class Meter(Callback):
    def __init__(self) -> None:
        self.times = [time.perf_counter()]

    def on_train_batch_end(self, *_: Any) -> None:
        self.times.append(time.perf_counter())


def train(name: str, method: lowbw.Method, options: argparse.Namespace) -> str:
    """Train from the same seed on the same text; return a row of the table."""
    seed_everything(0, workers=True, verbose=False)
    meter, strategy, num_nodes = Meter(), lowbw.Strategy(method), int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(
        strategy=strategy, devices=options.devices, num_nodes=num_nodes, callbacks=[meter],
        max_steps=options.steps, val_check_interval=options.steps, check_val_every_n_epoch=None,
        num_sanity_val_steps=0, limit_val_batches=16, **quiet,
    )  # fmt: skip
    trainer.fit(Adapted(options.width), StdlibText(batch_size=4))
    seconds = [after - before for before, after in itertools.pairwise(meter.times)][options.steps // 2 :]
    sent, loss = strategy.ledger.sent_bytes / options.steps, float(trainer.callback_metrics["val_loss"])
    return f"| {name} | {statistics.mean(seconds):.3f} | {sent / 1e3:,.1f} | {loss:.3f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=256, help="a multiple of 64")
    parser.add_argument("--devices", type=int, default=1, help="ranks of a node")
    options = parser.parse_args()
    methods = {
        "whole gradients": lowbw.Hierarchical(1),
        "dgc": lowbw.DGC(rampup_begin_step=options.steps // 10, sparsity=[0.99]),
        "sparse_loco": lowbw.LocalSGD(k_steps=10, begin_step=0, compression=lowbw.Compression()),
    }
    rows = [train(name, method, options) for name, method in methods.items()]
    if os.environ.get("RANK", "0") == "0":
        trained, total = Adapted(options.width).model.get_nb_trainable_parameters()
        print(f"{trained:,} of {total:,} parameters are trained.\n")
        print("| method | s per step | kB per step and rank | validation loss |\n| --- | --- | --- | --- |")
        print("\n".join(rows), flush=True)


if __name__ == "__main__":
    main()
