"""darts' N-HiTS: it makes the Trainer of pytorch_lightning itself, and gives it a checkpoint plugin of its own."""

import numpy as np
import pytorch_lightning as pl
from darts import TimeSeries
from darts.models import NHiTSModel

import lightning_lowbw  # noqa: F401 - as a user adds it
from clients.trial import Trial

PROJECT = "darts"


def main() -> None:
    trial = Trial(pl, 'NHiTSModel(..., pl_trainer_kwargs={"strategy": %s})')
    generator = np.random.default_rng(0)
    hours = np.arange(700)
    values = np.sin(2 * np.pi * hours / 24) + 0.1 * generator.standard_normal(hours.shape)
    series = TimeSeries.from_values(values.astype(np.float32))
    train, validation = series[:600], series[600:]
    model = NHiTSModel(
        input_chunk_length=48,
        output_chunk_length=12,
        layer_widths=128,
        batch_size=8,
        n_epochs=4,
        random_state=0,
        pl_trainer_kwargs={"strategy": trial.strategy, **trial.options()},
    )
    model.fit(train, val_series=validation)


if __name__ == "__main__":
    main()
