"""`MuonAdamW` is torch's Muon for matrices of hidden layers and AdamW for the rest, with one state."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_lowbw import ConfigurationError, MuonAdamW, QuantizedGradients, Strategy
from lightning_lowbw.presets import preset
from tests.ranks import on_ranks
from tests.strategies.fits import same, train
from tests.tiny import Tiny, weights_of


class Net(nn.Module):
    """An embedding, a hidden layer with a bias, a convolution and an output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.hidden = nn.Embedding(11, 6), nn.Linear(6, 6)
        self.conv, self.head = nn.Conv1d(6, 6, 1), nn.Linear(6, 3, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.hidden(self.embedding(tokens)).relu()
        return self.head(self.conv(hidden.mT).mT)


def backward(net: nn.Module, step: int) -> None:
    tokens = torch.randint(11, (4, 5), generator=torch.Generator().manual_seed(step))
    net.zero_grad()
    net(tokens).square().mean().backward()


def make(net: nn.Module) -> MuonAdamW:
    return MuonAdamW(net, lr=0.01, weight_decay=0.1, exclude=("head.*",))


pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9 has no Muon")


def test_it_is_muon_for_hidden_matrices_and_adamw_for_the_rest_also_from_a_state() -> None:
    torch.manual_seed(0)
    net, common = Net(), {"lr": 0.01, "weight_decay": 0.1}
    twin = deepcopy(net)
    matrices = [twin.hidden.weight]
    rest = [each for each in twin.parameters() if each is not matrices[0]]
    muon = torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **common)
    both, optimizer = (muon, torch.optim.AdamW(rest, **common)), make(net)
    schedules = [torch.optim.lr_scheduler.LinearLR(each) for each in (*both, optimizer)]
    for step in range(6):
        if step == 3:
            state, optimizer = optimizer.state_dict(), make(net)
            optimizer.load_state_dict(state)
            schedules[-1].optimizer = optimizer
        for module in (net, twin):
            backward(module, step)
        for each in (*both, optimizer, *schedules):
            each.step()
    for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert deepcopy(optimizer).state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()


def test_hooks_of_all_optimizers_are_called_once_a_step() -> None:
    """Not again for the two optimizers that it is made of; theirs are called as they would be of any."""
    net, called = Net(), list[Any]()
    optimizer = make(net)
    handles = [
        register(lambda one, *_: called.append(one))
        for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook)
    ]
    try:
        backward(net, 0)
        optimizer.step()
    finally:
        for handle in handles:
            handle.remove()
    assert called == [optimizer, optimizer]


class ByMuon(Tiny):
    def configure_optimizers(self) -> MuonAdamW:
        return MuonAdamW(self, 0.05, exclude=("head.*",))


@on_ranks()
def test_lightning_trains_by_it() -> None:
    """It steps two others in its own step, which no strategy takes for steps past Lightning."""
    for method in (preset("muloco").replace(k_steps=2), QuantizedGradients("int8")):
        module = ByMuon()
        before = weights_of(module)
        train(Strategy(method), module, 5)
        assert before != same(weights_of(module))


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"'tail' matches no parameter"):
        MuonAdamW(Net(), exclude=("tail",))
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(ConfigurationError, match=r"Install torch 2\.9"):
        MuonAdamW(Net())


def test_a_group_that_is_added_is_refused_and_embedding_bags_are_no_matrices() -> None:
    net = nn.Sequential(nn.EmbeddingBag(11, 6), nn.Linear(6, 6))
    optimizer = MuonAdamW(net)
    assert [group["is_muon"] for group in optimizer.param_groups for _ in group["params"]] == [True, False, False]
    with pytest.raises(ConfigurationError, match="no further parameters"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, 2))]})
