"""The dense phase is DDP to the bit; the sparse phase does not depend on how DDP lays out its buckets."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lightning_lowbw.strategies.communication_hook import CommunicationHook
from tests.ranks import run_ranks
from tests.tiny import ManualTiny, Tiny, amp_with_scaler, make_data, make_strategy, make_trainer, weights_of

STEPS = 8
MANY_BUCKETS = {"bucket_cap_mb": 0.005}  # rebuilt after the first iteration, in the order of the gradients
DDP_OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "many buckets": {**MANY_BUCKETS, "gradient_as_bucket_view": True},
    "static graph": {"static_graph": True, "broadcast_buffers": True},
    "no buffers": {"broadcast_buffers": False},
    "find unused": {"find_unused_parameters": True},  # and there are some
    "find unused, many buckets": {**MANY_BUCKETS, "find_unused_parameters": True},
}
ACCUMULATE = {"accumulate_grad_batches": 3}  # no_sync; the last step of the epoch has two batches only
TRAINER_OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "accumulate, clip norm": {**ACCUMULATE, "gradient_clip_val": 0.3},
    "bf16, clip value": {"precision": "bf16-mixed", "gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"},
    "16 scaled": {"amp": True},
}


def train(names: list[str], ddp: dict[str, dict[str, Any]], trainer: dict[str, dict[str, Any]]) -> dict[Any, str]:
    """Train with each strategy and each option; return the digests of the weights."""
    results = {}
    num_ranks = dist.get_world_size()
    for name in names:
        for ddp_name, ddp_options in ddp.items():
            for trainer_name, trainer_options in trainer.items():
                options = dict(trainer_options)
                if options.pop("amp", False):
                    options["plugins"] = [amp_with_scaler()]
                model = Tiny(unused="find_unused_parameters" in ddp_options)
                fit = make_trainer(make_strategy(name, **ddp_options), num_ranks, **options)
                fit.fit(model, make_data(num_ranks, STEPS))
                assert fit.global_step == -(-STEPS // options.get("accumulate_grad_batches", 1))
                results[name, ddp_name, trainer_name] = weights_of(model)
    return results


def same_on_all(results: list[dict[Any, str]]) -> dict[Any, str]:
    assert all(result == results[0] for result in results), "replicas differ"
    return results[0]


def test_dense_phase_is_ddp() -> None:
    digests = same_on_all(run_ranks(train, 3, ["ddp", "dense"], DDP_OPTIONS, {"default": {}}))
    for option in DDP_OPTIONS:
        assert digests["ddp", option, "default"] == digests["dense", option, "default"], option


def test_dense_phase_is_ddp_with_every_trainer_option() -> None:
    digests = same_on_all(run_ranks(train, 2, ["ddp", "dense"], {"default": {}}, TRAINER_OPTIONS))
    for option in TRAINER_OPTIONS:
        assert digests["ddp", "default", option] == digests["dense", "default", option], option
    assert len(set(digests.values())) == len(TRAINER_OPTIONS)  # the options do something


# torch's own reducer fails on a static graph whose first backward is under no_sync, with stock DDP too.
@pytest.mark.parametrize(
    ("option", "trainer"), [("static graph", "default"), ("many buckets", "accumulate, clip norm")]
)
def test_sparse_phase_does_not_depend_on_buckets(option: str, trainer: str) -> None:
    ddp = {name: DDP_OPTIONS[name] for name in ("default", option)}
    digests = same_on_all(run_ranks(train, 2, ["dgc"], ddp, {trainer: TRAINER_OPTIONS[trainer]}))
    assert len(digests) == 2
    assert len(set(digests.values())) == 1


class Counter(pl.Callback):
    """Counts the buckets that DDP fills in each step."""

    def __init__(self) -> None:
        self.buckets: list[int] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.buckets.append(0)


def count_buckets(make_module: Callable[[], Tiny]) -> list[int]:
    counter, reduce = Counter(), CommunicationHook.reduce

    @functools.wraps(reduce)  # DDP looks at the annotations
    def counted(hook: CommunicationHook, state: object, bucket: dist.GradBucket) -> Future[Tensor]:
        counter.buckets[-1] += 1
        return reduce(hook, state, bucket)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(CommunicationHook, "reduce", counted)
        trainer = make_trainer(make_strategy("dgc", rampup_begin_step=3), 2, callbacks=[counter])
        trainer.fit(make_module(), make_data(2, 6))
    return counter.buckets


@pytest.mark.parametrize("make_module", [Tiny, ManualTiny])
def test_in_sparse_steps_no_bucket_is_filled(make_module: Callable[[], Tiny]) -> None:
    """Each would cost a copy of the gradient, and nothing is reduced."""
    for buckets in run_ranks(count_buckets, 2, make_module):
        dense, sparse = buckets[:3], buckets[3:]
        assert all(dense)
        assert sparse == [0, 0, 0]
