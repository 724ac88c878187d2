"""Fits of groups, each a Lightning run in a process of its own."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from lightning_lowbw import ConfigurationError, ElasticShardedStrategy, ElasticStrategy, LocalSGD, Strategy
from lightning_lowbw.strategies.elastic import _Elastic
from tests.elastic.plain import PlainMembership, become_a_group
from tests.gpu.problem import check_near
from tests.ranks import on_ranks, run_ranks
from tests.tiny import BATCH, Tiny, make_trainer, sgd

K_STEPS = 4
STEPS = 5 * K_STEPS
METHODS = {
    "local_sgd": LocalSGD(k_steps=K_STEPS, begin_step=0),
    "diloco": LocalSGD(k_steps=K_STEPS, begin_step=0, outer="nesterov"),
    "sparse_loco": LocalSGD(K_STEPS, 0, compression={"density": 1 / 8, "chunk": 64, "min_numel": 100}),
}


class Scheduled(Tiny):
    """With a learning rate that falls in each step, and batches that take some time.

    Args:
        number: of the group, or of the rank.
        sleep_s: of each batch.
    """

    def __init__(self, number: int, sleep_s: float = 0.0) -> None:
        super().__init__()
        self.number, self.sleep_s = number, sleep_s
        self.lrs: dict[int, float] = {}
        self.validated: list[tuple[int, float]] = []

    def configure_optimizers(self) -> Any:
        optimizer = sgd([p for p in self.parameters() if p.requires_grad])
        scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        time.sleep(self.sleep_s)
        step = self.trainer.global_step
        self.lrs[step] = self.optimizers().param_groups[0]["lr"]
        generator = torch.Generator().manual_seed(100 * step + self.number)
        x, y = torch.randn(batch[0].shape, generator=generator), torch.randint(0, 5, (BATCH,), generator=generator)
        return nn.functional.cross_entropy(self(x.to(self.device)), y.to(self.device))

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.validated.append((self.trainer.global_step, float(whole(self.wide.weight).sum())))


def whole(tensor: Tensor) -> Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def data_of(steps: int) -> DataLoader:
    return DataLoader(TensorDataset(torch.zeros(BATCH * steps, 16), torch.zeros(BATCH * steps)), batch_size=BATCH)


class Stream(IterableDataset):
    """Six batches, whose number is not known."""

    def __iter__(self) -> Iterator[list[Tensor]]:
        return iter([[torch.zeros(BATCH, 16), torch.zeros(BATCH)]] * 6)


def stream_of(steps: int) -> DataLoader:
    return DataLoader(Stream(), batch_size=None)


def num_tokens(batch: list[Tensor]) -> int:
    return batch[0].numel()


def fit_group(
    folder: str,
    method: Any,
    sleeps: Sequence[float] = (0, 0, 0),
    begins: Sequence[float] = (0, 0, 0),
    max_steps: int = STEPS,
    ranks: int | Sequence[int] = 1,
    shards: Sequence[bool] = (False, False, False),
    at_least: int = 2,
    resumes: bool = False,
    lighthouse: str | None = None,
    backend: str = "gloo",
    loader: Callable[[int], DataLoader] = data_of,
    **options: Any,
) -> dict[str, Any]:
    store, number = become_a_group(folder, ranks, backend)
    time.sleep(begins[number])
    ranks, first = (ranks, number * ranks) if isinstance(ranks, int) else (ranks[number], sum(ranks[:number]))
    model = Scheduled(first + int(os.environ["RANK"]), sleeps[number])
    name = f"group {number}"
    if lighthouse is None:
        _Elastic.make_membership = lambda *_: PlainMembership(store, name, min_replicas=at_least, grace_s=20.0)
    if backend != "gloo":
        options |= {"process_group_backend": backend}
    kind = ElasticShardedStrategy if shards[number] else ElasticStrategy
    strategy = kind(method, group=name, grace_s=1.0, lighthouse=lighthouse, **options)
    there = {} if backend == "gloo" else {"accelerator": "gpu", "devices": [0], "num_nodes": ranks}
    there |= {"max_steps": max_steps, "max_epochs": -1, "val_check_interval": 7, "limit_val_batches": 1}
    trainer = make_trainer(strategy, ranks, **there)
    path = f"{folder}/{name}.ckpt"
    trainer.fit(model, loader(STEPS), data_of(1), ckpt_path=path if resumes else None)
    trainer.save_checkpoint(path)
    (worker,), weights = strategy.replicas, (*model.parameters(), model.norm.running_mean, model.norm.running_var)
    found = {"global_step": trainer.global_step, "epochs": trainer.current_epoch, "rounds": worker.num_averages}
    found |= {"seen": worker.tokens_seen, "contributed": worker.contributed}
    found |= {"lrs": model.lrs, "validated": model.validated}
    return {**found, "weights": [whole(each).cpu() for each in weights]}


def fit_fixed(method: Any) -> list[Tensor]:
    model = Scheduled(dist.get_rank())
    trainer = make_trainer(Strategy(method), dist.get_world_size(), max_steps=STEPS, max_epochs=-1)
    trainer.fit(model, data_of(STEPS * dist.get_world_size()))
    return [each.detach() for each in (*model.parameters(), model.norm.running_mean, model.norm.running_var)]


def test_a_fit_of_fixed_groups_is_equal_to_a_fit_without_elasticity(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """To the bit, and with validations of the weights after the last round in between."""
    coordination = pytest.importorskip("torchft.coordination")
    server = coordination.LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=20_000)
    request.addfinalizer(server.shutdown)
    method = METHODS["sparse_loco"]
    fixed = run_ranks(fit_fixed, 2, method)
    results = run_ranks(partial(fit_group, lighthouse=server.address()), 2, str(tmp_path), method, fresh=True)
    for result in results:
        assert all(map(torch.equal, result["weights"], fixed[0]))
        assert (result["global_step"], result["rounds"]) == (STEPS, 5)
        assert result["seen"] == 2 * STEPS * BATCH
        assert result["validated"] == results[0]["validated"]


@pytest.mark.parametrize("delay_steps", [0, 3])
def test_a_slow_group_and_a_late_one_end_with_the_others(delay_steps: int, tmp_path: Path) -> None:
    """They have the steps and learning rates of the fastest group."""
    sleeps, begins = (0.01, 0.07, 0.01), (0, 0, 0.6)
    method = METHODS["diloco"].replace(delay_steps=delay_steps)
    results = run_ranks(
        *(partial(fit_group, round_s=0.3, max_steps=100), 3, str(tmp_path), method, sleeps, begins), fresh=True
    )
    for result in results:
        assert all(map(torch.equal, result["weights"], results[0]["weights"]))
        for name in ("rounds", "global_step", "seen", "contributed"):
            assert result[name] == results[0][name], name
        assert result["contributed"] == {f"group {number}": result["rounds"] for number in range(3)}
        assert result["lrs"] == {step: pytest.approx(0.05 / (1 + step)) for step in result["lrs"]}
    assert results[0]["global_step"] == 100
    steps = [len(result["lrs"]) for result in results]
    assert steps[1] < max(steps)
    counted = results[0]["seen"] / BATCH
    assert 0 <= sum(steps) - counted <= 3 * delay_steps, "but for steps after the begin of the last round"
    assert min(results[2]["lrs"]) > 0, "the late group begins with the step of the other groups"


def test_groups_resume_from_their_checkpoints_to_the_bit(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    method = METHODS["sparse_loco"]
    at_once = run_ranks(fit_group, 2, str(whole), method, fresh=True)
    for max_steps, resumes in ((2 * K_STEPS, False), (STEPS, True)):
        for each in parts.glob("of *"):
            each.unlink()
        fitting = partial(fit_group, max_steps=max_steps, resumes=resumes)
        results = run_ranks(fitting, 2, str(parts), method, fresh=True)
    for result, whole_result in zip(results, at_once, strict=True):
        assert all(map(torch.equal, result["weights"], whole_result["weights"]))
        assert result["seen"] == whole_result["seen"]
        assert result["lrs"] == {step: lr for step, lr in whole_result["lrs"].items() if step >= 2 * K_STEPS}


def test_the_processes_of_a_group_step_together(tmp_path: Path) -> None:
    """As nodes of two ranks do without elasticity, except for the order of sums."""
    method = METHODS["local_sgd"]
    nodes = run_ranks(fit_fixed, 4, method.at(2))
    fitting = partial(fit_group, ranks=2, num_tokens=num_tokens, loader=stream_of)
    for result in run_ranks(fitting, 4, str(tmp_path), method, fresh=True):
        torch.testing.assert_close(result["weights"][:-2], nodes[0][:-2])  # running statistics are the leader's
        assert (result["rounds"], result["seen"]) == (5, 4 * STEPS * BATCH * 16)
        assert (result["global_step"], result["epochs"]) == (STEPS, 4)


@pytest.mark.parametrize("delay_steps", [0, 2])
def test_groups_that_differ_train_together(delay_steps: int, tmp_path: Path) -> None:
    """One process, two under DDP and two under FSDP have the weights of five alike, except for the order of sums."""
    method = METHODS["diloco"].replace(delay_steps=delay_steps)
    fitting = partial(fit_group, ranks=(1, 2, 2), shards=(False, False, True), at_least=3)
    results = run_ranks(fitting, 5, str(tmp_path), method, fresh=True)
    for result in results:
        assert all(map(torch.equal, result["weights"], results[0]["weights"]))
        assert (result["rounds"], result["global_step"], result["seen"]) == (5, STEPS, 5 * STEPS * BATCH)
        assert result["contributed"] == {f"group {number}": 5 for number in range(3)}
        assert result["validated"] == results[0]["validated"]


class Sharded(Scheduled):
    def configure_model(self) -> None:
        fully_shard(self.wide, mesh=init_device_mesh("cpu", (1,)))


def test_groups_with_one_seed_shuffle_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    strategies = [ElasticStrategy(METHODS["diloco"], group=group) for group in ("site_a", "site_b", "site_b")]
    orders = []
    for strategy in strategies:
        sampler = DistributedSampler(range(20), **make_trainer(strategy, 1).distributed_sampler_kwargs)
        orders.append([*sampler])
    assert orders[0] != orders[1] == orders[2]
    assert sorted(orders[0]) == [*range(20)]


@pytest.mark.parametrize("num_ranks", [1, 2])
@on_ranks(fresh=True)
def test_sigterm_ends_a_group_that_waits_for_others(num_ranks: int, tmp_path: Path) -> None:
    """It begins a fit that no other group joins; the last process of the group receives SIGTERM."""
    store, _ = become_a_group(str(tmp_path), num_ranks)
    _Elastic.make_membership = lambda *_: PlainMembership(store, "group 0")
    if int(os.environ["RANK"]) == num_ranks - 1:
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    strategy = ElasticStrategy(METHODS["sparse_loco"], group="group 0")
    trainer = make_trainer(strategy, num_ranks, max_steps=STEPS, max_epochs=-1)
    with pytest.raises(SIGTERMException):
        trainer.fit(Scheduled(0), data_of(STEPS))
    assert trainer.global_step == 1


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "ranks"), [("sparse_loco", 1), ("diloco", 2)])
def test_groups_with_nccl_inside_get_the_weights_of_a_cpu(name: str, ranks: int, tmp_path: Path) -> None:
    """All share one; the processes of a group by NCCL, the groups by gloo."""
    here, there = tmp_path / "cpu", tmp_path / "gpu"
    here.mkdir()
    there.mkdir()
    fitting = partial(fit_group, ranks=ranks)
    expected, *_ = run_ranks(fitting, 2 * ranks, str(here), METHODS[name], fresh=True)
    results = run_ranks(partial(fitting, backend="nccl"), 2 * ranks, str(there), METHODS[name], fresh=True)
    for result in results:
        assert all(map(torch.equal, result["weights"], results[0]["weights"]))
        for key in ("rounds", "global_step", "seen", "contributed"):
            assert result[key] == expected[key], key
    check_near(results[0]["weights"], expected["weights"], rtol=1e-3, atol=1e-3, selects=name == "sparse_loco")


@pytest.mark.gpu
def test_a_late_group_with_nccl_inside_heals(tmp_path: Path) -> None:
    fitting = partial(fit_group, round_s=0.3, max_steps=300, backend="nccl")
    results = run_ranks(*(fitting, 3, str(tmp_path), METHODS["diloco"], (0.02, 0.07, 0.02), (0, 0, 1.0)), fresh=True)
    for result in results:
        assert all(map(torch.equal, result["weights"], results[0]["weights"]))
        assert result["contributed"] == {f"group {number}": result["rounds"] for number in range(3)}
    assert min(results[2]["lrs"]) > 0


class LongValidation(Scheduled):
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        time.sleep(0.3)


@on_ranks(1, fresh=True)
def test_a_group_that_validates_for_long_does_not_hang(tmp_path: Path) -> None:
    """Its batches are noted, and are no steps."""
    store, _ = become_a_group(str(tmp_path))
    membership = PlainMembership(store, "group 0", min_replicas=1, grace_s=0.1)
    _Elastic.make_membership = lambda *_: membership
    strategy = ElasticStrategy(METHODS["local_sgd"], group="group 0", grace_s=0.1)
    limits: dict[str, Any] = {"max_steps": 2 * K_STEPS, "max_epochs": -1, "num_sanity_val_steps": 0}
    limits |= {"val_check_interval": K_STEPS + 1, "limit_val_batches": 10}
    make_trainer(strategy, 1, **limits).fit(LongValidation(0), data_of(STEPS), data_of(10))
    assert len(membership.noted) == 2 * K_STEPS + 10
    assert max(later - before for before, later in pairwise(membership.noted)) < 2.0, "validation takes 3 s"


class ByEpoch(Scheduled):
    def configure_optimizers(self) -> Any:
        optimizer = sgd([p for p in self.parameters() if p.requires_grad])
        return [optimizer], [LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))]


class EverySecondStep(Scheduled):
    def configure_optimizers(self) -> Any:
        made = super().configure_optimizers()
        made["lr_scheduler"]["frequency"] = 2
        return made


class TwoStepsABatch(Scheduled):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        for _ in range(2):
            self.optimizers().zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            self.optimizers().step()


class Reconfigured(Scheduled):
    def on_train_batch_end(self, *_: Any) -> None:
        self.trainer.strategy.reconfigure(METHODS["diloco"])


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (ByEpoch, "LambdaLR does not take a step with each step of the optimizer"),
        (EverySecondStep, "LambdaLR does not take a step with each step of the optimizer"),
        (TwoStepsABatch, "Step 2 is the second one in batch 1"),
        (Reconfigured, "All groups have one method"),
        (Sharded, "The model is sharded, .* a name that ends with _elastic_fsdp"),
    ],
)
@on_ranks(1, fresh=True)
def test_what_groups_would_do_differently_is_refused(model: type[Scheduled], words: str, tmp_path: Path) -> None:
    store, _ = become_a_group(str(tmp_path))
    _Elastic.make_membership = lambda *_: PlainMembership(store, "group 0", min_replicas=1, grace_s=0.1)
    trainer = make_trainer(ElasticStrategy(METHODS["local_sgd"], group="group 0"), 1, max_steps=STEPS, max_epochs=-1)
    with pytest.raises(ConfigurationError, match=words):
        trainer.fit(model(0), data_of(STEPS))


def fit_with_other_steps(folder: str) -> str:
    number = dist.get_rank()
    try:
        fit_group(folder, METHODS["local_sgd"], (0.1, 0.1), (0.5, 0), STEPS + 4 * number, at_least=1)
    except ConfigurationError as error:
        return f"{error}"
    return ""


def test_groups_that_would_end_at_different_steps_are_refused_by_name(tmp_path: Path) -> None:
    told = filter(None, run_ranks(fit_with_other_steps, 2, str(tmp_path), fresh=True))
    assert re.search(r"Trainer\(max_steps\): (20 here, 24|24 here, 20) there", *told)


def test_a_clock_that_ends_one_group_is_refused() -> None:
    strategy = ElasticStrategy(METHODS["local_sgd"])
    trainer = make_trainer(strategy, 1, max_steps=4, max_epochs=-1, max_time="00:01:00:00")
    with pytest.raises(ConfigurationError, match="max_time"):
        strategy._check_run(trainer)
