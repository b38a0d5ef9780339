"""Projections of one input side by side in memory, so that each is one product: queries, keys and values; gate and up.

The decoder's own parameters become views of the joint matrices, so nothing is held twice. For dense models with gated
MLPs, RMSNorms before attention and MLP, and rotary positions; others run through the decoder's own layers.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tightfit.models.decoder import Decoder, Layer
from tightfit.models.mlp import Mlp
from tightfit.models.spec import Rope


@dataclass(frozen=True)
class JointLayer:
    """The weights of one layer, as a serving step multiplies by them."""

    index: int
    attention_norm: Tensor
    mlp_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    rope: Rope
    scale: float
    window: int | None
    softcap: float | None


def can_join(model: Decoder) -> bool:
    """Whether a model's layers are of the common kind, and their projections plain linear layers (not quantized)."""
    spec = model.spec
    plain = spec.norm in ("rms", "rms_plus_one") and not spec.sandwich_norms and spec.gated
    apart = spec.latent is not None or spec.qk_norm_joint
    if not plain or apart or spec.rope is None or spec.experts is not None:
        return False
    return all(type(projection) is nn.Linear for layer in model.layers for projection in _projections(layer))


def _projections(layer: Any) -> tuple[nn.Module, ...]:
    attention, mlp = layer.attention, layer.mlp
    return attention.q, attention.k, attention.v, attention.o, mlp.gate, mlp.up, mlp.down


@torch.no_grad()
def join_layers(model: Decoder) -> list[JointLayer]:
    """The layers of `model`, whose parameters are views of joint ones from here on."""
    return [_joined(index, layer) for index, layer in enumerate(model.layers)]  # type: ignore[arg-type]


def _joined(index: int, layer: Layer) -> JointLayer:
    attention, mlp = layer.attention, layer.mlp
    assert isinstance(mlp, Mlp)
    assert mlp.gate is not None
    assert attention.rope is not None
    qkv, qkv_bias = _join(attention.q, attention.k, attention.v)
    gate_up, gate_up_bias = _join(mlp.gate, mlp.up)
    return JointLayer(
        index=index,
        attention_norm=norm_weight(layer.attention_norm),
        mlp_norm=norm_weight(layer.mlp_norm),
        qkv=qkv,
        qkv_bias=qkv_bias,
        q_norm=_optional(attention.q_norm),
        k_norm=_optional(attention.k_norm),
        o=attention.o.weight,
        o_bias=attention.o.bias,
        gate_up=gate_up,
        gate_up_bias=gate_up_bias,
        down=mlp.down.weight,
        down_bias=mlp.down.bias,
        rope=attention.rope,
        scale=attention.scale,
        window=attention.window,
        softcap=attention.softcap,
    )


def _join(*linears: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """One weight over the other, and the biases, where there are any."""
    weight = torch.cat(tuple(linear.weight for linear in linears))
    biases = [linear.bias for linear in linears if linear.bias is not None]
    bias = torch.cat(tuple(biases)) if biases else None
    at = 0
    for linear in linears:
        end = at + linear.weight.shape[0]
        linear.weight.data = weight[at:end]
        if bias is not None:
            linear.bias.data = bias[at:end]
        at = end
    return weight, bias


def norm_weight(norm: nn.Module) -> Tensor:
    """The weight of a norm."""
    weight = norm.weight
    assert isinstance(weight, Tensor)
    return weight


def _optional(norm: nn.Module | None) -> Tensor | None:
    return None if norm is None else norm_weight(norm)
