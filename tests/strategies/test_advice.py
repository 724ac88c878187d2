"""What the user is told at the start of a fit."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_lowbw import LocalSGDStrategy
from tests.ranks import run_ranks
from tests.tiny import Tiny, make_data, make_strategy, make_trainer


def fit_never_local(begin: Any, k_steps: int) -> list[str]:
    num_ranks = dist.get_world_size()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy = LocalSGDStrategy(k_steps, begin_step=begin)
        make_trainer(strategy, num_ranks).fit(Tiny(), make_data(num_ranks, 4))
    messages = [str(warning.message) for warning in caught]
    return [each for each in messages if "trains as DDP" in each or "trains alone" in each]


@pytest.mark.parametrize(
    ("begin", "k_steps", "word"),
    [
        ("first_lr_decay", 1, "scheduler"),
        (4, 2, "4 optimizer steps, and the first 4"),
        (3, 2, "before the first average"),
        (2, 2, ""),
    ],
)
def test_a_run_that_never_becomes_local_or_averages_is_told(begin: Any, k_steps: int, word: str) -> None:
    messages = run_ranks(fit_never_local, 2, begin, k_steps)[0]
    assert len(messages) == bool(word)
    assert all(word in message for message in messages)


def messages_with_adam(betas: list[float], options: dict[str, Any]) -> list[str]:
    logged: list[str] = []

    def adamw(parameters: Any) -> torch.optim.Optimizer:
        first, *others = parameters
        groups = [{"params": [first]}, {"params": others, "betas": (betas[-1], 0.999)}]
        return torch.optim.AdamW(groups, lr=1e-3, betas=(betas[0], 0.999))

    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        strategy = make_strategy("dgc", **options)
        make_trainer(strategy, dist.get_world_size()).fit(Tiny(adamw), make_data(2, 4))
    finally:
        logger.removeHandler(handler)
    return [each for each in logged if "beta1" in each]


@pytest.mark.parametrize(
    ("betas", "options", "words"),
    [
        ([0.9], {}, "AdamW: beta1=0.9 is lowered to 0.7 for sparse tensors"),
        ([0.8, 0.95], {}, "beta1=0.8, 0.95 is lowered"),
        ([0.7], {}, ""),
        ([0.9], {"correction": "error_feedback"}, ""),
    ],
)
def test_a_lowered_beta1_is_told_once_on_rank_zero(betas: list[float], options: dict[str, Any], words: str) -> None:
    first, second = run_ranks(messages_with_adam, 2, betas, options)
    assert second == []
    assert len(first) == bool(words)
    assert all(words in message for message in first)
