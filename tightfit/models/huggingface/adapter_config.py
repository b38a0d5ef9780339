"""What a PEFT directory says of its LoRA adapter, read and checked without torch."""

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tightfit.bounded_files import user_path
from tightfit.errors import UserError
from tightfit.models.resolve import read_config

CONFIG_FILE = "adapter_config.json"
PREFIX = "base_model.model."
"""Before the names of an adapter's tensors."""
MERGE = "merge it into its model with PEFT and serve that"
PLAIN: Mapping[str, Any] = {"use_dora": False, "bias": "none", "modules_to_save": None, "lora_bias": False}
LARGEST_RANK = 1024


def named_directories(given: Iterable[str]) -> dict[str, Path]:
    """`NAME=DIRECTORY` texts as a user wrote them."""
    found: dict[str, Path] = {}
    for text in given:
        name, equals, place = text.partition("=")
        if not (name and equals and place):
            raise UserError(f"--adapter is {text!r}; write NAME=DIRECTORY")
        if name in found:
            raise UserError(f"--adapter names {name!r} twice; give each adapter a name of its own")
        found[name] = user_path(place, f"--adapter {name}")
    return found


def read_adapter_config(directory: Path) -> dict[str, Any]:
    """The config of an adapter that is A and B and nothing else."""
    path = directory / CONFIG_FILE
    if not path.is_file():
        raise UserError(f"{directory} has no {CONFIG_FILE}; name the directory that PEFT's save_pretrained wrote")
    config = read_config(path)
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else config
        raise UserError(f"peft_type in {path} is {kind!r:.40}; only LORA adapters are served, {MERGE}")
    for name, plain in PLAIN.items():
        if (value := config.get(name, plain)) not in (plain, None, []):
            raise UserError(f"{name} in {path} is {value!r:.60}, which is not served; {MERGE}")
    return config


def largest_rank(directory: Path) -> int:
    """The largest rank that the config names."""
    config = read_adapter_config(directory)
    ranks = [config.get("r", 8), *_pattern(config, "rank_pattern", directory).values()]
    for rank in ranks:
        if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= LARGEST_RANK:
            raise UserError(f"r in {directory / CONFIG_FILE} is {rank!r:.40}; it must be from 1 to {LARGEST_RANK}")
    return max(ranks)


def scale_of(config: Mapping[str, Any], module: str, rank: int, directory: Path) -> float:
    """alpha / r (alpha / √r where rank-stabilised), with the alpha of this module where it has one of its own."""
    patterns = _pattern(config, "alpha_pattern", directory)
    own = next((value for key, value in patterns.items() if f".{module}".endswith(f".{key}")), None)
    alpha = config.get("lora_alpha", 8) if own is None else own
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise UserError(f"lora_alpha in {directory / CONFIG_FILE} is {alpha!r:.40}; it must be a number")
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _pattern(config: Mapping[str, Any], name: str, directory: Path) -> dict[str, Any]:
    """Values by the ends of modules' names; regular expressions, which PEFT would take too, are not run."""
    found = config.get(name) or {}
    if not isinstance(found, dict) or any(re.fullmatch(r"[\w.]+", key) is None for key in found):
        raise UserError(f"{name} in {directory / CONFIG_FILE} has other keys than modules' names; {MERGE}")
    return found
