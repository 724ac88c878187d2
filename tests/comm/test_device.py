"""What differs between devices: an accelerator without collectives of its own trains through the host."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD

from lightning_lowbw import DGC, LocalSGD, Method, PowerSGD, QuantizedGradients
from lightning_lowbw.comm.collectives import Collectives
from lightning_lowbw.kernels.tensors import Serial, device_of
from tests.comm.fake_device import CPU, FAKE, FakeDevice, refuse_tensors
from tests.ranks import on_ranks

STEPS = 6
METHODS: dict[str, Method] = {
    "dense": DGC(rampup_begin_step=STEPS),
    "dgc": DGC(sparsity=[0.9], min_numel=1, value_dtype="int8"),
    "int8": QuantizedGradients("int8"),
    "powersgd": PowerSGD(2),
    "local_sgd": LocalSGD(3),
    "delayed": LocalSGD(3, 0, outer="nesterov", delay_steps=1),
    "int4": LocalSGD(3, 0, compression="int4"),
    "sparse_loco": LocalSGD(3, 0, compression={}),
    "two levels": DGC(sparsity=[0.9], min_numel=1, topology=2),
    "leader": LocalSGD(3, topology=[[0], [1, 2, 3]]),
}


def train(method: Method, device: torch.device) -> list[Tensor]:
    with FakeDevice() if device == FAKE else nullcontext():
        torch.manual_seed(0)
        weights = [torch.randn(shape) for shape in ((16, 32), (32,), (5000,))]
        parameters = [torch.nn.Parameter(weight.to(device)) for weight in weights]
        optimizer = SGD(parameters, lr=0.1, momentum=0.9, foreach=False)
        worker = method.attach(optimizer, [(f"p{index}", each) for index, each in enumerate(parameters)])
        assert worker.params.device.type == device.type
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(STEPS):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(device)
            optimizer.step()
        if method.when.averages_weights:
            worker.finish()
        return [parameter.detach().to(CPU) for parameter in parameters]


@pytest.mark.parametrize("num_ranks", [2, 4])
@on_ranks()
def test_a_device_without_collectives_trains_through_the_host(num_ranks: int) -> None:
    """As the CPU does, bit for bit."""
    refuse_tensors()
    for name in [name for name in METHODS if (name in ("two levels", "leader")) == (num_ranks == 4)]:
        for on_host, on_device in zip(*(train(METHODS[name], device) for device in (CPU, FAKE)), strict=True):
            assert on_host.equal(on_device), name


@on_ranks()
def test_a_communication_hook_gets_the_sum_in_the_tensor_of_the_device() -> None:
    refuse_tensors()
    with FakeDevice():
        given = torch.arange(6.0).to(FAKE) + dist.get_rank()
        with pytest.raises(RuntimeError, match="no backend type associated with device type mps"):
            dist.all_reduce(given)
        assert Collectives().begin_all_reduce_(given).get_future().wait() is given
        assert given.to(CPU).equal(torch.arange(6.0) * 2 + 1)


def test_random_numbers_of_another_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[Any] = [torch.ones(1)]
    module = SimpleNamespace(get_rng_state=lambda: states[-1], set_rng_state=states.append, synchronize=lambda: None)
    monkeypatch.setattr(torch, "mps", module)
    device = Serial(FAKE)
    saved = device.rng_state()
    assert saved == {"mps": states[0]}
    device.set_rng_state(saved)
    assert len(states) == 2
    device.set_rng_state({"cuda": torch.zeros(1)})  # of another machine
    assert len(states) == 2
    device.synchronize()
    assert not device_of(CPU).rng_state()
