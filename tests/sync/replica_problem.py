"""Replicas in plain loops on real ranks, and their oracles: what the tests of local SGD have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_lowbw.comm.agreement import digest
from lightning_lowbw.comm.peers import part_of
from lightning_lowbw.compress.codec import make_value_format
from lightning_lowbw.method import Method
from lightning_lowbw.sync.local import LocalSync
from tests.local_oracle import OracleLocalSGD, OracleSparseLoCo, mean_of
from tests.sync.problem import (
    AWKWARD,
    Nodes,
    Parameters,
    Shape,
    coefficients,
    make_parameters,
    make_weight,
    weights_of,
)

STEPS = 14
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 2e-5}
OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": partial(torch.optim.AdamW, lr=0.05, eps=1e-3),
}


def gradient_of(name: str, weight: Tensor, rank: int, step: int) -> Tensor:
    return coefficients(name, weight, rank, step) + weight.detach()


# On ranks ----------------------------------------------------------------------------------------------------------


def attach(
    method: Method,
    optimizer: str = "sgd",
    shapes: Mapping[str, Shape] = AWKWARD,
    nodes: Nodes = (),
    named_buffers: Mapping[str, Tensor] | None = None,
) -> tuple[LocalSync, Parameters]:
    parameters = make_parameters(shapes)
    worker = method.attach(
        OPTIMIZERS[optimizer](parameters.values()),
        parameters.items(),
        topology=nodes or None,
        named_buffers=named_buffers,
    )
    assert isinstance(worker, LocalSync)
    return worker, parameters


def take_step(worker: LocalSync, parameters: Parameters, step: int) -> None:
    """A step in its explicit form, with gradients that are known in closed form."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            parameter.grad = gradient_of(name, parameter, rank, step)
    with worker.stepping():
        worker.exchange()
        worker.optimizer.step()


def train_on(worker: LocalSync, parameters: Parameters, steps: Iterable[int]) -> list[str]:
    """Take steps; return a digest of the weights after each."""
    digests = []
    for step in steps:
        take_step(worker, parameters, step)
        digests.append(digest(parameters.values()))
    return digests


def train(
    method: Method,
    optimizer: str = "sgd",
    *,
    nodes: Nodes = (),
    steps: int = STEPS,
    shapes: Mapping[str, Shape] = AWKWARD,
) -> dict[str, Any]:
    worker, parameters = attach(method, optimizer, shapes, nodes)
    digests = train_on(worker, parameters, range(steps))
    result = {
        "own": weights_of(parameters),
        "residuals": worker.state_dict()["residuals"],
        "fragments": [[worker.name_of(p) for p in fragment.parameters] for fragment in worker.fragments],
        "digests": digests,
        "sent": worker.peers.ledger.sent_bytes,
    }
    worker.finish()  # what has been begun, before the next function begins something
    return result


def set_weights(parameters: Parameters, weights: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])


# In one process ----------------------------------------------------------------------------------------------------


def by_oracle(name: str, groups: Sequence[Sequence[int]], optimizer: str, **choices: Any) -> OracleLocalSGD:
    """Train one tensor; each of the groups is a node whose ranks step together, or one rank."""
    start = make_weight(name, AWKWARD[name])
    oracle = OracleLocalSGD(start, len(groups), OPTIMIZERS[optimizer], **{"begin": 1, **choices})
    for step in range(STEPS):
        gradients = [
            mean_of([gradient_of(name, replica, rank, step) for rank in ranks])
            for ranks, replica in zip(groups, oracle.replicas, strict=True)
        ]
        oracle.take_step(gradients)
    return oracle


# Sparse ------------------------------------------------------------------------------------------------------------

CHUNK, DENSITY = 64, 1 / 16
SHAPES: dict[str, Shape] = {
    "matrix": (30, 50),  # 23 chunks, and 28 elements
    "conv": (8, 4, 3, 3),  # channels_last
    "transposed": (20, 30),
    "vector": (64,),
    "single": (1,),
    "scalar": (),
    "empty": (0, 3),
    "bias": (10,),
}
SPARSE: dict[str, Shape] = {name: shape for name, shape in SHAPES.items() if torch.Size(shape).numel() >= 64}
BASE: dict[str, Any] = {"density": DENSITY, "chunk": CHUNK, "min_numel": 64, "value_dtype": "float32"}


def with_base(choices: Mapping[str, Any]) -> dict[str, Any]:
    return {"begin_step": 0, **choices, "compression": {**BASE, **choices.get("compression", {})}}


def by_sparse_oracle(name: str, optimizer: str, groups: Sequence[Sequence[int]], **choices: Any) -> OracleSparseLoCo:
    """Each of the groups is a node, of which each rank keeps a part; gradients are summed as the wire does."""
    value_format = make_value_format(choices.pop("value_dtype", "float32"))
    is_per_tensor = choices.get("chunk", CHUNK) != CHUNK

    def quantise(values: Tensor) -> Tensor:
        return value_format.decode(value_format.encode(values, [values.numel()]), [values.numel()])

    oracle = OracleSparseLoCo(
        make_weight(name, SHAPES[name]),
        len(groups),
        OPTIMIZERS[optimizer],
        top=lambda numel: min(numel, max(1, round((numel if is_per_tensor else CHUNK) * DENSITY))),
        quantise=quantise,
        num_parts=len(groups[0]),
        **{"chunk": CHUNK, **choices},
    )
    for step in range(STEPS):
        gradients = []
        for ranks, replica in zip(groups, oracle.replicas, strict=True):
            by_rank = [gradient_of(name, replica, rank, step) / len(ranks) for rank in ranks]
            gradients.append(sum(by_rank[1:], start=by_rank[0]))
        oracle.take_step(gradients)
    return oracle


def check_sparse(
    results: Sequence[Mapping[str, Any]], optimizer: str, groups: Sequence[Sequence[int]], **choices: Any
) -> None:
    """Compare weights and residuals with the oracle, to the bit."""
    for name in SPARSE:
        oracle = by_sparse_oracle(name, optimizer, groups, **choices)
        assert oracle.rounds >= 2
        for number, ranks in enumerate(groups):
            for local_rank, rank in enumerate(ranks):
                assert torch.equal(results[rank]["own"][name], oracle.replicas[number].detach()), (name, rank)
                part = part_of(oracle.e[number].numel(), local_rank, len(ranks))
                # the residual of changes, which are minus the pseudo-gradients
                assert torch.equal(-results[rank]["residuals"][name], oracle.e[number][part]), (name, rank)
    assert set(results[0]["residuals"]) == set(SPARSE), "small tensors are averaged whole"
