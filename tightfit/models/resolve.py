"""From what a user typed to a ModelSpec: a preset's name, a directory with a config.json, or that file itself."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tightfit.errors import UserError
from tightfit.models.huggingface.config import spec_from_config
from tightfit.models.presets import PRESETS, preset, suggestion
from tightfit.models.spec import ModelSpec

LARGEST_CONFIG_BYTES = 16 * 2**20


def resolve_spec(source: str) -> ModelSpec:
    """The ModelSpec of `source`; a preset wins over a directory of the same name (write `./name` for the directory)."""
    if source in PRESETS:
        return preset(source)
    path = Path(source)
    try:
        if path.is_dir():
            path = path / "config.json"
        found = path.is_file()
    except (OSError, ValueError):  # a name too long for the file system, or with a null byte in it
        found = False
    if not found:
        raise UserError(
            f"{_shown(source)} is neither a model preset nor a directory with a config.json; {_fix(source)}"
        )
    return spec_from_config(read_config(path), str(path))


def reshaped(spec: ModelSpec, changes: Mapping[str, int], source: str) -> ModelSpec:
    """`spec`, which `source` names, with some of its sizes or flags changed."""
    changed: dict[str, Any] = {}
    for name, value in changes.items():
        old = getattr(spec, name, None) if name in ModelSpec.__dataclass_fields__ else None
        if not isinstance(old, int):
            raise UserError(f"model.shape.{name} is not a size of a model; see `tightfit models {source}`")
        if isinstance(old, bool) and value not in (0, 1):
            raise UserError(f"model.shape.{name} is {value}, but a model has that or not; say true or false")
        changed[name] = type(old)(value)
    return replace(spec, **changed)


def read_config(path: Path) -> Any:
    """The JSON value in the file `path`."""
    try:
        if path.stat().st_size > LARGEST_CONFIG_BYTES:
            raise UserError(f"{path} is larger than {LARGEST_CONFIG_BYTES >> 20} MiB; that is no model config")
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; check its permissions") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        reason = "too deeply nested" if isinstance(error, RecursionError) else str(error).split("\n", 1)[0]
        raise UserError(f"{path} is not JSON ({reason}); download or write it again") from None


def _shown(source: str) -> str:
    return repr(source if len(source) <= 100 else f"{source[:100]}…")


def _fix(source: str) -> str:
    return suggestion(source[:100])
