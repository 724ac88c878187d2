"""What is recorded of a training, on each of its ranks: digests of all bits that it has computed, step by step."""

from __future__ import annotations

import gc
import hashlib
import logging
import random
import traceback
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor

from tests.golden.cases import CASES, OPTIMIZERS, Case
from tests.golden.models import make_loader
from tests.tiny import make_trainer

# A row is of one step, or taken after the fit: then "bytes" are those sent, received, sent inside nodes, between nodes.
FIELDS = ("step", "weights", "buffers", "optimizer", "bytes", "norm")
END = "end"
DIGITS = 12


def own(value: Any) -> Any:
    """Return a rank's part of what is sharded."""
    return value.to_local() if hasattr(value, "to_local") else value


def digest(named: Iterable[tuple[object, object]]) -> str:
    """Return a digest of names, types, shapes and bits, in the order in which they come."""
    sha = hashlib.sha256()
    for name, given in named:
        value = own(given)
        sha.update(repr(name).encode())
        if isinstance(value, Tensor):
            sha.update(f"{value.dtype} {tuple(value.shape)}".encode())
            sha.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            sha.update(repr(value).encode())
    return sha.hexdigest()[:DIGITS]


def optimizer_digest(trainer: pl.Trainer) -> str:
    states = [optimizer.state_dict()["state"] for optimizer in trainer.optimizers]
    return digest(
        ((number, index, key), state[index][key])
        for number, state in enumerate(states)
        for index in sorted(state)
        for key in sorted(state[index])
    )


def row(trainer: pl.Trainer, step: int | str, nbytes: int | list[int] | None) -> list[Any]:
    module = trainer.lightning_module
    norm = sum(float(own(p.detach()).double().square().sum()) for p in module.parameters())
    return [
        step,
        digest(module.named_parameters()),
        digest(module.named_buffers()),
        optimizer_digest(trainer),
        nbytes,
        float(f"{norm:.10g}"),
    ]


class Recorder(pl.Callback):
    """One row per batch after which an optimizer has stepped; saves a checkpoint after a given step."""

    def __init__(self, save_after: int | None, path: str, with_bytes: bool) -> None:
        self.rows: list[list[Any]] = []
        self.with_bytes = with_bytes
        self.save_after, self.path = save_after, path
        self._last_step = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._last_step = trainer.global_step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self._last_step:  # gradients were accumulated
            return
        self._last_step = trainer.global_step
        nbytes = trainer.strategy.ledger.sent_bytes if self.with_bytes else None
        self.rows.append(row(trainer, self._last_step, nbytes))
        if self._last_step == self.save_after:
            trainer.save_checkpoint(self.path)


def fit(case: Case, max_steps: int, save_after: int | None, resume: str | None, path: str) -> list[list[Any]]:
    rank = dist.get_rank()
    random.seed(rank)
    module = case.model(OPTIMIZERS[case.optimizer], case.lr_milestones)
    torch.default_generator.manual_seed(7 + rank)
    recorder = Recorder(save_after, path, case.bytes_by_step)
    enough = 2 * max_steps * int(case.trainer.get("accumulate_grad_batches", 1))
    arguments = {
        "max_steps": max_steps if case.batches is None else -1,
        "num_sanity_val_steps": 0,
        **case.precision_arguments(),
        **case.trainer,
    }
    trainer = make_trainer(case.strategy(), case.ranks, callbacks=[*case.callbacks(), recorder], **arguments)
    loader = make_loader(enough if case.batches is None else case.batches[rank])
    validation = make_loader(2) if "val_check_interval" in case.trainer else None
    trainer.fit(module, loader, validation, ckpt_path=resume)
    if case.batches is None:
        assert trainer.global_step == max_steps, trainer.global_step
    ledger = trainer.strategy.ledger
    nbytes = [ledger.sent_bytes, ledger.received_bytes, ledger.intra_bytes, ledger.inter_bytes]
    return [*recorder.rows, row(trainer, END, nbytes)]


def record(case: Case, path: str) -> list[list[Any]]:
    """Return this rank's rows of one case."""
    if case.resume_at is None:
        return fit(case, case.steps, None, None, path)
    return [*fit(case, case.resume_at, case.resume_at, None, path), *fit(case, case.steps, None, path, path)]


def record_all(names: Sequence[str], folder: str) -> dict[str, list[list[Any]] | str]:
    """Return this rank's rows by case; where it failed, the traceback.

    Collective: all ranks. Each one notes the case it is in, for the one who waits.
    """
    for logger in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    records: dict[str, list[list[Any]] | str] = {}
    for number, name in enumerate(names):
        Path(folder, f"rank-{dist.get_rank()}").write_text(name)
        try:
            records[name] = record(CASES[name], f"{folder}/{number}.ckpt")
        except Exception:  # noqa: BLE001 - the record of this case; the others go on
            records[name] = traceback.format_exc()
        gc.collect()
        if number == 0:
            gc.freeze()  # all modules are imported now: a seventh of the time went into searching them again
        dist.barrier()
    return records


def merge(of_ranks: Sequence[Any]) -> Any:
    """Return what all ranks have, or the list of what each has."""
    return of_ranks[0] if all(value == of_ranks[0] for value in of_ranks) else list(of_ranks)


def merge_ranks(of_ranks: Sequence[list[list[Any]] | str]) -> list[list[Any]] | str:
    """Return one row per step with the values of all ranks."""
    failures = [f"Rank {rank}:\n{rows}" for rank, rows in enumerate(of_ranks) if isinstance(rows, str)]
    if failures:
        return "\n".join(failures)
    return [[merge(values) for values in zip(*rows, strict=True)] for rows in zip(*of_ranks, strict=True)]
