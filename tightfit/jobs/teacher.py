"""Teacher: the facts about a distillation's teacher that a plan needs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tightfit.jobs.served_weights import served_weights
from tightfit.models.quantized.held_weights import PLAIN_BYTES
from tightfit.models.spec import ModelSpec

SELF = "model"
"""The value of distill.teacher for the model itself, as it was before training."""


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """A teacher's shape, the bytes and place of its weights, and the number of compared layers."""

    spec: ModelSpec
    weight_bytes: int
    place: Literal["device", "host"] = "device"
    features: int = 0
    """Number of layers whose hidden states are compared."""
    maps: int = 0
    """Number of layers whose attention maps are compared."""


def has_coded_head(source: str, spec: ModelSpec) -> bool:
    """Whether the output projection of the model at `source` is held in codes."""
    folder = Path(source).expanduser()
    held = served_weights(folder, spec) if (folder / "config.json").is_file() else None
    return held is not None and held.head is not None


def held_weight_bytes(source: str, spec: ModelSpec, element_bytes: int) -> int:
    """Bytes of the weights at `source` once loaded: codes stay packed, every other weight takes `element_bytes`."""
    folder = Path(source).expanduser()
    held = served_weights(folder, spec) if (folder / "config.json").is_file() else None
    if held is None:
        return element_bytes * spec.params()
    return held.coded_bytes + held.plain_bytes // PLAIN_BYTES * element_bytes
