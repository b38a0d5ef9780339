"""Rope and gated activations: plain steps, torch.compile, Liger, Unsloth, ours."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.operations.case import AbsentError, Case, Forward, Where, compiled, imported
from benchmarks.peers.unsloth import unsloth_glu, unsloth_rope
from tightfit.kernels.attention.rope import rope, rope_eager
from tightfit.kernels.mlp.glu import glu, glu_eager
from tightfit.models.layers.rope import tables
from tightfit.models.spec import Activation, Rope


def rope_cases(where: Where) -> Iterator[Case]:
    """Four passes over q and k of one layer of an 8B model, which are views of what the projections wrote."""
    B, T, D = where.size(4, 1), where.size(4096, 6), where.size(128, 8)
    heads, kv_heads = where.size(32, 4), where.size(8, 2)
    positions = torch.arange(T, device=where.device)[None]
    cos, sin = tables(Rope(theta=5e5), D, 8192, positions, where.dtype)
    full_cos, full_sin = (torch.cat([x, x], dim=-1).squeeze(1) for x in (cos, sin))

    def on_views(turn: Forward) -> Forward:
        return lambda *made: turn(*(x.unflatten(-1, (-1, D)).transpose(1, 2) for x in made))

    def liger() -> Forward:
        function = imported("liger_kernel.ops.rope", "LigerRopeFunction", "liger-kernel")
        return on_views(lambda q, k: function.apply(q, k, full_cos, full_sin))

    eager = on_views(lambda q, k: rope_eager(q, k, cos, sin))
    yield Case(
        "rope",
        f"q {B}×{heads}×{T}×{D}, k ×{kv_heads}×",
        lambda: (where.randn(B, T, heads * D), where.randn(B, T, kv_heads * D)),
        {
            "eager": lambda: eager,
            "torch.compile": compiled(eager),
            "Liger": liger,
            "Unsloth": lambda: on_views(unsloth_rope(full_cos, full_sin)),
            "tightfit": lambda: on_views(lambda q, k: rope(q, k, cos, sin)),
            "tightfit in place": lambda: on_views(lambda q, k: rope(q, k, cos, sin, inplace=True)),
        },
        "copy",
        4 * B * T * (heads + kv_heads) * D * where.dtype.itemsize,
    )


def glu_cases(where: Where) -> Iterator[Case]:
    """Eight passes: gate and up read, their product written; its gradient, gate and up read, two gradients written."""
    activations: dict[Activation, str] = {"silu": "SwiGLU", "gelu_tanh": "GeGLU", "relu2": "ReLU² gate"}
    for activation, name in activations.items():
        yield _glu(where, activation, name, where.size(16384, 8), where.size(14336, 24))


def _glu(where: Where, activation: Activation, name: str, rows: int, width: int) -> Case:
    eager = partial(glu_eager, activation=activation)
    return Case(
        "glu",
        f"{name} {rows}×{width}",
        lambda: (where.randn(rows, width), where.randn(rows, width)),
        {
            "eager": lambda: eager,
            "torch.compile": compiled(eager),
            "Liger": partial(_liger_glu, activation),
            "Unsloth": partial(unsloth_glu, activation),
            "tightfit": partial(_ours, activation, overwrite=False),
            "tightfit overwriting": partial(_ours, activation, overwrite=True),
        },
        "copy",
        8 * rows * width * where.dtype.itemsize,
    )


def _ours(activation: Activation, *, overwrite: bool) -> Forward:
    # Views are no leaves, so their memory may be overwritten.
    return lambda gate, up: glu(gate.view_as(gate), up.view_as(up), activation, overwrite=overwrite)


def _liger_glu(activation: Activation) -> Forward:
    places = {"silu": ("swiglu", "LigerSiLUMulFunction"), "gelu_tanh": ("geglu", "LigerGELUMulFunction")}
    if activation not in places:
        raise AbsentError("Liger has no such operation")
    module, name = places[activation]
    function = imported(f"liger_kernel.ops.{module}", name, "liger-kernel")

    def forward(gate: Tensor, up: Tensor) -> Tensor:
        return function.apply(gate, up)

    return forward
