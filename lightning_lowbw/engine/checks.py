"""What a driver of gradients refuses or warns of: payloads that do not go with the peers, the model, the optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.what.payloads import Narrow, Whole
from lightning_lowbw.what.top_k import TopK
from lightning_lowbw.when.every_step import EveryStep
from lightning_lowbw.where.peers import Peers

if TYPE_CHECKING:
    from lightning_lowbw.engine.gradients import GradientWorker

Payload = Whole | Narrow | TopK


def check_top_k(what: TopK, when: EveryStep, names: Sequence[str], peers: Peers) -> None:
    """Check that a payload and a schedule go with the peers, and with the names of a model's parameters."""
    if peers.is_two_level:
        check_two_levels(what, when)
    what.check_names(names)


def check_two_levels(what: TopK, when: EveryStep) -> None:
    """Check that a payload and a schedule go with nodes of several ranks."""
    for name, given, allowed in (
        ("exchange", what.exchange, ("auto", "all_gather")),
        ("overlap", when.overlap, (False,)),
    ):
        if given not in allowed:
            raise ConfigurationError(
                f"{name}={given!r} on two levels: allowed there is {' or '.join(map(repr, allowed))}."
            )


def check_replaced(what: Payload, made_for: Payload) -> None:
    """Check that a payload that replaces another means the same by what is kept."""
    if type(what) is not type(made_for):
        raise ConfigurationError(f"{what} in place of {made_for}: another payload needs a worker of its own.")
    for name in ("correction", "dense_dtype") if isinstance(what, TopK) else ():
        given, own = getattr(what, name), getattr(made_for, name)
        if given != own:
            raise ConfigurationError(
                f"{name}={given!r} in place of {own!r}: it cannot change during a training. Attach the method anew."
            )


def warn_if_incomplete(worker: GradientWorker) -> None:
    """Warn, on rank 0, where sparse steps train by error feedback alone, and nobody has asked for that."""
    what, peers = worker.method.what, worker.peers
    is_asked_for = not isinstance(what, TopK) or what.correction == "error_feedback"
    if worker.correction.is_complete or is_asked_for or peers.num_senders == 1 or peers.rank > 0:
        return
    advice = "" if worker.when.rampup_begin_step else "; a dense phase (rampup_begin_step > 0) helps"
    warnings.warn(
        f"{type(worker.optimizer).__name__}: gradients are compressed with error feedback only. What is kept back "
        f"reaches this optimizer late and in bursts, which costs some accuracy for Adam-type optimizers{advice}. "
        "torch.optim.SGD, Adam and AdamW have corrections.",
        stacklevel=3,  # who has called `Method.attach`
    )
