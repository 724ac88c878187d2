"""What a choice of method has to leave out: what cannot be used in this training, or has not been measured for it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from lightning_lowbw.engine.gradients import GradientWorker
from lightning_lowbw.engine.worker import Worker
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.strategies.keywords import asked_of_buffers
from lightning_lowbw.what.top_k import TopK
from lightning_lowbw.where.agreement import gather

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_lowbw.strategies.strategy import Strategy


def left_out(strategy: Strategy, trainer: pl.Trainer, *, allow_local: bool) -> list[str]:
    """Return the methods that are left out, with the reasons.

    Collective: all ranks, where local SGD is allowed.
    """
    reasons = list[str]()
    workers = [worker for worker in strategy.workers if isinstance(worker, GradientWorker)]
    unknown = {type(each.optimizer).__name__ for each in workers if not each.correction.is_complete}
    if unknown:
        reasons.append(f"dgc: its accuracy is measured with SGD, Adam and AdamW, not with {', '.join(unknown)}")
    elif not numels_of(strategy)[0]:
        reasons.append("dgc: no tensor that is trained has min_numel elements")
    else:
        try:
            check_corrections(workers)
        except ConfigurationError as error:
            reasons.append(f"dgc: {str(error).split('. ')[0]}")
    if not allow_local:
        return reasons
    others = {type(each.optimizer).__name__ for each in workers} - {"SGD"}
    if others:
        reasons.append(f"local_sgd: its accuracy is measured with SGD, not with {', '.join(sorted(others))}")
    elif strategy._layer_sync is not None:
        reasons.append("local_sgd: sync_batchnorm=True communicates in every forward pass")
    elif asked_of_buffers(strategy._ddp_kwargs):
        reasons.append("local_sgd: broadcast_buffers=True communicates in every forward pass")
    elif len({*(lengths := gather(trainer.num_training_batches, "number of batches"))}) > 1 or math.inf in lengths:
        reasons.append("local_sgd: the ranks have different or unknown numbers of batches")
    return reasons


def check_corrections(workers: Iterable[Worker]) -> None:
    """Check that gradients can be corrected for these optimizers.

    Raises:
        ConfigurationError: an optimizer's momentum or weight decay has a form that sparse steps do not have.
    """
    for worker in workers:
        if isinstance(worker, GradientWorker):
            worker.correction.check()


def numels_of(strategy: Strategy) -> tuple[list[int], list[int]]:
    """Return the elements of this rank's part of each tensor that can be sparse, and of each other one."""
    what = strategy.method.what
    assert isinstance(what, TopK)
    sparse, others = list[int](), list[int]()
    for worker in strategy.workers:
        whole, rest = worker.params.numels_by_kind(what)
        parts = [worker.peers.part(numel) for numel in whole]
        sparse += [part.stop - part.start for part in parts]
        others += rest
    return sparse, others
