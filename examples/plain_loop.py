"""Deep gradient compression without Lightning: after `attach`, `optimizer.step()` exchanges the gradients.

Run it with two processes:  torchrun --nproc-per-node=2 examples/plain_loop.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from lightning_lowbw import DGC

STEPS = 200


def main() -> None:
    """Fit a teacher network; each rank sees its own data."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same model on all ranks: there is no DDP to broadcast it
    teacher = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
    model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)

    method = DGC(rampup_begin_step=20, rampup_step=60, sparsity=[0.9, 0.99, 0.999])
    worker = method.attach(optimizer, model.named_parameters())

    torch.manual_seed(1 + dist.get_rank())
    for step in range(STEPS):
        x = torch.randn(32, 64)
        loss = nn.functional.mse_loss(model(x), teacher(x).detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # exchanges the gradients first
        if dist.get_rank() == 0 and step % 40 == 39:
            print(f"step {step + 1}: loss {loss.item():.4f}, density {worker.last_density:.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
