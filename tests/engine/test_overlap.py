"""Sparse tensors that are sent during backward: the same training, to the bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim import SGD

from lightning_lowbw import DGC, ConfigurationError, NonFiniteGradientError
from lightning_lowbw.engine import sparse_exchange
from lightning_lowbw.where.agreement import digest
from lightning_lowbw.where.link import Link
from lightning_lowbw.where.peers import make_peers
from tests.engine.problem import AWKWARD, NODES, backward, each, make_gradient_worker, make_parameters, message_of
from tests.ranks import run_ranks

SHAPES = {**AWKWARD, "large": (331, 257), "late": (300, 250)}
BUCKETS = (("late", "pointwise"), ("large", "bias", "matrix", "conv"))  # what is not in them follows after backward


def train(overlap: bool, value_dtype: str, selection: str) -> dict[str, Any]:
    parameters = make_parameters(SHAPES)
    sgd = SGD(parameters.values(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)
    method = DGC(
        rampup_begin_step=1,
        sparsity=[0.9],
        min_numel=100,
        value_dtype=value_dtype,
        selection=selection,
        overlap=overlap,
    )
    worker = make_gradient_worker(method, sgd, parameters)
    num_begun = []
    for step in range(6):
        sgd.zero_grad()
        backward(parameters, step)
        for bucket in BUCKETS:
            worker.begin([parameters[name] for name in bucket if name in parameters])
        num_begun.append(sum(len(slots) for slots, _ in worker.sparse_gradients.begun))
        with worker.stepping():
            worker.exchange()
            sgd.step()
        assert not worker.sparse_gradients.begun
    return {
        "digest": digest(parameters.values()),
        "residuals": digest([worker.residuals[name] for name in parameters if name in worker.residuals]),
        "begun": num_begun,
    }


def test_trains_to_the_bit_as_without() -> None:
    choices = [("float32", "exact"), ("bfloat16", "sampled")]
    cases = [(overlap, *choice) for choice in choices for overlap in (False, True)]
    first, second = run_ranks(each, 2, train, cases)
    for rank in (first, second):
        for plain, overlapped in zip(rank[::2], rank[1::2], strict=True):
            assert plain["begun"] == [0] * 6
            assert overlapped["begun"] == [0] + [5] * 5
            assert overlapped["digest"] == plain["digest"]
            assert overlapped["residuals"] == plain["residuals"]
    assert [result["digest"] for result in first] == [result["digest"] for result in second]


def poison(where: str) -> tuple[str | None, bool, str]:
    parameters = make_parameters({"large": (60, 50), "matrix": (30, 20), "bias": (7,)})
    sgd = SGD(parameters.values(), lr=0.05, momentum=0.9)
    worker = make_gradient_worker(DGC(sparsity=[0.9], min_numel=100, overlap=True), sgd, parameters)
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


def test_a_bad_gradient_enters_no_residual_and_is_told_on_all_ranks() -> None:
    names = ["large", "matrix", "bias"]
    for name, *results in zip(names, *run_ranks(each, 2, poison, [(name,) for name in names]), strict=True):
        assert len({digest for _, _, digest in results}) == 1
        for message, is_finite, _ in results:
            assert message is not None
            assert f"the gradient of '{name}' on rank 1 is not finite" in message
            assert "Nothing was exchanged" not in message
            assert is_finite


def misuse() -> dict[str, str | None]:
    messages = {}
    for kind in ("clip", "skip", "twice"):
        parameters = make_parameters({"large": (60, 50), "bias": (7,)})
        sgd = SGD(parameters.values(), lr=0.05)
        worker = make_gradient_worker(DGC(sparsity=[0.9], min_numel=100, overlap=True), sgd, parameters)
        backward(parameters, 0)
        worker.begin(parameters.values())
        attempts: dict[str, Callable[[], object]] = {
            "clip": lambda: worker.clip_factor,  # noqa: B023
            "skip": lambda: worker.exchange(skip_nonfinite=True),  # noqa: B023
            "twice": lambda: (backward(parameters, 1), worker.begin(parameters.values())),  # noqa: B023
        }
        messages[kind] = message_of(attempts[kind], ConfigurationError)
        with worker.stepping():
            worker.exchange()
    return messages


def test_what_needs_the_gradients_after_they_are_sent_is_refused() -> None:
    for messages in run_ranks(misuse, 2):
        for kind, words in (("clip", "clipping"), ("skip", "skip_nonfinite"), ("twice", "second backward")):
            assert words in (messages[kind] or "")


def attach_on_two_levels(choices: dict[str, Any]) -> str | None:
    parameters = make_parameters({"large": (60, 50)})
    sgd, peers = SGD(parameters.values(), lr=0.05), make_peers(NODES["blocks"])  # as "auto" may find them
    return message_of(lambda: DGC(**choices).make_worker(sgd, parameters.items(), peers), ConfigurationError)


def test_what_two_levels_do_not_have_is_refused() -> None:
    cases: list[dict[str, Any]] = [{"overlap": True}, {"exchange": "dense"}, {"exchange": "reduce_scatter"}]
    for messages in run_ranks(each, 4, attach_on_two_levels, [(choices,) for choices in cases]):
        for choices, message in zip(cases, messages, strict=True):
            assert "on two levels" in (message or "")
            assert next(iter(choices)) in (message or "")


def begin_first_on_another_device() -> list[torch.device]:
    """Return where the link is measured, before there are residuals, with parameters that are not on the CPU."""
    parameter, devices = torch.nn.Parameter(torch.empty(1200, 1000, device="meta")), list[torch.device]()

    def note(_: Any, device: torch.device) -> Link:
        devices.append(device)
        return Link(0.0, 1.0)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(sparse_exchange, "measure_link", note)
        # At a sparsity of 1/16 the elements of four ranks, with positions, are more than a dense all-reduce.
        method = DGC(sparsity=[0.0625], overlap=True)
        worker = make_gradient_worker(method, SGD([parameter], lr=0.5), {"p": parameter})
        parameter.grad = torch.empty_like(parameter)
        worker.begin([parameter])
    return devices


def test_the_link_is_measured_where_the_parameters_are() -> None:
    assert run_ranks(begin_first_on_another_device, 4) == [[torch.device("meta")]] * 4


def without_sparse_tensors() -> list[float]:
    parameter = torch.nn.Parameter(torch.ones(4))
    worker = make_gradient_worker(DGC(sparsity=[0.9], overlap=True), SGD([parameter], lr=0.5), {"p": parameter})
    parameter.grad = torch.full((4,), float(dist.get_rank()))
    worker.begin([parameter])
    worker.optimizer.step()
    return parameter.tolist()


def test_where_no_tensor_is_large_enough_nothing_is_begun() -> None:
    assert run_ranks(without_sparse_tensors, 2) == [[0.75] * 4] * 2
