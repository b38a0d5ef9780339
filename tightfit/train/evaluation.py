"""Held-out loss: summed over counted tokens, divided by their number, whatever the batch size."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from tightfit.kernels.linear_cross_entropy import IGNORE
from tightfit.models.decoder import Decoder
from tightfit.train.step import Batch, inputs


@dataclass(frozen=True)
class Evaluation:
    """Mean loss in nats per token over `tokens` counted tokens."""

    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(min(self.loss, 700.0))


@torch.no_grad()
def evaluate(model: Decoder, batches: Iterable[Batch], device: torch.device) -> Evaluation:
    """The loss of `model` over all `batches`."""
    total = torch.zeros((), device=device, dtype=torch.float64)
    tokens = 0
    for batch in batches:
        output = model(**inputs(batch, device))
        assert output.loss is not None
        total += output.loss
        tokens += int((batch["labels"] != IGNORE).sum())
    return Evaluation(float(total) / max(tokens, 1), tokens)
