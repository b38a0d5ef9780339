"""Pipeline: who holds which layers, and how many micro-batches are in flight on each rank.

Layers are dealt out by cut.py. A micro-batch is in flight from its forward to its backward, and its activations are
kept meanwhile, as is what the stage sent on:

    gpipe        all M                                   (Huang et al. 2019)
    1f1b         min(M, K − r) on rank r of K            (Narayanan et al. 2021a)
    interleaved  2 (K − r − 1) + (v − 1) K + 1 pieces of a rank's v, at most M v   (Narayanan et al. 2021b)
    zero-bubble  min(M, K) on every rank                 (Qi et al. 2023, ZB-H1: weights' gradients wait as long,
                                                          on rank r those of min(M, r + 1) micro-batches)

Not here: the buffered weight versions of PipeDream, which flushing every step does without.
"""

from functools import lru_cache
from typing import NamedTuple

from tightfit.jobs.layout import Layout
from tightfit.memory.formulas.cut import cut
from tightfit.memory.formulas.layer import Level
from tightfit.models.spec import ModelSpec


class Stage(NamedTuple):
    """The layers [first, last) of one pipeline rank, and what else it has."""

    rank: int
    first: int
    last: int
    has_embedding: bool
    has_head: bool


@lru_cache(maxsize=4096)
def stage(spec: ModelSpec, length: int, pipeline: int, pieces: int, rank: int) -> Stage:
    """What pipeline rank `rank` holds; of several pieces, as many layers as if they were neighbours."""
    spans = cut(spec, length, pipeline * pieces)
    counts = [sum(last - first for first, last in spans[other::pipeline]) for other in range(rank + 1)]
    return Stage(rank, sum(counts[:rank]), sum(counts), rank == 0, rank == pipeline - 1)


@lru_cache(maxsize=4096)
def layer_counts(spec: ModelSpec, length: int, pipeline: int, pieces: int) -> tuple[int, ...]:
    """How many layers each pipeline rank has."""
    held = (stage(spec, length, pipeline, pieces, rank) for rank in range(pipeline))
    return tuple(own.last - own.first for own in held)


@lru_cache(maxsize=4096)
def telling_ranks(spec: ModelSpec, length: int, pipeline: int, pieces: int, split_backward: bool) -> tuple[int, ...]:
    """Ranks of which one is the fullest: the first has most in flight and the embedding, the last the head.

    Between them, of those with equal layers the first has most in flight; where backward is split, the last one has
    most gradients waiting for weights.
    """
    held = [stage(spec, length, pipeline, pieces, rank) for rank in range(pipeline)]
    spans = [range(own.first, own.last) for own in held]
    kinds = [
        (len(span), sum(map(spec.is_routed, span)), sum(spec.window_of(layer) is not None for layer in span))
        for span in spans
    ]
    middle = range(1, pipeline - 1)
    found = {0, pipeline - 1, *({kinds[rank]: rank for rank in reversed(middle)}.values())}
    if split_backward:
        found |= set({kinds[rank]: rank for rank in middle}.values())
    return tuple(sorted(found))


def pieces_in_flight(layout: Layout, rank: int, micro_batches: int) -> int:
    """Pieces of the model (a rank's layers / stages_per_rank) whose activations rank `rank` keeps at the fullest."""
    K, v = layout.pipeline, layout.stages_per_rank
    if K == 1:
        return 1
    if layout.schedule == "gpipe":
        return micro_batches
    if layout.schedule == "1f1b":
        return min(micro_batches, K - rank) if micro_batches >= K else micro_batches  # as parallel/pipeline_engine.py
    if layout.schedule == "zero-bubble":
        return min(micro_batches, K)
    return min(micro_batches * v, 2 * (K - rank - 1) + (v - 1) * K + 1)


Classes = tuple[tuple[int, Level, int], ...]
"""(a layer, what layers like it keep, how many there are)."""
_Class = tuple[bool, bool, Level]


class Candidate(NamedTuple):
    """A layer at which backward may be fullest, and the layers before and after it."""

    layer: int
    level: Level
    before: Classes
    after: Classes
    is_first: bool
    is_last: bool
    is_end: bool
    """The first or last of its class."""


@lru_cache(maxsize=4096)
def candidates(spec: ModelSpec, first: int, last: int, levels: tuple[Level, ...]) -> tuple[Candidate, ...]:
    """The first and the last layer of every class (routed or not, windowed or not, what it keeps) in [first, last).

    From one layer of a class to the next, what is kept shrinks and gradients grow by the same amounts, so the sum is
    largest at an end. The last layer but one is tried as well: what FSDP2 reduced a layer's gradients from is there
    beside every layer but the last.
    """
    classes = _classes(spec, first, last, levels)
    indices: dict[_Class, list[int]] = {}
    for index, kind in classes.items():
        indices.setdefault(kind, []).append(index)
    ends = {end for those in indices.values() for end in (those[0], those[-1])}
    return tuple(
        Candidate(
            index, classes[index][2], _counted(classes, range(first, index)), _counted(classes, range(index + 1, last)),
            index == first, index == last - 1, index in ends,
        )
        for index in sorted(ends | {max(first, last - 2)}, reverse=True)
    )  # fmt: skip


@lru_cache(maxsize=4096)
def totals(spec: ModelSpec, first: int, last: int, levels: tuple[Level, ...]) -> Classes:
    """All layers of a stage, by class."""
    classes = _classes(spec, first, last, levels)
    return _counted(classes, range(first, last))


def _classes(spec: ModelSpec, first: int, last: int, levels: tuple[Level, ...]) -> dict[int, _Class]:
    layers = zip(range(first, last), levels, strict=True)
    return {layer: (spec.is_routed(layer), spec.window_of(layer) is not None, level) for layer, level in layers}


def _counted(classes: dict[int, _Class], among: range) -> Classes:
    found: dict[_Class, list[int]] = {}
    for index in among:
        found.setdefault(classes[index], []).append(index)
    return tuple((those[0], kind[2], len(those)) for kind, those in found.items())
