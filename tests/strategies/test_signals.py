"""SIGTERM on any rank ends all after the same step; Ctrl-C ends them soon, wherever they are."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.connectors.signal_connector import _HandlersCompose
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.optim import SGD

from lightning_lowbw import DGCStrategy, LocalSGDStrategy, Method
from lightning_lowbw.comm.peers import Peers
from lightning_lowbw.strategies import signals
from lightning_lowbw.strategies.checkpoint import METADATA_KEY
from lightning_lowbw.strategies.signals import Signals
from tests.programs import forget_launcher, free_port
from tests.ranks import run_ranks
from tests.strategies.fits import weights
from tests.sync.problem import each
from tests.tiny import MIN_NUMEL, Tiny, TwoOptimizers, make_data, make_trainer

STEPS = 12
KILLED_AFTER = 3


def make(name: str) -> DDPStrategy:
    sparse: dict[str, Any] = {"sparsity": [0.9], "min_numel": MIN_NUMEL}
    strategies: dict[str, Any] = {
        "dense": lambda: DGCStrategy(rampup_begin_step=100, **sparse),
        "hand-over": lambda: DGCStrategy(rampup_begin_step=4, **sparse),
        "sparse": lambda: DGCStrategy(**sparse),
        "local_sgd": lambda: LocalSGDStrategy(k_steps=4, begin_step=0),
        "delayed": lambda: LocalSGDStrategy(k_steps=4, begin_step=0, delay_steps=1),
        "overlapping": lambda: LocalSGDStrategy(k_steps=6, begin_step=0, num_fragments=3, delay_steps=2),
        "ddp": DDPStrategy,
    }
    return strategies[name]()


class KillAfter(pl.Callback):
    """A signal for some ranks, after a step."""

    def __init__(self, ranks: list[int], number: signal.Signals = signal.SIGTERM) -> None:
        self.ranks, self.number = ranks, number

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == KILLED_AFTER and trainer.global_rank in self.ranks:
            os.kill(os.getpid(), self.number)


def fit_until_killed(name: str, ranks: list[int], folder: str, **options: Any) -> tuple[int, str]:
    num_ranks = dist.get_world_size()
    model = options.pop("model", Tiny)()
    callbacks = [KillAfter(ranks), OnExceptionCheckpoint(folder, name)]
    trainer = make_trainer(make(name), num_ranks, callbacks=callbacks, enable_checkpointing=True, **options)
    try:
        trainer.fit(model, make_data(num_ranks, 4 * STEPS))
    except SIGTERMException:
        return trainer.global_step, weights(model)
    return -1, ""


@pytest.mark.fault(
    "SIGTERM on one rank, or on all",
    "all ranks end after the same step, with a checkpoint on exceptions that resumes to the same bits",
)
@pytest.mark.parametrize(
    ("name", "ranks", "last"),
    [("dense", [0, 1], 5), ("hand-over", [1], 5), ("sparse", [1], 4), ("local_sgd", [1], 4)],
)
def test_a_sigterm_ends_all_ranks_after_the_same_step(name: str, ranks: list[int], last: int, tmp_path: Path) -> None:
    first, second = run_ranks(fit_until_killed, 2, name, ranks, str(tmp_path), timeout_s=60)
    assert first[0] == second[0] == last
    assert torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["global_step"] == last


def steps_with_a_message(period_s: float) -> list[int]:
    """Return the dense steps after which one is begun, until all end; rank 1 asks for that after step 20."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    worker = Method().make_synchronizer(SGD([parameter], lr=0.1), [("w", parameter)], Peers())
    connector = SimpleNamespace(received_sigterm=False)
    trainer: Any = SimpleNamespace(world_size=2, _signal_connector=connector)
    asked, told = Signals({0: worker}), []
    asked.begin_fit()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(signals, "PERIOD_S", period_s)
        for step in range(1, 100):
            worker.stop_requested |= step == 20 and dist.get_rank() == 1
            asked.end_step(worker, trainer)
            if connector.received_sigterm:
                return [*told, -step]
            if asked._asked is not None:
                told.append(step)
    return told


def test_short_steps_share_a_message() -> None:
    always, seldom = [*range(1, 21), -21], [*range(1, 17), 32, -33]
    assert run_ranks(each, 2, steps_with_a_message, [(0.0,), (1e6,)]) == [[always, seldom]] * 2


class SavesSlowly(pl.Callback):
    def on_exception(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_rank == 1:
            time.sleep(0.5)


def end_of_a_slow_save() -> float:
    trainer = make_trainer(make("sparse"), 2, callbacks=[KillAfter([1]), SavesSlowly()])
    with pytest.raises(SIGTERMException):
        trainer.fit(Tiny(), make_data(2, STEPS))
    return time.monotonic()


def test_no_rank_ends_before_all_have_saved() -> None:
    """Threads of the others would wait in a store that ends, and a launcher would end those that still save."""
    first, second = run_ranks(end_of_a_slow_save, 2)
    assert abs(first - second) < 0.3


class KillAt(pl.Callback):
    """SIGTERM for rank 1 in the middle of a validation, of which the first is before the first batch."""

    def __init__(self, moment: str) -> None:
        self.moment = moment

    def on_validation_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        moment = "in the sanity check" if trainer.sanity_checking else "in validation"
        if moment == self.moment and trainer.global_rank == 1:
            self.moment = ""
            os.kill(os.getpid(), signal.SIGTERM)


class Validated(Tiny):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx), sync_dist=True)


def fit_until_killed_at(name: str) -> list[int]:
    """Return the last step for each of the moments; after three steps is a validation."""
    ends = []
    for moment in ("in the sanity check", "in validation"):
        trainer = make_trainer(make(name), 2, callbacks=[KillAt(moment)], val_check_interval=3)
        try:
            trainer.fit(Validated(), make_data(2, STEPS), make_data(2, 2))
        except SIGTERMException:
            ends.append(trainer.global_step)
    return ends


@pytest.mark.fault("SIGTERM on one rank, or on all")
@pytest.mark.parametrize(("name", "ends"), [("dense", [2, 5]), ("sparse", [1, 4]), ("local_sgd", [4, 4])])
def test_also_before_the_first_batch_and_in_validation(name: str, ends: list[int]) -> None:
    assert run_ranks(fit_until_killed_at, 2, name, timeout_s=60) == [ends] * 2


class EachInTurn(TwoOptimizers):
    """The second optimizer steps in every other batch."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.manual_backward(super().training_step(batch, batch_idx))
        for optimizer in self.optimizers()[: 1 + batch_idx % 2]:  # type: ignore[index]
            optimizer.step()
        self.zero_grad()


def fit_variants(folder: str) -> list[int]:
    """Return the last steps where gradients are accumulated, and with two optimizers."""
    accumulated = fit_until_killed("dense", [1], f"{folder}/accumulated", accumulate_grad_batches=2)[0]
    return [accumulated, fit_until_killed("sparse", [1], f"{folder}/two", model=EachInTurn)[0]]


def test_also_while_gradients_are_accumulated_and_with_two_optimizers(tmp_path: Path) -> None:
    first, second = run_ranks(fit_variants, 2, str(tmp_path))
    assert first == second
    assert all(KILLED_AFTER < last <= KILLED_AFTER + 4 for last in first)


NUM_TIMES = 4


class SignalsSoon(Tiny):
    """A signal for this process, some time after the first step."""

    delay_s = 0.0

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step == 1:
            self.timer = threading.Timer(self.delay_s, os.kill, (os.getpid(), signal.SIGTERM))
            self.timer.start()


def fit_until_killed_at_some_time(name: str) -> list[tuple[int, str]]:
    """Signals come to all ranks, not quite together: in forward or backward, in an exchange, between batches."""
    ends = []
    signal.signal(signal.SIGTERM, lambda *_: None)  # one may come when the other rank's has ended the fit
    for number in range(NUM_TIMES):
        model = SignalsSoon()
        model.delay_s = 0.004 * number * (1 + dist.get_rank())
        trainer = make_trainer(make(name), 2, max_epochs=1000)
        try:
            trainer.fit(model, make_data(2, STEPS))
        except SIGTERMException:
            ends.append((trainer.global_step, str(trainer.state.status)))
        model.timer.join()
    return ends


@pytest.mark.fault("SIGTERM on one rank, or on all")
@pytest.mark.parametrize("name", ["hand-over", "local_sgd"])
def test_signals_that_come_to_all_at_any_time_end_all_after_the_same_step(name: str) -> None:
    first, second = run_ranks(fit_until_killed_at_some_time, 2, name)
    assert first == second
    assert len(first) == NUM_TIMES


def resume_after_a_signal(name: str, model: type[Tiny], folder: str) -> tuple[str, str]:
    def make_model() -> Tiny:
        made = model()
        made.data_by_step, made.dropout.p = True, 0.2
        torch.manual_seed(dist.get_rank())
        return made

    straight = make_model()
    options: dict[str, Any] = {"max_steps": 2 * STEPS, "max_epochs": -1}
    make_trainer(make(name), 2, **options).fit(straight, make_data(2, 2 * STEPS))
    fit_until_killed(name, [1], folder, model=make_model)
    resumed = make_model()
    make_trainer(make(name), 2, **options).fit(resumed, make_data(2, 2 * STEPS), ckpt_path=f"{folder}/{name}.ckpt")
    return weights(straight), weights(resumed)


@pytest.mark.fault("SIGTERM on one rank, or on all")
@pytest.mark.parametrize(
    ("name", "model"),
    [("sparse", Tiny), ("delayed", EachInTurn), ("overlapping", Tiny)],
    ids=["sparse", "two optimizers average at different steps", "another average is in progress"],
)
def test_the_checkpoint_of_a_sigterm_resumes_to_the_bit(name: str, model: type[Tiny], tmp_path: Path) -> None:
    for straight, resumed in run_ranks(resume_after_a_signal, 2, name, model, str(tmp_path)):
        assert straight == resumed
    metadata = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)[METADATA_KEY]
    assert not metadata["is_interrupted"], "the .ckpt has the weights of rank 0, not the consensus"


# SLURM ---------------------------------------------------------------------------------------------------------------


class Slurm(KillAfter):
    """What SLURM's environment registers, and its signal."""

    def __init__(self, ranks: list[int]) -> None:
        super().__init__(ranks, signal.SIGUSR1)
        self.saved: list[tuple[int, str]] = []

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        connector = trainer._signal_connector
        connector._slurm_sigusr_handler_fn = lambda *_: self.saved.append((trainer.global_step, weights(module)))
        connector._register_signal(signal.SIGUSR1, _HandlersCompose([connector._slurm_sigusr_handler_fn]))


def fit_until_requeued(name: str, model: type[Tiny] = Tiny) -> list[tuple[int, str]]:
    slurm = Slurm([1])
    trainer = make_trainer(make(name), 2, callbacks=[slurm])
    trainer.fit(model(), make_data(2, STEPS))
    assert trainer.global_step >= STEPS
    return slurm.saved


@pytest.mark.fault(
    "SLURM's signal to save and requeue, on one rank",
    "all ranks save once, after the same step",
)
@pytest.mark.parametrize(("name", "step"), [("hand-over", 5), ("delayed", 5)])
def test_slurms_signal_on_one_rank_saves_once_on_all(name: str, step: int) -> None:
    first, second = run_ranks(fit_until_requeued, 2, name)
    assert [saved for saved, _ in first] == [saved for saved, _ in second] == [step]


# Ctrl-C --------------------------------------------------------------------------------------------------------------

SOON_S = 20.0  # some 2 on a quiet machine; three tests run at a time here. Whoever waits for a peer waits 30 minutes.


class Announces(Tiny):
    """Trains until it is told to stop, and says when it has begun."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step == KILLED_AFTER:
            self.file.touch()


def train_for_ever(name: str, rank: int, port: int, folder: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="tests", LOCAL_WORLD_SIZE="2", GROUP_RANK="0")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    trainer = make_trainer(make(name), 2, max_epochs=100_000)
    trainer.fit(Announces(Path(folder) / f"rank{rank}"), make_data(2, STEPS))


def interrupt(train: Callable[[int, int, str], None], ranks: list[int], folder: str) -> tuple[float, list[Any]]:
    """Return for how many seconds two programs go on after Ctrl-C, and their exit codes."""
    forget_launcher()
    context, port = multiprocessing.get_context("fork"), free_port()
    programs = [context.Process(target=train, args=(rank, port, folder)) for rank in range(2)]
    for program in programs:
        program.start()
    while len(list(Path(folder).glob("rank*"))) < 2:
        time.sleep(0.01)
    begun = time.monotonic()
    for rank in ranks:
        os.kill(programs[rank].pid or 0, signal.SIGINT)
    for program in programs:
        program.join(max(0.0, begun + SOON_S + 5 - time.monotonic()))
    seconds, codes = time.monotonic() - begun, [program.exitcode for program in programs]
    for program in programs:
        program.kill()
        program.join()
    return seconds, codes


@pytest.mark.fault(
    "Ctrl-C on one rank, or on all",
    "all ranks end",
)
@pytest.mark.parametrize(("name", "ranks"), [("sparse", [0, 1]), ("local_sgd", [1])])
def test_ctrl_c_ends_all_soon(name: str, ranks: list[int], tmp_path: Path, record_property: Any) -> None:
    ((seconds, codes),) = run_ranks(
        interrupt, 1, functools.partial(train_for_ever, name), ranks, str(tmp_path), fresh=True, timeout_s=60
    )
    assert seconds < SOON_S, codes
    assert all(codes), codes
    record_property("seconds", seconds)
