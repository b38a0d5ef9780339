"""How much loss each set of linear layers adds when rounded to so many bits: a backward pass, a forward a width.

A change Δ of a weight moves the model's predictions, to second order, by (Fisher information; labels drawn from the
model's own predictions, so that the loss's gradient g = ∂L/∂y has no mean)

    KL ≈ ½ · mean over tokens of (gᵀ Δ x)² ≈ ½ · mean over tokens of Σ_oj g_o² · Δ_oj² · x_j²

where errors of different weights are taken to be independent, as those of rounding to nearest nearly are. Inputs and
gradients of a token belong together: the few tokens with huge activations have next to no gradient, and the product of
separate means, ½ · Σ mean g_o² · Δ_oj² · mean x_j², takes the layers behind them to be many times as sensitive as they
are. What remains is a factor for the error's size and for layers that perturb one another; so for every width the model
with all layers at that width is measured, and the estimates of that width are scaled to add up to it. What is predicted
is KL to the original, which is what the loss rises by where the original is well calibrated. GPTQ comes out better than
rounding to nearest, so the estimate is then an upper one. The whole model is on the device in float32.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tightfit.compress.bit_choice import PLAIN_BITS, WIDTHS, scheme_of, units
from tightfit.compress.scale_refit import nearest_fitted
from tightfit.models.decoder import Decoder

SMALLEST = 1e-12


@dataclass(frozen=True)
class Sensitivities:
    """Expected KL (nats a token) by unit and bits; the measured KL of every width for all, and the original's loss.

    `reference` are the original's log-probabilities of every row, on the host.
    """

    losses: Mapping[str, Mapping[int, float]]
    uniform: Mapping[int, float]
    original_loss: float
    reference: Sequence[Tensor]


def measure_sensitivities(
    model: Decoder,
    rows: Sequence[Tensor],
    group: int,
    *,
    widths: Sequence[int] = WIDTHS,
    say: Callable[[str], None] = lambda text: None,
) -> Sensitivities:
    """Of a float32 decoder on calibration rows [1, T] each."""
    estimates = _estimates(model, rows, widths, group)
    say("measured the gradients of all layers")
    reference, loss = reference_predictions(model, rows)
    uniform: dict[int, float] = {}
    for bits in widths:
        with rounded_to(model, dict.fromkeys(units(model.spec), bits), group):
            uniform[bits] = divergence(model, rows, reference)
        say(f"all layers at {bits} bits: KL {uniform[bits]:.4f}")
    factors = {bits: uniform[bits] / max(sum(e[bits] for e in estimates.values()), SMALLEST) for bits in widths}
    scaled = {unit: {bits: factors[bits] * kl for bits, kl in each.items()} for unit, each in estimates.items()}
    return Sensitivities(scaled, uniform, loss, reference)


def weights_of(model: Decoder, name: str) -> Tensor:
    """A matrix [outputs, inputs]."""
    return model.get_parameter(f"{name}.weight")


class _Estimate:
    """½ · Σ over tokens of Σ_oj g_o² Δ_oj² x_j² of a linear layer, for every width; passes of the model fill it."""

    def __init__(self, weight: Tensor, widths: Sequence[int], group: int) -> None:
        self.weight, self.group = weight, group
        self.sums = dict.fromkeys(widths, 0.0)
        self.tokens = 0

    def follow(self, module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
        """A forward hook: wait for the gradient of what was made of this input."""
        squares = arguments[0].detach().flatten(0, -2).square()
        output.register_hook(lambda gradient: self._add(squares, gradient.detach().flatten(0, -2).square()))

    @torch.no_grad()
    def _add(self, inputs: Tensor, gradients: Tensor) -> None:
        """Squares of both, [tokens, size]."""
        for bits in self.sums:
            change = round_weight(self.weight, bits, self.group) - self.weight
            self.sums[bits] += 0.5 * float(((gradients @ change.square()) * inputs).sum())
        self.tokens += len(inputs)

    def kl(self, bits: int) -> float:
        """A token."""
        return self.sums[bits] / self.tokens


def _estimates(
    model: Decoder, rows: Sequence[Tensor], widths: Sequence[int], group: int
) -> dict[str, dict[int, float]]:
    """By unit and width, before they are scaled."""
    named = units(model.spec)
    found = {name: _Estimate(weights_of(model, name), widths, group) for names in named.values() for name in names}
    handles = [model.get_submodule(name).register_forward_hook(own.follow) for name, own in found.items()]
    generator = torch.Generator(device=model.embed.weight.device).manual_seed(0)
    try:
        with _frozen(model):
            for tokens in rows:
                logits = model(tokens).logits
                assert logits is not None
                flat = logits.float().flatten(0, 1)
                drawn = torch.multinomial(flat.detach().softmax(-1), 1, generator=generator)[:, 0]
                F.cross_entropy(flat, drawn, reduction="sum").backward()
    finally:
        for handle in handles:
            handle.remove()
    return {
        unit: {bits: sum(found[name].kl(bits) for name in names) for bits in widths} for unit, names in named.items()
    }


@contextmanager
def _frozen(model: Decoder) -> Iterator[None]:
    """Gradients of what layers give and none of weights, which would be another model in float32."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    handle = model.embed.register_forward_hook(lambda module, arguments, output: output.requires_grad_())
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        handle.remove()
        for parameter in trained:
            parameter.requires_grad_(True)


def round_weight(weight: Tensor, bits: int, group: int) -> Tensor:
    """A matrix as `--method rtn` codes it."""
    return nearest_fitted(weight.float(), scheme_of(bits, group)).dequantize()


@contextmanager
def rounded_to(model: Decoder, bits: Mapping[str, int], group: int) -> Iterator[None]:
    """The model with units rounded to their bits; the weights come back afterwards."""
    kept: dict[str, Tensor] = {}
    with torch.no_grad():
        for unit, names in units(model.spec).items():
            for name in names if bits[unit] != PLAIN_BITS else ():
                weight = weights_of(model, name)
                kept[name] = weight.detach().clone()
                weight.copy_(round_weight(weight, bits[unit], group))
    try:
        yield
    finally:
        with torch.no_grad():
            for name, weight in kept.items():
                weights_of(model, name).copy_(weight)


@torch.no_grad()
def reference_predictions(model: Decoder, rows: Sequence[Tensor]) -> tuple[list[Tensor], float]:
    """Log-probabilities of the original on every row, on the host, and its loss."""
    found, total, count = [], 0.0, 0
    for tokens in rows:
        logits = model(tokens).logits
        assert logits is not None
        log_p = logits.float().log_softmax(-1)
        total -= float(log_p[:, :-1].gather(-1, tokens[:, 1:, None]).sum())
        count += tokens.shape[1] - 1
        found.append(log_p.cpu())
    return found, total / max(count, 1)


@torch.no_grad()
def divergence(model: Decoder, rows: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    """Mean KL(original ‖ model) a token."""
    total, count = 0.0, 0
    for tokens, known in zip(rows, reference, strict=True):
        logits = model(tokens).logits
        assert logits is not None
        log_q = logits.float().log_softmax(-1)
        log_p = known.to(log_q)
        total += float((log_p.exp() * (log_p - log_q)).sum())
        count += tokens.numel()
    return total / max(count, 1)
