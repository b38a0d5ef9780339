"""The bytes of a model that was loaded, beside what its files were read to take."""

from pathlib import Path

import torch

from tightfit.models.loading import load_model
from tightfit.models.quantized.held_weights import HeldWeights, held_weights
from tightfit.models.resolve import resolve_spec


def counted_bytes(folder: Path) -> int:
    """All parameters and buffers of the model in `folder`, as the engine loads it on a GPU."""
    model = load_model(str(folder), dtype=torch.bfloat16).model
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def assert_held_as_said(folder: Path) -> HeldWeights:
    """What was read from the headers is what is there, to the byte."""
    held = held_weights(folder, resolve_spec(str(folder)))
    assert held is not None
    assert held.total_bytes == counted_bytes(folder)
    return held
