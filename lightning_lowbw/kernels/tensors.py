"""Tensors of any layout, number and device: their order, lists of tensors in one call each, memory, copies, streams.

The order of a parameter's elements is their order in memory. So a pass over a channels_last or transposed parameter,
its gradient and its optimizer state copies nothing. All ranks must have the parameter laid out alike; DDP compares the
strides when it starts.

Two classes differ by kind of device; `device_of` returns an instance. `Cuda` (AMD's, too) computes on streams, beside
the host. `Serial` has one queue of work, and every copy to the host waits for this queue: the CPU, whose queue is
always empty, and any other accelerator, such as Apple's and Intel's. If such an accelerator has no collectives of its
own, messages go through the host, see `comm.collectives`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache, reduce
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.futures import Future
from torch.profiler import record_function

_cuda: Any = torch.cuda  # replaced in tests
_streams: dict[tuple[torch.device, str], Any] = {}

Order = tuple[int, ...]
LARGE_BYTES = 1 << 22  # from here on numpy asks for huge pages
CPU = torch.device("cpu")
CHUNK, CHUNK_OF_CPU = 1 << 23, 1 << 16  # elements that a checksum takes at a time: few launches, or within the cache
NUM_SAMPLED = 1 << 16  # elements of a tensor from which its distance is estimated


def allocate(shape: int | tuple[int, ...], dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
    """Return a tensor of any content, contiguous.

    A large one on a CPU comes from numpy, which asks Linux for huge pages. torch.empty does not, and from 32 MiB on the
    C library maps new pages at each call: the page faults then take longer than the use of the memory.
    """
    shape = (shape,) if isinstance(shape, int) else shape
    nbytes = prod(shape) * dtype.itemsize
    if device.type != "cpu" or nbytes < LARGE_BYTES:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.empty(nbytes, dtype=np.uint8)).view(dtype).view(shape)


@lru_cache(maxsize=64)
def constant(numbers: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the result of `upload`, one tensor for the same numbers: no caller may write to it."""
    return upload(numbers, dtype, device)


def upload(numbers: Iterable[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy numbers to a device without waiting for it."""
    tensor = torch.tensor(list(numbers), dtype=dtype, device="cpu")  # whatever the default device is
    return device_of(device).upload(tensor)


def download(numbers: Tensor) -> Callable[[], list[float]]:
    """Begin to copy numbers to the host; the returned function waits for the copy, not for later launches.

    It keeps a copy of the numbers, not the memory that they are a view of: they may be read a step later.
    """
    return device_of(numbers.device).download(numbers)


def as_real(tensor: Tensor) -> Tensor:
    """View a complex tensor as real, with a last dimension of 2; return any other tensor as it is."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def order_of(tensor: Tensor) -> Order:
    """Return the dimensions, the slowest in memory first; in logical order for a tensor with gaps."""
    if tensor.is_contiguous() or has_gaps(tensor):
        return tuple(range(tensor.dim()))
    return _by_stride(tensor.shape, tensor.stride())[0]


def has_gaps(tensor: Tensor) -> bool:
    """Return whether its elements are not next to each other in memory, in any order of its dimensions."""
    return not (tensor.is_contiguous() or _by_stride(tensor.shape, tensor.stride())[1])


@lru_cache(maxsize=4096)
def _by_stride(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[Order, bool]:
    """Return the dimensions, the slowest first, and whether there are no gaps; not by views, which take longer."""
    # A dimension of one element may have any stride.
    order = tuple(sorted(range(len(shape)), key=lambda dim: (shape[dim] != 1, -strides[dim])))
    expected, is_dense = 1, True
    for dim in reversed(order):
        is_dense &= shape[dim] == 1 or strides[dim] == expected
        expected *= shape[dim]
    return order, is_dense


def flat(tensor: Tensor) -> Tensor:
    """View a tensor as one dimension, in logical (row-major) order; a copy if its memory is laid out otherwise."""
    return tensor if tensor.dim() == 1 else tensor.reshape(-1)  # of hundreds, views take as long as all else


def cut(tensor: Tensor, part: slice) -> Tensor:
    """Return a part of a tensor's elements, flat and in logical order; a view of a contiguous one, in one call."""
    if tensor.is_contiguous():
        return tensor.as_strided((part.stop - part.start,), (1,), tensor.storage_offset() + part.start)
    return flat(tensor)[part]


def in_order(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return a view of a tensor in the shape of a parameter that is contiguous where both are laid out alike."""
    return tensor if parameter.is_contiguous() else tensor.permute(order_of(parameter))


def flat_in_order(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return the elements of a tensor in a parameter's order: a view where both are laid out alike, else a copy."""
    return flat(in_order(tensor, parameter))


def laid_out(elements: Tensor, shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> Tensor:
    """View a flat tensor in a shape, with strides that leave no gaps; without them in logical order."""
    if len(shape) == 1:
        return elements
    return elements.view(shape) if strides is None else elements.as_strided(shape, strides, elements.storage_offset())


def strides_of(tensor: Tensor) -> tuple[int, ...] | None:
    """Return what `laid_out` takes to undo `flat_in_order` of a tensor by itself."""
    return None if has_gaps(tensor) else tensor.stride()


def copy_in_order_(tensor: Tensor, parameter: Tensor, values: Tensor) -> None:
    """Write values, flat and in a parameter's order, into a tensor of its shape."""
    target = in_order(tensor, parameter)
    target.copy_(values.view(target.shape))


def copy_all_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, of the same shape; any dtypes and layouts.

    One call of `torch._foreach_copy_` for each pair of dtypes: if sources of one dtype have targets of several dtypes,
    it writes all targets in the dtype of the first, on a GPU, in releases until early 2026 (pytorch issue 173383). It
    copies a whole list one by one if the strides of one pair differ: such a pair is copied by itself. Dimensions of one
    element may have any stride: such tensors are flattened.

    In place:
        `targets`.
    """
    by_dtypes: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        is_alike = target.stride() == source.stride()
        if not is_alike and target.is_contiguous() and source.is_contiguous():
            target, source, is_alike = target.view(-1), source.view(-1), True
        if not is_alike or (not target.is_contiguous() and has_gaps(target)):
            target.copy_(source)
            continue
        some_targets, some_sources = by_dtypes.setdefault((target.dtype, source.dtype), ([], []))
        some_targets.append(target)
        some_sources.append(source)
    for some_targets, some_sources in by_dtypes.values():
        torch._foreach_copy_(some_targets, some_sources)


def split_front(vector: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    """Return views of the front of a vector, one after the other, without autograd's bookkeeping of each view."""
    return vector[: sum(sizes)].unsafe_split_with_sizes(sizes) if sizes else ()


def differences(now: Sequence[Tensor], before: Sequence[Tensor]) -> list[Tensor]:
    """Return ``now - before`` of each tensor: exactly 0 where both are equal, also where both are infinite.

    Args:
        now: real, any floating dtypes and shapes.
        before: of the same dtypes and shapes.
    """
    return in_flats(lambda after, earlier: torch.where(after == earlier, 0.0, after - earlier), now, before)


def in_flats(function: Callable[..., Tensor], *lists: Sequence[Tensor]) -> list[Tensor]:
    """Return the results of an elementwise function on tensors, tensors of one dtype together: few launches.

    Args:
        function: takes a flat tensor for each list, which it may write to, and returns a flat tensor.
        lists: tensors of the same shapes; the first list has the dtypes and devices by which tensors are grouped.

    Returns:
        One result for each tensor of the first list, laid out like it: parts of one tensor for each dtype and device.
    """
    results = list(lists[0])
    kinds = [(tensor.dtype, tensor.device) for tensor in lists[0]]
    for kind in dict.fromkeys(kinds):
        members = [index for index, other in enumerate(kinds) if other == kind]
        firsts = [lists[0][index] for index in members]
        flats = [
            _joined([flat_in_order(tensors[index], first) for index, first in zip(members, firsts, strict=True)])
            for tensors in lists
        ]
        parts = function(*flats).split([first.numel() for first in firsts])
        for index, first, part in zip(members, firsts, parts, strict=True):
            results[index] = laid_out(part, first.shape, strides_of(first))
    return results


def _joined(flats: list[Tensor]) -> Tensor:
    """Concatenate flat tensors, at least one, into memory of `allocate`."""
    dtype = reduce(torch.promote_types, {flat.dtype for flat in flats})
    return torch.cat(flats, out=allocate(sum(flat.numel() for flat in flats), dtype, flats[0].device))


def relative_distance(weights: Sequence[Tensor], means: Sequence[Tensor]) -> Tensor:
    """Return ``||weights - mean|| / ||mean||`` of all tensors together; large tensors are sampled.

    Args:
        weights: real, at least one, any floating dtypes, shapes and layouts.
        means: of the same shapes.

    Returns:
        A scalar, float32.
    """
    strides = [max(1, mean.numel() // NUM_SAMPLED) for mean in means]
    samples = [flat_in_order(mean, mean)[::stride] for mean, stride in zip(means, strides, strict=True)]
    sampled, sizes = torch.cat(samples), [sample.numel() for sample in samples]
    pairs = zip(weights, means, strides, strict=True)
    apart = torch.cat([flat_in_order(weight, mean)[::stride] for weight, mean, stride in pairs])
    apart = apart.to(sampled.dtype).sub_(sampled)
    norms = torch.stack(torch._foreach_norm([*apart.split(sizes), *sampled.split(sizes)])).double().view(2, -1)
    squares = (norms**2 * upload(strides, torch.float64, norms.device)).sum(1)
    return (squares[0] / squares[1]).sqrt().float()


def norm_of(parameters: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return the 2-norm of the gradients of parameters: float32, a scalar; of a `DTensor` this rank's shard."""
    gradients: list[Any] = [each.grad for each in parameters if each.grad is not None]
    gradients = [each.to_local() if hasattr(each, "to_local") else each for each in gradients]
    gradients = [each._values() if each.is_sparse else each for each in gradients]
    norms = torch._foreach_norm(gradients) if gradients else ()
    return torch.stack([torch.zeros((), device=device), *(norm.float() for norm in norms)]).norm()


def saved(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a copy of each tensor on the CPU, by name."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def checksum(tensors: Iterable[Tensor], at_a_time: int = 0) -> Tensor | int:
    """Return a hash of the bits of some tensors in their order in memory, on their device. Cheaper than `digest`.

    An element in another place, a matrix with the other sign, or roundings that add up to nothing change the hash; a
    sum of the bits would be the same.

    Args:
        tensors: all on one kind of device, if hashes are compared.
        at_a_time: elements, for one hash on all kinds of devices; 0: a number that is fast on the device.

    Returns:
        int64, a scalar; 0 if there are no elements.
    """
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        bits = flat_in_order(*[as_real(tensor)] * 2)
        if bits.itemsize != 4:  # else each chunk is viewed as integers
            bits = bits.view({1: torch.int8, 2: torch.int16}.get(bits.itemsize, torch.int32))
        alike.setdefault((bits.device, bits.dtype), []).append(bits)
    hashes: dict[torch.device, list[Tensor]] = {}
    for (device, dtype), flats in alike.items():
        fast = CHUNK_OF_CPU if device.type == "cpu" else CHUNK
        length = min(at_a_time or fast, sum(flat.numel() for flat in flats))
        weights = _weights(length, torch.int32, device)
        together, mixed = torch.empty_like(weights), torch.empty_like(weights)  # once: small blocks would fragment
        room = together.view(dtype) if dtype.itemsize == 4 else together
        for parts in _chunks(flats, length):
            num = sum(part.numel() for part in parts)
            is_one = len(parts) == 1 and dtype.itemsize == 4
            chunk = (parts[0] if is_one else torch.cat(parts, out=room[:num])).view(torch.int32)
            # Else two signs that have changed would cancel.
            torch.bitwise_right_shift(chunk, 15, out=mixed[:num]).bitwise_xor_(chunk).mul_(weights[:num])
            hashes.setdefault(device, []).append(mixed[:num].sum(dtype=torch.int32))
    total: Tensor | int = 0
    for device, chunks in hashes.items():
        total = total + (torch.stack(chunks).long() * _few_weights(len(chunks), torch.int64, device)).sum()
    return total ^ (total >> 32)


def _chunks(flats: Iterable[Tensor], length: int) -> Iterator[list[Tensor]]:
    """Yield all elements in lists of at most `length` elements; small tensors together, for fewer launches."""
    waiting: list[Tensor] = []
    num_waiting = 0
    length = max(1, length)
    for part in (part for each in flats for part in (each.split(length) if each.numel() > length else [each])):
        if not part.numel():
            continue
        if num_waiting + part.numel() > length:
            yield waiting
            waiting, num_waiting = [], 0
        waiting.append(part)
        num_waiting += part.numel()
    if waiting:
        yield waiting


def _weights(num: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return odd numbers without a pattern, one for each place; all ranks have the same numbers."""
    numbers = torch.arange(1, num + 1, dtype=dtype, device=device)
    for factor in (0x2C1B3C6D, 0x297A2D39):  # from a well-known hash of integers
        numbers = numbers.mul_(factor)
        numbers = numbers ^ (numbers >> 15)
    return numbers | 1


_few_weights = lru_cache(maxsize=16)(_weights)  # of chunks, which are as many at each average


# Profiles ------------------------------------------------------------------------------------------------------------


def part(name: str) -> AbstractContextManager[Any]:
    """Name a part of a step in a profile: of `torch.profiler`, or of Nsight in `torch.autograd.profiler.emit_nvtx`.

    If no profiler is active it takes a microsecond; torch's takes ten, and calls the dispatcher.
    """
    return record_function(f"lowbw: {name}") if torch.autograd._profiler_enabled() else nullcontext()


# Devices -------------------------------------------------------------------------------------------------------------

# Enters a stream beside the current one. Its work begins after the work that was on the current stream at the fork.
# Arguments: the tensors that the side stream uses, and whether the host waits for these tensors, too.
Fork = Callable[[tuple[Tensor, ...], bool], AbstractContextManager[Any]]


class Serial:
    """The CPU, or an accelerator with one queue of work.

    Args:
        device: of torch.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = getattr(torch, device.type, torch.cpu)  # such as torch.mps and torch.xpu

    def upload(self, tensor: Tensor) -> Tensor:
        """Copy a tensor of the host to the device, without waiting for the device."""
        return tensor.to(self.device)

    def download(self, numbers: Tensor) -> Callable[[], list[float]]:
        """Begin to copy numbers to the host; the returned function waits for the copy, and returns them."""
        return numbers.clone().tolist  # a copy: they may be overwritten before they are read

    def new_future(self) -> Future[Tensor]:
        """Return a future of a tensor, whose `wait` is a wait of the current stream if there are streams."""
        return Future()

    def fork(self, purpose: str) -> Fork:
        """Mark the end of the current stream; return how to enter the side stream of a purpose after that mark."""
        return lambda tensors, on_host: nullcontext()  # a copy to the host waits for all earlier work

    def aside(self, purpose: str) -> AbstractContextManager[Any]:
        """Return the context in which work is queued on the side stream of a purpose; it waits for no other stream."""
        return nullcontext()

    def join(self, purpose: str, *, on_host: bool = False) -> None:
        """Let the current stream, or the host, wait for the work on the side stream of a purpose."""

    def keep(self, tensor: Tensor) -> None:
        """Keep the memory of a tensor of another stream until the current stream no longer uses the tensor."""

    def timing_event(self) -> Any:
        """Return an event on the current stream: the device measures the time between two; None: the host does."""

    def synchronize(self, *, all_streams: bool = False) -> None:
        """Wait on the host for the work on the current stream, or on all streams."""
        self._module.synchronize()

    def rng_state(self) -> dict[str, Tensor]:
        """Return the state of its random number generator, by its type of device; none for the CPU."""
        return {} if self.device.type == "cpu" else {self.device.type: self._module.get_rng_state()}

    def set_rng_state(self, states: Mapping[str, Any]) -> None:
        """Load the result of `rng_state`, unless it is the state of another type of device."""
        if self.device.type in states:
            self._module.set_rng_state(states[self.device.type])


class Cuda:
    """A GPU of torch.cuda: work is asynchronous, and ordered by streams and events. `Serial` documents the methods.

    Args:
        device: of torch.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def upload(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def download(self, numbers: Tensor) -> Callable[[], list[float]]:
        copied, arrived = numbers.to("cpu", non_blocking=True), _cuda.Event()  # into pinned memory
        arrived.record(_cuda.current_stream(self.device))

        def read() -> list[float]:
            with part("the host waits"):
                arrived.synchronize()
            return copied.tolist()

        return read

    def new_future(self) -> Future[Tensor]:
        # Without its device `wait` would return at once: DDP would go on with a bucket before it has been reduced.
        return Future(devices=[self.device])

    def fork(self, purpose: str) -> Fork:
        stream, ready = side_stream(self.device, purpose), _cuda.Event()
        ready.record(_cuda.current_stream(self.device))

        def enter(tensors: tuple[Tensor, ...], on_host: bool) -> AbstractContextManager[Any]:
            if on_host:  # gloo reads from the host
                ready.synchronize()
            stream.wait_event(ready)
            for tensor in tensors:  # keep their memory until this stream no longer uses them
                tensor.record_stream(stream)
            return _cuda.stream(stream)

        return enter

    def aside(self, purpose: str) -> AbstractContextManager[Any]:
        return _cuda.stream(side_stream(self.device, purpose))

    def join(self, purpose: str, *, on_host: bool = False) -> None:
        stream = side_stream(self.device, purpose)
        stream.synchronize() if on_host else _cuda.current_stream(self.device).wait_stream(stream)

    def keep(self, tensor: Tensor) -> None:
        tensor.record_stream(_cuda.current_stream(self.device))

    def timing_event(self) -> Any:
        event = _cuda.Event(enable_timing=True)
        event.record(_cuda.current_stream(self.device))  # the current device may be another
        return event

    def synchronize(self, *, all_streams: bool = False) -> None:
        if all_streams:
            _cuda.synchronize(self.device)
        else:
            _cuda.current_stream(self.device).synchronize()

    def rng_state(self) -> dict[str, Tensor]:
        return {"cuda": _cuda.get_rng_state(self.device)}

    def set_rng_state(self, states: Mapping[str, Any]) -> None:
        if "cuda" in states:
            _cuda.set_rng_state(states["cuda"], self.device)


@cache
def device_of(device: torch.device) -> Serial | Cuda:
    """Return the object for a device of torch; always the same one."""
    return Cuda(device) if device.type == "cuda" else Serial(device)


def side_stream(device: torch.device, purpose: str) -> Any:
    """Return the CUDA stream of a device for a purpose, always the same one.

    On two levels there are more streams than the 8 queues that CUDA has by default. Streams that share a queue may wait
    for each other; `CUDA_DEVICE_MAX_CONNECTIONS`, at most 32, gives more queues (not measured).
    """
    if (device, purpose) not in _streams:
        _streams[device, purpose] = _cuda.Stream(device)
    return _streams[device, purpose]
