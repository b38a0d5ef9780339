"""How much loss each set of linear layers adds when rounded to a width: one backward pass, a forward pass per width.

A change Δ of a weight moves the model's predictions, to second order, by (Fisher information; labels drawn from the
model's own predictions, so that the loss's gradient g = ∂L/∂y has mean zero)

    KL ≈ ½ · mean over tokens of (gᵀ Δ x)² ≈ ½ · mean over tokens of Σ_oj g_o² · Δ_oj² · x_j²

where errors of different weights are taken to be independent, as those of rounding to nearest nearly are. Inputs and
gradients of a token belong together: the few tokens with huge activations have next to no gradient, and the product of
separate means, ½ · Σ mean g_o² · Δ_oj² · mean x_j², takes the layers behind them to be many times as sensitive as they
are. The estimates are still off by a factor, for the error's size and for layers that perturb one another; so for every
width the KL of the model with all layers at that width is measured, and the estimates of that width are scaled to add
up to it. Predicted is KL to the original, by which the loss rises where the original is well calibrated. GPTQ loses
less than rounding to nearest, so for GPTQ the estimate is an upper one.

One layer is in memory at a time. The rows go forward through the original and through every width, and the inputs of
every layer of the original are kept; then layers are read once more from the last to the first, and each is recomputed
from its kept inputs for its backward pass (memory: measuring_memory.py).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tightfit.compress.calibration.observation import layer_of, layer_output
from tightfit.compress.comparison import log_probabilities
from tightfit.compress.fit.bit_choice import WIDTHS, units
from tightfit.compress.fit.rounded_streams import (
    RoundedStreams,
    embedded,
    round_weight,
    units_of_layer,
    weight_of,
)
from tightfit.compress.loss_probe import chunks
from tightfit.compress.model_parts import ModelParts
from tightfit.models.decoder import Decoder

SMALLEST = 1e-12
Losses = Mapping[str, Mapping[int, float]]
"""Nats a token by unit and bits."""


@dataclass(frozen=True)
class Sensitivities:
    """Expected KL by unit and bits, measured KL of every width for all units, outputs of the original's last layer."""

    losses: Losses
    uniform: Mapping[int, float]
    reference: Sequence[Tensor]


def measure_sensitivities(
    parts: ModelParts,
    rows: Sequence[Tensor],
    group: int,
    *,
    widths: Sequence[int] = WIDTHS,
    say: Callable[[str], None] = lambda text: None,
) -> Sensitivities:
    """Measure the model in `parts` on calibration rows [1, T] each."""
    kept, streams = _forward(parts, rows, widths, group)
    reference, head = kept.pop(), parts.head()
    uniform = dict(zip(widths, streams.divergences(head, reference), strict=True))
    for bits, kl in uniform.items():
        say(f"all layers at {bits} bits: KL {kl:.4f}")
    gradients = _gradients_of_drawn(head, reference)
    del streams, head
    estimates = _backward(parts, kept, gradients, widths, group)
    say("measured the gradients of all layers")
    return Sensitivities(_scaled(estimates, uniform), uniform, reference)


@torch.no_grad()
def _forward(
    parts: ModelParts, rows: Sequence[Tensor], widths: Sequence[int], group: int
) -> tuple[list[list[Tensor]], RoundedStreams]:
    """Inputs of every layer of the original and outputs of its last one; the rows after all layers at every width."""
    kept = [embedded(parts, rows)]
    streams = RoundedStreams(kept[0], [dict.fromkeys(units(parts.spec), bits) for bits in widths], group)
    for index in range(parts.spec.layers):
        model = parts.layer(index)
        kept.append([layer_output(model, layer_of(model, index), x) for x in kept[-1]])
        streams.follow(model, index)
    return kept, streams


def _gradients_of_drawn(head: Decoder, reference: Sequence[Tensor]) -> list[Tensor]:
    """Gradients, by the last layer's outputs, of the summed loss on labels drawn from the model's own predictions."""
    generator = torch.Generator(device=reference[0].device).manual_seed(0)
    return [
        torch.cat([_gradient_of_drawn(head, chunk, generator) for chunk in chunks(head, x)]).view_as(x)
        for x in reference
    ]


def _gradient_of_drawn(head: Decoder, x: Tensor, generator: torch.Generator) -> Tensor:
    x = x.detach().requires_grad_()
    log_p = log_probabilities(head, head.norm(x))
    drawn = torch.multinomial(log_p.detach().exp(), 1, generator=generator)
    [gradient] = torch.autograd.grad(-log_p.gather(-1, drawn).sum(), x)
    return gradient


def _backward(
    parts: ModelParts, kept: list[list[Tensor]], gradients: list[Tensor], widths: Sequence[int], group: int
) -> dict[str, dict[int, float]]:
    """Estimates by unit and width, before they are scaled; empties `kept` and overwrites `gradients`."""
    found: dict[str, dict[int, float]] = {}
    for index in reversed(range(parts.spec.layers)):
        model, inputs = parts.layer(index), kept.pop()
        named = units_of_layer(model, index)
        pairs = {name: _Pairs(weight_of(model, name)) for names in named.values() for name in names}
        tokens = _layer_backward(model, index, inputs, gradients, pairs)
        for unit, names in named.items():
            estimates = [pairs.pop(name).estimates(widths, group) for name in names]
            found[unit] = {bits: sum(each[bits] for each in estimates) / tokens for bits in widths}
    return found


def _layer_backward(
    model: Decoder, index: int, inputs: Sequence[Tensor], gradients: list[Tensor], pairs: Mapping[str, "_Pairs"]
) -> int:
    """Backward through one layer: `gradients` of outputs become those of inputs, `pairs` fill; the number of tokens."""
    model.requires_grad_(False)  # gradients of weights would take the layer's memory once more
    handles = [model.get_submodule(name).register_forward_hook(each.follow) for name, each in pairs.items()]
    try:
        for number, x in enumerate(inputs):
            x = x.detach().requires_grad_()
            output = layer_output(model, layer_of(model, index), x)
            [gradients[number]] = torch.autograd.grad(output, x, gradients[number])
    finally:
        for handle in handles:
            handle.remove()
    return sum(x.shape[0] * x.shape[1] for x in inputs)


class _Pairs:
    """Σ over tokens of g_o² · x_j² of a linear layer, filled by hooks on its forward and backward pass."""

    def __init__(self, weight: Tensor) -> None:
        self.weight, self.sums = weight, torch.zeros_like(weight)

    def follow(self, module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
        """A forward hook: keep the input until the gradient of its output arrives."""
        inputs = arguments[0].detach()
        output.register_hook(lambda gradient: self._add(inputs, gradient.detach()))

    @torch.no_grad()
    def _add(self, inputs: Tensor, gradients: Tensor) -> None:
        self.sums.addmm_(gradients.flatten(0, -2).square().T, inputs.flatten(0, -2).square())

    @torch.no_grad()
    def estimates(self, widths: Sequence[int], group: int) -> dict[int, float]:
        """½ · Σ g_o² Δ_oj² x_j² of every width."""
        return {bits: 0.5 * self._weighed(round_weight(self.weight, bits, group)) for bits in widths}

    def _weighed(self, rounded: Tensor) -> float:
        return float(rounded.sub_(self.weight).square_().mul_(self.sums).sum())


def _scaled(estimates: Losses, uniform: Mapping[int, float]) -> dict[str, dict[int, float]]:
    """`estimates` scaled so that those of every width add up to the loss of all layers at that width."""
    factors = {bits: kl / max(sum(each[bits] for each in estimates.values()), SMALLEST) for bits, kl in uniform.items()}
    return {unit: {bits: factors[bits] * kl for bits, kl in each.items()} for unit, each in estimates.items()}
