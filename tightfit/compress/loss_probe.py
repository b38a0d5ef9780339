"""The loss of compressing, measured layer by layer on the way: KL(original ‖ compressed) on some calibration rows.

A few rows go through the original's layers while all calibration rows go through the compressed ones; in the end both
go through the final norm and the output projection, some tokens at a time. The whole model is never in memory. These
are rows that layers were coded for: on other text the loss is larger (`tightfit evaluate --against`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tightfit.compress.calibration.observation import through
from tightfit.compress.comparison import log_probabilities
from tightfit.compress.memory import CHUNK_SHARE, PROBED_LENGTH, PROBED_ROWS
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
def divergences(
    head: Decoder, known: Sequence[Tensor], others: Sequence[Sequence[Tensor]], compressed: Decoder | None = None
) -> list[float]:
    """KL(original ‖ compressed) in nats a token of each of `others`; all are last layers' outputs for the same rows.

    `head` has the original's final norm and output projection, `compressed` those of the others where they differ."""
    theirs = head if compressed is None else compressed
    totals = [0.0] * len(others)
    for row, x in enumerate(known):
        for part, chunk in enumerate(chunks(head, x)):
            p = log_probabilities(head, head.norm(chunk))
            for number, made in enumerate(others):
                q = log_probabilities(theirs, theirs.norm(chunks(head, made[row])[part]))
                totals[number] += float((p.exp() * (p - q)).sum())
    tokens = sum(x.shape[0] * x.shape[1] for x in known)
    return [total / max(tokens, 1) for total in totals]


class LossProbe:
    """Some calibration rows on their way through the original model; none where there are no calibration rows."""

    def __init__(self, stream: Sequence[Tensor]) -> None:
        self.original = probed(stream)

    def follow(self, model: Decoder, index: int) -> None:
        """Send the rows through layer `index` of the original, the only layer of `model`."""
        self.original = through(model, index, self.original)

    def kl(self, head: Decoder, stream: Sequence[Tensor], compressed: Decoder | None = None) -> float | None:
        """KL in nats a token, from the last compressed layer's outputs; `head` and `compressed` are `divergences`'."""
        return divergences(head, self.original, [probed(stream)], compressed)[0] if self.original else None
