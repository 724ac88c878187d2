"""Checkpoints: a plain ``.ckpt`` that Lightning writes on rank 0, and beside it a shard of each rank's own state.

The checkpoint loads without this package. Under `METADATA_KEY` it names its shards, the files in the folder
``<checkpoint>.ranks``. Their names carry an identity of the save: a checkpoint that is overwritten keeps its own shards
until the new one is there, so that a job that dies in between resumes from the old one.

The user's `CheckpointIO` writes, reads and removes all files. It may know paths that nothing else knows, it lists no
folder, and it decides how whole a file is that it was writing when its process died.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_lowbw.comm.agreement import agree, failing_together
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.kernels.tensors import device_of
from lightning_lowbw.strategies.fit import Fit
from lightning_lowbw.strategies.keywords import Needs
from lightning_lowbw.sync.state import equal_part, merge_states

METADATA_KEY = "lightning_lowbw"
FORMAT = 4  # of the shards; 1 was that of version 0.1.0, 3 that of 0.2.0
ALONE: Needs = "weights and optimizer"
FOLDER_SUFFIX = ".ranks"  # no digits: Lightning reads version numbers off the names in a checkpoint folder
GO_ON = (
    "give the strategy resume='weights and optimizer', which goes on from the file alone: with the step, the epoch, "
    "the optimizer and the schedulers, and without what has not been sent"
)


@dataclass(frozen=True)
class Layout:
    """How the ranks' own state lies in the files beside a checkpoint.

    Attributes:
        kind: the kind of the state; another kind cannot be loaded.
        nodes: the ranks of each node; None where flat.
        place: the place of this rank in its node, if the model is sharded inside nodes; a rank at another place has
            other shards.
    """

    kind: str
    nodes: list[list[int]] | None
    place: int | None = None


# Saving -----------------------------------------------------------------------------------------------------------


def save(
    fit: Fit,
    layout: Layout,
    checkpoint: dict[str, Any],
    filepath: _PATH,
    storage_options: Any,
    write: Callable[[dict[str, Any], _PATH], None],
) -> None:
    """Write the shards, then the checkpoint that names them; then delete the previous checkpoint's shards.

    If a rank dies or fails meanwhile, the previous checkpoint has its shards. Files that may be written in the
    background are there at the next save, or when the plugin has been torn down: then the shards are deleted.

    Collective: all ranks; not without the optimizers' states: then rank 0 writes the weights alone, as under DDP.

    Args:
        fit: the fit whose state is saved.
        layout: of the state.
        checkpoint: Lightning's.
        filepath: of this rank, whose folder is used: each rank may have a folder of its own. The file name of rank 0 is
            used, because names have metrics in them.
        storage_options: for the user's `CheckpointIO`.
        write: writes the checkpoint, on rank 0.

    Raises:
        ConfigurationError: on all ranks; a rank could not write its file.
    """
    if not fit.workers or "optimizer_states" not in checkpoint:
        write(checkpoint, filepath)
        return
    strategy = fit.trainer.strategy
    path, save_id, removed = strategy.broadcast((str(filepath), uuid.uuid4().hex[:12], fit.removed))
    fit.removed = []
    folder, slash, _ = str(filepath).rpartition("/")
    with failing_together():  # no rank writes before all ranks have deleted
        for each in removed:
            delete(fit, strategy.checkpoint_io, each, [strategy.global_rank])
        delete_unneeded(fit, strategy)
        states = [worker.state_dict() for worker in fit.workers]
    metadata = _metadata(fit, layout, save_id, states)
    shards = _shards(folder_of(f"{folder}{slash}{path.rpartition('/')[2]}"), metadata)
    metadata["saved"] = {**fit.saved, path: shards}
    with failing_together():
        shard, own = _shard(fit, save_id, states), shard_path(shards, strategy.global_rank)
        strategy.checkpoint_io.save_checkpoint(shard, own, storage_options=storage_options)
    del states, shard  # before the checkpoint is written
    with failing_together():
        write({**checkpoint, METADATA_KEY: metadata}, filepath)
    if path in fit.saved:
        fit.unneeded.append(fit.saved[path])
    fit.saved[path] = shards
    if isinstance(strategy.checkpoint_io, TorchCheckpointIO):  # another plugin may write in the background
        delete_unneeded(fit, strategy)


def _metadata(fit: Fit, layout: Layout, save_id: str, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "num_ranks": fit.trainer.world_size,
        "save_id": save_id,
        "format": FORMAT,
        "kind": layout.kind,
        "nodes": layout.nodes,
        "chosen": fit.auto.state_dict(),
        "workers": list(map(equal_part, states)),
    }


def _shard(fit: Fit, save_id: str, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    named = dict(fit.trainer.lightning_module.named_buffers())
    buffers = named if fit.replicas else fit.buffers.own(named)
    for worker in fit.replicas:  # also while the anchor is shown
        buffers |= {name: own for name, own in worker.replica.own_tensors().items() if name in named}
    return {
        "save_id": save_id,
        "rank": fit.trainer.global_rank,
        "workers": states,
        "rng": rng_state(fit.trainer.strategy.root_device),
        "precision": fit.trainer.precision_plugin.state_dict(),  # a GradScaler's; ranks that step alone scale alone
        "buffers": {name: buffer.cpu().clone() for name, buffer in buffers.items()},
        "shared_buffers": fit.buffers.state_dict(),
    }


def delete_unneeded(fit: Fit, strategy: Any) -> None:
    """Delete the shards of this rank, and of ranks that no longer exist, that no checkpoint needs any more."""
    for shards in fit.unneeded:
        no_longer = range(strategy.world_size, shards["num_ranks"]) if strategy.is_global_zero else ()
        _delete(strategy.checkpoint_io, shards, [strategy.global_rank, *no_longer])
    fit.unneeded = []


def delete(fit: Fit, checkpoint_io: Any, path: str, ranks: Iterable[int] | None = None) -> None:
    """Delete the shards of a checkpoint that rank 0 has removed, and their folder, if the plugin has folders.

    Args:
        fit: knows the shards.
        checkpoint_io: the user's.
        path: of the checkpoint, on rank 0.
        ranks: whose shards; None: all.
    """
    folder = folder_of(path)
    if shards := fit.saved.pop(path, None):
        folder = shards["folder"]
        _delete(checkpoint_io, shards, range(shards["num_ranks"]) if ranks is None else ranks)
    with contextlib.suppress(Exception):
        checkpoint_io.remove_checkpoint(folder)


def _delete(checkpoint_io: Any, shards: Mapping[str, Any], ranks: Iterable[int]) -> None:
    for path in (shard_path(shards, rank) for rank in ranks):
        try:
            checkpoint_io.remove_checkpoint(path)
        except FileNotFoundError:  # ranks may share the disk
            pass
        except Exception as error:  # noqa: BLE001 - plugins have errors of their own; nothing is lost
            rank_zero_warn(f"The shard {path!r}, which no checkpoint needs, could not be deleted: {error}.")


# Loading ----------------------------------------------------------------------------------------------------------


def load(fit: Fit, layout: Layout, checkpoint: Mapping[str, Any], path: _PATH | None, *, needs: Needs) -> None:
    """Load the workers' state of a checkpoint; with another number of ranks the mean of the ranks' states.

    Collective: all ranks, blocking.

    Args:
        fit: the fit that is resumed.
        layout: of its state.
        checkpoint: as it was loaded.
        path: where from; its shards are beside it.
        needs: the state that must be loaded.

    Raises:
        ConfigurationError: on all ranks; a shard is missing, damaged, of another save or of another version, and a
            resume needs it.
        DisagreementError: on all ranks; they have loaded different checkpoints.
    """
    metadata: Mapping[str, Any] = checkpoint.get(METADATA_KEY) or {}
    step, name, is_exact = checkpoint["global_step"], type(fit.trainer.strategy).__name__, needs != ALONE
    agree("checkpoint that is resumed", {"global_step": step, "save_id": metadata.get("save_id")})
    if is_exact and metadata.get("format", FORMAT) != FORMAT:
        raise ConfigurationError(
            f"{path} was written by another version of lightning_lowbw: the ranks' own state beside it has format "
            f"{metadata['format']}, and this version reads {FORMAT}. Finish the run with the version that wrote "
            f"it, or {GO_ON}."
        )
    is_ours = metadata.get("format") == FORMAT
    if is_ours:
        resumed = {str(path): _shards(folder_of(str(path)), metadata)}
        fit.saved = {**metadata.get("saved", {}), **resumed, **fit.saved}
    if is_ours and (method := fit.auto.load_state_dict(metadata["chosen"], fit.method)) is not None:
        fit.adopt(method)
    states: Sequence[Mapping[str, Any]] = ()
    if not is_ours or metadata["kind"] != layout.kind:
        writer = f"a method of kind {metadata['kind']!r}" if is_ours else "another program"
        rank_zero_info(
            f"The checkpoint was written by {writer}. {name}, of kind {layout.kind!r}, begins with the weights, the "
            "optimizer and the step in it, and with nothing else."
        )
    elif is_exact:
        assert path is not None
        _load_workers(fit, layout, metadata, path)
        return
    else:
        states = metadata["workers"]
        rank_zero_info(
            f"resume={ALONE!r}: {name} resumes from the checkpoint alone, with the weights, the optimizer, the "
            "schedulers, the epoch and the step in it. What had not been sent is lost, and an outer optimizer's "
            "momentum begins at zero."
        )
    if len(fit.workers) > 1 and not states:
        rank_zero_info(f"The checkpoint counts as {step} steps of each optimizer: it has their sum.")
    for worker in fit.workers:
        worker.step = step
    for worker, state in zip(fit.workers, states, strict=False):
        worker.load_state_dict(state)


def _load_workers(fit: Fit, layout: Layout, metadata: Mapping[str, Any], path: _PATH) -> None:
    """Load the workers' state and, with the same number of ranks, the other state of this rank.

    Collective: all ranks, blocking.
    """
    num_optimizers, num_ranks, shard = len(metadata["workers"]), fit.trainer.world_size, None
    checkpoint_io = fit.trainer.strategy.checkpoint_io
    with failing_together():
        if num_optimizers != len(fit.workers):
            raise ConfigurationError(
                f"{path} has the states of {num_optimizers} optimizers, and here are {len(fit.workers)}. "
                f"Resume with the optimizers that were saved, or {GO_ON}."
            )
        if (metadata["num_ranks"], metadata["nodes"]) == (num_ranks, layout.nodes):
            shard = load_shard(checkpoint_io, path, metadata, fit.trainer.global_rank)
            states = shard["workers"]
        else:  # the means; one shard is in memory at a time
            ranks = _ranks_like_this(layout, metadata, path)
            states = [
                merge_states(load_shard(checkpoint_io, path, metadata, rank)["workers"][number] for rank in ranks)
                for number in range(num_optimizers)
            ]
    with failing_together():
        for worker, state in zip(fit.workers, states, strict=True):
            worker.load_state_dict(state)
    fit.has_own_states = True
    if shard is None:
        rank_zero_info(
            f"The checkpoint was written by {metadata['num_ranks']} ranks{_on(metadata['nodes'])}; it is resumed "
            f"by {num_ranks}{_on(layout.nodes)}. Each starts with the mean of the ranks' own states."
        )
    else:
        restored = {name: shard[name] for name in ("rng", "precision")}
        fit.restore = functools.partial(
            _restore, restored, fit.trainer.strategy.root_device, fit.trainer.precision_plugin
        )
        fit.buffers.load_state_dict(shard["shared_buffers"])
        _load_buffers(fit.trainer.lightning_module, shard["buffers"])
    for worker in fit.replicas:  # until the first batch the model keeps the weights of the checkpoint
        worker.replica.show()


def _ranks_like_this(layout: Layout, metadata: Mapping[str, Any], path: _PATH) -> Sequence[int]:
    """Return the ranks whose states are averaged for this rank in another world: all ranks, or the same place."""
    if layout.place is None or layout.nodes is None:
        return range(metadata["num_ranks"])
    nodes, size = metadata["nodes"], len(layout.nodes[0])
    if len(nodes[0]) != size:
        raise ConfigurationError(
            f"{path} was written by nodes of {len(nodes[0])} ranks, and these have {size}. Resume "
            f"with any number of nodes of {len(nodes[0])} ranks, or {GO_ON}."
        )
    return [node[layout.place] for node in nodes]


def _load_buffers(module: torch.nn.Module, own: Mapping[str, Tensor]) -> None:
    """Load the buffers that a rank has for itself."""
    for name, buffer in list(module.named_buffers()):
        kept = own.get(name)
        if kept is not None and buffer.shape == kept.shape:
            buffer.copy_(kept)
        elif kept is not None:  # a buffer of its own on each rank: the checkpoint has that of rank 0
            layer, _, last = name.rpartition(".")
            module.get_submodule(layer)._buffers[last] = kept.to(buffer.device, buffer.dtype)


def _on(nodes: list[list[int]] | None) -> str:
    return "" if nodes is None else f" on nodes {nodes}"


# Files ------------------------------------------------------------------------------------------------------------


def folder_of(checkpoint_path: _PATH) -> str:
    """Return the folder that holds the shards of a checkpoint; local paths and URLs alike."""
    return f"{checkpoint_path}{FOLDER_SUFFIX}"


def _shards(folder: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return where the shards of a checkpoint are, in plain values."""
    return {"folder": folder, "num_ranks": metadata["num_ranks"], "save_id": metadata["save_id"]}


def shard_path(shards: Mapping[str, Any], rank: int) -> str:
    """Return the path of one rank's shard."""
    return f"{shards['folder']}/rank-{rank}-of-{shards['num_ranks']}-{shards['save_id']}.pt"


def load_shard(checkpoint_io: Any, checkpoint_path: _PATH, metadata: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Load the shard of one rank, which must be what its name says.

    Raises:
        ConfigurationError: on this rank; the shard is missing, damaged, or that of another rank, save or step.
    """
    given = str(checkpoint_path)
    target = os.path.realpath(given) if os.path.islink(given) else given  # `save_last="link"`
    path = shard_path(_shards(folder_of(target), metadata), rank)
    try:
        shard: dict[str, Any] = checkpoint_io.load_checkpoint(path)
    except Exception as error:  # of the plugin, of the unpickler, of the file system: anything
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise ConfigurationError(
            f"The shard {path!r} is missing or damaged ({type(error).__name__}: {reason}). It belongs to {given!r}, "
            f"saved by {metadata['num_ranks']} ranks: copy the folder along with the file (from all nodes, if their "
            f"disks are not shared), or {GO_ON}."
        ) from error
    found = shard.get("rank"), shard.get("save_id")
    if found != (rank, metadata["save_id"]):
        raise ConfigurationError(
            f"The shard {path!r} does not belong to the checkpoint beside it: its rank and save_id are {found}. All "
            f"shards must be of one save: copy the file and its folder once more, together, or {GO_ON}."
        )
    return shard


def rng_state(device: torch.device) -> dict[str, Any]:
    """Return the state of this process's random number generators: tensors and primitives."""
    return {"torch": torch.get_rng_state(), "python": random.getstate(), **device_of(device).rng_state()}


def _restore(shard: Mapping[str, Any], device: torch.device, precision_plugin: Any) -> None:
    """Load the random numbers and the GradScaler's state of a shard."""
    state = shard["rng"]
    torch.set_rng_state(state["torch"])
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    device_of(device).set_rng_state(state)
    if shard["precision"]:
        precision_plugin.load_state_dict(shard["precision"])
