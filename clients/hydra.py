"""Code in the manner of lightning-hydra-template: `@hydra.main`, and all that is built is a `_target_`."""

import sys
from typing import Any

import hydra
import lightning.pytorch as pl
from hydra.core.config_store import ConfigStore

from clients.ema import loaders
from clients.trial import Trial

PROJECT = "hydra-core"
CLASSES = {
    "ddp": "lightning.pytorch.strategies.DDPStrategy",
    "dgc": "lightning_lowbw.DGCStrategy",
    "local_sgd": "lightning_lowbw.LocalSGDStrategy",
}
ConfigStore.instance().store(
    "train",
    {
        "model": {"_target_": "clients.ema.Classifier"},
        "trainer": {"_target_": "lightning.pytorch.Trainer", "max_epochs": 5, "strategy": {"_target_": "???"}},
    },
)


@hydra.main(version_base=None, config_name="train")
def main(config: Any) -> None:
    pl.seed_everything(0)
    trainer = hydra.utils.instantiate(config.trainer, **trial.options())
    trainer.fit(hydra.utils.instantiate(config.model), *loaders())


if __name__ == "__main__":
    trial = Trial(pl, "trainer.strategy._target_=%s", CLASSES)
    if len(sys.argv) == 1:  # a rank that Lightning has started has it already
        sys.argv.append(f"trainer.strategy._target_={trial.typed}")
    main()
