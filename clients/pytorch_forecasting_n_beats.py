"""N-BEATS, with early stopping."""

import lightning.pytorch as pl
from lightning.pytorch.callbacks import EarlyStopping
from pytorch_forecasting import NBeats, TimeSeriesDataSet

from clients.pytorch_forecasting_tft import frame
from clients.trial import Trial

PROJECT = "pytorch-forecasting"


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
        time_varying_unknown_reals=["sales"],
    )
    validation = TimeSeriesDataSet.from_dataset(training, data, min_prediction_idx=106)
    model = NBeats.from_dataset(
        training, learning_rate=1e-3, weight_decay=1e-2, widths=[32, 256], backcast_loss_ratio=0.1
    )
    options = trial.options(EarlyStopping("val_loss", patience=10))
    trainer = pl.Trainer(
        strategy=trial.strategy, max_epochs=4, limit_train_batches=30, gradient_clip_val=0.1, **options
    )
    trainer.fit(
        model, training.to_dataloader(train=True, batch_size=16), validation.to_dataloader(train=False, batch_size=16)
    )


if __name__ == "__main__":
    main()
