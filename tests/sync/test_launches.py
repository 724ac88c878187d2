"""What a sparse step on a GPU launches and waits for, counted without one.

Tensors are fake: their device "cuda" does not exist; kernels of Triton are stubs. The counts are of
each operation of torch that computes or copies something, each kernel, and each wait of the host for the device.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from weakref import finalize

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import Parameter
from torch.optim import SGD, AdamW, Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_lowbw.comm.collectives import SideQueue, TrafficLedger, WeakGroup
from lightning_lowbw.comm.peers import Peers, TwoLevelPeers
from lightning_lowbw.comm.topology import Topology
from lightning_lowbw.kernels import dispatch, gpu, tensors
from lightning_lowbw.method import Method
from lightning_lowbw.payloads import codec as positions
from lightning_lowbw.payloads import low_rank
from lightning_lowbw.payloads.quantized import FORMATS, Quantized, QuantizedExchange
from lightning_lowbw.presets import DGC, Compression, LocalSGD, PowerSGD, QuantizedGradients
from lightning_lowbw.strategies.step_hooks import exchange_unscaled_
from lightning_lowbw.sync.buffers import ReplicaBuffers, specs_of, wide_copies
from lightning_lowbw.sync.gradient import GradientSync
from lightning_lowbw.sync.local import LocalSync
from lightning_lowbw.sync.replica import Replica
from lightning_lowbw.sync.state import whole_momentum
from tests.shapes import resnet50_shapes, transformer_shapes

triton_kernels = pytest.importorskip("lightning_lowbw.kernels.triton_kernels")

DOCUMENT = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "launches.md"
HEADING = "| | launches | waits | messages | calls | bytes |\n| --- | --- | --- | --- | --- | --- |\n"
MESSAGES = "collectives, on two levels between nodes"
CALLS = "calls of torch's dispatcher, views included"
BYTES = "tenths of bytes per parameter"  # at most in use, beyond what there is before the step
# Operations that only look at a tensor otherwise, or make room for one.
FREE = (
    "view", "_unsafe_view", "reshape", "slice", "select", "split", "split_with_sizes", "unbind", "detach", "expand",
    "unsqueeze", "squeeze", "t", "transpose", "permute", "alias", "as_strided", "empty", "empty_like", "empty_strided",
    "new_empty", "lift_fresh", "unfold", "view_as_real", "flatten", "unflatten", "new_empty_strided", "diagonal",
    "narrow", "is_pinned", "resize_", "unsafe_split_with_sizes",
)  # fmt: skip


def stand_in_for_the_device(monkeypatch: pytest.MonkeyPatch, count: Counter[str], num_ranks: int) -> None:
    """Let fake tensors answer what only a device could, and count what the host waits for."""

    def replace(name: str, answer: Callable[..., Any]) -> None:
        monkeypatch.setattr(FakeTensor, name, answer, raising=False)

    def wait(name: str, answer: Any) -> Callable[..., Any]:
        def waiting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if tensor.is_cuda:
                count[f"wait: {name}"] += 1
            return answer(tensor) if callable(answer) else answer

        return waiting

    def on_host_or_uploaded(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        device = kwargs.get("device") or next((each for each in args if isinstance(each, torch.device)), None)
        if tensor.is_cuda or device is None or device.type != "cuda":
            return Tensor.to(tensor, *args, **kwargs)
        count["upload" if kwargs.get("non_blocking") else "wait: upload from pageable memory"] += 1
        dtype = next((each for each in args if isinstance(each, torch.dtype)), tensor.dtype)
        return torch.empty(tensor.shape, dtype=dtype, device="cuda")

    def set_item(tensor: Tensor, index: Any, value: Any) -> None:
        target = indexed(tensor, index)
        copy(target, value) if isinstance(value, Tensor) else target.fill_(value)

    # Read are only control messages: all ranks have all gradients, none has a fault.
    replace("tolist", wait("tolist", lambda each: [1.0] * (each.numel() - 2 * num_ranks) + [0.0] * 2 * num_ranks))
    for name, answer in (("item", 1.0), ("__bool__", True), ("__float__", 1.0), ("__int__", 1), ("nonzero", None)):
        replace(name, wait(name, answer))
    replace("data_ptr", lambda each: 16 * each.untyped_storage()._cdata + each.storage_offset() * each.itemsize)
    replace("pin_memory", lambda each: each)
    replace("to", on_host_or_uploaded)
    replace("copy_", copy)
    replace("__getitem__", indexed)
    replace("__setitem__", set_item)


def copy(target: Tensor, source: Tensor) -> Tensor:
    """Do what `copy_` does: torch's own would ask for the device."""
    return target.mul_(source)


def indexed(tensor: Tensor, index: Any) -> Tensor:
    """Return what indexing does, by operations: Python's own would ask for the device."""
    indices, dim = list(index) if isinstance(index, tuple) else [index], 0
    if Ellipsis in indices:
        place, missing = indices.index(Ellipsis), tensor.dim() - len(indices) + 1
        indices[place : place + 1] = [slice(None)] * missing
    for each in indices:
        if isinstance(each, slice):
            start, stop, step = each.indices(tensor.shape[dim])
            if (start, stop, step) != (0, tensor.shape[dim], 1):
                tensor = torch.ops.aten.slice.Tensor(tensor, dim, start, stop, step)
            dim += 1
        elif isinstance(each, int):
            tensor = torch.ops.aten.select.int(tensor, dim, each)
        elif each is None:
            tensor, dim = tensor.unsqueeze(dim), dim + 1
        else:
            raise NotImplementedError(f"an index {each!r}")
    return tensor


@cache  # called at each operation, as the next function
def name_of(operation: Any) -> tuple[str, str]:
    """Return the library of an operation, and its name."""
    library, name, *_ = f"{operation}.".split(".")
    return library, name


def type_of(tensor: Tensor) -> str:
    """Return the type of the device, which asking a fake tensor would be another operation."""
    return (tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device).type


def tensors_of(values: Any) -> list[Tensor]:
    return [each for each in torch.utils._pytree.tree_leaves(values) if isinstance(each, Tensor)]


class Operations(TorchDispatchMode):
    """Counts what torch launches on the device, and the bytes that are in use there."""

    def __init__(self, count: Counter[str]) -> None:
        super().__init__()
        self.count = count
        self.used = self.most = 0
        self.storages: set[int] = set()

    def clear(self) -> None:
        """Begin to count: from here on."""
        self.count.clear()
        self.start = self.most = self.used

    def note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.storages:
            self.storages.add(storage._cdata)
            self.used += storage.nbytes()
            self.most = max(self.most, self.used)
            finalize(storage, self.free, storage._cdata, storage.nbytes())

    def free(self, key: int, nbytes: int) -> None:
        self.storages.remove(key)
        self.used -= nbytes

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        library, name = name_of(operation)
        if library == "prim":  # what a fake tensor is asked, and a real one knows
            return result
        self.count[CALLS] += 1
        for each in tensors_of(result):
            if type_of(each) == "cuda":
                self.note(each)
        leaves = tensors_of((args, kwargs, result)) if name not in FREE and library == "aten" else []
        if name != "_local_scalar_dense" and any(type_of(each) == "cuda" for each in leaves):
            self.count[name] += launches_of(name, args)
        return result


def launches_of(name: str, args: Any) -> int:
    """Return 1, or the number of tensors of a list that CUDA processes one by one.

    It does where the tensors of one place in the lists differ in dtype or strides, or one is not dense; of a copy the
    dtypes may differ, if they do so everywhere in the same way.
    """
    lists = [each for each in args if isinstance(each, (list, tuple)) and each and isinstance(each[0], Tensor)]
    if not (name.startswith("_foreach") and lists):
        return 1
    for together in zip(*lists, strict=True):
        dtypes, strides = [each.dtype for each in together], {each.stride() for each in together}
        alike = dtypes == [each[0].dtype for each in lists] and (len(set(dtypes)) == 1 or name == "_foreach_copy_")
        if not (alike and len(strides) == 1 and not any(map(tensors.has_gaps, together))):
            return len(lists[0])
    return 1


class Stub:
    """Stands for a kernel."""

    def __init__(self, count: Counter[str], name: str) -> None:
        self.count, self.name = count, name

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(each > 0 for each in grid)
        return lambda *args, **kwargs: self.count.update([self.name])


class Event:
    """Stands for an event of CUDA.

    Attributes:
        recorded: in the step that is counted.
    """

    recorded: ClassVar[list[Event]] = []

    def __init__(self, **options: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        self.recorded.append(self)

    def synchronize(self) -> None:
        assert self not in self.recorded, "the host waits for a launch of this step"


def stand_in(monkeypatch: pytest.MonkeyPatch, num_ranks: int) -> Counter[str]:
    """Replace the device, its kernels and its queues; return the counter of their calls."""
    count: Counter[str] = Counter()
    for name in vars(triton_kernels):
        if name.endswith("_kernel"):
            monkeypatch.setattr(triton_kernels, name, Stub(count, name))
    monkeypatch.setattr(dispatch, "uses_triton", lambda device: True)
    monkeypatch.setattr(gpu, "_num_processors", lambda device: 132)
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(SideQueue, "begin", run_now)
    monkeypatch.setattr(Replica, "copy_to_host", lambda *_: None)  # by the copy engine, which launches no kernel
    monkeypatch.setattr(tensors.Cuda, "join", lambda *_, **__: None)
    stand_in_for_the_device(monkeypatch, count, num_ranks)
    return count


@contextmanager
def counting(patch: pytest.MonkeyPatch, peers: Peers) -> Iterator[Operations]:
    """Count the operations inside on tensors of a device that is not there."""
    count, record = stand_in(patch, peers.num_ranks), peers.ledger.record
    of_slow_network = ("inter",) if peers.is_two_level else ("inter", None)

    def recording(nbytes: int, level: Any = None) -> None:
        count[MESSAGES] += level in of_slow_network
        record(nbytes, level)

    vars(peers.ledger)["record"] = recording
    with torch.no_grad(), FakeTensorMode(), Operations(count) as operations:
        yield operations


def tenths_per_parameter(operations: Operations, parameters: Mapping[str, Parameter]) -> int:
    """Return the most bytes in use beyond those at the start, in tenths per parameter."""
    return round(10 * (operations.most - operations.start) / sum(each.numel() for each in parameters.values()))


def fake_parameters(model: str, dtype: torch.dtype = torch.float32) -> dict[str, Parameter]:
    """Return the parameters of a model on a device that is not there; inside of `FakeTensorMode`."""
    last = torch.channels_last if CHANNELS_LAST in model else torch.contiguous_format
    parameters = {}
    for number, shape in enumerate(shapes_of(model)):
        memory_format = last if len(shape) == 4 else torch.contiguous_format
        weight = torch.empty(shape, dtype=dtype, device="cuda", memory_format=memory_format)
        parameters[str(number)] = Parameter(weight, requires_grad=False).requires_grad_()
    return parameters


def give_gradients(parameters: Mapping[str, Parameter]) -> None:
    for parameter in parameters.values():
        parameter.grad = torch.empty_like(parameter)


def fake_buffers() -> dict[str, Tensor]:
    """Return the buffers of the batch norms of ResNet-50, which have a weight and a bias of one dimension each."""
    widths = [shape for shape in resnet50_shapes() if len(shape) == 1]
    buffers = {}
    for number, shape in enumerate(widths[: -1 if len(widths) % 2 else None : 2]):
        for name in ("running_mean", "running_var"):
            buffers[f"{number}.{name}"] = torch.empty(shape, device="cuda")
        buffers[f"{number}.num_batches_tracked"] = torch.empty((), dtype=torch.int64, device="cuda")
    return buffers


def know_what_differs(buffers: ReplicaBuffers) -> None:
    """Let the ranks have compared their buffers, as before averages 1, 2 and 4: the counts of batches are equal."""
    floating = {name: each for name, each in buffers.now().items() if each.is_floating_point()}
    buffers.is_begun, buffers.num_averages, buffers.differing = True, 4, frozenset(floating)
    buffers.specs = specs_of(buffers.now())
    buffers.start = dict(zip(floating, wide_copies(list(floating.values())), strict=True))


def count_step(patch: pytest.MonkeyPatch, cell: tuple[str, str, str, str]) -> Counter[str]:
    """Return what the second compressed step has launched and waited for, without that of the user's optimizer."""
    optimizer, model, where, also = cell
    peers, has_scaler, is_sharded = make_peers(*PLACES[where]), also == GRAD_SCALER, also == SHARDED
    with counting(patch, peers) as operations:
        parameters = fake_parameters(model, torch.bfloat16 if also == BF16_TRUE else torch.float32)
        ours = OPTIMIZERS[optimizer](parameters.values())
        worker = GradientSync(OTHER_METHODS.get(also, DGC(sparsity=[0.999])), ours, parameters.items(), peers)
        scale = torch.ones((), device="cuda")
        scaler = SimpleNamespace(is_enabled=lambda: has_scaler, _get_scale_async=lambda: scale)
        precision = SimpleNamespace(scaler=scaler)
        for _ in range(2):  # the first step makes the buffers
            give_gradients(parameters)
            operations.clear()
            with worker.stepping():
                if also == IN_GROUPS:  # in a backward pass all launches but the last are hidden
                    with worker.sending_early(begins=False):
                        pass
                reduced = parameters.values() if worker.plan.reduce == "node" else ()  # by DDP, during backward

                def exchange(skip_nonfinite: bool, worker: GradientSync = worker, reduced: Any = reduced) -> bool:
                    if has_scaler or is_sharded:
                        worker.prepare(reduced=reduced, node=WeakGroup(None) if is_sharded else None)
                    return worker.exchange(reduced=reduced, skip_nonfinite=skip_nonfinite, applies=True)

                exchange_unscaled_(precision, ours, exchange)
        operations.count[BYTES] = tenths_per_parameter(operations, parameters)
        return operations.count


def count_average(patch: pytest.MonkeyPatch, name: str) -> Counter[str]:
    """Return the launches and waits of one average, from its begin to the weights that it changes."""
    peers, of_average = Peers(), Counter[str]()
    patch.setattr(ReplicaBuffers, "agree_on_shapes", lambda *_: None)  # the status says 1 of everything
    with counting(patch, peers) as operations:
        parameters = fake_parameters(f"ResNet-50{CHANNELS_LAST * (CHANNELS_LAST in name)}")
        buffers = fake_buffers() if BATCH_NORM in name else {}
        ours = SGD(parameters.values(), lr=0.1, momentum=0.9)
        worker = LocalSync(AVERAGES[name], ours, parameters.items(), peers, lambda: buffers)
        know_what_differs(worker.buffers)
        worker.measures_distance = LOGGED in name
        for step in range(2 * K_STEPS + 1):  # the first average makes the buffers
            give_gradients(parameters)
            with worker.stepping():
                worker.exchange()
                operations.clear()
            if step > K_STEPS:
                of_average.update(operations.count)
                of_average[BYTES] = max(of_average[BYTES], tenths_per_parameter(operations, parameters))
        assert worker.num_averages == 2
        return of_average


def count_local_step(
    patch: pytest.MonkeyPatch, begin_step: int, reduced: bool = False, is_sharded: bool = False
) -> Counter[str]:
    """Return what the third step has launched and waited for, which is synchronous or local."""
    peers = Peers()
    with counting(patch, peers) as operations:
        parameters, buffers = fake_parameters("ResNet-50"), fake_buffers()
        ours = SGD(parameters.values(), lr=0.1)
        worker = LocalSync(LocalSGD(8, begin_step), ours, parameters.items(), peers, lambda: buffers)
        know_what_differs(worker.buffers)
        for _ in range(3):
            give_gradients(parameters)
            operations.clear()
            Event.recorded.clear()
            with worker.stepping():
                all_reduced = parameters.values() if reduced else ()
                if is_sharded:
                    worker.prepare(reduced=all_reduced, node=WeakGroup(None))
                worker.exchange(reduced=all_reduced)
        operations.count[BYTES] = tenths_per_parameter(operations, parameters)
        return operations.count


def run_now(
    queue: Any, collectives: Callable[[Tensor], Tensor], tensors: tuple[Tensor, ...], after: Any, *, in_thread: bool
) -> Any:
    result = collectives(tensors[0] if after is None else after.wait())
    return SimpleNamespace(wait=lambda: result)


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Nothing fake stays in the caches."""
    yield
    for cached in (tensors.constant, tensors._few_weights, positions.fields_of, gpu._tile_owners, low_rank._rows):
        cached.cache_clear()


def make_peers(num_ranks: int, num_nodes: int) -> Any:
    if num_ranks == num_nodes:
        return Peers()
    topology = Topology.blocks(num_ranks, num_ranks // num_nodes)
    return TwoLevelPeers(topology, algorithm="sharded", ledger=TrafficLedger(), timeout=None)


MODELS = {"ResNet-50": resnet50_shapes, "transformer": transformer_shapes}
CHANNELS_LAST = " in channels_last"


def shapes_of(model: str) -> list[tuple[int, ...]]:
    return MODELS[model.removesuffix(CHANNELS_LAST)]()


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "SGD": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4),
    "AdamW": lambda parameters: AdamW(parameters, lr=1e-3),
    "AdamW(fused=True)": lambda parameters: AdamW(parameters, lr=1e-3, fused=True),
    "AdamW(capturable=True)": lambda p: AdamW(p, lr=torch.empty((), device="cuda"), capturable=True),
}
PLACES = {"2 ranks": (2, 2), "8 ranks": (8, 8), "64 ranks": (64, 64), "8 nodes of 8": (64, 8)}  # ranks, nodes
GRAD_SCALER = "GradScaler"
AT_A_QUARTER = "25 % of the elements"
BF16_TRUE = "bf16-true"
SHARDED, POWER_SGD, IN_GROUPS = "sharded inside nodes", "powersgd", "int8 in groups"
OTHER_METHODS: dict[str, Method] = {
    AT_A_QUARTER: DGC(sparsity=[0.75]),
    POWER_SGD: PowerSGD(),
    IN_GROUPS: QuantizedGradients("int8"),
    **{value_dtype: QuantizedGradients(value_dtype) for value_dtype in FORMATS},
}
CELLS = [
    *(("SGD", "ResNet-50", where, "") for where in ("2 ranks", "64 ranks", "8 nodes of 8")),
    ("SGD", "transformer", "8 nodes of 8", ""),
    ("AdamW", f"ResNet-50{CHANNELS_LAST}", "8 nodes of 8", ""),
    ("SGD", "ResNet-50", "8 nodes of 8", GRAD_SCALER),
    ("AdamW(fused=True)", "ResNet-50", "8 ranks", GRAD_SCALER),
    ("AdamW(capturable=True)", "ResNet-50", "8 ranks", ""),
    ("SGD", "transformer", "8 ranks", AT_A_QUARTER),
    ("SGD", "transformer", "8 nodes of 8", BF16_TRUE),
    *(("SGD", "ResNet-50", "8 ranks", name) for name in ("int8", "bfloat16")),
    ("SGD", "ResNet-50", "8 nodes of 8", "int8"),
    ("SGD", "transformer", "8 ranks", SHARDED),
    *(("SGD", "transformer", "8 ranks", name) for name in ("int8", IN_GROUPS)),
    *(("SGD", model, "8 ranks", POWER_SGD) for model in MODELS),
]


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """The rows of the table, as the document has them; with --rewrite-golden as they are found now."""
    head, *written = DOCUMENT.read_text().split(HEADING)
    if not request.config.getoption("--rewrite-golden"):
        yield {row.split(" |")[0].removeprefix("| "): row for row in "".join(written).splitlines() if row}
        return
    found: dict[str, str] = {}
    yield found
    DOCUMENT.write_text(head + HEADING + "\n".join(found.values()) + "\n")


K_STEPS = 2
LOCAL_SGD = LocalSGD(K_STEPS, 0)
HIDDEN = LocalSGD(K_STEPS, 0, outer="nesterov", delay_steps=1)
BATCH_NORM, LOGGED = " with batch norm", ", distance logged"
AVERAGES: dict[str, Method] = {
    "local SGD, ResNet-50": LOCAL_SGD,
    f"local SGD, ResNet-50{CHANNELS_LAST}": LOCAL_SGD,
    f"local SGD, ResNet-50{BATCH_NORM}": LOCAL_SGD,
    f"local SGD, ResNet-50{CHANNELS_LAST}{BATCH_NORM}": LOCAL_SGD,
    f"local SGD, ResNet-50{CHANNELS_LAST}{BATCH_NORM}{LOGGED}": LOCAL_SGD,
    f"local SGD, outer Nesterov, hidden by a step, ResNet-50{BATCH_NORM}": HIDDEN,
    f"int8, ResNet-50{BATCH_NORM}": LocalSGD(K_STEPS, 0, compression="int8"),
    f"SparseLoCo, ResNet-50{BATCH_NORM}": LocalSGD(K_STEPS, 0, compression=Compression()),
}
STEPS: dict[str, dict[str, Any]] = {
    "synchronous step of local SGD after DDP's backward pass": {"begin_step": 8, "reduced": True},
    "synchronous step of local SGD in a plain loop": {"begin_step": 8},
    f"synchronous step of local SGD, {SHARDED}": {"begin_step": 8, "is_sharded": True},
    "local step": {"begin_step": 0},
}
# By the name of the row: what counts, and the number of ranks.
COUNTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], Counter[str]], int]] = {
    **{", ".join(filter(None, cell)): (partial(count_step, cell=cell), PLACES[cell[2]][0]) for cell in CELLS},
    **{f"an average of {name}, 8 ranks": (partial(count_average, name=name), 8) for name in AVERAGES},
    **{f"a {name}, ResNet-50, 8 ranks": (partial(count_local_step, **options), 8) for name, options in STEPS.items()},
}


@contextmanager
def fake_world(num_ranks: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", COUNTS)
def test_launches(name: str, rows: dict[str, str], request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the table in benchmarks/results/launches.md says."""
    count_launches, num_ranks = COUNTS[name]
    with fake_world(num_ranks):
        count = count_launches(monkeypatch)
    num_waits = sum(number for what, number in count.items() if what.startswith("wait"))
    nbytes = count.pop(BYTES) / 10 if BYTES in count else "-"
    num_messages, num_calls = count.pop(MESSAGES, 0), count.pop(CALLS, 0)
    num_launches = count.total() - num_waits
    row = f"| {name} | {num_launches} | {num_waits} | {num_messages} | {num_calls} | {nbytes} |"
    if request.config.getoption("--rewrite-golden"):
        rows[name] = row
    assert rows[name] == row, f"pytest --rewrite-golden writes {DOCUMENT.name} anew; {count}"


def test_the_tables_of_hidden_fragments_are_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """If addresses are the same again, also while another fragment is in progress."""
    uploads = []
    with fake_world(8), counting(monkeypatch, peers := Peers()) as operations:
        exchange = QuantizedExchange(Quantized(value_dtype="int4"), peers, is_hidden=True)
        shapes = {"first": [(300, 20), (7,)], "second": [(5, 5000)]}
        fragments = [
            {f"{name} {i}": torch.empty(shape, device="cuda") for i, shape in enumerate(shapes[name])}
            for name in shapes
        ]
        for _ in range(3):
            operations.clear()
            for pending in [exchange.prepare(fragment).send() for fragment in fragments]:
                pending.wait().mean.dense()
            uploads.append(operations.count["upload"])
    assert uploads == [4, 0, 0]  # of each its table, and which tensors are in which block


def test_the_anchor_takes_no_memory_of_the_device_while_it_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReplicaBuffers, "compare", lambda *_: None)  # there are no buffers
    with fake_world(8), counting(monkeypatch, peers := Peers()) as operations:
        monkeypatch.setattr(FakeTensor, "__float__", lambda tensor: 0.0, raising=False)  # no rank has a fault
        parameters = fake_parameters("ResNet-50")
        ours = SGD(parameters.values(), lr=0.1)
        worker = LocalSync(LocalSGD(4, 0, outer="nesterov"), ours, parameters.items(), peers, dict)
        with worker.stepping():
            worker.exchange()
        operations.clear()
        worker.replica.show()
        gc.collect()
        before, numel = operations.start, sum(p.numel() for p in parameters.values())
        assert (operations.used - before) / numel < 0.01
        # The memory of a checksum, whatever the model's size; two buckets are less.
        assert operations.most - before < 14 * tensors.CHUNK


def test_whole_velocities_are_gathered_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_world(8), counting(monkeypatch, peers := make_peers(8, 2)) as operations:
        parameters = fake_parameters("ResNet-50")
        ours = SGD(parameters.values(), lr=0.1, momentum=0.9)
        worker = GradientSync(DGC(sparsity=[0.999]), ours, parameters.items(), peers)
        for parameter in parameters.values():
            worker.correction.velocity_part(parameter, peers.part(parameter.numel()))
        operations.clear()
        whole = whole_momentum(worker.correction, peers)
        assert {each.device.type for each in whole.values()} == {"cpu"}
        largest = max(4 * p.numel() for p in parameters.values())
        assert operations.most - operations.start < 4 * largest  # whatever their number: all would be eleven times it
