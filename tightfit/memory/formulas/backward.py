"""Backward: the fullest of its moments, with what each way of holding weights and gradients adds to it.

Weights' gradients, while backward is at layer k (parallel/data.py, train/step.py):

- one GPU, one micro-batch: they grow from the head down, `element` bytes each.
- accumulation and DDP: all are there already; those of the operation at work exist twice until they are added.
- FSDP2: the layer at work has whole ones; layers done have shards. The buffer that a layer's gradients were reduced
  from (float32 where masters are) stays until the next layer's are reduced. The root's and the embedding's gradients
  stay whole until its last callback. ZeRO-3 gathers the next layer's weights meanwhile; the embedding's are not needed.
- update in backward: those of the layer at work, and the output projection's where the embedding shares it.
- offload: as without; where they are updated inside backward, what waits for the link is bounded.

The embedding's gradient is summed by torch's embedding_dense_backward, which for more than 3072 tokens holds a float32
row per token and tenth token (EmbeddingBackwardKernel.cu) and sorts the indices (four int64 each).
"""

from collections.abc import Iterator

from tightfit.memory.formulas.labels import Label
from tightfit.memory.formulas.rank import KINDS, Place, RankMemory

SMALL_EMBEDDING_TOKENS = 3072
ROWS_PER_PARTIAL = 10
WIDE, INDEX = 4, 8
CODE_BYTES = 2

ACTIVATION_LABELS: tuple[Label, ...] = (
    *(Label("activations", kind, "kept for backward, see formulas/layer.py") for kind in KINDS),
    Label("activations", "of other micro-batches", "in flight in the pipeline"),
    Label("activations", "outside the layers", "final norm, rope tables"),
)
BACKWARD_LABELS: tuple[Label, ...] = (
    Label("weights", "gathered", "FSDP2: the layer at work and the root, or what is not let go of yet; fp8 codes"),
    Label("gradients", "from before", "DDP's buckets, and sums over earlier micro-batches"),
    *ACTIVATION_LABELS,
    Label("activations", "the layer at work", "what it kept, or computed again"),
    Label("activations", "gradients", "of activations, see formulas/layer.py"),
    Label("gradients", "of layers done", "as they stay"),
    Label("gradients", "of the layer at work", "as backward makes them"),
    Label("gradients", "of the vocabulary", "output projection and embedding"),
    Label("logits and loss", "logits and their gradients", "kernels/linear_cross_entropy.py"),
    Label("workspace", "attention or embedding", "float32 sums of the backward kernels"),
    Label(
        "communication",
        "all-gather and reduce-scatter",
        "FSDP2's buffers; gradients to the host and checkpoints from there",
    ),
)


def backward(at: RankMemory) -> tuple[int, ...]:
    """The fullest moment."""
    return max(_moments(at), key=sum)


def _moments(at: RankMemory) -> Iterator[tuple[int, ...]]:
    if at.cost.stage.has_head:
        yield _at_loss(at)
    last, inner = at.cost.places[0], at.cost.inner
    buffer = at.states.reduced * at.cost.widest.all if at.is_sharded and not at.sums_whole else 0
    for place in at.cost.places:
        yield _at_layer(at, inner if place is last and inner is not None and buffer > last.kept - inner.kept else place)
        if at.is_sharded:
            yield _at_reduction(at, place)
    if at.cost.stage.has_embedding:
        yield _at_embedding(at)
    if at.is_sharded and at.cost.root:
        yield _at_last_reduction(at)


def _at_loss(at: RankMemory) -> tuple[int, ...]:
    """The fused loss's float32 sums become the output projection's gradient."""
    cost, loss, e = at.cost, at.cost.loss, at.element
    narrow = e * cost.vocabulary if loss.weight_gradient_copies and e < WIDE else 0
    gathered = e * (cost.root if at.layout.zero == 3 else cost.params.all) if at.is_sharded else codes(at)
    prefetched = e * cost.widest.all if at.layout.zero == 3 else 0
    return (
        gathered, at.states.gradients, *cost.kinds, at.others, cost.outside, 0, 0, 0, 0,
        narrow + loss.weight_gradient_copies, loss.backward - loss.weight_gradient_copies, 0, prefetched,
    )  # fmt: skip


def _at_layer(at: RankMemory, place: Place) -> tuple[int, ...]:
    held, cost, e = at.states, at.cost, at.element
    there = held.gradients and not at.is_sharded
    moment = place.added if there else place.growing
    made = e * ((moment.made_weights if there else moment.weights) + moment.weight_copies)
    gathered, moving = codes(at, place.after), 0
    if at.is_sharded:
        gathered = e * _gathered(at, place)
        moving = _prefetched(at, place) + (0 if place.is_last or at.sums_whole else held.reduced * cost.widest.all)
    return (
        gathered, held.gradients, *place.before, at.others, cost.tables, moment.held, moment.gradients,
        _done(at, place.after), made, _waiting(at, at_last_layer=place.is_last), 0, moment.workspace,
        moving + _arriving(at, place),
    )  # fmt: skip


def codes(at: RankMemory, done: int = 0) -> int:
    """Layers' weights in fp8, as they are and transposed, from forward until a layer's backward is `done`."""
    if at.levers.matmul == "native":
        return 0
    return CODE_BYTES * (at.cost.params.all - at.cost.root - at.cost.embedding - done)


def _at_reduction(at: RankMemory, place: Place) -> tuple[int, ...]:
    """A layer is done: its whole gradients beside the buffer they are reduced from; its own weights are gone."""
    held, cost, e = at.states, at.cost, at.element
    before, done, made, head = held.gradients, _done(at, place.after), e * place.own, _waiting(at)
    if at.sums_whole:
        before, done, made, head = _whole_sums(at, cost.params.all - place.after), _shards(at, place.after), 0, 0
    return (
        e * _gathered_after(at, place), before, *place.before, at.others, cost.tables, 0, cost.stream, done, made, head,
        0, 0, _prefetched(at, place) + held.reduced * place.own,
    )  # fmt: skip


def _gathered_after(at: RankMemory, place: Place) -> int:
    """Weights that are whole once a layer has let go of its own."""
    if at.layout.zero == 3:
        return at.cost.root
    if _stays_gathered(at) and not at.sums_whole:
        return at.cost.params.all
    return at.cost.params.all - place.after - place.own


def _whole_sums(at: RankMemory, weights: int) -> int:
    return at.states.reduced * weights


def _shards(at: RankMemory, weights: int) -> int:
    return at.states.reduced * weights // at.ranks


def _gathered(at: RankMemory, place: Place) -> int:
    """Weights that are whole at a layer."""
    if at.layout.zero == 3:
        return at.cost.root + place.own
    return at.cost.params.all if _stays_gathered(at) else at.cost.params.all - place.after


def _prefetched(at: RankMemory, place: Place) -> int:
    """The next layer's weights, on their way."""
    return at.element * place.own if at.layout.zero == 3 and not place.is_first else 0


def _done(at: RankMemory, weights: int) -> int:
    """Gradients of so many weights as they stay; where the link to the host takes them, those that still wait."""
    grown, most = round(at.states.growing * weights), at.states.waiting
    return grown if most is None else min(grown, most)


def _waiting(at: RankMemory, *, at_last_layer: bool = False) -> int:
    """The output projection's gradient, until the embedding's joins it or FSDP2 reduces it with the root.

    One that goes to the host is there until the next gradient is.
    """
    held = at.states
    if not at.cost.stage.has_head or (held.gradients and not at.is_sharded):
        return 0
    goes = held.waiting is not None and at_last_layer
    if at.levers.update_in_backward and not at.spec.tied and not goes:
        return 0
    return at.element * at.cost.vocabulary


def _arriving(at: RankMemory, place: Place) -> int:
    """Of recomputed layers whose inputs are on the host: while one is at work, the next one's comes."""
    return at.arriving if place.awaits else 0


def _at_embedding(at: RankMemory) -> tuple[int, ...]:
    """Everything else is done: the embedding's gradient, its kernel's sums, and what has waited for the end."""
    held, cost, e = at.states, at.cost, at.element
    gathered = moving = 0
    if at.is_sharded:
        gathered = e * (cost.params.all if _stays_gathered(at) else cost.root)
        moving = 0 if at.sums_whole else held.reduced * cost.widest.all
    return (
        gathered, held.gradients, *(0,) * len(KINDS), at.others, cost.tables, 0, cost.stream, _layers_done(at), 0,
        _waiting(at) + e * cost.vocabulary, 0, _embedding_sums(at), moving,
    )  # fmt: skip


def _at_last_reduction(at: RankMemory) -> tuple[int, ...]:
    """FSDP2's last callback: the root's and the embedding's whole gradients, and the buffer one is reduced from."""
    held, cost, e = at.states, at.cost, at.element
    whole, largest = cost.root + cost.embedding, max(cost.root, cost.embedding)
    gathered = e * cost.params.all if _stays_gathered(at) and not at.sums_whole else 0
    before, done, made = held.gradients, _layers_done(at) + round(held.growing * largest), e * whole
    if at.sums_whole:
        before, done, made = _whole_sums(at, whole), _shards(at, cost.params.all - whole + largest), 0
    return (
        gathered, before, *(0,) * len(KINDS), at.others, cost.tables, 0, 0, done, 0, made, 0, 0,
        held.reduced * largest,
    )  # fmt: skip


def _stays_gathered(at: RankMemory) -> bool:
    """Whether weights stay whole from one micro-batch to the next."""
    return at.accumulation > 1 and at.layout.zero < 3


def _layers_done(at: RankMemory) -> int:
    """Gradients of all layers, as they stay."""
    return _done(at, at.cost.params.all - at.cost.root - at.cost.embedding)


def _embedding_sums(at: RankMemory) -> int:
    tokens = at.share.tokens
    if tokens <= SMALL_EMBEDDING_TOKENS:
        return 0
    rows = min(tokens, at.spec.vocab_size) + tokens // ROWS_PER_PARTIAL
    return WIDE * rows * at.spec.hidden_size + 4 * INDEX * tokens
