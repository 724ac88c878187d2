"""The one optimizer recipe of the zoo: SGD with momentum or AdamW, and how the learning rate moves.

Kept out of the modules so that both tasks offer the same knobs with the same meaning.
"""

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
        choices: The `Literal` type that lists what is allowed.

    Raises:
        ValueError: On every rank, at construction.
    """
    if value not in get_args(choices):
        raise ValueError(f"{knob}={value!r}; choose one of {', '.join(map(repr, get_args(choices)))}")


def configure_optimizer(
    module: LightningModule,
    *,
    optimizer: OptimizerName,
    lr: float,
    momentum: float,
    weight_decay: float,
    nesterov: bool,
    schedule: ScheduleName,
) -> OptimizerLRScheduler:
    """Build what `configure_optimizers` of a zoo module returns.

    Args:
        module: The module to train, attached to a Trainer (the schedules need the number of steps).
        optimizer: "sgd" (momentum, nesterov) or "adamw" (which ignores neither: both belong to "sgd" only).
        lr: Learning rate; the peak for "one_cycle", the start for "cosine".
        momentum: Momentum of SGD.
        weight_decay: L2 term of SGD, decoupled decay of AdamW.
        nesterov: Whether SGD looks ahead.
        schedule: "constant", "cosine" (to zero) or "one_cycle", stepped after every optimizer step.

    Returns:
        The dictionary form that Lightning takes.
    """
    chosen: Optimizer
    if optimizer == "sgd":
        chosen = SGD(module.parameters(), lr=lr, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov)
    else:
        chosen = AdamW(module.parameters(), lr=lr, weight_decay=weight_decay)
    if schedule == "constant":
        return {"optimizer": chosen}

    num_steps = module.trainer.estimated_stepping_batches
    if not math.isfinite(num_steps):
        raise ValueError(f"schedule={schedule!r} needs an end: give the Trainer max_epochs or max_steps")
    scheduler: LRScheduler
    if schedule == "cosine":
        scheduler = CosineAnnealingLR(chosen, T_max=int(num_steps))
    else:
        # The momentum stays put: cycling it as well would make two schedules out of one knob.
        scheduler = OneCycleLR(chosen, max_lr=lr, total_steps=int(num_steps), cycle_momentum=False)
    return {"optimizer": chosen, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
