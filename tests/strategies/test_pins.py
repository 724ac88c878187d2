"""The private things of Lightning and torch that the strategies touch. A test here fails when they have moved."""

from __future__ import annotations

import inspect

import torch
from lightning.pytorch import Trainer, callbacks
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
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

from lightning_lowbw.strategies.checks import AVERAGING, SETTINGS, settings_of
from lightning_lowbw.strategies.guest import RUN_STAGE


def test_ddp_strategy_wraps_then_registers_hooks() -> None:
    source = inspect.getsource(DDPStrategy.configure_ddp)
    assert source.index("_setup_model") < source.index("_register_ddp_hooks")
    setup = inspect.getsource(DDPStrategy.setup)
    assert setup.index("configure_ddp") < setup.index("setup_optimizers")


def test_a_barrier_stands_between_the_handlers_of_signals_and_the_first_data() -> None:
    run, stage = inspect.getsource(Trainer._run), inspect.getsource(Trainer._run_stage)
    assert run.index("register_signal_handlers()") < run.index("_run_stage()")
    assert stage.index(f'barrier("{RUN_STAGE}")') < stage.index("_run_sanity_check()")


def test_saves_in_the_background_have_one_thread() -> None:
    io = AsyncCheckpointIO()
    if hasattr(io, "_ensure_setup"):  # older releases make it at once
        assert io._executor is None
        io._ensure_setup()
    assert io._executor is not None
    assert io._executor._max_workers == 1
    io.teardown()


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


def test_ddp_broadcasts_buffers_by_one_method() -> None:
    assert "self._sync_buffers()" in inspect.getsource(DistributedDataParallel._pre_forward)
    assert "self._assign_modules_buffers()" in inspect.getsource(DistributedDataParallel._sync_buffers)
    assert "self.named_module_buffers" in inspect.getsource(DistributedDataParallel._assign_modules_buffers)
    source = inspect.getsource(DistributedDataParallel._default_broadcast_coalesced)
    assert "bufs = self.modules_buffers" in source
    assert "self._distributed_broadcast_coalesced(bufs, bucket_size, authoritative_rank)" in source


def test_sgd_runs_the_closure_before_it_reads_its_groups() -> None:
    source = inspect.getsource(SGD.step)
    assert source.index("closure()") < source.index("for group in self.param_groups")


def test_checkpoints_go_through_these() -> None:
    assert "self.is_global_zero" in inspect.getsource(Strategy.save_checkpoint)
    assert list(inspect.signature(Strategy.load_optimizer_state_dict).parameters) == ["self", "checkpoint"]


def test_averaging_callbacks_keep_their_average_under_one_name() -> None:
    assert len(AVERAGING) == (2 if hasattr(callbacks, "WeightAveraging") else 1)
    for cls in AVERAGING:
        assert "self._average_model" in inspect.getsource(cls.setup)


def test_the_weights_of_a_checkpoint_are_asked_for_before_its_callbacks() -> None:
    source = inspect.getsource(_CheckpointConnector.dump_checkpoint)
    assert source.index("_get_lightning_module_state_dict") < source.index("_call_callbacks_on_save_checkpoint")


def test_the_path_of_a_resume_is_known_before_it_is_loaded() -> None:
    source = inspect.getsource(_CheckpointConnector.resume_start)
    assert source.index("self._ckpt_path = checkpoint_path") < source.index("strategy.load_checkpoint(")
    assert "self._checkpoint_connector._ckpt_path" in inspect.getsource(Trainer.ckpt_path.fget)  # type: ignore[attr-defined]


def test_a_trainer_is_interrupted_before_callbacks_hear_of_the_exception_and_then_the_strategy() -> None:
    source = inspect.getsource(_interrupt)
    interrupted, told = source.index("TrainerStatus.INTERRUPTED"), source.index('"on_exception"')
    assert interrupted < told < source.index("strategy.on_exception")


def test_settings_are_compared_before_callbacks_are_set_up() -> None:
    run = inspect.getsource(Trainer._run)
    assert run.index("strategy.connect(") < run.index("strategy.setup_environment()") < run.index("_call_setup_hook")
    trainer = Trainer(accelerator="cpu", max_time={"minutes": 2}, logger=False, enable_checkpointing=False)
    for name in SETTINGS:
        assert hasattr(trainer, name), name
    assert settings_of(trainer)["Trainer(max_time)"] == [120]
    keys = [ModelCheckpoint(every_n_train_steps=steps).state_key for steps in (1, 2)]
    assert keys[0] != keys[1], "not what it does"


def test_ddp_searches_for_unused_parameters_where_it_reduces() -> None:
    condition = "torch.is_grad_enabled() and {}.require_backward_grad_sync"
    for function, model in ((DistributedDataParallel._post_forward, "self"), (prepare_for_backward, "model")):
        source = inspect.getsource(function)
        assert source.index(condition.format(model)) < source.index("_find_tensors(output)")


# Local SGD -----------------------------------------------------------------------------------------------------------


def test_backward_is_local_where_grad_sync_is_off() -> None:
    forward = inspect.getsource(DistributedDataParallel._pre_forward)
    assert "torch.is_grad_enabled() and self.require_backward_grad_sync" in forward
    assert "self.reducer._rebuild_buckets()" in forward
    assert hasattr(torch.distributed.Reducer, "_rebuild_buckets")


def test_sigterm_is_broadcast_before_each_batch_by_one_method_if_at_all() -> None:
    source = inspect.getsource(_TrainingEpochLoop)
    assert source.count("broadcast(") <= 1, "the training loop has a new broadcast"
    if "broadcast(" in source:
        assert "broadcast(" in inspect.getsource(_TrainingEpochLoop._broadcast_sigterm_tensor)


def test_sigterm_comes_through_a_list_of_handlers_and_is_acted_on_at_the_end_of_a_batch() -> None:
    handlers = _HandlersCompose([print])
    assert handlers.signal_handlers == [print]
    register = inspect.getsource(_SignalConnector.register_signal_handlers)
    assert "self._sigterm_notifier_fn" in register
    assert "self._slurm_sigusr_handler_fn" in register
    assert "self._signal_connector.received_sigterm" in inspect.getsource(Trainer.received_sigterm.fget)  # type: ignore[attr-defined]
    assert "received_sigterm" in inspect.getsource(_TrainingEpochLoop.on_advance_end)
    run = inspect.getsource(Trainer._run)
    assert run.index("self.strategy.setup(self)") < run.index("register_signal_handlers()")


def test_a_checkpoint_asks_the_strategy_for_the_weights_and_then_saves() -> None:
    assert "lightning_module_state_dict" in inspect.getsource(_CheckpointConnector)
    source = inspect.getsource(Trainer.save_checkpoint)
    assert source.index("dump_checkpoint") < source.index("self.strategy.save_checkpoint")


def test_the_epoch_ends_with_its_last_batch() -> None:
    assert "self.batch_progress.is_last_batch" in inspect.getsource(_TrainingEpochLoop._num_ready_batches_reached)
    assert "self.trainer.val_check_batch" in inspect.getsource(_TrainingEpochLoop._should_check_val_fx)


def test_a_batch_is_known_to_be_the_last_one_when_it_begins() -> None:
    advance = inspect.getsource(_TrainingEpochLoop.advance)
    begin, end = advance.index("is_last_batch = data_fetcher.done"), advance.index("_num_ready_batches_reached")
    assert begin < advance.index('"on_train_batch_start"') < advance.index("automatic_optimization.run") < end
    fetcher = inspect.signature(_PrefetchDataFetcher.__init__)
    assert fetcher.parameters["prefetch_batches"].default == 1


def test_counters_of_batches_and_steps_are_these() -> None:
    loop = Trainer(logger=False, accelerator="cpu", barebones=True).fit_loop.epoch_loop
    assert {"total", "current", "is_last_batch"} <= set(loop.batch_progress.state_dict())
    assert {"total", "current"} <= set(loop.scheduler_progress.state_dict())
    assert set(loop.automatic_optimization.optim_progress.state_dict()) == {"optimizer"}
    assert {"total", "current"} <= set(loop.manual_optimization.optim_step_progress.state_dict())
    assert loop._batches_that_stepped == 0
    assert "_should_check_val_epoch()" in inspect.getsource(_TrainingEpochLoop._should_check_val_fx)
    due = inspect.getsource(_TrainingEpochLoop._should_check_val_fx)
    assert "self.total_batch_idx if self.trainer.check_val_every_n_epoch is None else self.batch_idx" in due
    assert "self._every_n_train_steps" in inspect.getsource(ModelCheckpoint)


def test_monitored_metrics_are_cached_results() -> None:
    source = inspect.getsource(_ResultCollection._get_cache)
    assert "result_metric._computed" in source
    assert list(inspect.signature(_ResultCollection._forked_name).parameters) == ["self", "result_metric", "on_step"]
    assert "self._callback_metrics.update" in inspect.getsource(_LoggerConnector.callback_metrics.fget)  # type: ignore[attr-defined]


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
