"""On a GPU: what a step waits for and has in use, and that a side stream is waited for."""

from __future__ import annotations

import os
import traceback
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from lightning_lowbw import DGC, LocalSGD, Method, QuantizedGradients
from lightning_lowbw.comm.side_queue import SideQueue, new_future, side_stream
from lightning_lowbw.presets import preset
from lightning_lowbw.sync.local import LocalSync
from tests.gpu.nccl import through_nccl_on_one_device
from tests.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CYCLES = 200_000_000  # a tenth of a second
NUMEL = 1 << 24

# Bytes per parameter in use at most, beyond weights, gradients, optimizer and residuals; on two ranks. Estimated:
# no GPU has measured them yet.
METHODS: dict[str, tuple[Method, float]] = {
    "dgc": (DGC(sparsity=[0.999]), 0.5),
    "dgc at 25 %": (DGC(sparsity=[0.75]), 10.0),
    "int8": (QuantizedGradients("int8"), 5.0),
    "int4": (QuantizedGradients("int4"), 4.0),
    "bfloat16": (QuantizedGradients("bfloat16"), 8.5),
    "local SGD": (LocalSGD(k_steps=2, begin_step=0), 9.0),
    "sparse_loco": (preset("sparse_loco").replace(k_steps=2), 16.0),
}
MOST_WAITS = 1  # of a step, for the status: docs/launches.md


# Streams --------------------------------------------------------------------------------------------------------------


def write_late(result: torch.Tensor) -> torch.Tensor:
    torch.cuda._sleep(CYCLES)
    return result.fill_(1.0)


def test_what_a_side_stream_writes_is_there_after_wait() -> None:
    """Read at once on the main stream; with a future that does not know its device it is not there yet."""
    device = torch.device("cuda", torch.cuda.current_device())
    result = torch.zeros(NUMEL, device=device)
    torch.cuda.synchronize()
    SideQueue("proof").begin(write_late, (result,), in_thread=False).wait()
    assert float(result.sum()) == NUMEL

    blind = torch.zeros(NUMEL, device=device)
    future: Any = torch.futures.Future()  # in place of `new_future`
    torch.cuda.synchronize()
    with torch.cuda.stream(side_stream(device, "proof")):
        write_late(blind)
        future.set_result(blind)
    assert float(future.wait().sum()) == 0.0, "the proof has no power: a future without devices waits, too"


def test_a_future_of_a_device_makes_the_reader_wait() -> None:
    """As those that a communication hook gives to DDP."""
    device = torch.device("cuda", torch.cuda.current_device())
    result, future = torch.zeros(NUMEL, device=device), new_future(device)
    torch.cuda.synchronize()
    with torch.cuda.stream(side_stream(device, "proof")):
        write_late(result)
        future.set_result(result)
    assert float(future.wait().sum()) == NUMEL


# Waits and memory, two ranks on one device ----------------------------------------------------------------------------


def measure(device: str, name: str, numel: int) -> tuple[float, list[str]]:
    """Return the bytes per parameter that a step has in use at most, and where the host has waited for the device."""
    method, is_cuda = METHODS[name][0], device == "cuda"
    torch.manual_seed(0)
    parameters = {str(i): Parameter(torch.randn(numel // 8, device=device).mul_(0.01)) for i in range(8)}
    optimizer = torch.optim.SGD(parameters.values(), lr=0.01, momentum=0.9)
    worker = method.attach(optimizer, parameters.items())
    waits, most = list[str](), 0.0
    for step in range(5):  # the first ones allocate what is kept
        for parameter in parameters.values():
            parameter.grad = torch.randn_like(parameter)
        is_seen = is_cuda and step >= 3
        if is_seen:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = _note_frames(waits)
            optimizer.step()
        if is_seen:
            torch.cuda.set_sync_debug_mode("default")
            most = max(most, (torch.cuda.max_memory_allocated() - before) / numel)
        if not is_seen:
            waits.clear()
    if isinstance(worker, LocalSync):
        worker.finish()
    return most, waits


def _note_frames(waits: list[str]) -> Any:
    """Return what notes, in place of a warning of a wait, by which of our functions it was."""

    def note(message: Any, *_: Any, **__: Any) -> None:
        if "synchroniz" in str(message):
            ours = [frame for frame in traceback.extract_stack() if "lightning_lowbw" in frame.filename]
            waits.append(" < ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in ours[-3:]))

    return note


@pytest.mark.parametrize("name", METHODS)
def test_waits_and_memory(name: str, tmp_path: Path, record_property: Any) -> None:
    numel = int(os.environ.get("LOWBW_GPU_NUMEL", "100_000_000"))
    store = str(tmp_path / "store")
    found = run_ranks(through_nccl_on_one_device, 2, store, measure, name, numel, fresh=True, timeout_s=60.0)
    for nbytes, waits in found:
        record_property("bytes_per_parameter", round(nbytes, 2))
        record_property("waits", waits)
    for nbytes, waits in found:
        assert len(waits) <= 2 * MOST_WAITS, waits  # of two steps
        assert nbytes <= METHODS[name][1]
