"""Projections of one input side by side in memory, so that each is one product: queries, keys and values; gate and up.

The decoder's own parameters become views of the joint matrices, so nothing is held twice. For dense models with gated
MLPs, RMSNorms before attention and MLP, and rotary positions, their projections plain, packed integers or 8-bit floats
(with adapters beside them, adapted.py); others run through the decoder's own layers. On a CPU plain ones may
have a copy in 16 bits (half.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from tightfit.models.decoder import Decoder, Layer
from tightfit.models.linear_plus_adapter import base_of
from tightfit.models.mlp import Mlp
from tightfit.models.spec import Rope
from tightfit.serve.weights.adapted import AdaptedWeight, CodedMatrix, with_adapters
from tightfit.serve.weights.fp8 import Fp8Weight, is_fp8, join_fp8
from tightfit.serve.weights.half import HalfWeight, copy_bytes, halved, has_products, is_exact, is_near
from tightfit.serve.weights.int4 import Int4Weight, is_int4, join_int4, rounds_products
from tightfit.serve.weights.packed import PackedWeight, can_pack, join_packed

Weight = Tensor | PackedWeight | Fp8Weight | Int4Weight | HalfWeight | AdaptedWeight


@dataclass(frozen=True)
class JointLayer:
    """The weights of one layer, as a serving step multiplies by them."""

    index: int
    attention_norm: Tensor
    mlp_norm: Tensor
    qkv: Weight
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Weight
    o_bias: Tensor | None
    gate_up: Weight
    gate_up_bias: Tensor | None
    down: Weight
    down_bias: Tensor | None
    rope: Rope
    scale: float
    window: int | None
    softcap: float | None

    @property
    def kind(self) -> tuple[Any, ...]:
        """Equal for layers that run through the same kernels."""
        return tuple(_kind(getattr(self, each.name)) for each in fields(self) if each.name != "index")


def _kind(part: Any) -> Any:
    if isinstance(part, Tensor):
        return part.dtype, part.shape, part.stride()
    return (type(part), *map(_kind, part)) if isinstance(part, tuple) else repr(part)


def can_join(model: Decoder) -> bool:
    """Whether a model's layers are of the common kind, and projections of one input are all plain or coded alike."""
    spec = model.spec
    plain = spec.norm in ("rms", "rms_plus_one") and not spec.sandwich_norms and spec.gated
    apart = spec.latent is not None or spec.qk_norm_joint or spec.sinks
    if not plain or apart or spec.rope is None or spec.experts is not None:
        return False
    alike = [group for layer in model.layers for group in _projections(layer)]
    return all(can_be_one(linears) for linears in [*alike, (model.head,)])


@torch.no_grad()
def half_bytes(model: Decoder, *, rounded: bool = False) -> int:
    """What a copy of the joint matrices in 16 bits takes; 0 where it would change any (of a model that is `rounded`
    anyway: by more than 2⁻¹¹), or is of no use."""
    if not has_products(model.embed.weight) or not can_join(model):
        return 0
    groups = [*(group for layer in model.layers for group in _projections(layer)), (model.head,)]
    weights: list[list[Any]] = [[linear.weight for linear in group] for group in groups if _is_plain(group)]
    loses_nothing = is_near if rounded or rounds_products(model) else is_exact
    exact = all(loses_nothing(weight) for group in weights for weight in group)
    return sum(copy_bytes(*group) for group in weights) if exact else 0


def can_be_one(linears: Sequence[nn.Module]) -> bool:
    """Whether layers of one input can be multiplied by together."""
    bases = [base_of(linear) for linear in linears]
    return _is_plain(linears) or can_pack(bases) or is_int4(bases) or is_fp8(bases)


def _projections(layer: Any) -> tuple[tuple[nn.Module, ...], ...]:
    """Those of one input together."""
    attention, mlp = layer.attention, layer.mlp
    return (attention.q, attention.k, attention.v), (attention.o,), (mlp.gate, mlp.up), (mlp.down,)


def _is_plain(linears: Sequence[nn.Module]) -> bool:
    return all(type(linear) is nn.Linear for linear in linears)


@torch.no_grad()
def join_layers(model: Decoder, *, half: bool = False) -> list[JointLayer]:
    """The layers of `model`, whose parameters are views of joint ones from here on; with `half` read in 16 bits."""
    return [_joined(index, layer, half) for index, layer in enumerate(model.layers)]  # type: ignore[arg-type]


def _joined(index: int, layer: Layer, half: bool) -> JointLayer:
    attention, mlp = layer.attention, layer.mlp
    assert isinstance(mlp, Mlp)
    assert mlp.gate is not None
    assert attention.rope is not None
    qkv, qkv_bias = _join(attention.q, attention.k, attention.v, half=half)
    o, o_bias = _join(attention.o, half=half)
    gate_up, gate_up_bias = _join(mlp.gate, mlp.up, half=half)
    down, down_bias = _join(mlp.down, half=half)
    return JointLayer(
        index=index,
        attention_norm=norm_weight(layer.attention_norm),
        mlp_norm=norm_weight(layer.mlp_norm),
        qkv=qkv,
        qkv_bias=qkv_bias,
        q_norm=_optional(attention.q_norm),
        k_norm=_optional(attention.k_norm),
        o=o,
        o_bias=o_bias,
        gate_up=gate_up,
        gate_up_bias=gate_up_bias,
        down=down,
        down_bias=down_bias,
        rope=attention.rope,
        scale=attention.scale,
        window=attention.window,
        softcap=attention.softcap,
    )


def _join(*linears: nn.Linear, half: bool) -> tuple[Weight, Tensor | None]:
    """One weight over the other, and the biases, where there are any."""
    bias = _join_parameters(linears, "bias") if linears[0].bias is not None else None
    return as_one(linears, half=half), bias


def as_one(linears: Sequence[nn.Linear], *, half: bool = False) -> Weight:
    """The weights of layers of one input, one above the other."""
    if _is_plain(linears):
        joint = _join_parameters(linears, "weight")
        return halved(joint) if half else joint
    bases: Any = [base_of(linear) for linear in linears]
    return with_adapters(_join_coded(bases), linears)


def _join_coded(linears: Any) -> CodedMatrix:
    if is_fp8(linears):
        return join_fp8(linears)
    return join_int4(linears) if is_int4(linears) else join_packed(linears)


def _join_parameters(linears: Sequence[nn.Linear], name: str) -> Tensor:
    parts = [getattr(linear, name) for linear in linears]
    if len(parts) == 1:
        return parts[0]
    joint = torch.cat(parts)
    for part, view in zip(parts, joint.split([len(part) for part in parts]), strict=True):
        part.data = view
    return joint


def norm_weight(norm: nn.Module) -> Tensor:
    """The weight of a norm."""
    weight = norm.weight
    assert isinstance(weight, Tensor)
    return weight


def _optional(norm: nn.Module | None) -> Tensor | None:
    return None if norm is None else norm_weight(norm)
