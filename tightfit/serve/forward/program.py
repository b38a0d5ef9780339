"""The decoder's forward pass over joint weights: the same numbers in fewer and larger operations.

Many tokens: a norm, four products, rope, attention and an activation a layer; each residual is added inside the norm
after it. One token on a GPU (decoding): five kernels of our own a layer, in which norms, rope, activations
and residuals are part of the products (kernels/decode_linear.py); packed weights have norms apart.
"""

from copy import copy

import torch
import torch.nn.functional as F
from torch import Tensor

from tightfit.kernels.cross_entropy import softcapped
from tightfit.kernels.decode_attention import decode_attention
from tightfit.kernels.decode_linear import decode_linear
from tightfit.kernels.fp8_vector import fp8_vector
from tightfit.kernels.glu import glu
from tightfit.kernels.overlap import can_overlap
from tightfit.kernels.packed_vector import packed_vector
from tightfit.kernels.rms_norm import rms_norm
from tightfit.kernels.rope import rope
from tightfit.kernels.rotate_store import rotate_store
from tightfit.kernels.triton_support import use_triton
from tightfit.models.decoder import Decoder
from tightfit.serve.cache.paged import PagedCache
from tightfit.serve.forward.cpu_operations import RowNorm, turn_rows, turns
from tightfit.serve.forward.rope_tables import RopeTables
from tightfit.serve.schedule.step import Step
from tightfit.serve.weights.adapted import AdaptedWeight
from tightfit.serve.weights.fp8 import Fp8Weight
from tightfit.serve.weights.half import HalfWeight
from tightfit.serve.weights.int4 import Int4Weight
from tightfit.serve.weights.joint import JointLayer, Weight, as_one, join_layers, norm_weight
from tightfit.serve.weights.packed import PackedWeight


class Program:
    """A decoder of the common kind (weights/joint.py), run on steps."""

    def __init__(
        self,
        model: Decoder,
        cache: PagedCache,
        ropes: RopeTables,
        *,
        overlap: bool,
        sequences: int,
        half: bool = False,
    ) -> None:
        spec = model.spec
        self.model, self.cache, self.ropes, self.spec = model, cache, ropes, spec
        self.layers = join_layers(model, half=half)
        self.offset = 1.0 if spec.norm == "rms_plus_one" else 0.0
        self.head = as_one([model.head], half=half)
        self.device, self.dtype = model.embed.weight.device, model.embed.weight.dtype
        self.final_norm = norm_weight(model.norm)
        self.on_gpu = use_triton("auto", model.embed.weight)
        self.own_attention = self.on_gpu and not cache.is_quantized  # the kernels that store read what they stored
        self.on_cpu = self.device.type == "cpu" and not self.on_gpu
        self.row_norms = self._make_row_norms() if self.on_cpu and self.dtype == torch.float32 else {}
        self.overlap = overlap and can_overlap(model.embed.weight.device)
        self.counters = torch.zeros(sequences * spec.kv_heads, device=cache.storage.device, dtype=torch.int32)

    def shortened(self) -> "Program":
        """The same with as few of the first layers as have every kind of them."""
        short, kinds = copy(self), [layer.kind for layer in self.layers]
        short.layers = self.layers[: 1 + max(kinds.index(kind) for kind in kinds)]
        return short

    def product(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        """x · Wᵀ + b."""
        return F.linear(x, weight, bias) if isinstance(weight, Tensor) else weight.product(x, bias)

    def gated_product(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        """act(g) · u of a weight that is gate over up."""
        if not isinstance(weight, Tensor):
            return weight.gated_product(x, bias, self.spec.activation)
        gate, up = F.linear(x, weight, bias).chunk(2, dim=-1)
        return glu(gate, up, self.spec.activation)

    def states(self, step: Step) -> Tensor:
        """The residual stream after the last layer at the step's rows, [R, H]."""
        x = self.model.embed_tokens(step.tokens, step.positions)[0]
        if self.own_attention and len(x) == 1 and not (step.pieces or step.row_by_row or self.ropes.by_length):
            return self._one(x, step)
        return self._many(x, step)

    def project(self, states: Tensor) -> Tensor:
        """Logits [R, V]."""
        if self.on_gpu and len(states) == 1:
            logits = self._one_product(states, self.head, None, norm=self.final_norm, out_dtype=torch.float32)
        else:
            logits = self.product(self.norm(states, self.final_norm), self.head, None)
        return softcapped(logits, self.spec.logit_softcap)

    def _many(self, x: Tensor, step: Step) -> Tensor:
        """Of any step; x is [N, H]."""
        self.cache.step = step
        ropes = self.ropes.of(step)
        if self._is_lean(step):
            ropes = turns(ropes)
        normed = self.norm(x, self.layers[0].attention_norm)
        for layer in self.layers:
            mixed = self.product(self._attention(normed, layer, step, ropes), layer.o, layer.o_bias)
            normed, x = self.norm_of_sum(mixed, x, layer.mlp_norm)
            inner = self.gated_product(normed, layer.gate_up, layer.gate_up_bias)
            made = self.product(inner, layer.down, layer.down_bias)
            if layer.index + 1 < len(self.layers):
                normed, x = self.norm_of_sum(made, x, self.layers[layer.index + 1].attention_norm)
        if step.rows.numel() == len(x):
            return x + made
        return x[step.rows] + made[step.rows]

    def _attention(self, normed: Tensor, layer: JointLayer, step: Step, ropes: dict) -> Tensor:
        """Attention of all tokens, [N, heads · D]."""
        qkv = self.product(normed, layer.qkv, layer.qkv_bias)
        if self.own_attention and not self.ropes.by_length:
            apart = step.pieces or step.row_by_row
            return self.mixed(qkv, layer, step) if apart else self.decode(qkv, layer, step)
        if self._is_lean(step):
            return self._singles(qkv, layer, step, ropes[layer.rope])
        spec = self.spec
        parts = qkv.split([spec.query_size, spec.kv_size, spec.kv_size], dim=-1)
        q, k, v = (part.unflatten(-1, (-1, spec.head_dim)) for part in parts)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self.norm(q, layer.q_norm), self.norm(k, layer.k_norm)
        q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
        q, k = rope(q, k, *ropes[layer.rope])
        mixed = self.cache.attend(layer.index, q, k, v, scale=layer.scale, window=layer.window, softcap=layer.softcap)
        return mixed[0].transpose(0, 1).flatten(1)

    def _singles(self, qkv: Tensor, layer: JointLayer, step: Step, turn: tuple[Tensor, Tensor]) -> Tensor:
        """The same on a CPU where every sequence has one token: queries and keys are turned together, in place."""
        heads, kv_heads = self.spec.heads, self.spec.kv_heads
        rows = qkv.view(len(qkv), heads + 2 * kv_heads, -1)
        query, key, key_value = rows[:, :heads], rows[:, heads : heads + kv_heads], rows[:, heads:]
        if layer.q_norm is not None and layer.k_norm is not None:
            query.copy_(self.norm(query, layer.q_norm))
            key.copy_(self.norm(key, layer.k_norm))
        turn_rows(rows[:, : heads + kv_heads], *turn)
        mixed = self.cache.attend_singles(
            step, layer.index, query, key_value.unflatten(1, (2, kv_heads)), scale=layer.scale, window=layer.window
        )
        return mixed.flatten(1)

    def mixed(self, qkv: Tensor, layer: JointLayer, step: Step) -> Tensor:
        """The same by our kernels: turn and store all tokens, then single tokens and pieces of prompts attend."""
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
        )
        mixed = self.cache.attend_stored(
            step, layer.index, query, scale=layer.scale, window=layer.window, softcap=layer.softcap
        )
        return mixed.flatten(1)

    def decode(self, qkv: Tensor, layer: JointLayer, step: Step, overlap: bool = False) -> Tensor:
        """The same in one kernel where every sequence has one token."""
        cos, sin = self.ropes.fixed[layer.rope]
        mixed = decode_attention(
            qkv,
            self.cache.storage[layer.index, 0],
            self.cache.storage[layer.index, 1],
            step.tables,
            step.lengths,
            cos[0, 0],
            sin[0, 0],
            self.counters,
            heads=self.spec.heads,
            scale=layer.scale,
            window=layer.window,
            softcap=layer.softcap,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            norm_eps=self.spec.norm_eps,
            norm_offset=self.offset,
            overlap=overlap,
        )
        return mixed.flatten(1)

    def _one(self, x: Tensor, step: Step) -> Tensor:
        """Of a decoding step of one sequence."""
        for layer in self.layers:
            qkv = self._one_product(x, layer.qkv, layer.qkv_bias, norm=layer.attention_norm)
            mixed = self.decode(qkv, layer, step, self.overlap)
            x = self._one_product(mixed, layer.o, layer.o_bias, residual=x)
            inner = self._one_product(x, layer.gate_up, layer.gate_up_bias, norm=layer.mlp_norm, gated=True)
            x = self._one_product(inner, layer.down, layer.down_bias, residual=x)
        return x

    def _one_product(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None,
        *,
        norm: Tensor | None = None,
        gated: bool = False,
        residual: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """A product of one token with what stands before and after it, fused where our kernels take the weight."""
        if isinstance(weight, AdaptedWeight) or (isinstance(weight, Fp8Weight) and not weight.can_decode):
            x = x if norm is None else self.norm(x, norm)
            made = self.gated_product(x, weight, bias) if gated else weight.product(x, bias)
            return made if residual is None else made + residual
        if isinstance(weight, PackedWeight) and weight.takes_vector(x.dtype):
            return packed_vector(
                x,
                *weight,
                bias=bias,
                norm=norm,
                norm_eps=self.spec.norm_eps,
                norm_offset=self.offset,
                activation=self.spec.activation if gated else "",
                residual=residual,
                overlap=self.overlap,
            )
        if isinstance(weight, PackedWeight):
            x = x if norm is None else self.norm(x, norm)
            if gated:
                return weight.gated_product(x, bias, self.spec.activation, overlap=self.overlap)
            return weight.product(x, bias, residual, overlap=self.overlap)
        if isinstance(weight, Fp8Weight) and weight.takes_vector(x.dtype):
            return fp8_vector(
                x,
                *weight,
                bias=bias,
                norm=norm,
                norm_eps=self.spec.norm_eps,
                norm_offset=self.offset,
                activation=self.spec.activation if gated else "",
                residual=residual,
                out_dtype=out_dtype,
                overlap=self.overlap,
            )
        assert not isinstance(weight, HalfWeight | Int4Weight), "those are a CPU's"
        codes, scale = weight if isinstance(weight, Fp8Weight) else (weight, None)
        return decode_linear(
            x,
            codes,
            scale=scale,
            bias=bias,
            norm=norm,
            norm_eps=self.spec.norm_eps,
            norm_offset=self.offset,
            activation=self.spec.activation if gated else None,
            residual=residual,
            out_dtype=out_dtype,
            overlap=self.overlap,
        )

    def _make_row_norms(self) -> dict[Tensor, RowNorm]:
        """The model's norms in fewer operations, by their weights."""
        of_layers = ((each.attention_norm, each.mlp_norm, each.q_norm, each.k_norm) for each in self.layers)
        weights = (weight for layer in of_layers for weight in layer if weight is not None)
        return {w: RowNorm.of(w, self.offset, self.spec.norm_eps) for w in (*weights, self.final_norm)}

    def _is_lean(self, step: Step) -> bool:
        """Whether attention is one token each on a CPU, with nothing that torch's own has not."""
        plain = not self.cache.is_quantized and self.spec.attention_softcap is None
        return self.on_cpu and plain and not (step.pieces or step.row_by_row)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm as the model has it."""
        if (own := self.row_norms.get(weight)) is not None:
            return own(x)
        return rms_norm(x, weight, self.spec.norm_eps, offset=self.offset)

    def norm_of_sum(self, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """RMSNorm of x + residual, and that sum."""
        if self.on_cpu:
            s = x + residual
            return self.norm(s, weight), s
        return rms_norm(x, weight, self.spec.norm_eps, offset=self.offset, residual=residual)
