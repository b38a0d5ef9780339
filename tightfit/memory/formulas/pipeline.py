"""Pipeline: which layers each rank holds, and how many micro-batches are in flight there.

cut.py assigns layers to stages. A micro-batch is in flight from its forward to its backward: its activations, and the
output that the stage sent on, are kept meanwhile. With M micro-batches a step, rank r of K ranks has at most

    gpipe        all M                                   (Huang et al. 2019)
    1f1b         min(M, K − r) on rank r of K            (Narayanan et al. 2021a)
    interleaved  2 (K − r − 1) + (v − 1) K + 1, at most M v, each in one of a rank's v stages (Narayanan et al. 2021b)
    zero-bubble  min(M, K) on every rank                 (Qi et al. 2023, ZB-H1: besides, min(M, r + 1) micro-batches
                                                          on rank r ≥ 1 await their backward for weights)
    2bw          K − r on rank r, from one step into the next (Narayanan et al. 2021b, PipeDream-2BW)
    zb-v         min(M, 2 K − r − 1) in its first stage and min(M, r + 1) in its second (Qi et al. 2024): 2 K in all

Stages of one rank differ in size: the last has the output projection and fewer layers.
"""

from functools import lru_cache
from operator import mul
from typing import NamedTuple

from tightfit.jobs.layout import Layout, stages_of_rank
from tightfit.jobs.levers import Levers
from tightfit.jobs.workload import Workload
from tightfit.levers.policy.recompute import recomputed_layers
from tightfit.memory.formulas.cut import cut
from tightfit.models.spec import ModelSpec


class RankSpan(NamedTuple):
    """The layers [first, last) of one pipeline rank, and what else it has."""

    rank: int
    first: int
    last: int
    layers_by_stage: tuple[int, ...]
    has_embedding: bool
    has_head: bool

    def shares_embedding(self, spec: ModelSpec) -> bool:
        """Whether one weight on this rank is both the embedding and the output projection."""
        return spec.tied and self.has_embedding and self.has_head


def rank_spans(spec: ModelSpec, length: int, layout: Layout) -> tuple[RankSpan, ...]:
    """The span of each pipeline rank; several stages of a rank are treated as one run of consecutive layers."""
    return _rank_spans(spec, length, layout.pipeline, layout.stages_per_rank, in_v=layout.in_v)


def layer_counts(spec: ModelSpec, length: int, layout: Layout) -> tuple[int, ...]:
    """How many layers each pipeline rank has."""
    return tuple(span.last - span.first for span in rank_spans(spec, length, layout))


@lru_cache(maxsize=4096)
def _rank_spans(spec: ModelSpec, length: int, pipeline: int, pieces: int, *, in_v: bool) -> tuple[RankSpan, ...]:
    spans, head_rank = cut(spec, length, pipeline * pieces), 0 if in_v else pipeline - 1
    found, last = [], 0
    for rank in range(pipeline):
        stages = stages_of_rank(rank, pipeline, pieces, in_v=in_v)
        own = tuple(spans[stage][1] - spans[stage][0] for stage in stages)
        first, last = last, last + sum(own)
        found.append(RankSpan(rank, first, last, own, has_embedding=rank == 0, has_head=rank == head_rank))
    return tuple(found)


def telling_ranks(workload: Workload, layout: Layout, levers: Levers) -> tuple[int, ...]:
    """Pipeline ranks that can be the fullest: only these need to be computed."""
    recomputed = levers.checkpoint_every, levers.num_checkpoints
    micro_batches = workload.micro_batches(layout)
    return _telling_ranks(workload.spec, workload.sequence_length, layout, micro_batches, *recomputed)


@lru_cache(maxsize=4096)
def _telling_ranks(
    spec: ModelSpec, length: int, layout: Layout, micro_batches: int, every: int, count: int
) -> tuple[int, ...]:
    """One or two ranks of each group of alike ranks; the first (embedding) and the last (head) are groups of their own.

    Ranks are alike with equal kinds of layers in the same order (`every` and `count` say which are recomputed) and if
    all or none of them peak before their first gradients. Of a group the first has most micro-batches in flight and,
    where backward is split, the last has most that await backward for weights.
    """
    recomputed = recomputed_layers(spec.layers, every=every, count=count)
    traits = [(*spec.traits_of(layer), layer in recomputed) for layer in range(spec.layers)]
    alike: dict[tuple[object, ...], list[int]] = {}
    for rank, span in enumerate(rank_spans(spec, length, layout)):
        ends = span.has_embedding, span.has_head, all_forwards_first(layout, rank, micro_batches)
        alike.setdefault((*ends, span.layers_by_stage, *traits[span.first : span.last]), []).append(rank)
    ranks = {group[0] for group in alike.values()}
    return tuple(sorted(ranks | {group[-1] for group in alike.values()} if layout.splits_backward else ranks))


def micro_batches_in_flight(layout: Layout, rank: int, micro_batches: int) -> tuple[int, ...]:
    """Micro-batches whose activations each stage of rank `rank` keeps at the rank's peak."""
    K, v = layout.pipeline, layout.stages_per_rank
    if K == 1:
        return (1,)
    if layout.schedule == "gpipe" or (layout.schedule == "1f1b" and micro_batches < K):  # as pipeline_engine.py
        return (micro_batches,)
    if layout.schedule in ("1f1b", "2bw"):
        return (min(micro_batches, K - rank),)
    if layout.schedule == "zero-bubble":
        return (min(micro_batches, K),)
    if layout.schedule == "zb-v":
        return min(micro_batches, 2 * K - rank - 1), min(micro_batches, rank + 1)
    # Interleaved: a rank runs K micro-batches through one of its stages, then through the next.
    turns, begun = divmod(min(micro_batches * v, 2 * (K - rank - 1) + (v - 1) * K + 1), K * v)
    return tuple(turns * K + min(K, max(0, begun - stage * K)) for stage in range(v))


def most_in_flight(layout: Layout, rank: int, micro_batches: int, sizes: tuple[int, ...]) -> int:
    """The most that rank `rank` keeps at one time, if one micro-batch in its stages keeps `sizes`, in any unit."""
    if layout.schedule == "interleaved":
        return most_in_turns(layout.pipeline, rank, micro_batches, sizes)[0]
    return sum(map(mul, micro_batches_in_flight(layout, rank, micro_batches), sizes))


@lru_cache(maxsize=4096)
def most_in_turns(K: int, rank: int, micro_batches: int, sizes: tuple[int, ...]) -> tuple[int, int]:
    """The most under the interleaved schedule: at any time, and just after a backward through the first stage.

    That is not always when most micro-batches are in flight: those of a large stage may enter while those of a small
    one leave. The schedule is followed: forwards until the pipeline is full, then one forward one backward, then
    backwards. It is periodic, so 4 K micro-batches suffice.
    """
    v = len(sizes)
    pieces = min(micro_batches, 4 * K) * v
    full = min(pieces, 2 * (K - rank - 1) + (v - 1) * K + 1)
    now = most = beside_first = 0
    for turn in range(pieces + full - 1):
        if turn < pieces:
            now += sizes[turn // K % v]
            most = max(most, now)
        if (backward := turn + 1 - full) >= 0:
            stage = v - 1 - backward // K % v
            now -= sizes[stage]
            beside_first = max(beside_first, now) if stage == 0 else beside_first
    return most, beside_first


def all_forwards_first(layout: Layout, rank: int, micro_batches: int) -> bool:
    """Whether rank `rank` runs all forwards before its first backward, so that its peak may have no gradients yet.

    False without a flush between steps: gradients of the step before then exist.
    """
    in_flight = sum(micro_batches_in_flight(layout, rank, micro_batches))
    return not layout.has_two_versions and in_flight >= micro_batches * layout.stages_per_rank
