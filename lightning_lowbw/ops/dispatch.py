"""Chooses the twin of `reference` that runs: the fastest that works for a device and dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor

from lightning_lowbw.ops import (
    averages,
    blocks,
    compiled,
    compiled_averages,
    compiled_blocks,
    compiled_positions,
    compiler,
    cpu,
    gpu,
    reference,
)
from lightning_lowbw.ops.averages import Arrival
from lightning_lowbw.ops.reference import SecondMoment, Segment
from lightning_lowbw.ops.table import BLOCK, Field, upload

LONGEST_CAUSE = 200  # characters of an exception that are passed on: of a compiler's output the first line will do


def kernels_for(*tensors: Tensor) -> ModuleType:
    """Return the module with what selects, from `accumulate_` to `take_out_`, for these arguments."""
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return reference
    is_plain = all(tensor.dtype == torch.float32 and tensor.is_contiguous() for tensor in tensors)
    return compiled if is_plain and compiler.is_available() else cpu


def packs_compiled(tensor: Tensor) -> bool:
    """Return whether `compiled_positions` is to be used for positions, or their words."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and compiler.is_available()


def averages_for(device: torch.device) -> ModuleType:
    """Return the module to take `average_many_` from, for float32 that is contiguous."""
    if gpu.is_available(device):
        return gpu
    return compiled_averages if device.type == "cpu" and compiler.is_available() else averages


def blocks_for(packed: Tensor, values: Tensor | None = None) -> ModuleType:
    """Return the module to take `encode_` and `decode` from, for these bytes and values."""
    is_plain = packed.device.type == "cpu" and packed.is_contiguous()
    is_plain = is_plain and (values is None or (values.dtype == torch.float32 and values.is_contiguous()))
    return compiled_blocks if is_plain and compiler.is_available() else blocks


def prepare(device: torch.device) -> str | None:
    """Compile and run on a tiny problem each kernel that a device would use, before the training needs it.

    Triton needs a C compiler on every node, even to start a kernel. Without this check a node that has none would fail
    at its first sparse step, hours after the start, and the other nodes would wait for it. So call this on all ranks at
    the start; if any rank returns a reason, all must call `disable`, because the kernels round differently.

    Takes seconds for the first time; what has been compiled is kept.

    Returns:
        None if the kernels work, or there are none; else one sentence with the reason.
    """
    if gpu.is_available(device):
        name, run = "Triton", _run_triton
    elif device.type == "cpu" and compiler.is_installed():
        name, run = "numba", _run_numba
    else:
        return None
    try:
        run(device)
    except Exception as error:  # noqa: BLE001 - a compiler may fail in any way; the caller is told
        cause = next(iter(str(error).strip().splitlines()), "")[:LONGEST_CAUSE]
        return f"The kernels of {name} do not work on {device}: {type(error).__name__}: {cause}".rstrip(": .") + "."
    return None


def disable(device: torch.device, reason: str) -> None:
    """Use plain torch on devices of this type, in this process, from now on.

    Args:
        device: as given to `prepare`.
        reason: what `prepare` said, here or on another rank.
    """
    (compiler if device.type == "cpu" else gpu).disable(reason)


def _run_numba(device: torch.device) -> None:
    """Raise if the compiled pass differs from its specification."""
    (segment, _), (twin, _) = _tiny_segments(device, torch.float32), _tiny_segments(device, torch.float32)
    found, expected = compiled.accumulate_(segment, 1.0), reference.accumulate_(twin, 1.0)
    assert found is not None
    assert expected is not None
    _compare([found, segment.residual], [expected, twin.residual])
    _compare(*(_run_selection(module, twin) for module in (reference, compiled)))
    _compare(*(_run_averages(module, found) for module in (averages, compiled_averages)))
    _run_positions(found, twin.residual.numel())
    for bits in (8, 4):
        _compare(
            *(
                _run_blocks(module, segment.residual[None, : blocks.BLOCK + 1], bits)
                for module in (blocks, compiled_blocks)
            )
        )


def _run_selection(module: ModuleType, segment: Segment) -> list[Tensor]:
    """Return all that a twin of `reference` selects and takes out."""
    residual, velocity = segment.residual.clone(), segment.residual.clone()
    candidates = module.reach(residual, 1.0)
    positions, least = module.narrow(residual, candidates, 2)
    of_chunks = module.top_k_of_chunks(residual, BLOCK // 3, 3, 1)
    taken = module.take_out_(residual, velocity, positions, masking=True)
    return [candidates, positions, module.top_k(residual, 3), of_chunks, taken, residual, velocity, torch.tensor(least)]


def _run_averages(module: ModuleType, positions: Tensor) -> list[Tensor]:
    """Return what a twin of `averages` makes of two messages about the same elements."""
    count, numel = positions.numel(), int(positions[-1]) + 1
    mean, room, weight = torch.ones(numel), torch.ones(numel), torch.ones(numel)
    messages = positions.expand(1, 2, -1), torch.full((1, 2, count), 0.75)
    module.average_many_([Arrival(mean, 0, 0, count)], *messages)
    module.average_many_([Arrival(room, 0, 0, count, weight, 0.5)], *messages)
    return [mean, weight]


def _run_positions(positions: Tensor, numel: int) -> None:
    """Raise if positions do not come out of a message."""
    width = 2
    unary = positions.numel() + ((numel - 1) >> width)
    field = Field(positions.numel(), 0, width, 0, unary, unary, numel)
    fields = upload([field], torch.int64, positions.device).view(1, -1)
    words = torch.zeros((unary + width * positions.numel()) // 32 + 2, dtype=torch.int32)
    compiled_positions.pack_(positions, fields, words)
    _compare([compiled_positions.unpack(words, fields, unary, positions.numel())[0]], [positions])


def _run_blocks(module: ModuleType, values: Tensor, bits: int) -> list[Tensor]:
    """Return all that a twin of `blocks` makes of some values."""
    unsent, packed = values.clone(), torch.empty((len(values), -(-values.shape[1] * bits // 8)), dtype=torch.uint8)
    scales = module.encode_(unsent, bits, packed)
    return [unsent, packed, scales, module.decode(scales, packed, values.shape[1], bits)]


def _run_triton(device: torch.device) -> None:
    """Raise if the Triton kernels differ from their specification; waits for the device."""
    for dtype in (torch.float32, torch.bfloat16):
        segments, twins = _tiny_segments(device, dtype), _tiny_segments(device, dtype)
        workspace = gpu.Workspace()
        for _ in range(2):  # without thresholds, and with them
            expected = reference.compress_many_(twins, value_dtype=torch.float32, masking=True)
            found = gpu.compress_many_(segments, value_dtype=torch.float32, masking=True, workspace=workspace)
            _compare([*found, *(each.residual for each in segments)], [*expected, *(each.residual for each in twins)])
        _run_wire(segments, *found)
        _run_adam(device, dtype)


def _run_adam(device: torch.device, dtype: torch.dtype) -> None:
    """Raise if Adam's step into the residual differs from plain torch's by more than rounding."""
    segment, twin = (_with_second_moment(_tiny_segments(device, dtype)[0]) for _ in range(2))
    positions, values = gpu.compress_many_(
        [segment], value_dtype=torch.float32, masking=False, workspace=gpu.Workspace()
    )
    reference.accumulate_(twin, 0.0)
    corrected = segment.residual.index_put((positions,), values)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5  # of a step of about 1, which may cancel what is left
    if not torch.allclose(corrected, twin.residual, rtol=tolerance, atol=tolerance):
        raise ArithmeticError("they compute another step of Adam than plain torch")


def _with_second_moment(segment: Segment) -> Segment:
    square = torch.ones_like(segment.gradient)
    moment = SecondMoment(square=square, largest=None, beta2=0.5, share=0.5, eps=1e-8, corrections=(0.5, 0.5))
    return replace(segment, dampening=segment.momentum, second_moment=moment)


def _run_wire(segments: Sequence[Segment], positions: Tensor, values: Tensor) -> None:
    """Raise if what has been selected does not come out of a message, or is averaged otherwise."""
    device, width = positions.device, 10
    first, second = (each.k + ((each.residual.numel() - 1) >> width) for each in segments)  # bits, `what.positions`
    k, start = segments[0].k, first + second
    numels = [each.residual.numel() for each in segments]
    rows = [
        Field(k, 0, width, 0, first, start, numels[0]),
        Field(k, k, width, first, start, start + k * width, numels[1]),
    ]
    fields = upload(rows, torch.int64, device)
    residuals = [each.residual for each in segments]
    twins = [residual.clone() for residual in residuals]
    message = torch.zeros(4, dtype=torch.int32, device=device)  # two words of positions, one of values
    sent = message[2:].view(torch.bfloat16)[: positions.numel()]
    gpu.pack(positions, values, fields.view(2, -1), k, message, sent, residuals)
    damaged = torch.zeros((), dtype=torch.bool, device=device)
    read_positions, read = gpu.unpack(
        message.unsqueeze(0), fields.view(2, -1), positions.numel(), torch.bfloat16, 4, damaged
    )
    if damaged:
        raise ArithmeticError("they read positions that are outside their tensors")
    for twin, at, error in zip(twins, positions.split(k), (values - values.bfloat16()).split(k), strict=True):
        twin.index_add_(0, at, error)
    _compare([read_positions[0], read[0], *residuals], [positions, values.bfloat16().float(), *twins])
    messages = [each.expand(1, 2, -1).contiguous() for each in (read_positions, read)]
    for step in (False, True):
        mine, theirs = (
            [
                Arrival(torch.ones_like(each), 0, number * k, k, torch.ones_like(each) if step else None, 0.5)
                for number, each in enumerate(residuals)
            ]
            for _ in range(2)
        )
        gpu.average_many_(mine, *messages)
        averages.average_many_(theirs, *messages)
        _compare(*([each.out if each.weight is None else each.weight for each in many] for many in (mine, theirs)))


def _tiny_segments(device: torch.device, dtype: torch.dtype) -> list[Segment]:
    """Return two segments: one for wide loads, one whose length is odd. Large enough for a threshold, without ties."""

    def shuffled(numel: int) -> Tensor:  # small multiples of a power of two: no operation on them rounds
        return (torch.arange(numel, device=device) * 7 % numel - numel // 2).to(torch.float32).div_(64)

    return [
        Segment(
            residual=shuffled(numel),
            momentum_buffer=torch.zeros(numel, dtype=dtype, device=device),
            gradient=torch.ones(numel, dtype=dtype, device=device),
            weight=torch.ones(numel, dtype=dtype, device=device),
            k=2,
            momentum=0.5,
            weight_decay=2.0**-4,
            ahead=2.0**-5,
        )
        for numel in (BLOCK, BLOCK + 1)
    ]


def _compare(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    if not all(one.equal(other) for one, other in zip(found, expected, strict=True)):
        raise ArithmeticError("they compute something else than plain torch")
