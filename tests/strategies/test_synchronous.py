"""`overlap=True` in a Trainer: DDP's buckets carry the sparse tensors, and the training is the same to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from lightning.pytorch.demos.boring_classes import ManualOptimBoringModel

from lightning_lowbw import ConfigurationError
from tests.ranks import run_ranks
from tests.tiny import Tiny, amp_with_scaler, make_data, make_strategy, make_trainer, weights_of

STEPS = 8
SMALL_BUCKETS = {"bucket_cap_mb": 0.004}  # so that there are several


def fit(overlap: bool, trainer_options: dict[str, Any], strategy_options: dict[str, Any]) -> tuple[str, int, int]:
    model, num_begun = Tiny(), []
    strategy = make_strategy("dgc", overlap=overlap, **strategy_options)

    class Count(pl.Callback):
        def on_after_backward(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            num_begun.append(len(trainer.strategy.workers[0].sparse_gradients.begun))

    trainer = make_trainer(strategy, dist.get_world_size(), callbacks=[Count()], **trainer_options)
    trainer.fit(model, make_data(dist.get_world_size(), STEPS))
    return weights_of(model), max(num_begun), strategy.workers[0].step


@pytest.mark.parametrize(
    ("trainer_options", "strategy_options"),
    [
        ({}, {}),
        ({}, SMALL_BUCKETS),
        ({"accumulate_grad_batches": 3}, SMALL_BUCKETS),
        ({}, {**SMALL_BUCKETS, "gradient_as_bucket_view": True}),
        ({"precision": "bf16-true"}, SMALL_BUCKETS),
        ({}, {**SMALL_BUCKETS, "dense_dtype": "bfloat16"}),
    ],
)
def test_trains_to_the_bit_as_without(trainer_options: dict[str, Any], strategy_options: dict[str, Any]) -> None:
    plain = run_ranks(fit, 2, False, trainer_options, strategy_options)
    overlapped = run_ranks(fit, 2, True, trainer_options, strategy_options)
    assert {weights for weights, _, _ in overlapped} == {weights for weights, _, _ in plain}
    assert plain[0][1] == 0
    assert overlapped[0][1] == (2 if strategy_options else 1)
    assert overlapped[0][2] == plain[0][2]


class Clips(Tiny):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")


OBSTACLES: dict[str, tuple[Callable[[], pl.LightningModule], dict[str, Any]]] = {
    "gradient clipping": (Tiny, {"gradient_clip_val": 1.0}),
    "clipping of the module": (Clips, {}),
    "a GradScaler": (Tiny, {"plugins": "scaler"}),
    "manual optimization": (ManualOptimBoringModel, {}),
}


def refuse(name: str) -> str:
    make_model, trainer_options = OBSTACLES[name]
    if "plugins" in trainer_options:
        trainer_options = {"plugins": amp_with_scaler()}
    trainer = make_trainer(make_strategy("dgc", overlap=True), dist.get_world_size(), **trainer_options)
    data: Any = make_data(dist.get_world_size(), STEPS) if make_model is not ManualOptimBoringModel else None
    with pytest.raises(ConfigurationError) as caught:
        trainer.fit(make_model(), data)
    return str(caught.value)


@pytest.mark.parametrize("name", OBSTACLES)
def test_what_does_not_go_together_is_refused_before_the_first_step(name: str) -> None:
    for message in run_ranks(refuse, 2, name):
        assert name.removesuffix(" of the module").removeprefix("gradient ") in message
        assert "overlap=True" in message
