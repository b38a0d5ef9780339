"""Budget: which layers keep how much in so many bytes, so that the least time goes into computing again.

A layer keeps one of four levels (keeping.py), each with bytes (layer.py) and seconds of recomputation. Layers of a kind
(routed or not, windowed or not) are alike, so a choice is a number of layers per kind and level: a multiple-choice
knapsack, small enough to be solved exactly. Where there are several kinds, all choices of each are listed without those
that another beats in both bytes and seconds; kinds are added up likewise, and the quickest sum in the budget is taken.

Seconds are those of one card, an H200 at measured shares of its rates, whatever card it is for: only their ratios
matter, and a plan, its simulation and the run must choose alike. Bytes are what layers keep from forward to backward,
inputs included unless those are offloaded (all but one).
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from tightfit.errors import UserError
from tightfit.hardware.catalog import CATALOG
from tightfit.hardware.efficiency import MEASURED, by_head_size
from tightfit.memory.formulas.layer import LEVELS, Level, is_tiled, layer_cost, level_kept
from tightfit.memory.formulas.share import Share
from tightfit.models.spec import ModelSpec

WIDE = 4


class Option(NamedTuple):
    """What keeping at one level costs a layer."""

    bytes: int
    seconds: float


class Choice(NamedTuple):
    """How many layers of each kind keep at each level, and what that costs together."""

    bytes: int
    seconds: float
    counts: tuple[tuple[int, ...], ...]


def cheapest_levels(
    spec: ModelSpec, share: Share, layers: Sequence[int], budget: int, offload: bool
) -> tuple[Level, ...]:
    """The level of each of `layers`, which keep no more than `budget` bytes together."""
    kinds: dict[tuple[bool, bool], list[int]] = {}
    for layer in layers:
        kinds.setdefault((spec.is_routed(layer), spec.window_of(layer) is not None), []).append(layer)
    options = [level_options(spec, those[0], share, offload) for those in kinds.values()]
    stays = layer_cost(spec, layers[0], share).entry if offload else 0
    best = cheapest(options, [len(those) for those in kinds.values()], budget - stays)
    if best is None:
        inputs = zip(kinds.values(), options, strict=True)
        least = stays + sum(len(those) * each[0].bytes for those, each in inputs)
        raise UserError(
            f"levers.checkpoint_budget_bytes is {budget}, but the inputs of {len(layers)} layers alone take {least}; "
            "give at least that much, or set levers.offload_checkpoints"
        )
    found: dict[int, Level] = {}
    for those, counts in zip(kinds.values(), best.counts, strict=True):
        spread = [level for level, count in zip(LEVELS, counts, strict=True) for _ in range(count)]
        found |= dict(zip(those, spread, strict=True))
    return tuple(found[layer] for layer in layers)


def cheapest(options: Sequence[Sequence[Option]], counts: Sequence[int], budget: int) -> Choice | None:
    """The quickest choice within `budget` for `counts[k]` layers with `options[k]` each; None where none fits."""
    if len(options) == 1:
        return _quickest(options[0], counts[0], budget)
    sums = [Choice(0, 0.0, ())]
    for each, count in zip(options, counts, strict=True):
        of_kind = _unbeaten(_choices(each, count, budget))
        sums = _unbeaten(_sum(a, b) for a in sums for b in of_kind if a.bytes + b.bytes <= budget)
    return min(sums, key=lambda choice: choice.seconds, default=None)


def _sum(a: Choice, b: Choice) -> Choice:
    return Choice(a.bytes + b.bytes, a.seconds + b.seconds, a.counts + b.counts)


def _choices(options: Sequence[Option], count: int, budget: int) -> Iterator[Choice]:
    """Every way to deal `count` layers to `options` within `budget`."""
    for dealt in _dealt(count, len(options)):
        choice = _choice(options, dealt)
        if choice.bytes <= budget:
            yield choice


def _choice(options: Sequence[Option], dealt: tuple[int, ...]) -> Choice:
    pairs = list(zip(dealt, options, strict=True))
    return Choice(sum(n * o.bytes for n, o in pairs), sum(n * o.seconds for n, o in pairs), (dealt,))


def _quickest(options: Sequence[Option], count: int, budget: int) -> Choice | None:
    """The quickest way to deal `count` layers of one kind within `budget`.

    Of two options, the quicker one is taken as often as it fits, whatever is taken of the others: so only those are
    gone through.
    """
    slow, quick = (0, 1) if options[1].seconds <= options[0].seconds else (1, 0)
    more = options[quick].bytes - options[slow].bytes
    best: Choice | None = None
    for left, *others in _dealt(count, len(options) - 1):
        held = sum(n * option.bytes for n, option in zip(others, options[2:], strict=True))
        room = budget - held - left * options[slow].bytes
        taken = left if more <= 0 or room >= left * more else max(0, room // more)
        two = (left - taken, taken) if quick else (taken, left - taken)
        choice = _choice(options, (*two, *others))
        if choice.bytes <= budget and (best is None or choice.seconds < best.seconds):
            best = choice
    return best


@lru_cache(maxsize=64)
def _dealt(count: int, parts: int) -> tuple[tuple[int, ...], ...]:
    if parts == 1:
        return ((count,),)
    return tuple((n, *rest) for n in range(count + 1) for rest in _dealt(count - n, parts - 1))


def _unbeaten(choices: Iterator[Choice]) -> list[Choice]:
    """Without those that another needs neither more bytes nor more seconds than."""
    found: list[Choice] = []
    for choice in sorted(choices, key=lambda each: (each.bytes, each.seconds)):
        if not found or choice.seconds < found[-1].seconds:
            found.append(choice)
    return found


@lru_cache(maxsize=4096)
def level_options(spec: ModelSpec, layer: int, share: Share, offload: bool = False) -> tuple[Option, ...]:
    """Bytes on the GPU and seconds again of one layer at each level; what tiles compute again is not kept either."""
    entry = layer_cost(spec, layer, share).entry
    found: list[Option] = []
    for level, seconds in zip(LEVELS, _seconds(spec, layer, share), strict=True):
        size = sum(kept.bytes for kept in level_kept(spec, layer, share, level))
        if level == "matmuls" and share.tiles > 1:
            size, seconds = found[-1]  # the same as the level before, which is then taken
            found.append(Option(size, seconds))
            continue
        found.append(Option(size - (entry if offload and level != "everything" else 0), seconds))
    return tuple(found)


def _seconds(spec: ModelSpec, layer: int, share: Share) -> tuple[float, float, float, float]:
    """Time of one layer computed again at each level."""
    flop_s, attention_flop_s, bytes_s = _rates(spec.head_dim, share.element_bytes)
    attention = _attention_flops(spec, layer, share) / attention_flop_s
    products = 2 * share.tokens * _weights_again(spec, layer, share) / share.tensor / flop_s
    passes = share.tokens * share.element_bytes * _width_again(spec, layer) / share.tensor / bytes_s
    return attention + products + passes, products + passes, passes, 0.0


@lru_cache(maxsize=64)
def _rates(head_dim: int, element_bytes: int) -> tuple[float, float, float]:
    """Operations a second of products and of attention, and bytes a second, of an H200."""
    card = next(row for row in CATALOG if row.family == "H200")
    peak = 1e12 * (card.rates.of("fp32" if element_bytes == WIDE else "bf16") or card.rates.fp32)
    attention = by_head_size(MEASURED.attention_forward, head_dim)
    return peak * MEASURED.matmul, peak * attention, card.bandwidth_gb_s * 1e9 * MEASURED.bandwidth


def _attention_flops(spec: ModelSpec, layer: int, share: Share) -> float:
    """4 operations per channel and pair of a query with a key it sees."""
    length, window = share.length * share.context, spec.window_of(layer)
    seen = min(window or length, length)
    return 4 * share.rows * (seen * length - seen**2 / 2) * spec.query_size / share.tensor / share.context


def _weights_again(spec: ModelSpec, layer: int, share: Share) -> int:
    """Weights that a token is multiplied by again: all but those of the last product, whose result nobody needs.

    What tiles compute again at every level does not count, which is all that comes after attention.
    """
    if is_tiled(spec, layer, share):
        return spec.hidden_size * (spec.query_size + 2 * spec.kv_size)
    attention = spec.hidden_size * (2 * spec.query_size + 2 * spec.kv_size)
    return attention + _mlp_matrices(spec, layer) * spec.hidden_size * _mlp_width(spec, layer)


def _mlp_matrices(spec: ModelSpec, layer: int) -> int:
    needs_last = spec.is_routed(layer) or spec.sandwich_norms
    return (2 if spec.gated else 1) + needs_last


def _mlp_width(spec: ModelSpec, layer: int) -> int:
    if not spec.is_routed(layer):
        return spec.mlp_size
    assert spec.experts is not None
    return spec.experts.per_token * spec.experts.mlp_size + spec.experts.shared_size


def _width_again(spec: ModelSpec, layer: int) -> int:
    """Elements a token that norms, rope and (where its product is kept) the activation read and write again."""
    norms = spec.hidden_size * (12 if spec.sandwich_norms else 6)
    rope = 2 * (spec.query_size + spec.kv_size) * (2 if spec.qk_norm else 1)
    activation = 0 if _mlp_matrices(spec, layer) == 2 and spec.gated and not spec.mlp_bias else 3
    return norms + rope + activation * _mlp_width(spec, layer)
