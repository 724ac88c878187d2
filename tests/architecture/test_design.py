"""`walk.md` lists the functions that one step of a Trainer calls; this test traces the steps again and compares."""

from __future__ import annotations

import operator
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_lowbw
from lightning_lowbw import ElasticStrategy, LocalSGD, Strategy
from lightning_lowbw.kernels import dispatch
from lightning_lowbw.presets import preset
from tests.elastic import plain
from tests.elastic.plain import PlainMembership, become_a_group
from tests.ranks import run_ranks
from tests.tiny import make_trainer, sgd

ROOT = Path(lightning_lowbw.__file__).parent
PAGE = Path(__file__).with_name("walk.md")
HEAD = """# The functions that a step goes through

Written by `pytest tests/architecture/test_design.py --rewrite-golden`; without the option the test compares.

`Trainer.fit` on two ranks with gloo on a CPU: one linear layer with a bias, SGD with momentum. The trace is rank 0's,
of all threads, from the end of one batch to the end of the next one. Files and functions are in the order of the first
call.

A stay begins when a function of one file of the package is called from another file, of the package or not. A stay of
the data is a stay in `payloads/`, `kernels/` or `comm/` that begins with a function that receives or returns tensors.
"""
DATA = ("payloads/", "kernels/", "comm/")
NUM_STEPS = 9
# The largest numbers of stays and of files of a step of dgc, by whether only stays of the data count: only lower them.
MOST = {False: (120, 22), True: (36, 10)}


class OneLayer(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 256)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return sgd(self.parameters())


@dataclass
class Trace:
    """The calls of functions of the package.

    Attributes:
        functions: the functions of each file, in the order of the first call.
        stays: the file of each stay, and whether it is a stay of the data.
    """

    functions: dict[str, list[str]] = field(default_factory=dict)
    stays: list[tuple[str, bool]] = field(default_factory=list)

    def count(self, *, of_data: bool = False) -> tuple[int, int]:
        """Return the number of stays, and of files."""
        files = [file for file, is_of_data in self.stays if is_of_data or not of_data]
        return len(files), len({*files})


class Tracer(pl.Callback):
    """Traces the functions of the package between the ends of two batches.

    Args:
        steps: the numbers of optimizer steps at these ends.
    """

    def __init__(self, steps: tuple[int, int]) -> None:
        self.steps, self.trace = steps, Trace()
        self._begun: dict[FrameType, int] = {}  # the stay that a call has begun

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        is_traced = self.steps[0] <= trainer.global_step < self.steps[1]
        for module in (sys, threading):
            module.setprofile(self.note if is_traced else None)

    def note(self, frame: FrameType, event: str, returned: Any) -> None:
        code, path = frame.f_code, Path(frame.f_code.co_filename)
        if event not in ("call", "return") or not path.is_relative_to(ROOT):
            return
        file, stays = path.relative_to(ROOT).as_posix(), self.trace.stays
        if event == "call":
            name = code.co_qualname.rpartition("<locals>.")[2]  # type: ignore[attr-defined]  # since Python 3.11
            functions = self.trace.functions.setdefault(file, [])
            if name not in functions and name[0] != "<":
                functions.append(name)
            caller = None if frame.f_back is None else frame.f_back.f_code.co_filename
            # A kernel that numba has compiled has no caller: its file calls it.
            if caller not in (None, code.co_filename) and not is_polled(frame):
                self._begun[frame] = len(stays)
                arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
                received = [frame.f_locals.get(argument) for argument in arguments]
                stays.append((file, file.startswith(DATA) and any(map(has_tensors, received))))
        elif frame in self._begun:
            number = self._begun.pop(frame)
            stays[number] = file, stays[number][1] or (file.startswith(DATA) and has_tensors(returned))


def is_polled(frame: FrameType | None) -> bool:
    """Return whether the tests' membership has made a call: it asks again and again while it waits."""
    while frame is not None and frame.f_code.co_filename != plain.__file__:
        frame = frame.f_back
    return frame is not None


def has_tensors(value: Any) -> bool:
    """Return whether a value is a tensor of several elements, or a list, tuple or dictionary of tensors."""
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
    return any(isinstance(each, Tensor) and each.numel() > 1 for each in values)


def fixed(name: str, **changes: Any) -> Any:
    return Strategy(preset(name).replace(**changes))


def elastic(folder: str) -> Any:
    """Return the strategy of a group; each rank is one."""
    store, number = become_a_group(folder)
    strategy = ElasticStrategy(LocalSGD(k_steps=3, begin_step=0, outer="nesterov"), group=f"group {number}")
    strategy.make_membership = lambda *_: PlainMembership(store, strategy.group)  # type: ignore[method-assign]
    return strategy


# The strategy, the numbers of steps between which it is traced, and the sentence of the section.
WALKS: dict[str, tuple[Callable[[str], Any], tuple[int, int], str]] = {
    "One step of `dgc`": (lambda _: fixed("dgc", sparsity=(0.9,), min_numel=1000), (3, 4), "A sparse step, flat."),
    "One step of `int8`": (lambda _: fixed("int8"), (3, 4), "All gradients, flat."),
    "One round of `diloco`, hidden": (
        lambda _: fixed("diloco", k_steps=3, delay_steps=1),
        (5, 7),
        "`delay_steps=1`: the step after which the second average begins, and the step after which it is applied.",
    ),
    "One round of `diloco_elastic`": (elastic, (5, 6), "The last local step of the second round, and the round."),
}


def trace(heading: str, folder: str) -> Trace:
    make, steps, _ = WALKS[heading]
    strategy, tracer = make(folder), Tracer(steps)
    num_ranks = dist.get_world_size()  # of an elastic group: one
    trainer = make_trainer(strategy, num_ranks, max_steps=NUM_STEPS, max_epochs=-1, callbacks=[tracer])
    trainer.fit(OneLayer(), DataLoader(TensorDataset(torch.randn(4 * NUM_STEPS, 64)), batch_size=4))
    return tracer.trace


def section(heading: str, found: Trace) -> str:
    stays, of_data = ("{} stays in {} files".format(*found.count(of_data=only)) for only in (False, True))
    lines = [f"## {heading}", "", f"{WALKS[heading][2]} {stays}; of the data {of_data}.", ""]
    lines += ["| file | functions |", "| --- | --- |"]
    lines += [f"| `{file}` | {', '.join(f'`{name}`' for name in names)} |" for file, names in found.functions.items()]
    return "\n".join(["", *lines, ""])


@pytest.mark.skipif(dispatch.compiled_for() is None, reason="needs numba")
@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs co_qualname")
def test_the_page_lists_the_functions_that_a_step_calls(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    found = {heading: run_ranks(trace, 2, heading, str(tmp_path))[0] for heading in WALKS}
    for of_data, most in MOST.items():
        assert all(map(operator.le, found["One step of `dgc`"].count(of_data=of_data), most))
    now = HEAD + "".join(section(*each) for each in found.items())
    if request.config.getoption("--rewrite-golden"):
        PAGE.write_text(now)
    was, counts = PAGE.read_text(), re.compile(r"\d+ stays")
    assert counts.sub("", was) == counts.sub("", now), "pytest tests/architecture/test_design.py --rewrite-golden"
