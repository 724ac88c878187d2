"""The temporal fusion transformer, hidden size 32, with early stopping and a monitor of the learning rate."""

import lightning.pytorch as pl
import numpy as np
import pandas as pd
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor
from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet
from pytorch_forecasting.metrics import QuantileLoss

from clients.trial import Trial

PROJECT = "pytorch-forecasting"


def frame() -> pd.DataFrame:
    """Return the sales of 20 shops in 120 days."""
    generator = np.random.default_rng(0)
    days, shops = np.meshgrid(np.arange(120), np.arange(20))
    sales = 5 + np.sin(2 * np.pi * (days + shops) / 7) + 0.02 * days + 0.2 * generator.standard_normal(days.shape)
    frame = pd.DataFrame({"day": days.ravel(), "shop": shops.ravel().astype(str), "sales": sales.ravel()})
    frame["weekday"] = (frame.day % 7).astype(str)
    return frame


def main() -> None:
    pl.seed_everything(0)
    trial = Trial(pl, "pl.Trainer(strategy=%s)")
    data = frame()
    training = TimeSeriesDataSet(
        data[data.day < 106],
        time_idx="day",
        target="sales",
        group_ids=["shop"],
        max_encoder_length=21,
        max_prediction_length=7,
        static_categoricals=["shop"],
        time_varying_known_categoricals=["weekday"],
        time_varying_unknown_reals=["sales"],
    )
    validation = TimeSeriesDataSet.from_dataset(training, data, predict=True, stop_randomization=True)
    model = TemporalFusionTransformer.from_dataset(
        training,
        learning_rate=0.01,
        hidden_size=32,
        attention_head_size=2,
        hidden_continuous_size=16,
        loss=QuantileLoss(),
        reduce_on_plateau_patience=2,
    )
    options = trial.options(EarlyStopping("val_loss", patience=10), LearningRateMonitor())
    trainer = pl.Trainer(
        strategy=trial.strategy, max_epochs=4, limit_train_batches=30, gradient_clip_val=0.1, **options
    )
    trainer.fit(
        model, training.to_dataloader(train=True, batch_size=16), validation.to_dataloader(train=False, batch_size=16)
    )


if __name__ == "__main__":
    main()
