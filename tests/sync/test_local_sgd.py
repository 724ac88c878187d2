"""Local SGD on real ranks, against replicas in one process: on one level, on two, and by fragments."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lightning_lowbw import Compression, ConfigurationError, DisagreementError, LocalSGD
from lightning_lowbw.comm.agreement import digest
from lightning_lowbw.comm.collectives import all_reduce_bytes
from lightning_lowbw.presets import preset
from tests.ranks import run_ranks
from tests.sync import problem
from tests.sync.problem import ADAMW, AWKWARD, FLAT, MOMENTUM, NODES, THREE, Make, Nodes, backward, each

CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 2e-5}
STRIDED = NODES["strided"]
DILOCO: dict[str, Any] = {"outer": "nesterov", "outer_momentum": 0.9, "outer_lr": 0.7}
SLOWMO: dict[str, Any] = {"outer": "slowmo", "outer_momentum": 0.6, "outer_lr": 0.9}
# What `LocalSGD` gets, and on which nodes, of one rank on one level; the oracle has shorter names.
CASES: dict[str, tuple[dict[str, Any], tuple[Nodes, ...]]] = {
    "fixed": ({"k_steps": 4, "begin_step": 0}, (FLAT,)),
    "post_local": ({"k_steps": 3, "begin_step": 5}, (THREE, STRIDED)),
    "slowmo": ({"k_steps": 4, **SLOWMO}, (THREE,)),
    "diloco": ({"k_steps": 4, "begin_step": 0, **DILOCO}, (FLAT,)),
    "delayed diloco": ({"k_steps": 5, "delay_steps": 2, **DILOCO}, (FLAT,)),
    "uneven fragments": ({"k_steps": 5, "begin_step": 0, "num_fragments": 3, "delay_steps": 2}, (FLAT,)),
    "mixed": ({"k_steps": 6, "begin_step": 0, "num_fragments": 2, "delay_steps": 4, "mixing": 0.3}, (THREE,)),
    "streaming diloco": (
        {"k_steps": 5, "begin_step": 0, "num_fragments": 2, "delay_steps": 2, "mixing": 0.5, **DILOCO},
        (FLAT, STRIDED),
    ),
    "all of the mean": ({"k_steps": 4, "begin_step": 0, "delay_steps": 1, "mixing": 0.0}, (FLAT,)),
}
OF_ORACLE = {"k_steps": "k", "begin_step": "begin", "delay_steps": "delay"}


@pytest.mark.parametrize(
    ("nodes", "make"), [(FLAT, ADAMW), (THREE, MOMENTUM), (STRIDED, ADAMW)], ids=["2 ranks", "3 ranks", "2 nodes"]
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


def average_buffers(delay: int) -> dict[str, Tensor]:
    rank = dist.get_rank()
    weight = Parameter(torch.zeros(3))
    buffers = {
        "norm.running_mean": torch.tensor([1000.0, 0.0]),
        "norm.running_var": torch.tensor([1e-3, 1.0]),
        "norm.num_batches_tracked": torch.tensor(0),
        "mask": torch.tensor([0.0, -math.inf]),
        "third": torch.tensor([1 / 3]),
    }
    method = LocalSGD(k_steps=2 * delay + 2, begin_step=0, delay_steps=delay)
    worker = method.attach(torch.optim.SGD([weight], lr=0.1), [("weight", weight)], named_buffers=buffers)
    for step in range(2 * delay + 2 + delay):
        worker.optimizer.step()
        if step == 0:
            buffers["norm.running_mean"].copy_(torch.tensor([1000.0 + rank, 2.0 * rank]))
            buffers["norm.running_var"].copy_(torch.tensor([0.5, 1.0 + rank]))
            buffers["norm.num_batches_tracked"].fill_(5 + rank)
    return buffers


def test_buffers_are_averaged_with_the_variance_between_ranks() -> None:
    for buffers in (buffers for of_rank in run_ranks(each, 3, average_buffers, [(0,), (2,)]) for buffers in of_rank):
        torch.testing.assert_close(buffers["norm.running_mean"], torch.tensor([1001.0, 2.0]))
        # mean of variances + variance of means: of 0, 1, 2 that is 2/3, of 0, 2, 4 it is 8/3
        torch.testing.assert_close(buffers["norm.running_var"], torch.tensor([0.5 + 2 / 3, 2 + 8 / 3]))
        assert int(buffers["norm.num_batches_tracked"]) == 7
        assert buffers["mask"].tolist() == [0.0, -math.inf]
        assert buffers["third"].tolist() == torch.tensor([1 / 3]).tolist()  # to the bit, on three ranks


# Awkward parameters ------------------------------------------------------------------------------------------------


def freeze(first: dict[str, int], last: dict[str, int], worker: Any, parameters: Any, step: int) -> None:
    """Let tensors be trained from a step on, or until one."""
    for name, parameter in parameters.items():
        parameter.requires_grad_(first.get(name, 0) <= step < last.get(name, 99))


def leave_out(name: str, worker: Any, parameters: Any, step: int) -> None:
    parameters[name].grad = None


def own_weights(worker: Any, parameters: Any) -> dict[str, Tensor]:
    return problem.weights_of(parameters)


def test_frozen_parameters_do_not_move_and_those_that_did_are_averaged() -> None:
    shapes = {"a": (5, 13), "late": (64,), "early": (66,), "never": (67,)}
    hooks = {"before": partial(freeze, {"late": 5}, {"early": 2}), "after": partial(leave_out, "never")}
    training = partial(problem.train, shapes=shapes, look=own_weights, **hooks)
    sparse = Compression(chunk=64, density=1 / 16, min_numel=64)
    calls = {name: partial(training, LocalSGD(4, 0, compression=name)) for name in (None, sparse)}
    for first, *others in problem.run_each(3, calls).values():
        assert torch.equal(first["seen"][4]["late"], problem.make_weight("late", (64,)))  # to the bit, on three ranks
        for other in others:
            assert all(map(torch.equal, first["weights"].values(), other["weights"].values()))
            assert torch.equal(first["seen"][3]["early"], other["seen"][3]["early"]), "frozen in mid-interval"
        assert not torch.equal(first["weights"]["late"], problem.make_weight("late", (64,)))
        assert torch.allclose(first["weights"]["never"], problem.make_weight("never", (67,)), rtol=1e-6)


def freeze_with_a_gradient() -> str:
    parameters = problem.make_parameters({"a": (5, 13), "frozen": (7,)})
    worker = LocalSGD(k_steps=2, begin_step=0).attach(MOMENTUM(parameters.values()), parameters.items())
    for step in range(4):
        parameters["frozen"].requires_grad_(step < 2)
        worker.optimizer.zero_grad(set_to_none=False)  # torch steps what has a gradient, by each rank's own momentum
        backward(parameters, step)
        worker.optimizer.step()
    return digest(parameters.values())


def test_a_frozen_parameter_that_has_a_gradient_is_not_stepped() -> None:
    assert len(set(run_ranks(freeze_with_a_gradient, 2))) == 1


def agrees(worker: Any, parameters: Any) -> bool:
    return worker.parameters_agree  # type: ignore[no-any-return]


def test_what_is_frozen_while_an_average_is_in_progress_becomes_the_mean() -> None:
    hooks = {"before": partial(freeze, {}, {"frozen": 3}), "look": agrees}
    training = partial(problem.train, shapes={"a": (5, 13), "frozen": (7,)}, steps=5, **hooks)
    calls = {mixing: partial(training, LocalSGD(3, 0, delay_steps=2, mixing=mixing)) for mixing in (None, 0.5)}
    for first, second in problem.run_each(2, calls).values():
        assert not first["seen"][-1]
        assert torch.equal(first["weights"]["frozen"], second["weights"]["frozen"])
        assert not torch.equal(first["weights"]["a"], second["weights"]["a"])


def half_precision() -> Tensor:
    rank = dist.get_rank()
    weight = Parameter(torch.ones(4, dtype=torch.bfloat16))
    worker = LocalSGD(k_steps=2, begin_step=0).attach(torch.optim.SGD([weight], lr=0.0), [("w", weight)])
    for _ in range(2):
        weight.grad = torch.zeros_like(weight)
        with worker.stepping():
            worker.exchange()
            worker.optimizer.step()
            weight.data.fill_(1.0 + rank / 128)
    return weight.detach()


def test_half_types_are_summed_in_float32() -> None:
    for weight in run_ranks(half_precision, 3):
        assert weight.tolist() == [1.0 + 1 / 128] * 4


# Adaptive rules ----------------------------------------------------------------------------------------------------


def adapt_in_trouble(loss: float) -> list[int]:
    parameters = problem.make_parameters({"a": (3,)})
    method = LocalSGD(k_steps=2, begin_step=0, rule="fleet")
    worker: Any = method.attach(torch.optim.SGD(parameters.values(), lr=0.1), parameters.items())
    ks = []
    for step in range(12):
        is_bad = step >= 4 and dist.get_rank() == 1  # on one rank only
        worker.observe_loss(torch.tensor(loss if is_bad else 1.0))
        parameters["a"].grad = torch.zeros(3)
        worker.optimizer.step()
        ks.append(worker.k_steps)
    return ks


def test_losses_that_make_no_sense_leave_k_as_it_is() -> None:
    for results in run_ranks(each, 2, adapt_in_trouble, [(math.nan,), (0.0,)]):
        assert results == [[2] * 12] * 2


def adapt_without_loss() -> str | None:
    method = LocalSGD(k_steps=1, begin_step=0, rule="adacomm")
    return problem.message_of(partial(problem.train, method, shapes={"a": (3,)}, steps=1), ConfigurationError)


def test_an_adaptive_rule_without_a_loss_says_so_on_all_ranks() -> None:
    assert all("training_step" in str(message) for message in run_ranks(adapt_without_loss, 2))


def decay(worker: Any, parameters: Any, step: int) -> None:
    """A warm-up, a plateau, and a decay that rank 1 is late to hear of."""
    lr = [0.05, 0.1, 0.1, 0.1, 0.01, 0.01, 0.01, 0.01][step]
    worker.optimizer.param_groups[0]["lr"] = 0.1 if step == 4 and dist.get_rank() == 1 else lr
    worker.load_equal_state(worker.equal_state())  # a resume goes on alike


def is_local(worker: Any, parameters: Any) -> bool:
    return worker.is_local  # type: ignore[no-any-return]


def test_the_first_decay_of_the_learning_rate_begins_the_local_phase_on_all_ranks() -> None:
    method = LocalSGD(k_steps=4, begin_step="first_lr_decay")
    for result in run_ranks(partial(problem.train, method, shapes={"a": (3,)}, before=decay, look=is_local), 2):
        assert result["seen"] == [False] * 5 + [True] * 3  # told in the step after it


def ask_in_synchronous_steps(stops: int, saves: int) -> tuple[list[tuple[bool, bool]], list[str | None]]:
    parameters = problem.make_parameters({"a": (3,)})
    worker = LocalSGD(8, 4).attach(torch.optim.SGD(parameters.values(), lr=0.1), parameters.items())
    agreed = []
    for step in range(4):
        if dist.get_rank() == 1:
            worker.stop_requested = step == stops
            worker.save_requested = worker.save_requested or step == saves  # until all have heard of it
        backward(parameters, step)
        worker.optimizer.step()
        agreed.append((worker.stop_agreed, worker.save_agreed))
    told = []
    for ends in (False, True):
        worker = LocalSGD(8, 4).attach(torch.optim.SGD(parameters.values(), lr=0.1), parameters.items())
        worker.batch = dist.get_rank()  # one has left out a step
        worker.optimizer.step()
        told.append(problem.message_of(worker.finish if ends else worker.optimizer.step, DisagreementError))
    return agreed, told


def test_a_synchronous_step_tells_in_the_next_one_what_the_ranks_have_said_and_the_last_one_at_once() -> None:
    for last, one_before in run_ranks(each, 2, ask_in_synchronous_steps, [(1, 3), (0, 2)]):
        assert last[0] == [(False, False), (False, False), (True, False), (False, True)]
        assert one_before[0] == [(False, False), (True, False), (False, False), (False, True)]
        assert all("left out optimizer.step()" in str(each) for each in last[1])


def meet_a_sparse_gradient() -> Tensor:
    embedding = torch.nn.Embedding(5, 3, sparse=True)
    worker = LocalSGD(2, 5).attach(torch.optim.SGD(embedding.parameters(), lr=0.1), embedding.named_parameters())
    if dist.get_rank() == 1:  # the other rank's batch does not need this layer
        embedding(torch.tensor([1, 2])).sum().backward()
    worker.exchange()
    assert embedding.weight.grad is not None
    return embedding.weight.grad


def test_the_mean_of_a_sparse_gradient_is_dense_on_all_ranks() -> None:
    expected = torch.zeros(5, 3)
    expected[1:3] = 0.5
    assert all(gradient.equal(expected) for gradient in run_ranks(meet_a_sparse_gradient, 2))


# What fragments are for -----------------------------------------------------------------------------------------------

CONTROL = all_reduce_bytes(4 * (7 + 2 * 2), 2)  # the control message of each average, on two ranks


def most_sent(numels: Sequence[int], num_fragments: int) -> int:
    """Return the bytes of the step that sends the most."""
    parameters, sent = [Parameter(torch.zeros(numel)) for numel in numels], [0]
    method = LocalSGD(2, 0, num_fragments=num_fragments, compression=Compression())
    worker = method.attach(torch.optim.SGD(parameters, lr=0.0), [])
    for _ in range(2):
        worker.optimizer.step()
        sent.append(worker.peers.ledger.sent_bytes)
    return max(after - before for before, after in pairwise(sent))


def test_fragments_are_balanced_by_the_bytes_that_are_sent() -> None:
    numels = [8192, 4096] + [100] * 20  # of which the small are sent whole: most of the bytes
    whole, parts = run_ranks(each, 2, most_sent, [(numels, 1), (numels, 2)])[0]
    assert parts - CONTROL < 1.05 * (whole - CONTROL) / 2


def add_a_group() -> tuple[list[list[str]], str]:
    parameters = problem.make_parameters({"a": (40,), "b": (30,)})
    optimizer = torch.optim.SGD(parameters.values(), lr=0.05)
    late = problem.make_parameters({"late": (5,)})
    worker: Any = LocalSGD(k_steps=4, begin_step=0, num_fragments=2).attach(
        optimizer, [*parameters.items(), *late.items()]
    )
    problem.train_on(worker, parameters, range(3))
    optimizer.add_param_group({"params": list(late.values())})
    problem.train_on(worker, {**parameters, **late}, range(3, 8))
    return [[worker.name_of(p) for p in f.parameters] for f in worker.fragments], digest(late.values())


def test_parameters_that_come_later_join_a_fragment() -> None:
    (fragments, first), (_, second) = run_ranks(add_a_group, 2)
    assert fragments == [["a"], ["b", "late"]]
    assert first == second


def test_a_preset_takes_no_more_fragments_than_there_are_tensors() -> None:
    for num_tensors, expected in ((1, 1), (3, 3), (6, 4)):
        parameters = problem.make_parameters({f"p{number}": (6,) for number in range(num_tensors)})
        worker: Any = preset("streaming_diloco").attach(MOMENTUM(parameters.values()), parameters.items())
        assert len(worker.fragments) == expected


def two_hidden_optimizers() -> list[float]:
    weights = [torch.nn.Parameter(torch.zeros(100)) for _ in range(2)]
    workers = [
        LocalSGD(2, 0, delay_steps=1, topology=((0, 1), (2, 3))).attach(torch.optim.SGD([w], lr=1.0), [("w", w)])
        for w in weights
    ]
    for step in range(9):
        for sign, weight, worker in zip((1.0, -1.0), weights, workers, strict=True):
            weight.grad = torch.full((100,), sign)
            worker.optimizer.step()
            if (step + dist.get_rank()) % 2:  # ranks come to the second optimizer at different times
                time.sleep(0.005)
    return [float(weight[0]) for weight in weights]


def test_hidden_averages_of_two_optimizers_do_not_mix() -> None:
    assert run_ranks(two_hidden_optimizers, 4, timeout_s=30.0) == [[-9.0, 9.0]] * 4
