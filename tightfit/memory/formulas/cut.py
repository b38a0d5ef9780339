"""Cut: which layers each stage of a pipeline has, so that the slowest stage is as fast as it can be.

A pipeline goes at the pace of its slowest stage, and the output projection of a large vocabulary costs as much as
several layers: the last stage gets fewer of them. Costs are FLOPs of forward and backward per token (6 per weight that
multiplies it; 14 × query width per key it attends to: 4 forward, 10 backward), with memory traffic of the embedding
counted at OPERATIONS_PER_BYTE; they do not depend on the machine, so a run, its plan and its memory formulas cut alike.
The cut is exact: the slowest stage is as cheap as in any cut, and of all such cuts it is the most even one.
Limits: every stage has at least one layer; the stages of an interleaved rank are cut like any others.
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
"""FLOPs of the matrix units in the time of reading one byte of memory, on an H100 at the rates it reaches."""
EMBEDDING_BYTES = 12
"""Bytes moved per hidden channel: forward looks a number up and writes it; backward reads its gradient and adds it to
a float32 sum."""
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
    embedding_operations = OPERATIONS_PER_BYTE * EMBEDDING_BYTES * spec.hidden_size
    return balanced(layers, embedding_operations, head_operations(spec), stages)


def layer_operations(spec: ModelSpec, layer: int, length: int) -> float:
    """FLOPs of one token in a layer, forward and backward."""
    products = PRODUCT_OPERATIONS * spec.layer_params(layer, active=True)
    return products + ATTENTION_OPERATIONS * spec.query_size * spec.mean_keys_seen(layer, length)


def head_operations(spec: ModelSpec) -> float:
    """FLOPs of one token in the output projection."""
    return PRODUCT_OPERATIONS * spec.vocabulary_params


def balanced(layers: Sequence[float], before: float, after: float, stages: int) -> tuple[Span, ...]:
    """Spans of consecutive `layers`, whose costs are given; `before` is added to the first span's, `after` to the
    last's."""
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
    """Costs of spans of layers as a given stage; `sums[n]` is the cost of the first n layers."""

    sums: list[float]
    before: float
    after: float
    stages: int

    def within(self, stage: int, first: int, most: float) -> Iterator[tuple[int, float]]:
        """Possible ends of a stage that begins at `first`, with their costs, while these are at most `most` and a layer
        is left for each stage after it."""
        layers, left = len(self.sums) - 1, self.stages - 1 - stage
        ends = (self.before if stage == 0 else 0.0) + (0.0 if left else self.after)
        for last in range(first + 1 if left else layers, layers - left + 1):
            cost = self.sums[last] - self.sums[first] + ends
            if cost > most:
                return
            yield last, cost


def _least_largest(costs: _StageCosts) -> float:
    """The least possible cost of the slowest stage over all cuts, by bisection."""
    low, high = 0.0, costs.before + costs.sums[-1] + costs.after
    while high - low > TOLERANCE / 2 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if _fits(costs, middle) else (middle, high)
    return high


def _fits(costs: _StageCosts, most: float) -> bool:
    """Whether no layers are left over if each stage takes as many as it can at a cost of at most `most`."""
    last = 0
    for stage in range(costs.stages):
        ends = [end for end, _ in costs.within(stage, last, most)]
        if not ends:
            return False
        last = ends[-1]
    return True


def _most_even_cuts(costs: _StageCosts, most: float) -> list[dict[int, tuple[float, int]]]:
    """Dynamic program over stages that cost at most `most`: after each stage, a table from its end to the least sum of
    squared costs and the negated begin of that stage, so that of equals the later stages are shorter."""
    tables: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for stage in range(costs.stages):
        reached: dict[int, tuple[float, int]] = {}
        for first, (squares, _) in tables[-1].items():
            for last, cost in costs.within(stage, first, most):
                found = (squares + cost**2, -first)
                reached[last] = min(reached.get(last, found), found)
        tables.append(reached)
    return tables
