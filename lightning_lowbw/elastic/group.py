"""The processes of one group, and the orders of its leader.

A group is one Lightning run: one process, or several that train together, on one host or on several. Only its first
process, the leader, meets other groups. It gives orders, which all processes carry out: they bring their weights to the
leader, take the new weights, set them. An order is a name with plain values, and each process answers with a plain
value; so all processes take every decision of the leader at the same step, and raise its errors.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from lightning_lowbw.comm.collectives import Collectives, TrafficLedger, all_reduce_bytes
from lightning_lowbw.comm.peers import Peers
from lightning_lowbw.elastic.membership import Membership

BEAT_S, SILENT_S = 0.5, 5.0  # between two beats of a process; without any for so long it is taken to be lost
Places = Sequence[slice] | None  # the part of a flat tensor that each process has; None: each has the whole

END, RAISE = "end", "raise"


class LostProcessError(Exception):  # no RuntimeError, after which a leader would try again to meet the other groups
    """A process of this group has ended, or does not answer, so this process ends, too."""


class Orders:
    """The orders of the leader: over a gloo group of their own, beside whatever the training does.

    Collective: all processes of the group, as all methods, which block.

    Args:
        timeout: the time after which a process that hears nothing raises; the leader speaks once a second while it
            waits. None: the default of gloo.
    """

    def __init__(self, timeout: timedelta | None) -> None:
        self._size = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if self._size > 1 else 0
        self._group = dist.new_group(backend="gloo", timeout=timeout) if self._size > 1 else None
        self._carry_out: Callable[..., Any] = lambda *_: None

    def lead(self, carry_out: Callable[..., Any], section: Callable[[], Any], told: Callable[[], Any] = dict) -> Any:
        """Run a section on the leader, while the other processes carry out its orders.

        Args:
            carry_out: carries out an order on this process: takes its name and values, and returns the answer.
            section: calls `order`, any number of times.
            told: returns a plain value on the leader, after the section.

        Returns:
            The value of `told`.

        Raises:
            Exception: on all processes; the error of the section, or of an order on any process.
            LostProcessError: a process has ended, or has not answered in time; as from all methods.
        """
        self._carry_out = carry_out
        while self.rank:
            name, values = self.tell(None)
            if name == RAISE:
                raise values[0]
            if name == END:
                return values[0]
            self._answer(name, values)
        try:
            section()
        except LostProcessError:
            raise  # at once: it would take another timeout to tell a process that does not answer
        except Exception as error:
            with suppress(LostProcessError):
                self.tell((RAISE, (_portable(error),)))
            raise
        value = told()
        self.tell((END, (value,)))
        return value

    def order(self, name: str, *values: Any) -> list[Any]:
        """Let all processes carry out an order; return their answers. Called in a section."""
        self.tell((name, values))
        answers = self._answer(name, values)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def tell(self, value: Any) -> Any:
        """Return a value of the leader; outside of a section it may be any plain value."""
        message = [value]
        if self._group is not None:
            with _finding_lost_processes():
                dist.broadcast_object_list(message, 0, group=self._group, device=torch.device("cpu"))
        return message[0]

    def _answer(self, name: str, values: Sequence[Any]) -> list[Any]:
        try:
            answer = self._carry_out(name, *values)
        except LostProcessError:
            raise
        except Exception as error:  # noqa: BLE001 - the leader raises it, on all processes
            answer = _portable(error)
        answers = [answer] * self._size
        if self._group is not None:
            with _finding_lost_processes():
                dist.all_gather_object(answers, answer, group=self._group)
        return answers

    # Tensors of the host --------------------------------------------------------------------------------------------

    def bring(self, tensor: Tensor, places: Places) -> None:
        """Bring the parts of a tensor to the leader, which has its own part already; nothing if all have the whole.

        Args:
            tensor: the whole tensor on the leader, else the part; without gaps.
            places: the part of each process, in the flat tensor.
        """
        for rank, part in self._parts(tensor, places):
            dist.recv(part, rank, group=self._group) if not self.rank else dist.send(part, 0, group=self._group)

    def hand_out(self, tensor: Tensor, places: Places) -> None:
        """Give each process its part of a tensor of the leader, or the whole tensor; see `bring`."""
        if places is None and self._group is not None:
            dense = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
            dist.broadcast(dense.view(torch.uint8), 0, group=self._group)
        for rank, part in self._parts(tensor, places):
            dist.send(part, rank, group=self._group) if not self.rank else dist.recv(part, 0, group=self._group)

    def _parts(self, tensor: Tensor, places: Places) -> Iterator[tuple[int, Tensor]]:
        """Yield the parts to send or to receive, as bytes, each with its process."""
        if places is None:
            return
        for rank in [self.rank] if self.rank else range(1, self._size):
            part = tensor.view(-1) if self.rank else tensor.view(-1)[places[rank]]
            if part.numel():
                yield rank, part.view(torch.uint8)

    def close(self) -> None:
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
            self._group = None


@contextmanager
def _finding_lost_processes() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise LostProcessError(
            "A process of this group has ended, or has not answered in time, so this process ends, too. The output of "
            "the other processes says why. Start the group again."
        ) from error


def _portable(error: Exception) -> Exception:
    """Return an error that another process can read: a RuntimeError in the place of an error that cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - whatever a class of the user raises
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


class Group(Peers):
    """The processes of one group, as one process sees them.

    Collective: all processes of the group.

    Args:
        ledger: counts the traffic.
        is_sharded: whether each process has a shard of the model, and FSDP reduces the gradients; else DDP does.
        timeout: see `Orders`.

    Attributes:
        membership: finds the other groups: set it on the leader. None on the other processes.
        orders: given in steps; `hidden`: given in a thread beside steps.
        num_participants: groups in the last round.
    """

    may_grow = True

    def __init__(
        self,
        ledger: TrafficLedger | None = None,
        *,
        is_sharded: bool = False,
        timeout: timedelta | None = None,
    ) -> None:
        super().__init__(None, ledger)
        self.membership: Membership | None = None
        self.num_participants = 1
        self.are_shards, self.is_two_level = is_sharded, self.num_ranks > 1 and not is_sharded
        if self.is_two_level:
            self.node, self.ledger.has_levels = Collectives(None, self.ledger, "intra"), True
        self.orders, self.hidden = Orders(timeout), Orders(timeout)
        self._is_closed = threading.Event()
        self._beats = [(0, time.monotonic())] * self.num_ranks  # of each process: how many, and when the last one came
        if self.num_ranks > 1 and self.rank:
            threading.Thread(target=self._beat, name="lowbw-beats", daemon=True).start()

    def count_dense(self, nbytes: int) -> None:
        self.ledger.dense_bytes += all_reduce_bytes(nbytes, self.num_participants)
        self.ledger.dense_inter_bytes += all_reduce_bytes(nbytes, self.num_participants)

    def is_whole(self) -> bool:
        """Return whether all processes live: torchrun does not end a process because another host is silent."""
        with suppress(RuntimeError, ValueError):  # the store of the group is lost, or the user has ended the world
            for rank in range(1, self.num_ranks):
                number = distributed_c10d._get_default_store().add(f"lowbw/{rank}", 0)
                if number != self._beats[rank][0]:
                    self._beats[rank] = number, time.monotonic()
        return all(time.monotonic() - at_s < SILENT_S for _, at_s in self._beats[1:])

    def _beat(self) -> None:
        with suppress(RuntimeError, ValueError):  # the store is lost, as when the group ends
            while not self._is_closed.wait(BEAT_S):
                distributed_c10d._get_default_store().add(f"lowbw/{self.rank}", 1)

    def close(self) -> None:
        self._is_closed.set()
        if self.membership is not None:
            self.membership.close()
        self.orders.close()
        self.hidden.close()
