"""All that Triton would compile in a sparse step has been compiled at the start, on all ranks together.

Stubs take the place of kernels and note for which constexprs, dtypes and special values Triton compiles them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import AdamW

from lightning_lowbw.comm.link import Link
from lightning_lowbw.cost_model import Measured
from lightning_lowbw.kernels import dispatch
from lightning_lowbw.payloads.quantized import Quantized
from lightning_lowbw.payloads.top_k import TopK
from lightning_lowbw.presets import DGC, LocalSGD, QuantizedGradients
from lightning_lowbw.strategies.auto_choice import measure
from lightning_lowbw.sync import kernels
from tests.kernels.workers import OPTIMIZERS
from tests.ranks import run_ranks

pytest.importorskip("triton")

FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
SHAPES = [(33, 37), (64, 40), (40,), (17, 128), (16, 80)]  # large ones of odd and even sizes, and a small one
NODES = ((0, 2), (1, 3))
NUM_STEPS = 6
WRITTEN = {"take_kernel": ("sent_positions", "sent_values"), "unpack_kernel": ("positions", "values")}
STAIRS: dict[str, Any] = {"sparsity": (0.75, 0.9, 0.999), "rampup_step": NUM_STEPS, "min_numel": 1000}


class Stub:
    """Stands for a kernel."""

    def __init__(self, kernel: Any, name: str, seen: set[str]) -> None:
        self.kernel, self.name, self.seen = kernel, name, seen

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self.launch

    def launch(self, *args: Any, **kwargs: Any) -> None:
        """Note the variant, and write positions that are inside of their tensors."""
        values = {**dict(zip(self.kernel.arg_names, args, strict=False)), **kwargs}
        compiled_for = [f"{each.name}={_compiled_for(each, values.pop(each.name))}" for each in self.kernel.params]
        self.seen.add(f"{self.name}: {', '.join(compiled_for)}, {values}")
        given = dict(zip(self.kernel.arg_names, args, strict=False))
        for out in (given[name] for name in WRITTEN.get(self.name, ())):
            has_positions = self.name == "unpack_kernel" and not out.is_floating_point()
            out.copy_(torch.arange(out.shape[-1]) if has_positions else torch.zeros(()))


def _compiled_for(parameter: Any, value: Any) -> str:
    """Return what Triton compiles a kernel for, of an argument."""
    if parameter.is_constexpr:
        return str(value)
    if value is None or isinstance(value, float):
        return type(value).__name__
    if isinstance(value, Tensor):
        dtype, number = str(value.dtype), value.data_ptr()
    else:
        dtype, number = parameter.annotation_type or ("i32" if abs(value) < 1 << 31 else "i64"), value
    if not parameter.do_not_specialize:
        dtype += " aligned" * (number % 16 == 0) + " one" * (value is number and number == 1)
    return dtype


def note_launches() -> set[str]:
    """Replace the kernels by stubs, until the call of the rank has ended; return where they note their variants."""
    from lightning_lowbw.kernels import triton_kernels

    seen: set[str] = set()
    for name, kernel in [*vars(triton_kernels).items()]:
        if name.endswith("_kernel"):
            setattr(triton_kernels, name, Stub(kernel.kernel if isinstance(kernel, Stub) else kernel, name, seen))
    dispatch._has_kernels = lambda device: True
    kernels._compare = lambda *args: None  # stubs compute nothing
    return seen


def make_parameters(dtypes: list[torch.dtype]) -> list[Parameter]:
    return [Parameter(torch.zeros(shape, dtype=dtypes[number % len(dtypes)])) for number, shape in enumerate(SHAPES)]


def draw_gradient(parameter: Parameter, step: int) -> Tensor:
    """In every other step one that starts somewhere in a bucket."""
    start = step % 2
    return torch.randn(parameter.numel() + start, dtype=parameter.dtype)[start:].view(parameter.shape)


def train(optimizer: str, dtypes: list[torch.dtype], method: Any, nodes: Any) -> tuple[set[str], set[str]]:
    """Return the variants that are launched before the first step, and in the steps."""
    seen = note_launches()
    parameters = make_parameters(dtypes)
    ours = OPTIMIZERS[optimizer](parameters)
    at_nodes, named = method.at(nodes), [(str(i), each) for i, each in enumerate(parameters)]
    worker: Any = at_nodes.make_synchronizer(ours, named, at_nodes.make_peers())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(at_nodes.what), "uses_kernels", lambda *_: True)  # as on a GPU
        assert kernels.prepare_kernels([worker]) is None
    assert dispatch.uses_triton(torch.device("cpu"))
    at_start = {*seen}
    seen.clear()
    for step in range(NUM_STEPS):
        for number, parameter in enumerate(parameters):
            parameter.grad = draw_gradient(parameter, step)
            if number == step and dist.get_rank() == 0:
                parameter.grad = None  # this rank has one tensor less
        with worker.stepping():
            if worker.exchange(applies=step % 3 == 0):
                worker.step_exchanged()
                ours.step()
    return at_start, {*seen}


LOCAL = LocalSGD(k_steps=2, compression=TopK(density=0.01, min_numel=1000))
CASES: dict[str, tuple[str, list[torch.dtype], Any, Any]] = {
    "decay of some in bfloat16": ("momentum", [BFLOAT16], DGC(**STAIRS), "flat"),  # masks at some densities
    "mixed dtypes": ("momentum", [FLOAT32, BFLOAT16, FLOAT16], DGC(**STAIRS), "flat"),
    "Adam on two levels": ("Adam", [FLOAT32], DGC(**STAIRS), NODES),
    "int8": ("momentum", [FLOAT32], DGC(**STAIRS, value_dtype="int8"), "flat"),
    "error feedback": ("RMSprop", [BFLOAT16], DGC(**STAIRS), "flat"),
    "local SGD on two levels": ("momentum", [FLOAT32], LOCAL, NODES),
    "all in int4": ("AdamW", [FLOAT32, BFLOAT16], QuantizedGradients("int4"), "flat"),
    "all in float16 on two levels": ("momentum", [FLOAT16], QuantizedGradients("float16"), NODES),
}
LAUNCHED = {
    "all in int4": {"encode", "decode"},  # between two ranks nothing is combined
    "all in float16 on two levels": {"encode", "decode"},
}


@pytest.mark.filterwarnings("ignore:RMSprop")
@pytest.mark.parametrize("name", CASES)
def test_what_steps_launch_has_been_tried(name: str) -> None:
    for at_start, in_steps in run_ranks(train, 2 if CASES[name][-1] == "flat" else 4, *CASES[name]):
        assert {each.partition("_kernel")[0] for each in in_steps} >= LAUNCHED.get(name, {"pack", "unpack", "apply"})
        assert in_steps - at_start == set()
        assert len(at_start) <= len(in_steps) + 4  # of kinds, of averages with and without steps: both of each


def measured(dtype: torch.dtype) -> tuple[set[str], set[str]]:
    """Return the variants that are launched before the first step, and where steps are timed for `sparsity="auto"`."""
    seen = note_launches()
    parameters, method = make_parameters([dtype]), DGC(sparsity="auto")
    peers = method.make_peers()
    named = [(str(i), each) for i, each in enumerate(parameters)]
    worker = method.make_synchronizer(AdamW(parameters, lr=1e-3), named, peers)
    assert kernels.prepare_kernels([worker], also=[Quantized()]) is None
    at_start = {*seen}
    seen.clear()
    assert isinstance(method.what, TopK)
    timed = Measured(1.0, 2.0, {}, Link(0.0, 1.0))
    measure(method, ("dgc",), ([(2000,), (3000,)], [(7,)]), peers, worker.params.device, timed, begins_early=False)
    return at_start, {*seen}


def test_what_is_launched_to_choose_a_schedule_has_been_tried() -> None:
    for at_start, in_measurement in run_ranks(measured, 2, BFLOAT16):
        assert in_measurement
        assert in_measurement - at_start == set()
