"""Local SGD in Lightning: truly local, seen as a consensus, resumed to the bit, ended together."""

from __future__ import annotations

import os
import signal
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, OnExceptionCheckpoint, Timer
from lightning.pytorch.trainer.connectors.signal_connector import _HandlersCompose
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_lowbw import (
    AdaptiveLocalSGDStrategy,
    AveragingSchedule,
    Compression,
    ConfigurationError,
    DGCStrategy,
    LocalSGDStrategy,
    NonFiniteGradientError,
    TrafficMonitor,
    UnexpectedCollectiveError,
)
from lightning_lowbw.where.agreement import digest
from lightning_lowbw.where.volume import all_reduce_bytes
from tests.ranks import run_ranks
from tests.tiny import BATCH, Tiny, amp_with_scaler, make_data, make_trainer, sgd

STEPS = 10
SPARSE = {"density": 1 / 8, "chunk": 64, "min_numel": 100}  # the tiny layers
adamw = partial(torch.optim.AdamW, lr=1e-2)


def weights(module: nn.Module) -> str:
    return digest([*module.parameters(), *module.buffers()])


def gathered(value: Any) -> list[Any]:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class Trace(pl.Callback):
    """Keep the weights after each step, and what others are shown."""

    def __init__(self) -> None:
        self.after: list[str] = []
        self.shown: list[str] = []
        self.averages: list[int] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        self.after.append(weights(module))
        self.averages.append(trainer.strategy.workers[0].num_averages)

    def on_validation_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.shown.append(weights(module))

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.shown.append(weights(module))

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.shown.append(weights(module))


# Where and when ----------------------------------------------------------------------------------------------------


def fit_against_ddp(kwargs: dict[str, Any]) -> dict[str, Any]:
    num_ranks = dist.get_world_size()
    states = []
    for strategy in (pl.strategies.DDPStrategy(), LocalSGDStrategy(**kwargs)):
        model = Tiny(adamw)
        make_trainer(strategy, num_ranks, gradient_clip_val=0.5).fit(model, make_data(num_ranks, STEPS))
        states.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return {"same": all(torch.equal(states[0][name], states[1][name]) for name in states[0]), "weights": states}


@pytest.mark.parametrize("kwargs", [{"k_steps": 1}, {"begin_step": STEPS}])
def test_synchronous_steps_are_those_of_ddp_to_the_bit(kwargs: dict[str, Any]) -> None:
    for result in run_ranks(fit_against_ddp, 2, kwargs):
        assert result["same"]


def fit_audited(accumulate: int, kwargs: dict[str, Any]) -> dict[str, Any]:
    num_ranks = dist.get_world_size()
    trace = Trace()
    strategy = LocalSGDStrategy(audit=True, **kwargs)
    trainer = make_trainer(
        strategy, num_ranks, callbacks=[trace, TrafficMonitor(prog_bar=False)], accumulate_grad_batches=accumulate
    )
    trainer.fit(Tiny(unused=bool(kwargs.get("find_unused_parameters"))), make_data(num_ranks, STEPS * accumulate))
    by_rank = gathered(trace.after)
    same = [len(set(step)) == 1 for step in zip(*by_rank, strict=True)]
    return {"same": same, "averages": trace.averages, "steps": trainer.global_step}


@pytest.mark.parametrize(
    ("accumulate", "kwargs"),
    [
        (1, {"k_steps": 3, "begin_step": 2}),
        (2, {"k_steps": 3, "begin_step": 2}),
        (1, {"k_steps": 3, "begin_step": 0}),
        (1, {"k_steps": 4, "delay_steps": 2}),
        (1, {"k_steps": 3, "compression": SPARSE}),
        (1, {"k_steps": 4, "delay_steps": 3, "compression": SPARSE}),
        (1, {"k_steps": 3, "find_unused_parameters": True}),
        (1, {"k_steps": 3, "static_graph": True}),
        (1, {"k_steps": 3, "gradient_as_bucket_view": True}),
    ],
)
def test_averages_come_when_they_should_and_nothing_is_sent_between(accumulate: int, kwargs: dict[str, Any]) -> None:
    for result in run_ranks(fit_audited, 2, accumulate, kwargs):
        assert result["steps"] == STEPS
        begin, k, delay = kwargs.get("begin_step", 1), kwargs["k_steps"], kwargs.get("delay_steps", 0)
        due = [step for step in range(1, STEPS + 1) if step > begin and (step - begin - delay) % k == 0]
        due = [step for step in due if step - delay > begin]
        averages = result["averages"][accumulate - 1 :: accumulate]
        assert [
            step for step in range(1, STEPS + 1) if averages[step - 1] > (averages[step - 2] if step > 1 else 0)
        ] == due
        if not delay:
            same = result["same"][accumulate - 1 :: accumulate]
            assert [step for step in range(begin + 1, STEPS + 1) if same[step - 1]] == due


def monitor() -> tuple[list[dict[str, float]], int, list[float]]:
    rows: list[dict[str, float]] = []
    distances = []

    class Logged(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            rows.append({k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("traffic/")})

    model = Tiny(partial(torch.optim.SGD, lr=1e-12))  # the fifth step moves nothing: what differs has been set here

    class Drift(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
            if trainer.global_step == 4:
                with torch.no_grad():
                    for p in module.parameters():
                        if p.requires_grad:
                            p.add_(0.1 * (dist.get_rank() + 1) * torch.randn(p.shape))
                own = torch.cat([p.detach().reshape(-1) for p in module.parameters() if p.requires_grad])
                mean = torch.stack(gathered(own)).mean(0)
                distances.append(float((own - mean).norm() / mean.norm()))

    callbacks = [TrafficMonitor(prog_bar=False), Logged(), Drift()]
    trainer = make_trainer(LocalSGDStrategy(k_steps=4), dist.get_world_size(), callbacks=callbacks)
    trainer.fit(model, make_data(2, 9))
    return rows, sum(p.numel() for p in model.parameters() if p.requires_grad), distances


def test_what_is_logged() -> None:
    for rows, numel, distances in run_ranks(monitor, 2):
        buffers = 2 * 64  # running mean and variance; the count of batches is apart
        average = all_reduce_bytes(4 * (numel + buffers + 8 + 2 * 2), 2) + all_reduce_bytes(8, 2)
        sent = [row["traffic/bytes_sent"] for row in rows]
        assert sent[1:] == [0, 0, 0, average, 0, 0, 0, average]
        assert [row["traffic/averages"] for row in rows] == [0, 0, 0, 0, 1, 1, 1, 1, 2]
        assert {row["traffic/k_steps"] for row in rows} == {4.0}
        assert rows[4]["traffic/compression_ratio"] == pytest.approx(4 * all_reduce_bytes(4 * numel, 2) / average)
        assert rows[1]["traffic/exposed_s"] == 0.0
        assert rows[4]["traffic/exposed_s"] > 0.0
        assert rows[4]["traffic/consensus_distance"] == pytest.approx(distances[0], rel=1e-3)


class Chatty(Tiny):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, sync_dist=True)
        return loss


def fit_chatty() -> str:
    num_ranks = dist.get_world_size()
    trainer = make_trainer(LocalSGDStrategy(k_steps=4, audit=True), num_ranks)
    try:
        trainer.fit(Chatty(), make_data(num_ranks, STEPS))
    except UnexpectedCollectiveError as error:
        return str(error)
    return ""


def test_the_audit_names_a_collective_between_averages() -> None:
    for message in run_ranks(fit_chatty, 2):
        assert "all_reduce" in message
        assert "test_local_sgd_strategy.py" in message
        assert "training_step" in message


class Sleepy(Tiny):
    """Rank 0 sleeps in some steps, rank 1 in others."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if batch_idx % 2 == self.global_rank and batch_idx > 0:
            time.sleep(0.1)
        return super().training_step(batch, batch_idx)


def time_fit(strategy: str) -> float:
    num_ranks = dist.get_world_size()
    chosen = pl.strategies.DDPStrategy() if strategy == "ddp" else LocalSGDStrategy(k_steps=10, begin_step=1)
    trainer = make_trainer(chosen, num_ranks)
    started = time.perf_counter()
    trainer.fit(Sleepy(), make_data(num_ranks, 21))
    return time.perf_counter() - started


@pytest.mark.slow
def test_a_rank_does_not_wait_for_another_between_averages() -> None:
    """20 steps, each slow on one of two ranks: 20 x 0.1 s in lock-step, 10 x 0.1 s alone."""
    local, dense = max(run_ranks(time_fit, 2, "local")), max(run_ranks(time_fit, 2, "ddp"))
    assert dense - local > 0.6


# Looking -----------------------------------------------------------------------------------------------------------


def fit_and_look(look: bool, kwargs: dict[str, Any], folder: str) -> dict[str, Any]:
    num_ranks = dist.get_world_size()
    model, trace = Tiny(adamw, data_by_step=True), Trace()  # no dropout: a validation loader draws a random number
    options: dict[str, Any] = {"max_steps": STEPS, "max_epochs": -1, "callbacks": [trace]}
    if look:
        options |= {"val_check_interval": 2, "num_sanity_val_steps": 1}
        options["callbacks"] += [ModelCheckpoint(folder, monitor="val_loss", every_n_train_steps=3, save_top_k=-1)]
        options["enable_checkpointing"] = True
    trainer = make_trainer(LocalSGDStrategy(**kwargs), num_ranks, **options)
    trainer.fit(model, make_data(num_ranks, STEPS), make_data(num_ranks, 2) if look else None)
    assert len(set(gathered(weights(model)))) == 1, "no consensus after the fit"
    shown = gathered(trace.shown)
    assert all(len(set(each)) == 1 for each in zip(*shown, strict=True)), "somebody saw no consensus"
    assert len(trace.shown) > 5 or not look
    return {"after": trace.after, "end": weights(model)}


@pytest.mark.parametrize(
    "kwargs",
    [
        {"k_steps": 4},
        {"k_steps": 5, "delay_steps": 3},
        {"k_steps": 3, "outer": "slowmo"},
        {"k_steps": 20},
        {"k_steps": 4, "compression": SPARSE},
        {"k_steps": 4, "num_fragments": 3, "delay_steps": 2, "mixing": 0.25, "compression": SPARSE},
    ],
)
def test_validating_and_saving_change_nothing(kwargs: dict[str, Any], tmp_path: Path) -> None:
    quiet = run_ranks(fit_and_look, 2, False, kwargs, "")
    looked = run_ranks(fit_and_look, 2, True, kwargs, str(tmp_path))
    assert quiet == looked
    assert quiet[0]["after"][2] != quiet[1]["after"][2], "the ranks were not local"


def look_at_buffers(accumulate: int) -> list[str]:
    """Look after the last synchronous step, right after averages, and in the middle of an accumulation."""
    num_ranks = dist.get_world_size()
    trace = Trace()
    trainer = make_trainer(
        LocalSGDStrategy(k_steps=2, begin_step=3 if accumulate == 1 else 0),
        num_ranks,
        callbacks=[trace],
        val_check_interval=1,
        accumulate_grad_batches=accumulate,
    )
    trainer.fit(Tiny(), make_data(num_ranks, STEPS), make_data(num_ranks, 1))
    return trace.shown[2 * 3 if accumulate == 1 else 2 :]  # before: as in DDP, and the sanity check


@pytest.mark.parametrize("accumulate", [1, 2])
def test_all_ranks_see_the_same_buffers(accumulate: int) -> None:
    first, second = run_ranks(look_at_buffers, 2, accumulate)
    assert len(first) > 12
    assert first == second


def fit_with_unsynced_names(folder: str, resume: str) -> tuple[str, list[str]]:
    num_ranks = dist.get_world_size()

    class Named(Tiny):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("mine", float(self.global_rank))
            return loss

    saver = ModelCheckpoint(folder, filename="{step}-{mine:.1f}", every_n_train_steps=3, save_top_k=1, monitor="mine")
    trace = Trace()
    options: dict[str, Any] = {"max_steps": STEPS, "max_epochs": -1, "enable_checkpointing": True}
    trainer = make_trainer(LocalSGDStrategy(k_steps=4, audit=True), num_ranks, callbacks=[saver, trace], **options)
    trainer.fit(Named(data_by_step=True), make_data(num_ranks, STEPS), ckpt_path=resume or None)
    return str(saver.best_model_path), trace.after


def test_shards_lie_beside_the_file_of_rank_0(tmp_path: Path) -> None:
    """Rank 1 would name the file after its own metric."""
    straight = run_ranks(fit_with_unsynced_names, 2, str(tmp_path), "")
    (path,) = tmp_path.glob("*.ckpt")
    (folder,) = tmp_path.glob("*.ranks")
    assert folder.name == path.name + ".ranks"
    assert len(list(folder.iterdir())) == 2
    step = torch.load(path, weights_only=False)["global_step"]
    resumed = run_ranks(fit_with_unsynced_names, 2, str(tmp_path / "more"), str(path))
    for (_, before), (_, after) in zip(straight, resumed, strict=True):
        assert before[step:] == after


def go_over(path: str, first: str, second: str) -> str:
    num_ranks = dist.get_world_size()
    strategies = {"dgc": lambda: DGCStrategy(min_numel=100), "local_sgd": lambda: LocalSGDStrategy(k_steps=3)}

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 5:
                trainer.save_checkpoint(path)

    options: dict[str, Any] = {"max_steps": STEPS, "max_epochs": -1}
    trainer = make_trainer(strategies[first](), num_ranks, callbacks=[Save()], **options)
    trainer.fit(Tiny(), make_data(num_ranks, STEPS))
    model = Tiny()
    trainer = make_trainer(strategies[second](), num_ranks, **options)
    trainer.fit(model, make_data(num_ranks, STEPS), ckpt_path=path)
    assert trainer.global_step == STEPS
    assert trainer.strategy.workers[0].step == STEPS
    return digest(model.parameters())


@pytest.mark.parametrize("order", [("dgc", "local_sgd"), ("local_sgd", "dgc")])
def test_another_method_goes_on_with_the_weights(order: tuple[str, str], tmp_path: Path) -> None:
    first, second = run_ranks(go_over, 2, str(tmp_path / "some.ckpt"), *order)
    assert first == second


def fit_and_save(path: str) -> dict[str, Any]:
    num_ranks = dist.get_world_size()

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
            if trainer.global_step == 6:
                before = weights(module)
                trainer.save_checkpoint(path)
                assert weights(module) == before

        def on_save_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict) -> None:
            assert len(set(gathered(weights(module)))) == 1

    trace = Trace()
    trainer = make_trainer(LocalSGDStrategy(k_steps=4), num_ranks, callbacks=[trace, Save()])
    model = Tiny(data_by_step=True)
    trainer.fit(model, make_data(num_ranks, STEPS))
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_a_checkpoint_is_a_plain_file_with_the_mean_of_the_ranks(tmp_path: Path) -> None:
    path = tmp_path / "six.ckpt"
    run_ranks(fit_and_save, 2, str(path))
    checkpoint = torch.load(path, weights_only=False)
    shards = sorted((tmp_path / "six.ckpt.ranks").iterdir())
    own = [torch.load(shard, weights_only=True)["workers"][0]["own"] for shard in shards]
    assert len(own) == 2
    for name, value in checkpoint["state_dict"].items():
        if name in own[0] and "norm" not in name:
            torch.testing.assert_close(value, (own[0][name] + own[1][name]) / 2)
    assert not torch.equal(own[0]["wide.weight"], own[1]["wide.weight"])
    Tiny().load_state_dict(checkpoint["state_dict"])


def fit_resumable(
    strategy: dict[str, Any],
    path: str,
    save_at: int = 0,
    resume: bool = False,
    amp: bool = False,
    adaptive: bool = False,
) -> dict[str, Any]:
    num_ranks = dist.get_world_size()
    model, trace = Tiny(adamw, data_by_step=True, dropout=0.3), Trace()
    torch.manual_seed(7 + dist.get_rank() if not resume else 99)

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == save_at:
                trainer.save_checkpoint(path)

    options: dict[str, Any] = {"plugins": [amp_with_scaler(2.0**20)]} if amp else {}
    chosen = AdaptiveLocalSGDStrategy(**strategy) if adaptive else LocalSGDStrategy(**strategy)
    trainer = make_trainer(chosen, num_ranks, callbacks=[trace, Save()], max_steps=STEPS, max_epochs=-1, **options)
    trainer.fit(model, make_data(num_ranks, STEPS), ckpt_path=path if resume else None)
    return {"after": trace.after, "end": weights(model), "averages": trace.averages}


@pytest.mark.parametrize(
    ("strategy", "save_at", "amp", "adaptive"),
    [
        ({"k_steps": 4}, 1, False, False),
        ({"k_steps": 4}, 5, False, False),
        ({"k_steps": 4}, 7, True, False),
        ({"k_steps": 5, "delay_steps": 3, "begin_step": 0}, 6, False, False),
        ({"k_steps": 3, "outer": "nesterov"}, 6, False, False),
        ({"k_steps": 3, "value_dtype": "bfloat16"}, 6, False, False),
        ({"init_k_steps": 4, "rule": "adacomm"}, 7, False, True),
        ({"k_steps": 3, "compression": SPARSE}, 6, False, False),
        ({"k_steps": 4, "num_fragments": 3, "delay_steps": 3, "mixing": 0.25}, 6, False, False),
        ({"k_steps": 5, "delay_steps": 4, "begin_step": 0, "compression": SPARSE}, 6, False, False),
    ],
)
def test_resume_in_mid_interval_to_the_bit(
    strategy: dict[str, Any], save_at: int, amp: bool, adaptive: bool, tmp_path: Path
) -> None:
    path = str(tmp_path / "some.ckpt")
    fit = partial(fit_resumable, strategy, path, amp=amp, adaptive=adaptive)
    straight = run_ranks(partial(fit, save_at=save_at), 2)
    resumed = run_ranks(partial(fit, resume=True), 2)
    for before, after in zip(straight, resumed, strict=True):
        assert before["after"][save_at:] == after["after"]
        assert before["end"] == after["end"]
        assert before["averages"][save_at:] == after["averages"]


def test_another_number_of_ranks_resumes_from_the_consensus(tmp_path: Path) -> None:
    path = str(tmp_path / "some.ckpt")
    run_ranks(partial(fit_resumable, {"k_steps": 4}, path, save_at=6), 2)
    for num_ranks in (1, 3):
        results = run_ranks(partial(fit_resumable, {"k_steps": 4}, path, resume=True), num_ranks)
        assert len({result["end"] for result in results}) == 1
        assert len(results[0]["after"]) == STEPS - 6


class Biased(Tiny):
    """Each rank logs a number of its own, without sync_dist."""

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        epoch = self.trainer.current_epoch
        values = [[5.0, 1.0], [1.0, 3.0], [4.0, 4.5], [5.0, 5.0]][min(epoch, 3)]  # means 3, 2, 4.25, 5
        self.log("val_own", torch.tensor(values[self.global_rank]))


def fit_monitored(folder: str) -> dict[str, Any]:
    num_ranks = dist.get_world_size()
    best = ModelCheckpoint(folder, monitor="val_own", filename="{epoch}")
    stop = EarlyStopping("val_own", patience=1)
    trainer = make_trainer(
        LocalSGDStrategy(k_steps=4), num_ranks, callbacks=[best, stop], max_epochs=6, enable_checkpointing=True
    )
    trainer.fit(Biased(), make_data(num_ranks, 3), make_data(num_ranks, 1))
    return {
        "path": Path(best.best_model_path).name,
        "score": float(best.best_model_score or 0),
        "stopped": stop.stopped_epoch,
        "epochs": trainer.current_epoch,
    }


def test_monitored_metrics_are_means_over_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(fit_monitored, 2, str(tmp_path))
    assert first == second
    assert first == {"path": "epoch=1.ckpt", "score": 2.0, "stopped": 2, "epochs": 3}


# Optimizers --------------------------------------------------------------------------------------------------------


class Gan(pl.LightningModule):
    """Two optimizers by hand; the second steps in every other batch only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.first = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8))
        self.second = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        one, two = self.optimizers()
        for optimizer in (one, two):
            if optimizer is two and batch_idx % 2:
                continue
            loss = (self.second(self.first(batch[0])) - batch[1][:, None]).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.first.parameters(), 1e-2), torch.optim.SGD(self.second.parameters(), 1e-2)


def fit_gan(adaptive: bool) -> dict[str, Any]:
    num_ranks = dist.get_world_size()
    model = Gan()
    strategy = AdaptiveLocalSGDStrategy(3, audit=True) if adaptive else LocalSGDStrategy(3, audit=True)
    trace = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            trace.append((digest(model.first.parameters()), digest(model.second.parameters())))

    trainer = make_trainer(strategy, num_ranks, callbacks=[Watch()])
    trainer.fit(model, make_data(num_ranks, 14))
    buffers = [sorted(worker._buffers.floating) for worker in strategy._local_workers]
    return {
        "trace": trace,
        "averages": [w.num_averages for w in strategy._local_workers],
        "steps": [w.step for w in strategy._local_workers],
        "buffers": buffers,
        "end": weights(model),
    }


def fit_gan_with_unused() -> int:
    strategy = LocalSGDStrategy(3, audit=True, find_unused_parameters=True)
    make_trainer(strategy, dist.get_world_size()).fit(Gan(), make_data(2, 8))
    return strategy._local_workers[0].num_averages


def test_manual_optimization_is_local_where_ddp_looks_for_unused_parameters() -> None:
    assert run_ranks(fit_gan_with_unused, 2) == [2, 2]


@pytest.mark.parametrize("adaptive", [False, True])
def test_each_optimizer_has_its_own_counter(adaptive: bool) -> None:
    first, second = run_ranks(fit_gan, 2, adaptive)
    assert first["steps"] == [14, 7]
    assert first["end"] == second["end"]
    assert first["averages"] == second["averages"]
    assert first["buffers"] == [
        ["first.1.running_mean", "first.1.running_var"],
        ["second.1.running_mean", "second.1.running_var"],
    ]
    if not adaptive:
        assert first["averages"] == [4, 2]
        same = [
            tuple(a == b for a, b in zip(x, y, strict=True))
            for x, y in zip(first["trace"], second["trace"], strict=True)
        ]
        assert [i + 1 for i, (one, _) in enumerate(same) if one] == [1, 4, 7, 10, 13]
        assert [i + 1 for i, (_, two) in enumerate(same) if two] == [1, 2, 7, 8, 13, 14]


def fit_with_inf(amp: bool) -> dict[str, Any]:
    num_ranks = dist.get_world_size()
    trace = Trace()
    options = {"plugins": [amp_with_scaler()]} if amp else {}
    trainer = make_trainer(LocalSGDStrategy(k_steps=4), num_ranks, callbacks=[trace], **options)
    model = Tiny(poison=(1, 3))
    try:
        trainer.fit(model, make_data(num_ranks, STEPS))
    except NonFiniteGradientError as error:
        return {"error": str(error)}
    scaler = trainer.precision_plugin.scaler
    return {"averages": trace.averages, "scale": scaler.get_scale(), "end": weights(model)}


def test_an_inf_on_one_rank_skips_its_step_alone() -> None:
    first, second = run_ranks(fit_with_inf, 2, True)
    assert first["averages"] == second["averages"]
    assert second["scale"] == first["scale"] / 2
    assert first["end"] == second["end"]


def test_an_inf_without_a_scaler_is_named_on_all_ranks() -> None:
    for result in run_ranks(fit_with_inf, 2, False):
        assert "rank 1" in result["error"]


# Ending ------------------------------------------------------------------------------------------------------------


class Kill(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 3 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def fit_until_killed(folder: str, begin_step: int, delay: int) -> dict[str, Any]:
    num_ranks = dist.get_world_size()
    model = Tiny()
    trace = Trace()
    callbacks = [Kill(), trace, OnExceptionCheckpoint(folder)]
    strategy = LocalSGDStrategy(k_steps=4, begin_step=begin_step, delay_steps=delay)
    trainer = make_trainer(strategy, num_ranks, callbacks=callbacks, enable_checkpointing=True)
    try:
        trainer.fit(model, make_data(num_ranks, 20))
    except SIGTERMException:
        return {"steps": trainer.global_step, "weights": weights(model)}
    return {}


@pytest.mark.parametrize(("begin_step", "delay", "expected"), [(1, 0, 5), (10, 0, 4), (1, 2, 7)])
def test_a_sigterm_on_one_rank_ends_all_at_the_next_average(
    begin_step: int, delay: int, expected: int, tmp_path: Path
) -> None:
    first, second = run_ranks(fit_until_killed, 2, str(tmp_path), begin_step, delay)
    assert first["steps"] == second["steps"] == expected
    (path,) = tmp_path.glob("*.ckpt")
    assert torch.load(path, weights_only=False)["global_step"] == expected


def fit_until_requeued() -> list[tuple[int, str]]:
    num_ranks = dist.get_world_size()
    saved: list[tuple[int, str]] = []

    class Slurm(pl.Callback):
        """What SLURM's environment registers, and its signal on one rank."""

        def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            connector = trainer._signal_connector
            connector._slurm_sigusr_handler_fn = lambda *_: saved.append((trainer.global_step, weights(module)))
            connector._register_signal(signal.SIGUSR1, _HandlersCompose([connector._slurm_sigusr_handler_fn]))

        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 3 and trainer.global_rank == 1:
                os.kill(os.getpid(), signal.SIGUSR1)

    trainer = make_trainer(LocalSGDStrategy(k_steps=4), num_ranks, callbacks=[Slurm()])
    trainer.fit(Tiny(), make_data(num_ranks, STEPS))
    return saved


def test_slurms_signal_on_one_rank_saves_on_all_after_the_next_average() -> None:
    first, second = run_ranks(fit_until_requeued, 2)
    assert [step for step, _ in first] == [5]
    assert first == second


def fit_timed() -> dict[str, Any]:
    num_ranks = dist.get_world_size()
    asked: list[int] = []

    class Slow(Timer):
        def _check_time_remaining(self, trainer: pl.Trainer) -> None:
            asked.append(trainer.global_step)
            super()._check_time_remaining(trainer)

        def time_elapsed(self, stage: Any = "train") -> float:
            return 1e6 if asked and asked[-1] >= 5 and dist.get_rank() == 0 else 0.0

    trainer = make_trainer(LocalSGDStrategy(k_steps=4, audit=True), num_ranks, callbacks=[Slow({"seconds": 100})])
    trainer.fit(Tiny(), make_data(num_ranks, 12))
    return {"asked": asked, "steps": trainer.global_step}


def test_timers_ask_after_averages_only() -> None:
    first, second = run_ranks(fit_timed, 2)
    assert first["steps"] == second["steps"] == 5
    assert first["asked"][-1] == 5
    assert not {2, 3, 4} & set(first["asked"])


# Uneven data -------------------------------------------------------------------------------------------------------


def uneven_loader(num_batches: int) -> DataLoader:
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(BATCH * num_batches, 16, generator=generator)
    y = torch.randint(0, 5, (BATCH * num_batches,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=BATCH)


def fit_uneven(policy: str, max_steps: int = -1, **kwargs: Any) -> dict[str, Any]:
    num_ranks = dist.get_world_size()
    model, trace = Tiny(), Trace()
    options = {"max_epochs": 2, "max_steps": max_steps, "callbacks": [trace]}
    trainer = make_trainer(LocalSGDStrategy(k_steps=3, begin_step=0, uneven=policy, **kwargs), num_ranks, **options)
    trainer.fit(model, uneven_loader([7, 10, 13][dist.get_rank()]), uneven_loader(1))
    return {"steps": trainer.global_step, "epochs": trainer.current_epoch, "end": weights(model), "shown": trace.shown}


def test_ranks_with_more_batches_finish_them() -> None:
    results = run_ranks(fit_uneven, 3, "finish")
    assert [result["steps"] for result in results] == [14, 20, 26]
    assert len({result["end"] for result in results}) == 1
    assert all(result["shown"] == results[0]["shown"] for result in results)


def test_or_stop_at_the_next_average() -> None:
    results = run_ranks(fit_uneven, 3, "stop")
    assert [result["steps"] for result in results] == [14, 18, 18]
    assert len({result["end"] for result in results}) == 1


def test_the_last_step_of_one_rank_ends_the_training_of_all() -> None:
    results = run_ranks(fit_uneven, 3, "finish", 9)
    assert [result["steps"] for result in results] == [7, 9, 9]
    assert len({result["end"] for result in results}) == 1


def fit_uneven_until_killed() -> int:
    trainer = make_trainer(LocalSGDStrategy(k_steps=4, begin_step=0), 2, callbacks=[Kill()])
    try:  # rank 0 is out of data after 2 batches, rank 1 gets its signal after 3
        trainer.fit(Tiny(), uneven_loader([2, 9][dist.get_rank()]), uneven_loader(1))
    except SIGTERMException:
        return trainer.global_step
    return -1


def test_a_sigterm_ends_those_who_wait_for_data_of_others() -> None:
    assert run_ranks(fit_uneven_until_killed, 2) == [2, 4]


def fit_uneven_with(what: str) -> tuple[int, str]:
    """Things that stop a training early, with 7 and 10 batches."""

    class StopInMidEpoch(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            trainer.should_stop = trainer.should_stop or trainer.global_step == 4

    class Worse(Tiny):
        def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
            self.log("worse", float(self.trainer.current_epoch))

    stop = EarlyStopping("worse", patience=1) if what == "early stopping" else StopInMidEpoch()
    strategy = LocalSGDStrategy(k_steps=3, begin_step=0)
    trainer = make_trainer(strategy, 2, callbacks=[stop], max_epochs=6, min_epochs=4 if what == "early stopping" else 1)
    model = Worse()
    trainer.fit(model, uneven_loader([7, 10][dist.get_rank()]), uneven_loader(1))
    return trainer.global_step, weights(model)


def test_early_stopping_waits_for_min_epochs_on_uneven_data() -> None:
    (short, first), (long, second) = run_ranks(fit_uneven_with, 2, "early stopping")
    assert (short, long) == (28, 40)
    assert first == second


def test_a_stop_in_mid_epoch_leaves_a_consensus_on_uneven_data() -> None:
    (_, first), (_, second) = run_ranks(fit_uneven_with, 2, "stop")
    assert first == second


def average_weighted() -> Tensor:
    class Constant(pl.LightningModule):
        """Its weight moves by 1 per step on rank 0, by 2 on rank 1."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(()))

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            return -self.weight * (1.0 + self.global_rank)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    model = Constant()
    trainer = make_trainer(LocalSGDStrategy(k_steps=4, begin_step=0), 2)
    trainer.fit(model, uneven_loader([1, 3][dist.get_rank()]))
    return model.weight.detach()


def test_replicas_are_weighted_by_samples() -> None:
    for weight in run_ranks(average_weighted, 2):
        assert float(weight) == pytest.approx((1 * 1.0 + 3 * 6.0) / 4)


def fit_uneven_refused(trouble: str) -> str:
    options: dict[str, Any] = {"val_check_interval": 3} if trouble == "validation" else {}
    if trouble == "checkpoint":
        options |= {"callbacks": [ModelCheckpoint(every_n_train_steps=4)], "enable_checkpointing": True}
    if trouble == "accumulation":
        options |= {"accumulate_grad_batches": 3}
    kwargs: dict[str, Any] = {"begin_step": 8} if trouble == "synchronous" else {}
    kwargs |= {"begin_step": 2} if trouble == "accumulation" else {}
    kwargs |= {"delay_steps": 1} if trouble == "delay" else {}
    kwargs |= {"compression": {}} if trouble == "compression" else {}
    kwargs |= {"num_fragments": 2} if trouble == "fragments" else {}
    trainer = make_trainer(LocalSGDStrategy(**{"k_steps": 4, "begin_step": 0, **kwargs}), 2, **options)
    try:
        trainer.fit(Tiny(), uneven_loader(6 + 2 * dist.get_rank()), uneven_loader(1))
    except ConfigurationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("trouble", "word"),
    [
        ("synchronous", "synchronous"),
        ("accumulation", "synchronous"),
        ("delay", "delay_steps"),
        ("compression", "compression"),
        ("fragments", "num_fragments"),
        ("validation", "validation in the middle"),
        ("checkpoint", "end of an epoch"),
    ],
)
def test_what_uneven_data_do_not_allow_is_refused(trouble: str, word: str) -> None:
    for message in run_ranks(fit_uneven_refused, 2, trouble):
        assert word in message


# By name, and the callback -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("local_sgd", {"k_steps": 8, "begin_step": 1}),
        ("post_local_sgd", {"begin_step": "first_lr_decay"}),
        ("diloco_spawn", {"k_steps": 100, "begin_step": 0, "outer": "nesterov"}),
        ("streaming_diloco", {"k_steps": 100, "num_fragments": 4, "delay_steps": "auto", "mixing": 0.5}),
        ("sparse_loco_spawn", {"k_steps": 15, "begin_step": 0, "outer": "none", "compression": Compression()}),
        ("adaptive_local_sgd", {"k_steps": 1, "rule": "fleet", "max_k_steps": 16}),
    ],
)
def test_strategies_by_name(name: str, method: dict[str, Any]) -> None:
    strategy = pl.Trainer(strategy=name, accelerator="cpu", devices=2, logger=False, barebones=True).strategy
    assert isinstance(strategy, LocalSGDStrategy)
    assert {key: getattr(strategy.method, key) for key in method} == method


def test_wrong_arguments_are_refused() -> None:
    for wrong in (
        {"broadcast_buffers": True},
        {"uneven": "wait"},
        {"audit": "no"},
        {"k_step": 4},
        {"ddp_comm_hook": None},
        {"compression": {"top_k": 64}},
    ):
        with pytest.raises(ConfigurationError):
            LocalSGDStrategy(**wrong)
    with pytest.raises(ConfigurationError, match="LocalSGDStrategy"):
        AdaptiveLocalSGDStrategy(rule="fixed")
    for wrong in ({"begin_epoch": 1, "begin_step": 2}, {"begin_epoch": -1}, {"k_steps": 0}):
        with pytest.raises(ConfigurationError):
            AveragingSchedule(**wrong)


def fit_scheduled(callback: dict[str, Any], strategy: dict[str, Any]) -> tuple[Any, int]:
    num_ranks = dist.get_world_size()
    callbacks = [AveragingSchedule(**callback)] if callback else []
    trainer = make_trainer(LocalSGDStrategy(**strategy), num_ranks, callbacks=callbacks, max_epochs=2)
    trainer.fit(Tiny(), make_data(num_ranks, 8))
    (worker,) = trainer.strategy.workers
    return worker.method.begin_step, worker.num_averages


@pytest.mark.parametrize(
    ("callback", "strategy", "expected"),
    [
        ({"k_steps": 4, "begin_epoch": 1}, {}, (8, 2)),
        ({"begin_step": 0.25}, {"k_steps": 3}, (4, 4)),
        ({}, {"k_steps": 3, "begin_step": 0.5}, (8, 2)),
        ({"k_steps": 2, "begin_step": "first_lr_decay"}, {}, ("first_lr_decay", 0)),
    ],
)
def test_begin_in_epochs_and_in_fractions(callback: dict[str, Any], strategy: dict[str, Any], expected: Any) -> None:
    assert run_ranks(fit_scheduled, 2, callback, strategy) == [expected] * 2


def fit_with_finder(folder: str) -> list[str]:
    from lightning.pytorch.callbacks import LearningRateFinder

    num_ranks = dist.get_world_size()

    class WithRate(Tiny):
        lr = 0.01

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    model = WithRate()
    options = {
        "callbacks": [LearningRateFinder(num_training_steps=12)],
        "max_time": {"hours": 1},
        "default_root_dir": folder,
    }
    trainer = make_trainer(LocalSGDStrategy(k_steps=3), num_ranks, **options)
    trainer.fit(model, make_data(num_ranks, 20))
    return [digest(model.parameters())]


def test_a_tuner_in_a_callback_starts_the_training_twice(tmp_path: Path) -> None:
    first, second = run_ranks(fit_with_finder, 2, str(tmp_path))
    assert first == second


def fit_with_sync_batchnorm() -> str:
    try:
        make_trainer(LocalSGDStrategy(), 2, sync_batchnorm=True).fit(Tiny(), make_data(2, 4))
    except ConfigurationError as error:
        return str(error)
    return ""


def test_synchronised_batch_norm_is_refused() -> None:
    for message in run_ranks(fit_with_sync_batchnorm, 2):
        assert "sync_batchnorm" in message


def fit_never_local(begin: Any, k_steps: int) -> list[str]:
    num_ranks = dist.get_world_size()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy = LocalSGDStrategy(k_steps, begin_step=begin)
        make_trainer(strategy, num_ranks).fit(Tiny(), make_data(num_ranks, 4))
    messages = [str(warning.message) for warning in caught]
    return [each for each in messages if "trains as DDP" in each or "trains alone" in each]


@pytest.mark.parametrize(
    ("begin", "k_steps", "word"),
    [
        ("first_lr_decay", 1, "scheduler"),
        (4, 2, "4 optimizer steps, and the first 4"),
        (3, 2, "before the first average"),
        (2, 2, ""),
    ],
)
def test_a_run_that_never_becomes_local_or_averages_is_told(begin: Any, k_steps: int, word: str) -> None:
    messages = run_ranks(fit_never_local, 2, begin, k_steps)[0]
    assert len(messages) == bool(word)
    assert all(word in message for message in messages)


def fit_with_swa() -> list[str]:
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    num_ranks = dist.get_world_size()
    model = nn.Sequential()
    model = Tiny(sgd)
    callbacks = [StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)]
    trainer = make_trainer(LocalSGDStrategy(k_steps=3), num_ranks, callbacks=callbacks, max_epochs=4)
    trainer.fit(model, make_data(num_ranks, 4))
    return [digest(model.parameters())]


def test_weights_that_a_callback_leaves_at_the_end_are_averaged_too() -> None:
    first, second = run_ranks(fit_with_swa, 2)
    assert first == second
