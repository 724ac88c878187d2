"""Other people's projects, as their users train them: `make test-clients` (clients/run.py)."""

import importlib.util
from pathlib import Path

import torch


def _declare_torchvision() -> None:
    """Let torchvision be imported beside a torch without CUDA.

    Its release on PyPI is compiled for CUDA. Without that its kernels, which no client uses, do not load, and the
    import ends where it describes two of them.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or torch.version.cuda is not None:
        return
    for kernels in Path(spec.origin).parent.glob("_C*.so"):
        try:
            torch.ops.load_library(kernels)
        except OSError:
            for name in ("nms", "qnms"):
                torch.library.define(f"torchvision::{name}", "(Tensor boxes, Tensor scores, float threshold) -> Tensor")


_declare_torchvision()
