"""RankMemory: the sizes that all phases of one pipeline rank share.

What depends on shapes alone (`StageCost`) is found once and remembered: a search tries many ways of holding weights for
each. The rest is a handful of numbers per layout.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.workload import Workload
from tightfit.memory.formulas.keeping import layer_levels, offloaded_count, stored_bytes
from tightfit.memory.formulas.layer import STATISTIC, LayerCost, Level, Moment, forward_beside, layer_cost, level_kept
from tightfit.memory.formulas.logits import LossCost, loss_cost
from tightfit.memory.formulas.params import NOTHING, Params, embedding_params, layer_params, vocabulary_params
from tightfit.memory.formulas.pipeline import Candidate, Classes, Stage, candidates, pieces_in_flight, stage, totals
from tightfit.memory.formulas.share import Share, ceil, share_of
from tightfit.memory.formulas.states import States, states
from tightfit.models.spec import ModelSpec

KINDS = ("residual", "norms", "attention", "mlp", "routing")
INDEX = 8


class Place(NamedTuple):
    """A layer at which backward may be fullest."""

    before: tuple[int, ...]
    """Activations of the layers before it, by kind."""
    own: int
    """Its weights."""
    after: int
    """Weights of the layers after it."""
    growing: Moment
    """Its fullest moment where gradients of weights come into being,"""
    added: Moment
    """and where they are added to what is there."""
    is_first: bool
    is_last: bool
    awaits: bool
    """Whether the input of a recomputed layer before it is on its way from the host."""
    kept: int
    """Activations of the layers before it."""


@dataclass(frozen=True, slots=True)
class StageCost:
    """What shapes say about one pipeline rank and one micro-batch, in bytes and numbers of weights."""

    stage: Stage
    params: Params
    widest: Params
    """Of the stage's layers, the one with most weights."""
    vocabulary: int
    """Weights of the embedding or the output projection on this rank."""
    root: int
    """Weights FSDP2 gathers with the root: final norm, output projection, tied embedding, learned positions."""
    embedding: int
    """Weights of an untied embedding, a group of its own under FSDP2; 0 on other stages."""
    kinds: tuple[int, ...]
    """Activations of one micro-batch that stay on the GPU, by kind."""
    kept: int
    outside: int
    """Kept outside the layers: the final norm's input, rope tables."""
    tables: int
    """Of those, what is there while layers run backward."""
    forward_extra: int
    """Alive besides when forward ends its last layer."""
    working: int
    """Alive in a forward that keeps nothing."""
    places: tuple[Place, ...]
    """From the last layer to the first."""
    inner: Place | None
    """The last layer but one, beside which FSDP2 holds what it reduced the last one's gradients from."""
    loss: LossCost
    stream: int
    """The residual stream between two layers."""
    for_weights: int
    """Gradients that one micro-batch keeps from backward for inputs to backward for weights."""


@dataclass(slots=True)
class RankMemory:
    """One rank: its shapes, and how it holds what."""

    spec: ModelSpec
    layout: Layout
    levers: Levers
    share: Share
    cost: StageCost
    states: States
    accumulation: int
    element: int
    ranks: int
    """Data and context ranks, which split states."""
    others: int
    """Activations of the other micro-batches in flight."""
    inputs: int
    host_checkpoints: int
    arriving: int
    """The next input of a recomputed layer on its way from the host, while another is at work."""
    is_sharded: bool
    """Whether FSDP2 splits this rank's weights."""
    sums_whole: bool
    """ZeRO-1 sums whole gradients over micro-batches and reduces them in the last, when weights go as well."""


def rank_memory(workload: Workload, layout: Layout, levers: Levers, rank: int) -> RankMemory:
    """Everything about pipeline rank `rank`."""
    share = share_of(workload, layout, levers)
    own = stage(workload.spec, share.length * share.context, layout.pipeline, layout.stages_per_rank, rank)
    levels = layer_levels(workload.spec, levers, share, own.first, own.last)
    offloaded, stored = _offloaded(workload.spec, levers, share, levels) if levers.offload_checkpoints else (0, 0)
    cost = stage_cost(
        workload.spec, layout.pipeline, own, share, levels, offloaded, levers.loss == "fused", levers.loss_chunk_bytes
    )
    accumulation = max(1, workload.global_batch // (layout.micro_batch * layout.data))
    others, passes = _in_flight(layout, cost, accumulation, workload.weight_bytes)
    pieces, chunks = pieces_in_flight(layout, rank, accumulation), layout.stages_per_rank
    return RankMemory(
        workload.spec, layout, levers, share, cost,
        states(workload, layout, levers, cost.params, passes, cost.widest.all),
        passes, workload.weight_bytes, layout.data * layout.context // layout.copies,
        others, 2 * INDEX * share.tokens,
        offloaded * stored * max(pieces, chunks) // chunks, stored if offloaded else 0,
        layout.zero > 0, layout.zero == 1 and passes > 1,
    )  # fmt: skip


def _in_flight(layout: Layout, cost: StageCost, accumulation: int, element: int) -> tuple[int, int]:
    """Bytes that micro-batches other than the one at work keep, and of how many gradients are summed when fullest."""
    rank, chunks = cost.stage.rank, layout.stages_per_rank
    if layout.pipeline == 1:
        return 0, accumulation
    sent = 0 if cost.stage.has_head else chunks * cost.stream
    each, pieces = cost.kept + cost.outside + sent, pieces_in_flight(layout, rank, accumulation)
    loss = cost.loss.kept if cost.stage.has_head else 0
    if layout.schedule == "gpipe":  # all losses, then all backwards: fullest in the first, or in the second
        first = each + loss >= element * cost.params.all or accumulation == 1
        return (each + loss) * max(0, accumulation - (1 if first else 2)), 1 if first else accumulation
    others = max(0, each * (pieces - chunks) // chunks)
    if layout.schedule == "zero-bubble" and rank:
        waiting = min(accumulation, rank + 1)
        others += waiting * cost.for_weights + (waiting - 1) * loss
    return others, accumulation


@lru_cache(maxsize=65536)
def stage_cost(
    spec: ModelSpec, pipeline: int, own: Stage, share: Share, levels: tuple[Level, ...], offloaded: int, fused: bool,
    chunk_bytes: int,
) -> StageCost:  # fmt: skip
    """All that shapes say, remembered."""
    classes = totals(spec, own.first, own.last, levels)
    kinds = kept_by_kind(spec, classes, share, offloaded)
    last = layer_cost(spec, own.last - 1, share)
    tables, outside = _outside(spec, share, own, classes)
    return StageCost(
        own, *_weights(spec, own, share.tensor, share.expert, pipeline), kinds, sum(kinds), outside, tables,
        forward_beside(spec, own.last - 1, share, levels[-1]),
        max(layer_cost(spec, layer, share).forward_working for layer, _, _ in classes),
        *_places(spec, own, share, levels, offloaded),
        loss_cost(spec, share, fused=fused, allowed_bytes=chunk_bytes),
        last.entry,
        (own.last - own.first) * _for_weights(spec, share),
    )  # fmt: skip


def _for_weights(spec: ModelSpec, share: Share) -> int:
    """Of a layer: the gradients of what its projections, its norms and its MLP made."""
    inner = ceil(spec.query_size + 2 * spec.kv_size, share.tensor) * share.tokens
    return share.element_bytes * (inner + 4 * share.outer_tokens * spec.hidden_size)


def _offloaded(spec: ModelSpec, levers: Levers, share: Share, levels: tuple[Level, ...]) -> tuple[int, int]:
    """How many inputs of recomputed layers are on the host, and the bytes of one there."""
    each = stored_bytes(share.outer_tokens, spec.hidden_size, share.element_bytes, levers.checkpoint_format)
    recomputed = sum(level != "everything" for level in levels)
    return offloaded_count(recomputed, each, levers.checkpoint_host_bytes), each


def _places(
    spec: ModelSpec, own: Stage, share: Share, levels: tuple[Level, ...], offloaded: int
) -> tuple[tuple[Place, ...], Place | None]:
    """Ends of the classes, and the last layer but one where it is no end itself."""
    found = candidates(spec, own.first, own.last, levels)
    ends = tuple(_place(spec, one, share, offloaded) for one in found if one.is_end)
    inner = [_place(spec, one, share, offloaded) for one in found if not one.is_end]
    return ends, inner[0] if inner else None


def _place(spec: ModelSpec, candidate: Candidate, share: Share, offloaded: int) -> Place:
    cost = layer_cost(spec, candidate.layer, share)
    after = sum(count * _params(spec, layer, share).all for layer, _, count in candidate.after)
    before = kept_by_kind(spec, candidate.before, share, offloaded)
    return Place(
        before, _params(spec, candidate.layer, share).all, after,
        _fullest(cost, candidate.level, share, added=False),
        _fullest(cost, candidate.level, share, added=True),
        candidate.is_first, candidate.is_last, _awaits(candidate, offloaded), sum(before),
    )  # fmt: skip


def _awaits(candidate: Candidate, offloaded: int) -> bool:
    """A recomputed layer, this one or one after it, has called the one before, whose input is on the host."""
    before = _recomputed(candidate.before)
    called = candidate.level != "everything" or _recomputed(candidate.after) > 0
    return called and 0 < before <= offloaded


def _recomputed(classes: Classes) -> int:
    return sum(count for _, level, count in classes if level != "everything")


def _fullest(cost: LayerCost, level: Level, share: Share, *, added: bool) -> Moment:
    def size(moment: Moment) -> int:
        weights = (moment.made_weights if added else moment.weights) + moment.weight_copies
        return moment.held + moment.gradients + moment.workspace + share.element_bytes * weights

    return max((*cost.backward, *((cost.recompute,) if level != "everything" else ())), key=size)


def _params(spec: ModelSpec, layer: int, share: Share) -> Params:
    return layer_params(spec, layer, share.tensor, share.expert)


@lru_cache(maxsize=4096)
def _weights(
    spec: ModelSpec, own: Stage, tensor: int, expert: int, pipeline: int
) -> tuple[Params, Params, int, int, int]:
    """All weights of a stage, its widest layer, the vocabulary's, and those outside layers by FSDP2's groups."""
    total, widest = NOTHING, NOTHING
    for layer, _, count in totals(spec, own.first, own.last, ("everything",) * (own.last - own.first)):
        one = layer_params(spec, layer, tensor, expert)
        total, widest = total.plus(one, count), max(widest, one, key=lambda params: params.all)
    vocabulary = vocabulary_params(spec, tensor)
    tied = spec.tied and pipeline == 1
    before = embedding_params(spec, tensor) if own.has_embedding else 0
    after = spec.norm_params + (0 if tied else vocabulary) if own.has_head else 0
    embedding = vocabulary if own.has_embedding and not tied else 0
    return total.plus(Params(before + after, 0)), widest, vocabulary, before + after - embedding, embedding


def kept_by_kind(spec: ModelSpec, classes: Classes, share: Share, offloaded: int) -> tuple[int, ...]:
    """What layers keep on the GPU until backward; of the first `offloaded` recomputed ones the input is not there."""
    found = [0] * len(KINDS)
    for layer, level, count in classes:
        for kind, size in enumerate(_layer_kinds(spec, layer, share, level)):
            found[kind] += count * size
    if offloaded and classes:
        found[0] -= min(offloaded, _recomputed(classes)) * layer_cost(spec, classes[0][0], share).entry
    return tuple(found)


@lru_cache(maxsize=4096)
def _layer_kinds(spec: ModelSpec, layer: int, share: Share, level: Level) -> tuple[int, ...]:
    kept = level_kept(spec, layer, share, level)
    return tuple(sum(one.bytes for one in kept if one.kind == kind) for kind in KINDS)


def _outside(spec: ModelSpec, share: Share, own: Stage, classes: Classes) -> tuple[int, int]:
    """Rope keeps cosines and sines, one row for all, learned positions their numbers; and these with the final norm's
    input and statistics."""
    ropes = {rope for layer, _, _ in classes if (rope := spec.rope_of(layer)) is not None}
    pairs = sum(int(spec.head_dim * rope.rotated_share) // 2 for rope in ropes)
    numbers = INDEX * share.length if spec.rope is None and own.has_embedding else 0
    tables = 2 * share.length * pairs * share.element_bytes + numbers
    row = spec.hidden_size * share.element_bytes + STATISTIC * (2 if spec.norm == "layer" else 1)
    return tables, tables + (share.outer_tokens * row if own.has_head else 0)
