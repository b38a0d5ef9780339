"""Projections with the same input, joined in memory into one product: queries, keys and values; gate and up.

The decoder's own parameters become views of the joint matrices, so nothing is held twice. This is for dense models with
gated MLPs, RMSNorms before attention and MLP, and rotary positions, whose projections with one input are all plain or
all quantized alike (with adapters beside them: adapted.py); others run through the decoder's own layers. On a CPU plain
matrices may have a copy in 16 bits (half.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tightfit.models.decoder import Decoder, Layer
from tightfit.models.layers.attending import AttentionSettings
from tightfit.models.layers.linear_plus_adapter import base_of
from tightfit.models.layers.mlp import Mlp
from tightfit.models.spec import ModelSpec, Rope
from tightfit.plan.serving.cpu_operations import runs_joint
from tightfit.serve.weights.adapted import with_adapters
from tightfit.serve.weights.fp8 import Fp8Weight
from tightfit.serve.weights.half import copy_bytes, halved, has_products, is_exact, is_near
from tightfit.serve.weights.int4 import Int4Weight, rounds_products
from tightfit.serve.weights.norm import Norm
from tightfit.serve.weights.packed import PackedWeight
from tightfit.serve.weights.rounded import RoundedWeight
from tightfit.serve.weights.weight import PlainWeight, Weight

CODED = (Fp8Weight, Int4Weight, PackedWeight, RoundedWeight)


@dataclass(frozen=True)
class JointLayer:
    """The weights of one layer, as a serving step multiplies by them."""

    index: int
    attention_norm: Norm
    qkv: Weight
    q_norm: Norm | None
    k_norm: Norm | None
    o: Weight
    mlp_norm: Norm
    gate_up: Weight
    down: Weight
    rope: Rope
    attention: AttentionSettings

    @property
    def kind(self) -> tuple[Any, ...]:
        """Equal for layers that run through the same kernels."""
        return tuple(_kind(getattr(self, each.name)) for each in fields(self) if each.name != "index")


def _kind(part: Any) -> Any:
    if isinstance(part, Tensor):
        return part.dtype, part.shape, part.stride()
    if is_dataclass(part) and not isinstance(part, Rope):
        return (type(part), *(_kind(getattr(part, each.name)) for each in fields(part)))
    return (type(part), *map(_kind, part)) if isinstance(part, tuple) else repr(part)


def can_join(model: Decoder) -> bool:
    """Whether a model's layers are of the common kind, and projections of one input all plain or quantized alike."""
    return runs_joint(model.spec) and all(_can_be_one(linears) for linears in _matrices(model))


@torch.no_grad()
def half_bytes(model: Decoder, *, rounded: bool = False) -> int:
    """Bytes of a 16-bit copy of the joint matrices; 0 where it would change any of them (for a model that is `rounded`
    anyway: by more than 2⁻¹¹), or is of no use."""
    if not has_products(model.embed.weight) or not can_join(model):
        return 0
    weights: list[list[Any]] = [[linear.weight for linear in group] for group in _matrices(model) if _is_plain(group)]
    loses_nothing = is_near if rounded or rounds_products(model) else is_exact
    exact = all(loses_nothing(weight) for group in weights for weight in group)
    return sum(copy_bytes(*group) for group in weights) if exact else 0


def _matrices(model: Decoder) -> list[tuple[nn.Module, ...]]:
    """Projections of the model, those of one input together."""
    found: list[tuple[nn.Module, ...]] = []
    layer: Any
    for layer in model.layers:
        attention, mlp = layer.attention, layer.mlp
        found += [(attention.q, attention.k, attention.v), (attention.o,), (mlp.gate, mlp.up), (mlp.down,)]
    return [*found, (model.head,)]


def _can_be_one(linears: Sequence[nn.Module]) -> bool:
    """Whether layers of one input can be joined into one weight."""
    bases = [base_of(linear) for linear in linears]
    return _is_plain(linears) or any(kind.takes(bases) for kind in CODED)


def _is_plain(linears: Sequence[nn.Module]) -> bool:
    return all(type(linear) is nn.Linear for linear in linears)


@torch.no_grad()
def join_layers(model: Decoder, *, half: bool, overlap: bool) -> list[JointLayer]:
    """The layers of `model`, whose parameters become views of joint ones; with `half` products read copies in 16 bits,
    with `overlap` kernels begin while the one before them ends."""
    return [_joined(index, layer, model.spec, half, overlap) for index, layer in enumerate(model.layers)]  # type: ignore[arg-type]


def _joined(index: int, layer: Layer, spec: ModelSpec, half: bool, overlap: bool) -> JointLayer:
    attention, mlp = layer.attention, layer.mlp
    assert isinstance(mlp, Mlp)
    assert mlp.gate is not None
    assert attention.rope is not None
    return JointLayer(
        index=index,
        attention_norm=Norm.of(layer.attention_norm, spec, overlap=overlap),
        qkv=join((attention.q, attention.k, attention.v), half=half, overlap=overlap),
        q_norm=None if attention.q_norm is None else Norm.of(attention.q_norm, spec, overlap=overlap),
        k_norm=None if attention.k_norm is None else Norm.of(attention.k_norm, spec, overlap=overlap),
        o=join((attention.o,), half=half, overlap=overlap),
        mlp_norm=Norm.of(layer.mlp_norm, spec, overlap=overlap),
        gate_up=join((mlp.gate, mlp.up), half=half, overlap=overlap),
        down=join((mlp.down,), half=half, overlap=overlap),
        rope=attention.rope,
        attention={"scale": attention.scale, "window": attention.window, "softcap": attention.softcap},
    )


def join(linears: Sequence[nn.Linear], *, half: bool = False, overlap: bool = False) -> Weight:
    """The weights of layers with one input as one, one above the other, with their biases."""
    bias = None if linears[0].bias is None else _join_parameters(linears, "bias")
    if _is_plain(linears):
        plain = PlainWeight(_join_parameters(linears, "weight"), bias, overlap)
        return halved(plain) if half else plain
    bases: Any = [base_of(linear) for linear in linears]
    kind = next(kind for kind in CODED if kind.takes(bases))
    return with_adapters(kind.joined(bases, bias, overlap=overlap), linears)


def _join_parameters(linears: Sequence[nn.Linear], name: str) -> Tensor:
    parts = [getattr(linear, name) for linear in linears]
    if len(parts) == 1:
        return parts[0]
    joint = torch.cat(parts)
    for part, view in zip(parts, joint.split([len(part) for part in parts]), strict=True):
        part.data = view
    return joint
