"""Stage: bytes of one pipeline rank that depend only on shapes and on what layers keep, for one micro-batch; cached.

A search tries many ways of holding weights for each. Layers that are alike (routed or not, windowed or not, kept level)
are a kind. Going backward from one layer of a kind to the next, saved tensors shrink and gradients grow by constant
amounts, so backward peaks at the first or the last layer of a kind: only these are visited. For FSDP2 two more are:
the last but one, because every layer but the last has the reduce-scatter buffer of the layer after it beside it; and
the second, because every layer but the first has prefetched weights beside it. Where offload bounds the bytes of
waiting gradients, growth stops somewhere in between, and every moment of every layer is visited.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.precision import INT32_BYTES, INT64_BYTES
from tightfit.jobs.workload import Workload
from tightfit.levers.policy.offload import bounds_gradients, offloaded_count, stored_bytes
from tightfit.levers.policy.recompute import KeepLevel
from tightfit.memory.formulas.keeping import layer_levels
from tightfit.memory.formulas.layer import forward_extra, layer_cost, saved_bytes
from tightfit.memory.formulas.layer_moments import LayerMoment
from tightfit.memory.formulas.local_shape import LocalShape
from tightfit.memory.formulas.params import Params, embedding_params, layer_matrices, layer_params, vocabulary_params
from tightfit.memory.formulas.pipeline import RankSpan, rank_spans
from tightfit.memory.formulas.saved import SavedBytes, attention_saved, statistic_bytes, total


class LayerKind:
    """Bytes and weights of one layer that keeps `level`, shared by all layers that are alike."""

    def __init__(self, shape: LocalShape, layer: int, level: KeepLevel) -> None:
        params, cost, element_bytes = layer_params(shape, layer), layer_cost(shape, layer), shape.element_bytes
        self.is_recomputed = level != "everything"
        self.weights = params.all
        self.apart_weights = apart = params.experts if shape.expert > 1 else 0
        """Part of `weights`: experts that expert ranks split, an FSDP2 group of their own (parallel/data.py)."""
        padding_share = 1 - shape.experts / shape.padded_experts if shape.padded_experts else 0.0
        self.padding_weights = round(padding_share * params.experts)
        """Part of `weights` that is FSDP2's padding of a stack of experts and has no gradient (local_shape.py)."""
        self.saved = saved_bytes(shape, layer, level)
        self.working_bytes = cost.forward_working
        self.moments = (cost.recompute, *cost.backward) if self.is_recomputed else cost.backward

        def growing(moment: LayerMoment) -> int:
            return moment.activation_bytes + element_bytes * (moment.complete_weights + moment.weight_copies)

        self.fullest_growing = max(self.moments, key=growing)
        """The fullest of `moments` where all gradients of the layer's weights are new tensors."""
        self.fullest_summing = max(self.moments, key=lambda each: growing(each) - element_bytes * each.added_weights)
        """The fullest of `moments` where gradients of weights are added to existing sums as they are made."""
        self.reduction_bytes = total(attention_saved(shape)) + shape.hidden_bytes if apart else 0
        of_attention = (each.activation_bytes for each in self.moments if each.name == "attention")
        self.attention_bytes = sum(of_attention) if apart else 0
        """Activations when gradients of split experts are reduced (attention's saved tensors, and the gradient of the
        MLP's input), and in attention's backward, which follows."""


_remembered_kind = lru_cache(maxsize=65536)(LayerKind)


class LayerVisit(NamedTuple):
    """Backward at work in one layer: saved tensors of layers before it, and weights of layers after it, done."""

    kind: LayerKind
    saved_before: SavedBytes
    done_weights: int
    moment: LayerMoment
    """The kind's `fullest_growing`; where every layer is visited, each of the kind's moments in turn."""
    is_first: bool
    is_last: bool
    is_inner: bool
    """The second or the last layer but one, visited for FSDP2 alone."""
    awaits_input: bool
    """Whether the input of a recomputed layer before it is on its way from the host."""


class StageMemory:
    """One pipeline rank whose layers keep `levels`; inputs of its first `offloaded` recomputed layers are on the host.

    Of weights, `padding_weights` are FSDP2's padding and have no gradient, `apart_weights` are those of split experts,
    which other data ranks do not hold, `widest` are the largest layer's,
    `widest_dense` the largest layer's without split experts, `widest_group` those of the largest FSDP2 group.
    """

    def __init__(
        self,
        shape: LocalShape,
        span: RankSpan,
        levels: tuple[KeepLevel, ...],
        *,
        offloaded: int,
        every_layer: bool = False,
    ) -> None:
        kinds = _layer_kinds(shape, span.first, levels)
        counts = Counter(kinds)
        self.span = span
        self.params, self.layer_params = stage_params(shape, span)
        self.weights, self.layer_weights = self.params.all, self.layer_params.all
        self.padding_weights = sum(count * kind.padding_weights for kind, count in counts.items())
        self.apart_weights = sum(count * kind.apart_weights for kind, count in counts.items())
        self.widest = max(kind.weights for kind in counts)
        self.widest_dense = max(kind.weights - kind.apart_weights for kind in counts)
        self.widest_group = max(self.widest_dense, *(kind.apart_weights for kind in counts))
        self.last_layer_matrices = layer_matrices(shape, span.last - 1)
        self.vocabulary = vocabulary_params(shape)
        """Weights of the embedding, and of the output projection: as many."""
        self.shares_embedding = span.shares_embedding(shape.spec)
        self.outside = self.weights - self.layer_weights
        self.embedding = self.vocabulary if span.has_embedding and not self.shares_embedding else 0
        self.root = self.outside - self.embedding
        """Weights `outside` layers: an untied `embedding`, and FSDP2's group `root` of what is in no other: final norm,
        output projection, tied embedding, positions."""

        self.offloaded, self.offloaded_by_stage = offloaded, _by_stage(levels, span.layers_by_stage, offloaded)
        self.saved = _saved(shape, counts, offloaded)
        self.tables_bytes = _tables_bytes(shape, span)
        norm_bytes = shape.stream_bytes + statistic_bytes(shape.spec, shape.stream_tokens) if span.has_head else 0
        self.outside_bytes = self.tables_bytes + norm_bytes
        """Bytes outside the layers with the final norm's input; while layers run backward, only tables."""
        self.forward_extra_bytes = forward_extra(shape, span.last - 1, levels[-1])
        self.working_bytes = max(kind.working_bytes for kind in counts)
        # Gradients of the outputs of q, k and v, and 4 of the stream's size: of norms, output projection and MLP.
        qkv_columns = shape.columns(shape.spec.query_size + 2 * shape.spec.kv_size)
        layer_bytes = shape.element_bytes * shape.tokens * qkv_columns + 4 * shape.stream_bytes
        self.for_weights_bytes = len(levels) * layer_bytes
        """Gradients that one micro-batch keeps from backward for inputs to backward for weights."""
        self.visits = tuple(_visits(shape, kinds, offloaded, every_layer=every_layer))[::-1]


remembered_stage = lru_cache(maxsize=65536)(StageMemory)


def stage_memory(workload: Workload, layout: Layout, levers: Levers, shape: LocalShape, rank: int) -> StageMemory:
    """The StageMemory of pipeline rank `rank` of `layout`."""
    span = rank_spans(workload.spec, workload.sequence_length, layout)[rank]
    levels = layer_levels(shape, levers, range(span.first, span.last))
    offloaded = 0
    if levers.offload_checkpoints:
        recomputed = len(levels) - levels.count("everything")
        offloaded = offloaded_count(recomputed, checkpoint_bytes(shape, levers), levers.checkpoint_host_bytes)
    return remembered_stage(shape, span, levels, offloaded=offloaded, every_layer=bounds_gradients(levers))


def checkpoint_bytes(shape: LocalShape, levers: Levers) -> int:
    """Bytes of one recomputed layer's input on the host."""
    return stored_bytes(shape.stream_tokens, shape.spec.hidden_size, shape.element_bytes, levers.checkpoint_format)


@lru_cache(maxsize=65536)
def stage_params(shape: LocalShape, span: RankSpan) -> tuple[Params, Params]:
    """Weights of a stage (with the embedding, the final norm and the output projection it has), and of its layers."""
    spec, in_layers = shape.spec, Params()
    example = {spec.is_routed(layer): layer for layer in range(span.first, span.last)}
    for is_routed, count in Counter(map(spec.is_routed, range(span.first, span.last))).items():
        in_layers = in_layers.plus(layer_params(shape, example[is_routed]), count)
    before = embedding_params(shape) if span.has_embedding else 0
    head = 0 if span.shares_embedding(spec) else vocabulary_params(shape)
    norm = spec.norm_params if shape.adapted is None else 0
    return in_layers.plus(Params(before + (norm + head if span.has_head else 0))), in_layers


def _by_stage(levels: tuple[KeepLevel, ...], layers_by_stage: tuple[int, ...], offloaded: int) -> tuple[int, ...]:
    """How many of the first `offloaded` recomputed layers each stage of the rank has."""
    recomputed = [layer for layer, level in enumerate(levels) if level != "everything"][:offloaded]
    ends = zip(layers_by_stage, accumulate(layers_by_stage), strict=True)
    return tuple(sum(end - own <= layer < end for layer in recomputed) for own, end in ends)


@lru_cache(maxsize=65536)
def _layer_kinds(shape: LocalShape, first: int, levels: tuple[KeepLevel, ...]) -> tuple[LayerKind, ...]:
    """Kinds of the layers from `first` on, which keep `levels`."""
    traits = [(*shape.spec.traits_of(layer), level) for layer, level in enumerate(levels, first)]
    kinds = {}
    for index, trait in enumerate(traits):
        if trait not in kinds:
            kinds[trait] = _remembered_kind(shape, first + index, levels[index])
    return tuple(kinds[trait] for trait in traits)


def _saved(shape: LocalShape, counts: Mapping[LayerKind, int], offloaded: int) -> SavedBytes:
    """Saved tensors on the GPU of `counts` layers of each kind, without the first `offloaded` recomputed inputs."""
    sums = SavedBytes()
    for kind, count in counts.items():
        sums = SavedBytes(*[sum_ + count * size for sum_, size in zip(sums, kind.saved, strict=True)])
    return sums._replace(residual=sums.residual - min(offloaded, _recomputed(counts)) * shape.stream_bytes)


def _recomputed(counts: Mapping[LayerKind, int]) -> int:
    return sum(count for kind, count in counts.items() if kind.is_recomputed)


def _visits(
    shape: LocalShape, kinds: Sequence[LayerKind], offloaded: int, *, every_layer: bool
) -> Iterator[LayerVisit]:
    """Backward at the layers where it may be fullest, from the first layer to the last."""
    counts, last = Counter(kinds), len(kinds) - 1
    ends_of_kinds = {kinds.index(kind) for kind in counts} | {last - kinds[::-1].index(kind) for kind in counts}
    visited = range(len(kinds)) if every_layer else sorted(ends_of_kinds | {max(0, last - 1), min(1, last)})
    for index in visited:
        kind, before = kinds[index], Counter(kinds[:index])
        # A recomputed layer, this one or one after it, prefetches the input of the recomputed layer before it.
        recomputed_before, has_recomputed_after = _recomputed(before), _recomputed(counts) > _recomputed(before)
        visit = LayerVisit(
            kind=kind,
            saved_before=_saved(shape, before, offloaded),
            done_weights=sum(after.weights for after in kinds[index + 1 :]),
            moment=kind.fullest_growing,
            is_first=index == 0,
            is_last=index == last,
            is_inner=not every_layer and index not in ends_of_kinds,
            awaits_input=has_recomputed_after and 0 < recomputed_before <= offloaded,
        )
        yield from (visit._replace(moment=moment) for moment in kind.moments) if every_layer else (visit,)


def _tables_bytes(shape: LocalShape, span: RankSpan) -> int:
    """Rope's tables of cosines and sines [length, pairs], shared by all rows; learned positions' indices; and in each
    routed layer int32 counters of every expert's tokens, and of dropped ones (models/layers/mlp.py)."""
    spec, layers = shape.spec, range(span.first, span.last)
    ropes = {rope for layer in layers if (rope := spec.rope_of(layer)) is not None}
    pairs = sum(int(spec.rope_dim * rope.rotated_share) // 2 for rope in ropes)
    positions_bytes = INT64_BYTES * shape.length if spec.rope is None and span.has_embedding else 0
    counted_bytes = 0
    if spec.experts is not None:
        counters = spec.experts.count * (1 if spec.experts.capacity_factor is None else 2)
        counted_bytes = INT32_BYTES * counters * sum(map(spec.is_routed, layers))
    return 2 * shape.length * pairs * shape.element_bytes + positions_bytes + counted_bytes
