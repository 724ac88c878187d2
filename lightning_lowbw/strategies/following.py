"""A strategy given to a Trainer of the other package (`lightning`, `pytorch_lightning`) gets the class of that one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch.accelerators import Accelerator

from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.namespaces import PACKAGES, package_of, twins

if TYPE_CHECKING:
    from lightning_lowbw.strategies.strategy import Strategy


def set_accelerator(strategy: Strategy, accelerator: Accelerator) -> None:
    """Set a strategy's accelerator; if that is the other package's, make the strategy one of that package first.

    The accelerator is the first thing that a Trainer sets, before the strategy has done anything.

    Raises:
        ConfigurationError: the strategy's class is the user's own, and derives from one for the other package.
    """
    own, package = package_of(strategy), package_of(accelerator)
    if package not in (None, own):
        strategy.__class__ = _twin(type(strategy), f"{own}, and the Trainer is one of {package}")
        strategy._make_parts()
        stock = next(each for each in type(strategy).__mro__ if each.__module__.partition(".")[0] in PACKAGES)()
        vars(strategy).update({key: value for key, value in vars(stock).items() if package_of(value) == package})
    strategy._accelerator = accelerator


def _twin(cls: type[Strategy], packages: str) -> type[Strategy]:
    if len(twins(cls)) == 1:
        base = next(each for each in cls.__mro__ if len(twins(each)) > 1)
        twin: type = twins(base)[-1]
        raise ConfigurationError(
            f"{cls.__name__} derives from {base.__module__}.{base.__name__}, which is built on {packages}. Derive it "
            f"from {twin.__module__}.{twin.__name__}."
        )
    return twins(cls)[-1]
