"""In flight: bytes that a pipeline rank keeps of micro-batches other than the one at work, at the rank's peak.

pipeline.py counts micro-batches in flight under each schedule. Of each, a rank keeps the activations and the outputs
that its stages sent on; the model's last stage keeps the loss; and where backward is split (zero-bubble), gradients of
activations are kept until the backward for weights.
"""

from collections.abc import Iterator
from operator import mul
from typing import NamedTuple

from tightfit.jobs.layout import Layout
from tightfit.memory.formulas.local_shape import ceil
from tightfit.memory.formulas.pipeline import RankSpan, all_forwards_first, micro_batches_in_flight, most_in_turns
from tightfit.memory.formulas.stage import StageMemory


class InFlight(NamedTuple):
    """Other micro-batches at a pipeline rank's peak."""

    other_bytes: int
    """Activations of the micro-batches in flight other than the one at work."""
    beside_embedding_bytes: int
    """The same when the one at work goes backward through the embedding, with its activations in later stages."""
    summed_micro_batches: int
    """Micro-batches whose gradients are summed by the end of the backward at the peak; 1: no earlier gradients."""
    share_with_sums: float = 1.0
    """Share of the rank's layers that have gradients of earlier micro-batches by then."""
    freed_bytes: int | None = None
    """If the peak is in the first backward: activations freed by the time that all layers have gradients."""


def in_flight(layout: Layout, stage: StageMemory, loss_bytes: int, micro_batches: int, stream_bytes: int) -> InFlight:
    """Other micro-batches of a rank whose stages send `stream_bytes` on, and whose head keeps `loss_bytes` of each."""
    if layout.pipeline == 1:
        return InFlight(other_bytes=0, beside_embedding_bytes=0, summed_micro_batches=micro_batches)
    stages, span = layout.stages_per_rank, stage.span
    layers = span.layers_by_stage
    sent_bytes = (stages - span.has_head) * stream_bytes  # the output of each stage but the model's last
    each_bytes = sum(stage.saved) + stage.outside_bytes + sent_bytes
    loss_bytes *= span.has_head
    if layout.schedule == "interleaved":
        most = most_in_turns(layout, span.rank, micro_batches, layers)
        other_bytes = max(0, ceil(each_bytes * most.before_backward, sum(layers)) - each_bytes)
        beside_embedding_bytes = ceil(each_bytes * most.beside_first_stage, sum(layers))
    else:
        kept_loss_bytes = loss_bytes if stages == 1 else 0  # in a V a loss is followed by its backward at once
        other_bytes = max(_other_bytes(layout, stage, micro_batches, each_bytes, kept_loss_bytes))
        beside_embedding_bytes = other_bytes
    if micro_batches > 1 and all_forwards_first(layout, span.rank, micro_batches):
        # Interleaved, a rank's first stage begins backward after K backwards of each later one.
        backwards_before = (stages - 1) * layout.pipeline + 1
        freed_bytes = backwards_before * each_bytes // stages + loss_bytes
        return InFlight(other_bytes, beside_embedding_bytes, summed_micro_batches=1, freed_bytes=freed_bytes)
    # If all micro-batches go backward through a rank's last stage before any goes through another stage, only the last
    # has sums of gradients.
    first_backwards = 2 * layout.pipeline - 1 - span.rank if layout.in_v else layout.pipeline
    last_alone = stages > 1 and micro_batches <= first_backwards
    share = layers[-1] / sum(layers) if last_alone else 1.0
    return InFlight(other_bytes, beside_embedding_bytes, micro_batches, share)


def _other_bytes(
    layout: Layout, stage: StageMemory, micro_batches: int, each_bytes: int, loss_bytes: int
) -> Iterator[int]:
    """Bytes of other micro-batches at each time when a rank may be fullest; one keeps `each_bytes` in all stages."""
    layers = stage.span.layers_by_stage

    def of_stages(counts: tuple[int, ...], bytes_each: int) -> int:
        kept_layers = sum(map(mul, counts, layers))
        return ceil(bytes_each * kept_layers, sum(layers))

    for kept, waiting in _times(layout, stage.span, micro_batches):
        kept_bytes = max(0, of_stages(kept, each_bytes) - each_bytes) + (sum(kept) - 1) * loss_bytes
        yield kept_bytes + of_stages(waiting, stage.for_weights_bytes)


def _times(layout: Layout, span: RankSpan, micro_batches: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Candidates for the peak: per stage of a rank, micro-batches kept, and those that await backward for weights.

    In a V also two later times: when forwards are over, K are kept in the first stage and r in the second, of which
    r + 1 and r wait; and after a loss, one more is kept in the first stage and one less in the second, and one waits.
    """
    K, r, M = layout.pipeline, span.rank, micro_batches
    kept = micro_batches_in_flight(layout, r, M)
    if layout.schedule == "zero-bubble":
        return [(kept, (min(M, r + 1) if r else 0,))]
    times = [(kept, (0,) * len(kept))]
    if layout.schedule == "zb-v":
        times.append(((min(M, K), min(M, r)), (min(M, r + 1), min(M, r))))
    if layout.schedule == "zb-v" and not span.has_head:
        times.append(((min(M, 2 * K - r), min(M, r)), (1, 0)))
    return times
