"""Rank-local state beside a checkpoint: one file per rank in the folder ``<checkpoint>.ranks``.

The checkpoint itself stays the plain file that Lightning writes, and loads without this package. Under `METADATA_KEY`
it names its shards. Their names carry an identity of the save: a checkpoint that is overwritten keeps its own shards
until the new one is there, so that a job that dies in between resumes from the old one.

A checkpoint, a file or the folder of a sharded model, is overwritten so that at any time one of both is whole on disk.
The new one is written into the folder of the shards, and then renamed. Lightning writes files to the folder for
temporary files first: from another disk they would be copied, and a crash or a full disk would leave a part of one.
A folder cannot be renamed over another: the previous one is renamed into the folder of the shards first. A process that
is killed between these two leaves it there, and `put_back` finds it.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import random
import re
import shutil
import zipfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_lowbw.errors import ConfigurationError

METADATA_KEY = "lightning_lowbw"
FOLDER_SUFFIX = ".ranks"  # no digits: Lightning reads version numbers off the names in a checkpoint folder
PART = "checkpoint.part"  # in the folder of the shards: a checkpoint that is being written
BEFORE = "checkpoint.before"  # the one that it replaces
NAMES_OF_TORCH = (".metadata", "meta.pt")  # with the files *.distcp, what a checkpoint that is a folder consists of
Needs = Literal["exact", "weights and optimizer"]  # what a resume loads
NAME = re.compile(r"rank-(\d+)-of-\d+-.+\.pt")

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
        ConfigurationError: on this rank; the shard is missing, damaged, or that of another rank, save or step.
    """
    candidates = [shard_path(folder, rank, metadata) for folder in _folders(checkpoint_path, metadata["folder"])]
    for path in candidates:
        with contextlib.suppress(FileNotFoundError):
            shard = _read(io, path)
            _check(shard, path, metadata, rank)
            return shard, path
    raise ConfigurationError(
        f"The shard {candidates[0]!r} is missing. It belongs to {os.fspath(checkpoint_path)!r}, saved by "
        f"{metadata['num_ranks']} ranks: copy the folder along with the file (from all nodes, if their disks are not "
        f"shared), or {GO_ON}."
    )


def _read(io: CheckpointIO, path: str) -> Any:
    """Read a file of tensors and primitives.

    Raises:
        FileNotFoundError: it is not there.
        ConfigurationError: it is damaged.
    """
    while isinstance(io, AsyncCheckpointIO):
        assert io.checkpoint_io is not None
        io = io.checkpoint_io
    if type(io).load_checkpoint is not TorchCheckpointIO.load_checkpoint:  # the user's: it alone knows its files
        is_asked = "weights_only" in inspect.signature(io.load_checkpoint).parameters  # not before Lightning 2.6
        return io.load_checkpoint(path, **({"weights_only": True} if is_asked else {}))
    try:
        with get_filesystem(path).open(path, "rb") as file:
            with zipfile.ZipFile(file) as archive:  # torch compares no checksums, and takes half of all damaged files
                damaged = archive.testzip()
            if damaged is not None:
                raise zipfile.BadZipFile(f"wrong checksum of {damaged}")
            file.seek(0)
            return torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:  # of zipfile, of the unpickler, of the file system: anything
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise ConfigurationError(
            f"The shard {path!r} is damaged ({type(error).__name__}: {reason}). It must be the file that was saved: "
            f"copy it again, or {GO_ON}."
        ) from error


def _check(shard: Mapping[str, Any], path: str, metadata: Mapping[str, Any], rank: int) -> None:
    """Check that a shard is what its name says."""
    expected = {"rank": rank, "save_id": metadata["save_id"]}
    if metadata["is_interrupted"]:  # else all ranks were at the same place, with uneven data after different batches
        expected |= {"step": metadata["step"], "progress": [_progress(state) for state in metadata["workers"]]}
    found = dict.fromkeys(expected, "none")
    if isinstance(shard, Mapping):
        progress = [_progress(state) for state in shard.get("workers", [])]
        found = {name: {**shard, "progress": progress}.get(name, "none") for name in expected}
    if found == expected:
        return
    wrong = [f"{name} {found[name]} instead of {value}" for name, value in expected.items() if found[name] != value]
    raise ConfigurationError(
        f"The shard {path!r} does not belong to the checkpoint beside it: {', '.join(wrong)}. All shards must be of "
        f"one save: copy the file and its folder once more, together, or {GO_ON}."
    )


def _progress(state: Mapping[str, Any]) -> str:
    averages = f" and {state['num_averages']} averages" if "num_averages" in state else ""
    return f"{state['step']} steps{averages}"


def sweep(io: CheckpointIO, folder: str, kept: Collection[str], is_mine: Callable[[int], bool]) -> None:
    """Delete shards that no checkpoint names any more: of the previous save, and of interrupted saves.

    Args:
        io: what deletes them.
        folder: of the shards; nothing else in it is touched.
        kept: paths of shards.
        is_mine: whether this rank deletes the shards of a rank.
    """
    files, names = get_filesystem(folder), {path.rsplit("/", 1)[-1] for path in kept}
    files.invalidate_cache(folder)
    with contextlib.suppress(FileNotFoundError):
        for listed in files.ls(folder, detail=False):
            name = str(listed).replace("\\", "/").rsplit("/", 1)[-1]
            match = NAME.fullmatch(name)
            if match is not None and name not in names and is_mine(int(match[1])):
                with contextlib.suppress(FileNotFoundError):  # another node was faster
                    io.remove_checkpoint(f"{folder}/{name}")


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


# Overwriting ------------------------------------------------------------------------------------------------------


def prepare(filepath: str, folder: str) -> None:
    """Check that a checkpoint can be written, and delete what a process that was killed has left.

    Args:
        filepath: where the checkpoint, a file or a folder, is to be.
        folder: of its shards.

    Raises:
        ConfigurationError: `filepath` is a folder that is no checkpoint.
    """
    put_back(filepath, folder)
    if os.path.isdir(filepath) and not all(_is_of_checkpoint(name) for name in os.listdir(filepath)):
        raise ConfigurationError(
            f"{filepath!r} is a folder with other files than those of a checkpoint, and would be overwritten. Save the "
            "checkpoint under another name."
        )
    for name in (PART, BEFORE):
        remove(f"{folder}/{name}")


def overwrite(checkpoint: Any, filepath: str, folder: str, write: Callable[[Any, str], None]) -> None:
    """Write a checkpoint in place of the one of this name, after `prepare`.

    Args:
        checkpoint: for `write`.
        filepath: where the checkpoint, a file or a folder, is to be.
        folder: of its shards.
        write: makes a file, or a folder, of the name that it is given.
    """
    part, before = f"{folder}/{PART}", f"{folder}/{BEFORE}"
    try:
        write(checkpoint, part)
        if os.path.isdir(part) or os.path.isdir(filepath):
            with contextlib.suppress(FileNotFoundError):
                os.rename(filepath, before)
        os.replace(part, filepath)
    except BaseException:
        with contextlib.suppress(OSError):
            put_back(filepath, folder)
            remove(part)
        raise
    with contextlib.suppress(OSError):  # else `prepare` of the next save does it
        remove(before)


def put_back(filepath: str, folder: str) -> None:
    """Restore the previous checkpoint, if a process was killed before it had renamed the new one."""
    before = f"{folder}/{BEFORE}"
    if os.path.lexists(before) and not os.path.lexists(filepath):
        os.rename(before, filepath)


def remove(path: str) -> None:
    """Delete a file, a link or a folder, if it is there."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)


def _is_of_checkpoint(name: str) -> bool:
    return name in NAMES_OF_TORCH or name.endswith(".distcp")
