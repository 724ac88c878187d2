"""What does the sparse reduce-scatter cost in loss? 16 and 64 virtual ranks in one process, beside the all-gather.

    .venv/bin/python benchmarks/reduce_scatter.py            # about 20 minutes on one core
    .venv/bin/python benchmarks/reduce_scatter.py --quick    # under a minute; writes nothing

Each virtual rank has a batch, a velocity and a residual of its own; all take the same step. Both collectives are the
package's own arithmetic (`compress.sparse_sum`, a mean of sparse vectors), without a network. The loss is the mean of
the last tenth of the steps, over all ranks' batches. Writes benchmarks/results/reduce_scatter.json and .md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness import RESULTS, describe_environment
from lightning_lowbw.compress.codec import SparseCodec
from lightning_lowbw.compress.sparse_sum import SparseSum, even_boundaries
from lightning_lowbw.tools.zoo.digits import load_digit_tensors

DENSITIES, WORLDS, SEEDS = (0.01,), (16, 64), (0, 1)
STEPS, BATCH, LR, MOMENTUM, WIDTH = 300, 8, 0.05, 0.9, 256


def run(collective: str, num_ranks: int, density: float, seed: int, steps: int) -> dict[str, float]:
    """Train; return the loss, and the elements that a rank receives in a step."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
    model.append(nn.Linear(WIDTH, 10))
    shapes = {name: each.shape for name, each in model.named_parameters()}
    images, labels = load_digit_tensors()
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    numel, k = flat.numel(), round(density * flat.numel())
    residuals, velocities = torch.zeros(num_ranks, numel), torch.zeros(num_ranks, numel)
    boundaries = even_boundaries([numel], [k], num_ranks)
    generator, losses, received = torch.Generator().manual_seed(seed), [], 0

    def loss_of(weights: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        parts = weights.split([shape.numel() for shape in shapes.values()])
        named = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        return F.cross_entropy(torch.func.functional_call(model, named, (images,)), labels)

    of_all_ranks = torch.func.vmap(torch.func.grad_and_value(loss_of), in_dims=(None, 0, 0))
    for _ in range(steps):
        batches = torch.randint(len(images), (num_ranks, BATCH), generator=generator)
        gradients, loss = of_all_ranks(flat, images[batches], labels[batches])
        velocities.mul_(MOMENTUM).add_(gradients)
        residuals.add_(velocities)
        positions = residuals.abs().topk(k, dim=1).indices.sort(dim=1).values
        values = residuals.gather(1, positions)
        residuals.scatter_(1, positions, 0.0)
        velocities.scatter_(1, positions, 0.0)
        selected = list(zip(positions, values, strict=True))
        losses.append(float(loss.mean()))
        if collective == "all_gather":
            mean, received = torch.zeros(numel), (num_ranks - 1) * k
            for positions, values in selected:
                mean[positions] += values / num_ranks
        else:
            plan = SparseSum((numel,), k, boundaries, SparseCodec("float32"))
            mean, boundaries = _reduce(plan, selected, residuals, numel)
            received = (num_ranks - 1) * (plan.scatter_capacity + plan.gather_capacity)
        flat = flat - LR * mean
    return {"loss": statistics.fmean(losses[-max(1, steps // 10) :]), "received": received}


def _reduce(
    plan: SparseSum, selected: list[tuple[Tensor, Tensor]], residuals: Tensor, numel: int
) -> tuple[Tensor, tuple[int, ...]]:
    """Do what `ReduceScatterExchange` does between ranks; what is not sent goes back into the residuals."""
    outgoing = [plan.prepare(rank, part) for rank, part in enumerate(selected)]
    owned = []
    for rank, own in enumerate(outgoing):
        owned.append(plan.combine(rank, own.own, torch.stack([each.message[rank] for each in outgoing])))
    reduced = plan.finish(torch.stack([each.message for each in owned]))
    for residual, (positions, _), mine, owner in zip(residuals, selected, outgoing, owned, strict=True):
        residual.index_add_(0, positions, mine.unsent)
        residual.index_add_(0, *owner.unsent)
    mean = torch.zeros(numel)
    positions, values = reduced.mean
    mean[positions] = values
    return mean, reduced.boundaries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    rows, lines = [], ["| ranks | sent of all | all-gather | reduce-scatter | received, of the all-gather's |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for num_ranks in WORLDS[:1] if quick else WORLDS:
        for density in DENSITIES[:1] if quick else DENSITIES:
            of: dict[str, list[dict[str, float]]] = {}
            for collective in ("all_gather", "reduce_scatter"):
                of[collective] = [run(collective, num_ranks, density, s, 20 if quick else STEPS) for s in SEEDS]
                row = {"ranks": num_ranks, "density": density, "collective": collective, "runs": of[collective]}
                rows.append(row)
            shown = [", ".join(f"{each['loss']:.4f}" for each in runs) for runs in of.values()]
            share = of["reduce_scatter"][0]["received"] / of["all_gather"][0]["received"]
            lines.append(f"| {num_ranks} | {density:.2%} | {shown[0]} | {shown[1]} | {share:.2f} |")
            print(lines[-1], flush=True)
    if quick:
        return
    environment = describe_environment()
    (RESULTS / "reduce_scatter.json").write_text(
        json.dumps({"environment": environment, "rows": rows}, indent=1) + "\n"
    )
    text = f"Loss after {STEPS} steps, by seed; momentum SGD with masking, an MLP on digits.\n"
    (RESULTS / "reduce_scatter.md").write_text(text + "\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
