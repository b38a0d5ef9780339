"""Training: the fullest moment of every phase of a step, on every pipeline rank that differs.

A moment is a tuple of bytes with a fixed meaning for each place in it (`LABELS`): a search adds the tuple up
(`peak`), a ledger makes a line of each number (`training_ledger`). One arithmetic, two views.

- init: what lives as long as the run. States exist from the start (train/optimizer.py), so no first step differs.
- forward: its end, all activations kept and the last layer's own work.
- loss: beside the activations a chunk of logits and the gradients that the fused loss makes at once.
- backward: activations shrink from the last layer to the first while gradients of weights grow; the fullest moment is
  at the loss, at the first or last layer of a class, or at the embedding (backward.py). All are tried.
- optimizer: gradients widened a bucket at a time beside masters.
- evaluation: a forward that keeps nothing. save: the host holds what the file will.

How ZeRO, DDP, pipelines and the rest change this is said in states.py, backward.py, pipeline.py and share.py.
"""

from collections.abc import Iterator

from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.state_format import is_torch_adamw
from tightfit.jobs.workload import Workload
from tightfit.memory.formulas.backward import ACTIVATION_LABELS, BACKWARD_LABELS, backward, codes
from tightfit.memory.formulas.labels import Label
from tightfit.memory.formulas.logits import chunk_bytes
from tightfit.memory.formulas.overheads import DEFAULT, Overheads
from tightfit.memory.formulas.params import largest_in_layer
from tightfit.memory.formulas.pipeline import telling_ranks
from tightfit.memory.formulas.rank import KINDS, RankMemory, rank_memory
from tightfit.memory.formulas.share import ceil
from tightfit.memory.formulas.states import IN_FLIGHT_BYTES
from tightfit.memory.ledger import Ledger, Line, Phase

BUCKET_BYTES = 256 * 2**20
"""Of train/optimizer.py, which this file must not import; a test compares them."""
FACTORED_CHUNK = 2**22
"""Of levers/optimizer_states.py; the same."""
WIDE = 4

RESIDENT_LABELS: tuple[Label, ...] = (
    Label(
        "weights", "", "2 bytes a weight in 16 bits, 4 in float32; shards where FSDP2 splits what it does not narrow"
    ),
    Label("master weights", "", "4 bytes a weight beside 16-bit ones; FSDP2's float32 shards"),
    Label("optimizer states", "", "two moments in their format"),
    Label("inputs", "tokens and labels", "8 bytes each"),
    Label("workspace", "cuBLAS", "one per thread that calls it"),
    Label("workspace", "states and weights on their way", "levers.offload: what passes between host and GPU"),
)
FORWARD_LABELS: tuple[Label, ...] = (
    Label("weights", "gathered", "FSDP2: the layer at work and the root, or all under ZeRO-1 and 2; fp8 codes"),
    Label("gradients", "from before", "DDP's buckets, and sums over earlier micro-batches"),
    *ACTIVATION_LABELS,
    Label("activations", "at work in the last layer", "alive in forward but not kept"),
    Label("communication", "all-gather", "FSDP2 holds the last gathered buffer until the next is there"),
)
LOSS_LABELS: tuple[Label, ...] = (
    *FORWARD_LABELS,
    Label("logits and loss", "logits", "one chunk, or all of them with their copies"),
    Label("logits and loss", "hidden states and their gradient", "linear_cross_entropy makes it in forward"),
    Label("gradients", "of the output projection, float32", "linear_cross_entropy sums it over chunks"),
)
OPTIMIZER_LABELS: tuple[Label, ...] = (
    Label("gradients", "", "of all weights"),
    Label(
        "gradients", "widened bucket", "train/optimizer.py: float32 gradients of at most 256 MiB, or of one parameter"
    ),
)
EVALUATION_LABELS: tuple[Label, ...] = (
    FORWARD_LABELS[0],
    Label("gradients", "DDP's buckets", "they stay between steps"),
    Label("activations", "residual", "the input of the layer at work"),
    Label("activations", "at work in a layer, or in the loss", "alive in forward; nothing is kept"),
    Label("communication", "all-gather", "FSDP2 holds the last gathered buffer until the next is there"),
)
HOST_LABELS: tuple[Label, ...] = (
    Label("weights", "offloaded", "levers.offload"),
    Label("master weights", "offloaded", "levers.offload"),
    Label("optimizer states", "offloaded", "levers.offload"),
    Label("activations", "offloaded checkpoints", "levers.offload_checkpoints"),
)


def peak(workload: Workload, layout: Layout, levers: Levers, overheads: Overheads = DEFAULT) -> tuple[int, int]:
    """The most bytes a training step needs on one card, slack and context included, and of the host's per rank."""
    gpu = host = 0
    for rank in _telling_ranks(workload, layout):
        at = rank_memory(workload, layout, levers, rank)
        resident = sum(_resident(at, overheads))
        for _, numbers, _ in _phases(at):
            gpu = max(gpu, resident + sum(numbers))
        host = max(host, sum(_host(at)))
    return gpu + _slack(gpu, overheads) + overheads.context_bytes, host


def host_parts(workload: Workload, layout: Layout, levers: Levers) -> tuple[int, int]:
    """Bytes that one rank keeps on the host: states (with weights), and checkpoints."""
    found = [_host(rank_memory(workload, layout, levers, rank)) for rank in _telling_ranks(workload, layout)]
    *states, checkpoints = max(found, key=sum)
    return sum(states), checkpoints


def _telling_ranks(workload: Workload, layout: Layout) -> tuple[int, ...]:
    """Pipeline ranks of which one is the fullest."""
    if layout.pipeline == 1:
        return (0,)
    split = layout.schedule == "zero-bubble"
    return telling_ranks(workload.spec, workload.sequence_length, layout.pipeline, layout.stages_per_rank, split)


def training_ledger(workload: Workload, layout: Layout, levers: Levers, overheads: Overheads = DEFAULT) -> Ledger:
    """Every phase of a step, on every pipeline rank, line by line."""
    lines: list[Line] = []
    for rank in range(layout.pipeline):
        at = rank_memory(workload, layout, levers, rank)
        host = _host(at)
        nothing: tuple[Phase, tuple[int, ...], tuple[Label, ...]] = ("init", (), ())
        for phase, numbers, labels in (nothing, *_phases(at), _evaluation(at), ("save", (), ())):
            found = list(_lines(phase, rank, _resident(at, overheads), RESIDENT_LABELS))
            found += _lines(phase, rank, numbers, labels)
            lines += [*found, *_not_allocated(phase, rank, sum(line.bytes for line in found), overheads)]
            lines += _lines(phase, rank, host, HOST_LABELS, host=True)
        lines += _saved(at, rank)
    return Ledger("formulas", tuple(lines))


def _phases(at: RankMemory) -> Iterator[tuple[Phase, tuple[int, ...], tuple[Label, ...]]]:
    """The moments of a step, without what lives as long as the run."""
    yield "forward", _forward(at), FORWARD_LABELS
    if at.cost.stage.has_head:
        yield "loss", _loss(at), LOSS_LABELS
    yield "backward", backward(at), BACKWARD_LABELS
    yield "optimizer", _optimizer(at), OPTIMIZER_LABELS


def _resident(at: RankMemory, overheads: Overheads) -> tuple[int, ...]:
    held = at.states
    return held.weights, held.masters, held.moments, at.inputs, overheads.workspace_bytes, held.staging


def _forward(at: RankMemory) -> tuple[int, ...]:
    end = (*_kept(at, _gathered_in_forward(at)), at.cost.forward_extra, _all_gather(at))
    if at.states.host:
        return max(end, _at_start(at), key=sum)
    return max(end, _at_first_gathering(at), key=sum) if at.layout.zero == 3 else end


def _at_start(at: RankMemory) -> tuple[int, ...]:
    """Gradients of the last step whose updates have not been waited for, when the embedding is looked up."""
    cost, held, most = at.cost, at.states, at.states.waiting
    away = cost.params.all * held.host_moments // max(1, held.host_moments + held.moments)
    if not held.moments:
        away -= cost.vocabulary if most is None else cost.embedding
    left = at.element * away
    if most is not None:  # the link has worked on the others, the embedding's last
        left = min(left, most - (IN_FLIGHT_BYTES if cost.embedding else 0))
    return 0, max(left, held.gradients), *(0,) * len(KINDS), at.others, cost.tables, 0, 0


def _at_first_gathering(at: RankMemory) -> tuple[int, ...]:
    """FSDP2 lets go of the root's all-gather buffer only when the first group after it is whole as well."""
    whole = at.element * (at.cost.root + (at.cost.embedding or at.cost.widest.all))
    return whole, at.states.gradients, *(0,) * len(KINDS), at.others, at.cost.tables, 0, whole


def _kept(at: RankMemory, gathered: int) -> tuple[int, ...]:
    """Gathered weights, gradients from before and all activations, when forward has reached the last layer."""
    return gathered, at.states.gradients, *at.cost.kinds, at.others, at.cost.outside


def _gathered_in_forward(at: RankMemory) -> int:
    """FSDP2: the root stays whole; layers too under ZeRO-1 and 2. Of whole weights, their codes in fp8."""
    if not at.is_sharded:
        return codes(at)
    cost = at.cost
    return at.element * (cost.root + cost.widest.all if at.layout.zero == 3 else cost.params.all)


def _all_gather(at: RankMemory) -> int:
    """One layer's buffer; where weights stay gathered it is the first micro-batch's, which has no sums of gradients."""
    if not at.is_sharded:
        return 0
    stays = at.layout.zero < 3 and at.accumulation > 1
    return max(0, at.element * at.cost.widest.all - (at.states.gradients if stays else 0))


def _loss(at: RankMemory) -> tuple[int, ...]:
    loss = at.cost.loss
    rest = loss.forward - loss.logits - loss.weight_gradient_copies
    gathered = at.element * at.cost.root if at.layout.zero == 3 else _gathered_in_forward(at)
    return (
        *_kept(at, gathered), 0, _all_gather(at), loss.logits, rest, loss.weight_gradient_copies,
    )  # fmt: skip


def _optimizer(at: RankMemory) -> tuple[int, int]:
    """The first bucket is widened while all gradients are there; under FSDP2 nothing is, and only shards are left."""
    held, count = at.states, at.cost.params.all
    if at.levers.update_in_backward:
        return min(held.waiting or 0, at.element * count), 0
    if at.is_sharded:
        return held.reduced * at.cost.params.shard(at.ranks, at.layout.expert), 0
    if not is_torch_adamw(at.levers, wide=held.masters > 0 or at.element == WIDE):
        return at.element * count, _intermediates(at, count)
    return at.element * count, _widened(at, count) if held.masters else 0


def _intermediates(at: RankMemory, count: int) -> int:
    """Our kernels update where things lie; a factored second moment is spread out again a chunk at a time."""
    return 3 * WIDE * min(FACTORED_CHUNK, count) if at.levers.optimizer_states == "factored" else 0


def _widened(at: RankMemory, count: int) -> int:
    """Float32 copies less the gradients they replace, which DDP's buckets keep: the embedding's first, alone."""
    cost, stays = at.cost, at.ranks > 1 and at.layout.pipeline == 1
    first = cost.vocabulary if cost.stage.has_embedding else 0
    largest = largest_in_layer(at.spec, cost.stage.last - 1, at.share.tensor, at.share.expert)
    freed = 0 if stays else at.element
    bucket = min(BUCKET_BYTES, WIDE * count)
    return max(WIDE * first, WIDE * largest - freed * first, bucket - freed * bucket // WIDE)


def _host(at: RankMemory) -> tuple[int, ...]:
    held = at.states
    return held.host_weights, held.host_masters, held.host_moments, at.host_checkpoints


def _evaluation(at: RankMemory) -> tuple[Phase, tuple[int, ...], tuple[Label, ...]]:
    work = max(at.cost.working, _evaluated_loss(at) if at.cost.stage.has_head else 0)
    replicated = at.ranks > 1 and at.layout.pipeline == 1 and not at.is_sharded
    buckets = at.element * at.cost.params.all if replicated else 0
    numbers = (_gathered_in_forward(at), buckets, at.cost.stream, work, _all_gather(at))
    return "evaluation", numbers, EVALUATION_LABELS


def _evaluated_loss(at: RankMemory) -> int:
    """Hidden states and a chunk of logits that nothing else makes room for, or all of them."""
    if at.levers.loss == "plain":
        return at.cost.loss.forward
    tokens, size, columns = at.share.tokens, at.spec.hidden_size, ceil(at.spec.vocab_size, at.share.tensor)
    chunk = chunk_bytes(tokens, columns, size, at.element, at.levers.loss_chunk_bytes, training=False)
    return tokens * size * at.element + chunk


def _saved(at: RankMemory, rank: int) -> Iterator[Line]:
    """safetensors puts a whole file together in memory before it writes it (train/checkpoint.py)."""
    held = at.states
    numbers = held.weights, held.masters, held.moments
    labels = tuple(Label(label.component, "to be written", "save_file") for label in RESIDENT_LABELS[:3])
    return _lines("save", rank, numbers, labels, host=True)


def _lines(
    phase: Phase, rank: int, numbers: tuple[int, ...], labels: tuple[Label, ...], *, host: bool = False
) -> Iterator[Line]:
    for size, label in zip(numbers, labels, strict=True):
        if size:
            yield Line(
                component=label.component, phase=phase, bytes=size, place="host" if host else "gpu",
                detail=label.detail, why=label.why, rank=rank,
            )  # fmt: skip


def _not_allocated(phase: Phase, rank: int, allocated: int, overheads: Overheads) -> Iterator[Line]:
    labels = (
        Label("allocator slack", "", "a flat share of what is allocated: see overheads.py"),
        Label("cuda context", "", "driver and kernels: see overheads.py"),
    )
    return _lines(phase, rank, (_slack(allocated, overheads), overheads.context_bytes), labels)


def _slack(allocated: int, overheads: Overheads) -> int:
    return int(allocated * overheads.slack_share)
