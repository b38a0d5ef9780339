"""Calibration rows through models rounded to nearest, with one layer in memory at a time.

Several mixes of bits share a pass over the files: a layer is read once, rounded to the bits of each mix, and the rows
of that mix go through it. After the last layer, their logits are compared with the original's. Products are in full
float32: what 8 bits lose is little more than what TensorFloat-32 would.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from tightfit.compress.calibration.observation import layer_of, layer_output
from tightfit.compress.fit.bit_choice import PLAIN_BITS, scheme_of, units
from tightfit.compress.loss_probe import divergences
from tightfit.compress.model_parts import ModelParts
from tightfit.compress.rounding.scale_refit import nearest_fitted
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
    """Layer `index` of `model` rounded to its units' bits while the context lasts; then its weights are restored."""
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
    """Hidden states of the rows under every mix of bits, layer after layer."""

    def __init__(self, start: Sequence[Tensor], mixes: Sequence[Mix], group: int) -> None:
        self.mixes, self.group = mixes, group
        self.streams = [list(start) for _ in mixes]

    @torch.no_grad()
    def follow(self, model: Decoder, index: int) -> None:
        """Send every mix's rows through layer `index`, rounded to its bits; `model` has the original layer."""
        layer = layer_of(model, index)
        for bits, stream in zip(self.mixes, self.streams, strict=True):
            with rounded_to(model, index, bits, self.group):
                for number, x in enumerate(stream):
                    stream[number] = layer_output(model, layer, x)

    def divergences(self, head: Decoder, known: Sequence[Tensor]) -> list[float]:
        """KL(original ‖ mix) a token of every mix; `known` are the outputs of the original's last layer."""
        return divergences(head, known, self.streams)


@torch.no_grad()
def embedded(parts: ModelParts, rows: Sequence[Tensor]) -> list[Tensor]:
    """Embeddings of rows [1, T], the first layer's inputs."""
    model = parts.embedding()
    return [model.embed_tokens(tokens, model.token_positions(tokens, None, None)) for tokens in rows]


def measured_losses(
    parts: ModelParts, rows: Sequence[Tensor], mixes: Sequence[Mix], group: int, known: Sequence[Tensor]
) -> list[float]:
    """KL(original ‖ mix) a token of every mix on `rows`, for which the original's last layer outputs `known`."""
    streams = RoundedStreams(embedded(parts, rows), mixes, group)
    for index in range(parts.spec.layers):
        streams.follow(parts.layer(index), index)
    return streams.divergences(parts.head(), known)
