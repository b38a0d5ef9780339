"""The projections of a dense decoder layer: names, shapes, and which of them a user's patterns match. Without torch.

A target is a module's name or the end of one (`q`, `q_proj`, `self_attn.q_proj`, Phi-3's `qkv_proj`), a glob
(`model.layers.*.mlp.*`) or a regular expression (`.*\\.(q|v)_proj`) of a whole name: Hugging Face's, as in PEFT, or
tightfit's (`layers.0.attention.q`).
"""

import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Literal, get_args

from tightfit.errors import UserError
from tightfit.models.huggingface.families import FAMILIES
from tightfit.models.spec import ModelSpec

Projection = Literal["q", "k", "v", "o", "gate", "up", "down"]
PROJECTIONS: tuple[Projection, ...] = get_args(Projection)
ALL_LINEAR = "all-linear"
LONGEST_TARGET = 200


def linear_shapes(spec: ModelSpec) -> dict[Projection, tuple[int, int]]:
    """(outputs, inputs) of each projection of a dense layer."""
    hidden, query, key, inner = spec.hidden_size, spec.query_size, spec.kv_size, spec.mlp_size
    shapes: dict[Projection, tuple[int, int]] = {
        "q": (query, hidden),
        "k": (key, hidden),
        "v": (key, hidden),
        "o": (hidden, query),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
    }
    return shapes if spec.gated else {name: shape for name, shape in shapes.items() if name != "gate"}


def targeted(targets: Sequence[str], spec: ModelSpec) -> tuple[Projection, ...]:
    """The projections that `targets` match in every layer of a model of shape `spec`; a UserError if one matches none,
    or if layers differ in the projections matched."""
    found: dict[int, set[Projection]] = {layer: set() for layer in range(spec.layers)}
    unused = dict.fromkeys(targets)
    for layer, name, projections in _modules(spec):
        for target in targets:
            if _means(target, name):
                found[layer].update(projections)
                unused.pop(target, None)
    if unused:
        raise UserError(f"adapter.targets has {next(iter(unused))!r:.80}, {_what_is_wrong(spec)}")
    chosen = found[0]
    for layer, others in found.items():
        if odd := sorted(chosen ^ others):
            raise UserError(
                f"adapter.targets means {odd[0]} of layer {0 if odd[0] in chosen else layer} but not of layer "
                f"{layer if odd[0] in chosen else 0}; adapters are on a projection of every layer or of none"
            )
    return tuple(name for name in PROJECTIONS if name in chosen)


def check_target(target: str) -> None:
    """Raise a ValueError for a target that can match no family's projections, before the model is known."""
    if not 0 < len(target) <= LONGEST_TARGET:
        raise ValueError(f"adapter.targets has a name of {len(target)} characters; they have 1 to {LONGEST_TARGET}")
    general = re.sub(r"(?<![^.])\d+(?![^.])", "{layer}", target)
    if re.fullmatch(r"[\w.]+", target) and general not in _known_ends():
        raise ValueError(
            f"adapter.targets has {target!r:.80}, which no family calls a projection; name some of "
            f"{', '.join(PROJECTIONS)}, their modules, globs or regular expressions of these, or {ALL_LINEAR}"
        )


def _modules(spec: ModelSpec) -> Iterator[tuple[int, str, list[Projection]]]:
    """(layer, name, projections) of every module with projections, by Hugging Face's names and by ours; a module of
    theirs may hold several (`qkv_proj`), ours hold one each."""
    there = linear_shapes(spec)
    for theirs, ours in _rules(spec.family):
        held = [name for name in ours if name.rpartition(".")[2] in there]
        for layer in range(spec.layers):
            for name in held:
                yield layer, name.replace("{layer}", str(layer)), [_projection(name)]
            if held:
                yield layer, theirs.replace("{layer}", str(layer)), [_projection(name) for name in held]


def _rules(family: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Hugging Face's module names of a family's dense projections, with the names of our modules that each holds."""
    for rule in FAMILIES[family].weights:
        parts = rule.ours[0].split(".")
        is_dense = len(parts) == 4 and parts[2] in ("attention", "mlp") and parts[3] in PROJECTIONS
        if is_dense and not rule.is_tensor:
            yield rule.theirs, rule.ours


def _projection(ours: str) -> Projection:
    return next(name for name in PROJECTIONS if name == ours.rpartition(".")[2])


def _means(target: str, name: str) -> bool:
    if f".{name}".endswith(f".{target}") or fnmatchcase(name, target):
        return True
    try:
        return re.fullmatch(target, name) is not None
    except re.error:  # a glob, or nothing
        return False


def _known_ends() -> set[str]:
    """All suffixes of names of projections in any family, with `{layer}` for the layer's number."""
    names = [name for family in FAMILIES for theirs, ours in _rules(family) for name in (theirs, *ours)]
    parts = [name.split(".") for name in names]
    return {".".join(each[start:]) for each in parts for start in range(len(each))}


def _what_is_wrong(spec: ModelSpec) -> str:
    """What there is instead of a target that means nothing; nothing is, where layers are not dense."""
    if spec.experts is not None or spec.latent is not None:
        return f"but {spec.family} has experts or latent attention, which get no adapters; choose another model"
    names = dict.fromkeys(name for layer, name, _ in _modules(spec) if layer == 0)
    ours = ", ".join(linear_shapes(spec))
    theirs = ", ".join(name for name in names if not name.startswith("layers."))
    return f"which is no projection of {spec.family}; there are {ours} ({theirs} and so on), or {ALL_LINEAR}"
