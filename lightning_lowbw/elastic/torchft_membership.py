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

import torch.distributed as dist

from lightning_lowbw.comm.agreement import gather_json
from lightning_lowbw.elastic.membership import GivesUp, Quorum, Row, Settings, Share, raise_refused, refusals, rounds_of
from lightning_lowbw.elastic.transfer import CONNECT_S, POLL_S, StateClient, StateServer, packed, unpacked, watch
from lightning_lowbw.errors import ConfigurationError, DisagreementError
from lightning_lowbw.namespaces import LOGGER

_logger = logging.getLogger(LOGGER)
T = TypeVar("T")

TORCHFT = "0.2.0"  # others speak another protocol
LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"  # torchft's own variable: the lighthouse's address
HEARTBEAT_S = 0.25  # between two; the lighthouse takes a member for dead after 5 s, if not started otherwise
HANG_STEPS, HANG_S = 10, 60.0  # a group without a batch for ten times its longest step, and a minute, hangs
LEAVE_S = 5.0  # for which who is ended waits for a transfer that is in progress
TRIES = 3  # to take the state in time for a round, after which the others wait for this group
WAIT_S = 75.0  # of one request for a quorum. In the lighthouse each begins anew to wait for others, by default 60 s.
OWN_DATA = frozenset({"row", "failures"})  # of a member: what torchft has no field for
RETRY_S, WARN_S = 0.5, 60.0
PAUSE_S = 20.0  # for which a group is left out that others do not reach, if it does not reach them before
GONE_S = 20.0  # after which who has this one's name is not this one before a restart, and who is not reached never is
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
        self._process = dist.get_rank()
        (self._name, *_) = gather_json(f"{name or socket.gethostname()}:{uuid.uuid4()}")
        self._key: tuple[Any, ...] = ()  # of the quorum for which the group was made
        self._group: Any = None
        self._num_failures = 0
        self._limit_s, self._longest_s = self.timeout_s, 0.0  # of a collective of this round; of a step
        self._unreached: list[_Member] = []  # of the last members
        self._is_left_out, self._away_until_s = False, 0.0  # because of that
        self._said_s = 0.0  # when the last line told that it waits
        self._refused: set[str] = set()  # who has been named
        self._client: StateClient | None = None  # of the group whose state was taken last, up to a round
        self._why_not, self._num_fetched = "", 0  # it could not be; how often one was, since a round
        self._told: tuple[Row, Settings] = Row(), {}  # as of `quorum`
        self._fetching: Future[dict[str, Any]] | None = None  # goes on where it is not waited for any more
        if self._process == 0:
            self._server = StateServer(self._name.rpartition(":")[0], self._address, self.timeout_s)
            listener = socket.create_server((self._address, 0))  # not at other addresses of the host
            self._port = listener.getsockname()[1]
            options: dict[str, Any] = {"is_master": True, "wait_for_workers": False}
            self._store = dist.TCPStore(self._address, self._port, master_listen_fd=listener.detach(), **options)

    def state_of_others(self, row: Row, settings: Settings, gives_up: GivesUp) -> Mapping[str, Any] | None:
        """See `Membership`. Members of the last round are found by the lighthouse's page."""
        self._told = row, settings
        with suppress(RuntimeError):  # there is none, or this group has given up
            return self._fetch(lambda: self._lighthouse.addresses(self._name), gives_up, insists=True)
        return None

    def serve(self, shared: Share) -> None:
        if self._process == 0:
            self._server.answer(shared)

    def note(self, longest_s: float) -> None:
        self._lighthouse.hangs_from_s = time.monotonic() + max(HANG_S, HANG_STEPS * longest_s)
        self._longest_s = longest_s

    def quorum(self, row: Row, settings: Settings, shared: Share, gives_up: GivesUp) -> Quorum | None:
        began_s = self._said_s = time.monotonic()
        self._told = row, settings
        if self._process == 0:
            self._server.row, self._server.settings = row, dict(settings)
        while True:
            try:
                self._lighthouse.hangs_from_s = math.inf
                answer = self._ask(shared, began_s, gives_up)
                if answer is None:
                    self._fail()  # others may wait for this one; and the next request differs from this one
                    return None
                return self._join(*answer, shared, gives_up)
            except RuntimeError as error:  # on all processes
                told = f"{error}"
            self._fail()  # not before the error is forgotten, which refers to the group
            self._say_if_due(began_s, told)

    def _say_if_due(self, began_s: float, error: str = "") -> None:
        """Tell that this group waits, once a minute; the first time after an error soon."""
        now_s = time.monotonic()
        if now_s - self._said_s < WARN_S and (not error or self._said_s > began_s or now_s - began_s < WARN_S / 6):
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
            self._lighthouse.hangs_from_s = time.monotonic() + self._limit_s + HANG_S
            return fn(self._group)
        except Exception:
            self._fail()
            raise
        finally:
            self.note(self._longest_s)

    def commit(self, is_ok: bool = True) -> bool:
        """See `Membership`.

        Args:
            is_ok: False lets the round fail.
        """
        if not all(gather_json(is_ok and self._group is not None)):
            self._fail()
            return False
        self._forget_state()
        self._num_fetched = 0
        if self._process == 0:
            self._server.row = self._server.row._replace(is_new=False)
        return True

    def close(self) -> None:
        self._forget_state()
        self._disconnect()
        self._lighthouse.close()
        if self._process == 0:
            self._server.close(self.timeout_s if self._server.row.has_ended else LEAVE_S)

    def _together(self, fn: Callable[[], object]) -> None:
        """Call a function that communicates with other groups only; raise on all processes of this one.

        Raises:
            RuntimeError: it has failed on one of them.
        """
        told = ""
        try:
            fn()
        except RuntimeError as error:
            told = f"{error}"
        if failed := [error for error in gather_json(told) if error]:
            raise RuntimeError(failed[0])

    def _fail(self) -> None:
        """Leave the group, so that those fail, too, that wait for this member; a new one is made for the next round."""
        self._num_failures += 1
        self._disconnect()

    # Members --------------------------------------------------------------------------------------------------------

    def _ask(self, shared: Share, began_s: float, gives_up: GivesUp) -> tuple[int, Sequence[_Member]] | None:
        """Return the number of the next quorum, and its members; None if a process of this group has given up.

        Raises:
            RuntimeError: on all processes; there is none yet.
            DisagreementError: on all processes; this group is not as the others are, who go on without it.
        """
        answer: dict[str, Any] | None = None
        request, has_asked, (row, settings) = Future[Any](), False, self._told
        if self._process == 0:
            store = f"{self._address}:{self._port}"
        while answer is None:
            if self._process == 0 and not has_asked:
                self._unreached = _unreached(self._unreached)
            if self._process == 0 and not has_asked and (not self._unreached or time.monotonic() >= self._away_until_s):
                unreached = [member.name for member in self._unreached]
                told = row._replace(unreached=unreached, late=0 if self._fetching else self._num_fetched)
                own = _Member(self._name, store, self._server.address, told, self._num_failures)
                request, has_asked = self._lighthouse.begin_quorum(own), True
            if self._process == 0 and wait([request], POLL_S).done:
                answer = request.result()
            self.serve(shared)
            # At first it is taken for granted that the others are on their way.
            waited_s = time.monotonic() - began_s
            self._say_if_due(began_s)
            answers = gather_json((answer, waited_s, waited_s >= POLL_S and gives_up(False)))
            if any(given_up for *_, given_up in answers):
                return None
            answer, waited_s, _ = answers[0]  # so that all raise the same
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
        if own.row.is_new and self._is_left_out:  # the second time in a row
            raise ConfigurationError(told)
        self._is_left_out = self._lighthouse.is_away = True  # so that nobody waits for it
        self._away_until_s = time.monotonic() + PAUSE_S
        _logger.warning("%s It tries again in %.0f s.", told, PAUSE_S)
        raise RuntimeError(told)

    def _settings_of(self, member: _Member) -> Settings | None:
        """Return the settings of another group, which are not those of this one; None if it cannot be reached."""
        with suppress(OSError), closing(StateClient(member.state, self._asks())) as client:
            client.fetch()
            return dict(client.refusal["settings"])
        return None

    def _join(self, number: int, members: Sequence[_Member], shared: Share, gives_up: GivesUp) -> Quorum:
        """Connect to the members of a quorum that are not behind; or take the state of one.

        Raises:
            RuntimeError: on all processes; it was not possible.
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
            return Quorum(latest, 0, (own.label,), self._fetch(lambda: addresses, gives_up))
        if len(members) < self.min_replicas:
            time.sleep(RETRY_S)
            raise RuntimeError(f"up to date are {[member.label for member in up_to_date]}")
        rank, names = members.index(own), tuple(member.label for member in members)
        key = tuple((member.name, member.failures) for member in members)
        if key != self._key:
            # The step, because a lighthouse that is restarted counts its quorums from 1 again.
            path = f"{number}/{latest}/{sum(member.failures for member in members)}/{self._process}"
            self._disconnect()
            self._together(lambda: self._connect(members, up_to_date[0].store, path, rank))
            self._key, self._is_left_out = key, False
        state_bytes = max(member.row.state_bytes for member in members)
        self._limit_s = max(self.timeout_s, timeout_s_of(state_bytes, self.gbit_per_s))
        self._group._set_default_timeout(timedelta(seconds=self._limit_s))
        if not takers:
            return Quorum(latest, rank, names, None, tuple(member.row for member in members))
        (taker,), healed = takers, None
        giver = _in_turn(taker.name, donors)[0]
        if own is taker:
            healed = self._fetch(lambda: [donors[giver]], gives_up, is_waited_for=True)
        elif own.name == giver:
            self._together(lambda: self._give(taker, shared))
        return Quorum(latest, rank, names, healed)

    def _give(self, taker: _Member, shared: Share) -> None:
        """Copy the state for a member that all wait for; before it, for who has asked earlier.

        Raises:
            RuntimeError: it has not asked.
        """
        ends_s = time.monotonic() + 2 * CONNECT_S
        while self._process == 0 and self._server.answer(shared) != taker.name:
            if self._server.is_sending:
                ends_s = time.monotonic() + 2 * CONNECT_S
            if time.monotonic() > ends_s:
                raise RuntimeError(f"{taker.label} has not asked for the state")
            time.sleep(POLL_S / 20)

    # The state of others ----------------------------------------------------------------------------------------------

    def _fetch(
        self,
        addresses_of: Callable[[], Sequence[str]],
        gives_up: GivesUp,
        *,
        insists: bool = False,
        is_waited_for: bool = False,
    ) -> dict[str, Any]:
        """Take the state of the first group that gives it; the tensors on process 0 only.

        Args:
            addresses_of: returns those of groups; raises OSError where they cannot be found out.
            gives_up: as of `quorum`.
            insists: whether it is tried again as long as one of these has completed a round.
            is_waited_for: no round ends meanwhile.

        Raises:
            RuntimeError: on all processes, as all others; there is none, or this group has given up, to come again.
            DisagreementError: this group is refused.
            ConfigurationError: those that train are not reached.
        """
        began_s = self._said_s = time.monotonic()
        if self._process == 0 and self._fetching is None:
            self._num_fetched += 1
            self._fetching = _begin(lambda: self._fetch_from(addresses_of, insists, is_waited_for), "lowbw-fetch")
        fetched = self._fetching or Future[dict[str, Any]]()
        answer: dict[str, Any] | None = None
        while answer is None:
            if self._process == 0 and wait([fetched], POLL_S).done:
                error = fetched.exception()
                state = packed({} if error else {**fetched.result(), "tensors": {}}).numpy().tobytes()
                answer = told_of(error) if error else {"state": base64.b64encode(state).decode()}
            answers = gather_json((answer, gives_up(True)))
            if any(given_up for _, given_up in answers):
                raise RuntimeError("given up")
            answer = answers[0][0]
            client = self._client
            self._say_if_due(began_s, self._why_not or (client.progress if client else ""))
        self._fetching, self._why_not = None, ""
        _raise_told(answer)
        return fetched.result() if self._process == 0 else unpacked(base64.b64decode(answer["state"]))

    def _fetch_from(
        self, addresses_of: Callable[[], Sequence[str]], insists: bool, is_waited_for: bool
    ) -> dict[str, Any]:
        reached_s = time.monotonic()
        while True:
            failed, addresses = list[str](), list[str]()
            try:
                addresses = [*addresses_of()]
            except OSError as error:
                failed, reached_s = [f"{error}"], time.monotonic()
            for address in sorted(addresses, key=lambda each: self._client is None or each != self._client.address):
                try:
                    if self._client is None or self._client.address != address:
                        self._forget_state()
                        self._client = StateClient(address, self._asks())
                    client, reached_s = self._client, time.monotonic()
                    if client.fetch() is not None if is_waited_for else client.catch_up():
                        return client.state
                    self._check_refusal(client.refusal, address)
                except DisagreementError:
                    raise
                except Exception as error:  # noqa: BLE001 - whatever it is, another training is there
                    failed.append(f"{address}: {error!r}")
                self._forget_state()
            if not failed:
                raise RuntimeError("no other group has completed a round")
            self._why_not = "; ".join(failed)
            time.sleep(RETRY_S)
            if not insists or self._lighthouse.is_closed.is_set():
                raise RuntimeError(self._why_not)
            if time.monotonic() > reached_s + GONE_S:
                raise ConfigurationError(
                    f"Groups train, and this one does not reach them: {self._why_not}. All ports have to be open "
                    "between all groups: give address=..., or a VPN where one is behind NAT."
                )

    def _check_refusal(self, refusal: Mapping[str, Any], address: str) -> None:
        """Raise DisagreementError if who has refused this group has been in a round; else all compare in the next."""
        (row, settings), other = self._told, Row(*refusal["row"])
        if not other.is_new and (other.rounds or other.settings != row.settings):
            raise_refused(row, settings, other, refusal["settings"], f"{refusal['name']} at {address}")

    def _forget_state(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

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
        prefixed, options, size = dist.PrefixStore(path, _store_at(address)), gloo._Options(), len(members)
        before = _tcp_sockets()
        options._devices = [gloo.create_device(hostname=self._address)]  # it listens at a port of its own
        listening = [ports[0] for key, ports in _tcp_sockets().items() if key not in before and not ports[1]]
        if len(listening) != 1:
            raise RuntimeError("another thread has begun to listen at the same moment")
        (own_port,) = listening
        prefixed.set(f"port {rank}", f"{own_port}")
        options._timeout = timedelta(seconds=CONNECT_S)
        group = gloo(prefixed, rank, size, options)
        # Of what other threads have opened meanwhile, as loggers do, none is from one of these ports to another.
        ports = set(map(int, prefixed.multi_get([f"port {member}" for member in range(size)])))
        _of_group.clear()
        _of_group.update(key for key, each in _tcp_sockets().items() if each[0] == own_port or each[1] in ports)
        for descriptor, _ in _of_group:
            watch(descriptor)
        self._group = group

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
        self._torchft = torchft
        self._client: Any = None
        self.is_away = False  # whether no heartbeats are sent
        self.hangs_from_s = math.inf  # when this group, if nothing else is noted before, hangs
        self.is_closed = threading.Event()  # read where the state is asked for again and again
        self._heartbeats: threading.Thread | None = None

    def _connected(self) -> Any:
        return self._torchft.LighthouseClient(self.url, connect_timeout=timedelta(seconds=CONNECT_S))

    def begin_quorum(self, own: _Member) -> Future[Any]:
        """Begin to ask for the next quorum: its number and members, in the same order for all; or why there is none.

        The answer is plain values, for JSON.
        """
        self.is_away = False
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
            return told_of(error)

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
            OSError: it cannot be read.
        """
        address = urlsplit(self.url)
        connection = http.client.HTTPConnection(f"{address.hostname}", address.port, timeout=CONNECT_S)
        try:
            connection.request("GET", "/status")
            return html.unescape(connection.getresponse().read().decode())
        except http.client.HTTPException as error:
            raise OSError(f"{self.url}: {error}") from error
        finally:
            connection.close()

    def _ages(self, own: _Member) -> list[float]:
        """Return the seconds since the last heartbeats of other groups of this name."""
        line = rf"(?m)^ *(?!{re.escape(own.name)}:){re.escape(own.label)}:[-0-9a-f]+: seen ([0-9.]+)s ago"
        return [float(age) for age in re.findall(line, self._page())]

    def addresses(self, own_name: str) -> list[str]:
        """Return where the states of other members of the last round are served that are alive; with most rounds first.

        Raises:
            OSError: the page cannot be read.
        """
        page = self._page()
        members = re.findall(r"<b>(.*)</b> <br/>\s*Step: ([0-9]+) <br/>\s*Manager: (\S+) <br/>", page)
        ages = {name: float(age) for name, age in re.findall(r"(?m)^ *(\S.*): seen ([0-9.]+)s ago", page)}
        alive = {name: each for name, *each in members if name != own_name and ages.get(name, GONE_S) < CONNECT_S}
        in_turn = sorted(_in_turn(own_name, alive), key=lambda name: -int(alive[name][0]))
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
                client, used = None, client or self._connected()
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


def told_of(error: BaseException) -> dict[str, Any]:
    """Return an error as plain values, for all processes of a group."""
    return {"error": f"{error}", "kind": type(error).__name__}


def _raise_told(answer: Mapping[str, Any]) -> None:
    """Raise the error of which `told_of` has told; RuntimeError, where it may pass."""
    if "error" in answer:
        kinds = {kind.__name__: kind for kind in (ConfigurationError, DisagreementError)}
        raise kinds.get(answer["kind"], RuntimeError)(answer["error"])


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

_of_group: set[tuple[int, int]] = set()  # gloo's, as `_tcp_sockets` returns them


def _tcp_sockets() -> dict[tuple[int, int], tuple[int, int]]:
    """Return the ports of each TCP socket, here and there (0 where it listens), by its descriptor and inode."""
    found = {}
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # that of the listing itself
            status = os.fstat(int(name))
            if not stat.S_ISSOCK(status.st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as copy:
                if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                    listens = copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                    ends = copy.getsockname(), (0, 0) if listens else copy.getpeername()
                    found[int(name), status.st_ino] = ends[0][1], ends[1][1]
    return found


def _close_in_child() -> None:
    for descriptor, _ in _of_group & _tcp_sockets().keys():
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
