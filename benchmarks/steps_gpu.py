"""What a step of each method waits for, holds in memory and launches on a GPU, with echoes for ranks (`ops_gpu`).

    python benchmarks/steps_gpu.py waits      # where the host waits; more often than results/launches.md says fails
    python benchmarks/steps_gpu.py memory     # bytes per parameter at most, at 100M and 1B, beside their formulas
    python benchmarks/steps_gpu.py profile    # three steps of dgc on ResNet-50: launches, idle time, time per kernel
    python benchmarks/steps_gpu.py training   # milliseconds per batch of real trainings, beside those without peers

The results are written anew after each row. A CPU (`--device cpu`) takes the steps of a tiny model: it has no waits,
its allocator does not count, and layers are compiled without code. `make gpu` runs all four.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import prod
from pathlib import Path
from statistics import median, quantiles
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.data import DataLoader

from benchmarks.beside_ddp.tasks import be_quiet
from benchmarks.harness import describe_environment as describe_host
from benchmarks.ops_gpu import (
    RESULTS,
    WIDTHS,
    Step,
    decoder_shapes,
    describe_environment,
    echo,
    prepare,
    release,
    sizes_for,
    step_of,
    waits_of,
)
from lightning_lowbw import DGC, LocalSGD, Method, PowerSGD, QuantizedGradients, Strategy
from lightning_lowbw.kernels.gpu import NUM_RANGES
from lightning_lowbw.kernels.tensors import device_of
from lightning_lowbw.payloads.top_k import DECODED_BYTES, ELEMENT_BYTES
from lightning_lowbw.presets import preset
from lightning_lowbw.sync.gradient import GradientSync
from lightning_lowbw.sync.local import LocalSync
from tests.shapes import resnet50_shapes

NUM_RANKS, K_STEPS = 8, 2
IN_MESSAGE = 2.5  # bytes of an element: bfloat16, and about 4 bits of position
DECODED = DECODED_BYTES * 12 / ELEMENT_BYTES  # of those that are decoded at once: 4 more in between
SLACK = 1.1, 0.25  # of a formula: times, and bytes per parameter
STATE = 16  # bytes per parameter that are there before: weight, gradient, momentum, residual
PROFILED_STEPS = 3
PART = "lowbw: "  # of the package's own names in a profile


def of_messages(numel: int, *, density: float, more: float = 0.0) -> float:
    """Return what the messages of all ranks take, and what is decoded of them at once; `more`: means or changes."""
    num_sent = NUM_RANKS * density * numel
    return more + (num_sent * IN_MESSAGE + min(num_sent * 12, DECODED)) / numel


def of_few_bits(numel: int, *, num_bytes: float) -> float:
    """Return the message, what has been received, and the mean of a part."""
    return (2 + 1 / NUM_RANKS) * num_bytes


@dataclass(frozen=True)
class Case:
    """A method, and what a step of it may cost.

    Attributes:
        nbytes: per parameter, beyond what is there before the step, for a number of parameters; None: not measured.
        waits: at most.
    """

    method: Method
    nbytes: Callable[[int], float] | None = None
    waits: int = 1
    dtype: torch.dtype = torch.float32


CASES = {
    "dgc": Case(DGC(sparsity=[0.999]), partial(of_messages, density=0.001)),
    "dgc at 25 %": Case(DGC(sparsity=[0.75]), partial(of_messages, density=0.25)),
    "dgc, bf16-true": Case(
        DGC(sparsity=[0.999]), partial(of_messages, density=0.001, more=4 / NUM_RANGES), dtype=torch.bfloat16
    ),
    "int8": Case(QuantizedGradients("int8"), partial(of_few_bits, num_bytes=1 + 2 / 128)),
    "int4": Case(QuantizedGradients("int4"), partial(of_few_bits, num_bytes=0.5 + 2 / 128)),
    "bfloat16": Case(QuantizedGradients("bfloat16"), partial(of_few_bits, num_bytes=2)),
    "powersgd": Case(PowerSGD(2)),
    "local SGD, synchronous": Case(LocalSGD(K_STEPS, begin_step=1 << 20)),
    "local SGD": Case(LocalSGD(K_STEPS, 0)),
    "local SGD, hidden": Case(LocalSGD(K_STEPS, 0, delay_steps=1)),
    "diloco": Case(LocalSGD(K_STEPS, 0, outer="nesterov")),
    "sparse_loco": Case(preset("sparse_loco").replace(k_steps=K_STEPS), partial(of_messages, density=1 / 64, more=8)),
}


def make_step(case: Case, shapes: list[tuple[int, ...]], device: torch.device) -> Step:
    """Return a step of plain SGD with momentum; its `refresh` draws gradients."""
    parameters = [Parameter(torch.randn(shape, device=device).mul_(0.01).to(case.dtype)) for shape in shapes]
    optimizer = SGD(parameters, lr=1e-3, momentum=0.9)

    def refresh() -> None:
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter) if parameter.grad is None else parameter.grad.normal_()

    return step_of(make_worker(case.method, optimizer), optimizer, refresh)


def make_worker(method: Method, optimizer: SGD) -> Any:
    """Return what exchanges for an optimizer."""
    (group,), peers = optimizer.param_groups, echo(NUM_RANKS)
    named = [(str(number), parameter) for number, parameter in enumerate(group["params"])]
    if method.when.averages_weights:
        return LocalSync(method, optimizer, named, peers, {})
    return GradientSync(method, optimizer, named, peers)


def warmed_up(case: Case, shapes: list[tuple[int, ...]], device: torch.device) -> Step:
    """Return a step after some others: those that compile, and allocate what is kept."""
    step = make_step(case, shapes, device)
    for _ in range(2 * K_STEPS):
        step.refresh()  # type: ignore[attr-defined]
        step()
    return step


def wait_rows(device: torch.device, sizes: list[str]) -> list[Callable[[], dict[str, Any]]]:
    """Return what measures the waits of each method: of as many steps as lie between two averages."""

    def measure(name: str, case: Case) -> dict[str, Any]:
        step, waits = warmed_up(case, resnet50_shapes() if device.type == "cuda" else shapes_of("tiny"), device), []
        for _ in range(K_STEPS if case.method.when.averages_weights and "synchronous" not in name else 1):
            step.refresh()  # type: ignore[attr-defined]
            waits += waits_of(step, device)
        return {"name": name, "waits": waits, "allowed": case.waits, "failed": len(waits) > case.waits}

    return [partial(measure, name, case) for name, case in CASES.items()]


def shapes_of(size: str) -> list[tuple[int, ...]]:
    return decoder_shapes(*WIDTHS[size])


def memory_rows(device: torch.device, sizes: list[str]) -> list[Callable[[], dict[str, Any]]]:
    """Return what measures the memory of each method with a formula, in units of bytes per parameter."""

    def measure(size: str, name: str, case: Case) -> dict[str, Any]:
        shapes = shapes_of(size)
        numel = sum(map(prod, shapes))
        assert case.nbytes is not None
        formula = case.nbytes(numel)
        row: dict[str, Any] = {"name": f"{name}, {size}", "parameters": numel, "formula": round(formula, 2)}
        if device.type == "cpu":
            warmed_up(case, shapes, device)()
            return row | {"bytes": None, "failed": False}
        if torch.cuda.mem_get_info()[0] < numel * (STATE + SLACK[0] * formula + SLACK[1]) * SLACK[0]:
            return row | {"bytes": None, "no room": True, "failed": False}
        step, most = warmed_up(case, shapes, device), 0
        for _ in range(K_STEPS):
            step.refresh()  # type: ignore[attr-defined]
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step()
            most = max(most, torch.cuda.max_memory_allocated() - before)
        return row | {
            "bytes": round(most / numel, 2),
            "failed": most / numel > SLACK[0] * formula + SLACK[1],
        }

    cases = [(name, case) for name, case in CASES.items() if case.nbytes]
    return [partial(measure, size, name, case) for size in sizes for name, case in cases]


def profile_rows(device: torch.device, sizes: list[str]) -> list[Callable[[], dict[str, Any]]]:
    """Return what profiles steps of dgc on ResNet-50."""

    def measure() -> dict[str, Any]:
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        step = warmed_up(CASES["dgc"], resnet50_shapes() if device.type == "cuda" else shapes_of("tiny"), device)
        activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (device.type == "cuda")]
        step.refresh()  # type: ignore[attr-defined]
        with profile(activities=activities) as profiler:
            for _ in range(PROFILED_STEPS):
                step.refresh()  # type: ignore[attr-defined]
                with torch.profiler.record_function("the step"):
                    step()
            if device.type == "cuda":
                torch.cuda.synchronize()
        events = list(profiler.events() or ())
        on_host = [each for each in events if each.device_type == DeviceType.CPU]
        annotations = {each.name for each in on_host}  # some of which are shown on the device, too
        on_device = [each for each in events if each.device_type == DeviceType.CUDA and each.name not in annotations]
        on_device.sort(key=lambda each: each.time_range.start)
        steps = [each.time_range for each in on_host if each.name == "the step"]
        parts_us, time_us = Counter[str](), Counter[str]()
        for each in on_host:
            if each.name.startswith(PART):
                parts_us[each.name.removeprefix(PART)] += each.time_range.elapsed_us()
        for each in on_device:
            time_us[short_name(each.name)] += each.time_range.elapsed_us()
        # After the one copy to the host the device has nothing to do until the host has read it.
        pairs = pairwise(on_device)
        idle_us = [b.time_range.start - a.time_range.end for a, b in pairs if "DtoH" in a.name]
        launches = sum(
            each.name.startswith(("cudaLaunch", "cuLaunch", "cudaMemcpy", "cudaMemset"))
            and any(step.start <= each.time_range.start <= step.end for step in steps)
            for each in on_host
        )
        return {
            "name": "dgc, ResNet-50",
            "steps": PROFILED_STEPS,
            "launches and copies per step": round(launches / PROFILED_STEPS, 1),
            "idle us after the control message": [round(each, 1) for each in idle_us],
            "us of the host per step by part, one in another": {
                name: round(us / PROFILED_STEPS, 1) for name, us in parts_us.most_common()
            },
            "us per step by kernel, with those that draw gradients": {
                name: round(us / PROFILED_STEPS, 2) for name, us in time_us.most_common()
            },
            "failed": device.type == "cuda" and not launches,
        }

    return [measure]


class Decoder(nn.Module):
    """A transformer on tokens, which it is to repeat: its time is what counts."""

    def __init__(self, width: int, num_layers: int, num_tokens: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_tokens, width)
        layer = nn.TransformerEncoderLayer(width, 16, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, num_tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.head(self.layers(self.embedding(tokens)))
        return scores.flatten(0, 1)


AVERAGED = 8  # batches between two averages of the trainings
TRAININGS = {
    **{name: CASES[name].method for name in ("dgc", "int8", "powersgd")},
    f"local SGD, k = {AVERAGED}": LocalSGD(AVERAGED, 0),
}
HOOKS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "torch's fp16 hook": lambda: (None, default_hooks.fp16_compress_hook),
    "torch's PowerSGD hook, rank 2": lambda: (power_sgd_state(), powerSGD_hook.powerSGD_hook),
}
LOOP = "fused SGD, bfloat16 autocast, a plain loop: peers are echoes, torch's hooks in DDP among one rank of {}"
TRAINER = "fused SGD, bf16-mixed, a Trainer with DDP among one rank of {}: peers are echoes; alone is strategy ddp"


def power_sgd_state() -> powerSGD_hook.PowerSGDState:
    """Return that of torch's hook with the rank of ours, which begins with the first step that may."""
    return powerSGD_hook.PowerSGDState(process_group=None, matrix_approximation_rank=2, start_powerSGD_iter=2)


@dataclass(frozen=True)
class Training:
    """A model with a batch, and what trains it: a row.

    Attributes:
        methods: beside "alone"; names of `TRAININGS` and `HOOKS`.
        what: how it is trained, for the reader.
        is_compiled: whether `torch.compile` must have made a graph.
        is_in_trainer: whether Lightning's loop trains it.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: Tensor
    targets: Tensor
    methods: tuple[str, ...]
    what: str
    is_compiled: bool = False
    is_in_trainer: bool = False


def compiled(make: Callable[[], nn.Module], device: torch.device) -> nn.Module:
    """Return a decoder whose layers are compiled: as one, for they are alike."""
    model: Any = make()
    for number, layer in enumerate(model.layers.layers):  # not by `layer.compile`, which leaves out torch's own layers
        model.layers.layers[number] = torch.compile(layer, backend="inductor" if device.type == "cuda" else "aot_eager")
    return model  # type: ignore[no-any-return]


def trainings(device: torch.device) -> list[Training]:
    """Return what is trained, what matters most first."""
    is_cuda = device.type == "cuda"
    shape, num_tokens, width, num_layers = ((16, 512), 16_384, 1024, 12) if is_cuda else ((2, 8), 64, 32, 2)
    tokens, backend = torch.randint(num_tokens, shape, device=device), "NCCL" if is_cuda else "gloo"
    make, name = partial(Decoder, width, num_layers, num_tokens), f"decoder, {shape[0]} x {shape[1]} tokens"
    eager, in_loop = partial(Training, name, make, tokens, tokens.flatten()), LOOP.format(backend)
    found = [eager((*TRAININGS, *HOOKS), f"eager, {in_loop}")]
    if importlib.util.find_spec("torchvision"):
        from torchvision.models import resnet18, resnet50

        make_resnet, num_images, size = (resnet50, 64, 224) if is_cuda else (resnet18, 2, 32)
        images = torch.randn(num_images, 3, size, size, device=device).to(memory_format=torch.channels_last)
        named = f"{make_resnet.__name__.replace('resnet', 'ResNet-')}, {num_images} images", make_resnet, images
        targets = torch.randint(1000, (num_images,), device=device)
        found.append(Training(*named, targets, ("dgc",), f"eager, {in_loop}"))
    by_layer = f"{name}, compiled", partial(compiled, make, device), tokens, tokens.flatten(), ("dgc",)
    found.append(Training(*by_layer, f"compiled, {in_loop}", is_compiled=True))
    in_trainer = f"{name}, in a Trainer", make, tokens, tokens.flatten(), ("dgc", "int8")
    return [*found, Training(*in_trainer, f"eager, {TRAINER.format(backend)}", is_in_trainer=True)]


def training_rows(device: torch.device, sizes: list[str]) -> list[Callable[[], dict[str, Any]]]:
    """Return what measures a batch of a training: forward, backward, exchange, step.

    The host runs ahead of the device, as in any training, until it reads the control message.
    """
    return [partial(measure_training, training, device) for training in trainings(device)]


def measure_training(training: Training, device: torch.device) -> dict[str, Any]:
    """Return the times of a training by each method, which take turns: a drift of the clock is a spread."""
    torch.manual_seed(0)
    counters.clear()
    model = training.make().to(device, memory_format=torch.channels_last)  # of parameters with four dimensions
    ms: dict[str, list[float]] = {}
    kernels: dict[str, Counter[str]] = {}
    host: dict[str, dict[str, float]] = {}
    with one_rank(device):
        for turn in range(2):
            for method in ("alone", *training.methods):
                if training.is_in_trainer:
                    ms.setdefault(method, []).extend(trainer_ms(training, model, method, device))
                else:
                    train = trained_by(method, model, training.batch, training.targets)
                    ms.setdefault(method, []).extend(times_ms(train, device))
                    if turn == 0:
                        kernels[method] = kernels_us(train) if device.type == "cuda" else Counter()
                        host[method] = host_ms(train, device)
                    del train
                release(device)
    alone, num_graphs = median(ms["alone"]), counters["stats"]["unique_graphs"]
    more = {method: Counter({k: us - kernels["alone"][k] for k, us in of.items()}) for method, of in kernels.items()}
    return {
        "name": training.name,
        "what": training.what,
        "parameters": sum(each.numel() for each in model.parameters()),
        "us per empty launch": empty_launch_us(device),
        "ms per batch": {each: [round(median(taken), 2), round(min(taken), 2)] for each, taken in ms.items()},
        "quartiles": {each: [round(ms, 2) for ms in quantiles(taken, n=4)] for each, taken in ms.items()},
        "of alone": {each: round(median(taken) / alone, 3) for each, taken in ms.items()},
        "ms of the host in a step": host,
        "ms per batch in kernels": {each: round(us.total() / 1e3, 2) for each, us in kernels.items()},
        "us per batch more than alone, by kernel": {
            each: {name: round(us) for name, us in of.most_common(8)} for each, of in more.items() if each != "alone"
        },
        "compiled graphs": num_graphs,
        "failed": training.is_compiled != bool(num_graphs),
    }


@contextmanager
def one_rank(device: torch.device) -> Iterator[None]:
    """Have a process group of this process alone, which torch's hooks and a Trainer want."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def trained_by(method: str, model: nn.Module, batch: Tensor, targets: Tensor) -> Callable[[], float]:
    """Return a batch of a plain loop, and in it when backward has ended."""
    if method in HOOKS:
        ids = [batch.device.index or 0] if batch.device.type == "cuda" else None
        model = DistributedDataParallel(deepcopy(model), device_ids=ids)
        model.register_comm_hook(*HOOKS[method]())
    optimizer = SGD(model.parameters(), lr=1e-6, momentum=0.9, fused=True)
    step: Callable[[], Any] = optimizer.step
    if method in TRAININGS:
        step = step_of(make_worker(TRAININGS[method], optimizer), optimizer, lambda: None)

    def train() -> float:
        with torch.autocast(batch.device.type, torch.bfloat16):
            loss = nn.functional.cross_entropy(model(batch), targets)
        optimizer.zero_grad()
        loss.backward()
        begun = time.perf_counter()
        step()
        return begun

    return train


class Scored(pl.LightningModule):
    """The same for a Trainer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> SGD:
        return SGD(self.parameters(), lr=1e-6, momentum=0.9, fused=True)


class Echoed(Strategy):
    """A strategy of one rank whose peers are echoes of it."""

    def _make_peers(self, group: dist.ProcessGroup | None) -> None:
        self.peers = self._worker_peers = echo(NUM_RANKS)


class Clock(pl.Callback):
    """Takes the time before the batches of each run, and when the last have ended."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds = device, list[float]()
        self.untimed, self.runs, self.batches = BATCHES[device.type]

    @property
    def num_batches(self) -> int:
        return self.untimed + self.runs * self.batches

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx >= self.untimed and (batch_idx - self.untimed) % self.batches == 0:
            self.on_train_end()

    def on_train_end(self, *_: Any) -> None:
        synchronize(self.device)
        self.seconds.append(time.perf_counter())


def trainer_ms(training: Training, model: nn.Module, method: str, device: torch.device) -> list[float]:
    """Return what `times_ms` does, of the batches of a Trainer."""
    be_quiet()
    clock = Clock(device)
    trainer = pl.Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=1,
        strategy=DDPStrategy() if method == "alone" else Echoed(TRAININGS[method]),
        precision="bf16-mixed",
        max_epochs=1,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batches = DataLoader([(training.batch, training.targets)] * clock.num_batches, batch_size=None)  # type: ignore[arg-type]
    trainer.fit(Scored(model), batches)
    return [1e3 * (after - before) / clock.batches for before, after in pairwise(clock.seconds)]


def host_ms(train: Callable[[], float], device: torch.device) -> dict[str, float]:
    """Return the milliseconds of the host from the end of backward: before it waits, in the wait, and after it."""
    kind, waits = type(device_of(device)), list[tuple[float, float]]()
    download = kind.download

    def stamped(self: Any, numbers: Tensor) -> Callable[[], list[float]]:
        read = download(self, numbers)

        def reading() -> list[float]:
            begun = time.perf_counter()
            values = read()
            waits.append((begun, time.perf_counter()))
            return values

        return reading

    steps = list[tuple[float, float, float, bool]]()
    kind.download = stamped  # type: ignore[method-assign]
    try:
        for _ in range(2 * AVERAGED):
            waits.clear()
            begun = train()
            ended = time.perf_counter()
            first, last = (waits[0][0], waits[-1][1]) if waits else (ended, ended)
            steps.append((first - begun, last - first, ended - last, bool(waits)))
    finally:
        kind.download = download  # type: ignore[method-assign]
    exchanging = [step for step in steps if step[-1]] or steps  # of local SGD the averages
    parts = zip(("before", "in", "after"), zip(*exchanging, strict=True), strict=False)
    return {name: round(1e3 * median(seconds), 3) for name, seconds in parts}


def empty_launch_us(device: torch.device) -> float:
    """Return the microseconds of the host for an operation that does next to nothing: the yardstick of a host."""
    one = torch.zeros(1, device=device)
    started = time.perf_counter()
    for _ in range(1000):
        one.add_(1)
    return round(1e3 * (time.perf_counter() - started), 2)


def kernels_us(train: Callable[[], Any]) -> Counter[str]:
    """Return the microseconds per batch of each kernel."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED_STEPS):
            train()
        torch.cuda.synchronize()
    found = Counter[str]()
    for event in profiler.events() or ():
        if event.device_type == DeviceType.CUDA:
            found[short_name(event.name)] += event.time_range.elapsed_us() / PROFILED_STEPS
    return found


def short_name(kernel: str) -> str:
    """Return the name of a kernel without what all of torch's have, and without most of its template."""
    for prefix in ("void ", "at::native::", "(anonymous namespace)::", "at_cuda_detail::cub::detail::"):
        kernel = kernel.replace(prefix, "")
    return kernel[:100]


# Untimed, runs, and the batches of a run; in two turns of each method, together more than a hundred on a GPU.
BATCHES = {"cuda": (8, 7, AVERAGED), "cpu": (4, 2, 2)}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def times_ms(train: Callable[[], Any], device: torch.device) -> list[float]:
    """Return the milliseconds per batch of some runs of batches, between which the host waits for the device."""
    untimed, runs, batches = BATCHES[device.type]
    for _ in range(untimed):
        train()
    found = []
    for _ in range(runs):
        synchronize(device)
        started = time.perf_counter()
        for _ in range(batches):
            train()
        synchronize(device)
        found.append(1e3 * (time.perf_counter() - started) / batches)
    return found


KINDS = {"waits": wait_rows, "memory": memory_rows, "profile": profile_rows, "training": training_rows}


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=Path, default=RESULTS / "steps_gpu", help="of the results, without a suffix")
    options = parser.parse_args()
    device = torch.device(options.device)
    prepare(device)
    environment = {**describe_environment(device), "cpu": describe_host(None)["cpu"]}
    results: dict[str, Any] = {"environment": environment, "rows": []}
    for measure in KINDS[options.kind](device, [size for size in sizes_for(device) if size != "25M"]):
        results["rows"].append(measure())
        print(json.dumps(results["rows"][-1]), flush=True)
        options.out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
        release(device)
    failed = [row["name"] for row in results["rows"] if row["failed"]]
    of_cpu = ", on a CPU, which shows only that it runs" if device.type == "cpu" else ""
    print(f"{len(results['rows'])} rows{of_cpu}; beyond what is documented: {', '.join(failed) or 'none'}")
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
