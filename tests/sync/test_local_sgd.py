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

from lightning_lowbw import Compression, ConfigurationError, LocalSGD
from lightning_lowbw.comm.agreement import digest
from lightning_lowbw.comm.ledger import all_reduce_bytes
from lightning_lowbw.comm.mean import BUCKET_BYTES
from lightning_lowbw.method import Method
from lightning_lowbw.presets import preset
from tests.ranks import run_ranks
from tests.sync.problem import AWKWARD, NODES, Nodes, backward, make_parameters, make_weight, run_each
from tests.sync.replica_problem import CLOSE, OPTIMIZERS, STEPS, attach, by_oracle, take_step, train, train_on

TWO, THREE = ((0,), (1,)), ((0,), (1,), (2,))
STRIDED, SIX = NODES["strided"], NODES["three nodes"]
DILOCO: dict[str, Any] = {"outer": "nesterov", "outer_momentum": 0.9, "outer_lr": 0.7}
SLOWMO: dict[str, Any] = {"outer": "slowmo", "outer_momentum": 0.6, "outer_lr": 0.9}
# What `LocalSGD` gets and, where that has other names, the oracle; on which nodes, of one rank on one level.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[Nodes, ...]]] = {
    "fixed": ({"k_steps": 4, "begin_step": 0}, {}, (TWO, STRIDED)),
    "post_local": ({"k_steps": 3, "begin_step": 5}, {}, (THREE, SIX)),
    "fleet": ({"k_steps": 2, "rule": "fleet"}, {}, (TWO, STRIDED)),
    "adacomm": ({"k_steps": 8, "rule": "adacomm"}, {}, (THREE,)),
    "qsr": ({"k_steps": 2, "rule": "qsr", "qsr_alpha": 0.08, "max_k_steps": 5}, {"alpha": 0.08, "max_k": 5}, (TWO,)),
    "slowmo": ({"k_steps": 4, **SLOWMO}, SLOWMO, (THREE,)),
    "diloco": ({"k_steps": 4, "begin_step": 0, "outer": "nesterov"}, DILOCO, (TWO, SIX)),
    "delayed": ({"k_steps": 5, "delay_steps": 3}, {}, (THREE, SIX)),
    "delayed diloco": ({"k_steps": 5, "delay_steps": 2, "outer": "nesterov"}, DILOCO, (TWO,)),
    "fragments": ({"k_steps": 6, "begin_step": 0, "num_fragments": 3}, {}, (TWO, SIX)),
    "one per step": ({"k_steps": 4, "begin_step": 0, "num_fragments": 4}, {}, (THREE,)),
    "uneven": ({"k_steps": 5, "begin_step": 0, "num_fragments": 3, "delay_steps": 2}, {}, (TWO,)),
    "mixed": ({"k_steps": 6, "begin_step": 0, "num_fragments": 2, "delay_steps": 4, "mixing": 0.3}, {}, (THREE,)),
    "streaming diloco": (
        {"k_steps": 5, "begin_step": 0, "num_fragments": 2, "delay_steps": 2, "mixing": 0.5, "outer": "nesterov"},
        DILOCO,
        (TWO, STRIDED),
    ),
    "all of the mean": ({"k_steps": 4, "begin_step": 0, "delay_steps": 1, "mixing": 0.0}, {}, (TWO,)),
}
WORDS = {"k_steps": "k", "begin_step": "begin", "rule": "rule", "delay_steps": "delay", "mixing": "mixing"}


@pytest.mark.parametrize(
    ("nodes", "optimizer"),
    [(TWO, "adamw"), (THREE, "sgd"), (STRIDED, "adamw"), (SIX, "sgd")],
    ids=["2 ranks", "3 ranks", "2 nodes", "3 nodes"],
)
def test_equals_replicas_in_one_process(nodes: Nodes, optimizer: str) -> None:
    """A node is what a rank is on one level, and trains with the mean gradient of its ranks."""
    mine = {name: case for name, case in CASES.items() if nodes in case[2]}
    calls = {
        name: partial(train, LocalSGD(**choices), optimizer, nodes=nodes, schedule_lr="rule" in choices)
        for name, (choices, _, _) in mine.items()
    }
    for name, results in run_each(sum(map(len, nodes)), calls).items():
        choices, of_oracle, _ = mine[name]
        check(name, results, optimizer, nodes, choices, of_oracle)


def check(
    case: str,
    results: list[dict[str, Any]],
    optimizer: str,
    nodes: Nodes,
    choices: dict[str, Any],
    of_oracle: dict[str, Any],
) -> None:
    translated = {WORDS[name]: value for name, value in choices.items() if name in WORDS}
    num_fragments, k, adapts = choices.get("num_fragments", 1), choices["k_steps"], "rule" in choices
    members = results[0]["fragments"]
    assert sorted(name for of_one in members for name in of_one) == sorted(AWKWARD)
    applied = [0] * STEPS
    for fragment, names in enumerate(members):
        phase = k - round((fragment + 1) * k / num_fragments)
        for name in names:
            oracle = by_oracle(name, nodes, optimizer, schedule_lr=adapts, phase=phase, **{**translated, **of_oracle})
            for number, node in enumerate(nodes):
                for rank in node:
                    replica = oracle.replicas[number].detach()
                    torch.testing.assert_close(
                        results[rank]["own"][name], replica, **CLOSE, msg=f"{case} {name} {rank}"
                    )
        for step in oracle.averaged_at:
            applied = [n + (at >= step + oracle.delay) for at, n in enumerate(applied, start=1)]
    assert all(result["averages"] == applied for result in results), case
    for node in nodes:  # whose ranks step together
        assert all(results[rank]["digests"] == results[node[0]]["digests"] for rank in node)
    if adapts:
        assert len(set(oracle.ks)) > 1, "the case adapts nothing"
        assert all(result["k"][-1] == oracle.ks[-1] for result in results)
    if not oracle.delay and num_fragments == 1:
        for step in oracle.averaged_at:
            assert len({result["digests"][step - 1] for result in results}) == 1, "replicas differ after an average"
        assert len({result["digests"][oracle.averaged_at[0] - 2] for result in results}) == len(nodes)


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
    worker = LocalSGD(k_steps=2 * delay + 2, begin_step=0, delay_steps=delay).attach(
        torch.optim.SGD([weight], lr=0.1), [("weight", weight)], named_buffers=buffers
    )
    for step in range(2 * delay + 2 + delay):
        with worker.stepping():
            worker.exchange()
            if step == 0:
                buffers["norm.running_mean"].copy_(torch.tensor([1000.0 + rank, 2.0 * rank]))
                buffers["norm.running_var"].copy_(torch.tensor([0.5, 1.0 + rank]))
                buffers["norm.num_batches_tracked"].fill_(5 + rank)
    return buffers


def test_buffers_are_averaged_with_the_variance_between_ranks() -> None:
    results = run_each(3, {f"delay {delay}": partial(average_buffers, delay) for delay in (0, 2)})
    for buffers in [*results["delay 0"], *results["delay 2"]]:
        torch.testing.assert_close(buffers["norm.running_mean"], torch.tensor([1001.0, 2.0]))
        # mean of variances + variance of means: of 0, 1, 2 that is 2/3, of 0, 2, 4 it is 8/3
        torch.testing.assert_close(buffers["norm.running_var"], torch.tensor([0.5 + 2 / 3, 2 + 8 / 3]))
        assert int(buffers["norm.num_batches_tracked"]) == 7
        assert buffers["mask"].tolist() == [0.0, -math.inf]
        assert buffers["third"].tolist() == torch.tensor([1 / 3]).tolist()  # to the bit, on three ranks


# Awkward parameters ------------------------------------------------------------------------------------------------


def freeze_and_unfreeze() -> dict[str, Tensor]:
    parameters = make_parameters({"a": (5, 3), "late": (4,), "early": (6,), "never": (7,)})
    parameters["late"].requires_grad_(False)
    worker = LocalSGD(k_steps=4, begin_step=0).attach(OPTIMIZERS["sgd"](parameters.values()), parameters.items())
    seen: dict[str, Tensor] = {}
    for step in range(8):
        if step == 2:
            parameters["early"].requires_grad_(False)
        if step == 5:
            parameters["late"].requires_grad_(True)
        worker.optimizer.zero_grad()
        backward(parameters, step, unused=["never"])
        with worker.stepping():
            worker.exchange()
            worker.optimizer.step()
        if step in (3, 4):
            seen |= {f"{name} {step}": p.detach().clone() for name, p in parameters.items()}
    return {**seen, **{name: p.detach() for name, p in parameters.items()}}


def test_frozen_parameters_do_not_move_and_those_that_did_are_averaged() -> None:
    first, second, third = run_ranks(freeze_and_unfreeze, 3)
    assert torch.equal(first["late 4"], make_weight("late", (4,)))  # to the bit, on three ranks
    for name in ("a", "late", "early", "never"):
        assert torch.equal(first[name], second[name])
        assert torch.equal(first[name], third[name])
    assert not torch.equal(first["late"], make_weight("late", (4,)))
    assert torch.equal(first["early 3"], second["early 3"])  # frozen in mid-interval
    assert torch.allclose(first["never"], make_weight("never", (7,)), rtol=1e-6)


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


def average_much() -> tuple[int, list[bool]]:
    """Tensors larger than a bucket, of several dtypes, some empty."""
    shapes = {"big": (BUCKET_BYTES // 4 + 1,), "small": (3,), "empty": (0,)}
    rank = dist.get_rank()
    parameters = [Parameter(torch.full(shape, float(rank))) for shape in shapes.values()]
    parameters += [Parameter(torch.full((5,), float(rank), dtype=d)) for d in (torch.float64, torch.float16)]
    parameters += [Parameter(torch.full((2,), complex(rank, -rank)))]
    worker = LocalSGD(k_steps=2, begin_step=0).attach(
        torch.optim.SGD(parameters, lr=0.0), [(str(i), p) for i, p in enumerate(parameters)]
    )
    for _ in range(2):
        with worker.stepping():
            worker.exchange()
    good = [bool((p == (complex(1, -1) if p.is_complex() else 1)).all()) for p in parameters]
    return worker.num_averages, good


def test_dtypes_and_sizes_of_all_kinds() -> None:
    results = run_each(3, {"half": half_precision, "much": average_much})
    for weight in results["half"]:
        assert weight.tolist() == [1.0 + 1 / 128] * 4, "half types are not summed in float32"
    for num_averages, good in results["much"]:
        assert num_averages == 1
        assert all(good)


# Adaptive rules ----------------------------------------------------------------------------------------------------


def adapt_in_trouble(trouble: str) -> list[int]:
    parameters = make_parameters({"a": (3,)})
    method = LocalSGD(k_steps=2, begin_step=0, rule="fleet")
    worker: Any = method.attach(torch.optim.SGD(parameters.values(), lr=0.1), parameters.items())
    ks = []
    for step in range(12):
        (group,) = worker.optimizer.param_groups
        if trouble == "lr 0":
            group["lr"] = 0.0 if step >= 4 else 0.1
        loss = {"nan": math.nan, "inf": math.inf, "negative": -1.0, "zero": 0.0}.get(trouble, 1.0)
        is_bad = step >= 4 and dist.get_rank() == 1  # on one rank only
        worker.observe_loss(torch.tensor(loss if is_bad else 1.0))
        parameters["a"].grad = torch.zeros(3)
        worker.optimizer.step()
        ks.append(worker.k_steps)
    return ks


def test_numbers_that_make_no_sense_leave_k_as_it_is() -> None:
    troubles = ("nan", "inf", "negative", "zero", "lr 0")
    for trouble, results in run_each(2, {each: partial(adapt_in_trouble, each) for each in troubles}).items():
        assert results == [[2] * 12] * 2, trouble


def adapt_without_loss() -> str:
    parameters = make_parameters({"a": (3,)})
    worker = LocalSGD(k_steps=1, begin_step=0, rule="adacomm").attach(
        torch.optim.SGD(parameters.values(), lr=0.1), parameters.items()
    )
    try:
        worker.optimizer.step()
    except ConfigurationError as error:
        return str(error)
    return ""


def test_an_adaptive_rule_without_a_loss_says_so_on_all_ranks() -> None:
    for message in run_ranks(adapt_without_loss, 2):
        assert "training_step" in message


def detect_lr_decay() -> list[bool]:
    parameters = make_parameters({"a": (3,)})
    method = LocalSGD(k_steps=4, begin_step="first_lr_decay")
    worker = method.attach(torch.optim.SGD(parameters.values(), lr=0.1), parameters.items())
    local = []
    for step in range(8):
        # warm-up, a plateau, and a decay that rank 1 is late to hear of
        lr = [0.05, 0.1, 0.1, 0.1, 0.01, 0.01, 0.01, 0.01][step]
        worker.optimizer.param_groups[0]["lr"] = 0.1 if step == 4 and dist.get_rank() == 1 else lr
        backward(parameters, step)
        local.append(worker.is_local)
        worker.optimizer.step()
    return local


def test_the_first_decay_of_the_learning_rate_begins_the_local_phase_on_all_ranks() -> None:
    first, second = run_ranks(detect_lr_decay, 2)
    assert first == second == [False] * 5 + [True] * 3


# Samples and requests ----------------------------------------------------------------------------------------------


def weigh_samples() -> float:
    weight = Parameter(torch.zeros(()))
    worker: Any = LocalSGD(k_steps=2, begin_step=3).attach(torch.optim.SGD([weight], lr=1.0), [("w", weight)])
    worker.weighs_samples = True
    for step in range(5):
        worker.num_samples += 100.0 * (1 + dist.get_rank()) if step < 3 else 4.0 - dist.get_rank()
        weight.grad = torch.tensor(-1.0 - dist.get_rank())
        worker.optimizer.step()
    return float(weight)


def test_samples_of_synchronous_steps_do_not_weigh() -> None:
    # three steps of 1.5, then two of 1 (8 samples) or of 2 (6 samples)
    assert run_ranks(weigh_samples, 2) == [pytest.approx(4.5 + (8 * 2 + 6 * 4) / 14)] * 2


def come_to_the_end() -> dict[str, Any]:
    """Ranks average, also where none has trained since the last average."""
    worker, parameters = attach(LocalSGD(k_steps=4, begin_step=0), shapes={"a": (3,)})
    worker.weighs_samples = True
    for step in range(2):
        worker.num_samples += 1.0
        take_step(worker, parameters, step)
    worker.average()
    worker.stop_requested = worker.save_requested = dist.get_rank() == 1
    worker.average()
    requests = worker.stop_agreed, worker.save_agreed, worker.save_requested
    return {"requests": requests, "averages": worker.num_averages}


def test_what_ranks_tell_each_other_arrives_also_where_nobody_has_trained() -> None:
    for result in run_ranks(come_to_the_end, 2):
        assert result["requests"] == (True, True, False)
        assert result["averages"] == 1, "an average of nothing is none"


# What fragments are for -----------------------------------------------------------------------------------------------

CONTROL = all_reduce_bytes(4 * (6 + 2 * 2), 2)  # the control message of each average, on two ranks


def sent_by_step(numels: Sequence[int], steps: int, method: Method) -> list[int]:
    parameters = [Parameter(torch.zeros(numel)) for numel in numels]
    worker = method.attach(torch.optim.SGD(parameters, lr=0.0), [])
    sent = [0]
    for _ in range(steps):
        worker.optimizer.step()
        sent.append(worker.peers.ledger.sent_bytes)
    return [after - before for before, after in pairwise(sent)]


def test_the_peak_of_the_traffic_is_divided_by_the_number_of_fragments() -> None:
    numels = [1000 + number for number in range(24)]
    mixed = [8192, 4096] + [100] * 20  # of which the small are sent whole: most of the bytes
    calls = {f"whole {n}": partial(sent_by_step, numels, 16, LocalSGD(8, 0, num_fragments=n)) for n in (1, 4)}
    for n in (1, 2):
        sparse = LocalSGD(2, 0, num_fragments=n, compression=Compression())
        calls[f"sparse {n}"] = partial(sent_by_step, mixed, 2, sparse)
    results = {name: by_rank[0] for name, by_rank in run_each(2, calls).items()}
    whole, parts = results["whole 1"], results["whole 4"]
    assert [step for step, nbytes in enumerate(whole, start=1) if nbytes] == [8, 16]
    assert [step for step, nbytes in enumerate(parts, start=1) if nbytes] == [2, 4, 6, 8, 10, 12, 14, 16]
    assert sum(parts) == sum(whole) + (8 - 2) * CONTROL
    assert max(parts) - CONTROL < 1.01 * (max(whole) - CONTROL) / 4
    # Balanced by the bytes that are sent, not by elements.
    assert max(results["sparse 2"]) - CONTROL < 1.05 * (max(results["sparse 1"]) - CONTROL) / 2


def fragments_of(value_dtype: str) -> list[int]:
    """Return the bytes of float64 tensors, which are sent whole, by fragment."""
    parameters = [Parameter(torch.zeros(1600)), *(Parameter(torch.zeros(100, dtype=torch.float64)) for _ in range(4))]
    method = LocalSGD(
        k_steps=2, begin_step=0, num_fragments=2, compression=None if value_dtype == "float32" else value_dtype
    )
    worker: Any = method.attach(torch.optim.SGD(parameters, lr=0.1), [])
    return [sum(p.dtype == torch.float64 for p in fragment.parameters) for fragment in worker.fragments]


def test_narrow_fragments_are_balanced_by_the_bytes_that_they_send() -> None:
    """1600 values in 4 bits are as many bytes as 100 in float64, and in float32 as many as 800."""
    results = run_each(2, {name: partial(fragments_of, name) for name in ("float32", "int4")})
    assert results == {"float32": [[0, 4]] * 2, "int4": [[1, 3]] * 2}


def add_a_group() -> tuple[list[list[str]], str]:
    parameters = make_parameters({"a": (40,), "b": (30,)})
    optimizer = torch.optim.SGD(parameters.values(), lr=0.05)
    late = make_parameters({"late": (5,)})
    worker: Any = LocalSGD(k_steps=4, begin_step=0, num_fragments=2).attach(
        optimizer, [*parameters.items(), *late.items()]
    )
    train_on(worker, parameters, range(3))
    optimizer.add_param_group({"params": list(late.values())})
    train_on(worker, {**parameters, **late}, range(3, 8))
    return [[worker.name_of(p) for p in f.parameters] for f in worker.fragments], digest(late.values())


def test_parameters_that_come_later_join_a_fragment() -> None:
    (fragments, first), (_, second) = run_ranks(add_a_group, 2)
    assert fragments == [["a"], ["b", "late"]]
    assert first == second


def streams(num_tensors: int, num_fragments: Any) -> tuple[int, int]:
    parameters = make_parameters({f"p{number}": (6,) for number in range(num_tensors)})
    optimizer = torch.optim.SGD(parameters.values(), lr=0.05)
    method = preset("streaming_diloco").replace(k_steps=5, num_fragments=num_fragments, delay_steps=1)
    worker: Any = method.attach(optimizer, parameters.items())
    train_on(worker, parameters, range(12))
    return len(worker.fragments), worker.num_averages


def test_a_preset_takes_no_more_fragments_than_there_are_tensors() -> None:
    for num_tensors, expected in ((1, 1), (3, 3), (6, 4)):
        for num_fragments, num_averages in run_ranks(streams, 2, num_tensors, "auto"):
            assert num_fragments == expected
            assert num_averages >= 2 * expected, "12 steps, each fragment every 5"
    with pytest.raises(AssertionError, match="num_fragments=4, and the optimizer has 3 tensors: give at most as many"):
        run_ranks(streams, 1, 3, 4)


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
