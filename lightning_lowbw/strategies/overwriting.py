"""Overwrites a checkpoint, a file or the folder of a sharded model, so that at any time one of both is whole on disk.

The new one is written into the folder of the shards, and then renamed. Lightning writes files to the folder for
temporary files first: from another disk they would be copied, and a crash or a full disk would leave a part of one.
A folder cannot be renamed over another: the previous one is renamed into the folder of the shards first. A process that
is killed between these two leaves it there, and `put_back` finds it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from typing import Any

from lightning_lowbw.errors import ConfigurationError

PART = "checkpoint.part"  # in the folder of the shards: a checkpoint that is being written
BEFORE = "checkpoint.before"  # the one that it replaces
NAMES_OF_TORCH = (".metadata", "meta.pt")  # with the files *.distcp, what a checkpoint that is a folder consists of


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
