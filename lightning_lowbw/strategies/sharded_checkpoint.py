"""Checkpoints of sharded models: Lightning's two formats, and beside them what each rank has of its own shard."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.types import _PATH
from typing_extensions import override

from lightning_lowbw.engine.state import merge
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.strategies import shards
from lightning_lowbw.strategies.checkpoint import Checkpoints, _by_rank, _torn

if TYPE_CHECKING:
    from lightning_lowbw.strategies.sharded import ShardedStrategy

SIZES = "sizes"  # of the mesh of a node, in the metadata


class ShardedCheckpoints(Checkpoints):
    """Saves and loads what a rank has of its own shard; other nodes that hold the same shard may take it over."""

    _strategy: ShardedStrategy  # type: ignore[assignment]

    @property
    @override
    def kind(self) -> str:
        return f"{super().kind} of shards"

    @override
    def _metadata(self, checkpoint: Mapping[str, Any], folder: str) -> dict[str, Any]:
        return {**super()._metadata(checkpoint, folder), SIZES: list(self._strategy.groups.sizes)}

    @override
    def _find(
        self, metadata: Mapping[str, Any], path: _PATH
    ) -> tuple[list[Mapping[str, Any]], Mapping[str, Any] | None, str]:
        strategy, load = self._strategy, functools.partial(shards.load, self._strategy.checkpoint_io, path, metadata)
        sizes, nodes = metadata[SIZES], metadata["nodes"]
        if sizes != list(strategy.groups.sizes):
            raise ConfigurationError(
                f"{path} was written by nodes of {sizes[0]} data-parallel x {sizes[1]} tensor-parallel ranks, and "
                f"these have {' x '.join(map(str, strategy.groups.sizes))}: what the ranks had not sent is of shards "
                f"of another size. Resume with nodes of that size (any number of them), or {shards.GO_ON}."
            )
        if nodes == strategy.groups.nodes:
            return super()._find(metadata, path)
        ranks = [node[strategy.groups.coordinate] for node in nodes]
        torn: dict[int, str] = {}

        def states(number: int) -> Iterator[Mapping[str, Any]]:
            for rank in ranks:
                shard, _ = load(rank)
                torn[rank] = _torn(shard)
                yield shard["workers"][number]

        merged: list[Mapping[str, Any]] = [merge(states(number)) for number in range(len(strategy.workers))]
        return merged, None, _by_rank([torn[rank] for rank in ranks])


class NothingChosen:
    """Stands for the numbers that `sparsity="auto"` measures, which a sharded model is given."""

    def state_dict(self) -> None:
        """Return what a checkpoint keeps of it."""

    def load_state_dict(self, state: Any, *, is_foreign: bool = False) -> None:
        """Take over nothing."""
