"""Teacher: what a plan has to know of the model that another one learns from."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tightfit.jobs.served_weights import served_weights
from tightfit.models.quantized.held_weights import PLAIN_BYTES
from tightfit.models.spec import ModelSpec

SELF = "model"
"""The teacher that is the model itself, as it was before training."""


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """Its shape, the bytes of its weights as they are held, where that is, and the compared layers."""

    spec: ModelSpec
    weight_bytes: int
    place: Literal["device", "host"] = "device"
    features: int = 0
    maps: int = 0
    """Layers whose attention maps are compared."""


def held_weight_bytes(source: str, spec: ModelSpec, element_bytes: int) -> int:
    """Bytes of the weights at `source` once loaded: codes as they are, and `element_bytes` for every other number."""
    folder = Path(source).expanduser()
    held = served_weights(folder, spec) if (folder / "config.json").is_file() else None
    if held is None:
        return element_bytes * spec.params()
    return held.coded_bytes + held.plain_bytes // PLAIN_BYTES * element_bytes
