"""A vocabulary split over ranks: which rows of the embedding and of the output projection are here, and looking up.

Rank r of t has rows r · ⌈V/t⌉ up to the next rank's. An embedding looks up the tokens it has and gives zeros for the
others, so that the sum over ranks is the embedding; the fused loss (linear_cross_entropy.py) projects to the columns it
has and combines four numbers per row with the other ranks (sharded_weight.py), never their logits.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class VocabularyRows:
    """Rows `first` to `first + count` of a `vocabulary` are here; the processes of `group` have the others."""

    vocabulary: int
    first: int
    count: int
    group: str
    """The process group's name, which is what an operator can be given."""


def embedded_here(tokens: Tensor, weight: Tensor, rows: VocabularyRows) -> Tensor:
    """Embeddings of the tokens whose rows are here, and zeros for the others."""
    columns = tokens - rows.first
    held = (columns >= 0) & (columns < rows.count)
    return F.embedding(torch.where(held, columns, 0), weight).masked_fill(~held[..., None], 0.0)
