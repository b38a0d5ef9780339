"""Stage: what shapes say about one pipeline rank and one micro-batch, found once and remembered.

A search tries many ways of holding weights for each. Layers alike (routed or not, windowed or not, what they keep) are
a kind. From one layer of a kind to the next, what is kept shrinks and gradients grow by the same amounts, so backward
is fullest at the first or the last of a kind: only these are visited, and two for FSDP2: the last layer but one, as
what a layer's gradients were reduced from is there beside every layer but the last, and the second, as the next layer's
weights are gathered beside every layer but the first. Where no more than so many bytes of gradients wait
for the host, they stop growing in between, and every moment of every layer is visited.
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
from tightfit.memory.formulas.saved import SavedBytes, attention_saved, statistic_bytes


class LayerKind:
    """Layers that are alike, which share one of these."""

    def __init__(self, shape: LocalShape, layer: int, level: KeepLevel) -> None:
        """Of layers like `layer`, which keep `level`."""
        params, cost, element_bytes = layer_params(shape, layer), layer_cost(shape, layer), shape.element_bytes
        self.is_recomputed = level != "everything"
        self.weights = params.all
        self.apart_weights = apart = params.experts if shape.expert > 1 else 0
        """Of `weights`, experts that FSDP2 has in a group apart (parallel/data.py), as other ranks hold other ones."""
        padding_share = 1 - shape.experts / shape.padded_experts if shape.padded_experts else 0.0
        self.padding_weights = round(padding_share * params.experts)
        """Of `weights`, those that FSDP2 pads a stack of experts with, which have no gradient (local_shape.py)."""
        self.saved = saved_bytes(shape, layer, level)
        self.working_bytes = cost.forward_working
        """Alive in a forward that keeps nothing."""
        self.moments = (cost.recompute, *cost.backward) if self.is_recomputed else cost.backward
        """Of its backward, and of computing it again where it is."""
        self.fullest_growing = max(
            self.moments, key=lambda each: each.with_gradients(each.complete_weights, element_bytes)
        )
        """The fullest of `moments` where gradients of weights are new."""
        self.fullest_summing = max(self.moments, key=lambda each: each.with_gradients(each.new_weights, element_bytes))
        """The fullest of `moments` where gradients of weights are added to sums that are there."""
        kept_by_attention = sum(tensor.bytes for tensor in attention_saved(shape))
        self.reduction_bytes = kept_by_attention + shape.hidden_bytes if apart else 0
        """Activations when gradients of experts apart are reduced: what attention kept, and the gradient of the MLP's
        input."""
        of_attention = (each.activation_bytes for each in self.moments if each.name == "attention")
        self.attention_bytes = sum(of_attention) if apart else 0
        """Activations in attention's backward, after that."""


_remembered_kind = lru_cache(maxsize=65536)(LayerKind)


class LayerVisit(NamedTuple):
    """Backward at work in one layer."""

    kind: LayerKind
    saved_before: SavedBytes
    """What the layers before it keep."""
    done_weights: int
    """Of the layers after it, which are done."""
    moment: LayerMoment
    """The fullest of its kind where gradients of weights are new; where every layer is visited, each in turn."""
    is_first: bool
    is_last: bool
    is_inner: bool
    """The second or the last layer but one, visited for FSDP2 alone."""
    awaits_input: bool
    """Whether the input of a recomputed layer before it is on its way from the host."""


class StageMemory:
    """Bytes and numbers of weights of one pipeline rank."""

    def __init__(
        self,
        shape: LocalShape,
        span: RankSpan,
        levels: tuple[KeepLevel, ...],
        *,
        offloaded: int,
        every_layer: bool = False,
    ) -> None:
        """Of a stage whose layers keep `levels`, of the first `offloaded` recomputed ones the input on the host."""
        kinds = _layer_kinds(shape, span.first, levels)
        counts = Counter(kinds)
        self.span = span
        self.params, self.layer_params = stage_params(shape, span)
        """Weights of all, and of the layers."""
        self.weights, self.layer_weights = self.params.all, self.layer_params.all
        self.padding_weights = sum(count * kind.padding_weights for kind, count in counts.items())
        """Of those, what FSDP2 pads stacks of experts with, which have no gradient (local_shape.py)."""
        self.widest = max(kind.weights for kind in counts)
        """Weights of the layer that has most."""
        self.widest_dense = max(kind.weights - kind.apart_weights for kind in counts)
        """Weights of the largest group that FSDP2 gathers at once of a layer, without those of experts apart."""
        self.widest_group = max(self.widest_dense, *(kind.apart_weights for kind in counts))
        """Weights of the largest such group, experts apart or not."""

        self.vocabulary = vocabulary_params(shape)
        """Weights of the embedding or the output projection."""
        self.shares_embedding = span.shares_embedding(shape.spec)
        """Whether these two are one."""
        self.outside = self.weights - self.layer_weights
        """Weights outside layers: of an untied embedding, and of the root."""
        self.embedding = self.vocabulary if span.has_embedding and not self.shares_embedding else 0
        """Weights of an untied embedding; 0 on other stages."""
        self.root = self.outside - self.embedding
        """Weights of FSDP2's group of what is in no other: final norm, output projection, tied embedding, positions."""
        self.last_layer_matrices = layer_matrices(shape, span.last - 1)
        """Weights of each matrix of the last layer."""

        self.offloaded = offloaded
        """Recomputed layers whose input is on the host."""
        self.offloaded_by_stage = _by_stage(levels, span.layers_by_stage, offloaded)
        """How many of them each stage of the rank has."""
        self.saved = _saved(shape, counts, offloaded)
        """Activations of one micro-batch that layers keep on the GPU."""
        self.tables_bytes = _tables_bytes(shape, span)
        """Kept outside the layers while these run backward: rope tables, tokens by expert."""
        norm_bytes = shape.stream_bytes + statistic_bytes(shape.spec, shape.stream_tokens) if span.has_head else 0
        self.outside_bytes = self.tables_bytes + norm_bytes
        """The same with the final norm's input."""
        self.forward_extra_bytes = forward_extra(shape, span.last - 1, levels[-1])
        """Alive besides when forward ends its last layer."""
        self.working_bytes = max(kind.working_bytes for kind in counts)
        """Alive in a forward that keeps nothing."""
        self.for_weights_bytes = len(levels) * _for_weights_bytes(shape)
        """Gradients that one micro-batch keeps from backward for inputs to backward for weights."""
        self.visits = tuple(_visits(shape, kinds, offloaded, every_layer=every_layer))[::-1]
        """From the last layer to the first."""


remembered_stage = lru_cache(maxsize=65536)(StageMemory)


def stage_memory(workload: Workload, layout: Layout, levers: Levers, shape: LocalShape, rank: int) -> StageMemory:
    """What pipeline rank `rank` of `layout` has."""
    span = rank_spans(workload.spec, workload.sequence_length, layout)[rank]
    levels = layer_levels(shape, levers, range(span.first, span.last))
    offloaded = 0
    if levers.offload_checkpoints:
        recomputed = len(levels) - levels.count("everything")
        offloaded = offloaded_count(recomputed, checkpoint_bytes(shape, levers), levers.checkpoint_host_bytes)
    return remembered_stage(shape, span, levels, offloaded=offloaded, every_layer=bounds_gradients(levers))


def checkpoint_bytes(shape: LocalShape, levers: Levers) -> int:
    """The input of a recomputed layer on the host."""
    return stored_bytes(shape.stream_tokens, shape.spec.hidden_size, shape.element_bytes, levers.checkpoint_format)


@lru_cache(maxsize=65536)
def stage_params(shape: LocalShape, span: RankSpan) -> tuple[Params, Params]:
    """Weights of a stage (with the embedding, the final norm and the output projection it has), and of its layers."""
    spec, in_layers = shape.spec, Params()
    example = {spec.is_routed(layer): layer for layer in range(span.first, span.last)}
    for is_routed, count in Counter(spec.is_routed(layer) for layer in range(span.first, span.last)).items():
        in_layers = in_layers.plus(layer_params(shape, example[is_routed]), count)
    before = embedding_params(shape) if span.has_embedding else 0
    head = 0 if span.shares_embedding(spec) else vocabulary_params(shape)
    norm = spec.norm_params if shape.adapted is None else 0
    return in_layers.plus(Params(before + (norm + head if span.has_head else 0))), in_layers


def _by_stage(levels: tuple[KeepLevel, ...], layers_by_stage: tuple[int, ...], offloaded: int) -> tuple[int, ...]:
    """Of the first `offloaded` layers that are recomputed, how many are in each stage."""
    ends = tuple(accumulate(layers_by_stage))
    recomputed = [layer for layer, level in enumerate(levels) if level != "everything"][:offloaded]
    return tuple(
        sum(end - own <= layer < end for layer in recomputed) for end, own in zip(ends, layers_by_stage, strict=True)
    )


@lru_cache(maxsize=65536)
def _layer_kinds(shape: LocalShape, first: int, levels: tuple[KeepLevel, ...]) -> tuple[LayerKind, ...]:
    """Of the layers from `first` on, which keep `levels`."""
    spec, kinds, found = shape.spec, dict[object, LayerKind](), list[LayerKind]()
    for layer, level in enumerate(levels, first):
        traits = *spec.traits_of(layer), level
        if traits not in kinds:
            kinds[traits] = _remembered_kind(shape, layer, level)
        found.append(kinds[traits])
    return tuple(found)


def _saved(shape: LocalShape, counts: Mapping[LayerKind, int], offloaded: int) -> SavedBytes:
    """What so many layers of each kind keep; of the first `offloaded` recomputed ones the input is not there."""
    total = SavedBytes()
    for kind, count in counts.items():
        total = SavedBytes(*[sum_ + count * size for sum_, size in zip(total, kind.saved, strict=True)])
    on_host = min(offloaded, _recomputed(counts)) * shape.stream_bytes
    return total._replace(residual=total.residual - on_host) if on_host else total


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
        recomputed_before = _recomputed(before)
        # A recomputed layer, this one or one after it, has called the one before, whose input is on the host.
        called = kind.is_recomputed or _recomputed(counts) > recomputed_before
        visit = LayerVisit(
            kind=kind,
            saved_before=_saved(shape, before, offloaded),
            done_weights=sum(after.weights for after in kinds[index + 1 :]),
            moment=kind.fullest_growing,
            is_first=index == 0,
            is_last=index == last,
            is_inner=not every_layer and index not in ends_of_kinds,
            awaits_input=called and 0 < recomputed_before <= offloaded,
        )
        yield from (visit._replace(moment=moment) for moment in kind.moments) if every_layer else (visit,)


def _for_weights_bytes(shape: LocalShape) -> int:
    """Of a layer: the gradients of what its projections, its norms and its MLP made."""
    qkv_columns = shape.columns(shape.spec.query_size + 2 * shape.spec.kv_size)
    return shape.element_bytes * shape.tokens * qkv_columns + 4 * shape.stream_bytes


def _tables_bytes(shape: LocalShape, span: RankSpan) -> int:
    """Rope keeps cosines and sines, one row for all, learned positions their numbers; each routed layer counts every
    expert's tokens, and dropped ones (models/mlp.py), from step to step."""
    spec, layers = shape.spec, range(span.first, span.last)
    ropes = {rope for layer in layers if (rope := spec.rope_of(layer)) is not None}
    pairs = sum(int(spec.rope_dim * rope.rotated_share) // 2 for rope in ropes)
    positions_bytes = INT64_BYTES * shape.length if spec.rope is None and span.has_embedding else 0
    counted_bytes = 0
    if spec.experts is not None:
        counters = spec.experts.count * (1 if spec.experts.capacity_factor is None else 2)
        counted_bytes = INT32_BYTES * counters * sum(map(spec.is_routed, layers))
    return 2 * shape.length * pairs * shape.element_bytes + positions_bytes + counted_bytes
