"""SIGTERM on any rank ends all after the same step; Ctrl-C ends them soon, wherever they are."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LambdaCallback, OnExceptionCheckpoint
from lightning.pytorch.trainer.connectors.signal_connector import _HandlersCompose
from lightning.pytorch.utilities.exceptions import SIGTERMException

from tests.programs import forget_launcher, free_port
from tests.ranks import on_ranks, run_ranks
from tests.strategies.fits import At, gathered, make, same, train, train_by_step, weights
from tests.tiny import Tiny, TwoOptimizers

STEPS, KILLED_AFTER = 12, 3
LOCAL = {"local_sgd": {}, "delayed": {"delay_steps": 1}}


def strategy(name: str) -> Any:
    if name in LOCAL:
        return make("local_sgd", {"k_steps": 4, **LOCAL[name]})
    return make("dgc", {"rampup_begin_step": 4}) if name == "hand-over" else make(name)


def kill_here(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def kill(ranks: tuple[int, ...]) -> At:
    return At(KILLED_AFTER, kill_here, ranks=ranks)


def end_by_sigterm(name: str, *callbacks: pl.Callback, model: Tiny | None = None, **options: Any) -> int:
    """Return after which step a fit ends."""
    model = Tiny() if model is None else model
    with pytest.raises(SIGTERMException):
        train_by_step(strategy(name), model=model, callbacks=callbacks, **{"steps": 4 * STEPS, **options})
    return same(model.trainer.global_step)  # type: ignore[no-any-return]


@pytest.mark.fault
@pytest.mark.parametrize(
    ("name", "ranks", "last"), [("dense", (0, 1), 5), ("hand-over", (1,), 5), ("dgc", (1,), 4), ("local_sgd", (1,), 4)]
)
@on_ranks(2, timeout_s=60)
def test_a_sigterm_ends_all_ranks_after_the_same_step(name: str, ranks: Any, last: int, tmp_path: Path) -> None:
    saver = OnExceptionCheckpoint(tmp_path, name)
    assert end_by_sigterm(name, kill(ranks), saver, enable_checkpointing=True) == last
    assert torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["global_step"] == last


@on_ranks(2)
def test_no_rank_ends_before_all_have_saved() -> None:
    """Threads of the others would wait in a store that ends, and a launcher would end those that still save."""
    save_slowly = LambdaCallback(on_exception=lambda trainer, *_: time.sleep(0.5 * trainer.global_rank))
    with pytest.raises(SIGTERMException):
        train("dgc", data=STEPS, callbacks=[kill((1,)), save_slowly])
    first, second = gathered(time.monotonic())
    assert abs(first - second) < 0.3


@pytest.mark.fault
@pytest.mark.parametrize(("name", "ends"), [("dense", (5, 5)), ("dgc", (1, 4)), ("local_sgd", (4, 4))])
@on_ranks(2, timeout_s=60)
def test_also_before_the_first_batch_and_in_validation(name: str, ends: tuple[int, int]) -> None:
    for step, end in zip((0, 3), ends, strict=True):
        kill_in_validation = At(step, kill_here, "on_validation_batch_start", ranks=(1,))
        assert end_by_sigterm(name, kill_in_validation, val=2, val_check_interval=3) == end


@on_ranks(2)
def test_also_while_gradients_are_accumulated_and_with_two_optimizers() -> None:
    for name, options in (("dense", {"accumulate_grad_batches": 2}), ("dgc", {"model": TwoOptimizers()})):
        assert KILLED_AFTER < end_by_sigterm(name, kill((1,)), **options) <= KILLED_AFTER + 4


@pytest.mark.fault
@pytest.mark.parametrize("name", ["hand-over", "local_sgd"])
@on_ranks(2)
def test_signals_that_come_to_all_at_any_time_end_all_after_the_same_step(name: str) -> None:
    """Not quite together: in forward or backward, in an exchange, between batches."""
    signal.signal(signal.SIGTERM, lambda *_: None)  # one may come when the other rank's has ended the fit
    for number in range(4):
        delay_s, model = 0.004 * number * (1 + dist.get_rank()), Tiny()
        timer = threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGTERM))
        end_by_sigterm(name, At(1, lambda *_, timer=timer: timer.start()), model=model, steps=10_000)
        same(str(model.trainer.state.status))
        timer.join()


@pytest.mark.fault
@pytest.mark.parametrize(
    ("name", "model"),
    [("dgc", Tiny), ("delayed", TwoOptimizers)],
    ids=["sparse", "two optimizers average at different steps"],
)
@on_ranks(2)
def test_the_checkpoint_of_a_sigterm_resumes_to_the_bit(name: str, model: type[Tiny], tmp_path: Path) -> None:
    path, options = f"{tmp_path}/{name}.ckpt", {"data_by_step": True, "dropout": 0.2}
    straight, killed, resumed = (model(**options) for _ in range(3))
    train_by_step(strategy(name), model=straight, steps=2 * STEPS)
    saver = OnExceptionCheckpoint(tmp_path, name)
    end_by_sigterm(name, kill((1,)), saver, model=killed, steps=2 * STEPS, enable_checkpointing=True)
    train_by_step(strategy(name), model=resumed, steps=2 * STEPS, resume=path)
    assert weights(straight) == weights(resumed)


class Slurm(pl.Callback):
    """What SLURM's environment registers."""

    def __init__(self) -> None:
        self.saved: list[int] = []

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        connector = trainer._signal_connector
        connector._slurm_sigusr_handler_fn = lambda *_: self.saved.append(trainer.global_step)
        connector._register_signal(signal.SIGUSR1, _HandlersCompose([connector._slurm_sigusr_handler_fn]))


@pytest.mark.fault
@pytest.mark.parametrize("name", ["hand-over", "delayed"])
@on_ranks(2)
def test_slurms_signal_on_one_rank_saves_once_on_all(name: str) -> None:
    slurm, ask = Slurm(), At(KILLED_AFTER, lambda *_: os.kill(os.getpid(), signal.SIGUSR1), ranks=(1,))
    trainer = train(strategy(name), data=STEPS, callbacks=[slurm, ask])
    assert trainer.global_step == STEPS
    assert slurm.saved == [5]


# Ctrl-C --------------------------------------------------------------------------------------------------------------

SOON_S = 20.0  # some 2 on a quiet machine; three tests run at a time here. Whoever waits for a peer waits 30 minutes.


def train_for_ever(name: str, rank: int, port: int, folder: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="tests", LOCAL_WORLD_SIZE="2", GROUP_RANK="0")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    say = At(KILLED_AFTER, lambda *_: (Path(folder) / f"rank{rank}").touch())
    train(strategy(name), data=STEPS, callbacks=[say], max_epochs=100_000)


def interrupt(name: str, ranks: list[int], folder: str) -> tuple[float, list[Any]]:
    """Return for how many seconds two programs go on after Ctrl-C, and their exit codes."""
    forget_launcher()
    context, port = multiprocessing.get_context("fork"), free_port()
    programs = [context.Process(target=train_for_ever, args=(name, rank, port, folder)) for rank in range(2)]
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


@pytest.mark.fault
@pytest.mark.parametrize(("name", "ranks"), [("dgc", [0, 1]), ("local_sgd", [1])])
def test_ctrl_c_ends_all_soon(name: str, ranks: list[int], tmp_path: Path, record_property: Any) -> None:
    ((seconds, codes),) = run_ranks(interrupt, 1, name, ranks, str(tmp_path), fresh=True, timeout_s=60)
    assert seconds < SOON_S, codes
    assert all(codes), codes
    record_property("seconds", seconds)
