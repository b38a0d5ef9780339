"""What compressing has lost, measured while layers pass: KL(original ‖ compressed) on some calibration rows.

A few rows go through the original's layers beside the calibration rows that go through the compressed ones; in the end
both meet the final norm and the output projection, some tokens at a time. The whole model is in memory at no moment.
These are rows that layers were coded for: on other text the loss is larger (`tightfit evaluate --against`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tightfit.compress.comparison import log_probabilities
from tightfit.compress.memory import CHUNK_SHARE, PROBED_LENGTH, PROBED_ROWS
from tightfit.compress.observation import through
from tightfit.models.decoder import Decoder


def probed(stream: Sequence[Tensor]) -> list[Tensor]:
    """The first tokens of the first rows of batches [B, T, H]."""
    found, missing = [], PROBED_ROWS
    for batch in stream:
        found.append(batch[:missing, :PROBED_LENGTH])
        missing -= len(found[-1])
        if not missing:
            break
    return found


def chunks(head: Decoder, x: Tensor) -> tuple[Tensor, ...]:
    """Hidden states [B, T, H] in parts [tokens, H] whose logits may be in memory together."""
    return x.flatten(0, 1).split(max(head.spec.hidden_size // CHUNK_SHARE, 1))


@torch.no_grad()
def divergences(head: Decoder, known: Sequence[Tensor], others: Sequence[Sequence[Tensor]]) -> list[float]:
    """KL(original ‖ compressed) of each of `others` in nats a token, of what the last layers gave for the same rows."""
    totals = [0.0] * len(others)
    for row, x in enumerate(known):
        for part, chunk in enumerate(chunks(head, x)):
            p = log_probabilities(head, head.norm(chunk))
            for number, made in enumerate(others):
                q = log_probabilities(head, head.norm(chunks(head, made[row])[part]))
                totals[number] += float((p.exp() * (p - q)).sum())
    tokens = sum(x.shape[0] * x.shape[1] for x in known)
    return [total / max(tokens, 1) for total in totals]


class LossProbe:
    """Rows of the original, layer after layer; none where there are no calibration rows."""

    def __init__(self, stream: Sequence[Tensor]) -> None:
        self.original = probed(stream)

    def follow(self, model: Decoder, index: int) -> None:
        """Go through layer `index` of the original, which is all that `model` has."""
        self.original = through(model, index, self.original)

    def kl(self, head: Decoder, stream: Sequence[Tensor]) -> float | None:
        """Nats a token, of what the last compressed layer gave; `head` has the final norm and output projection."""
        return divergences(head, self.original, [probed(stream)])[0] if self.original else None
