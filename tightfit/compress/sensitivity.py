"""How much loss each set of linear layers adds when rounded to so many bits: a backward pass, a forward a width.

A change Δ of a weight moves the model's predictions, to second order, by (Fisher information; labels drawn from the
model's own predictions, so that the loss's gradient has no mean)

    KL ≈ ½ · Σ_oj G_o · Δ_oj² · h_j,     G_o = mean (∂L/∂y_o)²,  h_j = mean x_j²  over tokens

where errors of different weights are taken to be independent, as those of rounding to nearest nearly are. That is right
up to a factor that depends on the error's size; so for every width the model with all layers at that width is measured,
and the estimates of that width are scaled to add up to it. What is predicted is KL to the original, which
is what the loss rises by where the original is well calibrated. GPTQ comes out better than rounding to nearest, so
the estimate is then an upper one. The whole model is on the device in float32.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tightfit.compress.bit_choice import PLAIN_BITS, WIDTHS, scheme_of, units
from tightfit.models.decoder import Decoder
from tightfit.models.quantized.ranges import fit_grid

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
    moments = _moments(model, rows)
    estimates: dict[str, dict[int, float]] = {}
    for unit, names in units(model.spec).items():
        estimates[unit] = {bits: sum(_estimate(model, moments, n, bits, group) for n in names) for bits in widths}
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


class _Moments:
    """Sums of squares of a linear layer's inputs and of its outputs' gradients."""

    def __init__(self) -> None:
        self.inputs: Tensor | None = None
        self.gradients: Tensor | None = None
        self.tokens = 0

    def add_inputs(self, x: Tensor) -> None:
        flat = x.detach().flatten(0, -2)
        squares = flat.square().sum(0)
        self.inputs = squares if self.inputs is None else self.inputs + squares
        self.tokens += len(flat)

    def add_gradient(self, gradient: Tensor) -> None:
        squares = gradient.detach().flatten(0, -2).square().sum(0)
        self.gradients = squares if self.gradients is None else self.gradients + squares


def _moments(model: Decoder, rows: Sequence[Tensor]) -> dict[str, _Moments]:
    """By the name of every linear layer."""
    found: dict[str, _Moments] = {}
    handles = []
    for name in (name for names in units(model.spec).values() for name in names):
        found[name] = _Moments()

        def hook(module: nn.Module, arguments: tuple[Tensor, ...], made: Tensor, own: _Moments = found[name]) -> None:
            own.add_inputs(arguments[0])
            made.register_hook(own.add_gradient)

        handles.append(model.get_submodule(name).register_forward_hook(hook))
    generator = torch.Generator(device=model.embed.weight.device).manual_seed(0)
    try:
        for tokens in rows:
            logits = model(tokens).logits
            assert logits is not None
            flat = logits.float().flatten(0, 1)
            drawn = torch.multinomial(flat.detach().softmax(-1), 1, generator=generator)[:, 0]
            F.cross_entropy(flat, drawn, reduction="sum").backward()
            model.zero_grad(set_to_none=True)
    finally:
        for handle in handles:
            handle.remove()
    return found


@torch.no_grad()
def _estimate(model: Decoder, moments: Mapping[str, _Moments], name: str, bits: int, group: int) -> float:
    """½ · Σ_oj G_o Δ_oj² h_j of one matrix."""
    weight, own = weights_of(model, name), moments[name]
    assert own.inputs is not None
    assert own.gradients is not None
    squares = (round_weight(weight, bits, group) - weight).square()
    return float(0.5 * (own.gradients @ squares @ own.inputs) / own.tokens**2)


def round_weight(weight: Tensor, bits: int, group: int) -> Tensor:
    """A matrix rounded to nearest."""
    return fit_grid(weight.float(), scheme_of(bits, group)).code(weight.float()).dequantize()


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
