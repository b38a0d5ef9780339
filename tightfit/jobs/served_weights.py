"""Bytes of a served model's weights, from its files alone, also of a run that trained adapters; without torch.

Adapters on plain weights are merged into them at loading. On packed weights, or weights quantized at loading, they
stay separate in 16 bits, and the base stays as it was in training (models/adapted.py).
"""

from collections.abc import Iterable
from dataclasses import replace
from math import prod
from pathlib import Path

from tightfit.models.base_model import BaseModel, is_adapted, read_base
from tightfit.models.huggingface.adapter_config import PREFIX
from tightfit.models.quantized.held_weights import (
    PLAIN_BYTES,
    CodedModule,
    HeldWeights,
    Matrix,
    expanded_bytes,
    held_weights,
    matrices_of_modules,
    stored_tensors,
)
from tightfit.models.quantized.matrices import matrices
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
    tensors = stored_tensors(directory)
    adapter_params = sum(prod(tensor.shape) for tensor in tensors.values())
    return replace(held, plain_bytes=held.plain_bytes + PLAIN_BYTES * adapter_params, adapted=_adapted(tensors, spec))


def _adapted(names: Iterable[str], spec: ModelSpec) -> frozenset[str]:
    """The decoder's matrices that an adapter's tensors of these names change."""
    modules = {name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in names}
    known = matrices_of_modules(spec)
    return frozenset(matrix.name for module in modules for matrix in known.get(module, ()))


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
    shapes = [Matrix(name, outputs, inputs) for name, (_, outputs, inputs) in matrices(spec).items()]
    modules = tuple(CodedModule((each,), scheme, scheme.held_bytes(each.outputs, each.inputs)) for each in shapes)
    return HeldWeights(
        coded_bytes=sum(module.bytes for module in modules),
        plain_bytes=PLAIN_BYTES * (spec.params() - sum(module.elements for module in modules)),
        expanded_bytes=expanded_bytes(spec, scheme),
        description=scheme.describe(),
        scheme=scheme,
        modules=modules,
    )
