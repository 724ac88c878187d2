"""Every way in which a Trainer starts the ranks: popen, spawn and fork."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset

from lightning_lowbw import DGCStrategy, LocalSGDStrategy
from tests.programs import TORCHRUN, forget_launcher, free_port, run_python, run_script
from tests.ranks import run_ranks
from tests.strategies import restarted
from tests.strategies.launched import train
from tests.tiny import MIN_NUMEL, Tiny, make_trainer

SCRIPT = str(Path(__file__).with_name("launched.py"))
RESTARTED = str(Path(__file__).with_name("restarted.py"))


def check(folder: Path, strategy: str) -> None:
    """Both ranks have trained together, and the first process has what they trained."""
    lines = [(folder / f"rank{rank}").read_text() for rank in (0, 1)]
    assert lines[0] == lines[1]
    world_size, step, density, weights = lines[0].split()
    assert (world_size, step, density) == ("2", "8", "nan" if "local" in strategy else "0.0100")
    # The main process of spawn and fork gets rank 0's weights back.
    assert (folder / "after0").read_text() == weights


def train_from_here(strategy: str, folder: str) -> None:
    """As a program does that nobody has launched."""
    forget_launcher()
    os.environ["MASTER_PORT"] = str(free_port())  # the Trainer's own choice may be taken before its ranks listen
    train(strategy, folder)


@pytest.mark.parametrize("strategy", ["dgc_spawn", "local_sgd_fork"])
def test_started_by_the_trainer(strategy: str, tmp_path: Path) -> None:
    run_ranks(train_from_here, 1, strategy, str(tmp_path), fresh=True)
    check(tmp_path, strategy)


def test_started_as_a_script_of_pytorch_lightning(tmp_path: Path) -> None:
    """By spawn, which pickles the strategy. What it starts is forked, or it would load everything once more."""
    script = tmp_path / "launched.py"
    source = Path(SCRIPT).read_text()
    script.write_text(source.replace("import lightning.pytorch as pl", "import pytorch_lightning as pl"))
    run_script(tmp_path, str(script), str(tmp_path), "dgc_spawn")
    check(tmp_path / "dgc_spawn", "dgc_spawn")


@pytest.mark.slow
def test_started_as_a_script(tmp_path: Path) -> None:
    """The Trainer starts it once more for each further rank. Under torchrun: tests/test_cli.py."""
    run_python(tmp_path, SCRIPT, str(tmp_path), "dgc", "local_sgd")
    for strategy in ("dgc", "local_sgd"):
        check(tmp_path / strategy, strategy)


@pytest.mark.fault(
    "kill -9 under `torchrun --max-restarts`",
    "goes on from the last checkpoint, to the same bits",
)
@pytest.mark.slow
def test_torchrun_restarts_from_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 is killed in mid-interval; torchrun starts both anew, and they end with the bits of a run without that."""
    is_equal, steps = restart(tmp_path, monkeypatch, "sparse_loco")
    assert is_equal
    assert steps == [6, 6]  # the last checkpoint before the kill


def restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str) -> tuple[bool, list[int]]:
    """Return whether a killed run ends as one that was not, and from which step each rank goes on."""
    # Else restarted ranks find the addresses of those before in torchrun's store, and gloo connects to them.
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    folder, straight = tmp_path / "restarted", tmp_path / "straight"
    folder.mkdir()
    run_python(tmp_path, *TORCHRUN, "--max-restarts=1", RESTARTED, str(folder), strategy)
    run_ranks(restarted.train, 2, str(straight), strategy)
    ends = [(folder / f"rank{rank}").read_text().split() for rank in (0, 1)]
    expected = [(straight / f"rank{rank}").read_text().split()[1] for rank in (0, 1)]
    return [weights for _, weights in ends] == expected, [int(step) for step, _ in ends]


# What ends ranks that the Trainer has started -------------------------------------------------------------------------

SOON_S = 20.0
STRATEGIES = {
    "dgc": partial(DGCStrategy, sparsity=[0.9], min_numel=MIN_NUMEL),
    "local_sgd": partial(LocalSGDStrategy, k_steps=4, begin_step=0),
    "ddp": DDPStrategy,
}


class Announces(Tiny):
    """Says which processes train."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.norm = torch.nn.Identity()  # type: ignore[assignment]  # DDP's broadcast could meet Lightning's of a SIGTERM
        self.folder = Path(folder)

    def on_train_start(self) -> None:
        (self.folder / f"pid{self.global_rank}").write_text(str(os.getpid()))


class EndAfter(pl.Callback):
    """An error, or signals for this process or the one that has started it, after three steps."""

    def __init__(self, event: str) -> None:
        self.signal, _, self.receiver = event.partition(" on ")

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step != 3 or (trainer.global_rank == 0 and self.receiver != "all ranks"):
            return
        if self.signal == "error":
            raise ValueError("the reason")
        name, _, again = self.signal.partition(" ")
        os.kill(os.getppid() if self.receiver == "the first process" else os.getpid(), getattr(signal, name))
        while again:
            time.sleep(0.2)
            os.kill(os.getppid(), getattr(signal, name))


def train_until(name: str, event: str, folder: str) -> None:
    """In the first process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    callbacks = [EndAfter(event), OnExceptionCheckpoint(folder, "last")]
    strategy = STRATEGIES[name](start_method="fork")
    trainer = make_trainer(strategy, 2, max_epochs=100_000, callbacks=callbacks, enable_checkpointing=True)
    data = TensorDataset(torch.randn(64, 16), torch.randint(0, 5, (64,)))
    try:
        trainer.fit(Announces(folder), DataLoader(data, batch_size=4))
    except Exception as error:
        Path(folder, "error").write_text(f"{error} {callbacks[0] in trainer.callbacks}")
        raise


def end(name: str, event: str, folder: str) -> tuple[int | None, int, list[int]]:
    """Return the exit code of the first process, how many ranks go on, and the step of the checkpoint by its files."""
    forget_launcher()
    os.environ["MASTER_PORT"] = str(free_port())
    first = multiprocessing.get_context("fork").Process(target=train_until, args=(name, event, folder))
    first.start()
    deadline = time.monotonic() + SOON_S
    first.join(SOON_S)
    code = first.exitcode
    ranks = [int(file.read_text()) for file in Path(folder).glob("pid*")]
    while any(map(is_alive, ranks)) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = list(filter(is_alive, ranks))
    first.kill()
    for rank in left:
        os.kill(rank, signal.SIGKILL)
    files = [*Path(folder).glob("last.ckpt"), *Path(folder).glob("last.ckpt.ranks/*")]
    return code, len(left), [load(file) for file in files]


def load(file: Path) -> int:
    saved = torch.load(file, weights_only=True)
    return int(saved["global_step"] if "global_step" in saved else saved["step"])


def is_alive(process: int) -> bool:
    state = Path(f"/proc/{process}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.fault(
    "SIGTERM or Ctrl-C where the Trainer has spawned or forked the ranks",
    "all ranks end after the same step, with a complete checkpoint; then the first process, with exit code 143 or 1",
)
@pytest.mark.parametrize(
    ("event", "code"),
    [
        ("SIGTERM on a rank", 143),
        ("SIGTERM on the first process", 143),
        ("SIGINT on the first process", 1),
        ("SIGKILL on the first process", -signal.SIGKILL),
    ],
)
@pytest.mark.parametrize("name", ["dgc", "local_sgd"])
def test_a_signal_ends_all_and_is_told(name: str, event: str, code: int, tmp_path: Path) -> None:
    ((ended, left, steps),) = run_ranks(end, 1, name, event, str(tmp_path), fresh=True)
    assert (ended, left) == (code, 0)
    assert steps == [steps[0]] * 3
    assert steps[0] > 3


def test_ctrl_c_twice_kills_ranks_that_wait(tmp_path: Path) -> None:
    event = "SIGINT again on the first process"
    assert run_ranks(end, 1, "dgc", event, str(tmp_path), fresh=True) == [(1, 0, [])]


def test_an_error_is_told_and_its_checkpoint_has_what_was_trained(tmp_path: Path) -> None:
    ((code, left, steps),) = run_ranks(end, 1, "dgc", "error", str(tmp_path), fresh=True)
    assert (code, left, steps) == (1, 0, [3, 3, 3])
    told = (tmp_path / "error").read_text()
    assert "the reason" in told
    assert told.endswith("True")  # the Trainer has its callbacks again
