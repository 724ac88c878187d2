"""A method in words, for the `repr` of a strategy."""

from __future__ import annotations

from typing import Any

from lightning_lowbw.engine.method import Method
from lightning_lowbw.what.payloads import Narrow
from lightning_lowbw.what.top_k import TopK
from lightning_lowbw.when.every_k import AUTO, FIRST_LR_DECAY, MOST_FRAGMENTS, EveryK
from lightning_lowbw.when.every_step import EveryStep


def in_words(method: Method) -> str:
    """Return when the ranks communicate, and what is sent.

    Example:
        >>> from lightning_lowbw.engine.presets import DGC, LocalSGD
        >>> in_words(DGC(sparsity=[0.75, 0.999], rampup_begin_step=500, rampup_step=1500))
        'every step, the 25 %, later 0.1 % largest elements of each tensor as bfloat16, from step 500 over 1500 steps'
        >>> in_words(LocalSGD(k_steps=8))
        'every 8 steps after step 1, whole parameters in float32'
    """
    if isinstance(method.when, EveryK):
        return _averages_in_words(method.when, _changes_in_words(method))
    return _gradients_in_words(method.when, method.what)


def where_in_words(method: Method) -> dict[str, object]:
    """Return who communicates with whom, by the names of the arguments; algorithm and dtype if not the default."""
    where = method.where
    shown: dict[str, object] = {"topology": where.topology}
    if where.topology != "flat" and where.algorithm is not None:
        shown["algorithm"] = where.algorithm
    return shown if where.inter_dtype == "float32" else {**shown, "inter_dtype": where.inter_dtype}


def percent(fraction: float) -> str:
    """Return a fraction as a percentage, without digits that mean nothing."""
    return f"{100 * fraction:.4g} %"


def _gradients_in_words(when: EveryStep, what: object) -> str:
    if isinstance(what, Narrow):
        begin = f", from step {when.rampup_begin_step}" if when.rampup_begin_step else ""
        return f"every step, whole gradients as {what.value_dtype}{begin}"
    if not isinstance(what, TopK):
        return "every step, whole gradients"
    words = _measured_in_words(when, what) if when.is_auto else _stairs_in_words(when, what)
    if what.exchange != "auto":
        words.append(f"by {what.exchange}")
    return ", ".join(["every step", *words])


def _measured_in_words(when: EveryStep, what: TopK) -> list[str]:
    auto = f"as many of the largest elements of {_pieces_in_words(what)} as cost {percent(when.budget)} of a step"
    return [auto, f"as {what.value_dtype}", *(["without a warm-up"] if when.pretrained else [])]


def _stairs_in_words(when: EveryStep, what: TopK) -> list[str]:
    densities = [1.0 - sparsity for sparsity in when.stairs] or [what.density]
    stairs = ", later ".join(percent(density) for density in densities)
    spread = f" over {when.rampup_step} steps" if len(densities) > 1 else ""
    return [
        f"the {stairs} largest elements of {_pieces_in_words(what)} as {what.value_dtype}",
        f"from step {when.rampup_begin_step}{spread}",
    ]


def _averages_in_words(when: EveryK, payload: str) -> str:
    begin: Any = when.begin_step
    if isinstance(begin, float):
        after = f"{percent(begin)} of the run"
    else:
        after = "the first decay of the learning rate" if begin == FIRST_LR_DECAY else f"step {begin}"
    period = str(when.k_steps)
    if when.rule != "fixed":
        period += f" to {when.max_k_steps}"
        after += f" by rule {when.rule!r}"
    words = [f"every {period} steps after {after}", payload]
    if when.has_fragments:
        num = f"up to {MOST_FRAGMENTS}" if when.num_fragments == AUTO else when.num_fragments
        words.append(f"in {num} fragments")
    if when.outer != "none":
        words.append(f"outer optimizer {when.outer!r}")
    if when.delay_steps:
        words.append(f"hidden behind {when.delay_steps if when.delay_steps != 'auto' else 'measured'} steps")
    return ", ".join(words)


def _changes_in_words(method: Method) -> str:
    what = method.what
    if isinstance(what, TopK):
        return f"the {percent(what.density)} largest changes of {_pieces_in_words(what)} as {what.value_dtype}"
    return f"whole changes in {what.value_dtype}" if isinstance(what, Narrow) else "whole parameters in float32"


def _pieces_in_words(what: TopK) -> str:
    return "each tensor" if what.chunk is None else f"each chunk of {what.chunk}"
