"""The sparse reduce-scatter: nothing is lost, replicas are equal, volumes are bounded; against sums in dictionaries."""

from __future__ import annotations

from itertools import pairwise, product
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from lightning_lowbw.comm.peers import Peers
from lightning_lowbw.compress import sparse_sum
from lightning_lowbw.compress.codec import MAX_NUMEL, SparseCodec
from lightning_lowbw.compress.selection import num_selected
from lightning_lowbw.compress.top_k import TopK
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.sync.exchange import ReduceScatterExchange
from tests.ranks import on_ranks
from tests.sync.problem import same_on_all

NUMELS = (1000, 0, 1, 257, 4096)


class Round(NamedTuple):
    """All ranks of one step, in one process."""

    outgoing: list[sparse_sum.Outgoing]
    owned: list[sparse_sum.Owned]
    reduced: sparse_sum.Reduced


def play(plan: sparse_sum.SparseSum, selections: list[sparse_sum.Sparse]) -> Round:
    outgoing = [plan.prepare(rank, selected) for rank, selected in enumerate(selections)]
    received = [torch.stack([out.message[rank] for out in outgoing]) for rank in range(plan.num_ranks)]
    owned = [plan.combine(rank, outgoing[rank].own, received[rank]) for rank in range(plan.num_ranks)]
    return Round(outgoing, owned, plan.finish(torch.stack([out.message for out in owned])))


def draw(numel: int, count: int, seed: int, begin: int = 0, dtype: torch.dtype = torch.float32) -> sparse_sum.Sparse:
    """Select elements at random, from `begin` on; integers, whose sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    positions = begin + torch.randperm(numel - begin, generator=generator)[:count].sort().values
    return positions, torch.randint(-50, 50, (positions.numel(),), generator=generator).to(dtype)


def as_dict(*vectors: sparse_sum.Sparse) -> dict[int, float]:
    total: dict[int, float] = {}
    for positions, values in vectors:
        for position, value in zip(positions.tolist(), values.tolist(), strict=True):
            total[position] = total.get(position, 0.0) + value
    return total


class Oracle:
    """The same algorithm, element by element, in dictionaries."""

    def __init__(self, numels: tuple[int, ...], boundaries: tuple[int, ...], k: int) -> None:
        num_ranks = len(boundaries) - 1
        self.tensor_of = [tensor for tensor, numel in enumerate(numels) for _ in range(numel)]
        self.parts = list(pairwise(boundaries))
        self.room = sparse_sum.scatter_capacity(k, num_ranks)
        self.offer = sparse_sum.gather_capacity(k, num_ranks)

    def choose(self, elements: dict[int, float], capacity: int) -> dict[int, float]:
        """Of every tensor the same fraction, and the largest of it."""
        by_tensor: dict[int, list[int]] = {}
        for position in sorted(elements, key=lambda position: -abs(elements[position])):
            by_tensor.setdefault(self.tensor_of[position], []).append(position)
        ranked = []
        for positions in by_tensor.values():
            ranked += [((place + 0.5) / len(positions), position) for place, position in enumerate(positions)]
        return {position: elements[position] for _, position in sorted(ranked)[:capacity]}

    def run(self, selections: list[sparse_sum.Sparse]) -> tuple[dict[int, float], list[dict[int, float]]]:
        """Return the mean, and what goes back to each rank."""
        mean: dict[int, float] = {}
        unsent: list[dict[int, float]] = [{} for _ in self.parts]
        for owner, (begin, end) in enumerate(self.parts):
            sums: dict[int, float] = {}
            for rank, selected in enumerate(selections):
                mine = {p: v for p, v in as_dict(selected).items() if begin <= p < end}
                sent = mine if rank == owner else self.choose(mine, self.room)
                for position, value in mine.items():
                    if position in sent:
                        sums[position] = sums.get(position, 0.0) + value
                    else:
                        unsent[rank][position] = value
            handed = self.choose(sums, self.offer)
            mean.update({position: value / len(self.parts) for position, value in handed.items()})
            unsent[owner].update({position: value for position, value in sums.items() if position not in handed})
        return mean, unsent


def distinct_magnitudes(selected: sparse_sum.Sparse, rank: int) -> sparse_sum.Sparse:
    """No two sums are equal in magnitude: which of two is larger would be a matter of taste. Powers of two apart."""
    positions, values = selected
    return positions, values.sign() * (1.0 + positions.float() / 2**13) * (1 + rank / 64)


@pytest.mark.parametrize(("num", "begin", "gathered"), [(1, 0, 4), (2, 4900, 4), (3, 0, 1), (3, 4900, 2), (8, 4900, 1)])
def test_like_the_oracle(num: int, begin: int, gathered: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_sum, "GATHERED", gathered)
    numel, k = sum(NUMELS), 400
    boundaries = sparse_sum.even_boundaries(NUMELS, [num_selected(n, 0.07) if n else 0 for n in NUMELS], num)
    plan = sparse_sum.SparseSum(NUMELS, k, boundaries, SparseCodec("float32"))
    selections = [distinct_magnitudes(draw(numel, k, seed, begin), seed) for seed in range(num)]
    mean, unsent = Oracle(NUMELS, boundaries, k).run(selections)
    played = play(plan, selections)
    assert as_dict(played.reduced.mean) == pytest.approx(mean)
    for selected, outgoing, owned, expected in zip(selections, played.outgoing, played.owned, unsent, strict=True):
        back = as_dict((selected[0], outgoing.unsent), owned.unsent)
        assert {**dict.fromkeys(back, 0.0), **expected} == pytest.approx({**dict.fromkeys(expected, 0.0), **back})
    if begin:  # the test is about something
        assert num == 1 or any(outgoing.unsent.any() for outgoing in played.outgoing)


def test_equal_positions_add_up_in_rank_order() -> None:
    values = [1e8, 1.0, -1e8]  # (1e8 + 1) - 1e8 is 0 in float32, any other order gives 1
    positions, sums = sparse_sum.sum_in_order([(torch.tensor([7]), torch.tensor([value])) for value in values])
    assert (positions.tolist(), sums.tolist()) == ([7], [0.0])


def test_parts_find_the_elements() -> None:
    """All in the last hundredth: after a few steps the owners have equal shares, and hardly anything overflows."""
    numel, k, num_ranks = 1_000_000, 4000, 4
    boundaries = sparse_sum.even_boundaries((numel,), (k,), num_ranks)
    overflow = []
    for step in range(6):
        selections = [draw(numel, k, 50 * step + rank, begin=990_000) for rank in range(num_ranks)]
        played = play(sparse_sum.SparseSum((numel,), k, boundaries, SparseCodec("float32")), selections)
        overflow.append(sum(int(outgoing.unsent.count_nonzero()) for outgoing in played.outgoing) / (num_ranks * k))
        boundaries = played.reduced.boundaries
        assert boundaries[0] == 0
        assert boundaries[-1] == numel
        assert list(boundaries) == sorted(boundaries)
    assert overflow[0] > 0.3 * (1 - 1 / num_ranks)
    assert overflow[-1] < 0.001
    assert boundaries[1] > 990_000


def test_boundaries_follow_from_the_tensors_before_anything_is_known() -> None:
    assert sparse_sum.even_boundaries((100, 100), (10, 30), 4) == (0, 100, 133, 166, 200)
    assert sparse_sum.even_boundaries((7,), (1,), 1) == (0, 7)
    for num_ranks in (2, 5, 64):  # more ranks than elements
        boundaries = sparse_sum.even_boundaries((3, 0, 2), (1, 0, 1), num_ranks)
        assert (len(boundaries), boundaries[0], boundaries[-1]) == (num_ranks + 1, 0, 5)
        assert list(boundaries) == sorted(boundaries)


def test_less_than_six_k_whatever_the_number_of_ranks() -> None:
    for num_ranks, k in product(range(2, 65), (1024, 1_000_003)):
        capacity = sparse_sum.scatter_capacity(k, num_ranks) + sparse_sum.gather_capacity(k, num_ranks)
        assert (num_ranks - 1) * capacity < 6 * k


def test_too_many_elements() -> None:
    with pytest.raises(ConfigurationError, match="positions for 2147483647"):
        sparse_sum.SparseSum((MAX_NUMEL, 1), 10, (0, MAX_NUMEL, MAX_NUMEL + 1), SparseCodec("float32"))


# On real ranks ------------------------------------------------------------------------------------------------------


@on_ranks(3)
def test_an_exchange_of_three_ranks_loses_nothing() -> None:
    """All of the last tensor's elements lie at its beginning."""
    peers = Peers()
    exchange = ReduceScatterExchange(TopK(density=0.02, exchange="reduce_scatter"), peers)
    applied, made = ([torch.zeros(numel, dtype=torch.float64) for numel in NUMELS] for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse_sum, "GATHERED", 1)  # so that sums wait, too
        for step in range(4):
            seeds = [torch.Generator().manual_seed(1000 * step + peers.rank) for _ in NUMELS]
            drawn = [torch.randn(numel, generator=seed) for numel, seed in zip(NUMELS, seeds, strict=True)]
            gradients = {str(number): gradient for number, gradient in enumerate(drawn)}
            gradients["4"][200:] = 0.0
            means = exchange.prepare(gradients).send().wait().mean.dense()
            for total, mean, mine, gradient in zip(applied, means.values(), made, gradients.values(), strict=True):
                total += mean.double() * peers.num_ranks
                mine += gradient
    same_on_all([total.tolist() for total in applied])
    for total, kept, mine in zip(applied, exchange.residuals.values(), made, strict=True):
        apart = mine - kept
        dist.all_reduce(apart)
        torch.testing.assert_close(total, apart, rtol=1e-5, atol=2e-5)
