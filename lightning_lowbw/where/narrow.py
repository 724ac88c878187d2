"""The mean of flat vectors over ranks in few bits per value, with error feedback.

Each rank writes the N parts of its vector in few bits and sends part j to rank j; rank j averages what it got, and
sends the mean, in few bits as well, to all. What the rounding takes away is handed back to the rank that has rounded:
of the vector to every rank, of the mean, N times, to the one that owns the part. The caller adds it to the next vector.

Source: error feedback on both ways as in Tang et al., "DoubleSqueeze: Parallel Stochastic Gradient Descent with
Double-Pass Error-Compensated Compression", arXiv 1905.05957; the server's work is divided among the ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_lowbw.what.narrow_values import NarrowFormat
from lightning_lowbw.where.collectives import Collectives
from lightning_lowbw.where.peers import Peers


def narrow_mean(vector: Tensor, value_format: NarrowFormat, peers: Peers) -> tuple[Tensor, Tensor]:
    """Average the vectors of the participants, sent in few bits; sums are in the vector's dtype.

    On two levels the vectors are those of nodes: each rank of a node does this for its part of its node's, and the
    means are gathered in the node. A single participant keeps its vector: nothing is sent, nothing rounded.

    Collective: all ranks with vectors of one length, on the ranks of a node equal ones but for what was returned last;
    blocking; an all-to-all and an all-gather, on two levels one more all-gather in the node.

    Wire:
        `where.volume.narrow_mean_bytes`: for int8 a quarter, for int4 an eighth of the float32 all-reduce, and a scale
        per 128 values.

    Args:
        vector: float32 or wider; 1-d.
        value_format: see `what.narrow_values`.
        peers: the ranks.

    Returns:
        The mean, with the same bits on all ranks; and what is to be added to this rank's next vector, such that sent
        plus unsent, both summed over the ranks that are about one part, are their vectors. Both have the vector's dtype
        and shape, and memory of their own.

    Raises:
        ConfigurationError: on all ranks; see `Peers.check_parts`.
    """
    own, longest = peers.part(vector.numel()), peers.part(vector.numel(), 0)
    part = torch.nn.functional.pad(vector[own], (0, longest.stop - (own.stop - own.start)))
    mean, rest = narrow_mean_of_part(part, value_format, peers.between)
    unsent = torch.zeros_like(vector)
    unsent[own] = rest[: own.stop - own.start]
    return peers.gather_parts_in_node(mean, vector.numel()), unsent


def narrow_mean_of_part(part: Tensor, value_format: NarrowFormat, between: Collectives) -> tuple[Tensor, Tensor]:
    """Average the vectors of the ranks of one group, as `narrow_mean` does for the parts of a node.

    Collective: all ranks of the group with vectors of one length, blocking; an all-to-all and an all-gather.

    Args:
        part: float32 or wider; 1-d.
        value_format: see `what.narrow_values`.
        between: the group.

    Returns:
        The mean, with the same bits on all ranks, and what is to be added to this rank's next vector.
    """
    num_ranks, numel = between.num_ranks, part.numel()
    if num_ranks == 1 or numel == 0:
        return part.clone(), torch.zeros_like(part)
    size = -(-numel // num_ranks)
    wanted = torch.nn.functional.pad(part, (0, num_ranks * size - numel)).view(num_ranks, size)
    message = value_format.encode(wanted)
    unsent = wanted - value_format.decode(message, size)
    received = between.all_to_all(message.view(-1)).view(num_ranks, -1)
    mean = value_format.decode(received, size).to(part.dtype).mean(0)
    answer = value_format.encode(mean.unsqueeze(0))
    unsent[between.rank] += num_ranks * (mean - value_format.decode(answer, size).squeeze(0))
    handed_out = value_format.decode(between.all_gather(answer.view(-1)), size)
    return handed_out.reshape(-1)[:numel].to(part.dtype), unsent.view(-1)[:numel]
