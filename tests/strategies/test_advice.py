"""What the user is told at the start of a fit."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from lightning_lowbw import DGC, DGCStrategy, LocalSGDStrategy, SparsityWarmup, Strategy
from tests.ranks import on_ranks
from tests.strategies.fits import make, train, warned
from tests.tiny import Tiny

STEPS = 4


def messages_of(strategy: Any, model: Any, callbacks: list[pl.Callback]) -> list[str]:
    """Train a few steps; return the warnings, and what is logged."""
    logged: list[str] = []
    logger, handler = logging.getLogger("lightning.pytorch.utilities.rank_zero"), logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    _, said = warned(lambda: train(strategy, model(), STEPS, callbacks=callbacks))
    logger.removeHandler(handler)
    return logged + said


def warm_up(**changes: Any) -> Any:
    return make("dgc, warm-up", changes)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    first, *others = parameters
    groups = [{"params": [first]}, {"params": others, "betas": (0.95, 0.999)}]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.8, 0.999))


ADAMW = functools.partial(Tiny, adamw)
RMSPROP = functools.partial(Tiny, functools.partial(torch.optim.RMSprop, lr=1e-3))
SHORT, DENSITY, BETA, CORRECTION = "trains as DDP", "elements are sent. Sparsity is", "beta1", "error feedback only"
TOO_SHORT = "This run has 4 optimizer steps, and the first {} would come with step {}: up to step {} it trains as DDP"
# What is trained; words that all messages of a matter have; and what one message has: "" where there must be none.
CASES: list[tuple[Callable[[], Any], Any, list[pl.Callback], str, str]] = [
    (
        lambda: warm_up(rampup_begin_step=4, sparsity=(0.9,), rampup_step=1),
        *(Tiny, [], SHORT, TOO_SHORT.format("compressed step", 5, 4)),
    ),
    (lambda: warm_up(rampup_begin_step=3, sparsity=(0.9,), rampup_step=1), Tiny, [], SHORT, ""),
    (
        lambda: LocalSGDStrategy(2, begin_step=3),
        *(Tiny, [], SHORT, TOO_SHORT.format("average", 5, 3) + ", and after it each rank alone"),
    ),
    (
        lambda: LocalSGDStrategy(1, begin_step="first_lr_decay"),
        *(Tiny, [], SHORT, "begin_step='first_lr_decay', and the module has no learning"),
    ),
    (
        lambda: warm_up(sparsity=(0, 0.1, 0.25, 0.5)),
        *(Tiny, [], DENSITY, "sparsity=[0.0, 0.1, 0.25, 0.5]: 90 %, 75 % of"),
    ),
    (warm_up, Tiny, [SparsityWarmup(begin_step=0, sparsity=[0.002])], DENSITY, "sparsity=[0.002]: 99.8 % of"),
    (lambda: Strategy(DGC(density=0.999)), Tiny, [], DENSITY, "density=0.999: 99.9 % of the elements are sent. "),
    (lambda: LocalSGDStrategy(2, compression={"density": 0.5}), Tiny, [], DENSITY, ""),
    (
        lambda: warm_up(min_numel=1, exclude=("wider.weight",)),
        *(Tiny, [], "are sent sparse", "7 of 8 tensors, 40.8% of the 3,461 elements that are "),
    ),
    (warm_up, ADAMW, [], BETA, "AdamW: beta1=0.8, 0.95 is lowered to 0.7 for sparse tensors"),
    (lambda: warm_up(exclude=("*",)), ADAMW, [], BETA, ""),
    (warm_up, RMSPROP, [], CORRECTION, "RMSprop: gradients are compressed with"),
    (DGCStrategy, RMSPROP, [], CORRECTION, ""),  # that is still to be chosen, if at all
]


@on_ranks(2)
def test_rank_zero_is_told_once_what_will_not_do_what_was_meant() -> None:
    for strategy, model, callbacks, matter, told in CASES:
        said = [each for each in messages_of(strategy(), model, callbacks) if matter in each]
        assert [told in each for each in said] == [True] * (bool(told) and dist.get_rank() == 0), said
