"""LoRA of peft on GPT-2 of transformers: few trained parameters beside many frozen ones."""

import lightning.pytorch as pl
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader

from clients.transformers import LanguageModel, sentences
from clients.trial import Trial

PROJECT = "peft"


class Adapted(LanguageModel):
    def __init__(self) -> None:
        super().__init__()
        self.model = get_peft_model(
            self.model, LoraConfig(r=16, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
        )


def main() -> None:
    pl.seed_everything(0)
    trial = Trial(pl, "pl.Trainer(strategy=%s)")
    trainer = pl.Trainer(strategy=trial.strategy, max_epochs=2, gradient_clip_val=1.0, **trial.options())
    trainer.fit(Adapted(), DataLoader(sentences(480), 4, shuffle=True))


if __name__ == "__main__":
    main()
