"""DDP's communication hook: how a bucket is reduced, on gloo as well as on NCCL.

In a dense step the bucket is all-reduced during backward; in a sparse or local step it is all-reduced inside the node,
or not at all. The hook is registered before the first step in which DDP is to reduce otherwise than over all ranks,
because a hook in Python runs twice for each bucket (when it is ready, and when it has arrived) and cannot be removed.
In a step without a reduction DDP does not call it.
"""
# No `from __future__ import annotations` here: DDP checks the hook's annotations, which must be real objects.

import time
from collections.abc import Collection
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.futures import Future
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from lightning_lowbw.comm.peers import Peers
from lightning_lowbw.kernels.tensors import device_of
from lightning_lowbw.method import Method
from lightning_lowbw.sync.local import LocalSync
from lightning_lowbw.sync.step_plan import StepPlan
from lightning_lowbw.sync.synchronizer import Synchronizer

Ranks = Literal["all", "node"]


class CommunicationHook:
    """Reduces DDP's buckets in steps that DDP does not reduce by itself; made for one fit.

    Stock Lightning registers hooks only on CUDA, and does not warn.

    For a `Fit` it is the `View` of the model.

    Args:
        ddp: the model whose buckets are reduced.
        peers: the ranks that reduce its buckets.
        method: the method of the coming steps.
        is_manual: whether the user's code calls backward.

    Attributes:
        reduction: the ranks over which the coming step reduces; None: no reduction.
        is_timing: whether steps are timed; the host then waits for a CUDA device after backward.
    """

    def __init__(self, ddp: DistributedDataParallel, peers: Peers, method: Method, *, is_manual: bool) -> None:
        self._ddp: Any = ddp  # until the fit ends
        self._peers, self._is_manual = peers, is_manual
        self.reduction: Ranks | None = "all"
        self.is_timing = False
        self._has_stepped = True  # since the last batch; the next gradients are not accumulated
        self._is_registered = False  # whether DDP calls `reduce`
        self._has_reduced = False  # whether DDP has reduced a backward pass: the first one teaches it a static graph
        # DDP ignores parameters that are frozen now and unfrozen later; the exchange reduces their gradients.
        self._trained = frozenset(parameter for parameter in ddp.parameters() if parameter.requires_grad)
        self._nbytes = sum(parameter.nbytes for parameter in self._trained)
        self._means: set[Tensor] = set()  # with a manual backward: parameters whose gradients are means
        # Lightning prepares DDP in `manual_backward`; a plain `loss.backward()` bypasses that.
        forgetting = self._trained if is_manual else ()
        self._handles = [each.register_post_accumulate_grad_hook(self._means.discard) for each in forgetting]
        self._last_launch_s: float | None = None  # when the last bucket of a backward pass was sent
        # Without `reduce`: when the last gradient was ready. First all parameters have hooks, then only the last one.
        self._clocks = {each: each.register_post_accumulate_grad_hook(self._note_gradient) for each in self._trained}
        self._last: Parameter | None = None
        # An own `backward` may write gradients by hand: then all parameters keep their hooks, which note each gradient.
        self._has_own_backward, self._noted = is_overridden("backward", ddp.module), list[Tensor]()
        self.use(method)
        self._intercept_if_needed()

    def use(self, method: Method) -> None:
        """Let dense gradients be summed as a method does it; up to a choice that is still to come a step is DDP's."""
        peers, is_auto = self._peers, method.when.is_auto
        peers.inter_dtype = method.where.narrow_dtype
        peers.is_summed_flat = is_auto or method.where.algorithm == "flat"
        peers.ledger.has_levels = peers.is_two_level and not (
            peers.is_summed_flat and (is_auto or method.what.sends_all)
        )

    def release(self) -> None:
        """Leave the parameters as they were, and the model to be collected: DDP's reducer holds this object."""
        for handle in (*self._handles, *self._clocks.values()):
            handle.remove()
        self._ddp = None

    def _intercept_if_needed(self) -> None:
        """Let DDP call `reduce` from now on, if DDP cannot reduce the coming step by itself."""
        reduces_otherwise = self._ddp.require_backward_grad_sync and self.reduction != "all"
        peers = self._peers
        is_one_all_reduce = peers.inter_dtype is None and (peers.is_summed_flat or not peers.is_two_level)
        is_needed = self._is_manual or not is_one_all_reduce or reduces_otherwise
        if is_needed and not self._is_registered:
            self._is_registered = True
            while self._clocks and not self._has_own_backward:
                self._clocks.popitem()[1].remove()
            self._ddp.register_comm_hook(state=None, hook=self.reduce)

    def begin_batch(self, workers: Collection[Synchronizer], *, is_timing: bool) -> None:
        """Prepare for a batch; `is_timing`: see the attribute."""
        ddp, plans, self.is_timing = self._ddp, [worker.plan for worker in workers], is_timing
        self._prepare(plans)  # Lightning turns it on after each training_step of manual optimization
        is_local = any(plan.is_local for plan in plans)  # then buffers are averaged with the weights
        if not (self._is_manual or is_local or ddp.require_backward_grad_sync):
            # DDP then also leaves out its broadcast of buffers in the next forward pass, as while accumulating. In
            # manual optimization Lightning's DDP broadcasts none.
            ddp.require_forward_param_sync = self._has_stepped
        self._has_stepped = False

    def end_step(self, worker: Synchronizer, workers: Collection[Synchronizer]) -> None:
        """End a step; in manual optimization the next backward pass may be of the same batch."""
        self._has_stepped = True
        self._prepare([worker.plan for worker in workers])

    def _prepare(self, plans: Collection[StepPlan]) -> None:
        """If DDP reduces nothing in the coming step, let it fill no buckets and search for no unused parameters."""
        ddp = self._ddp
        if ddp.require_backward_grad_sync and any(plan.is_local for plan in plans):
            # DDP would rebuild its buckets, with a broadcast, in the next forward pass; here all ranks take part.
            ddp.reducer._rebuild_buckets()
        # Optimizers in different phases, as when one steps less often, reduce their own gradients before they step.
        reductions = {self._reduction_of(plan) for plan in plans} or {"all"}
        self.reduction = reductions.pop() if len(reductions) == 1 else None
        is_learning = bool(ddp.static_graph) and not self._has_reduced
        ddp.require_backward_grad_sync = is_learning or self.reduction is not None
        self._intercept_if_needed()

    def _reduction_of(self, plan: StepPlan) -> Ranks | None:
        """Return the ranks over which DDP may reduce the gradients of a coming step.

        With `find_unused_parameters` DDP communicates with all ranks, so that the worker takes the mean of the node
        instead.
        """
        if plan.reduce == "node":
            return None if self._ddp.find_unused_parameters else "node"
        return "all" if plan.reduce == "all" else None

    def _reduced(self, worker: Synchronizer, plan: StepPlan) -> frozenset[Parameter]:
        """Return the parameters whose gradients are means already: not after a plain `loss.backward()`.

        DDP reduces no gradients that are written by hand, for which no bucket was sent, and no second backward pass.
        """
        is_reduced = self._reduction_of(plan) is not None
        if is_reduced and self._is_manual:
            is_reduced = self._means.issuperset(self._trained.intersection(worker.params))
        elif is_reduced:
            knows_all = self._is_registered or self._last is None or self._has_own_backward
            is_by_hand = knows_all and self._last_launch_s is None
            is_reduced = not is_by_hand and len(self._noted) == len(set(self._noted))
        return self._trained if is_reduced else frozenset()

    def take(self, worker: Synchronizer) -> frozenset[Parameter]:
        """Return the parameters whose gradients are means already; note how long the optimizer has waited for them."""
        plan = worker.plan
        reduced = self._reduced(worker, plan)
        self._noted.clear()
        self._has_reduced |= self._ddp.require_backward_grad_sync
        self._means.difference_update(worker.params if self._means else ())
        if not plan.is_local:
            self._peers.ledger.exposed_s += self._wait_s()
            if reduced and not self._is_registered:
                self._peers.count_all_reduce(self._nbytes)
        return reduced

    def has_mean(self, worker: Synchronizer) -> bool:
        """Return whether the gradients of the coming step are means over all ranks already."""
        plan = worker.plan
        return plan.reduce == "all" and bool(self._reduced(worker, plan))

    # A worker has the user's own parameters, whole, and nothing else is to do.

    def give(self, worker: Synchronizer) -> None: ...
    def sum_in_node_(self, number: Tensor) -> None: ...
    def end_batch(self) -> None: ...
    def look(self) -> None: ...
    def share_in_node(self, replicas: Collection[LocalSync]) -> None: ...

    # A bucket ---------------------------------------------------------------------------------------------------

    def reduce(self, state: object, bucket: dist.GradBucket) -> Future[Tensor]:
        """Return the future of a bucket: all-reduced as DDP does, all-reduced inside the node, or unchanged.

        Collective: all ranks (inside the node: the ranks of the node), in the same order of buckets; does not block.
        """
        buffer, peers = bucket.buffer(), self._peers
        if self.reduction is None:
            future = device_of(buffer.device).new_future()  # done after the queued work of the current stream
            future.set_result(buffer)
            return future
        if self._handles:
            self._means.update(bucket.parameters())
        # A product, as in DDP's reducer: a division gives other bits unless N is a power of two.
        buffer.mul_(1.0 / (peers.node.num_ranks if self.reduction == "node" else peers.num_ranks))
        self._waits_for(buffer.device)
        self._last_launch_s = time.perf_counter()
        if self.reduction == "node":
            return peers.begin_all_reduce_in_node_(buffer).get_future()
        peers.count_dense(buffer.nbytes)
        return peers.begin_all_reduce_(buffer, dtype=peers.inter_dtype).get_future()

    def _note_gradient(self, parameter: Tensor) -> None:
        """Note the time at which a gradient is ready. After the first steps only the last gradient is timed."""
        self._last = cast(Parameter, parameter)
        if self._has_own_backward and self._ddp.require_backward_grad_sync:
            self._noted.append(parameter)
        if self.reduction is None:
            return
        if len(self._clocks) == 1:
            self._waits_for(parameter.device)
        self._last_launch_s = time.perf_counter()

    def _wait_s(self) -> float:
        """Return how long the training has waited since the last bucket was sent; 0 if that is not known.

        On a CUDA device it is known only while steps are timed: otherwise the host does not wait.
        """
        last, self._last_launch_s = self._last_launch_s, None
        if self._last is not None and len(self._clocks) > 1 and not self._has_own_backward:  # the first time
            for parameter in self._clocks.keys() - {self._last}:
                self._clocks.pop(parameter).remove()
        if last is None or not self._waits_for(self._ddp.device):
            return 0.0
        return time.perf_counter() - last

    def _waits_for(self, device: torch.device) -> bool:
        """Wait for queued work, while steps are timed; return whether the host's clock is valid for the device now."""
        if self.is_timing:
            device_of(device).synchronize()
        return self.is_timing or device.type == "cpu"
