"""The Lightning step: what the strategy makes of automatic, accumulated and manual optimization, and of other fits."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn

from lightning_lowbw import DGC, DGCStrategy
from lightning_lowbw.comm.agreement import digest
from tests.ranks import run_ranks
from tests.strategies.fits import STEPS, fit
from tests.sync.problem import each
from tests.tiny import BATCH, MIN_NUMEL, Tiny, make_data, make_strategy, make_trainer, sgd, weights_of


def trainer_and_plain_loop() -> tuple[list[Tensor], list[Tensor]]:
    """Train the same by Lightning, and by a plain loop around the method that has its own tests."""
    nesterov, accumulate, clip = partial(sgd, nesterov=True), 2, 0.3
    by_trainer = Tiny(nesterov)
    fit(by_trainer, accumulate_grad_batches=accumulate, gradient_clip_val=clip)

    model = Tiny(nesterov)
    optimizer = model.configure_optimizers()
    method = DGC(rampup_begin_step=2, rampup_step=4, sparsity=(0.5, 0.95), min_numel=MIN_NUMEL)
    worker = method.attach(optimizer, model.named_parameters())
    x, y = make_data(dist.get_world_size(), STEPS).dataset.tensors
    for first in range(0, STEPS, accumulate):
        optimizer.zero_grad()
        for batch in range(first, min(STEPS, first + accumulate)):
            part = slice(batch * BATCH, (batch + 1) * BATCH)
            (nn.functional.cross_entropy(model(x[part]), y[part]) / accumulate).backward()
        # Before the exchange while sparse, else after it.
        if worker.clips_before_exchange:
            worker.prepare()
        else:
            worker.exchange()
        nn.utils.clip_grad_norm_(list(model.parameters()), clip * worker.clip_factor)
        optimizer.step()
    return [p.detach() for p in by_trainer.parameters()], [p.detach() for p in model.parameters()]


def test_the_trainer_does_what_the_method_says() -> None:
    for by_trainer, by_loop in run_ranks(trainer_and_plain_loop, 2):
        for a, b in zip(by_trainer, by_loop, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


class Gan(pl.LightningModule):
    """Two optimizers with toggling; the discriminator steps every other batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
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
        return [sgd(self.generator.parameters()), torch.optim.AdamW(self.discriminator.parameters(), lr=1e-2)]


def train_gan(name: str) -> tuple[str, list[int], int]:
    model = Gan()
    trainer = fit(model, strategy=make_strategy(name, find_unused_parameters=True), max_epochs=2)
    steps = [worker.step for worker in trainer.strategy.workers] if name != "ddp" else []
    return weights_of(model), steps, model.closures


def test_two_optimizers_in_manual_optimization() -> None:
    first, second = run_ranks(each, 2, train_gan, [("dgc",), ("dense",), ("ddp",)])
    assert first == second
    (_, steps, closures), dense, ddp = first
    assert steps == [18, 10]  # a counter per optimizer: each goes through the warm-up at its own pace
    assert closures == 10
    # While both are dense it is DDP, also with one optimizer's gradients in buckets of the other.
    assert dense[0] == ddp[0]


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


class Thawing(pl.Callback):
    """Unfreeze a layer in the middle of the run, as BaseFinetuning does."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: Tiny, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            module.frozen.requires_grad_(True)
            trainer.optimizers[0].add_param_group({"params": list(module.frozen.parameters()), "lr": 0.01})


def unfreeze() -> tuple[str, bool]:
    model = Tiny()
    before = model.frozen.weight.detach().clone()
    fit(model, callbacks=[Thawing()])
    return weights_of(model), bool((model.frozen.weight != before).any())


def test_a_layer_unfrozen_later_stays_the_same_on_all_ranks() -> None:
    """Stock DDP lets it drift apart: parameters that are frozen when it wraps are never reduced."""
    first, second = run_ranks(unfreeze, 2)
    assert first == second
    assert first[1]


class Swapping(Thawing):
    """Then freeze all that DDP has wrapped: it reduces nothing any more."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: Tiny, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, module, batch, batch_idx)
        if batch_idx == 1:
            for name, parameter in module.named_parameters():
                parameter.requires_grad_(name.startswith("frozen"))


class SkipsBackward(Tiny):
    """Leaves out backward passes on all ranks."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if self.trainer.global_step > 1:
            super().backward(loss, *args, **kwargs)


def train_unusually(what: str) -> tuple[str, int]:
    num_ranks, model = dist.get_world_size(), SkipsBackward() if what == "no backward" else Tiny()
    options: dict[str, Any] = {"callbacks": [Swapping()]} if what == "swapped layers" else {}
    length = STEPS
    if what == "other lengths":  # each in an epoch of its own at the same step
        options, length = {"max_steps": 20, "max_epochs": -1}, 5 + 2 * dist.get_rank()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the lengths
        trainer = make_trainer(make_strategy("dgc", rampup_begin_step=10), num_ranks, **options)
        trainer.fit(model, make_data(num_ranks, length))
    return weights_of(model), trainer.global_step


def test_unusual_trainings_are_no_errors() -> None:
    """In dense steps, and the last one in sparse ones, too."""
    cases = {"swapped layers": STEPS, "no backward": STEPS, "other lengths": 20}
    first, second = run_ranks(each, 2, train_unusually, [(what,) for what in cases])
    assert first == second
    assert [steps for _, steps in first] == list(cases.values())


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
    first, second = run_ranks(each, 2, find_learning_rate, [(0,), (12,)])
    assert first == second
    blind, tuned = first
    assert tuned == blind


def test_a_strategy_can_be_copied_and_pickled_before_the_fit() -> None:
    import pickle

    strategy = DGCStrategy(sparsity=[0.5], start_method="spawn")
    assert pickle.loads(pickle.dumps(strategy)).method == strategy.method == copy.deepcopy(strategy).method
