"""Muon for matrices and AdamW for all other parameters, in one optimizer, as automatic optimization needs.

Source: Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024, which is `torch.optim.Muon`; Liu
et al., "Muon is scalable for LLM training", arXiv 2502.16982, for one learning rate of both. It is the inner
optimizer of Therien et al., "MuLoCo: Muon is a practical inner optimizer for DiLoCo", arXiv 2505.23725.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from inspect import unwrap
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from lightning_lowbw.errors import ConfigurationError

EMBEDDINGS = nn.Embedding, nn.EmbeddingBag


class MuonAdamW(Optimizer):
    """Step the matrices of hidden layers by `torch.optim.Muon`, other parameters by `torch.optim.AdamW`.

    There are two param groups; a scheduler changes both learning rates together.

    Args:
        model: the model to train. Weights of `nn.Embedding` and `nn.EmbeddingBag` are no matrices of hidden layers.
        lr: the learning rate of both: a matrix moves as far as AdamW would move it ("match_rms_adamw").
        weight_decay: the decoupled weight decay of both.
        momentum: the momentum of Muon.
        betas: the betas of AdamW.
        exclude: names of other matrices for AdamW, such as the output layer's; shell patterns such as ``"head.*"``.

    Raises:
        ConfigurationError: torch has no Muon, or a pattern matches no parameter; later, if a group is added.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        *,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        exclude: Sequence[str] = (),
    ) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise ConfigurationError(
                f"MuonAdamW with torch {torch.__version__}, which has no torch.optim.Muon. Install torch 2.9 or later."
            )
        named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        for pattern in exclude:
            if not any(fnmatchcase(name, pattern) for name in named):
                raise ConfigurationError(f"exclude={list(exclude)}: {pattern!r} matches no parameter that is trained.")
        others = {p for module in model.modules() if isinstance(module, EMBEDDINGS) for p in module.parameters()}
        others |= {p for name, p in named.items() if any(fnmatchcase(name, pattern) for pattern in exclude)}
        by_muon = [p.ndim == 2 and p not in others for p in named.values()]
        groups = []
        for is_muon in (True, False):
            if chosen := [p for p, of in zip(named.values(), by_muon, strict=True) if of == is_muon]:
                options: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
                options |= {"momentum": momentum, "adjust_lr_fn": "match_rms_adamw"} if is_muon else {"betas": betas}
                groups.append({**_of(is_muon)(chosen, **options).param_groups[0], "is_muon": is_muon})
        super().__init__(groups, {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if "is_muon" not in param_group:
            raise ConfigurationError(
                "MuonAdamW takes no further parameters, for instance parameters that are unfrozen during a training. "
                "Set requires_grad=True on all parameters before you make the optimizer."
            )
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step, after the closure."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            # Made here: a copied or loaded optimizer has only its groups and state.
            part = _of(group["is_muon"])(group["params"])
            part.param_groups, part.state = [group], self.state
            unwrap(type(part).step)(part)  # this optimizer calls the global hooks itself
        return loss


def _of(is_muon: bool) -> type[Any]:
    return torch.optim.Muon if is_muon else AdamW
