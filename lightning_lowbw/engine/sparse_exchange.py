"""The largest elements of all tensors, from accumulation to average: one implementation for gradients and for weights.

    accumulate   e = e + D, or a correction of D      | `what.selection`, over a table of segments
    choose       the k largest of e, and encode them  | `what.top_k`
    exchange     between peers                        | `where.peers`
    average      1/N of the sum, in one order         | `what.top_k`

Elements that were not sent, and rounding errors, stay in e.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_lowbw.engine.sparse_work import DenseWork, GatheredWork, ReducedWork, SparseWork
from lightning_lowbw.errors import ConfigurationError
from lightning_lowbw.namespaces import LOGGER
from lightning_lowbw.ops.reference import Segment
from lightning_lowbw.what.positions import MAX_NUMEL
from lightning_lowbw.what.residuals import Residuals
from lightning_lowbw.what.selection import Selection
from lightning_lowbw.what.sparse_sum import Sparse
from lightning_lowbw.what.top_k import TopK
from lightning_lowbw.where.link import Choice, Link, choose
from lightning_lowbw.where.peers import Peers
from lightning_lowbw.where.probe import measure_link
from lightning_lowbw.where.reduce_scatter import SparseReduceScatter

_logger = logging.getLogger(LOGGER)


@dataclass
class SparseExchange:
    """Exchanges the largest elements of tensors between peers, and keeps the rest of each.

    On two levels each rank of a node does this for its part of every tensor, among the ranks that have this part in
    the other nodes; inside the node the messages are gathered.

    Args:
        payload: what is sent; may be replaced between steps, on all ranks.
        peers: who takes part.

    Attributes:
        residuals: e of this rank's part of each tensor, by name; float32, float64 of tensors in float64; flat.
        link: by which the collective is chosen, once it has been measured.
        damaged: whether a message had invalid positions: bool, a scalar on the device; None before the first. On a CPU
            an error is raised instead. The next control message reports it, because that of this step has been sent
            already.
    """

    payload: TopK
    peers: Peers
    residuals: Residuals = field(default_factory=Residuals, init=False)
    _selections: dict[str, Selection] = field(default_factory=dict, init=False)
    link: Link | None = field(default=None, init=False)
    damaged: Tensor | None = field(default=None, init=False)
    _last_kind: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self._reducer = SparseReduceScatter(self.peers.between, self.payload.codec)

    @property
    def selection(self) -> Selection:
        """What finds the largest, as the payload says."""
        return self._selections.setdefault(self.payload.selection, Selection(self.payload.selection))

    def part(self, flat: Tensor) -> Tensor:
        """Return this rank's part of the elements of a tensor."""
        return flat[self.peers.part(flat.numel())]

    def parts_of_node_mean(self, flats: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's part of the mean of tensors over the ranks of the node; on one level they are whole.

        Collective: the ranks of a node, blocking; a reduce-scatter.

        Args:
            flats: by name; float32, 1-d.
        """
        num_local, local_rank = self.peers.num_local_ranks, self.peers.local_rank
        if num_local == 1:
            return dict(flats)
        rows = [torch.cat([f[self.peers.part(f.numel(), each)] for f in flats.values()]) for each in range(num_local)]
        longest = max(row.numel() for row in rows)
        vector = torch.cat([pad(row, (0, longest - row.numel())) for row in rows])
        mine = self.peers.reduce_scatter_in_node(vector)[: rows[local_rank].numel()].div_(num_local)
        sizes = self.local_numels({name: f.numel() for name, f in flats.items()}, local_rank)
        return dict(zip(flats, mine.split(sizes), strict=True))

    def segments(
        self, parts: Mapping[str, Tensor], density: float, others: Mapping[str, Mapping[str, Any]] | None = None
    ) -> dict[str, Segment]:
        """Return the table of this rank's parts that are not empty.

        Args:
            parts: of the gradients, or of the changes of the weights: any floating dtype, flat.
            density: the fraction that is sent.
            others: more fields of each segment.

        Raises:
            ConfigurationError: a part has more elements than there are positions.
        """
        for name, part in parts.items():
            if part.numel() > MAX_NUMEL:
                raise ConfigurationError(
                    f"{name!r} has {part.numel()} elements, positions go up to {MAX_NUMEL}: exclude=[{name!r}]."
                )
        device = next(iter(parts.values())).device
        wide = [name for name, part in parts.items() if part.dtype == torch.float64]
        self.residuals.ensure({name: part.numel() for name, part in parts.items()}, device, wide)
        return {
            name: Segment(
                residual=self.residuals[name],
                gradient=part,
                **{"momentum_buffer": None, "weight": None, **(others or {}).get(name, {})},
                **self.payload.selected(part.numel(), density),
            )
            for name, part in parts.items()
            if part.numel()
        }

    def compress(self, segments: Mapping[str, Segment], *, masking: bool = False) -> dict[str, Sparse]:
        """Accumulate, and take the largest elements out of the residuals.

        In place:
            The residuals and velocities of the segments.

        Args:
            segments: of `segments`.
            masking: whether velocities are cleared where elements are taken.

        Returns:
            Positions, int64, ascending, and values, float32, by name.
        """
        if self.payload.decay != 1.0 and segments:
            torch._foreach_mul_([segment.residual for segment in segments.values()], self.payload.decay)
        return dict(zip(segments, self.selection.compress_(segments, masking=masking), strict=True))

    def begin(self, kind: str, selected: Mapping[str, Sparse], numels: Mapping[str, int], density: float) -> SparseWork:
        """Send what has been selected; return what can be waited for.

        In place:
            The residuals: what is rounded away, or does not fit, goes back into them.

        Collective: all ranks, with the same names; see `gather`. Other kinds are waited for here.

        Args:
            kind: one of `where.link.EXCHANGES`.
            selected: of `compress`, in the order of `numels`; without parts that are empty.
            numels: elements of each whole tensor.
            density: the fraction that is sent.
        """
        if kind == "all_gather":
            return self.gather(selected, numels, density)
        try:
            if kind == "reduce_scatter":
                return ReducedWork(self, self._reduce_scatter(selected, numels, density))
            return DenseWork(self, self._all_reduce(selected, numels))
        except BaseException:
            self.put_back(selected)
            raise

    def gather(
        self,
        selected: Mapping[str, Sparse],
        numels: Mapping[str, int],
        density: float,
        control: Tensor | None = None,
    ) -> GatheredWork:
        """Send what has been selected to all participants, and numbers with it.

        In place:
            The residuals: what is rounded away goes back into them; after an exception all of it.

        Collective: all ranks, with the same names; an all-gather, on two levels another one inside the node.

        Wire:
            `TopK.nbytes` of this rank's parts, padded to the longest of the ranks of a node; then the control message.

        Args:
            selected: of `compress`, in the order of `numels`; without parts that are empty.
            numels: elements of each whole tensor.
            density: the fraction that is sent.
            control: numbers that all ranks get from all; float32, 1-d.
        """
        device = next(iter(self.residuals.values())).device
        message = torch.empty(0, dtype=torch.uint8, device=device)
        if selected:
            residuals = [self.residuals[name] for name in selected]
            sizes_here = [residual.numel() for residual in residuals]
            try:
                message = self.payload.codec.encode(list(selected.values()), sizes_here, residuals)
            except BaseException:
                self.put_back(selected)
                raise
        num_local = self.peers.num_local_ranks
        sizes = [self.payload.nbytes(self.local_numels(numels, local_rank), density) for local_rank in range(num_local)]
        if missing := max(sizes) - message.numel():
            message = pad(message, (0, missing))
        if control is not None:
            message = torch.cat([message, control.view(torch.uint8)])
        return GatheredWork(self, numels, density, sizes, 0 if control is None else control.nbytes, message)

    def put_back(self, selected: Mapping[str, Sparse]) -> None:
        """Put back into the residuals the elements that were taken out of them and did not reach any rank.

        In place:
            The residuals.
        """
        for name, (positions, values) in selected.items():
            self.residuals[name].index_add_(0, positions, values.to(self.residuals[name].dtype))

    def choose(self, numels: Mapping[str, int], density: float, step: int, device: torch.device) -> str:
        """Return one of `where.link.EXCHANGES`, the same on all ranks; rank 0 logs a change.

        Collective: all ranks, where the link has to be measured.

        Args:
            numels: elements of each whole tensor.
            density: the fraction that is sent.
            step: for the log.
            device: of the parameters; before the first sparse step there are no residuals, which would tell it.
        """
        kind = asked_for(self.payload, self.peers)
        if kind == "auto":
            sizes, num_ranks = list(numels.values()), self.peers.num_participants
            choice = predict(self.payload, sizes, density, num_ranks, self.link or Link(0.0, 1.0))
            if self.link is None and choice.name != "all_gather":  # which has the fewest rounds; else latency counts
                self.link = measure_link(self.peers.group, device)
                choice = predict(self.payload, sizes, density, num_ranks, self.link)
            kind = choice.name
            if kind != self._last_kind and self.link is not None and self.peers.rank == 0:
                _logger.info("Step %d, density %.4g: %s.", step, density, choice)
        self._last_kind = kind
        return kind

    def _reduce_scatter(
        self, selected: Mapping[str, Sparse], numels: Mapping[str, int], density: float
    ) -> dict[str, Sparse]:
        """Sum at the owners; elements that do not fit, and rounding errors, are put back into the residuals."""
        self._reducer.codec = self.payload.codec
        counts = [self.payload.num_sent(numels[name], density) for name in selected]
        averaged = self._reducer.average(list(selected.values()), [numels[name] for name in selected], counts)
        self.put_back(dict(zip(selected, averaged.unsent, strict=True)))
        return dict(zip(selected, averaged.means, strict=True))

    def _all_reduce(self, selected: Mapping[str, Sparse], numels: Mapping[str, int]) -> dict[str, Tensor]:
        """Sum the same elements in dense tensors."""
        sizes = [numels[name] for name in selected]
        message = next(iter(self.residuals.values())).new_zeros(sum(sizes), dtype=torch.float32)
        for mean, (positions, values) in zip(message.split(sizes), selected.values(), strict=True):
            mean[positions] = values * (1.0 / self.peers.num_participants)
        self.peers.all_reduce_(message)
        return dict(zip(selected, message.split(sizes), strict=True))

    def local_numels(self, numels: Mapping[str, int], local_rank: int) -> list[int]:
        """Return the elements of a local rank's part of each tensor."""
        parts = [self.peers.part(numel, local_rank) for numel in numels.values()]
        return [part.stop - part.start for part in parts]

    def to(self, device: torch.device) -> None:
        """Move the residuals; the kernels' workspaces are made anew, except the thresholds."""
        self.residuals.to(device)
        for selection in self._selections.values():
            selection.thresholds = selection.thresholds
        self.damaged = None if self.damaged is None else self.damaged.to(device)

    def state_dict(self) -> dict[str, Any]:
        """Return the state apart from residuals and the user's settings."""
        link = None if self.link is None else (self.link.latency_s, self.link.bandwidth_bytes_per_s)
        return {"thresholds": dict(self.selection.thresholds), "link": link, "reducer": self._reducer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a `state_dict` of the same ranks."""
        self.selection.thresholds = state["thresholds"]
        self.link = None if state["link"] is None else Link(*state["link"])
        self._reducer.load_state_dict(state["reducer"])


def asked_for(payload: TopK, peers: Peers) -> str:
    """Return how elements are summed, one of `where.link.EXCHANGES`, or "auto" where the link decides."""
    return "all_gather" if peers.is_two_level or payload.needs_senders else payload.exchange


def predict(payload: TopK, numels: Sequence[int], density: float, num_participants: int, link: Link) -> Choice:
    """Return the predicted times of the collectives on a link, and the fastest."""
    counts = [payload.num_sent(numel, density) for numel in numels]
    k = sum(counts)
    return choose(numels, k, num_participants, 8 * payload.codec.nbytes(counts, numels) / k, link)
