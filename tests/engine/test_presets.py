"""The values of the names in docs/methods/local_sgd.md are those of the presets."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from lightning_lowbw import EveryK, LocalSGD, Method, TopK
from lightning_lowbw.engine.presets import PRESETS, preset

PAGE = Path(__file__).resolve().parents[2] / "docs" / "methods" / "local_sgd.md"
HEAD = "| name | `k_steps` | `begin_step` | other values |\n| --- | --- | --- | --- |\n"
NAMES = [name for name in PRESETS if preset(name).averages_weights]


def in_words(method: Method) -> list[str]:
    """Return the cells of a row: what differs from local SGD's defaults."""
    when, usual, others = method.when, LocalSGD().when, list[str]()
    assert isinstance(when, EveryK)
    words = {
        "rule": f'rule "{when.rule}"',
        "outer": f'outer "{when.outer}"',
        "num_fragments": f"{when.num_fragments_of(1000)} fragments",
        "delay_steps": f'hidden (`delay_steps="{when.delay_steps}"`)',
        "mixing": f"mixing {when.mixing}",
    }
    changed = {each.name for each in fields(EveryK) if each.compare and each.init}
    changed = {name for name in changed if getattr(when, name) != getattr(usual, name)} - {"k_steps", "begin_step"}
    assert changed <= set(words)
    others = [words[name] for name in words if name in changed]
    if isinstance(method.what, TopK):
        others.append(f'density 1/{1 / method.what.density:.0f}, "{method.what.value_dtype}"')
    period = f"{when.k_steps}" if when.rule == "fixed" else f"{when.k_steps} to {when.max_k_steps}"
    begin = f'"{when.begin_step}"' if isinstance(when.begin_step, str) else f"{when.begin_step}"
    return [period, begin, ", ".join(others)]


@pytest.mark.parametrize("name", NAMES)
def test_the_card_has_the_values_of_the_names(name: str) -> None:
    rows = PAGE.read_text().partition(HEAD)[2].partition("\n\n")[0].splitlines()
    cells = {row.split("|")[1].strip(): [cell.strip() for cell in row.split("|")[2:-1]] for row in rows}
    assert list(cells) == [f"`{each}`" for each in NAMES]
    assert cells[f"`{name}`"] == in_words(preset(name))
