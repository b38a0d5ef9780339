"""A decoder with memory but without values: random numbers that weights overwrite at once cost seconds per billion."""

import torch

from tightfit.models.decoder import Decoder
from tightfit.models.spec import ModelSpec


def blank_decoder(spec: ModelSpec, device: str | torch.device, dtype: torch.dtype) -> Decoder:
    """A decoder on `device` whose parameters, of type `dtype`, still have to be filled."""
    with torch.device("meta"):
        model = Decoder(spec)
    model = model.to(dtype).to_empty(device=device)
    if spec.tied:
        model.head.weight = model.embed.weight  # to_empty gave each its own memory
    return model
