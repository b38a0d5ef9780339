"""A decoder with memory but without values: random numbers that weights overwrite at once cost seconds per billion."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
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
