"""What the user is told at the start of a fit."""

from __future__ import annotations

import functools
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from lightning_lowbw import DGC, DGCStrategy, LocalSGDStrategy, SparsityWarmup, Strategy
from tests.ranks import on_ranks
from tests.strategies.fits import make, train, warned
from tests.sync.problem import listening
from tests.tiny import Tiny

STEPS = 4


def messages_of(strategy: Any, model: Any, callbacks: list[pl.Callback]) -> list[str]:
    """Train a few steps; return the warnings, and what is logged."""
    with listening("lightning.pytorch.utilities.rank_zero") as logged:
        _, said = warned(lambda: train(strategy, model(), STEPS, callbacks=callbacks))
    return logged + said


def warm_up(**changes: Any) -> Any:
    return make("dgc, warm-up", changes)


def one_stair(begin: int) -> Any:
    return warm_up(rampup_begin_step=begin, sparsity=(0.9,), rampup_step=1)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    first, *others = parameters
    groups = [{"params": [first]}, {"params": others, "betas": (0.95, 0.999)}]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.8, 0.999))


ADAMW = functools.partial(Tiny, adamw)
RMSPROP = functools.partial(Tiny, functools.partial(torch.optim.RMSprop, lr=1e-3))
TOO_SHORT = "This run has 4 optimizer steps, and the first {} would come with step {}: up to step {} it trains as DDP"
# Words that all messages of a matter have; what is trained; what one message has, or "" for none; callbacks.
CASES: dict[str, list[tuple[Any, ...]]] = {
    "trains as DDP": [
        (one_stair(begin=4), Tiny, TOO_SHORT.format("compressed step", 5, 4)),
        (one_stair(begin=3), Tiny, ""),
        (LocalSGDStrategy(2, begin_step=3), Tiny, TOO_SHORT.format("average", 5, 3) + ", and after it each rank alone"),
    ],
    "elements are sent. Sparsity is": [
        (warm_up(sparsity=(0, 0.1, 0.25, 0.5)), Tiny, "sparsity=[0.0, 0.1, 0.25, 0.5]: 90 %, 75 % of"),
        (warm_up(), Tiny, "sparsity=[0.002]: 99.8 % of", SparsityWarmup(begin_step=0, sparsity=[0.002])),
        (Strategy(DGC(density=0.999)), Tiny, "density=0.999: 99.9 % of the elements are sent. "),
        (LocalSGDStrategy(2, compression={"density": 0.5}), Tiny, ""),
    ],
    "are sent sparse": [
        (
            warm_up(min_numel=1, exclude=("wider.weight",)),
            Tiny,
            "7 of 8 tensors, 40.8% of the 3,461 elements that are ",
        ),
    ],
    "beta1": [
        (warm_up(), ADAMW, "AdamW: beta1=0.8, 0.95 is lowered to 0.7 for sparse tensors"),
        (warm_up(exclude=("*",)), ADAMW, ""),
    ],
    "error feedback only": [
        (warm_up(), RMSPROP, "RMSprop: gradients are compressed with"),
        (DGCStrategy(), RMSPROP, ""),  # that is still to be chosen, if at all
    ],
}


@on_ranks(2)
def test_rank_zero_is_told_once_what_will_not_do_what_was_meant() -> None:
    for matter, rows in CASES.items():
        for strategy, model, told, *callbacks in rows:
            said = [each for each in messages_of(strategy, model, callbacks) if matter in each]
            assert [told in each for each in said] == [True] * (bool(told) and dist.get_rank() == 0), said
