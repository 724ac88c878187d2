"""The grid of golden trajectories: not the full product, but a case for each path through the code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop

import lightning_lowbw as lowbw
from tests.golden import models

PAPERS: dict[str, Any] = {"outer": "nesterov", "outer_momentum": 0.9}  # DiLoCo's
OPTIMIZERS: dict[str, models.MakeOptimizer] = {
    "sgd": partial(SGD, lr=0.1),
    "momentum": partial(SGD, lr=0.05, momentum=0.9),
    "nesterov": partial(SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": partial(AdamW, lr=1e-2),
    "adam": partial(Adam, lr=1e-2, weight_decay=0.01, amsgrad=True),
    "rmsprop": partial(RMSprop, lr=1e-3),
    "adagrad": partial(Adagrad, lr=1e-2),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training.

    Attributes:
        strategy: makes it, or its name.
        optimizer: a key of `OPTIMIZERS`.
        model: a class of `models`.
        ranks: number of ranks.
        precision: of the Trainer; "scaler" is a GradScaler on the CPU.
        init_scale: of the GradScaler; the larger one skips steps.
        trainer: other arguments of the Trainer.
        callbacks: makes them.
        lr_milestones: steps after which the learning rate is halved.
        steps: optimizer steps.
        batches: of each rank in an epoch; None is enough for all steps. Then the epochs end the fit.
        resume_at: the step after which another Trainer goes on; None for one fit.
        bytes_by_step: whether the bytes sent up to a step are known then. They are not where an average travels on two
            levels behind the steps: its later collectives begin as soon as its first ones happen to have ended.
        end: what the test compares of the row after a fit: "all"; its "state", without the bytes, because the end of a
            fit may compare and average buffers; or "nothing", if the last step was inside a period or hid an average:
            then the row has a mean of the replicas that no step has made.
    """

    strategy: Callable[[], Any]
    optimizer: str = "momentum"
    model: type[models.Golden] = models.Golden
    ranks: int = 2
    precision: str = "32-true"
    init_scale: float = 2.0**10
    trainer: Mapping[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], list[pl.Callback]] = list
    lr_milestones: tuple[int, ...] = ()
    steps: int = 8
    batches: tuple[int, ...] | None = None
    resume_at: int | None = None
    bytes_by_step: bool = True
    end: Literal["all", "state", "nothing"] = "all"

    def precision_arguments(self) -> dict[str, Any]:
        if self.precision != "scaler":
            return {"precision": self.precision}
        scaler = torch.amp.GradScaler("cpu", init_scale=self.init_scale, growth_interval=3)
        return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=scaler)]}


CASES: dict[str, Case] = {}

CONV = {"model": models.Conv}
CLIP_NORM = {"gradient_clip_val": 0.3}
CLIP_VALUE = {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}
ACCUMULATE = {"accumulate_grad_batches": 2}
VALIDATE = {"val_check_interval": 3}
INTERLEAVED = [[0, 2], [1, 3]]


def add(name: str, strategy: Callable[..., Any], options: Mapping[str, Any], **fields: Any) -> None:
    assert name not in CASES, name
    CASES[name] = Case(strategy=partial(strategy, **options), **fields)


def by_name(name: str) -> str:
    return name


# Deep gradient compression ----------------------------------------------------------------------------------------

DGC = {"sparsity": (0.8,), "min_numel": 100, "value_dtype": "float32"}


STAIRS = {"rampup_begin_step": 2, "rampup_step": 4, "sparsity": (0.5, 0.75, 0.9)}
SHARED = {"find_unused_parameters": True}


def dgc(name: str, options: Mapping[str, Any] = {}, group: str = "dgc", **fields: Any) -> None:
    is_sgd = fields.get("optimizer", "momentum") in ("sgd", "momentum", "nesterov")
    knobs = {**DGC, **({"momentum_masking": True} if is_sgd else {}), **options}  # at all densities
    of_ddp = {knob: knobs.pop(knob) for knob in SHARED if knob in knobs}
    add(f"{group}/{name}", lowbw.Strategy, {"method": lowbw.DGC(**knobs), **of_ddp}, **fields)


for _optimizer in ("momentum", "adamw"):
    dgc(_optimizer, optimizer=_optimizer)
for _optimizer in ("momentum", "adam", "rmsprop"):
    dgc(f"{_optimizer}-stairs-int8", {**STAIRS, "value_dtype": "int8"}, optimizer=_optimizer)
dgc("sgd-two-levels", {"topology": 2, **STAIRS}, "dgc_two_levels", optimizer="sgd", ranks=4)

dgc("bfloat16-conv", {"value_dtype": "bfloat16"}, optimizer="nesterov", model=models.Conv)
dgc("float16-four-ranks", {"value_dtype": "float16"}, ranks=4, model=models.Conv)
dgc("int4-adamw-channels-last", {"value_dtype": "int4"}, optimizer="adamw", model=models.ChannelsLast)
dgc("int2-sgd", {"value_dtype": "int2"}, optimizer="sgd")

dgc("four-ranks-int4-adam", {"value_dtype": "int4", **STAIRS}, ranks=4, optimizer="adam")
dgc("clip-rmsprop", trainer=CLIP_NORM, optimizer="rmsprop")
dgc("no-masking-nesterov-int4", {"momentum_masking": False, "value_dtype": "int4"}, optimizer="nesterov")
dgc("masking-adamw", {"momentum_masking": True}, optimizer="adamw")
dgc("exclude", {"exclude": ["body.3.*"], **STAIRS}, optimizer="nesterov")
dgc("tied", STAIRS, optimizer="nesterov", model=models.TiedAndUsed)
dgc("groups", STAIRS, optimizer="nesterov", model=models.Groups, lr_milestones=(4,))
dgc("two-optimizers", STAIRS, optimizer="momentum", model=models.TwoOptimizers, steps=12)

dgc("clip-norm", STAIRS, trainer=CLIP_NORM, optimizer="nesterov")
dgc("clip-value-adamw", {"value_dtype": "int8"}, trainer=CLIP_VALUE, optimizer="adamw")
dgc("accumulate-adam", STAIRS, trainer=ACCUMULATE, optimizer="adam")
dgc("bf16", STAIRS, precision="bf16-mixed", optimizer="nesterov")
dgc("scaler", STAIRS, precision="scaler", optimizer="momentum")
dgc("scaler-skips-adamw", {"value_dtype": "int8"}, precision="scaler", init_scale=2.0**20, optimizer="adamw", steps=10)

dgc("resume-stairs", STAIRS, optimizer="nesterov", resume_at=4, model=models.Dropout)
dgc("resume-adamw-int8", {"value_dtype": "int8"}, optimizer="adamw", resume_at=4)
dgc("resume-four-ranks", {"value_dtype": "bfloat16"}, ranks=4, resume_at=4)
dgc("resume-wide", {"sparsity": (0.98,)}, model=models.Wide, resume_at=3, steps=6)

for _name, _options, _fields in (
    ("interleaved-adamw-int8", {"topology": INTERLEAVED, "value_dtype": "int8", **STAIRS}, {"optimizer": "adamw"}),
    ("int4-clip", {"topology": 2, "value_dtype": "int4"}, {"trainer": CLIP_NORM}),
    ("accumulate-bf16", {"topology": 2}, {"trainer": ACCUMULATE, "precision": "bf16-mixed"}),
    ("scaler-nesterov", {"topology": 2, **STAIRS}, {"precision": "scaler", "optimizer": "nesterov"}),
    ("wide", {"topology": 2, "sparsity": (0.98,), "value_dtype": "bfloat16"}, {"model": models.Wide, "steps": 6}),
    ("tied", {"topology": 2}, {"model": models.TiedAndUsed, "optimizer": "adamw"}),
    ("resume-adamw-bfloat16", {"topology": INTERLEAVED, "value_dtype": "bfloat16"},
     {"resume_at": 4, "optimizer": "adamw"}),
):  # fmt: skip
    dgc(_name, _options, "dgc_two_levels", ranks=4, **_fields)

add("dgc/by-name-warm-up", by_name, {"name": "dgc"}, optimizer="nesterov", model=models.Wide,
    callbacks=lambda: [lowbw.SparsityWarmup(begin_step=2, steps=3, sparsity=[0.5, 0.9])])  # fmt: skip

CHUNKS = {"density": 0.1, "chunk": 64, "decay": 0.9, "value_dtype": "int8"}
for _name, _options, _fields in (
    ("chunks-over-senders-adamw", CHUNKS, {"optimizer": "adamw"}),
    ("over-senders-resume", {**STAIRS, "momentum_masking": True}, {"resume_at": 4}),
):
    _method = lowbw.DGC(min_numel=100, mean_over="senders", **_options)
    add(f"dgc/{_name}", lowbw.Strategy, {"method": _method}, **_fields)

# Few bits per value, every step -----------------------------------------------------------------------------------

for _name, _method, _fields in (
    ("int8-adamw-four-ranks-conv", lowbw.QuantizedGradients(), {**CONV, "optimizer": "adamw", "ranks": 4}),
    ("int8-rmsprop-clip", lowbw.QuantizedGradients(), {"optimizer": "rmsprop", "trainer": CLIP_NORM}),
    ("int8-scaler-skips", lowbw.QuantizedGradients(), {"precision": "scaler", "init_scale": 2.0**20, "steps": 10}),
    ("int4-adagrad-accumulate", lowbw.QuantizedGradients("int4"), {"optimizer": "adagrad", "trainer": ACCUMULATE}),
    ("int4-begins-dense-bf16", lowbw.QuantizedGradients("int4", rampup_begin_step=3), {"precision": "bf16-mixed"}),
    ("int4-two-levels", lowbw.QuantizedGradients("int4", topology=INTERLEAVED), {"ranks": 4, "optimizer": "nesterov"}),
    ("int8-resume-adam", lowbw.QuantizedGradients(), {"optimizer": "adam", "resume_at": 4, "model": models.Dropout}),
):
    add(f"quantized/{_name}", lowbw.Strategy, {"method": _method}, **_fields)
add("quantized/int4-by-name-wide", by_name, {"name": "int4"}, model=models.Wide, steps=6)

# Low rank ---------------------------------------------------------------------------------------------------------

for _name, _method, _fields in (
    ("adamw-two-levels", lowbw.PowerSGD(1, topology=INTERLEAVED), {"optimizer": "adamw", "ranks": 4}),
    ("clip-conv", lowbw.PowerSGD(1), {"optimizer": "nesterov", "trainer": CLIP_NORM, "model": models.Conv}),
    ("begins-dense-accumulate-bf16", lowbw.PowerSGD(start_step=3), {"precision": "bf16-mixed", "trainer": ACCUMULATE}),
    ("resume-adam", lowbw.PowerSGD(4), {"optimizer": "adam", "resume_at": 4, "model": models.Dropout}),
    ("every-k", lowbw.Method(when=lowbw.EveryK(k_steps=2), what=lowbw.LowRank()), {"optimizer": "adamw"}),
):
    add(f"powersgd/{_name}", lowbw.Strategy, {"method": _method}, **_fields)

# Local SGD --------------------------------------------------------------------------------------------------------


def local(name: str, options: Mapping[str, Any] = {}, group: str = "local_sgd", **fields: Any) -> None:
    knobs = {"k_steps": 2, **options}
    of_ddp = {knob: knobs.pop(knob) for knob in SHARED if knob in knobs}
    add(f"{group}/{name}", lowbw.Strategy, {"method": lowbw.LocalSGD(**knobs), **of_ddp}, **fields)


def named(name: str, preset: str, k_steps: int, **fields: Any) -> None:
    add(name, by_name, {"name": preset}, callbacks=lambda: [lowbw.AveragingSchedule(k_steps=k_steps)], **fields)


local("four-ranks-conv", {"k_steps": 3}, ranks=4, model=models.Conv, optimizer="nesterov")
local("channels-last-adamw", {}, model=models.ChannelsLast, optimizer="adamw")
local("tied-unused", {**SHARED, "begin_step": 2}, model=models.Tied, optimizer="adamw")
local("groups", {"begin_step": 0}, model=models.Groups, optimizer="nesterov", lr_milestones=(4,))
local("two-optimizers", {}, model=models.TwoOptimizers, optimizer="adamw", steps=12)
local("delayed-mixing-adamw", {"k_steps": 3, "delay_steps": 2, "mixing": 0.5}, optimizer="adamw")
local("int4-adamw-conv", {"compression": "int4"}, optimizer="adamw", model=models.Conv)
local("accumulate-adamw", {"begin_step": 2}, trainer=ACCUMULATE, optimizer="adamw")
local("bf16", {}, precision="bf16-mixed", optimizer="nesterov", model=models.Conv)
local("scaler-skips", {}, precision="scaler", init_scale=2.0**20, steps=10)
local("even", {}, batches=(3, 3), trainer={"max_epochs": 3})
local("resume", {"k_steps": 3}, resume_at=5, steps=10, model=models.Dropout, optimizer="nesterov")
local("resume-after-delay-adamw", {"k_steps": 3, "delay_steps": 2}, resume_at=6, steps=10, optimizer="adamw")
local("resume-bfloat16", {"compression": "bfloat16", "k_steps": 3}, resume_at=5, steps=10)

named("post_local_sgd/half-adamw", "post_local_sgd", 2, optimizer="adamw", lr_milestones=(3,), model=models.Conv)
HALF = {"k_steps": 2, "begin_step": 0.5}
for _name, _options, _fields in (
    ("half-two-levels", {"topology": 2}, {"lr_milestones": (3,), "ranks": 4, "optimizer": "nesterov"}),
    ("half-resume", {}, {"lr_milestones": (5,), "resume_at": 6, "steps": 8}),
):
    add(f"post_local_sgd/{_name}", lowbw.LocalSGDStrategy, {**HALF, **_options}, **_fields)

for _name, _options, _fields in (
    ("adacomm-slowmo", {"rule": "adacomm", "init_k_steps": 3, "outer": "slowmo"}, {"trainer": CLIP_NORM}),
    ("qsr-delayed", {"rule": "qsr", "qsr_alpha": 0.08, "init_k_steps": 2, "delay_steps": 1}, {"lr_milestones": (5,)}),
    ("fleet-two-levels", {"init_k_steps": 2, "topology": 2}, {"ranks": 4, "optimizer": "adamw"}),
    ("fleet-compressed", {"init_k_steps": 2, "compression": {"density": 0.2, "min_numel": 100}}, {}),
    ("resume-adacomm", {"rule": "adacomm", "init_k_steps": 3}, {"resume_at": 5, "optimizer": "nesterov"}),
):
    add(f"adaptive/{_name}", lowbw.AdaptiveLocalSGDStrategy, _options, **{"steps": 10, **_fields})

for _name, _options, _fields in (
    ("slowmo-two-levels", {"outer": "slowmo", "topology": INTERLEAVED}, {"ranks": 4}),
    ("slowmo-resume", {"outer": "slowmo", "outer_momentum": 0.7}, {"resume_at": 5, "steps": 10}),
    ("diloco-resume", {**PAPERS, "k_steps": 3}, {"resume_at": 5, "steps": 10, "optimizer": "adamw"}),
    ("diloco-alone-resume", {**PAPERS, "k_steps": 3, "delay_steps": 2},
     {"ranks": 1, "resume_at": 5, "steps": 10, "optimizer": "adamw"}),
    ("streaming-slowmo", {"num_fragments": 2, "outer": "slowmo", "k_steps": 3, "delay_steps": 1}, {}),
    ("streaming-bfloat16", {"num_fragments": 2, "compression": "bfloat16"},
     {"model": models.Conv, "precision": "bf16-mixed"}),
    ("streaming-int4-resume-between", {"num_fragments": 2, "k_steps": 3, "delay_steps": 1, "compression": "int4"},
     {"ranks": 3, "optimizer": "adamw", "resume_at": 4, "steps": 10}),
    ("streaming-two-levels", {"num_fragments": 2, "k_steps": 3, "delay_steps": 1, "mixing": 0.3, "topology": 2},
     {"ranks": 4, "optimizer": "adamw", "bytes_by_step": False}),
    ("streaming-resume-between",
     {"num_fragments": 3, "k_steps": 4, "delay_steps": 1, "mixing": 0.5, **PAPERS},
     {"resume_at": 6, "steps": 11, "optimizer": "adamw"}),
):  # fmt: skip
    local(_name, {"begin_step": 0, **_options}, "outer", **_fields)
named("outer/diloco-by-name", "diloco", 3, optimizer="adamw")

for _name, _options, _fields in (
    ("leader", {"topology": INTERLEAVED, "k_steps": 3}, {"optimizer": "nesterov", "model": models.Conv}),
    ("nodes-of-two-sizes", {"topology": [[0, 1, 2], [3]]}, {"optimizer": "adamw"}),
    ("delayed", {"topology": 2, "k_steps": 3, "delay_steps": 1}, {"bytes_by_step": False}),
    ("int8-slowmo", {"topology": 2, "compression": "int8", "outer": "slowmo"}, {}),
    ("resume-bf16", {"topology": 2, "k_steps": 3}, {"resume_at": 5, "steps": 10, "precision": "bf16-mixed"}),
):  # fmt: skip
    local(_name, _options, "local_two_levels", ranks=4, **_fields)

# SparseLoCo -------------------------------------------------------------------------------------------------------

LOCO = {"density": 0.1, "chunk": 256, "min_numel": 100}
for _name, _compression, _options, _fields in (
    ("int4", {"value_dtype": "int4"}, {}, {"optimizer": "nesterov", "model": models.Conv}),
    ("float32-sgd", {"value_dtype": "float32", "decay": 1.0}, {}, {"optimizer": "sgd"}),
    ("whole-wide", {"chunk": None, "density": 0.02}, {}, {"optimizer": "adamw", "model": models.Wide, "steps": 6}),
    ("over-ranks", {"mean_over": "ranks"}, {}, {"optimizer": "adamw", "ranks": 4}),
    ("streaming-mixing", {}, {"num_fragments": 2, "k_steps": 3, "delay_steps": 1, "mixing": 0.5},
     {"optimizer": "nesterov"}),
    ("bf16-post", {}, {"begin_step": 2}, {"precision": "bf16-mixed", "optimizer": "adamw"}),
    ("two-levels", {}, {"topology": 2}, {"optimizer": "adamw", "ranks": 4}),
    ("two-levels-float32", {"value_dtype": "float32", "chunk": None}, {"topology": INTERLEAVED, **PAPERS},
     {"ranks": 4, "optimizer": "nesterov"}),
    ("resume-int2", {}, {"k_steps": 3}, {"resume_at": 5, "steps": 10, "optimizer": "adamw"}),
    ("resume-delayed-int4", {"value_dtype": "int4"}, {"k_steps": 3, "delay_steps": 2},
     {"resume_at": 5, "steps": 10, "optimizer": "nesterov"}),
):  # fmt: skip
    local(_name, {"begin_step": 0, "compression": {**LOCO, **_compression}, **_options}, "sparse_loco", **_fields)
named("sparse_loco/by-name-wide", "sparse_loco", 3, optimizer="adamw", model=models.Wide, steps=6)

# Dense on two levels ----------------------------------------------------------------------------------------------

for _name, _options, _fields in (
    ("leader-nodes-of-two-sizes", {"algorithm": "leader", "topology": [[0, 1, 2], [3]]},
     {"model": models.Conv}),
    ("interleaved-bfloat16", {"inter_dtype": "bfloat16", "topology": INTERLEAVED},
     {"optimizer": "adam"}),
    ("accumulate-bf16", {}, {"trainer": ACCUMULATE, "precision": "bf16-mixed", "optimizer": "rmsprop"}),
    ("clip-value-scaler", {"algorithm": "leader"}, {"trainer": CLIP_VALUE, "precision": "scaler"}),
    ("tied-unused", SHARED, {"model": models.Tied, "optimizer": "adamw"}),
    ("resume", {"inter_dtype": "bfloat16"}, {"resume_at": 4, "optimizer": "nesterov", "model": models.Dropout}),
):  # fmt: skip
    add(f"hierarchical/{_name}", lowbw.HierarchicalStrategy, {"topology": 2, **_options}, ranks=4, **_fields)

# Sharded inside nodes ---------------------------------------------------------------------------------------------

FSDP_DGC = {**STAIRS, "min_numel": 50}
FSDP_LOCO = {"density": 0.1, "chunk": 64, "min_numel": 50}
for _name, _method, _fields in (
    ("dense-interleaved", lowbw.Hierarchical(INTERLEAVED), {"optimizer": "adamw"}),
    ("dgc-nesterov-clip", lowbw.DGC(**FSDP_DGC, momentum_masking=True),
     {"optimizer": "nesterov", "trainer": CLIP_NORM}),
    ("dgc-adamw-int8-tied-and-used-bf16", lowbw.DGC(**FSDP_DGC, value_dtype="int8"),
     {"optimizer": "adamw", "model": models.TiedAndUsed, "precision": "bf16-mixed"}),
    ("dgc-resume", lowbw.DGC(**FSDP_DGC, momentum_masking=True), {"resume_at": 4, "model": models.Dropout}),
    ("int8-adamw-conv", lowbw.QuantizedGradients(), {"optimizer": "adamw", "model": models.Conv, "trainer": VALIDATE}),
    ("local-sgd-configured", lowbw.LocalSGD(2), {"optimizer": "sgd", "model": models.Sharded, "trainer": ACCUMULATE}),
    ("qsr-int8", lowbw.AdaptiveLocalSGD(2, rule="qsr", qsr_alpha=0.1, compression="int8"), {"lr_milestones": (5,)}),
    ("diloco-delayed-resume", lowbw.LocalSGD(3, 0, delay_steps=1, **PAPERS),
     {"optimizer": "adamw", "resume_at": 5, "steps": 10}),
    ("sparse-loco-resume", lowbw.LocalSGD(2, 0, compression=FSDP_LOCO),
     {"optimizer": "adamw", "resume_at": 5, "steps": 10, "model": models.Sharded}),
):  # fmt: skip
    _topology = INTERLEAVED if "interleaved" in _name else 2
    add(f"fsdp/{_name}", lowbw.ShardedStrategy, {"method": _method, "topology": _topology}, ranks=4, **_fields)

# What is compared of the end of a fit -----------------------------------------------------------------------------

ENDS_WITH_ROUND = """
    adaptive/adacomm-slowmo local_sgd/accumulate-adamw local_sgd/groups local_sgd/even outer/slowmo-two-levels
    post_local_sgd/half-adamw post_local_sgd/half-two-levels sparse_loco/bf16-post sparse_loco/float32-sgd
    sparse_loco/int4 sparse_loco/over-ranks sparse_loco/two-levels sparse_loco/two-levels-float32
"""
ENDS_INSIDE = """
    adaptive/fleet-compressed adaptive/fleet-two-levels adaptive/qsr-delayed adaptive/resume-adacomm
    fsdp/diloco-delayed-resume fsdp/local-sgd-configured fsdp/qsr-int8 fsdp/sparse-loco-resume
    local_sgd/bf16 local_sgd/channels-last-adamw local_sgd/delayed-mixing-adamw local_sgd/four-ranks-conv
    local_sgd/int4-adamw-conv local_sgd/resume local_sgd/resume-after-delay-adamw local_sgd/resume-bfloat16
    local_sgd/scaler-skips local_sgd/two-optimizers
    local_two_levels/delayed local_two_levels/int8-slowmo local_two_levels/leader local_two_levels/nodes-of-two-sizes
    local_two_levels/resume-bf16
    outer/diloco-by-name outer/diloco-resume outer/slowmo-resume outer/streaming-bfloat16
    outer/streaming-int4-resume-between outer/streaming-resume-between outer/streaming-slowmo
    outer/streaming-two-levels
    post_local_sgd/half-resume
    powersgd/every-k sparse_loco/resume-delayed-int4 sparse_loco/resume-int2 sparse_loco/streaming-mixing
"""
for _name in ENDS_WITH_ROUND.split():
    CASES[_name] = replace(CASES[_name], end="state")
for _name in ENDS_INSIDE.split():
    CASES[_name] = replace(CASES[_name], end="nothing")
