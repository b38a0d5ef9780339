"""Cut: which layers each stage of a pipeline has, so that the slowest stage is as fast as it can be.

A pipeline goes at the pace of its slowest stage, and the output projection of a large vocabulary costs as much as
several layers: the last stage gets fewer of them. Costs are operations of forward and backward per token, as
plan/work.py counts them (6 per weight that multiplies it, 14 × query width per position it sees), with memory traffic
of the embedding counted at OPERATIONS_PER_BYTE; they do not depend on the machine, so a run, its plan and its memory
formulas cut alike. The cut is exact: the least largest stage over all cuts, and of those the most even one.
Limits: every stage has at least one layer; interleaved pieces are cut as that many stages.
"""

from collections.abc import Sequence
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
    window = min(spec.window_of(layer) or length, length)
    seen = window - window**2 / (2 * length)
    products = PRODUCT_OPERATIONS * spec.layer_params(layer, active=True)
    return products + ATTENTION_OPERATIONS * spec.query_size * seen


def head_operations(spec: ModelSpec) -> float:
    """The output projection, of one token."""
    return PRODUCT_OPERATIONS * spec.vocab_size * spec.hidden_size


def embedding_operations(spec: ModelSpec) -> float:
    """The embedding, of one token."""
    return OPERATIONS_PER_BYTE * EMBEDDING_BYTES * spec.hidden_size


def balanced(layers: Sequence[float], before: float, after: float, stages: int) -> tuple[Span, ...]:
    """Consecutive spans of `layers`; `before` counts with the first one, `after` with the last."""
    costs = _Costs([0.0, *accumulate(layers)], before, after, stages)
    least = _least_largest(costs)
    # best[n] is the least sum of squares of the stages so far over the first n layers, and where the last began
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for stage in range(stages):
        best.append(_extended(costs, best[-1], stage, least))
    return _spans(best)


class _Costs:
    """What a span of layers costs as a given stage."""

    def __init__(self, sums: list[float], before: float, after: float, stages: int) -> None:
        self.sums, self.before, self.after, self.stages = sums, before, after, stages
        self.layers = len(sums) - 1

    def of(self, stage: int, first: int, last: int) -> float:
        ends = (self.before if stage == 0 else 0.0) + (self.after if stage == self.stages - 1 else 0.0)
        return self.sums[last] - self.sums[first] + ends

    def lasts(self, stage: int, first: int) -> range:
        """Where a stage that begins at `first` may end, leaving a layer for each one after it."""
        left = self.stages - 1 - stage
        return range(self.layers if not left else first + 1, self.layers - left + 1)


def _least_largest(costs: _Costs) -> float:
    """The smallest largest stage of any cut."""
    found = {0: 0.0}
    for stage in range(costs.stages):
        reached: dict[int, float] = {}
        for first, largest in found.items():
            for last in costs.lasts(stage, first):
                if last > first:
                    here = max(largest, costs.of(stage, first, last))
                    reached[last] = min(reached.get(last, here), here)
        found = reached
    return found[costs.layers]


def _extended(
    costs: _Costs, before: dict[int, tuple[float, int]], stage: int, most: float
) -> dict[int, tuple[float, int]]:
    """One more stage, of at most `most`."""
    reached: dict[int, tuple[float, int]] = {}
    for first, (squares, _) in before.items():
        for last in costs.lasts(stage, first):
            cost = costs.of(stage, first, last)
            if last > first and cost <= most * (1 + 1e-12):
                found = (squares + cost**2, -first)  # of equals, the one whose later stages are shorter
                reached[last] = min(reached.get(last, found), found)
    return reached


def _spans(best: list[dict[int, tuple[float, int]]]) -> tuple[Span, ...]:
    last = max(best[-1])
    spans: list[Span] = []
    for reached in reversed(best[1:]):
        first = -reached[last][1]
        spans.insert(0, (first, last))
        last = first
    return tuple(spans)
