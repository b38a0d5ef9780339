"""Cut: which layers each stage of a pipeline has, so that the slowest stage is as fast as it can be.

A pipeline goes at the pace of its slowest stage, and the output projection of a large vocabulary costs as much as
several layers: the last stage gets fewer of them. Costs are operations of forward and backward per token (6 per weight
that multiplies it; 14 × query width per key it attends to: 4 forward, 10 backward), with memory traffic of the
embedding counted at OPERATIONS_PER_BYTE; they do not depend on the machine, so a run, its plan and its memory formulas
cut alike. The cut is exact: the least largest stage over all cuts, and of those the most even one.
Limits: every stage has at least one layer; interleaved pieces are cut as that many stages.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from tightfit.errors import UserError
from tightfit.models.spec import ModelSpec

PRODUCT_OPERATIONS = 6
ATTENTION_OPERATIONS = 14
OPERATIONS_PER_BYTE = 200
"""Of the matrix units while a byte of memory is read, on an H100 at the rates it reaches."""
EMBEDDING_BYTES = 12
"""Per number of the hidden size: looked up and written forward; its gradient read, and added to float32 backward."""

TOLERANCE = 1e-12
"""Relative: stages whose costs differ by less cost the same."""

Span = tuple[int, int]
"""Layers [first, last)."""


@lru_cache(maxsize=1024)
def cut(spec: ModelSpec, length: int, stages: int) -> tuple[Span, ...]:
    """The layers of each of `stages` stages, for rows of `length` tokens."""
    if stages > spec.layers:
        raise UserError(
            f"the pipeline has {stages} stages (layout.pipeline × stages_per_rank), but the model has {spec.layers} "
            "layers; give at most one stage per layer"
        )
    layers = [layer_operations(spec, layer, length) for layer in range(spec.layers)]
    return balanced(layers, embedding_operations(spec), head_operations(spec), stages)


def layer_operations(spec: ModelSpec, layer: int, length: int) -> float:
    """Of one token forward and backward."""
    products = PRODUCT_OPERATIONS * spec.layer_params(layer, active=True)
    return products + ATTENTION_OPERATIONS * spec.query_size * spec.mean_keys_seen(layer, length)


def head_operations(spec: ModelSpec) -> float:
    """The output projection, of one token."""
    return PRODUCT_OPERATIONS * spec.vocabulary_params


def embedding_operations(spec: ModelSpec) -> float:
    """The embedding, of one token."""
    return OPERATIONS_PER_BYTE * EMBEDDING_BYTES * spec.hidden_size


def balanced(layers: Sequence[float], before: float, after: float, stages: int) -> tuple[Span, ...]:
    """Consecutive spans of `layers`; `before` counts with the first one, `after` with the last."""
    costs = _StageCosts(sums=[0.0, *accumulate(layers)], before=before, after=after, stages=stages)
    tables = _most_even_cuts(costs, most=_least_largest(costs) * (1 + TOLERANCE))
    spans: list[Span] = []
    last = len(layers)
    for table in reversed(tables[1:]):
        spans.insert(0, (-table[last][1], last))
        last = spans[0][0]
    return tuple(spans)


@dataclass(frozen=True)
class _StageCosts:
    """What a span of layers costs as a given stage; `sums[n]` is what the first n layers do."""

    sums: list[float]
    before: float
    after: float
    stages: int

    def of(self, stage: int, first: int, last: int) -> float:
        ends = (self.before if stage == 0 else 0.0) + (self.after if stage == self.stages - 1 else 0.0)
        return self.sums[last] - self.sums[first] + ends

    def lasts(self, stage: int, first: int) -> range:
        """Where a stage that begins at `first` may end, leaving a layer for each one after it."""
        layers, left = len(self.sums) - 1, self.stages - 1 - stage
        return range(first + 1 if left else layers, layers - left + 1)

    def within(self, stage: int, first: int, most: float) -> Iterator[tuple[int, float]]:
        """Where it may end and what it then costs, which is at most `most`."""
        for last in self.lasts(stage, first):
            cost = self.of(stage, first, last)
            if cost > most:
                return
            yield last, cost


def _least_largest(costs: _StageCosts) -> float:
    """The cost of the largest stage in the cut where that is least, found by halving."""
    low, high = 0.0, costs.before + costs.sums[-1] + costs.after
    while high - low > TOLERANCE / 2 * high:
        middle = (low + high) / 2
        largest = _largest_of_full_stages(costs, middle)
        low, high = (middle, high) if largest is None else (low, largest)
    return high


def _largest_of_full_stages(costs: _StageCosts, most: float) -> float | None:
    """The largest stage where each takes all layers that it can at a cost of `most`; None where some are left."""
    first, largest = 0, 0.0
    for stage in range(costs.stages):
        ends = list(costs.within(stage, first, most))
        if not ends:
            return None
        first = ends[-1][0]
        largest = max(largest, ends[-1][1])
    return largest


def _most_even_cuts(costs: _StageCosts, most: float) -> list[dict[int, tuple[float, int]]]:
    """After each stage of at most `most`: by the layers it may end at, the least sum of squares and -first of that
    stage. Of equals, that is the cut whose later stages are shorter."""
    tables: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for stage in range(costs.stages):
        reached: dict[int, tuple[float, int]] = {}
        for first, (squares, _) in tables[-1].items():
            for last, cost in costs.within(stage, first, most):
                found = (squares + cost**2, -first)
                reached[last] = min(reached.get(last, found), found)
        tables.append(reached)
    return tables
