"""Deep gradient compression on real gloo ranks, in a plain loop, against the paper's equations in one process.

On one level, and on two, where it is that of one rank per node on each part of a tensor.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import SGD, AdamW

from lightning_lowbw import DGC, Hierarchical, Method
from lightning_lowbw.comm.agreement import digest
from lightning_lowbw.comm.topology import part_of
from lightning_lowbw.compress.selection import num_selected
from lightning_lowbw.sync.gradient import GradientSync
from tests.ranks import run_ranks
from tests.sync.problem import (
    AWKWARD,
    CLOSE,
    DENSE_THEN_SPARSE,
    DENSITIES,
    EXACT,
    FLAT,
    NODES,
    Nodes,
    backward,
    by_the_paper,
    coefficients,
    each,
    from_memory,
    make_parameters,
    make_weight,
    take_step,
    weights_of,
)

THREE: Nodes = ((0,), (1,), (2,))
STAIRS: dict[str, Any] = {"rampup_begin_step": 2, "rampup_step": 6, "sparsity": [0.5, 0.9, 0.97]}  # then 3 %
STEPS = 10
Case = tuple[dict[str, Any], dict[str, float], dict[str, Any]]  # of SGD, of clipping, of the method
MOMENTUM: dict[str, Any] = {"momentum": 0.9}
NESTEROV: dict[str, Any] = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.05}
CASES: list[Case] = [
    ({}, {}, {}),
    (MOMENTUM, {}, {}),  # which is cleared at 3 %, not above
    (MOMENTUM, {}, {"momentum_masking": True, "min_numel": 18, "rampup_begin_step": 0}),
    (MOMENTUM, {}, {"momentum_masking": False, "min_numel": 18}),
    (NESTEROV, {"norm": 0.5}, {"min_numel": 18}),
    ({**MOMENTUM, "weight_decay": 0.05}, {"value": 0.3}, {}),
    (MOMENTUM, {}, {"chunk": 64, "mean_over": "senders"}),
    (MOMENTUM, {}, {"decay": 0.8, "min_numel": 18}),
]


def make_method(knobs: dict[str, Any]) -> Method:
    return DGC(**{**STAIRS, **EXACT, "min_numel": 1, **knobs})


def train(sgd: dict[str, Any], clip: dict[str, float], knobs: dict[str, Any], nodes: Nodes) -> dict[str, Any]:
    parameters = make_parameters(AWKWARD)
    worker = make_method(knobs).attach(SGD(parameters.values(), lr=0.05, **sgd), parameters.items(), topology=nodes)
    assert isinstance(worker, GradientSync)
    digests, num_empty = [], []
    for step in range(STEPS):
        worker.optimizer.zero_grad()
        backward(parameters, step)
        (worker.prepare if worker.clips_before_exchange else worker.exchange)()
        if "norm" in clip:
            nn.utils.clip_grad_norm_(parameters.values(), clip["norm"] * worker.clip_factor)
        if "value" in clip:
            nn.utils.clip_grad_value_(parameters.values(), clip["value"])
        worker.optimizer.step()
        digests.append(digest(parameters.values()))
        num_empty.append({name: int((residual == 0).sum()) for name, residual in worker.residuals.items()})
    state = {worker.name_of(parameter): entry for parameter, entry in worker.optimizer.state.items()}
    assert all(parameters[name].stride() == make_weight(name, shape).stride() for name, shape in AWKWARD.items())
    assert all(
        entry["momentum_buffer"].stride() == parameters[name].stride()
        for name, entry in state.items()
        if entry.get("momentum_buffer") is not None
    )
    return {
        "digests": digests,
        "weights": weights_of(parameters),
        "num_empty": num_empty,
        "residuals": {name: residual.clone() for name, residual in worker.residuals.items()},
        "in optimizer": {name for name, entry in state.items() if entry.get("momentum_buffer") is not None},
        "whole": {worker.name_of(p): u for p, u in worker.whole_momentum().items()},
    }


@pytest.mark.parametrize(
    ("nodes", "cases"),
    [
        (FLAT, CASES),
        (THREE, [CASES[4], CASES[6]]),
        (NODES["blocks"], [CASES[1], CASES[4], CASES[6]]),
        (NODES["crossed"], [CASES[2], CASES[3]]),
        (NODES["three nodes"], [CASES[5]]),
    ],
    ids=["2 ranks", "3 ranks", "blocks", "crossed", "three nodes"],
)
def test_equals_the_paper(nodes: Nodes, cases: list[Case]) -> None:
    by_rank = run_ranks(each, sum(map(len, nodes)), train, [(*case, nodes) for case in cases])
    for (sgd, clip, knobs), *results in zip(cases, *by_rank, strict=True):
        assert len({tuple(result["digests"]) for result in results}) == 1, "replicas differ"
        method = make_method(knobs)
        densities = {step: method.when.density(step) for step in range(STEPS)}
        options = {"masking": knobs.get("momentum_masking"), **sgd}
        options |= {name: knobs[name] for name in ("chunk", "decay", "mean_over") if name in knobs}
        min_numel = method.what.min_numel
        expected, oracles = by_the_paper(AWKWARD, nodes, densities, clip=clip, min_numel=min_numel, **options)
        for name, weight in expected.items():
            what = f"{sgd} {clip} {knobs} {name}"
            torch.testing.assert_close(results[0]["weights"][name].contiguous(), weight, **CLOSE, msg=what)
            assert not weight.numel() or not weight.equal(make_weight(name, AWKWARD[name]).contiguous())
            if weight.numel() >= min_numel:
                check_what_is_kept(name, weight.numel(), nodes, results, oracles)
        if len(nodes) == 2 == sum(map(len, nodes)) and not {"chunk", "decay"} & set(knobs):
            numels = {name: weight.numel() for name, weight in expected.items() if weight.numel() >= max(1, min_numel)}
            for step, density in densities.items():  # what was sent is the only place where the residual is zero
                sent = {name: num_selected(numel, density) for name, numel in numels.items()} if density < 1 else {}
                assert {n: k for n, k in results[0]["num_empty"][step].items() if k} == sent


def check_what_is_kept(name: str, numel: int, nodes: Nodes, results: list[dict[str, Any]], oracles: Any) -> None:
    """Each rank of a node keeps its part of u and v; the optimizer keeps no u of its own beside it."""
    for number, node in enumerate(nodes):
        for local_rank, rank in enumerate(node):
            part, oracle = part_of(numel, local_rank, len(node)), oracles[name, local_rank]
            assert results[rank]["residuals"][name].numel() == part.stop - part.start
            if part.stop > part.start:
                v = oracle.v[number, 0].flatten()
                torch.testing.assert_close(results[rank]["residuals"][name], v, rtol=1e-4, atol=1e-4)
            is_in_parts = len(node) > 1 and oracle.momentum != 0
            assert (name in results[rank]["whole"]) == is_in_parts
            assert not is_in_parts or name not in results[rank]["in optimizer"]
        if len(node) > 1 and oracles[name, 0].momentum and not oracles[name, 0].nesterov:  # the paper's is another one
            own = [oracles[name, local_rank].u.get((number, 0), torch.zeros(0)) for local_rank in range(len(node))]
            whole = from_memory(torch.cat(own), name, AWKWARD[name])
            torch.testing.assert_close(results[node[0]]["whole"][name].contiguous(), whole, rtol=1e-4, atol=1e-4)


# Settings of the optimizer --------------------------------------------------------------------------------------------

GROUPS: dict[str, dict[str, Any]] = {
    "matrix": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1},
    "cube": {"lr": 0.02, "momentum": 0.5, "weight_decay": 0.0, "nesterov": True},
    "vector": {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.2},
    "conv": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
}
BY_THE_PAPER = DENSE_THEN_SPARSE.replace(momentum_masking=True)


def scheduled(settings: dict[str, Any], step: int) -> dict[str, float]:
    """As OneCycleLR does; the paper's form of Nesterov's momentum is torch's only while that does not change."""
    change = 1.0 if "nesterov" in settings else 1 - 0.03 * step
    return {"lr": settings["lr"] * (1 + step) / 4, "momentum": settings["momentum"] * change}


def train_groups() -> tuple[dict[str, Tensor], str]:
    parameters = make_parameters({name: AWKWARD[name] for name in GROUPS})
    groups = [{"params": [parameters[name]], **settings} for name, settings in GROUPS.items()]
    worker = BY_THE_PAPER.attach(SGD(groups), parameters.items())
    for step in DENSITIES:
        for group, settings in zip(worker.optimizer.param_groups, GROUPS.values(), strict=True):
            group.update(scheduled(settings, step))
        before = [{**group, "params": None} for group in worker.optimizer.param_groups]
        worker.optimizer.zero_grad()
        backward(parameters, step)
        with worker.stepping():
            worker.exchange()
            inside = {(group["momentum"], group["weight_decay"]) for group in worker.optimizer.param_groups}
            assert (inside == {(0.0, 0.0)}) == worker.is_sparse  # type: ignore[attr-defined]
            worker.optimizer.step()
        assert [{**group, "params": None} for group in worker.optimizer.param_groups] == before
    return weights_of(parameters), digest(parameters.values())


def test_each_param_group_has_its_own_settings_which_a_scheduler_may_change_in_each_step() -> None:
    (weights, first), (_, second) = run_ranks(train_groups, 2)
    assert first == second
    for name, settings in GROUPS.items():
        expected, _ = by_the_paper(
            {name: AWKWARD[name]},
            FLAT,
            DENSITIES,
            masking=True,
            settings=lambda step, settings=settings: scheduled(settings, step),  # type: ignore[misc]
            **settings,
        )
        torch.testing.assert_close(weights[name].contiguous(), expected[name], **CLOSE)


VARIANTS: dict[str, tuple[dict[str, Any], float]] = {
    "default": ({}, 1.0),
    "foreach": ({"foreach": True}, 1.0),
    "fused": ({"fused": True}, 1.0),
    "maximize": ({"maximize": True, "foreach": False}, -1.0),
    "maximize fused": ({"maximize": True, "fused": True}, -1.0),
}


def train_variant(options: dict[str, Any], sign: float) -> dict[str, Tensor]:
    parameters = make_parameters({name: AWKWARD[name] for name in ("matrix", "conv", "vector")})
    sgd = SGD(parameters.values(), lr=0.05, **NESTEROV, **options)
    worker = DENSE_THEN_SPARSE.replace(min_numel=18).attach(sgd, parameters.items())
    for step in DENSITIES:
        take_step(worker, parameters, step, sign=sign)
    return weights_of(parameters)


def test_implementations_of_sgd_and_its_direction_make_no_difference() -> None:
    default, *others = run_ranks(each, 2, train_variant, list(VARIANTS.values()))[0]
    for variant, weights in zip([*VARIANTS][1:], others, strict=True):
        for name, weight in weights.items():
            close = CLOSE if "fused" in variant else {"rtol": 0.0, "atol": 0.0}  # which rounds a step in another way
            torch.testing.assert_close(weight, default[name], **close, msg=f"{variant} {name}")


# Dtypes ---------------------------------------------------------------------------------------------------------------


def train_dtype(dtype: torch.dtype, value_dtype: str) -> dict[str, Any]:
    parameters = make_parameters(AWKWARD, dtype)
    sgd = SGD(parameters.values(), lr=0.05, momentum=0.9)
    worker: Any = DENSE_THEN_SPARSE.replace(value_dtype=value_dtype).attach(sgd, parameters.items())
    for step in DENSITIES:
        take_step(worker, parameters, step)
    kept = {residual.dtype for residual in worker.residuals.values()}
    return {"weights": weights_of(parameters), "digest": digest(parameters.values()), "kept": kept}


def test_dtypes_of_parameters_and_of_the_wire() -> None:
    expected, _ = by_the_paper(AWKWARD, FLAT, DENSITIES, momentum=0.9)
    cases = [(dtype, value) for dtype in (torch.bfloat16, torch.float64) for value in ("float32", "int8")]
    for (dtype, _), first, second in zip(cases, *run_ranks(each, 2, train_dtype, cases), strict=True):
        assert first["digest"] == second["digest"]
        assert first["kept"] == {torch.float64 if dtype == torch.float64 else torch.float32}
        tolerance = 0.1 if dtype == torch.bfloat16 else 0.02
        for name, weight in first["weights"].items():
            assert weight.dtype == dtype
            assert weight.isfinite().all()
            if weight.numel() >= 100:  # rounding lets a few other elements be selected than in full precision
                assert ((weight.float() - expected[name]).abs() < tolerance).float().mean() > 0.93
                assert ((make_weight(name, AWKWARD[name]) - expected[name]).abs() > 2 * tolerance).float().mean() > 0.5


def keep_what_is_small(options: dict[str, Any]) -> Tensor:
    """Of a hundred elements one is sent; another gets 1, and then a billionth in each step."""
    weight = Parameter(torch.zeros(100, dtype=torch.float64))
    worker: Any = DGC(sparsity=[0.99], min_numel=1, **options).attach(SGD([weight], lr=0.1), [("weight", weight)])
    for step in range(21):
        weight.grad = torch.zeros_like(weight)
        weight.grad[7], weight.grad[5] = 10.0, 1e-9 if step else 1.0
        if step == 20:
            worker.load_state_dict(worker.state_dict())
        worker.optimizer.step()
    torch.testing.assert_close(float(weight[7].detach()), -21.0, rtol=2e-2, atol=0.0)
    return worker.residuals["weight"][5]


def average_in_double() -> list[list[float]]:
    """Dense, in float64 and bfloat16; and complex numbers, beside sparse steps."""
    wide, narrow = Parameter(torch.zeros(3, dtype=torch.float64)), Parameter(torch.zeros(2, dtype=torch.bfloat16))
    both = Parameter(torch.zeros(40, dtype=torch.complex64))
    sgd = SGD([wide, narrow, both], lr=1.0)
    worker: Any = DGC(min_numel=30).attach(sgd, [("wide", wide), ("narrow", narrow), ("complex", both)])
    wide.grad = torch.tensor([1 + 2.0**-40, 2.0**-300, 1e200], dtype=torch.float64)
    narrow.grad = torch.full((2,), 1.0 + dist.get_rank(), dtype=torch.bfloat16)
    both.grad = torch.full((40,), complex(2 * dist.get_rank(), -1.0))
    sgd.step()
    assert "complex" not in worker.residuals
    return [wide.tolist(), narrow.tolist(), torch.view_as_real(both.detach())[0].tolist()]


def test_float64_keeps_its_precision_and_complex_numbers_are_sent_dense() -> None:
    options = [{}, {"value_dtype": "int8"}, {"chunk": 50}, {"exchange": "reduce_scatter"}]
    for kept in run_ranks(each, 2, keep_what_is_small, [(each_options,) for each_options in options]):
        assert all(abs(float(each) - (1 + 20e-9)) < 1e-14 for each in kept)
    wide = [-(1 + 2.0**-40), -(2.0**-300), -1e200]
    assert run_ranks(average_in_double, 2) == [[wide, [-1.5, -1.5], [-1.0, 1.0]]] * 2


def train_in_bfloat16(nodes: Nodes) -> list[tuple[bool, int]]:
    """Return whether weights are those by hand, and the bytes between nodes of a step."""
    found = []
    methods = [Hierarchical(inter_dtype=dtype, topology=nodes) for dtype in ("float32", "bfloat16")]
    warm_up = DGC(rampup_begin_step=2, min_numel=1).at(nodes)
    for method in [*methods, Method(when=warm_up.when, what=warm_up.what, where=methods[1].where)]:
        parameters = make_parameters({"matrix": (30, 20)})
        expected, is_half = make_weight("matrix", (30, 20)), method.where.inter_dtype != "float32"
        worker = method.attach(SGD(parameters.values(), lr=0.5), parameters.items())
        for step in range(2):
            sent = worker.peers.ledger.inter_bytes
            take_step(worker, parameters, step)
            own = [(coefficients("matrix", expected, each, step) + expected) * 0.25 for each in range(4)]
            parts = [own[first] + own[second] for first, second in nodes]
            parts = [part.bfloat16() if is_half else part for part in parts]
            expected = expected - 0.5 * (parts[0] + parts[1]).float()
        found.append((parameters["matrix"].equal(expected), worker.peers.ledger.inter_bytes - sent))
    return found


def test_half_types_between_nodes_are_sent_in_dense_steps() -> None:
    """The status beside them is exact, and has a message of its own."""
    for wide, half, warm_up in run_ranks(train_in_bfloat16, 4, NODES["blocks"]):
        assert [wide[0], half[0], warm_up[0]] == [True] * 3
        assert wide[1] - half[1] == wide[1] - warm_up[1] == 2 * 600 // 2  # of a rank's part, sent to one other node


# Parameters that come and go ------------------------------------------------------------------------------------------

CHANGING = {
    "always": (20, 10),
    "pausing": (20, 10),
    "dense_pausing": (7,),
    "on_rank_0": (20, 10),
    "dense_on_rank_0": (7,),
    "never": (20, 10),
    "frozen": (20, 10),
    "dense_frozen": (7,),
    "stopped": (15, 10),
    "added": (15, 10),
}
PAUSED, FROZEN, PAUSE, UNFREEZE, ADD, STOP = ("pausing", "dense_pausing"), ("frozen", "dense_frozen"), (4, 5), 3, 5, 6
SETTINGS: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}
OF_ADDED: dict[str, Any] = {"lr": 0.2, "momentum": 0.5, "nesterov": True}


def everything_about(worker: Any, parameter: Parameter) -> str:
    residual = [worker.residuals[name] for name in [worker.name_of(parameter)] if name in worker.residuals]
    return digest([parameter, worker.optimizer.state[parameter]["momentum_buffer"], *residual])


def train_through_changes() -> dict[str, Any]:
    parameters = make_parameters(CHANGING)
    added = parameters["added"]  # is not the model's: a loss's own parameter, say
    optimizer = SGD([p for p in parameters.values() if p is not added], **SETTINGS)
    named = [(name, p) for name, p in parameters.items() if p is not added]
    worker: Any = BY_THE_PAPER.replace(min_numel=100).attach(optimizer, named)
    elsewhere = () if dist.get_rank() == 0 else ("on_rank_0", "dense_on_rank_0")
    digests = []
    for step in DENSITIES:
        for name in FROZEN:
            parameters[name].requires_grad_(step >= UNFREEZE)
        parameters["stopped"].requires_grad_(step < STOP)
        if step == ADD:
            optimizer.add_param_group({"params": [added], "weight_decay": 0.0, **OF_ADDED})
        pausing = [parameters[name] for name in PAUSED] if step in PAUSE else []
        before, resting = (
            weights_of(parameters),
            [everything_about(worker, each_parameter) for each_parameter in pausing],
        )
        take_step(worker, parameters, step, unused=("never", *elsewhere, *(PAUSED if step in PAUSE else ())))
        assert [everything_about(worker, each_parameter) for each_parameter in pausing] == resting
        moved = {name for name, parameter in parameters.items() if not parameter.equal(before[name])}
        still = {"never"} | ({*PAUSED} if step in PAUSE else set()) | ({"stopped"} if step >= STOP else set())
        still |= ({*FROZEN} if step < UNFREEZE else set()) | ({"added"} if step < ADD else set())
        assert moved == set(CHANGING) - still
        digests.append(digest(parameters.values()))
    never = parameters["never"]
    assert never.grad is None
    assert never not in optimizer.state
    assert set(worker.state_dict()["residuals"]) == {
        "always",
        "pausing",
        "on_rank_0",
        "frozen",
        "stopped",
        "optimizer.9",
    }
    return {"digests": digests, "weights": weights_of(parameters)}


def test_unused_frozen_unfrozen_and_added_parameters() -> None:
    """Unused on all ranks: left alone, to the bit. On some ranks: all ranks receive what the others send."""
    results = run_ranks(train_through_changes, 3)
    assert results[0]["digests"] == results[1]["digests"] == results[2]["digests"]
    for name, shape in CHANGING.items():
        first = UNFREEZE if name in FROZEN else ADD if name == "added" else 0
        steps = [s for s in DENSITIES if s >= first and not (name in PAUSED and s in PAUSE)]
        steps = [s for s in steps if name != "never" and not (name == "stopped" and s >= STOP)]
        expected, _ = by_the_paper(
            {name: shape},
            THREE,
            {step: DENSITIES[step] for step in steps},
            min_numel=100,
            users=[0] if name.endswith("on_rank_0") else None,
            masking=True,
            **(OF_ADDED if name == "added" else SETTINGS),
        )
        torch.testing.assert_close(results[0]["weights"][name], expected[name], **CLOSE)


def step_beside_empty_shards(shapes: dict[str, tuple[int, ...]], knobs: dict[str, Any]) -> tuple[str, list[float]]:
    parameters = make_parameters(shapes)
    optimizer = AdamW(parameters.values(), lr=0.02)
    worker = DGC(sparsity=[0.9], min_numel=18, **knobs).attach(optimizer, parameters.items())
    worker.params.whole_numels = dict.fromkeys(parameters.values(), 2000)
    for step in range(2):
        take_step(worker, parameters, step)
    worker.finish()
    return digest(parameters.values()), [float(optimizer.state[p]["step"]) for p in parameters.values()]


def test_shards_without_elements_are_not_sent() -> None:
    """The whole tensor is sent sparse; a rank and its peers have no row of it. Their counts of steps go on."""
    shapes: list[dict[str, tuple[int, ...]]] = [{"elsewhere": (0, 20)}, {"elsewhere": (0, 20), "here": (30, 20)}]
    options: list[dict[str, Any]] = [{}, {"mean_over": "senders"}, {"exchange": "reduce_scatter"}]
    cases = [(each_shapes, knobs) for each_shapes in shapes for knobs in options]
    first, second = run_ranks(each, 2, step_beside_empty_shards, cases)
    assert first == second
    assert [counts for _, counts in first] == [[2.0] * len(each_shapes) for each_shapes, _ in cases]
