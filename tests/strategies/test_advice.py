"""What the user is told at the start of a fit."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from lightning_lowbw import DGC, LocalSGDStrategy, SparsityWarmup, Strategy
from lightning_lowbw.presets import preset
from tests.ranks import on_ranks
from tests.strategies.fits import make, train, warned
from tests.sync.problem import listening
from tests.tiny import Tiny

STEPS = 4


def warm_up(**changes: Any) -> Any:
    return make("dgc, warm-up", changes)


def one_stair(begin: int) -> Any:
    return warm_up(rampup_begin_step=begin, sparsity=(0.9,), rampup_step=1)


TOO_SHORT = "This run has 4 optimizer steps, and the first {} would come with step {}: up to step {} it trains as DDP"
# Words that all messages about one matter have; then the strategy, what its message has, or "" for no message, and
# callbacks. Messages of the optimizer (beta1, error feedback) are in tests/sync/test_adam.py and test_plain_loops.py.
CASES: dict[str, list[tuple[Any, ...]]] = {
    "trains as DDP": [
        (one_stair(begin=4), TOO_SHORT.format("compressed step", 5, 4)),
        (one_stair(begin=3), ""),
        (LocalSGDStrategy(2, begin_step=3), TOO_SHORT.format("average", 5, 3) + ", and after it each rank alone"),
    ],
    "elements are sent. Sparsity is": [
        (warm_up(), "sparsity=[0.002]: 99.8 % of", SparsityWarmup(begin_step=0, sparsity=[0.002])),
        (Strategy(DGC(density=0.999)), "density=0.999: 99.9 % of the elements are sent. "),
        (LocalSGDStrategy(2, compression={"density": 0.5}), ""),
    ],
    "times as many": [
        (Strategy(preset("hidden_local_sgd")), "every 8 steps of 2 participants: train about 1.45 times as many"),
        (LocalSGDStrategy(2), ""),
    ],
    "are sent sparse": [
        (warm_up(min_numel=1, exclude=("wider.weight",)), "7 of 8 tensors, 40.8% of the 3,461 elements that are "),
    ],
}


@on_ranks(2)
def test_rank_zero_is_told_once_what_will_not_do_what_was_meant() -> None:
    for matter, rows in CASES.items():
        for strategy, told, *callbacks in rows:
            with listening("lightning.pytorch.utilities.rank_zero") as logged:
                _, said = warned(lambda: train(strategy, Tiny(), STEPS, callbacks=callbacks))  # noqa: B023
            messages = [each for each in logged + said if matter in each]
            assert [told in each for each in messages] == [True] * (bool(told) and dist.get_rank() == 0), messages
