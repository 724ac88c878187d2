"""Members found by torchft's lighthouse, and connected by gloo groups that are made anew where the members change.

Of torchft this uses the lighthouse and its client. Everything else is here, in the order of a round: who is there, the
group, the state for those that are behind, the vote of a group's processes. All compare the same rows, and leave out
the same members: with other settings, of another run, with a name in use, or whom not all others reach.

It does not use `torchft.Manager`: one failed quorum leaves it unusable, its healing is pickle over unauthenticated
HTTP, its server ends the process for whoever asks it to, and it waits in vain for an answer if the lighthouse is
restarted.

A round of two groups, of which B is behind; the processes of a group agree after each step (`_vote`):

    group A                     lighthouse                    group B
       |-- state ----------------------------------------------->|     `state_of_others`, `transfer`: A trains on
       |-- step, row, store -------->|<------ step, row, store --|     `_ask`
       |<-- number, members ---------|--------- number, members->|
       |<=============== gloo, by the store of A ===============>|     `_connect`, if the members are others
       |<-------------- all-reduce, all-gather, ... ------------>|     `collective`
       |   all processes of A?             all processes of B?   |     `commit`

Who is behind, for all that, is in no round: it takes the state of a member, and asks again. Who comes late `TRIES`
times, because rounds are shorter than that takes, is waited for.

Where anything fails a group leaves (`_fail`): what others wait for fails, too, and the next round has new connections.
"""

from __future__ import annotations

import base64
import html
import http.client
import importlib
import importlib.metadata
import json
import logging
import math
import os
import re
import socket
import stat
import struct
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from dataclasses import astuple, dataclass
from datetime import timedelta
from typing import Any, NoReturn, TypeVar
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from lightning_lowbw.comm.agreement import gather_json
from lightning_lowbw.elastic.membership import Quorum, Row, Settings, Share, raise_refused, refusals, rounds_of
from lightning_lowbw.elastic.transfer import CONNECT_S, POLL_S, StateClient, StateServer, packed, unpacked, watch
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.namespaces import LOGGER

_logger = logging.getLogger(LOGGER)
T = TypeVar("T")

TORCHFT = "0.2.0"  # others speak another protocol
LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"  # torchft's own variable: the lighthouse's address
HEARTBEAT_S = 0.25  # between two; the lighthouse takes a member for dead after 5 s, if not started otherwise
HANG_ROUNDS, HANG_S = 10, 60.0  # a group that has not come for ten times its longest round, and a minute, hangs
TRIES = 3  # to take the state in time for a round, after which the others wait for this group
WAIT_S = 75.0  # of one request for a quorum. In the lighthouse each begins anew to wait for others, by default 60 s.
OWN_DATA = frozenset({"row", "failures"})  # of a member: what torchft has no field for
SETTINGS = "settings"  # of a group, in its store
RETRY_S, WARN_S = 0.5, 60.0
PAUSE_S, MAX_PAUSE_S = 5.0, 300.0  # twice as long each time for which a group is left out that others do not reach
GONE_S = 20.0  # after which a group with this one's name is not this one, before it was restarted
SIOCGIFADDR = 0x8915  # Linux: the address of an interface
MIN_TIMEOUT_S = 10.0  # for pauses of an operating system; those of a link may take SILENT_S
ROUND_STATES = 2.0  # the bytes of a round by those of the state: at most an all-reduce of all of it


def timeout_s_of(state_bytes: float, gbit_per_s: float) -> float:
    """Return the seconds after which a collective may be taken for lost: twice what the slowest may take.

    Who has come late too often with the state is waited for in a collective: with a shorter timeout it never arrives.

    Example:
        >>> timeout_s_of(state_bytes=80_000_000, gbit_per_s=0.1)
        38.4
    """
    return 2 * (1 + ROUND_STATES) * state_bytes * 8 / (gbit_per_s * 1e9)


@dataclass(frozen=True)
class _Member:
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
        """The name that the group keeps when it restarts."""
        return self.name.rpartition(":")[0]

    def fits(self, other: _Member) -> bool:
        """Whether both can be in one round: they reach one another, and have not one name."""
        is_broken = other.name in self.row.unreached or self.name in other.row.unreached
        return not is_broken and self.label != other.label


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
        state_bytes: of the state that a member which is behind is given.
        name: of this group, no other's, and the same after a restart; None is the host's.
        min_replicas: members that a round has at least. With 1 a group that is cut off trains on alone.
        gbit_per_s: the slowest uplink of a member.
        timeout_s: after which a collective is taken for lost; None computes it. It is what a member costs that hangs.
        address: at which other groups reach this process; None is the address of the interface GLOO_SOCKET_IFNAME, or
            of the one that leads to the lighthouse.

    Raises:
        ConfigurationError: on all processes of the group.
    """

    def __init__(
        self,
        lighthouse: str | None = None,
        *,
        state_bytes: int,
        name: str | None = None,
        min_replicas: int = 2,
        gbit_per_s: float = 0.1,
        timeout_s: float | None = None,
        address: str | None = None,
    ) -> None:
        lighthouse = str(lighthouse or os.environ.get(LIGHTHOUSE, "")).rstrip("/")
        if not re.fullmatch(r"(https?://)?[^/:]+:\d+", lighthouse):
            kind = "an IPv6 address, and groups meet by IPv4: " if lighthouse.count(":") > 2 else ""
            raise ConfigurationError(
                f"lighthouse={lighthouse!r}: {kind}give its address with the port, or set {LIGHTHOUSE}=http://10.0.0.1:29510."
            )
        needed_s = timeout_s_of(state_bytes, gbit_per_s)
        if timeout_s is not None and timeout_s < needed_s:
            raise ConfigurationError(
                f"timeout_s={timeout_s:g} is too short: a state of {state_bytes / 1e6:.0f} MB at {gbit_per_s:g} Gbit/s "
                f"needs {needed_s:.0f} s, or those that join never arrive. Leave timeout_s out, or raise it."
            )
        torchft = _import_torchft()
        self.min_replicas, self.gbit_per_s = min_replicas, gbit_per_s
        self.timeout_s = max(MIN_TIMEOUT_S, needed_s) if timeout_s is None else timeout_s
        self._lighthouse = _Lighthouse(torchft, lighthouse if "//" in lighthouse else f"http://{lighthouse}")
        self._address = _own_address(address, self._lighthouse.url)
        self._process, self._num_processes = dist.get_rank(), dist.get_world_size()
        (self._name, *_) = gather_json(f"{name or socket.gethostname()}:{uuid.uuid4()}")
        self._key: tuple[Any, ...] = ()  # of the quorum for which the group was made
        self._group: Any = None
        self._num_failures = 0
        self._unreached: list[_Member] = []  # of the last members
        self._away_until_s, self._pause_s = 0.0, PAUSE_S  # when it is left out, because of that
        self._said_s = 0.0  # when the last line told that it waits
        self._refused: set[str] = set()  # who has been named
        self._client: StateClient | None = None  # of the group whose state was taken last, up to a round
        self._num_fetched = 0  # how often it was, since a round
        self._fetching: Future[dict[str, Any]] | None = None  # goes on where it is not waited for any more
        if self._process == 0:
            self._server = StateServer(self._address, self.timeout_s)
            listener = socket.create_server((self._address, 0))  # not at other addresses of the host
            self._port = listener.getsockname()[1]
            options: dict[str, Any] = {"is_master": True, "wait_for_workers": False}
            self._store = dist.TCPStore(self._address, self._port, master_listen_fd=listener.detach(), **options)

    def state_of_others(self, row: Row, gives_up: Callable[[], bool]) -> Mapping[str, Any] | None:
        """See `Membership`. Members of the last round are found by the lighthouse's page."""
        with suppress(RuntimeError):  # nobody, or nobody who has a state for this group; the round will tell
            return self._fetch(lambda: self._lighthouse.addresses(self._name), row, gives_up)
        return None

    def serve(self, shared: Share) -> None:
        if self._process == 0:
            self._server.answer(shared)

    def quorum(self, row: Row, settings: Settings, shared: Share, gives_up: Callable[[], bool]) -> Quorum | None:
        began_s = self._said_s = time.monotonic()
        if self._process == 0:
            self._server.row = row
        while True:
            quorum, error = None, None
            try:
                answer = self._ask(row, settings, shared, began_s, gives_up)
                if answer is None:
                    self._fail()  # others may wait for this one; and the next request differs from this one
                    return None
                quorum = self._join(*answer, row, shared, gives_up)
            except RuntimeError as raised:
                error = raised.with_traceback(None)  # which refers to the group
                self._fail()
            if self._vote(quorum is not None):
                assert quorum is not None
                return quorum
            self._say_if_due(began_s, error)

    def _say_if_due(self, began_s: float, error: Exception | None) -> None:
        """Tell that this group waits, once a minute; the first time after an error soon."""
        now_s = time.monotonic()
        if now_s - self._said_s < WARN_S and (error is None or self._said_s > began_s or now_s - began_s < WARN_S / 6):
            return
        self._said_s = now_s
        _logger.warning(
            "Waiting for %.0f s now for a round of at least %d members, at the lighthouse %s. Last attempt: %s",
            *(now_s - began_s, self.min_replicas, self._lighthouse.url, error or "has no answer yet"),
        )

    def collective(self, fn: Callable[[dist.ProcessGroup], T]) -> T:
        """See `Membership`. The group is not to be kept: it lives as long as something refers to it."""
        if self._group is None:
            raise RuntimeError("This round has failed.")
        try:
            return fn(self._group)
        except Exception:
            self._fail()
            raise

    def commit(self, is_ok: bool = True) -> bool:
        """See `Membership`.

        Args:
            is_ok: False lets the round fail.
        """
        counts = self._vote(is_ok and self._group is not None)
        if counts:
            self._forget_state()
            self._num_fetched = 0
        return counts

    def close(self) -> None:
        self._forget_state()
        self._disconnect()
        self._lighthouse.close()
        if self._process == 0:
            self._server.close()

    def _vote(self, is_ok: bool) -> bool:
        """Return whether it is so on all processes of this group."""
        if not all(gather_json(is_ok)):
            self._fail()
            return False
        return True

    def _fail(self) -> None:
        """Leave the group, so that those fail, too, that wait for this member; a new one is made for the next round."""
        self._num_failures += 1
        self._disconnect()

    # Members --------------------------------------------------------------------------------------------------------

    def _ask(
        self, row: Row, settings: Settings, shared: Share, began_s: float, gives_up: Callable[[], bool]
    ) -> tuple[int, Sequence[_Member]] | None:
        """Return the number of the next quorum, and its members; None if a process of this group has given up.

        Raises:
            RuntimeError: on all processes; there is none yet.
            DisagreementError: on all processes; this group is not as the others are, who go on without it.
        """
        answer: dict[str, Any] | None = None
        request, has_asked = Future[Any](), False
        if self._process == 0:
            store = f"{self._address}:{self._port}"
            self._store.set(SETTINGS, json.dumps(dict(settings)))  # for who differs
        while answer is None:
            if self._process == 0 and not has_asked and self._unreached:
                self._unreached = _unreached(self._unreached)
                self._away_until_s = self._away_until_s if self._unreached else 0.0
            if self._process == 0 and not has_asked and time.monotonic() >= self._away_until_s:
                self._away_until_s = 0.0
                unreached = [member.name for member in self._unreached]
                told = row._replace(unreached=unreached, late=0 if self._fetching else self._num_fetched)
                own = _Member(self._name, store, self._server.address, told, self._num_failures)
                request, has_asked = self._lighthouse.begin_quorum(own), True
            if self._process == 0 and wait([request], POLL_S).done:
                answer = request.result()
            self.serve(shared)
            # At first it is taken for granted that the others are on their way.
            waited_s = time.monotonic() - began_s
            self._say_if_due(began_s, None)
            answers = gather_json((answer, waited_s, self._pause_s, waited_s >= POLL_S and gives_up()))
            if any(given_up for *_, given_up in answers):
                return None
            answer, waited_s, self._pause_s, _ = answers[0]  # so that all raise the same
        if "error" in answer:
            raise (ConfigurationError if answer["is_final"] else RuntimeError)(answer["error"])
        members = [
            _Member(name, store, state, Row(*told), failures)
            for name, store, state, told, failures in answer["members"]
        ]
        by_name = {member.name: member for member in members}
        refused = refusals({member.name: member.row for member in members})
        if self._name in refused:
            other = by_name[refused[self._name]]
            raise_refused(row, settings, other.row, self._settings_of(other), f"{other.label} at {other.store}")
        if new := refused.keys() - self._refused:
            self._refused |= new
            _logger.warning(
                "Refused, because of other settings or another run, which are named there: %s.",
                ", ".join(sorted(by_name[name].label for name in new)),
            )
        members = [member for member in members if member.name not in refused]
        chosen = connected(members)
        if by_name[self._name] not in chosen:
            self._back_off(by_name[self._name], chosen, waited_s)
        if left := [member.label for member in members if member not in chosen]:
            _logger.warning("The round is without %s: not all others reach it, or another has its name.", left)
        return answer["number"], chosen

    def _back_off(self, own: _Member, chosen: Sequence[_Member], waited_s: float) -> NoReturn:
        """Let the others go on without this group, which does not fit some of them."""
        others = [member.label for member in chosen if not own.fits(member)]
        if own.label in others:
            if waited_s > GONE_S:
                raise second_of(own.label)
            time.sleep(RETRY_S)
            raise RuntimeError(f"another group has the name {own.label!r}, too")
        told = (
            f"This group, at {own.store}, and {others} do not reach one another, and the others go on without it. All "
            "ports have to be open between all groups: give address=..., or a VPN where one is behind NAT."
        )
        if own.row.is_new and self._pause_s > PAUSE_S:  # the second time in a row
            raise ConfigurationError(told)
        self._lighthouse.is_away = True  # so that nobody waits for it
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        self._away_until_s = time.monotonic() + self._pause_s
        _logger.warning("%s It tries again in %.0f s.", told, self._pause_s)
        raise RuntimeError(told)

    def _settings_of(self, member: _Member) -> Settings | None:
        """Return the settings of another group, which it has put into its store; None if it cannot be reached."""
        with suppress(RuntimeError):
            return dict(json.loads(_store_at(member.store).get(SETTINGS)))
        return None

    def _join(
        self, number: int, members: Sequence[_Member], row: Row, shared: Share, gives_up: Callable[[], bool]
    ) -> Quorum:
        """Connect to the members of a quorum that are not behind; or take the state of one.

        Raises:
            RuntimeError: it was not possible.
        """
        latest = rounds_of({member.name: member.row for member in members})
        (own,) = (member for member in members if member.name == self._name)
        up_to_date = [member for member in members if member.row.rounds == latest]
        takers = [member for member in members if member not in up_to_date and member.row.late >= TRIES][:1]
        members = [member for member in members if member in up_to_date or member in takers]
        donors = {member.name: member.state for member in up_to_date}
        if own not in members:
            self._lighthouse.is_away = True  # the others do not wait for it meanwhile
            addresses = [donors[name] for name in _in_turn(self._name, donors)]
            return Quorum(latest, 0, (own.label,), self._fetch(lambda: addresses, row, gives_up))
        if len(members) < self.min_replicas:
            time.sleep(RETRY_S)
            raise RuntimeError(f"up to date are {[member.label for member in up_to_date]}")
        rank, names = members.index(own), tuple(member.label for member in members)
        giver = next((in_turn[0] for in_turn in (_in_turn(taker.name, donors) for taker in takers)), "")
        key = tuple((member.name, member.failures) for member in members)
        if key != self._key:
            # The step, because a lighthouse that is restarted counts its quorums from 1 again.
            path = f"{number}/{latest}/{sum(member.failures for member in members)}/{self._process}"
            self._disconnect()
            self._unreached = _unreached([member for member in members if member.name != self._name])
            if self._unreached:
                raise RuntimeError(f"no connection to {[member.label for member in self._unreached]}")
            self._connect(up_to_date[0].store, path, rank, len(members))
            self._key, self._pause_s = key, PAUSE_S
        state_bytes = max(member.row.state_bytes for member in members)
        timeout_s = max(self.timeout_s, timeout_s_of(state_bytes, self.gbit_per_s))
        self._group._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=timeout_s))
        healed = None
        if own in takers:
            healed = self._fetch(lambda: [donors[giver]], row, gives_up, is_waited_for=True)
        elif own.name == giver and self._process == 0:
            ends_s = time.monotonic() + 2 * CONNECT_S
            while not self._server.answer(shared):
                if time.monotonic() > ends_s:
                    raise RuntimeError(f"{takers[0].label} has not asked for the state")
                time.sleep(POLL_S / 20)
        return Quorum(latest, rank, names, healed, None if takers else tuple(member.row for member in members))

    # The state of others ----------------------------------------------------------------------------------------------

    def _fetch(
        self,
        addresses_of: Callable[[], Sequence[str]],
        row: Row,
        gives_up: Callable[[], bool],
        *,
        is_waited_for: bool = False,
    ) -> dict[str, Any]:
        """Take the state of the first group that gives it; the tensors on process 0 only.

        Args:
            is_waited_for: no round ends meanwhile.

        Raises:
            RuntimeError: on all processes; there is none, or this group has given up, to come again.
        """
        if self._process == 0 and self._fetching is None:
            asks = {"name": self._name, "settings": row.settings, "run": row.run if row.rounds else ""}
            self._fetching = _begin(lambda: self._fetch_from(addresses_of(), asks, is_waited_for), "lowbw-fetch")
            self._num_fetched += 1
        fetched = self._fetching or Future[dict[str, Any]]()
        answer: str | None = None
        while answer is None:
            if self._process == 0 and wait([fetched], POLL_S).done:
                error = fetched.exception()
                state = {} if error else {**fetched.result(), "tensors": {}}
                answer = f"!{error}" if error else base64.b64encode(packed(state).numpy().tobytes()).decode()
            answers = gather_json((answer, gives_up()))
            if any(given_up for _, given_up in answers):
                raise RuntimeError("given up")
            answer = answers[0][0]
        self._fetching = None
        if answer.startswith("!"):
            raise RuntimeError(answer[1:])
        return fetched.result() if self._process == 0 else unpacked(base64.b64decode(answer))

    def _fetch_from(self, addresses: Sequence[str], asks: Mapping[str, str], is_waited_for: bool) -> dict[str, Any]:
        reasons = []
        for address in sorted(addresses, key=lambda each: self._client is None or each != self._client.address):
            try:
                if self._client is None or self._client.address != address or self._client.is_lost:
                    self._forget_state()
                    self._client = StateClient(address, asks)
                client = self._client
                if client.fetch() is not None if is_waited_for else client.catch_up():
                    return client.state
                reasons.append(f"{address} has none for this group")
            except OSError as error:
                if self._client is None:  # given up
                    break
                reasons.append(f"{address}: {error}")
                self._forget_state()
        if reasons:
            time.sleep(RETRY_S)
        raise RuntimeError(f"the state of another group could not be taken: {'; '.join(reasons) or 'there is none'}")

    def _forget_state(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _connect(self, address: str, path: str, rank: int, size: int) -> None:
        """Make the group of these members, which meet in a store."""
        before = _open_sockets()
        prefixed = dist.PrefixStore(path, _store_at(address))
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=self._address)]
        options._timeout = timedelta(seconds=CONNECT_S)
        backend = gloo(prefixed, rank, size, options)
        _of_group.clear()
        _of_group.update(_open_sockets() - before)
        for descriptor, _ in _of_group:
            watch(descriptor)
        group = dist.ProcessGroup(prefixed, rank, size)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            group._register_backend(torch.device(device), dist.ProcessGroup.BackendType.GLOO, backend)
        # What torch.distributed's functions look up: members by global rank. That of another is of no importance.
        others = [member for member in range(size) if member != rank]
        world = dist.distributed_c10d._world
        world.pg_map[group] = ("gloo", prefixed)
        world.pg_group_ranks[group] = {self._process: rank, **{self._num_processes + other: other for other in others}}
        self._group = group

    def _disconnect(self) -> None:
        """Forget the group. gloo closes its connections when nothing refers to it any more; `abort` does not."""
        world = dist.distributed_c10d._world
        world.pg_map.pop(self._group, None)
        world.pg_group_ranks.pop(self._group, None)
        self._group, self._key = None, ()


class _Lighthouse:
    """torchft's client, made anew after an error.

    Heartbeats are sent here and not by torchft's server: that one would have everybody who reaches its port end the
    process.
    """

    def __init__(self, torchft: Any, url: str) -> None:
        self.url = url
        self._torchft = torchft
        self._client: Any = None
        self.is_away = False  # whether no heartbeats are sent
        self._answered_s = self._longest_s = 0.0  # when a request was answered last, and until the next one at most
        self._hangs_from_s = math.inf  # when this group is to have come again
        self._is_closed = threading.Event()
        self._heartbeats: threading.Thread | None = None

    def _connected(self) -> Any:
        return self._torchft.LighthouseClient(self.url, connect_timeout=timedelta(seconds=CONNECT_S))

    def begin_quorum(self, own: _Member) -> Future[Any]:
        """Begin to ask for the next quorum: its number and members, in the same order for all; or why there is none.

        The answer is plain values, for JSON.
        """
        now_s = time.monotonic()
        self._longest_s = max(self._longest_s, now_s - (self._answered_s or now_s))
        self.is_away, self._hangs_from_s = False, math.inf
        # In a thread, because a signal would be handled only after torchft has returned.
        return _begin(lambda: self._request(own), "lowbw-quorum")

    def _request(self, own: _Member) -> dict[str, Any]:
        client, self._client = self._client, None
        try:
            if self._heartbeats is None:  # not before this member can come to a round
                self._refuse_second(own)
                self._heartbeats = threading.Thread(
                    target=self._send_heartbeats, args=(own.name,), name="lowbw-heartbeats", daemon=True
                )
                self._heartbeats.start()
            client = client or self._connected()
            found = client.quorum(
                replica_id=own.name,
                timeout=timedelta(seconds=WAIT_S),
                address=own.state,
                store_address=own.store,
                step=own.row.rounds,  # for the lighthouse's page
                data={"row": list(own.row), "failures": own.failures},
            )
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
            told = [[*astuple(member)] for member in sorted(members, key=lambda member: member.name)]
            return {"number": found.quorum_id, "members": told}
        except Exception as error:  # noqa: BLE001 - it is told where the answer is waited for
            if not isinstance(error, TimeoutError):  # after which the lighthouse still counts on this member
                time.sleep(RETRY_S)
            return {"error": f"{error}", "is_final": isinstance(error, ConfigurationError)}
        finally:
            self._answered_s = time.monotonic()
            if self._longest_s:  # not in the first round
                self._hangs_from_s = self._answered_s + max(HANG_S, HANG_ROUNDS * self._longest_s)

    def _refuse_second(self, own: _Member) -> None:
        """Raise ConfigurationError if another group has the name and is alive; before the others hear of this one."""
        before, began_s = self._ages(own), time.monotonic()
        if before:
            time.sleep(POLL_S)
            if any(age < time.monotonic() - began_s for age in self._ages(own)):  # heard of meanwhile
                raise second_of(own.label)

    def _page(self) -> str:
        """Return the lighthouse's page.

        Raises:
            OSError, HTTPException: it cannot be read.
        """
        address = urlsplit(self.url)
        connection = http.client.HTTPConnection(f"{address.hostname}", address.port, timeout=CONNECT_S)
        with closing(connection):
            connection.request("GET", "/status")
            return html.unescape(connection.getresponse().read().decode())

    def _ages(self, own: _Member) -> list[float]:
        """Return the seconds since the last heartbeats of other groups of this name."""
        line = rf"(?m)^ *(?!{re.escape(own.name)}:){re.escape(own.label)}:[-0-9a-f]+: seen ([0-9.]+)s ago"
        return [float(age) for age in re.findall(line, self._page())]

    def addresses(self, own_name: str) -> list[str]:
        """Return where the states of other members of the last round are served that are alive; none where unknown."""
        with suppress(OSError, http.client.HTTPException):
            page = self._page()
            members = re.findall(r"<b>(.*)</b> <br/>\s*Step: [0-9]+ <br/>\s*Manager: (\S+) <br/>", page)
            ages = {name: float(age) for name, age in re.findall(r"(?m)^ *(\S.*): seen ([0-9.]+)s ago", page)}
            alive = {name: address for name, address in members if ages.get(name, GONE_S) < CONNECT_S}
            return [alive[name] for name in _in_turn(own_name, alive) if name != own_name]
        return []

    def _send_heartbeats(self, name: str) -> None:
        """Tell the lighthouse that this member is alive, until `close`; not while it hangs."""
        client, has_said = None, False
        while not self._is_closed.wait(HEARTBEAT_S):
            hangs = time.monotonic() > self._hangs_from_s
            if hangs and not has_said:
                _logger.warning("This group takes %d times as long as ever for a round; others go on.", HANG_ROUNDS)
            has_said = hangs
            if self.is_away or hangs:
                continue
            with suppress(RuntimeError, TimeoutError):
                client, used = None, client or self._connected()
                used.heartbeat(name, timeout=timedelta(seconds=CONNECT_S))
                client = used

    def close(self) -> None:
        self._is_closed.set()
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


def _begin(fn: Callable[[], T], name: str) -> Future[T]:
    """Call a function in a thread that keeps no process alive."""
    future = Future[T]()

    def run() -> None:
        try:
            future.set_result(fn())
        except Exception as error:  # noqa: BLE001 - it is raised where the result is waited for
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def _in_turn(own_name: str, names: Iterable[str]) -> list[str]:
    """Return others in an order that differs between groups: they do not all take the state of one."""
    return sorted(names, key=lambda name: zlib.crc32(f"{own_name} {name}".encode()))


def _store_at(address: str) -> dist.TCPStore:
    host, _, port = address.rpartition(":")
    limit = timedelta(seconds=CONNECT_S)
    return dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=limit)


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

_of_group: set[tuple[int, int]] = set()  # gloo's, as `_open_sockets` returns them


def _open_sockets() -> set[tuple[int, int]]:
    """Return the descriptor and the inode of each."""
    found = set()
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # that of the listing itself
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found.add((int(name), status.st_ino))
    return found


def _close_in_child() -> None:
    for descriptor, _ in _of_group & _open_sockets():
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
    otel = os.environ.pop("TORCHFT_USE_OTEL", None)  # with it the import fails
    os.environ.setdefault("RUST_LOG", "warn")  # else torchft writes a line for each request
    torchft = importlib.import_module("torchft.coordination")
    if otel is not None:
        os.environ["TORCHFT_USE_OTEL"] = otel
    return torchft


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
