"""From what a user typed to a ModelSpec: a preset, a directory with a config.json, that file itself, or a run."""

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tightfit.bounded_files import read_json
from tightfit.errors import UserError
from tightfit.models.hub import hub_directory, hub_hint, is_hub_name
from tightfit.models.huggingface.config import spec_from_config
from tightfit.models.presets import PRESETS, preset, suggestion
from tightfit.models.spec import ModelSpec

LARGEST_SIZE = 2**31
MOST_LAYERS = 100_000
"""Formulas go through the layers one by one."""
LARGEST_CONFIG_BYTES = 16 * 2**20


def resolve_spec(source: str) -> ModelSpec:
    """The ModelSpec of `source`; a preset wins over a directory of the same name (write `./name` for the directory)."""
    if source in PRESETS:
        return preset(source)
    if is_hub_name(source):
        return spec_from_config(read_config(hub_directory(source, weights=False) / "config.json"), source)
    path = Path(source)
    try:
        path = path.expanduser()
        is_folder, found = path.is_dir(), path.is_file()
    except (OSError, ValueError, RuntimeError):  # too long a name, a null byte in it, an unknown user's home
        is_folder = found = False
    if not (found or is_folder):
        raise _no_model(source)
    return spec_at(path, source)


def spec_at(path: Path, source: str) -> ModelSpec:
    """The ModelSpec of a directory, a run or a config.json, whatever its name; errors call it `source`."""
    if path.is_dir():
        path = newest_checkpoint(path, source)
        refuse_adapter(path)
        path = path / "config.json"
    if not path.is_file():
        raise _no_model(source)
    return spec_from_config(read_config(path), str(path))


def _no_model(source: str) -> UserError:
    return UserError(f"{_shown(source)} is neither a model preset nor a directory with a config.json; {_fix(source)}")


def newest_checkpoint(path: Path, source: str) -> Path:
    """`path`, or its newest complete checkpoint where it is a run; errors call it `source`."""
    is_run = (path / "checkpoints").is_dir() and not (path / "config.json").exists()
    if not is_run:
        return path
    found = checkpoints_of(path)
    if not found:
        raise UserError(f"{source} is a run without a complete checkpoint; train it further or name another")
    return found[-1]


def checkpoints_of(run: Path) -> list[Path]:
    """The complete checkpoints of `run`, oldest first; incomplete ones have names that begin with a dot, and an empty
    directory never was one."""
    found = [path for path in (run / "checkpoints").glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
    return sorted(filter(_is_filled, found), key=lambda path: int(path.name.removeprefix("step-")))


def _is_filled(path: Path) -> bool:
    """Whether `path` is a directory that holds something; it may be removed by its run at any instant."""
    try:
        return any(path.iterdir())
    except PermissionError:
        return path.is_dir()
    except OSError:
        return False


def reshaped(spec: ModelSpec, changes: Mapping[str, int], source: str) -> ModelSpec:
    """`spec`, which `source` names, with some of its sizes or flags changed."""
    changed: dict[str, Any] = {}
    for name, value in changes.items():
        old = getattr(spec, name, None) if name in ModelSpec.__dataclass_fields__ else None
        if not isinstance(old, int):
            raise UserError(f"model.shape.{name} is not a size of a model; see `tightfit models {source}`")
        most = MOST_LAYERS if name == "layers" else LARGEST_SIZE
        if not 0 <= value <= most:
            raise UserError(f"model.shape.{name} is {value!r:.40}; it lies between 0 and {most:,}")
        if isinstance(old, bool) and value not in (0, 1):
            raise UserError(f"model.shape.{name} is {value}, but a model has that or not; say true or false")
        changed[name] = type(old)(value)
    return replace(_with_layers(spec, changed.get("layers", spec.layers)), **changed)


def _with_layers(spec: ModelSpec, layers: int) -> ModelSpec:
    """`spec` with so many layers; windows and dense MLPs leave with their layers, and continue in further ones."""
    windowed = _continued(spec.window_layers, spec.layers, layers)
    experts = spec.experts
    if experts is not None:
        experts = replace(experts, dense_layers=_continued(experts.dense_layers, spec.layers, layers))
    window = spec.window if windowed or not spec.window_layers else None
    return replace(spec, layers=layers, window=window, window_layers=windowed, experts=experts)


def _continued(chosen: Collection[int], layers: int, wanted: int) -> tuple[int, ...]:
    """Which of `wanted` layers are what the `chosen` ones of `layers` are: in their period, or else, as where the first
    or the last are chosen, further layers are like the last."""
    if not chosen or wanted <= layers:
        return tuple(layer for layer in chosen if layer < wanted)
    is_chosen = [layer in chosen for layer in range(layers)]
    period = next((step for step in range(1, layers) if is_chosen[step:] == is_chosen[:-step]), 1)
    while len(is_chosen) < wanted:
        is_chosen.append(is_chosen[-period])
    return tuple(layer for layer in range(wanted) if is_chosen[layer])


def read_config(path: Path) -> Any:
    """The JSON value in the file `path`."""
    return read_json(path, LARGEST_CONFIG_BYTES, "a model config", remedy="download or write it again")


def _shown(source: str) -> str:
    return repr(source if len(source) <= 100 else f"{source[:100]}…")


def _fix(source: str) -> str:
    hint = hub_hint(source)
    return suggestion(source[:100]) if hint is None else f"{hint}; {suggestion(source[:100])}"


def refuse_adapter(path: Path) -> None:
    """Refuse a directory that holds LoRA weights and no model."""
    if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        raise UserError(
            f"{path} is an adapter (LoRA), weights to be added to a model; merge them with peft (`merge_and_unload`, "
            "`save_pretrained`) and give that directory"
        )
