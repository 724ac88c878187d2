"""The transfer of a group's state to a group that is behind, while the sending group trains on.

A group offers its state after each round. A thread copies the state and sends the copy to a group that asks for it.
Each transfer has a connection of its own; the next group that asks waits until the transfer has ended:

    group that is behind                 group that trains
       |-- name, row ----------------------->|
       |<-- one line: refused ---------------|   or, if the group may take part:
       |<-- one line, plain values, tensors -|   a thread copies the state and sends the copy

A group with other settings or of another run is refused; the answer holds the row of the sender.
Nothing that is received is executed. During a transfer both sides hold one more copy of the state.
"""

from __future__ import annotations

import io
import json
import logging
import socket
import socketserver
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_lowbw.elastic.membership import Row, Share
from lightning_lowbw.kernels.tensors import as_real
from lightning_lowbw.namespaces import LOGGER

_logger = logging.getLogger(LOGGER)

CONNECT_S = 5.0  # limit for a connection to the lighthouse, or to another group
STALL_S = 20.0  # a connection on which nothing moves for this long is lost
ANSWER_S = 600.0  # limit for the answer: the sending group serves other groups, and copies a large state, before
POLL_S = 1.0
CHUNK_BYTES = 1 << 18  # sent at a time, each within STALL_S
MAX_LINE_BYTES = 1 << 26


def packed(state: Mapping[str, Any]) -> Tensor:
    """Return tensors and plain values as bytes."""
    file = io.BytesIO()
    torch.save(dict(state), file)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def unpacked(message: bytes | bytearray) -> dict[str, Any]:
    """Return what `packed` was given. Nothing in the message is executed."""
    state: dict[str, Any] = torch.load(io.BytesIO(message), map_location="cpu", weights_only=True)
    return state


class RefusedError(Exception):
    """The asked group refuses the group that asks; the arguments are its own name and row."""


def _tell(connection: socket.socket, **values: Any) -> None:
    connection.sendall(json.dumps(values).encode() + b"\n")


def _bytes_of(tensor: Tensor) -> memoryview:
    whole: memoryview = tensor.view(-1).view(torch.uint8).numpy().data
    return whole


def _send(connection: socket.socket, tensor: Tensor) -> None:
    whole = _bytes_of(tensor)
    for start in range(0, len(whole), CHUNK_BYTES):  # the timeout of `sendall` is that of all its bytes
        connection.sendall(whole[start : start + CHUNK_BYTES])


# Both sides -----------------------------------------------------------------------------------------------------------


class StateServer(socketserver.TCPServer):
    """Sends the state of this group to the groups that ask for it, one after the other.

    Args:
        name: name of this group.
        address: address at which the server listens.
        told: returns the row of this group.

    Attributes:
        address: the same with the port.
    """

    request_queue_size = 64

    def __init__(self, name: str, address: str, told: Callable[[], Row]) -> None:
        super().__init__((address, 0), socketserver.BaseRequestHandler)
        self.address = f"{address}:{self.server_address[1]}"
        self._name, self._told, self._is_closed = name, told, False
        self._shared: Share | None = None
        self._changes = threading.Condition()  # held while the state is copied
        threading.Thread(target=self.serve_forever, name="lowbw-state", daemon=True).start()

    def offer(self, shared: Share | None) -> None:
        """Offer the state from now on; None: the state is about to change and may not be read."""
        with self._changes:
            self._shared = shared
            self._changes.notify_all()

    def finish_request(self, request: Any, client_address: Any) -> None:
        request.settimeout(STALL_S)
        with request.makefile("rb") as file:
            asked = json.loads(file.readline(MAX_LINE_BYTES))
        self.reply(asked["name"], Row(*asked["row"]), request)

    def reply(self, name: str, asks: Row, connection: socket.socket) -> None:
        """Refuse the group that asks, or send it the state, once it may be read."""
        copies = dict[str, Tensor]()
        with self._changes:
            self._changes.wait_for(lambda: self._is_closed or self._shared is not None)
            if self._shared is None:
                return
            plain = dict(self._shared())
            tensors = plain.pop("tensors")
            row = self._told()._replace(rounds=plain["num_averages"], run=plain["run"])
            is_refused = asks.settings != row.settings or not row.rounds or (asks.rounds and asks.run != row.run)
            if not is_refused:
                for name, tensor in tensors.items():
                    real = as_real(tensor.detach())
                    copies[name] = real.to("cpu", copy=True, memory_format=torch.contiguous_format)
        if is_refused:
            _tell(connection, refused=[self._name, row])
            return
        kinds = {name: (list(each.shape), each.new_empty(0)) for name, each in copies.items()}
        head = packed({"plain": plain, "kinds": kinds})
        megabytes = sum(each.nbytes for each in copies.values()) / 1e6
        _logger.info("Sending the state after round %d to %s: %.1f MB.", row.rounds, name, megabytes)
        _tell(connection, num_bytes=head.numel())
        for message in (head, *copies.values()):
            _send(connection, message)

    def handle_error(self, *_: Any) -> None:
        _logger.debug("A connection for the state has ended.", exc_info=True)  # lost, or opened by another program

    def close(self, patience_s: float) -> None:
        """End the server, after the transfer in progress if it ends in time."""
        with self._changes:
            self._is_closed = True
            self._changes.notify_all()
        ending = threading.Thread(target=self.shutdown, daemon=True)
        ending.start()
        ending.join(patience_s)
        if ending.is_alive():
            _logger.warning("Another group has not received the state of this group in %.0f s.", patience_s)
        self.server_close()


class StateClient:
    """Receives the states of other groups.

    Attributes:
        progress: the state of the transfer, in words.
    """

    progress = ""

    def fetch(self, address: str, name: str, row: Row) -> dict[str, Any]:
        """Return the state of a group, with "tensors" by name, on the CPU.

        Args:
            address: address of the group's `StateServer`.
            name: name of this group.
            row: row of this group.

        Raises:
            OSError: there is no answer, the connection is lost, or nothing arrives.
            ValueError: the connection is closed before the answer.
            RefusedError: the other group refuses this one.
        """
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), CONNECT_S) as connection:
            self.progress = f"asks {address} for its state"
            connection.settimeout(ANSWER_S)
            _tell(connection, name=name, row=row)
            with connection.makefile("rb") as file:
                answer = json.loads(file.readline(MAX_LINE_BYTES))
                connection.settimeout(STALL_S)
                if "refused" in answer:
                    other, there = answer["refused"]
                    raise RefusedError(other, Row(*there))
                return self._receive(file, address, answer["num_bytes"])

    def _receive(self, file: Any, address: str, num_bytes: int) -> dict[str, Any]:
        def fill(tensor: Tensor) -> Tensor:
            if file.readinto(_bytes_of(tensor)) != tensor.nbytes:
                raise ConnectionError("the connection was closed")
            return tensor

        head = unpacked(fill(torch.empty(num_bytes, dtype=torch.uint8)).numpy().tobytes())
        tensors = {name: carrier.new_empty(shape) for name, (shape, carrier) in head["kinds"].items()}
        total, num_received = sum(each.nbytes for each in tensors.values()), 0
        for tensor in tensors.values():
            num_received += fill(tensor).nbytes
            self.progress = f"{num_received / 1e6:.0f} of {total / 1e6:.0f} MB of the state of {address} have arrived"
        return {**head["plain"], "tensors": tensors}
