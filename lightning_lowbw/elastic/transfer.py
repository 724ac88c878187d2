"""The state of a group, sent to one that is behind, while all others go on.

A group offers the state after each round, and a thread sends a copy of it to who asks. Who has received it asks again,
because rounds may have ended meanwhile, and is sent what has changed, to the bit: it is up to date as soon as a
transfer takes less time than a round. Each time is a connection of its own:

    who is behind                         a group that trains
       |-- run, settings, what it has ------->|
       |<-- one line: busy, or refused -------|   another one is served: it asks again in a second
       |<-- one line, plain values, tensors --|   a thread copies the state, and sends the copy
       |-- run, settings, what it has ------->|
       |<-- one line, what has changed -------|   of each tensor a bit for each element, and the changed ones

Who could not take part is refused, and told the settings and the run of this group. Nothing that is received is
executed. Memory: one more copy of the state on both sides; there until another group asks, or for a minute.
"""

from __future__ import annotations

import io
import json
import logging
import math
import socket
import socketserver
import threading
import time
import uuid
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_lowbw.elastic.membership import Row, Share
from lightning_lowbw.kernels.tensors import as_real
from lightning_lowbw.namespaces import LOGGER

_logger = logging.getLogger(LOGGER)

CONNECT_S = 5.0  # to connect to the lighthouse, or to other members, who come at the same moment
STALL_S = 20.0  # after which a connection on which nothing moves is lost
COPY_S = 300.0  # for which an answer is waited for, before which a large state is copied, or compared
POLL_S = 1.0
KEEP_S = 60.0  # for which a copy is kept, of which only changes need to be sent
CHUNK_BYTES = 1 << 18  # that are sent at a time, each within STALL_S
MOST_ASKED_BYTES, MOST_TOLD_BYTES = 1 << 16, 1 << 26  # of a line
SHRINK = 0.7  # by which a transfer is smaller than the one before, or it does not catch up with the rounds
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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


class RefusedError(Exception):
    """A group lets another one take no part; its name, row and settings are the arguments."""


def _tell(connection: socket.socket, **values: Any) -> None:
    connection.sendall(json.dumps(values).encode() + b"\n")


def _send(connection: socket.socket, tensor: Tensor) -> None:
    whole = tensor.view(torch.uint8).numpy().data
    for start in range(0, len(whole), CHUNK_BYTES):  # each in time: of `sendall` the timeout is that of all
        connection.sendall(whole[start : start + CHUNK_BYTES])


def _fill(file: Any, tensor: Tensor) -> None:
    room = tensor.view(torch.uint8).numpy().data
    if file.readinto(room) != len(room):
        raise ConnectionError("the connection was closed")


# Both sides -----------------------------------------------------------------------------------------------------------


class _Handler(socketserver.StreamRequestHandler):
    timeout = STALL_S

    def handle(self) -> None:
        server: Any = self.server
        server.reply(json.loads(self.rfile.readline(MOST_ASKED_BYTES)), self.connection)


class StateServer(socketserver.ThreadingTCPServer):
    """Sends the state of this group to those that ask, one after the other.

    Args:
        name: of this group.
        address: at which it listens.

    Attributes:
        address: with the port.
        row, settings: what this group has told last.
    """

    daemon_threads, request_queue_size = True, 64

    def __init__(self, name: str, address: str) -> None:
        super().__init__((address, 0), _Handler)
        self.address = f"{address}:{self.server_address[1]}"
        self.row, self.settings = Row(), dict[str, str]()
        self._name, self._is_closed = name, False
        self._shared: Share | None = None
        self._unchanged, self._turn = threading.Lock(), threading.Lock()  # the state; of those that are sent it
        self._copy, self._sent, self._sent_s = dict[str, Tensor](), "", math.inf  # the last one, its token, when
        threading.Thread(target=self.serve_forever, name="lowbw-state", daemon=True).start()

    def offer(self, shared: Share | None) -> None:
        """Give the state to those that ask from now on; None: it is about to change, and no longer read."""
        with self._unchanged:
            self._shared = shared
            if time.monotonic() > self._sent_s + KEEP_S:
                self._copy = {}

    def reply(self, asks: Mapping[str, str], connection: socket.socket) -> None:
        """Refuse a group that asks, let it ask again, or send it the state."""
        if asks["settings"] != self.row.settings:
            _tell(connection, refused=[self._name, self.row, self.settings])
        elif not self._turn.acquire(blocking=False):
            _tell(connection, is_busy=True)
        else:
            try:
                answer, messages = self._answer(asks)
                _tell(connection, **answer)
                for message in messages:
                    _send(connection, message)
            finally:
                self._sent_s = time.monotonic()
                self._turn.release()

    def _answer(self, asks: Mapping[str, str]) -> tuple[dict[str, Any], list[Tensor]]:
        """Return what a group is told, and what is sent after it: what has changed since it was sent the state."""
        with self._unchanged:
            if self._shared is None:
                return {"is_busy": True}, []
            plain = dict(self._shared())
            tensors, rounds, run = plain.pop("tensors"), plain["num_averages"], plain["run"]
            if not rounds or asks["run"] not in ("", run):
                return {"refused": [self._name, self.row._replace(rounds=rounds, run=run), self.settings]}, []
            if asks["has"] != self._sent:
                self._copy = {}
            parts = update_(self._copy, tensors)
            self._sent, self._sent_s = uuid.uuid4().hex, math.inf
        values = [part.values for part in parts]
        heads = [(part.name, part.shape, part.mask, part.values[:0].clone(), part.values.numel()) for part in parts]
        head = packed({"plain": plain, "parts": heads})
        megabytes = sum(each.nbytes for each in values) / 1e6
        _logger.info("%s is sent the state after round %d: %.1f MB.", asks["name"], rounds, megabytes)
        return {"has": self._sent, "num_bytes": head.numel()}, [head, *values]

    def handle_error(self, *_: Any) -> None:
        _logger.debug("A connection for the state has ended.", exc_info=True)  # lost, or none of ours

    def close(self, patience_s: float) -> None:
        """End, after a transfer that is in progress, if it ends in time."""
        if self._is_closed:
            return
        self._is_closed = True
        self.shutdown()
        self.server_close()
        if not self._turn.acquire(timeout=patience_s):
            _logger.warning("Another group has not received the state of this one in %.0f s.", patience_s)


class StateClient:
    """Receives the states of other groups.

    Attributes:
        address: of the group that has sent the last one.
        tensors: of that, by name, on the CPU.
        progress: in words.
        reached_s: when a group was connected to.
    """

    def __init__(self) -> None:
        self.progress, self.reached_s = "", -math.inf
        self.forget()

    def forget(self) -> None:
        """Free the memory; the next state comes whole."""
        self.address, self._has, self.tensors = "", "", dict[str, Tensor]()

    def fetch(self, address: str, asks: Mapping[str, str]) -> tuple[dict[str, Any], int]:
        """Return the state of a group, with "tensors" by name, on the CPU; and the bytes that have come.

        Args:
            address: of its `StateServer`.
            asks: what this group is: "name", "settings" and "run", or "" where it may take part in any.

        Raises:
            OSError: nobody answers, the connection is lost, or nothing comes.
            ValueError: it is closed before the answer.
            RefusedError: it may not take part there.
        """
        host, _, port = address.rpartition(":")
        while True:
            with socket.create_connection((host, int(port)), CONNECT_S) as connection:
                self.reached_s, self.progress = time.monotonic(), f"asks {address} for its state"
                connection.settimeout(COPY_S)
                _tell(connection, **asks, has=self._has)
                with connection.makefile("rb") as file:
                    answer = json.loads(file.readline(MOST_TOLD_BYTES))
                    connection.settimeout(STALL_S)
                    if "has" in answer:
                        return self._receive(file, address, **answer)
                if "refused" in answer:
                    name, row, settings = answer["refused"]
                    raise RefusedError(name, Row(*row), settings)
            time.sleep(POLL_S)

    def _receive(self, file: Any, address: str, has: str, num_bytes: int) -> tuple[dict[str, Any], int]:
        message = torch.empty(num_bytes, dtype=torch.uint8)
        _fill(file, message)
        head = unpacked(message.numpy().tobytes())
        total = sum(number * carrier.itemsize for _, _, _, carrier, number in head["parts"])
        moved, parts = 0, []
        for name, shape, mask, carrier, number in head["parts"]:
            parts.append(Part(name, shape, mask, carrier.new_empty(number)))
            _fill(file, parts[-1].values)
            moved += parts[-1].values.nbytes
            self.progress = f"{moved / 1e6:.0f} of {total / 1e6:.0f} MB of the state of {address} have come"
        for part in parts:  # all or none
            apply_(self.tensors, part)
        self.address, self._has = address, has
        return {**head["plain"], "tensors": self.tensors}, total

    def catch_up(self, address: str, asks: Mapping[str, str]) -> tuple[dict[str, Any], bool]:
        """Return the state, after no round has ended meanwhile, or it does not help; and whether none has.

        Args and errors are those of `fetch`, before a whole state has come.
        """
        state, last_bytes = dict[str, Any](), math.inf
        while True:
            rounds = state.get("num_averages")
            try:
                state, num_bytes = self.fetch(address, asks)
            except (OSError, ValueError):
                if not state:
                    raise
                return state, False
            if state["num_averages"] == rounds or (rounds is not None and num_bytes >= SHRINK * last_bytes):
                return state, state["num_averages"] == rounds
            last_bytes = num_bytes
