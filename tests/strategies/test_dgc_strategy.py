"""The Lightning step: what the strategy makes of automatic, accumulated, scaled, clipped and manual optimization."""

from __future__ import annotations

import contextlib
import copy
import math
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn

from lightning_lowbw import DGC, ConfigurationError, DGCStrategy, DisagreementError, NonFiniteGradientError
from lightning_lowbw.where.agreement import digest
from tests.ranks import run_ranks
from tests.tiny import (
    BATCH,
    MIN_NUMEL,
    Tiny,
    amp_with_scaler,
    make_data,
    make_strategy,
    make_trainer,
    sgd,
    weights_of,
)

STEPS = 9


def fit(model: pl.LightningModule, steps: int = STEPS, **options: Any) -> pl.Trainer:
    num_ranks = dist.get_world_size()
    strategy = options.pop("strategy", None) or make_strategy("dgc")
    trainer = make_trainer(strategy, num_ranks, **options)
    trainer.fit(model, make_data(num_ranks, steps))
    return trainer


# The strategy is the method ---------------------------------------------------------------------------------------


def trainer_and_plain_loop(optimizer: Any, accumulate: int, clip: float | None) -> tuple[list[Tensor], list[Tensor]]:
    """Train the same by Lightning, and by a plain loop around the method that has its own tests."""
    by_trainer = Tiny(optimizer)
    fit(by_trainer, accumulate_grad_batches=accumulate, gradient_clip_val=clip)

    model = Tiny(optimizer)
    optimizer = model.configure_optimizers()
    method = DGC(rampup_begin_step=2, rampup_step=4, sparsity=(0.5, 0.95), min_numel=MIN_NUMEL, selection="exact")
    worker = method.attach(optimizer, model.named_parameters())
    x, y = make_data(dist.get_world_size(), STEPS).dataset.tensors
    for first in range(0, STEPS, accumulate):
        optimizer.zero_grad()
        for batch in range(first, min(STEPS, first + accumulate)):
            part = slice(batch * BATCH, (batch + 1) * BATCH)
            (nn.functional.cross_entropy(model(x[part]), y[part]) / accumulate).backward()
        with worker.stepping():
            is_sparse, threshold = worker.is_sparse, (clip or 1e9) * worker.clip_factor
            clip_ = partial(nn.utils.clip_grad_norm_, list(model.parameters()), threshold)
            worker.exchange(clip=clip_ if is_sparse else None)
            if not is_sparse:
                clip_()
            optimizer.step()
    return [p.detach() for p in by_trainer.parameters()], [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(
    ("optimizer", "accumulate", "clip"),
    [
        (sgd, 1, None),
        (partial(sgd, nesterov=True), 2, 0.3),
        (partial(sgd, momentum=0.0), 1, 0.3),
        (partial(torch.optim.AdamW, lr=1e-2), 1, None),
    ],
)
def test_the_trainer_does_what_the_method_says(optimizer: Any, accumulate: int, clip: float | None) -> None:
    results = run_ranks(trainer_and_plain_loop, 2, optimizer, accumulate, clip)
    for by_trainer, by_loop in results:
        for a, b in zip(by_trainer, by_loop, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def half_batches(accumulate: int) -> tuple[str, int, int]:
    """An epoch whose length is no multiple of the accumulation: the last batches step all the same."""
    model = Tiny()
    trainer = fit(model, steps=7, accumulate_grad_batches=accumulate)
    (worker,) = trainer.strategy.workers
    return weights_of(model), worker.step, trainer.strategy.ledger.steps


def test_one_exchange_per_optimizer_step() -> None:
    results = run_ranks(half_batches, 2, 3)
    assert results[0] == results[1]
    assert results[0][1:] == (3, 3)


# GradScaler -------------------------------------------------------------------------------------------------------


def inf_on_one_rank(phase: str) -> dict[str, Any]:
    num_ranks = dist.get_world_size()
    bad_batch = {"dense": 1, "sparse": 6}[phase]
    model = Tiny(poison=(1, bad_batch))
    trace: list[dict[str, Any]] = []

    class Trace(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
            (worker,) = trainer.strategy.workers
            buffers = [s["momentum_buffer"] for s in worker.optimizer.state.values()]
            trace.append(
                {
                    "weights": weights_of(module),
                    "residuals": digest(worker.residuals.values()),
                    "momentum": digest(buffers),
                    "scale": trainer.precision_plugin.scaler.get_scale(),
                    "step": worker.step,
                    "param_group": {k: v for k, v in worker.optimizer.param_groups[0].items() if k != "params"},
                }
            )

    trainer = make_trainer(make_strategy("dgc"), num_ranks, plugins=[amp_with_scaler()], callbacks=[Trace()])
    trainer.fit(model, make_data(num_ranks, STEPS))
    return {"bad": bad_batch, "trace": trace}


@pytest.mark.parametrize("phase", ["dense", "sparse"])
def test_an_inf_on_one_rank_skips_the_step_on_all(phase: str) -> None:
    results = run_ranks(inf_on_one_rank, 2, phase)
    for result in results:
        before, after = result["trace"][result["bad"] - 1], result["trace"][result["bad"]]
        for unchanged in ("weights", "residuals", "momentum", "param_group"):
            assert before[unchanged] == after[unchanged], unchanged
        assert after["scale"] == before["scale"] / 2
        assert after["step"] == before["step"] + 1
        assert result["trace"][-1]["weights"] != after["weights"]  # and goes on
        assert result["trace"][-1]["param_group"]["momentum"] == 0.9
    for here, there in zip(results[0]["trace"], results[1]["trace"], strict=True):
        assert (here["weights"], here["scale"], here["step"]) == (there["weights"], there["scale"], there["step"])


def scaled_and_unscaled(clip: float | None, optimizer: Any) -> list[list[Tensor]]:
    weights = []
    for init_scale in (1.0, 2.0**8):
        model = Tiny(optimizer).double().float()
        plugin = amp_with_scaler(init_scale)
        plugin.forward_context = contextlib.nullcontext  # type: ignore[method-assign]
        # the scaler alone: fp16 would round otherwise
        fit(model, plugins=[plugin], gradient_clip_val=clip)
        weights.append([p.detach() for p in model.parameters()])
    return weights


FUSED = [partial(sgd, fused=True), partial(torch.optim.AdamW, lr=0.01, fused=True)]  # unscale inside their step


@pytest.mark.parametrize(("clip", "optimizer"), [(None, sgd), (0.3, sgd), *((None, fused) for fused in FUSED)])
def test_the_scale_does_not_reach_the_residual(clip: float | None, optimizer: Any) -> None:
    unscaled, scaled = run_ranks(scaled_and_unscaled, 2, clip, optimizer)[0]
    for a, b in zip(unscaled, scaled, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def nonfinite_without_scaler() -> str:
    model = Tiny(poison=(1, 6))
    with pytest.raises(NonFiniteGradientError) as caught:
        fit(model)
    return str(caught.value)


def test_a_nonfinite_gradient_is_an_error_on_all_ranks() -> None:
    messages = run_ranks(nonfinite_without_scaler, 2)
    assert messages[0] == messages[1]
    assert "rank 1" in messages[0]
    assert "wide.weight" in messages[0]


# Clipping ---------------------------------------------------------------------------------------------------------


def own_norm(module: pl.LightningModule) -> float:
    return math.sqrt(sum(float(p.grad.norm()) ** 2 for p in module.parameters() if p.grad is not None))


class ClipsInItsOwnWay(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, bool, float]] = []

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        is_sparse = not self.trainer.strategy.workers[0].reduces_in_backward
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        self.seen.append(("clip", is_sparse, own_norm(self)))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append(("step", not self.trainer.strategy.workers[0].reduces_in_backward, own_norm(self)))


def clip_in_its_own_way() -> list[tuple[str, bool, float]]:
    model = ClipsInItsOwnWay()
    fit(model)
    return model.seen


def test_a_modules_own_clipping_acts_on_the_local_gradient() -> None:
    for seen in run_ranks(clip_in_its_own_way, 2):
        dense = [entry for entry in seen if not entry[1]]
        sparse = [entry for entry in seen if entry[1]]
        # Once per step; DDP clips the mean after the hook, DGC clips its own gradient before the exchange.
        assert [name for name, _, _ in dense] == ["step", "clip"] * 2
        assert [name for name, _, _ in sparse] == ["clip", "step"] * (STEPS - 2)
        assert all(norm == pytest.approx(0.1, rel=1e-3) for name, _, norm in dense if name == "clip")
        clipped = [norm for name, _, norm in sparse if name == "clip"]
        assert all(norm == pytest.approx(0.1 * math.sqrt(2), rel=1e-3) for norm in clipped)


# Manual optimization ----------------------------------------------------------------------------------------------


class Gan(pl.LightningModule):
    """Two optimizers with toggling; the discriminator steps every other batch."""

    def __init__(self, kinds: tuple[Any, Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.kinds = kinds
        self.generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 16))
        self.discriminator = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
        self.closures = 0

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        real, _ = batch
        noise = torch.randn(len(real), 4, generator=torch.Generator().manual_seed(10 * batch_idx + self.global_rank))
        make, judge = self.optimizers()
        self.toggle_optimizer(make)
        loss = -self.discriminator(self.generator(noise)).mean()
        make.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(make, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        make.step()
        self.untoggle_optimizer(make)
        if batch_idx % 2:
            return
        self.toggle_optimizer(judge)

        def closure() -> None:
            self.closures += 1
            judge.zero_grad()
            gap = self.discriminator(self.generator(noise).detach()).mean() - self.discriminator(real).mean()
            self.manual_backward(gap)

        judge.step(closure=closure)
        self.untoggle_optimizer(judge)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.kinds[0](self.generator.parameters()), self.kinds[1](self.discriminator.parameters())]


def train_gan(kinds: tuple[Any, Any], name: str) -> tuple[str, list[int], int]:
    model = Gan(kinds)
    trainer = fit(model, strategy=make_strategy(name, find_unused_parameters=True), max_epochs=2)
    steps = [worker.step for worker in trainer.strategy.workers] if name != "ddp" else []
    return weights_of(model), steps, model.closures


@pytest.mark.parametrize(
    "kinds", [(sgd, sgd), (partial(torch.optim.AdamW, lr=1e-2), partial(torch.optim.AdamW, lr=1e-2))]
)
def test_two_optimizers_in_manual_optimization(kinds: tuple[Any, Any]) -> None:
    results = run_ranks(train_gan, 2, kinds, "dgc")
    assert results[0] == results[1]
    assert results[0][1] == [18, 10]  # a counter per optimizer: each goes through the warm-up at its own pace
    assert results[0][2] == 10
    # While both are dense it is DDP, also with one optimizer's gradients in buckets of the other.
    assert run_ranks(train_gan, 2, kinds, "dense")[0][0] == run_ranks(train_gan, 2, kinds, "ddp")[0][0]


# Around the fit ---------------------------------------------------------------------------------------------------


def fit_twice_and_evaluate() -> list[str]:
    num_ranks = dist.get_world_size()
    data = make_data(num_ranks, STEPS)
    model = Tiny()
    trainer = make_trainer(make_strategy("dgc"), num_ranks, max_epochs=1)
    trainer.validate(model, data, verbose=False)
    digests = []
    for epochs in (1, 2):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(model, data)
        digests += [weights_of(model), digest(model.buffers())]
        trainer.test(model, data, verbose=False)
        assert weights_of(model) == digests[-2]
    assert [worker.step for worker in trainer.strategy.workers] == [STEPS]  # of the second fit
    trainer.predict(model, torch.utils.data.DataLoader(data.dataset.tensors[0], batch_size=BATCH))
    assert "clip_gradients" not in vars(trainer.precision_plugin)
    return digests


def test_fit_twice_validate_test_predict() -> None:
    results = run_ranks(fit_twice_and_evaluate, 2)
    assert results[0] == results[1]
    assert len(set(results[0])) == 4


def dev_run() -> str:
    model = Tiny()
    fit(model, fast_dev_run=3)
    return weights_of(model)


def test_fast_dev_run() -> None:
    assert len(set(run_ranks(dev_run, 2))) == 1


class Thawing(pl.Callback):
    """Unfreeze a layer in the middle of the run, as BaseFinetuning does."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: Tiny, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            module.frozen.requires_grad_(True)
            trainer.optimizers[0].add_param_group({"params": list(module.frozen.parameters()), "lr": 0.01})


def unfreeze(name: str) -> tuple[str, bool]:
    model = Tiny()
    before = model.frozen.weight.detach().clone()
    fit(model, strategy=make_strategy(name), callbacks=[Thawing()])
    return weights_of(model), bool((model.frozen.weight != before).any())


def test_a_layer_unfrozen_later_stays_the_same_on_all_ranks() -> None:
    """Stock DDP lets it drift apart: parameters that are frozen when it wraps are never reduced."""
    for name in ("dgc", "dense"):
        results = run_ranks(unfreeze, 2, name)
        assert results[0] == results[1], name
        assert results[0][1]
    stock = run_ranks(unfreeze, 2, "ddp")
    assert stock[0][0] != stock[1][0]


def average_weights() -> str:
    """StochasticWeightAveraging ends with an epoch that steps without a backward, for the batch norm statistics."""
    model = Tiny()
    swa = pl.callbacks.StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)
    fit(model, callbacks=[swa], max_epochs=3)
    return weights_of(model)


def test_stochastic_weight_averaging() -> None:
    assert len(set(run_ranks(average_weights, 2))) == 1


class Scheduled(Tiny):
    """OneCycleLR rewrites the momentum after every step."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS)
        self.momenta: list[float] = []
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.momenta.append(self.trainer.optimizers[0].param_groups[0]["momentum"])


def cycle() -> tuple[str, list[float]]:
    model = Scheduled()
    fit(model)
    return weights_of(model), model.momenta


def test_the_user_sees_their_own_momentum() -> None:
    (weights, momenta), other = run_ranks(cycle, 2)
    assert (weights, momenta) == other
    reference = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(reference, max_lr=0.1, total_steps=STEPS)
    expected = []
    for _ in range(STEPS):
        expected.append(reference.param_groups[0]["momentum"])
        reference.step()
        scheduler.step()
    assert momenta == expected


def one_rank() -> tuple[str, str, int]:
    model = Tiny()
    with pytest.warns(UserWarning, match="one rank"):
        trainer = fit(model)
    plain = Tiny()
    stock = pl.Trainer(
        strategy="auto",
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        max_epochs=1,
        enable_progress_bar=False,
    )
    stock.fit(plain, make_data(1, STEPS))
    return weights_of(model), weights_of(plain), trainer.strategy.ledger.sent_bytes


def test_one_rank_is_plain_sgd() -> None:
    ((weights, plain, sent),) = run_ranks(one_rank, 1)
    assert weights == plain
    assert sent == 0


def buffers_while_looking() -> tuple[list[str], str, str]:
    """Return the running statistics in training, in validation, and after the fit."""
    num_ranks = dist.get_world_size()
    seen: dict[str, list[str]] = {"train": [], "validation": []}

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
            seen["train"].append(digest(module.buffers()))

        def on_validation_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
            seen["validation"].append(digest(module.buffers()))

    model = Tiny()
    trainer = make_trainer(make_strategy("dgc"), num_ranks, callbacks=[Watch()], val_check_interval=3)
    trainer.fit(model, make_data(num_ranks, STEPS), make_data(num_ranks, 1))
    return seen["train"], seen["validation"][-1], digest(model.buffers())


def test_buffers_are_those_of_rank_zero_wherever_somebody_looks() -> None:
    (train_0, validation_0, end_0), (train_1, validation_1, end_1) = run_ranks(buffers_while_looking, 2)
    assert train_0[-1] != train_1[-1]  # not sent in every step
    assert validation_0 == validation_1 == train_0[-1]
    assert end_0 == end_1


class HasLearningRate(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.05

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd([p for p in self.parameters() if p.requires_grad], lr=self.lr)


def find_learning_rate(num_training: int) -> tuple[str, int]:
    """The tuner trains on the live strategy, then puts everything back."""
    model = HasLearningRate()
    trainer = make_trainer(make_strategy("dgc"), dist.get_world_size(), max_steps=STEPS, max_epochs=-1)
    if num_training:
        Tuner(trainer).lr_find(model, make_data(2, 30), num_training=num_training, update_attr=False)
    trainer.fit(model, make_data(2, STEPS))
    return weights_of(model), trainer.strategy.workers[0].step


def test_the_tuner_leaves_no_trace() -> None:
    blind = run_ranks(find_learning_rate, 2, 0)
    assert run_ranks(find_learning_rate, 2, 12) == blind
    assert blind[0] == blind[1]


def with_precision(precision: str) -> tuple[str, set[torch.dtype], set[torch.dtype]]:
    model = Tiny()
    trainer = fit(model, precision=precision)
    residuals = {residual.dtype for residual in trainer.strategy.workers[0].residuals.values()}
    return weights_of(model), {p.dtype for p in model.parameters()}, residuals


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16-mixed", torch.float32), ("bf16-true", torch.bfloat16), ("64-true", torch.float64)]
)
def test_precisions(precision: str, dtype: torch.dtype) -> None:
    results = run_ranks(with_precision, 2, precision)
    assert results[0] == results[1]
    assert results[0][1:] == ({dtype}, {torch.float32})


# What users do that DDP forgives ------------------------------------------------------------------------------------


class Bypasses(Tiny):
    """Steps the optimizer itself, past Lightning: DDP has averaged the gradients by then, DGC has not."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class Drifts(Tiny):
    """Changes a weight on one rank."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 101 and self.global_rank == 1:
            with torch.no_grad():
                self.wide.weight[0, 0] += 1e-6


class Shares(Tiny):
    def configure_optimizers(self) -> Any:
        self.automatic_optimization = False
        return [sgd(self.wide.parameters()), sgd([*self.wide.parameters(), *self.head.parameters()])]


def meet_an_error(module: type[Tiny], steps: int) -> tuple[str, str, int]:
    trainer = make_trainer(make_strategy("dgc"), dist.get_world_size())
    with pytest.raises(ConfigurationError) as caught:
        trainer.fit(module(), make_data(2, steps))
    return type(caught.value).__name__, str(caught.value), trainer.global_step


@pytest.mark.parametrize(
    ("module", "steps", "message", "at"),
    [
        (Bypasses, STEPS, "called past Lightning", 0),
        (Drifts, 210, "weights differ", 200),
        (Shares, STEPS, "parameter in common", 0),
    ],
)
def test_what_would_part_the_ranks_is_an_error_on_all(module: type[Tiny], steps: int, message: str, at: int) -> None:
    for _, text, step in run_ranks(meet_an_error, 2, module, steps, timeout_s=60.0):
        assert message in text
        assert step == at


def exchange_out_of_step() -> str:
    model = Tiny()
    worker = DGC(sparsity=(0.9,), min_numel=MIN_NUMEL).attach(sgd(model.wide.parameters()), model.named_parameters())
    model.wide(torch.randn(BATCH, 16)).sum().backward()
    with pytest.raises(DisagreementError) as caught:
        worker.exchange(num_backwards=5 + dist.get_rank())  # rank 1 has skipped a step
    assert not worker.residuals
    return str(caught.value)


def test_ranks_that_are_at_different_steps_do_not_mix_their_gradients() -> None:
    for message in run_ranks(exchange_out_of_step, 2):
        assert "different numbers of backward passes" in message


class Lookahead(torch.optim.Optimizer):
    """A wrapper with an attribute `optimizer`, as many have: it is the one Lightning knows."""

    def __init__(self, parameters: Any) -> None:
        self.optimizer = sgd(list(parameters), weight_decay=0.0)
        super().__init__(self.optimizer.param_groups, {})

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        self.optimizer.step()
        return loss


class Codebook(Tiny):
    """A buffer that the training reads: it must be the same on all ranks, unlike batch norm's statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))
        self.seen: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(digest([self.mean]))
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return super().forward(x - self.mean)


def read_a_buffer() -> list[str]:
    model = Codebook()
    fit(model)
    return model.seen


def test_buffers_that_the_training_reads_are_those_of_rank_zero() -> None:
    """Each forward begins with rank 0's, as in DDP; batch norm's are in another test."""
    results = run_ranks(read_a_buffer, 2)
    assert results[0] == results[1]
    assert len(set(results[0])) == STEPS


def clip_a_wrapper() -> str:
    model = Tiny(Lookahead)
    fit(model, gradient_clip_val=0.3)
    return weights_of(model)


def test_an_optimizer_that_wraps_another() -> None:
    assert len(set(run_ranks(clip_a_wrapper, 2))) == 1


# Names ------------------------------------------------------------------------------------------------------------


def by_name() -> tuple[str, str]:
    trainer = make_trainer("dgc", dist.get_world_size())  # type: ignore[arg-type]
    model = Tiny()
    trainer.fit(model, make_data(dist.get_world_size(), 3))
    return type(trainer.strategy).__name__, weights_of(model)


def test_by_name() -> None:
    results = run_ranks(by_name, 2)
    assert results[0] == results[1]
    assert results[0][0] == "DGCStrategy"


def test_a_strategy_can_be_copied_and_pickled_before_the_fit() -> None:
    import pickle

    strategy = DGCStrategy(sparsity=[0.5], start_method="spawn")
    assert pickle.loads(pickle.dumps(strategy)).method == strategy.method == copy.deepcopy(strategy).method
