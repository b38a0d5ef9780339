"""A decoder with memory but without values: random numbers that weights overwrite at once cost seconds per billion."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tightfit.models.decoder import Decoder, Implementations
from tightfit.models.spec import ModelSpec

RANDOM_FILLS = ("normal_", "uniform_", "kaiming_uniform_")


class _Uninitialised(TorchFunctionMode):
    """Skips random fills. Even on the meta device the first one costs 1.5 s, for importing torch's decompositions."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in RANDOM_FILLS:
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


def blank_decoder(
    spec: ModelSpec, device: str | torch.device, dtype: torch.dtype, impl: Implementations | None = None
) -> Decoder:
    """A decoder on `device` whose parameters, of type `dtype`, still have to be filled."""
    with torch.device("meta"), _Uninitialised():
        model = Decoder(spec, impl)
    model = model.to(dtype).to_empty(device=device)
    if spec.tied:
        model.head.weight = model.embed.weight  # to_empty gave each its own memory
    return model


def whole_state(model: Decoder) -> dict[str, Tensor]:
    """The state dict of the whole model: what other ranks of a pipeline hold of it is on the meta device."""
    own: dict[str, Tensor] = model.state_dict()
    return own if is_complete(model) else {name: own.get(name, t) for name, t in _shape(model).state_dict().items()}


def whole_parameters(model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """The parameters of the whole model, likewise."""
    if is_complete(model):
        yield from model.named_parameters()
        return
    own = dict(model.named_parameters())
    yield from ((name, own.get(name, parameter)) for name, parameter in _shape(model).named_parameters())


def is_complete(model: Decoder) -> bool:
    """Whether nothing of it is missing, as other ranks of a pipeline have it or its turn has not come."""
    ends = (model.embed, model.norm, model.head)
    return len(model.layers) == model.spec.layers and all(end is not None for end in ends)


def _shape(model: Decoder) -> Decoder:
    with torch.device("meta"), _Uninitialised():
        return Decoder(model.spec)
