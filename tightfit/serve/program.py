"""The decoder's forward pass over joint weights: the same numbers in fewer and larger operations.

Many tokens: a norm, four products, rope, attention and an activation a layer; each residual is added inside the norm
after it. Few tokens on a GPU (decoding): five kernels of our own around attention's two, in which norms, activations
and residuals are part of the products (kernels/decode_linear.py).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tightfit.kernels.cross_entropy import capped
from tightfit.kernels.decode_linear import MOST_ROWS, decode_linear
from tightfit.kernels.glu import glu
from tightfit.kernels.overlap import can_overlap
from tightfit.kernels.paged_attention import paged_attention
from tightfit.kernels.rms_norm import rms_norm
from tightfit.kernels.rope import rope
from tightfit.kernels.rotate_store import rotate_store
from tightfit.kernels.triton_support import use_triton
from tightfit.models.decoder import Decoder
from tightfit.serve.joint_weights import JointLayer, join_layers
from tightfit.serve.paged_cache import PagedCache
from tightfit.serve.rope_tables import RopeTables
from tightfit.serve.step import Step

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class Program:
    """A decoder of the common kind (joint_weights.py), run on steps."""

    def __init__(self, model: Decoder, cache: PagedCache, ropes: RopeTables) -> None:
        spec = model.spec
        self.model, self.cache, self.ropes, self.spec = model, cache, ropes, spec
        self.layers = join_layers(model)
        self.offset = 1.0 if spec.norm == "rms_plus_one" else 0.0
        self.head, self.final_norm = model.head.weight, model.norm.weight
        self.on_gpu = use_triton("auto", model.embed.weight)
        self.overlap = can_overlap(model.embed.weight.device)
        self.product: Product = F.linear

    def logits(self, step: Step) -> Tensor:
        """Logits [R, V] of the step's rows."""
        x = self.model.embedded(step.tokens, step.positions)[0]
        if self.on_gpu and not step.pieces and not self.ropes.by_length and len(x) <= MOST_ROWS:
            return self._few(x, step)
        return self._many(x, step)

    def _many(self, x: Tensor, step: Step) -> Tensor:
        """Logits of any step; x is [N, H]."""
        self.cache.step = step
        ropes = self.ropes.of(step)
        normed = self._norm(x, self.layers[0].attention_norm)
        for layer in self.layers:
            mixed = self.product(self._attention(normed, layer, step, ropes), layer.o, layer.o_bias)
            normed, x = self._norm_of_sum(mixed, x, layer.mlp_norm)
            gate, up = self.product(normed, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
            made = self.product(glu(gate, up, self.spec.activation), layer.down, layer.down_bias)
            following = layer.index + 1
            weight = self.layers[following].attention_norm if following < len(self.layers) else self.final_norm
            normed, x = self._norm_of_sum(made, x, weight)
        rows = normed if step.rows.numel() == len(normed) else normed[step.rows]
        return capped(self.product(rows, self.head, None), self.spec.logit_softcap)

    def _attention(self, normed: Tensor, layer: JointLayer, step: Step, ropes: dict) -> Tensor:
        """Attention of all tokens, [N, heads · D]."""
        spec, D = self.spec, self.spec.head_dim
        qkv = self.product(normed, layer.qkv, layer.qkv_bias)
        if self.on_gpu and not step.pieces and not self.ropes.by_length:
            return self._decode_attention(qkv, layer, step)
        parts = qkv.split([spec.query_size, spec.kv_size, spec.kv_size], dim=-1)
        q, k, v = (part.unflatten(-1, (-1, D)) for part in parts)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)
        q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
        q, k = rope(q, k, *ropes[layer.rope])
        mixed = self.cache.attend(layer.index, q, k, v, scale=layer.scale, window=layer.window, softcap=layer.softcap)
        return mixed[0].transpose(0, 1).flatten(1)

    def _decode_attention(self, qkv: Tensor, layer: JointLayer, step: Step, overlap: bool = False) -> Tensor:
        """The same where every sequence has one token, by our kernels."""
        keys, values = self.cache.storage[layer.index, 0], self.cache.storage[layer.index, 1]
        cos, sin = self.ropes.fixed[layer.rope]
        query = rotate_store(
            qkv,
            keys,
            values,
            step.slots,
            step.positions[0],
            cos[0, 0],
            sin[0, 0],
            heads=self.spec.heads,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            norm_eps=self.spec.norm_eps,
            norm_offset=self.offset,
            overlap=overlap,
        )
        mixed = paged_attention(
            query,
            keys,
            values,
            step.tables,
            step.lengths,
            scale=layer.scale,
            window=layer.window,
            softcap=layer.softcap,
            overlap=overlap,
        )
        return mixed.flatten(1)

    def _few(self, x: Tensor, step: Step) -> Tensor:
        """Logits of a decoding step of few sequences, float32."""
        eps, offset, overlap = self.spec.norm_eps, self.offset, self.overlap
        normed = {"norm_eps": eps, "norm_offset": offset}
        for layer in self.layers:
            qkv = decode_linear(x, layer.qkv, bias=layer.qkv_bias, norm=layer.attention_norm, overlap=overlap, **normed)
            mixed = self._decode_attention(qkv, layer, step, overlap)
            x = decode_linear(mixed, layer.o, bias=layer.o_bias, residual=x, overlap=overlap)
            inner = decode_linear(
                x,
                layer.gate_up,
                bias=layer.gate_up_bias,
                norm=layer.mlp_norm,
                activation=self.spec.activation,
                overlap=overlap,
                **normed,
            )
            x = decode_linear(inner, layer.down, bias=layer.down_bias, residual=x, overlap=overlap)
        logits = decode_linear(x, self.head, norm=self.final_norm, out_dtype=torch.float32, overlap=overlap, **normed)
        return capped(logits, self.spec.logit_softcap)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self.spec.norm_eps, offset=self.offset)

    def _norm_of_sum(self, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return rms_norm(x, weight, self.spec.norm_eps, offset=self.offset, residual=residual)
