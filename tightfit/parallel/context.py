"""Context parallelism: each rank holds a piece of every row, and ranks exchange activations in attention only.

Every context rank is given the same whole rows and keeps its tokens (row_split.py). Labels are those of the loader,
already shifted (`labels[t]` follows `tokens[t]`), so cutting both at the same places loses no pair at a border.
Positions are computed for the whole row, restarted at documents, and then cut; rope tables are made from them. A rank's
loss is that of its own tokens, divided by the counted tokens of the step; gradients of weights are summed over data and
context ranks together, and ZeRO shards over both (mesh.py). Everything but attention is as on one process.

| | attention of a rank | what it sends per layer, forward |
|---|---|---|
| exchange of heads (head_exchange.py) | heads / u, all tokens | (u − 1)/u of its q, k, v and output |
| ring (ring.py) | all heads, its tokens' queries | r − 1 times its keys and values |

`layout.ring` says how many of the context ranks form the ring; the others exchange heads inside it. The ring is for
heads that are too few, and for links that are slow: its messages are on their way while attention runs.

The decoder's class is unchanged. Four methods of the instance are replaced, which Decoder.forward and pipeline stages
both call: positions, embedding, the forward context (its `attend` replaces attention) and the loss. Each calls the
method it replaces, which may already be that of a mesh of tensor ranks (tensor_mesh.py): rows are then first cut to
this context rank's tokens, and afterwards split over the mesh. The balance loss of routed layers is computed over the
tokens of all pieces of a row, as one process would.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tightfit.collectives.conjugate import all_reduce
from tightfit.errors import UserError
from tightfit.jobs.layout import Layout
from tightfit.jobs.rules.shapes import unshared_rows
from tightfit.kernels.attention.attention import AttentionMask
from tightfit.models.decoder import Decoder, ForwardContext
from tightfit.models.layers.attending import AttentionSettings, attend_masked
from tightfit.models.layers.cache import KeyValueCache
from tightfit.models.layers.mlp import RoutedMlp
from tightfit.models.layers.rope import tables
from tightfit.models.layers.routing import z_loss
from tightfit.parallel.head_exchange import gather_rows, scatter_rows
from tightfit.parallel.mesh import context_group, context_ranks_group
from tightfit.parallel.ring import ring_attention
from tightfit.parallel.ring_sinks import ring_sink_attention
from tightfit.parallel.row_split import RowSplit

APPLIED = "row_split"
"""Name of the decoder attribute that holds its RowSplit."""
BY_LONGEST_ROW = ("dynamic", "longrope")
"""Scalings of rope that depend on the last position of a row, which may lie on another rank."""


def context_parallel(model: Decoder, mesh: DeviceMesh, layout: Layout) -> None:
    """Give `model` this rank's tokens of every row, in place and once; nothing changes where rows are whole."""
    rows = context_ranks_group(mesh)
    if rows is None or APPLIED in vars(model):
        return
    ring, heads = context_group(mesh, "ring"), context_group(mesh, "heads")
    split = RowSplit(
        ring=layout.ring,
        ring_rank=0 if ring is None else ring.rank(),
        ulysses_ranks=layout.ulysses_ranks,
        ulysses_rank=0 if heads is None else heads.rank(),
    )
    methods = (model.token_positions, model.embed_tokens, model.forward_context, model.loss)
    context = Context(model, split, heads, ring, WholeRows(*methods))
    own: Any = vars(model)
    own[APPLIED] = split
    own["token_positions"] = context.token_positions
    own["embed_tokens"] = context.embed_tokens
    own["forward_context"] = context.forward_context
    own["loss"] = context.loss
    for module in model.modules():
        if isinstance(module, RoutedMlp):
            vars(module)["_balance_loss"] = partial(_balance_loss, rows)
            vars(module)["_z_loss"] = partial(_z_loss, rows)


def _balance_loss(group: dist.ProcessGroup, probabilities: Tensor, load: Tensor) -> Tensor:
    """E · Σ_e f_e · P_e (models/layers/mlp.py) over the tokens of all ranks; gradients are those of this rank's
    tokens."""
    sums = all_reduce(torch.cat([load.to(probabilities.dtype), probabilities.sum(0)]), group)
    load, probability = (sums / (len(probabilities) * group.size())).chunk(2)
    return len(load) * (load * probability).sum()


def _z_loss(group: dist.ProcessGroup, logits: Tensor) -> Tensor:
    """The mean over the tokens of all ranks, which have equally many; gradients are those of this rank's tokens."""
    return all_reduce(z_loss(logits) / group.size(), group)


@dataclass(frozen=True)
class WholeRows:
    """The decoder's methods before they are replaced."""

    token_positions: Callable[[Tensor, Tensor | None, KeyValueCache | None], Tensor]
    embed_tokens: Callable[[Tensor, Tensor], Tensor]
    forward_context: Callable[[Tensor, Tensor, Tensor | None, KeyValueCache | None], ForwardContext]
    loss: Callable[[Tensor, Tensor, float | Tensor | None], Tensor]


@dataclass(frozen=True)
class Context:
    """Replacements of decoder methods: they are given whole rows and compute for this rank's tokens."""

    model: Decoder
    split: RowSplit
    heads_group: dist.ProcessGroup | None
    ring_group: dist.ProcessGroup | None
    whole: WholeRows
    """The methods that these replace, and call."""

    def token_positions(self, tokens: Tensor, documents: Tensor | None, cache: KeyValueCache | None) -> Tensor:
        """Positions of this rank's tokens in their documents, from whole rows."""
        if cache is not None:
            raise UserError("a model whose rows are split over ranks cannot generate; load the checkpoint on one")
        if sentence := unshared_rows(tokens.shape[1], self.split.ranks, self.split.ring):
            raise UserError(sentence)
        return self.split.cut(self.whole.token_positions(tokens, documents, None))

    def embed_tokens(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Embeddings of this rank's tokens of whole rows; `positions` are of these tokens."""
        return self.whole.embed_tokens(self.split.cut(tokens), positions)

    def loss(self, x: Tensor, labels: Tensor, divisor: float | Tensor | None = None) -> Tensor:
        """The summed loss of this rank's tokens; `labels` are of whole rows."""
        return self.whole.loss(x, self.split.cut(labels), divisor)

    def forward_context(
        self, x: Tensor, positions: Tensor, documents: Tensor | None, cache: KeyValueCache | None
    ) -> ForwardContext:
        """Rope tables for this rank's tokens, and attention over whole rows."""
        ctx = self.whole.forward_context(x, positions, documents, cache)
        documents = ctx.mask.documents  # of the rows that this rank attends in: a tensor mesh may have split them
        own, length = positions.shape[1], positions.shape[1] * self.split.ranks
        ctx.mask = AttentionMask(own, own, x.device)  # for its sizes only: `attend` masks whole rows
        mask = AttentionMask(length, length, x.device, documents)
        ctx.attend, ctx.heads_multiple = partial(self.attend, mask), self.split.ulysses_ranks
        for rope in ctx.rope_tables:
            if rope.scaling in BY_LONGEST_ROW:
                ctx.rope_tables[rope] = self._tables_of_whole_rows(rope, x, length, documents)
        return ctx

    def _tables_of_whole_rows(
        self, rope: Any, x: Tensor, length: int, documents: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        spec, rows = self.model.spec, torch.empty(1, length, dtype=torch.int8, device=x.device)
        positions = Decoder.token_positions(self.model, rows, documents, None)
        whole = tables(rope, spec.head_dim, spec.max_positions, positions, x.dtype)
        cos, sin = (self.split.cut(table.transpose(1, 2)).transpose(1, 2) for table in whole)
        return cos, sin

    def attend(
        self,
        mask: AttentionMask,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        **settings: Unpack[AttentionSettings],
    ) -> Tensor:
        """Attention of this rank's tokens to their whole rows, [B, heads, t, D]."""
        if self.heads_group is not None:
            query, key, value = gather_rows(query, key, value, self.heads_group)
            if (sinks := settings.get("sinks")) is not None:
                settings["sinks"] = sinks.chunk(self.heads_group.size())[self.heads_group.rank()]
        attended = self._attend(mask, query, key, value, **settings)
        del query, key, value  # freed before the outputs are received
        return attended if self.heads_group is None else scatter_rows(attended, self.heads_group)

    def _attend(
        self, mask: AttentionMask, query: Tensor, key: Tensor, value: Tensor, **settings: Unpack[AttentionSettings]
    ) -> Tensor:
        if self.ring_group is None:
            return attend_masked(query, key, value, mask, impl=self.model.impl.attention, **settings)
        scale, first = settings["scale"], self._first_keys(mask, settings["window"], len(query))
        if (sinks := settings.get("sinks")) is not None:
            return ring_sink_attention(query, key, value, sinks, first, self.ring_group, scale=scale)
        softcap = settings.get("softcap")
        return ring_attention(query, key, value, first, self.ring_group, scale=scale, softcap=softcap)

    def _first_keys(self, mask: AttentionMask, window: int | None, rows: int) -> Tensor | None:
        """The first key that each query of this ring rank attends to, [B, tokens]; None where that is the row's."""
        window = mask.effective_window(window)
        if mask.is_causal_only(window):
            return None
        first = mask.first(window).int()
        pieces = [first[:, begin:end] for begin, end in self.split.ring_intervals(mask.keys)]
        return torch.cat(pieces, dim=1).expand(rows, -1)
