"""Teacher: what a plan has to know of the model that another one learns from."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

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
    """Bytes of the weights at `source` once loaded: as they are stored where compressed, else `element_bytes` each."""
    config = Path(source) / "config.json"
    if config.is_file() and '"quantization_config"' in config.read_text(encoding="utf-8", errors="replace"):
        return sum(file.stat().st_size for file in Path(source).glob("*.safetensors"))
    return element_bytes * spec.params()
