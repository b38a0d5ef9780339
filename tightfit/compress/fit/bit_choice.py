"""Bits of every set of linear layers within a budget of bytes, for the least expected loss.

A unit is the linear layers that read the same input (query, key and value; output projection; gate and up; down). They
share a width, so that programs can fuse them. Each unit has options: bits, bytes and expected added loss. All units
begin at 16 bits; then the step down with the least added loss per byte saved is taken, along the lower convex hull of
every unit's options, until the model fits the budget; leftover bytes are spent on the best steps up that still fit.
A single width for all units is taken where it fits and is expected to lose less. Nothing here imports torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tightfit.compress.recipe import Recipe, Step
from tightfit.errors import UserError
from tightfit.models.quantized.matrices import matrices
from tightfit.models.quantized.scheme import Scheme
from tightfit.models.spec import ModelSpec

PLAIN_BITS = 16
WIDTHS = (3, 4, 5, 6, 8)
LEAST_WIDTHS = (2, *WIDTHS)
"""Two bits only where nothing else fits: in a mix they lose more than estimated (docs/LOG.md)."""
GROUPS = (128, 64, 32, 16, 8)
FREE_GROUPS = ("int", "binary")
"""Kinds of numbers whose groups may have any size."""


@dataclass(frozen=True)
class Option:
    """One width of one unit: its bytes in memory, and the loss it adds (nats a token)."""

    bits: int
    bytes: int
    loss: float


@dataclass(frozen=True)
class BitChoice:
    """Bits by unit, bytes of the whole model in memory, and its expected added loss (nats a token)."""

    bits: Mapping[str, int]
    bytes: int
    loss: float


def units(spec: ModelSpec) -> dict[str, tuple[str, ...]]:
    """The matrices of every unit, by the unit's name such as layers.0.qkv."""
    found: dict[str, list[str]] = {}
    for name in matrices(spec):
        layer, _, own = name.partition(".attention.")
        if own:
            unit = f"{layer}.{'o' if own == 'o' else 'qkv'}"
        else:
            stem, _, own = name.rpartition(".")
            unit = f"{stem}.{'down' if own == 'down' else 'up'}"
        found.setdefault(unit, []).append(name)
    return {unit: tuple(names) for unit, names in found.items()}


def group_of(spec: ModelSpec) -> int:
    """The largest of `GROUPS` that divides the inputs of every matrix; 0 where none does."""
    inputs = {shape[2] for shape in matrices(spec).values()}
    fits = [group for group in GROUPS if all(size % group == 0 for size in inputs)]
    return fits[0] if fits else 0


def settled_for(recipe: Recipe, spec: ModelSpec) -> Recipe:
    """`recipe` with group sizes and symmetry filled in for this model where its steps leave them open.

    Groups are `group_of` the model. Models with experts get symmetric codes: transformers (5.23) drops zero points
    when it stacks experts on loading.
    """
    return Recipe(tuple(_settled(step, group_of(spec), symmetric=spec.experts is not None) for step in recipe.steps))


def _settled(step: Step, group: int, *, symmetric: bool) -> Step:
    scheme = step.scheme()
    if scheme is None or scheme.outliers or scheme.kind not in FREE_GROUPS:
        return step
    if step.group is None and scheme.group > 0:
        step = replace(step, group=group)
    return replace(step, symmetric=True) if symmetric and step.symmetric is None else step


def scheme_of(bits: int, group: int) -> Scheme:
    """The scheme of a width: a recipe step's default, in groups of `group`."""
    return Scheme(bits=bits, group=group, symmetric=bits == 8)


def unit_bytes(spec: ModelSpec, names: Sequence[str], bits: int, group: int) -> int:
    """Bytes of the matrices `names` in memory at this width."""
    shapes = matrices(spec)
    if bits == PLAIN_BITS:
        return sum(2 * count * outputs * inputs for count, outputs, inputs in (shapes[name] for name in names))
    scheme = scheme_of(bits, group)
    return sum(count * scheme.held_bytes(outputs, inputs) for count, outputs, inputs in (shapes[n] for n in names))


def options_of(spec: ModelSpec, losses: Mapping[str, Mapping[int, float]], group: int) -> dict[str, list[Option]]:
    """Every unit's options from the losses of its widths, raised where needed so that fewer bits never lose less."""
    by_unit: dict[str, list[Option]] = {}
    for unit, names in units(spec).items():
        options = [Option(PLAIN_BITS, unit_bytes(spec, names, PLAIN_BITS, group), 0.0)]
        for bits in sorted(losses[unit], reverse=True):
            loss = max(losses[unit][bits], options[-1].loss)
            options.append(Option(bits, unit_bytes(spec, names, bits, group), loss))
        by_unit[unit] = options
    return by_unit


def plain_bytes(spec: ModelSpec) -> int:
    """Bytes of what is never quantized, two a number: embedding, norms, biases, output projection, routers."""
    quantized = sum(count * outputs * inputs for count, outputs, inputs in matrices(spec).values())
    return 2 * (spec.params() - quantized)


def uniform_bytes(spec: ModelSpec, bits: int, group: int) -> int:
    """Bytes of the whole model with every unit at `bits`."""
    return plain_bytes(spec) + sum(unit_bytes(spec, names, bits, group) for names in units(spec).values())


def require_room(least_bytes: int, budget_bytes: int) -> None:
    """Refuse a budget below `least_bytes`, which the weights take at the fewest bits."""
    if least_bytes > budget_bytes:
        raise UserError(
            f"even at {min(LEAST_WIDTHS)} bits the weights take {least_bytes / 2**30:.2f} GiB, and there is room for "
            f"{max(budget_bytes, 0) / 2**30:.2f}; take a card with more memory or a shorter --context"
        )


def choose_bits(spec: ModelSpec, options: Mapping[str, Sequence[Option]], budget_bytes: int) -> BitChoice:
    """The widths whose model takes at most `budget_bytes`, for the least expected loss."""
    fixed = plain_bytes(spec)
    least = fixed + sum(min(option.bytes for option in each) for each in options.values())
    require_room(least, budget_bytes)
    found = [_mixed(options, budget_bytes - fixed), *_uniform(options)]
    fitting = [choice for choice in found if _bytes(choice) <= budget_bytes - fixed]
    best = min(fitting, key=lambda choice: (_loss(choice), _bytes(choice)))
    return BitChoice({unit: option.bits for unit, option in best.items()}, fixed + _bytes(best), _loss(best))


def _bytes(choice: Mapping[str, Option]) -> int:
    return sum(option.bytes for option in choice.values())


def _loss(choice: Mapping[str, Option]) -> float:
    return sum(option.loss for option in choice.values())


def _uniform(options: Mapping[str, Sequence[Option]]) -> list[dict[str, Option]]:
    """For every width, the choice that gives it to all units."""
    widths = [option.bits for option in next(iter(options.values()))]
    return [
        {unit: next(option for option in each if option.bits == bits) for unit, each in options.items()}
        for bits in widths
    ]


def _mixed(options: Mapping[str, Sequence[Option]], budget_bytes: int) -> dict[str, Option]:
    """Steps down along the hulls until the budget holds, the least loss per byte first; then `_filled`."""
    hulls = {unit: _hull(each) for unit, each in options.items()}
    position = dict.fromkeys(hulls, 0)
    total_bytes = sum(hull[0].bytes for hull in hulls.values())

    def price(unit: str) -> float:
        here, below = hulls[unit][position[unit]], hulls[unit][position[unit] + 1]
        return (below.loss - here.loss) / (here.bytes - below.bytes)

    while total_bytes > budget_bytes:
        unit = min((unit for unit in hulls if position[unit] + 1 < len(hulls[unit])), key=price)
        total_bytes += hulls[unit][position[unit] + 1].bytes - hulls[unit][position[unit]].bytes
        position[unit] += 1
    return _filled({unit: hull[position[unit]] for unit, hull in hulls.items()}, options, budget_bytes - total_bytes)


def _hull(options: Sequence[Option]) -> list[Option]:
    """From the largest down, the options on the lower convex hull of loss over bytes."""
    hull: list[Option] = []
    for option in sorted(options, key=lambda each: (-each.bytes, each.loss)):
        if hull and option.bytes == hull[-1].bytes:
            continue
        while len(hull) > 1 and _slope(hull[-2], option) <= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(option)
    return hull


def _slope(larger: Option, smaller: Option) -> float:
    return (smaller.loss - larger.loss) / (larger.bytes - smaller.bytes)


def _filled(choice: dict[str, Option], options: Mapping[str, Sequence[Option]], left: int) -> dict[str, Option]:
    """`choice` after the steps up that fit into `left` bytes, the most loss saved per byte first."""
    while True:
        steps = [
            (unit, option)
            for unit, each in options.items()
            for option in each
            if 0 < option.bytes - choice[unit].bytes <= left and option.loss < choice[unit].loss
        ]
        if not steps:
            return choice
        unit, option = max(
            steps, key=lambda step: (choice[step[0]].loss - step[1].loss) / (step[1].bytes - choice[step[0]].bytes)
        )
        left -= option.bytes - choice[unit].bytes
        choice[unit] = option


def recipe_for(spec: ModelSpec, choice: BitChoice, group: int, method: str) -> Recipe:
    """The recipe that codes every unit with its bits, by `method` (rtn or gptq)."""
    named = units(spec)
    steps = []
    for bits in sorted(set(choice.bits.values())):
        layers = tuple(name for unit, chosen in choice.bits.items() if chosen == bits for name in named[unit])
        scheme = None if bits == PLAIN_BITS else scheme_of(bits, group)
        if scheme is None:
            steps.append(Step(method="keep", layers=layers))
        else:
            steps.append(
                Step(
                    method="gptq" if method == "gptq" else "rtn",
                    layers=layers,
                    bits=bits,
                    group=group,
                    symmetric=scheme.symmetric,
                )
            )
    return Recipe(tuple(steps))
