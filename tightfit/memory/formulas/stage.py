"""Stage: what shapes say about one pipeline rank and one micro-batch, found once and remembered.

A search tries many ways of holding weights for each. Layers alike (routed or not, windowed or not, what they keep) are
a kind. From one layer of a kind to the next, what is kept shrinks and gradients grow by the same amounts, so backward
is fullest at the first or the last of a kind: only these are visited, and two for FSDP2: the last layer but one, as
what a layer's gradients were reduced from is there beside every layer but the last, and the second, as the next layer's
weights are gathered beside every layer but the first. Where no more than so many bytes of gradients wait
for the host, they stop growing in between, and every moment of every layer is visited.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.workload import Workload
from tightfit.levers.policy.offload import bounds_gradients, offloaded_count, stored_bytes
from tightfit.levers.policy.recompute import KeepLevel
from tightfit.memory.formulas.keeping import layer_levels
from tightfit.memory.formulas.layer import forward_extra, layer_cost, saved_bytes
from tightfit.memory.formulas.layer_moments import LayerMoment
from tightfit.memory.formulas.local_shape import LocalShape
from tightfit.memory.formulas.params import Params
from tightfit.memory.formulas.pipeline import PipelineStage, pipeline_stage
from tightfit.memory.formulas.saved import INDEX, OFFSET, SavedBytes, attention_saved, statistic_bytes
from tightfit.memory.formulas.tensor_mesh import held_embedding, held_layer, held_matrices, held_vocabulary
from tightfit.models.spec import ModelSpec


class LayerKind(NamedTuple):
    """What distinguishes layers."""

    is_routed: bool
    is_windowed: bool
    level: KeepLevel


class LayerVisit(NamedTuple):
    """Backward at work in one layer."""

    saved_before: SavedBytes
    """What the layers before it keep."""
    own_weights: int
    apart_weights: int
    """Of those, experts that are a group of their own (parallel/data.py), as other ranks hold other ones,"""
    padding_weights: int
    """Of experts, those that FSDP2 pads a stack with, which have no gradient (local_shape.py),"""
    kept_at_reduction: int
    """and what the layer still holds when their gradients are reduced,"""
    attention_after: int
    """and at its attention's fullest moment after that."""
    done_weights: int
    """Of the layers after it, which are done."""
    growing: LayerMoment
    """A moment of it, its fullest where gradients of weights come into being,"""
    summing: LayerMoment
    """and where they are added to sums that are there."""
    is_first: bool
    is_last: bool
    is_inner: bool
    """The second or the last layer but one, visited for FSDP2 alone."""
    awaits_input: bool
    """Whether the input of a recomputed layer before it is on its way from the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes and numbers of weights of one pipeline rank."""

    stage: PipelineStage
    params: Params
    weights: int
    """All of `params`."""
    padding_weights: int
    """Of those, what FSDP2 pads stacks of experts with, which have no gradient (local_shape.py)."""
    layer_weights: int
    layer_params: Params
    """The same, experts apart."""
    widest: int
    """Weights of the layer that has most,"""
    widest_group: int
    """of the largest group of a layer that FSDP2 gathers at once,"""
    widest_dense: int
    """and of the largest that leads a layer: without experts that are a group of their own."""
    vocabulary: int
    """Weights of the embedding or the output projection."""
    shares_embedding: bool
    """Whether these two are one."""
    root: int
    """Weights outside layers but for an untied embedding: final norm, output projection, tied embedding, positions."""
    embedding: int
    """Weights of an untied embedding; 0 on other stages."""
    last_layer_matrices: tuple[int, ...]
    """Weights of each matrix of the last layer."""
    offloaded: int
    """Recomputed layers whose input is on the host."""
    saved: SavedBytes
    """Activations of one micro-batch that layers keep on the GPU."""
    outside_bytes: int
    """Kept outside the layers: the final norm's input, rope tables, tokens by expert."""
    tables_bytes: int
    """Of those, what is there while layers run backward."""
    forward_extra_bytes: int
    """Alive besides when forward ends its last layer."""
    working_bytes: int
    """Alive in a forward that keeps nothing."""
    stream_bytes: int
    """The residual stream between two layers."""
    for_weights_bytes: int
    """Gradients that one micro-batch keeps from backward for inputs to backward for weights."""
    visits: tuple[LayerVisit, ...]
    """From the last layer to the first."""


def stage_memory(workload: Workload, layout: Layout, levers: Levers, shape: LocalShape, rank: int) -> StageMemory:
    """What pipeline rank `rank` of `layout` has."""
    spec = workload.spec
    shape_of_pipeline = layout.pipeline, layout.stages_per_rank
    stage = pipeline_stage(spec, workload.sequence_length, *shape_of_pipeline, rank, in_v=layout.in_v)
    levels = layer_levels(spec, levers, shape, stage.first, stage.last)
    return remembered_stage(
        spec,
        shape,
        stage,
        levels,
        shares_embedding=spec.tied and stage.has_embedding and stage.has_head,
        offloaded=_offloaded_checkpoints(spec, shape, levers, levels) if levers.offload_checkpoints else 0,
        every_layer=bounds_gradients(levers),
    )


def checkpoint_bytes(spec: ModelSpec, shape: LocalShape, levers: Levers) -> int:
    """The input of a recomputed layer on the host."""
    return stored_bytes(shape.stream_tokens, spec.hidden_size, shape.element_bytes, levers.checkpoint_format)


def _offloaded_checkpoints(spec: ModelSpec, shape: LocalShape, levers: Levers, levels: tuple[KeepLevel, ...]) -> int:
    """How many inputs of recomputed layers are on the host."""
    recomputed = len(levels) - levels.count("everything")
    return offloaded_count(recomputed, checkpoint_bytes(spec, shape, levers), levers.checkpoint_host_bytes)


@lru_cache(maxsize=65536)
def remembered_stage(
    spec: ModelSpec,
    shape: LocalShape,
    stage: PipelineStage,
    levels: tuple[KeepLevel, ...],
    *,
    shares_embedding: bool,
    offloaded: int,
    every_layer: bool = False,
) -> StageMemory:
    """Of a stage whose layers keep `levels`, of the first `offloaded` recomputed ones the input on the host."""
    layers = _StageLayers(spec, shape, stage, levels, offloaded)
    in_layers, outside = stage_params(spec, shape, stage, shares_embedding=shares_embedding)
    vocabulary = held_vocabulary(spec, shape)
    embedding = vocabulary if stage.has_embedding and not shares_embedding else 0
    tables_bytes = _tables_bytes(spec, shape, stage, layers) + layers.counted_tokens_bytes()
    final_norm_bytes = shape.stream_bytes(spec) + statistic_bytes(spec, shape.stream_tokens) if stage.has_head else 0
    return StageMemory(
        stage=stage,
        params=in_layers.plus(Params(outside)),
        weights=in_layers.all + outside,
        padding_weights=sum(count * layers.padding(kind) for kind, count in layers.counts.items()),
        layer_weights=in_layers.all,
        layer_params=in_layers,
        widest=max(params.all for params in layers.weights.values()),
        widest_group=layers.widest_group(),
        widest_dense=layers.widest_dense(),
        vocabulary=vocabulary,
        shares_embedding=shares_embedding,
        root=outside - embedding,
        embedding=embedding,
        last_layer_matrices=held_matrices(spec, stage.last - 1, shape),
        offloaded=offloaded,
        saved=layers.saved(layers.counts),
        outside_bytes=tables_bytes + final_norm_bytes,
        tables_bytes=tables_bytes,
        forward_extra_bytes=forward_extra(spec, stage.last - 1, shape, levels[-1]),
        working_bytes=max(layer_cost(spec, layer, shape).forward_working for layer in layers.examples.values()),
        stream_bytes=shape.stream_bytes(spec),
        for_weights_bytes=len(levels) * _for_weights_bytes(spec, shape),
        visits=tuple(layers.visits(every_layer=every_layer))[::-1],
    )


@lru_cache(maxsize=65536)
def stage_params(
    spec: ModelSpec, shape: LocalShape, stage: PipelineStage, *, shares_embedding: bool
) -> tuple[Params, int]:
    """Weights of a stage's layers, and outside them: the embedding, the final norm and the output projection."""
    in_layers = Params()
    example = {spec.is_routed(layer): layer for layer in range(stage.first, stage.last)}
    for is_routed, count in Counter(spec.is_routed(layer) for layer in range(stage.first, stage.last)).items():
        in_layers = in_layers.plus(held_layer(spec, example[is_routed], shape), count)
    before = held_embedding(spec, shape) if stage.has_embedding else 0
    head = 0 if shares_embedding else held_vocabulary(spec, shape)
    after = spec.norm_params + head if stage.has_head else 0
    return in_layers, before + after


class _StageLayers:
    """The layers of a stage by kind."""

    def __init__(
        self, spec: ModelSpec, shape: LocalShape, stage: PipelineStage, levels: tuple[KeepLevel, ...], offloaded: int
    ) -> None:
        self.spec, self.shape, self.offloaded = spec, shape, offloaded
        self.kinds = _layer_kinds(spec, stage.first, stage.last, levels)
        self.counts = Counter(self.kinds)
        self.examples = {kind: stage.first + self.kinds.index(kind) for kind in self.counts}
        """A layer of each kind."""
        self.weights = {kind: held_layer(spec, n, shape) for kind, n in self.examples.items()}
        self.saved_of_kind = {kind: saved_bytes(spec, n, shape, kind.level) for kind, n in self.examples.items()}

    def apart(self, kind: LayerKind) -> int:
        """Experts of a layer that are a group of their own."""
        return self.weights[kind].experts if self.shape.expert > 1 else 0

    def padding(self, kind: LayerKind) -> int:
        """Of a layer's weights."""
        if not self.shape.padded_experts or not kind.is_routed:
            return 0
        padding_share = 1 - self.shape.experts(self.spec) / self.shape.padded_experts
        return round(padding_share * self.weights[kind].experts)

    def counted_tokens_bytes(self) -> int:
        """Each routed layer counts every expert's tokens, and dropped ones (models/mlp.py), from step to step."""
        if self.spec.experts is None:
            return 0
        routed = sum(count for kind, count in self.counts.items() if kind.is_routed)
        counters = 1 if self.spec.experts.capacity_factor is None else 2
        return OFFSET * routed * counters * self.spec.experts.count

    def widest_group(self) -> int:
        """Weights of a layer's largest group."""
        return max(max(self.apart(kind), params.all - self.apart(kind)) for kind, params in self.weights.items())

    def widest_dense(self) -> int:
        """Weights of a layer's first group."""
        return max(params.all - self.apart(kind) for kind, params in self.weights.items())

    def _kept_at_reduction(self, kind: LayerKind) -> int:
        """What attention has kept, and the gradient of the MLP's input."""
        if not self.apart(kind):
            return 0
        kept_bytes = sum(tensor.bytes for tensor in attention_saved(self.spec, self.shape))
        return kept_bytes + self.shape.hidden_bytes(self.spec)

    def _attention_after(self, kind: LayerKind) -> int:
        if not self.apart(kind):
            return 0
        moments = layer_cost(self.spec, self.examples[kind], self.shape).backward
        attention = next(moment for moment in moments if moment.name == "attention")
        return attention.held_bytes

    def saved(self, counts: Mapping[LayerKind, int]) -> SavedBytes:
        """What so many layers of each kind keep; of the first `offloaded` recomputed ones the input is not there."""
        total = SavedBytes()
        for kind, count in counts.items():
            one = self.saved_of_kind[kind]
            total = SavedBytes(*[sum_ + count * size for sum_, size in zip(total, one, strict=True)])
        on_host = min(self.offloaded, _recomputed(counts)) * self.shape.stream_bytes(self.spec)
        return total._replace(residual=total.residual - on_host) if on_host else total

    def visits(self, *, every_layer: bool) -> Iterator[LayerVisit]:
        """Backward at the layers where it may be fullest, from the first layer to the last."""
        count = len(self.kinds)
        firsts = {self.kinds.index(kind) for kind in self.counts}
        lasts = {count - 1 - self.kinds[::-1].index(kind) for kind in self.counts}
        ends_of_kinds = firsts | lasts
        for index in range(count) if every_layer else sorted(ends_of_kinds | {max(0, count - 2), min(1, count - 1)}):
            visit = self._visit(index, is_inner=not every_layer and index not in ends_of_kinds)
            kind = self.kinds[index]
            moments: tuple[LayerMoment, ...] = (visit.growing,)
            if every_layer:
                recomputed = kind.level != "everything"
                moments = _moments(self.spec, self.examples[kind], self.shape, recomputed=recomputed)
            yield from (visit._replace(growing=moment) for moment in moments)

    def _visit(self, index: int, *, is_inner: bool) -> LayerVisit:
        """Backward at the layer with this number in the stage, at its fullest moment."""
        kind, before = self.kinds[index], Counter(self.kinds[:index])
        after_weights = sum((count - before[each]) * self.weights[each].all for each, count in self.counts.items())
        growing, summing = _fullest(self.spec, self.examples[kind], self.shape, recomputed=kind.level != "everything")
        return LayerVisit(
            saved_before=self.saved(before),
            own_weights=self.weights[kind].all,
            apart_weights=self.apart(kind),
            padding_weights=self.padding(kind),
            kept_at_reduction=self._kept_at_reduction(kind),
            attention_after=self._attention_after(kind),
            done_weights=after_weights - self.weights[kind].all,
            growing=growing,
            summing=summing,
            is_first=index == 0,
            is_last=index == len(self.kinds) - 1,
            is_inner=is_inner,
            awaits_input=self._awaits_input(kind, before),
        )

    def _awaits_input(self, kind: LayerKind, before: Mapping[LayerKind, int]) -> bool:
        """A recomputed layer, this one or one after it, has called the one before, whose input is on the host."""
        recomputed_before, all_recomputed = _recomputed(before), _recomputed(self.counts)
        called = kind.level != "everything" or all_recomputed > recomputed_before
        return called and 0 < recomputed_before <= self.offloaded


@lru_cache(maxsize=65536)
def _layer_kinds(spec: ModelSpec, first: int, last: int, levels: tuple[KeepLevel, ...]) -> tuple[LayerKind, ...]:
    """Of the layers [first, last)."""
    return tuple(
        LayerKind(spec.is_routed(layer), spec.window_of(layer) is not None, level)
        for layer, level in zip(range(first, last), levels, strict=True)
    )


def _moments(spec: ModelSpec, layer: int, shape: LocalShape, *, recomputed: bool) -> tuple[LayerMoment, ...]:
    """Of a layer's backward, and of computing it again where it is."""
    cost = layer_cost(spec, layer, shape)
    return (cost.recompute, *cost.backward) if recomputed else cost.backward


@lru_cache(maxsize=65536)
def _fullest(spec: ModelSpec, layer: int, shape: LocalShape, *, recomputed: bool) -> tuple[LayerMoment, LayerMoment]:
    """The moment that needs most where gradients of weights come into being, and where they are added to sums."""
    moments, element_bytes = _moments(spec, layer, shape, recomputed=recomputed), shape.element_bytes
    growing = max(moments, key=lambda each: each.held_bytes + element_bytes * (each.made_weights + each.weight_copies))
    summing = max(moments, key=lambda each: each.held_bytes + element_bytes * (each.new_weights + each.weight_copies))
    return growing, summing


def _recomputed(counts: Mapping[LayerKind, int]) -> int:
    return sum(count for kind, count in counts.items() if kind.level != "everything")


def _for_weights_bytes(spec: ModelSpec, shape: LocalShape) -> int:
    """Of a layer: the gradients of what its projections, its norms and its MLP made."""
    qkv_columns = shape.columns(spec.query_size + 2 * spec.kv_size)
    return shape.element_bytes * shape.tokens * qkv_columns + 4 * shape.stream_bytes(spec)


def _tables_bytes(spec: ModelSpec, shape: LocalShape, stage: PipelineStage, layers: _StageLayers) -> int:
    """Rope keeps cosines and sines, one row for all; learned positions their numbers."""
    ropes = {rope for layer in layers.examples.values() if (rope := spec.rope_of(layer)) is not None}
    pairs = sum(int(spec.rope_dim * rope.rotated_share) // 2 for rope in ropes)
    positions_bytes = INDEX * shape.length if spec.rope is None and stage.has_embedding else 0
    return 2 * shape.length * pairs * shape.element_bytes + positions_bytes
