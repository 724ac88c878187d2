"""What of Lightning's Trainer works with which strategy: benchmarks/results/lightning.md, as short runs find it.

A row is a function that runs on every rank: it trains, and fails where a callback or setting has not done its work.
What it returns is what differs from what Lightning says of it; None where nothing does. `make surface` runs them
all, and writes the page anew.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import re
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch import callbacks as cb
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.connectors import accelerator_connector
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_lowbw import DGCStrategy, HierarchicalStrategy, LocalSGDStrategy, QuantizedGradients, Strategy
from lightning_lowbw.comm.agreement import digest
from lightning_lowbw.errors import ConfigurationError
from tests.programs import forget_launcher
from tests.ranks import run_ranks

PAGE = Path(__file__).with_name("results") / "lightning.md"
YES = "yes"
REFUSED = "refused at the start of the fit, with the methods that take it"
SKIPPED = "after an exception the save is skipped, with one line; after a SIGTERM the checkpoint is complete"
ON_EXCEPTION = "`OnExceptionCheckpoint`"
MOVING_AVERAGES = "`StochasticWeightAveraging`", "`WeightAveraging`"  # what a method that averages weights refuses
Cells = dict[tuple[str, str], str]  # by row and column
BATCHES, BATCH = 4, 4  # of each rank's epoch
LR = 0.05
SPARSE = {"density": 1 / 8, "chunk": 64, "min_numel": 100}
COLUMNS: dict[str, Callable[..., DDPStrategy]] = {
    "ddp": DDPStrategy,
    "dgc": lambda **more: DGCStrategy(rampup_begin_step=2, sparsity=[0.9], min_numel=100, **more),
    "int8": lambda **more: Strategy(QuantizedGradients("int8"), **more),
    "hierarchical": lambda **more: HierarchicalStrategy(topology=1, **more),
    "local_sgd": lambda **more: LocalSGDStrategy(k_steps=3, **more),
    "diloco": lambda **more: LocalSGDStrategy(k_steps=3, outer="nesterov", **more),
    "streaming_diloco": lambda **more: LocalSGDStrategy(
        k_steps=4, outer="nesterov", num_fragments=2, delay_steps=1, **more
    ),
    "sparse_loco": lambda **more: LocalSGDStrategy(k_steps=3, compression=SPARSE, **more),
}


class Model(pl.LightningModule):
    """A classifier; what rows need of a module, they give it."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.backbone = nn.Sequential(nn.Linear(16, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU())
        self.head = nn.Linear(64, 8)
        self.lr, self.momentum, self.scale = LR, 0.9, 1.0
        self.scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
        self.losses: list[float] = []
        self.seen: list[str] = []  # what has happened, in its order
        self.__dict__.update(options)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))

    def loss(self, batch: list[Tensor]) -> Tensor:
        return self.scale * nn.functional.cross_entropy(self(batch[0]), batch[1])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.seen.append("train")
        loss = self.loss(batch)
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.seen.append("sanity" if self.trainer.sanity_checking else "validate")
        self.log("val_loss", self.loss(batch), sync_dist=True)
        self.log("rises", float(self.current_epoch), sync_dist=True)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=self.lr, momentum=self.momentum)
        return optimizer if self.scheduler is None else [[optimizer], [self.scheduler(optimizer)]]


def dataset(num_batches: int, seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    num = BATCH * num_batches * dist.get_world_size()
    return TensorDataset(torch.randn(num, 16, generator=generator), torch.randint(0, 8, (num,), generator=generator))


def loader(num_batches: int = BATCHES) -> DataLoader:
    return DataLoader(dataset(num_batches), batch_size=BATCH)


class Run:
    """What a row has: the column's strategy, a folder of its own, and a fit that ends with equal replicas."""

    def __init__(self, column: str, folder: Path) -> None:
        self.column, self.strategy, self.folder = column, COLUMNS[column], folder

    def trainer(self, **options: Any) -> pl.Trainer:
        defaults: dict[str, Any] = {
            "logger": False,
            "enable_checkpointing": any(isinstance(each, cb.Checkpoint) for each in options.get("callbacks", [])),
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "max_epochs": 2,
            "num_sanity_val_steps": 0,
        }
        options = {**(defaults if "barebones" not in options else {"max_epochs": 2}), **options}
        options = {"strategy": self.strategy(), "accelerator": "cpu", "devices": dist.get_world_size(), **options}
        return pl.Trainer(**options)

    def fit(self, model: Any, *loaders: Any, ckpt_path: Any = None, **options: Any) -> pl.Trainer:
        trainer = self.trainer(**options)
        trainer.fit(model, *(loaders or (loader(), loader(2))), ckpt_path=ckpt_path)
        check_equal(trainer.lightning_module)
        return trainer


def everywhere(value: Any) -> list[Any]:
    """Return what each rank has."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def check_equal(module: nn.Module) -> None:
    assert len(set(everywhere(digest(module.parameters())))) == 1, "replicas differ at the end"
    assert all(bool(p.isfinite().all()) for p in module.parameters()), "not finite"


def copies(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def are_equal(some: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    return all(a.equal(b) for a, b in zip(some, others, strict=True))


def mean_of_ranks(tensors: Iterable[Tensor]) -> list[Tensor]:
    means = copies(tensors)
    for tensor in means:
        dist.all_reduce(tensor)
        tensor.div_(dist.get_world_size())
    return means


def are_close(some: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(some, others, strict=True))


class Look(cb.Callback):
    """Calls a function after each batch; the last in the list sees what the others have done."""

    def __init__(self, function: Callable[[pl.Trainer, pl.LightningModule], None]) -> None:
        self.function = function

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        self.function(trainer, module)


Row = Callable[[Run], "str | None"]
ROWS: dict[str, Row] = {}


def row(name: str) -> Callable[[Row], Row]:
    def add(function: Row) -> Row:
        ROWS[name] = function
        return function

    return add


# Callbacks ------------------------------------------------------------------------------------------------------


def averages_weights(column: str) -> bool:
    method = getattr(COLUMNS[column](), "method", None)
    return method is not None and method.when.averages_weights


def refused(run: Run, callback: cb.Callback) -> str | None:
    """Return what a method that averages weights says of a moving average; None with other strategies."""
    if not averages_weights(run.column):
        return None
    try:
        run.fit(Model(), callbacks=[callback])
    except ConfigurationError:
        return REFUSED
    raise AssertionError("not refused")


@row("`StochasticWeightAveraging`")
def swa(run: Run) -> str | None:
    callback = cb.StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=2, annealing_epochs=1)
    if remark := refused(run, callback):
        return remark
    trainer = run.fit(Model(), max_epochs=4, callbacks=[callback])
    model = trainer.lightning_module
    assert int(callback.n_averaged) == 3, f"{int(callback.n_averaged)} averaged"
    assert callback._average_model is not None
    assert are_close(model.parameters(), mean_of_ranks(callback._average_model.parameters())), "not swapped"
    return None


class Watched(Model):
    """Keeps a digest of the weights of each validation."""

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.seen.append(digest(self.parameters()))


@row("`WeightAveraging`")
def weight_averaging(run: Run) -> str | None:
    if remark := refused(run, cb.WeightAveraging()):
        return remark
    sums: list[Tensor] = []
    num = 0
    last: list[Tensor] = []

    def add(trainer: pl.Trainer, module: pl.LightningModule) -> None:
        nonlocal num
        num += 1
        last[:] = copies(module.parameters())
        sums[:] = last if not sums else [a + b for a, b in zip(sums, last, strict=True)]

    model = Watched()
    run.fit(model, callbacks=[cb.WeightAveraging(), Look(add)])
    ended = copies(model.parameters())
    assert not are_close(ended, mean_of_ranks(last)), "not swapped"
    assert are_close(ended, mean_of_ranks([each / num for each in sums])), "not the average"
    looks = [each for each in model.seen if len(each) > 10]
    return None if len(set(everywhere(tuple(looks)))) == 1 else "until the end each rank's own average is validated"


class Thaw(cb.BaseFinetuning):
    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        self.freeze(pl_module.backbone, train_bn=False)  # type: ignore[arg-type]

    def finetune_function(self, pl_module: pl.LightningModule, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, lr=0.02)  # type: ignore[arg-type]


@row("`BaseFinetuning`")
def base_finetuning(run: Run) -> None:
    model = Model()
    weight = model.backbone[0].weight
    assert isinstance(weight, Tensor)
    begun, at_epoch_1 = copies([weight]), []

    def look(trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.global_step == BATCHES:
            at_epoch_1[:] = copies([weight])

    trainer = run.fit(model, max_epochs=3, callbacks=[Thaw(), Look(look)])
    assert are_equal(begun, at_epoch_1), "trained while frozen"
    assert len(trainer.optimizers[0].param_groups) == 2
    assert not begun[0].equal(weight), "thawed, and not trained"


@row("`EarlyStopping`")
def early_stopping(run: Run) -> None:
    trainer = run.fit(Model(), max_epochs=9, callbacks=[cb.EarlyStopping("rises", patience=2)])
    assert trainer.current_epoch == 3, f"stopped after epoch {trainer.current_epoch}"
    assert trainer.global_step == 3 * BATCHES


@row("`GradientAccumulationScheduler`")
def accumulation_schedule(run: Run) -> None:
    trainer = run.fit(Model(), callbacks=[cb.GradientAccumulationScheduler({0: 1, 1: 2})])
    assert trainer.global_step == BATCHES + BATCHES // 2, f"{trainer.global_step} steps"


@row("`LearningRateFinder`")
def learning_rate_finder(run: Run) -> None:
    model = Model()
    finder = cb.LearningRateFinder(min_lr=1e-4, max_lr=1.0, num_training_steps=20, early_stop_threshold=None)
    trainer = run.fit(model, loader(20), callbacks=[finder], max_steps=4, default_root_dir=run.folder)
    assert finder.optimal_lr is not None
    found = finder.optimal_lr.suggestion()
    assert found == model.lr == trainer.optimizers[0].param_groups[0]["lr"], "not set"
    assert found not in (None, LR)
    assert len(finder.optimal_lr.results["lr"]) >= 19, "stopped early"
    assert len(set(everywhere(found))) == 1, "ranks have found different ones"
    assert trainer.global_step == 4, f"{trainer.global_step} steps"


class WithData(Model):
    """A module with a loader of its own."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.batch_size, self.num_loaded = 2, 0

    def train_dataloader(self) -> DataLoader:
        self.num_loaded += 1
        return DataLoader(dataset(BATCHES), batch_size=self.batch_size)


@row("`BatchSizeFinder`")
def batch_size_finder(run: Run) -> None:
    model, trainer = WithData(), run.trainer(callbacks=[cb.BatchSizeFinder(max_trials=2)])
    trainer.fit(model)
    assert model.batch_size > 2


@row(ON_EXCEPTION)
def on_exception_checkpoint(run: Run) -> str | None:
    def fail(trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.global_step == 5:
            raise RuntimeError("on purpose")

    callback = cb.OnExceptionCheckpoint(run.folder, filename="left")
    with contextlib.suppress(RuntimeError):
        run.fit(Model(), callbacks=[callback, Look(fail)])
    dist.barrier()  # after an exception no rank waits for rank 0, which writes the file
    if run.column != "ddp":
        assert not (run.folder / "left.ckpt").exists()
        return SKIPPED
    trainer = run.fit(Model(), ckpt_path=str(run.folder / "left.ckpt"))
    assert trainer.global_step == 2 * BATCHES, f"{trainer.global_step} steps"
    return None


@row("`ModelCheckpoint(save_top_k=2)`")
def top_k(run: Run) -> None:
    callback = cb.ModelCheckpoint(run.folder, "{epoch}", monitor="rises", save_top_k=2)
    run.fit(Model(), max_epochs=4, callbacks=[callback])
    dist.barrier()
    assert {path.name for path in run.folder.glob("*.ckpt")} == {"epoch=0.ckpt", "epoch=1.ckpt"}
    assert len(list(run.folder.iterdir())) in (2, 4), "files of deleted checkpoints are left"
    assert callback.best_model_path.endswith("epoch=0.ckpt")


@row('`ModelCheckpoint(save_last="link")`')
def save_last_link(run: Run) -> None:
    run.fit(Model(), max_epochs=1, callbacks=[cb.ModelCheckpoint(run.folder, "{epoch}", save_last="link")])
    dist.barrier()
    link = run.folder / "last.ckpt"
    assert link.is_symlink()
    assert link.resolve().name == "epoch=0.ckpt"
    trainer = run.fit(model := Model(), ckpt_path=str(link))
    assert trainer.global_step == 2 * BATCHES
    assert len(model.losses) == BATCHES


@row('`ckpt_path="last"`')
def last(run: Run) -> None:
    def callbacks() -> list[cb.Callback]:
        return [cb.ModelCheckpoint(run.folder, save_last=True)]

    class Half(cb.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            trainer.should_stop = True

    run.fit(Model(), callbacks=[*callbacks(), Half()])
    dist.barrier()
    trainer = run.fit(model := Model(), callbacks=callbacks(), ckpt_path="last")
    assert len(model.losses) == BATCHES, "not resumed"
    assert trainer.global_step == 2 * BATCHES
    run.fit(straight := Model())
    assert digest(model.parameters()) == digest(straight.parameters()), "not the weights of a run without a stop"


@row("`ModelCheckpoint(save_weights_only=True)`")
def save_weights_only(run: Run) -> None:
    run.fit(model := Model(), callbacks=[cb.ModelCheckpoint(run.folder, "some", save_weights_only=True)])
    dist.barrier()
    loaded = Model.load_from_checkpoint(run.folder / "some.ckpt", weights_only=True)
    # The last epoch's file of a method that averages weights has the last average, and the fit ends with another one.
    assert averages_weights(run.column) or are_equal(loaded.parameters(), model.parameters())
    check_equal(loaded)
    assert len(list(run.folder.iterdir())) == 1


@row("`fit(ckpt_path=..., weights_only=True)`")
def weights_only(run: Run) -> None:
    run.fit(Model(), max_epochs=1, callbacks=[cb.ModelCheckpoint(run.folder, "some")])
    dist.barrier()
    trainer = run.trainer()
    trainer.fit(model := Model(), loader(), ckpt_path=str(run.folder / "some.ckpt"), weights_only=True)
    check_equal(model)
    assert len(model.losses) == BATCHES, "not resumed"


# Schedulers -----------------------------------------------------------------------------------------------------


@row("`ReduceLROnPlateau`")
def plateau(run: Run) -> None:
    def scheduler(optimizer: torch.optim.Optimizer) -> Any:
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"scheduler": plateau, "monitor": "rises"}

    trainer = run.fit(Model(scheduler=scheduler), max_epochs=3)
    assert trainer.optimizers[0].param_groups[0]["lr"] == LR / 4


@row("`OneCycleLR`, in each step")
def one_cycle(run: Run) -> None:
    def cycle(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.OneCycleLR:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=2 * BATCHES + 1)

    found: list[Any] = []

    def look(trainer: pl.Trainer, module: pl.LightningModule) -> None:
        found.append({name: trainer.optimizers[0].param_groups[0][name] for name in ("lr", "momentum")})

    model = Model(scheduler=lambda optimizer: {"scheduler": cycle(optimizer), "interval": "step"})
    run.fit(model, callbacks=[Look(look)])
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=LR, momentum=0.9)
    scheduler, wanted = cycle(optimizer), []
    for _ in range(2 * BATCHES):
        optimizer.step()
        scheduler.step()
        wanted.append({name: optimizer.param_groups[0][name] for name in ("lr", "momentum")})
    assert found == wanted


# The Trainer's arguments ----------------------------------------------------------------------------------------


# Settings of which the steps and validations that follow say that they have had their effect: steps, and what was seen.
T, V = "train", "validate"
COUNTED: dict[str, tuple[dict[str, Any], int, list[str] | None]] = {
    "`accumulate_grad_batches=3`": ({"accumulate_grad_batches": 3}, 4, None),  # 3 + 1 of each epoch
    "`overfit_batches=2`": ({"overfit_batches": 2, "max_epochs": 3}, 6, None),
    "`limit_train_batches`, `limit_val_batches`: numbers": (
        {"limit_train_batches": 3, "limit_val_batches": 1}, 6, 2 * [*3 * [T], V],
    ),
    "`val_check_interval`: a number": ({"max_epochs": 1, "val_check_interval": 2}, 4, 2 * [T, T, V, V]),
    "`val_check_interval=3`, `check_val_every_n_epoch=None`": (
        {"val_check_interval": 3, "check_val_every_n_epoch": None}, 8, [*2 * [*3 * [T], V, V], T, T],
    ),
    "`check_val_every_n_epoch=2`": ({"check_val_every_n_epoch": 2}, 8, [*8 * [T], V, V]),
    "`fast_dev_run=2`": ({"fast_dev_run": 2}, 2, [T, T, V, V]),
    "`barebones=True`": ({"barebones": True}, 8, None),
    "`sync_batchnorm=True`": ({"sync_batchnorm": True}, 8, None),
    "`use_distributed_sampler=False`": ({"use_distributed_sampler": False, "max_epochs": 1}, 8, None),  # all of it
    "`num_sanity_val_steps=2`": ({"num_sanity_val_steps": 2, "max_epochs": 1}, 4, ["sanity", "sanity", *4 * [T], V, V]),
}  # fmt: skip


def count(run: Run, options: dict[str, Any], num_steps: int, seen: list[str] | None) -> None:
    model = Model()
    trainer = run.fit(model, **options)
    assert trainer.global_step == num_steps, f"{trainer.global_step} steps"
    assert seen in (None, model.seen), model.seen


for name, (options, *expected) in COUNTED.items():
    row(name)(functools.partial(count, options=options, num_steps=expected[0], seen=expected[1]))


@row("`max_time`")
def max_time(run: Run) -> None:
    begun = time.monotonic()
    trainer = run.fit(Model(), loader(), max_epochs=-1, max_time={"milliseconds": 60})
    assert time.monotonic() - begun >= 0.06
    assert len(set(everywhere(trainer.global_step))) == 1


def clip(run: Run, algorithm: str) -> None:
    """With a loss a million times larger, only clipped gradients leave the weights where they are."""
    model, most = Model(lr=1.0, momentum=0.0, scale=1e6), 1e-3
    begun = copies(model.parameters())
    trainer = run.fit(model, max_epochs=1, gradient_clip_val=most, gradient_clip_algorithm=algorithm)
    moves = [(a - b).flatten() for a, b in zip(model.parameters(), begun, strict=True)]
    move = torch.cat(moves).norm() if algorithm == "norm" else torch.cat(moves).abs().max()
    # An outer optimizer goes further than the average: here at most 0.7 (1 + 0.9 + ...) times as far.
    assert 0.0 < float(move) <= 4.0 * trainer.global_step * most, f"moved by {float(move)}"


@row('`gradient_clip_algorithm="norm"`')
def clip_norm(run: Run) -> None:
    clip(run, "norm")


@row('`gradient_clip_algorithm="value"`')
def clip_value(run: Run) -> None:
    clip(run, "value")


@row("`reload_dataloaders_every_n_epochs=1`")
def reload(run: Run) -> None:
    model, trainer = WithData(), run.trainer(max_epochs=3, reload_dataloaders_every_n_epochs=1)
    trainer.fit(model)
    check_equal(model)
    assert model.num_loaded == 3
    assert trainer.global_step == 3 * 2 * BATCHES


# Modules --------------------------------------------------------------------------------------------------------


@row('`torch.compile(module, backend="eager")`')
def compiled(run: Run) -> None:
    model = Model()
    begun = copies(model.parameters())
    trainer = run.fit(torch.compile(model, backend="eager"), max_epochs=1)
    assert trainer.global_step == BATCHES
    assert not any(a.equal(b) for a, b in zip(begun, model.parameters(), strict=True))
    check_equal(model)


@row("tied weights")
def tied(run: Run) -> None:
    class Tied(Model):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
            self.decode.weight = self.encode.weight

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.decode(torch.relu(self.encode(x))))

    model = Tied()
    begun = copies([model.encode.weight])
    run.fit(model)
    assert model.encode.weight is model.decode.weight
    assert not begun[0].equal(model.encode.weight)


class Manual(Model):
    """Two optimizers in manual optimization, of which the second steps in every second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        first, second = self.optimizers()
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(self.loss(batch))
        first.step()
        if batch_idx % 2:
            second.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=LR) for part in (self.backbone, self.head)]


@row("manual optimization with two optimizers")
def manual(run: Run) -> None:
    model = Manual()
    begun = copies(model.parameters())
    trainer = run.fit(model)
    assert trainer.global_step == 3 * BATCHES, f"{trainer.global_step} steps"
    assert not any(a.equal(b) for a, b in zip(begun, model.parameters(), strict=True))


@row("manual optimization, `toggle_optimizer`, with `find_unused_parameters=True`")
def toggled(run: Run) -> None:
    class Toggles(Manual):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
            for optimizer in self.optimizers():
                self.toggle_optimizer(optimizer)
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
                optimizer.step()
                self.untoggle_optimizer(optimizer)

    model = Toggles()
    begun = copies(model.parameters())
    trainer = run.fit(model, strategy=run.strategy(find_unused_parameters=True))
    assert trainer.global_step == 4 * BATCHES, f"{trainer.global_step} steps"
    assert not any(a.equal(b) for a, b in zip(begun, model.parameters(), strict=True))


@row("`validate`, `test` and `predict` after `fit`")
def after_fit(run: Run) -> None:
    trainer = run.fit(model := Model())
    before = digest([*model.parameters(), *model.buffers()])
    (validated,) = trainer.validate(model, loader(2), verbose=False)
    (tested,) = trainer.test(model, loader(2), verbose=False)
    assert abs(validated["val_loss"] - tested["test_loss"]) < 1e-6
    predicted = trainer.predict(model, loader(2), return_predictions=True)
    assert predicted is not None
    assert len(predicted) == 2
    assert before == digest([*model.parameters(), *model.buffers()])
    (fresh,) = run.trainer().validate(model, loader(2), verbose=False)
    assert fresh["val_loss"] == validated["val_loss"]


@row("a second `fit` of the same Trainer")
def again(run: Run) -> None:
    trainer = run.fit(model := Model(), max_epochs=1)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, loader())
    check_equal(model)
    assert trainer.global_step == 2 * BATCHES


# Started by the Trainer -----------------------------------------------------------------------------------------

NOTEBOOK = 'notebooks: `strategy="..._notebook"`'


class Note(cb.Callback):
    """Writes down what a rank has at the end."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        line = f"{trainer.global_step} steps {digest(module.parameters())}"
        (Path(self.folder) / f"rank{trainer.global_rank}").write_text(line)


class OnItsOwn(WithData):
    """Has its data, which it makes before there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.data = TensorDataset(torch.randn(64, 16), torch.randint(0, 8, (64,)))

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.data, batch_size=BATCH)


def in_notebook(column: str, folder: str) -> dict[str, str]:
    """Train as in a notebook, in a process that nobody has launched: the ranks are forked from it."""
    forget_launcher()
    accelerator_connector._IS_INTERACTIVE = True  # type: ignore[attr-defined]  # what Lightning finds in a notebook
    model, options = OnItsOwn(), {"accelerator": "cpu", "devices": 2, "max_steps": 8, "logger": False}
    options |= {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    try:
        trainer = pl.Trainer(strategy=f"{column}_notebook", callbacks=[Note(folder)], **options)
        trainer.fit(model)
        ends = {(Path(folder) / f"rank{rank}").read_text() for rank in (0, 1)}
        assert ends == {f"8 steps {digest(model.parameters())}"}, "not the weights of both ranks"
    except Exception as error:  # noqa: BLE001 - as in `survey`
        return {NOTEBOOK: in_words(error)}
    return {NOTEBOOK: YES}


# ----------------------------------------------------------------------------------------------------------------


def in_words(error: BaseException) -> str:
    """Return the first sentence of an error."""
    sentence = re.split(r"(?<=[^.])\. ", " ".join(str(error).split()))[0].rstrip(".").replace("|", "/")
    return sentence if isinstance(error, AssertionError) else f"{type(error).__name__}: {sentence}"


def survey(column: str, folder: str) -> dict[str, str]:
    """Return the cells of a column, on every rank."""
    cells = {}
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    for number, (name, row_of) in enumerate(ROWS.items()):
        own = Path(folder) / f"{number}"
        own.mkdir(exist_ok=True)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                cells[name] = row_of(Run(column, own)) or YES
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the cell
            cells[name] = in_words(error)
            traceback.print_exc()  # if it is this rank's alone, the others will hang
        torch.use_deterministic_algorithms(False)
        dist.barrier()
    logging.disable(logging.NOTSET)
    return cells


def run_survey(columns: Iterable[str], folder: Path) -> Cells:
    """Return what two ranks find, by row and column."""
    cells: Cells = {}
    for column in columns:
        own = folder / column
        own.mkdir()
        ranks = run_ranks(survey, 2, column, str(own), timeout_s=300.0)
        (noted,) = run_ranks(in_notebook, 1, column, str(own), fresh=True)
        for name in (*ROWS, NOTEBOOK):
            cells[name, column] = " / ".join({{**each, **noted}[name]: None for each in ranks})
    return cells


def write_page() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = table(run_survey(COLUMNS, Path(folder)))
    text = PAGE.read_text()
    PAGE.write_text(text[: text.index("| |")] + found)


def table(cells: Cells) -> str:
    """Return the cells as a table, in which reasons are numbers, and the reasons below it."""
    rows, columns = (list(dict.fromkeys(each)) for each in zip(*cells, strict=True))
    reasons = list(dict.fromkeys(cell for cell in cells.values() if cell != YES))
    shown = {YES: YES, **{reason: f"({number})" for number, reason in enumerate(reasons, start=1)}}
    lines = [[name, *(shown[cells[name, column]] for column in columns)] for name in rows]
    head = f"| | {' | '.join(f'`{column}`' for column in columns)} |\n{'|---' * (len(columns) + 1)}|\n"
    body = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return head + body + "".join(f"\n({number}) {reason}\n" for number, reason in enumerate(reasons, start=1))


def read_table(text: str) -> Cells:
    """Return the cells of a page, by row and column."""
    head, _, *rows = ([cell.strip() for cell in line[1:-1].split("|")] for line in text.splitlines() if line[:1] == "|")
    reasons = {YES: YES, **dict(re.findall(r"^(\(\d+\)) (.*)$", text, re.MULTILINE))}
    return {
        (row[0], column.strip("`")): reasons[cell]
        for row in rows
        for column, cell in zip(head[1:], row[1:], strict=True)
    }
