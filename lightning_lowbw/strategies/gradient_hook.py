"""DDP's communication hook: how a bucket is reduced, on gloo as well as on NCCL.

In a dense step the bucket is all-reduced during backward; in a sparse or local one inside the node, or not at all.
"""
# No `from __future__ import annotations` here: DDP checks the hook's annotations, which must be real objects.

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future, collect_all
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from lightning_lowbw.engine.worker import Worker
from lightning_lowbw.where.side_queue import new_future, side_stream

if TYPE_CHECKING:
    from lightning_lowbw.strategies.strategy import Strategy

Reduction = Callable[[Tensor], Future[Tensor]]


class GradientHook:
    """Reduces DDP's buckets, each parameter as the worker of its optimizer requires."""

    def __init__(self, strategy: "Strategy") -> None:
        self._strategy = strategy
        self._last_launch_s: float | None = None  # when the last bucket of a backward pass was sent
        self._handles: list[RemovableHandle] = []
        self._means: set[Tensor] = set()  # those whose gradients have been reduced, for the next step

    def register(self, model: DistributedDataParallel, *, is_manual: bool) -> None:
        """Let DDP call `reduce` with each bucket. Stock Lightning registers hooks on CUDA only, silently.

        Args:
            is_manual: whether the user's code calls backward.
        """
        model.register_comm_hook(state=None, hook=self.reduce)
        self._means.clear()
        # A plain `loss.backward()` passes by DDP, which Lightning prepares in `manual_backward`.
        for parameter in model.parameters() if is_manual else ():
            if parameter.requires_grad:
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._means.discard))

    def release(self) -> None:
        """Leave the parameters as they were before `register`."""
        while self._handles:
            self._handles.pop().remove()

    def reduced_of(self, parameters: Iterable[Parameter]) -> set[Tensor]:
        """Return those whose gradients DDP has reduced since `forget`, and since they were last accumulated."""
        return self._means.intersection(parameters)

    def forget(self, parameters: Iterable[Parameter]) -> None:
        """Note that an optimizer has stepped with the gradients."""
        self._means.difference_update(parameters)

    def reduce(self, state: object, bucket: dist.GradBucket) -> Future[Tensor]:
        """Return the bucket's future: all-reduced as DDP does, all-reduced inside the node, or as it is.

        Collective: all ranks (inside the node: those of the node), in the same order of buckets; waits for none.
        """
        workers = self._strategy.workers
        reductions = {self._reduction(worker) for worker in workers} or {self._all_reduce}
        self._means.update(bucket.parameters())
        if len(reductions) > 1:
            return self._reduce_by_parameter(bucket)
        (reduction,) = reductions
        return completed(bucket.buffer()) if reduction is None else reduction(bucket.buffer())

    def count_wait(self) -> None:
        """Add to the ledger how long the training has waited since the last bucket was sent.

        On a CUDA device the host does not wait: only while steps are timed.
        """
        if self._last_launch_s is not None and self._waits_for_device():
            self._strategy.ledger.exposed_s += time.perf_counter() - self._last_launch_s
        self._last_launch_s = None

    def _note_launch(self) -> None:
        """Note when a bucket was sent."""
        self._waits_for_device()
        self._last_launch_s = time.perf_counter()

    def _waits_for_device(self) -> bool:
        """Wait for queued work, while steps are timed; return whether the host's clock is valid for the device now."""
        device = self._strategy.root_device
        if device.type == "cuda" and self._strategy.auto.is_timing:
            torch.cuda.current_stream(device).synchronize()
            return True
        return device.type == "cpu"

    def _reduction(self, worker: Worker) -> Reduction | None:
        """Return how the gradients of a worker are reduced in the coming step; None: not at all."""
        if worker.reduces_in_backward:
            return self._all_reduce
        return self._all_reduce_in_node if self._strategy.regime.ddp_reduces(worker) else None

    def _all_reduce(self, buffer: Tensor) -> Future[Tensor]:
        peers = self._strategy.groups.gradients
        peers.count_dense(buffer.nbytes)
        buffer.mul_(1.0 / peers.num_ranks)  # as the reducer does; a division has other bits unless N is a power of two
        self._note_launch()
        return peers.begin_all_reduce_(buffer, exact=False).get_future()

    def _all_reduce_in_node(self, buffer: Tensor) -> Future[Tensor]:
        peers = self._strategy.groups.gradients
        buffer.mul_(1.0 / peers.node.num_ranks)
        self._note_launch()
        return peers.begin_all_reduce_in_node_(buffer).get_future()

    def _reduce_by_parameter(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Reduce each parameter as the worker of its optimizer does: optimizers may be in different phases."""
        by_parameter = {
            parameter: self._reduction(worker)
            for worker in self._strategy.workers
            for group in worker.optimizer.param_groups
            for parameter in group["params"]
        }
        pending = []
        for reduction in (self._all_reduce, self._all_reduce_in_node):
            views = [
                view
                for parameter, view in zip(bucket.parameters(), bucket.gradients(), strict=True)
                if by_parameter.get(parameter, self._all_reduce) == reduction
            ]
            if views:
                pending.append((views, reduction(torch.cat([view.reshape(-1) for view in views]))))
        return copied_back(bucket.buffer(), pending)


def completed(buffer: Tensor) -> Future[Tensor]:
    """Return a future of a bucket that needs no more reduction, done after the work queued on the current stream."""
    future = new_future(buffer.device)
    future.set_result(buffer)
    return future


def copied_back(buffer: Tensor, pending: Sequence[tuple[list[Tensor], Future[Tensor]]]) -> Future[Tensor]:
    """Return a future of a bucket whose views get the values of some futures.

    In place:
        The views, when the futures are done.
    """
    if not pending:
        return completed(buffer)
    if buffer.is_cuda:
        # On a stream that waits for each of them in turn; the host and the backward pass go on. `collect_all` would
        # return a future without devices, and DDP would read the bucket before the reduction has run.
        with torch.cuda.stream(side_stream(buffer.device, "buckets")):
            for views, future in pending:
                _copy_back(views, future)
            return completed(buffer)
    copies = [future.then(functools.partial(_copy_back, views)) for views, future in pending]

    def finished(done: Future[list[Future[None]]]) -> Tensor:
        for copy in done.value():
            copy.value()  # raises what the reduction has raised
        return buffer

    return collect_all(copies).then(finished)


def _copy_back(views: list[Tensor], future: Future[Tensor]) -> None:
    values = future.wait()
    if values.is_cuda:  # allocated on another stream
        values.record_stream(torch.cuda.current_stream(values.device))
    for view, value in zip(views, values.split([view.numel() for view in views]), strict=True):
        view.copy_(value.view(view.shape))
