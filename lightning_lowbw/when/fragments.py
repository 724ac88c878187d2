"""Fragments of a model that are averaged at different steps, so that less is sent at once.

Source: Douillard et al., "Streaming DiLoCo with overlapping communication", arXiv 2501.18512, section 2.2 and algorithm
2: fragment p of P is begun when t - t_p is a multiple of its period.

Deviation: the authors' fragments are whole layers in a known order; here tensors are combined so that fragments have
nearly equal sizes, for any model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def balance(sizes: Sequence[int], loads: Sequence[int]) -> list[int]:
    """Return a fragment for each tensor: the largest first, each to the smallest fragment so far.

    The largest fragment has at most 4/3 of what it must have (Graham, "Bounds on multiprocessing timing anomalies",
    1969); a tensor is not cut, so that one with more than 1/P of it all is the peak.

    Args:
        sizes: of each tensor: elements, or bytes that are sent.
        loads: what each fragment has already.

    Example:
        >>> balance([10, 50, 30, 20], [0, 0])
        [0, 0, 1, 1]
    """
    totals, chosen = list(loads), [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        chosen[index] = min(range(len(totals)), key=lambda p: (totals[p], p))
        totals[chosen[index]] += max(sizes[index], 1)  # empty tensors are spread, too
    return chosen


def steps_before(fragment: int, num_fragments: int, k_steps: int) -> int:
    """Return by how many steps the first period of a fragment is shortened, so that the last one is begun after k
    steps.

    Example:
        >>> [100 - steps_before(fragment, 4, 100) for fragment in range(4)]
        [25, 50, 75, 100]
    """
    return k_steps - round((fragment + 1) * k_steps / num_fragments)


def hiding_steps(average_s: float, step_s: float, k_steps: int) -> int:
    """Return tau, the number of steps that hide an average: as many as it takes, at least one, fewer than k.

    Args:
        average_s: seconds that an average takes, waited for.
        step_s: seconds of a local step.
    """
    ratio = average_s / step_s if step_s > 0 else math.inf
    return min(max(1, math.ceil(min(ratio, float(k_steps)))), k_steps - 1)
