"""Saved tensors: everything a layer keeps from forward to backward, one line each with its reason.

Derived from what the code saves on a GPU (models/decoder.py, models/layers/mlp.py, kernels/), not from a general rule:
norms keep their input and one or two float32 per row; rope keeps its tables only; flash attention keeps q, k, v, its
output (which is the output projection's input) and a float32 per row and head; the gated MLP keeps gate and up and
computes their product again. A test compares each layer's bytes with what autograd really keeps.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import Literal, NamedTuple

from tightfit.jobs.engine import ENGINES
from tightfit.jobs.precision import FLOAT32_BYTES, INT32_BYTES, INT64_BYTES
from tightfit.levers.policy.recompute import needs_last_product
from tightfit.memory.formulas.adapter import low_rank_bytes
from tightfit.memory.formulas.local_shape import LocalShape
from tightfit.models.spec import ModelSpec

SavedKind = Literal["residual", "norms", "attention", "mlp", "routing"]
STATISTICS = "row_norm keeps float32 per row"


class SavedTensor(NamedTuple):
    """One tensor kept for backward, or several of equal size."""

    kind: SavedKind
    name: str
    bytes: int
    why: str
    tensors: int = 1
    """Number of tensors of equal size; `bytes` is their sum."""


class SavedBytes(NamedTuple):
    """Bytes of saved tensors by kind; `unsplit` is what the allocator counts beyond them (segments.py)."""

    residual: int = 0
    norms: int = 0
    attention: int = 0
    mlp: int = 0
    routing: int = 0
    unsplit: int = 0


def total(tensors: Iterable[SavedTensor]) -> int:
    """Bytes of all `tensors`."""
    return sum(tensor.bytes for tensor in tensors)


def untiled_saved(shape: LocalShape, layer: int) -> list[SavedTensor]:
    """All that an untiled layer keeps if nothing is recomputed; in the lists of this file some lines have no bytes."""
    return [*attention_saved(shape), *_mlp_saved(shape, layer), *_engine_saved(shape, layer)]


@lru_cache(maxsize=4096)
def attention_saved(shape: LocalShape) -> tuple[SavedTensor, ...]:
    """Tensors saved by a layer's first half, from the residual stream to attention's projected output."""
    spec, latent, stream_bytes, stream_rows = shape.spec, shape.spec.latent, shape.stream_bytes, shape.stream_tokens
    input_bytes = shape.inputs_bytes if shape.trains("q", "k", "v") else 0
    heads_bytes = shape.query_bytes + shape.key_bytes if spec.qk_norm else 0
    heads = 2 if spec.qk_norm_joint else shape.heads + shape.kv_heads
    # Latent attention's down-projections (models/layers/latent_attention.py): each vector before and after its norm.
    kv_rank, query_rank = (latent.kv_rank, latent.query_rank or 0) if latent is not None else (0, 0)
    kv_bytes, query_bytes = (shape.tokens * rank * shape.element_bytes for rank in (kv_rank, query_rank))
    return (
        SavedTensor("residual", "layer input", stream_bytes, "row_norm keeps its input"),
        SavedTensor("norms", "attention norm statistics", statistic_bytes(spec, stream_rows), STATISTICS),
        SavedTensor("attention", "projections' input", input_bytes, "q, k and v share the norm's output"),
        SavedTensor("attention", "adapters' A x", low_rank_bytes(shape, "q", "k", "v", "o"), "B's gradient needs it"),
        *_norm_saved(spec, "queries and keys", heads_bytes, shape.tokens * heads),
        *_norm_saved(spec, "keys' and values' vectors", kv_bytes, shape.tokens),
        SavedTensor("attention", "keys' and values' vectors", kv_bytes, "the input of what is made of them"),
        *_norm_saved(spec, "queries' vectors", query_bytes, shape.tokens),
        SavedTensor("attention", "queries' vectors", query_bytes, "the input of what is made of them"),
        *attended(shape),
        *_norm_saved(spec, "attention output", stream_bytes if spec.sandwich_norms else 0, stream_rows),
    )


def attended(shape: LocalShape) -> list[SavedTensor]:
    """Tensors saved by attention itself."""
    logsumexp_bytes = FLOAT32_BYTES * shape.tokens * shape.heads
    unpadded_bytes = shape.tokens * shape.spec.output_size * shape.element_bytes if shape.spec.latent is not None else 0
    codes_bytes = shape.query_bytes // shape.element_bytes if shape.codes_inputs else 0
    return [
        SavedTensor("attention", "queries", shape.query_bytes, "flash attention keeps what rope wrote"),
        SavedTensor("attention", "keys and values", 2 * shape.attended_key_bytes, "kept once per key head", 2),
        SavedTensor("attention", "output", shape.query_bytes, "attention and the output projection share it"),
        SavedTensor("attention", "logsumexp", logsumexp_bytes, "flash attention keeps float32 per row and head"),
        SavedTensor("attention", "unpadded output", unpadded_bytes, "the output projection's input"),
        SavedTensor("attention", "output's codes", codes_bytes, "the output projection's input in fp8"),
        SavedTensor("attention", "output returned", shape.returned_bytes, "the output projection's is a copy"),
    ]


def _norm_saved(spec: ModelSpec, name: str, input_bytes: int, rows: int) -> tuple[SavedTensor, ...]:
    """A norm of `input_bytes` in `rows`, where the model has it."""
    norm_bytes = statistic_bytes(spec, rows) if input_bytes else 0
    before = SavedTensor("norms", f"{name} before norm", input_bytes, "row_norm keeps its input")
    return before, SavedTensor("norms", f"{name} norm statistics", norm_bytes, STATISTICS)


def statistic_bytes(spec: ModelSpec, rows: int) -> int:
    """Statistics that a norm saves per row: 1/rms, and the mean of a LayerNorm."""
    return FLOAT32_BYTES * rows * (2 if spec.norm == "layer" else 1)


def _mlp_saved(shape: LocalShape, layer: int) -> list[SavedTensor]:
    """Tensors saved by a layer's second half: from the residual sum after attention to the MLP's output."""
    spec, stream_bytes, stream_rows = shape.spec, shape.stream_bytes, shape.stream_tokens
    input_bytes = stream_bytes if spec.is_routed(layer) else shape.inputs_bytes
    read_bytes = input_bytes if shape.trains("gate", "up") else 0
    low_bytes = low_rank_bytes(shape, "gate", "up", "down")
    return [
        SavedTensor("residual", "sum after attention", stream_bytes, "row_norm keeps the sum it norms"),
        SavedTensor("norms", "MLP norm statistics", statistic_bytes(spec, stream_rows), STATISTICS),
        *(_experts_saved(shape) if spec.is_routed(layer) else _dense_saved(shape, spec.mlp_size)),
        SavedTensor("mlp", "input", read_bytes, "gate and up projections (or router) share the norm's output"),
        SavedTensor("mlp", "adapters' A x", low_bytes, "B's gradient needs it"),
        *_norm_saved(spec, "MLP output", stream_bytes if spec.sandwich_norms else 0, stream_rows),
    ]


def _dense_saved(shape: LocalShape, width: int) -> list[SavedTensor]:
    spec, inner_bytes = shape.spec, shape.inner_bytes(width)
    product_bytes = inner_bytes if shape.trains("down") else 0
    if not spec.gated:
        activated_bytes = product_bytes // (shape.element_bytes if shape.codes_inputs else 1)
        return [
            SavedTensor("mlp", "up", inner_bytes, "the activation keeps its input"),
            SavedTensor("mlp", "activated", activated_bytes, "the down projection keeps its input"),
        ]
    # Projections with biases or adapters, or on a mesh, are by themselves, and down keeps its input.
    apart_bytes = product_bytes if shape.adapted is not None or spec.mlp_bias or shape.mesh_ranks else 0
    return [
        SavedTensor("mlp", "gate and up", 2 * inner_bytes, "gated_mlp keeps both, and not their product", 2),
        SavedTensor("mlp", "product", apart_bytes, "the down projection, which is by itself, keeps its input"),
    ]


def _experts_saved(shape: LocalShape) -> list[SavedTensor]:
    """Tensors saved by kernels/experts/routed_mlp.py: gate and up of every (token, expert) row, and the routing.

    Expert ranks (parallel/expert.py; load assumed balanced) also keep the rows they received, and the permutation of
    rows before sending and after receiving.
    """
    tokens, element_bytes, experts = shape.tokens, shape.element_bytes, shape.spec.experts
    assert experts is not None
    chosen, travels = experts.per_token * tokens, shape.expert > 1
    probabilities_bytes = FLOAT32_BYTES * (tokens + 1) * experts.count
    weights_bytes = chosen * element_bytes + (FLOAT32_BYTES * (chosen + tokens) if experts.normalise else 0)
    index_bytes = INT64_BYTES * (2 * chosen + (3 if travels else 1) * shape.routed_rows)
    index_bytes += INT32_BYTES * experts.count // shape.expert
    logits_bytes = FLOAT32_BYTES * tokens * (experts.count + 1) if experts.z_weight else 0
    biases_bytes = INT64_BYTES * chosen + tokens * experts.count * element_bytes if shape.spec.mlp_bias else 0
    received_bytes = shape.routed_bytes if travels else 0
    is_gated = experts.shared_size and experts.shared_gated
    gated_bytes = shape.hidden_bytes + tokens * element_bytes if is_gated else 0
    inner_bytes = 2 * shape.experts_inner_bytes
    return [
        SavedTensor("routing", "router probabilities", probabilities_bytes, "softmax output, balance shares"),
        SavedTensor("routing", "chosen experts and rows", index_bytes, "top-k, each row's token, each token's rows"),
        SavedTensor("routing", "weights", weights_bytes, "normalising keeps both sides, combining its factor"),
        SavedTensor("mlp", "experts' gate and up", inner_bytes, "no copies of tokens, no products, no outputs", 2),
        SavedTensor("routing", "router logits", logits_bytes, "float32, and their logsumexp: the z-loss"),
        SavedTensor("routing", "weights by expert", biases_bytes, "of down biases: [tokens, experts]"),
        SavedTensor("mlp", "received rows", received_bytes, "the input of this rank's experts"),
        *(_dense_saved(shape, experts.shared_size) if experts.shared_size else ()),
        SavedTensor("mlp", "shared expert's output and gate", gated_bytes, "mul keeps both sides"),
    ]


def product_saved(shape: LocalShape, layer: int) -> list[SavedTensor]:
    """Products kept by `checkpoint_keep: matmuls` beside attention's: the output projection's result, gate and up; the
    down projection's only where a norm or a router needs it."""
    spec, hidden_bytes, experts = shape.spec, shape.hidden_bytes, shape.spec.experts
    projected = SavedTensor("attention", "projected output", hidden_bytes, "the sum with the residual is made again")
    if experts is None or not spec.is_routed(layer):
        inner_bytes = spec.up_projections * shape.inner_bytes(spec.mlp_size)
        normed_bytes = hidden_bytes if spec.sandwich_norms else 0
        return [
            projected,
            SavedTensor("mlp", "gate and up", inner_bytes, "the activation is computed again"),
            SavedTensor("mlp", "output", normed_bytes, "its norm is computed again"),
        ]
    scores_bytes = shape.tokens * experts.count * shape.element_bytes
    output_bytes = shape.routed_bytes if needs_last_product(spec, layer) else 0
    experts_bytes = 2 * shape.experts_inner_bytes + output_bytes
    gate_bytes = hidden_bytes + shape.tokens * shape.element_bytes if experts.shared_gated else 0
    shared_bytes = 2 * shape.inner_bytes(experts.shared_size) + gate_bytes if experts.shared_size else 0
    return [
        projected,
        SavedTensor("routing", "router's scores", scores_bytes, "the choice of experts is computed again"),
        SavedTensor("mlp", "experts' products", experts_bytes, "gate and up; with a shared expert the outputs too"),
        SavedTensor("mlp", "shared expert's gate, up, output and share", shared_bytes, "multiplied again"),
    ]


def _engine_saved(shape: LocalShape, layer: int) -> list[SavedTensor]:
    """Tensors that other engines save beyond tightfit's: float32 copies of norms' inputs, rope's products, the
    activated gate and its product with up; some keep the input that tensor ranks all-gather for a block."""
    if shape.engine_name == "tightfit":
        return []
    spec, memory = shape.spec, ENGINES[shape.engine_name].memory
    norms = memory.norm_copies if spec.norm != "layer" else min(1.0, memory.norm_copies)
    rope = memory.rope_copies if spec.rope is not None else 0.0
    norm_bytes, rope_bytes = int(norms * shape.stream_bytes), int(rope * (shape.query_bytes + shape.key_bytes))
    activation_copies = memory.gate_copies if spec.gated else memory.activation_copies
    gate_bytes = int(activation_copies * shape.inner_bytes(spec.active_mlp_size(layer)))
    gathered_bytes = 2 * (shape.hidden_bytes - shape.stream_bytes)  # of both blocks
    kept_bytes = gathered_bytes if memory.keeps_gathered and shape.sequence_parallel else 0
    return [
        SavedTensor("norms", "unfused norms", norm_bytes, "single operations keep copies"),
        SavedTensor("attention", "unfused rope", rope_bytes, "products with sine and cosine"),
        SavedTensor("mlp", "unfused activation", gate_bytes, "activated gate and product are kept"),
        SavedTensor("attention", "gathered inputs", kept_bytes, "kept instead of gathered again"),
    ]
