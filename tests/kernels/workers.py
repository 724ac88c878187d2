"""Workers whose kernels are tried, of each optimizer and payload; imported without Lightning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from lightning_lowbw.comm.echoes import echo
from lightning_lowbw.method import Method
from lightning_lowbw.payloads.top_k import TopK
from lightning_lowbw.presets import DGC, LocalSGD, QuantizedGradients
from lightning_lowbw.schedules.every_step import EveryStep
from lightning_lowbw.sync.synchronizer import Synchronizer

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "momentum": lambda p: SGD([{"params": p[:1]}, {"params": p[1:], "weight_decay": 1e-4}], 0.1, 0.9, nesterov=True),
    "AdamW": lambda p: AdamW(p, lr=1e-3),
    "Adam": lambda p: Adam(p, lr=1e-3, weight_decay=0.01, amsgrad=True),
    "RMSprop": lambda p: RMSprop(p, lr=1e-3),
}
METHODS: dict[str, Any] = {
    "dgc": DGC(),
    "int2": DGC(value_dtype="int2"),
    "chunks": Method(when=EveryStep(sparsity=(0.75,)), what=TopK(chunk=256)),
    **{value_dtype: QuantizedGradients(value_dtype) for value_dtype in ("int8", "int4", "bfloat16", "float16")},
    "averages": LocalSGD(2, 0, compression=TopK(density=0.01, chunk=4096)),
    "averages in int4": LocalSGD(2, 0, delay_steps=1, compression="int4"),
}


def make_worker(method: Any = METHODS["dgc"], optimizer: str = "momentum", device: str = "cpu") -> Synchronizer:
    dtypes = torch.float32, torch.bfloat16, torch.float16
    parameters = [Parameter(torch.zeros(3, dtype=dtype, device=device)) for dtype in dtypes]
    named = [(str(number), each) for number, each in enumerate(parameters)]
    worker: Synchronizer = method.make_synchronizer(OPTIMIZERS[optimizer](parameters), named, echo(2))
    return worker
