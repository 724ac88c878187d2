"""A method is one value; a cell that makes no sense is refused with the reason."""

from __future__ import annotations

import json
import os
import pickle
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lightning_lowbw
from lightning_lowbw import (
    DGC,
    ConfigurationError,
    EveryK,
    EveryStep,
    Hierarchical,
    LocalSGD,
    Method,
    Quantized,
    TopK,
    Topology,
    Where,
)
from lightning_lowbw.presets import PRESETS, preset
from tests.ranks import on_ranks

NODES = ((0, 1), (2, 3))
BFLOAT16 = Where(topology="auto", inter_dtype="bfloat16")
METHODS = {
    "ddp": Method(),
    "bfloat16 gradients": Method(what=Quantized(value_dtype="bfloat16")),
    "int4 averages": Method(when=EveryK(k_steps=4), what=Quantized(value_dtype="int4")),
    "chunked gradients": Method(when=EveryStep(rampup_begin_step=10), what=TopK(chunk=64, density=0.1)),
    "nodes": DGC(sparsity=[0.75, 0.999], rampup_step=10, exclude=["*.bias"], topology=Topology(NODES)),
    "lists": Method(where=Where(topology=[[0, 1], [2, 3]], algorithm="leader", inter_dtype="bfloat16")),
    "ranks per node": DGC(topology=2),
    **{name: preset(name) for name in PRESETS},
}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_a_value(name: str) -> None:
    method = METHODS[name]
    assert method == replace(method)
    assert hash(method) == hash(replace(method))
    assert pickle.loads(pickle.dumps(method)) == method
    assert eval(repr(method), dict(vars(lightning_lowbw))) == method
    assert [other for other in METHODS.values() if other == method] == [method]
    description = method.describe()
    assert Method(**description) == method
    assert Method(**json.loads(json.dumps(description))) == method  # as YAML has it: lists, no tuples
    assert {key.split(".")[0] for key in method.settings()} == {"when", "what", "where"}


def test_a_topology_is_one_value_however_it_is_written() -> None:
    written: list[Any] = [NODES, [[0, 1], [2, 3]], [(1, 0), (3, 2)], Topology(NODES)]
    assert len({Method(where=topology) for topology in written}) == 1
    assert Method().at(NODES) == Method(where=NODES) != Method()  # type: ignore[arg-type]
    assert Method().at(None) == Method()


def test_replacing_knobs() -> None:
    method = DGC(sparsity=[0.9]).replace(rampup_begin_step=5, min_numel=7)
    assert (method.when, method.what) == (EveryStep(rampup_begin_step=5, sparsity=(0.9,)), TopK(min_numel=7))
    with pytest.raises(ConfigurationError, match=r"has no k_steps: choose among rampup_begin_step, .*density"):
        method.replace(k_steps=5)
    with pytest.raises(ConfigurationError, match="The method has no min_numel"):
        Method().replace(min_numel=5)


@pytest.mark.parametrize(
    "arguments",
    [
        {"where": BFLOAT16},
        {"where": Where(topology="auto", algorithm="leader")},
        {"when": EveryK(), "where": Where(topology=NODES, algorithm="leader")},
        {"what": TopK(), "when": EveryStep(rampup_begin_step=1), "where": BFLOAT16},
        {"what": TopK(), "when": EveryStep(sparsity="auto"), "where": BFLOAT16},  # begins dense, and may stay so
        {"what": TopK(), "where": Where(algorithm="sharded")},
    ],
)
def test_what_makes_sense_is_not_refused(arguments: dict[str, Any]) -> None:
    assert Method(**Method(**arguments).describe()) == Method(**arguments)


def test_a_process_group_and_a_topology_exclude_each_other() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    sgd, group = torch.optim.SGD([parameter], lr=0.1), object()
    with pytest.raises(ConfigurationError, match="a topology is of all ranks"):
        Method().attach(sgd, [("weight", parameter)], topology=NODES, process_group=group)  # type: ignore[arg-type]


@pytest.mark.parametrize("topology", ["flat", "auto"])
@on_ranks()
def test_half_types_are_sent_between_ranks_that_are_nodes(topology: Any) -> None:
    os.environ["GROUP_RANK"] = str(dist.get_rank())  # as torchrun says it
    weight, gradient = torch.nn.Parameter(torch.zeros(8)), torch.linspace(0.1, 1.0, 8)
    sgd = torch.optim.SGD([weight], lr=1.0)
    worker = Hierarchical(topology, inter_dtype="bfloat16").attach(sgd, [("w", weight)])
    weight.grad = gradient * (1 + dist.get_rank())
    sgd.step()
    halves = [(gradient * (1 + rank) / 2).to(torch.bfloat16) for rank in range(2)]
    assert torch.equal(weight.detach(), -(halves[0] + halves[1]).float())
    assert worker.peers.ledger.sent_bytes < 8 * 4 + 200  # and a status


@on_ranks()
def test_attaching_fails_on_all_ranks_or_on_none() -> None:
    weight, rank = torch.nn.Parameter(torch.ones(8)), dist.get_rank()
    method, words = Method(what=Quantized(value_dtype=("int4", "int8")[rank])), "rank 0 has 'int4', rank 1 has 'int8'"
    with pytest.raises(ConfigurationError, match=f"what.value_dtype: {words}"):
        method.attach(torch.optim.SGD([weight], lr=0.1), [("w", weight)])
    with pytest.raises(ConfigurationError, match=r"dampening=0\.5"):
        DGC().attach(torch.optim.SGD([weight], lr=0.1, momentum=0.9, dampening=0.5 * rank), [("w", weight)])


# The card of the names ------------------------------------------------------------------------------------------------

PAGE = Path(__file__).resolve().parents[2] / "docs" / "methods" / "local_sgd.md"
HEAD = "| name | `k_steps` | `begin_step` | other values |\n|---|---|---|---|\n"
NAMES = [name for name in PRESETS if preset(name).when.averages_weights]


def changed_by(method: Method) -> set[str]:
    """Return the values that differ from those of local SGD, beside its period and its begin."""
    assert isinstance(method.when, EveryK)
    knobs = {each.name for each in fields(EveryK) if each.compare and each.init} - {"k_steps", "begin_step"}
    values = {knob: getattr(method.when, knob) for knob in knobs}
    values = {knob: value for knob, value in values.items() if value != getattr(LocalSGD().when, knob)}
    if "num_fragments" in values:
        values["num_fragments"] = method.when.num_fragments_of(1000)
    if isinstance(method.what, TopK):
        values |= {"density": f"1/{1 / method.what.density:.0f}", "value_dtype": method.what.value_dtype}
    return {str(value) for value in values.values()}


@pytest.mark.parametrize("name", NAMES)
def test_the_card_has_the_values_of_the_names(name: str) -> None:
    rows = PAGE.read_text().partition(HEAD)[2].partition("\n\n")[0].splitlines()
    cells = {row.split("|")[1].strip(): [cell.strip() for cell in row.split("|")[2:-1]] for row in rows}
    assert list(cells) == [f"`{each}`" for each in NAMES]
    period, begin, others = cells[f"`{name}`"]
    when: Any = preset(name).when
    assert period == (f"{when.k_steps}" if when.rule == "fixed" else f"{when.k_steps} to {when.max_k_steps}")
    assert begin == f"{when.begin_step}"
    assert {*re.findall(r"(?<=\")\w+|[\d./]+(?!\w)", others)} == changed_by(preset(name))
