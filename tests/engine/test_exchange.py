"""How the selected elements are summed: the same sums whichever way, and the cheapest way by itself."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from lightning_lowbw.engine.sparse_exchange import predict
from torch import Tensor

from lightning_lowbw import DGC
from lightning_lowbw.engine.gradients import GradientWorker
from lightning_lowbw.what.top_k import TopK
from lightning_lowbw.where.agreement import digest
from lightning_lowbw.where.ledger import all_gather_bytes
from lightning_lowbw.where.link import EXCHANGES, Link
from tests.engine.problem import AWKWARD, backward, each, from_memory, make_parameters
from tests.ranks import run_ranks

SHAPES = {**AWKWARD, "large": (331, 257)}
STEPS = 6


def train(
    exchange: str, sparsity: list[float], value_dtype: str, steps: int = STEPS, shapes: Any = SHAPES
) -> dict[str, Any]:
    parameters = make_parameters(shapes)
    sgd = torch.optim.SGD(parameters.values(), lr=0.05, momentum=0.9)
    method = DGC(
        sparsity=sparsity,
        rampup_step=steps if len(sparsity) > 1 else 1,
        min_numel=1,
        exchange=exchange,
        value_dtype=value_dtype,
    )
    worker = method.attach(sgd, parameters.items())
    assert isinstance(worker, GradientWorker)
    produced = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in parameters.items()}
    applied = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in parameters.items()}
    chosen, sent = [], []
    for step in range(steps):
        sgd.zero_grad()
        backward(parameters, step)
        before = {name: (p.grad.clone(), u_of(sgd, p), p.grad) for name, p in parameters.items()}  # type: ignore[union-attr]
        sent_before = worker.peers.ledger.sent_bytes
        with worker.stepping():
            worker.exchange()
            for name, parameter in parameters.items():
                gradient, velocity, _ = before[name]
                produced[name] += 0.9 * velocity.double() + gradient.double()
                applied[name] += parameter.grad.double()  # type: ignore[union-attr]
            sgd.step()
        sent.append(worker.peers.ledger.sent_bytes - sent_before)
        assert worker.sparse is not None
        chosen.append(worker.sparse._last_kind)
    return {
        "digest": digest(parameters.values()),
        "weights": {name: p.detach().clone() for name, p in parameters.items()},
        "produced": produced,
        "applied": applied,
        "residuals": {name: from_memory(v, name, parameters[name].shape) for name, v in worker.residuals.items()},
        "chosen": chosen,
        "sent": sent,
    }


def u_of(sgd: torch.optim.Optimizer, parameter: Tensor) -> Tensor:
    velocity = sgd.state[parameter].get("momentum_buffer")
    return torch.zeros_like(parameter) if velocity is None else velocity.clone()


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_nothing_is_lost_and_replicas_are_equal(num_ranks: int) -> None:
    """What was applied, and 1/N of what is kept, is the mean of all that the ranks have made; in each exchange."""
    cases = [(exchange, [0.9], "float32") for exchange in EXCHANGES]
    cases += [(exchange, [0.9], "int4") for exchange in EXCHANGES if exchange != "dense"]  # which sums float32
    by_case = dict(zip(map(str, cases), zip(*run_ranks(each, num_ranks, train, cases), strict=True), strict=True))
    for results in by_case.values():
        assert len({result["digest"] for result in results}) == 1
        for name, residual in results[0]["residuals"].items():
            kept = sum(result["residuals"][name].double() for result in results) / num_ranks
            made = sum(result["produced"][name] for result in results) / num_ranks
            torch.testing.assert_close(results[0]["applied"][name] + kept, made, rtol=1e-5, atol=1e-5)
            assert residual.abs().sum() > 0 or residual.numel() < 20
    gathered, dense = (by_case[str((exchange, [0.9], "float32"))][0] for exchange in ("all_gather", "dense"))
    for name, weight in gathered["weights"].items():  # the same elements are summed
        torch.testing.assert_close(dense["weights"][name], weight, rtol=1e-5, atol=1e-6)


def test_a_reduce_scatter_of_two_ranks_hands_out_all_sums() -> None:
    cases = [(exchange, [0.9], "float32", 1) for exchange in ("all_gather", "reduce_scatter")]
    gathered, scattered = run_ranks(each, 2, train, cases)[0]
    for name in ("large", "matrix"):
        weight = gathered["weights"][name]
        same = torch.isclose(scattered["weights"][name], weight, rtol=1e-5, atol=1e-6)
        assert float((~same).float().mean()) < 0.02  # except what did not fit an owner's row


def test_auto_takes_the_all_gather_without_measuring_where_it_moves_the_least() -> None:
    for result in run_ranks(train, 2, "auto", [0.9], "bfloat16"):
        assert result["chosen"] == ["all_gather"] * STEPS


def train_and_listen() -> tuple[list[str], list[str]]:
    lines: list[str] = []
    logger = logging.getLogger("lightning.pytorch.lightning_lowbw")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    # So large that what counts is the bytes, and not the rounds.
    return train("auto", [0.0625, 0.99], "float32", 4, {"large": (1200, 1000)})["chosen"], lines


def test_auto_measures_the_link_and_says_what_it_takes() -> None:
    """At a sparsity of 1/16 the elements of the other ranks, with positions, are more than a dense all-reduce."""
    results = run_ranks(train_and_listen, 4)
    assert len({tuple(chosen) for chosen, _ in results}) == 1
    chosen, lines = results[0]
    assert chosen[-1] == "all_gather"
    assert chosen[0] != "all_gather"
    assert any("dense" in line and "all-gather" in line and line.endswith(f": {chosen[0]}.") for line in lines)
    assert all(not said for _, said in results[1:])


@pytest.mark.parametrize("chunk", [None, 4096])
def test_what_is_predicted_is_what_is_sent(chunk: int | None) -> None:
    """With chunks as many elements are sent of the rest of a tensor as of a chunk."""
    payload, numels = TopK(chunk=chunk), [5000, 100_001]
    seconds = predict(payload, numels, 0.001, 4, Link(latency_s=0.0, bandwidth_bytes_per_s=1.0)).times_s
    assert seconds["all_gather"] == all_gather_bytes(payload.nbytes(numels, 0.001), 4)
