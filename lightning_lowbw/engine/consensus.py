"""The mean of the replicas, copied into the model for validation and saving; training is unaffected."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_lowbw.engine.buffers import copies, put_back_, unchanged
from lightning_lowbw.engine.control import Control, control_message
from lightning_lowbw.engine.faults import OF_WEIGHTS, check_faults, weight_fault
from lightning_lowbw.engine.late_faults import check_late_faults
from lightning_lowbw.ops.reference import as_real
from lightning_lowbw.where.mean import MeanWork

if TYPE_CHECKING:
    from lightning_lowbw.engine.replicas import ReplicaWorker


class Consensus:
    """Copies the consensus into the model, and restores the replica.

    Attributes:
        own: this rank's tensors by name, while the consensus is shown; else None.
    """

    def __init__(self, worker: ReplicaWorker) -> None:
        self._worker = worker
        self.own: dict[str, Tensor] | None = None
        self._shown: dict[str, Tensor] = {}  # copies of the buffers' consensus, while it is shown

    @property
    def is_there(self) -> bool:
        """Whether there is nothing to average. Any forward pass may change buffers."""
        return self._worker.parameters_agree and not self._worker.averaging.buffers.start

    def tensors(self) -> dict[str, Tensor]:
        """Return everything that is averaged, by name: parameters, floating buffers, counts."""
        return {**self._worker.by_name(), **self._buffers()}

    def _buffers(self) -> dict[str, Tensor]:
        buffers = self._worker.averaging.buffers
        return {**buffers.floating, **{f"count.{index}": count for index, count in enumerate(buffers.counts)}}

    def unequal(self) -> list[Parameter]:
        """Return the parameters that may differ between ranks: those trained since their last average."""
        unequal: dict[Parameter, None] = {}
        for fragment in self._worker.fragments:
            unequal.update(dict.fromkeys([] if fragment.work is None else fragment.work.parameters))
            unequal.update(fragment.moved)
        return list(unequal)

    def own_tensors(self) -> dict[str, Tensor]:
        """Return this rank's own tensors that are averaged, without frozen parameters that were never trained."""
        if self.own is not None:
            now, kept = self.tensors(), self._unchanged()
            return {name: kept.get(name, now[name]) for name in self.own}
        frozen = {p for p in self._worker.parameters() if not p.requires_grad}.difference(self.unequal())
        return {name: tensor for name, tensor in self.tensors().items() if tensor not in frozen}

    def restart(self) -> None:
        """Measure the changes of buffers that were set while the consensus was shown as `hide` would."""
        if self.own is not None:
            self._worker.averaging.buffers.restart(self.own.keys() - self._unchanged().keys())

    def _unchanged(self) -> dict[str, Tensor]:
        """Return this rank's own of what has not been changed while the consensus was shown."""
        return unchanged(self.tensors(), self.own or {}, self._shown)

    def show(self) -> None:
        """Put the mean of the replicas into the model, until `hide`.

        Collective: all ranks; blocking. If they are equal already, as `check_late_faults`.

        Raises:
            NonFiniteGradientError: on all ranks; names the rank and the parameter. Nothing is shown.
            ValueError: on all ranks; a message that a rank has received was damaged.
        """
        if self.own is not None:
            return
        with torch.inference_mode(False), torch.no_grad():  # tensors made here outlive an evaluation
            if self.is_there:
                check_late_faults(self._worker)
            else:
                self._show()

    def _show(self) -> None:
        worker, peers = self._worker, self._worker.peers
        buffers = worker.averaging.buffers
        parameters = self.unequal()
        fault = weight_fault(worker, parameters)
        is_faulty = (fault > 0).float().reshape(1)  # one number; the rank is exchanged only after a fault
        means, num_faulty = MeanWork([*parameters, *buffers.changes()], is_faulty, 1.0 / peers.num_ranks, peers).wait()
        if float(num_faulty):
            self._raise_fault(parameters, fault)
        self.hold()
        for parameter, mean in zip(parameters, means[: len(parameters)], strict=True):
            as_real(parameter).copy_(mean)
        kept = {name: start.clone() for name, start in buffers.start.items()}
        buffers.apply(means[len(parameters) :], {})
        buffers.start = kept
        buffers.agree_counts(peers)
        self.remember_shown()

    def remember_shown(self) -> None:
        """Note what the buffers have now, with the consensus in the model."""
        self._shown = copies(self._buffers())

    def hold(self) -> None:
        """Keep this rank's own tensors until `hide`, because the model's are about to be overwritten."""
        self.own = copies(self.own_tensors())

    def _raise_fault(self, parameters: list[Parameter], fault: Tensor) -> None:
        """Find the rank and the parameter with an inf or NaN, and raise.

        Collective: all ranks, blocking.
        """
        worker, peers = self._worker, self._worker.peers
        message = control_message([], fault, 0, peers.rank, peers.num_ranks, worker.device)
        peers.all_reduce_(message)
        check_faults(Control.read(message, peers.num_ranks), worker, OF_WEIGHTS, parameters, worker.step)

    @torch.no_grad()
    def hide(self) -> None:
        """Put this rank's own parameters and buffers back, except buffers that have been changed meanwhile."""
        if self.own is not None:
            changed = put_back_(self.tensors(), self.own, self._shown)
            self._worker.averaging.buffers.restart(changed)
            self._forget()

    def _forget(self) -> None:
        self.own, self._shown = None, {}

    def keep(self) -> None:
        """Leave the consensus in the model for good.

        Collective: as `show`.
        """
        self.show()
        self._forget()
        self._worker.ending.step = None
