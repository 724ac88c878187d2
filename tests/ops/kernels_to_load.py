"""The variants of the compiled pass, loaded in the process that ranks are forked from.

In a new checkout nothing has been compiled, and each rank would compile what it needs, all at the same time.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import random
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from lightning_lowbw.ops import compiler

# Whether there is Adam's second moment, its maximum, Nesterov's momentum.
KINDS = ((False, False, False), (False, False, True), (True, False, False), (True, True, False))


def load(others: Callable[[], object]) -> None:
    """Load or compile all variants of `compiled._kernel`, and `others`.

    What another process is compiling is loaded at the end. The order is random: processes that begin together compile
    different ones.
    """
    if not compiler.is_available():
        return
    from lightning_lowbw.ops import compiled

    calls: dict[str, Callable[[], object]] = {"others": others}
    for has_buffer, has_weight, has_fault in itertools.product((False, True), repeat=3):
        for kind in KINDS if has_buffer else KINDS[:1]:
            choices = (has_buffer, has_weight, *kind, has_fault)
            calls["".join(str(int(each)) for each in choices)] = partial(compiled._kernel, *choices)
    folder = Path(tempfile.gettempdir()) / f"lightning_lowbw-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    names = random.SystemRandom().sample(sorted(calls), len(calls))
    for operation in (fcntl.LOCK_EX | fcntl.LOCK_NB, fcntl.LOCK_EX):
        names = [name for name in names if not _call_alone(calls[name], folder / name, operation)]


def _call_alone(call: Callable[[], object], path: Path, operation: int) -> bool:
    """Call while holding the lock of a file; return False if another process has it and `operation` does not wait."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, operation)
        except BlockingIOError:
            return False
        call()
    return True
