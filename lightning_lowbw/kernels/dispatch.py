"""Chooses the twin of `reference` that runs, and tries each before the training starts.

Triton compiles a kernel for each set of its constexprs and for the dtypes of its tensors; nothing else makes another
variant (`triton_kernels.kernel`). `Uses` lists what these depend on in a training; the sizes of blocks are constants.

| kernel | compiled for |
| --- | --- |
| correct | `Kind`: dtypes of gradient, velocity and weight; Adam; alignment, which is the gradient's in each step |
| order, plan, count, take | nothing that varies |
| digits, choose | each of the three digits |
| ones | nothing that varies |
| pack, unpack | the dtype of values on the wire, or the bits of levels |
| apply | the next power of two of the number of messages; whether weights are stepped; what is divided by |
| encode, combine, decode | 8 bits or 4, or the half type; decode also whether messages are averaged |
| chunks | the next power of two of the length of a chunk |
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lightning_lowbw.kernels import gpu, reference
from lightning_lowbw.kernels.reference import Arrival, Code, SecondMoment, Segment
from lightning_lowbw.kernels.table import GPU_BLOCK, Field, JoinedRow, JoinedTable, Kind, Workspace
from lightning_lowbw.kernels.tensors import upload

LONGEST_CAUSE = 200  # characters of an exception that are passed on: of a compiler's output the first line will do
PLAIN = Kind(torch.float32, torch.float32, torch.float32, is_adam=False, is_aligned=True)
TINY_NUMELS = GPU_BLOCK, GPU_BLOCK + 1

OLDEST_CAPABILITY = (7, 0)  # what Triton compiles for

_faults: dict[str, str] = {}  # why the kernels of a type of device are not to be used in this process


def has_numba() -> bool:
    """Return whether numba is installed, be it broken, and not disabled."""
    return "cpu" not in _faults and importlib.util.find_spec("numba") is not None


def has_triton() -> bool:
    """Return whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def uses_triton(device: torch.device) -> bool:
    """Return whether Triton's kernels run on a device: CUDA or ROCm, with a Triton for it, and not disabled."""
    return "cuda" not in _faults and _has_kernels(device)


@cache  # called in each step
def _has_kernels(device: torch.device) -> bool:
    if device.type != "cuda" or not has_triton():
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= OLDEST_CAPABILITY


@cache
def _import_cpu() -> ModuleType | None:
    try:
        return importlib.import_module("lightning_lowbw.kernels.cpu")
    except ImportError:  # numba is not installed, or not for this numpy
        return None


def compiled_for(*tensors: Tensor) -> ModuleType | None:
    """Return `cpu`, the module that numba compiles, where it takes these tensors; their dtypes are not looked at."""
    if "cpu" in _faults or not all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors):
        return None
    return _import_cpu()


def kernels_for(*tensors: Tensor) -> ModuleType:
    """Return the module with what selects, from `accumulate_` to `take_`, for these arguments."""
    is_plain = all(tensor.dtype == torch.float32 for tensor in tensors)
    return (compiled_for(*tensors) if is_plain else None) or reference


def chunks_for(values: Tensor, chunk: int) -> ModuleType:
    """Return the module to take `largest` of each chunk from."""
    is_short = chunk <= gpu.LONGEST_CHUNK and values.dtype == torch.float32
    return gpu if uses_triton(values.device) and is_short else kernels_for(values)


def averages_for(device: torch.device) -> ModuleType:
    """Return the module to take `average_many_` from, for contiguous tensors of float32 or 16 bits."""
    if uses_triton(device):
        return gpu
    return (compiled_for() if device.type == "cpu" else None) or reference


def blocks_for(*tensors: Tensor) -> ModuleType:
    """Return the module to take `encode_blocks_` and `decode_blocks` from, for these tensors."""
    return (None if tensors[0].dtype == torch.float64 else compiled_for(*tensors)) or reference


# Before the training --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Uses:
    """What a training uses of the Triton kernels.

    Args:
        kinds: of the tensors that kernels compress.
        mean_dtypes: of the gradients that means are written into, beside float32.
        value_dtypes: of the values in messages; of levels the bits.
        num_messages: that kernels average.
        steps: whether weights are stepped by the means; otherwise the means are written.
        over_senders: whether the means are those over the senders of an element.
        codes: of vectors of which all is sent, see `reference.Code`; what numba compiles for integers is tried as well.
        chunks: lengths of chunks of which the largest elements are sent.
    """

    kinds: tuple[Kind, ...] = (PLAIN, PLAIN._replace(is_aligned=False))
    mean_dtypes: tuple[torch.dtype, ...] = ()
    value_dtypes: tuple[torch.dtype | int, ...] = (torch.bfloat16,)
    num_messages: tuple[int, ...] = (2,)
    steps: tuple[bool, ...] = (False, True)
    over_senders: bool = False
    codes: tuple[Code, ...] = (8, 4, torch.bfloat16, torch.float16)
    chunks: tuple[int, ...] = (4096,)

    @property
    def bits(self) -> tuple[int, ...]:
        """The codes that numba compiles something for."""
        return tuple(code for code in self.codes if isinstance(code, int))


NO_KERNELS = Uses(kinds=(), value_dtypes=(), num_messages=(), steps=(), codes=(), chunks=())


def prepare(device: torch.device, uses: Uses | None = None) -> str | None:
    """Compile and run on a tiny problem each kernel that a training would use, before it needs them.

    Triton needs a C compiler on every node, even to start a kernel. Without this check a node that has none would fail
    at its first sparse step, hours after the start, and the other nodes would wait for it. So call this on all ranks at
    the start; if any rank returns a reason, all must call `disable`, because the kernels round differently.

    Takes seconds for the first time; what has been compiled is kept.

    Args:
        device: of the parameters.
        uses: what the Triton kernels are compiled for, and of numba's those for integers with a scale; None: what
            `Uses` says by default.

    Returns:
        None if the kernels work, if a device has none, or they are disabled; else one sentence with the reason.

    Raises:
        RuntimeError: on this rank; a kernel has left the device unusable, for plain torch, too.
    """
    uses = uses or Uses()
    if uses_triton(device):
        name = "Triton"
    elif device.type == "cpu" and replace(uses, codes=uses.bits) == NO_KERNELS:
        return None
    elif device.type == "cpu" and has_numba():
        name = "numba"
    else:
        return _what_is_missing(device)
    try:
        (_try_numba if name == "numba" else _try_triton)(device, uses)
    except Exception as error:  # noqa: BLE001 - a compiler may fail in any way; the caller is told
        cause = next(iter(str(error).strip().splitlines()), "")[:LONGEST_CAUSE]
        reason = f"The kernels of {name} do not work on {device}: {type(error).__name__}: {cause}".rstrip(": .") + "."
        try:
            torch.ones(1, device=device).add_(1).tolist()  # after a fault in a kernel every call of CUDA fails
        except Exception as fault:
            raise RuntimeError(
                f"{reason} After it this process cannot use {device} any more, not even by plain torch. Start all "
                "ranks again without Triton (pip uninstall triton), or with another version of it."
            ) from fault
        return reason
    return None


def _what_is_missing(device: torch.device) -> str | None:
    """Return what is to be installed for kernels on a device; None if nothing is, or they are disabled."""
    if device.type in _faults:
        return None
    if device.type == "cpu":
        return "numba is not installed: pip install numba."
    if device.type == "cuda" and not has_triton():
        return "Triton is not installed: pip install triton."
    return None


def disable(device: torch.device, reason: str) -> None:
    """Use plain torch on devices of this type, in this process, from now on.

    Args:
        device: as given to `prepare`.
        reason: what `prepare` said, here or on another rank.
    """
    _faults[device.type] = reason


def _tiny_segment(device: torch.device, kind: Kind) -> Segment:
    """Return a segment of a kind. Large enough for a threshold, without ties."""
    numel = GPU_BLOCK if kind.is_aligned else GPU_BLOCK + 1
    # Small multiples of a power of two: no operation on them rounds.
    shuffled = (torch.arange(numel, device=device) * 7 % numel - numel // 2).to(torch.float32).div_(64)
    velocity = torch.zeros(numel, dtype=kind.momentum_buffer, device=device)
    moment = SecondMoment(
        square=torch.ones_like(velocity), largest=None, beta2=0.5, share=0.5, eps=1e-8, corrections=(0.5, 0.5)
    )
    return Segment(
        residual=shuffled,
        momentum_buffer=velocity,
        gradient=torch.ones(numel, dtype=kind.gradient, device=device),
        weight=torch.ones(numel, dtype=kind.weight, device=device),
        k=2,
        momentum=0.5,
        dampening=0.5 if kind.is_adam else 0.0,
        weight_decay=2.0**-4,
        ahead=2.0**-5,
        second_moment=moment if kind.is_adam else None,
    )


def _compare(found: Sequence[Tensor], expected: Sequence[Tensor], *, tolerance: float = 0.0) -> None:
    for one, other in zip(found, expected, strict=True):
        is_same = torch.allclose(one, other, rtol=tolerance, atol=tolerance) if tolerance else one.equal(other)
        if not is_same:
            raise ArithmeticError("they compute something else than plain torch")


def _try_numba(device: torch.device, uses: Uses) -> None:
    """Raise if what numba compiles differs from its specification."""
    cpu = importlib.import_module("lightning_lowbw.kernels.cpu")
    results = []
    for module in (cpu, reference):
        segment = _tiny_segment(device, PLAIN)
        v, numel = segment.residual, segment.residual.numel()
        positions = module.accumulate_(segment, 1.0)
        searches = [module.reach(v, 1.0), module.largest(v, 3), module.largest(v, 3, numel // 3, 1)]
        accumulated, taken = v.clone(), module.take_(v, segment.momentum_buffer, positions, masking=True)
        averaged = _averaged(module, v, positions, 2, (False, True))
        results.append([positions, accumulated, *searches, taken, v, *averaged])
    _compare(*results)
    for bits in uses.bits:
        _compare(*(_scaled(each, device, bits) for each in (cpu, reference)))
    positions, code, fields = _tiny_positions(device)
    words, read = torch.zeros(2, dtype=torch.int32), torch.empty(len(positions) + cpu.BYTE, dtype=torch.int32)
    cpu.pack_(positions, fields, *code, words)
    counts = torch.tensor(cpu.unpack(words, fields, code, (0, code[1]), read))
    _compare([read[: len(positions)].long(), counts], [positions, torch.tensor([len(positions), 0])])


def _averaged(
    module: ModuleType,
    like: Tensor,
    positions: Tensor,
    num_messages: int,
    steps: Sequence[bool],
    over_senders: bool = False,
) -> list[Tensor]:
    """Return what a module makes of equal messages about two tensors: means, or stepped weights."""
    results, count = [], positions.numel()
    indices = positions.to(torch.int32).expand(2, num_messages, -1).contiguous()
    for is_step in steps:
        outs, weights = ([torch.ones_like(like) for _ in range(2)] for _ in range(2))
        arrivals = [
            Arrival(out, number, 0, count - number, weight if is_step else None, 0.5)
            for number, (out, weight) in enumerate(zip(outs, weights, strict=True))
        ]
        values = torch.full_like(indices, 0.75, dtype=torch.float32)
        module.average_many_(arrivals, indices, values, over_senders=over_senders)
        results += weights if is_step else outs
    return results


def _try_triton(device: torch.device, uses: Uses) -> None:
    """Raise if the Triton kernels differ from their specification; waits for the device."""
    for is_adam in (False, True):
        if kinds := [kind for kind in uses.kinds if kind.is_adam == is_adam]:
            _try_compression(device, kinds, is_adam)
    for value_dtype in uses.value_dtypes:
        _try_wire(device, value_dtype)
    like = torch.ones(GPU_BLOCK + 1, dtype=torch.float32, device=device)
    positions = torch.tensor([0, 5, GPU_BLOCK - 3, GPU_BLOCK], device=device)
    dtypes = dict.fromkeys([torch.float32, *uses.mean_dtypes])
    for num_messages, dtype in product(uses.num_messages, dtypes):
        steps = uses.steps if dtype == torch.float32 else (False,)
        arguments = like.to(dtype), positions, num_messages, steps, uses.over_senders
        _compare(*(_averaged(each, *arguments) for each in (gpu, reference)))
    values = _tiny_segment(device, PLAIN).residual
    for chunk in uses.chunks:
        _compare(*([each.largest(values, 1, chunk, 1)] for each in (gpu, reference)))
    for code in uses.codes:
        _compare(*(_joined(device, code, in_kernels=in_kernels) for in_kernels in (True, False)))


def _scaled(module: ModuleType, device: torch.device, bits: int) -> list[Tensor]:
    """Return what a module makes of two vectors as integers with scales."""
    values = torch.arange(2 * GPU_BLOCK + 2, device=device).sub_(GPU_BLOCK).to(torch.float32).div_(7).view(2, -1)
    scales = torch.empty((2, -(-values.shape[1] // reference.SCALED)), dtype=torch.bfloat16, device=device)
    packed = torch.empty((2, -(-values.shape[1] * bits // 8)), dtype=torch.uint8, device=device)
    module.encode_blocks_(values, scales, packed, bits)
    return [values, scales, packed, module.decode_blocks(scales, packed, values.shape[1], bits)]


def _joined(device: torch.device, code: Code, *, in_kernels: bool) -> list[Tensor]:
    """Return what kernels, or the reference, make of two tensors as one vector: as of three ranks, and as of two."""
    numels, results = (GPU_BLOCK + 2, 5), list[Tensor]()
    values = torch.arange(sum(numels), device=device).sub_(GPU_BLOCK).to(torch.float32).div_(7)
    signals, residuals = ([*(values * factor).split(numels)] for factor in (1.0, 0.25))
    flags = torch.zeros(len(numels) + 1, dtype=torch.bool, device=device)
    module: ModuleType = reference
    vector: Any = reference.Vector(signals, residuals)
    whole: Any = reference.Vector(signals, [*map(torch.zeros_like, signals)])
    if in_kernels:
        parts = zip(signals, (0, numels[0]), residuals, strict=True)
        rows = [JoinedRow.of(signal, slice(0, signal.numel()), start, residual) for signal, start, residual in parts]
        module, vector = gpu, JoinedTable().update(rows, device)
        whole = JoinedTable().update((row._replace(residual=0) for row in rows), device)
    if code == torch.float32:  # what is sent whole, and what the ranks of a node have gathered
        sent = torch.empty((1, 4 * sum(numels)), dtype=torch.uint8, device=device)
        module.encode_(whole, sent, sum(numels), code, flags)
        module.decode_(vector, values.view(1, -1).view(torch.uint8), sum(numels), code, num_messages=1)
        return [sent, flags, *signals]
    for num_rows, size in ((3, GPU_BLOCK + 3), (1, sum(numels))):  # the second row has the end of the vector
        sent = torch.empty((num_rows, reference.code_bytes(size, code)), dtype=torch.uint8, device=device)
        module.encode_(vector, sent, size, code, flags)
        if num_rows == 1:
            module.decode_(vector, torch.cat([sent, sent]), size, code, num_messages=2)
        else:
            module.combine_(vector, sent.clone(), sent[0], 0, size, code, flags)
            module.decode_(vector, sent, size, code, num_messages=1)
        results += [sent, *(tensor.clone() for tensor in (*signals, *residuals))]
    return [*results, flags]


def _try_compression(device: torch.device, kinds: Sequence[Kind], is_adam: bool) -> None:
    """Raise if other elements are selected, or residuals differ; Adam's steps by more than rounding."""
    segments, twins = ([_tiny_segment(device, kind) for kind in kinds] for _ in range(2))
    workspace = Workspace()
    for _ in range(1 if is_adam else 2):  # without thresholds, and with them
        found = gpu.compress_many_(segments, masking=not is_adam, workspace=workspace)
        if not is_adam:
            expected = reference.compress_many_(twins, masking=True)
            _compare([*found, *(each.residual for each in segments)], [*expected, *(each.residual for each in twins)])
            continue
        for segment, twin, at, sent in zip(segments, twins, *(each.split(2) for each in found), strict=True):
            reference.accumulate_(twin, 0.0)
            # Of a step of about 1, which may cancel what is left.
            tolerance = 1e-5 if twin.gradient.dtype == torch.float32 else 1e-2
            _compare([segment.residual.index_put((at,), sent)], [twin.residual], tolerance=tolerance)


def _tiny_positions(device: torch.device) -> tuple[Tensor, tuple[int, int], Tensor]:
    """Return two positions of each of two tensors, and how they are coded in two words: see `compress.codec`."""
    width, k, numels = 10, 2, TINY_NUMELS
    positions = torch.tensor([5, numels[0] - 3, 0, numels[1] - 1], device=device)
    rows = [Field(k, 0, 0, numels[0], 0), Field(k, k, numels[0], numels[1], 1)]
    return positions, (width, 2 * k + (sum(numels) >> width)), upload(rows, torch.int64, device).view(2, -1)


def _try_wire(device: torch.device, value_dtype: torch.dtype | int) -> None:
    """Raise if what has been selected does not come out of a message, or is rounded otherwise."""
    positions, code, fields = _tiny_positions(device)
    k, window = len(positions) // 2, (0, code[1])
    values = torch.tensor([1.0, -1.0 - 2.0**-9, 3.0, 2.0**-3], dtype=torch.float32, device=device)
    residuals = [torch.ones(numel, dtype=torch.float32, device=device) for numel in TINY_NUMELS]
    twins = [residual.clone() for residual in residuals]
    message = torch.zeros(8, dtype=torch.int32, device=device)  # two words of positions, then the values
    if isinstance(value_dtype, torch.dtype):
        coded = gpu.CodedValues(value_dtype, 0, 8 // value_dtype.itemsize, 0)
        rounded = values.to(value_dtype).float()
    else:  # each of the two blocks from 1 to 2, or nearly: with a sign the lowest, the highest, the lowest, the highest
        coded, lowest, top = gpu.CodedValues(None, value_dtype, 2, 16), 0x3F80, (1 << (value_dtype - 1)) - 1
        codes = top + 1 | top << value_dtype | top << 3 * value_dtype
        message[2:5] = torch.tensor([0x4000 << 16 | lowest] * 2 + [codes], dtype=torch.int32)
        bits = torch.tensor([lowest << 16, (lowest << 16) + (0x80 << 16) // top * top] * 2, dtype=torch.int32)
        rounded = bits.view(torch.float32).to(device) * values.sign()[[1, 0, 0, 0]]
    gpu.pack(positions, values, fields, code, k, message, coded, residuals)
    read_positions, read = gpu.unpack(message.unsqueeze(0), fields, code, window, len(positions), coded)
    for twin, at, error in zip(twins, positions.split(k), (values - rounded).split(k), strict=True):
        twin.index_add_(0, at, error)
    _compare([read_positions[0].long(), read[0], *residuals], [positions, rounded, *twins])
