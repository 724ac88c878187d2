"""What the strategies rely on in the sources of Lightning and torch, where no other test would notice a change."""

from __future__ import annotations

import inspect
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies.strategy import Strategy
from torch.optim import SGD

from lightning_lowbw.strategies.base import RUN_STAGE

# Functions, and what has to be in the source of each, in this order.
IN_ORDER: list[tuple[Any, ...]] = [
    # A barrier stands between the handlers of signals and the first data.
    (Trainer._run, "self.strategy.setup(self)", "register_signal_handlers()", "_run_stage()"),
    (Trainer._run_stage, f'barrier("{RUN_STAGE}")', "_run_sanity_check()"),
    # Settings are compared before callbacks are set up.
    (Trainer._run, "strategy.connect(", "strategy.setup_environment()", "_call_setup_hook"),
    # SGD runs the closure before it reads its groups.
    (SGD.step, "closure()", "for group in self.param_groups"),
    (Strategy.save_checkpoint, "self.is_global_zero"),
    # When a validation is due.
    (_TrainingEpochLoop._should_check_val_fx, "_should_check_val_epoch()", "self.trainer.val_check_batch"),
    (_TrainingEpochLoop._should_check_val_fx, "self.total_batch_idx if self.trainer.check_val_every_n_epoch is None"),
    (_TrainingEpochLoop._should_check_val_fx, "check_val_every_n_epoch is None else self.batch_idx"),
]


def test_sources_are_what_is_relied_on() -> None:
    for function, *fragments in IN_ORDER:
        source = inspect.getsource(function)
        places = [source.index(fragment) for fragment in fragments]
        assert places == sorted(places), (function, fragments)
