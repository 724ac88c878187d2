"""DDP's communication hook: how a bucket is reduced, on gloo as well as on NCCL.

In a dense step the bucket is all-reduced during backward; in a sparse or local one inside the node, or not at all.
"""
# No `from __future__ import annotations` here: DDP checks the hook's annotations, which must be real objects.

import functools
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future, collect_all
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from lightning_lowbw.comm.peers import Peers
from lightning_lowbw.comm.side_queue import new_future, side_stream
from lightning_lowbw.sync.synchronizer import Synchronizer

Reduction = Callable[[Tensor], Future[Tensor]]


def ddp_reduces(worker: Synchronizer, model: DistributedDataParallel) -> bool:
    """Return whether DDP reduces a worker's gradients in the coming step: over all ranks, or inside the node.

    Not inside the node if it would search for unused parameters, which communicates with all ranks; then the worker
    takes the mean of the node.
    """
    return worker.reduces_in_backward or (worker.reduces_in_node and not model.find_unused_parameters)


class GradientHook:
    """Reduces DDP's buckets, each parameter as the worker of its optimizer requires.

    Args:
        workers: of the optimizers, at any time.

    Attributes:
        is_timing: whether steps are timed; then the host waits for a CUDA device after backward.
    """

    def __init__(self, workers: Mapping[int, Synchronizer]) -> None:
        self._workers = workers
        self._model: DistributedDataParallel | None = None
        self._peers: Peers | None = None
        self.is_timing = False
        self._last_launch_s: float | None = None  # when the last bucket of a backward pass was sent
        self._handles: list[RemovableHandle] = []
        self._means: set[Tensor] = set()  # those whose gradients have been reduced, for the next step

    def register(self, model: DistributedDataParallel, peers: Peers, *, is_manual: bool) -> None:
        """Let DDP call `reduce` with each bucket. Stock Lightning registers hooks on CUDA only, silently.

        Args:
            model: whose buckets they are.
            peers: the ranks that reduce them.
            is_manual: whether the user's code calls backward.
        """
        self._model, self._peers = model, peers
        model.register_comm_hook(state=None, hook=self.reduce)
        self._means.clear()
        # A plain `loss.backward()` passes by DDP, which Lightning prepares in `manual_backward`.
        for parameter in model.parameters() if is_manual else ():
            if parameter.requires_grad:
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._means.discard))

    def release(self) -> None:
        """Leave the parameters as they were before `register`."""
        self._model = self._peers = None
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
        reductions = {self._reduction(worker) for worker in self._workers.values()} or {self._all_reduce}
        self._means.update(bucket.parameters())
        if len(reductions) > 1:
            return self._reduce_by_parameter(bucket)
        (reduction,) = reductions
        return completed(bucket.buffer()) if reduction is None else reduction(bucket.buffer())

    def wait_s(self) -> float:
        """Return how long the training has waited since the last bucket was sent; 0 where that is not known.

        On a CUDA device the host does not wait: only while steps are timed.
        """
        last, self._last_launch_s = self._last_launch_s, None
        if last is None or self._model is None or not self._waits_for(self._model.device):
            return 0.0
        return time.perf_counter() - last

    def _waits_for(self, device: torch.device) -> bool:
        """Wait for queued work, while steps are timed; return whether the host's clock is valid for the device now."""
        if device.type == "cuda" and self.is_timing:
            torch.cuda.current_stream(device).synchronize()
            return True
        return device.type == "cpu"

    def _reduction(self, worker: Synchronizer) -> Reduction | None:
        """Return how the gradients of a worker are reduced in the coming step; None: not at all."""
        assert self._model is not None
        if worker.reduces_in_backward:
            return self._all_reduce
        return self._all_reduce_in_node if ddp_reduces(worker, self._model) else None

    def _all_reduce(self, buffer: Tensor) -> Future[Tensor]:
        assert self._peers is not None
        self._peers.count_dense(buffer.nbytes)
        # As the reducer does; a division has other bits unless N is a power of two.
        buffer.mul_(1.0 / self._peers.num_ranks)
        self._note_launch(buffer.device)
        return self._peers.begin_all_reduce_(buffer, exact=False).get_future()

    def _all_reduce_in_node(self, buffer: Tensor) -> Future[Tensor]:
        assert self._peers is not None
        buffer.mul_(1.0 / self._peers.node.num_ranks)
        self._note_launch(buffer.device)
        return self._peers.begin_all_reduce_in_node_(buffer).get_future()

    def _note_launch(self, device: torch.device) -> None:
        self._waits_for(device)
        self._last_launch_s = time.perf_counter()

    def _reduce_by_parameter(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Reduce each parameter as the worker of its optimizer does: optimizers may be in different phases."""
        by_parameter = {
            parameter: self._reduction(worker)
            for worker in self._workers.values()
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


def reaches(graph: Any, parameters: Collection[Tensor]) -> bool:
    """Return whether a loss depends on some of the parameters; also after its backward pass.

    Args:
        graph: the loss's `grad_fn`.
    """
    waiting, seen = [graph], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if getattr(node, "variable", None) in parameters:
            return True
        waiting += [each for each, _ in node.next_functions]
    return False


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
