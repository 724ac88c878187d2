"""Deep gradient compression on real gloo ranks, in a plain loop, against the paper's equations in one process.

On one level, and on two, where it is that of one rank per node on each part of a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import SGD, Adam, Optimizer, RMSprop

from lightning_lowbw import DGC, Method, PowerSGD, QuantizedGradients
from lightning_lowbw.comm import peers
from lightning_lowbw.comm.agreement import digest
from lightning_lowbw.comm.peers import part_of
from lightning_lowbw.payloads import top_k
from tests.ranks import on_ranks
from tests.sync import problem
from tests.sync.problem import AWKWARD, CLOSE, DENSE_THEN_SPARSE, DENSITIES, EXACT, FLAT, NODES, THREE, Nodes

STAIRS: dict[str, Any] = {"rampup_begin_step": 2, "rampup_step": 6, "sparsity": [0.5, 0.9, 0.97]}  # then 3 %
STEPS = 8
Case = tuple[dict[str, Any], dict[str, float], dict[str, Any]]  # of SGD, of clipping, of the method
MOMENTUM: dict[str, Any] = {"momentum": 0.9}
NESTEROV: dict[str, Any] = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.05}
CLIMBING: dict[str, Any] = {**MOMENTUM, "weight_decay": 0.05, "maximize": True, "fused": True}
CASES: list[Case] = [
    ({}, {}, {}),
    (MOMENTUM, {}, {}),  # which is cleared at 3 %, not above
    (MOMENTUM, {}, {"momentum_masking": True, "min_numel": 18, "rampup_begin_step": 0}),
    (CLIMBING, {"value": 0.3}, {"momentum_masking": False, "min_numel": 18}),
    (NESTEROV, {"norm": 0.5}, {"min_numel": 18}),
    (MOMENTUM, {}, {"chunk": 64, "mean_over": "senders", "decay": 0.8}),
]


def make_method(knobs: dict[str, Any]) -> Method:
    return DGC(**{**STAIRS, **EXACT, "min_numel": 1, **knobs})


def exchange_and_clip(limits: dict[str, float], worker: Any, parameters: Any, step: int) -> None:
    (worker.prepare if worker.plan.clips_before_exchange else worker.exchange)()
    if "norm" in limits:
        nn.utils.clip_grad_norm_(parameters.values(), limits["norm"] * worker.plan.clip_factor)
    if "value" in limits:
        nn.utils.clip_grad_value_(parameters.values(), limits["value"])


@pytest.mark.parametrize(
    ("nodes", "cases"),
    [(FLAT, CASES), (THREE, [CASES[4]]), (NODES["crossed"], [CASES[2], CASES[4], CASES[5]])],
    ids=["2 ranks", "3 ranks", "crossed"],
)
def test_equals_the_paper(nodes: Nodes, cases: list[Case]) -> None:
    """Weights, and what each rank keeps of its part; also where the optimizer climbs, or is a fused one."""
    calls = {}
    for number, (sgd, clip, knobs) in enumerate(cases):
        make, sign = partial(SGD, lr=0.05, **sgd), -1.0 if "maximize" in sgd else 1.0
        training = partial(problem.train, make_method(knobs), make, nodes=nodes, sign=sign)
        calls[number] = partial(training, after=partial(exchange_and_clip, clip))
    for (sgd, clip, knobs), results in zip(cases, problem.run_each(sum(map(len, nodes)), calls).values(), strict=True):
        assert len({tuple(result["digests"]) for result in results}) == 1, "replicas differ"
        method, min_numel = make_method(knobs), knobs.get("min_numel", 1)
        densities = {step: method.when.density(step) for step in range(STEPS)}
        options = {"masking": knobs.get("momentum_masking"), **sgd}
        options = {name: value for name, value in options.items() if name not in ("maximize", "fused")}
        options |= {name: knobs[name] for name in ("chunk", "decay", "mean_over") if name in knobs}
        expected, oracles = problem.by_the_paper(AWKWARD, nodes, densities, clip=clip, min_numel=min_numel, **options)
        for name, weight in expected.items():
            what = f"{sgd} {clip} {knobs} {name}"
            torch.testing.assert_close(results[0]["weights"][name].contiguous(), weight, **CLOSE, msg=what)
            assert not weight.numel() or not weight.equal(problem.make_weight(name, AWKWARD[name]).contiguous())
            for number, node in enumerate(nodes if weight.numel() >= max(1, min_numel) else ()):
                for local_rank, rank in enumerate(node):
                    part, kept = part_of(weight.numel(), local_rank, len(node)), results[rank]["residuals"][name]
                    assert kept.numel() == part.stop - part.start
                    if kept.numel():
                        v = oracles[name, local_rank].v[number, 0].flatten()
                        torch.testing.assert_close(kept, v, rtol=1e-4, atol=1e-4)


# Dtypes ---------------------------------------------------------------------------------------------------------------


SENT_WHOLE = "2 parameters, such as 'wide', are float64, complex or views with gaps: they are sent whole"


@on_ranks()
def test_float64_and_complex_numbers_are_sent_whole_which_rank_0_says() -> None:
    wide, narrow = Parameter(torch.zeros(40, dtype=torch.float64)), Parameter(torch.zeros(2, dtype=torch.bfloat16))
    both = Parameter(torch.zeros(40, dtype=torch.complex64))
    sgd = SGD([wide, narrow, both], lr=1.0)
    warns = pytest.warns(match=SENT_WHOLE) if dist.get_rank() == 0 else nullcontext()
    with warns:
        worker = DGC(min_numel=30).attach(sgd, [("wide", wide), ("narrow", narrow), ("complex", both)])
    wide.grad = torch.tensor([1 + 2.0**-40, 2.0**-300, 1e200, *[1.0] * 37], dtype=torch.float64)
    narrow.grad = torch.full((2,), 1.0 + dist.get_rank(), dtype=torch.bfloat16)
    both.grad = torch.full((40,), complex(2 * dist.get_rank(), -1.0))
    sgd.step()
    assert not worker.state_dict()["residuals"]
    assert wide.tolist()[:3] == [-(1 + 2.0**-40), -(2.0**-300), -1e200]
    assert narrow.tolist() == [-1.5, -1.5]
    assert torch.view_as_real(both.detach())[0].tolist() == [-1.0, 1.0]


# Parameters that come and go ------------------------------------------------------------------------------------------

NAMES = "always pausing dense_pausing on_rank_0 dense_on_rank_0 never frozen dense_frozen"
BY_THE_PAPER = DENSE_THEN_SPARSE.replace(momentum_masking=True)
CHANGING = {name: (7,) if name.startswith("dense") else (20, 10) for name in NAMES.split()}
CHANGING |= {"stopped": (15, 10), "added": (15, 10)}
PAUSE, UNFREEZE, ADD, STOP = (4, 5), 3, 5, 6
SETTINGS: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}
OF_ADDED: dict[str, Any] = {"lr": 0.2, "momentum": 0.5, "nesterov": True, "weight_decay": 0.0}


def moves_in(name: str, step: int) -> bool:
    """Return whether any rank uses a tensor in a step."""
    kind = name.removeprefix("dense_")
    is_used = {"pausing": step not in PAUSE, "never": False, "frozen": step >= UNFREEZE}
    return {**is_used, "stopped": step < STOP, "added": step >= ADD}.get(kind, True)


@on_ranks()
def test_unused_frozen_unfrozen_and_added_parameters() -> None:
    """Unused on all ranks: not stepped. On some ranks: all ranks receive the gradients of the other ranks."""
    parameters = problem.make_parameters(CHANGING)
    added = parameters["added"]  # is not the model's: a loss's own parameter, say
    optimizer = SGD([p for p in parameters.values() if p is not added], **SETTINGS)
    named = [(name, p) for name, p in parameters.items() if p is not added]
    worker = BY_THE_PAPER.replace(min_numel=100).attach(optimizer, named)
    elsewhere = [] if dist.get_rank() == 0 else ["on_rank_0", "dense_on_rank_0"]
    for step in DENSITIES:
        for name in ("frozen", "dense_frozen", "stopped"):
            parameters[name].requires_grad_(moves_in(name, step))
        if step == ADD:
            optimizer.add_param_group({"params": [added], **OF_ADDED})
        before = problem.weights_of(parameters)
        unused = [name for name in CHANGING if name in elsewhere or not moves_in(name, step)]
        problem.take_step(worker, parameters, step, unused)
        moved = {name for name, parameter in parameters.items() if not parameter.equal(before[name])}
        assert moved == {name for name in CHANGING if moves_in(name, step)}
        problem.same_on_all(digest(parameters.values()))
    sparse = {name for name, shape in CHANGING.items() if len(shape) == 2} - {"added"}
    assert set(worker.state_dict()["residuals"]) == {*sparse, "optimizer.9"}
    as_in_paper = {name: shape for name, shape in CHANGING.items() if name != "pausing"}  # its velocity never pauses
    for name, shape in as_in_paper.items():
        densities = {step: density for step, density in DENSITIES.items() if moves_in(name, step)}
        options = {"min_numel": 100, "users": [0] if name.endswith("on_rank_0") else None, "masking": True}
        options |= OF_ADDED if name == "added" else SETTINGS
        expected, _ = problem.by_the_paper({name: shape}, FLAT, densities, **options)
        torch.testing.assert_close(parameters[name].detach(), expected[name], **CLOSE)


ADAM, RMSPROP = partial(Adam, lr=0.05, amsgrad=True), partial(RMSprop, lr=0.05, momentum=0.9)
PLAIN, OF_TURNS = partial(SGD, lr=0.05), make_method({"rampup_begin_step": 0})
WITHOUT: list[tuple[Method, Any, Nodes]] = [
    (BY_THE_PAPER, problem.MOMENTUM, NODES["blocks"]),
    (BY_THE_PAPER, ADAM, FLAT),
    (BY_THE_PAPER, RMSPROP, FLAT),
    (OF_TURNS, PLAIN, FLAT),
    (OF_TURNS, PLAIN, NODES["blocks"]),
    (QuantizedGradients("int4"), problem.ADAMW, FLAT),
    (QuantizedGradients("int4"), problem.ADAMW, THREE),
    (PowerSGD(start_step=0), problem.MOMENTUM, FLAT),
]


@pytest.mark.parametrize(("num_ranks", "method", "make", "nodes"), [(sum(map(len, w[2])), *w) for w in WITHOUT])
@on_ranks()
def test_what_no_rank_uses_is_not_stepped(num_ranks: int, method: Method, make: Any, nodes: Nodes) -> None:
    """Elements of it are sent all the same, and stay in the residuals. Velocities go on."""
    worker, parameters = problem.attach(method, make, {"matrix": (20, 10), "other": (15, 10), "late": (15, 10)}, nodes)
    matrix = parameters["matrix"]

    def unsent() -> Tensor:
        """Return the sum of the residuals over the ranks."""
        total, residual = torch.zeros(matrix.numel()), worker.residuals["matrix"]
        total[worker.peers.part(matrix.numel()) if residual.numel() < matrix.numel() else slice(None)] = residual
        dist.all_reduce(total)
        return total

    for step in range(3):
        problem.take_step(worker, parameters, step, ["late"])
    before, late, kept = digest([matrix]), digest([parameters["late"]]), unsent()
    problem.take_step(worker, parameters, 3, ["matrix", "late"])
    assert (digest([matrix]), digest([parameters["late"]])) == (before, late)
    assert (matrix.grad, parameters["late"].grad) == (None, None)
    is_plain = worker.optimizer.param_groups[0].get("momentum") == 0.0
    if is_plain or worker.correction.kind == "error_feedback":  # without a velocity
        torch.testing.assert_close(unsent(), kept, rtol=1e-4, atol=1e-5)
    problem.take_step(worker, parameters, 4)
    problem.same_on_all(digest(parameters.values()))
    assert digest([matrix]) != before


def train_with_changes(keeps: bool, make: Callable[..., Optimizer], key: str) -> tuple[list[Tensor], int]:
    """Return the weights after each step of a training in which everything changes that a step depends on; and in how
    many steps the rows were those of the step before."""
    shapes = {"matrix": (30, 20), "conv": (8, 4, 3, 3), "bias": (17,), "other": (12, 10)}
    torch.manual_seed(0)
    parameters = {name: Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    matrix, conv = parameters["matrix"], parameters["conv"]
    ours = [p for name, p in parameters.items() if name != "other"]
    optimizer = make([{"params": ours[:1]}, {"params": ours[1:]}])
    worker = DGC(**{**STAIRS, **EXACT, "rampup_begin_step": 0, "min_numel": 18}).attach(optimizer, parameters.items())
    weights = []
    memory = {name: torch.empty_like(parameter) for name, parameter in parameters.items()}
    changes = {
        1: lambda: optimizer.state.clear(),
        2: lambda: optimizer.param_groups[0].update(lr=0.01),
        3: lambda: optimizer.param_groups[1].update(weight_decay=0.1, nesterov=True),
        4: lambda: matrix.requires_grad_(False),
        5: lambda: setattr(conv, "data", conv.data.clone()),
        6: lambda: matrix.requires_grad_(True),
        8: lambda: optimizer.add_param_group({"params": [parameters["other"]]}),
        9: lambda: setattr(worker, "method", DGC(**{**STAIRS, "rampup_begin_step": 0, "min_numel": 18})),
        10: lambda: optimizer.state[matrix].update({key: torch.ones_like(matrix)}),
        11: lambda: setattr(optimizer.state[conv][key], "data", torch.ones_like(conv.data)),
        12: lambda: optimizer.load_state_dict(deepcopy(optimizer.state_dict())),
        13: lambda: worker.load_state_dict(deepcopy(worker.state_dict())),
        14: lambda: worker.compressed.residuals.load({n: 2 * each for n, each in worker.residuals.items()}),
        15: lambda: [state.get("step", torch.zeros(())).fill_(100) for state in optimizer.state.values()],  # in place
        16: lambda: optimizer.param_groups[1].update(lr=0.01),  # which is in its decay, too
        17: lambda: optimizer.param_groups[1].update(momentum=0.0, betas=(0.5, 0.95)),
        18: lambda: optimizer.param_groups[0].update(weight_decay=0.1),
        19: lambda: matrix.data.copy_(0.5 * matrix.data),
        20: lambda: worker.to(torch.device("cpu")),
        21: lambda: optimizer.param_groups[0].update(maximize=True),
        22: lambda: optimizer.param_groups[1].update(momentum=0.5, nesterov=False),
        24: lambda: optimizer.param_groups[0]["params"].append(optimizer.param_groups[1]["params"].pop(0)),
    }
    rows, num_kept = None, 0
    for step in range(26):
        changes.get(step, lambda: None)()
        if not keeps:
            worker.table._made_of = ()
            getattr(worker.correction, "_counted", {}).clear()
            for cached in (top_k._messages, top_k._layouts, top_k._at, peers.fill_buckets, peers.part_of):
                cached.cache_clear()
        for name, parameter in parameters.items():
            gradient = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(97 * step + len(name)))
            gradient += dist.get_rank()
            is_missing = not parameter.requires_grad or (name, step, dist.get_rank()) == ("conv", 7, 1)
            parameter.grad = None if is_missing else memory[name].copy_(gradient) if step % 2 else gradient
        optimizer.step()
        weights += [parameter.detach().clone() for parameter in parameters.values()]
        rows, before = worker.table.rows, rows
        num_kept += rows is before
    return weights, num_kept


MAKERS: dict[str, tuple[Callable[..., Optimizer], str]] = {
    "SGD": (partial(SGD, lr=0.1, momentum=0.9), "momentum_buffer"),
    "Adam": (partial(Adam, lr=0.01, amsgrad=True), "exp_avg_sq"),
}


@pytest.mark.parametrize("name", MAKERS)
@on_ranks()
def test_what_is_kept_between_steps_is_never_stale(name: str) -> None:
    make, key = MAKERS[name]
    (kept, num_kept), (anew, num_anew) = (train_with_changes(keeps, make, key) for keeps in (True, False))
    assert len(kept) == 104
    assert all(map(torch.equal, kept, anew))
    assert (num_kept > 5, num_anew) == (True, 0), (num_kept, num_anew)
