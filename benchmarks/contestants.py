"""What a user with a slow network would pick: this package's strategies, torch's communication hooks, and the limit.

Stock Lightning registers communication hooks on CUDA only. `HookStrategy` registers them everywhere, which is all it
does; so the peers run here as they would on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

import lightning_lowbw as lowbw
from lightning_lowbw import DGCStrategy, HierarchicalStrategy, LocalSGDStrategy

ONE_BUCKET_MB = 4096
LOCAL_STEPS = 8
WARMUP_STEPS = 2  # PowerSGD's and local SGD's least; DDP rebuilds its buckets in the second

# All replicas start from one seed, so DDP's broadcast of the model is left out: at 100 Mb/s it takes longer than the
# steps that are measured. Buffers are left out for all alike; DGC does not broadcast them while it is sparse.
COMMON: dict[str, Any] = {"init_sync": False, "broadcast_buffers": False, "gradient_as_bucket_view": True}


class HookStrategy(DDPStrategy):
    """DDP with a communication hook, on CPU too."""

    def _register_ddp_hooks(self) -> None:
        assert isinstance(self.model, DistributedDataParallel)
        self.model.register_comm_hook(self._ddp_comm_state, self._ddp_comm_hook)


def power_sgd(rank: int, start_step: int = WARMUP_STEPS) -> DDPStrategy:
    """Make PowerSGD in one bucket: with several, its two all-reduces per bucket race on gloo."""
    state = powerSGD_hook.PowerSGDState(
        process_group=None, matrix_approximation_rank=rank, start_powerSGD_iter=start_step, min_compression_rate=1
    )
    hook = powerSGD_hook.powerSGD_hook
    return HookStrategy(ddp_comm_state=state, ddp_comm_hook=hook, bucket_cap_mb=ONE_BUCKET_MB, **COMMON)


def post_local_sgd() -> DDPStrategy:
    """Make torch's post-local SGD: gradients stay, parameters are averaged every few steps."""
    state = post_localSGD_hook.PostLocalSGDState(
        process_group=None, subgroup=None, start_localSGD_iter=WARMUP_STEPS, post_local_gradient_allreduce=False
    )
    hook = post_localSGD_hook.post_localSGD_hook
    return HookStrategy(ddp_comm_state=state, ddp_comm_hook=hook, model_averaging_period=LOCAL_STEPS, **COMMON)


@dataclass(frozen=True)
class Contestant:
    """A method under its name in the tables.

    Attributes:
        make: returns the strategy; to be called once per fit.
        period: steps after which its communication repeats; a measurement takes a multiple.
        dense_share: its bytes as a fraction of DDP's, roughly: decides how many steps can be waited for.
        num_untimed_steps: before the window, by which time a step is like all later ones: DDP has rebuilt its buckets
            (2), a warm-up is over, the caches are warm.
        is_compiled: whether numba may be used where it is installed.
        is_alone: whether each rank trains a model of its own, as one process does that has never heard of others.
    """

    name: str
    make: Callable[[], Strategy]
    period: int = 1
    dense_share: float = 1.0
    num_untimed_steps: int = WARMUP_STEPS + 3
    is_compiled: bool = True
    is_alone: bool = False


ALONE = Contestant("alone", lambda: SingleDeviceStrategy(torch.device("cpu")), 1, 0.0, is_alone=True)
NO_COMMUNICATION = Contestant("no communication", lambda: HookStrategy(ddp_comm_hook=noop_hook, **COMMON), 1, 0.0)
DDP = Contestant("ddp", lambda: DDPStrategy(**COMMON), num_untimed_steps=2)
FP16 = Contestant(
    "ddp + fp16", lambda: HookStrategy(ddp_comm_hook=default_hooks.fp16_compress_hook, **COMMON), 1, 0.5, 2
)
POWER_SGD = [Contestant(f"PowerSGD rank {rank}", lambda rank=rank: power_sgd(rank), 1, 0.01) for rank in (1, 2, 4)]
OUR_POWER_SGD = [
    Contestant(
        f"powersgd / {rank}",
        lambda rank=rank: lowbw.Strategy(lowbw.PowerSGD(rank, start_step=WARMUP_STEPS), **COMMON),
        1,
        0.01,
    )
    for rank in (1, 2, 4)
]
POST_LOCAL_SGD = Contestant(f"torch local SGD / {LOCAL_STEPS}", post_local_sgd, LOCAL_STEPS, 1 / LOCAL_STEPS)
DGC = Contestant("dgc", lambda: DGCStrategy(sparsity=[0.999], **COMMON), 1, 0.01)
DGC_TORCH = replace(DGC, name="dgc, plain torch", is_compiled=False)
NARROW = [
    Contestant(dtype, lambda dtype=dtype: lowbw.Strategy(lowbw.QuantizedGradients(dtype), **COMMON), 1, share)
    for dtype, share in (("int8", 1 / 4), ("int4", 1 / 8))
]
INT8_TORCH = replace(NARROW[0], name="int8, plain torch", is_compiled=False)
LOCAL_SGD = Contestant(
    f"local_sgd / {LOCAL_STEPS}", lambda: LocalSGDStrategy(LOCAL_STEPS, **COMMON), LOCAL_STEPS, 1 / LOCAL_STEPS, 2
)
HIDDEN_LOCAL_SGD = Contestant(
    f"local_sgd / {LOCAL_STEPS}, hidden",
    lambda: LocalSGDStrategy(LOCAL_STEPS, delay_steps=LOCAL_STEPS - 1, **COMMON),
    LOCAL_STEPS,
    1 / LOCAL_STEPS,
    2 * LOCAL_STEPS,  # from the step in which an average lands (averages begin after steps 9, 17, 25) to another one
)

COMPRESSING = [*POWER_SGD, *OUR_POWER_SGD, DGC_TORCH, DGC]
ALL = [
    ALONE,
    NO_COMMUNICATION,
    DDP,
    FP16,
    *NARROW,
    INT8_TORCH,
    *COMPRESSING,
    POST_LOCAL_SGD,
    LOCAL_SGD,
    HIDDEN_LOCAL_SGD,
]
SHORT = [ALONE, NO_COMMUNICATION, DDP, FP16, *NARROW, *POWER_SGD, *OUR_POWER_SGD, DGC_TORCH, DGC]
SHARDED = Contestant("hierarchical, sharded", lambda: HierarchicalStrategy(**COMMON), num_untimed_steps=2)
LEADER = Contestant("hierarchical, leader", lambda: HierarchicalStrategy(algorithm="leader", **COMMON), 1, 1.0, 2)
TWO_LEVEL_DGC = Contestant("dgc, two levels", lambda: DGCStrategy(sparsity=[0.999], topology="auto", **COMMON), 1, 0.01)
TWO_LEVEL_LOCAL_SGD = Contestant(
    f"local_sgd / {LOCAL_STEPS}, two levels",
    lambda: LocalSGDStrategy(LOCAL_STEPS, topology="auto", **COMMON),
    LOCAL_STEPS,
    1 / LOCAL_STEPS,
    2,
)
# For nodes of several ranks.
TWO_LEVEL = [ALONE, NO_COMMUNICATION, DDP, LEADER, SHARDED, DGC, TWO_LEVEL_DGC, LOCAL_SGD, TWO_LEVEL_LOCAL_SGD]
# Where computation is emulated, so that few cores carry many ranks; flat, and for nodes of several ranks.
EMULATED = [NO_COMMUNICATION, DDP, FP16, POWER_SGD[0], NARROW[0], DGC]
EMULATED_TWO_LEVEL = [NO_COMMUNICATION, DDP, FP16, SHARDED, TWO_LEVEL_DGC]
BY_NAME = {contestant.name: contestant for contestant in (*ALL, *TWO_LEVEL)}
