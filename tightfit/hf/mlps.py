"""The MLPs of Hugging Face models, through our kernels.

Where the three projections are plain linear layers without hooks, the whole MLP is one operation, which saves less for
backward. Otherwise the projections are called as modules, so adapters, quantized layers and hooks keep working, and
only act(gate) · up is fused.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import activations

from tightfit.hf.replacement import Method, Replacement
from tightfit.kernels.mlp.gated_mlp import can_fuse, gated_mlp
from tightfit.kernels.mlp.glu import ALPHA, LIMIT, glu
from tightfit.kernels.triton_support import Impl
from tightfit.models.spec import Activation

ACTIVATIONS: dict[type[nn.Module], Activation] = {
    activations.SiLUActivation: "silu",
    nn.SiLU: "silu",
    activations.GELUActivation: "gelu",
    activations.GELUTanh: "gelu_tanh",
    activations.NewGELUActivation: "gelu_tanh",
}


@dataclass(frozen=True)
class GatedMlpHandler:
    """down_proj(act(gate(x)) · up(x)); a single name in `projections` stands for gate and up stacked."""

    projections: tuple[str, ...] = ("gate_proj", "up_proj")
    activation: str = "act_fn"
    part: Literal["mlp"] = "mlp"

    def replacements(self, module: nn.Module, impl: Impl) -> Iterator[Replacement]:
        activation = ACTIVATIONS.get(type(module.get_submodule(self.activation)))
        if activation is not None:
            yield Replacement(module, "forward", _gated_mlp(self.projections, activation, impl))


@dataclass(frozen=True)
class ExpertsHandler:
    """All experts of a layer: the activation that transformers calls between their two grouped GEMMs.

    With `experts_implementation="eager"` there is no such call, and the experts stay as they are.
    """

    part: Literal["mlp"] = "mlp"

    def replacements(self, module: nn.Module, impl: Impl) -> Iterator[Replacement]:
        activation = ACTIVATIONS.get(type(module.get_submodule("act_fn")))
        if activation is not None:
            yield Replacement(module, "_apply_gate", _expert_gate(activation, impl))


@dataclass(frozen=True)
class ClampedExpertsHandler:
    """Experts of gpt-oss, whose gate and up are every other column of one projection, clamped (kernels/mlp/glu.py).

    Backward keeps that projection alone, where transformers keeps five more tensors of half its size.
    """

    part: Literal["mlp"] = "mlp"

    def replacements(self, module: nn.Module, impl: Impl) -> Iterator[Replacement]:
        if (getattr(module, "alpha", None), getattr(module, "limit", None)) == (ALPHA, LIMIT):
            yield Replacement(module, "_apply_gate", _clamped_gate(impl))


@dataclass(frozen=True)
class TanhGeluHandler:
    """transformers' `gelu_new`, eight elementwise passes, as torch's single one: the same formula."""

    part: Literal["mlp"] = "mlp"

    def replacements(self, module: nn.Module, impl: Impl) -> Iterator[Replacement]:
        yield Replacement(module, "forward", _tanh_gelu)


@cache
def _gated_mlp(projections: tuple[str, ...], activation: Activation, impl: Impl) -> Method:
    def forward(self: Any, x: Tensor) -> Tensor:
        linears = [getattr(self, name) for name in (*projections, "down_proj")]
        if len(linears) == 3 and can_fuse(x, *linears):
            gate, up, down = (linear.weight for linear in linears)
            return gated_mlp(x, gate, up, down, activation, impl=impl)
        projected = [getattr(self, name)(x) for name in projections]
        gate, up = projected if len(projected) == 2 else projected[0].chunk(2, dim=-1)
        return self.down_proj(glu(gate, up, activation, impl=impl))

    return forward


@cache
def _expert_gate(activation: Activation, impl: Impl) -> Method:
    def _apply_gate(self: Any, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return glu(gate, up, activation, impl=impl)

    return _apply_gate


@cache
def _clamped_gate(impl: Impl) -> Method:
    def _apply_gate(self: Any, gate_up: Tensor) -> Tensor:
        return glu(gate_up[..., ::2], gate_up[..., 1::2], "swiglu_clamped", impl=impl)

    return _apply_gate


def _tanh_gelu(self: Any, input: Tensor) -> Tensor:
    return F.gelu(input, approximate="tanh")
