"""LocalShape: one rank's part of one micro-batch, the sizes that every formula of activations counts with.

Tensor ranks hold heads/t heads and mlp_size/t columns each (Megatron, Shoeybi et al. 2019). With sequence parallelism
(Korthikanti et al. 2022) the residual stream and the norms are split along the sequence as well, and a block's
all-gathered input is gathered again in backward rather than kept. Context ranks hold length/c tokens of every row.

On a 2D, 2.5D or 3D mesh a rank has `rows / parts` rows of a micro-batch, and 1/q of their heads, columns and residual
stream (Xu and You 2021: 1/q² of all activations; Wang et al. 2022: 1/(d q²); Bian et al. 2021: 1/q³). Not counted: the
float32 temporaries of norms, which are not fused on a mesh; they are smaller than the peaks of layer_moments.py.
"""

from dataclasses import dataclass
from functools import lru_cache

from tightfit.jobs.adapter import Adapted
from tightfit.jobs.engine import EngineName
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.projections import Projection
from tightfit.jobs.workload import Workload
from tightfit.levers.policy.tiles import head_groups, is_tiled
from tightfit.models.spec import ModelSpec


def ceil(value: int, parts: int) -> int:
    """value / parts, rounded up: the largest part is what has to fit."""
    return -(-value // parts)


@dataclass
class LocalShape:
    """Rows × length tokens on one rank, `element_bytes` per number, of layers split over `tensor` ranks.

    Formulas are cached by shape: do not change one. Its sizes are computed once, when it is made.
    """

    spec: ModelSpec
    rows: int
    length: int
    element_bytes: int
    tensor: int = 1
    mesh_ranks: int = 0
    """Ranks of a 2D, 2.5D or 3D mesh with different parts of a weight; `tensor` is then the mesh's side. 0: no mesh."""
    sequence_parallel: bool = False
    context: int = 1
    ring: int = 1
    expert: int = 1
    padded_experts: int = 0
    """Experts of a routed layer in FSDP2's all-gather, padded to equally many per rank; 0: no padding needed."""
    tiles: int = 1
    codes_inputs: bool = False
    """Whether linear layers keep their input as fp8 codes, of a byte each."""
    engine_name: EngineName = "tightfit"
    adapted: Adapted | None = None
    """Adapters trained on a frozen model; None where the model itself is trained."""

    def __post_init__(self) -> None:
        spec, element_bytes = self.spec, self.element_bytes
        split = self.tensor, self.mesh_ranks, self.sequence_parallel, self.context, self.ring, self.expert, self.tiles
        self._hash = hash((spec, self.rows, self.length, element_bytes, *split, self.adapted is None))
        """Of the fields that differ within one search."""
        self.is_cube = self.mesh_ranks == self.tensor**3
        """Whether tensor ranks form a 3D mesh."""
        self.tokens = self.rows * self.length
        """Tokens whose attention and MLP this rank computes."""
        self.whole_length = self.length * self.context
        """Tokens of a row on all context ranks together."""
        self.has_tiles, self.tile_tokens = self.tiles > 1, ceil(self.tokens, self.tiles)
        self.stream_tokens = ceil(self.tokens, self.tensor) if self.sequence_parallel else self.tokens
        """Tokens of the residual stream and the norms on this rank: a share of `tokens` with sequence parallelism."""
        self.stream_bytes = self.stream_tokens * spec.hidden_size * element_bytes
        """The residual stream between two layers."""
        self.hidden_bytes = self.tokens * spec.hidden_size * element_bytes
        """A tensor of the hidden size for all tokens: what a block takes in and gives out."""
        self.inputs_bytes = self.stream_bytes // (element_bytes if self.codes_inputs else 1)
        """The normed residual stream, saved once for the projections that read it; fp8 codes have a byte a number."""

        self.heads = ceil(spec.heads, self.tensor)
        self.kv_heads = ceil(spec.kv_heads, self.tensor)
        """Key heads of this rank; where there are fewer than tensor ranks, some hold the same one."""
        ulysses_ranks = self.context // self.ring
        attended_kv_heads = max(self.kv_heads, ulysses_ranks)  # copies counted: with fewer heads than ranks, each one
        self.repeats_keys = self.heads != attended_kv_heads
        """Whether several query heads attend with one key head."""
        head_bytes = self.tokens * spec.head_dim * element_bytes
        self.query_bytes, self.key_bytes = self.heads * head_bytes, self.kv_heads * head_bytes
        """Queries, or attention's output before it is projected; and keys, or values."""
        self.attended_key_bytes = attended_kv_heads * head_bytes
        """Keys, or values, that this rank attends over: all tokens of some heads where context ranks exchange heads in
        an all-to-all (Ulysses)."""
        self.qkv_bytes = self.query_bytes + 2 * self.attended_key_bytes
        self.returned_bytes = self.query_bytes if ulysses_ranks > 1 else 0
        """Attention's output after heads are exchanged back, a second tensor; 0 where no heads are exchanged."""
        self.head_groups = head_groups(attended_kv_heads // ulysses_ranks, self.tiles)
        """Groups of heads that a tiled layer's attention goes through one after another."""

        experts = spec.experts
        self.experts = ceil(experts.count, self.expert) if experts is not None else 0
        """Experts of a routed layer that this rank computes with."""
        self.routed_rows = experts.rows(self.tokens) if experts is not None else 0
        """The most (token, expert) pairs that this rank's tokens have in a routed layer."""
        self.routed_bytes = self.routed_rows * spec.hidden_size * element_bytes
        """A tensor of the hidden size for all those pairs."""
        expert_columns = self.columns(experts.mlp_size) if experts is not None else 0
        self.experts_inner_bytes = self.routed_rows * expert_columns * element_bytes
        """A tensor inside the experts: their gate, or up, or product."""

    def __hash__(self) -> int:
        return self._hash

    def columns(self, width: int) -> int:
        """Columns of this rank of a matrix `width` wide."""
        return ceil(width, self.tensor)

    def inner_bytes(self, width: int) -> int:
        """A tensor inside an MLP of `width`: its gate, or up, or their product."""
        return self.tokens * self.columns(width) * self.element_bytes

    def trains(self, *names: Projection) -> bool:
        """Whether any of these projections needs its input for a gradient of weights."""
        return self.adapted is None or self.adapted.has(*names)

    def is_tiled(self, layer: int) -> bool:
        """Whether layer `layer` is computed a tile of tokens at a time."""
        return is_tiled(self.spec, layer, self.tiles)


_remembered = lru_cache(maxsize=4096)(LocalShape)


def local_shape(workload: Workload, layout: Layout, levers: Levers) -> LocalShape:
    """The shape on every rank of `layout`."""
    rows, length = ceil(layout.micro_batch, layout.row_parts), ceil(workload.sequence_length, layout.context)
    sizes = rows, length, workload.weight_bytes
    return shape_of_tokens(workload.spec, layout, levers, *sizes, workload.adapted, workload.engine_name)


def shape_of_tokens(
    spec: ModelSpec,
    layout: Layout,
    levers: Levers,
    rows: int,
    length: int,
    element_bytes: int,
    adapted: Adapted | None,
    engine_name: EngineName = "tightfit",
) -> LocalShape:
    """The shape on a rank of `layout` that computes attention of rows × length tokens."""
    return _remembered(
        spec,
        rows,
        length,
        element_bytes,
        tensor=layout.tensor_axes[2],
        mesh_ranks=0 if layout.tensor_mesh == "1d" else layout.weight_ranks,
        sequence_parallel=layout.splits_stream and layout.tensor > 1,
        context=layout.context,
        ring=layout.ring,
        expert=layout.expert,
        padded_experts=_padded_experts(spec, layout),
        tiles=levers.tiles,
        codes_inputs=levers.matmul == "fp8-tensor",
        engine_name=engine_name,
        adapted=adapted,
    )


def _padded_experts(spec: ModelSpec, layout: Layout) -> int:
    """FSDP2 shards a stack of experts by whole experts: 8 over 6 ranks are 2 each, so the all-gather has 12."""
    if spec.experts is None or not layout.zero:
        return 0
    own = ceil(spec.experts.count, layout.expert)
    sharing = max(1, layout.zero_ranks // layout.expert)
    return ceil(own, sharing) * sharing if own % sharing else 0
