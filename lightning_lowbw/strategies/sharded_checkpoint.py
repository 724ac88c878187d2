"""Checkpoints of sharded models: Lightning's two formats, and beside them the state of each rank's own shard."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.types import _PATH
from typing_extensions import override

from lightning_lowbw.engine.local_view import DTensor, Shard
from lightning_lowbw.engine.resharding import Coordinate, reshard
from lightning_lowbw.engine.state import merge_states
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.strategies import shards
from lightning_lowbw.strategies.checkpoint import Checkpoints, by_rank, states_of

if TYPE_CHECKING:
    from lightning_lowbw.strategies.sharded import ShardedStrategy

SIZES = "sizes"  # of the mesh of a node, in the metadata


class ShardedCheckpoints(Checkpoints):
    """Saves and loads the state of a rank's own shard; nodes of another number or size may load it, too."""

    _strategy: ShardedStrategy  # type: ignore[assignment]

    @property
    @override
    def kind(self) -> str:
        return f"{super().kind} of shards"

    @override
    def _metadata(self, checkpoint: Mapping[str, Any], folder: str) -> dict[str, Any]:
        return {**super()._metadata(checkpoint, folder), SIZES: list(self._strategy.groups.sizes)}

    @override
    def _is_renamed(self, filepath: _PATH) -> bool:
        is_folder = self._strategy._save_distributed_checkpoint  # which no plugin writes
        return (is_folder and "://" not in str(filepath)) or super()._is_renamed(filepath)

    @override
    def _find(
        self, metadata: Mapping[str, Any], path: _PATH
    ) -> tuple[list[Mapping[str, Any]], Mapping[str, Any] | None, str]:
        strategy, load = self._strategy, functools.partial(shards.load, self._strategy.checkpoint_io, path, metadata)
        sizes, nodes = tuple(metadata[SIZES]), metadata["nodes"]
        if nodes == strategy.groups.nodes and sizes == strategy.groups.sizes:
            return super()._find(metadata, path)
        torn: dict[int, str] = {}

        def merged(number: int, coordinate: int) -> Mapping[str, Any]:
            """Return the mean, over nodes, of what a worker had of the shard with this coordinate."""
            return merge_states(states_of(number, [node[coordinate] for node in nodes], load, torn))

        found: list[Mapping[str, Any]]
        if sizes == strategy.groups.sizes:
            found = [merged(number, strategy.groups.coordinate) for number in range(len(strategy.workers))]
        else:
            shapes, own = self._shapes(sizes, path), Coordinate(strategy.groups.coordinate, strategy.groups.sizes[0])
            found = [
                reshard((merged(number, each) for each in range(sizes[0])), worker, shapes, sizes[0], own)
                for number, worker in enumerate(strategy.workers)
            ]
        return found, None, by_rank([torn[rank] for rank in sorted(torn)])

    def _shapes(self, sizes: tuple[int, ...], path: _PATH) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the whole parameters by name.

        Raises:
            ConfigurationError: alike on all ranks; shards of this kind cannot be cut anew.
        """
        module = self._strategy.lightning_module
        assert module is not None
        parameters = dict(module.named_parameters())
        others = [n for n, p in parameters.items() if isinstance(p, DTensor) and p.placements != (Shard(0),)]
        if sizes[1] > 1 or self._strategy.groups.sizes[1] > 1 or others:
            also = f", and {others[0]!r} is sharded otherwise than by rows" if others else ""
            raise ConfigurationError(
                f"{path} was written by nodes of {_product(sizes)} ranks, and these have "
                f"{_product(self._strategy.groups.sizes)}{also}: what the ranks had not sent is of shards of another "
                "size, and only rows are dealt out anew. Resume with nodes of that size (any number of them), or "
                f"{shards.GO_ON}."
            )
        return {name: tuple(parameter.shape) for name, parameter in parameters.items()}


def _product(sizes: tuple[int, ...]) -> str:
    return f"{sizes[0]} data-parallel x {sizes[1]} tensor-parallel"
