"""The consensus view: validation, checkpoints and the end of the fit use the mean of the replicas.

It does not change the training: afterwards each rank continues with its own weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_lowbw.strategies.checks import warn_if_replaced
from lightning_lowbw.sync.buffers import copies, unchanged
from lightning_lowbw.sync.local import LocalSync


class ConsensusView:
    """Replaces this rank's weights by the replicas' mean, and restores them."""

    def __init__(self) -> None:
        self._own_buffers: dict[str, Tensor] = {}  # by name, while the model has those of the consensus
        self._shown_buffers: dict[str, Tensor] = {}  # copies of what the model has instead
        self._shown: list[LocalSync] = []
        self._has_warned = False  # of buffers that have been replaced

    @property
    def is_shown(self) -> bool:
        """Whether the model holds the consensus of replicas that differ."""
        return bool(self._shown)

    def own_buffers(self, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's own, while the model has those of the consensus, without those changed meanwhile."""
        return unchanged(buffers, self._own_buffers, self._shown_buffers)

    def show(self, workers: list[LocalSync], module: pl.LightningModule, *, is_interrupted: bool) -> None:
        """Put the consensus into the model, until `hide`.

        Collective: all ranks; if the replicas are equal, as `Synchronizer.check_late_faults`. Not during the
        handling of an exception, when some ranks may be elsewhere: then each keeps its own weights.
        """
        if self.is_shown:
            return
        if is_interrupted:
            if not all(worker.parameters_agree for worker in workers):
                rank_zero_warn("The training was interrupted between two averages: these are the weights of rank 0.")
            return
        if not self._has_warned:
            self._has_warned = warn_if_replaced(module, workers)
        is_equal = all(worker.is_consensus for worker in workers)
        if not is_equal:
            self._own_buffers = copies(dict(module.named_buffers()))
        for worker in workers:
            worker.show_consensus()
        self._shown = [] if is_equal else list(workers)
        self.remember_shown(module)

    def remember_shown(self, module: pl.LightningModule) -> None:
        """Note what the buffers have now, with the consensus in the model."""
        for worker in self._shown:
            worker.note_shown()
        self._shown_buffers = copies(dict(module.named_buffers())) if self.is_shown else {}

    def hide(self) -> None:
        """Give this rank its own weights back."""
        for worker in self._shown:
            worker.hide_consensus()
        self.keep()

    @contextmanager
    def loading(self, workers: list[LocalSync], module: pl.LightningModule) -> Iterator[None]:
        """Keep the consensus of a checkpoint in the model until `hide`, while other weights are loaded."""
        if not workers:
            yield
            return
        tensors = {name: tensor for worker in workers for name, tensor in worker.averaged_tensors().items()}
        tensors |= dict(module.named_buffers())
        shown = copies(tensors)
        yield
        if all(worker.is_consensus for worker in workers):
            return
        self._own_buffers = copies(dict(module.named_buffers()))
        for worker in workers:
            worker.hold_own()
        self._shown = list(workers)
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(shown[name])
        self.remember_shown(module)

    def keep(self) -> None:
        """Keep the consensus in the model."""
        self._own_buffers, self._shown_buffers, self._shown = {}, {}, []

    def copied(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state that does not change when the view ends: it may be written to disk later."""
        if not self.is_shown:
            return state
        return {name: v.detach().clone() if isinstance(v, Tensor) else v for name, v in state.items()}
