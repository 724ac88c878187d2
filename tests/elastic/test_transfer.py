"""The state of a group, sent to a group that is behind: to the bit, one group after the other."""

from __future__ import annotations

import math
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

from lightning_lowbw.elastic import transfer
from lightning_lowbw.elastic.membership import Row, settings_text
from lightning_lowbw.elastic.torchft_membership import TorchftMembership
from lightning_lowbw.elastic.transfer import StateClient, StateServer
from lightning_lowbw.errors import DisagreementError

ROW = Row(settings=settings_text({"method": "as here"}))
ASKS = "joiner", ROW
LARGE = 1 << 24  # elements: more than the buffers of two sockets hold


class Group:
    """A group that trains, and offers its state after each round, which `change` changes.

    Args:
        tensors: of the state.
        change: of the tensors, in a round.
        steps: number of steps of a round.
    """

    def __init__(self, tensors: dict[str, Tensor], change: Callable[[], object] = bool, steps: int = 1) -> None:
        self.tensors, self.change, self.steps = tensors, change, steps
        self.row = ROW._replace(rounds=2, run="r")
        self.server = StateServer("donor", "127.0.0.1", lambda: self.row)
        self.server.offer(self.state)
        self.rounds = 3
        self.is_over = threading.Event()

    def train(self) -> None:
        while not self.is_over.wait(0.02 * self.steps):
            self.server.offer(None)
            self.change()
            self.rounds += 1
            self.server.offer(self.state)

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


def test_a_state_arrives_to_the_bit() -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = {
        "wide": torch.randn(3, 5, 2, 2, generator=generator).to(memory_format=torch.channels_last),
        "half": torch.tensor([-0.0, float("nan"), 7.0]).bfloat16(),
        "double": torch.randn(2, 3, generator=generator).double(),
        "scalar": torch.tensor(2.5),
        "nothing": torch.zeros(0, 4),
        "complex": torch.randn(4, dtype=torch.complex64, generator=generator),
    }
    with training(Group(tensors, steps=1 << 30)) as group:
        state = StateClient().fetch(group.server.address, *ASKS)
    assert state["others"] == {3: (1.5, "x")}
    for name, tensor in tensors.items():
        real, received = torch.view_as_real(tensor) if tensor.is_complex() else tensor, state["tensors"][name]
        assert (received.dtype, received.shape) == (real.dtype, real.shape)
        assert torch.equal(*(each.reshape(-1).contiguous().view(torch.uint8) for each in (received, real))), name


def test_a_state_is_of_one_round_while_the_group_trains_on() -> None:
    weights = torch.zeros(LARGE)
    with training(Group({"w": weights}, lambda: weights.add_(1.0))) as group:
        state = StateClient().fetch(group.server.address, *ASKS)
        assert {*state["tensors"]["w"][::1000].tolist()} == {state["num_averages"] - 3.0}


def stalled(address: str) -> socket.socket:
    """Ask for the state, and read only its first bytes."""
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)))
    transfer._tell(connection, name="stalled", row=ROW)
    assert connection.recv(100)
    return connection


def test_two_are_served_one_after_the_other() -> None:
    """The first one dies in the transfer."""
    with training(Group({"w": torch.ones(LARGE)})) as group:
        first, states = stalled(group.server.address), list[Any]()
        waits = threading.Thread(target=lambda: states.append(StateClient().fetch(group.server.address, *ASKS)))
        waits.start()
        waits.join(0.5)
        assert waits.is_alive()
        first.close()
        waits.join(20.0)
        assert torch.equal(states[0]["tensors"]["w"], torch.ones(LARGE))


def a_membership(addresses: Callable[[], list[str]], row: Row = ROW) -> TorchftMembership:
    """Return a newcomer's membership, with a lighthouse that knows these addresses."""
    membership = object.__new__(TorchftMembership)
    membership._name, membership._says_s = "joiner", math.inf
    membership._client, membership._row = StateClient(), row
    lighthouse = SimpleNamespace(addresses=lambda _: addresses())
    membership._lighthouse = lighthouse  # type: ignore[assignment]
    return membership


def test_a_group_that_leaves_in_a_transfer_loses_nothing_and_the_next_group_is_asked() -> None:
    with training(Group({"w": torch.ones(LARGE)})) as leaves, training(Group({"w": torch.full((9,), 2.0)})) as stays:
        blocked = stalled(leaves.server.address)
        rounds = leaves.rounds
        membership, found = a_membership(lambda: [leaves.server.address, stays.server.address]), list[Any]()
        taking = threading.Thread(target=lambda: found.append(membership._fetch(None, bool)))
        taking.start()
        time.sleep(0.5)
        assert leaves.rounds > rounds, "it trains on while the thread sends"
        leaves.is_over.set()
        began_s = time.monotonic()
        leaves.server.close(0.1)  # the end of its training
        blocked.close()
        leaves.server.close(0.1)  # Lightning does so in the teardown, too
        assert time.monotonic() - began_s < 5.0
        taking.join(20.0)
        assert found[0]["tensors"]["w"].tolist() == [2.0] * 9


def test_a_state_that_changes_is_not_read() -> None:
    group = Group({"w": torch.zeros(3)})
    group.server.offer(None)
    began_s = time.monotonic()
    threading.Timer(0.5, group.server.offer, (group.state,)).start()
    StateClient().fetch(group.server.address, *ASKS)
    assert time.monotonic() - began_s > 0.5
    group.server.close(2.0)


def test_a_group_that_ends_waits_for_a_transfer() -> None:
    group, client = Group({"v": torch.ones(LARGE), "w": torch.ones(LARGE)}), StateClient()
    states: list[Any] = []
    taking = threading.Thread(target=lambda: states.append(client.fetch(group.server.address, *ASKS)))
    taking.start()
    while not client.progress.endswith("have arrived"):
        time.sleep(0.001)
    group.server.close(20.0)
    taking.join()
    assert states[0]["tensors"]["w"].equal(torch.ones(LARGE))


def test_a_state_is_data() -> None:
    state = {"weights": torch.ones(3), "nested": [1, 2.5, "three", None, {"four": True}]}
    received = transfer.unpacked(transfer.packed(state).numpy().tobytes())
    assert torch.equal(received.pop("weights"), torch.ones(3))
    assert received == {"nested": state["nested"]}
    with pytest.raises(pickle.UnpicklingError, match="Weights only"):
        transfer.unpacked(transfer.packed({"code": test_a_state_is_data}).numpy().tobytes())


def joined(addresses: Callable[[], list[str]], row: Row = ROW) -> Any:
    """Return what a newcomer begins with."""
    return a_membership(addresses, row).state_of_others(row, bool)


def test_a_newcomer_without_the_state_tries_again_and_begins_no_second_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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

        def breaking(message: bytes) -> dict[str, Any]:
            if broken:
                broken.clear()
                raise KeyError("broken")
            return unpacked(message)

        monkeypatch.setattr(transfer, "unpacked", breaking)
        assert joined(addresses)["tensors"]["w"].equal(torch.ones(5))
    assert not attempts
    assert joined(list) is None, "nobody lives"
    monkeypatch.setattr("lightning_lowbw.elastic.torchft_membership.CONNECT_S", 1.0)
    assert joined(lambda: [dead]) is None, "its group is heard, and has been started again at another address"


def test_a_newcomer_that_is_refused_ends_and_begins_no_second_training() -> None:
    with training(Group({"w": torch.ones(5)}, steps=1 << 30)) as group:  # no round ends
        there = lambda: [group.server.address]  # noqa: E731
        other = Row(settings=settings_text({"method": "another"}), run="r", rounds=4)
        assert joined(there, other) is None, "nobody there has been in a round yet"
        group.row = group.row._replace(is_new=False)
        with pytest.raises(DisagreementError, match="other settings than group 'donor at 127"):
            joined(there, other)
        with pytest.raises(DisagreementError, match=r"in run 'old', of 4 rounds; group 'donor at .*' trains in run"):
            joined(there, ROW._replace(run="old", rounds=4))
        assert joined(there, ROW._replace(run="r", rounds=4))["num_averages"] == 3
        group.rounds = 0
        assert joined(there) is None, "nothing has been averaged"


def test_what_strangers_send_does_not_end_the_serving() -> None:
    group = Group({"w": torch.ones(3)})
    with training(group):
        host, _, port = group.server.address.rpartition(":")
        for sent in (b"", b"GET / HTTP/1.1\n", b"[]\n", b"{}\n"):
            with socket.create_connection((host, int(port)), 5.0) as stranger:
                stranger.sendall(sent)
        StateClient().fetch(group.server.address, *ASKS)
