"""Recipe: what is done to a model, as an ordered list of steps, each for the layers a pattern names.

```yaml
- method: rotate                     # of the whole model
- method: gptq                       # how layers are coded: the last step that names a layer decides
  bits: 4
  group: 64
- method: rtn
  bits: 8
  layers: "*.mlp.down"
- method: keep                       # neither quantized nor pruned
  layers: ["layers.0.*", "layers.1.*"]
- method: rtn                        # the output projection, which no pattern but its name means
  bits: 8
  layers: head
```

Names are ours, `layers.3.attention.q`, and patterns those of shells. `--method rotate+gptq` is a recipe of two steps.
Pruning (magnitude, wanda, sparsegpt) comes before coding, wherever its step stands; of several, the last decides too.
Nothing here imports torch.
"""

import difflib
import json
import re
from collections.abc import Collection
from dataclasses import MISSING, asdict, dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, get_args

from tightfit.bounded_yaml import read_yaml_file
from tightfit.errors import UserError
from tightfit.models.quantized.matrices import HEAD
from tightfit.models.quantized.scheme import FIXED_BITS, FIXED_GROUPS, PACKED_BITS, Scheme

Coding = Literal[
    "rtn", "gptq", "round", "awq", "smoothquant", "spqr", "nf4", "llm.int8", "fp8", "mxfp4", "nvfp4", "binary"
]
Pruning = Literal["magnitude", "wanda", "sparsegpt"]
Method = Literal["rotate", "keep", Coding, Pruning]
METHODS: tuple[str, ...] = get_args(Method)
PRUNING: tuple[str, ...] = get_args(Pruning)
CODING: tuple[str, ...] = get_args(Coding)
OF_OPTION = tuple(method for method in METHODS if method != "keep")
"""Steps that `--method` takes: `keep` is for some layers, which only a recipe can name."""
ALONE = ("structured", "svd", "whitened-svd")
"""Methods of `tightfit compress` that replace all matrices by others, and so cannot be a step."""
CALIBRATED = ("gptq", "round", "awq", "smoothquant", "spqr", "wanda", "sparsegpt")
"""Methods that look at the inputs of layers."""
KINDS = ("nf4", "mxfp4", "nvfp4", "binary", "fp8")
SPQR_GROUP = 16
SETTLED: dict[str, dict[str, Any]] = {
    "smoothquant": {"bits": 8, "group": 0, "symmetric": True, "numbers": "int", "activations": "int8"},
    "llm.int8": {"bits": 8, "group": 0, "symmetric": True, "numbers": "int", "activations": None},
    "spqr": {"group": SPQR_GROUP, "symmetric": False, "numbers": "int", "activations": None},
}
"""Options whose values a method fixes."""
PRUNING_OPTIONS = ("sparsity", "pattern")
NUMBERS = ("bits", "group", "symmetric")
INPUTS = ("activations", "static")
USED: dict[str, tuple[str, ...]] = {
    "rotate": ("seed",),
    "keep": (),
    "rtn": (*NUMBERS, "numbers", "ranges", *INPUTS),
    "gptq": (*NUMBERS, "numbers", "ranges", *INPUTS, "act_order", "damping"),
    "round": (*NUMBERS, "numbers", "ranges", *INPUTS, "act_order", "damping", "steps", "seed"),
    "awq": (*NUMBERS, "numbers", *INPUTS),
    "smoothquant": (*SETTLED["smoothquant"], "static", "alpha"),
    "spqr": (*SETTLED["spqr"], "bits", "static", "outlier_share", "damping"),
    "llm.int8": (*SETTLED["llm.int8"], "ranges", "static"),
    **dict.fromkeys(KINDS, (*NUMBERS, "ranges", *INPUTS)),
    "magnitude": PRUNING_OPTIONS,
    "wanda": PRUNING_OPTIONS,
    "sparsegpt": (*PRUNING_OPTIONS, "damping"),
}
"""The options that a method uses; others would have no effect, so they are refused."""
MOST_SEED = 2**32 - 1


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step. What is None follows from the method: 4 bits, groups of 128, asymmetric below 8 bits."""

    method: Method
    layers: tuple[str, ...] = ("*",)
    bits: int | None = None
    group: int | None = None
    symmetric: bool | None = None
    numbers: Literal["int", "nf4", "mxfp4", "nvfp4", "fp8"] | None = None
    """Number kind for rtn and gptq; integers by default."""
    ranges: Literal["minmax", "percentile", "kl", "mse"] | None = None
    act_order: Literal["none", "static", "groups"] = "static"
    damping: float = 0.01
    alpha: float | None = None
    """SmoothQuant's; searched where it is None."""
    activations: Literal["int8", "fp8"] | None = None
    static: Literal["minmax", "percentile", "kl", "mse"] | None = None
    """How calibration finds the one scale of a layer's inputs; None: a scale per token, computed at run time."""
    outlier_share: float = 0.01
    sparsity: float = 0.5
    """The share of weights that pruning makes zero."""
    pattern: str | None = None
    """N:M instead: of every M neighbouring inputs, N stay, such as 2:4."""
    steps: int = 200
    """Optimizer steps of learned rounding (round), for each layer."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise UserError(_unknown(self.method, METHODS))
        if not 0 < self.damping < 1:
            raise UserError(f"damping is {self.damping}; it lies between 0 and 1, such as 0.01")
        if not 0 <= self.outlier_share < 0.5:
            raise UserError(f"outlier_share is {self.outlier_share}; it is a share of the weights, from 0 to below 0.5")
        if not 0 <= self.seed <= MOST_SEED:
            raise UserError(f"seed is {self.seed}; it lies between 0 and {MOST_SEED}")
        if self.alpha is not None and not 0 <= self.alpha <= 1:
            raise UserError(f"alpha is {self.alpha}; it lies between 0 and 1")
        if not 0 < self.sparsity < 1:
            raise UserError(f"sparsity is {self.sparsity}; it is the share of weights to prune, between 0 and 1")
        if self.steps < 1:
            raise UserError(f"steps is {self.steps}; learned rounding takes at least one")
        if self.method == "round" and (
            self.numbers not in (None, "int") or self.activations or self.act_order == "groups"
        ):
            raise UserError("round learns integers in plain groups beside unrounded activations; use gptq for others")
        for name, settled in SETTLED.get(self.method, {}).items():
            if (given := getattr(self, name)) not in (None, settled):
                raise UserError(
                    f"{name} is {given}, but {self.method} has {settled}; leave it out or use another method"
                )
        if self.pattern is not None and self.kept_of_group is None:
            raise UserError(f"pattern is {self.pattern!r}; give N:M with N below M, such as 2:4")
        if HEAD in self.layers and self.method != "keep":
            self._check_head()

    def _check_head(self) -> None:
        """Refuse codes of the output projection that no kernel of one token reads packed."""
        if self.method not in ("rtn", "gptq"):
            raise UserError(
                f"layers names {HEAD}, but the method is {self.method}; the output projection is coded by rtn or gptq: "
                f"give it a step of its own with one of these and layers {HEAD}"
            )
        if self.act_order == "groups":
            raise UserError(f"act_order is groups, but {HEAD} is read in plain groups; leave it out for {HEAD}")
        scheme = self.scheme()
        assert scheme is not None
        if scheme.kind != "int" or scheme.activations is not None or scheme.bits not in PACKED_BITS or scheme.group < 0:
            widths = ", ".join(map(str, PACKED_BITS))
            raise UserError(
                f"{HEAD} is to be {scheme.describe()}; the output projection can be integers of {widths} bits in "
                "groups or rows, beside unrounded inputs"
            )

    @property
    def kept_of_group(self) -> tuple[int, int] | None:
        """N and M of the pattern; None where there is none or it is malformed."""
        found = re.fullmatch(r"([1-9]\d?):([1-9]\d?)", self.pattern or "")
        kept, group = (int(part) for part in found.groups()) if found else (0, 0)
        return (kept, group) if kept < group else None

    def names(self, layer: str) -> bool:
        """Whether the step is for the layer of this name."""
        return any(_means(pattern, layer) for pattern in self.layers)

    def scheme(self) -> Scheme | None:
        """How the step codes weights; None where it does not."""
        if self.method not in CODING:
            return None
        is_static = self.static is not None
        if self.method == "smoothquant":
            return Scheme(bits=8, group=0, activations="int8", static=is_static)
        if self.method == "llm.int8":
            return Scheme(bits=8, group=0, activations="llm.int8", static=is_static)
        if self.method == "spqr":
            return Scheme(bits=self.bits or 3, group=SPQR_GROUP, symmetric=False, outliers=True, static=is_static)
        kind: Any = self.method if self.method in KINDS else (self.numbers or "int")
        bits = FIXED_BITS.get(kind, 4) if self.bits is None else self.bits
        group = FIXED_GROUPS.get(kind, 0 if bits == 8 else 128) if self.group is None else self.group
        symmetric = (kind != "int" or bits == 8) if self.symmetric is None else self.symmetric
        activations = self.activations
        return Scheme(kind=kind, bits=bits, group=group, symmetric=symmetric, activations=activations, static=is_static)


@dataclass(frozen=True)
class Recipe:
    """Steps in order."""

    steps: tuple[Step, ...]

    def require_named(self, layers: Collection[str]) -> None:
        """Refuse a pattern that names none of `layers`: a layer that was misspelt would be treated like the others."""
        for pattern in (pattern for step in self.steps for pattern in step.layers):
            if not any(_means(pattern, layer) for layer in layers):
                raise UserError(
                    f"layers {pattern!r} names none of the model's matrices, such as {next(iter(layers))}; correct or "
                    f"drop it (embedding, norms and routers stay as they are; the output projection is {HEAD})"
                )

    def require_effect(self, layers: Collection[str]) -> None:
        """Refuse a step without effect, such as one for some layers before one for all."""
        for number, step in enumerate(self.steps):
            if self._is_overruled(number, layers):
                raise UserError(
                    f"step {number + 1} ({_step_text(step)}) decides nothing, as the last step that names a layer "
                    "decides, and later ones name all of its; put it after them, or drop it"
                )

    def _is_overruled(self, number: int, layers: Collection[str]) -> bool:
        """Whether later steps decide about every layer that step `number` names."""
        step, later = self.steps[number], self.steps[number + 1 :]
        families = [family for family in (CODING, PRUNING) if step.method == "keep" or step.method in family]
        others = {each.method for each in self.steps}
        return step.method != "rotate" and all(
            any(each.method in (*family, "keep") and each.names(layer) for each in later)
            for family in families
            if others & set(family)
            for layer in layers
            if step.names(layer)
        )

    def coding(self, layer: str) -> Step | None:
        """The step that codes a layer, if any does."""
        return self._last(layer, CODING)

    def pruning(self, layer: str) -> Step | None:
        """The step that prunes a layer, if any does."""
        return self._last(layer, PRUNING)

    def _last(self, layer: str, methods: tuple[str, ...]) -> Step | None:
        chosen = [step for step in self.steps if step.method in (*methods, "keep") and step.names(layer)]
        return None if not chosen or chosen[-1].method == "keep" else chosen[-1]

    @property
    def rotation(self) -> Step | None:
        """The step that rotates the model."""
        return next((step for step in self.steps if step.method == "rotate"), None)

    @property
    def learns(self) -> bool:
        """Whether any step learns its rounding, for the outputs that the original model has."""
        return any(step.method == "round" for step in self.steps)

    @property
    def is_calibrated(self) -> bool:
        """Whether any step needs data."""
        return any(step.method in CALIBRATED or step.static is not None for step in self.steps)

    def describe(self) -> str:
        """One line, with steps in the order in which they are done."""
        return ", then ".join(_step_text(step) for step in sorted(self.steps, key=_order_of))

    def fingerprint(self) -> str:
        """Text that is equal for equal recipes."""
        return json.dumps([asdict(step) for step in self.steps], sort_keys=True)


def _means(pattern: str, layer: str) -> bool:
    """Whether a pattern names the layer: the output projection by its own name alone, as `*` means the layers."""
    return pattern == layer if layer == HEAD else fnmatchcase(layer, pattern)


def _unknown(method: str, known: tuple[str, ...]) -> str:
    """Why `method` is no step where those are `known`."""
    if method in ALONE:
        return f"method {method} is no step; use --method {method} alone, and compress what it makes"
    if near := difflib.get_close_matches(str(method).lower(), (*known, *ALONE), n=1):
        return f"method {method!r} is unknown; did you mean {near[0]}?"
    return f"method {method!r} is unknown; use one of {', '.join(known)}, or alone {', '.join(ALONE)}"


def _order_of(step: Step) -> int:
    """The whole model is rotated first, and matrices are pruned before they are coded."""
    return 0 if step.method == "rotate" else 1 if step.method in PRUNING else 2


def _step_text(step: Step) -> str:
    scheme = step.scheme()
    if step.method in PRUNING:
        coded = f"{step.method} {step.pattern or f'{step.sparsity:.0%}'}"
    elif scheme is None:
        coded = step.method
    else:
        coded = scheme.describe() if step.method in KINDS else f"{step.method} {scheme.describe()}"
    return coded if step.layers == ("*",) else f"{coded} for {', '.join(step.layers)}"


def recipe_of(method: str, **options: Any) -> Recipe:
    """The recipe of `--method`, such as gptq or wanda+gptq; options other than pruning's go to the last step, and
    `head` is the bits of the output projection."""
    names = method.split("+")
    given = {name: value for name, value in options.items() if value is not None}
    head = given.pop("head", None)
    sparse = {name: given.pop(name) for name in PRUNING_OPTIONS if name in given}
    if sparse and not set(names) & set(PRUNING):
        raise UserError(f"--{' and --'.join(sparse)} would prune; put one of {', '.join(PRUNING)} into --method")
    if names[-1] in PRUNING and given.keys() & {"bits", "group", "symmetric", "activations", "static"}:
        raise UserError(f"--method {method} ends in pruning, which has no bits; add a coding, as {method}+gptq")
    for name in names:
        if name not in OF_OPTION:
            raise UserError(_unknown(name, OF_OPTION))
    last = len(names) - 1
    steps = [
        _step({"method": name, **(sparse if name in PRUNING else {}), **(given if i == last else {})}, "--method")
        for i, name in enumerate(names)
    ]
    if head is not None:
        steps.append(_head_step(head, steps[-1], given))
    return _checked(steps, "--method")


def _head_step(bits: int, layers: Step, given: dict[str, Any]) -> Step:
    """The step of `--head`, by GPTQ where the layers' method reads text; in as many bits as the layers, with their
    group and symmetry too."""
    scheme = layers.scheme()
    is_alike = scheme is not None and (scheme.kind, scheme.bits) == ("int", bits)
    shared = {name: given[name] for name in ("group", "symmetric") if is_alike and name in given}
    method = "gptq" if layers.method in CALIBRATED else "rtn"
    return _step({"method": method, "bits": bits, "layers": HEAD, **shared}, "--head")


def read_recipe(path: Path) -> Recipe:
    """The recipe in a YAML file."""
    content = read_yaml_file(path, "a recipe", remedy="give a YAML file of steps, as in docs/compressing.md")
    steps = content.get("steps") if isinstance(content, dict) else content
    if not isinstance(steps, list) or not steps:
        raise UserError(f"{path} is not a list of steps; see docs/compressing.md")
    return _checked([_step(step, str(path)) for step in steps], str(path))


def _step(given: Any, source: str) -> Step:
    known = {field.name: field for field in fields(Step)}
    if not isinstance(given, dict) or "method" not in given:
        raise UserError(f"a step in {source} is {given!r}; it must be an object with a method")
    values = dict(given)
    for name in values:
        if name not in known:
            raise UserError(f"a step in {source} has {name!r}; it may have {', '.join(known)}")
    if "layers" in values:
        values["layers"] = _patterns(values["layers"], source)
    for name, value in values.items():
        values[name] = _checked_value(name, value, known[name], source)
    step = Step(**values)
    for name in values:
        if name not in ("method", "layers", *USED[step.method]):
            raise UserError(f"{name} in {source} is {values[name]}, but {step.method} does not use it; leave it out")
    step.scheme()
    return step


def _patterns(named: Any, source: str) -> tuple[str, ...]:
    """One pattern of layers, or several."""
    patterns = (named,) if isinstance(named, str) else named
    if not isinstance(patterns, list | tuple) or not patterns or not all(isinstance(each, str) for each in patterns):
        raise UserError(f"layers in {source} is {named!r}; it must be a pattern or a list of them")
    return tuple(patterns)


def _checked_value(name: str, value: Any, field: Any, source: str) -> Any:
    """`value`, refused where its type does not suit the option: a YAML file can hold anything."""
    told = ""
    if name in ("bits", "group", "steps", "seed"):
        ok, told = isinstance(value, int) and not isinstance(value, bool), "a whole number"
    elif name in ("damping", "alpha", "outlier_share", "sparsity"):
        value = _decimal(value)
        ok, told = isinstance(value, int | float) and not isinstance(value, bool), "a number such as 0.01"
    elif name == "symmetric":
        ok, told = isinstance(value, bool), "true or false"
    elif name == "pattern":
        ok, told = isinstance(value, str), "text such as '2:4'"
    elif name in ("method", "layers"):
        ok = True
    else:
        choices = [choice for part in get_args(field.type) for choice in (get_args(part) or (part,))]
        ok = value in choices
        told = ", ".join(str(choice) for choice in choices if choice is not type(None))
    if not ok or (value is None and field.default is MISSING):
        raise UserError(f"{name} in {source} is {value!r}; it must be {told}")
    return value


def _decimal(value: Any) -> Any:
    """The number that a text such as 1e-3 means, which YAML takes for text as it has no point."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _checked(steps: list[Step], source: str) -> Recipe:
    rotations = [i for i, step in enumerate(steps) if step.method == "rotate"]
    if rotations and (rotations != [0] or steps[0].layers != ("*",)):
        raise UserError(f"the rotation in {source} must be the first step, once, and of the whole model")
    if all(step.method in ("rotate", "keep") for step in steps):
        raise UserError(f"no step in {source} quantizes or prunes anything; add one such as gptq")
    return Recipe(tuple(steps))
