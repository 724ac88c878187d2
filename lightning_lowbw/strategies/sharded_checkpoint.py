"""Checkpoints of sharded models: Lightning's two formats, and beside them the state of each rank's own shard."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning.fabric.utilities.types import _PATH
from torch import Tensor
from typing_extensions import override

from lightning_lowbw.engine.local_view import DTensor, Shard
from lightning_lowbw.engine.resharding import Coordinate, reshard
from lightning_lowbw.engine.state import merge_states
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.strategies import shards
from lightning_lowbw.strategies.checkpoint import CheckpointedStrategy, by_rank, states_of
from lightning_lowbw.strategies.sharded_regime import ShardedRegime
from lightning_lowbw.where.node_mesh import NodeMesh

SIZES = "sizes"  # of the mesh of a node, in the metadata


class ShardedCheckpoints(CheckpointedStrategy):
    """Saves and loads the state of a rank's own shard; nodes of another number or size may load it, too."""

    regime: ShardedRegime
    _save_distributed_checkpoint: bool

    @property
    def groups(self) -> NodeMesh:
        """The mesh of this rank's node, and this rank's coordinate; from the start of a fit on."""
        raise NotImplementedError

    @property
    @override
    def _kind(self) -> str:
        return f"{super()._kind} of shards"

    @property
    @override
    def _nodes(self) -> list[list[int]] | None:
        return self.groups.nodes

    @override
    def _own_buffers(self, buffers: dict[str, Tensor]) -> dict[str, Tensor]:
        return self.regime.own_buffers(buffers)

    @override
    @contextmanager
    def _loading(self) -> Iterator[None]:
        with self.regime.loading():
            yield

    @override
    def _metadata(self, checkpoint: Mapping[str, Any], folder: str) -> dict[str, Any]:
        return {**super()._metadata(checkpoint, folder), SIZES: list(self.groups.sizes)}

    @override
    def _is_renamed(self, filepath: _PATH) -> bool:
        is_folder = self._save_distributed_checkpoint  # which no plugin writes
        return (is_folder and "://" not in str(filepath)) or super()._is_renamed(filepath)

    @override
    def _find(
        self, metadata: Mapping[str, Any], path: _PATH
    ) -> tuple[list[Mapping[str, Any]], Mapping[str, Any] | None, str]:
        load = functools.partial(shards.load, self.checkpoint_io, path, metadata)
        sizes, nodes = tuple(metadata[SIZES]), metadata["nodes"]
        if nodes == self.groups.nodes and sizes == self.groups.sizes:
            return super()._find(metadata, path)
        torn: dict[int, str] = {}

        def merged(number: int, coordinate: int) -> Mapping[str, Any]:
            """Return the mean, over nodes, of what a worker had of the shard with this coordinate."""
            return merge_states(states_of(number, [node[coordinate] for node in nodes], load, torn))

        found: list[Mapping[str, Any]]
        if sizes == self.groups.sizes:
            found = [merged(number, self.groups.coordinate) for number in range(len(self.workers))]
        else:
            shapes, own = self._shapes(sizes, path), Coordinate(self.groups.coordinate, self.groups.sizes[0])
            found = [
                reshard((merged(number, each) for each in range(sizes[0])), worker, shapes, sizes[0], own)
                for number, worker in enumerate(self.workers)
            ]
        return found, None, by_rank([torn[rank] for rank in sorted(torn)])

    def _shapes(self, sizes: tuple[int, ...], path: _PATH) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the whole parameters by name.

        Raises:
            ConfigurationError: alike on all ranks; shards of this kind cannot be cut anew.
        """
        module = self.lightning_module
        assert module is not None
        parameters = dict(module.named_parameters())
        others = [n for n, p in parameters.items() if isinstance(p, DTensor) and p.placements != (Shard(0),)]
        if sizes[1] > 1 or self.groups.sizes[1] > 1 or others:
            also = f", and {others[0]!r} is sharded otherwise than by rows" if others else ""
            raise ConfigurationError(
                f"{path} was written by nodes of {_product(sizes)} ranks, and these have "
                f"{_product(self.groups.sizes)}{also}: what the ranks had not sent is of shards of another "
                "size, and only rows are dealt out anew. Resume with nodes of that size (any number of them), or "
                f"{shards.GO_ON}."
            )
        return {name: tuple(parameter.shape) for name, parameter in parameters.items()}


def _product(sizes: tuple[int, ...]) -> str:
    return f"{sizes[0]} data-parallel x {sizes[1]} tensor-parallel"
