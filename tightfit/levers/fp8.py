"""fp8 matmuls in the linear layers of decoder layers; lossy, off by default.

Applied from outside by replacing the `forward` of projections (and of whole gated MLPs without biases); weights,
gradients and optimizer states keep their formats. q, k and v share one quantized input, as do gate and up.
Embedding, output projection, norms, attention itself, routers and MoE experts are unchanged.

| levers.matmul | y and dx | dW | kept of a linear layer's input |
|---|---|---|---|
| fp8-tensor | 8 bits, one scale per tensor | 8 bits | 1 byte a number |
| fp8-row | 8 bits, a scale per row | bf16 | 2 bytes, as natively |

Source: Micikevicius et al. 2022 for the formats; per-tensor scales are of the current tensor, not of earlier steps.
On CPUs the same codes are multiplied in float32: the numerics of fp8, slower than without it.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from tightfit.errors import UserError
from tightfit.kernels.fp8.fp8_codes import Scaling, SharedInput, WeightCodes
from tightfit.kernels.fp8.fp8_linear import fp8_linear
from tightfit.kernels.fp8.fp8_matmul import refuse_unfit_card
from tightfit.kernels.fp8.fp8_mlp import fp8_gated_mlp
from tightfit.kernels.fp8.fp8_quantize import ALIGNED
from tightfit.models.decoder import Decoder, Layer
from tightfit.models.layers.mlp import Mlp

SCALINGS: dict[str, Scaling] = {"fp8-tensor": "tensor", "fp8-row": "row"}


@dataclass(frozen=True)
class Fp8Linear:
    """A linear layer's forward in 8 bits."""

    linear: nn.Linear
    codes: WeightCodes
    shared: SharedInput

    def __call__(self, x: Tensor) -> Tensor:
        return fp8_linear(x, self.linear.weight, self.linear.bias, self.codes, self.shared)


@dataclass(frozen=True)
class Fp8Mlp:
    """A gated MLP's forward in 8 bits."""

    mlp: Mlp
    codes: tuple[WeightCodes, WeightCodes, WeightCodes]

    def __call__(self, x: Tensor) -> tuple[Tensor, None]:
        assert self.mlp.gate is not None
        weights = self.mlp.gate.weight, self.mlp.up.weight, self.mlp.down.weight
        return fp8_gated_mlp(x, *weights, self.mlp.activation, self.codes), None


def use_fp8(model: Decoder, matmul: Literal["native", "fp8-tensor", "fp8-row"], *, keep_codes: bool) -> None:
    """Make the decoder's layers multiply as `matmul` says.

    `keep_codes` keeps a weight's codes from forward to backward, which is valid where only the optimizer changes it.
    """
    if matmul == "native":
        return
    device = model.embed.weight.device
    refuse_unfit_card(torch.device("cuda") if device.type == "meta" and torch.cuda.is_available() else device)
    scaling = SCALINGS[matmul]
    new = partial(WeightCodes, scaling, keep_codes)
    for layer in model.layers:
        own, mlp = cast(Layer, layer).attention, cast(Layer, layer).mlp
        _replace([own.q, own.k, own.v], scaling, keep_codes)
        _replace([own.o], scaling, keep_codes)
        if not isinstance(mlp, Mlp):
            continue
        if mlp.gate is not None and mlp.up.bias is None:
            for linear in (mlp.gate, mlp.up, mlp.down):
                _refuse_unfit(linear)
            _set_forward(mlp, Fp8Mlp(mlp, (new(), new(), new())))
        else:
            _replace([linear for linear in (mlp.gate, mlp.up) if linear is not None], scaling, keep_codes)
            _replace([mlp.down], scaling, keep_codes)


def _replace(linears: list[nn.Linear], scaling: Scaling, keep_codes: bool) -> None:
    """Replace the forward of linear layers that have the same input."""
    shared = SharedInput(scaling, len(linears))
    for linear in linears:
        _refuse_unfit(linear)
        _set_forward(linear, Fp8Linear(linear, WeightCodes(scaling, keep_codes), shared))


def _set_forward(module: Any, forward: Fp8Linear | Fp8Mlp) -> None:
    module.forward = forward


def _refuse_unfit(linear: nn.Linear) -> None:
    """Refuse sizes that fp8 GEMMs cannot take, and tensor-parallel layers."""
    if tuple(linear.weight.shape) != (linear.out_features, linear.in_features) or "forward" in vars(linear):
        raise UserError("levers.matmul asks for fp8, which layout.tensor does not split yet; set one of the two back")
    if linear.in_features % ALIGNED or linear.out_features % ALIGNED:
        raise UserError(
            f"levers.matmul asks for fp8, which needs sizes in multiples of {ALIGNED}, but a linear layer is "
            f"{linear.in_features} × {linear.out_features}; set it to native"
        )
