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


def train(uses_kernels: bool, name: str, method: Method, nodes: Any) -> tuple[list[Tensor], list[Tensor], str]:
    """Train in a plain loop; return weights, residuals and states of the optimizer, and a digest of the weights."""
    dispatch.uses_triton = lambda device: uses_kernels  # put back by `run_ranks`
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 130), nn.Tanh(), nn.Linear(130, 17), nn.Tanh(), nn.Linear(17, 3))
    kind, options = OPTIMIZERS[name]
    optimizer = kind(model.parameters(), **options)
    worker = method.attach(optimizer, model.named_parameters(), topology=nodes)
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
        with worker.stepping():
            worker.exchange()
            optimizer.step()
    worker.finish()  # local weights are averaged
    residuals = worker.state_dict()["residuals"]
    weights = [parameter.detach() for parameter in model.parameters()]
    kept = [state for parameter in model.parameters() for state in optimizer.state[parameter].values()]
    return weights, [*residuals.values(), *kept], digest(weights)


NODES, SPARSE = ((0, 2), (1, 3)), partial(DGC, sparsity=(0.9, 0.97), rampup_step=2, min_numel=1000)
CASES: dict[str, tuple[str, Method, int, Any]] = {  # and the ranks
    "int4": ("nesterov", SPARSE(value_dtype="int4"), 2, "flat"),
    # Adam's first steps are of one size: which are the largest is then a matter of rounding.
    "on two levels": ("adam", SPARSE(rampup_begin_step=2), 4, NODES),
    "all in float16, two ranks": ("nesterov", QuantizedGradients("float16"), 2, "flat"),
    "all in int8, three ranks": ("nesterov", QuantizedGradients("int8"), 3, "flat"),
    "all in int4 on two levels": ("nesterov", QuantizedGradients("int4"), 4, NODES),
    "averages in int4": ("nesterov", LocalSGD(2, 0, compression="int4"), 3, "flat"),
    "hidden averages in int8 on two levels": ("nesterov", LocalSGD(2, 0, delay_steps=1, compression="int8"), 4, NODES),
}


@pytest.mark.parametrize("case", CASES)
def test_a_training_is_that_of_a_cpu(case: str) -> None:
    """To the bit with SGD, to rounding with Adam; and the replicas are one."""
    name, method, num_ranks, nodes = CASES[case]
    found, expected = (run_ranks(train, num_ranks, each, name, method, nodes) for each in (True, False))
    assert len({of_weights for _, _, of_weights in found}) == 1
    for mine, theirs in zip(found, expected, strict=True):
        assert mine[1]
        for a, b in zip([*mine[0], *mine[1]], [*theirs[0], *theirs[1]], strict=True):
            if name == "nesterov":
                assert a.equal(b)
            else:
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def take_bad_steps(uses_kernels: bool, method: Method) -> tuple[list[str], list[Tensor]]:
    """Return what each step says, of which the last has a NaN on rank 1; and the weights."""
    dispatch.uses_triton = lambda device: uses_kernels  # put back by `run_ranks`
    model, said = nn.Sequential(nn.Linear(300, 17), nn.Linear(17, 9)), list[str]()
    torch.manual_seed(0)
    optimizer = SGD(model.parameters(), **EXACT)
    worker: Any = method.attach(optimizer, model.named_parameters())
    for step in range(3):
        for parameter in model.parameters():
            nn.init.zeros_(parameter) if step == 0 else None
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        if step == 2 and dist.get_rank() == 1:
            model[1].weight.grad[3, 4] = torch.nan  # type: ignore[index]
        try:
            with worker.stepping():
                worker.exchange()
                optimizer.step()
            said.append("")
        except NonFiniteGradientError as error:
            said.append(str(error))
    return said, [each.detach() for each in model.parameters()]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_bad_gradient_of_few_bits_is_told_as_on_a_cpu(num_ranks: int) -> None:
    found, expected = (run_ranks(take_bad_steps, num_ranks, each, QuantizedGradients("int8")) for each in (True, False))
    for (said, tensors), (as_said, as_expected) in zip(found, expected, strict=True):
        assert said == as_said
        assert "Step 2: the gradient of '1.weight' on rank 1 is not finite" in said[2]
        assert [*map(bool, said)] == [False, False, True]
        assert all(a.equal(b) for a, b in zip(tensors, as_expected, strict=True))
