"""Members found by torchft's lighthouse, and connected by gloo groups that are made anew where the members change.

Of torchft this uses the lighthouse and its client. Everything else is here, in the order of a round: who is there, the
group, the state for those that are behind, the vote of a group's processes. All compare the same rows, and leave out
the same members: with other settings, of another run, with a name in use, or whom not all others reach.

It does not use `torchft.Manager`: one failed quorum leaves it unusable, its healing is pickle over unauthenticated
HTTP, its server ends the process for whoever asks it to, and it waits in vain for an answer if the lighthouse is
restarted.

A round of two groups, of which B is behind; the processes of a group agree after each step:

    group A                     lighthouse                    group B
       |-- state ----------------------------------------------->|     `state_of_others`, `transfer`: A trains on
       |-- step, row, store -------->|<------ step, row, store --|     `_ask`
       |<-- number, members ---------|--------- number, members->|
       |<=============== gloo, by the store of A ===============>|     `_connect`, if the members are others
       |<-------------- all-reduce, all-gather, ... ------------>|     `collective`
       |   all processes of A?             all processes of B?   |     `commit`

Who is behind, for all that, is in no round: it takes the state of a member, and asks again. Who is late then, because
rounds are shorter than that takes, is waited for.

Where anything fails a group leaves (`_fail`): what others wait for fails, too, and the next round has new connections.
"""

from __future__ import annotations

import base64
import html
import http.client
import importlib
import importlib.metadata
import logging
import math
import os
import re
import socket
import stat
import struct
import threading
import time
import urllib.request
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar
from urllib.parse import urlsplit

import torch.distributed as dist

from lightning_lowbw.comm.agreement import gather_json
from lightning_lowbw.elastic.membership import GivesUp, Quorum, Row, Settings, Share, raise_refused, refusals, rounds_of
from lightning_lowbw.elastic.transfer import CONNECT_S, POLL_S, RefusedError, StateClient, StateServer, packed, unpacked
from lightning_lowbw.errors import ConfigurationError, DisagreementError
from lightning_lowbw.namespaces import LOGGER

_logger = logging.getLogger(LOGGER)
T = TypeVar("T")

TORCHFT = "0.2.0"  # others speak another protocol
LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"  # torchft's own variable: the lighthouse's address
HEARTBEAT_S = 0.25  # between two; the lighthouse takes a member for dead after 5 s, if not started otherwise
HANG_STEPS, HANG_S = 10, 60.0  # a group without a batch for ten times its longest step, and a minute, hangs
LEAVE_S = 5.0  # for which who is ended waits for a transfer that is in progress
SILENT_S = 6  # after which a member of the group is lost: nothing confirms what was sent, or takes it, or no heartbeat
# Of a request for a quorum, longer than the join timeout; and of the next ones. With each the lighthouse begins anew to
# wait for others: who has waited for long would leave none of them the time to come.
WAIT_S, RENEW_S = 12.0, 5.0
OPEN_PORTS = "Open all ports between all groups: give address=..., or a VPN where one is behind NAT."
OWN_DATA = frozenset({"row", "failures"})  # of a member: what torchft has no field for
RETRY_S, WARN_S = 0.5, 60.0
PAUSE_S = 20.0  # for which a group is left out that others do not reach, if it does not reach them before
GONE_S = 20.0  # after which who has this one's name is not this one before a restart, and who is not reached never is
SIOCGIFADDR = 0x8915  # Linux: the address of an interface
TIMEOUT_S = 10.0  # for pauses of an operating system; those of a link may take SILENT_S
ROUND_STATES = 2.0  # the bytes of a round by those of the state: at most an all-reduce of all of it


def timeout_s_of(state_bytes: float, gbit_per_s: float) -> float:
    """Return the seconds after which a collective may be taken for lost: twice what the slowest may take.

    Who is late with the state is waited for in a collective: with a shorter timeout it never arrives.

    Example:
        >>> timeout_s_of(state_bytes=80_000_000, gbit_per_s=0.1)
        38.4
    """
    return 2 * (1 + ROUND_STATES) * state_bytes * 8 / (gbit_per_s * 1e9)


class _Member(NamedTuple):
    """What the lighthouse tells of a member to all.

    Attributes:
        name: its label, and what is another after a restart.
        store: address of the store in which its processes and those of others meet.
        state: address at which its state is served.
        row: as given to `Membership.quorum`.
        failures: rounds that have failed there. After each the members make a new group.
    """

    name: str
    store: str
    state: str
    row: Row
    failures: int

    @property
    def label(self) -> str:
        return label_of(self.name)

    def fits(self, other: _Member) -> bool:
        """Whether both can be in one round: they reach one another, and have not one name."""
        is_broken = other.name in self.row.unreached or self.name in other.row.unreached
        return not is_broken and self.label != other.label


def label_of(name: str) -> str:
    """Return the name that a group keeps when it restarts, by the one that it has up to then."""
    return name.rpartition(":")[0]


def connected(members: Sequence[_Member]) -> list[_Member]:
    """Return the largest set of members of which each fits each other; with most of those that have been in rounds."""

    def largest(candidates: Sequence[_Member]) -> list[_Member]:
        if not candidates:
            return []
        first, *rest = candidates
        fitting = [member for member in rest if first.fits(member)]
        with_first = [first, *largest(fitting)]
        without = [] if len(fitting) == len(rest) else largest(rest)
        return max(with_first, without, key=lambda found: (sum(not member.row.is_new for member in found), len(found)))

    found = largest(sorted(members, key=lambda member: (member.row.is_new, member.name)))
    return sorted(found, key=lambda member: member.name)


class TorchftMembership:
    """A `Membership` by torchft's lighthouse, over gloo.

    torch.distributed is initialised with the processes of this group, all of which make one of these.

    Collective: all processes of the group.

    Args:
        lighthouse: its address, as "http://10.0.0.1:29510"; None is that of the environment's TORCHFT_LIGHTHOUSE.
        name: of this group, no other's, and the same after a restart; None is the host's.
        min_replicas: members that a round has at least. With 1 a group that is cut off trains on alone.
        gbit_per_s: the slowest uplink of a member.
        timeout_s: after which a collective is taken for lost, if the state of a member takes no longer at `gbit_per_s`,
            see `timeout_s_of`. It is what a member costs that hangs.
        address: at which other groups reach this process; None is the address of the interface GLOO_SOCKET_IFNAME, or
            of the one that leads to the lighthouse.

    Raises:
        ConfigurationError: on all processes of the group.
    """

    def __init__(
        self,
        lighthouse: str | None = None,
        *,
        name: str | None = None,
        min_replicas: int = 2,
        gbit_per_s: float = 0.1,
        timeout_s: float = TIMEOUT_S,
        address: str | None = None,
    ) -> None:
        lighthouse = str(lighthouse or os.environ.get(LIGHTHOUSE, "")).rstrip("/")
        if not re.fullmatch(r"(https?://)?[^/:]+:\d+", lighthouse):
            kind = "an IPv6 address, and groups meet by IPv4: " if lighthouse.count(":") > 2 else ""
            raise ConfigurationError(
                f"lighthouse={lighthouse!r}: {kind}give its address with the port, or set {LIGHTHOUSE}=http://10.0.0.1:29510."
            )
        torchft = _import_torchft()
        self.min_replicas, self.gbit_per_s, self.timeout_s = min_replicas, gbit_per_s, timeout_s
        self._lighthouse = _Lighthouse(torchft, lighthouse if "//" in lighthouse else f"http://{lighthouse}")
        self._address = _own_address(address, self._lighthouse.url)
        self._process = dist.get_rank()
        (self._name, *_) = gather_json(f"{name or socket.gethostname()}:{uuid.uuid4()}")
        self._key: tuple[Any, ...] = ()  # of the quorum for which the group was made
        self._group: Any = None
        self._num_failures = 0
        self._limit_s, self._longest_s = timeout_s, 0.0  # of a collective of this round; of a step
        self._unreached: list[_Member] = []  # of the last members
        self._away_until_s = 0.0  # because of that; 0 if others have reached it since
        self._began_s = self._said_s = 0.0  # when this group began to wait; when it has said so
        self._client, self._why_not = StateClient(), ""  # of what comes from others; why it could not be taken
        self._is_late = False  # it has come, and is of a round before that which the others are in
        self._told: tuple[Row, Settings] = Row(), {}  # as of `quorum`
        self._fetching: Future[dict[str, Any]] | None = None  # goes on where it is not waited for any more
        if self._process == 0:
            self._server = StateServer(label_of(self._name), self._address)
            listener = socket.create_server((self._address, 0))  # not at other addresses of the host
            port = listener.getsockname()[1]
            options: dict[str, Any] = {"is_master": True, "wait_for_workers": False}
            self._store = dist.TCPStore(self._address, port, master_listen_fd=listener.detach(), **options)

    def state_of_others(self, row: Row, settings: Settings, gives_up: GivesUp) -> Mapping[str, Any] | None:
        """See `Membership`. Members of the last round are found by the lighthouse's page."""
        self._told = row, settings
        with suppress(RuntimeError):  # there is none, or this group has given up
            return self._fetch(self._insist, gives_up)
        return None

    def serve(self, shared: Share | None) -> None:
        if self._process == 0:
            self._server.offer(shared)

    def note(self, longest_s: float) -> None:
        self._lighthouse.hangs_from_s = time.monotonic() + max(HANG_S, HANG_STEPS * longest_s)
        self._longest_s = longest_s

    def quorum(self, row: Row, settings: Settings, gives_up: GivesUp) -> Quorum | None:
        self._began_s = self._said_s = time.monotonic()
        self._told = row, settings
        if self._process == 0:
            self._server.row, self._server.settings = row, dict(settings)
        while True:
            try:
                self._lighthouse.hangs_from_s = math.inf
                answer = self._ask(gives_up)
                if answer is None:
                    self._fail()  # others may wait for this one; and the next request differs from this one
                    return None
                return self._join(*answer, gives_up)
            except RuntimeError as error:  # on all processes
                told = f"{error}"
            self._fail()  # not before the error is forgotten, which refers to the group
            self._say_if_due(told)
            time.sleep(RETRY_S)

    def _say_if_due(self, error: str = "") -> None:
        """Tell that this group waits, once a minute; the first time after an error soon."""
        now_s, is_first = time.monotonic(), self._said_s == self._began_s
        if now_s - self._said_s < (WARN_S / 6 if error and is_first else WARN_S):
            return
        self._said_s = now_s
        _logger.warning(
            "Waiting for %.0f s now for a round of at least %d members, at the lighthouse %s. Last attempt: %s",
            *(now_s - self._began_s, self.min_replicas, self._lighthouse.url, error or "has no answer yet"),
        )

    def _await(
        self, answer: Future[dict[str, Any]] | None, gives_up: Callable[[], bool], progress: Callable[[], str]
    ) -> dict[str, Any] | None:
        """Return, on all processes, what a thread of process 0 answers; None if a process has given up.

        Args:
            answer: plain values, for JSON, or told of an error by `_begin`; of process 0.
            gives_up: asked about once a second.
            progress: returns it in words.
        """
        while True:
            is_done = answer is not None and bool(wait([answer], POLL_S).done)
            self._say_if_due(progress())
            answers = gather_json((answer.result() if answer is not None and is_done else None, gives_up()))
            if any(has_given_up for _, has_given_up in answers):
                return None
            if (found := answers[0][0]) is not None:
                return dict(found)

    def collective(self, fn: Callable[[dist.ProcessGroup], T]) -> T:
        """See `Membership`. The group is not to be kept: it lives as long as something refers to it."""
        if self._group is None:
            raise RuntimeError("This round has failed.")
        try:
            self._lighthouse.hangs_from_s = time.monotonic() + self._limit_s + HANG_S
            with self._watching():
                return fn(self._group)
        except Exception:
            self._fail()
            raise
        finally:
            self.note(self._longest_s)

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Let a collective fail when a member is silent: one that is stopped keeps its connections."""
        has_ended, others = threading.Event(), [name for name, _ in self._key if name != self._name]

        def watch() -> None:
            while not has_ended.wait(POLL_S):
                with suppress(OSError):
                    ages = self._lighthouse.page()[1]
                    is_heard = ages.get(self._name, math.inf) < POLL_S
                    silent = [name for name in others if ages.get(name, 0.0) > SILENT_S]
                    if is_heard and silent and not has_ended.is_set():
                        _logger.warning("Lost: %s. The lighthouse hears nothing for %d s.", ", ".join(silent), SILENT_S)
                        _shut_down()
                        return

        threading.Thread(target=watch, name="lowbw-watch", daemon=True).start()
        try:
            yield
        finally:
            has_ended.set()

    def commit(self, is_ok: bool = True) -> bool:
        """See `Membership`.

        Args:
            is_ok: False lets the round fail.
        """
        if not all(gather_json(is_ok and self._group is not None)):
            self._fail()
            return False
        self._client.forget()
        self._is_late = False
        if self._process == 0:
            self._server.row = self._server.row._replace(is_new=False)
        return True

    def close(self) -> None:
        self._disconnect()
        self._lighthouse.close()
        if self._process == 0:
            self._server.close(self._limit_s if self._server.row.has_ended else LEAVE_S)

    def _fail(self) -> None:
        """Leave the group, so that those fail, too, that wait for this member; a new one is made for the next round."""
        self._num_failures += 1
        self._disconnect()

    # Members --------------------------------------------------------------------------------------------------------

    def _ask(self, gives_up: GivesUp) -> tuple[int, Sequence[_Member]] | None:
        """Return the number of the next quorum, and its members; None if a process of this group has given up.

        Raises:
            RuntimeError: on all processes; there is none yet.
            DisagreementError: on all processes; this group is not as the others are, who go on without it.
        """
        row, settings = self._told
        # In a thread, because a signal would be handled only after torchft has returned.
        request = _begin(lambda: self._request(row, self._num_failures), "lowbw-quorum") if self._process == 0 else None
        # At first it is taken for granted that the others are on their way.
        ends_s = self._began_s + POLL_S
        answer = self._await(request, lambda: time.monotonic() >= ends_s and gives_up(False), lambda: "")
        if answer is None:
            return None
        _raise_told(answer)
        members = [
            _Member(name, store, state, Row(*told), failures)
            for name, store, state, told, failures in answer["members"]
        ]
        by_name = {member.name: member for member in members}
        refused = refusals({member.name: member.row for member in members})
        if self._name in refused:
            other = by_name[refused[self._name]]
            theirs = settings if other.row.settings == row.settings else self._settings_of(other)
            raise_refused(row, settings, other.row, theirs, f"{other.label} at {other.store}")
        if refused:
            named = ", ".join(sorted(by_name[name].label for name in refused))
            _logger.warning("Refused, because of other settings or another run, which are named there: %s.", named)
        members = [member for member in members if member.name not in refused]
        chosen = connected(members)
        if by_name[self._name] not in chosen:
            self._back_off(by_name[self._name], chosen, answer["waited_s"])
        if left := [member.label for member in members if member not in chosen]:
            _logger.warning("The round is without %s: not all others reach it, or another has its name.", left)
        return answer["number"], chosen

    def _request(self, row: Row, num_failures: int) -> dict[str, Any]:
        """Return the number of the next quorum, and its members, in the same order for all; as plain values.

        While some are not reached it is asked for later, so that nobody waits for this group.
        """
        while (unreached := _unreached(self._unreached)) and time.monotonic() < self._away_until_s:
            time.sleep(POLL_S)
        if num_failures != self._num_failures:
            raise RuntimeError("given up")
        self._unreached = unreached
        is_late = self._is_late and not self._fetching
        told = row._replace(unreached=[member.name for member in unreached], is_late=is_late)
        own = _Member(self._name, f"{self._address}:{self._store.port}", self._server.address, told, num_failures)
        number, members = self._lighthouse.quorum(own, lambda: num_failures == self._num_failures)
        return {"number": number, "members": members, "waited_s": time.monotonic() - self._began_s}

    def _back_off(self, own: _Member, chosen: Sequence[_Member], waited_s: float) -> NoReturn:
        """Let the others go on without this group, which does not fit some of them."""
        others = [member.label for member in chosen if not own.fits(member)]
        if own.label in others:
            if waited_s > GONE_S:
                raise second_of(own.label)
            raise RuntimeError(f"another group has the name {own.label!r}, too")
        told = (
            f"This group, at {own.store}, and {others} do not reach one another, and the others go on without it. "
            + OPEN_PORTS
        )
        if own.row.is_new and self._away_until_s:  # the second time in a row
            raise ConfigurationError(told)
        self._lighthouse.is_away = True  # so that nobody waits for it
        self._away_until_s = time.monotonic() + PAUSE_S
        _logger.warning("%s It tries again in %.0f s.", told, PAUSE_S)
        raise RuntimeError(told)

    def _settings_of(self, member: _Member) -> Settings | None:
        """Return the settings of another group, which are not those of this one; None if it cannot be reached."""
        with suppress(OSError, ValueError):
            try:
                StateClient().fetch(member.state, self._asks())
            except RefusedError as refused:
                return dict(refused.args[-1])
        return None

    def _join(self, number: int, members: Sequence[_Member], gives_up: GivesUp) -> Quorum:
        """Connect to the members of a quorum that are not behind; or take the state of one.

        Raises:
            RuntimeError: on all processes; it was not possible.
        """
        latest = rounds_of({member.name: member.row for member in members})
        (own,) = (member for member in members if member.name == self._name)
        up_to_date = [member for member in members if member.row.rounds == latest]
        donors = [member.state for member in sorted(up_to_date, key=lambda member: _turn_of(member.name, self._name))]
        taker = next((member for member in members if member not in up_to_date and member.row.is_late), None)
        members = [member for member in members if member in up_to_date or member is taker]
        if own not in members:
            self._lighthouse.is_away = True  # the others do not wait for it meanwhile
            self._disconnect()  # from those of an earlier round: no `commit` is of this one
            healed = self._fetch(lambda: self._take(donors), gives_up)
            self._is_late = True  # if rounds end before it is in one
            return Quorum(latest, 0, (own.label,), healed)
        if len(members) < self.min_replicas:
            raise RuntimeError(f"up to date are {[member.label for member in up_to_date]}")
        key = tuple((member.name, member.failures) for member in members)
        if key != self._key:
            # The step, because a lighthouse that is restarted counts its quorums from 1 again.
            path = f"{number}/{latest}/{sum(member.failures for member in members)}/{self._process}"
            self._disconnect()
            error = ""
            try:
                self._connect(members, up_to_date[0].store, path, members.index(own))
            except RuntimeError as raised:
                error = f"{raised}"
            if errors := [each for each in gather_json(error) if each]:
                raise RuntimeError(errors[0])
            self._key, self._away_until_s = key, 0.0
        self._limit_s = max(self.timeout_s, timeout_s_of(max(m.row.state_bytes for m in members), self.gbit_per_s))
        self._group._set_default_timeout(timedelta(seconds=self._limit_s))
        # The others wait for who is late in the next collective.
        given = self._fetch(lambda: self._take(donors), gives_up) if own is taker else None
        rows = tuple(member.row for member in members) if taker is None else None
        return Quorum(latest, members.index(own), tuple(member.label for member in members), given, rows)

    # The state of others ----------------------------------------------------------------------------------------------

    def _fetch(self, take: Callable[[], dict[str, Any]], gives_up: GivesUp) -> dict[str, Any]:
        """Call `take` in a thread of process 0, or wait for what has been called before; the tensors are there only.

        Raises:
            RuntimeError: on all processes, as all others; there is no state, or this group has given up, to come again.
            DisagreementError: this group is refused.
            ConfigurationError: those that train are not reached.
        """
        self._began_s = self._said_s = time.monotonic()
        if self._process == 0 and self._fetching is None:
            self._fetching = _begin(lambda: {"state": _as_text(take())}, "lowbw-fetch")
        answer = self._await(self._fetching, lambda: gives_up(True), lambda: self._why_not or self._client.progress)
        if answer is None:
            raise RuntimeError("given up")
        self._fetching, self._why_not = None, ""
        _raise_told(answer)
        state = unpacked(base64.b64decode(answer["state"]))
        return {**state, "tensors": self._client.tensors}

    def _insist(self) -> dict[str, Any]:
        """Return the state of a group that trains; while one lives it is tried again, whatever fails.

        Raises:
            RuntimeError: there is none.
            DisagreementError, ConfigurationError: as of `_fetch`.
        """
        reached_s = time.monotonic()
        while True:
            addresses = None
            try:
                addresses = self._lighthouse.addresses(self._name)
                return self._take(addresses)
            except OSError as error:
                self._why_not, now_s = f"{error}", time.monotonic()
            reached_s = now_s if addresses is None else max(reached_s, self._client.reached_s)
            if now_s > reached_s + GONE_S:
                raise ConfigurationError(
                    f"Groups train, and this one does not reach them: {self._why_not}. {OPEN_PORTS}"
                )
            if self._lighthouse.is_closed.wait(RETRY_S):
                raise RuntimeError(self._why_not)

    def _take(self, addresses: Sequence[str]) -> dict[str, Any]:
        """Return the state of the first group that gives it, of who has sent one before if that is among these.

        Raises:
            RuntimeError: none has completed a round.
            OSError: some could not be reached.
            DisagreementError: one that has been in a round refuses this group; of others all compare in the next one.
        """
        (row, settings), failed = self._told, list[str]()
        for address in sorted(addresses, key=lambda each: each != self._client.address):
            try:
                state, is_current = self._client.catch_up(address, self._asks())
            except RefusedError as refused:
                name, other, theirs = refused.args
                if not other.is_new and (other.rounds or other.settings != row.settings):
                    raise_refused(row, settings, other, theirs, f"{name} at {address}")
            except Exception as error:  # noqa: BLE001 - whatever it is, another training is there
                failed.append(f"{address}: {error!r}")
            else:
                self._is_late = not is_current or state["is_exchanging"]
                self._lighthouse.appear(self._name)  # it is in their next round
                return state
        raise OSError("; ".join(failed)) if failed else RuntimeError("no other group has completed a round")

    def _asks(self) -> dict[str, str]:
        """Return what is told to a group whose state is asked for."""
        row, _ = self._told
        return {"name": self._name, "settings": row.settings, "run": row.run if row.rounds else ""}

    def _connect(self, members: Sequence[_Member], address: str, path: str, rank: int) -> None:
        """Make the group of these members, which meet in a store.

        Raises:
            RuntimeError: on this process.
        """
        self._unreached = _unreached([member for member in members if member.name != self._name])
        if self._unreached:
            raise RuntimeError(f"no connection to {[member.label for member in self._unreached]}")
        gloo: Any = dist.ProcessGroupGloo
        options, before, limit = gloo._Options(), _tcp_sockets(), timedelta(seconds=CONNECT_S)
        options._devices, options._timeout = [gloo.create_device(hostname=self._address)], limit
        host, _, port = address.rpartition(":")
        store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=limit)
        self._group = gloo(dist.PrefixStore(path, store), rank, len(members), options)
        _of_group.clear()
        _of_group.update(_tcp_sockets() - before)
        for descriptor, _ in _of_group:
            _watch(descriptor)

    def _disconnect(self) -> None:
        """Forget the group. gloo closes its connections when nothing refers to it any more; `abort` does not."""
        self._group, self._key = None, ()


class _Lighthouse:
    """torchft's client, made anew after an error.

    Heartbeats are sent here and not by torchft's server: that one would have everybody who reaches its port end the
    process.
    """

    def __init__(self, torchft: Any, url: str) -> None:
        self.url = url
        self._connect = partial(torchft.LighthouseClient, url, connect_timeout=timedelta(seconds=CONNECT_S))
        self._client: Any = None
        self.is_away = False  # whether no heartbeats are sent
        self.hangs_from_s = math.inf  # when this group, if nothing else is noted before, hangs
        self.is_closed = threading.Event()  # read where the state is asked for again and again
        self._heartbeats: threading.Thread | None = None

    def appear(self, name: str) -> None:
        """Send heartbeats from now on: the others wait for this member in a round.

        Raises:
            ConfigurationError: another group has its name.
            OSError: the page cannot be read.
        """
        self.is_away = False
        if self._heartbeats is None:
            self._refuse_second(name)
            self._heartbeats = threading.Thread(
                target=self._send_heartbeats, args=(name,), name="lowbw-heartbeats", daemon=True
            )
            self._heartbeats.start()

    def quorum(self, own: _Member, is_asked: Callable[[], bool]) -> tuple[int, list[_Member]]:
        """Wait for the next quorum; return its number and members, in the same order for all.

        Args:
            own: this member.
            is_asked: returns whether it is still waited for.

        Raises:
            ConfigurationError: others have the name of this one, or other programs.
            RuntimeError, TimeoutError: there is none yet.
        """
        self.appear(own.name)
        client, self._client = self._client, None
        client = client or self._connect()
        ask = partial(
            client.quorum,
            replica_id=own.name,
            address=own.state,
            store_address=own.store,
            step=own.row.rounds,  # for the lighthouse's page
            data={"row": list(own.row), "failures": own.failures},
        )
        wait_s, found = WAIT_S, None
        while found is None:
            try:
                found = ask(timeout=timedelta(seconds=wait_s))
            except TimeoutError:
                if not is_asked():
                    raise
                wait_s = RENEW_S
        self._client = client
        members = [member for each in found.participants if (member := _member_of(each)) is not None]
        others = {each.replica_id for each in found.participants}.difference(member.name for member in members)
        if others and own.row.is_new:  # those that train go on
            raise ConfigurationError(
                f"The lighthouse {self.url} has members of another program, or of another version: "
                f"{sorted(others)}. Start one for each training."
            )
        if (own.name, own.failures) not in {(member.name, member.failures) for member in members}:
            raise RuntimeError("the lighthouse has answered an older request of this group")
        return found.quorum_id, sorted(members, key=lambda member: member.name)

    def _refuse_second(self, own_name: str) -> None:
        """Raise ConfigurationError if another group has the name and is alive; before the others hear of this one."""

        def ages() -> list[float]:
            return [
                age for name, age in self.page()[1].items() if label_of(name) == label_of(own_name) and name != own_name
            ]

        began_s = time.monotonic()
        if any(age < POLL_S for age in ages()):  # of a group that is alive, or was a moment ago
            time.sleep(POLL_S)
            if any(age < time.monotonic() - began_s for age in ages()):  # heard of meanwhile
                raise second_of(label_of(own_name))

    def page(self) -> tuple[str, dict[str, float]]:
        """Return the lighthouse's page, and by that the seconds since the last heartbeat of each member.

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

    def addresses(self, own_name: str) -> list[str]:
        """Return where the states of other members of the last round are served that are alive; with most rounds first.

        Raises:
            OSError: the page cannot be read.
        """
        page, ages = self.page()
        members = re.findall(r"<b>(.*)</b> <br/>\s*Step: ([0-9]+) <br/>\s*Manager: (\S+) <br/>", page)
        alive = {name: each for name, *each in members if name != own_name and ages.get(name, GONE_S) < CONNECT_S}
        in_turn = sorted(alive, key=lambda name: (-int(alive[name][0]), _turn_of(name, own_name)))
        return [alive[name][1] for name in in_turn]

    def _send_heartbeats(self, name: str) -> None:
        """Tell the lighthouse that this member is alive, until `close`; not while it hangs."""
        client, has_said = None, False
        while not self.is_closed.wait(HEARTBEAT_S):
            hangs = time.monotonic() > self.hangs_from_s
            if hangs and not has_said:
                _logger.warning("This group takes %d times as long as ever for a step; others go on.", HANG_STEPS)
            has_said = hangs
            if self.is_away or hangs:
                continue
            with suppress(RuntimeError, TimeoutError):
                client, used = None, client or self._connect()
                used.heartbeat(name, timeout=timedelta(seconds=CONNECT_S))
                client = used

    def close(self) -> None:
        self.is_closed.set()
        if self._heartbeats is not None:
            self._heartbeats.join()


def _member_of(participant: Any) -> _Member | None:
    """Return what a participant has told; None if it is of another program."""
    data = participant.data or {}
    if data.keys() != OWN_DATA or len(data["row"]) != len(Row._fields):
        return None
    addresses = participant.store_address, participant.address
    return _Member(participant.replica_id, *addresses, Row(*data["row"]), data["failures"])


def second_of(label: str) -> ConfigurationError:
    """Return the error of a group whose name another one has."""
    return ConfigurationError(f"Another group has the name {label!r}, too. Give each one of its own: group=...")


def _begin(fn: Callable[[], dict[str, Any]], name: str) -> Future[dict[str, Any]]:
    """Call a function in a thread that keeps no process alive; an error is told in plain values."""
    future = Future[dict[str, Any]]()

    def run() -> None:
        try:
            future.set_result(fn())
        except Exception as error:  # noqa: BLE001 - see `_raise_told`
            future.set_result({"error": f"{error}", "kind": type(error).__name__})

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def _raise_told(answer: Mapping[str, Any]) -> None:
    """Raise the error of which `_begin` has told, on all processes of a group; RuntimeError, where it may pass."""
    if "error" in answer:
        kinds = {kind.__name__: kind for kind in (ConfigurationError, DisagreementError)}
        raise kinds.get(answer["kind"], RuntimeError)(answer["error"])


def _as_text(state: Mapping[str, Any]) -> str:
    """Return a state without its tensors, for JSON."""
    return base64.b64encode(packed({**state, "tensors": {}}).numpy().tobytes()).decode()


def _turn_of(name: str, own_name: str) -> int:
    """Return a number in an order of others that differs between groups: they do not all take the state of one."""
    return zlib.crc32(f"{own_name} {name}".encode())


def _unreached(members: Sequence[_Member]) -> list[_Member]:
    """Return those to whom no connection can be made."""

    def is_reached(address: str) -> bool:
        host, _, port = address.rpartition(":")
        with suppress(OSError), socket.create_connection((host, int(port)), CONNECT_S):
            return True
        return False

    addresses = {address: member for member in members for address in (member.store, member.state)}
    with ThreadPoolExecutor(1 + len(addresses)) as pool:
        reached = dict(zip(addresses, pool.map(is_reached, addresses), strict=True))
    return [member for member in members if not (reached[member.store] and reached[member.state])]


# Forked processes -----------------------------------------------------------------------------------------------------
# A DataLoader's workers inherit all sockets. While one of these is open there, nobody notices that it is left here.

# gloo's; and what other threads have opened while it connected, as loggers do: it ends with those when one is lost.
_of_group: set[tuple[int, int]] = set()


def _tcp_sockets() -> set[tuple[int, int]]:
    """Return the descriptors of TCP sockets, with their inodes."""
    found = set()
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # that of the listing itself
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                with socket.socket(fileno=os.dup(int(name))) as copy:
                    if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                        found.add((int(name), status.st_ino))
    return found


def _watch(descriptor: int) -> None:
    """Let a connection fail soon after the other machine has vanished, which sends no end of it, or reads no more."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:  # closed meanwhile
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        settings = {"TCP_KEEPIDLE": SILENT_S // 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": SILENT_S // 2}
        for name, value in {**settings, "TCP_USER_TIMEOUT": 1000 * SILENT_S}.items():
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _shut_down() -> None:
    """End the connections of the group, on both sides; who waits on one gets an error."""
    for descriptor, _ in _of_group & _tcp_sockets():
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.getpeername()  # not that at which gloo listens: it would end the process
            connection.shutdown(socket.SHUT_RDWR)


def _close_in_child() -> None:
    for descriptor, _ in _of_group & _tcp_sockets():
        os.close(descriptor)


os.register_at_fork(after_in_child=_close_in_child)


# Surroundings ---------------------------------------------------------------------------------------------------------


def _import_torchft() -> Any:
    try:
        version = importlib.metadata.version("torchft")
    except importlib.metadata.PackageNotFoundError:
        version = "none"
    if version != TORCHFT:
        raise ConfigurationError(
            f"Elastic training needs torchft {TORCHFT}, here and in the lighthouse; {version} is installed. "
            'pip install "lightning-lowbw[elastic]"'
        )
    os.environ.pop("TORCHFT_USE_OTEL", None)  # with it the import fails
    os.environ.setdefault("RUST_LOG", "warn")  # else torchft writes a line for each request
    return importlib.import_module("torchft.coordination")


def _own_address(address: str | None, lighthouse: str) -> str:
    """Return the given address of this host, that of the interface GLOO_SOCKET_IFNAME, or of the way to the lighthouse.

    Raises:
        ConfigurationError: there is none.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            if address:
                probe.bind((address, 0))
                return address
            if interface:
                import fcntl

                request = struct.pack("256s", interface.split(",")[0].encode()[:15])
                return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)[20:24])
            parts = urlsplit(lighthouse)
            probe.connect((parts.hostname, parts.port))  # sends nothing
            return str(probe.getsockname()[0])
        except OSError as error:
            given = f"address={address}" if address else f"GLOO_SOCKET_IFNAME={interface}" if interface else lighthouse
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise ConfigurationError(
                f"{given}: {error.strerror}. Other groups reach this one at an IPv4 address of this host, whose "
                f"interfaces are {names}. Give another."
            ) from error
