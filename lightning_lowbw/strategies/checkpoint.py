"""Checkpoints: a plain ``.ckpt`` that Lightning writes on rank 0, and beside it a shard of each rank's own state."""

from __future__ import annotations

import contextlib
import functools
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_lowbw.engine.state import equal_state, load_equal_state, merge
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.strategies import shards
from lightning_lowbw.where.agreement import failing_together

if TYPE_CHECKING:
    from lightning_lowbw.strategies.strategy import Strategy

FORMAT = 2  # of the shards; 1 was that of version 0.1.0
Needs = Literal["exact", "weights and optimizer"]
NUM_KEPT = 2  # of a rank's shards in a folder: the checkpoint that is there, and the one to replace it


class Checkpoints:
    """Saves, loads and removes the shards of this rank: workers, random numbers, precision and buffers.

    Args:
        strategy: whose they are.
        needs: what a resume needs: "exact" all shards; "weights and optimizer" the ``.ckpt`` alone.

    Raises:
        ConfigurationError: `needs` is none of these.
    """

    def __init__(self, strategy: Strategy, needs: Needs) -> None:
        if needs not in get_args(Needs):
            choices = ", ".join(repr(choice) for choice in get_args(Needs))
            raise ConfigurationError(f"resume={needs!r}: choose one of {choices}.")
        self._strategy, self._needs_shards = strategy, needs == "exact"
        self._run_id = ""
        self._num_saves = 0
        self._written: dict[str, list[str]] = {}  # this rank's shards by folder, the latest last
        self._saved_as: dict[str, _PATH] = {}  # rank 0's path, by this rank's own
        self._resume_path: _PATH | None = None
        self._rng_state: Mapping[str, Any] | None = None  # to be set before the first batch
        self._precision_state: dict[str, Any] | None = None

    def begin_fit(self) -> None:
        """Give the fit an identity, by which the shards of a save are told from others.

        Collective: all ranks.
        """
        self._rng_state = self._precision_state = None
        self._run_id = self._strategy.broadcast(uuid.uuid4().hex[:12])

    # Saving -----------------------------------------------------------------------------------------------------

    def save_shard(self, checkpoint: dict[str, Any], filepath: _PATH) -> tuple[dict[str, Any], _PATH]:
        """Write this rank's shard; return the checkpoint with what finds the shards again, and rank 0's path of it.

        Collective: all ranks; not while an exception unwinds.
        """
        strategy = self._strategy
        if not strategy.workers or "optimizer_states" not in checkpoint:  # weights only
            return checkpoint, filepath
        filepath = self._path_of_rank_zero(filepath)
        self._num_saves += 1  # the same on all ranks: Lightning saves on all of them
        folder = shards.folder_of(filepath)
        metadata = {
            "num_ranks": strategy.world_size,
            "folder": folder.replace("\\", "/").rsplit("/", 1)[-1],
            "save_id": f"{self._run_id}-{self._num_saves}",
            "format": FORMAT,
            "kind": strategy.method.kind,
            "nodes": strategy.groups.nodes,
            "chosen": strategy.auto.state_dict(),
            "workers": [equal_state(worker) for worker in strategy.workers],
        }
        # First the shards: where the checkpoint is, this node's shards are too.
        path = shards.shard_path(folder, strategy.global_rank, metadata)
        strategy.checkpoint_io.save_checkpoint(self._shard(metadata["save_id"]), path)
        self._drop_old(folder, path)
        return {**checkpoint, shards.METADATA_KEY: metadata}, filepath

    def _shard(self, save_id: object) -> dict[str, Any]:
        strategy, own = self._strategy, self._strategy.regime.own_buffers
        module = strategy.lightning_module
        assert module is not None
        return {
            "save_id": save_id,
            "workers": [worker.state_dict() for worker in strategy.workers],
            "rng": shards.rng_state(strategy.root_device),
            "precision": strategy.precision_plugin.state_dict(),  # a GradScaler's; ranks that step alone scale alone
            "buffers": {name: own.get(name, buffer).cpu().clone() for name, buffer in module.named_buffers()},
        }

    def _path_of_rank_zero(self, filepath: _PATH) -> _PATH:
        """Return where rank 0 saves: names with metrics in them differ between ranks, and only rank 0 writes the file.

        Collective: all ranks; not while an exception unwinds, where they need not all be here.
        """
        strategy = self._strategy
        if strategy.world_size == 1 or strategy.trainer.interrupted:
            return filepath
        path = strategy.broadcast(filepath)
        self._saved_as[str(filepath)] = path
        return path

    def _drop_old(self, folder: str, path: str) -> None:
        """Delete this rank's older shards in a folder, but the last: its checkpoint is still the one that is there."""
        written = self._written.setdefault(folder, [])
        written.append(path)
        while len(written) > NUM_KEPT:
            with contextlib.suppress(FileNotFoundError):
                self._strategy.checkpoint_io.remove_checkpoint(written.pop(0))

    def remove_shards(self, filepath: _PATH) -> None:
        """Delete the shards of a checkpoint that has been deleted."""
        folder = shards.folder_of(self._saved_as.pop(str(filepath), filepath))
        self._written.pop(folder, None)
        if self._strategy.local_rank == 0:  # of each node: disks need not be shared
            with contextlib.suppress(FileNotFoundError):  # another node was faster
                self._strategy.checkpoint_io.remove_checkpoint(folder)

    # Loading ----------------------------------------------------------------------------------------------------

    def note_path(self, checkpoint_path: _PATH) -> None:
        """Keep where a checkpoint was loaded from: its shards are beside it."""
        self._resume_path = checkpoint_path

    def load_shards(self, checkpoint: Mapping[str, Any]) -> None:
        """Give the workers the state that belongs to a checkpoint; in another world the mean of what ranks had.

        Collective: all ranks, blocking.

        Raises:
            ConfigurationError: on all ranks; a shard is missing, or of another version, and a resume needs it.
        """
        strategy = self._strategy
        metadata: Mapping[str, Any] | None = checkpoint.get(shards.METADATA_KEY)
        is_of_another_version = metadata is not None and metadata.get("format") != FORMAT
        if metadata is not None and is_of_another_version and self._needs_shards:
            raise ConfigurationError(
                f"{self._resume_path} was written by another version of lightning_lowbw: the ranks' own state beside "
                f"it has format {metadata.get('format', 1)}, and this version reads {FORMAT}. Finish the run with the "
                f"version that wrote it, or {shards.GO_ON}."
            )
        if metadata is not None and not is_of_another_version:
            strategy.auto.load_state_dict(metadata.get("chosen"))
        if metadata is None or is_of_another_version or metadata["kind"] != strategy.method.kind:
            strategy.auto.load_state_dict(None, is_foreign=True)
            self._go_on_without(checkpoint, [])
            rank_zero_info(
                f"The checkpoint was not written by this method and version: {type(strategy).__name__} starts with the "
                "weights, the optimizer and the step in it, and with nothing else."
            )
            return
        found, missing = None, ""
        with failing_together():
            try:
                found = self._find(metadata)
            except ConfigurationError as error:
                if self._needs_shards:
                    raise
                missing = str(error).split(". ")[0]
        if not strategy.reduce_boolean_decision(found is not None):
            self._go_on_without(checkpoint, metadata.get("workers", []))
            rank_zero_warn(
                f"{missing or 'Shards of other ranks are missing'}. resume='weights and optimizer': "
                f"{type(strategy).__name__} goes on from the checkpoint alone, with the weights, the optimizer, the "
                "schedulers, the epoch and the step in it. What had not been sent is lost, and an outer optimizer's "
                "momentum begins at zero."
            )
            return
        assert found is not None
        states, shard = found
        with strategy.regime.loading():
            with failing_together():
                for worker, state in zip(strategy.workers, states, strict=True):
                    worker.load_state_dict(state)
            if shard is not None:
                self._restore(shard)
        if shard is not None:
            return
        rank_zero_info(
            f"The checkpoint was written by {metadata['num_ranks']} ranks{_on(metadata.get('nodes'))}; it is resumed "
            f"by {strategy.world_size}{_on(strategy.groups.nodes)}. Each starts with the mean of the ranks' own states."
        )

    def _find(self, metadata: Mapping[str, Any]) -> tuple[list[Mapping[str, Any]], Mapping[str, Any] | None]:
        """Return the state of each worker, and this rank's shard where the world is that of the checkpoint.

        Raises:
            ConfigurationError: on this rank; a shard is missing.
        """
        strategy, path = self._strategy, self._resume_path
        assert path is not None
        load = functools.partial(shards.load, strategy.checkpoint_io, path, metadata)
        if metadata["num_ranks"] == strategy.world_size and metadata.get("nodes") == strategy.groups.nodes:
            shard, own_path = load(strategy.global_rank)
            self._written[shards.folder_of(path)] = [own_path]
            return shard["workers"], shard
        numbers, ranks = range(len(strategy.workers)), range(metadata["num_ranks"])
        return [merge(load(rank)[0]["workers"][number] for rank in ranks) for number in numbers], None

    def _go_on_without(self, checkpoint: Mapping[str, Any], states: Sequence[Mapping[str, Any]]) -> None:
        """Go on from a checkpoint alone; with what is the same on all ranks, where it has that."""
        workers = self._strategy.workers
        for number, worker in enumerate(workers):
            worker.step = checkpoint["global_step"] // max(1, len(workers))
            if number < len(states):
                load_equal_state(worker, states[number])

    def _restore(self, shard: Mapping[str, Any]) -> None:
        self._rng_state, self._precision_state = shard["rng"], shard.get("precision")
        module = self._strategy.lightning_module
        assert module is not None
        for name, buffer in module.named_buffers():
            if name in shard["buffers"] and buffer.shape == shard["buffers"][name].shape:
                buffer.copy_(shard["buffers"][name])

    def begin_batch(self) -> None:
        """Set the random numbers of a resume; only now: what Lightning does before the first batch draws some too."""
        if self._rng_state is None:
            return
        shards.set_rng_state(self._rng_state, self._strategy.root_device)
        if self._precision_state:
            self._strategy.precision_plugin.load_state_dict(self._precision_state)
        self._rng_state = self._precision_state = None


def _on(nodes: list[list[int]] | None) -> str:
    return "" if nodes is None else f" on nodes {nodes}"
