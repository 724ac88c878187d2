"""The state of a group, sent to one that is behind, while all others go on.

A group listens at a port. When it is asked, it copies its state at the end of a step, and a thread sends the copy. Who
has received it asks again on the same connection, because rounds may have ended meanwhile, and is sent what has
changed, to the bit: it is up to date as soon as a transfer takes less time than a round.

    who is behind                         a group that trains
       |-- run, settings, name --------------->|
       |<-- WAIT, once a second ---------------|   until its step ends, or who has asked before is up to date
       |<-- STATE: plain values, tensors ------|   its thread sends, and it trains
       |-- run, settings, name --------------->|
       |<-- STATE: what has changed -----------|   of each tensor a bit for each element, and the changed ones

Who could not take part is REFUSED, and told the settings and the run of this group. Nothing that is received is
executed. Memory: one more copy of the state on both sides; there until another group asks, or who has asked has been in
a round.
"""

from __future__ import annotations

import io
import json
import logging
import math
import os
import socket
import struct
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, wait
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from lightning_lowbw.elastic.membership import Row, Share
from lightning_lowbw.kernels.tensors import as_real
from lightning_lowbw.namespaces import LOGGER

_logger = logging.getLogger(LOGGER)

CONNECT_S = 5.0  # to connect to the lighthouse, or to other members, who come at the same moment
SILENT_S = 6  # after which a connection is lost: nothing confirms what was sent, or takes it, or that it is there
STALL_S = 20.0  # for which bytes are waited for from a sender that is there, and sends nothing
POLL_S = 1.0
CHUNK_BYTES = 1 << 18  # that are sent at a time, each within STALL_S
MOST_ASKED_BYTES = 1 << 16
SHRINK = 0.7  # by which a transfer is smaller than the one before, or it does not catch up with the rounds
ASK, WAIT, STATE, REFUSED = range(4)
_FRAME = struct.Struct("!BQ")  # its kind, and the bytes that follow
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_open: WeakSet[socket.socket] = WeakSet()  # a DataLoader's workers inherit them


class Part(NamedTuple):
    """What is sent of a tensor.

    Attributes:
        name: of the tensor.
        shape: of the tensor.
        mask: which elements have changed, a bit for each; None: all are sent.
        values: of these elements; flat.
    """

    name: str
    shape: list[int]
    mask: Tensor | None
    values: Tensor


def update_(copy: dict[str, Tensor], now: Mapping[str, Tensor]) -> list[Part]:
    """Bring a copy of tensors up to date, one after the other; return what has changed, to the bit.

    In place:
        The copy: on the CPU, real, contiguous.
    """
    parts = []
    for name, tensor in now.items():
        real = as_real(tensor.detach())
        before = copy.get(name)
        if before is None:
            copy[name] = before = real.to("cpu", copy=True, memory_format=torch.contiguous_format)
            parts.append(Part(name, [*before.shape], None, before.view(-1)))
            continue
        flat, old = real.cpu().contiguous().view(-1), before.view(-1)
        has_changed = flat.view(_BITS[flat.itemsize]) != old.view(_BITS[flat.itemsize])
        if has_changed.any():
            mask = torch.from_numpy(np.packbits(has_changed.numpy()))
            parts.append(Part(name, [*before.shape], mask, flat[has_changed]))
            old.copy_(flat)
    return parts


def apply_(copy: dict[str, Tensor], part: Part) -> None:
    """Bring a tensor of a copy up to date with what `update_` has returned."""
    if part.mask is None:
        copy[part.name] = part.values.view(part.shape)
        return
    flat = copy[part.name].view(-1)
    has_changed = np.unpackbits(part.mask.numpy(), count=flat.numel())
    flat[torch.from_numpy(has_changed).bool()] = part.values


def packed(state: Mapping[str, Any]) -> Tensor:
    """Return the bytes of tensors and plain values."""
    file = io.BytesIO()
    torch.save(dict(state), file)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def unpacked(message: bytes | bytearray) -> dict[str, Any]:
    """Return what `packed` was given; nothing in it is executed."""
    state: dict[str, Any] = torch.load(io.BytesIO(message), map_location="cpu", weights_only=True)
    return state


# Frames ---------------------------------------------------------------------------------------------------------------


def watch(descriptor: int) -> None:
    """Let a connection fail soon after the other machine has vanished, which sends no end of it, or reads no more."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:  # of another kind than TCP
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        settings = {"TCP_KEEPIDLE": SILENT_S // 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": SILENT_S // 2}
        for name, value in {**settings, "TCP_USER_TIMEOUT": 1000 * SILENT_S}.items():
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _opened(connection: socket.socket) -> socket.socket:
    connection.settimeout(STALL_S)
    watch(connection.fileno())
    _open.add(connection)
    return connection


def _send(connection: socket.socket, kind: int, message: Tensor | None = None) -> None:
    """Send a frame; flat bytes."""
    connection.sendall(_FRAME.pack(kind, 0 if message is None else message.numel()))
    if message is not None:
        _send_tensor(connection, message)


def _json(value: Any) -> Tensor:
    return torch.tensor([*json.dumps(value).encode()], dtype=torch.uint8)


def _send_tensor(connection: socket.socket, tensor: Tensor) -> None:
    whole = tensor.view(torch.uint8).numpy().data
    for start in range(0, len(whole), CHUNK_BYTES):  # each in time: of `sendall` the timeout is that of all
        connection.sendall(whole[start : start + CHUNK_BYTES])


def _fill(connection: socket.socket, room: memoryview) -> None:
    while len(room):
        num = connection.recv_into(room)
        if not num:
            raise ConnectionError("the connection was closed")
        room = room[num:]


def _receive(connection: socket.socket, most_bytes: int) -> tuple[int, bytearray]:
    head = bytearray(_FRAME.size)
    _fill(connection, memoryview(head))
    kind, num = _FRAME.unpack(head)
    if num > most_bytes:
        raise ConnectionError(f"a frame of {num} bytes, and at most {most_bytes} are expected")
    message = bytearray(num)
    _fill(connection, memoryview(message))
    return kind, message


def _close_in_child() -> None:
    for connection in _open:
        connection.close()


os.register_at_fork(after_in_child=_close_in_child)


# Both sides -----------------------------------------------------------------------------------------------------------


class StateServer:
    """Sends the state of this group to those that ask, one after the other.

    Args:
        name: of this group.
        address: at which it listens.
        patience_s: for which who asks waits for the end of a step, or of a round.

    Attributes:
        address: with the port.
        row, settings: what this group has told last.
    """

    def __init__(self, name: str, address: str, patience_s: float) -> None:
        self._name, self._listener = name, _opened(socket.create_server((address, 0), backlog=64))
        self._listener.settimeout(None)
        self.address, self._patience_s = f"{address}:{self._listener.getsockname()[1]}", patience_s
        self.row, self.settings = Row(), dict[str, str]()
        self._asked: tuple[dict[str, str], dict[str, Tensor], Future[Any]] | None = None
        self._turn = threading.Lock()
        self._idle: socket.socket | None = None  # whose turn it is, and who has asked for nothing more
        self._is_closed = False
        threading.Thread(target=self._accept, name="lowbw-state", daemon=True).start()

    @property
    def is_sending(self) -> bool:
        """Whether a group has asked, and does not have the state yet."""
        return self._turn.locked() and self._idle is None

    def answer(self, share: Share) -> str:
        """Copy the state for who has asked; return its name, or "". While the state is read nobody may change it."""
        asked, self._asked = self._asked, None
        if asked is None:
            return ""
        asks, copy, future = asked
        state = dict(share())
        tensors = state.pop("tensors")
        fits = state["num_averages"] and asks["run"] in ("", state["run"])
        future.set_result((update_(copy, tensors) if fits else None, state))
        return asks["name"]

    def close(self, patience_s: float) -> None:
        """End, after a transfer that is in progress, if it ends in time."""
        if self._is_closed:
            return
        self._is_closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # which wakes the thread
        self._listener.close()
        self._end_idle()
        if not self._turn.acquire(timeout=patience_s):
            _logger.warning("Another group has not received the state of this one in %.0f s.", patience_s)

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection = _opened(self._listener.accept()[0])
            except OSError:  # closed; or there are too many files for now
                time.sleep(POLL_S / 20)
            else:
                threading.Thread(target=self._serve, args=(connection,), name="lowbw-state", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        copy, has_turn = dict[str, Tensor](), False
        try:
            with connection, ExitStack() as turn:
                while True:
                    asks = json.loads(_receive(connection, MOST_ASKED_BYTES)[1])
                    connection.settimeout(STALL_S)
                    if has_turn:
                        self._idle = None
                    if asks["settings"] != self.row.settings:
                        self._refuse(connection, self.row)
                        continue
                    if not has_turn:
                        while not self._turn.acquire(timeout=POLL_S):
                            self._end_idle()
                            self._wait(connection, math.inf)
                        turn.callback(self._end_turn)
                        has_turn = True
                    self._reply(connection, asks, copy)
                    connection.settimeout(None)  # who is up to date may wait for long
                    self._idle = connection
                    if self._is_closed:
                        return
        except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:  # lost, or none of ours
            _logger.debug("A connection for the state has ended: %s", error)

    def _end_idle(self) -> None:
        idle = self._idle
        if idle is not None:
            with suppress(OSError):
                idle.shutdown(socket.SHUT_RDWR)

    def _end_turn(self) -> None:
        self._idle = None
        self._turn.release()

    def _wait(self, connection: socket.socket, ends_s: float) -> None:
        if self._is_closed or time.monotonic() > ends_s:
            raise TimeoutError("the training has ended, or takes no step")
        _send(connection, WAIT)

    def _refuse(self, connection: socket.socket, row: Row) -> None:
        _send(connection, REFUSED, _json({"name": self._name, "row": row, "settings": self.settings}))

    def _reply(self, connection: socket.socket, asks: dict[str, str], copy: dict[str, Tensor]) -> None:
        future: Future[Any] = Future()
        self._asked, ends_s = (asks, copy, future), time.monotonic() + self._patience_s
        while not wait([future], POLL_S).done:
            self._wait(connection, ends_s)
        parts, plain = future.result()
        if parts is None:
            self._refuse(connection, self.row._replace(rounds=plain["num_averages"], run=plain["run"]))
            return
        heads = [(part.name, part.shape, part.mask, part.values[:0].clone(), part.values.numel()) for part in parts]
        _send(connection, STATE, packed({"plain": plain, "parts": heads}))
        for part in parts:
            _send_tensor(connection, part.values)
        megabytes = sum(part.values.nbytes for part in parts) / 1e6
        _logger.info(
            "%s has the state after round %d; sent were %.1f MB.", asks["name"], plain["num_averages"], megabytes
        )


class StateClient:
    """Receives the state of another group.

    Args:
        address: of its `StateServer`.
        asks: what this group is: "name", "settings" and "run", or "" where it may take part in any.

    Attributes:
        state: what has come: "tensors" by name, on the CPU, and plain values; nothing yet is empty.
        address: as given.
        progress: in words.
        refusal: "name", "row" and "settings" of the other group, if that has refused this one.

    Raises:
        OSError: nobody answers.
    """

    def __init__(self, address: str, asks: Mapping[str, str]) -> None:
        host, _, port = address.rpartition(":")
        self.address, self._asks = address, _json(asks)
        self._socket = _opened(socket.create_connection((host, int(port)), CONNECT_S))
        self._tensors: dict[str, Tensor] = {}
        self.state: dict[str, Any] = {}
        self.refusal: dict[str, Any] = {}
        self.progress = ""

    def fetch(self) -> int | None:
        """Bring `state` up to date; return the bytes that has taken, None if the other group refuses this one.

        Raises:
            OSError: the connection is lost, or nothing comes.
        """
        _send(self._socket, ASK, self._asks)
        kind = WAIT
        while kind == WAIT:
            kind, message = _receive(self._socket, 1 << 40)
        if kind == REFUSED:
            self.refusal = json.loads(message)
            return None
        head = unpacked(message)
        total = sum(number * carrier.itemsize for _, _, _, carrier, number in head["parts"])
        moved, parts = 0, []
        for name, shape, mask, carrier, number in head["parts"]:
            values = carrier.new_empty(number)
            _fill(self._socket, values.view(torch.uint8).numpy().data)
            parts.append(Part(name, shape, mask, values))
            moved += values.nbytes
            self.progress = f"{moved / 1e6:.0f} of {total / 1e6:.0f} MB of the state of {self.address} have come"
        for part in parts:  # all or none
            apply_(self._tensors, part)
        self.state = {**head["plain"], "tensors": self._tensors}
        return total

    def catch_up(self) -> bool:
        """Bring `state` up to date until no round has ended meanwhile, or it does not help; False where refused.

        Raises:
            OSError: as of `fetch`, before a whole state has come.
        """
        last_bytes = math.inf
        while True:
            rounds = self.state.get("num_averages")
            try:
                num_bytes = self.fetch()
            except OSError:
                if rounds is None:
                    raise
                self.close()
                return True  # another group was served in between: what has come is whole
            if num_bytes is None:
                return False
            if self.state["num_averages"] == rounds or (rounds is not None and num_bytes >= SHRINK * last_bytes):
                return True
            last_bytes = num_bytes

    def close(self) -> None:
        """End the connection; a `fetch` in another thread fails."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
