"""The interface of payloads, and the payloads by their names in files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch

from lightning_lowbw.comm.peers import Peers
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.schedules.schedule import Schedule

FLOAT_BYTES = 4
Shapes = Sequence[tuple[int, ...]]
PAYLOADS: dict[str, type[Payload]] = {}


class Message(NamedTuple):
    """A message that a payload hands to a collective. For an all-reduce `nbytes` is the size of the sum; for the other
    collectives it is the size of the message that a rank sends.

    "gather_in_node" is an all-gather between the ranks of a node; the other collectives are between participants.
    The status of a step, and the tensors that are sent whole, go in the first message.
    """

    collective: Literal["all_reduce", "all_gather", "all_to_all", "gather_in_node"]
    nbytes: int


@dataclass(frozen=True)
class Payload(ABC):
    """The part of a signal that is sent: the base of frozen dataclasses, which are registered when they are defined.

    By default a payload compresses every tensor, and keeps back the elements that it does not send.

    Attributes:
        key: its name in a file, ``{payload: top_k}``; the argument of the class statement.
        sends_all: whether every element is sent, so that there is nothing to be kept back and nothing to exchange but
            whole tensors.
        takes_density: whether it sends as many elements as the schedule's stairs of sparsity say.
        corrects: whether gradients enter the residual as the optimizer's correction says (`payloads.corrections`), so
            that the pass that compresses does the work of the optimizer's step; else by error feedback.
        keeps_parts: whether each rank of a node keeps back its part of every tensor only; if not, the whole tensor.
        can_be_early: whether gradients can go in several messages; all but the last message begin in the
            backward pass.
        can_be_hidden: whether its exchange sends everything when it begins, so that local steps can be taken before it
            is waited for.
        takes_weights: whether its mean can count participants unequally, as in elastic rounds.
        fixed: names of fields that cannot change during a training.
    """

    key: ClassVar[str]
    sends_all: ClassVar[bool] = False
    takes_density: ClassVar[bool] = False
    corrects: ClassVar[bool] = False
    keeps_parts: ClassVar[bool] = True
    can_be_early: ClassVar[bool] = False
    can_be_hidden: ClassVar[bool] = False
    takes_weights: ClassVar[bool] = False
    fixed: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, key: str | None = None) -> None:
        if key is not None:  # else the class is a user's own, derived from a payload here
            cls.key = key
            PAYLOADS[key] = cls

    @abstractmethod
    def messages(self, shapes: Shapes, num_participants: int, num_parts: int = 1, *, when: Schedule) -> list[Message]:
        """Return the messages of one exchange of the compressed tensors, apart from the status.

        Args:
            shapes: shapes of the compressed tensors.
            num_participants: N.
            num_parts: in which a node exchanges each tensor; 1 when flat.
            when: the schedule, after its warm-up.
        """

    @abstractmethod
    def exchange(self, peers: Peers, when: Schedule) -> Any:
        """Return the exchange (`payloads.exchange.Exchange`) of the compressed tensors; None if it sends all whole.

        Args:
            peers: the participants.
            when: the schedule.
        """

    @property
    def density(self) -> float:
        """The fraction of elements that is sent, if the schedule does not say it."""
        return 1.0

    def at(self, density: float) -> Payload:
        """Return the payload with another density, where it takes one: that of a stair of the schedule."""
        return self

    def masks(self, momenta: Iterable[float], *, by_default: bool) -> bool:
        """Return whether velocities are cleared where they are sent, if it corrects.

        Args:
            momenta: of the tensors.
            by_default: whether the optimizer's correction does so.
        """
        return by_default

    def sample(self, min_numel: int) -> Payload:
        """Return the payload for timing exchanges of a few tensors that do not belong to the model.

        Args:
            min_numel: elements of the smallest tensor that is compressed.
        """
        return self

    def uses_kernels(self, device: torch.device) -> bool:
        """Return whether compiled kernels of a device are used."""
        return False

    def compresses(self, name: str, numel: int, small_numel: int) -> bool:
        """Return whether a tensor is compressed; else it is sent whole, with the status.

        Args:
            name: of the parameter.
            numel: its elements.
            small_numel: below how many a tensor is small for its model.
        """
        return numel > 0

    def check(self, when: Schedule) -> None:
        """Check that the payload can be combined with a schedule.

        Raises:
            ConfigurationError: it cannot, with the reason.
        """
        if (when.stairs or when.is_auto) and not self.takes_density:
            raise ConfigurationError(
                f"sparsity={list(when.stairs) or 'auto'} with {self}: stairs of sparsity say how many elements TopK "
                "sends. Leave them out, or send the largest elements with what=TopK()."
            )
        if when.is_always_synchronous and not self.sends_all:
            raise ConfigurationError(
                f"k_steps=1 with {self}: an average after each step is one of gradients, as in DDP, and nothing "
                "would be compressed. Give k_steps > 1, or use when=EveryStep()."
            )
        if when.delay_steps and not self.can_be_hidden:
            raise ConfigurationError(
                f"delay_steps={when.delay_steps!r} with {self}: its messages depend on one another and cannot be "
                "hidden. Leave out delay_steps, or send Whole, Quantized or TopK."
            )

    def check_names(self, names: Iterable[str]) -> None:  # noqa: B027 - most say nothing of names
        """Check the settings that name parameters.

        Args:
            names: of the model's parameters.

        Raises:
            ConfigurationError: there is no such parameter.
        """

    def check_replacement(self, before: Payload) -> None:
        """Check that the payload can replace another payload whose exchanges have left residuals.

        Raises:
            ConfigurationError: it cannot.
        """
        if type(self) is not type(before):
            raise ConfigurationError(f"{self} in place of {before}: another payload needs a worker of its own.")
        # The exchange has been made for these.
        for name in self.fixed:
            if getattr(self, name) != getattr(before, name):
                raise ConfigurationError(
                    f"{name}={getattr(self, name)!r} in place of {getattr(before, name)!r}: it cannot change during a "
                    "training. Attach the method anew."
                )
