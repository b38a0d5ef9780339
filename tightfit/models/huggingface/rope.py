"""Rotary positions in a config.json, read in both styles and written in the older one.

Older files have `rope_theta`, `rope_scaling` and, for Gemma-3's windowed layers, `rope_local_base_freq`; transformers 5
writes `rope_parameters` with everything in it, once, or once per layer type. A value inside the object beats the same
one outside, except `original_max_position_embeddings`, where transformers does it the other way round for Phi-3's sake.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tightfit.models.huggingface.families import Family
from tightfit.models.huggingface.fields import Fields
from tightfit.models.spec import Rope, RopeScaling

LONGEST = 2**31


@dataclass(frozen=True)
class _Scaling:
    """A scaling rule: its name in `Rope`, the constants it needs, and those it may have."""

    ours: RopeScaling
    needed: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    trained_length: bool = False
    per_pair: bool = False


_SCALINGS = {
    "default": _Scaling("none"),
    "linear": _Scaling("linear", ("factor",)),
    "dynamic": _Scaling("dynamic", ("factor",)),
    "llama3": _Scaling("llama3", ("factor", "low_freq_factor", "high_freq_factor"), trained_length=True),
    "yarn": _Scaling(
        "yarn",
        optional=("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
        trained_length=True,
    ),
    "longrope": _Scaling("longrope", optional=("factor", "attention_factor"), trained_length=True, per_pair=True),
}
_TRAINED = "original_max_position_embeddings"


def read_ropes(fields: Fields, family: Family, head_dim: int, max_positions: int) -> tuple[Rope, Rope | None]:
    """The rope of the model, and that of its windowed layers where the family has two."""

    def one(inside: Fields, theta_name: str) -> Rope:
        return _read_rope(inside, fields, theta_name, family, head_dim, max_positions)

    empty = Fields(family.default_rope, fields.source, inside="rope_scaling")
    scaling, parameters = fields.inner("rope_scaling"), fields.inner("rope_parameters")
    nested = parameters is not None and any(isinstance(value, Mapping) for value in parameters.values.values())
    if not family.two_ropes:
        if nested and parameters is not None:
            raise parameters.bad("full_attention", parameters.values, "this family has one rope for all its layers")
        return one(scaling or parameters or empty, "rope_theta"), None
    if parameters is not None and not nested:
        raise fields.bad("rope_parameters", parameters.values, "it must have one object per layer type")
    full = scaling or (parameters and parameters.inner("full_attention")) or empty
    local = (parameters and parameters.inner("sliding_attention")) or empty
    return one(full, "rope_theta"), one(local, "rope_local_base_freq")


def _read_rope(inside: Fields, outside: Fields, theta_name: str, family: Family, head_dim: int, longest: int) -> Rope:
    """One rope from the object `inside` and the fields around it."""
    given = inside.get("rope_type", "type")[1]
    name = family.rope_types.get(given, given) if isinstance(given, str) else given or "default"
    scaling = _SCALINGS.get(name) if isinstance(name, str) else None
    if scaling is None:
        raise inside.bad("rope_type", given, f"use one of {', '.join(_SCALINGS)}")
    theta_in = inside if inside.get("rope_theta")[1] is not None else outside
    theta = theta_in.number("rope_theta" if theta_in is inside else theta_name, above=1.0)
    share = _share(inside, outside, family)
    dim = int(head_dim * share)
    if scaling.ours == "dynamic" and dim <= 2:
        raise inside.bad("rope_type", given, f"it needs more than the {dim} rotated numbers each head has")
    pairs = {part: inside.numbers(part, dim // 2) for part in ("short_factor", "long_factor") if scaling.per_pair}
    factors = _factors(inside, outside, scaling, longest)
    return Rope(theta=theta, rotated_share=share, scaling=scaling.ours, factors=factors, **pairs)


def _share(inside: Fields, outside: Fields, family: Family) -> float:
    """The rotated share of each head: 1 unless the family lets a config say otherwise."""
    holder = inside if inside.get("partial_rotary_factor")[1] is not None else outside
    share = holder.maybe_number("partial_rotary_factor")
    fixed = family.insists.get("partial_rotary_factor")
    if share is not None and (share > 1 or share != (fixed or share)):
        raise holder.bad("partial_rotary_factor", share, "it must be " + ("1" if fixed else "at most 1"))
    return 1.0 if share is None else share


def _factors(inside: Fields, outside: Fields, scaling: _Scaling, longest: int) -> tuple[tuple[str, float], ...]:
    """The constants of the scaling rule, by name; an optional one of 0 counts as not given, as in transformers."""
    found: dict[str, float] = {name: inside.number(name) for name in scaling.needed}
    found |= {name: value for name in scaling.optional if (value := inside.maybe_number(name, or_equal=True))}
    if scaling.trained_length:
        holder = outside if outside.get(_TRAINED)[1] is not None else inside
        trained = holder.maybe_whole(_TRAINED, least=2, most=LONGEST) or longest
        if trained < 2:
            raise holder.bad(_TRAINED, None, f"{scaling.ours} needs it, or room for more than {longest} position")
        found[_TRAINED] = float(trained)
        if scaling.ours == "yarn":
            found.setdefault("factor", longest / trained)
    if scaling.ours == "yarn" and inside.get("truncate")[1] is not None:
        found["truncate"] = float(inside.flag("truncate"))
    if scaling.ours == "llama3" and found["low_freq_factor"] >= found["high_freq_factor"]:
        raise inside.bad("high_freq_factor", found["high_freq_factor"], "it must be larger than low_freq_factor")
    return tuple(sorted(found.items()))


def write_ropes(family: Family, rope: Rope | None, local: Rope | None) -> dict[str, Any]:
    """The fields that say `rope` and `local`, in the older style, which transformers 5 reads as well."""
    if rope is None:
        return {}
    unscaled = {"rope_type": "default"} if family.default_rope else None  # null would mean the family's own scaling
    config: dict[str, Any] = {"rope_theta": rope.theta, "rope_scaling": _scaling_object(rope) or unscaled}
    if local is not None:
        config["rope_local_base_freq"] = local.theta
    if "partial_rotary_factor" not in family.insists:
        config["partial_rotary_factor"] = rope.rotated_share
    trained = rope.factor(_TRAINED)
    if _TRAINED in family.defaults and trained is not None:
        config[_TRAINED] = int(trained)
    return config


_WRITTEN_AS: dict[str, Callable[[float], Any]] = {_TRAINED: int, "truncate": bool}


def _scaling_object(rope: Rope) -> dict[str, Any] | None:
    if rope.scaling == "none":
        return None
    lists = {"short_factor": list(rope.short_factor), "long_factor": list(rope.long_factor)}
    constants = {name: _WRITTEN_AS.get(name, float)(value) for name, value in rope.factors}
    return {"rope_type": rope.scaling, **constants, **(lists if rope.short_factor else {})}
