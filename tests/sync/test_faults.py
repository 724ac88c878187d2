"""What goes wrong in a step or an average is told on all ranks; a state names a torn step, and training goes on."""

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

from lightning_lowbw import (
    DGC,
    ConfigurationError,
    DisagreementError,
    EveryStep,
    LocalSGD,
    Method,
    NonFiniteGradientError,
    PowerSGD,
    Quantized,
    QuantizedGradients,
    TopK,
    Where,
)
from lightning_lowbw.comm.agreement import digest
from lightning_lowbw.comm.collectives import Collectives, TensorWork
from lightning_lowbw.compress import codec
from lightning_lowbw.compress.quantization import QUANTIZED_NAMES
from lightning_lowbw.compress.top_k import Compression
from lightning_lowbw.sync import exchange as exchanges
from lightning_lowbw.sync.exchange import DenseMean, PendingWhole
from lightning_lowbw.sync.local import LocalSync
from tests.oracle import mean_of
from tests.ranks import run_ranks
from tests.sync import problem
from tests.sync.problem import FLAT, MOMENTUM, NODES, OF_REPLICAS, Nodes, backward, each, message_of, take_step

SHAPES = {"matrix": (30, 20), "conv": (8, 4, 3, 3), "bias": (7,)}
METHOD = DGC(sparsity=[0.9], min_numel=100)
OPTIMIZERS: list[Callable[..., Optimizer]] = [MOMENTUM, partial(AdamW, lr=0.02), partial(RMSprop, lr=0.002)]
CULPRIT = 1


def attach(
    method: Method = METHOD, shapes: Any = SHAPES, make: Any = MOMENTUM, nodes: Nodes = FLAT
) -> tuple[Any, problem.Parameters]:
    parameters = problem.make_parameters(shapes)
    topology = None if nodes == FLAT else nodes
    return method.attach(make(parameters.values()), parameters.items(), topology=topology), parameters


def everything(worker: Any, parameters: problem.Parameters) -> list[Tensor]:
    """Return all that a step commits."""
    states = [value for state in worker.optimizer.state.values() for value in state.values()]
    return [*parameters.values(), *worker.residuals.values(), *(each for each in states if isinstance(each, Tensor))]


# Gradients that are not finite ----------------------------------------------------------------------------------------


def poison(method: Method, value: float, name: str, skips: bool) -> tuple[str | None, list[bool], int, str]:
    """Two good steps, one with a bad element on one rank, which is looked for before clipping, two good ones."""
    worker, parameters = attach(method)
    for step in range(2):
        take_step(worker, parameters, step)
    before, groups = digest(everything(worker, parameters)), [dict(group) for group in worker.optimizer.param_groups]
    worker.optimizer.zero_grad()
    backward(parameters, 2)
    if dist.get_rank() == CULPRIT:
        parameters[name].grad[(1,) * parameters[name].dim()] = value  # type: ignore[index]
    taken: list[bool] = []

    def exchange() -> None:
        with worker.stepping():
            worker.prepare()  # clipping spreads a NaN to all tensors: whose fault it was is known then
            torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
            taken.append(worker.exchange(skip_nonfinite=skips))

    message = message_of(exchange, NonFiniteGradientError)
    assert digest(everything(worker, parameters)) == before
    assert [dict(group) for group in worker.optimizer.param_groups] == groups
    assert worker.state_dict()["torn"] == ""
    steps = worker.step
    for step in (3, 4):
        take_step(worker, parameters, step)
    assert all(parameter.isfinite().all() for parameter in parameters.values())
    return message, taken, steps, digest(parameters.values())


def test_a_bad_gradient_on_one_rank_is_told_on_all_or_skipped_by_all() -> None:
    bad = [
        (METHOD, math.nan, "conv"),
        (DGC(rampup_begin_step=100), -math.inf, "bias"),
        (QuantizedGradients(), -math.inf, "bias"),
        (PowerSGD(), math.nan, "conv"),
    ]
    cases = [(*case, skips) for case in bad for skips in (False, True)] + [(METHOD, -math.inf, "bias", False)]
    for (method, _, name, skips), first, second in zip(cases, *run_ranks(each, 2, poison, cases), strict=True):
        assert first == second
        message, taken, steps, _ = first
        if skips:  # counted, as `trainer.global_step` does
            assert (message, taken, steps) == (None, [False], 3)
            continue
        assert f"Step 2: the gradient of '{name}' on rank {CULPRIT} is not finite" in str(message)
        assert steps == 2
        assert ("give it a warm-up (there is none" in str(message)) == (method == METHOD and name != "bias")


def meet_a_fault(make: Any, name: str, nodes: Nodes) -> list[Any]:
    """A NaN that the pass finds which accumulates, by hand, without `stepping`; then a good step."""
    worker, parameters = attach(METHOD, SHAPES, make, nodes)
    for step in range(3):
        take_step(worker, parameters, step)
    before = digest(parameters.values())
    worker.optimizer.zero_grad()
    backward(parameters, 3)
    if dist.get_rank() == CULPRIT:
        parameters[name].grad.view(-1)[0] = torch.nan  # type: ignore[union-attr]
    said = [message_of(worker.exchange, NonFiniteGradientError), worker.state_dict()["torn"]]
    assert digest(parameters.values()) == before
    assert all(bool(tensor.isfinite().all()) for tensor in everything(worker, parameters))
    take_step(worker, parameters, 4)
    assert worker.state_dict()["torn"] == ""
    return [*said, digest(parameters.values())]


OF_OPTIMIZERS = [(make, "matrix") for make in OPTIMIZERS]


@pytest.mark.parametrize(
    ("nodes", "cases"),
    [(FLAT, [*OF_OPTIMIZERS, (MOMENTUM, "bias")]), (NODES["blocks"], OF_OPTIMIZERS[1:2])],
    ids=["flat", "two levels"],
)
def test_what_is_not_finite_enters_no_state(nodes: Nodes, cases: list[tuple[Any, str]]) -> None:
    results = run_ranks(each, sum(map(len, nodes)), meet_a_fault, [(*case, nodes) for case in cases])
    for (_, name), *of_case in zip(cases, *results, strict=True):
        assert all(found == of_case[0] for found in of_case)
        assert f"Step 3: the gradient of '{name}'" in of_case[0][0]
        assert of_case[0][1] == "the exchange of gradients after step 3"


def add_up_too_much(checks_now: bool, nodes: Nodes, ends: bool) -> tuple[str, int]:
    """Return what is said, and in which step; rank 1 has gradients as large as float32."""
    worker, parameters = attach(METHOD, nodes=nodes)
    for step in range(3):
        worker.optimizer.zero_grad()
        backward(parameters, step)
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
        except NonFiniteGradientError as error:
            assert checks_now or all(bool(weight.isfinite().all()) for weight in parameters.values())
            return str(error), step
    return "", -1


@pytest.mark.fault(
    "gradients of 3e38, which are finite, and whose sum with earlier ones is not",
    "an error on all ranks that names the rank and the parameter, in the next step, or at the end of the fit",
)
@pytest.mark.parametrize("nodes", [FLAT, NODES["blocks"]], ids=["flat", "two levels"])
def test_finite_gradients_whose_sum_is_not_are_told(nodes: Nodes) -> None:
    """In the step that adds them up; where gradients are looked at before, in the next one, or where the run ends."""
    cases = [(False, nodes, False), (True, nodes, False), (True, nodes, True)]
    for (at_once, _), late, at_the_end in run_ranks(each, sum(map(len, nodes)), add_up_too_much, cases):
        who = "on rank 1" if nodes == FLAT else "on node 0 (ranks [0, 1])"
        assert f"'matrix' {who} is not finite, or too large to be added to the residual" in at_once
        for said, _ in (late, at_the_end):
            assert f"the gradient of 'matrix' {'on rank ' if nodes == FLAT else 'on node 0'}" in said
            assert "added to the residual, has become too large for float32" in said
        assert at_the_end[1] == 2


def overflow_gradients(dtype: str, value: float) -> list[str]:
    weight = Parameter(torch.zeros(300))
    optimizer = SGD([weight], lr=1e-39)
    QuantizedGradients(dtype).attach(optimizer, [("weight", weight)])
    said = []
    for _ in range(3):
        weight.grad = torch.full((300,), value)
        said.append(message_of(optimizer.step, NonFiniteGradientError) or "")  # type: ignore[arg-type]
    return said


def overflow_changes(value_dtype: str, ends: str, nodes: Nodes) -> list[str]:
    """Return what each period says, until one fails, where ranks move by 3e38 in the first one: with float16 rank 1."""
    weight = Parameter(torch.zeros(600))
    optimizer = SGD([weight], lr=1.0)
    worker: Any = LocalSGD(2, 0, compression=value_dtype).attach(optimizer, [("w", weight)], topology=nodes or None)
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
        except NonFiniteGradientError as error:
            return [*said, str(error)]
    return said


@pytest.mark.fault(
    "local steps that change weights by 3e38, which overflows in the residual of an average in few bits",
    "an error on all ranks that names the rank, at the next average, at the end, or before the weights are saved",
)
def test_what_is_kept_of_changes_too_large_is_told() -> None:
    """The weights agree then, and may be finite: of 3e38 float16 sends 65504, and the rest adds up to an infinity."""
    cases = [("float16", "next", ()), ("int4", "next", ()), ("float16", "finish", ()), ("int4", "consensus", ())]
    for (name, ends, _), first, second in zip(cases, *run_ranks(each, 2, overflow_changes, cases), strict=True):
        assert first == second
        *before, said = first
        assert before == ([""] if ends == "next" else [])
        who = "rank 1" if name == "float16" else "rank 0"
        assert f"what was kept of earlier changes of the weights on {who} has become too large for float32" in said
        assert f"Step {4 if ends == 'next' else 2}: " in said
    for said in run_ranks(overflow_changes, 4, "float16", "next", NODES["blocks"]):
        assert said[0] == ""
        assert "changes of the weights on node 0 (ranks [0, 1]) has become too large for float32" in said[1]


def test_what_is_kept_of_gradients_too_large_is_told() -> None:
    """The sum of two is not finite, or what is kept of them grows until it is not: never silently."""
    cases = [(dtype, value) for dtype in QUANTIZED_NAMES for value in (3e38, 1e30)]
    for results in run_ranks(each, 2, overflow_gradients, cases):
        for (_, value), said in zip(cases, results, strict=True):
            told = "what was kept of earlier gradients on rank 0 has become too large for float32. " in said[-1]
            assert told or (value < 1e31 and said == ["", "", ""]) or "a sum was not finite" in said[-1]
            assert said[0] == ""


# Damaged messages -----------------------------------------------------------------------------------------------------

WITH_MESSAGES = {"dgc": METHOD, "local_sgd": LocalSGD(2, 0, compression={"min_numel": 100, "value_dtype": "float32"})}


def take_steps(worker: Any, parameters: problem.Parameters) -> None:
    """Take the steps of an exchange."""
    for _ in range(2 if worker.is_local else 1):
        for parameter in parameters.values():
            parameter.grad = torch.ones_like(parameter).add_(0.1 * dist.get_rank())
        worker.optimizer.step()


def receive_damage(name: str) -> list[str | None]:
    """Return what each exchange says, where a bit flips in what rank 1 receives in the second one."""
    worker, parameters = attach(WITH_MESSAGES[name])
    receive, said = TensorWork.wait, [message_of(partial(take_steps, worker, parameters), ValueError)]

    def receive_flipped(work: Any) -> Tensor:
        gathered = receive(work).clone()
        if gathered.dtype == torch.uint8:
            gathered.view(-1)[0] ^= dist.get_rank()  # of the unary part: a position more, or one less
        return gathered

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TensorWork, "wait", receive_flipped)
        return [*said, message_of(partial(take_steps, worker, parameters), ValueError)]


def note_damage(name: str, ends: bool) -> str | None:
    """Return what is said in the exchange, or at the end, after one in which rank 1 notes what a GPU would."""
    worker, parameters = attach(WITH_MESSAGES[name])
    take_steps(worker, parameters)
    worker.compressed.fault.fill_(dist.get_rank() == 1)
    return message_of(worker.check_late_faults if ends else partial(take_steps, worker, parameters), ValueError)


def test_a_damaged_message_raises_where_it_is_received_and_on_a_gpu_in_the_next_step_on_all() -> None:
    """The others learn of it as of any error of a rank."""
    for first, second in zip(*run_ranks(each, 2, receive_damage, [(name,) for name in WITH_MESSAGES]), strict=True):
        assert first == [None, None]
        assert second[0] is None
        assert "positions; " in str(second[1])
    for said in run_ranks(each, 2, note_damage, [("dgc", False), ("dgc", True), ("local_sgd", False)]):
        assert all("rank 1 has received a damaged message: its positions were too many" in str(each) for each in said)


# Steps and averages that fail -----------------------------------------------------------------------------------------


class LinkLost(RuntimeError):
    pass


def lose_the_link(*_: Any, **__: Any) -> None:
    raise LinkLost


def lack_memory(*_: Any, **__: Any) -> None:
    raise MemoryError


def fail(patch: pytest.MonkeyPatch, method: Method, where: str) -> None:
    """Let the link be lost from now on, or memory be short in a function of the codec."""
    if where:
        patch.setattr(codec, where, lack_memory)
    elif isinstance(method.what, Quantized):
        patch.setattr(Collectives, "all_to_all", lose_the_link)
    else:
        patch.setattr(TensorWork, "wait", lose_the_link)


def fail_in_the_exchange(method: Method, where: str) -> tuple[str, int, str]:
    """Fail in the second step, on all ranks, and go on."""
    worker, parameters = attach(method)
    take_step(worker, parameters, 0)
    weights, groups = digest(parameters.values()), [dict(group) for group in worker.optimizer.param_groups]
    worker.optimizer.zero_grad()
    backward(parameters, 1)
    with pytest.MonkeyPatch.context() as patch:
        fail(patch, method, where)
        with pytest.raises((LinkLost, MemoryError)):
            worker.optimizer.step()
    assert digest(parameters.values()) == weights
    assert [dict(group) for group in worker.optimizer.param_groups] == groups
    torn = worker.state_dict()["torn"]
    for step in (1, 2):
        take_step(worker, parameters, step)
    assert all(tensor.isfinite().all() for tensor in everything(worker, parameters))
    return torn, worker.step, worker.state_dict()["torn"] + digest(parameters.values())


def test_an_exchange_that_fails_is_named_and_the_next_one_is_whole() -> None:
    """What had been selected is lost."""
    methods = [METHOD, METHOD.replace(exchange="reduce_scatter"), QuantizedGradients()]
    cases = [(method, "") for method in methods] + [(METHOD, "pack")]
    for first, second in zip(*run_ranks(each, 2, fail_in_the_exchange, cases), strict=True):
        assert first == second
        assert first[:2] == ("the exchange of gradients after step 1", 3)


def fail_inside_a_step() -> None:
    worker, parameters = attach()
    take_step(worker, parameters, 0)
    backward(parameters, 1)
    of_user = [dict(group) for group in worker.optimizer.param_groups]

    def step() -> None:
        with worker.stepping():
            worker.exchange()
            raise KeyError("in the middle")

    assert message_of(step, KeyError) == "'in the middle'"
    assert [dict(group) for group in worker.optimizer.param_groups] == of_user
    assert worker.state_dict()["torn"] == "the optimizer's step after step 1", "others may have taken it"
    take_step(worker, parameters, 1)
    assert worker.state_dict()["torn"] == ""


def test_a_step_that_raised_is_torn_and_leaves_the_users_values() -> None:
    run_ranks(fail_inside_a_step, 2)


PULL = torch.linspace(1, 2, 2560)


def fail_in_an_average(options: dict[str, Any], where: str) -> dict[str, Any]:
    """Average once, fail in the second average, take the step again; nothing is forgotten but what was kept then."""
    weight = Parameter(torch.zeros(2560))
    method = LocalSGD(3, 0, **options)
    worker: Any = method.attach(SGD([weight], lr=1.0), [("w", weight)])

    def step(number: int = 1) -> None:
        for _ in range(number):
            weight.grad = -PULL.roll(400 * dist.get_rank())
            worker.optimizer.step()

    step(5)
    lost = worker.state_dict()["residuals"].get("w", torch.zeros(2560))
    with pytest.MonkeyPatch.context() as patch:
        fail(patch, method, where)
        step(worker.when.delay_steps)
        with pytest.raises((LinkLost, MemoryError)):
            step()
    torn = worker.state_dict()["torn"]
    step(4)
    own, state = weight.detach().clone(), worker.state_dict()
    worker.finish()
    kept = state["residuals"].get("w", torch.zeros(2560))
    steps = 10 + worker.when.delay_steps
    return {"there": own + kept + lost, "steps": steps, "counted": worker.step, "torn": torn, "end": digest([weight])}


TOP_K = {"compression": Compression(decay=1.0, density=0.1, min_numel=1, value_dtype="float32", mean_over="ranks")}


def test_an_average_that_fails_leaves_each_rank_what_it_had() -> None:
    """Its step is taken again. Weights and residuals are together what the steps have done, but what had been kept."""
    cases: list[tuple[dict[str, Any], str]] = [({}, ""), (TOP_K, ""), (TOP_K, "pack"), ({"compression": "int8"}, "")]
    cases.append(({**TOP_K, "delay_steps": 2}, ""))
    for results in zip(*run_ranks(each, 2, fail_in_an_average, cases), strict=True):
        assert len({result["end"] for result in results}) == 1
        done = mean_of([result["steps"] * PULL.roll(400 * rank) for rank, result in enumerate(results)])
        torch.testing.assert_close(mean_of([result["there"] for result in results]), done, rtol=1e-3, atol=1e-3)
        for result in results:
            assert "the average" in result["torn"]
            assert result["counted"] == result["steps"] - 1


# Replicas that are not finite, or at another step ---------------------------------------------------------------------


def poison_a_replica(choices: dict[str, Any]) -> tuple[int, str]:
    worker, parameters = attach(LocalSGD(**{"k_steps": 3, "begin_step": 0, **choices}), OF_REPLICAS)
    for step in range(9):
        if step == 4 and dist.get_rank() == 1:
            with torch.no_grad():
                parameters["matrix"][1, 2] = math.nan if "delay_steps" in choices else math.inf
        try:
            problem.train_on(worker, parameters, [step])
        except NonFiniteGradientError as error:
            assert dist.get_rank() == 1 or all(parameter.isfinite().all() for parameter in parameters.values())
            return step, str(error)
    return -1, ""


def test_a_rank_that_is_not_finite_is_named_on_all_and_nothing_is_averaged() -> None:
    cases = [problem.with_base({}), problem.with_base({"delay_steps": 1}), {}, {"compression": "int8"}]
    cases.append({"outer": "nesterov", "num_fragments": 2})
    for first, second in zip(*run_ranks(each, 2, poison_a_replica, [(case,) for case in cases]), strict=True):
        assert first == second
        step, message = first
        assert step >= 4
        assert "rank 1 up to step " in message
        assert "left parameter 'matrix'" in message


def fall_out_of_step() -> str | None:
    worker, parameters = attach(LocalSGD(k_steps=4, begin_step=0), {"a": (3,)})
    problem.train_on(worker, parameters, range(1))  # in which ranks at different steps would be told
    worker.step += dist.get_rank()
    return message_of(lambda: problem.train_on(worker, parameters, range(1, 4)), DisagreementError)


def reach_the_exchange_in_another_batch(topology: Any) -> str | None:
    parameters = problem.make_parameters({"a": (40, 30)})
    where = Where(topology=topology, inter_dtype="float32" if topology == "flat" else "bfloat16")
    method = Method(when=EveryStep(1), what=TopK(min_numel=1), where=where)
    worker = method.attach(SGD(parameters.values(), lr=0.05), parameters.items())
    backward(parameters, 0)
    worker.batch = 300 + (dist.get_rank() == 3)
    worker.prepare()
    return message_of(worker.exchange, DisagreementError)


def train_with_weights_that_differ() -> str | None:
    worker, parameters = attach(DGC(min_numel=1))
    worker.is_compared = True
    with torch.no_grad():
        parameters["matrix"][0, 0] += 1e-6 * dist.get_rank()
    return message_of(lambda: take_step(worker, parameters, 0), DisagreementError)


def test_ranks_out_of_step_or_with_other_weights_are_found_out() -> None:
    """Half types between nodes round no number of the status."""
    found = problem.run_each(2, {"step": fall_out_of_step, "weights": train_with_weights_that_differ})
    assert all("optimizer steps: rank 0 has 4, rank 1 has 5" in str(message) for message in found["step"])
    assert all("the weights differ between the ranks" in str(message) for message in found["weights"])
    for messages in run_ranks(each, 4, reach_the_exchange_in_another_batch, [(NODES["blocks"],), ("flat",)]):
        for message in messages:
            assert "batch: rank 0 has 300, rank 1 has 300, rank 2 has 300, rank 3 has 301" in str(message)


def lose_a_rank_while_the_consensus_is_shown() -> tuple[str | None, bool, bool]:
    # Of two types, and so in two buckets.
    parameters = {"weight": Parameter(torch.ones(4)), "bias": Parameter(torch.ones(3, dtype=torch.float64))}
    optimizer, buffers = SGD(parameters.values(), lr=0.1), {"seen": torch.ones(2)}
    worker = LocalSGD(4, 0).attach(optimizer, parameters.items(), named_buffers=buffers)
    assert isinstance(worker, LocalSync)
    for tensor in [*parameters.values(), *buffers.values()]:
        tensor.grad = torch.full_like(tensor, dist.get_rank() + 1.0)
    optimizer.step()
    buffers["seen"] += dist.get_rank()
    own, begun, wait = digest([*parameters.values(), *buffers.values()]), [], PendingWhole.wait

    def fail_in_the_second(pending: PendingWhole) -> tuple[DenseMean, Tensor]:
        begun.append(pending.names)
        if len(begun) == 2:
            raise RuntimeError("gloo: a peer has gone")
        return wait(pending)

    PendingWhole.wait = fail_in_the_second  # type: ignore[method-assign]
    said = message_of(worker.show_consensus, RuntimeError)
    is_own = digest([*parameters.values(), *buffers.values()]) == own
    PendingWhole.wait = wait  # type: ignore[method-assign]
    with worker.consensus():
        is_mean = all(each.allclose(torch.full_like(each, 0.85)) for each in parameters.values())
    return said, is_own, is_mean and digest([*parameters.values(), *buffers.values()]) == own


def test_a_consensus_that_arrives_in_part_leaves_each_rank_its_own_weights() -> None:
    """A checkpoint that the exception's handler saves would have some tensors of one model, and some of another."""
    assert run_ranks(lose_a_rank_while_the_consensus_is_shown, 2) == [("gloo: a peer has gone", True, True)] * 2


# What is refused in a step --------------------------------------------------------------------------------------------


def meet_a_sparse_layout_on_one_rank(method: Method, clips: bool) -> str | None:
    group = dist.new_group(timeout=timedelta(seconds=5))  # so that a rank left behind says so soon
    embedding = torch.nn.Embedding(50, 10, sparse=True)
    worker = method.attach(SGD(embedding.parameters(), lr=0.1), embedding.named_parameters(), process_group=group)
    if dist.get_rank() == CULPRIT:  # the other rank's batch does not need this layer
        embedding(torch.tensor([1, 2])).sum().backward()

    def step() -> None:
        if clips:
            worker.prepare()
        worker.exchange()

    return message_of(step, ConfigurationError)


def test_a_sparse_layout_on_one_rank_is_refused_on_all() -> None:
    for messages in run_ranks(each, 2, meet_a_sparse_layout_on_one_rank, [(METHOD, False), (METHOD, True)]):
        for message in messages:
            assert f"'weight' on rank {CULPRIT} is sparse" in str(message)


TURN_DENSE: list[dict[str, Any]] = [{"rampup_begin_step": 100}, {"min_numel": 500}, {"exclude": ["mat*"]}]


def turn_dense() -> list[str | None]:
    worker, parameters = attach()
    for step in range(2):
        take_step(worker, parameters, step)
    before, said = digest(everything(worker, parameters)), []
    for change in TURN_DENSE:
        worker.method = METHOD.replace(**change)
        said.append(message_of(lambda: take_step(worker, parameters, 2), ConfigurationError))
        assert digest(everything(worker, parameters)) == before
    worker.method = METHOD.replace(sparsity=[0.5])  # other densities are fine
    take_step(worker, parameters, 2)
    return said


def exclude_a_giant(exclude: list[str]) -> str | None:
    exchanges.MAX_NUMEL = 500  # the matrix has more
    worker, parameters = attach(METHOD.replace(exclude=exclude))
    return message_of(lambda: take_step(worker, parameters, 0), ConfigurationError)


def test_what_cannot_be_sent_is_refused_on_all_ranks() -> None:
    """The residual of a tensor that turns dense would never be sent, and its velocity differs from rank to rank."""
    for schedule, min_numel, exclude in run_ranks(turn_dense, 2):
        assert "Step 2 would be dense" in schedule
        assert "Step 2 would send 'conv' dense" in min_numel
        assert "Step 2 would send 'matrix' dense" in exclude
    for giant, excluded in run_ranks(each, 2, exclude_a_giant, [([],), (["matrix"],)]):
        assert "exclude=['matrix']" in str(giant)
        assert excluded is None
