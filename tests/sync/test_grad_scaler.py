"""Plain loops with a GradScaler: `scaler.step(optimizer)` is all there is to call, also where one rank overflows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim import SGD, AdamW, Optimizer

from lightning_lowbw import DGC, LocalSGD, Method, QuantizedGradients
from lightning_lowbw.comm.agreement import digest
from tests.sync.problem import AWKWARD, FLAT, NODES, Nodes, attach, backward, run_each

SHAPES = {name: AWKWARD[name] for name in ("matrix", "conv", "vector", "scalar")}
STEPS, OVERFLOW = 4, 2
SCALE = 2.0**7  # a power of two: scaled and unscaled gradients are the same bits
FUSED_ADAMW: Callable[..., Optimizer] = partial(AdamW, fused=True)
MOMENTUM: Callable[..., Optimizer] = partial(SGD, momentum=0.9)
CASES: dict[str, tuple[Method, Callable[..., Optimizer], Nodes]] = {
    "dense": (DGC(rampup_begin_step=100), FUSED_ADAMW, FLAT),
    "sparse": (DGC(sparsity=[0.9], min_numel=18), MOMENTUM, FLAT),
    "sparse, two levels": (DGC(sparsity=[0.9], min_numel=18), FUSED_ADAMW, NODES["strided"]),
    "narrow": (QuantizedGradients(), FUSED_ADAMW, FLAT),
    "synchronous": (LocalSGD(k_steps=2, begin_step=100), MOMENTUM, FLAT),
    "local": (LocalSGD(k_steps=2, begin_step=0), FUSED_ADAMW, FLAT),
    "local, two levels": (LocalSGD(k_steps=2, begin_step=0), MOMENTUM, NODES["strided"]),
}


def train(name: str, form: str) -> dict[str, Any]:
    """Rank 1 alone overflows in one step. "reference": without a scaler, and that step is left out by hand."""
    method, make_optimizer, nodes = CASES[name]
    worker, parameters = attach(method, partial(make_optimizer, lr=0.01), SHAPES, nodes)
    optimizer = worker.optimizer
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=1000, enabled=form != "reference")
    scales = []
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(parameters, step)
        overflows = step == OVERFLOW and dist.get_rank() == 1
        if form == "reference":
            with worker.stepping():
                if step != OVERFLOW:
                    worker.exchange()
                    optimizer.step()
                elif name.startswith("local"):  # only those who share the gradient of rank 1 leave it out
                    worker.exchange()
                    if dist.get_rank() not in next((node for node in nodes if 1 in node), (1,)):
                        optimizer.step()
            continue
        for parameter in parameters.values():
            if parameter.grad is not None:
                parameter.grad.mul_(SCALE if step == 0 else scaler.get_scale())
        if overflows:
            parameters["conv"].grad.fill_(torch.inf)  # type: ignore[union-attr]
        scaler.scale(torch.zeros(()))  # makes its tensors, as the scaling of a loss does
        if form != "scaled":
            scaler.unscale_(optimizer)
        if form == "exchanged by hand" and not worker.plan.is_local:
            worker.prepare()
            worker.exchange(skip_nonfinite=True)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return {"bits": digest(parameters.values()), "step": worker.step, "scales": scales}


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_rank_that_overflows_alone_leaves_no_rank_waiting(num_ranks: int) -> None:
    names = [name for name, (_, _, nodes) in CASES.items() if len(nodes) * len(nodes[0]) == num_ranks]
    forms = ("reference", "scaled", "unscaled by hand", "exchanged by hand")
    calls = {(name, form): partial(train, name, form) for form in forms for name in names}
    results = run_each(num_ranks, calls)
    for (name, form), ranks in results.items():
        expected = [rank["bits"] for rank in results[name, "reference"]]
        assert [rank["bits"] for rank in ranks] == expected, (name, form)
        assert all(rank["step"] == STEPS for rank in ranks), (name, form)
        if form != "reference":  # each rank's own scale
            assert ranks[1]["scales"] == [SCALE] * OVERFLOW + [SCALE / 2] * (STEPS - OVERFLOW), (name, form)
