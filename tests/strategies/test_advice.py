"""What the user is told at the start of a fit."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from lightning_lowbw import DGC, DGCStrategy, LocalSGDStrategy, SparsityWarmup, Strategy
from tests.ranks import run_ranks
from tests.tiny import Tiny, make_data, make_strategy, make_trainer

STEPS = 4


def messages_of(strategy: Any, model: Any, callbacks: list[pl.Callback]) -> list[str]:
    """Train a few steps; return the warnings, and what is logged."""
    said: list[str] = []
    logger, handler = logging.getLogger("lightning.pytorch.utilities.rank_zero"), logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(strategy, dist.get_world_size(), callbacks=callbacks)
        trainer.fit(model(), make_data(dist.get_world_size(), STEPS))
    logger.removeHandler(handler)
    return said + [str(each.message) for each in caught]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    first, *others = parameters
    groups = [{"params": [first]}, {"params": others, "betas": (0.95, 0.999)}]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.8, 0.999))


ADAMW = functools.partial(Tiny, adamw)
RMSPROP = functools.partial(Tiny, functools.partial(torch.optim.RMSprop, lr=1e-3))
SHORT, DENSITY, BETA, CORRECTION = "trains as DDP", "elements are sent. Sparsity is", "beta1", "error feedback only"
TOO_SHORT = "This run has 4 optimizer steps, and the first {} would come with step {}: up to step {} it trains as DDP"
# What is trained; words that all messages of a matter have; and what one message has: "" where there must be none.
CASES: list[tuple[Callable[[], Strategy], Any, list[pl.Callback], str, str]] = [
    (
        lambda: make_strategy("dgc", rampup_begin_step=4, sparsity=[0.9]),
        *(Tiny, [], SHORT, TOO_SHORT.format("compressed step", 5, 4)),
    ),
    (lambda: make_strategy("dgc", rampup_begin_step=3, sparsity=[0.9]), Tiny, [], SHORT, ""),
    (
        lambda: LocalSGDStrategy(2, begin_step=3),
        *(Tiny, [], SHORT, TOO_SHORT.format("average", 5, 3) + ", and after it each rank alone"),
    ),
    (
        lambda: LocalSGDStrategy(1, begin_step="first_lr_decay"),
        *(Tiny, [], SHORT, "begin_step='first_lr_decay', and the module has no learning"),
    ),
    (
        lambda: make_strategy("dgc", sparsity=[0, 0.1, 0.25, 0.5]),
        *(Tiny, [], DENSITY, "sparsity=[0.0, 0.1, 0.25, 0.5]: 90 %, 75 % of"),
    ),
    (
        lambda: make_strategy("dgc"),
        *(Tiny, [SparsityWarmup(begin_step=0, sparsity=[0.002])], DENSITY, "sparsity=[0.002]: 99.8 % of"),
    ),
    (lambda: Strategy(DGC(density=0.999)), Tiny, [], DENSITY, "density=0.999: 99.9 % of the elements are sent. "),
    (lambda: LocalSGDStrategy(2, compression={"density": 0.5}), Tiny, [], DENSITY, ""),
    (
        lambda: make_strategy("dgc", min_numel=1, exclude=["wider.weight"]),
        *(Tiny, [], "are sent sparse", "7 of 8 tensors, 40.8% of the 3,461 elements that are "),
    ),
    (
        lambda: make_strategy("dgc"),
        *(ADAMW, [], BETA, "AdamW: beta1=0.8, 0.95 is lowered to 0.7 for sparse tensors"),
    ),
    (lambda: make_strategy("dgc", exclude=["*"]), ADAMW, [], BETA, ""),
    (lambda: make_strategy("dgc"), RMSPROP, [], CORRECTION, "RMSprop: gradients are compressed with"),
    (DGCStrategy, RMSPROP, [], CORRECTION, ""),  # that is still to be chosen, if at all
]


def messages_of_matters() -> list[list[str]]:
    said = [messages_of(make(), model, callbacks) for make, model, callbacks, *_ in CASES]
    matters = [matter for *_, matter, _ in CASES]
    return [[each for each in messages if matter in each] for messages, matter in zip(said, matters, strict=True)]


def test_rank_zero_is_told_once_what_will_not_do_what_was_meant() -> None:
    first, second = run_ranks(messages_of_matters, 2)
    assert second == [[]] * len(CASES)
    for said, (*_, told) in zip(first, CASES, strict=True):
        assert [told in each for each in said] == [True] * bool(told), said
