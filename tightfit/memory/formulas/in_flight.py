"""In flight: bytes that a pipeline rank keeps of micro-batches other than the one at work, at the rank's peak.

pipeline.py counts micro-batches in flight under each schedule. Of each, a rank keeps the activations and the outputs
that its stages sent on; the model's last stage keeps the loss; and where backward is split (zero-bubble), gradients of
activations are kept until the backward for weights.
"""

from operator import mul
from typing import NamedTuple

from tightfit.memory.formulas.local_shape import ceil
from tightfit.memory.formulas.pipeline import all_forwards_first, micro_batches_in_flight, most_in_turns
from tightfit.memory.formulas.rank import RankMemory


class InFlight(NamedTuple):
    """Other micro-batches during a backward in which a rank may be fullest."""

    summed_micro_batches: int
    """Micro-batches whose gradients are summed by the end of that backward; 1: no earlier gradients."""
    other_bytes: int = 0
    """Activations of the micro-batches in flight other than the one at work."""
    beside_embedding_bytes: int = 0
    """The same when the one at work goes backward through the embedding, with its activations in later stages."""
    share_with_sums: float = 1.0
    """Share of the rank's layers that have gradients of earlier micro-batches by then."""


def in_flight(rank: RankMemory) -> tuple[InFlight, ...]:
    """Others during the first backward in which `rank` may be fullest; and, where no gradients are summed there yet,
    during its second if sums of gradients are larger than the activations freed in between."""
    layout, stage, span, micro_batches = rank.layout, rank.stage, rank.stage.span, rank.micro_batches
    if layout.pipeline == 1:
        return (InFlight(micro_batches),)
    stages, layers = layout.stages_per_rank, span.layers_by_stage
    sent_bytes = (stages - span.has_head) * rank.shape.stream_bytes  # the output of each stage but the model's last
    each_bytes = sum(stage.saved) + stage.outside_bytes + sent_bytes
    loss_bytes = rank.loss.kept * span.has_head
    if layout.schedule == "interleaved":
        most, beside_first_stage = most_in_turns(layout.pipeline, span.rank, micro_batches, layers)
        other_bytes = max(0, ceil(each_bytes * most, sum(layers)) - each_bytes)
        beside_embedding_bytes = ceil(each_bytes * beside_first_stage, sum(layers))
    else:
        kept_loss_bytes = loss_bytes if stages == 1 else 0  # in a V a loss is followed by its backward at once
        other_bytes = beside_embedding_bytes = _other_bytes(rank, each_bytes, kept_loss_bytes)
    if micro_batches > 1 and all_forwards_first(layout, span.rank, micro_batches):
        first = InFlight(1, other_bytes, beside_embedding_bytes)
        # Interleaved, a rank's first stage begins backward after K backwards of each later one.
        freed_bytes = ((stages - 1) * layout.pipeline + 1) * each_bytes // stages + loss_bytes
        if freed_bytes >= rank.states.reduced_gradient_bytes * stage.weights:
            return (first,)
        left = (max(0, size - freed_bytes) for size in (other_bytes, beside_embedding_bytes))
        return first, InFlight(micro_batches, *left)
    return (InFlight(micro_batches, other_bytes, beside_embedding_bytes, _share_with_sums(rank)),)


def _share_with_sums(rank: RankMemory) -> float:
    """All of a rank's layers; or its last stage's, where all micro-batches go backward through that stage before any
    goes through another: then only it has sums of gradients."""
    layout, span = rank.layout, rank.stage.span
    first_backwards = 2 * layout.pipeline - 1 - span.rank if layout.in_v else layout.pipeline
    last_alone = layout.stages_per_rank > 1 and rank.micro_batches <= first_backwards
    return span.layers_by_stage[-1] / sum(span.layers_by_stage) if last_alone else 1.0


def _other_bytes(rank: RankMemory, each_bytes: int, loss_bytes: int) -> int:
    """The most of other micro-batches, of which each keeps `each_bytes` in all stages of the rank, and its loss."""
    layers = rank.stage.span.layers_by_stage

    def of_stages(counts: tuple[int, ...], bytes_each: int) -> int:
        return ceil(bytes_each * sum(map(mul, counts, layers)), sum(layers))

    return max(
        max(0, of_stages(kept, each_bytes) - each_bytes)
        + (sum(kept) - 1) * loss_bytes
        + of_stages(waiting, rank.stage.for_weights_bytes)
        for kept, waiting in _times(rank)
    )


def _times(rank: RankMemory) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Candidates for the peak: per stage of a rank, micro-batches kept, and those that await backward for weights.

    In a V also two later times: when forwards are over, K are kept in the first stage and r in the second, of which
    r + 1 and r wait; and after a loss, one more is kept in the first stage and one less in the second, and one waits.
    """
    span, schedule = rank.stage.span, rank.layout.schedule
    K, r, M = rank.layout.pipeline, span.rank, rank.micro_batches
    kept = micro_batches_in_flight(rank.layout, r, M)
    if schedule == "zero-bubble":
        return [(kept, (min(M, r + 1) if r else 0,))]
    times = [(kept, (0,) * len(kept))]
    if schedule == "zb-v":
        times.append(((min(M, K), min(M, r)), (min(M, r + 1), min(M, r))))
    if schedule == "zb-v" and not span.has_head:
        times.append(((min(M, 2 * K - r), min(M, r)), (1, 0)))
    return times
