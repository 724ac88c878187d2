"""Checkpoints: a plain ``.ckpt`` that Lightning writes on rank 0, and beside it a shard of each rank's own state."""

from __future__ import annotations

import contextlib
import functools
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, get_args

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_lowbw.arguments import check_one_of
from lightning_lowbw.comm.agreement import agree, failing_together, gather
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.strategies import shards
from lightning_lowbw.strategies.base import BaseStrategy
from lightning_lowbw.sync.state import merge_states

FORMAT = 3  # of the shards; 1 was that of version 0.1.0
ALONE: shards.Needs = "weights and optimizer"
# Each worker's state, this rank's shard if the world is that of the checkpoint, and what an exception had interrupted.
_Found = tuple[list[Mapping[str, Any]], Mapping[str, Any] | None, str]


class CheckpointedStrategy(BaseStrategy):
    """A strategy that saves, loads and removes shards: workers, random numbers, precision and buffers of each rank."""

    @override
    def _make_parts(self) -> None:
        super()._make_parts()
        check_one_of("resume", self._options["resume"], get_args(shards.Needs))
        self._last_queued: Future[None] | None = None  # done when the last save is written
        self._latest: dict[str, str] = {}  # this rank's shard of the last save, by folder
        self._removed: list[str] = []  # folders that rank 0 has removed, and other nodes not yet
        self._loaded: Mapping[str, Any] | None = None  # random numbers and a GradScaler's state, for the first batch

    def _begin_checkpoints(self) -> None:
        """Give the fit an identity, which distinguishes the shards of its saves from others.

        Collective: all ranks.
        """
        self._removed, self._loaded = [], None
        self._num_saves = 0  # ranks that an exception ended may have saved different numbers of times
        self._run_id = self.broadcast(uuid.uuid4().hex[:12])

    @property
    def _kind(self) -> str:
        """The kind of the state beside a checkpoint; another kind cannot be loaded."""
        return self.method.kind

    @property
    def _nodes(self) -> list[list[int]] | None:
        """The ranks of each node; None where flat."""
        raise NotImplementedError

    def _chosen(self) -> Mapping[str, Any] | None:
        """Return what this run has chosen by measuring."""
        return None

    def _load_chosen(self, chosen: Mapping[str, Any] | None) -> None:
        """Keep what a run that is resumed has chosen."""

    def _own_buffers(self, buffers: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return those buffers, by name, that a rank keeps in its shard."""
        return {**buffers, **self.view.own_buffers(buffers)}

    @contextlib.contextmanager
    def _loading(self) -> Iterator[None]:
        """Enclose the loading of a rank's own state: until the first batch the model keeps the checkpoint's weights."""
        assert self.lightning_module is not None
        with self.view.loading(self.replicas, self.lightning_module):
            yield

    # Saving -----------------------------------------------------------------------------------------------------

    def _save(
        self, checkpoint: dict[str, Any], filepath: _PATH, write: Callable[[dict[str, Any], _PATH], None]
    ) -> None:
        """Write the shards, then the checkpoint that names them; then delete those of the previous checkpoint.

        If a rank dies or fails meanwhile, the previous checkpoint stays unchanged.

        Collective: all ranks. Not during the handling of an exception: then each rank that calls this writes its own
        shard, and nothing is deleted. Not without the optimizers' states either: then rank 0 writes the weights alone,
        as under DDP.

        Args:
            checkpoint: Lightning's.
            filepath: of this rank; that of rank 0 is used.
            write: writes the checkpoint, on rank 0.

        Raises:
            ConfigurationError: on all ranks; a rank could not write its file.
        """
        has_shards = bool(self.workers) and "optimizer_states" in checkpoint
        if not has_shards:
            write(checkpoint, filepath)
            return
        self._wait_for_the_save_before()
        filepath = self._follow_rank_zero(filepath)
        together = contextlib.nullcontext if self.is_interrupted else failing_together
        if self.is_interrupted:
            for worker in self.workers:
                worker.recall()
        self._num_saves += 1  # the same on all ranks: Lightning saves on all of them
        folder = shards.folder_of(filepath)
        checkpoint = {**checkpoint, shards.METADATA_KEY: self._metadata(checkpoint, folder)}
        metadata = checkpoint[shards.METADATA_KEY]
        path = shards.shard_path(folder, self.global_rank, metadata)
        renames = self.is_global_zero and self._is_renamed(filepath)
        with together():
            if renames:
                shards.prepare(os.fspath(filepath), folder)
            self.checkpoint_io.save_checkpoint(self._shard(metadata), path)
        with together():
            if renames:
                shards.overwrite(checkpoint, os.fspath(filepath), folder, write)
            else:
                write(checkpoint, filepath)
        if isinstance(self.checkpoint_io, AsyncCheckpointIO) and self.checkpoint_io._executor is not None:
            self._last_queued = self.checkpoint_io._executor.submit(lambda: None)  # its one thread keeps the order
        if not self.is_interrupted:
            self._sweep(folder, path)

    def _is_renamed(self, filepath: _PATH) -> bool:
        """Return whether the checkpoint is written under another name first; see `shards`."""
        return type(self.checkpoint_io) is TorchCheckpointIO and "://" not in str(filepath)

    def _wait_for_the_save_before(self) -> None:
        """Wait until AsyncCheckpointIO has written its queue: shards are kept of two saves, not of three."""
        if self._last_queued is not None:
            self._last_queued.result()
            self._last_queued = None

    def _metadata(self, checkpoint: Mapping[str, Any], folder: str) -> dict[str, Any]:
        return {
            "num_ranks": self.world_size,
            "folder": folder.replace("\\", "/").rsplit("/", 1)[-1],
            "save_id": f"{self._run_id}-{self._num_saves}",
            "step": checkpoint["global_step"],
            "is_interrupted": self.is_interrupted,
            "format": FORMAT,
            "kind": self._kind,
            "nodes": self._nodes,
            "chosen": self._chosen(),
            "workers": [worker.equal_state() for worker in self.workers],
        }

    def _shard(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        module = self.lightning_module
        assert module is not None
        buffers = self._own_buffers(dict(module.named_buffers()))
        return {
            **{name: metadata[name] for name in ("save_id", "step")},
            "rank": self.global_rank,
            "workers": [worker.state_dict() for worker in self.workers],
            "rng": shards.rng_state(self.root_device),
            "precision": self.precision_plugin.state_dict(),  # a GradScaler's; ranks that step alone scale alone
            "buffers": {name: buffer.cpu().clone() for name, buffer in buffers.items()},
        }

    def _follow_rank_zero(self, filepath: _PATH = "") -> _PATH:
        """Return the path of rank 0, and remove in each node what rank 0 has removed.

        Both may differ between ranks: names have metrics in them, and `ModelCheckpoint` removes the worst by a metric.
        The files that count are those of rank 0.

        Collective: all ranks; not during the handling of an exception, when some ranks may be elsewhere.
        """
        if self.world_size == 1 or self.is_interrupted:
            return filepath
        filepath, removed = self.broadcast((filepath, self._removed))
        self._removed = []
        for folder in () if self.is_global_zero else removed:
            self._latest.pop(folder, None)
            if self.local_rank == 0:  # disks need not be shared
                self._remove(folder)
        return filepath

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self._follow_rank_zero()

    def _sweep(self, folder: str, path: str) -> None:
        """Delete earlier shards of this rank beside a checkpoint, and those of ranks that no longer exist."""
        kept = {path}
        before, self._latest[folder] = self._latest.get(folder), path
        rank, num_ranks, is_first = self.global_rank, self.world_size, self.local_rank == 0
        try:
            if self.is_global_zero:  # of a process that was killed while it overwrote a checkpoint
                shards.remove(f"{folder}/{shards.PART}")
            if isinstance(self.checkpoint_io, AsyncCheckpointIO):  # the checkpoint before may be there still
                if before is None:
                    return
                kept.add(before)
            elif before not in (None, path):  # also where a plugin keeps files that cannot be listed
                self.checkpoint_io.remove_checkpoint(before)
            shards.sweep(
                self.checkpoint_io, folder, kept, lambda other: other == rank or (is_first and other >= num_ranks)
            )
        except Exception as error:  # noqa: BLE001 - remote file systems have errors of their own; nothing is lost
            rank_zero_warn(f"Shards of checkpoints before {path!r} could not be deleted: {error}.")

    @override
    def remove_checkpoint(self, filepath: _PATH) -> None:
        super().remove_checkpoint(filepath)  # other nodes delete their shards at the next save
        if self.is_global_zero:
            folder = shards.folder_of(filepath)
            self._removed.append(folder)
            self._latest.pop(folder, None)
            self._remove(folder)

    def _remove(self, folder: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # nodes may share the disk
            self.checkpoint_io.remove_checkpoint(folder)

    # Loading ----------------------------------------------------------------------------------------------------

    def _load_shards(self, checkpoint: Mapping[str, Any], path: _PATH | None) -> None:
        """Load the workers' state of a checkpoint; with another number of ranks the mean of the ranks' states.

        Collective: all ranks, blocking.

        Args:
            checkpoint: as it was loaded.
            path: where from; its shards are beside it.

        Raises:
            ConfigurationError: on all ranks; a shard is missing, damaged, of another save or of another version, and a
                resume needs it.
            DisagreementError: on all ranks; they have loaded different checkpoints.
        """
        metadata: Mapping[str, Any] = checkpoint.get(shards.METADATA_KEY) or {}
        step, name = checkpoint["global_step"], type(self).__name__
        agree("checkpoint that is resumed", {"global_step": step, "save_id": metadata.get("save_id")})
        if self._options["resume"] != ALONE and metadata.get("format", FORMAT) != FORMAT:
            raise ConfigurationError(
                f"{path} was written by another version of lightning_lowbw: the ranks' own state beside it has format "
                f"{metadata['format']}, and this version reads {FORMAT}. Finish the run with the version that wrote "
                f"it, or {shards.GO_ON}."
            )
        is_ours = metadata.get("format") == FORMAT
        if is_ours:
            self._load_chosen(metadata["chosen"])
        if not is_ours or metadata["kind"] != self._kind:
            self._set_workers(step, [])
            writer = f"a method whose ranks keep {_kept(metadata['kind'])}" if is_ours else "another program"
            rank_zero_info(
                f"The checkpoint was written by {writer}. {name}, whose ranks keep {_kept(self._kind)}, begins with "
                "the weights, the optimizer and the step in it, and with nothing else."
            )
        elif self._options["resume"] == ALONE:
            self._set_workers(step, metadata["workers"])
            rank_zero_info(
                f"resume={ALONE!r}: {name} resumes from the checkpoint alone, with the weights, the optimizer, the "
                "schedulers, the epoch and the step in it. What had not been sent is lost, and an outer optimizer's "
                "momentum begins at zero."
            )
        else:
            assert path is not None
            self._load_workers(metadata, path)

    def _set_workers(self, step: int, states: Sequence[Mapping[str, Any]]) -> None:
        """Set the workers' steps, and what is the same on all ranks, where the checkpoint has that."""
        for number, worker in enumerate(self.workers):
            worker.step = step // len(self.workers)
            if number < len(states):
                worker.load_equal_state(states[number])

    def _load_workers(self, metadata: Mapping[str, Any], path: _PATH) -> None:
        """Load the workers' state and, with the same number of ranks, the other state of this rank.

        Collective: all ranks, blocking.
        """
        with failing_together():
            states, shard, torn = self._find(metadata, path)
        with self._loading():
            with failing_together():
                for worker, state in zip(self.workers, states, strict=True):
                    worker.load_state_dict(state)
            if shard is not None:
                self._restore(shard)
        if shard is None:
            rank_zero_info(
                f"The checkpoint was written by {metadata['num_ranks']} ranks{_on(metadata['nodes'])}; it is resumed "
                f"by {self.world_size}{_on(self._nodes)}. Each starts with the mean of the ranks' own states."
            )
        else:
            torn = by_rank(gather(torn, "interrupted steps"))
            folder = shards.folder_of(path)
            if shard["path"].startswith(f"{folder}/"):  # else those of another checkpoint are there
                self._latest[folder] = shard["path"]  # deleted by the next save; another job may be writing others
        if torn:
            rank_zero_warn(
                f"Resuming from {path}, which was saved while an exception ended the run, in the middle of a step: "
                f"{torn}. Those ranks take the step again, so that what it adds to their weights, or to what they have "
                "not sent, may count twice."
            )

    def _find(self, metadata: Mapping[str, Any], path: _PATH) -> _Found:
        """Return each worker's state, this rank's shard if the world is that of the checkpoint, and what was
        interrupted.

        Raises:
            ConfigurationError: on this rank; a shard is missing, damaged or another one.
        """
        load = functools.partial(shards.load, self.checkpoint_io, path, metadata)
        if metadata["num_ranks"] == self.world_size and metadata.get("nodes") == self._nodes:
            shard, own_path = load(self.global_rank)
            return shard["workers"], {**shard, "path": own_path}, _torn(shard)
        numbers, ranks = range(len(self.workers)), range(metadata["num_ranks"])
        torn: dict[int, str] = {}
        merged: list[Mapping[str, Any]] = [merge_states(states_of(number, ranks, load, torn)) for number in numbers]
        return merged, None, by_rank([torn[rank] for rank in ranks])

    def _restore(self, shard: Mapping[str, Any]) -> None:
        """Load what a rank has beside its workers."""
        self._loaded = {name: shard[name] for name in ("rng", "precision")}
        module = self.lightning_module
        assert module is not None
        for name, buffer in module.named_buffers():
            if name in shard["buffers"] and buffer.shape == shard["buffers"][name].shape:
                buffer.copy_(shard["buffers"][name])

    def _restore_random_numbers(self) -> None:
        """Set the state of the random numbers; only before the first batch, because Lightning draws some before it."""
        if self._loaded is None:
            return
        shards.set_rng_state(self._loaded["rng"], self.root_device)
        if self._loaded["precision"]:
            self.precision_plugin.load_state_dict(self._loaded["precision"])
        self._loaded = None


def states_of(
    number: int,
    ranks: Iterable[int],
    load: Callable[[int], tuple[Mapping[str, Any], str]],
    torn: dict[int, str],
) -> Iterator[Mapping[str, Any]]:
    """Yield what ranks have saved of a worker, one shard in memory at a time.

    In place:
        `torn`: what an exception had interrupted, by rank.
    """
    for rank in ranks:
        shard, _ = load(rank)
        torn[rank] = _torn(shard)
        yield shard["workers"][number]


def _torn(shard: Mapping[str, Any]) -> str:
    return " and ".join(state["torn"] for state in shard["workers"] if state["torn"])


def by_rank(texts: Sequence[str]) -> str:
    """Return the texts of the ranks; ranks with the same text are put together."""
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks.setdefault(text, []).append(rank)
    return "; ".join(f"rank {', '.join(map(str, who))}: {text}" for text, who in ranks.items() if text)


def _on(nodes: list[list[int]] | None) -> str:
    return "" if nodes is None else f" on nodes {nodes}"


def _kept(kind: str) -> str:
    return {"replicas": "weights of their own", "gradients": "unsent gradients"}.get(kind.split()[0], "nothing")
