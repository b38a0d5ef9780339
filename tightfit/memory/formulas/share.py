"""Share: what one rank sees of one micro-batch, the sizes that every formula of activations counts with.

Tensor ranks hold heads/t heads and mlp_size/t columns each (Megatron, Shoeybi et al. 2019). With sequence parallelism
(Korthikanti et al. 2022) the residual stream and the norms are split along the sequence as well, and what is gathered
for a projection is gathered again in backward rather than kept. Context ranks hold length/c tokens of every row.
"""

from dataclasses import dataclass
from functools import lru_cache

from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.workload import Workload
from tightfit.models.spec import ModelSpec


def ceil(value: int, parts: int) -> int:
    """value / parts, rounded up: the largest part is what has to fit."""
    return -(-value // parts)


@dataclass(frozen=True)
class Share:
    """Rows × length tokens in numbers of `element_bytes`, spread over `tensor` ranks."""

    rows: int
    length: int
    element_bytes: int
    tensor: int = 1
    sequence_parallel: bool = False
    context: int = 1
    expert: int = 1
    tiles: int = 1

    @property
    def tokens(self) -> int:
        """Tokens whose attention and MLP this rank computes."""
        return self.rows * self.length

    @property
    def outer_tokens(self) -> int:
        """Tokens of the residual stream and the norms."""
        return ceil(self.tokens, self.tensor) if self.sequence_parallel else self.tokens

    def heads(self, spec: ModelSpec) -> int:
        """Query heads of this rank."""
        return ceil(spec.heads, self.tensor)

    def kv_heads(self, spec: ModelSpec) -> int:
        """Key heads of this rank; where there are fewer than tensor ranks, some hold the same one."""
        return ceil(spec.kv_heads, self.tensor)


def share_of(workload: Workload, layout: Layout, levers: Levers) -> Share:
    """The share of every rank of `layout`."""
    return _share(
        layout.micro_batch, ceil(workload.sequence_length, layout.context), workload.weight_bytes, layout.tensor,
        layout.sequence_parallel and layout.tensor > 1, layout.context, layout.expert, levers.tiles,
    )  # fmt: skip


_share = lru_cache(maxsize=4096)(Share)
