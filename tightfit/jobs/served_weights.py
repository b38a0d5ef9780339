"""Bytes of a served model's weights, from its files alone, also of a run that trained adapters; without torch.

Adapters on plain weights are merged into them at loading. On packed weights, or weights quantized at loading, they
stay separate in 16 bits, and the base stays as it was in training (models/adapted.py).
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
    """The quantized weights of the model in `directory`; None where its weights are plain."""
    if not is_adapted(directory):
        return held_weights(directory, spec)
    base = read_base(directory)
    held = _held_base(base, spec)
    if held is None:
        return None
    adapter_params = sum(prod(tensor.shape) for tensor in stored_tensors(directory).values())
    return replace(held, plain_bytes=held.plain_bytes + PLAIN_BYTES * adapter_params)


def _held_base(base: BaseModel, spec: ModelSpec) -> HeldWeights | None:
    """The quantized weights of an adapter's base, as training held them; None where they were plain."""
    folder = Path(base.source).expanduser()
    has_files = (folder / "config.json").is_file() and not is_adapted(folder)
    held = held_weights(folder, spec) if has_files else None
    if held is None and base.rounding is not None:
        return rounded_weights(base.rounding, spec)
    return held


def rounded_weights(scheme: Scheme, spec: ModelSpec) -> HeldWeights:
    """The weights of a plain dense model whose linear layers are quantized as they are loaded."""
    shapes = linear_shapes(spec).values()
    coded = spec.layers * sum(scheme.held_bytes(outputs, inputs) for outputs, inputs in shapes)
    plain = spec.params() - spec.layers * sum(outputs * inputs for outputs, inputs in shapes)
    return HeldWeights(coded, PLAIN_BYTES * plain, expanded_bytes(spec, scheme), scheme.describe(), scheme)
