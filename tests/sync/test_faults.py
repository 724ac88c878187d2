"""A fault in a step or an average is an error on all ranks, and no weight has changed."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, AdamW, Optimizer, RMSprop

import lightning_lowbw as lowbw
from lightning_lowbw.comm.agreement import digest
from lightning_lowbw.comm.collectives import TensorWork
from lightning_lowbw.payloads import top_k
from lightning_lowbw.payloads.quantized import FORMATS
from tests.ranks import on_ranks
from tests.sync import problem
from tests.sync.problem import FLAT, MOMENTUM, NODES, OF_REPLICAS, Nodes, attach, message_of, same_on_all, take_step

SHAPES = {"matrix": (30, 20), "conv": (8, 4, 3, 3), "bias": (7,)}
METHOD = lowbw.DGC(sparsity=[0.9], min_numel=100)
OPTIMIZERS: list[Callable[..., Optimizer]] = [MOMENTUM, partial(AdamW, lr=0.02), partial(RMSprop, lr=0.002)]
CULPRIT = 1


def everything(worker: Any, parameters: problem.Parameters) -> list[Tensor]:
    """Return all that a step commits."""
    states = [value for state in worker.optimizer.state.values() for value in state.values()]
    return [*parameters.values(), *worker.residuals.values(), *(each for each in states if isinstance(each, Tensor))]


# Gradients that are not finite ----------------------------------------------------------------------------------------


BAD: list[tuple[lowbw.Method, float, str]] = [
    (METHOD, math.nan, "conv"),
    (METHOD, -math.inf, "bias"),
    (lowbw.DGC(rampup_begin_step=100), -math.inf, "bias"),
    (lowbw.QuantizedGradients(), -math.inf, "bias"),
    (lowbw.PowerSGD(), math.nan, "conv"),
]


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize(("method", "value", "name"), BAD)
@on_ranks()
def test_a_bad_gradient_on_one_rank_is_told_on_all_or_skipped_by_all(
    method: lowbw.Method, value: float, name: str, skips: bool
) -> None:
    """Two good steps, then one with a bad element on one rank, which is looked for before clipping."""
    worker, parameters = attach(method, shapes=SHAPES)
    problem.train_on(worker, parameters, range(2))
    weights = digest(parameters.values())
    before, groups = digest(everything(worker, parameters)), [dict(group) for group in worker.optimizer.param_groups]
    worker.optimizer.zero_grad()
    problem.backward(parameters, 2)
    if dist.get_rank() == CULPRIT:
        parameters[name].grad[(1,) * parameters[name].dim()] = value  # type: ignore[index]
    taken: list[bool] = []

    def exchange() -> None:
        with worker.stepping():
            worker.prepare()  # clipping spreads a NaN to all tensors: whose fault it was is known then
            torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
            taken.append(worker.exchange(skip_nonfinite=skips))

    message = message_of(exchange, lowbw.NonFiniteGradientError)
    if skips:  # counted, as `trainer.global_step` does
        assert (message, taken, worker.step) == (None, [False], 3)
    else:
        assert f"Step 2: the gradient of '{name}' on rank {CULPRIT} is not finite" in str(message)
        assert ("give it a warm-up (there is none" in str(message)) == (method == METHOD and name != "bias")
        assert worker.step == 2
    assert digest(parameters.values()) == weights
    if skips:  # nothing has entered the residuals
        assert digest(everything(worker, parameters)) == before
        assert [dict(group) for group in worker.optimizer.param_groups] == groups
        problem.train_on(worker, parameters, (3, 4))
        assert all(parameter.isfinite().all() for parameter in parameters.values())
        same_on_all(digest(parameters.values()))


@pytest.mark.parametrize(
    ("num_ranks", "make", "name"),
    [*((2, make, "matrix") for make in OPTIMIZERS), (2, MOMENTUM, "bias"), (4, OPTIMIZERS[1], "matrix")],
)
@on_ranks()
def test_what_is_not_finite_enters_no_state(num_ranks: int, make: Any, name: str) -> None:
    """A NaN that the pass finds which accumulates, by hand, without `stepping`."""
    worker, parameters = attach(METHOD, make, SHAPES, FLAT if num_ranks == 2 else NODES["blocks"])
    problem.train_on(worker, parameters, range(3))
    before = digest(parameters.values())
    worker.optimizer.zero_grad()
    problem.backward(parameters, 3)
    if dist.get_rank() == CULPRIT:
        parameters[name].grad.view(-1)[0] = torch.nan  # type: ignore[union-attr]
    assert f"Step 3: the gradient of '{name}'" in str(message_of(worker.exchange, lowbw.NonFiniteGradientError))
    assert digest(parameters.values()) == before
    assert all(bool(tensor.isfinite().all()) for tensor in everything(worker, parameters))


def add_up_too_much(checks_now: bool, nodes: Nodes, ends: bool) -> tuple[str, int]:
    """Return the error and its step; rank 1 has gradients as large as float32."""
    worker, parameters = attach(METHOD, MOMENTUM, SHAPES, nodes)
    for step in range(3):
        worker.optimizer.zero_grad()
        problem.backward(parameters, step)
        if dist.get_rank() == CULPRIT and (step or not ends):
            parameters["matrix"].grad.fill_(3e38)  # type: ignore[union-attr]
        try:
            with worker.stepping():
                if checks_now:
                    worker.prepare()
                worker.exchange()
                worker.optimizer.step()
            if ends and step == 2:
                worker.check_late_faults()
        except lowbw.NonFiniteGradientError as error:
            assert checks_now or all(bool(weight.isfinite().all()) for weight in parameters.values())
            return str(error), step
    return "", -1


@pytest.mark.fault
@pytest.mark.parametrize("num_ranks", [2, 4])
@on_ranks()
def test_finite_gradients_whose_sum_is_not_are_told(num_ranks: int) -> None:
    """In the step that adds them up; where gradients are looked at before, in the next one, or where the run ends."""
    nodes, place = (FLAT, "on rank ") if num_ranks == 2 else (NODES["blocks"], "on node 0")
    owner = "on rank 1" if num_ranks == 2 else "on node 0 (ranks [0, 1])"
    said, _ = add_up_too_much(False, nodes, False)
    assert f"'matrix' {owner} is not finite, or too large to be added to the residual" in said
    for ends in (False, True):
        said, step = add_up_too_much(True, nodes, ends)
        assert f"the gradient of 'matrix' {place}" in said
        assert "added to the residual, has become too large for float32" in said
        assert step == 2 or not ends


def overflow_changes(value_dtype: str, ends: str, nodes: Nodes) -> list[str]:
    """Return the message of each period, or ""; in the first one rank 1, and with int4 each rank, moves by 3e38."""
    weight = Parameter(torch.zeros(600))
    optimizer = SGD([weight], lr=1.0)
    method = lowbw.LocalSGD(2, 0, compression=value_dtype)
    worker: Any = method.attach(optimizer, [("w", weight)], topology=nodes or None)
    is_large, said = value_dtype != "float16" or dist.get_rank() == 1, []
    for period in range(3):
        try:
            for _ in range(2):
                weight.grad = torch.full_like(weight, -1.5e38 if is_large and period == 0 else -1.0)
                optimizer.step()
            if ends == "finish":
                worker.finish()
            elif ends == "consensus":
                with worker.consensus():
                    pass
            said.append("")
        except lowbw.NonFiniteGradientError as error:
            return [*said, str(error)]
    return said


FEW_BITS = [(2, "float16", "next"), (3, "int4", "next"), (2, "float16", "finish"), (3, "int4", "consensus")]


@pytest.mark.fault
@pytest.mark.parametrize(("num_ranks", "value_dtype", "ends"), [*FEW_BITS, (4, "float16", "next")])
@on_ranks()
def test_what_is_kept_of_changes_too_large_is_told(num_ranks: int, value_dtype: str, ends: str) -> None:
    """The weights agree then, and may be finite: of 3e38 float16 sends 65504, and the rest adds up to an infinity."""
    *before, said = same_on_all(overflow_changes(value_dtype, ends, NODES["blocks"] if num_ranks == 4 else ()))
    assert before == ([""] if ends == "next" else [])
    owner = "rank 1" if value_dtype == "float16" else "rank 0"
    owner = "node 0 (ranks [0, 1])" if num_ranks == 4 else owner
    assert f"what was kept of earlier changes of the weights on {owner} has become too large for float32" in said
    assert f"Step {4 if ends == 'next' else 2}: " in said


@pytest.mark.parametrize("dtype", FORMATS)
@on_ranks()
def test_what_is_kept_of_gradients_too_large_is_told(dtype: str) -> None:
    """The sum of two gradients is not finite, or the residual grows until it is not finite: never silently."""
    for value in (3e38, 1e30):
        weight, said = Parameter(torch.zeros(300)), list[str]()
        optimizer = SGD([weight], lr=1e-39)
        lowbw.QuantizedGradients(dtype).attach(optimizer, [("weight", weight)])
        for _ in range(3):
            weight.grad = torch.full((300,), value)
            said.append(message_of(optimizer.step, lowbw.NonFiniteGradientError) or "")  # type: ignore[arg-type]
        told = "what was kept of earlier gradients on rank 0 has become too large for float32. "
        is_right = not any(said) and (value < 1e31 or bool(((weight + 0.9).abs() < 0.01).all()))
        assert is_right or any(told in each or "a sum was not finite" in each for each in said)
        assert said[0] == ""


# Damaged messages -----------------------------------------------------------------------------------------------------


@on_ranks()
def test_a_damaged_message_raises_where_it_is_received() -> None:
    """A bit flips in what rank 1 receives in the second step."""
    worker, parameters = attach(METHOD, shapes=SHAPES)
    take_step(worker, parameters, 0)
    receive = TensorWork.wait

    def receive_flipped(work: Any) -> Tensor:
        gathered = receive(work).clone()
        if gathered.dtype == torch.uint8:
            gathered.view(-1)[0] ^= dist.get_rank()  # of the unary part: a position more, or one less
        return gathered

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TensorWork, "wait", receive_flipped)
        said = message_of(partial(take_step, worker, parameters, 1), ValueError)
    assert said is None if dist.get_rank() == 0 else "positions; " in str(said)


# Replicas that are not finite, or at another step ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "choices",
    [
        *(problem.with_base({}), problem.with_base({"delay_steps": 1}), {}, {"compression": "int8"}),
        {"outer": "nesterov", "num_fragments": 2},
    ],
)
@on_ranks()
def test_a_rank_that_is_not_finite_is_named_on_all_and_nothing_is_averaged(choices: dict[str, Any]) -> None:
    worker, parameters = attach(lowbw.LocalSGD(**{"k_steps": 3, "begin_step": 0, **choices}), shapes=OF_REPLICAS)
    problem.train_on(worker, parameters, range(4))
    if dist.get_rank() == 1:
        with torch.no_grad():
            parameters["matrix"][1, 2] = math.nan if "delay_steps" in choices else math.inf
    with pytest.raises(lowbw.NonFiniteGradientError, match=r"rank 1 up to step .*left parameter 'matrix'") as caught:
        problem.train_on(worker, parameters, range(4, 9))
    assert dist.get_rank() == 1 or all(parameter.isfinite().all() for parameter in parameters.values())
    same_on_all((worker.step, str(caught.value)))


@on_ranks()
def test_ranks_at_different_steps_are_found_out() -> None:
    worker, parameters = attach(lowbw.LocalSGD(k_steps=4, begin_step=0), shapes={"a": (3,)})
    problem.train_on(worker, parameters, range(1))  # in which ranks at different steps would be told
    worker.step += dist.get_rank()
    with pytest.raises(lowbw.DisagreementError, match="optimizer steps: rank 0 has 4, rank 1 has 5"):
        problem.train_on(worker, parameters, range(1, 4))


@pytest.mark.parametrize("topology", [NODES["blocks"], "flat"])
@on_ranks(4)
def test_ranks_in_different_batches_are_found_out(topology: Any) -> None:
    """Half types between nodes round no number of the status."""
    where = lowbw.Where(topology=topology, inter_dtype="float32" if topology == "flat" else "bfloat16")
    method = lowbw.Method(when=lowbw.EveryStep(1), what=lowbw.TopK(min_numel=1), where=where)
    worker, parameters = attach(method, shapes={"a": (40, 30)})
    problem.backward(parameters, 0)
    worker.batch = 300 + (dist.get_rank() == 3)
    worker.prepare()
    said = "batch: rank 0 has 300, rank 1 has 300, rank 2 has 300, rank 3 has 301"
    with pytest.raises(lowbw.DisagreementError, match=said):
        worker.exchange()


# Refusals in a step ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clips", [False, True])
@on_ranks()
def test_a_sparse_layout_on_one_rank_is_refused_on_all(clips: bool) -> None:
    group = dist.new_group(timeout=timedelta(seconds=5))  # so that a rank left behind says so soon
    embedding = torch.nn.Embedding(50, 10, sparse=True)
    worker = METHOD.attach(SGD(embedding.parameters(), lr=0.1), embedding.named_parameters(), process_group=group)
    if dist.get_rank() == CULPRIT:  # the other rank's batch does not need this layer
        embedding(torch.tensor([1, 2])).sum().backward()

    def exchange() -> None:
        if clips:
            worker.prepare()
        worker.exchange()

    with pytest.raises(lowbw.ConfigurationError, match=f"'weight' on rank {CULPRIT} is sparse"):
        exchange()


TURN_DENSE: list[tuple[dict[str, Any], str]] = [
    ({"rampup_begin_step": 100}, "Step 2 would be dense"),
    ({"min_numel": 500}, "Step 2 would send 'conv' dense"),
    ({"exclude": ["mat*"]}, "Step 2 would send 'matrix' dense"),
]


@on_ranks()
def test_what_would_turn_dense_is_refused() -> None:
    """The residual would never be sent, and the velocity differs from rank to rank."""
    worker, parameters = attach(METHOD, shapes=SHAPES)
    problem.train_on(worker, parameters, range(2))
    before = digest(everything(worker, parameters))
    for change, words in TURN_DENSE:
        worker.use(METHOD.replace(**change))
        with pytest.raises(lowbw.ConfigurationError, match=words):
            take_step(worker, parameters, 2)
        assert digest(everything(worker, parameters)) == before
    worker.use(METHOD.replace(sparsity=[0.5]))  # other densities are fine
    take_step(worker, parameters, 2)


@on_ranks()
def test_a_tensor_without_room_for_its_positions_is_refused_on_all_ranks() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(top_k, "MAX_NUMEL", 500)  # the matrix has more
        for exclude in ([], ["matrix"]):
            worker, parameters = attach(METHOD.replace(exclude=exclude), shapes=SHAPES)
            said = message_of(partial(take_step, worker, parameters, 0), lowbw.ConfigurationError)
            assert said is None if exclude else "exclude=['matrix']" in str(said)
