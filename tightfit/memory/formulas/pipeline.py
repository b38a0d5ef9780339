"""Pipeline: who holds which layers, and how many micro-batches are in flight on each rank.

Layers are dealt out evenly, the first ranks taking one more where they do not divide. A micro-batch is in flight from
its forward to its backward, and its activations are kept meanwhile:

    gpipe        all M                                   (Huang et al. 2019)
    1f1b         min(M, K − r) on rank r of K            (Narayanan et al. 2021a)
    interleaved  2 (K − r − 1) + (v − 1) K + 1 pieces of a rank's v, at most M v   (Narayanan et al. 2021b)
    zero-bubble  min(M, K) on every rank                 (Qi et al. 2023, ZB-H1: weights' gradients wait as long)

Not here: the buffered weight versions of PipeDream, which flushing every step does without.
"""

from functools import lru_cache
from typing import NamedTuple

from tightfit.jobs.layout import Layout
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
def stage(layers: int, pipeline: int, rank: int) -> Stage:
    """What pipeline rank `rank` holds."""
    each, left = divmod(layers, pipeline)
    first = rank * each + min(rank, left)
    return Stage(rank, first, first + each + (rank < left), rank == 0, rank == pipeline - 1)


def pieces_in_flight(layout: Layout, rank: int, micro_batches: int) -> int:
    """Pieces of the model (a rank's layers / stages_per_rank) whose activations rank `rank` keeps at the fullest."""
    K, v = layout.pipeline, layout.stages_per_rank
    if K == 1:
        return 1
    if layout.schedule == "gpipe":
        return micro_batches
    if layout.schedule == "1f1b":
        return min(micro_batches, K - rank)
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


@lru_cache(maxsize=4096)
def candidates(spec: ModelSpec, first: int, last: int, levels: tuple[Level, ...]) -> tuple[Candidate, ...]:
    """The first and the last layer of every class (routed or not, windowed or not, what it keeps) in [first, last).

    From one layer of a class to the next, what is kept shrinks and gradients grow by the same amounts, so the sum is
    largest at an end.
    """
    classes = _classes(spec, first, last, levels)
    indices: dict[_Class, list[int]] = {}
    for index, kind in classes.items():
        indices.setdefault(kind, []).append(index)
    ends = {end for those in indices.values() for end in (those[0], those[-1])}
    return tuple(
        Candidate(
            index, classes[index][2], _counted(classes, range(first, index)), _counted(classes, range(index + 1, last)),
            index == first, index == last - 1,
        )
        for index in sorted(ends, reverse=True)
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
