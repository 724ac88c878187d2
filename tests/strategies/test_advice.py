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
from lightning.pytorch.strategies import DDPStrategy

from lightning_lowbw import DGC, AutoStrategy, DGCStrategy, LocalSGDStrategy, SparsityWarmup, Strategy
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


class Falling(Tiny):
    """The learning rate falls after the third step."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def lines_of_post_local_sgd() -> list[str]:
    lines, logger = list[str](), logging.getLogger("lightning.pytorch")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    strategy = LocalSGDStrategy(2, begin_step="first_lr_decay")
    make_trainer(strategy, 2).fit(Falling(), make_data(2, 8))
    logger.removeHandler(handler)
    assert strategy.workers[0].is_local
    return [line for line in lines if "learning rate" in line]


def test_what_local_steps_wait_for_is_told_and_when_they_begin() -> None:
    lines, of_other = run_ranks(lines_of_post_local_sgd, 2)
    assert of_other == []
    assert len(lines) == 2
    assert "synchronous until the learning rate falls (begin_step='first_lr_decay')" in lines[0]
    assert lines[1] == "The learning rate has fallen: synchronous up to step 4, then local."


def warned_in_a_dry_run(strategy: Strategy, is_dry: bool) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(strategy, 2, fast_dev_run=1 if is_dry else False, max_steps=1).fit(Tiny(), make_data(2, 1))
    return [message for each in caught if "optimizer steps, and the first" in (message := str(each.message))]


@pytest.mark.parametrize(
    "make", [lambda: make_strategy("dgc", rampup_begin_step=5), lambda: LocalSGDStrategy(begin_step=5)]
)
def test_a_dry_run_is_not_told_that_it_is_short(make: Any) -> None:
    assert [len(lines) for lines in run_ranks(warned_in_a_dry_run, 2, make(), False)] == [1, 0]
    assert run_ranks(warned_in_a_dry_run, 2, make(), True) == [[], []]


def warned_alone(cls: type[Strategy]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(cls(), 1).fit(Tiny(), make_data(1, 1))
    return [message for each in caught if "one rank" in (message := str(each.message))]


@pytest.mark.parametrize("cls", [AutoStrategy, DGCStrategy])
def test_one_rank_alone_is_told(cls: type[Strategy]) -> None:
    assert run_ranks(warned_alone, 1, cls) == [
        [
            f"{cls.__name__} with one rank: there is no other rank to communicate with, so this trains as without it. "
            "Set Trainer(devices=..., num_nodes=...) for more."
        ]
    ]


MOSTLY_SENT: list[tuple[Callable[[], Strategy], list[pl.Callback], str]] = [
    (lambda: make_strategy("dgc", sparsity=[0.001]), [], "sparsity=[0.001]: 99.9 % of"),
    (lambda: make_strategy("dgc", sparsity=[0, 0.1, 0.25, 0.5]), [], "sparsity=[0.0, 0.1, 0.25, 0.5]: 90 %, 75 % of"),
    (lambda: Strategy(DGC(sparsity=[0.01])), [], "sparsity=[0.01]: 99 % of the elements are sent. Sparsity is"),
    (lambda: make_strategy("dgc"), [SparsityWarmup(begin_step=0, sparsity=[0.002])], "give sparsity=[0.998], and for"),
    (lambda: Strategy(DGC(density=0.999)), [], "density=0.999: 99.9 % of the elements are sent. Sparsity is the "),
    (lambda: LocalSGDStrategy(2, compression={"density": 0.9}), [], "To send 10 % give density=0.1."),
    (lambda: make_strategy("dgc", sparsity=[0, 0.5, 0.9]), [], ""),
    (lambda: LocalSGDStrategy(2, compression={"density": 0.5}), [], ""),
]


def warned_of_what_is_sent() -> list[list[str]]:
    said = []
    for make, callbacks, _ in MOSTLY_SENT:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            make_trainer(make(), 2, callbacks=callbacks, max_steps=1).fit(Tiny(), make_data(2, 1))
        said.append([message for each in caught if "elements are sent" in (message := str(each.message))])
    return said


def test_a_density_that_was_given_as_a_sparsity_is_told() -> None:
    first, second = run_ranks(warned_of_what_is_sent, 2)
    assert second == [[]] * len(MOSTLY_SENT)
    for said, (_, _, words) in zip(first, MOSTLY_SENT, strict=True):
        assert [words in each for each in said] == [True] * bool(words)


def messages_of_fit(strategy: DDPStrategy, model: Tiny) -> list[str]:
    """Train a few steps; return what is logged."""
    logged: list[str] = []
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        make_trainer(strategy, dist.get_world_size()).fit(model, make_data(2, 4))
    finally:
        logger.removeHandler(handler)
    return logged


def messages_with_adam(betas: list[float], options: dict[str, Any]) -> list[str]:
    def adamw(parameters: Any) -> torch.optim.Optimizer:
        first, *others = parameters
        groups = [{"params": [first]}, {"params": others, "betas": (betas[-1], 0.999)}]
        return torch.optim.AdamW(groups, lr=1e-3, betas=(betas[0], 0.999))

    logged = messages_of_fit(make_strategy("dgc", **options), Tiny(adamw))
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


def what_stays_whole(min_numel: int, exclude: list[str]) -> tuple[list[str], float]:
    """Return what is said of tensors that stay whole, and the density that is shown."""
    strategy = make_strategy("dgc", min_numel=min_numel, exclude=exclude)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logged = messages_of_fit(strategy, Tiny())
    logged += [str(each.message) for each in caught]
    (worker,) = strategy.workers  # type: ignore[attr-defined]
    return [each for each in logged if "sent sparse" in each], float(worker.metrics(is_due=True)["density"])


def test_that_little_can_be_compressed_is_told_with_the_numbers() -> None:
    numels = {name: p.numel() for name, p in Tiny().named_parameters() if p.requires_grad}
    total, largest = sum(numels.values()), max(numels, key=numels.__getitem__)
    assert numels[largest] > total / 2
    for min_numel, exclude in ((total, []), (1, [largest])):
        sparse = [numel for name, numel in numels.items() if numel >= min_numel and name not in exclude]
        (first, density), (second, _) = run_ranks(what_stays_whole, 2, min_numel, exclude)
        share = sum(sparse) / total
        assert first[0].startswith(
            f"{len(sparse)} of {len(numels)} tensors, {share:.1%} of the {total:,} elements that are trained, are sent "
        )
        assert (len(first), second) == (1, [])
        assert density == pytest.approx(1 - share / 2)  # of sparse tensors a half is sent in the fourth step
        advice = "With a smaller min_numel or less exclude more" if exclude else "With a smaller min_numel more"
        assert advice in first[0]
        assert (f"exclude={exclude}" in first[0]) == bool(exclude)
    ((said, density), _) = run_ranks(what_stays_whole, 2, numels[largest], [])
    assert said == []
    assert density == pytest.approx(1 - numels[largest] / total / 2)


def warned_and_logged() -> tuple[list[str], list[str]]:
    strategy = make_strategy("dgc", exclude=["*"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logged = messages_of_fit(strategy, Tiny(functools.partial(torch.optim.Adam, lr=1e-3)))
    return [str(each.message) for each in caught if "sent sparse" in str(each.message)], logged


def test_that_nothing_can_be_compressed_is_a_warning() -> None:
    (warned, logged), (others, _) = run_ranks(warned_and_logged, 2)
    (message,) = warned
    assert others == []
    assert message.startswith("0 of ")
    assert "exclude=['*']" in message
    assert not any("beta1" in each for each in logged)
