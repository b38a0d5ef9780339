"""Learned rounding: which way weights are rounded is trained on the outputs of the whole decoder layer.

    ŵ = round(u) · S · f,   least over u and f:   Σ over tokens of ‖layer(x̂; ŵ) − y‖² / ‖y‖²,   y = layer(x; w)

x̂ are the layer's inputs behind the layers already coded, x and y its inputs and outputs in the original model: a layer
also makes up for the errors of those before it. Gradients pass straight through `round`, as in AutoRound (Cheng et al.
2023), which begins with w / S in the range of the weights and moves every u by the sign of its gradient. Here GPTQ's
codes and ranges are the beginning: u is w / S where that rounds to GPTQ's code, else a number near its code's edge.
From there steps by sign alone make codes worse: with GPTQ's codes most gradients are noise, which Adam averages out.
The learning rate falls to zero; f multiplies the scale of a group. Errors are relative token by token, as a few tokens
have many times the others' magnitude.

A layer whose error over all calibration rows fell at neither rate keeps GPTQ's codes. Integers only; experts, which are
coded apart from the other matrices, are not learned.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from tightfit.compress.calibration.observation import tensor_float32
from tightfit.compress.memory import LEARNING_TOKENS
from tightfit.models.decoder import Decoder, Layer
from tightfit.models.quantized.coded_weight import CodedWeight
from tightfit.models.quantized.rounding import store_scales

RATES = (1.0, 0.25)
"""Adam's rate for u, times steps: how far u would move if all its gradients agreed and the rate were constant.
Perplexity of SmolLM2-135M in 2 bits at rates of 0.25, 1 and 2.5: 105, 64.6 and 75.2. The second rate is tried on layers
whose error the first does not lower."""
SCALE_RATE = 0.1
"""The rate of f beside that of u."""
EDGE = 0.3
"""The greatest distance at which u begins from its code, where GPTQ did not round to nearest; at 0.5 it would flip."""


class _Rounded(torch.autograd.Function):
    """round(u) · S with a scale per group and straight-through gradients; only u and S are saved for backward."""

    @staticmethod
    def forward(ctx: Any, unrounded: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(unrounded, scale)
        return _in_groups(unrounded.round(), scale).mul_(scale[..., None]).view_as(unrounded)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        unrounded, scale = ctx.saved_tensors
        gradient = _in_groups(gradients[0], scale)
        of_scale = _in_groups(unrounded.round(), scale).mul_(gradient).sum(-1)
        return (gradient * scale[..., None]).view_as(unrounded), of_scale


def _in_groups(values: Tensor, scale: Tensor) -> Tensor:
    """[outputs, inputs] as [outputs, groups, group]."""
    return values.view(*scale.shape, -1)


@dataclass
class LearnedMatrix:
    """A matrix whose rounding is being learned: `unrounded` is u [outputs, inputs], `factor` f [outputs, groups]."""

    coded: CodedWeight
    unrounded: Tensor
    factor: Tensor

    @classmethod
    def of(cls, coded: CodedWeight, weight: Tensor) -> "LearnedMatrix":
        """Begin with the codes of the float32 matrix `weight`."""
        scale, zero = coded.scale, _zero(coded)[..., None]
        codes = _in_groups(coded.codes.float(), scale) - zero
        unrounded = (_in_groups(weight, scale) / scale[..., None]).clamp_(codes - EDGE, codes + EDGE)
        return cls(coded, unrounded.view_as(weight).requires_grad_(), torch.ones_like(scale, requires_grad=True))

    def rounded(self) -> Tensor:
        """ŵ, through which gradients reach u and f."""
        rounded: Tensor = _Rounded.apply(self.unrounded, self.coded.scale * self.factor)
        return rounded

    @torch.no_grad()
    def clamp(self) -> None:
        """Keep u within the range of codes."""
        zero, last = _zero(self.coded)[..., None], self.coded.scheme.levels - 1
        _in_groups(self.unrounded, self.factor).clamp_(-zero - EDGE, last - zero + EDGE)

    @torch.no_grad()
    def finished(self) -> CodedWeight:
        """The codes that were learned."""
        codes = _in_groups(self.unrounded.round(), self.factor).add_(_zero(self.coded)[..., None])
        scale = store_scales(self.coded.scale * self.factor, self.coded.scheme).scale
        return replace(self.coded, codes=codes.view_as(self.unrounded).to(torch.uint8), scale=scale)


def _zero(coded: CodedWeight) -> Tensor:
    """Z of every group."""
    return torch.full_like(coded.scale, coded.scheme.middle) if coded.zero is None else coded.zero


@dataclass(frozen=True)
class LayerTask:
    """A layer, its calibration inputs [B, T, H] and the outputs wanted of it."""

    model: Decoder
    layer: Layer
    inputs: Sequence[Tensor]
    wanted: Sequence[Tensor]

    def error(self, weights: Mapping[str, Tensor], x: Tensor, wanted: Tensor) -> Tensor:
        """Σ over tokens of ‖output − wanted‖² / ‖wanted‖², with `weights` in the layer."""
        positions = torch.arange(x.shape[1], device=x.device)[None]
        with tensor_float32(x.device):
            output, _ = functional_call(
                self.layer, dict(weights), (x, self.model.forward_context(x, positions, None, None))
            )
        return ((output - wanted).square().sum(-1) / wanted.square().sum(-1).clamp(min=1e-12)).sum()

    @torch.no_grad()
    def total_error(self, coded: Mapping[str, CodedWeight]) -> float:
        """`error` of the dequantized `coded`, summed over all rows."""
        weights = {f"{name}.weight": weight.dequantize() for name, weight in coded.items()}
        return sum(float(self.error(weights, x, y)) for x, y in zip(self.inputs, self.wanted, strict=True))

    def some_rows(self, chance: torch.Generator) -> tuple[Tensor, Tensor]:
        """Random rows of one batch, about 4096 tokens."""
        batch = int(torch.randint(len(self.inputs), (), generator=chance))
        x = self.inputs[batch]
        count = max(LEARNING_TOKENS // x.shape[1], 1)
        chosen = torch.randperm(len(x), generator=chance)[:count].to(x.device)
        return x[chosen], self.wanted[batch][chosen]


def learn_rounding(
    task: LayerTask, coded: Mapping[str, CodedWeight], weights: Mapping[str, Tensor], *, steps: int, seed: int
) -> dict[str, CodedWeight]:
    """Better codes for matrices with float32 `weights`; those of `coded` where none were found."""
    error = task.total_error(coded)
    for rate in RATES:
        learned = _learned(task, coded, weights, rate=rate, steps=steps, seed=seed)
        if task.total_error(learned) < error:
            return learned
    return dict(coded)


def _learned(
    task: LayerTask,
    coded: Mapping[str, CodedWeight],
    weights: Mapping[str, Tensor],
    *,
    rate: float,
    steps: int,
    seed: int,
) -> dict[str, CodedWeight]:
    learned = {name: LearnedMatrix.of(coded[name], weights[name]) for name in coded}
    matrices = list(learned.values())
    optimizer = torch.optim.Adam(
        [
            {"params": [m.unrounded for m in matrices], "share": 1.0},
            {"params": [m.factor for m in matrices], "share": SCALE_RATE},
        ],
        fused=True,
    )
    chance = torch.Generator().manual_seed(seed)
    for number in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = group["share"] * rate / steps * (1 - number / steps)
        x, wanted = task.some_rows(chance)
        with torch.enable_grad():
            rounded = {f"{name}.weight": matrix.rounded() for name, matrix in learned.items()}
            task.error(rounded, x, wanted).backward(inputs=[t for m in matrices for t in (m.unrounded, m.factor)])
        del rounded
        optimizer.step()
        optimizer.zero_grad()
        for matrix in matrices:
            matrix.clamp()
    return {name: matrix.finished() for name, matrix in learned.items()}
