"""neuralforecast's N-HiTS: it makes the Trainer of pytorch_lightning itself; the length of the run is in steps."""

import neuralforecast
import numpy as np
import pandas as pd
import pytorch_lightning as pl
from neuralforecast.models import NHITS

import lightning_lowbw  # noqa: F401 - as a user adds it
from clients.trial import Trial

PROJECT = "neuralforecast"


def main() -> None:
    trial = Trial(pl, "NHITS(..., strategy=%s)")
    generator = np.random.default_rng(0)
    hours, series = np.meshgrid(np.arange(300), np.arange(16))
    values = np.sin(2 * np.pi * (hours + series) / 24) + 0.1 * generator.standard_normal(hours.shape)
    frame = pd.DataFrame({"unique_id": series.ravel(), "ds": hours.ravel(), "y": values.ravel()})
    model = NHITS(
        h=12,
        input_size=48,
        mlp_units=[[64, 64]] * 3,
        windows_batch_size=32,
        max_steps=120,
        val_check_steps=60,
        strategy=trial.strategy,
        **trial.options(),
    )
    neuralforecast.NeuralForecast(models=[model], freq=1).fit(frame, val_size=24)


if __name__ == "__main__":
    main()
