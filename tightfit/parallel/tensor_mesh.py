"""2D, 2.5D and 3D tensor parallelism: weights and activations are both cut in blocks over a mesh of tensor ranks.

The residual stream is cut by rows over `depth` and `row` ranks and by hidden size over `column` ranks, so that no rank
holds more than its block of any activation or weight. Matrix products exchange blocks:

| | mesh | product | a rank's weights | its activations |
|---|---|---|---|---|
| 2d | q × q | SUMMA (collectives/summa.py) | 1/q² | 1/q² |
| 2.5d | d × q × q | SUMMA in each of d meshes; weights have d copies | 1/q² | 1/(d q²) |
| 3d | q × q × q | collectives/cubic.py | 1/q³ | 1/q³ |

(Xu and You 2021; Wang et al. 2022; Bian et al. 2021.) Between the projections into attention and out of it a rank has
some rows and some heads of the micro-batch, so attention is local; on a 3d mesh rows lie along `column` and heads along
`row` ranks there, as its products exchange both axes. Norms combine sums over `column` ranks (split_norm.py).

Embedding and output projection have vocabulary along `row` and hidden size along `column`. A rank looks up its rows of
the table for the tokens of all `row` ranks; a reduce-scatter sums them onto the ranks that have these tokens. For the
loss an all-gather and an all-to-all give each rank whole hidden states for the tokens of its `column`, and the
projection's columns are all-gathered: the fused loss (kernels/loss/vocab_parallel.py) combines statistics over `row`
ranks.

Gradients of replicated parameters are partial and summed once a step (tensor.py). With fewer key heads than ranks along
heads, keys and values are all-gathered and each rank takes the head its queries use. Fewer rows than parts (the last
batch of an evaluation) are filled up with rows that do not count. Refused, with reasons, in jobs/rules/tensor_mesh.py:
routed layers, latent attention, tiles. A pipeline's stages send blocks of the residual stream, each rank to the one at
its place in the next stage's mesh. Rows are first cut over context ranks, then split over each mesh (context.py).
"""

import re
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tightfit.collectives.conjugate import (
    all_gather,
    all_gather_columns,
    all_reduce,
    all_to_all,
    reduce_scatter,
)
from tightfit.collectives.cubic import CubicGroups, cubic
from tightfit.collectives.shards import BlockSplit, remember_splits
from tightfit.collectives.split_norm import split_layer_norm, split_rms_norm
from tightfit.collectives.summa import SummaGroups, summa
from tightfit.errors import UserError
from tightfit.jobs.layout import Layout
from tightfit.kernels.loss.linear_cross_entropy import IGNORE, linear_cross_entropy
from tightfit.kernels.loss.vocab_parallel import VocabularyRows, embed_own_rows
from tightfit.kernels.mlp.glu import glu
from tightfit.models.decoder import Decoder, ForwardContext
from tightfit.models.layers.cache import KeyValueCache
from tightfit.models.layers.mlp import Mlp
from tightfit.models.layers.norm import LayerNorm
from tightfit.parallel.mesh import BlockAxes, block_axes

Dims = tuple[int | None, int | None, int | None]
"""The dimension of a parameter that each of depth, row and column ranks splits; None where these have copies."""
FLAT_CUTS: tuple[tuple[str, Dims], ...] = (
    (r"^(embed|head)\.weight$", (None, 0, 1)),
    (r"^positions\.weight$", (None, None, 1)),
    (r"\.(q|k|v|o|gate|up|down)\.weight$", (None, 1, 0)),
)
"""On 2d and 2.5d meshes."""
CUBE_CUTS: tuple[tuple[str, Dims], ...] = (
    (r"^(embed|head)\.weight$", (1, 0, 1)),
    (r"^positions\.weight$", (None, None, 1)),
    (r"\.(q|k|v|gate|up)\.weight$", (1, 0, 1)),
    (r"\.(o|down)\.weight$", (1, 1, 0)),
    (r"\.(q|k|v|gate|up)\.bias$", (None, 0, None)),
)
BY_COLUMN: Dims = (None, None, 0)
"""All other vectors: norms and biases of the residual stream, and on flat meshes every bias."""
PER_HEAD = r"\.(q_norm|k_norm)\."


def mesh_parallel(model: Decoder, mesh: DeviceMesh, layout: Layout) -> None:
    """Cut `model`, of which a pipeline may have left a stage, to this rank's blocks; it may be on the meta device."""
    axes = block_axes(mesh)
    blocks = Blocks(axes, cube=layout.tensor_mesh == "3d")
    splits = {name: _split(name, p, axes, model, cube=blocks.cube) for name, p in model.named_parameters()}
    for name, split in splits.items():
        _cut(model, name, split)
    if model.spec.tied and "embed.weight" in splits:
        model.head.weight = model.embed.weight
        splits["head.weight"] = splits["embed.weight"]
    remember_splits(model, splits)
    if (table := splits.get("embed.weight", splits.get("head.weight"))) is not None:  # a stage between has neither
        cut_vocabulary = table.cuts[-2]
        first, count = cut_vocabulary.bounds()
        group = cut_vocabulary.mesh.get_group().group_name
        model.impl = replace(model.impl, vocabulary=VocabularyRows(model.spec.vocab_size, first, count, group))
    _use_blocks(model, blocks)


def _split(name: str, p: nn.Parameter, axes: BlockAxes, model: Decoder, *, cube: bool) -> BlockSplit:
    cuts = CUBE_CUTS if cube else FLAT_CUTS
    dims = next((dims for pattern, dims in cuts if re.search(pattern, name)), BY_COLUMN)
    if re.search(PER_HEAD, name):
        joint: Dims = (None, 0, None) if cube else BY_COLUMN
        dims = joint if model.spec.qk_norm_joint else (None, None, None)
    every = (axes.depth, axes.row, axes.column)
    dims = tuple(dim if axis.size() > 1 else None for axis, dim in zip(every, dims, strict=True))  # type: ignore[assignment]
    return BlockSplit(mesh=axes.mesh, grid=axes.grid, dim=None, axes=every, dims=dims, shape=tuple(p.shape))


def _cut(model: nn.Module, name: str, split: BlockSplit) -> None:
    path, _, leaf = name.rpartition(".")
    owner = model.get_submodule(path)
    own = getattr(owner, leaf)
    requires_grad = own.requires_grad
    with torch.no_grad():
        own = own.detach()
        for cut in reversed(split.cuts):
            assert cut.dim is not None
            own = own.narrow(cut.dim, *cut.bounds())
        shard = own.clone(memory_format=torch.contiguous_format)
    setattr(owner, leaf, nn.Parameter(shard, requires_grad=requires_grad))


@dataclass(frozen=True)
class Blocks:
    """This rank's place in the mesh, and the matrix products that it computes with the other ranks."""

    axes: BlockAxes
    cube: bool

    @property
    def heads(self) -> DeviceMesh:
        """The axis that attention's heads and an MLP's columns are split over."""
        return self.axes.row if self.cube else self.axes.column

    def part(self, axis: DeviceMesh) -> int:
        """Index of this rank's part of the rows, which are split over depth ranks and, inside those, over `axis`."""
        return self.axes.depth.get_local_rank() * axis.size() + axis.get_local_rank()

    @property
    def parts(self) -> int:
        """Number of parts that rows are cut into."""
        return self.axes.depth.size() * self.axes.row.size()

    def project(self, x: Tensor, linears: tuple[nn.Linear, ...], *, leaving: bool) -> tuple[Tensor, ...]:
        """x times the transpose of every weight, plus its bias; `leaving`: the projection out of attention or MLP."""
        weights = tuple(linear.weight for linear in linears)
        row, column = self.axes.row.get_group(), self.axes.column.get_group()
        if self.cube:
            inputs, outputs = (column, row) if leaving else (row, column)
            groups = CubicGroups(inputs=inputs, weights=self.axes.depth.get_group(), outputs=outputs)
            found = cubic(x, weights, groups)
        else:
            found = summa(x, weights, SummaGroups(inputs=column, weights=row))
        biases = (linear.bias for linear in linears)
        return tuple(y if bias is None else y + bias for y, bias in zip(found, biases, strict=True))

    def columns(self, weight: Tensor) -> Tensor:
        """This rank's rows of a vocabulary matrix, with all columns of its `column`: a 3d mesh splits them by depth."""
        return all_gather_columns(weight, self.axes.depth.get_group()) if self.cube else weight


def _use_blocks(model: Decoder, blocks: Blocks) -> None:
    """Replace the methods of decoder and layers that need whole tensors by those for blocks."""
    whole = MeshDecoder(model, blocks)
    own: Any = vars(model)
    # The module's own forward is replaced: FSDP2 all-gathers the shards of an untied embedding around it.
    if model.embed is not None:
        vars(model.embed)["forward"] = partial(_embed, model, blocks)
    own["token_positions"] = whole.token_positions
    own["embed_tokens"] = whole.embed_tokens
    own["forward_context"] = whole.forward_context
    own["loss"] = whole.loss
    if model.norm is not None:
        model.norm.forward = partial(_norm, model.norm, blocks.axes.column)
    layers: list[Any] = list(model.layers)
    for layer in layers:
        for norm in (layer.attention_norm, layer.attention_post_norm, layer.mlp_norm, layer.mlp_post_norm):
            if norm is not None:
                norm.forward = partial(_norm, norm, blocks.axes.column)
        _use_in_attention(layer.attention, blocks, model.spec.kv_heads)
        layer.mlp.forward = partial(_mlp, layer.mlp, blocks)


def _use_in_attention(attention: Any, blocks: Blocks, kv_heads: int) -> None:
    vars(attention)["_project_qkv"] = partial(_project_qkv, attention, blocks, kv_heads)
    attention.o.forward = lambda x: blocks.project(x, (attention.o,), leaving=True)[0]
    if attention.joint_norm and attention.q_norm is not None:
        for norm in (attention.q_norm, attention.k_norm):
            norm.forward = partial(_norm, norm, blocks.heads)


def _embed(model: Decoder, blocks: Blocks, tokens: Tensor) -> Tensor:
    """This rank's columns of the embeddings of tokens in its vocabulary rows; zeros for other tokens."""
    rows = model.impl.vocabulary
    assert rows is not None
    return embed_own_rows(tokens, blocks.columns(model.embed.weight), rows)


def _norm(norm: Any, axis: DeviceMesh, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    stream = x if residual is None else x + residual
    group = axis.get_group()
    if isinstance(norm, LayerNorm):
        normed = split_layer_norm(stream, norm.weight, norm.bias, norm.eps, group)
    else:
        normed = split_rms_norm(stream, norm.weight, norm.eps, norm.offset, group)
    return normed if residual is None else (normed, stream)


def _project_qkv(attention: Any, blocks: Blocks, kv_heads: int, x: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values of this rank's rows and heads."""
    query, *pair = blocks.project(x, (attention.q, attention.k, attention.v), leaving=False)
    ranks_per_head = blocks.heads.size() // kv_heads
    if ranks_per_head > 1:
        head = blocks.heads.get_local_rank() // ranks_per_head * attention.head_dim
        gathered = (all_gather_columns(part, blocks.heads.get_group()) for part in pair)
        pair = [part[..., head : head + attention.head_dim] for part in gathered]
    return query, *pair


def _mlp(mlp: Mlp, blocks: Blocks, x: Tensor) -> tuple[Tensor, None]:
    if mlp.gate is None:
        hidden = mlp._activation(blocks.project(x, (mlp.up,), leaving=False)[0])
    else:
        gate, up = blocks.project(x, (mlp.gate, mlp.up), leaving=False)
        hidden = glu(gate, up, mlp.activation, overwrite=True, impl=mlp.impl)
    return blocks.project(hidden, (mlp.down,), leaving=True)[0], None


@dataclass(frozen=True)
class MeshDecoder:
    """Replacements of decoder methods: they are given whole rows and compute for this rank's block."""

    model: Decoder
    blocks: Blocks

    def rows(self, x: Tensor, axis: DeviceMesh, fill: int | None = None) -> Tensor:
        """This rank's part of rows x [B, T], cut over depth ranks and `axis`."""
        return self._parts(x, fill)[self.blocks.part(axis)]

    def _parts(self, x: Tensor, fill: int | None = None) -> Tensor:
        """Rows x [B, T] in equal parts [parts, b, T], padded with copies of the first row, or with `fill`."""
        missing = -len(x) % self.blocks.parts
        if missing:
            spare = x[:1].expand(missing, -1) if fill is None else x.new_full((missing, x.shape[1]), fill)
            x = torch.cat([x, spare])
        return x.unflatten(0, (self.blocks.parts, -1))

    def token_positions(self, tokens: Tensor, documents: Tensor | None, cache: KeyValueCache | None) -> Tensor:
        """Positions of the tokens of all rows."""
        if cache is not None:
            raise UserError("a model split over a mesh of tensor ranks cannot generate; load the checkpoint on one")
        return Decoder.token_positions(self.model, tokens, documents, None)

    def embed_tokens(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """This rank's block of the residual stream: some rows and columns."""
        model, axes = self.model, self.blocks.axes
        every_row = self._parts(tokens).unflatten(0, (axes.depth.size(), -1))[axes.depth.get_local_rank()].flatten(0, 1)
        found = model.embed(every_row)
        x = reduce_scatter(found, axes.row.get_group()).view(-1, tokens.shape[1], found.shape[-1])
        if model.spec.embedding_scale != 1.0:
            x = x * x.new_full((), model.spec.embedding_scale)
        if model.positions is None:
            return x
        return x + model.positions(positions if len(positions) == 1 else self.rows(positions, axes.row))

    def forward_context(
        self, x: Tensor, positions: Tensor, documents: Tensor | None, cache: KeyValueCache | None
    ) -> ForwardContext:
        """Mask and rope tables of the rows that this rank's attention has."""
        axis = self.blocks.axes.column if self.blocks.cube else self.blocks.axes.row
        own = positions if len(positions) == 1 else self.rows(positions, axis)
        return Decoder.forward_context(
            self.model, x, own, None if documents is None else self.rows(documents, axis), cache
        )

    def loss(self, x: Tensor, labels: Tensor, divisor: float | Tensor | None = None) -> Tensor:
        """The summed loss of all rows; this rank computes its rows' part, over its shard of the vocabulary."""
        model, axes = self.model, self.blocks.axes
        column = axes.column.get_group()
        own = linear_cross_entropy(
            self._whole_states(x),
            all_gather_columns(self.blocks.columns(model.head.weight), column),
            self.rows(labels, axes.column, IGNORE),
            softcap=model.spec.logit_softcap,
            divisor=divisor,
            chunk_bytes=model.impl.loss_chunk_bytes,
            impl=model.impl.linear_cross_entropy,
            rows=model.impl.vocabulary,
        )
        return all_reduce(all_reduce(own, column), axes.depth.get_group())

    def _whole_states(self, x: Tensor) -> Tensor:
        """Blocks [b, T, H/q] → hidden states [b, T, H] of the rows of this rank's column.

        The incoming gradient covers this rank's shard of the vocabulary; the all-gather's conjugate sums over shards.
        """
        rows, length, width = x.shape
        gathered = all_gather(x, self.blocks.axes.row.get_group()).view(-1, rows * length, width)
        parts = all_to_all(gathered, self.blocks.axes.column.get_group())  # [q columns, b · T, H/q]
        return parts.movedim(0, 1).reshape(rows, length, -1)
