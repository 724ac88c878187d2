"""Sparse local SGD on real ranks, against algorithm 1 of SparseLoCo in one process, bit for bit."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from lightning_lowbw import ConfigurationError, LocalSGD
from lightning_lowbw.comm.collectives import all_gather_bytes, all_reduce_bytes
from lightning_lowbw.presets import Compression
from tests.ranks import run_ranks
from tests.sync import problem
from tests.sync.problem import ADAMW, BASE, FLAT, MOMENTUM, NODES, OF_REPLICAS, SPARSE, THREE, Make, Nodes, with_base

train = partial(problem.train, steps=problem.STEPS)
WHOLE, INT4, INT2 = {"chunk": None, "decay": 1.0}, {"value_dtype": "int4"}, {"value_dtype": "int2"}
# What `LocalSGD` gets, and the oracle.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "chunked": ({"k_steps": 4}, {}),
    "per tensor, all is kept": ({"k_steps": 2, "compression": WHOLE}, {"k": 2, **WHOLE}),
    "over all ranks": (
        {"k_steps": 3, "compression": {"mean_over": "ranks", **INT4}},
        {"k": 3, "over_senders": False, **INT4},
    ),
    "delayed two bits": ({"k_steps": 5, "delay_steps": 2, "compression": INT2}, {"k": 5, "delay": 2, **INT2}),
}
PLACES: dict[str, tuple[Nodes, Make, tuple[str, ...]]] = {
    "2 ranks": (FLAT, ADAMW, (*CASES,)),
    "3 ranks": (THREE, MOMENTUM, ("chunked", "over all ranks")),
    "crossed": (NODES["crossed"], MOMENTUM, ("per tensor, all is kept", "delayed two bits")),
}


def method_of(choices: dict[str, Any]) -> Any:
    return LocalSGD(**with_base(choices))


@pytest.mark.parametrize("place", PLACES)
def test_equals_the_algorithm_in_one_process_to_the_bit(place: str) -> None:
    """A node is a participant with the mean of its changes; k, chunks, messages, residuals are of each rank's part."""
    nodes, make, cases = PLACES[place]
    methods = {case: method_of(CASES[case][0]) for case in cases}
    calls = {case: partial(train, method, make, OF_REPLICAS, nodes) for case, method in methods.items()}
    for case, results in problem.run_each(sum(map(len, nodes)), calls).items():
        problem.check_sparse(results, nodes, make, SPARSE, **CASES[case][1])
        assert set(results[0]["residuals"]) == set(SPARSE), "small tensors are averaged whole"


FRAGMENTS: dict[str, Any] = {"k_steps": 4, "num_fragments": 2, "delay_steps": 2, "compression": {"value_dtype": "int2"}}


def test_fragments_and_an_outer_optimizer_step_with_the_sparse_mean() -> None:
    methods = {"fragments": FRAGMENTS, "outer": {"k_steps": 4, "outer": "nesterov", "outer_momentum": 0.9}}
    calls = {name: partial(train, method_of(of_one), ADAMW, OF_REPLICAS) for name, of_one in methods.items()}
    results = problem.run_each(2, calls)
    for name in SPARSE:
        replica = problem.by_sparse_replicas(name, FLAT, ADAMW, momentum=0.9).replicas[0].detach()
        torch.testing.assert_close(results["outer"][0]["weights"][name], replica, rtol=1e-5, atol=1e-5)
    for fragment, members in enumerate(results["fragments"][0]["fragments"]):
        choices = {"value_dtype": "int2", "phase": 4 - round((fragment + 1) * 4 / 2), "delay": 2}
        problem.check_sparse(results["fragments"], FLAT, ADAMW, set(members) & set(SPARSE), **choices)


def test_where_nothing_is_whole_a_round_is_one_all_gather() -> None:
    """The status is part of the message: a small all-reduce of its own costs more frames than it has bytes."""
    choices = {"k_steps": 3, "compression": {"value_dtype": "int2"}}
    numels = [torch.Size(shape).numel() for shape in SPARSE.values()]
    message = Compression(**with_base(choices)["compression"]).nbytes(numels) + 4 * (5 + 2 * 2)
    for result in run_ranks(partial(train, method_of(choices), shapes=SPARSE, steps=6), 2):
        compared = all_reduce_bytes(2 * 8, 2)  # once, that the ranks have the same buffers: none
        assert result["sent"][-1] == 2 * all_gather_bytes(message, 2) + compared


def test_nodes_of_three_agree_whatever_the_rounding_of_their_mean() -> None:
    training = partial(train, method_of({"k_steps": 4}), ADAMW, OF_REPLICAS, NODES["three each"], steps=8)
    assert len({result["digests"][-1] for result in run_ranks(training, 6)}) == 1


def exclude(pattern: str) -> list[str]:
    method = LocalSGD(k_steps=2, begin_step=0, compression=Compression(**{**BASE, "exclude": [pattern]}))
    return sorted(train(method, shapes=OF_REPLICAS, steps=2)["residuals"])


def test_tensors_that_are_excluded() -> None:
    assert run_ranks(exclude, 2, "mat*") == [sorted(set(SPARSE) - {"matrix"})] * 2
    assert "'nothing' matches no parameter" in str(problem.message_of(partial(exclude, "nothing"), ConfigurationError))
