"""Every method that makes a promise, a row each: a new one joins here, and the formula of a new payload `volumes`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import lightning_lowbw as lowbw

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01)
NESTEROV = partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1)
ADAMW = partial(torch.optim.AdamW, lr=0.01, eps=1e-3)
RMSPROP = partial(torch.optim.RMSprop, lr=0.01, eps=1e-3)
SMALL: dict[str, Any] = {"min_numel": 1}


@dataclass(frozen=True)
class Row:
    """A method, with an optimizer, on a number of ranks."""

    method: lowbw.Method
    optimizer: Callable[..., torch.optim.Optimizer] = SGD
    num_ranks: int = 2


NODES = ((0, 2), (1, 3))
TWO_LEVELS: dict[str, Any] = {"topology": NODES}
INT2 = {"min_numel": 100, "value_dtype": "int2"}
STAIRS: dict[str, Any] = {"rampup_begin_step": 2, "rampup_step": 4, "sparsity": (0.5, 0.9), **SMALL}
ROWS = {
    "whole": Row(lowbw.Method(when=lowbw.EveryStep(), what=lowbw.Whole())),
    "hierarchical": Row(lowbw.Hierarchical(2), ADAMW, 4),
    "dgc": Row(lowbw.DGC(**STAIRS)),
    "dgc nesterov": Row(lowbw.DGC(**STAIRS, value_dtype="float32", momentum_masking=True), NESTEROV),
    "dgc adamw": Row(lowbw.DGC(**STAIRS, value_dtype="int8"), ADAMW),
    "dgc by error feedback": Row(lowbw.DGC(**STAIRS), RMSPROP),
    "dgc adamw on two levels": Row(lowbw.DGC(**STAIRS, **TWO_LEVELS), ADAMW, 4),
    "chunks every step": Row(lowbw.DGC(density=0.1, chunk=64, decay=0.9, mean_over="senders", **SMALL)),
    "int8 by rmsprop on four ranks": Row(lowbw.QuantizedGradients(), RMSPROP, 4),
    "int4 after two dense steps": Row(lowbw.QuantizedGradients("int4", rampup_begin_step=2), ADAMW),
    "int4 on two levels": Row(lowbw.QuantizedGradients("int4", **TWO_LEVELS), ADAMW, 4),
    "bfloat16 on two levels": Row(lowbw.Method(what=lowbw.Quantized(value_dtype="bfloat16"), where=NODES), SGD, 4),
    "local_sgd": Row(lowbw.LocalSGD(3)),
    "adaptive_local_sgd": Row(lowbw.AdaptiveLocalSGD(4, begin_step=0, rule="adacomm"), ADAMW, 3),
    "local_sgd on two levels": Row(lowbw.LocalSGD(3, **TWO_LEVELS), ADAMW, 4),
    "diloco": Row(lowbw.LocalSGD(3, 0, outer="nesterov"), ADAMW),
    "slowmo, hidden": Row(lowbw.LocalSGD(4, 0, outer="slowmo", delay_steps=3)),
    "streaming": Row(lowbw.LocalSGD(4, 0, outer="nesterov", num_fragments=2, delay_steps=3, mixing=0.5)),
    "int8 every k": Row(lowbw.LocalSGD(3, compression="int8"), SGD, 3),
    "int8 every k, hidden": Row(lowbw.LocalSGD(4, delay_steps=3, compression="int8"), SGD, 3),
    "int4 every k, hidden, in fragments on two levels": Row(
        lowbw.LocalSGD(4, 0, num_fragments=2, delay_steps=3, compression="int4", **TWO_LEVELS), ADAMW, 4
    ),
    "sparse_loco": Row(lowbw.LocalSGD(3, 0, compression={"min_numel": 100, "chunk": 128}), ADAMW, 3),
    "sparse_loco, hidden, on two levels": Row(
        lowbw.LocalSGD(4, 0, delay_steps=2, compression=INT2, **TWO_LEVELS), ADAMW, 4
    ),
    "powersgd on two levels": Row(lowbw.PowerSGD(1, start_step=2, **TWO_LEVELS), ADAMW, 4),
    "powersgd every k on two levels": Row(
        lowbw.Method(when=lowbw.EveryK(k_steps=3), what=lowbw.LowRank(), where=NODES), SGD, 4
    ),
}
