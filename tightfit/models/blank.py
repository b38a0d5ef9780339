"""Decoders with uninitialised weights, and the parameters of a decoder of which this rank has some layers only.

Weights that are loaded right after construction need no random initialisation, which takes seconds per billion.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tightfit.models.decoder import Decoder, Implementations
from tightfit.models.spec import ModelSpec

RANDOM_FILLS = ("normal_", "uniform_", "kaiming_uniform_")


class _SkipInit(TorchFunctionMode):
    """Skips random fills; on the meta device too, where the first one would import torch's decompositions (1.5 s)."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in RANDOM_FILLS:
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


def blank_decoder(
    spec: ModelSpec, device: str | torch.device, dtype: torch.dtype, impl: Implementations | None = None
) -> Decoder:
    """A decoder on `device` with uninitialised parameters of `dtype`."""
    with torch.device("meta"), _SkipInit():
        model = Decoder(spec, impl)
    # as `to_empty`, whose `empty_like` of a meta tensor imports sympy (a second)
    model = model.to(dtype)._apply(lambda x: torch.empty(x.shape, dtype=x.dtype, device=device))
    if spec.tied:
        model.head.weight = model.embed.weight  # `_apply` has untied them
    return model


def whole_state(model: Decoder) -> dict[str, Tensor]:
    """The state dict of the whole model; tensors of other pipeline ranks are on the meta device."""
    own: dict[str, Tensor] = model.state_dict()
    if is_complete(model):
        return own
    return {name: own.get(name, tensor) for name, tensor in _on_meta(model).state_dict().items()}


def whole_parameters(model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """The parameters of the whole model; those of other pipeline ranks are on the meta device."""
    if is_complete(model):
        yield from model.named_parameters()
        return
    own = dict(model.named_parameters())
    yield from ((name, own.get(name, parameter)) for name, parameter in _on_meta(model).named_parameters())


def is_complete(model: Decoder) -> bool:
    """Whether all layers, embedding, norm and head are in `model`: a pipeline rank, or a part of it, lacks some."""
    ends = (model.embed, model.norm, model.head)
    return len(model.layers) == model.spec.layers and all(end is not None for end in ends)


def _on_meta(model: Decoder) -> Decoder:
    with torch.device("meta"), _SkipInit():
        return Decoder(model.spec)
