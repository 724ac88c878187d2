"""What ranks load sooner or later, loaded once in the server that they are forked from: 1 s for each rank otherwise.

Only imports, and nothing that starts a thread: threads do not survive a fork.
"""

from __future__ import annotations

import contextlib
import gc
import importlib

for name in (
    "torch",
    "torch._dynamo",  # by the first step of an optimizer
    "torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook",  # by Lightning's DDPStrategy
    "torch.profiler._cupti_monitor",
    "lightning.pytorch",
    "torchmetrics",
    "lightning_lowbw",
):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)

with contextlib.suppress(ImportError):  # optional
    import numba

    numba.njit("float32(float32)")(lambda x: x)  # the first function makes numba load all that it knows

gc.collect()
gc.freeze()  # and is not looked through again, after each function that a rank runs
