"""The order of elements in residuals: the order of the parameter's elements in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import Parameter

from lightning_lowbw.errors import WITHOUT_RESIDUALS, ConfigurationError
from lightning_lowbw.ops.layout import Order, order_of, reordered
from lightning_lowbw.ops.reference import as_real

if TYPE_CHECKING:
    from lightning_lowbw.engine.gradients import GradientWorker


def check_order(worker: GradientWorker, name: str, parameter: Parameter) -> None:
    """Check that the residual of a parameter is in the order of its elements in memory.

    Raises:
        ConfigurationError: its memory format has changed since.
    """
    order = order_of(as_real(parameter))
    if not worker.keeps(name) or worker.orders.get(name) == order:
        worker.orders[name] = order
        return
    raise ConfigurationError(
        f"Step {worker.step}: the memory format of {name!r} has changed (the order of its dimensions was "
        f"{worker.orders.get(name)}, and is {order}), and gradients that have not been sent are kept in that order. "
        "Change the memory format before training: model.to(memory_format=...) in __init__ or configure_model."
    )


class Reordering:
    """Converts loaded residuals to the present order of elements in memory.

    Raises:
        ConfigurationError: on all ranks, before anything is loaded: there are only parts, of another order.
    """

    def __init__(self, worker: GradientWorker, parameters: Mapping[str, Parameter], state: Mapping[str, Any]) -> None:
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._changed: dict[str, tuple[Order, Order]] = {}
        worker.orders.clear()
        for name in {**state["residuals"], **state["rounded"]}:
            parameter = as_real(parameters[name])
            old = tuple(state["orders"][name])
            new = worker.orders[name] = order_of(parameter)
            self._shapes[name] = tuple(parameter.shape)
            if old != new:
                self._changed[name] = old, new
                numels = {state[key][name].numel() for key in ("residuals", "rounded") if name in state[key]}
                if numels != {parameter.numel()}:
                    raise ConfigurationError(
                        f"The checkpoint keeps parts of {name!r} in the order of its dimensions {old}, and it now lies "
                        f"in memory in the order {new}. Resume with the memory format of that run "
                        f"(model.to(memory_format=...)), or {WITHOUT_RESIDUALS}."
                    )

    def __call__(self, name: str, values: Tensor) -> Tensor:
        """Return what is kept of a parameter, flat, in the order of today."""
        if name not in self._changed:
            return values
        return reordered(values, self._shapes[name], *self._changed[name])
