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
        has_means: returns whether the gradients of the coming step, a dense one, are means over all ranks already.

    Attributes:
        is_exchanging: whether the exchange that is done now is one for clipping.
    """

    def __init__(
        self, strategy: Strategy, exchange: Callable[[Worker], None], has_means: Callable[[Worker], bool]
    ) -> None:
        self._strategy, self._exchange, self._has_means = strategy, exchange, has_means
        self.is_exchanging = False
        self._exchanged: set[Worker] = set()  # since the last backward pass
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
        """Note that gradients change: those that have been exchanged are exchanged again."""
        self._exchanged.clear()

    def take_exchanged(self, worker: Worker) -> bool:
        """Return whether the gradients of the coming step have been exchanged; of the step after it they have not."""
        has_exchanged = worker in self._exchanged
        self._exchanged.discard(worker)
        return has_exchanged

    def _is_of_mean(self, worker: Worker) -> bool:
        """Whether the mean is clipped, and the step, which comes later, makes it."""
        is_of_rank = worker.is_local or worker.clips_before_exchange
        is_manual = not self._strategy.trainer.lightning_module.automatic_optimization
        return is_manual and not is_of_rank and not (worker.reduces_in_backward and self._has_means(worker))

    def _make_mean(self, worker: Worker) -> bool:
        """Exchange the gradients of the coming step; return whether it is taken."""
        if worker in self._exchanged:
            return worker.is_taken
        self.is_exchanging = True
        try:
            self._exchange(worker)
        finally:
            self.is_exchanging = False
        self._exchanged.add(worker)
        self._strategy.signals.read_requests(worker)  # another exchange before the step would overwrite them
        return worker.is_taken

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
            if self._is_of_mean(worker) and not self._make_mean(worker):
                return  # a GradScaler skips the step because of an inf, which clipping by value would remove
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
