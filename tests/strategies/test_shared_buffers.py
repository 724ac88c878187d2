"""Running statistics are a rank's own in the sparse phase, and rank 0's in validation; other buffers as in DDP.

Shapes that differ between ranks are an error, also in mid-fit; shapes that change alike are not looked for.

Changes of buffers in a module's hooks last, as under ddp, also while the buffers of another rank are shown. Buffers and
parameters that DDP ignores, and frozen weights of other classes, are each rank's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_lowbw import ConfigurationError, DisagreementError
from lightning_lowbw.comm.agreement import digest
from lightning_lowbw.comm.collectives import broadcast_flat_
from lightning_lowbw.strategies import shared_buffers
from lightning_lowbw.strategies.checks import check_model
from tests.ranks import on_ranks
from tests.strategies.fits import STEPS, At, Noted, gathered, make, same, train, train_by_step
from tests.tiny import ManualTiny, Tiny, make_data, make_trainer

DGC = "dgc, warm-up"
KINDS: dict[str, tuple[Any, type[Tiny]]] = {
    "dgc": (lambda: make(DGC), Tiny),
    "dgc, broadcast_buffers": (lambda: make(DGC, broadcast_buffers=True), Tiny),
    "dgc in manual optimization": (lambda: make(DGC), ManualTiny),
    "sharded": (lambda: make("int8, sharded", topology=1), Tiny),
}


def buffers_of(module: nn.Module) -> str:
    return digest(module.buffers())


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_buffers_are_those_of_rank_zero_wherever_somebody_looks(kind: str) -> None:
    """Also at the end of an epoch with a validation: all ranks decide alike there, as under ddp."""
    strategy, model = (make() for make in KINDS[kind])
    hooks = ("on_train_batch_end", "on_validation_batch_end", "on_train_epoch_end")
    trained, validated, ended = noted = [Noted(buffers_of, hook) for hook in hooks]
    options: dict[str, Any] = {"max_epochs": 2, "val_check_interval": 3, "num_sanity_val_steps": 0}
    train(strategy, model, STEPS, 1, callbacks=noted, **options)
    values = gathered(trained.values)
    assert all(a != b for a, b in zip(*values, strict=True)), "batch norm's statistics are sent in every step"
    same(buffers_of(model))
    assert same(validated.values) == values[0][2::3]
    assert same(ended.values) == values[0][STEPS - 1 :: STEPS]


class Own(ManualTiny):
    """A buffer of each rank that the training reads, and a buffer that DDP ignores and could not send."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("read", torch.zeros(16))
        self.register_buffer("graph", torch.eye(3).to_sparse(), persistent=False)
        self._ddp_params_and_buffers_to_ignore = ["graph"]

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.read.lerp_(x.detach().mean(0), 0.1)
        return super().forward(x - self.read)


@on_ranks(2)
def test_in_manual_optimization_a_validation_changes_no_buffer_that_the_training_reads() -> None:
    """Lightning's DDP broadcasts none there."""
    ends = []
    for num_batches in (0, 1):
        model = Own()
        options = {"val_check_interval": 2} if num_batches else {}
        train(DGC, model, STEPS, num_batches, num_sanity_val_steps=0, **options)
        ends.append(digest(model.parameters()))
    assert ends[0] == ends[1]


def test_buffers_of_any_dtype_and_strides_go_in_one_message() -> None:
    def make_buffers(first: float) -> list[Tensor]:
        x = first + torch.arange(8.0)
        return [x.to(torch.int16), torch.complex(x, -x), x.view(4, 2)[:, 1], x[3]]

    message, buffers, expected = list[Tensor](), make_buffers(100.0), make_buffers(0.0)
    broadcast_flat_(expected, lambda flat: message.append(flat.clone()))
    broadcast_flat_(buffers, lambda flat: flat.copy_(message[0]))
    assert [buffer.tolist() for buffer in buffers] == [buffer.tolist() for buffer in expected]


def test_a_buffer_that_ddp_cannot_broadcast_is_named() -> None:
    model = Tiny()
    model.register_buffer("counts", torch.zeros(3, dtype=torch.int16))
    with pytest.raises(ConfigurationError, match=r"'counts' is of torch\.int16.*register it as int32 or int64"):
        check_model(model)
    model._ddp_params_and_buffers_to_ignore = ["counts"]
    check_model(model)


# Buffers that the user's hooks change ---------------------------------------------------------------------------------


class Hooks(Tiny):
    """Sets a buffer when an epoch begins, and three after each validation; writes down what the training sees."""

    def __init__(self) -> None:
        super().__init__(data_by_step=True)
        self.register_buffer("temperature", torch.tensor(-1.0))
        self.register_buffer("best", torch.tensor(100.0))
        self.register_buffer("patience", torch.tensor(0))
        self.seen: list[list[float]] = []

    def on_train_epoch_start(self) -> None:
        self.temperature.fill_(float(self.current_epoch))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        noted = self.temperature, self.best, self.patience, self.norm.running_mean[0]
        self.seen.append([float(each) for each in noted])
        return super().training_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        self.best.fill_(7.0 + self.global_step)
        self.patience += 1
        self.norm.running_mean.fill_(50.0 + self.global_step)


@pytest.mark.parametrize("strategy", ["int8", "local_sgd"])  # compressed from the first step on; with local steps
@on_ranks(2)
def test_what_hooks_set_stays_and_is_in_the_checkpoint(strategy: str, tmp_path: Path) -> None:
    """The buffers seen by a fit are compared with two fits that resume after its validation and after its epoch."""
    paths = [f"{tmp_path}/validated.ckpt", f"{tmp_path}/epoch.ckpt"]
    saves = [
        At(3, lambda trainer, _: trainer.save_checkpoint(paths[0]), "on_validation_end"),
        At(5, lambda trainer, _: trainer.save_checkpoint(paths[1]), "on_train_epoch_end"),
    ]
    options: dict[str, Any] = {"max_epochs": 2, "val_check_interval": 3, "num_sanity_val_steps": 0}
    models = []
    for resume in (None, *paths):
        models.append(Hooks())
        train(strategy, models[-1], 5, 1, callbacks=[] if resume else saves, resume=resume, **options)
    whole, after_validation, after_epoch = (model.seen for model in models)
    assert [temperature for temperature, *_ in whole] == [0.0] * 5 + [1.0] * 5
    assert [patience for _, _, patience, _ in whole] == [0.0] * 3 + [1.0] * 5 + [2.0] * 2
    assert whole[3][1:3] == [10.0, 1.0]
    assert (whole[3][3] == 53.0) == (strategy == "int8")  # running statistics belong to the anchor that is shown
    assert after_validation == whole[3:]
    assert after_epoch == whole[5:]


class Buffers(Tiny):
    """Has buffers that all ranks change alike, differently, or from step 2 on, beside the buffers of batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ema", torch.ones(100))
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("late", torch.ones(5))
        self.seen: list[str] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.ema.lerp_(self.wide.bias.detach().mean().expand(100), 0.1)
        self.scale.add_(self.global_rank)
        self.late.add_(self.global_rank * (self.global_step >= 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen.append(digest([self.ema, self.scale]))
        return super().forward(x * self.scale.sum().sigmoid())


def count_broadcasts(**keywords: Any) -> tuple[list[int], list[int], list[str], list[str]]:
    """Return the bytes of buffers before each forward pass, by DDP and the ledger; the buffers seen; the messages."""
    sent, model, said = list[int](), Buffers(), list[str]()
    broadcast = DistributedDataParallel._distributed_broadcast_coalesced

    def watched(model: DistributedDataParallel, tensors: list[Tensor], *args: Any) -> None:
        if model.training:
            sent.append(sum(tensor.nbytes for tensor in tensors))
        broadcast(model, tensors, *args)

    hooks = ("on_train_batch_start", "on_before_backward")
    counts = [Noted(lambda module: module.trainer.strategy.ledger.sent_bytes, hook) for hook in hooks]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DistributedDataParallel, "_distributed_broadcast_coalesced", watched)
        patch.setattr(shared_buffers, "rank_zero_info", said.append)
        train(make("int8", **keywords), model, 10, callbacks=counts)
    begin, end = (count.values for count in counts)
    return sent, [after - before for before, after in zip(begin, end, strict=True)], model.seen, said


@on_ranks(2)
def test_buffers_that_ranks_change_differently_are_broadcast_and_counted() -> None:
    """Except batch norm's statistics, and buffers that are equal anyway; the ranks compare after steps 1 and 2."""
    sent, counted, seen, said = count_broadcasts()
    same(seen)
    assert sent == counted == [4 * 108, 4 * 3] + [4 * 8] * 8
    first, second = gathered(said)[0]
    for message, words in (
        (first, ("differently: scale. ", "12 bytes")),
        (second, ("differently: late. ", "32 bytes")),
    ):
        assert all(each in message for each in words)
    assert "broadcast_buffers=False" in second


@on_ranks(2)
def test_all_buffers_are_broadcast_or_none_where_that_is_asked() -> None:
    everything, *_ = count_broadcasts(broadcast_buffers=True)
    assert min(everything) > 4 * 108 or dist.get_rank()
    assert count_broadcasts(broadcast_buffers=False)[0] == []


# Shapes ---------------------------------------------------------------------------------------------------------------


class Bank(Tiny):
    """Has a bank with a shape of its own on each rank, that grows, and a moving average beside it."""

    def __init__(self, num_rows: int, num_more: int, *ignored: str) -> None:
        super().__init__(data_by_step=True)
        self.register_buffer("bank", torch.zeros(num_rows))
        self.register_buffer("average", torch.zeros(4))
        self.num_more, self._ddp_params_and_buffers_to_ignore = num_more, [*ignored]

    def _load_from_state_dict(self, state: dict[str, Tensor], prefix: str, *args: Any) -> None:
        self.bank = torch.zeros_like(state[f"{prefix}bank"])
        super()._load_from_state_dict(state, prefix, *args)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows = torch.full((self.num_more,), 1.0 + self.global_rank + self.global_step)
        self.bank = torch.cat([self.bank, rows])
        self.average = 0.9 * self.average + self.global_rank  # another tensor
        return super().training_step(batch, batch_idx) * (1.0 + 0.01 * self.average.sum())


METHODS = {"diloco": {"k_steps": 2}, DGC: {}, "int8": {}}


@pytest.mark.parametrize("name", ["local_sgd", "int8", "int8, sharded"])
@on_ranks(2)
def test_shapes_that_differ_at_the_start_are_refused(name: str) -> None:
    """Also in an evaluation, before which Lightning broadcasts."""
    options = {"topology": 1} if "sharded" in name else {}
    words = r"shapes of buffers; .*_ddp_params_and_buffers_to_ignore.*\n  bank: rank 0 has \(\(1,.*, rank 1 has \(\(2,"
    with pytest.raises(DisagreementError, match=words):
        train(make(name, **options), Bank(1 + dist.get_rank(), 0))
    if "sharded" not in name:
        trainer = make_trainer(make(name), 2)
        with pytest.raises(DisagreementError, match=words):
            trainer.validate(Bank(1 + dist.get_rank(), 0), make_data(2, 1), verbose=False)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.fault
@on_ranks(2)
def test_shapes_that_come_to_differ_are_named_when_the_ranks_compare(name: str) -> None:
    model = Bank(1, 1 + dist.get_rank())
    with pytest.raises(DisagreementError, match=r"\n  bank: rank 0 has .* rank 1 has "):
        train(make(name, METHODS[name]), model, STEPS)


@pytest.mark.parametrize("name", METHODS)
@on_ranks(2)
def test_an_ignored_bank_is_each_ranks_own_after_a_resume_too(name: str, tmp_path: Path) -> None:
    path, ends = f"{tmp_path}/some.ckpt", []
    for saves, resume in (((5,), None), ((), path)):
        model = Bank(1, 1 + dist.get_rank(), "bank")
        train_by_step(make(name, METHODS[name]), path, saves, resume, model=model, steps=12)
        ends.append([model.bank.tolist(), model.average.tolist(), digest(model.parameters())])
    assert len(ends[0][0]) == 1 + 12 * (1 + dist.get_rank())
    assert ends[0] == ends[1]


# Left alone -----------------------------------------------------------------------------------------------------------


class InFewBits(Tensor):
    """A frozen weight that knows no arithmetic, as quantized ones of LoRA."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.split, Tensor.split, Tensor.view, Tensor.permute):
            raise NotImplementedError(func)
        return super().__torch_function__(func, types, args, kwargs or {})


class Ignoring(Tiny):
    """Has a frozen parameter and a buffer that each rank sets to its number, and a weight of another class."""

    def __init__(self) -> None:
        super().__init__()
        self.mine = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.few = nn.Parameter(torch.ones(3).as_subclass(InFewBits), requires_grad=False)
        self.register_buffer("own", torch.zeros(3))
        self._ddp_params_and_buffers_to_ignore = ["mine", "few", "own"]

    def on_train_start(self) -> None:
        self.mine.fill_(self.global_rank)
        self.own.fill_(self.global_rank)


@pytest.mark.parametrize("name", ["dgc", "local_sgd"])
@on_ranks(2)
def test_what_ddp_ignores_is_each_ranks_own(name: str) -> None:
    module = Ignoring()
    train(name, module)
    assert module.mine.tolist() == module.own.tolist() == [float(dist.get_rank())] * 3
