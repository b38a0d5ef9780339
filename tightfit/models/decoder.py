"""ONE decoder for every supported family, in plain PyTorch, built from a ModelSpec.

A single-device model: parallelism, checkpointing and offload are applied from outside, and kernels are chosen by
`Implementations`. Parameters have our own names (`layers.3.attention.q.weight`); `huggingface/weights.py` maps them.
Shapes: B batch, T tokens, H hidden size, D head size, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Unpack, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tightfit.kernels.attention.attention import AttentionImpl, AttentionMask
from tightfit.kernels.attention.rope import rope
from tightfit.kernels.joint_linear import joint_linear
from tightfit.kernels.loss.cross_entropy import softcapped
from tightfit.kernels.loss.linear_cross_entropy import CHUNK_BYTES, LinearCrossEntropyImpl, linear_cross_entropy
from tightfit.kernels.loss.vocab_parallel import VocabularyRows
from tightfit.kernels.mlp.gated_mlp import can_fuse
from tightfit.kernels.triton_support import Impl
from tightfit.models.layers.attending import AttentionSettings, attend_masked
from tightfit.models.layers.cache import KeyValueCache
from tightfit.models.layers.latent_attention import AttendLatent, LatentAttention
from tightfit.models.layers.mlp import Mlp, RoutedMlp
from tightfit.models.layers.norm import make_norm
from tightfit.models.layers.rope import tables
from tightfit.models.quantized.linear import QuantizedLinear
from tightfit.models.spec import ModelSpec, Rope


@dataclass(frozen=True)
class Implementations:
    """Which implementation of each operation the decoder calls."""

    attention: AttentionImpl = "auto"
    fused_qkv: bool = True
    """Compute q, k and v in one autograd function where possible (kernels/joint_linear.py)."""
    linear_cross_entropy: LinearCrossEntropyImpl = "auto"
    loss_chunk_bytes: int = CHUNK_BYTES
    norm: Impl = "auto"
    rope: Impl = "auto"
    glu: Impl = "auto"
    vocabulary: VocabularyRows | None = None
    """This rank's rows of the embedding and output projection, where tensor parallelism splits the vocabulary."""


class Attend(Protocol):
    """Replaces the attention of layers, for code that keeps keys and values elsewhere (paged cache, context ranks)."""

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        **settings: Unpack[AttentionSettings],
    ) -> Tensor:
        """Attention [B, heads, T, D] of query [B, heads, T, D]; key and value [B, kv_heads, T, D] are the new ones."""


@dataclass
class ForwardContext:
    """What all layers of one forward pass share: attention mask, cos and sin tables per rope, key/value cache."""

    mask: AttentionMask
    rope_tables: dict[Rope, tuple[Tensor, Tensor]]
    cache: KeyValueCache | None
    attend: Attend | None = None
    """Replaces cache and attention where given."""
    attend_latent: AttendLatent | None = None
    """The same for latent attention, where tokens' latent vectors are kept instead of keys and values."""
    heads_multiple: int = 1
    """`attend` may be called with a part of the heads, if its number of key heads is a multiple of this."""

    def attended(self, layer: "Attention | LatentAttention", query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of one layer to what is cached and new, [B, heads, T, D]; by `attend` where that is given."""
        settings = AttentionSettings(scale=layer.scale, window=layer.window, softcap=layer.softcap, sinks=layer.sinks)
        if self.attend is not None:
            return self.attend(layer.layer, query, key, value, **settings)
        if self.cache is not None:
            key, value = self.cache.extend(layer.layer, key, value)
        return attend_masked(query, key, value, self.mask, impl=layer.impl.attention, **settings)


class LossTarget(Protocol):
    """What a micro-batch learns from besides its labels (a teacher's predictions), made before the forward pass."""

    def loss(self, model: "Decoder", x: Tensor, labels: Tensor, divisor: float | Tensor | None) -> Tensor:
        """The summed loss of normed hidden states x [B, T, H], in the place of `Decoder.loss`."""


Objective = Callable[[Tensor, Tensor | None], LossTarget]
"""Makes the LossTarget of a micro-batch from its tokens and documents."""


@dataclass
class DecoderOutput:
    """`logits` without labels, summed `loss` with labels.

    `auxiliary` is what training adds for routed layers: the mean of their balance and z-losses, with their weights.
    """

    logits: Tensor | None
    loss: Tensor | None
    auxiliary: Tensor | None


class Attention(nn.Module):
    """Grouped-query attention with optional biases, qk-norm, rope, window and softcap."""

    def __init__(self, spec: ModelSpec, layer: int, impl: Implementations) -> None:
        super().__init__()
        self.layer, self.impl, self.head_dim = layer, impl, spec.head_dim
        self.window, self.rope, self.softcap = spec.window_of(layer), spec.rope_of(layer), spec.attention_softcap
        self.scale = spec.head_dim**-0.5 if spec.attention_scale is None else spec.attention_scale
        self.q = nn.Linear(spec.hidden_size, spec.query_size, bias=spec.qkv_bias)
        self.k = nn.Linear(spec.hidden_size, spec.kv_size, bias=spec.qkv_bias)
        self.v = nn.Linear(spec.hidden_size, spec.kv_size, bias=spec.qkv_bias)
        self.o = nn.Linear(spec.query_size, spec.hidden_size, bias=spec.output_bias)
        self.joint_norm = spec.qk_norm_joint
        query_norm, key_norm = (spec.query_size, spec.kv_size) if spec.qk_norm_joint else (spec.head_dim,) * 2
        self.q_norm = make_norm(spec, impl.norm, query_norm) if spec.qk_norm else None
        self.k_norm = make_norm(spec, impl.norm, key_norm) if spec.qk_norm else None
        self.sinks = nn.Parameter(torch.zeros(spec.heads)) if spec.sinks else None

    def heads(self, x: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, normed and rotated, [B, heads, T, D]."""
        query, key, value = self._project_qkv(x)
        if self.joint_norm and self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = (flat.unflatten(-1, (-1, self.head_dim)) for flat in (query, key, value))
        if not self.joint_norm and self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)  # [B, heads, T, D]
        if self.rope is not None:
            cos, sin = ctx.rope_tables[self.rope]
            query, key = rope(query, key, cos, sin, impl=self.impl.rope)
        return query, key, value

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        attended = ctx.attended(self, *self.heads(x, ctx))
        return self.o(attended.transpose(1, 2).flatten(2))

    def _project_qkv(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, [B, T, heads · D]."""
        if self.impl.fused_qkv and can_fuse(x, self.q, self.k, self.v):
            return joint_linear(x, self.q.weight, self.k.weight, self.v.weight)
        return self.q(x), self.k(x), self.v(x)


class Layer(nn.Module):
    """Pre-norm attention and MLP on the residual stream; Gemma-2 and 3 norm their outputs as well."""

    def __init__(self, spec: ModelSpec, layer: int, impl: Implementations) -> None:
        super().__init__()
        self.attention_norm = make_norm(spec, impl.norm)
        # Latent attention has no modules k and v: features that need them are refused for it (jobs/rules).
        kind = Attention if spec.latent is None else cast(type[Attention], LatentAttention)
        self.attention = kind(spec, layer, impl)
        self.attention_post_norm = make_norm(spec, impl.norm) if spec.sandwich_norms else None
        self.mlp_norm = make_norm(spec, impl.norm)
        self.mlp = RoutedMlp(spec, impl.glu) if spec.is_routed(layer) else Mlp(spec, spec.mlp_size, impl.glu)
        self.mlp_post_norm = make_norm(spec, impl.norm) if spec.sandwich_norms else None

    def forward(self, x: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor | None]:
        """The new residual stream, and the auxiliary loss of a routed layer."""
        attended = self.attention(self.attention_norm(x), ctx)
        if self.attention_post_norm is not None:
            attended = self.attention_post_norm(attended)
        normed, x = self.mlp_norm(attended, residual=x)
        out, auxiliary = self.mlp(normed)
        return x + (out if self.mlp_post_norm is None else self.mlp_post_norm(out)), auxiliary


class Decoder(nn.Module):
    """Embedding, layers, final norm and output projection."""

    def __init__(self, spec: ModelSpec, impl: Implementations | None = None) -> None:
        super().__init__()
        self.spec, self.impl = spec, impl or Implementations()
        self.embed = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.positions = nn.Embedding(spec.max_positions, spec.hidden_size) if spec.rope is None else None
        self.layers = nn.ModuleList(Layer(spec, i, self.impl) for i in range(spec.layers))
        self.norm = make_norm(spec, self.impl.norm)
        self.head = nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)
        if spec.tied:
            self.head.weight = self.embed.weight
        self.objective: Objective | None = None
        """What training minimises instead of cross entropy alone; evaluation does not use it."""

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        *,
        documents: Tensor | None = None,
        cache: KeyValueCache | None = None,
        last_only: bool = False,
        divisor: float | Tensor | None = None,
    ) -> DecoderOutput:
        """Logits of tokens [B, T] (of the last one with `last_only`), or with `labels` [B, T] their summed loss.

        `labels[b, t]` is the token that should follow `tokens[b, t]`, −100 where it does not count. `documents[b, t]`
        is the id of the packed document of a token: attention stays inside it and positions restart with it.

        `divisor` divides the summed loss, such as by the number of labels of all micro-batches of a step. Dividing
        here rather than afterwards rounds the gradient of the hidden states once less.
        """
        learns = labels is not None and self.objective is not None and torch.is_grad_enabled()
        target = self.objective(tokens, documents) if learns and self.objective is not None else None
        positions = self.token_positions(tokens, documents, cache)
        x = self.embed_tokens(tokens, positions)
        ctx = self.forward_context(x, positions, documents, cache)
        added: list[Tensor] = []
        for layer in self.layers:
            x, auxiliary = layer(x, ctx)
            if auxiliary is not None:
                added.append(auxiliary)
        if cache is not None:
            cache.advance(tokens.shape[1])
        x = self.norm(x[:, -1:] if last_only else x)
        auxiliary = torch.stack(added).mean() if added else None
        if labels is None:
            logits = softcapped(self.head(x), self.spec.logit_softcap)
            return DecoderOutput(logits=logits, loss=None, auxiliary=auxiliary)
        loss = self.loss(x, labels, divisor) if target is None else target.loss(self, x, labels, divisor)
        return DecoderOutput(logits=None, loss=loss, auxiliary=auxiliary)

    def loss(self, x: Tensor, labels: Tensor, divisor: float | Tensor | None = None) -> Tensor:
        """Summed cross entropy of normed hidden states [B, T, H]."""
        return linear_cross_entropy(
            x,
            self.head_weight(x.dtype),
            labels,
            softcap=self.spec.logit_softcap,
            divisor=divisor,
            chunk_bytes=self.impl.loss_chunk_bytes,
            impl=self.impl.linear_cross_entropy,
            rows=self.impl.vocabulary,
        )

    def head_weight(self, dtype: torch.dtype) -> Tensor:
        """The output projection as a matrix, expanded to `dtype` where it is held in codes."""
        head: nn.Linear | QuantizedLinear = self.head
        return head.expand(dtype) if isinstance(head, QuantizedLinear) else head.weight

    def token_positions(self, tokens: Tensor, documents: Tensor | None, cache: KeyValueCache | None) -> Tensor:
        """Position of each token in its own document, [B or 1, T]."""
        start = cache.length if cache is not None else 0
        index = torch.arange(start, start + tokens.shape[1], device=tokens.device)[None]
        if documents is None:
            return index
        starts = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
        return index - torch.where(starts, index, 0).cummax(dim=1).values

    def embed_tokens(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """The residual stream before the first layer, [B, T, H]."""
        x = self.embed(tokens)
        if self.spec.embedding_scale != 1.0:
            x = x * x.new_full((), self.spec.embedding_scale)  # rounded to the model's dtype, as it was in training
        return x if self.positions is None else x + self.positions(positions)

    def forward_context(
        self, x: Tensor, positions: Tensor, documents: Tensor | None, cache: KeyValueCache | None
    ) -> ForwardContext:
        """Mask and rope tables for tokens at `positions`."""
        spec = self.spec
        queries = positions.shape[1]  # not x.shape[1]: under sequence parallelism x has this rank's tokens only
        keys = queries + (cache.length if cache is not None else 0)
        ropes = {rope for i in range(spec.layers) if (rope := spec.rope_of(i)) is not None}
        return ForwardContext(
            mask=AttentionMask(queries, keys, x.device, documents),
            rope_tables={r: tables(r, spec.rope_dim, spec.max_positions, positions, x.dtype) for r in ropes},
            cache=cache,
        )
