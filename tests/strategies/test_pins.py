"""The private things of Lightning and torch that the strategies touch. A test here fails when they have moved."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.overrides.distributed import prepare_for_backward
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.strategy import Strategy
from lightning.pytorch.trainer.call import _interrupt
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from lightning.pytorch.trainer.connectors.signal_connector import _HandlersCompose, _SignalConnector
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from lightning_lowbw.strategies.base import RUN_STAGE
from lightning_lowbw.strategies.checks import SETTINGS, settings_of

SEND = "_distributed_broadcast_coalesced"
GRAD_SYNC = "torch.is_grad_enabled() and {}.require_backward_grad_sync"


# Functions, and what has to be in the source of each, in this order.
IN_ORDER: list[tuple[Any, ...]] = [
    (DDPStrategy.configure_ddp, "_setup_model", "_register_ddp_hooks"),
    (DDPStrategy.setup, "configure_ddp", "setup_optimizers"),
    # Stock Lightning registers no hook off CUDA.
    (DDPStrategy._register_ddp_hooks, 'if self.root_device.type == "cuda"'),
    # A barrier stands between the handlers of signals and the first data.
    (Trainer._run, "self.strategy.setup(self)", "register_signal_handlers()", "_run_stage()"),
    (Trainer._run_stage, f'barrier("{RUN_STAGE}")', "_run_sanity_check()"),
    # Settings are compared before callbacks are set up.
    (Trainer._run, "strategy.connect(", "strategy.setup_environment()", "_call_setup_hook"),
    # Clipping comes after the closure through one private method; a scaler unscales after the closure.
    (Precision._wrap_closure, "closure()"),
    (Precision._after_closure, "on_before_optimizer_step", "self._clip_gradients"),
    (MixedPrecision.optimizer_step, "closure()", "unscale_(", "_after_closure("),
    # DDP broadcasts buffers by one method.
    (DistributedDataParallel._pre_forward, "self._sync_buffers()"),
    (DistributedDataParallel._sync_buffers, "self._assign_modules_buffers()"),
    (DistributedDataParallel._assign_modules_buffers, "self.named_module_buffers"),
    (DistributedDataParallel._default_broadcast_coalesced, "bufs = self.modules_buffers"),
    (DistributedDataParallel._default_broadcast_coalesced, f"self.{SEND}(bufs, bucket_size, authoritative_rank)"),
    # SGD runs the closure before it reads its groups.
    (SGD.step, "closure()", "for group in self.param_groups"),
    # The weights of a checkpoint are asked for, of the strategy, before its callbacks, and then saved by the strategy.
    (_CheckpointConnector.dump_checkpoint, "_get_lightning_module_state_dict", "_call_callbacks_on_save_checkpoint"),
    (_CheckpointConnector, "lightning_module_state_dict"),
    (Trainer.save_checkpoint, "dump_checkpoint", "self.strategy.save_checkpoint"),
    (Strategy.save_checkpoint, "self.is_global_zero"),
    # The path of a resume is known before it is loaded.
    (_CheckpointConnector.resume_start, "self._ckpt_path = checkpoint_path", "strategy.load_checkpoint("),
    (Trainer.ckpt_path.fget, "self._checkpoint_connector._ckpt_path"),  # type: ignore[attr-defined]
    # A Trainer is interrupted before callbacks hear of the exception, and then the strategy.
    (_interrupt, "TrainerStatus.INTERRUPTED", '"on_exception"', "strategy.on_exception"),
    # DDP searches for unused parameters where it reduces.
    (DistributedDataParallel._post_forward, GRAD_SYNC.format("self"), "_find_tensors(output)"),
    (prepare_for_backward, GRAD_SYNC.format("model"), "_find_tensors(output)"),
    # Backward is local where grad sync is off.
    (DistributedDataParallel._pre_forward, GRAD_SYNC.format("self"), "self.reducer._rebuild_buckets()"),
    # SIGTERM comes through a list of handlers and is acted on at the end of a batch.
    (_SignalConnector.register_signal_handlers, "self._sigterm_notifier_fn"),
    (_SignalConnector.register_signal_handlers, "self._slurm_sigusr_handler_fn"),
    (Trainer.received_sigterm.fget, "self._signal_connector.received_sigterm"),  # type: ignore[attr-defined]
    (_TrainingEpochLoop.on_advance_end, "received_sigterm"),
    # When a validation is due.
    (_TrainingEpochLoop._should_check_val_fx, "_should_check_val_epoch()", "self.trainer.val_check_batch"),
    (_TrainingEpochLoop._should_check_val_fx, "self.total_batch_idx if self.trainer.check_val_every_n_epoch is None"),
    (_TrainingEpochLoop._should_check_val_fx, "check_val_every_n_epoch is None else self.batch_idx"),
    # Monitored metrics are cached results.
    (_ResultCollection._get_cache, "result_metric._computed"),
    (_LoggerConnector.callback_metrics.fget, "self._callback_metrics.update"),  # type: ignore[attr-defined]
]
SIGNATURES: list[tuple[Any, list[str]]] = [
    (Precision._clip_gradients, ["self", "model", "optimizer", "clip_val", "gradient_clip_algorithm"]),
    (Precision.clip_gradients, ["self", "optimizer", "clip_val", "gradient_clip_algorithm"]),
    (Strategy.load_optimizer_state_dict, ["self", "checkpoint"]),
    (_ResultCollection._forked_name, ["self", "result_metric", "on_step"]),
]


def test_sources_are_what_is_relied_on() -> None:
    for function, *fragments in IN_ORDER:
        source = inspect.getsource(function)
        places = [source.index(fragment) for fragment in fragments]
        assert places == sorted(places), (function, fragments)
    for function, names in SIGNATURES:
        assert list(inspect.signature(function).parameters) == names


def test_saves_in_the_background_have_one_thread() -> None:
    io = AsyncCheckpointIO()
    if hasattr(io, "_ensure_setup"):  # older releases make it at once
        assert io._executor is None
        io._ensure_setup()
    assert io._executor is not None
    assert io._executor._max_workers == 1
    io.teardown()


def test_settings_are_those_of_a_trainer() -> None:
    trainer = Trainer(accelerator="cpu", max_time={"minutes": 2}, logger=False, enable_checkpointing=False)
    for name in SETTINGS:
        assert hasattr(trainer, name), name
    assert settings_of(trainer)["Trainer(max_time)"] == [120]
    keys = [ModelCheckpoint(every_n_train_steps=steps).state_key for steps in (1, 2)]
    assert keys[0] != keys[1], "not what it does"


def test_sigterm_is_broadcast_before_each_batch_by_one_method_if_at_all() -> None:
    source = inspect.getsource(_TrainingEpochLoop)
    assert source.count("broadcast(") <= 1, "the training loop has a new broadcast"
    if "broadcast(" in source:
        assert "broadcast(" in inspect.getsource(_TrainingEpochLoop._broadcast_sigterm_tensor)


def test_what_loops_reducers_and_handlers_have() -> None:
    assert hasattr(torch.distributed.Reducer, "_rebuild_buckets")
    assert _HandlersCompose([print]).signal_handlers == [print]
    loop = Trainer(logger=False, accelerator="cpu", barebones=True).fit_loop.epoch_loop
    assert set(loop.automatic_optimization.optim_progress.state_dict()) == {"optimizer"}
    assert {"total", "current"} <= set(loop.manual_optimization.optim_step_progress.state_dict())


def test_hooks_after_a_step_are_called_in_the_order_of_one_dictionary() -> None:
    """`GradientSync.step_exchanged` puts its own hook first."""
    optimizer, order = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))]), list[str]()
    optimizer.register_step_post_hook(lambda *_: order.append("user"))
    handle = optimizer.register_step_post_hook(lambda *_: order.append("ours"))
    optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
    optimizer.step()
    assert order == ["ours", "user"]


def test_a_scaler_asks_what_it_has_found() -> None:
    """`exchange_unscaled_` writes there what all ranks have found."""
    scaler, parameter = torch.amp.GradScaler("cpu"), torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    parameter.grad = scaler.scale(torch.ones(3))
    scaler.unscale_(optimizer)
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    assert list(found) == [parameter.device]
    assert not found[parameter.device]
    scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {parameter.device: torch.ones(())}
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(parameter, torch.ones(3))
