"""The errors of this package. Each error is raised on every rank, or the job would hang."""

from __future__ import annotations

# Advice where a checkpoint has residuals that do not fit.
WITHOUT_RESIDUALS = "resume without the residuals: strategies take resume='weights and optimizer'"


class ConfigurationError(ValueError):
    """The settings of the user cannot run; the message names the given value, the allowed values and the way out."""


class DisagreementError(ConfigurationError):
    """The ranks were given different configurations, models or checkpoints."""


class NonFiniteGradientError(FloatingPointError):
    """A gradient, a weight or a residual is infinite or NaN; the message says where, and what to do."""
