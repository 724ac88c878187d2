"""What a rank sends in each step of a row, by the formulas of the payload: on two levels between nodes.

Written from `comm.collectives`, `TopK.nbytes` and the docstrings under "Wire"; no collective is looked at.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate

from lightning_lowbw import EveryK, EveryStep, LowRank, Quantized, TopK, Whole
from lightning_lowbw.comm.collectives import all_gather_bytes, all_reduce_bytes
from lightning_lowbw.payloads.quantized import FORMATS
from tests.contract.rows import Row
from tests.sync.problem import AWKWARD

NUMELS = {name: math.prod(shape) for name, shape in AWKWARD.items()}
NUMEL = sum(NUMELS.values())
BUFFERS = 5 + 5  # running mean and variance; and one integer
FLOAT_BYTES, INT_BYTES = 4, 8
Turn = tuple[int, int, int]  # see `Volumes.of_replicas`


class Volumes:
    """The formulas on the ranks of a row: a participant has `num_local` ranks, and each sends its part.

    Args:
        row: with a topology of nodes of one size, or none.
    """

    def __init__(self, row: Row) -> None:
        self.row, self.what, topology = row, row.method.what, row.method.where.topology
        self.num_local = 1 if topology == "flat" else topology if isinstance(topology, int) else len(topology.nodes[0])  # type: ignore[union-attr]
        self.num_participants = row.num_ranks // self.num_local

    def whole(self, numel: int) -> int:
        """Return the bytes of an all-reduce of float32 elements."""
        return all_reduce_bytes(FLOAT_BYTES * -(-numel // self.num_local), self.num_participants)

    def parts(self, numels: Sequence[int]) -> list[int]:
        """Return the elements of the longest parts of tensors."""
        return [-(-numel // self.num_local) for numel in numels]

    def quantized(self, value_dtype: str, numels: Sequence[int]) -> int:
        """Return the bytes of a mean in few bits."""
        numel, num, nbytes = sum(self.parts(numels)), self.num_participants, FORMATS[value_dtype].nbytes
        if num == 2 or self.row.method.when.delay_steps:
            return (num - 1) * nbytes(numel)
        return 2 * (num - 1) * nbytes(-(-numel // num))

    def sparse(self, what: TopK, numels: Sequence[int], density: float | None) -> int:
        """Return the bytes of the largest elements."""
        what = what if density is None else what.at(density)
        return all_gather_bytes(what.nbytes(self.parts(numels)), self.num_participants)

    def low_rank(self, what: LowRank, names: Iterable[str], control: int) -> int:
        """Return the bytes of two thin matrices, in two messages; with the first go what does not pay, and a status."""
        lefts = rights = 0
        for shape in map(AWKWARD.__getitem__, names):
            n, m = shape[0] if shape else 1, math.prod(shape[1:])
            rank = min(what.rank, n, m)
            pays = 2 * (n + m) * rank < n * m
            lefts, rights = lefts + (n * rank if pays else n * m), rights + (m * rank if pays else 0)
        return self.whole(lefts + max(1, control)) + self.whole(rights + 1)

    def beside(self, numel: int) -> int:
        """Return the bytes of elements that go in a message to all, each rank's part of them, and of a status."""
        return FLOAT_BYTES * (self.num_participants - 1) * numel

    def compressed(self, names: Iterable[str], control: int = 0) -> int:
        """Return the bytes of tensors that a payload sends in one way always: a new one has its line here."""
        what = self.what
        if isinstance(what, Quantized):
            return self.quantized(what.value_dtype, [NUMELS[name] for name in names]) + self.beside(control)
        assert isinstance(what, LowRank)
        return self.low_rank(what, names, control)

    def of_gradients(self, when: EveryStep, step: int) -> int:
        """Return the bytes of the step with this number, from 0."""
        control, what = len(NUMELS) + 2 * self.row.num_ranks, self.what
        if isinstance(what, Whole) or step < when.rampup_begin_step:
            return self.whole(NUMEL + control)
        if not isinstance(what, TopK):
            return self.compressed(NUMELS, control)
        density = when.density(step, what.density)
        assert density < 1.0
        sparse = [numel for name, numel in NUMELS.items() if what.compresses(name, numel, 1)]
        others = [numel for name, numel in NUMELS.items() if not what.compresses(name, numel, 1)]
        return self.beside(self.parts([sum(others)])[0] + control) + self.sparse(what, sparse, density)

    def of_average(self, when: EveryK, names: Sequence[str], with_buffers: bool) -> int:
        """Return the bytes of the average of some parameters, except integer buffers."""
        numels = {name: NUMELS[name] for name in names if NUMELS[name]}
        taken = [] if isinstance(self.what, Whole) else list(numels.values())
        if isinstance(self.what, TopK):
            taken = [numel for name, numel in numels.items() if self.what.compresses(name, numel, 1)]
        words = sum(numels.values()) - sum(taken) + BUFFERS * with_buffers + 5 + 2 * self.row.num_ranks
        if isinstance(self.what, TopK):
            return self.whole(words) + self.sparse(self.what, taken, None)
        return self.whole(words) + (self.compressed(numels) if taken else 0)

    def of_replicas(
        self, when: EveryK, num_steps: int, turns: Sequence[Turn], fragments: Sequence[Sequence[str]]
    ) -> list[int]:
        """Return the bytes of each step.

        Args:
            turns: after which step, from 1, which fragment's average is begun, and after which it is applied.
        """
        assert isinstance(when.begin_step, int)
        synchronous = self.whole(NUMEL + len(NUMELS) + 2 + 2 * self.row.num_ranks)
        by_step = [synchronous if step < when.begin_step else 0 for step in range(num_steps)]
        # What differs, of three buffers: all do; and where changes of floating ones are measured from.
        by_step[max(0, when.begin_step - 1)] += all_reduce_bytes(2 * INT_BYTES * (1 + 3), self.row.num_ranks)
        by_step[max(0, when.begin_step - 1)] += FLOAT_BYTES * BUFFERS
        for begun, fragment, applied in turns:
            is_last = fragment == len(fragments) - 1
            by_step[begun - 1] += self.of_average(when, fragments[fragment], with_buffers=is_last)
            if is_last and applied <= num_steps:
                by_step[applied - 1] += INT_BYTES
        return by_step


def wire_bytes(row: Row, num_steps: int, turns: Sequence[Turn], fragments: Sequence[Sequence[str]]) -> list[int]:
    """Return what a rank has sent after each step; see `Volumes.of_replicas`."""
    volumes, when = Volumes(row), row.method.when
    if isinstance(when, EveryStep):
        return list(accumulate(volumes.of_gradients(when, step) for step in range(num_steps)))
    return list(accumulate(volumes.of_replicas(when, num_steps, turns, fragments)))
