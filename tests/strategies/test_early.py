"""Gradients in few bits that are sent during the backward pass, in several messages: by the definition; faults."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lightning_lowbw as lowbw
from lightning_lowbw.payloads.quantized import PendingQuantized
from lightning_lowbw.strategies import fit
from lightning_lowbw.sync import early
from lightning_lowbw.sync.gradient import GradientSync
from tests.oracle import OracleQuantized
from tests.ranks import on_ranks
from tests.strategies.fits import At, gathered, make, refusal, same, state_of, train, weights
from tests.tiny import Tiny, weights_of

STEPS = 6


class Message(NamedTuple):
    """A message: the names of its tensors, whether it has a status, and whether it was sent in a backward pass."""

    names: tuple[str, ...]
    has_status: bool
    is_early: bool


@contextmanager
def sending(*, num_groups: int = 100) -> Iterator[list[Message]]:
    """Let the tiny layers go in groups of their own; return the messages."""
    messages, send = list[Message](), PendingQuantized.send

    def noted(self: Any, status: Tensor | None = None, whole: Any = None) -> Any:
        messages.append(Message(tuple(self._names), status is not None, torch._C._current_graph_task_id() != -1))
        return send(self, status, whole)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(early, "LEAST_NUMEL", 1)
        patch.setattr(early, "NUM_GROUPS", num_groups)
        patch.setattr(fit, "prepare_kernels", lambda *_, **__: None)  # whose trial sends to echoes
        patch.setattr(PendingQuantized, "send", noted)
        yield messages


class Late(pl.Callback):
    """May change gradients, so that none is sent before it has been called."""

    def on_after_backward(self, *_: Any) -> None:
        pass


class Exchanged(pl.Callback):
    """Keeps the gradients that each backward pass has made, and their means."""

    def __init__(self) -> None:
        self.own: list[dict[str, np.ndarray]] = []
        self.means: list[dict[str, np.ndarray]] = []

    def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda p, name=name: self.note(name, p))

    def note(self, name: str, parameter: Tensor) -> None:
        if not self.own or name in self.own[-1]:
            self.own.append({})
        assert parameter.grad is not None
        self.own[-1][name] = parameter.grad.clone().numpy().ravel()

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        named = module.named_parameters()
        self.means.append({n: p.grad.clone().numpy().ravel() for n, p in named if p.grad is not None})


@pytest.mark.parametrize(("num_ranks", "dtype"), [(2, "int4"), (3, "int8")])
@on_ranks()
def test_each_message_is_the_definition_and_all_but_the_last_begin_in_the_backward_pass(
    num_ranks: int, dtype: str
) -> None:
    exchanged = Exchanged()
    with sending(num_groups=20) as messages:
        trainer = train(lowbw.Strategy(lowbw.QuantizedGradients(dtype)), data=STEPS, callbacks=[exchanged])
    groups = [message.names for message in messages[: len(messages) // STEPS]]
    assert len(groups) >= 3
    assert groups[0] == ("head.bias", "head.weight", "wider.bias")
    assert messages == STEPS * [Message(names, names == groups[-1], names != groups[-1]) for names in groups]
    of_ranks = gathered(exchanged.own)
    oracles = [OracleQuantized(num_ranks, int(dtype[-1])) for _ in groups]
    for step, means in enumerate(exchanged.means):
        for names, oracle in zip(groups, oracles, strict=True):
            signals = [np.concatenate([own[step][name] for name in names]) for own in of_ranks]
            assert np.array_equal(np.concatenate([means[name] for name in names]), oracle.mean(signals)), (step, names)
    (worker,) = trainer.strategy.workers
    for names, oracle in zip(groups, oracles, strict=True):
        kept = torch.cat([worker.residuals[name] for name in names])
        assert kept.equal(torch.from_numpy(oracle.residuals[dist.get_rank()]))
    same(weights(trainer.lightning_module))


class UnusedAtFirst(Tiny):
    """Layers that no rank uses, or one rank, come before the layers whose gradients are ready first."""

    def __init__(self) -> None:
        super().__init__(unused=True)
        for name in ("wide", "norm", "wider", "head"):
            self._modules[name] = self._modules.pop(name)


OPTIONS: dict[str, dict[str, Any]] = {
    "unused on one rank": {"model": UnusedAtFirst},
    "accumulated": {"accumulate_grad_batches": 2},
    "clipped": {"gradient_clip_val": 0.1},
}


@pytest.mark.parametrize("case", OPTIONS)
@on_ranks()
def test_when_messages_begin_changes_nothing(case: str) -> None:
    """A rank may begin its own later, as where a callback may change gradients: on rank 1 alone, on both, on none."""
    options, found = dict(OPTIONS[case]), []
    model = options.pop("model", Tiny)
    for late in ((), (1,), (0, 1)):
        callbacks = [Late()] if dist.get_rank() in late else []
        with sending() as messages:
            trainer = train("int8", model(), STEPS, callbacks=callbacks, **options)
        is_late = dist.get_rank() in late
        num_early = sum(message.is_early for message in messages)
        assert (num_early == 0) if is_late else num_early > len(messages) // 3
        assert sum(message.has_status for message in messages) == trainer.global_step
        assert not messages[-1].is_early
        same(weights(trainer.lightning_module))
        found.append(state_of(trainer))
        assert case != "unused on one rank" or trainer.lightning_module.never.weight.grad is None
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("case", ["two levels", "dense"])
@on_ranks(4)
def test_one_message_goes_where_gradients_are_not_final_in_the_backward_pass(case: str) -> None:
    """Also with a GradScaler and by hand: test_auto.py."""
    strategy = make("int8 on two levels" if case == "two levels" else "int8")
    if case == "dense":
        strategy = lowbw.Strategy(lowbw.QuantizedGradients(rampup_begin_step=STEPS))
    with sending() as messages:
        trainer = train(strategy, data=STEPS)
    num_sent = 0 if case == "dense" else trainer.global_step
    assert [message.is_early for message in messages] == [False] * num_sent
    same(weights(trainer.lightning_module))


@on_ranks()
def test_a_dense_step_of_ddp_is_left_alone() -> None:
    """Except for steps in which something else is due, such as the first step."""
    exchanged, exchange = list[int](), GradientSync.exchange

    def noted(self: Any, **options: Any) -> bool:
        exchanged.append(self.step)
        return exchange(self, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradientSync, "exchange", noted)
        trainer = train(lowbw.Strategy(lowbw.Method()), data=STEPS)
    assert trainer.global_step == STEPS
    assert len(exchanged) <= 1
    same(weights(trainer.lightning_module))


@on_ranks()
def test_a_nan_is_told_on_all_ranks_before_anything_is_applied() -> None:
    """All gradients of rank 1 have it, and most of them have been sent."""
    before: dict[str, Any] = {}

    def note(trainer: pl.Trainer, module: pl.LightningModule) -> None:
        (worker,) = trainer.strategy.workers
        before.update(weights=weights_of(module), worker=worker)

    model = Tiny(poison=(1, 3))
    with sending() as messages:
        said = refusal("int8", model, STEPS, error=lowbw.NonFiniteGradientError, callbacks=[At(3, note)])
    assert "Step 3: the gradient of 'wide.weight' on rank 1 is not finite" in said
    assert "Nothing was applied" in said
    assert messages[-2].is_early
    same(before["weights"])
    assert weights_of(model) == before["weights"]


class Doubling(Tiny):
    """A hook of one rank, registered in the middle of the backward pass, comes after all other hooks."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        def double(parameter: nn.Parameter) -> None:
            parameter.grad.mul_(2)  # type: ignore[union-attr]

        loss = super().training_step(batch, batch_idx)
        if (batch_idx, dist.get_rank()) == (2, 1):
            loss.register_hook(lambda _: self.head.weight.register_post_accumulate_grad_hook(double) and None)
        return loss


@on_ranks()
def test_a_gradient_that_changes_after_it_was_sent_is_told_on_all_ranks() -> None:
    with sending():
        said = refusal("int8", Doubling(), STEPS)
    assert "The gradient of 'head.weight' on rank 1 has changed after the backward pass had made and sent it" in said


class Clamping(Tiny):
    """Changes its gradients where torch does not see it."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss, *args, **kwargs)
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.data.clamp_(-1e-5, 1e-5)


@on_ranks()
def test_gradients_that_a_module_changes_after_its_backward_pass_count() -> None:
    with sending() as messages:
        model = Clamping()
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        train("int8", model, 1)
        moved = max(float((p.detach() - before[n]).abs().max()) for n, p in model.named_parameters())
        assert 0 < moved < 1e-3
    assert not any(message.is_early for message in messages)
