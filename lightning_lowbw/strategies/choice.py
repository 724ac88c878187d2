"""Chooses, by the method, what a strategy does apart from the exchange."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_lowbw.engine.method import Method
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.strategies.facts import agree_on_configuration
from lightning_lowbw.strategies.regime import Regime
from lightning_lowbw.strategies.replicas import Replicas
from lightning_lowbw.strategies.synchronous import Synchronous
from lightning_lowbw.strategies.uneven import Policy
from lightning_lowbw.strategies.words import in_words
from lightning_lowbw.where.agreement import failing_together

if TYPE_CHECKING:
    from lightning_lowbw.strategies.strategy import Strategy


def regime_of(strategy: Strategy, uneven: Policy) -> Regime:
    """Return what a strategy does apart from the exchange.

    Raises:
        ConfigurationError: `uneven` is out of range, or has no meaning for the method.
    """
    if strategy.method.averages_weights:
        return Replicas(strategy, uneven)
    if uneven != "finish":
        raise ConfigurationError(
            f"uneven={uneven!r}: for methods that average weights after some steps; the method given communicates in "
            f"every step ({in_words(strategy.method)}). Leave it out."
        )
    return Synchronous(strategy)


def take(strategy: Strategy, method: Method) -> None:
    """Replace a strategy's method, and what its kind does apart from the exchange; the workers stay the same."""
    is_other = method.averages_weights != strategy.method.averages_weights
    strategy.method = method
    if is_other:
        strategy.regime.tear_down()
        strategy.regime = regime_of(strategy, strategy._options["uneven"])


def adopt(strategy: Strategy, method: Method) -> None:
    """Continue with another method, after a step at which all ranks have the same weights and no residuals.

    Collective: all ranks.

    Raises:
        ConfigurationError, DisagreementError: on all ranks.
    """
    agree_on_configuration(type(strategy).__name__, method.facts())
    before, regime = strategy.workers, strategy.regime
    strategy.signals.settle()  # a rank repeats its request
    take(strategy, method)
    if strategy.regime is not regime:
        with failing_together():
            strategy.regime.check(strategy.trainer)
        strategy.regime.begin_fit()
        strategy.groups.make_for_averages(method, strategy._timeout)
    strategy._make_workers()
    for worker, old in zip(strategy.workers, before, strict=True):
        worker.step, worker.batch = old.step, old.batch
        worker.requests = old.requests
    if strategy.regime is not regime:
        strategy.regime.set_up(strategy.trainer)
