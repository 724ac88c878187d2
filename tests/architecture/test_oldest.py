"""The names that the package takes from torch, Lightning and Hydra are there in the oldest releases that it accepts.

With these releases, in the environment that `make test-oldest` makes, `--rewrite-golden` writes `oldest_names.txt`. A
name that is not in it fails here, with any release.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lightning_lowbw

ROOT = Path(lightning_lowbw.__file__).parent
KNOWN = Path(__file__).with_name("oldest_names.txt")
ROOTS = ("torch", "lightning", "torchmetrics", "hydra", "omegaconf")
LATER = {  # names that only newer releases have, or that are there later; what is done without them
    "lightning.pytorch.callbacks.WeightAveraging": "a callback that nobody can have then",
    "torch.distributed.fsdp.FSDPModule": "ShardedStrategy is refused",
    "torch.distributed.fsdp.fully_shard": "ShardedStrategy is refused",
    "torch.distributed.fsdp.register_fsdp_forward_method": "ShardedStrategy is refused",
    "torch.distributed.tensor.DTensor": "taken from torch.distributed._tensor",
    "torch.optim.Muon": "MuonAdamW is refused",
}
IS_OLDEST = torch.__version__.startswith("2.4.")


def names_of(tree: ast.Module) -> Iterator[str]:
    """Yield the dotted names that a module takes from other packages: those it imports, and attributes of these."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in ROOTS:
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.split(".")[0]
                if root in ROOTS:
                    aliases[alias.asname or root] = alias.name if alias.asname else root
    for node in ast.walk(tree):
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name) and node.id in aliases:
            yield ".".join([aliases[node.id], *reversed(parts)])


def resolves(name: str) -> bool:
    """Return whether a dotted name is there, in the release that is installed."""
    root, *parts = name.split(".")
    module: Any = importlib.import_module(root)
    for number, part in enumerate(parts):
        if not hasattr(module, part):
            try:
                module = importlib.import_module(".".join([root, *parts[: number + 1]]))
                continue
            except ImportError:
                return False
        module = getattr(module, part)
    return True


def test_every_name_is_in_the_oldest_releases(request: pytest.FixtureRequest) -> None:
    found = {name for path in ROOT.rglob("*.py") for name in names_of(ast.parse(path.read_text()))}
    if IS_OLDEST and request.config.getoption("--rewrite-golden"):
        KNOWN.write_text("".join(f"{name}\n" for name in sorted(found - set(LATER))))
    known = set(KNOWN.read_text().split())
    assert found - known == set(LATER), (
        f"Check that torch 2.4 and Lightning 2.4 have them (`make test-oldest`), then add them to {KNOWN.name}"
    )
    assert known <= found, f"Take them out of {KNOWN.name}"


def test_every_name_is_in_these_releases() -> None:
    missing = [name for name in KNOWN.read_text().split() if not resolves(name)]
    assert missing == []
