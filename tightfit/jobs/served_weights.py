"""What the weights of a model take where it is served, from its files alone: of a run of adapters too, without torch.

Adapters over plain weights are added to these as they are loaded. Over packed ones, or ones that were rounded as they
were loaded, they stand beside them in 16 bits, and the model stays as it was in training (models/adapted.py).
"""

from dataclasses import replace
from math import prod
from pathlib import Path

from tightfit.jobs.projections import linear_shapes
from tightfit.models.base_model import BaseModel, is_adapted, read_base
from tightfit.models.quantized.held_weights import (
    PLAIN_BYTES,
    HeldWeights,
    expanded_bytes,
    held_weights,
    stored_tensors,
)
from tightfit.models.quantized.scheme import Scheme
from tightfit.models.spec import ModelSpec


def served_weights(directory: Path, spec: ModelSpec) -> HeldWeights | None:
    """Of the model in `directory`; None where its weights are plain."""
    if not is_adapted(directory):
        return held_weights(directory, spec)
    base = read_base(directory)
    held = _held_base(base, spec)
    if held is None:
        return None
    adapter_params = sum(prod(tensor.shape) for tensor in stored_tensors(directory).values())
    return replace(held, plain_bytes=held.plain_bytes + PLAIN_BYTES * adapter_params)


def _held_base(base: BaseModel, spec: ModelSpec) -> HeldWeights | None:
    """The model under an adapter as training held it; None where that was plainly."""
    folder = Path(base.source).expanduser()
    has_files = (folder / "config.json").is_file() and not is_adapted(folder)
    held = held_weights(folder, spec) if has_files else None
    if held is None and base.rounding is not None:
        return rounded_weights(base.rounding, spec)
    return held


def rounded_weights(scheme: Scheme, spec: ModelSpec) -> HeldWeights:
    """A plain dense model whose linear layers are rounded as they are loaded."""
    shapes = linear_shapes(spec).values()
    coded = spec.layers * sum(scheme.held_bytes(outputs, inputs) for outputs, inputs in shapes)
    plain = spec.params() - spec.layers * sum(outputs * inputs for outputs, inputs in shapes)
    return HeldWeights(coded, PLAIN_BYTES * plain, expanded_bytes(spec, scheme), scheme.describe(), scheme)
