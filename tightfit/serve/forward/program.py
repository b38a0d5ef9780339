"""The decoder's forward pass over joint weights: the same numbers in fewer and larger operations.

Many tokens: a norm, four products, rope, attention and an activation a layer; each residual is added inside the norm
after it. Some sequences, one token each: norms and attention begin while the kernel before them ends, and so do
products (kernels/decoding/few_rows.py). One token on a GPU (decoding): five kernels of our own a layer, in which norms,
rope, activations and residuals are part of the products (kernels/decoding/decode_linear.py); with packed weights, norms
are kernels of their own where the product's kernel does not take them.
"""

from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tightfit.kernels.attention.rope import rope
from tightfit.kernels.decoding.decode_attention import decode_attention
from tightfit.kernels.decoding.rotate_store import rotate_store
from tightfit.kernels.loss.cross_entropy import softcapped
from tightfit.kernels.overlap import can_overlap
from tightfit.kernels.triton_support import use_triton
from tightfit.models.decoder import Decoder
from tightfit.models.huggingface.adapter import Adapter
from tightfit.models.spec import ModelSpec
from tightfit.serve.cache.paged import PagedCache
from tightfit.serve.forward.cpu_operations import turn_rows, turns
from tightfit.serve.forward.rope_tables import RopeTables
from tightfit.serve.schedule.step import Step
from tightfit.serve.weights.joint import JointLayer, join, join_layers
from tightfit.serve.weights.norm import Norm
from tightfit.serve.weights.requested import Choice, with_requested
from tightfit.serve.weights.weight import Fused


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
        adapters: Mapping[str, Adapter] | None = None,
    ) -> None:
        """`adapters` are those that requests may choose."""
        spec = model.spec
        self.model, self.cache, self.ropes, self.spec = model, cache, ropes, spec
        self.overlap = overlap and can_overlap(model.embed.weight.device)
        self.choice = Choice(adapters or {}, overlap=self.overlap)
        self.layers = [
            with_adapters(layer, spec, self.choice) for layer in join_layers(model, half=half, overlap=self.overlap)
        ]
        self.final_norm = Norm.of(model.norm, spec, overlap=self.overlap)
        self.head = join([model.head], half=half, overlap=self.overlap)
        self.on_gpu = use_triton("auto", model.embed.weight)
        self.own_attention = self.on_gpu and not cache.is_quantized  # the kernels that store keys write no codes
        self.on_cpu = self.final_norm.on_cpu
        self.counters = torch.zeros(sequences * spec.kv_heads, device=cache.device, dtype=torch.int32)

    def shortened(self) -> "Program":
        """A copy with only as many of the first layers as include every kind of layer, and one more, as the last layer
        does some of its work for fewer rows."""
        short, kinds = copy(self), [layer.kind for layer in self.layers]
        short.layers = self.layers[: 2 + max(kinds.index(kind) for kind in kinds)]
        return short

    def with_layers(self, kept: list[int], cache: PagedCache) -> "Program":
        """A copy that runs the layers `kept` alone, over a cache that has only those."""
        some = copy(self)
        some.cache, some.own_attention = cache, self.on_gpu and not cache.is_quantized
        some.layers = [replace(self.layers[layer], index=index) for index, layer in enumerate(kept)]
        return some

    def states(self, step: Step) -> Tensor:
        """The residual stream after the last layer at the step's rows, [R, H]."""
        self.choice.make(step)
        x = self.model.embed_tokens(step.tokens, step.positions)[0]
        if self.own_attention and len(x) == 1 and not (step.pieces or step.row_by_row or self.ropes.by_length):
            return self._one(x, step)
        return self._many(x, step)

    def project(self, states: Tensor) -> Tensor:
        """Logits [R, V]."""
        if self.on_gpu and len(states) == 1:
            fused = Fused(norm=self.final_norm, out_dtype=torch.float32, overlap=self.overlap)
            logits = self.head.one_token(states, fused)
        else:
            logits = self.head.product(self.final_norm(states))
        return softcapped(logits, self.spec.logit_softcap)

    def _many(self, x: Tensor, step: Step) -> Tensor:
        """`states` of any step from x [N, H]. After its attention, the last layer computes the step's rows alone."""
        self.cache.step = step
        ropes = self.ropes.of(step)
        if self._is_lean(step):
            ropes = turns(ropes)
        normed = self.layers[0].attention_norm(x)
        for layer in self.layers:
            attended, is_last = self._attention(normed, layer, step, ropes), layer.index + 1 == len(self.layers)
            if is_last and step.rows.numel() < len(x):
                attended, x = attended[step.rows], x[step.rows]
                self.choice.narrow(step.rows)
                if not len(x):  # a piece of a prompt without logits: its keys and values are stored
                    return x
            normed, x = layer.mlp_norm.of_sum(layer.o.product(attended), x)
            mlp_output = layer.down.product_of_gated(layer.gate_up, normed, self.spec.activation)
            if not is_last:
                normed, x = self.layers[layer.index + 1].attention_norm.of_sum(mlp_output, x)
        return x + mlp_output

    def _attention(self, normed: Tensor, layer: JointLayer, step: Step, ropes: dict) -> Tensor:
        """Attention of all tokens, [N, heads · D]."""
        qkv = layer.qkv.product(normed)
        if self.own_attention and not self.ropes.by_length:
            apart = step.pieces or step.row_by_row
            return self.mixed(qkv, layer, step) if apart else self.decode(qkv, layer, step)
        if self._is_lean(step):
            return self._singles(qkv, layer, step, ropes[layer.rope])
        spec = self.spec
        parts = qkv.split([spec.query_size, spec.kv_size, spec.kv_size], dim=-1)
        q, k, v = (part.unflatten(-1, (-1, spec.head_dim)) for part in parts)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = layer.q_norm(q), layer.k_norm(k)
        q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
        q, k = rope(q, k, *ropes[layer.rope])
        mixed = self.cache.attend(layer.index, q, k, v, **layer.attention)
        return mixed[0].transpose(0, 1).flatten(1)

    def _singles(self, qkv: Tensor, layer: JointLayer, step: Step, turn: tuple[Tensor, Tensor]) -> Tensor:
        """`_attention` on a CPU where every sequence has one token: queries and keys are rotated together, in place."""
        heads, kv_heads = self.spec.heads, self.spec.kv_heads
        rows = qkv.view(len(qkv), heads + 2 * kv_heads, -1)
        query, key, key_value = rows[:, :heads], rows[:, heads : heads + kv_heads], rows[:, heads:]
        if layer.q_norm is not None and layer.k_norm is not None:
            query.copy_(layer.q_norm(query))
            key.copy_(layer.k_norm(key))
        turn_rows(rows[:, : heads + kv_heads], *turn)
        key_value = key_value.unflatten(1, (2, kv_heads))
        return self.cache.attend_singles(step, layer.index, query, key_value, **layer.attention).flatten(1)

    def mixed(self, qkv: Tensor, layer: JointLayer, step: Step) -> Tensor:
        """`_attention` by our kernels: rotate and store all tokens, then attend, single tokens and pieces apart."""
        step, (keys, values) = self.cache.places(layer.index, step), self.cache.numbers(layer.index)
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
            **_kernel_norms(layer),
        )
        return self.cache.attend_stored(step, layer.index, query, **layer.attention).flatten(1)

    def decode(self, qkv: Tensor, layer: JointLayer, step: Step) -> Tensor:
        """`_attention` in one kernel of ours where every sequence has one token."""
        step, (keys, values) = self.cache.places(layer.index, step), self.cache.numbers(layer.index)
        cos, sin = self.ropes.fixed[layer.rope]
        mixed = decode_attention(
            qkv,
            keys,
            values,
            step.tables,
            step.lengths,
            cos[0, 0],
            sin[0, 0],
            self.counters,
            heads=self.spec.heads,
            scale=layer.attention["scale"],
            window=layer.attention["window"],
            softcap=layer.attention.get("softcap"),
            overlap=self.overlap,
            **_kernel_norms(layer),
        )
        return mixed.flatten(1)

    def _one(self, x: Tensor, step: Step) -> Tensor:
        """`states` of a decoding step of one sequence."""
        overlap, activation = self.overlap, self.spec.activation
        for layer in self.layers:
            qkv = layer.qkv.one_token(x, Fused(norm=layer.attention_norm, overlap=overlap))
            mixed = self.decode(qkv, layer, step)
            x = layer.o.one_token(mixed, Fused(residual=x, overlap=overlap))
            inner = layer.gate_up.one_token(x, Fused(norm=layer.mlp_norm, activation=activation, overlap=overlap))
            x = layer.down.one_token(inner, Fused(residual=x, overlap=overlap))
        return x

    def _is_lean(self, step: Step) -> bool:
        """Whether every sequence has one token, on a CPU, and torch's own attention does (no codes, no softcap)."""
        plain = not self.cache.is_quantized and self.spec.attention_softcap is None
        return self.on_cpu and plain and not (step.pieces or step.row_by_row)


def with_adapters(layer: JointLayer, spec: ModelSpec, choice: Choice) -> JointLayer:
    """A layer whose matrices get what adapters add to them."""
    before, mlp = f"layers.{layer.index}", [spec.mlp_size, spec.mlp_size]
    attention = [f"{before}.attention.{part}" for part in "qkv"]
    heads = [spec.query_size, spec.kv_size, spec.kv_size]
    return replace(
        layer,
        qkv=with_requested(layer.qkv, attention, heads, choice),
        o=with_requested(layer.o, [f"{before}.attention.o"], [spec.hidden_size], choice),
        gate_up=with_requested(layer.gate_up, [f"{before}.mlp.gate", f"{before}.mlp.up"], mlp, choice),
        down=with_requested(layer.down, [f"{before}.mlp.down"], [spec.hidden_size], choice),
    )


def _kernel_norms(layer: JointLayer) -> dict[str, Any]:
    """The norms of queries and keys as our kernels take them."""
    if layer.q_norm is None or layer.k_norm is None:
        return {"q_norm": None, "k_norm": None}
    norms = {"q_norm": layer.q_norm.weight, "k_norm": layer.k_norm.weight}
    return norms | {"norm_eps": layer.q_norm.eps, "norm_offset": layer.q_norm.offset}
