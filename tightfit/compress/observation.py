"""Running one decoder layer and looking at what goes into its parts."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tightfit.compress.inputs import InputStatistics
from tightfit.models.decoder import Decoder, Layer


class _Seen(Exception):  # noqa: N818
    """Raised to leave a forward pass of which everything wanted has been seen."""


def run_layer(model: Decoder, layer: Layer, x: Tensor) -> Tensor:
    """The residual stream [B, T, H] after `layer`."""
    positions = torch.arange(x.shape[1], device=x.device)[None]
    made, _ = layer(x, model.forward_context(x, positions, None, None))
    return made


def observe(
    model: Decoder, layer: Layer, inputs: Sequence[Tensor], names: Sequence[str], *, stop: bool = False
) -> dict[str, InputStatistics]:
    """Statistics of what goes into the modules `names` of `layer`; with `stop`, nothing after the last is computed."""
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
