"""The private things of Lightning and torch that the strategies touch. A test here fails when they have moved."""

from __future__ import annotations

import inspect

import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.strategy import Strategy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD


def test_ddp_strategy_wraps_then_registers_hooks() -> None:
    source = inspect.getsource(DDPStrategy.configure_ddp)
    assert source.index("_setup_model") < source.index("_register_ddp_hooks")
    setup = inspect.getsource(DDPStrategy.setup)
    assert setup.index("configure_ddp") < setup.index("setup_optimizers")


def test_stock_lightning_registers_no_hook_off_cuda() -> None:
    assert 'if self.root_device.type == "cuda"' in inspect.getsource(DDPStrategy._register_ddp_hooks)


def test_clipping_comes_after_the_closure_through_one_private_method() -> None:
    assert "closure()" in inspect.getsource(Precision._wrap_closure)
    after = inspect.getsource(Precision._after_closure)
    assert after.index("on_before_optimizer_step") < after.index("self._clip_gradients")
    names = list(inspect.signature(Precision._clip_gradients).parameters)
    assert names == ["self", "model", "optimizer", "clip_val", "gradient_clip_algorithm"]
    assert list(inspect.signature(Precision.clip_gradients).parameters) == [
        "self",
        "optimizer",
        "clip_val",
        "gradient_clip_algorithm",
    ]


def test_the_scaler_unscales_after_the_closure() -> None:
    source = inspect.getsource(MixedPrecision.optimizer_step)
    assert source.index("closure()") < source.index("unscale_(") < source.index("_after_closure(")


def test_ddp_asks_one_method_whether_to_broadcast_buffers() -> None:
    assert "will_sync_module_buffers" in inspect.getsource(DistributedDataParallel._check_sync_bufs_pre_fwd)


def test_ddp_broadcasts_the_buffers_of_one_list() -> None:
    assert "self.modules_buffers" in inspect.getsource(DistributedDataParallel._default_broadcast_coalesced)


def test_sgd_runs_the_closure_before_it_reads_its_groups() -> None:
    source = inspect.getsource(SGD.step)
    assert source.index("closure()") < source.index("for group in self.param_groups")


def test_checkpoints_go_through_these() -> None:
    assert "self.is_global_zero" in inspect.getsource(Strategy.save_checkpoint)
    assert list(inspect.signature(Strategy.load_optimizer_state_dict).parameters) == ["self", "checkpoint"]


def test_the_hook_may_be_a_bound_method_with_annotations() -> None:
    from lightning_lowbw.strategies.base import LowBandwidthStrategy

    signature = inspect.signature(LowBandwidthStrategy._gradient_hook)
    assert signature.parameters["bucket"].annotation is torch.distributed.GradBucket
    assert signature.return_annotation == torch.futures.Future[torch.Tensor]
