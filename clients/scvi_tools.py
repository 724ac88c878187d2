"""scVI on counts of 800 cells."""

import anndata
import lightning.pytorch as pl
import numpy as np
import scvi

from clients.trial import Trial

PROJECT = "scvi-tools"
REMARK = (
    'By class: it looks for "ddp" in a name to choose its distributed sampler. By name it ends with an error that says '
    "so."
)
CLASSES = {
    "ddp": '"ddp_find_unused_parameters_true"',
    "dgc": "lowbw.DGCStrategy(find_unused_parameters=True)",
    "local_sgd": "lowbw.LocalSGDStrategy(find_unused_parameters=True)",
}


def main() -> None:
    trial = Trial(pl, "model.train(strategy=%s)", CLASSES)
    scvi.settings.seed = 0
    generator = np.random.default_rng(0)
    kinds = generator.integers(0, 4, 800)
    rates = np.exp(generator.standard_normal((4, 200)))
    cells = anndata.AnnData(generator.poisson(rates[kinds]).astype(np.float32))
    cells.obs["batch"] = generator.integers(0, 2, 800).astype(str)
    scvi.model.SCVI.setup_anndata(cells, batch_key="batch")
    model = scvi.model.SCVI(cells)
    model.train(max_epochs=11, batch_size=32, early_stopping=False, strategy=trial.strategy, **trial.options())


if __name__ == "__main__":
    main()
