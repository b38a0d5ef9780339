"""Engine: another program that holds, splits and updates the weights in our optimizer's place."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from tightfit.parallel.ranks import Ranks
from tightfit.train.precision import LossScale

if TYPE_CHECKING:  # step.py needs the optimizer, which may have one of these
    from tightfit.train.step import Batch, OnPhase, StepResult


class Engine(Protocol):
    """What training needs of an engine. All ranks call each method together."""

    def train_step(
        self,
        batches: "Sequence[Batch]",
        device: torch.device,
        lr: float,
        scale: LossScale,
        on_phase: "OnPhase",
        ranks: Ranks,
    ) -> "StepResult":
        """Forward, backward and update over the rows of all ranks."""

    def weights(self, dtype: torch.dtype, ranks: Ranks) -> dict[str, Tensor]:
        """All weights on the first rank, as a checkpoint has them; nothing on the others."""

    def states(self, ranks: Ranks) -> dict[str, Tensor]:
        """The optimizer's states on the first rank, as a checkpoint has them; nothing on the others."""
