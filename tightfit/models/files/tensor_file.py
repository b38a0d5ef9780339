"""Safetensors files that others may read: with the mode that the user's umask gives.

safetensors 0.8 writes into a temporary that only its owner may read, and renames it
(https://github.com/safetensors/safetensors/issues/782): a model that one user trains, another could not serve.
"""

import stat
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write `tensors` to `path`."""
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    save_file(tensors, path, metadata=metadata)
    path.chmod(mode)
