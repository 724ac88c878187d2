"""Saves and loads the state of a worker: tensors on the CPU and primitives.

A rank's own state is keyed by the names of parameters. What it keeps back is that of its part of each tensor: ranks of
the same world take theirs as it is, others cut theirs out of the mean over the participants of the whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_lowbw.engine.average import Average
from lightning_lowbw.engine.late_faults import forget_late_faults
from lightning_lowbw.engine.orders import Reordering
from lightning_lowbw.errors import WITHOUT_RESIDUALS, ConfigurationError
from lightning_lowbw.ops.layout import order_of
from lightning_lowbw.ops.reference import as_real, is_finite
from lightning_lowbw.where.topology import part_of

if TYPE_CHECKING:
    from lightning_lowbw.engine.gradients import GradientWorker
    from lightning_lowbw.engine.replicas import ReplicaWorker
    from lightning_lowbw.engine.worker import Worker

Named = dict[str, Tensor]


# Parts of tensors -----------------------------------------------------------------------------------------------------


def _saved(tensors: Mapping[str, Tensor]) -> Named:
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


def _rank(worker: Worker) -> tuple[int, int]:
    """Return which rank this is among those that communicate, of how many."""
    return worker.peers.rank, worker.peers.num_ranks


def _local_rank(worker: Worker) -> tuple[int, int]:
    """Return which part of every tensor this rank keeps: its local rank, of how many."""
    return worker.peers.local_rank, worker.peers.num_local_ranks


def own_part(kept: Tensor, numel: int, of: tuple[int, int]) -> Tensor:
    """Return a rank's part of what a state has of a tensor with so many elements, flat; a merged state has it whole."""
    part = part_of(numel, *of)
    return kept if kept.numel() == part.stop - part.start else kept[part]


def _nodes(worker: Worker) -> list[list[int]] | None:
    """Return the ranks of each node, which determine who keeps which part; None when flat."""
    topology = worker.peers.topology
    return None if topology is None else [list(node) for node in topology.nodes]


def _check_origin(worker: Worker, state: Mapping[str, Any]) -> None:
    """Check on all ranks that a state is of this version, and that its parts are those of these nodes."""
    if "nodes" not in state:
        raise ConfigurationError(
            "The state was written by an earlier version of lightning_lowbw, which has another format. Resume with "
            "that version, or begin a new run with the weights alone."
        )
    for key in ("residuals", "velocities", "rounded"):
        for name, kept in state.get(key, {}).items():
            if not is_finite(kept):
                raise ConfigurationError(
                    f"The state's {key} of {name!r}, which this rank has kept back for later steps, contain inf or "
                    "NaN in the checkpoint itself. Resume from an earlier checkpoint, or begin a new run with the "
                    "weights alone."
                )
    is_merged, nodes = state["local_rank"] is None, _nodes(worker)
    rank, own = state.get("rank"), _rank(worker)
    keeps = any(state.get(key) for key in ("residuals", "rounded", "velocities", "local", "own"))
    keeps = keeps or bool(state.get("optimizer", {}).get("state"))
    if keeps and not is_merged and rank is not None and tuple(rank) != own:
        raise ConfigurationError(
            f"The state is that of rank {rank[0]} of {rank[1]}, and this is rank {own[0]} of {own[1]}: what a rank has "
            "kept back is its own. Let each rank save worker.state_dict() in a file of its own and load that; for "
            "another number of ranks load what lightning_lowbw.merge_states makes of the states of all."
        )
    if not is_merged and state["nodes"] != nodes and (state["residuals"] or state["rounded"]):
        raise ConfigurationError(
            f"The state is that of a rank {_on(state['nodes'])}, and the ranks are now {_on(nodes)}, where each keeps "
            "other parts of the tensors. Resume with the topology of that run, or load what "
            "lightning_lowbw.merge_states makes of the states of all its ranks."
        )


def _on(nodes: list[list[int]] | None) -> str:
    return "without nodes" if nodes is None else f"on nodes {nodes}"


# Gradients ------------------------------------------------------------------------------------------------------------


def of_gradients(worker: GradientWorker) -> dict[str, Any]:
    """Return what differs from rank to rank, and the step."""
    parameters, optimizer = worker.by_name(), worker.optimizer
    kept = {name: as_real(parameter) for name, parameter in parameters.items() if worker.keeps(name)}
    of_sparse = {name: parameters[name] for name in worker.residuals if name in parameters}  # not what was taken out
    velocities = {name: worker.velocities.saved(parameter) for name, parameter in of_sparse.items()}
    local = {
        name: _saved({k: optimizer.state[p][k] for k in worker.correction.local_keys(p)})
        for name, p in of_sparse.items()
    }
    unsent, rounded = (
        {} if each is None else {name: kept for name, kept in each.residuals.state().items() if name in parameters}
        for each in (worker.sparse, worker.narrow)
    )
    return {
        "step": worker.step,
        "small_numel": worker.small_numel,
        "rank": _rank(worker),
        "local_rank": _local_rank(worker),
        "nodes": _nodes(worker),
        "num_participants": worker.peers.num_participants,
        "correction": worker.correction.kind,
        "shapes": {name: tuple(each.shape) for name, each in kept.items()},
        "orders": {name: order_of(each) for name, each in kept.items()},
        "residuals": unsent,
        "velocities": _saved({name: velocity for name, velocity in velocities.items() if velocity is not None}),
        "rounded": rounded,
        "local": local,
        "exchange": None if worker.sparse is None else worker.sparse.state_dict(),
        "torn": worker.torn,
    }


def load_gradients(worker: GradientWorker, state: Mapping[str, Any]) -> None:
    """Take over `of_gradients` of the same ranks, or `merge_states`; see `GradientWorker.load_state_dict`."""
    _check_origin(worker, state)
    worker.is_compared = False
    parameters, kind = worker.by_name(), worker.correction.kind
    if state["residuals"] and state["correction"] != kind:
        raise ConfigurationError(
            f"The checkpoint keeps what {state['correction']!r} had not sent, and to {worker.method.what} with "
            f"{type(worker.optimizer).__name__}, which is {kind!r}, that means something else. Resume with the method, "
            "the optimizer and the correction that it was trained with (of TopK, correction='auto' is 'momentum' for "
            f"SGD, 'own_variance' for Adam and AdamW), or {WITHOUT_RESIDUALS}."
        )
    for name, shape in state["shapes"].items():
        there = tuple(as_real(parameters[name]).shape) if name in parameters else None
        if there != tuple(shape):
            has = "no such parameter" if there is None else f"shape {there}"
            raise ConfigurationError(
                f"The checkpoint keeps a residual of shape {tuple(shape)} for {name!r}; the optimizer has {has}. "
                f"Resume with the model that was saved, or {WITHOUT_RESIDUALS}."
            )
    if (state["residuals"] and worker.sparse is None) or (state["rounded"] and worker.narrow is None):
        raise ConfigurationError(
            f"The checkpoint keeps gradients that have not been sent, and with {worker.method.what} they never would "
            f"be. Resume with the payload of that run, or {WITHOUT_RESIDUALS}."
        )
    to_order = Reordering(worker, parameters, state)

    def own(name: str, kept: Tensor) -> Tensor:
        return own_part(to_order(name, kept), as_real(parameters[name]).numel(), _local_rank(worker))

    worker.step, worker.small_numel = state["step"], state["small_numel"]
    worker.velocities.clear()
    forget_late_faults(worker)
    if worker.narrow is not None:
        rounded = {name: own(name, kept) for name, kept in state["rounded"].items()}
        worker.narrow.residuals.load(rounded, worker.device)
    if worker.sparse is not None:
        residuals = {name: own(name, kept) for name, kept in state["residuals"].items()}
        worker.sparse.residuals.load(residuals, worker.device)
        if state["exchange"] is not None:
            worker.sparse.load_state_dict(state["exchange"])
    for name, kept in state["velocities"].items():
        worker.velocities.load(parameters[name], own(name, kept))
    for name, tensors in state["local"].items():
        for key, value in tensors.items():
            of_parameter = worker.optimizer.state.get(parameters[name], {})
            if key in of_parameter:  # of G^2 / N, where N may be another now
                factor = state["num_participants"] / worker.peers.num_participants
                of_parameter[key].copy_(value.to(of_parameter[key].device) * factor)


# Replicas -------------------------------------------------------------------------------------------------------------

COUNTERS = ("step", "steps_since_average", "num_averages", "num_samples")


def of_replica(worker: ReplicaWorker) -> dict[str, Any]:
    """Return a rank's weights, the optimizer's state, and where it is in the interval."""
    averaging, worker.ending.step = worker.averaging, None  # whoever has the state can go on
    worker.consensus_view.restart()
    own = {} if worker.parameters_agree else _saved(worker.consensus_view.own_tensors())
    return {
        **{name: getattr(worker, name) for name in COUNTERS},
        "small_numel": worker.small_numel,
        "torn": worker.torn,
        **worker.phase.state_dict(),
        "loss": worker.loss.state_dict(),
        "own": own,
        "rank": _rank(worker),
        "local_rank": _local_rank(worker),
        "nodes": _nodes(worker),
        "buffers": _saved(averaging.buffers.start),
        "start": _saved({worker.name_of(p): start for p, start in averaging.start.items()}),
        "velocity": _saved({worker.name_of(p): u for p, u in averaging.velocity.items()}),
        "residuals": {} if averaging.sparse is None else averaging.sparse.residuals.state(),
        "rounded": {} if averaging.narrow is None else averaging.narrow.residuals.state(),
        "exchange": None if averaging.sparse is None else averaging.sparse.state_dict(),
        "delay": worker.delay.state_dict(),
        "fragments": [
            {
                "names": [worker.name_of(p) for p in fragment.parameters],
                "steps": fragment.steps,
                "moved": [worker.name_of(p) for p in fragment.moved],
                "work": None if fragment.work is None else _of_work(worker, fragment.work),
            }
            for fragment in worker.fragments
        ],
        "optimizer": _cpu(worker.optimizer.state_dict()),
    }


def _of_work(worker: ReplicaWorker, work: Average) -> dict[str, Any]:
    """Return the state of an average that has been begun, once it has arrived: what it is decoded with is at hand."""
    with worker.averaging.offload.at_hand(worker.device):
        return work.state_dict(worker.name_of)


def load_replica(worker: ReplicaWorker, state: Mapping[str, Any]) -> None:
    """Take over `of_replica` of the same ranks, or `merge_states`; see `ReplicaWorker.load_state_dict`."""
    averaging, parameters, device = worker.averaging, worker.by_name(), worker.device
    before = worker.small_numel
    worker.small_numel = state["small_numel"]  # which tells what is sent
    try:
        _check_replica(worker, state)
    except ConfigurationError:
        worker.small_numel = before
        raise
    forget_late_faults(worker)
    targets = worker.consensus_view.tensors()
    for name, own in state["own"].items():
        targets[name].copy_(own)
    for name in COUNTERS:
        setattr(worker, name, state[name])
    worker.phase.load_state_dict(state)
    worker.loss.load_state_dict(state["loss"], device)
    averaging.buffers.start = {name: start.to(device, copy=True) for name, start in state["buffers"].items()}
    averaging.start = {parameters[name]: start.to(device, copy=True) for name, start in state["start"].items()}
    averaging.velocity = {parameters[name]: u.to(device, copy=True) for name, u in state["velocity"].items()}
    for exchange, unsent in ((averaging.sparse, state["residuals"]), (averaging.narrow, state["rounded"])):
        if exchange is not None:
            numels = {name: as_real(parameters[name]).numel() for name in unsent}
            parts = {name: own_part(kept, numels[name], _local_rank(worker)) for name, kept in unsent.items()}
            exchange.residuals.load(parts, device)
    if averaging.sparse is not None and state["exchange"] is not None:
        averaging.sparse.load_state_dict(state["exchange"])
    for fragment, saved in zip(worker.fragments, state["fragments"], strict=True):
        fragment.parameters = [parameters[name] for name in saved["names"]]
        fragment.steps = saved["steps"]
        fragment.moved = {parameters[name]: None for name in saved["moved"]}
        fragment.work = None if saved["work"] is None else Average.from_state(saved["work"], parameters, device)
    worker.delay.load_state_dict(state["delay"])
    worker.optimizer.load_state_dict(state["optimizer"])


def _check_replica(worker: ReplicaWorker, state: Mapping[str, Any]) -> None:
    _check_origin(worker, state)
    worker.is_compared = False
    if len(state["fragments"]) != len(worker.fragments):
        raise ConfigurationError(
            f"The checkpoint has been written with num_fragments={len(state['fragments'])}, and this is "
            f"{len(worker.fragments)}. Resume with the same num_fragments, or {WITHOUT_RESIDUALS}."
        )
    if worker.averaging.needs_start and state["own"] and not state["start"]:
        raise ConfigurationError(
            "The checkpoint was written between two averages, and not with an outer optimizer, a value_dtype or a "
            "compression, which need the last consensus. Resume without these, from a checkpoint written after an "
            f"average, or {WITHOUT_RESIDUALS}."
        )
    has_no_averages = worker.peers.num_participants == 1 or worker.when.schedule.is_always_synchronous
    if state["own"] and worker.peers.num_ranks > 1 and has_no_averages:
        raise ConfigurationError(
            "The state was written between two averages, where each rank has weights of its own, and here no average "
            f"would ever make them equal: {worker.method}. Resume with the schedule and the topology of that run, or "
            "load what lightning_lowbw.merge_states makes of the states of all its ranks."
        )
    targets, parameters, averaging = worker.consensus_view.tensors(), worker.by_name(), worker.averaging
    shapes = {name: (own.shape, targets.get(name)) for name, own in state["own"].items()}
    for name, start in state["start"].items():
        parameter = parameters.get(name)
        shapes[name] = start.shape, parameter if parameter is None else as_real(parameter)
    for name, (shape, target) in shapes.items():
        if target is None or target.shape != shape:
            raise ConfigurationError(
                f"The checkpoint has {name!r} of shape {tuple(shape)}; this model has not. Resume with the model it "
                f"was written with, or {WITHOUT_RESIDUALS}."
            )
    for name in (name for fragment in state["fragments"] for name in fragment["names"]):
        if name not in parameters:
            raise ConfigurationError(
                f"The checkpoint has {name!r}, and this optimizer has no such parameter. Resume with the model it "
                f"was written with, or {WITHOUT_RESIDUALS}."
            )
    for exchange, unsent in ((averaging.sparse, state["residuals"]), (averaging.narrow, state["rounded"])):
        for name, residual in unsent.items():
            keeps = exchange is not None and averaging.takes(parameters[name])
            if not keeps and residual.any():
                raise ConfigurationError(
                    f"The checkpoint keeps changes of {name!r} ({residual.numel()} elements) that have not been sent, "
                    f"and with {worker.method.what} they never would be. Resume with the compression of that run, or "
                    f"{WITHOUT_RESIDUALS}."
                )


# Equal on all ranks ---------------------------------------------------------------------------------------------------


def equal_state(worker: Any) -> dict[str, Any]:
    """Return what is the same on all ranks: numbers, for the checkpoint itself."""
    state: dict[str, Any] = {"step": worker.step, "small_numel": worker.small_numel}
    if worker.method.averages_weights:
        state |= {**worker.phase.state_dict(), "num_averages": worker.num_averages}
    return state


def load_equal_state(worker: Any, state: Mapping[str, Any]) -> None:
    """Take over what `equal_state` returned."""
    worker.step, worker.small_numel = state["step"], state["small_numel"]
    if worker.method.averages_weights:
        worker.phase.load_state_dict(state)


def _cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)  # a subclass (an 8-bit state) may not know `clone`
    if isinstance(value, dict):
        return {key: _cpu(item) for key, item in value.items()}
    if getattr(value, "shape", None) == ():  # of numpy, as a user's formula returns; a shard with one does not load
        return value.item()
    return type(value)(map(_cpu, value)) if type(value) in (list, tuple) else value
