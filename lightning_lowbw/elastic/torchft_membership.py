"""Members found by torchft's lighthouse, connected by gloo groups that are made anew when the members change.

This module uses the lighthouse of torchft and its client, and nothing else of torchft. A round has these parts: the
lighthouse finds the members; they connect; a member that is behind takes the state of another member; the processes of
a group vote. All members compare the same rows and leave out the same groups, for other settings or another run.

`torchft.Manager` is not used: one failed quorum leaves it unusable, its healing is pickle over unauthenticated HTTP,
its server ends the process at anybody's request, and it waits in vain for an answer after a restart of the lighthouse.

A round of two groups, by their leaders; B has just joined:

    group A                     lighthouse                    group B
       |-- state ----------------------------------------------->|     `state_of_others`; A trains on
       |-- step, row, store -------->|<------ step, row, store --|     `_ask`
       |<-- number, members ---------|--------- number, members->|
       |<=============== gloo, by the store of A ===============>|     `_connect`, if the members have changed
       |<-------------- all-reduce, all-gather, ... ------------>|     `collective`
       |   has nothing failed?               has nothing failed? |     `commit`

A group that is behind takes part in no round: it takes the state of a member and asks again. If rounds have ended
meanwhile, the members wait for it once, at the begin of the next round.

After any error a group leaves (`_fail`). The collectives of the other members then fail, too, and all members make new
connections for the next attempt. Each group then tells which members it did not reach, and all members leave out the
same groups (`_connected`). A group that is left out sends no heartbeats until it has the state of a group that goes on:
no second training begins while that group reaches the lighthouse.
"""

from __future__ import annotations

import html
import http.client
import importlib
import importlib.metadata
import logging
import math
import os
import re
import socket
import struct
import threading
import time
import urllib.request
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from lightning_lowbw.elastic.membership import GivesUp, Quorum, Row, Share, latest_of, raise_refused, refusals
from lightning_lowbw.elastic.transfer import CONNECT_S, POLL_S, RefusedError, StateClient, StateServer
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.namespaces import LOGGER

T = TypeVar("T")
_logger = logging.getLogger(LOGGER)

TORCHFT = "0.2.0"  # other releases speak another protocol
LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"  # torchft's own variable: the lighthouse's address
HEARTBEAT_S = 0.25  # between two heartbeats; without any for 5 s, its default, the lighthouse takes a member for dead
HANG_S = 120.0  # a group without a batch for this long hangs
LEAVE_S = 5.0  # limit for a transfer in progress when a group is ended
SILENT_S = 6  # a member without heartbeats for this long fails the collective in progress
# Timeout of a request for a quorum, longer than the join timeout of the lighthouse. That begins anew with each request:
# with shorter ones it would never end while a slow group is heard.
WAIT_S = 12.0
OPEN_PORTS = (
    "Open all ports between all groups, or add the missing route; set GLOO_SOCKET_IFNAME if another interface leads to "
    "the other groups, or use a VPN if one is behind NAT."
)
TAKEN_NAME = "Another group has the name {!r}, too. Give each group a name of its own: group=..."
START_S = 10.0  # a group that starts waits so long for a second one, which begins with it
OWN_DATA = frozenset({"row", "failures", "cut"})  # of a member: what torchft has no field for
RETRY_S, WARN_S = 0.5, 60.0
# On the lighthouse's page: name, rounds and address of each member of the last quorum.
MEMBERS = re.compile(r"<b>(.*)</b> <br/>\s*Step: ([0-9]+) <br/>\s*Manager: (\S+) <br/>")
SIOCGIFADDR = 0x8915  # Linux: the address of an interface
TIMEOUT_S = 10.0  # for pauses of an operating system; pauses of a link may take SILENT_S
ROUND_STATES = 2.0  # bytes of a round / bytes of the state: at most an all-reduce of the whole state


def timeout_s_of(state_bytes: float, gbit_per_s: float) -> float:
    """Return the timeout of a collective in seconds: twice what the slowest collective may take.

    A collective also waits for a member that takes the state at the begin of the round; the timeout covers both.

    Example:
        >>> timeout_s_of(state_bytes=80_000_000, gbit_per_s=0.1)
        38.4
    """
    return 2 * (1 + ROUND_STATES) * state_bytes * 8 / (gbit_per_s * 1e9)


class _Member(NamedTuple):
    """A member as the lighthouse describes it to all members.

    Attributes:
        name: name of the group.
        store: address of the store in which the members meet.
        state: address of its `StateServer`.
        row: as given to `Membership.quorum`.
        failures: number of its rounds that have failed. After a failure the members make a new group.
        cut: stores of members that it did not reach in its last attempt to connect.
    """

    name: str
    store: str
    state: str
    row: Row
    failures: int
    cut: Sequence[str] = ()


class TorchftMembership:
    """A `Membership` by torchft's lighthouse, over gloo.

    Args:
        lighthouse: its address, as "http://10.8.0.1:29510"; None: the address in TORCHFT_LIGHTHOUSE.
        name: name of this group: no other group has it, and the group keeps it after a restart; None: the host's name.
        min_replicas: smallest number of members of a round. With 1, a group trains on alone if no other group is there.
        gbit_per_s: the slowest uplink of a member.
        timeout_s: timeout of a collective, unless `timeout_s_of` is longer. A member that hangs costs this time.
        is_whole: returns whether all processes of this group live; if not, the group sends no heartbeats.

    Raises:
        ConfigurationError: a value cannot be used.
    """

    def __init__(
        self,
        lighthouse: str | None = None,
        *,
        name: str | None = None,
        min_replicas: int = 1,
        gbit_per_s: float = 0.1,
        timeout_s: float = TIMEOUT_S,
        is_whole: Callable[[], bool] = lambda: True,
    ) -> None:
        lighthouse = str(lighthouse or os.environ.get(LIGHTHOUSE, "")).rstrip("/")
        if not re.fullmatch(r"(https?://)?[^/:]+:\d+", lighthouse):
            raise ConfigurationError(
                f"lighthouse={lighthouse!r}: give its IPv4 address with the port, or set {LIGHTHOUSE}=http://10.8.0.1:29510."
            )
        torchft = _import_torchft()
        self.min_replicas, self.gbit_per_s, self.timeout_s = min_replicas, gbit_per_s, timeout_s
        url = lighthouse if "//" in lighthouse else f"http://{lighthouse}"
        self._address = _own_address(url)
        self._name = name or socket.gethostname()
        self._lighthouse = _Lighthouse(torchft, url, self._name, is_whole)
        self._key: tuple[Any, ...] = ()  # the members for which the group was made
        self._group: Any = None
        self._num_failures = 0
        self._limit_s = timeout_s  # timeout of a collective of this round
        self._cut: list[str] = []  # stores of members that were not reached in the last attempt to connect
        self._goes_on: tuple[str, ...] = ()  # members of the last round, if it had one or some were left out
        self._began_s = self._says_s = 0.0  # when this group began to wait; when it logs that it waits
        self._client = StateClient()  # receives the states
        self._has_taken = False  # a state since the last round: if it is behind again, the members wait for it
        self._row = Row()  # as given to `quorum`, and new no longer after a round
        self._gives_up: GivesUp = lambda: False  # as given to `quorum`
        self._server = StateServer(self._name, self._address, lambda: self._row)
        listener = socket.create_server((self._address, 0))  # not at other addresses of the host
        port = listener.getsockname()[1]
        options: dict[str, Any] = {"is_master": True, "wait_for_workers": False}
        self._store = dist.TCPStore(self._address, port, master_listen_fd=listener.detach(), **options)

    def state_of_others(self, row: Row, gives_up: GivesUp) -> dict[str, Any] | None:
        """See `Membership`. The lighthouse's page lists the members of the last round."""
        self._row = row
        with suppress(RuntimeError):  # there is none, or this group has given up
            return self._fetch(None, gives_up)
        return None

    def serve(self, shared: Share | None) -> None:
        self._server.offer(shared)

    def note(self) -> None:
        self._lighthouse.hangs_from_s = time.monotonic() + HANG_S

    def quorum(self, row: Row, gives_up: GivesUp) -> Quorum | None:
        self._begin_to_wait()
        self._row, self._gives_up = row, gives_up
        while True:
            told = ""
            try:
                self._lighthouse.hangs_from_s = math.inf
                answer = self._ask(gives_up)
                if answer is None:
                    self._fail()  # other members may wait for this group; and the next request has another number
                    return None
                if (quorum := self._join(*answer, gives_up)) is not None:
                    return quorum
                continue
            except TimeoutError:
                pass  # the lighthouse may answer this request, which has ended: no member must wait for this group then
            except (RuntimeError, OSError) as error:
                told = f"{error}"
            self._fail()  # not inside `except`: the error refers to the group
            self._say_if_due(told)
            time.sleep(RETRY_S if told else 0.0)

    def _begin_to_wait(self) -> None:
        self._client.progress, self._began_s = "", time.monotonic()
        self._says_s = self._began_s + WARN_S / 6

    def _say_if_due(self, error: str = "") -> None:
        """Log that this group waits: after ten seconds, then once a minute."""
        now_s = time.monotonic()
        if now_s < self._says_s:
            return
        self._says_s = now_s + WARN_S
        _logger.warning(
            "Waiting for %.0f s now for a round of at least %d members, at the lighthouse %s. Last attempt: %s",
            *(now_s - self._began_s, self.min_replicas, self._lighthouse.url, error or "has no answer yet"),
        )

    def _call(self, fn: Callable[[], T], gives_up: GivesUp) -> T | None:
        """Call a function in a thread; return its result, or None if this group gives up.

        In a thread, because torchft and sockets would keep the process from handling a signal.

        Args:
            fn: the function.
            gives_up: asked about once a second, and after an error.
        """
        result = Future[T]()

        def run() -> None:
            try:
                result.set_result(fn())
            except (ConfigurationError, OSError) as error:  # among these TimeoutError
                result.set_exception(error)
            except Exception as error:  # noqa: BLE001 - another attempt may succeed
                result.set_exception(RuntimeError(f"{error}"))

        threading.Thread(target=run, name="lowbw-call", daemon=True).start()
        while not wait([result], POLL_S).done or result.exception():
            self._say_if_due(self._client.progress)
            if gives_up():
                return None
            if result.done():
                break
        return result.result()

    def collective(self, begin: Callable[[dist.ProcessGroup], Any]) -> None:
        """See `Membership`. A member without heartbeats fails it: a stopped process keeps its connections open."""
        if self._group is None:
            raise RuntimeError("This round has failed.")
        members = [name for name, *_ in self._key if name != self._name]
        try:
            self._lighthouse.hangs_from_s = time.monotonic() + self._limit_s + HANG_S
            work = begin(self._group)
            while not work.is_completed():
                with suppress(RuntimeError):  # an error of the work itself is raised below
                    work.wait(timedelta(seconds=POLL_S))
                silent = [] if work.is_completed() else self._lighthouse.silent(members)
                self._gives_up()  # the other processes of this group hear that it waits
                if silent:
                    # A gloo group can be destroyed only after its work has ended, which may take its whole timeout.
                    threading.Thread(target=_let_go, args=(work, self._group), daemon=True).start()
                    raise RuntimeError(f"the lighthouse has heard nothing of {silent} for {SILENT_S} s")
            work.wait()
        except Exception:
            self._fail()
            raise
        finally:
            self.note()

    def commit(self) -> bool:
        """See `Membership`."""
        if self._group is None:
            self._fail()
            return False
        self._row, self._has_taken = self._row._replace(is_new=False), False
        return True

    def close(self) -> None:
        self._disconnect()
        self._lighthouse.close()
        self._server.close(self._limit_s if self._row.has_ended else LEAVE_S)

    def _fail(self) -> None:
        """Leave the group, so that the members that wait for this one fail; the next round has a new group."""
        self._num_failures += 1
        self._disconnect()

    # Members --------------------------------------------------------------------------------------------------------

    def _ask(self, gives_up: GivesUp) -> tuple[int, Sequence[_Member]] | None:
        """Return the number of the next quorum, and its members; None if this group has given up.

        Raises:
            TimeoutError, RuntimeError: there is none yet.
            DisagreementError: this group differs from the other groups, which go on without it.
        """
        row = self._row
        ends_s = self._began_s + POLL_S  # until then this group does not give up: the other groups are on their way
        told = row._replace(is_late=self._has_taken)

        def request() -> tuple[int, list[_Member]]:
            if row.is_new and not self._has_taken:
                self._lighthouse.await_another(self._server.address)
            stores = f"{self._address}:{self._store.port}", self._server.address
            return self._lighthouse.quorum(_Member(self._name, *stores, told, self._num_failures, self._cut))

        answer = self._call(request, lambda: time.monotonic() >= ends_s and gives_up())
        if answer is None:
            return None
        number, members = answer
        by_name = {member.name: member for member in members}
        refused = refusals({member.name: member.row for member in members})
        if self._name in refused:
            other = by_name[refused[self._name]]
            raise_refused(row, other.row, f"{other.name} at {other.store}")
        if refused:
            named = ", ".join(refused)
            _logger.warning("Refused because of other settings or another run: %s. The error there says why.", named)
        return number, [member for member in members if member.name not in refused]

    def _join(self, number: int, members: Sequence[_Member], gives_up: GivesUp) -> Quorum | None:
        """Connect to the members of a quorum that go on, or take the state of one.

        Returns:
            None if this group has waited for a group that has taken a state, and is to ask for the next quorum.

        Raises:
            RuntimeError: it was not possible.
        """
        (own,) = (member for member in members if member.name == self._name)
        latest = latest_of({member.name: member.row for member in members})
        going = _connected([member for member in members if member.name in latest])
        late = [member for member in members if member.name not in latest and member.row.is_late]
        taker = next((member for member in late if len(_connected([*going, member])) > len(going)), None)
        cut = {m.name: m.store for m in members if m not in going and any(_is_cut(m, other) for other in going)}
        members = [member for member in members if member in going or member is taker]
        donors = [member.name for member in going]
        if own not in members:
            self._lighthouse.is_away = True  # no heartbeats: the members do not wait for this group meanwhile
            self._disconnect()  # from the members of an earlier round, which `commit` would count as this one
            if own.name in cut:
                _logger.warning(
                    "Group %r at %s is left out of a round of %s, and takes their state: at least one connection "
                    "between this group and the other groups fails. %s",
                    *(own.name, own.store, donors, OPEN_PORTS),
                )
            return Quorum(0, (own.name,), healed=self._fetch(donors, gives_up))
        if len(members) < self.min_replicas:
            raise RuntimeError(f"up to date are {donors}; not reached are {cut}")
        self._connect(number, own, members, going[0])
        rank, names = members.index(own), tuple(member.name for member in members)
        goes_on = names if cut or len(names) == 1 else ()
        if goes_on and goes_on != self._goes_on:
            why = f"{cut} are not reached by all" if cut else "no other group is there"
            _logger.warning("Training goes on with %s only: %s. Groups that come take their state.", [*names], why)
        self._goes_on = goes_on
        if taker is None:
            return Quorum(rank, names, tuple(member.row for member in members))
        healed = self._fetch(donors, gives_up) if own is taker else None
        with suppress(RuntimeError):  # the other members wait here for the state to arrive
            self.collective(lambda group: group.allreduce([torch.zeros(1)]))
        self.commit()
        return None if healed is None else Quorum(rank, names, healed=healed)

    def _connect(self, number: int, own: _Member, members: Sequence[_Member], host: _Member) -> None:
        """Make the group of the members, unless it is there, and set its timeout.

        Args:
            number: number of the quorum.
            own: this group.
            members: the members.
            host: the member in whose store they meet.

        Raises:
            RuntimeError: the group could not be made; see `_make_group`.
        """
        key = tuple((member.name, member.store, member.failures) for member in members)
        if key != self._key:
            self._disconnect()
            # Not the number alone: a lighthouse that is restarted counts its quorums from 1 again.
            path = f"{number}/{host.row.rounds}/{zlib.crc32(repr(key).encode())}"
            self._make_group(own, members, host.store, path)
            self._key = key
        self._limit_s = max(self.timeout_s, timeout_s_of(max(m.row.state_bytes for m in members), self.gbit_per_s))
        self._group._set_default_timeout(timedelta(seconds=self._limit_s))

    def _make_group(self, own: _Member, members: Sequence[_Member], store: str, path: str) -> None:
        """Make the group of the members, which meet in a store.

        Raises:
            RuntimeError: it cannot be made; `_cut` has the stores of the members that do not accept a connection.
        """
        gloo: Any = dist.ProcessGroupGloo
        options, limit = gloo._Options(), timedelta(seconds=CONNECT_S)
        options._devices, options._timeout = [gloo.create_device(hostname=self._address)], limit
        host, _, port = store.rpartition(":")
        try:
            there = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=limit)
            self._group = gloo(dist.PrefixStore(path, there), members.index(own), len(members), options)
        except RuntimeError as raised:
            cut = {member.name: member.store for member in members if member is not own and not _accepts(member.store)}
            self._cut = [*cut.values()]
            if not cut:
                raise
            raise RuntimeError(
                f"{own.name!r} at {own.store} does not reach {cut}, although all reach the lighthouse. {OPEN_PORTS}"
            ) from raised
        self._cut = []

    # The state of other groups ----------------------------------------------------------------------------------------

    def _fetch(self, names: Sequence[str] | None, gives_up: GivesUp) -> dict[str, Any]:
        """Return the state of one of some groups, None: of any; repeat after a failure while such a group lives.

        Raises:
            RuntimeError: there is none, or this group has given up for now.
            DisagreementError: this group is refused.
        """
        self._begin_to_wait()
        while True:
            try:
                state = self._call(lambda: self._take(self._lighthouse.addresses(names)), gives_up)
            except OSError as error:
                self._client.progress = f"groups train, and this one does not reach them: {error}. {OPEN_PORTS}"
                time.sleep(RETRY_S)
                continue
            if state is None:
                raise RuntimeError("given up")
            self._has_taken, self._cut = True, []
            return state

    def _take(self, addresses: Sequence[str]) -> dict[str, Any]:
        """Return the state of the first group that gives it.

        Raises:
            RuntimeError: no group has completed a round.
            OSError: a group was not reached.
            DisagreementError: a group that has been in a round refuses this one. (A refusal by a newcomer counts only
                in the next quorum, where all compare.)
        """
        failed = list[str]()
        for address in addresses:
            try:
                state = self._client.fetch(address, self._name, self._row)
            except RefusedError as refused:
                name, other = refused.args
                if not other.is_new and (other.rounds or other.settings != self._row.settings):
                    raise_refused(self._row, other, f"{name} at {address}")
            except Exception as error:  # noqa: BLE001 - whatever it is, another training is there
                # But a group that was started again is heard, listens elsewhere, and waits as this one does.
                is_old = isinstance(error, ConnectionRefusedError) and time.monotonic() > self._began_s + CONNECT_S
                failed += [] if is_old else [f"{address}: {error!r}"]
            else:
                self._lighthouse.is_away = False  # this group is in their next round
                return state
        raise OSError("; ".join(failed)) if failed else RuntimeError("no other group has completed a round")

    def _disconnect(self) -> None:
        """Forget the group. gloo closes its connections when nothing refers to it any more; `abort` does not."""
        self._group, self._key = None, ()


class _Lighthouse:
    """torchft's client, made anew after an error.

    This class sends the heartbeats itself: torchft's server, which would do it, ends the process at the request of
    anybody that reaches its port.
    """

    def __init__(self, torchft: Any, url: str, name: str, is_whole: Callable[[], bool]) -> None:
        self.url, self._name, self._is_whole = url, name, is_whole
        self._connect = partial(torchft.LighthouseClient, url, connect_timeout=timedelta(seconds=CONNECT_S))
        self._client: Any = None
        self.is_away = True  # whether no heartbeats are sent, so that the other groups do not wait for this one
        self.hangs_from_s = math.inf  # time after which this group is taken to hang, unless `note` comes before
        self._starts_s: float | None = None  # when the lighthouse was first reached; infinity after the start
        self.is_closed = threading.Event()
        self._heartbeats = threading.Thread(target=self._send_heartbeats, name="lowbw-heartbeats", daemon=True)
        self._heartbeats.start()

    def quorum(self, own: _Member) -> tuple[int, list[_Member]]:
        """Wait for the next quorum; return its number and members, in the same order for all.

        Raises:
            ConfigurationError: another group has the name of this one, or a member is another program.
            RuntimeError, TimeoutError: there is none yet.
        """
        self.is_away = False
        client, self._client = self._client or self._connect(), None
        try:
            found = client.quorum(
                replica_id=own.name,
                address=own.state,
                store_address=own.store,
                step=own.row.rounds,  # for the lighthouse's page
                data={"row": list(own.row), "failures": own.failures, "cut": list(own.cut)},
                timeout=timedelta(seconds=WAIT_S),
            )
        except TimeoutError:
            self._client = client
            raise
        self._client = client
        members = {each.replica_id: member for each in found.participants if (member := _member_of(each)) is not None}
        if len(members) < len(found.participants) and own.row.is_new:  # groups that train go on
            raise ConfigurationError(
                f"The lighthouse {self.url} also has members of another program, or of another version. Start a "
                "lighthouse for each training."
            )
        told = members.get(own.name)
        if told is not None and told.store != own.store:
            raise ConfigurationError(TAKEN_NAME.format(own.name))
        if told is None or told.failures != own.failures:
            raise RuntimeError("the lighthouse has answered an older request of this group")
        return found.quorum_id, [members[name] for name in sorted(members)]

    def page(self) -> tuple[str, dict[str, float]]:
        """Return the lighthouse's page, and the seconds since the last heartbeat of each member, read from it.

        Raises:
            OSError: it cannot be read.
        """
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"{self.url}/status", timeout=CONNECT_S) as answer:
                page = html.unescape(answer.read().decode())
        except http.client.HTTPException as error:
            raise OSError(f"{self.url}: {error}") from error
        return page, {name: float(age) for name, age in re.findall(r"(?m)^ *(\S.*): seen ([0-9.]+)s ago", page)}

    def silent(self, names: Sequence[str]) -> list[str]:
        """Return the members without a heartbeat for SILENT_S; none if this group is not heard either."""
        with suppress(OSError):
            ages = self.page()[1]
            if ages.get(self._name, math.inf) < POLL_S:
                return [name for name in names if ages.get(name, 0.0) > SILENT_S]
        return []

    def addresses(self, names: Sequence[str] | None = None) -> list[str]:
        """Return the `StateServer`s of the living other members of the last round; the most rounds first.

        Args:
            names: the members; None: all.

        Raises:
            OSError: the page cannot be read.
        """
        page, ages = self.page()
        asked = {name: each for name, *each in MEMBERS.findall(page) if name != self._name and name in (names or ages)}
        alive = {name: each for name, each in asked.items() if ages.get(name, math.inf) < CONNECT_S}
        in_turn = sorted(alive, key=lambda name: (-int(alive[name][0]), name))
        return [alive[name][1] for name in in_turn]

    def await_another(self, own: str) -> None:
        """Wait, once and for START_S at most, for the heartbeats of another group, which begins with this one.

        Args:
            own: address of the `StateServer` of this group.

        Raises:
            OSError: the page cannot be read.
            ConfigurationError: another process trains under the name of this group.
        """
        self.is_away = False
        while self._starts_s != math.inf and not self.is_closed.wait(HEARTBEAT_S):
            page, ages = self.page()
            self._starts_s = self._starts_s or time.monotonic()
            others = [name for name, age in ages.items() if name != self._name and age < CONNECT_S]
            if others or time.monotonic() > self._starts_s + START_S:
                self._starts_s = math.inf
                there = [address for name, _, address in MEMBERS.findall(page) if name == self._name]
                if any(address != own and _accepts(address) for address in there):
                    raise ConfigurationError(TAKEN_NAME.format(self._name))

    def _send_heartbeats(self) -> None:
        """Tell the lighthouse that this member is alive, until `close`; not while the group hangs."""
        client, has_said = None, False
        while not self.is_closed.wait(HEARTBEAT_S):
            hangs = time.monotonic() > self.hangs_from_s
            if hangs and not has_said:
                _logger.warning("This group has begun no batch for %g s; other groups go on without it.", HANG_S)
            has_said = hangs
            if self.is_away or hangs or not self._is_whole():
                continue
            with suppress(RuntimeError, TimeoutError):
                client, used = None, client or self._connect()
                used.heartbeat(self._name, timeout=timedelta(seconds=CONNECT_S))
                client = used

    def close(self) -> None:
        self.is_closed.set()
        self._heartbeats.join()


def _member_of(participant: Any) -> _Member | None:
    """Return a participant of a quorum as a member; None if it is another program."""
    data = participant.data or {}
    if data.keys() != OWN_DATA or len(data["row"]) != len(Row._fields):
        return None
    addresses = participant.store_address, participant.address
    return _Member(participant.replica_id, *addresses, Row(*data["row"]), data["failures"], data["cut"])


def _is_cut(member: _Member, other: _Member) -> bool:
    return member.store in other.cut or other.store in member.cut


def _connected(members: Sequence[_Member]) -> list[_Member]:
    """Return the largest set of members that reach each other; of sets of one size the first: the same on all members.

    Members that train come before newcomers, then the order is that of the names.
    """
    in_turn, sets = sorted(members, key=lambda member: (member.row.is_new, member.name)), list[list[_Member]]()
    for first in in_turn:
        sets.append(found := [first])
        for member in in_turn:
            if member is not first and not any(_is_cut(member, other) for other in found):
                found.append(member)
    return max(sets, key=len)


def _accepts(address: str) -> bool:
    """Return whether a connection to an address is accepted."""
    host, _, port = address.rpartition(":")
    with suppress(OSError), socket.create_connection((host, int(port)), CONNECT_S):
        return True
    return False


def _let_go(work: Any, group: Any) -> None:
    """Wait for the end of abandoned work, with the last reference to its group."""
    with suppress(RuntimeError):
        work.wait()
    del group


# Surroundings ---------------------------------------------------------------------------------------------------------


def _import_torchft() -> Any:
    version = next((each.version for each in importlib.metadata.distributions(name="torchft")), "none")
    if version != TORCHFT:
        raise ConfigurationError(
            f"Elastic training needs torchft {TORCHFT}, here and in the lighthouse; {version} is installed. "
            'pip install "lightning-lowbw[elastic]"'
        )
    os.environ.pop("TORCHFT_USE_OTEL", None)  # the import fails if it is set
    os.environ.setdefault("RUST_LOG", "warn")  # torchft would write a line for each request
    return importlib.import_module("torchft.coordination")


def _own_address(lighthouse: str) -> str:
    """Return the address of this host: that of the interface GLOO_SOCKET_IFNAME, or of the way to the lighthouse.

    Raises:
        ConfigurationError: there is none.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            if interface:
                import fcntl

                request = struct.pack("256s", interface.split(",")[0].encode()[:15])
                return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)[20:24])
            parts = urlsplit(lighthouse)
            probe.connect((parts.hostname, parts.port))  # sends nothing
            return str(probe.getsockname()[0])
        except OSError as error:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise ConfigurationError(
                f"GLOO_SOCKET_IFNAME={interface}, lighthouse {lighthouse}: {error.strerror}. Other groups reach this "
                f"one at an IPv4 address of this host, whose interfaces are {names}. Set GLOO_SOCKET_IFNAME to one."
            ) from error
