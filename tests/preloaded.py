"""What ranks load sooner or later, loaded once in the server that they are forked from: 1 s for each rank otherwise.

Nothing that starts a thread: threads do not survive a fork.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.metadata
import os

from _pytest.assertion import install_importhook
from _pytest.config import get_config

from tests.ranks import what_is_loaded

# The server must not use CUDA before it forks: torch asks NVML then whether there is a device.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
# Each Trainer looks for callbacks of other packages, through all that is installed: a seventh of a short fit.
importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)

for name in (
    "torch",
    "torch._dynamo",  # by the first step of an optimizer
    "torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook",  # by Lightning's DDPStrategy
    "torch.profiler._cupti_monitor",
    "pytest",  # by the test modules
    "lightning.pytorch",
    "torchmetrics",
    "omegaconf",  # by Lightning, where it loads a checkpoint
    "sklearn.datasets",  # the digits
    "torch.distributed._tensor",  # by shards, as the next one
    "torch.distributed.checkpoint.state_dict",
    "lightning_lowbw",
):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)

with contextlib.suppress(ImportError):  # optional
    import fcntl
    import tempfile

    import torch

    from lightning_lowbw.comm.echoes import echo
    from lightning_lowbw.presets import DGC, QuantizedGradients
    from lightning_lowbw.sync.kernels import what_fails

    torch.set_num_threads(1)
    # Compiled in some ten seconds, loaded in a tenth of one; of processes that begin together one compiles.
    with open(f"{tempfile.gettempdir()}/lightning_lowbw-{os.getuid()}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        parameter = torch.nn.Parameter(torch.zeros(1))
        for method in (DGC(), QuantizedGradients("int8")):
            worker = method.make_synchronizer(torch.optim.SGD([parameter]), [("", parameter)], echo(2))
            what_fails([worker], [method.what], torch.device("cpu"))

if os.environ.get("TRITON_INTERPRET") == "1":  # tests/kernels/kernel_steps.py
    from tests.kernels import interpreter

    interpreter.speed_up()

# What a failed assert in a rank has compared, as in the process of the tests.
install_importhook(get_config())

what_is_loaded()
gc.set_threshold(20_000)  # objects: what a fit makes for a while is no garbage, and each call of `run_ranks` collects
gc.collect()
gc.freeze()  # and is not looked through again, after each function that a rank runs
