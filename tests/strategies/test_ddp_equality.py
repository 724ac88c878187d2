"""The dense phase is DDP to the bit; the sparse phase does not depend on how DDP lays out its buckets."""

from __future__ import annotations

from typing import Any

from tests.ranks import run_ranks
from tests.tiny import Tiny, amp_with_scaler, make_data, make_strategy, make_trainer, weights_of

STEPS = 8
DDP_OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "many buckets": {"bucket_cap_mb": 0.005},  # rebuilt after the first iteration, in the order of the gradients
    "static graph": {"static_graph": True},
    "find unused": {"find_unused_parameters": True},
    "bucket view": {"gradient_as_bucket_view": True},
    "no buffers": {"broadcast_buffers": False},
    "buffers": {"broadcast_buffers": True},
}
TRAINER_OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "accumulate": {"accumulate_grad_batches": 3},  # no_sync; the last step of the epoch has two batches only
    "clip norm": {"gradient_clip_val": 0.3},
    "clip value": {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"},
    "bf16": {"precision": "bf16-mixed"},
    "16 scaled": {"amp": True},
}


def train(
    names: list[str], ddp: dict[str, dict[str, Any]], trainer: dict[str, dict[str, Any]], unused: bool
) -> dict[tuple[str, ...], str]:
    """Train with each strategy and each option; return the digests of the weights."""
    import torch.distributed as dist

    results = {}
    num_ranks = dist.get_world_size()
    for name in names:
        for ddp_name, ddp_options in ddp.items():
            for trainer_name, trainer_options in trainer.items():
                options = dict(trainer_options)
                if options.pop("amp", False):
                    options["plugins"] = [amp_with_scaler()]
                model = Tiny(unused=unused)
                fit = make_trainer(make_strategy(name, **ddp_options), num_ranks, **options)
                fit.fit(model, make_data(num_ranks, STEPS))
                assert fit.global_step == -(-STEPS // options.get("accumulate_grad_batches", 1))
                results[name, ddp_name, trainer_name] = weights_of(model)
    return results


def same_on_all(results: list[dict[tuple[str, ...], str]]) -> dict[tuple[str, ...], str]:
    assert all(result == results[0] for result in results), "replicas differ"
    return results[0]


def test_dense_phase_is_ddp() -> None:
    digests = same_on_all(run_ranks(train, 3, ["ddp", "dense"], DDP_OPTIONS, {"default": {}}, False))
    for option in DDP_OPTIONS:
        assert digests["ddp", option, "default"] == digests["dense", option, "default"], option


def test_dense_phase_is_ddp_with_every_trainer_option() -> None:
    digests = same_on_all(run_ranks(train, 2, ["ddp", "dense"], {"default": {}}, TRAINER_OPTIONS, False))
    for option in TRAINER_OPTIONS:
        assert digests["ddp", "default", option] == digests["dense", "default", option], option
    assert len(set(digests.values())) == len(TRAINER_OPTIONS)  # the options do something


def test_dense_phase_is_ddp_with_unused_parameters() -> None:
    options = {name: {**DDP_OPTIONS[name], "find_unused_parameters": True} for name in ("default", "many buckets")}
    digests = same_on_all(run_ranks(train, 2, ["ddp", "dense"], options, {"default": {}}, True))
    for option in options:
        assert digests["ddp", option, "default"] == digests["dense", option, "default"], option


def test_sparse_phase_does_not_depend_on_buckets() -> None:
    trainer = {name: TRAINER_OPTIONS[name] for name in ("default", "clip norm")}
    digests = same_on_all(run_ranks(train, 2, ["dgc"], DDP_OPTIONS, trainer, False))
    # torch's own reducer fails on a static graph whose first backward is under no_sync, with stock DDP too
    options = {name: option for name, option in DDP_OPTIONS.items() if name != "static graph"}
    trainer["accumulate"] = TRAINER_OPTIONS["accumulate"]
    digests |= same_on_all(run_ranks(train, 2, ["dgc"], options, {"accumulate": trainer["accumulate"]}, False))
    for name in trainer:
        assert len({digest for key, digest in digests.items() if key[2] == name}) == 1, (name, digests)
    assert len(set(digests.values())) == len(trainer)
