"""Story: a step as a list of moments, each with everything that is in memory then; a phase's peak is its fullest one.

A field of `StepMoment`, `Resident` or `OnHost` is a line of the ledger. Its component, detail and reason are annotated
here; its bytes are computed in step.py. A search only sums each moment, while a ledger turns the fullest moment's
fields into lines: one arithmetic, two views.
"""

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Annotated, Any, NamedTuple, get_type_hints

from tightfit.memory.ledger import Component, Line, Phase, Place

KEPT = "kept for backward: saved.py"
OFFLOADED = "on the host: levers.offload"
TEACHER = "teacher"
ROUNDING = "rounding"
FROZEN = "frozen, under adapters"


class About(NamedTuple):
    """A ledger line but for its bytes."""

    component: Component
    detail: str
    why: str


class StepMoment(NamedTuple):
    """One moment of a step: bytes on the GPU beside `Resident`; fields that are not given are 0.

    The first six fields are those of SavedBytes, in its order: `StepMoment(*saved, …)`.
    """

    residual: Annotated[int, About("activations", "residual", KEPT)] = 0
    norms: Annotated[int, About("activations", "norms", KEPT)] = 0
    attention: Annotated[int, About("activations", "attention", KEPT)] = 0
    mlp: Annotated[int, About("activations", "mlp", KEPT)] = 0
    routing: Annotated[int, About("activations", "routing", KEPT)] = 0
    unsplit: Annotated[int, About("activations", ROUNDING, "allocator: unsplit ends of segments")] = 0
    other_micro_batches: Annotated[int, About("activations", "of other micro-batches", "in flight in the pipeline")] = 0
    outside_layers: Annotated[int, About("activations", "outside the layers", "final norm, rope, tokens by expert")] = 0
    stream: Annotated[int, About("activations", "residual stream", "the input of the layer at work")] = 0
    at_work: Annotated[int, About("activations", "at work in a layer or the loss", "alive in forward, not kept")] = 0
    layer_saved: Annotated[int, About("activations", "the layer at work", "what it kept, or computed again")] = 0
    activation_gradients: Annotated[int, About("activations", "gradients", "of activations: layer_moments.py")] = 0
    working_weights: Annotated[int, About("weights", "gathered", "FSDP2's whole weights, fp8: working_weights.py")] = 0
    earlier_gradients: Annotated[int, About("gradients", "from before", "DDP's buckets, sums of micro-batches")] = 0
    done_gradients: Annotated[int, About("gradients", "of layers done", "whole; shards under FSDP2")] = 0
    layer_gradients: Annotated[int, About("gradients", "of the layer at work", "as backward makes them")] = 0
    vocabulary_gradients: Annotated[int, About("gradients", "of the vocabulary", "of output projection, embedding")] = 0
    all_gradients: Annotated[int, About("gradients", "", "of all weights")] = 0
    update_copies: Annotated[int, About("gradients", "widened bucket", "float32, at most 256 MiB or one parameter")] = 0
    logits: Annotated[int, About("logits and loss", "logits", "a chunk, or all with their float32 copies")] = 0
    hidden: Annotated[int, About("logits and loss", "hidden states and their gradient", "made in forward")] = 0
    teacher: Annotated[int, About("activations", "teacher", "its forward pass, then its hidden states")] = 0
    kernel_workspace: Annotated[int, About("workspace", "attention or embedding", "float32 sums in backward")] = 0
    all_gather: Annotated[int, About("communication", "all-gather", "FSDP2: the last buffer, the next weights")] = 0
    reduce_scatter: Annotated[int, About("communication", "reduce-scatter", "FSDP2: freed at the next reduction")] = 0
    arriving: Annotated[int, About("communication", "from the host", "the next recomputed layer's input")] = 0


class Resident(NamedTuple):
    """Bytes on a rank's GPU from the first step to the last: states.py."""

    weights: Annotated[int, About("weights", "", "2 bytes a weight in 16 bits, 4 in float32; shards under FSDP2")] = 0
    masters: Annotated[int, About("master weights", "", "4 bytes beside 16-bit weights; FSDP2's float32 shards")] = 0
    moments: Annotated[int, About("optimizer states", "", "two moments in their format")] = 0
    unsplit: Annotated[int, About("optimizer states", ROUNDING, "allocator: unsplit ends of segments")] = 0
    staging: Annotated[int, About("workspace", "states and weights on their way", OFFLOADED)] = 0
    inputs: Annotated[int, About("inputs", "tokens and labels", "8 bytes each")] = 0
    cublas: Annotated[int, About("workspace", "cuBLAS", "one per thread that calls it")] = 0
    teacher: Annotated[int, About("weights", TEACHER, "of the teacher, as they are stored where compressed")] = 0
    scales: Annotated[int, About("optimizer states", "learned scales", "16 bytes a scale: quantize.scales")] = 0
    frozen: Annotated[int, About("weights", FROZEN, "as they are held: no gradients, no states")] = 0
    older_weights: Annotated[int, About("weights", "of one update before", "schedule 2bw: for those in flight")] = 0
    finished_gradients: Annotated[int, About("gradients", "of the step before", "schedule 2bw: wait for the norm")] = 0


class OnHost(NamedTuple):
    """Bytes that one rank keeps in host memory."""

    weights: Annotated[int, About("weights", "offloaded", OFFLOADED)] = 0
    masters: Annotated[int, About("master weights", "offloaded", OFFLOADED)] = 0
    moments: Annotated[int, About("optimizer states", "offloaded", OFFLOADED)] = 0
    checkpoints: Annotated[int, About("activations", "offloaded checkpoints", "levers.offload_checkpoints")] = 0
    teacher: Annotated[int, About("weights", TEACHER, "distill.place")] = 0


def state_bytes(holder: Resident | OnHost) -> int:
    """Bytes that a checkpoint saves: weights, masters and moments."""
    return holder.weights + holder.masters + holder.moments


def fullest(moments: Iterable[StepMoment]) -> StepMoment:
    """The moment with most bytes."""
    return max(moments, key=sum)


def lines(parts: NamedTuple, phase: Phase, rank: int, place: Place = "gpu") -> Iterator[Line]:
    """A line of the ledger for every field with bytes."""
    for size, (component, detail, why) in zip(parts, _about(type(parts)), strict=True):
        if size:
            yield Line(component=component, phase=phase, bytes=size, place=place, detail=detail, why=why, rank=rank)


@cache
def _about(parts: type[Any]) -> tuple[About, ...]:
    hints = get_type_hints(parts, include_extras=True)
    return tuple(hints[name].__metadata__[0] for name in parts._fields)
