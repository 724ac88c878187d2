"""The one optimizer recipe of the zoo: SGD with momentum or AdamW, and how the learning rate moves.

Kept out of the modules so that both tasks offer the same knobs with the same meaning.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, OneCycleLR

OptimizerName = Literal["sgd", "adamw"]
ScheduleName = Literal["constant", "cosine", "one_cycle"]


def check_choice(knob: str, value: str, choices: object) -> None:
    """Refuse a value that is not among the choices of a `Literal`.

    Args:
        knob: Name of the constructor argument, for the message.
        value: What the user gave.
        choices: The `Literal` type that lists the allowed values.

    Raises:
        ValueError: On every rank, at construction.
    """
    if value not in get_args(choices):
        raise ValueError(f"{knob}={value!r}; choose one of {', '.join(map(repr, get_args(choices)))}")


def configure_optimizer(module: LightningModule) -> OptimizerLRScheduler:
    """Build what `configure_optimizers` of a zoo module returns, from the knobs in its hyperparameters.

    Args:
        module: The module to train, attached to a Trainer (the schedules need the number of steps). Its hyperparameters
            are `optimizer` ("sgd", or "adamw", which has no use for the next two), `momentum`, `nesterov`, `lr`,
            `weight_decay` and `schedule` ("constant", "cosine" to zero, or "one_cycle"; one value per step).

    Returns:
        The dictionary form that Lightning takes.

    Raises:
        ValueError: If there is a schedule but no end of the training.
    """
    knobs = module.hparams
    common = {"lr": knobs["lr"], "weight_decay": knobs["weight_decay"]}
    optimizer: Optimizer
    if knobs["optimizer"] == "sgd":
        optimizer = SGD(module.parameters(), momentum=knobs["momentum"], nesterov=knobs["nesterov"], **common)
    else:
        optimizer = AdamW(module.parameters(), **common)
    schedule: ScheduleName = knobs["schedule"]
    if schedule == "constant":
        return {"optimizer": optimizer}

    num_steps = module.trainer.estimated_stepping_batches
    if not math.isfinite(num_steps):
        raise ValueError(f"schedule={schedule!r} needs an end: give the Trainer max_epochs or max_steps")
    scheduler: LRScheduler
    if schedule == "cosine":
        scheduler = CosineAnnealingLR(optimizer, T_max=int(num_steps))
    else:
        # The momentum stays put: cycling it as well would make two schedules out of one knob.
        scheduler = OneCycleLR(optimizer, max_lr=knobs["lr"], total_steps=int(num_steps), cycle_momentum=False)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
