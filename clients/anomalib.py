"""GANomaly of anomalib, from a folder of images: manual optimization, two optimizers, one graph for both losses."""

import tempfile
from pathlib import Path

import lightning.pytorch as pl
from anomalib.data import Folder
from anomalib.engine import Engine
from anomalib.models import Ganomaly
from torchvision.transforms.functional import to_pil_image

from clients.trial import Trial, images, names

PROJECT = "anomalib"


def main() -> None:
    pl.seed_everything(0)
    trial = Trial(pl, "Engine(strategy=%s)", names("_find_unused_parameters_true"), loss="generator_loss")
    folder = Path(tempfile.mkdtemp(dir="."))  # of this rank alone
    for index, (image, label) in enumerate(zip(*images(480, 32, 4), strict=True)):
        kind = folder / ("bad" if label == 3 else "good")
        kind.mkdir(exist_ok=True)
        to_pil_image((image.clamp(-3, 3) + 3) / 6).save(kind / f"{index}.png")
    data = Folder("squares", root=folder, normal_dir="good", abnormal_dir="bad", train_batch_size=4, num_workers=0)
    size = Ganomaly.configure_pre_processor(image_size=(32, 32))
    model = Ganomaly(batch_size=4, n_features=16, latent_vec_size=32, pre_processor=size, visualizer=False)
    engine = Engine(strategy=trial.strategy, max_epochs=3, default_root_dir=".", **trial.options())
    engine.fit(model, datamodule=data)


if __name__ == "__main__":
    main()
