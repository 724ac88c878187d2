"""Optimizers that outlive a fit: after sparse or local steps their states are each rank's own."""

from __future__ import annotations

import pickle
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Adam, Optimizer, RMSprop

from lightning_lowbw import ConfigurationError, DisagreementError
from lightning_lowbw.comm.agreement import digest
from tests.ranks import on_ranks
from tests.strategies.fits import At, Noted, gathered, refusal, same, train, weights, whole_weights
from tests.tiny import Tiny, make_data, sgd

STEPS = 4


class Keeps(Tiny):
    """Makes its optimizer once."""

    kept: Any = None

    def configure_optimizers(self) -> Optimizer:
        self.kept = self.kept or super().configure_optimizers()
        return self.kept


adam = partial(Adam, lr=1e-3)
Kept = partial(Keeps, adam)


def state_of(module: Any) -> list[Tensor]:
    states = module.kept.state.values() if module.kept else []
    return [getattr(tensor, "to_local", tensor.clone)().clone() for state in states for tensor in state.values()]


def interrupt(*_: Any) -> None:
    raise RuntimeError("in mid-fit")


@pytest.mark.fault
@pytest.mark.parametrize(
    ("first", "second", "num_ranks", "make", "stops"),
    [
        *[("dgc", "dense", 2, adam, False), ("dgc", "dgc", 2, adam, False), ("dgc", "dense", 2, sgd, True)],
        ("dgc, dense at first", "hierarchical on two levels", 4, adam, False),
        *[("local_sgd", "int8", 2, adam, False), ("local_sgd", "dense", 2, partial(RMSprop, lr=1e-3), False)],
        *[("diloco", "powersgd", 2, adam, False), ("post-local", "post-local", 2, adam, False)],
        ("post-local on two levels", "dgc on two levels", 4, adam, False),
        ("dgc on two levels", "post-local on two levels", 4, adam, False),
        ("dgc on two levels", "dense", 4, sgd, True),  # where the parts of a node's velocity are put together
        ("dgc on two levels", "dense", 4, adam, True),
        ("dgc, sharded", "post-local, sharded", 4, adam, False),
        ("post-local, sharded", "dgc, sharded", 4, adam, False),
    ],
)
@on_ranks()
def test_a_second_fit_begins_with_the_mean(first: str, second: str, num_ranks: int, make: Any, stops: bool) -> None:
    """Also after an exception, and with other states than Adam's."""
    # In no second fit the first two steps are local.
    model, after = Keeps(make), Noted(whole_weights)
    states = [Noted(state_of, hook) for hook in ("setup", "on_train_batch_start")]
    if stops:
        assert refusal(first, model, STEPS, error=RuntimeError, callbacks=[At(STEPS - 1, interrupt)]) == "in mid-fit"
    else:
        train(first, model, STEPS)
    train(second, model, 2, callbacks=[after, *states])
    assert len(same(after.values)) == 2
    before, begun = (each.values[0] for each in states)
    others = gathered((before, dist.get_rank()))
    if second.endswith("sharded"):  # those with the same shards
        others = [each for each in others if each[1] % 2 == dist.get_rank() % 2]
    means = [torch.stack(each).mean(0) for each in zip(*(state for state, _ in others), strict=True)]
    assert max(float((own - mean).abs().max()) for own, mean in zip(before, means, strict=True)) > 1e-5
    if not (stops and num_ranks == 4):
        assert max(float((own - mean).abs().max()) for own, mean in zip(begun, means, strict=True)) < 1e-6


@on_ranks(2)
def test_a_second_fit_of_a_trainer_and_a_state_that_one_rank_has() -> None:
    """Of a state that differs because a rank has loaded another one by hand."""
    model = Kept()
    trainer = train("dgc, dense at first", model, STEPS, max_epochs=1)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, make_data(2, STEPS))
    same(weights(model))
    model = Kept()
    optimizer = model.configure_optimizers()
    if dist.get_rank():
        optimizer.load_state_dict(trainer.optimizers[0].state_dict())
    message = refusal("int8", model, STEPS, error=DisagreementError)
    assert "optimizers' states at the start of the fit" in message
    assert "optimizer 0, wide.weight, exp_avg: rank 0 has nothing" in message


@pytest.mark.parametrize("first", ["dgc", "local_sgd"])
@on_ranks(2)
def test_stock_ddp_and_a_plain_loop_refuse_such_a_state(first: str) -> None:
    model = Kept()
    train(first, model, STEPS)
    optimizer = model.kept
    assert all((deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer)), deepcopy(model)))
    with pytest.raises(ConfigurationError) as caught:
        optimizer.step()
    for message in (refusal("ddp", model, 2), str(caught.value)):
        assert "The state of this Adam is each rank's own" in same(message)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.load_state_dict(gathered(optimizer.state_dict())[0])  # one for all
    train("ddp", model, 2)
    same(digest(model.parameters()))
    for name, steps in ((first, STEPS), ("dense", 2), ("ddp", 2)):  # the second one takes over
        train(name, model, steps)
    same(digest(model.parameters()))


@on_ranks(2)
def test_states_that_are_equal_are_left_alone() -> None:
    """Fits that leave the state equal are followed by any other."""
    for first in ("int8", "dense", "ddp"):
        model = Kept()
        for name in (first, "ddp", "dense", "post-local"):
            train(name, model, 2)
        same(digest(model.parameters()))
