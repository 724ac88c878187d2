"""A training problem whose gradients are known in closed form, in plain loops on real ranks and beside an oracle.

The loss of a rank in a step is ``sum_i <c_i, w_i> + |w_i|^2 / 2`` with random c of the rank, the step and the tensor;
its gradient is c + w.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, AdamW, Optimizer

from lightning_lowbw import DGC, Method
from lightning_lowbw.comm.agreement import digest
from lightning_lowbw.comm.peers import part_of
from lightning_lowbw.namespaces import LOGGER
from lightning_lowbw.payloads.codec import VALUE_FORMATS
from tests.oracle import OracleDGC, OracleLocalSGD, OracleSparseLoCo
from tests.ranks import run_ranks

Shape = tuple[int, ...]
Parameters = dict[str, Parameter]
Nodes = tuple[tuple[int, ...], ...]  # the ranks of each
Result = TypeVar("Result")

FLAT: Nodes = ((0,), (1,))  # nodes of one rank are one level
THREE: Nodes = ((0,), (1,), (2,))
NODES: dict[str, Nodes] = {
    "blocks": ((0, 1), (2, 3)),
    "strided": ((0, 2), (1, 3)),
    "crossed": ((0, 3), (1, 2)),  # the second ranks are in another order than the first
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


# As the equations have it.
EXACT: dict[str, Any] = {"value_dtype": "float32"}
DENSE_THEN_SPARSE = DGC(rampup_begin_step=2, rampup_step=4, sparsity=[0.5, 0.9], min_numel=1, **EXACT)
DENSITIES = {step: DENSE_THEN_SPARSE.when.density(step) for step in range(8)}
CLOSE: dict[str, Any] = {"rtol": 2e-5, "atol": 5e-6}  # after the steps of DENSITIES in float32


def message_of(function: Callable[[], object], kind: type[Exception] | tuple[type[Exception], ...]) -> str | None:
    """Return what `function` says when it raises `kind`; None where it does not."""
    try:
        function()
    except kind as error:
        return str(error)
    return None


def everywhere(value: Result) -> list[Result]:
    """Return what each rank has."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def same_on_all(value: Result) -> Result:
    """Return what this rank has, which all others must have, too."""
    values = everywhere(value)
    assert all(other == value for other in values), values
    return value


def run_each(num_ranks: int, calls: Mapping[Any, Callable[[], Any]]) -> dict[Any, list[Any]]:
    """Start the ranks once for several functions; return what each returns on each rank."""
    by_rank = run_ranks(_call_each, num_ranks, list(calls.values()))
    return {name: [of_rank[number] for of_rank in by_rank] for number, name in enumerate(calls)}


def _call_each(calls: Iterable[Callable[[], Any]]) -> list[Any]:
    return [call() for call in calls]


def node_of(rank: int, nodes: Nodes) -> int:
    """Return the number of a rank's node."""
    return next(number for number, node in enumerate(nodes) if rank in node)


def mean_of_nodes(parts: Sequence[Tensor], nodes: Nodes) -> Tensor:
    """Return the mean over the nodes of a tensor of which each rank has its part, flat, in the order of the ranks."""
    return torch.stack([torch.cat([parts[rank] for rank in node]) for node in nodes]).mean(0)


def make_weight(name: str, shape: Shape, dtype: torch.dtype = torch.float32) -> Tensor:
    weight = torch.randn(shape, generator=_generator(name, 0, 0), dtype=torch.float32).to(dtype)
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
    return torch.randn(like.shape, generator=_generator(name, rank + 1, step), dtype=torch.float32).to(like.dtype)


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


def take_step(worker: Any, parameters: Mapping[str, Parameter], step: int, unused: Collection[str] = ()) -> None:
    """The loop that the documentation shows, in its explicit form."""
    worker.optimizer.zero_grad()
    backward(parameters, step, unused)
    with worker.stepping():
        worker.exchange()
        worker.optimizer.step()


# One training on ranks ------------------------------------------------------------------------------------------------

Make = Callable[..., Optimizer]
Hook = Callable[[Any, Parameters, int], None]  # gets the worker, its parameters and the number of the step
MOMENTUM, ADAMW = partial(SGD, lr=0.05, momentum=0.9, weight_decay=0.01), partial(AdamW, lr=0.05, eps=1e-3)


def nothing(*_: Any) -> None:
    pass


def attach(
    method: Method,
    make: Make = MOMENTUM,
    shapes: Mapping[str, Shape] = AWKWARD,
    nodes: Any = (),
    dtype: torch.dtype = torch.float32,
) -> tuple[Any, Parameters]:
    """Return a worker and its parameters; without nodes on those of the method."""
    parameters = make_parameters(shapes, dtype)
    return method.attach(make(parameters.values()), parameters.items(), topology=nodes or None), parameters


def train(
    method: Method,
    make: Make = MOMENTUM,
    shapes: Mapping[str, Shape] = AWKWARD,
    nodes: Nodes = (),
    steps: int = 8,
    *,
    dtype: torch.dtype = torch.float32,
    sign: float = 1.0,
    before: Hook = nothing,
    after: Hook = nothing,
    look: Callable[[Any, Parameters], Any] = nothing,
) -> dict[str, Any]:
    """Train on ranks.

    Args:
        nodes: none are those of the method.
        sign: of the loss.
        before: called before each backward pass.
        after: called after each backward pass.
        look: called after each step.

    Returns:
        Weights, what this rank keeps, and the fragments; of each step a digest of the weights, the bytes sent up to it,
        and what `look` has returned.
    """
    worker, parameters = attach(method, make, shapes, nodes, dtype)
    digests, sent, seen = list[str](), list[int](), list[Any]()
    for step in range(steps):
        worker.optimizer.zero_grad()
        before(worker, parameters, step)
        backward(parameters, step, sign=sign)
        after(worker, parameters, step)
        worker.optimizer.step()
        digests.append(digest(parameters.values()))
        sent.append(worker.peers.ledger.sent_bytes)
        seen.append(look(worker, parameters))
    # Not those of the state, which has no averages in progress.
    residuals = worker.replica.residuals if method.when.averages_weights else worker.state_dict()["residuals"]
    kept = {name: residual.clone() for name, residual in residuals.items()}
    result = {"weights": weights_of(parameters), "residuals": kept, "digests": digests}
    fragments = worker.fragments if method.when.averages_weights else ()
    result["fragments"] = [[worker.params.name_of(p) for p in fragment.parameters] for fragment in fragments]
    worker.finish()  # what has been begun, before the next function begins something
    strides = {name: make_weight(name, shape).stride() for name, shape in shapes.items()}
    assert {name: parameter.stride() for name, parameter in parameters.items() if name in shapes} == strides
    return {**result, "sent": sent, "seen": seen}


# Beside oracles -------------------------------------------------------------------------------------------------------


def by_the_paper(
    shapes: Mapping[str, Shape],
    nodes: Nodes,
    densities: Mapping[int, float],
    *,
    min_numel: int = 1,
    clip: Mapping[str, float] = {},
    users: Collection[int] | None = None,
    make_oracle: Callable[..., Any] = OracleDGC,
    **options: Any,
) -> tuple[dict[str, Tensor], dict[tuple[str, int], Any]]:
    """Train in one process: each part of a tensor by one rank of the paper per node, with the node's mean gradient.

    Args:
        densities: of each step.
        clip: the whole gradient, by "norm" or "value".
        users: the ranks that use the tensors; the gradient of others is 0. None is all.
        **options: of the oracles.

    Returns:
        The weights; and the oracles, by name and local rank.
    """
    weights = {name: in_memory(make_weight(name, shape), name).clone() for name, shape in shapes.items()}
    oracles = {
        (name, local_rank): make_oracle(
            len(nodes), min_numel=1 if weight.numel() >= min_numel else weight.numel() + 1, **{"lr": 0.05, **options}
        )
        for name, weight in weights.items()
        for local_rank in range(len(nodes[0]))
    }

    def gradient_of(name: str, node: tuple[int, ...], step: int) -> Tensor:
        like = torch.empty(shapes[name])
        own = [in_memory(coefficients(name, like, rank, step), name) + weights[name] for rank in node]
        used = [g if users is None or rank in users else g * 0 for rank, g in zip(node, own, strict=True)]
        return sum(used, torch.zeros(())) / len(node)

    for step, density in densities.items():
        of_nodes = [{name: gradient_of(name, node, step) for name in weights} for node in nodes]
        if density == 1.0:  # clipped after the mean
            of_nodes = [{name: sum(each[name] for each in of_nodes) / len(nodes) for name in weights}] * len(nodes)  # type: ignore[misc]
        of_nodes = [_clipped(each, clip, 1.0 if density == 1.0 else len(nodes) ** 0.5) for each in of_nodes]
        for (name, local_rank), oracle in oracles.items():
            part = part_of(weights[name].numel(), local_rank, len(nodes[0]))
            own = [[each[name][part]] for each in of_nodes]
            if part.stop > part.start and density == 1.0:
                oracle.dense_step([weights[name][part]], own)
            elif part.stop > part.start:
                oracle.sparse_step([weights[name][part]], own, density)
    return {name: from_memory(weight, name, shapes[name]) for name, weight in weights.items()}, oracles


def _clipped(gradients: dict[str, Tensor], clip: Mapping[str, float], factor: float) -> dict[str, Tensor]:
    if "norm" in clip:
        norm = sum(float((g * g).sum()) for g in gradients.values()) ** 0.5
        gradients = {name: g * min(1.0, clip["norm"] * factor / (norm + 1e-6)) for name, g in gradients.items()}
    if "value" in clip:
        gradients = {name: g.clamp(-clip["value"], clip["value"]) for name, g in gradients.items()}
    return gradients


Signals = list[dict[str, Tensor]]  # of each node, flat, in the order in memory


def train_by_means(
    mean: Callable[[Signals], dict[str, Tensor]],
    make: Make,
    shapes: Mapping[str, Shape],
    nodes: Nodes,
    steps: int,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """Train in one process with the means that an oracle makes of the nodes' mean gradients; return the weights."""
    weights = {name: make_weight(name, shape, dtype) for name, shape in shapes.items()}
    optimizer = make(list(weights.values()))
    for step in range(steps):
        signals: Signals = []
        for node in nodes:
            own = [{name: coefficients(name, w, rank, step) + w for name, w in weights.items()} for rank in node]
            signals.append({name: in_memory(sum(each[name] for each in own) / len(node), name) for name in weights})  # type: ignore[arg-type]
        for name, flat in mean(signals).items():
            weights[name].grad = from_memory(flat, name, shapes[name]).to(dtype)
        optimizer.step()
    return weights


@contextlib.contextmanager
def listening(name: str = LOGGER, level: int = logging.NOTSET) -> Iterator[list[str]]:
    """Give what a logger says meanwhile."""
    said, handler, logger = list[str](), logging.Handler(), logging.getLogger(name)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    before = logger.level
    logger.setLevel(level or before)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


# Replicas -------------------------------------------------------------------------------------------------------------

STEPS = 14  # of a comparison of replicas


def set_weights(parameters: Parameters, weights: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])


def train_on(worker: Any, parameters: Parameters, steps: Iterable[int]) -> list[str]:
    """Take steps; return a digest of the weights after each."""
    digests = []
    for step in steps:
        take_step(worker, parameters, step)
        digests.append(digest(parameters.values()))
    return digests


def take_steps_of(oracle: Any, name: str, nodes: Nodes) -> Any:
    """Train one tensor; each node is a replica, whose ranks step together with gradients summed as the wire does."""
    for step in range(STEPS):
        gradients = []
        for ranks, replica in zip(nodes, oracle.replicas, strict=True):
            of_ranks = [(coefficients(name, replica, rank, step) + replica.detach()) / len(ranks) for rank in ranks]
            gradients.append(sum(of_ranks[1:], start=of_ranks[0]))
        oracle.take_step(gradients)
    return oracle


def by_replicas(name: str, nodes: Nodes, make: Make, **choices: Any) -> OracleLocalSGD:
    oracle = OracleLocalSGD(make_weight(name, AWKWARD[name]), len(nodes), make, **{"begin": 1, **choices})
    return take_steps_of(oracle, name, nodes)  # type: ignore[no-any-return]


CHUNK, DENSITY = 64, 1 / 16
OF_REPLICAS: dict[str, Shape] = {
    "matrix": (30, 50),  # 23 chunks, and 28 elements
    "conv": (8, 4, 3, 3),  # channels_last
    "transposed": (20, 30),
    "vector": (64,),
    "single": (1,),
    "scalar": (),
    "empty": (0, 3),
    "bias": (10,),
}
SPARSE = {name: shape for name, shape in OF_REPLICAS.items() if torch.Size(shape).numel() >= 64}
BASE: dict[str, Any] = {"density": DENSITY, "chunk": CHUNK, "min_numel": 64, "value_dtype": "float32"}


def with_base(choices: Mapping[str, Any]) -> dict[str, Any]:
    return {"begin_step": 0, **choices, "compression": {**BASE, **choices.get("compression", {})}}


def by_sparse_replicas(name: str, nodes: Nodes, make: Make, **choices: Any) -> OracleSparseLoCo:
    """As `by_replicas`; each rank of a node keeps a part."""
    value_format = VALUE_FORMATS[choices.pop("value_dtype", "float32")]

    def quantise(values: Tensor) -> Tensor:
        return value_format.decode(value_format.encode(values, [values.numel()]), [values.numel()])

    options = {"chunk": CHUNK, "density": DENSITY, "num_parts": len(nodes[0]), "quantise": quantise, **choices}
    oracle = OracleSparseLoCo(make_weight(name, OF_REPLICAS[name]), len(nodes), make, **options)
    return take_steps_of(oracle, name, nodes)  # type: ignore[no-any-return]


def check_sparse(results: Any, nodes: Nodes, make: Make, names: Iterable[str], **choices: Any) -> None:
    """Compare weights and residuals with the oracle, to the bit."""
    for name in names:
        oracle = by_sparse_replicas(name, nodes, make, **choices)
        assert oracle.rounds >= 2
        for number, ranks in enumerate(nodes):
            for local_rank, rank in enumerate(ranks):
                assert torch.equal(results[rank]["weights"][name], oracle.replicas[number].detach()), (name, rank)
                part = part_of(oracle.e[number].numel(), local_rank, len(ranks))
                # the residual of changes, which are minus the pseudo-gradients
                assert torch.equal(-results[rank]["residuals"][name], oracle.e[number][part]), (name, rank)
