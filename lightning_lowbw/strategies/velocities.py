"""Gathers the velocities of deep gradient compression, of which each rank of a node keeps a part."""

from __future__ import annotations

from typing import Any

from lightning_lowbw.engine.gradients import GradientWorker
from lightning_lowbw.engine.worker import Worker


def with_whole_velocities(state: dict[str, Any], worker: Worker) -> dict[str, Any]:
    """Return an optimizer's `state_dict` with whole velocities, so that any strategy can resume from it.

    Collective: the ranks of a node.
    """
    if not isinstance(worker, GradientWorker):
        return state
    whole = worker.whole_momentum()
    entries = dict(state["state"])  # new dictionaries: those of the state are the optimizer's own
    parameters = (p for group in worker.optimizer.param_groups for p in group["params"])
    for index, parameter in enumerate(parameters):
        if parameter in whole:
            entries[index] = {**entries.get(index, {}), worker.velocities.key: whole[parameter]}
    return {**state, "state": entries}


def leave_whole_velocities_(worker: Worker) -> None:
    """Put whole velocities into the optimizer at the end of a fit.

    In place:
        The optimizer's state.

    Collective: the ranks of a node.
    """
    if isinstance(worker, GradientWorker):
        for parameter, velocity in worker.whole_momentum().items():
            worker.optimizer.state[parameter][worker.velocities.key] = velocity
