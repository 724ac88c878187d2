"""Elastic rounds of members that are threads of one process, without torchft and without Lightning."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lightning_lowbw import ConfigurationError, DisagreementError, LocalSGD
from lightning_lowbw.comm.agreement import digest, gather
from lightning_lowbw.elastic import site, sync
from lightning_lowbw.elastic.group import Group, LostProcessError
from lightning_lowbw.elastic.membership import Quorum, Row, judge_of, latest_of, raise_refused, refusals
from lightning_lowbw.elastic.sync import ElasticSync
from lightning_lowbw.method import Method
from lightning_lowbw.sync.status import STOP
from tests.elastic.plain import KilledError, PlainMembership
from tests.ranks import on_ranks, run_ranks

K_STEPS, TOKENS = 3, 4
SPARSE: dict[str, Any] = {"density": 1 / 8, "chunk": 64, "min_numel": 64, "value_dtype": "float32", "decay": 1.0}
METHODS = {
    "local_sgd": LocalSGD(k_steps=K_STEPS, begin_step=0),
    "diloco": LocalSGD(k_steps=K_STEPS, begin_step=0, outer="nesterov"),
    "sparse_loco": LocalSGD(k_steps=K_STEPS, begin_step=0, compression=SPARSE),
}

HIDDEN = {name: method.replace(delay_steps=1) for name, method in METHODS.items()}


@dataclass
class Member:
    """A member with two tensors: sparse payloads select elements of "wide", and average "bias" whole.

    Args:
        store: of all members.
        number: from which its gradients follow.
        method: of all.
        last_step: of all.
        is_over: whether the member leaves; else after the last step.
        before: called before each step with the member and the number of the step.
        membership: more arguments.
        options: more arguments of `ElasticSync`.
        is_even: whether it tells one token in every round, whatever it has done.
        grace_s: time for which it waits for other members at the end.
    """

    store: dist.Store
    number: int
    method: Method
    last_step: int = 4 * K_STEPS
    is_over: Callable[[Member], bool] | None = None
    before: Callable[[Member, int], None] | None = None
    membership: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    is_even: bool = False
    grace_s: float = 1.0
    anchors: dict[int, list[Tensor]] = field(default_factory=dict)
    error: BaseException | None = None
    has_left: bool = False

    def __post_init__(self) -> None:
        self.contributors: dict[int, set[str]] = {}
        self.moved = torch.zeros(20, 13)  # by all steps
        self.parameters = make_parameters()
        self.there = PlainMembership(self.store, f"group {self.number}", **self.membership)
        optimizer = torch.optim.SGD(self.parameters.values(), lr=0.05, momentum=0.9)
        self.worker = ElasticSync(self.method, optimizer, self.parameters.items(), group_of(self.there), **self.options)
        self.worker.last_step = self.last_step
        self._ask, self.there.quorum = self.there.quorum, self.quorum  # type: ignore[method-assign]
        self._apply, self.worker._apply = self.worker._apply, self.apply  # type: ignore[method-assign]

    def quorum(self, row: Row, *arguments: Any) -> Quorum | None:
        return self._ask(row._replace(tokens=float(row.tokens > 0)) if self.is_even else row, *arguments)

    def apply(self, *arguments: Any) -> None:
        self._apply(*arguments)
        self.note()

    def run(self) -> None:
        try:
            self.worker.join()
            self.note()
            self.kept = float(self.kept_change().abs().sum())
            step = 0
            while not (self.is_over(self) if self.is_over else self.worker.is_complete):
                if self.before is not None:
                    self.before(self, step)
                self.take_step(step)
                step += 1
            self.worker.end(grace_s=self.grace_s)
            self.there.close()
            self.has_left = True
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.error = error
            if not isinstance(error, KilledError):
                self.there.close()

    def take_step(self, step: int) -> None:
        set_gradients(self.parameters, self.number, step)
        self.worker.tokens += TOKENS
        with self.worker.stepping():
            self.worker.exchange()
            before = self.parameters["wide"].detach().clone()
            self.worker.optimizer.step()
            self.moved += self.parameters["wide"].detach() - before
        if self.worker.has_communicated:
            self.note()

    def kept_change(self) -> Tensor:
        """Return what has not been averaged: of the weights, and of what sparse payloads keep back."""
        weight = self.parameters["wide"]
        residuals = {} if self.worker.site is None else self.worker.site.replica.residuals
        residual = residuals.get("wide", torch.zeros(weight.numel()))
        return weight.detach() - self.worker.replica.start[weight] + residual.view_as(weight)

    def note(self) -> None:
        number = self.worker.num_averages
        self.anchors[number] = [each.clone() for each in self.worker.replica.start.values()]
        self.contributors[number] = {name for name, last in self.worker.contributed.items() if last == number}


def group_of(membership: PlainMembership) -> Group:
    group = Group()
    group.membership = membership if group.rank == 0 else None
    return group


def make_parameters() -> dict[str, Parameter]:
    generator = torch.Generator().manual_seed(5)
    shapes = {"wide": (20, 13), "bias": (7,)}
    return {name: Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


def set_gradients(parameters: Mapping[str, Parameter], number: int, step: int) -> None:
    generator = torch.Generator().manual_seed(1000 * number + step)
    for parameter in parameters.values():
        parameter.grad = parameter.detach() + torch.randn(parameter.shape, generator=generator)


def train(members: Sequence[Member]) -> None:
    threads = [threading.Thread(target=member.run, name=f"member {member.number}", daemon=True) for member in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive()
    for member in members:
        if member.error is not None and not isinstance(member.error, KilledError):
            raise member.error


def assert_equal_anchors(members: Sequence[Member]) -> None:
    """Members that have ended the same round have the same anchor."""
    for number in {number for member in members for number in member.anchors}:
        first, *others = [member.anchors[number] for member in members if number in member.anchors]
        assert all(torch.equal(mine, each) for other in others for mine, each in zip(first, other, strict=True)), number


def check_nothing_is_lost(members: Sequence[Member], of: Sequence[Member]) -> None:
    """The sum of all steps = the committed changes, as some members have seen them, + residuals + work since then."""
    anchors = {number: mine[0] for member in of for number, mine in member.anchors.items()}
    contributors = {number: names for member in of for number, names in member.contributors.items()}
    last = max(anchors)
    assert set(anchors) == set(range(last + 1))
    committed = sum(len(contributors[n]) * (anchors[n] - anchors[n - 1]) for n in range(1, last + 1))
    kept = sum(member.kept_change() for member in members)
    torch.testing.assert_close(sum(member.moved for member in members), committed + kept, rtol=0, atol=1e-4)


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


def train_fixed(cases: Mapping[str, Method], steps: int) -> dict[str, list[list[Tensor]]]:
    """Train a rank by `LocalSync` with each method; return the anchors after each average."""
    anchors: dict[str, list[list[Tensor]]] = {}
    for name, method in cases.items():
        parameters, starts = make_parameters(), list[list[Tensor]]()
        worker = method.attach(torch.optim.SGD(parameters.values(), lr=0.05, momentum=0.9), parameters.items())
        for step in range(steps):
            set_gradients(parameters, dist.get_rank(), step)
            worker.optimizer.step()
            if worker.num_averages > len(starts):
                starts.append([each.clone() for each in worker.replica.start.values()])
        worker.finish()
        anchors[name] = starts
    return anchors


def test_fixed_members_get_the_weights_without_elasticity_to_the_bit() -> None:
    """The last round is never hidden."""
    cases = {
        f"{name} {delay}": method.replace(delay_steps=delay)
        for name, method in METHODS.items()
        for delay in (0, 1, K_STEPS - 1)
    }
    expected, *_ = run_ranks(train_fixed, 3, cases, 4 * K_STEPS)
    for case, method in cases.items():
        store = dist.HashStore()
        members = [Member(store, number, method) for number in range(3)]
        train(members)
        assert_equal_anchors(members)
        assert len(expected[case]) == 4 - (method.when.delay_steps > 0)
        for member in members:
            assert member.worker.num_averages == 4
            assert member.worker.tokens_seen == 3 * 4 * K_STEPS * TOKENS
            for number, anchor in enumerate(expected[case], 1):
                assert all(map(torch.equal, member.anchors[number], anchor)), (case, number)
            assert all(map(torch.equal, member.anchors[4], member.parameters.values()))


def test_steps_go_on_while_a_round_is_exchanged(store: dist.Store) -> None:
    took_s: list[tuple[int, float]] = []

    def slow_down(member: Member) -> None:
        collective, take_step = member.there.collective, member.take_step

        def slow(fn: Callable[..., Any]) -> Any:
            time.sleep(0.3)
            return collective(fn)

        def timed(step: int) -> None:
            began_s = time.monotonic()
            take_step(step)
            took_s.append((step, time.monotonic() - began_s))

        member.there.collective, member.take_step = slow, timed  # type: ignore[method-assign]

    method = METHODS["local_sgd"].replace(k_steps=8, delay_steps=7)
    members = [Member(store, n, method, last_step=24, before=lambda *_: time.sleep(0.1)) for n in range(2)]
    for member in members:
        slow_down(member)
    train(members)
    assert_equal_anchors(members)
    assert members[0].worker.num_averages == 3
    hidden = [each_s for step, each_s in took_s if step < 23]
    assert max(hidden) < 0.2, "an exchange takes at least 0.3 s"
    assert min(each_s for step, each_s in took_s if step == 23) > 0.3
    assert members[0].worker.peers.ledger.exposed_s < 2.0


@pytest.mark.parametrize("has_come", [True, False])
def test_a_state_that_is_saved_while_a_round_is_hidden_has_all_work_once(
    has_come: bool, store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All members are killed a step after the round has begun, and resume. The state has the round if all came."""
    monkeypatch.setattr(sync, "SETTLE_S", 30.0 if has_come else 0.1)
    states: dict[int, dict[str, Any]] = {}
    moved: dict[int, Tensor] = {}

    def save_and_die(member: Member, step: int) -> None:
        if step == 2 * K_STEPS - 1 and member.number == 1 and not has_come:
            time.sleep(1.0)  # the other one saves and is killed meanwhile
        if step == 2 * K_STEPS + 1:
            assert member.worker.is_hiding
            states[member.number], moved[member.number] = member.worker.state_dict(), member.moved.clone()
            raise KilledError

    compression = {**SPARSE, "mean_over": "ranks"}
    method = LocalSGD(k_steps=K_STEPS, begin_step=0, compression=compression, delay_steps=2)
    members = [Member(store, n, method, before=save_and_die, is_even=True) for n in range(2)]
    train(members)
    for state in states.values():
        assert state["num_averages"] == 1 + has_come
        assert state["tokens"] == TOKENS * (1 if has_come else K_STEPS + 1)
    assert has_come or float(states[0]["site"]["residuals"]["wide"].abs().sum()) > 0, "of the first round"
    again_store = dist.HashStore()
    again = [Member(again_store, n, method, 6 * K_STEPS, is_even=True) for n in range(2)]
    for number, (member, before) in enumerate(zip(again, members, strict=True)):
        member.worker.load_state_dict(states[number])
        member.moved = moved[number]
        rounds = range(states[number]["num_averages"] + 1)
        member.anchors |= {n: before.anchors[n] for n in rounds if n in before.anchors}
        member.contributors |= {n: before.contributors[n] for n in rounds if n in before.anchors}
    train(again)
    assert_equal_anchors(again)
    check_nothing_is_lost(again, of=again)


def test_a_fit_that_is_stopped_while_a_round_is_hidden_takes_its_result(store: dist.Store) -> None:
    ends: dict[str, Any] = {"is_over": lambda member: member.worker.step == K_STEPS + 1}
    ends["before"] = lambda _, step: time.sleep(0.3 * (step == K_STEPS))
    members = [Member(store, n, METHODS["local_sgd"].replace(delay_steps=2), **ends) for n in range(2)]
    train(members)
    assert_equal_anchors(members)
    for worker in (member.worker for member in members):
        assert (worker.num_averages, worker.tokens) == (1, TOKENS)
        worker.finish()
        assert all(torch.equal(each, start) for each, start in worker.replica.start.items())
        assert worker.tokens == 0.0


def test_steps_that_began_at_other_weights_are_not_added_to_a_running_training(store: dist.Store) -> None:
    worker = Member(store, 0, METHODS["local_sgd"], membership={"min_replicas": 1}).worker
    worker.begin()
    shared = worker.shared_state() | {"run": "another", "num_averages": 3}
    shared["tensors"] = {name: tensor + 1.0 for name, tensor in shared["tensors"].items()}
    for now in worker.params:
        now.data.add_(5.0)
    worker.tokens = float(TOKENS)
    worker._heal(shared)
    assert (worker.run, worker.num_averages, worker.tokens) == ("another", 3, 0.0)
    for now, anchor in worker.replica.start.items():
        torch.testing.assert_close(now.data, anchor, rtol=0, atol=0)


@pytest.mark.parametrize("methods", [METHODS, HIDDEN], ids=["shown", "hidden"])
def test_the_others_go_on_without_a_member_that_is_killed_in_a_round(
    methods: Mapping[str, Method], store: dist.Store
) -> None:
    kills = {1: {"kill_in": (3, 1)}}
    members = [Member(store, number, methods["sparse_loco"], membership=kills.get(number, {})) for number in range(3)]
    train(members)
    assert_equal_anchors(members)
    for member in (members[0], members[2]):
        assert member.worker.num_averages == 4
        assert member.worker.contributed == {"group 0": 4, "group 1": 1, "group 2": 4}


@pytest.mark.parametrize("methods", [METHODS, HIDDEN], ids=["shown", "hidden"])
def test_a_joiner_that_finds_others_in_a_round_trains_to_its_end_with_them(
    methods: Mapping[str, Method], store: dist.Store
) -> None:
    joiner: list[Member] = []

    def join(member: Member, step: int) -> None:
        if step == 2 * K_STEPS - 1:  # the last one but one
            joiner.append(Member(store, 2, methods["diloco"]))
            state = member.worker.shared_state()
            state["tensors"] = {name: tensor.clone() for name, tensor in state["tensors"].items()}
            joiner[0].there.state_of_others = lambda *_: state  # type: ignore[method-assign]
            thread.start()

    thread = threading.Thread(target=lambda: joiner[0].run())
    members = [Member(store, 0, methods["diloco"], before=join), Member(store, 1, methods["diloco"])]
    train(members)
    thread.join(30.0)
    worker = joiner[0].worker
    assert_equal_anchors([*members, *joiner])
    assert [*joiner[0].anchors] == [1, 2, 3, 4], "the second one with its own step"
    assert worker.contributed == {f"group {n}": 4 for n in range(3)}
    assert worker.tokens_seen == members[0].worker.tokens_seen == TOKENS * (K_STEPS * 4 * 2 + K_STEPS * 2 + 1)
    assert not [quorum for quorum in joiner[0].there.history if quorum.healed]


def test_a_slow_member_contributes_what_it_has_done_and_delays_nobody(store: dist.Store) -> None:
    """It misses rounds; its work is rebased to the anchor that it heals to, and weighs by its tokens."""
    there = {"grace_s": 0.1, "min_replicas": 1}
    slow = Member(
        *(store, 0, METHODS["local_sgd"], 10**6),
        is_over=lambda member: member.worker.contributed.get("group 0", 0) > 6,
        before=lambda *_: time.sleep(0.2),
        membership=there,
    )
    ends = {"is_over": lambda _: slow.has_left, "membership": there}
    fast = [Member(store, n, METHODS["local_sgd"], 10**6, **ends) for n in (1, 2)]
    train([slow, *fast])
    assert_equal_anchors([slow, *fast])
    healed = [quorum for quorum in slow.there.history if quorum.healed]
    assert len(healed) >= 2, "it has missed rounds"
    assert slow.worker.step == K_STEPS * slow.worker.num_averages, "and is where the other members are"
    contributions = sum("group 0" in each for each in slow.contributors.values())
    assert contributions == len(slow.anchors) - 1 >= 2
    last = slow.worker.num_averages
    assert slow.worker.tokens_seen == TOKENS * K_STEPS * (2 * last + contributions)


def test_before_the_last_round_has_ended_no_member_takes_a_state_that_says_so(store: dist.Store) -> None:
    """The last round fails at first. In each collective, and between rounds, there is a state to take."""
    seen: list[tuple[int, bool]] = []
    members = [Member(store, n, METHODS["local_sgd"], membership={"fail_in": {(5, 0): False}}) for n in range(2)]
    there = members[0].there

    def looked(function: Callable[..., Any], *arguments: Any) -> Any:
        state = {} if there.shared is None else there.shared()
        seen.append((state.get("num_averages", -1), state.get("step") == 4 * K_STEPS and not state["steps"]))
        return function(*arguments)

    there.collective, there.quorum = (partial(looked, each) for each in (there.collective, there.quorum))  # type: ignore[method-assign]
    train(members)
    looked(dict)
    assert members[0].worker.num_averages == 4
    assert {rounds for rounds, has_ended in seen if has_ended} == {4}
    assert {rounds for rounds, _ in seen} == {0, 1, 2, 3, 4}


def test_those_that_have_ended_wait_for_a_slow_one(store: dist.Store) -> None:
    there = {"grace_s": 0.1}
    fast = [Member(store, n, METHODS["local_sgd"], grace_s=20.0, membership=there) for n in (1, 2)]
    dawdle = lambda _, step: time.sleep(0.3 if step > 2 else 0.0)  # noqa: E731
    slow = Member(store, 0, METHODS["local_sgd"], before=dawdle, membership=there)
    train([slow, *fast])
    assert_equal_anchors([slow, *fast])
    assert slow.contributors[1] == {"group 0", "group 1", "group 2"}
    assert slow.worker.num_averages == 4, "it has healed in the end"


def test_a_host_without_the_memory_of_a_round_is_refused(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three processes of the group are there: 24 bytes of the leader, 8 of each other process; 16 are in use."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    for free, expected in (
        (24, nullcontext()),
        (23, pytest.raises(ConfigurationError, match="40 bytes per trained")),
    ):
        member = Member(store, 0, METHODS["diloco"])
        monkeypatch.setattr(site, "available_bytes", lambda free=free: free * (20 * 13 + 7))
        with expected:
            member.worker.begin()
        member.there.close()


def test_a_member_without_the_other_members_ends_with_an_error(store: dist.Store) -> None:
    """Not before its first round: groups may start hours apart."""
    first = Member(store, 0, METHODS["local_sgd"])
    first.worker.max_wait_s = 0.6
    leaves = {"is_over": lambda member: member.worker.num_averages == 2}
    threading.Timer(0.6, lambda: Member(store, 1, METHODS["local_sgd"], **leaves).run()).start()
    with pytest.raises(TimeoutError, match=r"Too few groups have come to the end of round 3 in 0\.6 s"):
        train([first])


@pytest.mark.parametrize("methods", [METHODS, HIDDEN], ids=["shown", "hidden"])
def test_a_stop_in_the_last_round_leaves_a_state_that_resumes_in_it(
    methods: Mapping[str, Method], store: dist.Store
) -> None:
    """A step before the last one: after that Lightning takes none, and the work would be lost."""
    leaves = lambda member: member.worker.num_averages == 3  # noqa: E731
    other = Member(store, 1, methods["sparse_loco"], is_over=leaves)
    first = Member(store, 0, methods["sparse_loco"], is_over=lambda member: bool(member.worker.requests.agreed & STOP))
    ask, kept = first.there.quorum, list[Tensor]()

    def asked(*arguments: Any) -> Quorum | None:
        if first.worker.num_averages == 3:
            kept.append(first.kept_change())
            first.worker.requests.asked = STOP
        return ask(*arguments)

    first.there.quorum = asked  # type: ignore[method-assign]
    train([first, other])
    worker = first.worker
    assert (worker.num_averages, worker.step, worker.num_skipped, worker.is_complete) == (3, 11, -1, False)
    assert worker.tokens == K_STEPS * TOKENS
    assert torch.equal(first.kept_change(), kept[0])
    again = Member(dist.HashStore(), 0, methods["sparse_loco"], membership={"min_replicas": 1})
    again.worker.load_state_dict(worker.state_dict())
    train([again])
    assert (again.worker.num_averages, again.worker.step, again.worker.tokens) == (5, 12, 0.0)


@pytest.mark.parametrize("methods", [METHODS, HIDDEN], ids=["shown", "hidden"])
def test_a_change_that_is_not_finite_is_left_out_by_name(
    methods: Mapping[str, Method], store: dist.Store, caplog: pytest.LogCaptureFixture
) -> None:
    def poison(member: Member, step: int) -> None:
        if step == K_STEPS + 1:
            member.parameters["wide"].data[3, 4] = float("nan")

    members = [Member(store, n, methods["sparse_loco"], before=poison if n == 1 else None) for n in range(3)]
    train(members)
    assert_equal_anchors(members)
    assert all(torch.isfinite(each).all() for member in members for each in member.parameters.values())
    assert members[0].worker.contributed == {f"group {n}": 4 for n in range(3)}
    assert members[0].worker.tokens_seen == TOKENS * K_STEPS * (3 * 4 - 1)
    assert caplog.text.count("has left an inf or NaN") == 1


@pytest.mark.parametrize("num_members", [2, 3])
def test_a_change_that_is_much_larger_than_usual_is_left_out(
    num_members: int, store: dist.Store, caplog: pytest.LogCaptureFixture
) -> None:
    """After five rounds, in the seventh and the eighth of ten; the weights of that member are those of the others."""

    def jump(member: Member, step: int) -> None:
        member.worker.max_change_ratio = 10.0
        if step in (6 * K_STEPS + 1, 7 * K_STEPS + 1) and member.number == 1:
            member.parameters["wide"].data += 100.0

    members = [Member(store, n, METHODS["sparse_loco"], 10 * K_STEPS, before=jump) for n in range(num_members)]
    train(members)
    assert_equal_anchors(members)
    assert all(float(member.parameters["wide"].detach().abs().max()) < 10.0 for member in members)
    assert caplog.text.count("the weights of group 1 have moved more than 10 times as far") == 2 * num_members
    assert [number for number, names in members[0].contributors.items() if "group 1" not in names] == [0, 7, 8]


def test_a_member_with_another_anchor_than_most_heals(store: dist.Store) -> None:
    """Its last round was with members that have gone, or its processor rounds differently."""

    def tamper(member: Member, step: int) -> None:
        if member.worker.num_averages:
            member.worker.replica.start[member.parameters["wide"]][2, 3] += 1e-6

    members = [Member(store, n, METHODS["local_sgd"], 8 * K_STEPS, before=tamper if n == 0 else None) for n in range(3)]
    train(members)
    assert_equal_anchors(members)
    assert [sum(quorum.healed is not None for quorum in m.there.history) for m in members] == [7, 0, 0]
    assert members[0].worker.contributed == {f"group {n}": 8 for n in range(3)}


def test_a_member_that_begins_with_other_weights_is_told(store: dist.Store) -> None:
    """The first name decides."""
    members = [Member(store, n, METHODS["local_sgd"]) for n in range(3)]
    members[2].parameters["bias"].data += 1.0
    with pytest.raises(DisagreementError, match="begin with different weights"):
        train(members)
    assert [member.has_left for member in members] == [True, True, False]


def row_of(method: Method, **parameters: Parameter) -> Row:
    named, members = make_parameters() | parameters, group_of(PlainMembership(dist.HashStore(), "group"))
    worker = ElasticSync(method, torch.optim.SGD(named.values(), lr=0.1), named.items(), members)
    worker.begin()
    return worker._row()


@pytest.mark.parametrize(
    ("method", "parameters", "message"),
    [
        ("diloco", {}, "when.outer: nesterov here, none there"),
        ("sparse_loco", {}, "what.payload: top_k here, whole there"),
        ("local_sgd", {"bias": torch.zeros(9)}, r"bias: torch.float32 of shape \[9\] here, .* \[7\] there"),
        ("local_sgd", {"wide": torch.zeros(13, 20).t()}, r"parameter wide: .*, dimensions in memory \[1, 0\] here"),
        ("local_sgd", {"more": torch.zeros(2)}, "parameter more: torch.float32 of shape .* here, nothing there"),
    ],
)
def test_settings_that_differ_are_named(method: str, parameters: dict[str, Tensor], message: str) -> None:
    here = row_of(METHODS[method], **{name: Parameter(tensor) for name, tensor in parameters.items()})
    with pytest.raises(DisagreementError, match=message):
        raise_refused(here, row_of(METHODS["local_sgd"]), "site")


OLD, NEW = Row(4, settings="a", run="old"), Row(settings="a", run="new")
TRAINS = Row(2, settings="a", run="old", is_new=False)


@pytest.mark.parametrize(
    ("rows", "refused", "latest", "run"),
    [
        ({"a": NEW, "b": OLD}, "", ["b"], "old"),  # all begin: the checkpoint with the most rounds counts
        ({"a": TRAINS, "b": OLD}, "", ["a"], "old"),  # a checkpoint with more rounds takes over no training
        ({"a": OLD._replace(run="other"), "b": TRAINS}, "a", None, None),
        ({"a": NEW._replace(settings="b"), "b": TRAINS, "c": NEW}, "a", None, None),
        ({"b": NEW._replace(settings="b"), "a": NEW}, "b", None, None),
        ({"a": NEW, "b": NEW._replace(anchor=1.0), "c": NEW}, "b", None, None),
        ({"a": OLD._replace(anchor=1.0), "b": OLD, "c": OLD}, "", ["b", "c"], "old"),
        ({"a": TRAINS._replace(anchor=1.0), "b": TRAINS._replace(rounds=1), "c": NEW}, "", ["a"], "old"),
    ],
)
def test_members_that_train_decide(
    rows: dict[str, Row], refused: str, latest: list[str] | None, run: str | None
) -> None:
    assert [*refusals(rows)] == [*refused]
    assert latest is None or (latest_of(rows), rows[judge_of(rows)].run) == (latest, run)


def test_groups_that_resume_at_different_steps_end_together(store: dist.Store) -> None:
    """As from checkpoints of one round, without the work of the next one. Integer buffers may differ, too."""
    buffers = [{"mean": torch.zeros(3), "seen": torch.arange(n + 1)} for n in range(2)]
    options = [{"named_buffers": partial(buffers.__getitem__, n)} for n in range(2)]

    def resume(member: Member, step: int) -> None:
        member.worker.step += 7 * (step == 0 and member.number == 0)

    members = [Member(store, n, METHODS["local_sgd"], before=resume, options=options[n]) for n in range(2)]
    train(members)
    assert_equal_anchors(members)
    assert [member.worker.step for member in members] == [4 * K_STEPS] * 2


def test_buffers_may_be_infinite_from_the_start_or_complex(store: dist.Store) -> None:
    """As masks and the frequencies of rotary embeddings are."""
    buffers = [{"mask": torch.tensor([0.0, -math.inf]), "turn": torch.full((3,), 1j)} for _ in range(2)]
    options = [{"named_buffers": partial(buffers.__getitem__, n)} for n in range(2)]
    members = [Member(store, n, METHODS["local_sgd"], options=options[n]) for n in range(2)]
    train(members)
    assert_equal_anchors(members)
    assert [member.worker.tokens_seen for member in members] == [2 * 4 * K_STEPS * TOKENS] * 2
    assert all(torch.equal(each["turn"], torch.full((3,), 1j)) for each in buffers)


@on_ranks()
def test_a_group_of_two_processes_resumes_inside_a_round_and_hides_rounds() -> None:
    alone = {"min_replicas": 1, "grace_s": 0.1}
    member, again = (Member(dist.HashStore(), dist.get_rank(), METHODS["diloco"], membership=alone) for _ in range(2))
    member.worker.join()
    member.take_step(0)
    assert member.worker._here == f"rank {dist.get_rank()}"
    again.worker.load_state_dict(member.worker.state_dict())
    assert all(map(torch.equal, member.parameters.values(), again.parameters.values()))
    assert again.worker.optimizer.state
    again.worker.forget()
    assert not again.worker.optimizer.state, "the loaded one"
    hidden = Member(dist.HashStore(), dist.get_rank(), HIDDEN["sparse_loco"], membership=alone)
    hidden.run()
    assert hidden.error is None
    assert (hidden.worker.num_averages, hidden.worker.step, hidden.worker.tokens_seen) == (4, 12, 2 * 12 * TOKENS)
    digests = gather([digest(hidden.parameters.values()), hidden.worker.contributed], "weights")
    assert digests[0] == digests[1]


@on_ranks()
def test_an_interrupt_of_a_leader_that_waits_ends_its_group() -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    member = Member(dist.HashStore(), dist.get_rank(), METHODS["diloco"])
    member.there.quorum = interrupt  # type: ignore[method-assign, assignment]
    member.run()
    assert isinstance(member.error, LostProcessError if dist.get_rank() else KeyboardInterrupt)
    member.worker.group.close()  # as when the process ends


def test_one_that_joins_comes_to_its_first_round_before_the_others() -> None:
    """They do not wait for it, and it has begun its steps later: the time decides, and not their number."""
    method = LocalSGD(k_steps=100, begin_step=0)
    options = {"membership": {"min_replicas": 1, "grace_s": 0.1}, "last_step": 1000}
    there, new = (Member(dist.HashStore(), number, method, **options) for number in range(2))
    there.worker.join()
    for step in range(3):
        there.take_step(step)
    there.worker._step_s = 0.01
    state = there.worker.shared_state()
    new.there.state_of_others = lambda *_: state  # type: ignore[method-assign, assignment, return-value]
    new.worker.join()
    num_steps = 0
    while not new.worker.has_communicated:
        time.sleep(0.02)
        new.take_step(num_steps)
        num_steps += 1
    assert 0 < num_steps < 50, "97 are left, which take there less than a second"


def test_all_restart_from_the_checkpoint_with_the_most_rounds(store: dist.Store) -> None:
    """What a group's own checkpoint has not sent counts only if it has not been averaged since."""
    states: list[dict[str, Any]] = [{}, {}]

    def save(member: Member, step: int) -> None:
        if step == (K_STEPS + 1, 4 * K_STEPS - 1)[member.number]:
            states[member.number] = member.worker.state_dict()

    members = [Member(store, n, METHODS["sparse_loco"], before=save) for n in range(2)]
    train(members)
    assert [state["num_averages"] for state in states] == [1, 3]
    assert states[0]["tokens"] == TOKENS
    again_store = dist.HashStore()
    again = [Member(again_store, n, METHODS["sparse_loco"], last_step=5 * K_STEPS) for n in range(2)]
    for member, state in zip(again, states, strict=True):
        member.worker.load_state_dict(state)
    train(again)
    assert_equal_anchors(again)
    assert [min(member.anchors) for member in again] == [4, 4], "with what the second had begun of the fourth"
    assert again[0].kept == 0.0
    assert again[1].kept > 0.0, "its residual"
    assert again[1].worker.contributed == {"group 0": 6, "group 1": 6}


def test_a_round_that_fails_on_all_members_is_repeated_with_the_same_work(store: dist.Store) -> None:
    method = LocalSGD(k_steps=K_STEPS, begin_step=0, compression={**SPARSE, "mean_over": "ranks"})
    fails = {"fail_in": {(number, 0): False for number in (3, 4, 6)}}
    members = [Member(store, n, method, 5 * K_STEPS, membership=fails, is_even=True) for n in range(3)]
    train(members)
    assert_equal_anchors(members)
    check_nothing_is_lost(members, of=members)
    assert {member.worker.tokens_seen for member in members} == {3 * 5}, "one token for each member and round"


@pytest.mark.parametrize("delay_steps", [0, 1])
def test_a_member_that_does_not_know_whether_its_round_counted_drops_that_work_alone(
    delay_steps: int, store: dist.Store, caplog: pytest.LogCaptureFixture
) -> None:
    """The exchange fails on one member only, after it is complete: the other members have counted its work."""
    method = METHODS["sparse_loco"].replace(delay_steps=delay_steps)
    fails = [{}, {(3, 1): True}, {}]
    members = [
        Member(store, n, method, 8 * K_STEPS, membership={"grace_s": 1.0, "fail_in": fails[n]}) for n in range(3)
    ]
    train(members)
    assert_equal_anchors(members)
    assert caplog.text.count("other groups may have counted it already") == 1
    dropped = K_STEPS * TOKENS + delay_steps * TOKENS
    assert members[0].worker.tokens_seen >= 3 * 8 * K_STEPS * TOKENS - dropped - K_STEPS * TOKENS
    assert members[0].worker.contributed == {f"group {n}": 8 for n in range(3)}
