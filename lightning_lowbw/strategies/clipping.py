"""Gradient clipping: before the exchange, on this rank's own gradient, where the exchange is sparse.

Clipping the mean instead would shrink elements that contain the gradients of hundreds of steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer

from lightning_lowbw.engine.worker import Worker

if TYPE_CHECKING:
    from lightning_lowbw.strategies.strategy import Strategy


class Clipping:
    """Moves Lightning's clipping before the exchange.

    The module's `configure_gradient_clipping` is called as always, once per step; norms are multiplied by the method's
    factor. Where the mean is clipped, `clip_gradients` in manual optimization exchanges the gradients; the step does so
    again only after another backward pass.

    Args:
        strategy: whose steps they are.
        exchange: does the exchange of a step.
    """

    def __init__(self, strategy: Strategy, exchange: Callable[[Worker], None]) -> None:
        self._strategy, self._exchange = strategy, exchange
        self._original: Callable[..., None] | None = None  # the precision plugin's own

    @property
    def is_asked_for(self) -> bool:
        """Whether the user has configured clipping, by the Trainer's arguments or by an overridden hook."""
        module = self._strategy.lightning_module
        assert module is not None
        return bool(module.trainer.gradient_clip_val) or is_overridden("configure_gradient_clipping", module)

    def comes_before_exchange(self, worker: Worker) -> bool:
        """Return whether the coming step of an optimizer clips, and does so before the exchange."""
        return worker.clips_before_exchange and self.is_asked_for

    def clip(self, optimizer: Optimizer) -> None:
        """Clip the gradients of an optimizer, the user's own, before they are exchanged.

        In place:
            `.grad` of its parameters.
        """
        assert self._original is not None
        trainer = self._strategy.trainer
        self._original(
            self._strategy.lightning_module,
            optimizer,
            trainer.gradient_clip_val,
            gradient_clip_algorithm=trainer.gradient_clip_algorithm,
        )

    def begin_backward(self) -> None:
        """Note that gradients change: if they have been exchanged already, they are exchanged again."""
        for worker in self._strategy.workers:
            worker.is_prepared = worker.is_exchanged = False

    def _is_of_mean(self, worker: Worker) -> bool:
        """Whether the mean is clipped, and the step, which comes later, makes it."""
        is_of_rank = worker.is_local or worker.clips_before_exchange
        is_manual = not self._strategy.trainer.lightning_module.automatic_optimization
        return is_manual and not is_of_rank and not worker.reduces_in_backward

    def install(self) -> None:
        """Replace two methods of the precision plugin, in which all clipping of Lightning ends."""
        plugin, worker_of = self._strategy.precision_plugin, self._strategy.worker_of
        clip_gradients, original = plugin.clip_gradients, plugin._clip_gradients

        def clip_with_factor(
            optimizer: Any,
            clip_val: int | float = 0.0,
            gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
        ) -> None:
            worker = worker_of(optimizer)
            if self._is_of_mean(worker) and not worker.is_exchanged:
                self._exchange(worker)
            factor = worker.clip_factor if gradient_clip_algorithm == GradClipAlgorithmType.NORM else 1.0
            clip_gradients(optimizer, clip_val * factor, gradient_clip_algorithm)

        def clip_unless_done(model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            if not worker_of(optimizer).clips_before_exchange:
                original(model, optimizer, *args, **kwargs)

        self._original = original
        plugin.clip_gradients = clip_with_factor  # type: ignore[method-assign]
        plugin._clip_gradients = clip_unless_done  # type: ignore[method-assign]

    def restore(self) -> None:
        """Give the plugin its own methods back."""
        if self._original is not None:
            plugin = self._strategy.precision_plugin
            del plugin.clip_gradients, plugin._clip_gradients
            self._original = None
