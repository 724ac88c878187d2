"""Run a function on several real gloo ranks.

Starting ranks is what costs, so they stay: a pool of processes serves all tests of a module, and each call makes a
process group of its own in them. Between calls a rank forgets what the function left behind (`_Left`). They are forked
from a server that has everything loaded (`tests/preloaded.py`).
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import io
import logging
import multiprocessing
import operator
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

# The functions of these modules are put back if a test replaces one in a rank.
PATCHED = ("lightning_lowbw", "torch.distributed", "torch.optim", "lightning.pytorch.strategies")


class _Rank:
    """A process that runs one function after the other."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.preloaded"])
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,))
        self.process.start()
        theirs.close()

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


_idle: list[_Rank] = []


def run_ranks(function: Any, num_ranks: int, *args: Any, timeout_s: float = 120.0, fresh: bool = False) -> list[Any]:
    """Return what `function(*args)` returns on each rank.

    The ranks look to Lightning as if torchrun had started them; the process group is there already.

    Args:
        timeout_s: after which the ranks are killed.
        fresh: whether the ranks are processes that have run nothing before and end with this call, for a function that
            changes its process for good (signals, memory, threads).

    Raises:
        AssertionError: a rank failed, with its traceback, or the time is over, with where each rank was then; all ranks
            have ended.
    """
    ranks = [_Rank() for _ in range(num_ranks)] if fresh else _take(num_ranks)
    is_done = False
    try:
        with tempfile.TemporaryDirectory() as folder:
            # Within one deadline, whatever it is that takes long.
            deadline = time.monotonic() + timeout_s
            for number, rank in enumerate(ranks):
                _send(rank, (number, num_ranks, f"{folder}/store", deadline, os.getcwd(), function, args))
            try:
                results = _collect([rank.connection for rank in ranks], deadline)
            except TimeoutError as error:
                raise AssertionError(f"{error}\n{_stacks(f'{folder}/store', num_ranks)}") from None
            is_done = True
            return results
    finally:
        if is_done and not fresh:
            _idle[:0] = ranks
        else:
            for rank in ranks:
                rank.end()


def on_ranks(num_ranks: int = 2, **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a test run on each of some ranks, as many as its argument `num_ranks` says if it has one.

    Args:
        options: of `run_ranks`.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**arguments: Any) -> None:
            if dist.is_initialized():  # the rank finds the test by its name
                test(**arguments)
            else:
                run_ranks(functools.partial(run, **arguments), arguments.get("num_ranks", num_ranks), **options)

        return run

    return decorate


def end_ranks() -> None:
    """End the ranks that wait for a function."""
    while _idle:
        _idle.pop().end()


def idle_processes() -> list[Any]:
    return [rank.process for rank in _idle]


atexit.register(end_ranks)  # before multiprocessing waits for them


def _take(num_ranks: int) -> list[_Rank]:
    ranks = [_idle.pop(0) for _ in range(min(num_ranks, len(_idle)))]
    for rank in [rank for rank in ranks if not rank.process.is_alive()]:
        ranks.remove(rank)
        rank.end()
    return ranks + [_Rank() for _ in range(num_ranks - len(ranks))]


def _send(rank: _Rank, job: tuple[Any, ...]) -> None:
    buffer = io.BytesIO()
    torch.save(job, buffer)
    with contextlib.suppress(OSError):  # it died: its end is read as such
        rank.connection.send_bytes(buffer.getvalue())


def _collect(connections: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(connections):
        waiting = {connection: rank for rank, connection in enumerate(connections) if rank not in results}
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"Ranks {sorted(waiting.values())} did not end in time.")
        for connection in ready:
            rank = waiting[connection]
            try:
                succeeded, payload = connection.recv()
            except (EOFError, ConnectionResetError) as error:
                raise AssertionError(f"Rank {rank} died without a word.") from error
            if not succeeded:
                raise AssertionError(f"Rank {rank} failed:\n{payload}")
            results[rank] = torch.load(io.BytesIO(payload), weights_only=False)
    return [results[rank] for rank in range(len(connections))]


def _stacks(store: str, num_ranks: int) -> str:
    """Return where each rank was at the deadline, in all its threads."""
    time.sleep(1.0)
    files = (Path(f"{store}.stacks{rank}") for rank in range(num_ranks))
    texts = [file.read_text() if file.exists() else "it has not begun" for file in files]
    return "\n".join(f"Rank {rank}:\n{text}" for rank, text in enumerate(texts))


# In a rank.


def _serve(connection: Connection) -> None:
    torch.set_num_threads(1)
    left = _Left()
    while True:
        try:
            job = connection.recv_bytes()
        except EOFError:  # whoever ran the tests is gone
            break
        try:
            left.forget()
            with warnings.catch_warnings():
                result = _run(*torch.load(io.BytesIO(job), weights_only=False))
        except BaseException:  # noqa: BLE001 - whatever it is, the parent shows it
            with contextlib.suppress(OSError):
                connection.send((False, traceback.format_exc()))
            break
        with contextlib.suppress(OSError):
            connection.send((True, result))
        del job, result
    connection.close()
    # Without a word of goodbye: a peer that failed would be waited for.
    os._exit(0)


def _run(rank: int, num_ranks: int, store: str, deadline: float, folder: str, function: Any, args: Any) -> bytes:
    os.chdir(folder)
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(num_ranks))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "GROUP_RANK": "0"}
    os.environ |= {"TORCHELASTIC_RUN_ID": "tests", "GLOO_SOCKET_IFNAME": "lo"}
    with open(f"{store}.stacks{rank}", "w") as stacks:
        # By a thread of C: no lock that a rank that hangs may hold, no signal that a Trainer gives another handler.
        faulthandler.dump_traceback_later(max(0.01, deadline - time.monotonic()), file=stacks)
        try:
            return _result(rank, num_ranks, store, function, args)
        finally:
            faulthandler.cancel_dump_traceback_later()


def _result(rank: int, num_ranks: int, store: str, function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    dist.barrier()  # a function may destroy the group at once, while another rank still connects
    buffer = io.BytesIO()
    torch.save(function(*args), buffer)
    if dist.is_initialized():  # the function may have ended it
        dist.barrier()
    return buffer.getvalue()


class _Left:
    """What a function may leave behind in its process, and what was there before the first one."""

    def __init__(self) -> None:
        import numpy as np
        from lightning_utilities.core.rank_zero import rank_zero_only

        self.np, self.rank_zero_only = np, rank_zero_only
        self.environment = dict(os.environ)
        self.generators = torch.get_rng_state(), random.getstate(), np.random.get_state()
        self.handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
        self.dtype = torch.get_default_dtype()
        self.threads = torch.get_num_threads()
        self.rank = getattr(rank_zero_only, "rank", 0)
        self.loggers, self.names, self.warned = what_is_loaded()

    def forget(self) -> None:
        """Put everything back. After the first function all its ranks have ended it, and no peer is left waiting."""
        if dist.is_initialized():
            dist.destroy_process_group()
        for module, names in self.names.items():
            current = vars(module)
            if len(current) == len(names) and all(map(operator.is_, current.values(), names.values())):
                continue
            current.update({name: value for name, value in names.items() if current.get(name) is not value})
        if (groups := sys.modules.get("lightning_lowbw.comm.collectives")) is not None:
            getattr(groups, "_groups", {}).clear()  # groups of worlds that are gone
        os.environ.clear()
        os.environ.update(self.environment)
        torch_state, python_state, numpy_state = self.generators
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        self.np.random.set_state(numpy_state)
        for number, handler in self.handlers.items():
            if handler is not None and signal.getsignal(number) != handler:
                signal.signal(number, handler)
        torch.set_default_dtype(self.dtype)
        torch.set_num_threads(self.threads)
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(False)
        self.rank_zero_only.rank = self.rank
        for logger in _loggers():
            settings = self.loggers.get(logger, (logging.NOTSET, [], True, [], False))
            logger.level, logger.handlers, logger.propagate, logger.filters, logger.disabled = settings
            logger.handlers, logger.filters = [*logger.handlers], [*logger.filters]
        logging.Logger.manager._clear_cache()
        for cache in self.warned:
            cache.clear()
        gc.collect()


@functools.cache
def what_is_loaded() -> tuple[dict[logging.Logger, Any], dict[ModuleType, dict[str, Any]], list[Any]]:
    """Return loggers, names and what warns once as they are: in the server, or each rank would copy its memory."""
    from lightning_utilities.core.rank_zero import WarningCache

    values = [value for module in _modules(("lightning",)) for value in vars(module).values()]
    return (
        {logger: _settings(logger) for logger in _loggers()},
        {module: dict(vars(module)) for module in _modules(PATCHED)},
        [value for value in values if type(value) is WarningCache],
    )


def _loggers() -> list[logging.Logger]:
    known = [each for each in logging.Logger.manager.loggerDict.values() if isinstance(each, logging.Logger)]
    return [logging.getLogger(), *known]


def _settings(logger: logging.Logger) -> tuple[int, list[logging.Handler], bool, list[Any], bool]:
    return logger.level, [*logger.handlers], logger.propagate, [*logger.filters], logger.disabled


def _modules(names: tuple[str, ...]) -> list[ModuleType]:
    return [module for name, module in sys.modules.items() if name.startswith(names) if type(module) is ModuleType]
