"""Running one decoder layer and observing the inputs of its modules.

Layers are in float32. On a GPU their matrix products run in TensorFloat-32, with inputs of ten bits of mantissa as in
float16: eight times as fast, and other programs calibrate in 16 bits.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tightfit.compress.calibration.inputs import InputStatistics
from tightfit.models.decoder import Decoder, Layer


class _Seen(Exception):  # noqa: N818
    """Raised to stop a forward pass when all wanted inputs have been observed."""


@contextmanager
def tensor_float32(device: torch.device) -> Iterator[None]:
    """Products of float32 matrices on a GPU in TensorFloat-32."""
    before = torch.get_float32_matmul_precision()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def layer_of(model: Decoder, index: int) -> Layer:
    """Layer `index` of a model that may have no other."""
    found = model.layers._modules[str(index)]
    assert isinstance(found, Layer)
    return found


def layer_output(model: Decoder, layer: Layer, x: Tensor) -> Tensor:
    """The residual stream [B, T, H] after `layer`."""
    positions = torch.arange(x.shape[1], device=x.device)[None]
    output, _ = layer(x, model.forward_context(x, positions, None, None))
    return output


def run_layer(model: Decoder, layer: Layer, x: Tensor) -> Tensor:
    """`layer_output`, on a GPU with products in TensorFloat-32."""
    with tensor_float32(x.device):
        return layer_output(model, layer, x)


@torch.no_grad()
def through(model: Decoder, index: int, stream: Sequence[Tensor]) -> list[Tensor]:
    """The calibration rows after layer `index`."""
    layer = layer_of(model, index)
    return [run_layer(model, layer, x) for x in stream]


def observe(
    model: Decoder, layer: Layer, inputs: Sequence[Tensor], names: Sequence[str], *, stop: bool = False
) -> dict[str, InputStatistics]:
    """Statistics of the inputs of the modules `names` of `layer`; with `stop`, nothing after the last is computed."""
    seen: dict[str, InputStatistics] = {}
    hooks = []
    for name in names:

        def hook(module: nn.Module, arguments: tuple[Tensor, ...], name: str = name) -> None:
            x = arguments[0]
            seen.setdefault(name, InputStatistics(x.shape[-1], x.device)).add(x)
            if stop and name == names[-1]:
                raise _Seen

        hooks.append(layer.get_submodule(name).register_forward_pre_hook(hook))
    try:
        for x in inputs:
            try:
                run_layer(model, layer, x)
            except _Seen:
                continue
    finally:
        for handle in hooks:
            handle.remove()
    return seen
