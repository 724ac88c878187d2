"""Every way in which a Trainer starts the ranks: popen, spawn and fork."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from torch.multiprocessing import ProcessExitedException
from torch.utils.data import DataLoader, TensorDataset

from lightning_lowbw import DGCStrategy
from tests.programs import TORCHRUN, forget_launcher, free_port, run_python, run_script
from tests.ranks import on_ranks, run_ranks
from tests.strategies import restarted
from tests.strategies.fits import At
from tests.strategies.launched import train
from tests.tiny import Tiny, make_trainer

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


@pytest.mark.parametrize("strategy", [pytest.param("dgc_spawn", marks=pytest.mark.slow), "local_sgd_fork"])
def test_started_by_the_trainer(strategy: str, tmp_path: Path) -> None:
    run_ranks(train_from_here, 1, strategy, str(tmp_path), fresh=True)
    check(tmp_path, strategy)


def test_started_as_a_script_of_pytorch_lightning(tmp_path: Path) -> None:
    """By spawn; its processes are forked here, because a spawned one loads everything once more."""
    script = tmp_path / "launched.py"
    source = Path(SCRIPT).read_text()
    source = source.replace("import lightning.pytorch as pl", "import pytorch_lightning as pl")
    script.write_text(source.replace("from lightning_lowbw import Av", "from lightning_lowbw.mirror import Av"))
    run_script(tmp_path, str(script), str(tmp_path), "dgc_spawn")
    check(tmp_path / "dgc_spawn", "dgc_spawn")


@pytest.mark.slow
def test_started_as_a_script(tmp_path: Path) -> None:
    """The Trainer starts it once more for each further rank. Under torchrun: tests/test_cli.py."""
    run_python(tmp_path, SCRIPT, str(tmp_path), "dgc", "local_sgd")
    for strategy in ("dgc", "local_sgd"):
        check(tmp_path / strategy, strategy)


@pytest.mark.fault
@pytest.mark.slow
def test_torchrun_restarts_from_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 is killed in mid-interval; torchrun starts both anew, and they end with the bits of a run without that."""
    # Else restarted ranks find the addresses of those before in torchrun's store, and gloo connects to them.
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    folder, straight = tmp_path / "restarted", tmp_path / "straight"
    folder.mkdir()
    run_python(tmp_path, *TORCHRUN, "--max-restarts=1", RESTARTED, str(folder))
    run_ranks(restarted.train, 2, str(straight))
    for rank in (0, 1):
        step, weights = (folder / f"rank{rank}").read_text().split()
        assert step == "6"  # the last checkpoint before the kill
        assert weights == (straight / f"rank{rank}").read_text().split()[1]


@on_ranks(1, fresh=True, timeout_s=60.0)
def test_a_signal_to_a_rank_that_the_trainer_has_started_ends_all() -> None:
    forget_launcher()
    os.environ["MASTER_PORT"] = str(free_port())
    kill = At(3, lambda *_: os.kill(os.getpid(), signal.SIGTERM), ranks=(1,))
    trainer = make_trainer(DGCStrategy(start_method="fork"), 2, max_epochs=100_000, callbacks=[kill])
    data = TensorDataset(torch.randn(64, 16), torch.randint(0, 5, (64,)))
    with pytest.raises(ProcessExitedException, match="process 1 terminated with signal SIGTERM"):
        trainer.fit(Tiny(), DataLoader(data, batch_size=4))
