"""Sparse tensors that are sent during backward: the same training, to the bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch.distributed as dist
from torch.optim import SGD

from lightning_lowbw import DGC, ConfigurationError, NonFiniteGradientError
from lightning_lowbw.where.agreement import digest
from tests.engine.problem import AWKWARD, backward, make_parameters
from tests.engine.test_dgc_failures import message_of
from tests.engine.test_two_levels import NODES, exchange_of
from tests.ranks import run_ranks

SHAPES = {**AWKWARD, "large": (331, 257), "late": (300, 250)}
BUCKETS = (("late", "pointwise"), ("large", "bias", "matrix", "conv"))  # what is not in them follows after backward


def train(overlap: bool, value_dtype: str, selection: str, exchange: str = "auto") -> dict[str, Any]:
    parameters = make_parameters(SHAPES)
    sgd = SGD(parameters.values(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)
    method = DGC(
        rampup_begin_step=1,
        sparsity=[0.9],
        min_numel=100,
        value_dtype=value_dtype,
        selection=selection,
        exchange=exchange,
        overlap=overlap,
    )
    worker = method.attach(sgd, parameters.items())
    num_begun = []
    for step in range(6):
        sgd.zero_grad()
        backward(parameters, step)
        for bucket in BUCKETS:
            worker.begin([parameters[name] for name in bucket if name in parameters])
        num_begun.append(sum(len(slots) for slots, _ in worker._begun))
        with worker.stepping():
            worker.exchange()
            sgd.step()
        assert not worker._begun
    return {
        "digest": digest(parameters.values()),
        "residuals": digest([worker.residuals[p] for p in parameters.values() if p in worker.residuals]),
        "begun": num_begun,
    }


@pytest.mark.parametrize(("value_dtype", "selection"), [("float32", "exact"), ("bfloat16", "sampled")])
def test_trains_to_the_bit_as_without(value_dtype: str, selection: str) -> None:
    plain = run_ranks(train, 2, False, value_dtype, selection)
    overlapped = run_ranks(train, 2, True, value_dtype, selection)
    for one, other in zip(plain, overlapped, strict=True):
        assert one["begun"] == [0] * 6
        assert other["begun"] == [0] + [5] * 5  # dense first
        assert other["digest"] == one["digest"] == plain[0]["digest"]
        assert other["residuals"] == one["residuals"]


def test_another_exchange_waits_for_the_end_of_backward() -> None:
    plain, overlapped = (run_ranks(train, 2, overlap, "float32", "exact", "dense") for overlap in (False, True))
    assert overlapped[0]["begun"] == [0] * 6
    assert len({result["digest"] for result in (*plain, *overlapped)}) == 1


def poison(where: str) -> tuple[str | None, bool, str]:
    parameters = make_parameters({"large": (60, 50), "matrix": (30, 20), "bias": (7,)})
    worker = DGC(sparsity=[0.9], min_numel=100, overlap=True).attach(
        SGD(parameters.values(), lr=0.05, momentum=0.9), parameters.items()
    )
    for step in range(3):
        worker.optimizer.zero_grad()
        backward(parameters, step)
        if step == 2 and dist.get_rank() == 1:
            parameters[where].grad.view(-1)[3] = math.nan  # type: ignore[union-attr]

        def take() -> None:
            with worker.stepping():
                worker.exchange()
                worker.optimizer.step()

        worker.begin([parameters["large"]])
        worker.begin([parameters["matrix"]])
        message = message_of(take, NonFiniteGradientError)
    kept = [*worker.residuals.values(), *(state["momentum_buffer"] for state in worker.optimizer.state.values())]
    return message, all(bool(each.isfinite().all()) for each in kept), digest(parameters.values())


@pytest.mark.parametrize("where", ["large", "matrix", "bias"])
def test_a_bad_gradient_enters_no_residual_and_is_told_on_all_ranks(where: str) -> None:
    results = run_ranks(poison, 2, where)
    assert len({digest for _, _, digest in results}) == 1
    for message, is_finite, _ in results:
        assert message is not None
        assert f"the gradient of '{where}' on rank 1 is not finite" in message
        assert "Nothing was exchanged" not in message
        assert is_finite


def misuse(kind: str) -> str | None:
    parameters = make_parameters({"large": (60, 50), "bias": (7,)})
    worker = DGC(sparsity=[0.9], min_numel=100, overlap=True).attach(
        SGD(parameters.values(), lr=0.05), parameters.items()
    )
    backward(parameters, 0)
    worker.begin(parameters.values())
    if kind == "clip":
        message = message_of(lambda: worker.exchange(clip=lambda: None), ConfigurationError)
    elif kind == "skip":
        message = message_of(lambda: worker.exchange(skip_nonfinite=True), ConfigurationError)
    else:
        backward(parameters, 1)
        message = message_of(lambda: worker.begin(parameters.values()), ConfigurationError)
    with worker.stepping():
        worker.exchange()
    return message


@pytest.mark.parametrize(
    ("kind", "words"), [("clip", "clipping"), ("skip", "skip_nonfinite"), ("twice", "second backward")]
)
def test_what_needs_the_gradients_after_they_are_sent_is_refused(kind: str, words: str) -> None:
    for message in run_ranks(misuse, 2, kind):
        assert message is not None
        assert words in message


def attach_on_two_levels(choices: dict[str, Any]) -> str | None:
    parameters = make_parameters({"large": (60, 50)})
    exchange = exchange_of(NODES["blocks"])
    sgd = SGD(parameters.values(), lr=0.05)
    return message_of(lambda: DGC(**choices).attach(sgd, parameters.items(), exchange), ConfigurationError)


@pytest.mark.parametrize("choices", [{"overlap": True}, {"exchange": "dense"}, {"exchange": "reduce_scatter"}])
def test_what_two_levels_do_not_have_is_refused(choices: dict[str, Any]) -> None:
    for message in run_ranks(attach_on_two_levels, 4, choices):
        assert message is not None
        assert "on two levels" in message
        assert next(iter(choices)) in message
