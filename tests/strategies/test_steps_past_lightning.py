"""Steps that Lightning does not take: nothing has exchanged their gradients, so they are refused before they move a
weight. A returned optimizer may step another optimizer in its own step.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim import optimizer as torch_optimizer

from lightning_lowbw import DisagreementError
from lightning_lowbw.comm.agreement import gather
from tests.ranks import on_ranks
from tests.strategies.fits import make, refusal, same, train, weights
from tests.tiny import ManualTiny, Tiny, trained

STEPS = 4


class InBackward(Tiny):
    """Steps in hooks of the backward pass, as in torch's tutorial."""

    def on_train_start(self) -> None:
        for parameter in trained(self):
            optimizer = SGD([parameter], lr=0.1)

            def step(_: Tensor, optimizer: Optimizer = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(step)

    def configure_optimizers(self) -> None:
        """Return no optimizer."""


class Unreturned(ManualTiny):
    """As of a GAN, one of whose two optimizers is not returned."""

    def configure_optimizers(self) -> Optimizer:
        self.other = [SGD(self.head.parameters(), lr=0.1)]
        return SGD([*self.wide.parameters(), *self.norm.parameters(), *self.wider.parameters()], lr=0.1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.other[0].step()
        return loss


class Wrapper(Optimizer):
    """Calls its closure itself, and then the optimizer that it wraps, as SAM does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})
        self.base_optimizer = SGD(self.param_groups, lr=0.05)
        self.param_groups = self.base_optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        self.base_optimizer.step()
        return loss


class ByHand(Tiny):
    """Moves weights in hooks of the backward pass without an optimizer."""

    def on_train_start(self) -> None:
        for parameter in self.head.parameters():
            parameter.register_post_accumulate_grad_hook(_move)

    def configure_optimizers(self) -> Optimizer:
        return SGD([*self.wide.parameters(), *self.wider.parameters()], lr=0.05)


@torch.no_grad()
def _move(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.sub_(parameter.grad, alpha=0.1)
    parameter.grad = None


def check_refused(name: str, model: Tiny, begin: str) -> None:
    """Check that at most the step of the returned optimizer in the same batch is taken, and no hook of torch's left."""
    strategy = make(name, **({"topology": 1} if "sharded" in name else {}))
    message = same(refusal(strategy, model, STEPS))
    assert message.startswith(begin)
    assert "configure_optimizers" in message
    assert model.trainer.global_step <= 1
    assert not torch_optimizer._global_optimizer_pre_hooks


@pytest.mark.fault
@pytest.mark.parametrize("name", ["dgc", "dgc, dense at first", "int8", "post-local", "post-local, sharded"])
@on_ranks(2)
def test_a_step_of_another_optimizer_is_refused_before_it_moves_a_weight(name: str) -> None:
    for model in [Unreturned] if "sharded" in name else [InBackward, Unreturned]:
        check_refused(name, model(), "SGD.step() was called directly")


class Ignored(Unreturned):
    """Its head is the user's own."""

    _ddp_params_and_buffers_to_ignore = ("head.weight", "head.bias")


@pytest.mark.parametrize("name", ["dgc", "int8", "local_sgd"])
@on_ranks(2)
def test_parameters_that_ddp_is_told_to_ignore_are_stepped_by_the_user(name: str) -> None:
    model = Ignored()
    train(make(name), model, STEPS)
    same(model.wide.weight.tolist())
    assert len({str(head) for head in gather(model.head.weight.tolist(), "heads")}) == 2
    returned = Tiny()
    returned._ddp_params_and_buffers_to_ignore = ["head.weight"]
    check_refused(name, returned, "_ddp_params_and_buffers_to_ignore names 'head.weight', which an optimizer")


@pytest.mark.parametrize(("name", "step"), [("int8", 0), ("dgc, dense at first", 3)])
@on_ranks(2)
def test_weights_that_are_moved_by_hand_are_found_with_the_next_checksum(name: str, step: int) -> None:
    """In the first step that compresses, and then every 100 steps."""
    message = same(refusal(name, ByHand(), STEPS, error=DisagreementError))
    assert message.startswith(f"Step {step}: the weights differ between the ranks")


@on_ranks(2)
def test_weights_that_are_moved_by_hand_in_dense_steps_are_found_at_the_end() -> None:
    assert "checksum of head.weight" in refusal("dense", ByHand(), STEPS, error=DisagreementError)


class Twice(SGD):
    """Calls its closure twice, as SAM does."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            closure()
        return super().step(closure)


@pytest.mark.fault
@pytest.mark.parametrize("name", ["dgc", "int8", "powersgd"])
@on_ranks(2)
def test_a_closure_that_is_called_twice_is_refused_where_gradients_are_kept_back(name: str) -> None:
    message = same(refusal(name, Tiny(partial(Twice, lr=0.05)), STEPS))
    assert "Twice has called its closure twice in step 0" in message


class Lookahead(Optimizer):
    """Gives its closure to the optimizer that it wraps."""

    def __init__(self, params: Any) -> None:
        self.optimizer = SGD(params, lr=0.05)
        super().__init__(self.optimizer.param_groups, {})
        self.param_groups = self.optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class Allowed(ManualTiny):
    """Steps a latent of this rank, and has a target that is no rank's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.target = nn.Linear(32, 5)  # trained by nobody, with requires_grad as it is by default
        self.teacher = nn.Linear(16, 5).requires_grad_(False)

    def on_train_start(self) -> None:
        self.of_teacher = [SGD(self.teacher.parameters(), lr=1.0, weight_decay=1.0)]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        latent = batch[0].clone().requires_grad_()
        nn.functional.cross_entropy(self(latent), batch[1]).backward(inputs=[latent])
        SGD([latent], lr=0.1).step()
        self.of_teacher[0].step()
        with torch.no_grad():
            self.target.weight.lerp_(self.head.weight, 0.1)
        return super().training_step((latent.detach(), batch[1]), batch_idx)

    def configure_optimizers(self) -> Optimizer:
        return SGD([p for name, p in self.named_parameters() if p.requires_grad and "target" not in name], lr=0.05)


@pytest.mark.parametrize("name", ["dgc", "int8", "local_sgd"])
@on_ranks(2)
def test_steps_inside_of_a_step_and_of_others_than_the_module_s_parameters_are_allowed(name: str) -> None:
    ends = []
    for model in (Tiny(Lookahead), Tiny(Wrapper), Tiny(partial(SGD, lr=0.05)), Allowed()):
        train(name, model, STEPS)
        if name == "local_sgd" and isinstance(model, Allowed):
            del model.target  # it follows the weights of its own rank, and belongs to no average
        ends.append(same(weights(model)))
    lookahead, wrapper, as_without, _ = ends
    assert lookahead == wrapper == as_without
