"""What the user is told at the start of a fit."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist

from lightning_lowbw import DGC, DGCStrategy, LocalSGDStrategy, SparsityWarmup, Strategy
from tests.ranks import run_ranks
from tests.tiny import Tiny, make_data, make_strategy, make_trainer


def messages_of(strategy: Any, model: Any = Tiny, steps: int = 4, **options: Any) -> list[str]:
    """Train a few steps; return the warnings, and what is logged."""
    said: list[str] = []
    logger, handler = logging.getLogger("lightning.pytorch.utilities.rank_zero"), logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(strategy, dist.get_world_size(), **options)
        trainer.fit(model(), make_data(dist.get_world_size(), steps))
    logger.removeHandler(handler)
    return said + [str(each.message) for each in caught]


TOO_SHORT = "This run has 4 optimizer steps, and the first {} would come with step {}: up to step {} it trains as DDP"


@pytest.mark.parametrize(
    ("strategy", "told"),
    [
        (make_strategy("dgc", rampup_begin_step=4, sparsity=[0.9]), TOO_SHORT.format("compressed step", 5, 4)),
        (make_strategy("dgc", rampup_begin_step=3, sparsity=[0.9]), ""),
        (LocalSGDStrategy(2, begin_step=3), TOO_SHORT.format("average", 5, 3) + ", and after it each rank alone"),
        (LocalSGDStrategy(2, begin_step=2), ""),
        (DGCStrategy(), ""),  # says itself what it has chosen
        (
            LocalSGDStrategy(1, begin_step="first_lr_decay"),
            "begin_step='first_lr_decay', and the module has no learning",
        ),
    ],
)
def test_a_run_that_is_too_short_for_its_method_is_told_so(strategy: Strategy, told: str) -> None:
    first, second = run_ranks(messages_of, 2, strategy)
    assert [told in each for each in first if "trains as DDP" in each] == [True] * bool(told)
    assert not any("trains as DDP" in each for each in second)


def test_one_rank_alone_is_told() -> None:
    (said,) = run_ranks(messages_of, 1, DGCStrategy())
    assert len([each for each in said if each.startswith("DGCStrategy with one rank: there is no other")]) == 1


MOSTLY_SENT: list[tuple[Callable[[], Strategy], list[pl.Callback], str]] = [
    (lambda: make_strategy("dgc", sparsity=[0, 0.1, 0.25, 0.5]), [], "sparsity=[0.0, 0.1, 0.25, 0.5]: 90 %, 75 % of"),
    (lambda: make_strategy("dgc"), [SparsityWarmup(begin_step=0, sparsity=[0.002])], "sparsity=[0.002]: 99.8 % of"),
    (lambda: Strategy(DGC(density=0.999)), [], "density=0.999: 99.9 % of the elements are sent. Sparsity is the "),
    (lambda: LocalSGDStrategy(2, compression={"density": 0.5}), [], ""),
]


def warned_of_what_is_sent() -> list[list[str]]:
    said = [messages_of(make(), steps=1, callbacks=callbacks) for make, callbacks, _ in MOSTLY_SENT]
    return [[each for each in messages if "elements are sent. Sparsity is" in each] for messages in said]


def test_a_density_that_was_given_as_a_sparsity_is_told() -> None:
    first, second = run_ranks(warned_of_what_is_sent, 2)
    assert second == [[]] * len(MOSTLY_SENT)
    for said, (_, _, words) in zip(first, MOSTLY_SENT, strict=True):
        assert [words in each for each in said] == [True] * bool(words)


def adamw(parameters: Any, betas: list[float]) -> torch.optim.Optimizer:
    first, *others = parameters
    groups = [{"params": [first]}, {"params": others, "betas": (betas[-1], 0.999)}]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(betas[0], 0.999))


@pytest.mark.parametrize(
    ("betas", "exclude", "words"),
    [
        ([0.8, 0.95], [], "AdamW: beta1=0.8, 0.95 is lowered to 0.7 for sparse tensors"),
        ([0.9], ["*"], ""),
    ],
)
def test_a_lowered_beta1_is_told_once_on_rank_zero(betas: list[float], exclude: list[str], words: str) -> None:
    model = functools.partial(Tiny, functools.partial(adamw, betas=betas))
    first, second = run_ranks(messages_of, 2, make_strategy("dgc", exclude=exclude), model)
    assert [words in each for each in first if "beta1" in each] == [True] * bool(words)
    assert not any("beta1" in each for each in second)


def test_that_little_can_be_compressed_is_told_with_the_numbers() -> None:
    numels = {name: p.numel() for name, p in Tiny().named_parameters() if p.requires_grad}
    total, largest = sum(numels.values()), max(numels, key=numels.__getitem__)
    assert numels[largest] > total / 2
    sparse = [numel for name, numel in numels.items() if name != largest]
    said, _ = run_ranks(messages_of, 2, make_strategy("dgc", min_numel=1, exclude=[largest]))
    told = f"{len(sparse)} of {len(numels)} tensors, {sum(sparse) / total:.1%} of the {total:,} elements that are "
    assert [each.startswith(told) for each in said if "are sent sparse" in each] == [True]


@pytest.mark.parametrize("sparsity", [[0.999], None])
def test_another_optimizer_is_told_that_it_has_no_correction(sparsity: Any) -> None:
    """Where that is still to be chosen, later, if at all."""
    model = functools.partial(Tiny, functools.partial(torch.optim.RMSprop, lr=1e-3))
    said, others = run_ranks(messages_of, 2, DGCStrategy(sparsity=sparsity), model)
    assert len([each for each in said if "error feedback only" in each]) == (sparsity is not None)
    assert not any("error feedback only" in each for each in others)
