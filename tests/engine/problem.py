"""A training problem whose gradients are known in closed form, for loops in plain PyTorch on real ranks.

The loss of a rank in a step is ``sum_i <c_i, w_i> + |w_i|^2 / 2`` with random c of the rank, the step and the tensor;
its gradient is c + w.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning_lowbw.engine.plain_loop import wrap_step
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_lowbw import DGC, Method
from lightning_lowbw.engine.gradients import GradientWorker
from lightning_lowbw.engine.worker import Worker
from tests.oracle import OracleDGC

Shape = tuple[int, ...]
Parameters = dict[str, Parameter]
Nodes = tuple[tuple[int, ...], ...]  # the ranks of each
Result = TypeVar("Result")

FLAT: Nodes = ((0,), (1,))  # nodes of one rank are one level
NODES: dict[str, Nodes] = {
    "blocks": ((0, 1), (2, 3)),
    "strided": ((0, 2), (1, 3)),
    "crossed": ((0, 3), (1, 2)),  # the second ranks are in another order than the first
    "three nodes": ((0, 1), (2, 3), (4, 5)),
    "three each": ((0, 1, 2), (3, 4, 5)),
}

AWKWARD: dict[str, Shape] = {
    "scalar": (),
    "single": (1,),
    "empty": (0,),
    "empty_matrix": (3, 0),
    "vector": (17,),
    "cube": (5, 6, 7),
    "conv": (8, 4, 3, 3),  # channels_last
    "pointwise": (12, 10, 1, 1),  # channels_last and contiguous at once
    "matrix": (30, 20),
    "transposed": (20, 30),  # strides of its transpose
}


EXACT: dict[str, Any] = {"selection": "exact", "value_dtype": "float32"}  # as the equations have it
DENSE_THEN_SPARSE = DGC(rampup_begin_step=2, rampup_step=4, sparsity=[0.5, 0.9], min_numel=1, **EXACT)
DENSITIES = {step: DENSE_THEN_SPARSE.when.density(step) for step in range(8)}
CLOSE: dict[str, Any] = {"rtol": 2e-5, "atol": 5e-6}  # after the steps of DENSITIES in float32


def message_of(function: Callable[[], object], kind: type[Exception]) -> str | None:
    """Return what `function` says when it raises `kind`; None where it does not."""
    try:
        function()
    except kind as error:
        return str(error)
    return None


def each(function: Callable[..., Result], cases: Iterable[tuple[Any, ...]]) -> list[Result]:
    """Return the results of all cases; on ranks, so that all of them are one start."""
    return [function(*case) for case in cases]


def node_of(rank: int, nodes: Nodes) -> int:
    """Return the number of a rank's node."""
    return next(number for number, node in enumerate(nodes) if rank in node)


def mean_of_nodes(parts: Sequence[Tensor], nodes: Nodes) -> Tensor:
    """Return the mean over the nodes of a tensor of which each rank has its part, flat, in the order of the ranks."""
    return torch.stack([torch.cat([parts[rank] for rank in node]) for node in nodes]).mean(0)


def make_weight(name: str, shape: Shape, dtype: torch.dtype = torch.float32) -> Tensor:
    weight = torch.randn(shape, generator=_generator(name, 0, 0)).to(dtype)
    if name == "transposed":
        return weight.t().contiguous().t()
    return weight.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else weight


def in_memory(tensor: Tensor, name: str) -> Tensor:
    """Return the elements of a tensor, flat, in the order in which those of `make_weight` lie in memory."""
    if tensor.dim() == 4:
        tensor = tensor.permute(0, 2, 3, 1)
    return (tensor.t() if name == "transposed" else tensor).reshape(-1)


def from_memory(flat: Tensor, name: str, shape: Shape) -> Tensor:
    """Return what `in_memory` was made of: contiguous."""
    numbers = in_memory(torch.arange(flat.numel()).view(shape), name)
    return torch.empty_like(flat).index_copy_(0, numbers, flat).view(shape)


def make_parameters(shapes: Mapping[str, Shape], dtype: torch.dtype = torch.float32) -> Parameters:
    return {name: Parameter(make_weight(name, shape, dtype)) for name, shape in shapes.items()}


def coefficients(name: str, like: Tensor, rank: int, step: int) -> Tensor:
    return torch.randn(like.shape, generator=_generator(name, rank + 1, step)).to(like.dtype)


def _generator(name: str, rank: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(sum(map(ord, name)) * 1_000_003 + rank * 1009 + step)


def weights_of(parameters: Parameters) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


class _Loss(torch.autograd.Function):
    """What a tensor adds to the loss. Its gradient alone is computed: by ten operations a backward took as long as the
    rest of a step."""

    @staticmethod
    def forward(context: Any, weight: Tensor, c: Tensor) -> Tensor:
        context.gradient = c + weight
        return weight.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(context: Any, sign: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return context.gradient * sign, None


def loss_of(parameters: Mapping[str, Parameter], step: int, unused: Collection[str] = ()) -> Tensor:
    """Return this rank's loss in a step, whose gradients alone are right."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    loss = torch.zeros(())
    for name, parameter in parameters.items():
        if name not in unused and parameter.requires_grad:
            loss = loss + _Loss.apply(parameter, coefficients(name, parameter, rank, step))
    return loss


def backward(parameters: Mapping[str, Parameter], step: int, unused: Collection[str] = (), sign: float = 1.0) -> None:
    """Compute this rank's own gradients; those of `unused` stay None."""
    loss = loss_of(parameters, step, unused)
    if loss.requires_grad:
        (sign * loss).backward()


def make_gradient_worker(method: Method, optimizer: Optimizer, parameters: Parameters) -> GradientWorker:
    """Return a worker as a strategy makes it."""
    worker = method.make_worker(optimizer, parameters.items(), method.make_peers())
    assert isinstance(worker, GradientWorker)
    wrap_step(worker)
    return worker


def take_step(
    worker: Worker, parameters: Mapping[str, Parameter], step: int, unused: Collection[str] = (), sign: float = 1.0
) -> None:
    """The loop that the documentation shows."""
    worker.optimizer.zero_grad()
    backward(parameters, step, unused, sign)
    with worker.stepping():
        worker.exchange()
        worker.optimizer.step()


def by_the_paper(
    name: str,
    shape: Shape,
    oracle: OracleDGC,
    densities: Mapping[int, float],
    *,
    before_step: Callable[[OracleDGC, int], None] | None = None,
    users: Iterable[int] | None = None,
) -> Tensor:
    """Train one tensor by the oracle: at each step of `densities`; on ranks that are no `users` its gradient is 0."""
    weight = make_weight(name, shape)
    for step, density in densities.items():
        if before_step is not None:
            before_step(oracle, step)
        gradients = [[coefficients(name, weight, rank, step) + weight] for rank in range(oracle.num_ranks)]
        if users is not None:
            gradients = [g if rank in users else [torch.zeros_like(weight)] for rank, g in enumerate(gradients)]
        if density == 1.0:
            oracle.dense_step([weight], gradients)
        else:
            oracle.sparse_step([weight], gradients, density)
    return weight


class Said(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
