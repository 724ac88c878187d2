"""Whole steps with the Triton kernels, in Triton's interpreter: run by `test_gpu`, as `kernel_cases` is."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from lightning_lowbw.comm.agreement import digest
from lightning_lowbw.errors import NonFiniteGradientError
from lightning_lowbw.kernels import dispatch
from lightning_lowbw.method import Method
from lightning_lowbw.presets import DGC, LocalSGD, QuantizedGradients
from tests.ranks import run_ranks

# All factors are powers of two, or the interpreter, which fuses no multiply with an add, would round otherwise.
EXACT = {"lr": 0.25, "momentum": 0.5, "weight_decay": 2.0**-7}
OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "nesterov": (SGD, {**EXACT, "nesterov": True, "maximize": True}),
    "adam": (Adam, {"lr": 0.01, "weight_decay": 0.01, "amsgrad": True}),
}
NUM_STEPS = 4


def train(
    uses_kernels: bool, name: str, method: Method, nodes: Any, has_nan: bool
) -> tuple[list[Tensor], list[Tensor], str]:
    """Train in a plain loop; return weights, residuals and states of the optimizer, and a digest of the weights.

    With a NaN, which rank 1 has in the last step, return the weights, no state, and the error.
    """
    dispatch.uses_triton = lambda device: uses_kernels  # put back by `run_ranks`
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 130), nn.Tanh(), nn.Linear(130, 17), nn.Tanh(), nn.Linear(17, 3))
    kind, options = OPTIMIZERS[name]
    optimizer = kind(model.parameters(), **options)
    worker = method.attach(optimizer, model.named_parameters(), topology=nodes)
    weights = [parameter.detach() for parameter in model.parameters()]
    for step in range(NUM_STEPS):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        optimizer.zero_grad()
        for parameter in model.parameters():  # drawn: a backward pass would not round alike on all machines
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        if step == 1 and dist.get_rank() == 1:
            model[2].weight.grad = None  # type: ignore[assignment]
        if step == 2 and dist.get_rank() == 1:
            model[2].bias.grad = None  # type: ignore[assignment]
        if step == 3:
            model[4].bias.grad = None  # type: ignore[assignment]
            if has_nan and dist.get_rank() == 1:
                model[2].weight.grad[3, 4] = torch.nan  # type: ignore[index]
        try:
            with worker.stepping():
                worker.exchange()
                optimizer.step()
        except NonFiniteGradientError as error:
            return weights, [], str(error)
    worker.finish()  # local weights are averaged
    residuals = worker.state_dict()["residuals"]
    kept = [state for parameter in model.parameters() for state in optimizer.state[parameter].values()]
    return weights, [*residuals.values(), *kept], digest(weights)


NODES, SPARSE = ((0, 2), (1, 3)), partial(DGC, sparsity=(0.9, 0.97), rampup_step=2, min_numel=1000)
CASES: dict[str, tuple[str, Method, int, Any]] = {  # and the ranks
    "int4": ("nesterov", SPARSE(value_dtype="int4"), 2, "flat"),
    # Adam's first steps are of one size: then rounding decides which elements are the largest.
    "on two levels": ("adam", SPARSE(rampup_begin_step=2), 4, NODES),
    "all in float16, two ranks": ("nesterov", QuantizedGradients("float16"), 2, "flat"),
    "all in int8, three ranks": ("nesterov", QuantizedGradients("int8"), 3, "flat"),
    "all in int4 on two levels": ("nesterov", QuantizedGradients("int4"), 4, NODES),
    "averages in int4": ("nesterov", LocalSGD(2, 0, compression="int4"), 3, "flat"),
    "hidden averages in int8 on two levels": ("nesterov", LocalSGD(2, 0, delay_steps=1, compression="int8"), 4, NODES),
}


NAN = ("all in float16, two ranks", "all in int8, three ranks")


@pytest.mark.parametrize(("case", "has_nan"), [*((case, False) for case in CASES), *((case, True) for case in NAN)])
def test_a_training_is_that_of_a_cpu(case: str, has_nan: bool) -> None:
    """To the bit with SGD, to rounding with Adam; all replicas are equal, and all ranks raise the same error."""
    name, method, num_ranks, nodes = CASES[case]
    found, expected = (run_ranks(train, num_ranks, each, name, method, nodes, has_nan) for each in (True, False))
    assert len({said for _, _, said in found}) == 1
    for (weights, kept, said), (as_weights, as_kept, as_said) in zip(found, expected, strict=True):
        assert bool(kept) != has_nan
        if has_nan:
            assert said == as_said
            assert "Step 3: the gradient of '2.weight' on rank 1 is not finite" in said
        for a, b in zip([*weights, *kept], [*as_weights, *as_kept], strict=True):
            if name == "nesterov":
                assert a.equal(b)
            else:
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
