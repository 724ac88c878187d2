"""Running statistics of batch norm in the sparse phase: each rank keeps its own; validation uses those of rank 0.

The same holds after a resume until the first batch, because a finished run may have none.

Those of ResNet-50 are 213 KB per forward pass, more than its sparse gradients, and no training step reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from lightning_lowbw.engine.buffers import copies, put_back_, unchanged
from lightning_lowbw.strategies.keywords import asked_of_buffers
from lightning_lowbw.where.collectives import broadcast_flat_

if TYPE_CHECKING:
    from lightning_lowbw.strategies.strategy import Strategy


class BatchNorm:
    """Excludes running statistics from DDP's broadcast of buffers, and copies those of rank 0 into the model for
    validation.

    Attributes:
        own: this rank's statistics (after a resume all buffers) by name, while the model has those of rank 0.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self.own: dict[str, Tensor] = {}
        self._shown: dict[str, Tensor] = {}  # copies of what the model has instead
        self._statistic_ids: frozenset[int] | None = None  # once per fit, not per forward pass

    def begin_fit(self) -> None:
        """Forget the last fit."""
        self.keep()
        self._statistic_ids = None

    def buffers_to_broadcast(self, everything: list[Tensor]) -> list[Tensor]:
        """Return the buffers that rank 0 sends to all before the coming forward pass."""
        if not self._is_own:
            return everything
        if self._statistic_ids is None:
            self._statistic_ids = frozenset(id(buffer) for buffer in self._statistics().values())
        return [buffer for buffer in everything if id(buffer) not in self._statistic_ids]

    def show(self) -> None:
        """Put the statistics of rank 0 into the model, until `hide`.

        Collective: all ranks.
        """
        if self._is_own and not self.own:
            self.own = copies(self._statistics())
            self.leave()
            self._shown = copies(self._statistics())

    def hide(self) -> None:
        """Put this rank's own statistics back, except those that have been changed meanwhile."""
        put_back_(self._buffers(), self.own, self._shown)
        self.keep()

    def own_buffers(self, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return `own` without those that have been changed meanwhile."""
        return unchanged(buffers, self.own, self._shown)

    def keep(self) -> None:
        """Keep the statistics of rank 0 in the model."""
        self.own, self._shown = {}, {}

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Keep the present buffers in the model until `hide`, while others are loaded."""
        buffers = self._buffers()
        self._shown = copies(buffers)
        yield
        self.own = copies(buffers)
        for name, buffer in buffers.items():
            buffer.copy_(self._shown[name])

    def leave(self) -> None:
        """Put the statistics of rank 0 into the model, for good.

        Collective: all ranks.
        """
        if not self._is_own:
            return

        def broadcast_(flat: Tensor) -> None:
            dist.broadcast(flat, src=0)
            self._strategy.ledger.record(flat.nbytes)

        broadcast_flat_(self._statistics().values(), broadcast_)

    @property
    def _is_own(self) -> bool:
        """Whether each rank keeps its own statistics in the coming step; not if `broadcast_buffers` is given."""
        is_left_to_us = asked_of_buffers(self._strategy._ddp_kwargs) is None
        return is_left_to_us and any(not worker.reduces_in_backward for worker in self._strategy.workers)

    def _buffers(self) -> dict[str, Tensor]:
        module = self._strategy.lightning_module
        assert module is not None
        return dict(module.named_buffers())

    def _statistics(self) -> dict[str, Tensor]:
        """Return the buffers of the layers that keep running statistics, by name."""
        module = self._strategy.lightning_module
        assert module is not None
        return {
            f"{name}.{key}": buffer
            for name, layer in module.named_modules()
            if isinstance(layer, _NormBase)
            for key, buffer in layer.named_buffers(recurse=False)
        }
