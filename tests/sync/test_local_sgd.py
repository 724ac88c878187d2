"""Local SGD on real ranks, against replicas in one process: on one level, on two, and by fragments."""

from __future__ import annotations

import math
import time
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import Parameter

from lightning_lowbw import Compression, ConfigurationError, DisagreementError, LocalSGD
from lightning_lowbw.comm.agreement import digest
from lightning_lowbw.comm.collectives import all_reduce_bytes
from lightning_lowbw.presets import preset
from lightning_lowbw.sync.status import SAVE, STOP
from tests.ranks import on_ranks
from tests.sync import problem
from tests.sync.problem import ADAMW, AWKWARD, FLAT, MOMENTUM, NODES, THREE, Make, Nodes, everywhere, same_on_all

CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 2e-5}
ONE: Nodes = ((0,),)
STRIDED = NODES["strided"]
DILOCO: dict[str, Any] = {"outer": "nesterov", "outer_momentum": 0.9, "outer_lr": 0.7}
SLOWMO: dict[str, Any] = {"outer": "slowmo", "outer_momentum": 0.6, "outer_lr": 0.9}
# What `LocalSGD` gets, and on which nodes, of one rank on one level; the oracle has shorter names.
CASES: dict[str, tuple[dict[str, Any], tuple[Nodes, ...]]] = {
    "fixed": ({"k_steps": 4, "begin_step": 0}, (FLAT,)),
    "post_local": ({"k_steps": 3, "begin_step": 5}, (THREE, STRIDED)),
    "slowmo": ({"k_steps": 4, **SLOWMO}, (THREE,)),
    "diloco": ({"k_steps": 4, "begin_step": 0, **DILOCO}, (ONE, FLAT)),
    "delayed diloco": ({"k_steps": 5, "delay_steps": 2, **DILOCO}, (ONE, FLAT)),
    "uneven fragments": ({"k_steps": 5, "begin_step": 0, "num_fragments": 3, "delay_steps": 2}, (FLAT,)),
    "mixed": ({"k_steps": 6, "begin_step": 0, "num_fragments": 2, "delay_steps": 4, "mixing": 0.3}, (THREE,)),
    "streaming diloco": (
        {"k_steps": 5, "begin_step": 0, "num_fragments": 2, "delay_steps": 2, "mixing": 0.5, **DILOCO},
        (ONE, FLAT, STRIDED),
    ),
    "all of the mean": ({"k_steps": 4, "begin_step": 0, "delay_steps": 1, "mixing": 0.0}, (FLAT,)),
}
OF_ORACLE = {"k_steps": "k", "begin_step": "begin", "delay_steps": "delay"}


@pytest.mark.parametrize(
    ("nodes", "make"),
    [(ONE, ADAMW), (FLAT, ADAMW), (THREE, MOMENTUM), (STRIDED, ADAMW)],
    ids=["one rank takes outer steps alone", "2 ranks", "3 ranks", "2 nodes"],
)
def test_equals_replicas_in_one_process(nodes: Nodes, make: Make) -> None:
    """A node is what a rank is on one level, and trains with the mean gradient of its ranks."""
    mine = {name: choices for name, (choices, places) in CASES.items() if nodes in places}
    training = partial(problem.train, make=make, nodes=nodes, steps=problem.STEPS)
    calls = {name: partial(training, LocalSGD(**choices)) for name, choices in mine.items()}
    for case, results in problem.run_each(sum(map(len, nodes)), calls).items():
        choices = {OF_ORACLE.get(name, name): value for name, value in mine[case].items()}
        num_fragments, fragments = choices.pop("num_fragments", 1), results[0]["fragments"]
        assert sorted(name for of_one in fragments for name in of_one) == sorted(AWKWARD)
        for fragment, names in enumerate(fragments):
            phase = choices["k"] - round((fragment + 1) * choices["k"] / num_fragments)
            for name in names:
                oracle = problem.by_replicas(name, nodes, make, phase=phase, **choices)
                for replica, node in zip(oracle.replicas, nodes, strict=True):
                    for rank in node:
                        own = results[rank]["weights"][name]
                        torch.testing.assert_close(own, replica.detach(), **CLOSE, msg=f"{case} {name} {rank}")
        for node in nodes:  # whose ranks step together
            assert all(results[rank]["digests"] == results[node[0]]["digests"] for rank in node)


# Buffers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delay", [0, 2])
@on_ranks(3)
def test_buffers_are_averaged_with_the_variance_between_ranks(delay: int) -> None:
    rank, weight = dist.get_rank(), Parameter(torch.zeros(3))
    buffers = {
        "norm.running_mean": torch.tensor([1000.0, 0.0]),
        "norm.running_var": torch.tensor([1e-3, 1.0]),
        "third": torch.tensor([1 / 3]),
    }
    method = LocalSGD(k_steps=2 * delay + 2, begin_step=0, delay_steps=delay)
    worker = method.attach(torch.optim.SGD([weight], lr=0.1), [("weight", weight)], named_buffers=buffers)
    for step in range(2 * delay + 2 + delay):
        worker.optimizer.step()
        if step == 0:
            buffers["norm.running_mean"].copy_(torch.tensor([1000.0 + rank, 2.0 * rank]))
            buffers["norm.running_var"].copy_(torch.tensor([0.5, 1.0 + rank]))
    torch.testing.assert_close(buffers["norm.running_mean"], torch.tensor([1001.0, 2.0]))
    # mean of variances + variance of means: of 0, 1, 2 that is 2/3, of 0, 2, 4 it is 8/3
    torch.testing.assert_close(buffers["norm.running_var"], torch.tensor([0.5 + 2 / 3, 2 + 8 / 3]))
    assert buffers["third"].tolist() == torch.tensor([1 / 3]).tolist()  # to the bit, on three ranks


# Awkward parameters ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", [None, Compression(chunk=64, density=1 / 16, min_numel=64)])
@on_ranks(3)
def test_frozen_parameters_do_not_move_and_those_that_did_are_averaged(compression: Any) -> None:
    shapes = {"a": (5, 13), "late": (64,), "early": (66,), "never": (67,)}

    def freeze(worker: Any, parameters: Any, step: int) -> None:
        parameters["late"].requires_grad_(step >= 5)
        parameters["early"].requires_grad_(step < 2)

    def leave_out(worker: Any, parameters: Any, step: int) -> None:
        parameters["never"].grad = None

    hooks: dict[str, Any] = {"before": freeze, "after": leave_out, "look": lambda _, p: problem.weights_of(p)}
    result = problem.train(LocalSGD(4, 0, compression=compression), shapes=shapes, **hooks)
    weights, late, never = result["weights"], *(problem.make_weight(name, shapes[name]) for name in ("late", "never"))
    assert torch.equal(result["seen"][4]["late"], late)  # to the bit, on three ranks
    assert not torch.equal(weights["late"], late)
    assert torch.allclose(weights["never"], never, rtol=1e-6)
    same_on_all(digest([*weights.values(), result["seen"][3]["early"]]))  # frozen in mid-interval


@on_ranks()
def test_a_frozen_parameter_that_has_a_gradient_is_not_stepped() -> None:
    worker, parameters = problem.attach(LocalSGD(k_steps=2, begin_step=0), shapes={"a": (5, 13), "frozen": (7,)})
    for step in range(4):
        parameters["frozen"].requires_grad_(step < 2)
        worker.optimizer.zero_grad(set_to_none=False)  # torch steps what has a gradient, by each rank's own momentum
        problem.backward(parameters, step)
        worker.optimizer.step()
    same_on_all(digest(parameters.values()))


@pytest.mark.parametrize("mixing", [None, 0.5])
@on_ranks()
def test_what_is_frozen_while_an_average_is_in_progress_becomes_the_mean(mixing: float | None) -> None:
    def freeze(worker: Any, parameters: Any, step: int) -> None:
        parameters["frozen"].requires_grad_(step < 3)

    hooks: dict[str, Any] = {"before": freeze, "look": lambda worker, _: worker.parameters_agree}
    method, shapes = LocalSGD(3, 0, delay_steps=2, mixing=mixing), {"a": (5, 13), "frozen": (7,)}
    result = problem.train(method, shapes=shapes, steps=5, **hooks)
    assert not result["seen"][-1]
    same_on_all(digest([result["weights"]["frozen"]]))
    assert len({*everywhere(digest([result["weights"]["a"]]))}) == 2


@on_ranks(3)
def test_half_types_are_summed_in_float32() -> None:
    weight = Parameter(torch.ones(4, dtype=torch.bfloat16))
    worker = LocalSGD(k_steps=2, begin_step=0).attach(torch.optim.SGD([weight], lr=0.0), [("w", weight)])
    for _ in range(2):
        weight.grad = torch.zeros_like(weight)
        with worker.stepping():
            worker.exchange()
            worker.optimizer.step()
            weight.data.fill_(1.0 + dist.get_rank() / 128)
    assert weight.tolist() == [1.0 + 1 / 128] * 4


@pytest.mark.parametrize(("outer", "moved"), [({}, 0.0), ({**DILOCO, "outer_momentum": 0.0, "outer_lr": 1.0}, 8.0)])
@on_ranks()
def test_an_outer_optimizer_keeps_what_half_types_round_away(outer: dict[str, Any], moved: float) -> None:
    """One of two ranks moves by the least that a bfloat16 can, the mean by half as much; x0 is in float32."""
    weight = Parameter(torch.full((4,), 256.0, dtype=torch.bfloat16))
    worker = LocalSGD(2, 0, **outer).attach(torch.optim.SGD([weight], lr=1.0), [("w", weight)])
    for step in range(16):
        weight.grad = torch.full_like(weight, -2.0 if dist.get_rank() == 0 and step % 2 else 0.0)
        worker.optimizer.step()
    assert weight.tolist() == [256.0 + moved] * 4


# Adaptive rules ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [math.nan, 0.0])
@on_ranks()
def test_losses_that_make_no_sense_leave_k_as_it_is(loss: float) -> None:
    def observe(worker: Any, parameters: Any, step: int) -> None:
        worker.observe_loss(torch.tensor(loss if step >= 4 and dist.get_rank() == 1 else 1.0))  # on one rank only

    method = LocalSGD(k_steps=2, begin_step=0, rule="fleet")
    hooks: dict[str, Any] = {"before": observe, "look": lambda worker, _: worker.plan.k_steps}
    assert problem.train(method, shapes={"a": (3,)}, steps=12, **hooks)["seen"] == [2] * 12


@on_ranks()
def test_an_adaptive_rule_without_a_loss_says_so_on_all_ranks() -> None:
    with pytest.raises(ConfigurationError, match="training_step"):
        problem.train(LocalSGD(k_steps=1, begin_step=0, rule="adacomm"), shapes={"a": (3,)}, steps=1)


@on_ranks()
def test_a_synchronous_step_tells_in_the_next_one_what_the_ranks_have_said_and_the_last_one_at_once() -> None:
    def ask(worker: Any, parameters: Any, step: int) -> None:
        if dist.get_rank() == 1:
            worker.requests.asked = {1: STOP, 3: SAVE}.get(step, 0)

    hooks: dict[str, Any] = {"before": ask, "look": lambda worker, _: worker.requests.agreed}
    assert problem.train(LocalSGD(8, 4), shapes={"a": (3,)}, steps=4, **hooks)["seen"] == [0, 0, STOP, SAVE]


@pytest.mark.parametrize("ends", [False, True])
@on_ranks()
def test_a_synchronous_step_that_one_rank_left_out_is_told(ends: bool) -> None:
    worker, _ = problem.attach(LocalSGD(8, 4), shapes={"a": (3,)})
    worker.batch = dist.get_rank()
    worker.optimizer.step()
    with pytest.raises(DisagreementError, match=r"left out optimizer.step\(\)"):
        worker.finish() if ends else worker.optimizer.step()


@on_ranks()
def test_the_mean_of_a_sparse_gradient_is_dense_on_all_ranks() -> None:
    embedding = torch.nn.Embedding(5, 3, sparse=True)
    worker = LocalSGD(2, 5).attach(torch.optim.SGD(embedding.parameters(), lr=0.1), embedding.named_parameters())
    if dist.get_rank() == 1:  # the other rank's batch does not need this layer
        embedding(torch.tensor([1, 2])).sum().backward()
    worker.exchange()
    assert embedding.weight.grad is not None
    assert embedding.weight.grad.tolist() == [[0.5 * (row in (1, 2))] * 3 for row in range(5)]


# What fragments are for -----------------------------------------------------------------------------------------------

CONTROL = all_reduce_bytes(4 * (5 + 2 * 2), 2)  # the control message of each average, on two ranks


@on_ranks()
def test_fragments_are_balanced_by_the_bytes_that_are_sent() -> None:
    most = []
    for num_fragments in (1, 2):  # small tensors are sent whole, and are most of the bytes
        parameters, sent = [Parameter(torch.zeros(numel)) for numel in [8192, 4096] + [100] * 20], [0]
        method = LocalSGD(2, 0, num_fragments=num_fragments, compression=Compression())
        worker = method.attach(torch.optim.SGD(parameters, lr=0.0), [])
        for _ in range(2):
            worker.optimizer.step()
            sent.append(worker.peers.ledger.sent_bytes)
        most.append(max(after - before for before, after in pairwise(sent)) - CONTROL)
    assert most[1] < 1.05 * most[0] / 2


@on_ranks()
def test_parameters_that_come_later_join_a_fragment() -> None:
    parameters = problem.make_parameters({"a": (40,), "b": (30,), "late": (5,)})
    optimizer = torch.optim.SGD([parameters["a"], parameters["b"]], lr=0.05)
    worker: Any = LocalSGD(k_steps=4, begin_step=0, num_fragments=2).attach(optimizer, parameters.items())
    problem.train_on(worker, {name: parameters[name] for name in "ab"}, range(3))
    optimizer.add_param_group({"params": [parameters["late"]]})
    problem.train_on(worker, parameters, range(3, 8))
    assert [[worker.params.name_of(p) for p in each.parameters] for each in worker.fragments] == [["a"], ["b", "late"]]
    same_on_all(digest([parameters["late"]]))


def test_a_preset_takes_no_more_fragments_than_there_are_tensors() -> None:
    for num_tensors, expected in ((1, 1), (3, 3), (6, 4)):
        shapes = {f"p{number}": (6,) for number in range(num_tensors)}
        worker, _ = problem.attach(preset("streaming_diloco"), shapes=shapes)
        assert len(worker.fragments) == expected


@on_ranks(4, timeout_s=30.0)
def test_hidden_averages_of_two_optimizers_do_not_mix() -> None:
    weights, hidden = [Parameter(torch.zeros(100)) for _ in range(2)], LocalSGD(2, 0, delay_steps=1, topology=2)
    workers = [hidden.attach(torch.optim.SGD([weight], lr=1.0), [("w", weight)]) for weight in weights]
    for step in range(9):
        for sign, weight, worker in zip((1.0, -1.0), weights, workers, strict=True):
            weight.grad = torch.full((100,), sign)
            worker.optimizer.step()
            if (step + dist.get_rank()) % 2:  # ranks come to the second optimizer at different times
                time.sleep(0.005)
    assert [float(weight[0]) for weight in weights] == [-9.0, 9.0]
