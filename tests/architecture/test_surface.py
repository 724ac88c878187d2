"""The public surface: names, keywords, YAML keys, metrics and the keys of a checkpoint are those of `surface.txt`.

`pytest tests/architecture --rewrite-golden` writes the file anew; its diff is the list of what was and what is.
"""

from __future__ import annotations

import difflib
import inspect
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import StrategyRegistry
from omegaconf import DictConfig, OmegaConf

import lightning_lowbw as lowbw
from lightning_lowbw.strategies.keywords import DDP_KEYWORDS, OWNED, STRATEGY_KEYWORDS, UNSUPPORTED
from tests.ranks import run_ranks
from tests.strategies.fits import train
from tests.tiny import MIN_NUMEL

FILE = Path(__file__).with_name("surface.txt")
CONF = Path(__file__).parents[2] / "conf"
COMMON = "the keywords of every strategy"  # DDP's depend on the release of torch
METHODS = {
    "dgc": lowbw.DGC(sparsity=(0.8,), min_numel=MIN_NUMEL),
    "sparse_loco": lowbw.LocalSGD(2, 0, outer="nesterov", compression={"density": 0.1, "min_numel": MIN_NUMEL}),
}


def keys_of(value: Mapping[Any, Any], parents: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the paths of all leaves, without names of tensors, which are the user's, and without torch's own keys."""
    for key, inner in value.items():
        path = (*parents, str(key))
        if "." in str(key) or isinstance(key, int):
            yield ".".join((*parents, "*"))
        elif key == "param_groups":
            yield ".".join(path)
        elif isinstance(inner, (Mapping, DictConfig)) and inner:
            yield from keys_of(inner, path)
        elif isinstance(inner, list) and inner and all(isinstance(each, Mapping) for each in inner):
            for each in inner:
                yield from keys_of(each, path)
        else:
            yield ".".join(path)


def keywords_of(function: Any) -> str:
    if isinstance(function, type) and issubclass(function, Exception):
        return "a message"
    names = list(inspect.signature(function).parameters)
    own = [name for name in names if name not in STRATEGY_KEYWORDS]
    return " ".join(own if own == names else [*own, f"and {COMMON}"])


def save(name: str, folder: str) -> list[str]:
    """Train three steps on each rank; return the metrics, the files of a checkpoint, and their keys."""
    trainer = train(lowbw.Strategy(METHODS[name]), data=3, callbacks=[lowbw.TrafficMonitor()])
    trainer.save_checkpoint(f"{folder}/a.ckpt")
    trainer.strategy.barrier()
    state = torch.load(f"{folder}/a.ckpt", weights_only=True)["lightning_lowbw"]
    (shard,) = Path(folder, "a.ckpt.ranks").glob("rank-0-of-2-*.pt")
    keys = sorted({*keys_of(torch.load(shard, weights_only=True))})
    metrics = [metric for metric in trainer.callback_metrics if metric.startswith("traffic/")]
    return [
        *(f"metric of {name}: {metric}" for metric in sorted(metrics)),
        *(f".ckpt of {name}: lightning_lowbw.{key}" for key in sorted({*keys_of(state)})),
        *(f"shard of {name}: {key}" for key in keys),
    ]


def surface() -> list[str]:
    own = [name for name in STRATEGY_KEYWORDS if name not in DDP_KEYWORDS]
    lines = [f"{COMMON}: {' '.join(own)}, and those of ddp without {' '.join(sorted({*OWNED, *UNSUPPORTED}))}"]
    for name in sorted(lowbw.__all__):
        lines.append(f"exported: {name}({keywords_of(getattr(lowbw, name))})")
    classes = [entry["strategy"] for entry in StrategyRegistry.values()]
    ours = [cls for cls in classes if cls.__module__.startswith("lightning_lowbw")]
    lines.append(f"registered names, with endings: {len(ours)}")
    lines += [f"strategy name: {name}" for name in lowbw.names()]
    for path in sorted(CONF.rglob("*.yaml")):
        keys = keys_of(OmegaConf.to_container(OmegaConf.load(path)) or {})  # type: ignore[arg-type]
        lines.append(f"conf/{path.relative_to(CONF)}: {' '.join(sorted({*keys}))}")
    for name in METHODS:
        with tempfile.TemporaryDirectory() as folder:
            lines += run_ranks(save, 2, name, folder)[0]
    return lines


def test_the_public_surface_is_the_recorded_one(request: pytest.FixtureRequest) -> None:
    now = surface()
    if request.config.getoption("--rewrite-golden"):
        FILE.write_text("".join(f"{line}\n" for line in now))
    was = FILE.read_text().splitlines()
    changes = "\n".join(line for line in difflib.ndiff(was, now) if line[0] in "+-")
    assert was == now, f"The public surface has changed; was (-), is (+):\n{changes}\nIf so: --rewrite-golden."
