"""Guards: a test that changes what the next one finds fails, and the next one finds it as it was."""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import random
import statistics
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.reliability import Recorder
from tests.ranks import end_ranks, idle_processes

# Written by pytest itself; and by libraries when they are first imported, which may happen inside of a test.
NOT_OURS = ("PYTEST_", "KMP_", "TORCHINDUCTOR_", "TRITON_", "CUDA_", "TZ")
DURATIONS = Path(__file__).with_name("durations.json")  # seconds of each file, of a run with --write-durations
GRACE_S = 2.0  # for a thread or process that is about to end

torch.set_num_threads(1)  # the tensors are small, and the other cores have the ranks
if hasattr(os, "SCHED_BATCH"):
    # A thread that is woken up waits for its turn. Otherwise gloo's own thread interrupts one that has just sent and
    # still holds the lock that it needs, and polls until that one has its turn: a tenth of the time of all tests.
    with contextlib.suppress(OSError):  # not everywhere allowed
        if os.sched_getscheduler(0) == os.SCHED_OTHER:  # who started the tests at idle priority keeps that
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", default="0/1", help="3/8: the fourth of eight parts of the tests")
    parser.addoption("--rewrite-golden", action="store_true", help="record the golden trajectories anew")
    parser.addoption("--write-durations", action="store_true", help="write tests/durations.json; in a run of all tests")
    parser.addoption("--rewrite-reliability", action="store_true", help="write benchmarks/results/reliability.md anew")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--rewrite-reliability"):
        config.pluginmanager.register(Recorder())
    if config.getoption("--write-durations") and not hasattr(config, "workerinput"):  # not in workers of pytest-xdist
        config.pluginmanager.register(_Durations())


class _Durations:
    """Writes the seconds of each file, from which the next runs take the order of the files."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid.partition("::")[0]] += report.duration  # type: ignore[assignment]

    def pytest_sessionfinish(self) -> None:
        rounded = {path: round(seconds, 1) for path, seconds in sorted(self.seconds.items())}
        DURATIONS.write_text(json.dumps(rounded, indent=0) + "\n")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.hookimpl(trylast=True)  # of what `-m` and `-k` have left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the files that take long, so that no worker of pytest-xdist is left alone with one at the end.

    A file without a recorded duration comes in the middle.
    """
    seconds = json.loads(DURATIONS.read_text())
    middle = statistics.median(seconds.values())
    items.sort(key=lambda item: -seconds.get(item.nodeid.partition("::")[0], middle))
    number, num_shards = map(int, config.getoption("--shard").split("/"))
    items[:] = items[number::num_shards]


def pytest_collection_finish() -> None:
    """What has been imported stays: the collector of garbage need not look through it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _ranks_of_the_module() -> Iterator[None]:
    """The processes of `run_ranks` serve all tests of a module."""
    yield
    end_ranks()


@pytest.fixture(autouse=True)
def _no_leaked_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    leaked = {name for name in changed if not name.startswith(NOT_OURS)}
    for name in leaked:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    if leaked:
        pytest.fail(f"The test left environment variables changed: {', '.join(sorted(leaked))}. Use monkeypatch.")


@pytest.fixture(autouse=True)
def _no_leaked_process_group() -> Iterator[None]:
    yield
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("The test left a process group initialised. Use tests.ranks.run_ranks.")


@pytest.fixture(autouse=True)
def _no_leaked_threads_or_processes() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    new = [thread for thread in threading.enumerate() if thread not in before and not thread.daemon]
    for thread in new:
        thread.join(GRACE_S)
    names = [thread.name for thread in new if thread.is_alive()]
    for process in set(multiprocessing.active_children()) - set(idle_processes()):
        process.join(GRACE_S)
        if process.is_alive():
            names.append(process.name)
            process.kill()
            process.join()
    if names:
        pytest.fail(f"The test left threads or processes running: {', '.join(names)}.")


@pytest.fixture(autouse=True)
def _no_leaked_torch_settings() -> Iterator[None]:
    before = _torch_settings()
    yield
    after = _torch_settings()
    torch.set_default_dtype(before["default dtype"])  # type: ignore[arg-type]
    if after["deterministic algorithms"] != before["deterministic algorithms"]:  # loads the compiler's options, in 1 s
        torch.use_deterministic_algorithms(bool(before["deterministic algorithms"]))
    torch.set_num_threads(before["threads"])  # type: ignore[arg-type]
    torch.set_grad_enabled(bool(before["gradients"]))
    changed = [f"{name} {before[name]} -> {after[name]}" for name in before if before[name] != after[name]]
    if changed:
        pytest.fail(f"The test left torch changed: {'; '.join(changed)}.")


def _torch_settings() -> dict[str, object]:
    return {
        "default dtype": torch.get_default_dtype(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
        "gradients": torch.is_grad_enabled(),
    }


@pytest.fixture(autouse=True)
def _own_random_numbers() -> Iterator[None]:
    """Start every test from the same seed and give the generators back: seeding inside of a test is no leak then."""
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    torch.default_generator.manual_seed(0)  # `torch.manual_seed` keeps a traceback for each kind of device, in 4 ms
    random.seed(0)
    yield
    torch.set_rng_state(torch_state)
    random.setstate(python_state)
