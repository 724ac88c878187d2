"""Process groups, made once, and the collectives of a group, with a ledger of bytes sent and seconds waited.

The formulas give the bytes that one rank sends (and receives), and the rounds: a round is a message that is sent after
another message has arrived; it costs at least the latency of the link.

Source: the ring algorithms (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009), which NCCL and gloo
use for large messages.

This package does not keep a group alive; torch does, until `destroy_process_group`. At interpreter shutdown a gloo
thread may still release a tensor. It then needs the GIL, Python ends the thread, and C++ aborts the process.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any, Literal
from weakref import WeakSet, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.futures import Future

from lightning_lowbw.kernels.tensors import device_of, part

Level = Literal["intra", "inter"]

# Thread blocks of NCCL. Each one holds a multiprocessor as long as the link takes; a slow network needs far fewer.
MAX_CTAS = 4
# Bytes, between two ranks: for larger tensors an all-reduce of gloo is as fast, in half the memory.
MOST_SWAPPED = 1 << 18
# Pairs of CUDA events that have not been read yet; older pairs are dropped rather than waited for.
MAX_PENDING = 256


@dataclass
class TrafficLedger:
    """Running totals since the start of the fit, of this rank alone; a reader takes differences.

    Attributes:
        steps: optimizer steps accounted for.
        sent_bytes: bytes sent, by the formulas below.
        received_bytes: bytes received; the same in the ring algorithms used here.
        intra_bytes: of the bytes sent, those inside a node, with a topology.
        inter_bytes: of the bytes sent, those between nodes, with a topology.
        dense_bytes: bytes plain DDP would have sent for the gradients of the same steps, and for buffers.
        dense_inter_bytes: bytes that "hierarchical" would have sent between nodes for them, with a topology.
        has_levels: whether there is a slow network between nodes, with a fast one inside.
        exposed_s: seconds in which the training waited for an exchange. On CUDA measured with events, a few steps
            late and without the dense phase, whose communication runs beside the backward pass.
    """

    steps: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    intra_bytes: int = 0
    inter_bytes: int = 0
    dense_bytes: int = 0
    dense_inter_bytes: int = 0
    exposed_s: float = 0.0
    has_levels: bool = field(default=False, repr=False, compare=False)
    _pending: deque[tuple[Any, Any]] = field(
        default_factory=lambda: deque(maxlen=MAX_PENDING), repr=False, compare=False
    )

    def record(self, nbytes: int, level: Level | None = None) -> None:
        """Add one collective that moved `nbytes` in each direction, on a level of the topology if there is one."""
        self.sent_bytes += nbytes
        self.received_bytes += nbytes
        if level == "intra":
            self.intra_bytes += nbytes
        elif level == "inter":
            self.inter_bytes += nbytes

    @property
    def of_slow_network(self) -> tuple[int, int]:
        """The bytes sent on the slow network, and the bytes that a dense exchange would have sent on it."""
        return (self.inter_bytes, self.dense_inter_bytes) if self.has_levels else (self.sent_bytes, self.dense_bytes)

    def since(self, earlier: TrafficLedger) -> TrafficLedger:
        """Return the traffic after an earlier copy of this ledger."""
        names = [total.name for total in fields(self) if total.compare]
        totals = {name: getattr(self, name) - getattr(earlier, name) for name in names}
        return TrafficLedger(**totals, has_levels=self.has_levels)

    @contextmanager
    def waiting(self, device: torch.device) -> Iterator[None]:
        """Add the time of a blocking collective on tensors of `device`. Does not synchronise the host with a GPU."""
        start, started = device_of(device).timing_event(), time.perf_counter()
        with part("wait"):
            yield
        if start is None:
            self.exposed_s += time.perf_counter() - started
        else:
            self._pending.append((start, device_of(device).timing_event()))

    def settle(self) -> None:
        """Add the CUDA waits that have ended by now to `exposed_s`."""
        while self._pending and self._pending[0][1].query():
            start, end = self._pending.popleft()
            self.exposed_s += start.elapsed_time(end) / 1e3


def all_reduce_bytes(nbytes: int, num_ranks: int) -> int:
    """Return the bytes a rank sends in a ring all-reduce of a message of `nbytes`: 2 (W - 1) / W * nbytes."""
    return 2 * (num_ranks - 1) * nbytes // num_ranks


def all_gather_bytes(nbytes: int, num_ranks: int) -> int:
    """Return the bytes a rank sends in a ring all-gather of `nbytes` from each rank: (W - 1) * nbytes."""
    return (num_ranks - 1) * nbytes


def reduce_scatter_bytes(nbytes: int, num_ranks: int) -> int:
    """Return the bytes a rank sends to reduce a message of `nbytes` in parts, one per rank: (W - 1) / W * nbytes.

    As many as it sends to gather the parts.
    """
    return (num_ranks - 1) * nbytes // num_ranks


def sent_bytes(messages: Iterable[tuple[str, int]], num_ranks: int) -> int:
    """Return the bytes a rank sends between participants, for `payloads.payload.Message`s."""
    formulas = {"all_reduce": all_reduce_bytes, "all_gather": all_gather_bytes, "all_to_all": all_gather_bytes}
    return sum(formulas[kind](nbytes, num_ranks) for kind, nbytes, *_ in messages if kind in formulas)


def all_reduce_rounds(num_ranks: int) -> int:
    """Return how many messages follow one another in a ring all-reduce: 2 (W - 1)."""
    return 2 * (num_ranks - 1)


def all_gather_rounds(num_ranks: int, *, is_ring: bool = True) -> int:
    """Return how many messages follow one another in an all-gather: W - 1 in a ring, 1 where all go at once (gloo)."""
    return num_ranks - 1 if is_ring else int(num_ranks > 1)


class WeakGroup:
    """Returns a group, as long as torch has it, and does not keep it alive.

    Raises:
        RuntimeError: when it is called; the group has been destroyed.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._is_weak = isinstance(group, dist.ProcessGroup)  # else the world, or a group without this rank
        self._group: Any = ref(group) if self._is_weak else group

    def __call__(self) -> dist.ProcessGroup | None:
        """Return the group."""
        group: dist.ProcessGroup | None = self._group() if self._is_weak else self._group
        if group is None and self._is_weak:
            raise RuntimeError("The process group has been destroyed: attach a new worker, or build a new Trainer.")
        return group


_groups: dict[tuple[ref[dist.ProcessGroup], tuple[object, ...]], WeakGroup] = {}  # by world and purpose


def group_of(
    ranks: tuple[int, ...], purpose: str, timeout: timedelta | None = None, *, is_hidden: bool = False
) -> dist.ProcessGroup | None:
    """Return the process group of some ranks, made at the first call.

    Collective: all ranks of the world, those outside of the group as well, in the same order of calls.

    Args:
        ranks: ranks of the world; a group has them in ascending order.
        purpose: concurrent work needs its own groups, because the ranks may begin it in different orders.
        timeout: the time after which a collective of the group fails; None is the world's timeout.
        is_hidden: whether the GPU computes meanwhile, so that NCCL must leave multiprocessors free.
    """
    world = dist.group.WORLD
    assert world is not None
    for stale in [key for key in _groups if key[0]() is not world]:
        del _groups[stale]  # a world that was made anew has groups of its own
    key = ref(world), (ranks, purpose, timeout)
    if key not in _groups:
        limit = _timeout_of_world() if timeout is None else timeout
        with _not_split_from(world):
            group = dist.new_group(list(ranks), timeout=limit, pg_options=_few_ctas(limit) if is_hidden else None)
        _groups[key] = WeakGroup(group)
    return _groups[key]()


@contextmanager
def _not_split_from(world: dist.ProcessGroup) -> Iterator[None]:
    """Let `new_group` make a new gloo group, also where the world is bound to a GPU, as Lightning's is.

    torch splits new groups off a bound world. Gloo claims to support that, but a rank outside of the group then raises
    an AttributeError (torch 2.13).
    """
    device = world.bound_device_id
    if device is None or dist.get_backend(world) != "gloo":
        yield
        return
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = device


def _few_ctas(timeout: timedelta | None) -> Any:
    """Return NCCL's options with a limit of `MAX_CTAS`; None with another backend, or if NCCL has no such limit."""
    nccl: Any = getattr(dist, "ProcessGroupNCCL", None)
    options: Any = None if nccl is None or dist.get_backend() != "nccl" else nccl.Options()
    if not hasattr(getattr(options, "config", None), "max_ctas"):
        return None
    options.config.max_ctas = MAX_CTAS
    if timeout is not None:
        options._timeout = timeout  # else torch warns that they differ
    return options


def _timeout_of_world() -> timedelta | None:
    """Return the timeout given to `init_process_group`; None, the backend's default, if it is not known."""
    world: Any = dist.group.WORLD
    for device in world._device_types:
        timeout = getattr(getattr(world._get_backend(device), "options", None), "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    return None


def is_gloo(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Return whether a group's collectives on tensors of a device are gloo's, also if it has several backends."""
    return device.type == "cpu" or dist.get_backend(group) == "gloo"


def on_wire(tensor: Tensor, group: dist.ProcessGroup | None, *, is_sum: bool) -> Tensor:
    """Return the tensor for a collective of a group: a copy on the host if the backend does not accept it.

    Args:
        is_sum: whether the tensor is reduced or broadcast; else it is gathered, and gloo gathers only CPU tensors.
    """
    is_taken = not is_gloo(group, tensor.device) or (is_sum and tensor.device.type in ("cpu", "cuda"))
    return tensor if is_taken else tensor.cpu()


_abandoned: list[list[Any]] = []


class Works:
    """Works of gloo that are waited for together.

    If nothing has waited for them, because a step has failed, they are kept: a message for a buffer that has been freed
    blocks a connection of gloo, and no later message on it would arrive.
    """

    def __init__(self, works: Iterable[Any]) -> None:
        self._works = list(works)

    def wait(self) -> None:
        while self._works:
            self._works[0].wait()
            del self._works[0]

    def __del__(self) -> None:
        if self._works:
            _abandoned.append(self._works)


@dataclass(frozen=True)
class TensorWork:
    """Work on a tensor that has been begun."""

    tensor: Tensor
    work: Any = None  # a work of torch.distributed, or a future; None if there was nothing to do
    staged: Tensor | None = None  # where messages arrive, if not in the tensor
    sums: bool = False  # whether `staged` has several messages, to be summed

    def wait(self) -> Tensor:
        """Wait for it (on CUDA the current stream does), and return the tensor."""
        if self.work is not None:
            self.work.wait()
        return self._filled()

    def get_future(self) -> Future[Tensor]:
        """Return the future of the tensor, as a communication hook of DDP must.

        The future carries its device: gloo's own futures do not, and DDP would not wait for them on CUDA.
        """
        future = device_of(self.tensor.device).new_future()

        def hand_over(reduced: Future[list[Tensor]]) -> None:
            try:
                reduced.value()  # raises what the collective has raised
                future.set_result(self._filled())
            except Exception as error:  # noqa: BLE001 - raised again where the future is waited for
                future.set_exception(error)  # type: ignore[arg-type]  # torch's annotation is wrong

        if self.work is None:
            future.set_result(self.tensor)
        elif isinstance(self.work, Future):
            return self.work
        else:
            self.work.get_future().add_done_callback(hand_over)
        return future

    def _filled(self) -> Tensor:
        if self.sums and self.staged is not None:
            torch.sum(self.staged, 0, out=self.tensor)
        elif self.staged is not None:
            self.tensor.view(-1).copy_(self.staged)
        return self.tensor


def begin_all_reduce_(
    tensor: Tensor,
    group: dist.ProcessGroup | None = None,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    dtype: torch.dtype | None = None,
) -> TensorWork:
    """Begin to reduce a tensor over the ranks of a group, in place; no ledger counts it.

    Collective: all ranks of the group, in the same order of calls.

    Args:
        dtype: the dtype in which a wider tensor is sent; None is the tensor's own.
    """
    # float16 is sent unchanged: rounded to bfloat16, 65504 becomes 65536, which is an infinity in float16.
    is_wide = dtype is not None and dtype.itemsize < tensor.itemsize
    sent = on_wire(tensor.to(dtype) if is_wide else tensor, group, is_sum=True)
    work = dist.all_reduce(sent, op=op, group=group, async_op=True)
    return TensorWork(tensor, work, None if sent is tensor else sent)


def all_reduce_(
    tensor: Tensor, group: dist.ProcessGroup | None = None, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> None:
    """Reduce a tensor over the ranks of a group, in place; no ledger counts it.

    Collective: all ranks of the group, blocking (on CUDA, for the stream).
    """
    begin_all_reduce_(tensor, group, op).wait()


def broadcast_(tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Overwrite a tensor with the tensor of the group's first rank; no ledger counts it.

    Collective: all ranks of the group, blocking (on CUDA, for the stream).
    """
    sent = on_wire(tensor, group, is_sum=True)
    dist.broadcast(sent, group=group, group_src=0)
    if sent is not tensor:
        tensor.copy_(sent)


class Collectives:
    """A process group with a ledger. One rank alone sends nothing, and never waits.

    Without torch.distributed there is one rank.

    Args:
        group: the process group; None is the world.
        ledger: counts the traffic.
        level: the level of the network between these ranks, if they are a part of a topology.
        is_alone: ignore the group: this rank alone, and all operations do nothing.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        ledger: TrafficLedger | None = None,
        level: Level | None = None,
        *,
        is_alone: bool = False,
    ) -> None:
        self._group = WeakGroup(group)
        self.ledger = TrafficLedger() if ledger is None else ledger
        self.level, self._tags = level, itertools.count(1)
        # Cached: torch looks these up in many dictionaries, and a step asks a dozen times.
        is_one = is_alone or not dist.is_initialized()
        self.num_ranks = 1 if is_one else dist.get_world_size(group)
        self.rank = 0 if is_one else dist.get_rank(group)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group, None for the world, as long as there is one."""
        return self._group()

    @property
    def weight(self) -> float:
        """The weight of this rank's tensors in a mean."""
        return 1.0 / self.num_ranks

    def begin_all_reduce_(self, tensor: Tensor, *, dtype: torch.dtype | None = None) -> TensorWork:
        """Begin to sum a flat tensor over the ranks, in place; return the work.

        Collective: all ranks, in the same order of calls.

        Args:
            dtype: the dtype in which a wider tensor is sent; None is the tensor's own.
        """
        if self.num_ranks == 1:
            return TensorWork(tensor)
        work = begin_all_reduce_(tensor, self.group, dtype=dtype)
        sent = tensor if work.staged is None else work.staged
        self._record(all_reduce_bytes(sent.nbytes, self.num_ranks))
        return work

    def begin_sum_(self, tensor: Tensor, *, dtype: torch.dtype | None = None) -> TensorWork:
        """Begin the sum of `begin_all_reduce_` for a caller that needs no future of DDP.

        An all-reduce of gloo waits for two round trips between two ranks. Small tensors are swapped, and summed here:
        one round trip, the same number of bytes, and the same bits.
        """
        is_small = self.num_ranks == 2 and tensor.nbytes <= MOST_SWAPPED
        if dtype is not None or not is_small or tensor.device.type != "cpu":
            return self.begin_all_reduce_(tensor, dtype=dtype)
        gathered = self.begin_all_gather(tensor)
        return TensorWork(tensor, gathered, gathered.tensor, sums=True)

    def all_reduce_(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Reduce a flat tensor over the ranks, in place; by default the sum.

        Collective: all ranks, blocking (on CUDA, for the stream).
        """
        if self.num_ranks == 1:
            return
        with self.ledger.waiting(tensor.device):
            all_reduce_(tensor, self.group, op)
        self._record(all_reduce_bytes(tensor.nbytes, self.num_ranks))

    def broadcast_(self, tensor: Tensor) -> None:
        """Overwrite a tensor with the tensor of the group's first rank.

        Collective: all ranks, blocking (on CUDA, for the stream).
        """
        if self.num_ranks == 1:
            return
        with self.ledger.waiting(tensor.device):
            broadcast_(tensor, self.group)
        self._record(tensor.nbytes)

    def all_gather(self, message: Tensor) -> Tensor:
        """Return the messages of all ranks, in rank order: shape (ranks, elements of a message).

        Collective: all ranks with messages of one size, blocking (on CUDA, for the stream).

        Args:
            message: see `begin_all_gather`.
        """
        with self.ledger.waiting(message.device):
            return self.begin_all_gather(message).wait()

    def begin_all_gather(self, message: Tensor, out: Tensor | None = None) -> TensorWork:
        """Begin `all_gather`.

        Collective: all ranks, in the same order of calls.

        Wire:
            (W - 1) messages.

        Args:
            message: 1-d, any dtype (it is sent as bytes); do not write to it before the wait.
            out: the result: contiguous, any shape with W times as many elements; allocated here if left out.
        """
        num_ranks = self.num_ranks
        out = message.new_empty((num_ranks, message.numel())) if out is None else out
        if num_ranks == 1:
            return TensorWork(out, staged=message)
        self._record(all_gather_bytes(message.nbytes, num_ranks))
        sent = self._staged(message)
        received = None if sent.device == out.device else sent.new_empty(out.numel())
        target = out.view(-1) if received is None else received
        if is_gloo(self.group, message.device):
            rows = list(target.view(num_ranks, -1))
            return TensorWork(out, self._begin_swap([sent] * num_ranks, rows), received)
        # torch up to 2.12 has only the second name, and torch 2.13 warns about it.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        work = gather(target.view(torch.uint8), sent.view(torch.uint8), group=self.group, async_op=True)
        return TensorWork(out, work, received)

    def begin_all_to_all(self, message: Tensor) -> TensorWork:
        """Send the r-th of equal parts of a message to rank r; the work returns the parts received, in rank order.

        Collective: all ranks with messages of one size, in the same order of calls; there are several ranks.

        Wire:
            (W - 1) parts.

        Args:
            message: 1-d; its length is a multiple of the number of ranks. Do not write to it before the wait.
        """
        self._record(reduce_scatter_bytes(message.nbytes, self.num_ranks))
        return self._begin_exchange(message)

    def reduce_scatter(self, vector: Tensor) -> Tensor:
        """Return this rank's part of the sum over the ranks: ceil(numel / W) elements, the last filled with zeros.

        One rank alone gets the vector itself, no copy.

        Collective: all ranks, blocking (on CUDA, for the stream); not in the ledger's waiting time.

        Wire:
            (W - 1) parts.
        """
        num_ranks = self.num_ranks
        if num_ranks == 1:
            return vector
        missing = -vector.numel() % num_ranks
        padded = torch.nn.functional.pad(vector, (0, missing)) if missing else vector  # a pad of nothing is a copy
        self._record(reduce_scatter_bytes(padded.nbytes, num_ranks))
        if is_gloo(self.group, vector.device):  # whose reduce-scatter is an all-reduce, or missing
            return self._begin_exchange(padded).wait().view(num_ranks, -1).sum(0)
        part = padded.new_empty(padded.numel() // num_ranks)
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        scatter(part, padded, group=self.group)
        return part

    def gather_parts(self, part: Tensor, numel: int) -> Tensor:
        """Return the parts of all ranks, concatenated, without the padding after `numel` elements.

        One rank alone gets its part itself, no copy.

        Collective: all ranks with parts of one size, blocking (on CUDA, for the stream); not in the ledger's waiting
        time.

        Wire:
            (W - 1) parts.
        """
        return part[:numel] if self.num_ranks == 1 else self.begin_all_gather(part).wait().view(-1)[:numel]

    def _begin_exchange(self, message: Tensor) -> TensorWork:
        num_ranks, out, staged = self.num_ranks, torch.empty_like(message), self._staged(message)
        received = out if staged.device == out.device else torch.empty_like(staged)
        if is_gloo(self.group, message.device):
            work: Any = self._begin_swap(list(staged.view(num_ranks, -1)), list(received.view(num_ranks, -1)))
        else:
            work = dist.all_to_all_single(received, staged, group=self.group, async_op=True)
        return TensorWork(out, work, None if received is out else received)

    def _begin_swap(self, outgoing: Sequence[Tensor], received: Sequence[Tensor]) -> Works:
        """Begin to send each rank a tensor, and to receive one from each, both ways at once: one round trip.

        gloo's own all-gather is a ring, with a round trip for each other rank. It often sends in one direction after
        the other, as its all-to-all does: the two directions share a connection, and the announcement that a rank is
        ready to receive waits behind the message that the rank is sending. So all receives are posted before the sends.
        """
        this_rank, num_ranks = self.rank, self.num_ranks
        received[this_rank].copy_(outgoing[this_rank])
        tag = next(self._tags)  # as in torch's collectives: an abandoned message is not mistaken for a later one
        # Each rank begins with another receiver.
        others = [(this_rank + distance) % num_ranks for distance in range(1, num_ranks)]
        # All receives are posted before any send: two ranks that send first would wait for each other.
        options: dict[str, Any] = {"group": self.group, "tag": tag}
        works = [dist.irecv(received[rank].view(torch.uint8), group_src=rank, **options) for rank in others]
        works += [dist.isend(outgoing[rank].view(torch.uint8), group_dst=rank, **options) for rank in others]
        return Works(works)

    def _staged(self, tensor: Tensor) -> Tensor:
        if tensor.stride(0) != 1:  # `contiguous` does not change a single element, which then has no view as bytes
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        return on_wire(tensor, self.group, is_sum=False)

    def _record(self, nbytes: int) -> None:
        self.ledger.record(nbytes, self.level)


def broadcast_flat_(tensors: Iterable[Tensor], broadcast_: Callable[[Tensor], object]) -> None:
    """Overwrite many small tensors, in one message.

    Collective: as `broadcast_`; none if there are no tensors.

    Args:
        tensors: of any dtype and strides; all on one device.
        broadcast_: overwrites flat bytes with the bytes of the source.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    if not by_dtype:
        return
    # Wide dtypes first: then each dtype begins at a multiple of its own size.
    groups = sorted(by_dtype.values(), key=lambda alike: -alike[0].itemsize)
    rows = [_flatten_dense_tensors(alike).view(torch.uint8) for alike in groups]
    message = torch.cat(rows)
    broadcast_(message)  # no backend sends int16, or unsigned integers that are wider than a byte
    for alike, row in zip(groups, message.split([row.numel() for row in rows]), strict=True):
        torch._foreach_copy_(alike, _unflatten_dense_tensors(row.view(alike[0].dtype), alike))


# In the background ----------------------------------------------------------------------------------------------------

_threads: dict[str, tuple[ThreadPoolExecutor, WeakSet[SideQueue]]] = {}  # by purpose, with the queues that use it


class SideQueue:
    """Runs collectives one after another in the background: on a thread with gloo, on a stream with NCCL.

    They run in the order of the calls, which is the same on all ranks. They start when earlier work on the caller's
    stream has ended; a wait on another stream waits for their end there (tests/gpu/test_streams.py).

    Args:
        purpose: queues of one purpose share a thread, and a stream of a device, because they share process groups,
            whose collectives must come in one order; queues of different purposes do not wait for each other.
    """

    def __init__(self, purpose: str) -> None:
        self.purpose = purpose

    def begin(
        self,
        collectives: Callable[[Tensor], Tensor],
        tensors: tuple[Tensor, ...],
        after: Future[Tensor] | None = None,
        *,
        in_thread: bool,
    ) -> Future[Tensor]:
        """Begin to run collectives; return the future of their result.

        Collective: all ranks, in the same order of calls.

        Args:
            collectives: a function that blocks; it gets the first of `tensors`, or the result of `after`.
            tensors: all tensors of the caller's stream that the collectives use; with `in_thread` the thread waits
                until that stream has filled them.
            after: the future of another queue, to wait for first.
            in_thread: for gloo, whose collectives block the host; else they are queued on a stream from here.
        """
        device = device_of(tensors[0].device)
        future, enter = device.new_future(), device.fork(self.purpose)

        def run() -> None:
            try:
                with torch.no_grad(), enter(tensors, in_thread):
                    given = tensors[0]
                    if after is not None:
                        given = after.wait()
                        device_of(given.device).keep(given)  # it was made on another side stream
                    future.set_result(collectives(given))  # here: it records an event on the side stream
            except Exception as error:  # noqa: BLE001 - raised again where the future is waited for
                future.set_exception(error)  # type: ignore[arg-type]  # torch's annotation is wrong

        if in_thread:
            if self.purpose not in _threads:
                _threads[self.purpose] = ThreadPoolExecutor(1, f"lightning_lowbw {self.purpose}"), WeakSet()
            thread, users = _threads[self.purpose]
            users.add(self)
            thread.submit(run)
        else:
            run()
        return future

    def close(self) -> None:
        """End the thread, unless another queue uses it, after the work that has been begun."""
        thread, users = _threads.get(self.purpose, (None, WeakSet()))
        users.discard(self)
        if thread is not None and not users:
            thread.shutdown(wait=False)
            del _threads[self.purpose]
