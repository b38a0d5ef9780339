"""Vocabulary parallelism: ranks split the rows of the embedding and of the output projection.

Rank r of t has rows r · ⌈V/t⌉ up to the next rank's. The embedding returns zeros for tokens of other ranks, so that the
sum over ranks is the embedding. The fused loss (linear_cross_entropy.py) projects to this rank's columns and combines
four numbers per row with the other ranks (sharded_weight.py), never the logits.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class VocabularyRows:
    """This rank's rows of the vocabulary, [first, first + count) of `vocabulary`; `group` has the others."""

    vocabulary: int
    first: int
    count: int
    group: str
    """The process group's name: custom operators take strings, not groups."""


def embed_own_rows(tokens: Tensor, weight: Tensor, rows: VocabularyRows) -> Tensor:
    """Embeddings of the tokens in this rank's rows, and zeros for other tokens."""
    local = tokens - rows.first
    own = (local >= 0) & (local < rows.count)
    return F.embedding(torch.where(own, local, 0), weight).masked_fill(~own[..., None], 0.0)
