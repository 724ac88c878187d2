"""The state of a group, sent to one that is behind: to the bit, in parts, one group after the other."""

from __future__ import annotations

import json
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_lowbw.elastic import torchft_membership, transfer
from lightning_lowbw.elastic.membership import Row, digest_of
from lightning_lowbw.elastic.torchft_membership import TorchftMembership
from lightning_lowbw.elastic.transfer import StateClient, StateServer, apply_, update_
from lightning_lowbw.errors import ConfigurationError, DisagreementError

SETTINGS = {"method": "as here"}
ASKS = {"name": "joiner", "settings": digest_of(SETTINGS), "run": ""}
ROW = Row(settings=ASKS["settings"])
LARGE = 1 << 24  # elements: more than the buffers of two sockets hold


class Group:
    """A group that trains: at the end of each step it serves its state, and `change` is called.

    Args:
        tensors: of the state.
        change: of the tensors, in a round.
        steps: of a round.
    """

    def __init__(self, tensors: dict[str, Tensor], change: Callable[[], object] = bool, steps: int = 1) -> None:
        self.tensors, self.change, self.steps = tensors, change, steps
        self.server = StateServer("donor", "127.0.0.1", 2.0)
        self.server.row, self.server.settings = Row(2, settings=digest_of(SETTINGS), run="r"), SETTINGS
        self.rounds, self.longest_s = 3, 0.0
        self.is_over = threading.Event()

    def train(self) -> None:
        step = 0
        while not self.is_over.wait(0.02):
            began_s = time.monotonic()
            self.server.answer(self.state)
            self.longest_s = max(self.longest_s, time.monotonic() - began_s)
            step += 1
            if step % self.steps == 0:
                self.change()
                self.rounds += 1

    def state(self) -> dict[str, Any]:
        return {"tensors": self.tensors, "num_averages": self.rounds, "run": "r", "others": {3: (1.5, "x")}}


@contextmanager
def training(group: Group) -> Iterator[Group]:
    thread = threading.Thread(target=group.train, daemon=True)
    thread.start()
    try:
        yield group
    finally:
        group.is_over.set()
        thread.join()
        group.server.close(2.0)


def test_what_has_changed_arrives_to_the_bit() -> None:
    generator = torch.Generator().manual_seed(1)
    now = {
        "wide": torch.randn(3, 5, 2, 2, generator=generator).to(memory_format=torch.channels_last),
        "half": torch.randn(9, generator=generator).bfloat16(),
        "double": torch.randn(2, 3, generator=generator).double(),
        "scalar": torch.tensor(2.5),
        "nothing": torch.zeros(0, 4),
        "complex": torch.randn(4, dtype=torch.complex64, generator=generator),
        "still": torch.ones(7),
    }
    sent: dict[str, Tensor] = {}
    received: dict[str, Tensor] = {}
    for changed in ({"wide": (0, 1, 1, 0), "half": 3, "scalar": ()}, {"double": (1, 2), "complex": 2}, {}):
        parts = update_(sent, now)
        for part in parts:
            apply_(received, part)
        for name, tensor in now.items():
            real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            assert received[name].dtype == real.dtype
            pair = [each.reshape(-1).contiguous().view(torch.uint8) for each in (received[name], real)]
            assert torch.equal(*pair), name
        for name, place in changed.items():
            now[name][place] = {"wide": -0.0, "scalar": float("nan")}.get(name, 7.0)
    assert [part.name for part in parts] == ["double", "complex"], "nothing else"
    assert [part.values.numel() for part in parts] == [1, 2]
    now["wide"].zero_()
    update_(sent, now)
    now["wide"].neg_()  # -0.0 is another number for a checksum
    (part,) = update_(sent, now)
    assert part.values.numel() == now["wide"].numel()


def test_rounds_that_end_meanwhile_are_caught_up_with() -> None:
    weights = torch.zeros(LARGE)
    with training(Group({"w": weights}, lambda: weights[:100].add_(1.0), steps=3)) as group:
        client = StateClient(group.server.address, ASKS)
        assert client.catch_up()
        state = client.state
        assert state["others"] == {3: (1.5, "x")}
        assert state["tensors"]["w"][:101].tolist() == [state["num_averages"] - 3.0] * 100 + [0.0]
        first = client.fetch()
        assert first is not None
        assert first <= 400, "only what has changed"
        client.close()


def test_who_cannot_catch_up_stops_trying() -> None:
    weights = torch.zeros(LARGE)
    with training(Group({"w": weights}, lambda: weights.add_(1.0))) as group:
        client = StateClient(group.server.address, ASKS)
        assert client.catch_up()
        assert len({*client.state["tensors"]["w"][::1000].tolist()}) == 1, "of one round"
        client.close()


@pytest.mark.parametrize(("name", "value"), [("settings", "other"), ("run", "other")])
def test_who_could_not_take_part_is_given_nothing(name: str, value: str) -> None:
    with training(Group({"w": torch.zeros(3)})) as group:
        client = StateClient(group.server.address, {**ASKS, name: value})
        assert not client.catch_up()
        client.close()
        row = Row(*client.refusal["row"])
        assert (client.refusal["settings"], row.settings, row.run) == (SETTINGS, ASKS["settings"], "r")
        assert row.rounds == (3 if name == "run" else 2), "told, or completed since then"
        own_run = StateClient(group.server.address, {**ASKS, "run": "r"})
        assert own_run.catch_up()
        own_run.close()


def stalled(address: str, *, reads: bool = True) -> socket.socket:
    """Ask for the state, and read only its first bytes, or none."""
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)))
    asks = json.dumps({**ASKS, "name": "stalled"}).encode()
    connection.sendall(transfer._FRAME.pack(transfer.ASK, len(asks)) + asks)
    assert not reads or connection.recv(100)
    return connection


def test_two_are_served_one_after_the_other_and_one_copy_is_kept() -> None:
    """The first one dies in the transfer."""
    with training(Group({"w": torch.ones(LARGE)})) as group:
        first, second = stalled(group.server.address), StateClient(group.server.address, ASKS)
        waited = threading.Thread(target=second.catch_up, daemon=True)
        waited.start()
        waited.join(1.5)
        assert waited.is_alive()
        first.close()
        waited.join(20.0)
        assert torch.equal(second.state["tensors"]["w"], torch.ones(LARGE))
        assert second.fetch() == 0, "nothing has changed"
        third = StateClient(group.server.address, ASKS)
        assert third.catch_up()
        with pytest.raises(OSError, match=r"closed|reset|Broken"):
            second.fetch()
        second.close()
        third.close()


MADE: list[TorchftMembership] = []


@pytest.fixture(autouse=True)
def _end_connections() -> Iterator[None]:
    yield
    for membership in MADE:
        membership._forget_state()
    MADE.clear()


def a_membership() -> TorchftMembership:
    """Return one of a group that asks, without a lighthouse."""
    membership = object.__new__(TorchftMembership)
    MADE.append(membership)
    membership._name, membership._process, membership._fetching, membership._num_fetched = "joiner", 0, None, 0
    membership._client = None
    membership._told, membership._why_not, membership.min_replicas = (ROW, SETTINGS), "", 2
    membership._lighthouse = SimpleNamespace(is_closed=threading.Event(), url="here", close=bool)  # type: ignore[assignment]
    return membership


def fetch(addresses: list[str]) -> dict[str, Any]:
    return a_membership()._fetch(lambda: addresses, lambda _: False)


def test_who_leaves_in_a_transfer_costs_its_group_nothing_and_the_next_one_is_asked() -> None:
    with training(Group({"w": torch.ones(LARGE)})) as leaves, training(Group({"w": torch.full((9,), 2.0)})) as stays:
        blocked = stalled(leaves.server.address)
        assert leaves.longest_s < 1.0, "it trains on while the thread sends"
        addresses = [leaves.server.address, stays.server.address]
        found: list[Any] = []
        taking = threading.Thread(target=lambda: found.append(fetch(addresses)))
        taking.start()
        time.sleep(0.5)
        leaves.is_over.set()
        leaves.server.close(0.1)  # as at the end of its training
        taking.join(20.0)
        blocked.close()
        assert found[0]["tensors"]["w"].tolist() == [2.0] * 9


def test_a_transfer_that_breaks_off_changes_nothing() -> None:
    weights = torch.zeros(LARGE)
    with training(Group({"w": weights, "last": torch.zeros(3)}, steps=1000)) as group:
        client = StateClient(group.server.address, ASKS)
        client.fetch()
        weights.add_(1.0)
        filled = transfer._fill
        parts: list[int] = []

        def breaking(connection: socket.socket, room: memoryview) -> None:
            if len(room) > 1 << 20:
                parts.append(len(room))
                filled(connection, room[: 1 << 20])
                raise ConnectionError("broken")
            filled(connection, room)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transfer, "_fill", breaking)
            with pytest.raises(ConnectionError):
                client.fetch()
        assert parts
        assert not client.state["tensors"]["w"].any()
        client.close()


def test_a_group_that_takes_no_step_is_given_up() -> None:
    group = Group({"w": torch.zeros(3)})  # which does not train
    client = StateClient(group.server.address, ASKS)
    began_s = time.monotonic()
    with pytest.raises(OSError, match=r"closed|reset"):
        client.catch_up()
    client.close()
    assert 1.5 < time.monotonic() - began_s < 6.0
    group.server.close(2.0)


def test_who_closes_waits_for_a_transfer_and_not_for_who_has_the_state() -> None:
    with training(Group({"v": torch.ones(LARGE), "w": torch.ones(LARGE)}, steps=1 << 30)) as group:
        client = StateClient(group.server.address, ASKS)
        taking = threading.Thread(target=client.fetch)
        taking.start()
        while not client.progress:
            time.sleep(0.001)
        began_s = time.monotonic()
        group.server.close(20.0)
        assert time.monotonic() - began_s < 10.0
        taking.join()
        client.close()
    assert client.state["tensors"]["w"].equal(torch.ones(LARGE))


def test_a_state_is_data() -> None:
    state = {"weights": torch.ones(3), "nested": [1, 2.5, "three", None, {"four": True}]}
    received = transfer.unpacked(transfer.packed(state).numpy().tobytes())
    assert torch.equal(received.pop("weights"), torch.ones(3))
    assert received == {"nested": state["nested"]}
    with pytest.raises(pickle.UnpicklingError, match="Weights only"):
        transfer.unpacked(transfer.packed({"code": test_a_state_is_data}).numpy().tobytes())


def test_a_whole_state_is_kept_where_the_connection_is_lost_before_it_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = Group({"w": torch.arange(5.0)})
    fetch_once, served = StateClient.fetch, list[int | None]()

    def fetch(client: StateClient) -> int | None:
        if served:
            client._socket.shutdown(socket.SHUT_RDWR)
        served.append(fetch_once(client))
        return served[-1]

    monkeypatch.setattr(StateClient, "fetch", fetch)
    with training(group):
        client = StateClient(group.server.address, ASKS)
        assert client.catch_up()
        client.close()
    assert client.state["tensors"]["w"].equal(torch.arange(5.0))


def test_a_state_that_comes_is_waited_for_whatever_the_time() -> None:
    """As that of 30 minutes after which others are waited for no longer: a transfer ends by itself."""
    with training(Group({"w": torch.ones(LARGE)})) as group:
        late = lambda is_taking: not is_taking  # noqa: E731
        membership = a_membership()
        state = membership._fetch(lambda: [group.server.address], late)
        assert torch.equal(state["tensors"]["w"], torch.ones(LARGE))
        with pytest.raises(RuntimeError, match="given up"):
            membership._fetch(lambda: [group.server.address], lambda _: True)


def joined(monkeypatch: pytest.MonkeyPatch, addresses: Callable[[], list[str]], row: Row = ROW) -> Any:
    """Return what a newcomer begins with, where a lighthouse knows these addresses."""
    monkeypatch.setattr(torchft_membership, "GONE_S", 5.0)
    membership = a_membership()
    membership._lighthouse.addresses = lambda _: addresses()  # type: ignore[method-assign]
    return membership.state_of_others(row, SETTINGS, lambda _: False)


def test_who_cannot_take_the_state_tries_again_and_begins_no_second_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page is not read, nobody listens, a connection breaks off; then it comes."""
    closed = socket.create_server(("127.0.0.1", 0))
    dead = f"127.0.0.1:{closed.getsockname()[1]}"
    closed.close()
    with training(Group({"w": torch.ones(5)})) as group:
        attempts: list[Any] = [OSError("no page"), [dead], [group.server.address], [group.server.address]]
        unpacked, broken = transfer.unpacked, [True]

        def addresses() -> list[str]:
            if isinstance(found := attempts.pop(0), OSError):
                raise found
            return found

        def breaking(message: bytearray) -> dict[str, Any]:
            if broken:
                broken.clear()
                raise KeyError("broken")
            return unpacked(message)

        monkeypatch.setattr(transfer, "unpacked", breaking)
        assert joined(monkeypatch, addresses)["tensors"]["w"].equal(torch.ones(5))
    assert not attempts
    assert joined(monkeypatch, list) is None, "nobody lives"
    with pytest.raises(ConfigurationError, match=rf"this one does not reach them: {dead}: .* give address="):
        joined(monkeypatch, lambda: [dead])


def test_who_is_refused_ends_by_name_and_begins_no_second_training(monkeypatch: pytest.MonkeyPatch) -> None:
    with training(Group({"w": torch.ones(5)}, steps=1 << 30)) as group:  # no round ends
        there = lambda: [group.server.address]  # noqa: E731
        other = Row(settings="other", run="r", rounds=4)
        assert joined(monkeypatch, there, other) is None, "nobody there has been in a round yet"
        group.server.row = group.server.row._replace(is_new=False)
        with pytest.raises(DisagreementError, match="other settings than group 'donor at 127"):
            joined(monkeypatch, there, other)
        with pytest.raises(DisagreementError, match=r"in run 'old', of 4 rounds; group 'donor at .*' trains in run"):
            joined(monkeypatch, there, Row(settings=ASKS["settings"], run="old", rounds=4))
        group.rounds = 0
        assert joined(monkeypatch, there) is None, "nothing has been averaged"


def test_a_group_that_all_wait_for_is_given_the_state_after_who_has_asked_before() -> None:
    group = Group({"w": torch.ones(LARGE)})
    membership = a_membership()
    membership._server = group.server
    early = stalled(group.server.address, reads=False)
    time.sleep(0.5)
    taker = StateClient(group.server.address, {**ASKS, "name": "taker"})
    taking = threading.Thread(target=taker.fetch, daemon=True)
    taking.start()
    threading.Timer(1.0, early.close).start()
    member = torchft_membership._Member("taker", "", "", Row(), 0)
    membership._give(member, group.state)
    taking.join(20.0)
    assert torch.equal(taker.state["tensors"]["w"], torch.ones(LARGE))
    taker.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torchft_membership, "CONNECT_S", 0.2)
        with pytest.raises(RuntimeError, match="has not asked for the state"):
            membership._give(member, group.state)
    group.server.close(2.0)


def test_who_is_ended_waits_shortly_for_a_transfer() -> None:
    with training(Group({"w": torch.ones(LARGE)})) as group:
        blocked = stalled(group.server.address)
        membership = a_membership()
        membership._server = group.server
        membership._group, membership.timeout_s = None, 600.0
        began_s = time.monotonic()
        membership.close()
        assert 0.9 * torchft_membership.LEAVE_S < time.monotonic() - began_s < 2 * torchft_membership.LEAVE_S
        membership.close()  # as Lightning does, at the end and in the teardown
        assert time.monotonic() - began_s < 2 * torchft_membership.LEAVE_S, "nothing more is waited for"
        blocked.close()


def test_what_strangers_send_does_not_end_the_serving() -> None:
    group = Group({"w": torch.ones(3)})
    with training(group):
        host, _, port = group.server.address.rpartition(":")
        for sent in (b"", b"GET / HTTP/1.1", b"\x00" + (2).to_bytes(8, "big") + b"[]"):
            with socket.create_connection((host, int(port)), 5.0) as stranger:
                stranger.sendall(sent)
        client = StateClient(group.server.address, ASKS)
        assert client.catch_up()
        client.close()
