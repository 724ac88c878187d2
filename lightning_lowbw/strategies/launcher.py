"""Ranks that the Trainer spawns or forks: they end as those that torchrun has started, and the process here says why.

Lightning handles their exceptions only in the process that has started them, where there is nothing to save. After a
SIGTERM, which all ranks raise as a `SystemExit`, it waits for a result for ever. And a signal to it ends it alone.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.trainer.call import _call_and_handle_interrupt
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.multiprocessing import ProcessExitedException
from typing_extensions import override

AFTER_SIGTERM = 128 + signal.SIGTERM  # the exit code of a shell; Lightning's exception has it after 2.6


class Launcher(_MultiProcessingLauncher):
    """Starts ranks, asks them to end when a signal comes, and raises here what has ended them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._received: int | None = None  # the first signal here
        self._give_callbacks_back: Callable[[], None] | None = None

    # In the process that starts the ranks ---------------------------------------------------------------------------

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        self._received = None
        try:
            with self._passing_signals_on():
                return self._result(super().launch(function, *args, trainer=trainer, **kwargs))
        except BaseException as exception:
            if trainer is not None:
                # Callbacks have been told in the ranks; here one would save a model that has not been trained.
                callbacks = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
                self._give_callbacks_back = functools.partial(setattr, trainer, "callbacks", callbacks)
                trainer.callbacks = []  # type: ignore[attr-defined]
            if isinstance(exception, ProcessExitedException):
                self._result(None)  # it may have been a signal from here
            raise

    def _result(self, result: Any) -> Any:
        """Return what rank 0 has returned, or raise what has ended the ranks."""
        if self._received == signal.SIGINT:
            raise KeyboardInterrupt
        if self._received == signal.SIGTERM or (isinstance(result, SystemExit) and result.code == AFTER_SIGTERM):
            exception = SIGTERMException()
            exception.code = AFTER_SIGTERM
            raise exception
        if isinstance(result, SystemExit):
            raise result
        return result

    def end_exception(self) -> None:
        """Let the Trainer have its callbacks again, when Lightning has called those that it has."""
        if self._give_callbacks_back is not None:
            self._give_callbacks_back()
            self._give_callbacks_back = None

    @contextlib.contextmanager
    def _passing_signals_on(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        found = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)}
        replaced = {signum: handler for signum, handler in found.items() if handler not in (None, signal.SIG_IGN)}

        def pass_on(signum: int, frame: Any) -> None:
            if self._received is None:
                self._received = signum
                name = signal.Signals(signum).name
                rank_zero_info(
                    f"{name}: all ranks end after one step, with the checkpoints that callbacks save on exceptions. "
                    f"{'Another' if signum == signal.SIGINT else 'A'} Ctrl-C kills them at once."
                )
                self.kill(signal.SIGTERM)
            elif signum == signal.SIGINT:
                self.kill(signal.SIGKILL)
            handler = replaced[signal.Signals(signum)]
            if callable(handler) and handler is not signal.default_int_handler:
                handler(signum, frame)

        for signum in replaced:
            signal.signal(signum, pass_on)
        try:
            yield
        finally:
            for signum, handler in replaced.items():
                signal.signal(signum, handler)

    @property  # of Lightning's attribute, which `launch` sets when all ranks have been started
    def procs(self) -> list[Any]:
        return self._procs

    @procs.setter
    def procs(self, procs: list[Any]) -> None:
        self._procs = procs
        if procs and self._received is not None:  # meanwhile
            self.kill(signal.SIGTERM)

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_procs": []}

    # In a rank ------------------------------------------------------------------------------------------------------

    @override
    def _wrapping_function(
        self, process_idx: int, trainer: pl.Trainer | None, function: Callable[..., Any], *args: Any
    ) -> None:
        rank = os.getpid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # Ctrl-C comes to all, or when the first process has been killed. Not for processes of a DataLoader.
        signal.signal(signal.SIGINT, lambda *_: signal.raise_signal(signal.SIGTERM) if os.getpid() == rank else None)
        if trainer is not None:
            function = functools.partial(_run, trainer, function)
        super()._wrapping_function(process_idx, trainer, function, *args)


def _run(trainer: pl.Trainer, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Return what a rank returns; also the exit code, as an exception, if it is 0, or that of a SIGTERM.

    With the code 0 it would leave no result. With another the first rank that ends would be the end of the others.
    """
    trainer.strategy._launcher = None  # this is a rank: its exceptions are handled here
    try:
        return _call_and_handle_interrupt(trainer, function, *args, **kwargs)
    except SIGTERMException:
        return SystemExit(AFTER_SIGTERM)
    except SystemExit as ending:
        if ending.code:
            raise
        return SystemExit(ending.code)
