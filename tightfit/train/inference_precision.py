"""The number format a trained model is evaluated and sampled in: never narrower than its weights unless asked for.

On a GPU it is the format the weights are stored in. On a CPU it is float32, which holds every narrower weight exactly
and is at least as fast; products with 4-bit codes excepted (serve/weights/int4.py), unless float32 is asked for. GGUF
files, whose other weights are unpacked anyway, are computed in float32 everywhere.
"""

import json
from pathlib import Path
from typing import Literal

import torch

from tightfit.models.resolve import checkpoints_of

InferencePrecision = Literal["auto", "fp32", "bf16", "fp16"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STORED = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def inference_dtype(source: str, precision: InferencePrecision, device: torch.device) -> torch.dtype:
    """The dtype to compute the model at `source` in."""
    if precision != "auto":
        return DTYPES[precision]
    return torch.float32 if device.type == "cpu" else stored_dtype(source)


def stored_dtype(source: str) -> torch.dtype:
    """The format that the config.json at `source` (a model's directory or a run) names; float32 without one."""
    folder, found = Path(source), checkpoints_of(Path(source))
    if found and not (folder / "config.json").is_file():
        folder = found[-1]
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return STORED.get(config.get("dtype") or config.get("torch_dtype"), torch.float32)
    except (OSError, ValueError, AttributeError):
        return torch.float32
