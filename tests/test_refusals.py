"""Arguments that are refused at the call: by call, its arguments, and words of the error."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from omegaconf import OmegaConf

import lightning_lowbw as lowbw
from lightning_lowbw.presets import preset
from lightning_lowbw.tools.plan import CLUSTER, make_cluster, show
from tests.programs import ROOT
from tests.ranks import on_ranks
from tests.strategies.fits import At, adamw, make, refusal, same, train
from tests.tiny import Tiny, sgd, trained, weights_of

FEW, BFLOAT16 = lowbw.Quantized(), lowbw.Where(topology="auto", inter_dtype="bfloat16")
NODE_WISE = lowbw.Where(topology="auto", algorithm="leader")
DENSE, DILOCO = lowbw.Hierarchical(), lowbw.LocalSGD(k_steps=4, begin_step=0, outer="nesterov")
NUMBERS = dict(zip(CLUSTER, (2, 1, 10.0, 0.1, 200.0, 1000.0, 0.5), strict=True))
OUT_OF_RANGE = {"nodes": 0, "ranks_per_node": None, "latency_ms": -1.0, "overlap": 50}  # None: not given; 50: percent
UNKNOWN_OPTIMIZER = OmegaConf.merge(OmegaConf.load(ROOT / "conf/plan.yaml"), {"optimizer": "admw"})
REFUSED: dict[Callable[..., Any], list[tuple[dict[str, Any], str]]] = {
    lowbw.EveryStep: [
        ({"rampup_begin_step": -1}, r"rampup_begin_step=-1: .* integer >= 0"),
        ({"rampup_step": 0}, r"rampup_step=0: .* integer >= 1"),
        ({"rampup_step": 3}, r"rampup_step=3 with sparsity=None: .*several values"),
        ({"sparsity": 0.999}, r"sparsity=0\.999: give a list of numbers in \[0, 1\), for instance \[0\.999\]"),
        ({"sparsity": (0.5, 1.0)}, r"sparsity=\[0\.5, 1\.0\]: 1\.0 is outside \[0, 1\)"),
        ({"sparsity": (99.9,)}, r"99\.9 is outside \[0, 1\).* 0\.999 sends 0\.1 %"),
        ({"sparsity": (float("nan"),)}, r"give a list of numbers in \[0, 1\)"),
        ({"sparsity": (0.5, 0.999, 0.9)}, r"0\.9 follows 0\.999, so more would be sent after the warm-up than in it"),
        *(({"sparsity": "auto", "budget": budget}, f"budget={budget}") for budget in (1.5, float("nan"))),
        ({"sparsity": [0.999], "budget": 0.1}, "budget=0.1"),
    ],
    lowbw.EveryK: [
        ({"k_steps": 0}, "k_steps=0: give a number of optimizer steps, an integer >= 1"),
        ({"begin_step": 1.5}, "begin_step=1.5: .*between 0 and 1"),
        ({"begin_step": "first_lr_decay"}, r"begin_step='first_lr_decay': .*number of steps .*fraction of the run"),
        ({"rule": "best"}, "rule='best': choose one of fixed, fleet, adacomm, qsr"),
        ({"rule": "fleet", "k_steps": 32}, "max_k_steps=16 is below the first k of 32"),
        ({"max_k_steps": 4}, r"max_k_steps=4 with rule='fixed', .*or set rule to 'fleet' or 'adacomm' or 'qsr'"),
        ({"rule": "fleet", "qsr_alpha": 0.3}, "qsr_alpha=0.3 with rule='fleet', .*leave it out, or set rule to 'qsr'"),
        ({"rule": "qsr", "qsr_alpha": 0.0}, "qsr_alpha=0.0: give a number > 0"),
        ({"outer": "adam"}, "outer='adam': choose one of none, slowmo, nesterov"),
        ({"outer_lr": 0.7}, "outer_lr=0.7 without an outer optimizer"),
        ({"outer": "slowmo", "outer_momentum": 1.0}, r"outer_momentum=1.0: give a number in \[0, 1\)"),
        ({"outer": "nesterov", "outer_lr": "0.7"}, "outer_lr='0.7': give a number > 0"),
        ({"outer": "slowmo", "k_steps": 1}, "outer='slowmo' with k_steps=1, which is DDP"),
        ({"num_fragments": 0}, "num_fragments=0: give an integer >= 1, or 'auto'"),
        ({"num_fragments": 9}, "num_fragments=9 with k_steps=8: give at most one fragment per step"),
        ({"num_fragments": "auto", "rule": "fleet"}, "num_fragments='auto' requires a fixed period"),
        ({"delay_steps": 8}, "delay_steps=8 with k_steps=8: give an integer from 0 to k_steps - 1"),
        ({"mixing": 0.5}, "mixing=0.5 is for averages that are applied later: give delay_steps"),
        ({"mixing": 1.5, "delay_steps": 1}, r"mixing=1.5: give a number in \[0, 1\], or None"),
    ],
    lowbw.LocalSGD: [
        ({"compression": {"density": 1.0}}, "density=1.0"),
        ({"compression": {"chunk": 0}}, "chunk=0"),
        ({"compression": {"decay": 1.1}}, "decay=1.1"),
        ({"compression": {"value_dtype": "int3"}}, "int2"),
        ({"compression": "int2"}, r"value_dtype='int2': choose one of .*int4"),
        ({"compression": True}, "what=True: give one of LowRank"),
    ],
    lowbw.Method: [
        ({"what": FEW, "when": lowbw.EveryStep(sparsity=(0.9,))}, r"sparsity=\[0\.9\] with Quantized\(.*what=TopK\(\)"),
        ({"when": lowbw.EveryStep(rampup_begin_step=3)}, r"rampup_begin_step=3 with Whole\(\): every step is dense"),
        (
            {"what": lowbw.LowRank(), "when": lowbw.EveryK(delay_steps=2)},
            r"delay_steps=2 with LowRank\(.*cannot be hidden",
        ),
        ({"what": FEW, "when": lowbw.EveryK(k_steps=1)}, r"k_steps=1 with Quantized\(.*nothing would be compressed"),
        ({"what": lowbw.TopK(momentum_masking=True), "when": lowbw.EveryK()}, r"momentum_masking=True every k steps"),
        ({"where": lowbw.Where(topology=[[0], [1]], algorithm="leader")}, r"algorithm='leader' with topology=Topology"),
        ({"when": lowbw.EveryK(), "where": BFLOAT16}, r"'bfloat16' every k.*Quantized\(value_dtype='bfloat16'\)"),
        ({"what": FEW, "where": BFLOAT16}, r"inter_dtype='bfloat16' with Quantized\(.*from step 0: .*begin_step > 0"),
        ({"what": FEW, "when": lowbw.EveryStep(), "where": NODE_WISE}, "'leader' with .*'sharded'"),
        ({"when": "step"}, r"when='step': give one of EveryK, EveryStep, or a mapping with 'every'"),
        ({"what": {"payload": "top"}}, r"what: payload='top': choose one of low_rank, quantized, top_k, whole"),
        ({"where": {"nodes": 2}}, r"where has no nodes: choose among topology, algorithm, inter_dtype"),
        ({"when": lowbw.EveryK(k_steps=4), "where": lowbw.Where(topology=2, algorithm="flat")}, "'flat' every k steps"),
        ({"where": {"algorithm": "ring"}}, r"algorithm='ring': choose one of sharded, leader"),
        ({"where": {"topology": 2, "inter_dtype": "float16"}}, r"inter_dtype='float16': .*65504.*Take 'bfloat16'"),
    ],
    lowbw.DGC: [
        ({"exclude": "*.bias"}, r"exclude='\*\.bias': give a list of parameter name patterns"),
        ({"value_dtype": torch.float16}, r"value_dtype=torch\.float16: choose one of float32, bfloat16"),
        ({"momentum_masking": 1}, r"momentum_masking=1: give True, False or None"),
        ({"exchange": "reduce_scatter"}, r"DGC has no exchange: choose among rampup_begin_step"),
        ({"density": 0.1, "sparsity": [0.9]}, r"both say how much is sent; give one"),
    ],
    lowbw.DGCStrategy: [
        *(
            ({name: 7}, rf"DGCStrategy\({name}=7\).*Leave it out, or use strategy='ddp'")
            for name in ("ddp_comm_hook", "mixed_precision")
        ),
        ({"sparsity": [0.9, 0.99]}, "rampup_step=1 for the 2 values .* Give the number of optimizer steps"),
        ({"sparsity": [0.1, 0.01, 0.001], "rampup_step": 3}, "the fraction kept back, not the one sent"),
        ({"rampup_begin_step": 2, "pretrained": True}, r"^pretrained=True with .* is for sparsity='auto'"),
        ({"sparsity": "automatic"}, r"list of numbers in \[0, 1\), for instance \[0\.999\], or 'auto'"),
        ({"sparsity": "auto", "rampup_begin_step": 100}, "these are chosen, too"),
    ],
    lowbw.LocalSGDStrategy: [({name: True}, name) for name in ("broadcast_buffers", "static_graph")],
    lowbw.ShardedStrategy: [
        ({"method": lowbw.DGC(sparsity="auto")}, r"Give the numbers: DGC\(sparsity=\[0.99\]"),
        ({"method": lowbw.AdaptiveLocalSGD(rule="fleet")}, "Take 'fixed' or 'qsr'"),
        ({"method": lowbw.LocalSGD(4, num_fragments=2)}, "parts are balanced by bytes"),
        ({"method": DENSE, "topology": "flat"}, "a model is sharded over the ranks of a node. Give"),
    ],
    lowbw.AdaptiveLocalSGD: [({"k_steps": 2}, r"k_steps=2: the first k is init_k_steps here")],
    preset: [({"name": "dcg"}, r"method 'dcg': choose one of dgc, bfloat16, float16, int8, int4, ")],
    lowbw.SparsityWarmup: [
        ({"begin_epoch": 1, "steps": 5}, "give epochs or steps, not both"),
        ({"epochs": -1}, "epochs=-1"),
        ({"epochs": 3, "sparsity": [0.9]}, r"epochs=3, sparsity=\[0\.9\]\): a single value is not spread"),
    ],
    lowbw.ElasticStrategy: [
        ({"method": lowbw.DGC()}, "If a step communicated, one missing or slow group would stop all groups"),
        ({"method": lowbw.LocalSGD(k_steps=4)}, r"Take LocalSGD\(k_steps=8, begin_step=0\), without rule"),
        ({"method": lowbw.LocalSGD(4, 0, num_fragments=2)}, "without rule, mixing, num_fragments and topology"),
        ({"method": DILOCO, "k_steps": 20, "round_s": 60}, "k_steps=20 and round_s=60: .* Give one"),
        ({"method": DILOCO, "timeout_s": 0}, "timeout_s=0: give a number above 0"),
        ({"method": DILOCO, "min_replicas": 1.5}, "min_replicas=1.5: give a number of groups"),
        ({"method": DILOCO, "topology": 2}, "each group is a node. .*, num_fragments and topology"),
    ],
    show: [({"config": UNKNOWN_OPTIMIZER}, "optimizer='admw': choose one of sgd, adam, adamw")],
    make_cluster: [({"numbers": {**NUMBERS, name: value}}, name) for name, value in OUT_OF_RANGE.items()],
}


ROWS = [(call, *row) for call, of_call in REFUSED.items() for row in of_call]


@pytest.mark.parametrize(("call", "arguments", "words"), ROWS)
def test_what_is_refused_and_why(call: Callable[..., Any], arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(lowbw.ConfigurationError, match=words):
        call(**arguments)


# Fits on two ranks ----------------------------------------------------------------------------------------------------

STEPS, NAMES = 4, ("dgc", "int8", "local_sgd")
rmsprop = partial(torch.optim.RMSprop, lr=1e-3)


class Keeps(Tiny):
    """Makes its optimizer once, and keeps it for another fit."""

    kept: Any = None

    def configure_optimizers(self) -> Any:
        self.kept = self.kept or super().configure_optimizers()
        return self.kept


@pytest.mark.parametrize("names", [("int8", "ddp", "dense", "post-local"), ("local_sgd", "local_sgd")])
@on_ranks(2)
def test_a_kept_state_that_is_equal_on_all_ranks_or_stays_each_rank_s_is_left_alone(names: tuple[str, ...]) -> None:
    model = Keeps(adamw)
    for name in names:
        train(name, model, STEPS)
    same(weights_of(model))


def replace_optimizers(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    trainer.strategy.optimizers = [torch.optim.Adam(trained(module), lr=1e-2)]


def replaced(name: str, hook: str = "on_train_batch_end", **options: Any) -> Callable[[], Any]:
    return lambda: train(name, Tiny(), STEPS, callbacks=[At(2, replace_optimizers, hook)], max_epochs=2, **options)


def kept(first: str, second: str, optimizer: Any = adamw, **options: Any) -> Callable[[], Any]:
    """Return two fits of a module that makes its optimizer once."""

    def fits() -> None:
        model = Keeps(optimizer)
        train(make(first, **options), model, STEPS)
        train(make(second, **options), model, STEPS)

    return fits


UNEQUAL = r"states of the optimizers at the start of the fit .* return a new optimizer from configure_optimizers"
IN_PLACE = r"have been replaced in mid-fit: Adam in place of SGD\. .* Change their param groups instead"


class Ema(pl.Callback):
    """A moving average of another package."""


AVERAGED: dict[str, dict[str, Any]] = {  # options of a Trainer that do not go with averages of weights
    "Give a number of batches": {"val_check_interval": "00:00:00:05", "check_val_every_n_epoch": None},
    "sync_batchnorm=True": {"sync_batchnorm": True},
    "StochasticWeightAveraging with a": {"callbacks": [pl.callbacks.StochasticWeightAveraging(0.01)]},
    "Ema with a method that averages the weights after some steps: in between": {"callbacks": [Ema()]},
    "would prune different weights": {"callbacks": [pl.callbacks.ModelPruning("l1_unstructured")]},
}
if hasattr(pl.callbacks, "WeightAveraging"):  # since Lightning 2.6
    AVERAGED["WeightAveraging with a method that averages"] = {"callbacks": [pl.callbacks.WeightAveraging()]}


def averaged(options: dict[str, Any]) -> Callable[[], Any]:
    return lambda: train(lowbw.LocalSGDStrategy(), Tiny(), 2 * STEPS, 2, **options)


FITS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    **{f"{name}, optimizer replaced": (replaced(name), lowbw.ConfigurationError, IN_PLACE) for name in NAMES},
    "optimizer replaced in a step": (replaced("dgc", "on_before_zero_grad"), lowbw.ConfigurationError, IN_PLACE),
    "sparse, then dense": (kept("dgc", "dense"), lowbw.DisagreementError, UNEQUAL),
    "sparse, then sparse": (kept("dgc, dense at first", "dgc", sgd), lowbw.DisagreementError, UNEQUAL),
    "local, then int8": (kept("local_sgd", "int8", rmsprop), lowbw.DisagreementError, UNEQUAL),
    "local, then synchronous at first": (kept("diloco", "post-local"), lowbw.DisagreementError, UNEQUAL),
    **{
        f"averages, {words}": (averaged(options), lowbw.ConfigurationError, words)
        for words, options in AVERAGED.items()
    },
    "shards": (kept("dgc, sharded", "dgc, sharded", topology=1), lowbw.DisagreementError, UNEQUAL),
}


@pytest.mark.fault
@pytest.mark.parametrize("case", FITS)
@on_ranks(2)
def test_fits_that_are_refused_on_all_ranks(case: str) -> None:
    fit, error, words = FITS[case]
    message = same(refusal(fit=fit, error=error))
    assert re.search(words, message), message
