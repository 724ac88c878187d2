"""Running statistics are a rank's own in the sparse phase, and rank 0's in validation; other buffers as in DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_lowbw import ConfigurationError, QuantizedGradients, ShardedStrategy, Topology
from lightning_lowbw.comm.agreement import digest
from lightning_lowbw.comm.topology import make_node_mesh
from lightning_lowbw.strategies.checks import check_model
from lightning_lowbw.strategies.fsdp import _shard, equalise_
from lightning_lowbw.sync.local_view import LocalTensors
from tests.ranks import run_ranks
from tests.strategies.fits import STEPS
from tests.sync.problem import each
from tests.tiny import ManualTiny, Tiny, make_data, make_strategy, make_trainer

KINDS: dict[str, tuple[Any, type[Tiny]]] = {
    "dgc": (lambda: make_strategy("dgc"), Tiny),
    "dgc, broadcast_buffers": (lambda: make_strategy("dgc", broadcast_buffers=True), Tiny),
    "dgc in manual optimization": (lambda: make_strategy("dgc"), ManualTiny),
    "sharded": (lambda: ShardedStrategy(QuantizedGradients("int8"), topology=1), Tiny),
}


def buffers_while_looking(kind: str) -> tuple[list[str], list[str], list[str], str]:
    """Return the buffers after each step, in validation, at the end of each epoch, and after the fit."""
    num_ranks = dist.get_world_size()
    make, make_model = KINDS[kind]
    trained, validated, ended = list[str](), list[str](), list[str]()

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
            trained.append(digest(module.buffers()))

        def on_validation_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
            validated.append(digest(module.buffers()))

        def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            ended.append(digest(module.buffers()))

    model = make_model()
    options: dict[str, Any] = {"max_epochs": 2, "val_check_interval": 3, "num_sanity_val_steps": 0}
    trainer = make_trainer(make(), num_ranks, callbacks=[Watch()], **options)
    trainer.fit(model, make_data(num_ranks, STEPS), make_data(num_ranks, 1))
    return trained, validated, ended, digest(model.buffers())


@pytest.mark.parametrize("kind", KINDS)
def test_buffers_are_those_of_rank_zero_wherever_somebody_looks(kind: str) -> None:
    """Also at the end of an epoch with a validation: what is decided there is decided by all alike, as under ddp."""
    (trained, *of_rank_0), (others, *of_rank_1) = run_ranks(buffers_while_looking, 2, kind)
    assert all(a != b for a, b in zip(trained, others, strict=True)), "batch norm's statistics are sent in every step"
    assert of_rank_0 == of_rank_1
    validated, ended, _ = of_rank_0
    assert validated == trained[2::3]
    assert ended == trained[STEPS - 1 :: STEPS]


class Own(ManualTiny):
    """Buffers of each rank that the training reads, and one that DDP does not know and could not send."""

    def __init__(self) -> None:
        super().__init__()
        self._ddp_params_and_buffers_to_ignore = ["own"]
        for name in ("own", "read"):
            self.register_buffer(name, torch.zeros(16))
        self.register_buffer("graph", torch.eye(3).to_sparse(), persistent=False)
        self._ddp_params_and_buffers_to_ignore.append("graph")

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.own.fill_(self.global_rank)
            self.read.lerp_(x.detach().mean(0), 0.1)
        return super().forward(x - self.read)


def validate_or_not(validates: bool) -> tuple[str, float]:
    num_ranks, model = dist.get_world_size(), Own()
    options: dict[str, Any] = {"val_check_interval": 2} if validates else {"limit_val_batches": 0}
    trainer = make_trainer(make_strategy("dgc"), num_ranks, num_sanity_val_steps=0, **options)
    trainer.fit(model, make_data(num_ranks, STEPS), make_data(num_ranks, 1))
    return digest(model.parameters()), float(model.own[0])


def test_in_manual_optimization_a_validation_changes_no_buffer_that_the_training_reads() -> None:
    """Lightning's DDP broadcasts none there; and what DDP is told to ignore is left alone anywhere."""
    for rank, ((validated, own), (quiet, _)) in enumerate(run_ranks(each, 2, validate_or_not, [(True,), (False,)])):
        assert validated == quiet
        assert own == rank


ODD: dict[str, Callable[[Tensor], Tensor]] = {  # of eight numbers
    "int16": lambda x: x.to(torch.int16),
    "complex": lambda x: torch.complex(x, -x),
    "a column": lambda x: x.view(4, 2)[:, 1],
    "a number": lambda x: x[3],
}


def shard_odd_buffers() -> dict[str, list[Any]]:
    """Return rank 0's, and those of this rank after the model has been sharded and after a resume has equalised it."""
    rank, found = dist.get_rank(), {}
    module = nn.Module()
    module.device_mesh = make_node_mesh(Topology(((0, 1),)), rank, "cpu", None).mesh
    for name, make in ODD.items():
        module.register_buffer(name, make(torch.arange(8.0) + 100 * rank))
        found[name] = [make(torch.arange(8.0)).tolist()]
    _shard(module, torch.device("cpu"))
    for name, buffer in module.named_buffers():
        found[name].append(buffer.tolist())
        buffer.copy_(ODD[name](torch.arange(8.0) + 100 * rank))
    equalise_(module, LocalTensors(), None)
    for name, buffer in module.named_buffers():
        found[name].append(buffer.tolist())
    return found


def test_buffers_of_any_dtype_and_strides_are_those_of_rank_zero_in_a_sharded_model() -> None:
    """Gloo takes no int16, and reads what has gaps as if it had none."""
    for found in run_ranks(shard_odd_buffers, 2):
        for name, (expected, sharded, equalised) in found.items():
            assert sharded == equalised == expected, name


def test_a_buffer_that_ddp_cannot_broadcast_is_named() -> None:
    model = Tiny()
    model.register_buffer("counts", torch.zeros(3, dtype=torch.int16))
    with pytest.raises(ConfigurationError, match=r"'counts' is of torch\.int16.*register it as int32 or int64"):
        check_model(model)
    model._ddp_params_and_buffers_to_ignore = ["counts"]
    check_model(model)
