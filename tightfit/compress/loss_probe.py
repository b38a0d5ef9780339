"""What compressing has lost, measured while layers pass: KL(original ‖ compressed) on some calibration rows.

A few rows go through the original's layers beside the calibration rows that go through the compressed ones; in the end
both meet the final norm and the output projection, some tokens at a time. The whole model is in memory at no moment.
These are rows that layers were coded for: on other text the loss is larger (`tightfit evaluate --against`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tightfit.compress.comparison import log_probabilities
from tightfit.compress.memory import PROBED_LENGTH, PROBED_ROWS
from tightfit.compress.observation import through
from tightfit.models.decoder import Decoder

CHUNK_SHARE = 16
"""Hidden numbers over tokens whose logits are in memory at a time: less than the copy of an end that was written."""


def probed(stream: Sequence[Tensor]) -> list[Tensor]:
    """The first tokens of the first rows of batches [B, T, H]."""
    found, missing = [], PROBED_ROWS
    for batch in stream:
        found.append(batch[:missing, :PROBED_LENGTH])
        missing -= len(found[-1])
        if not missing:
            break
    return found


class LossProbe:
    """Rows of the original, layer after layer; none where there are no calibration rows."""

    def __init__(self, stream: Sequence[Tensor]) -> None:
        self.original = probed(stream)

    def follow(self, model: Decoder, index: int) -> None:
        """Go through layer `index` of the original, which is all that `model` has."""
        self.original = through(model, index, self.original)

    @torch.no_grad()
    def kl(self, head: Decoder, stream: Sequence[Tensor]) -> float | None:
        """Nats a token, of what the last compressed layer gave; `head` has the final norm and output projection."""
        total = tokens = 0.0
        for known, made in zip(self.original, probed(stream), strict=True):
            step = max(head.spec.hidden_size // CHUNK_SHARE, 1)
            for chunk in zip(*(x.flatten(0, 1).split(step) for x in (known, made)), strict=True):
                p, q = (log_probabilities(head, head.norm(x)) for x in chunk)
                total += float((p.exp() * (p - q)).sum())
            tokens += known.shape[0] * known.shape[1]
        return total / tokens if tokens else None
