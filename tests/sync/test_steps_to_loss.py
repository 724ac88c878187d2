"""benchmarks/steps_to_loss.py: the averages that it simulates are those of two ranks."""

from __future__ import annotations

import pytest
import torch

from benchmarks.steps_to_loss import OUTER, Averages
from lightning_lowbw import LocalSGD, TopK
from tests.ranks import run_ranks
from tests.sync import problem
from tests.sync.problem import MOMENTUM

SHAPES = {"matrix": (30, 20), "vector": (17,), "cube": (5, 6, 7), "single": (1,)}
CASES = {
    "it waits": LocalSGD(3, 0),
    "hidden": LocalSGD(4, 0, delay_steps=3, outer="nesterov", outer_lr=OUTER[0], outer_momentum=OUTER[1]),
    "streaming": LocalSGD(4, 0, delay_steps=3, outer="nesterov", num_fragments=2, mixing=0.5),
    "sparse": LocalSGD(3, 0, compression={"density": 0.1, "chunk": 100, "min_numel": 64}),
}


@pytest.mark.parametrize("case", CASES)
def test_simulated_averages_are_those_of_ranks(case: str) -> None:
    method = CASES[case]
    replicas = [problem.make_parameters(SHAPES) for _ in range(2)]
    what = method.what if isinstance(method.what, TopK) else None
    averages = Averages([list(parameters.values()) for parameters in replicas], method.when, what)  # type: ignore[arg-type]
    optimizers, num = [MOMENTUM(parameters.values()) for parameters in replicas], 0
    for step in range(problem.STEPS):
        for rank, (parameters, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            for name, parameter in parameters.items():
                parameter.grad = problem.coefficients(name, parameter, rank, step) + parameter.detach()
            optimizer.step()
        num += averages.after_step()
    assert num >= 2
    results = run_ranks(problem.train, 2, method, MOMENTUM, SHAPES, (), problem.STEPS)
    for parameters, result in zip(replicas, results, strict=True):
        for name, weight in result["weights"].items():
            torch.testing.assert_close(parameters[name].detach(), weight)
