"""A moving average that a callback puts into the model: equal on all ranks, and there for as long as under ddp."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_lowbw import LocalSGD, LocalSGDStrategy, ShardedStrategy, Strategy
from lightning_lowbw.comm.agreement import digest
from lightning_lowbw.sync.local_view import DTensor
from tests.ranks import run_ranks
from tests.strategies.fits import SPARSE, Trace, gathered
from tests.strategies.sharded_models import Configured, shard_digest
from tests.strategies.sharded_models import train as train_shards
from tests.tiny import Tiny, make_data, make_trainer, sgd, weights_of

STEPS = 10
# When it is taken out again -> whether the last weights that were validated are saved, and left after the fit, by ddp.
OUT = {
    "on_train_epoch_start": (True, True),  # as in schnetpack
    "on_validation_end": (False, False),  # before a save
    "on_train_batch_start": (True, True),
    "on_fit_end": (True, False),  # in since the first validation; what is validated later has been trained from it
    "": (True, True),  # never
}

STRATEGIES: dict[str, Any] = {
    "ddp": lambda: "ddp",
    "local": lambda: LocalSGDStrategy(k_steps=4, begin_step=0),
    "post-local": lambda: LocalSGDStrategy(k_steps=4, begin_step=6),
    "two levels": lambda: LocalSGDStrategy(k_steps=4, begin_step=0, topology=2),
    "sparse": lambda: LocalSGDStrategy(k_steps=4, begin_step=0, compression=SPARSE),
    "streaming": lambda: Strategy(LocalSGD(4, 0, outer="nesterov", num_fragments=2, delay_steps=2)),
}


class Average(Callback):
    """A moving average that is in the model from a validation on, until the hook `out`."""

    def __init__(self, out: str, *, swaps_pointers: bool = False) -> None:
        self.out, self.swaps_pointers, self.own = out, swaps_pointers, list[torch.Tensor]()

    def _put(self, module: pl.LightningModule, values: list[torch.Tensor]) -> None:
        for parameter, value in zip(module.parameters(), values, strict=True):
            if self.swaps_pointers:
                parameter.data = value
            else:
                parameter.data.copy_(value)

    def _end(self, module: pl.LightningModule, hook: str) -> None:
        if hook == self.out and self.own:
            self._put(module, self.own)
            self.own = []

    def on_train_start(self, trainer: Any, module: pl.LightningModule) -> None:
        self.mean = [p.detach().clone() for p in module.parameters()]

    def on_train_batch_end(self, trainer: Any, module: pl.LightningModule, *_: Any) -> None:
        for mean, parameter in zip(self.mean, module.parameters(), strict=True):
            mean.lerp_(parameter.detach(), 0.3)

    def on_validation_epoch_start(self, trainer: Any, module: pl.LightningModule) -> None:
        if not self.own or not self.out:
            now = [p.data for p in module.parameters()]
            self.own = now if self.swaps_pointers else [each.clone() for each in now]
            self._put(module, self.mean)

    def on_validation_end(self, trainer: Any, module: pl.LightningModule) -> None:
        self._end(module, "on_validation_end")

    def on_train_epoch_start(self, trainer: Any, module: pl.LightningModule) -> None:
        self._end(module, "on_train_epoch_start")

    def on_train_batch_start(self, trainer: Any, module: pl.LightningModule, *_: Any) -> None:
        self._end(module, "on_train_batch_start")

    def on_fit_end(self, trainer: Any, module: pl.LightningModule) -> None:
        self._end(module, "on_fit_end")


class Export(Callback):
    """What others read at the end of a validation and of an epoch, and beside a save."""

    def __init__(self) -> None:
        self.read: list[str] = []

    def on_validation_end(self, trainer: Any, module: pl.LightningModule) -> None:
        self.read.append(weights_of(module))

    def on_train_epoch_end(self, trainer: Any, module: pl.LightningModule) -> None:
        self.read.append(weights_of(module))

    def on_save_checkpoint(self, trainer: Any, module: pl.LightningModule, checkpoint: Any) -> None:
        self.read.append(weights_of(module))


class Watched(Tiny):
    """Notes with which weights it is validated."""

    def __init__(self) -> None:
        super().__init__()
        self.validated: list[str] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        if not batch_idx:
            self.validated.append(weights_of(self))


def train(name: str, folder: str, average: Average | None, **options: Any) -> dict[str, Any]:
    """Train two epochs; return what was trained, and of what is validated, saved and left which are the same."""
    num_ranks, module, export, trace = dist.get_world_size(), Watched(), Export(), Trace()
    callbacks: list[Callback] = [] if name == "ddp" else [trace]
    if average is not None:
        callbacks += [average, export, ModelCheckpoint(folder, filename=name, enable_version_counter=False)]
    usual = {"max_epochs": 2, "enable_checkpointing": average is not None, "num_sanity_val_steps": 0}
    trainer = make_trainer(STRATEGIES[name](), num_ranks, callbacks=callbacks, **{**usual, **options})
    trainer.fit(module, make_data(num_ranks, STEPS), make_data(num_ranks, 2) if average is not None else None)
    left = gathered(weights_of(module))
    assert len(set(left)) == 1
    if average is None:
        return {"after": trace.after}
    validated, saved = module.validated[-1], Watched()
    saved.load_state_dict(torch.load(f"{folder}/{name}.ckpt", weights_only=True)["state_dict"])
    trainer.validate(module, make_data(num_ranks, 2), verbose=False)
    for each in (module.validated, export.read if "val_check_interval" not in options else []):
        assert all(len(set(of_ranks)) == 1 for of_ranks in zip(*gathered(each), strict=True))
    return {
        "after": trace.after,
        "is saved": weights_of(saved) == validated,
        "is left": left[0] == validated,
    }


def train_with_averages(name: str, folder: str) -> None:
    quiet = train(name, folder, None)["after"]
    for out, expected in OUT.items():
        found = train(name, folder, Average(out, swaps_pointers=out == "on_train_epoch_start"))
        assert (found["is saved"], found["is left"]) == expected, out
        if out in ("", "on_fit_end"):
            assert found["after"][:STEPS] == quiet[:STEPS], out
            assert found["after"] != quiet or name == "ddp", out
        else:  # what is taken out again changes nothing
            assert found["after"] == quiet, out
    if name != "ddp":
        assert len(set(gathered(tuple(quiet)))) == 2, "the ranks were not local"
        # Also in mid-epoch, where it is out again before the next batch.
        assert train(name, folder, Average("on_train_batch_start"), val_check_interval=3)["after"] == quiet


@pytest.mark.fault(
    "a moving average that a callback puts in before a validation, and takes out again some time later, or never",
    "equal on all ranks, validated, saved and left as by ddp; where it is taken out again, the same bits as without it",
)
@pytest.mark.parametrize("name", ["ddp", "local", "post-local", "sparse", "streaming"])
def test_an_average_is_validated_saved_and_left_as_by_ddp(name: str, tmp_path: Path) -> None:
    run_ranks(train_with_averages, 2, name, str(tmp_path), timeout_s=240.0)


def test_an_average_is_that_of_all_nodes(tmp_path: Path) -> None:
    run_ranks(train_on_nodes, 4, str(tmp_path))


def train_on_nodes(folder: str) -> None:
    found = train("two levels", folder, Average("on_train_epoch_start"))
    assert found["is saved"]
    assert found["is left"]


class BeforeStep(Tiny):
    """Calls a function with the weights that a step begins with."""

    def __init__(self, check: Callable[[BeforeStep], None]) -> None:
        super().__init__()
        self.check = check

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.check(self)
        return super().training_step(batch, batch_idx)


def adopt() -> None:
    """What stays in the model is the consensus from which the next changes are measured; averages in progress end."""
    had_averages = list[bool]()

    def check(module: BeforeStep) -> None:
        (worker,) = module.trainer.strategy.workers  # type: ignore[attr-defined]
        has_averages = any(fragment.work for fragment in worker.fragments)
        if module.trainer.global_step == 5:  # a validation has just been
            assert not has_averages
            assert worker.parameters_agree
            assert len(set(gathered(weights_of(module)))) == 1
            assert all(start.equal(parameter) for parameter, start in worker.start.items())
        had_averages.append(has_averages)

    class Look(Callback):
        def on_validation_start(self, trainer: Any, module: Any) -> None:
            assert any(fragment.work for fragment in trainer.strategy.workers[0].fragments)

    module = BeforeStep(check)
    options = {"val_check_interval": 5, "max_steps": 8, "num_sanity_val_steps": 0, "callbacks": [Average(""), Look()]}
    make_trainer(STRATEGIES["streaming"](), 2, **options).fit(module, make_data(2, 9), make_data(2, 1))
    assert any(had_averages)
    assert len(set(gathered(weights_of(module)))) == 1


def test_what_stays_is_the_next_consensus() -> None:
    run_ranks(adopt, 2)


class SwapsInModelEval(Watched):
    """Puts its average in before the consensus is shown, and out with Lightning's counterpart of that hook."""

    def __init__(self) -> None:
        super().__init__()
        self.average = Average("on_validation_model_train")

    def on_train_start(self) -> None:
        self.average.on_train_start(self.trainer, self)

    def on_train_batch_end(self, *_: Any) -> None:
        self.average.on_train_batch_end(self.trainer, self)

    def on_validation_model_eval(self) -> None:
        super().on_validation_model_eval()
        self.average.on_validation_epoch_start(self.trainer, self)

    def on_validation_model_train(self) -> None:
        super().on_validation_model_train()
        self.average._end(self, "on_validation_model_train")


def swap_in_model_eval() -> None:
    after = []
    for data in (None, make_data(2, 2)):
        module, trace = SwapsInModelEval(), Trace()
        options = {"callbacks": [trace], "val_check_interval": 5, "max_epochs": 2, "num_sanity_val_steps": 0}
        make_trainer(STRATEGIES["local"](), 2, **options).fit(module, make_data(2, STEPS), data)
        after.append(trace.after)
        assert all(len(set(each)) == 1 for each in zip(*gathered(module.validated), strict=True))
    assert after[0] == after[1]


def test_an_average_that_goes_in_before_the_consensus_is_shown_changes_nothing() -> None:
    run_ranks(swap_in_model_eval, 2)


def resume(folder: str) -> None:
    """Go on from a checkpoint with the average in it: as under ddp the training begins with that, on all ranks."""
    path = f"{folder}/local.ckpt"
    train("local", folder, Average("on_train_epoch_start"))
    saved = Tiny()
    saved.load_state_dict(torch.load(path, weights_only=True)["state_dict"])

    def check(module: BeforeStep) -> None:
        if module.trainer.global_step == 2 * STEPS:
            assert gathered(weights_of(module)) == [weights_of(saved)] * 2

    module = BeforeStep(check)
    make_trainer(STRATEGIES["local"](), 2, max_epochs=3).fit(module, make_data(2, STEPS), ckpt_path=path)
    assert len(set(gathered(weights_of(module)))) == 1


def test_a_resume_begins_with_the_average_that_was_saved(tmp_path: Path) -> None:
    run_ranks(resume, 2, str(tmp_path))


class ValidatedShards(Configured):
    def __init__(self) -> None:
        super().__init__(sgd)
        self.validated: list[str] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        # Copies: FSDP cannot free the memory of a gathered tensor that numpy has seen.
        shards = [p.to_local() if isinstance(p, DTensor) else p for p in self.parameters()]
        self.validated.append(digest([each.detach().clone() for each in shards]))
        super().validation_step(batch, batch_idx)


def train_sharded() -> None:
    """Two nodes of two ranks; rank i has the same shard as rank i + 2."""
    left = {}
    for out in (None, "on_validation_end", "on_train_epoch_start", "on_train_batch_start", ""):
        module, strategy = ValidatedShards(), ShardedStrategy(LocalSGD(4, 0), topology=2)
        options = {"val": out is not None, "callbacks": [] if out is None else [Average(out)], "max_epochs": 2}
        train_shards(strategy, module, STEPS - 1, 4, dist.get_rank(), num_sanity_val_steps=0, max_steps=13, **options)
        for of_ranks in zip(*gathered(module.validated), strict=True):
            assert of_ranks[:2] == of_ranks[2:], out
        of_ranks = gathered(shard_digest(module))
        assert of_ranks[:2] == of_ranks[2:], out
        left[out] = of_ranks
    quiet, *others, kept = left.values()
    assert others == [quiet] * 3
    assert kept != quiet


def test_an_average_of_a_sharded_model_is_that_of_all_nodes() -> None:
    run_ranks(train_sharded, 4)
