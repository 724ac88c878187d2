"""Members that are found by torchft: real processes on the loopback are killed, stopped, added; the lighthouse, too."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import itertools
import math
import multiprocessing
import os
import signal
import socket
import threading
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_lowbw.elastic import lighthouse
from lightning_lowbw.elastic.membership import Row, raise_refused, settings_text
from lightning_lowbw.elastic.torchft_membership import TorchftMembership, _connected, _Lighthouse, _Member
from lightning_lowbw.elastic.transfer import StateClient
from lightning_lowbw.errors import ConfigurationError, DisagreementError
from tests.elastic import members

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchft") is None, reason='needs torchft: pip install "lightning-lowbw[elastic]"'
)

LONG_S = 20.0  # a timeout that does not end what a test waits for
HERE = {"lighthouse": "127.0.0.1:1"}
QUICK = {"WAIT_S": 3.0, "WARN_S": 2.0}


def test_fixed_members_do_not_heal_and_listen_on_their_address_only() -> None:
    with members.groups(min_replicas=3) as made:
        for group in range(3):
            made.start(group, rounds=4)
        ended = [made.first(group, "ended") for group in range(3)]
        assert (Path(made.folder) / "stderr").read_text() == ""  # no line for each request, reconfiguration ...
    assert {event.kind for event in made.events} == {"joined", "committed", "ended"}
    # Each adds its rank, so that the mean is 1 higher after each round.
    sums = {event.value[0] for event in made.events if event.kind == "committed" and event.step == 4}
    assert sums == {4.0 * members.SIZE}
    assert [event.value for event in ended] == [{"0100007F"}] * 3  # 127.0.0.1


def test_a_dead_member_costs_its_heartbeat_and_never_the_join_timeout() -> None:
    """A member is killed between rounds, a new one takes the state, and one is killed while it takes the state."""
    constants = {"_send": members.send_slowly}
    with members.groups(min_replicas=2, join_timeout_ms=60_000) as made:
        for group in range(3):
            made.start(group, timeout_s=LONG_S, pause_s=0.3, value=5.0, constants=constants)
        made.committed(2, size=3)
        killed_s = [made.signal(2, signal.SIGKILL)]
        made.committed(0, size=2, after_s=killed_s[-1])
        made.start(2, value=-1.0, pause_s=0.3, constants=constants)  # different weights
        healed = made.first(2, "healed", after_s=killed_s[0])
        assert healed.step > 0
        new = made.committed(2, size=3, after_s=healed.at_s)
        assert made.committed(0, new.step).value[0] == new.value[0]
        assert made.committed(0, new.step).members == new.members
        made.start(4)
        made.first(4, "joined")
        time.sleep(0.5)
        killed_s.append(made.signal(4, signal.SIGKILL))
        made.committed(0, made.committed(0, after_s=killed_s[-1]).step + 3)
    assert max(event.value[1] for event in made.events if event.kind == "committed" and event.group == 0) < 6.0
    assert not [event for event in made.events if event.group == 4 and event.kind == "healed"]


@pytest.mark.parametrize(
    ("names", "cuts", "newcomers", "goes_on"),
    [
        ("ab", ["ab"], "", "a"),
        ("ab", ["ba"], "a", "b"),  # a newcomer waits for a group that trains
        ("abcd", ["ac", "ad", "cb", "db"], "", "ab"),
        ("abcd", ["ab", "ac", "ad"], "", "bcd"),  # the larger set
        ("abc", ["bc"], "", "ab"),
        ("abc", [], "", "abc"),
    ],
)
def test_one_set_of_groups_that_reach_each_other_goes_on(
    names: str, cuts: list[str], newcomers: str, goes_on: str
) -> None:
    """It is the same in any order, and if one group of a pair tells or both."""
    for order in itertools.permutations(names):
        for both in ([], [cut[::-1] for cut in cuts]):
            there = [
                _Member(name, name, "", Row(is_new=name in newcomers), 0, [b for a, b in cuts + both if a == name])
                for name in order
            ]
            assert "".join(sorted(member.name for member in _connected(there))) == goes_on


def test_groups_that_start_within_seconds_begin_together_and_a_group_alone_begins_alone() -> None:
    with members.groups(min_replicas=1, join_timeout_ms=60_000) as made:
        made.start(0, constants={"START_S": 60.0})
        made.first(0, "joined")
        time.sleep(1.0)
        made.start(1)
        assert made.committed(0).members == ("group0", "group1")
        made.signal(0, signal.SIGKILL)
        made.until(lambda event: event.kind == "said" and "goes on with ['group1'] only: no other" in event.value)
        made.signal(1, signal.SIGKILL)
        began_s = time.monotonic()
        made.start(2, constants={"START_S": 3.0})
        assert made.committed(2, size=1).at_s > began_s + 3.0
        made.start(3, name="group2", constants={"START_S": 1.0})
        with pytest.raises(AssertionError, match="Another group has the name"):
            made.committed(3)
    said = [event for event in made.events if event.kind == "said"]
    assert len(said) == 2, "once, not in each round"


def test_a_group_that_hangs_and_has_heartbeats_holds_nobody_for_long() -> None:
    constants = {"HANG_S": 1.0}
    with members.groups(min_replicas=1, join_timeout_ms=60_000) as made:
        made.start(0, timeout_s=1.0, pause_s=0.3, constants={**constants, "START_S": 0.0})
        made.committed(0)
        made.start(1, timeout_s=1.0, constants=constants, act=members.hang_in_the_middle, act_in=4)
        lost = made.first(0, "lost")
        alone = made.committed(0, size=1, after_s=lost.at_s)
        assert alone.at_s - lost.at_s < 10.0
        assert "has begun no batch for 1 s" in made.first(1, "said").value


def test_a_kill_in_a_collective_fails_the_round_on_all_at_once() -> None:
    # One member of the ring is no neighbour of the killed one: it notices only that a neighbour has left the group.
    with members.groups(min_replicas=4) as made:
        for group in range(3):
            made.start(group, timeout_s=LONG_S, min_replicas=3)
        made.start(3, act=members.die_in_the_middle, act_in=2)
        lost = [made.first(group, "lost") for group in range(3)]
        assert max(event.at_s for event in lost) - made.committed(0, 2).at_s < LONG_S / 2
        assert [event.step for event in lost] == [2, 2, 2]
        failed = [event for event in made.events if event.kind == "committed" and event.step > 2]
        assert not failed


def test_a_member_that_is_stopped_in_a_collective_is_lost_long_before_the_timeout() -> None:
    """A member that only comes late is not."""
    options = {"constants": {"SILENT_S": 2}, "timeout_s": 100.0}
    with members.groups(min_replicas=2) as made:
        for group in range(2):
            made.start(group, **options, late_s=2.5 * group)
        made.committed(1, size=2)
        assert not [event for event in made.events if event.kind == "lost"]
        made.start(2, **options, act=members.stop_in_the_middle, act_in=2)
        lost = made.first(0, "lost")
        assert "has heard nothing of ['group2']" in lost.value
        assert lost.at_s - made.committed(2, lost.step).at_s < LONG_S / 2
        made.committed(0, size=2, after_s=lost.at_s)
        went_on_s = made.signal(2, signal.SIGCONT)
        together = made.committed(0, size=3, after_s=went_on_s)
        assert made.committed(2, together.step, size=3).value[0] == together.value[0]


def test_too_few_members_wait_and_say_so_also_after_a_restart_of_the_lighthouse() -> None:
    with members.groups(min_replicas=1) as made:
        made.start(0, min_replicas=2, constants=QUICK)
        made.start(1, min_replicas=2)
        made.committed(0, size=2)
        made.end_lighthouse()
        made.start_lighthouse()  # counts its quorums from 1 again
        made.committed(1, size=2, after_s=time.monotonic())
        killed_s = made.signal(1, signal.SIGKILL)
        said = made.until(lambda event: event.kind == "said" and "a round of at least 2 members" in event.value)
        assert not [event for event in made.events if event.kind == "committed" and event.at_s > killed_s + 1.0]
        made.start(2, min_replicas=2)
        made.committed(0, size=2, after_s=said.at_s)
        made.signal(2, signal.SIGKILL)
        made.until(lambda event: event.kind == "said", after_s=time.monotonic())
        made.signal(0, signal.SIGINT)
        made.processes[0].join(60.0)
        assert made.processes[0].exitcode == 1  # Ctrl-C ends a process that waits


def test_a_newcomer_with_other_settings_is_refused_by_name_and_the_only_incumbent_goes_on() -> None:
    with members.groups(min_replicas=1) as made:
        made.start(1, settings={"what.density": "0.125"}, constants={"START_S": 0.0})
        made.committed(1, 1)
        made.start(0, settings={"what.density": "0.25"})
        with pytest.raises(AssertionError, match=r"than group .*group1.*what\.density: 0\.25 here, 0\.125 there"):
            made.committed(0)
        made.events.clear()
        made.committed(1, size=1)


def a_member_of(name: str, rows: dict[str, Row]) -> tuple[TorchftMembership, list[_Member]]:
    """Return the membership of a group without a lighthouse, and the members of a quorum."""
    membership = object.__new__(TorchftMembership)
    membership._name, membership._key, membership._group = name, (), object()
    membership.min_replicas, membership._num_failures, membership._says_s = 1, 0, math.inf
    membership._cut, membership._row = [], Row()
    there: Any = SimpleNamespace(url="http://lighthouse", await_another=lambda _: None)
    membership._lighthouse, membership._client = there, StateClient()
    return membership, [_Member(name, f"{name}:1", f"{name}:2", row, 0) for name, row in rows.items()]


def test_a_group_that_takes_the_state_is_in_no_round_until_the_members_wait_for_it() -> None:
    """The group of its last round, which has not failed, does not count: `commit` would make the group not late."""
    membership, there = a_member_of("stopped", {"donor": Row(3), "other": Row(3), "stopped": Row(2)})
    membership._has_taken = True
    membership._fetch = lambda *_: {}  # type: ignore[method-assign]
    assert membership._join(1, there, bool).members == ("stopped",)  # type: ignore[union-attr]
    assert not membership.commit()
    assert membership._has_taken


def test_a_call_is_given_up_and_raises_what_its_function_raises() -> None:
    membership, _ = a_member_of("group", {})
    waits = threading.Event().wait
    assert membership._call(lambda: waits(5.0), lambda: True) is None
    assert membership._call(lambda: ["all"], bool) == ["all"]
    with pytest.raises(OSError, match="refused"):
        membership._call(lambda: socket.create_connection(("127.0.0.1", 1)), bool)
    with pytest.raises(DisagreementError, match="other settings"):
        membership._call(
            lambda: raise_refused(Row(settings=settings_text({"a": 1})), Row(settings=settings_text({})), "site"), bool
        )


def participant(store: str = "127.0.0.1:1", failures: int = 2) -> SimpleNamespace:
    data = {"row": list(Row(3, tokens=4.0)), "failures": failures, "cut": []}
    return SimpleNamespace(replica_id="site", store_address=store, address="127.0.0.1:2", data=data)


OWN = _Member("site", "127.0.0.1:1", "127.0.0.1:2", Row(3, tokens=8.0), 2)


def test_a_late_answer_finds_that_the_group_has_left() -> None:
    membership, _ = a_member_of("site", {})
    membership._address, membership._store = "127.0.0.1", SimpleNamespace(port=1)  # type: ignore[assignment]
    membership._server = SimpleNamespace(address="127.0.0.1:2")  # type: ignore[assignment]
    membership._has_taken, asked = False, list[tuple[int, bool]]()

    def quorum(own: _Member) -> Any:
        asked.append((own.failures, membership._group is None))
        raise TimeoutError

    membership._lighthouse.quorum = quorum  # type: ignore[method-assign]
    assert membership.quorum(Row(), lambda: len(asked) > 2 and time.sleep(1.0) is None) is None
    assert asked[:3] == [(0, False), (1, True), (2, True)]


def members_of(own: _Member, *participants: SimpleNamespace) -> list[_Member]:
    """Return the members of a quorum, in which the lighthouse has answered with some participants."""
    answer = SimpleNamespace(quorum_id=1, participants=participants)
    there = object.__new__(_Lighthouse)
    there.url, there._name, there._client = "http://127.0.0.1:1", own.name, SimpleNamespace(quorum=lambda **_: answer)
    return there.quorum(own)[1]


def test_answers_that_are_refused() -> None:
    """An answer to an older request is not taken; a second group with the name, and another program, are errors."""
    with pytest.raises(RuntimeError, match="an older request"):
        members_of(OWN, participant(failures=1))
    with pytest.raises(ConfigurationError, match=r"Another group has the name 'site', too\. Give each group a name"):
        members_of(OWN, participant(store="127.0.0.1:9"))
    stranger = SimpleNamespace(replica_id="stranger", data=None)
    with pytest.raises(ConfigurationError, match="also has members of another program"):
        members_of(OWN, participant(), stranger)
    assert len(members_of(OWN._replace(row=Row(3, is_new=False)), participant(), stranger)) == 1


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
        assert len(healed) == 2, "as it joins, and as the other groups wait"
    waits = [event.value[1] for event in made.events if event.kind == "committed" and event.group == 0]
    alone = [event for event in made.events if event.at_s > joined.at_s and len(event.members) == 2]
    assert alone, "rounds without it"
    assert max(waits) < 4.0


def serve(folder: Path, address: str) -> None:
    members.keep_stderr_in(str(folder))
    lighthouse.main(["--bind", address])


def test_the_lighthouse_command_serves_until_a_signal(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        (process := context.Process(target=serve, args=(tmp_path, address))).start()
        process.join(members.PATIENCE_S)
        assert process.exitcode == 1
        assert (tmp_path / "stderr").read_text().startswith("lowbw-lighthouse: Address already in use")
    for number in (signal.SIGTERM, signal.SIGINT):
        (process := context.Process(target=serve, args=(tmp_path, address))).start()
        deadline_s, page = time.monotonic() + members.PATIENCE_S, b""
        while not page and time.monotonic() < deadline_s:
            with contextlib.suppress(OSError):
                page = urllib.request.urlopen(f"http://{address}/status").read()
            time.sleep(0.1)
        assert b"Quorum" in page
        os.kill(process.pid or 0, number)
        process.join(10.0)
        assert process.exitcode == 0


@pytest.mark.parametrize("found", [[SimpleNamespace(version="0.3.0")], []])
def test_another_torchft_is_refused(monkeypatch: pytest.MonkeyPatch, found: list[Any]) -> None:
    monkeypatch.setattr(importlib.metadata, "distributions", lambda **_: found)
    with pytest.raises(ConfigurationError, match=r'needs torchft 0\.2\.0.* pip install "lightning-lowbw\[elastic\]"'):
        TorchftMembership("127.0.0.1:1")


@pytest.mark.parametrize(
    ("given", "interface", "message"),
    [
        ({"lighthouse": "http://10.0.0.1"}, "", r"lighthouse='http://10.0.0.1': give its IPv4 address with the port"),
        ({"lighthouse": "http://[fd00::1]:29510/"}, "", r"\]:29510': give its IPv4 address with the port"),
        (HERE, "wg7", r"GLOO_SOCKET_IFNAME=wg7, .*: No such device. .* interfaces are .*lo.*\. Set"),
    ],
)
def test_addresses(monkeypatch: pytest.MonkeyPatch, given: dict[str, str], interface: str, message: str) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    monkeypatch.setenv("RUST_LOG", "warn")  # or the first one sets it
    with pytest.raises(ConfigurationError, match=message):
        TorchftMembership(**given)
