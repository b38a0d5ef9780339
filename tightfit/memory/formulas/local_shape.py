"""LocalShape: what one rank sees of one micro-batch, the sizes that every formula of activations counts with.

Tensor ranks hold heads/t heads and mlp_size/t columns each (Megatron, Shoeybi et al. 2019). With sequence parallelism
(Korthikanti et al. 2022) the residual stream and the norms are split along the sequence as well, and what is gathered
for a projection is gathered again in backward rather than kept. Context ranks hold length/c tokens of every row.
"""

from dataclasses import dataclass
from functools import lru_cache

from tightfit.jobs.engine import EngineName
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.workload import Workload
from tightfit.levers.policy.tiles import head_groups, is_tiled
from tightfit.models.spec import ModelSpec


def ceil(value: int, parts: int) -> int:
    """value / parts, rounded up: the largest part is what has to fit."""
    return -(-value // parts)


@dataclass(frozen=True)
class LocalShape:
    """Rows × length tokens in numbers of `element_bytes`, spread over `tensor` ranks."""

    rows: int
    length: int
    element_bytes: int
    tensor: int = 1
    mesh_ranks: int = 0
    """Ranks of a 2D, 2.5D or 3D mesh that have different parts of a weight; `tensor` is then its side."""
    sequence_parallel: bool = False
    context: int = 1
    ring: int = 1
    expert: int = 1
    padded_experts: int = 0
    """Experts of a routed layer as FSDP2 gathers them, equally many for each rank that shares them; 0: none added."""
    tiles: int = 1
    codes_inputs: bool = False
    """Whether linear layers keep their input as fp8 codes, of a byte each."""
    engine_name: EngineName = "tightfit"

    @property
    def tokens(self) -> int:
        """Tokens whose attention and MLP this rank computes."""
        return self.rows * self.length

    @property
    def whole_length(self) -> int:
        """Tokens of a row on all context ranks together."""
        return self.length * self.context

    @property
    def exchanging(self) -> int:
        """Context ranks that exchange heads: in attention each has all their tokens and its share of the heads."""
        return self.context // self.ring

    @property
    def stream_tokens(self) -> int:
        """Tokens of the residual stream and the norms."""
        return ceil(self.tokens, self.tensor) if self.sequence_parallel else self.tokens

    def heads(self, spec: ModelSpec) -> int:
        """Query heads of this rank."""
        return ceil(spec.heads, self.tensor)

    def kv_heads(self, spec: ModelSpec) -> int:
        """Key heads of this rank; where there are fewer than tensor ranks, some hold the same one."""
        return ceil(spec.kv_heads, self.tensor)

    def columns(self, width: int) -> int:
        """Columns of this rank of a matrix `width` wide."""
        return ceil(width, self.tensor)

    def stream_bytes(self, spec: ModelSpec) -> int:
        """The residual stream between two layers."""
        return self.stream_tokens * spec.hidden_size * self.element_bytes

    def hidden_bytes(self, spec: ModelSpec) -> int:
        """A tensor of the hidden size for all tokens: what a block takes in and gives out."""
        return self.tokens * spec.hidden_size * self.element_bytes

    def query_bytes(self, spec: ModelSpec) -> int:
        """Queries, or attention's output before it is projected."""
        return self.tokens * self.heads(spec) * spec.head_dim * self.element_bytes

    def key_bytes(self, spec: ModelSpec) -> int:
        """Keys, or values."""
        return self.tokens * self.kv_heads(spec) * spec.head_dim * self.element_bytes

    def attended_kv_heads(self, spec: ModelSpec) -> int:
        """Key heads of all ranks that exchange heads; where there are fewer than ranks, some get the same one."""
        return max(self.kv_heads(spec), self.exchanging)

    def attended_key_bytes(self, spec: ModelSpec) -> int:
        """Keys, or values, as attention has them."""
        return self.tokens * self.attended_kv_heads(spec) * spec.head_dim * self.element_bytes

    def is_tiled(self, spec: ModelSpec, layer: int) -> bool:
        """Whether this layer works through its tokens in pieces."""
        return is_tiled(spec, layer, self.tiles)

    def head_groups(self, spec: ModelSpec) -> int:
        """In how many groups a tiled layer's attention takes its heads."""
        return head_groups(self.attended_kv_heads(spec) // self.exchanging, self.tiles)

    def returned_bytes(self, spec: ModelSpec) -> int:
        """Attention's output as other ranks send it back; else the output projection takes what attention made."""
        return self.query_bytes(spec) if self.exchanging > 1 else 0

    def experts(self, spec: ModelSpec) -> int:
        """Experts of a routed layer that this rank computes with."""
        return ceil(spec.experts.count, self.expert) if spec.experts is not None else 0

    def routed_rows(self, spec: ModelSpec) -> int:
        """The most (token, expert) pairs that this rank's tokens have in a routed layer."""
        return spec.experts.rows(self.tokens) if spec.experts is not None else 0

    def copies_bytes(self, spec: ModelSpec) -> int:
        """A tensor of the hidden size for all those pairs."""
        return self.routed_rows(spec) * spec.hidden_size * self.element_bytes

    def experts_inner_bytes(self, spec: ModelSpec) -> int:
        """A tensor inside the experts: their gate, or up, or product."""
        width = self.columns(spec.experts.mlp_size) if spec.experts is not None else 0
        return self.routed_rows(spec) * width * self.element_bytes

    def inputs_bytes(self, spec: ModelSpec) -> int:
        """The residual stream, normed, as the projections that share it keep it."""
        return self.stream_bytes(spec) // (self.element_bytes if self.codes_inputs else 1)

    def inner_bytes(self, width: int) -> int:
        """A tensor inside an MLP of `width`: its gate, or up, or their product."""
        return self.tokens * self.columns(width) * self.element_bytes


_remembered = lru_cache(maxsize=4096)(LocalShape)


def local_shape(workload: Workload, layout: Layout, levers: Levers) -> LocalShape:
    """The shape on every rank of `layout`."""
    return _remembered(
        rows=ceil(layout.micro_batch, layout.row_parts),
        length=ceil(workload.sequence_length, layout.context),
        element_bytes=workload.weight_bytes,
        tensor=layout.tensor_axes[2],
        mesh_ranks=0 if layout.tensor_mesh == "1d" else layout.weight_ranks,
        sequence_parallel=layout.tensor_mesh != "1d" or (layout.sequence_parallel and layout.tensor > 1),
        context=layout.context,
        ring=layout.ring,
        expert=layout.expert,
        padded_experts=_padded_experts(workload.spec, layout),
        tiles=levers.tiles,
        codes_inputs=levers.matmul == "fp8-tensor",
        engine_name=workload.engine_name,
    )


def shape_of_input(layout: Layout, levers: Levers, *, rows: int, length: int, element_bytes: int) -> LocalShape:
    """The shape on a rank of `layout` whose layers take [rows, length, hidden], its part of the sequence."""
    split = layout.sequence_parallel and layout.tensor > 1
    return LocalShape(
        rows=rows,
        length=length * (layout.tensor if split else 1),
        element_bytes=element_bytes,
        tensor=layout.tensor,
        sequence_parallel=split,
        context=layout.context,
        ring=layout.ring,
        expert=layout.expert,
        tiles=levers.tiles,
    )


def _padded_experts(spec: ModelSpec, layout: Layout) -> int:
    """FSDP2 splits a stack of experts into whole ones: 8 over 6 ranks are 2 each, and 12 where they are gathered."""
    if spec.experts is None or not layout.zero:
        return 0
    own = ceil(spec.experts.count, layout.expert)
    sharing = max(1, layout.sharing // layout.expert)
    return ceil(own, sharing) * sharing if own % sharing else 0
