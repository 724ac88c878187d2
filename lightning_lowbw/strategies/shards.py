"""Rank-local state beside a checkpoint: one file per rank in the folder ``<checkpoint>.ranks``.

The checkpoint itself stays the plain file that Lightning writes, and loads without this package. Under `METADATA_KEY`
it names its shards. Their names carry an identity of the save: a checkpoint that is overwritten keeps its own shards
until the new one is there, so that a job that dies in between resumes from the old one.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.types import _PATH

from lightning_lowbw.errors import ConfigurationError

METADATA_KEY = "lightning_lowbw"
FOLDER_SUFFIX = ".ranks"  # no digits: Lightning reads version numbers off the names in a checkpoint folder

GO_ON = (
    "give the strategy resume='weights and optimizer', which goes on from the file alone: with the step, the epoch, "
    "the optimizer and the schedulers, and without what has not been sent"
)


def folder_of(checkpoint_path: _PATH) -> str:
    """Return the folder that holds the shards of a checkpoint; local paths and fsspec URLs alike."""
    return f"{os.fspath(checkpoint_path)}{FOLDER_SUFFIX}"


def shard_path(folder: str, rank: int, metadata: Mapping[str, Any]) -> str:
    """Return the path of one rank's shard."""
    return f"{folder}/rank-{rank}-of-{metadata['num_ranks']}-{metadata['save_id']}.pt"


def load(
    io: CheckpointIO, checkpoint_path: _PATH, metadata: Mapping[str, Any], rank: int
) -> tuple[dict[str, Any], str]:
    """Load the shard of one rank; return it with its path.

    Raises:
        ConfigurationError: on this rank; the shard is missing.
    """
    candidates = [shard_path(folder, rank, metadata) for folder in _folders(checkpoint_path, metadata["folder"])]
    for path in candidates:
        with contextlib.suppress(FileNotFoundError):
            return io.load_checkpoint(path), path
    raise ConfigurationError(
        f"The shard {candidates[0]!r} is missing. It belongs to {os.fspath(checkpoint_path)!r}, saved by "
        f"{metadata['num_ranks']} ranks: copy the folder along with the file (from all nodes, if their disks are not "
        f"shared), or {GO_ON}."
    )


def _folders(checkpoint_path: _PATH, name_when_saved: str) -> list[str]:
    """List where the shards may be: the checkpoint may have been renamed, copied, or be a link (`save_last="link"`)."""
    path = os.fspath(checkpoint_path)
    name = path.replace(os.sep, "/").rsplit("/", 1)[-1]
    folders = [folder_of(path), f"{path.removesuffix(name)}{name_when_saved}"]
    if "://" not in path and os.path.islink(path):
        folders.append(folder_of(str(Path(path).resolve())))
    return list(dict.fromkeys(folders))


def rng_state(device: torch.device) -> dict[str, Any]:
    """Return the state of this process's random number generators: tensors and primitives."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Take over what `rng_state` returned."""
    torch.set_rng_state(state["torch"])
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
