"""Exchange of heads between context ranks by all-to-all (Ulysses, Jacobs et al. 2023).

Before attention each of u ranks has t tokens of all heads; after one all-to-all it has all u · t tokens of its share of
the heads, and attention is that of one process. A second one brings the outputs back. Queries, keys and values travel
in one message. With fewer key heads than ranks, a key head goes to every rank that has queries of it.

Elements that a rank sends for t tokens of h query and k key heads of D channels, forward (backward sends as many):

    (u − 1)/u · t · D · (2 h + 2 max(k, u))

The volume per rank falls with u while a ring's does not. Its cost in memory: attention's output is saved twice, before
the second all-to-all (for attention's backward) and after it (for the output projection's).
"""

import torch
import torch.distributed as dist
from torch import Tensor

from tightfit.collectives.conjugate import all_to_all


def gather_rows(query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """All tokens of this rank's heads, [B, heads, T, D], from this rank's tokens of all heads [B, heads, t, D]."""
    pieces = [_by_receiver(heads, group.size()) for heads in (query, key, value)]
    arrived = all_to_all(torch.cat(pieces, dim=3), group)  # [ranks, B, t, heads, D]
    rows = arrived.transpose(0, 1).flatten(1, 2)
    query, key, value = rows.split([piece.shape[3] for piece in pieces], dim=2)
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def _by_receiver(heads: Tensor, ranks: int) -> Tensor:
    """[ranks, B, t, heads / ranks, D] of [B, heads, t, D]; too few heads are repeated."""
    if heads.shape[1] < ranks:
        heads = heads.repeat_interleave(ranks // heads.shape[1], dim=1)
    return heads.transpose(1, 2).unflatten(2, (ranks, -1)).permute(2, 0, 1, 3, 4)


def scatter_rows(attended: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's tokens of all heads, [B, heads, t, D], from all tokens of its own [B, heads, T, D]."""
    pieces = attended.transpose(1, 2).unflatten(1, (group.size(), -1)).transpose(0, 1)
    arrived = all_to_all(pieces, group)  # [ranks, B, t, heads, D]
    return arrived.permute(1, 2, 0, 3, 4).flatten(2, 3).transpose(1, 2)
