"""The velocities u of sparse tensors: the optimizer's own state; on two levels each rank keeps its part."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_lowbw.ops.layout import copy_in_order_, flat_in_order, in_order
from lightning_lowbw.what.momentum import ErrorFeedback
from lightning_lowbw.where.peers import Peers


class Velocities:
    """Gives the parts of u that this rank corrects.

    Args:
        correction: knows where the optimizer keeps u.
        peers: say which part is this rank's.
    """

    def __init__(self, correction: ErrorFeedback, peers: Peers) -> None:
        self._correction, self._peers = correction, peers
        self._parts: dict[Parameter, Tensor] = {}  # on two levels, instead of the optimizer's

    @property
    def key(self) -> str | None:
        """The name of u in the optimizer's state; None under error feedback."""
        return self._correction.velocity_key

    def part(self, parameter: Parameter) -> Tensor:
        """Return u of this rank's part: flat; a copy where it is laid out unlike the parameter, see `keep`."""
        if not self._peers.is_two_level:
            return flat_in_order(self._correction.velocity(parameter), parameter)
        if parameter not in self._parts:
            whole = flat_in_order(self._correction.velocity(parameter), parameter)
            self._parts[parameter] = whole[self._peers.part(parameter.numel())].clone()
            del self._correction.optimizer.state[parameter][self.key]
        return self._parts[parameter]

    def keep(self, parameter: Parameter, velocity: Tensor | None) -> None:
        """Write back what `part` has returned, where it was a copy."""
        if velocity is not None and not self._peers.is_two_level:
            whole = self._correction.velocity(parameter)
            if not in_order(whole, parameter).is_contiguous():
                copy_in_order_(whole, parameter, velocity)

    def whole(self) -> dict[Parameter, Tensor]:
        """Return the velocities that are kept in parts, whole.

        Collective: the ranks of a node, blocking.
        """
        whole = {}
        for parameter, velocity in self._parts.items():
            # In float32, which holds narrower ones exactly.
            wide = velocity.to(torch.promote_types(velocity.dtype, torch.float32))
            longest = self._peers.part(parameter.numel(), 0).stop
            wide = torch.nn.functional.pad(wide, (0, longest - wide.numel()))
            gathered = self._peers.gather_parts_in_node(wide, parameter.numel())
            whole[parameter] = torch.empty_like(parameter, requires_grad=False)
            copy_in_order_(whole[parameter], parameter, gathered)
        return whole

    def saved(self, parameter: Parameter) -> Tensor | None:
        """Return u of this rank's part as it is, without making one."""
        if parameter in self._parts:
            return self._parts[parameter]
        velocity = None if self.key is None else self._correction.optimizer.state.get(parameter, {}).get(self.key)
        return None if velocity is None else flat_in_order(velocity.detach(), parameter)

    def load(self, parameter: Parameter, part: Tensor) -> None:
        """Take over u of this rank's part: flat, in the parameter's order."""
        if self._peers.is_two_level:
            self.part(parameter).copy_(part)
        else:
            copy_in_order_(self._correction.velocity(parameter), parameter, part)

    def clear(self) -> None:
        """Forget the parts."""
        self._parts.clear()

    def to(self, device: torch.device) -> None:
        """Move the parts."""
        self._parts = {parameter: part.to(device) for parameter, part in self._parts.items()}
