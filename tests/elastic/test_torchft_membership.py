"""Members that are found by torchft: real processes on the loopback are killed, stopped, added; the lighthouse, too."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import signal
import socket
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from lightning_lowbw.comm.agreement import gather_json
from lightning_lowbw.elastic import torchft_membership
from lightning_lowbw.elastic.membership import Row
from lightning_lowbw.elastic.torchft_membership import TorchftMembership, _Lighthouse, _Member, connected
from lightning_lowbw.errors import ConfigurationError
from tests.elastic import members
from tests.ranks import on_ranks, run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchft") is None, reason='needs torchft: pip install "lightning-lowbw[elastic]"'
)

LONG_S = 20.0  # a timeout that does not end what a test waits for
HERE = {"lighthouse": "127.0.0.1:1"}
QUICK = {"WAIT_S": 3.0, "WARN_S": 2.0}


def test_fixed_members_do_not_heal_and_use_all_collectives_on_their_address_only() -> None:
    with members.groups(min_replicas=3) as made:
        for group in range(3):
            made.start(group, rounds=4, act=members.all_collectives)
        ended = [made.first(group, "ended") for group in range(3)]
        assert (Path(made.folder) / "stderr").read_text() == ""  # no line for each request, reconfiguration ...
    assert {event.kind for event in made.events} == {"joined", "committed", "ended"}
    # Each adds its rank, so that the mean is 1 higher after each round.
    sums = {event.value[0] for event in made.events if event.kind == "committed" and event.step == 4}
    assert sums == {4.0 * members.SIZE}
    assert [event.value for event in ended] == [{"0100007F"}] * 3  # 127.0.0.1


def test_a_kill_between_rounds_costs_a_heartbeat_and_a_new_member_takes_the_state() -> None:
    with members.groups(min_replicas=2) as made:
        for group in range(3):
            made.start(group, timeout_s=LONG_S, pause_s=0.3, value=5.0)
        made.committed(2, size=3)
        killed_s = made.signal(2, signal.SIGKILL)
        went_on = made.committed(0, size=2, after_s=killed_s)
        assert went_on.at_s - killed_s < LONG_S / 2
        made.start(2, value=-1.0)  # other weights than theirs
        healed = made.first(2, "healed", after_s=killed_s)
        assert healed.step > 0
        new = made.committed(2, size=3, after_s=killed_s)
        assert made.committed(0, new.step).value[0] == new.value[0]
        assert made.committed(0, new.step).members == new.members


def test_who_comes_with_more_rounds_than_those_who_train_takes_their_state() -> None:
    with members.groups(min_replicas=2) as made:
        for group in range(2):
            made.start(group, pause_s=0.3, value=5.0)
        made.committed(0, size=2)
        made.start(2, step=1000, value=-1.0)  # of its checkpoint
        healed = made.first(2, "healed")
        assert healed.step < 1000
        new = made.committed(2, size=3)
        assert made.committed(0, new.step, size=3).value[0] == new.value[0]
    assert {event.group for event in made.events if event.kind == "healed"} == {2}


@pytest.mark.parametrize("attempts", [[1, 2], [2, 3]], ids=["new", "incumbent"])
def test_two_groups_meet_again_after_the_path_between_them_was_cut(attempts: list[int]) -> None:
    """For longer than an attempt to connect takes, as both come for the first time, or after a failed round."""
    constants = {"CONNECT_S": 2.0, "PAUSE_S": 1.0}
    with members.groups(min_replicas=2) as made:
        cut = {**constants, "_unreached": members.Cut(attempts)}
        fails = {} if 1 in attempts else {"act": members.fail, "act_in": 1}
        made.start(0, constants=cut, **fails)
        made.start(1, constants=constants)
        for group in range(2):
            made.committed(group, 3, size=2)
    assert [event for event in made.events if event.group == 1 and "tries again in 1 s" in f"{event.value}"]


def test_a_dead_member_costs_its_heartbeat_and_never_the_join_timeout() -> None:
    """Killed between rounds, in a collective, and while it takes the state."""
    constants = {"_send": members.send_slowly}
    with members.groups(min_replicas=2, join_timeout_ms=60_000, heartbeat_timeout_ms=1500) as made:
        for group in range(3):
            made.start(group, pause_s=0.3, constants=constants)
        made.committed(2, size=3)
        killed_s = [made.signal(2, signal.SIGKILL)]
        made.committed(0, size=2, after_s=killed_s[-1])
        made.start(3, pause_s=0.3, constants=constants, act=members.die_in_the_middle, act_in=1)
        made.committed(3, size=3)
        killed_s.append(made.first(0, "lost").at_s)
        made.committed(0, size=2, after_s=killed_s[-1])
        made.start(4, constants=constants)
        made.first(4, "joined")
        time.sleep(0.5)
        killed_s.append(made.signal(4, signal.SIGKILL))
        made.committed(0, made.committed(0, after_s=killed_s[-1]).step + 3)
    for at_s in killed_s:
        rounds = [event for event in made.events if event.kind == "committed" and at_s < event.at_s < at_s + 10.0]
        assert max(event.value[1] for event in rounds) < 4.0
    assert not [event for event in made.events if event.group == 4 and event.kind == "healed"]


def test_a_group_that_hangs_and_has_heartbeats_holds_nobody_for_long() -> None:
    constants = {"HANG_S": 3.0}
    with members.groups(min_replicas=1, join_timeout_ms=60_000) as made:
        made.start(0, min_replicas=1, timeout_s=2.0, pause_s=0.3, constants=constants)
        made.committed(0)
        made.start(1, timeout_s=2.0, constants=constants, act=members.hang_in_the_middle, act_in=4)
        lost = made.first(0, "lost")
        alone = made.committed(0, size=1, after_s=lost.at_s)
        assert alone.at_s - lost.at_s < 10.0
        assert "as long as ever" in made.first(1, "said").value


def test_the_clock_of_hangs_is_that_of_steps() -> None:
    membership = object.__new__(TorchftMembership)
    membership._lighthouse = _Lighthouse(SimpleNamespace(LighthouseClient=bool), "http://127.0.0.1:1")
    for longest_s, expected_s in ((0.1, 60.0), (30.0, 300.0), (float("inf"), float("inf"))):
        membership.note(longest_s)
        assert membership._lighthouse.hangs_from_s == pytest.approx(time.monotonic() + expected_s, abs=2.0)


def test_a_kill_in_a_collective_fails_the_round_on_all_at_once() -> None:
    # Of four in a ring one is no neighbour of the killed: it hears only of a neighbour that has left the group.
    with members.groups(min_replicas=4) as made:
        for group in range(3):
            made.start(group, timeout_s=LONG_S, min_replicas=3)
        made.start(3, act=members.die_in_the_middle, act_in=2)
        lost = [made.first(group, "lost") for group in range(3)]
        assert max(event.at_s for event in lost) - made.committed(0, 2).at_s < LONG_S / 2
        assert [event.step for event in lost] == [2, 2, 2]
        failed = [event for event in made.events if event.kind == "committed" and event.step > 2]
        assert not failed


def test_who_leaves_a_round_is_noticed_at_once_although_it_has_forked() -> None:
    with members.groups(min_replicas=2) as made:
        made.start(0, timeout_s=LONG_S)
        made.start(1, timeout_s=LONG_S, act=members.fork_and_fail, act_in=2)
        lost = made.first(0, "lost")
        assert lost.at_s - made.committed(0, 2).at_s < LONG_S / 2


def test_who_hangs_in_a_collective_costs_the_timeout_and_is_healed() -> None:
    with members.groups(min_replicas=2) as made:
        for group in range(2):
            made.start(group, timeout_s=2.0)
        made.committed(1, size=2)
        made.start(2, timeout_s=2.0, act=members.stop_in_the_middle, act_in=2)
        lost = made.first(0, "lost")
        assert lost.at_s - made.committed(2, lost.step).at_s > 2.0
        made.committed(0, size=2, after_s=lost.at_s)
        made.signal(2, signal.SIGCONT)
        made.first(2, "healed", after_s=lost.at_s)
        new = made.committed(2, size=3, after_s=lost.at_s)
        assert made.committed(0, new.step).value[0] == new.value[0]


def test_who_comes_back_after_rounds_of_the_others_costs_no_round() -> None:
    """It has been stopped between two rounds, of all with the same members, and has their connections still."""
    with members.groups(min_replicas=2) as made:
        for group in range(3):
            made.start(group, timeout_s=LONG_S, pause_s=1.0)
        made.committed(2, step=2, size=3)
        stopped_s = made.signal(2, signal.SIGSTOP)
        made.committed(0, size=2, after_s=stopped_s)
        began_s = made.signal(2, signal.SIGCONT)
        healed = made.first(2, "healed", after_s=stopped_s)
        made.committed(2, healed.step + 1, size=3, after_s=began_s)
        made.committed(0, healed.step + 3, size=3, after_s=began_s)
    assert not [event for event in made.events if event.kind in ("lost", "failed", "said")]


def test_who_is_stopped_in_a_collective_is_lost_long_before_the_timeout() -> None:
    options = {"constants": {"SILENT_S": 2}, "timeout_s": 100.0}
    with members.groups(min_replicas=2) as made:
        for group in range(2):
            made.start(group, **options)
        made.committed(1, size=2)
        made.start(2, **options, act=members.stop_in_the_middle, act_in=2)
        lost = made.first(0, "lost")
        assert lost.at_s - made.committed(2, lost.step).at_s < LONG_S / 2
        made.committed(0, size=2, after_s=lost.at_s)
        made.signal(2, signal.SIGCONT)
        made.committed(2, size=3, after_s=lost.at_s)


def test_who_has_waited_for_long_lets_the_others_have_their_time_to_come() -> None:
    """The lighthouse would count the join timeout from its request on, and leave out who comes as the last one."""
    options = {"constants": {"WAIT_S": 1.2, "RENEW_S": 0.3}, "min_replicas": 1}
    with members.groups(min_replicas=1, join_timeout_ms=1000) as made:
        for group, pause_s in ((0, 3.0), (1, 3.5)):  # the second one is late in each round, by less than the timeout
            made.start(group, pause_s=pause_s, **options)
        made.start(2, pause_s=3.0, **options)
        both = made.committed(0, size=3)
        stopped_s = made.signal(2, signal.SIGSTOP)
        without = made.committed(0, size=2, after_s=max(stopped_s, both.at_s))
        made.signal(2, signal.SIGCONT)  # it comes soon after a round, and waits for the next one
        made.committed(0, size=3, after_s=without.at_s)
        sizes = [len(event.members) for event in made.events if event.kind == "committed" and event.at_s > both.at_s]
    assert min(sizes) == 2


def test_who_comes_late_to_a_collective_is_not_taken_for_lost() -> None:
    options = {"constants": {"SILENT_S": 2}, "timeout_s": LONG_S}
    with members.groups(min_replicas=2) as made:
        made.start(0, rounds=2, **options)
        made.start(1, rounds=2, late_s=5.0, **options)
        first = made.committed(0, 1)
        assert first.at_s - made.first(0, "joined").at_s > 5.0
        assert made.committed(0, 2).at_s - first.at_s < 5.0
    assert not [event for event in made.events if event.kind == "lost"]


def test_a_restarted_lighthouse_is_found_again_while_a_member_waits_for_another() -> None:
    with members.groups(min_replicas=2) as made:
        made.start(0)
        made.start(1, pause_s=1.5)
        made.committed(1, size=2)
        made.end_lighthouse()
        made.start_lighthouse()  # counts its quorums from 1 again
        made.committed(1, size=2, after_s=time.monotonic())


def test_too_few_members_wait_and_say_so() -> None:
    with members.groups(min_replicas=2) as made:
        made.start(0, constants=QUICK)
        made.start(1)
        made.committed(0, size=2)
        killed_s = made.signal(1, signal.SIGKILL)
        said = made.until(lambda event: event.kind == "said")
        assert "a round of at least 2 members" in said.value
        assert not [event for event in made.events if event.kind == "committed" and event.at_s > killed_s + 1.0]
        made.start(2)
        made.committed(0, size=2, after_s=said.at_s)
        made.signal(2, signal.SIGKILL)
        made.until(lambda event: event.kind == "said" and event.at_s > said.at_s + 1.0)
        made.signal(0, signal.SIGINT)
        made.processes[0, 0].join(60.0)
        assert made.processes[0, 0].exitcode == 1  # of Ctrl-C, although it waits


def test_a_lighthouse_that_never_answers_is_named_soon() -> None:
    with members.groups() as made, socket.create_server(("127.0.0.1", 0)) as mute:
        constants = {"CONNECT_S": 0.5, "WARN_S": 6.0}
        made.start(0, lighthouse=f"127.0.0.1:{mute.getsockname()[1]}", constants=constants)
        joined = made.first(0, "joined")
        said = made.first(0, "said")
        assert "timed out" in said.value
        assert said.at_s - joined.at_s < 6.0


def test_of_two_groups_with_one_name_the_newcomer_ends_before_the_others_hear_of_it() -> None:
    with members.groups(join_timeout_ms=10_000, heartbeat_timeout_ms=5000) as made:
        for group in range(2):
            made.start(group, pause_s=0.3)
        made.committed(0, size=2)
        began_s = time.monotonic()
        made.start(2, name="group1")
        with pytest.raises(AssertionError, match=r"Another group has the name .*group1"):
            made.until(lambda event: event.group == 2 and event.kind == "committed")
        made.events = [event for event in made.events if event.group < 2]
        made.committed(0, made.events[-1].step + 2)
        waits = [event.value[1] for event in made.events if event.kind == "committed" and event.at_s > began_s]
        assert max(waits) < 4.0, "a heartbeat's timeout"


def test_a_group_whose_name_is_the_end_of_that_of_another_takes_part() -> None:
    with members.groups() as made:
        for group, name in enumerate(("11", "site 1")):
            made.start(group, name=name, pause_s=0.3)
        made.committed(0, size=2)
        made.start(2, name="1")
        made.committed(2, size=3)


def test_of_two_groups_with_one_name_that_start_at_once_one_ends_and_the_others_go_on() -> None:
    with members.groups(min_replicas=2) as made:
        for group in range(3):
            made.start(group, name=f"group{min(group, 1)}", constants={"GONE_S": 6.0})
        with pytest.raises(AssertionError, match=r"Another group has the name .*group1"):
            made.until(lambda _: False)
        made.events = [event for event in made.events if event.kind != "raised"]
        made.committed(0, size=2, after_s=time.monotonic())


def test_a_newcomer_with_other_settings_is_refused_by_name_and_the_only_incumbent_goes_on() -> None:
    with members.groups(min_replicas=1) as made:
        made.start(1, min_replicas=1, settings={"what.density": "0.125"})
        made.committed(1, 1)
        made.start(0, min_replicas=1, settings={"what.density": "0.25"})
        with pytest.raises(AssertionError, match=r"than group .*group1.*what\.density: 0\.25 here, 0\.125 there"):
            made.committed(0)
        made.events.clear()
        made.committed(1, size=1)


def test_the_processes_of_a_group_give_up_together() -> None:
    with members.groups() as made:
        made.start(0, 2, patience_s=[LONG_S, 0.5])
        for process in range(2):
            assert made.first(0, "gave up", process=process).value < LONG_S / 2


def test_members_of_another_program_are_named_on_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUST_LOG", "warn")
    with members.groups(min_replicas=2) as made:
        made.start(0, 2)
        client = torchft_membership._import_torchft().LighthouseClient(
            f"http://127.0.0.1:{made.port}", connect_timeout=timedelta(seconds=LONG_S)
        )
        client.quorum(replica_id="stranger", timeout=timedelta(seconds=6 * LONG_S))
        for connection in made.connections:
            joined, raised = connection.recv(), connection.recv()
            assert (joined.kind, raised.kind) == ("joined", "raised")
            assert "members of another program" in raised.value
            assert "stranger" in raised.value


@on_ranks()
def test_the_processes_of_a_group_agree_on_the_connection_before_the_next_collective() -> None:
    """One of them has no connection; the other would take the state, or give it."""
    for own in ("taker:1", "donor:1", "other:1"):
        membership = object.__new__(TorchftMembership)
        membership._name, membership._process, membership._key, membership._group = own, dist.get_rank(), (), None
        membership.min_replicas, membership._num_failures = 2, 0

        def connect(*_: object) -> None:
            if dist.get_rank() == 1:
                raise RuntimeError("no connection to ['donor']")

        membership._connect = connect  # type: ignore[method-assign]
        rows = {"donor:1": Row(3), "other:1": Row(3), "taker:1": Row(0, is_late=True)}
        there = [_Member(name, "127.0.0.1:1", "127.0.0.1:1", row, 0) for name, row in rows.items()]
        with pytest.raises(RuntimeError, match="no connection to"):
            membership._join(1, there, lambda _: False)
        assert gather_json(own) == [own, own]


@on_ranks()
def test_who_takes_the_state_after_a_stop_is_in_no_round_till_it_is_waited_for() -> None:
    """The group of its last round, which has not failed there, is none for it: else it is never told to be late."""
    membership = object.__new__(TorchftMembership)
    membership._name, membership._process, membership._key, membership._group = (
        "stopped:1",
        dist.get_rank(),
        (),
        object(),
    )
    membership._num_failures, membership._lighthouse = 0, _Lighthouse(SimpleNamespace(LighthouseClient=bool), "")
    membership._fetch = lambda *_: {}  # type: ignore[method-assign]
    rows = {"donor:1": Row(3), "other:1": Row(3), "stopped:1": Row(2)}
    there = [_Member(name, "127.0.0.1:1", "127.0.0.1:1", row, 0) for name, row in rows.items()]
    assert membership._join(1, there, lambda _: False).members == ("stopped",)
    assert not membership.commit()
    assert membership._is_late


def connect_beside_a_logger(path: str) -> tuple[list[bool], bool]:
    """Make the group of two members, each a rank; return which of its sockets are watched, and that of a logger."""
    membership = object.__new__(TorchftMembership)
    membership._name, membership._address, membership._process = f"{dist.get_rank()}:1", "127.0.0.1", 0
    with socket.create_server(("127.0.0.1", 0)) as elsewhere, socket.socket() as logger:
        logger.connect(elsewhere.getsockname())
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        stores = gather_json(f"127.0.0.1:{store.port}")
        members = [_Member(f"{each}:1", stores[each], stores[each], Row(), 0) for each in range(2)]
        membership._connect(members, stores[0], path, dist.get_rank())
        dist.barrier()
        connections = [socket.socket(fileno=os.dup(descriptor)) for descriptor, _ in torchft_membership._of_group]
        torchft_membership._of_group.clear()
        *watched, of_logger = (
            each.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) > 0 for each in (*connections, logger)
        )
        for each in connections:
            each.close()
        return watched, of_logger


def test_connections_of_the_group_are_watched_and_no_others(tmp_path: Path) -> None:
    for watched, of_logger in run_ranks(connect_beside_a_logger, 2, f"{tmp_path}"):
        assert len(watched) >= 2, "where it listens, and to the other member"
        assert all(watched)
        assert not of_logger


def test_the_processes_of_a_group_fail_together() -> None:
    with members.groups(min_replicas=2) as made:
        made.start(0, 2, act=members.fail_in_process_1, act_in=1, rounds=3)
        made.start(1, 2, rounds=3)
        for group in range(2):
            for process in range(2):
                last = made.committed(group, 3, process=process)
                assert last.value[0] == 1.5 * members.SIZE
        failed = [(event.group, event.process, event.step) for event in made.events if event.kind == "failed"]
        assert sorted(failed) == [(0, 0, 1), (0, 1, 1), (1, 0, 1), (1, 1, 1)]


def test_an_answer_to_an_older_request_is_not_taken() -> None:
    own, older = _Member("site:1", "127.0.0.1:1", "127.0.0.1:2", Row(3, tokens=8.0), 2), Row(3, tokens=4.0)
    data = {"row": list(older), "failures": 1}
    old = SimpleNamespace(replica_id=own.name, store_address=own.store, address=own.state, data=data)
    client = SimpleNamespace(quorum=lambda **_: SimpleNamespace(quorum_id=1, participants=[old]))
    lighthouse = _Lighthouse(SimpleNamespace(LighthouseClient=lambda *_, **__: client), "http://127.0.0.1:1")
    lighthouse.is_closed.set()  # no heartbeats
    lighthouse._refuse_second = lambda _: None  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="an older request"):
        lighthouse.quorum(own, lambda: True)
    data["failures"] = own.failures
    _, (member,) = lighthouse.quorum(own, lambda: True)
    assert member.row == older
    lighthouse.close()


@pytest.mark.parametrize(
    ("broken", "new", "expected"),
    [
        ("", "", "abcd"),
        ("ac", "", "abd"),
        ("ca cb cd", "", "abd"),
        ("ab bc cd", "", "ac"),  # one of three sets of two
        ("ac ad bc bd", "", "ab"),
        ("ac ad bc bd", "ab", "cd"),
        ("ab ac ad", "bcd", "a"),  # newcomers do not outvote who trains
    ],
)
def test_the_largest_set_that_is_connected_goes_on(broken: str, new: str, expected: str) -> None:
    unreached = {name: [f"{pair[1]}:1" for pair in broken.split() if pair[0] == name] for name in "abcd"}
    told = {name: Row(is_new=name in new, unreached=unreached[name]) for name in "abcd"}
    found = connected([_Member(f"{name}:1", "", "", row, 0) for name, row in told.items()])
    assert "".join(member.label for member in found) == expected


def test_who_is_late_with_the_state_is_waited_for() -> None:
    """Every element changes in each round, and rounds are shorter than a transfer."""
    with members.groups(min_replicas=2) as made:
        for group in range(2):
            made.start(group, pause_s=0.2)
        made.committed(0, size=2)
        made.start(2, constants={"StateClient": members.LateClient})
        joined = made.first(2, "joined")
        new = made.committed(2, size=3)
        assert made.committed(0, new.step).value[0] == new.value[0]
        healed = [event for event in made.events if event.group == 2 and event.kind == "healed"]
        assert len(healed) == 3, "as it joins, as it is behind, and as the others wait"
    waits = [event.value[1] for event in made.events if event.kind == "committed" and event.group == 0]
    alone = [event for event in made.events if event.at_s > joined.at_s and len(event.members) == 2]
    assert len(alone) > 2, "rounds without it"
    assert max(waits) < 4.0


def test_nobody_takes_the_state_of_who_has_ended_its_training() -> None:
    with members.groups(min_replicas=1) as made:
        made.start(0, rounds=3, min_replicas=1)
        made.first(0, "ended")
        made.start(1, rounds=3, min_replicas=1)
        assert made.first(1, "ended").step == 3


@pytest.mark.parametrize(
    ("version", "message"), [("0.3.0", "needs torchft 0.2.0"), (None, r'pip install "lightning-lowbw\[elastic\]"')]
)
def test_another_torchft_is_refused(monkeypatch: pytest.MonkeyPatch, version: str | None, message: str) -> None:
    def find(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", find)
    with pytest.raises(ConfigurationError, match=message):
        TorchftMembership("127.0.0.1:1")


@pytest.mark.parametrize(
    ("given", "interface", "message"),
    [
        ({"lighthouse": "http://10.0.0.1"}, "", r"lighthouse='http://10.0.0.1': give its address with the port"),
        (
            {"lighthouse": "http://[fd00::1]:29510/"},
            "",
            r"\]:29510': an IPv6 address, and groups meet by IPv4",
        ),
        ({"lighthouse": "127.0.0.1:1/"}, "wg7", "GLOO_SOCKET_IFNAME=wg7: No such device"),
        (HERE, "wg7", r"GLOO_SOCKET_IFNAME=wg7: No such device. .* interfaces are .*lo.*\. Give"),
        ({**HERE, "address": "192.0.2.1"}, "", r"address=192.0.2.1: Cannot assign .* Give"),
    ],
)
def test_addresses(monkeypatch: pytest.MonkeyPatch, given: dict[str, str], interface: str, message: str) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    monkeypatch.setenv("RUST_LOG", "warn")  # or the first one sets it
    with pytest.raises(ConfigurationError, match=message):
        TorchftMembership(**given)
