"""Calibration rows through models rounded to nearest, of which one layer is in memory at a time.

Several mixes of bits share a pass over the files: a layer is read once, rounded as each mix has it, and every mix's
rows go through. What they lose is told where they meet the final norm and output projection, beside the original's.
Products are in full float32: what 8 bits lose is little more than what TensorFloat-32 would.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from tightfit.compress.bit_choice import PLAIN_BITS, scheme_of, units
from tightfit.compress.loss_probe import divergences
from tightfit.compress.model_parts import ModelParts
from tightfit.compress.observation import layer_of, layer_output
from tightfit.compress.scale_refit import nearest_fitted
from tightfit.models.decoder import Decoder

Mix = Mapping[str, int]
"""Bits by unit."""


def round_weight(weight: Tensor, bits: int, group: int) -> Tensor:
    """A matrix as `--method rtn` codes it."""
    return nearest_fitted(weight.float(), scheme_of(bits, group)).dequantize()


def weight_of(model: Decoder, name: str) -> Tensor:
    """A matrix [outputs, inputs]."""
    return model.get_parameter(f"{name}.weight")


def units_of_layer(model: Decoder, index: int) -> dict[str, tuple[str, ...]]:
    """The matrices of layer `index` by unit."""
    return {unit: names for unit, names in units(model.spec).items() if unit.startswith(f"layers.{index}.")}


@contextmanager
def rounded_to(model: Decoder, index: int, bits: Mix, group: int) -> Iterator[None]:
    """The model with layer `index` rounded to its units' bits; the weights come back afterwards."""
    kept: dict[str, Tensor] = {}
    with torch.no_grad():
        for unit, names in units_of_layer(model, index).items():
            for name in names if bits[unit] != PLAIN_BITS else ():
                weight = weight_of(model, name)
                kept[name] = weight.detach().clone()
                weight.copy_(round_weight(weight, bits[unit], group))
    try:
        yield
    finally:
        with torch.no_grad():
            for name, weight in kept.items():
                weight_of(model, name).copy_(weight)


class RoundedStreams:
    """Rows as every mix of bits has them, layer after layer."""

    def __init__(self, start: Sequence[Tensor], mixes: Sequence[Mix], group: int) -> None:
        self.mixes, self.group = mixes, group
        self.streams = [list(start) for _ in mixes]

    @torch.no_grad()
    def follow(self, model: Decoder, index: int) -> None:
        """Go through layer `index`, which `model` has as it was, as every mix has it."""
        layer = layer_of(model, index)
        for bits, stream in zip(self.mixes, self.streams, strict=True):
            with rounded_to(model, index, bits, self.group):
                for number, x in enumerate(stream):
                    stream[number] = layer_output(model, layer, x)

    def divergences(self, head: Decoder, known: Sequence[Tensor]) -> list[float]:
        """KL(original ‖ mix) a token of every mix; `known` is what the original's last layer gave."""
        return divergences(head, known, self.streams)


@torch.no_grad()
def embedded(parts: ModelParts, rows: Sequence[Tensor]) -> list[Tensor]:
    """Rows [1, T] as the first layer gets them."""
    model = parts.embedding()
    return [model.embed_tokens(tokens, model.token_positions(tokens, None, None)) for tokens in rows]


def measured_losses(
    parts: ModelParts, rows: Sequence[Tensor], mixes: Sequence[Mix], group: int, known: Sequence[Tensor]
) -> list[float]:
    """KL(original ‖ mix) a token of every mix on `rows`, after whose last layer the original has `known`."""
    streams = RoundedStreams(embedded(parts, rows), mixes, group)
    for index in range(parts.spec.layers):
        streams.follow(parts.layer(index), index)
    return streams.divergences(parts.head(), known)
