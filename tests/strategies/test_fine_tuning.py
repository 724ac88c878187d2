"""LoRA and other frozen models: what is kept and saved is what trains."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_lowbw.what.top_k import small_numel
from tests.ranks import run_ranks
from tests.strategies.adapted import METHODS, SAVED_AT, STEPS, DropsFrozen, SavesAdapters, fit
from tests.tiny import Watcher, since_lightning_2_5, weights_of


def tensors_in(state: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Find the tensors of a nested state, with the keys on the way to them."""
    if isinstance(state, Tensor):
        yield name, state
    elif isinstance(state, dict):
        for key, value in state.items():
            yield from tensors_in(value, f"{name}/{key}")
    elif isinstance(state, (list, tuple)):
        for index, value in enumerate(state):
            yield from tensors_in(value, f"{name}/{index}")


def keep(name: str, folder: str) -> dict[str, Any]:
    """Save in the middle; return what the state and its files hold of frozen weights, and what a resume leads to."""
    found: dict[str, Any] = {}
    for cls in (SavesAdapters, DropsFrozen):
        path = f"{folder}/{cls.__name__}{{}}.ckpt"
        model = cls()
        trainer = fit(METHODS[name], model, callbacks=[Watcher(path, (SAVED_AT,))])
        resumed = cls()
        trainer_of_resumed = fit(METHODS[name], resumed, path.format(SAVED_AT))
        (shard,) = Path(f"{path.format(SAVED_AT)}.ranks").glob(f"rank-{trainer.global_rank}-of-2-*.pt")
        in_files = [torch.load(file, weights_only=True) for file in (path.format(SAVED_AT), shard)]
        state = dict(tensors_in([*in_files, [worker.state_dict() for worker in trainer.strategy.workers]]))
        num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        found[cls.__name__] = {
            "equal": weights_of(resumed) == weights_of(model) and trainer_of_resumed.global_step == STEPS,
            "frozen": [key for key in state if "base" in key or "middle" in key],
            "most": max(tensor.numel() for tensor in state.values() if tensor.is_floating_point()) <= num_trained,
            "in file": list(in_files[0]["state_dict"]),
            "weights": weights_of(model),
            "as ddp": trainer.strategy.ledger.dense_bytes / STEPS / num_trained,
        }
    return found


@since_lightning_2_5
@pytest.mark.parametrize("name", METHODS)
def test_adapters_alone_are_kept_saved_and_resumed(name: str, tmp_path: Path) -> None:
    names = [f"{layer}.lora_{part}.weight" for layer in ("first", "last") for part in "ab"]
    one, other = run_ranks(keep, 2, name, str(tmp_path))
    for found in (*one.values(), *other.values()):
        assert found["equal"]
        assert found["most"]
        assert found["frozen"] == []
        assert found["in file"] == names
        assert found["as ddp"] == pytest.approx(4, rel=0.2)  # what is saved is told against what trains, in float32
    assert one["DropsFrozen"]["weights"] == one["SavesAdapters"]["weights"] == other["SavesAdapters"]["weights"]


def test_adapters_are_compressed() -> None:
    """Rank 8 beside 768 is 6,144 elements, the smallest tensor of such a model that trains, and most of it."""
    numels = [8 * 768] * 24 + [8 * 2304] * 12 + [8 * 3072] * 12
    compressed = sum(numel for numel in numels if numel >= small_numel(numels))
    assert compressed >= 0.97 * sum(numels)
