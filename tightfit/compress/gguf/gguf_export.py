"""A model as a quantized GGUF file: which tensor gets which type, and how its blocks are coded.

Mixtures follow llama.cpp's: `q4_k_m` codes most matrices as Q4_K, the output projection (or the embedding it is tied
to) and half of the value and down projections, where errors cost most, as Q6_K. Rows that are no whole blocks of 256
get types with blocks of 32: Q5_0 for Q4_K, Q5_1 for Q5_K, Q8_0 for Q6_K. With calibration text, scales are fitted with
inputs weighted by importance, and codes make up for one another's errors (gguf_feedback.py).
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tightfit.compress.calibration.calibration import read_calibration
from tightfit.compress.gguf.gguf_blocks import CODERS, encode_rows
from tightfit.compress.gguf.gguf_feedback import code_layers
from tightfit.durable import require_new
from tightfit.errors import UserError
from tightfit.models.files.checksums import list_beside, write_file_checksum
from tightfit.models.gguf.config import ARCHITECTURES, metadata_of
from tightfit.models.gguf.model import write_gguf
from tightfit.models.gguf.weights import to_gguf
from tightfit.models.loading import load_model, source_spec
from tightfit.models.saving import WIDER, Export, require_float16, writing_new
from tightfit.models.spec import ModelSpec

TYPES: dict[str, tuple[str, str, int]] = {
    "q8_0": ("Q8_0", "Q8_0", 7),
    "q4_0": ("Q4_0", "Q6_K", 2),
    "q4_1": ("Q4_1", "Q6_K", 3),
    "q4_k_m": ("Q4_K", "Q6_K", 15),
    "q5_k_m": ("Q5_K", "Q6_K", 17),
    "q6_k": ("Q6_K", "Q6_K", 18),
}
"""The type of most matrices, of the most sensitive ones, and llama.cpp's number of the mixture."""
FALLBACKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


@dataclass(frozen=True)
class GgufCoder:
    """Chooses a type for every matrix of a model and makes its blocks."""

    spec: ModelSpec
    mixture: str
    blocks: dict[str, Tensor] = field(default_factory=dict)
    """Matrices coded already, by tightfit's names and with its order of rows; others are rounded to nearest."""

    @property
    def file_type(self) -> int:
        """llama.cpp's number for the mixture."""
        return TYPES[self.mixture][2]

    def kind(self, name: str, shape: tuple[int, ...]) -> str:
        """The GGUF type of our parameter `name`."""
        if len(shape) < 2 or "router" in name or shape[-1] % 32:
            return "F32" if len(shape) < 2 or "router" in name else "F16"
        usual, better, _ = TYPES[self.mixture]
        chosen = better if self._is_sensitive(name) else usual
        return FALLBACKS[chosen] if chosen in FALLBACKS and shape[-1] % CODERS[chosen].size else chosen

    def _is_sensitive(self, name: str) -> bool:
        if name in ("head.weight", "embed.weight"):
            return name == "head.weight" or self.spec.tied
        if self.mixture not in ("q4_k_m", "q5_k_m") or not name.startswith("layers."):
            return False
        layer, layers = int(name.split(".")[1]), self.spec.layers
        eighth = layers // 8
        ends = layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
        return ends and any(part in name for part in (".v.", ".down"))

    def encode(self, name: str, values: NDArray[np.float32], kind: str) -> NDArray[np.uint8]:
        """The blocks of a matrix."""
        if name not in self.blocks:
            return encode_rows(torch.from_numpy(values), kind).numpy()
        interleaved = ARCHITECTURES[metadata_of(self.spec)["general.architecture"]].interleaved
        return to_gguf(self.blocks[name], name, self.spec, interleaved).astype(np.uint8)  # rows as GGUF orders them


def export_gguf(
    source: str,
    target: Path,
    mixture: str,
    data: tuple[str, ...],
    *,
    samples: int,
    length: int | None,
    cache: Path,
    device: torch.device,
    progress: bool = False,
) -> Export:
    """Write the model at `source` as the GGUF file `target`, with codes chosen for inputs from `data` where given."""
    require_new(target)
    if mixture not in TYPES:
        raise UserError(f"GGUF type {mixture!r} is not written; use one of {', '.join(TYPES)}")
    spec = source_spec(source)
    metadata_of(spec)  # a model that GGUF cannot express is refused before any work
    rows = None
    if data:
        rows = read_calibration(
            source,
            spec,
            data,
            samples=samples,
            length=length or min(512, spec.max_positions),
            cache=cache,
            field="text",
            progress=progress,
            remedy="give more text",
        )
    loaded = load_model(source, packed=False)
    require_float16(loaded.model, source, WIDER)
    coder = GgufCoder(spec, mixture)
    if rows is not None:
        coder = replace(coder, blocks=code_layers(source, rows, device, coder.kind, progress=progress))
    with writing_new(target):
        list_beside(target).unlink(missing_ok=True)  # the list of an earlier file of this name
        write_gguf(loaded.model, loaded.tokenizer, target, "fp16", coder)
        write_file_checksum(target)
    return Export(target, loaded.model.spec.params(), target.stat().st_size)
