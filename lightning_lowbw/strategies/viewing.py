"""What all methods that average weights do in a fit: validation, checkpoints and the end see the consensus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor
from typing_extensions import override

from lightning_lowbw.strategies.consensus_view import ConsensusView
from lightning_lowbw.strategies.regime import Regime

if TYPE_CHECKING:
    from lightning_lowbw.strategies.strategy import Strategy


class Viewing(Regime):
    """Connects the consensus view to the hooks of a fit; `show` is the subclass's.

    Attributes:
        view: of the consensus.
    """

    def __init__(self, strategy: Strategy) -> None:
        super().__init__(strategy)
        self.view = ConsensusView()

    @override
    def own_buffers(self, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {**buffers, **self.view.own_buffers(buffers)}

    @override
    def begin_fit(self) -> None:
        super().begin_fit()
        self.view.keep()

    @override
    @contextmanager
    def loading(self) -> Iterator[None]:
        module = self.strategy.lightning_module
        assert module is not None
        with self.view.loading(self.strategy.replicas, module):
            yield

    @override
    def end_validation(self) -> None:
        if not self.strategy.trainer.sanity_checking:  # after which there may be nothing to train
            self.view.hide()

    @override
    def end_save(self) -> None:
        if not self.strategy.trainer.validating:
            self.view.hide()

    @override
    def leave_consensus(self) -> None:
        self.show()
        self.keep_consensus()

    def keep_consensus(self) -> None:
        """Leave the consensus, which is shown, in the model."""
        self.view.keep()
        for worker in self.strategy.replicas:
            worker.finish()
