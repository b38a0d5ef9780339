"""Saved tensors: everything an untiled layer keeps from forward to backward, one line each with its reason.

Derived from what the code saves on a GPU (models/decoder.py, models/mlp.py, kernels/), not from a general rule: norms
keep their input and one or two float32 per row; rope keeps its tables only; flash attention keeps q, k, v, its output
(which is the output projection's input) and a float32 per row and head; the gated MLP keeps gate and up and computes
their product again. A test compares each layer's bytes with what autograd really keeps.
"""

from functools import lru_cache
from typing import Literal, NamedTuple

from tightfit.levers.policy.recompute import needs_last_product
from tightfit.memory.formulas.local_shape import LocalShape
from tightfit.models.spec import Latent, ModelSpec

Kind = Literal["residual", "norms", "attention", "mlp", "routing"]
STATISTIC, INDEX, OFFSET = 4, 8, 4
"""Bytes of a float32 per row, and of an index."""


class SavedTensor(NamedTuple):
    """One tensor kept for backward."""

    kind: Kind
    name: str
    bytes: int
    why: str


class SavedBytes(NamedTuple):
    """Saved tensors added up by kind."""

    residual: int = 0
    norms: int = 0
    attention: int = 0
    mlp: int = 0
    routing: int = 0


@lru_cache(maxsize=4096)
def attention_saved(spec: ModelSpec, shape: LocalShape) -> tuple[SavedTensor, ...]:
    """Of a layer's first half: from the residual stream to the attention's output before it is added."""
    stream_bytes, norm_bytes = shape.stream_bytes(spec), statistic_bytes(spec, shape.stream_tokens)
    saved = [
        SavedTensor("residual", "layer input", stream_bytes, "row_norm keeps its input"),
        SavedTensor("norms", "attention norm statistics", norm_bytes, "row_norm keeps float32 per row"),
        SavedTensor("attention", "projections' input", shape.inputs_bytes(spec), "q, k and v share the norm's output"),
    ]
    if spec.qk_norm:
        before_bytes = shape.query_bytes(spec) + shape.key_bytes(spec)
        heads = 2 if spec.qk_norm_joint else shape.heads(spec) + shape.kv_heads(spec)
        rows = shape.tokens * heads
        saved += [
            SavedTensor("norms", "queries and keys before their norms", before_bytes, "row_norm keeps its input"),
            SavedTensor(
                "norms", "query and key norm statistics", statistic_bytes(spec, rows), "row_norm keeps float32 per row"
            ),
        ]
    if spec.latent is not None:
        saved += _latent_saved(spec, spec.latent, shape)
    saved += attended(spec, shape)
    if spec.sandwich_norms:
        saved += [
            SavedTensor("norms", "attention output before its norm", stream_bytes, "row_norm keeps its input"),
            SavedTensor("norms", "attention output norm statistics", norm_bytes, "row_norm keeps float32 per row"),
        ]
    return tuple(saved)


def attended(spec: ModelSpec, shape: LocalShape) -> list[SavedTensor]:
    """Of attention itself."""
    logsumexp_bytes = STATISTIC * shape.tokens * shape.heads(spec)
    unpadded = []
    if spec.latent is not None:
        unpadded_bytes = shape.tokens * spec.output_size * shape.element_bytes
        unpadded = [SavedTensor("attention", "unpadded output", unpadded_bytes, "the output projection's input")]
    saved = [
        SavedTensor("attention", "queries", shape.query_bytes(spec), "flash attention keeps what rope wrote"),
        SavedTensor("attention", "keys and values", 2 * shape.attended_key_bytes(spec), "kept once per key head"),
        SavedTensor("attention", "output", shape.query_bytes(spec), "attention and the output projection share it"),
        SavedTensor("attention", "logsumexp", logsumexp_bytes, "flash attention keeps float32 per row and head"),
        *unpadded,
    ]
    if shape.codes_inputs:
        codes_bytes = shape.query_bytes(spec) // shape.element_bytes
        saved.append(SavedTensor("attention", "output's codes", codes_bytes, "the output projection's input in fp8"))
    if returned_bytes := shape.returned_bytes(spec):
        saved.append(SavedTensor("attention", "output returned", returned_bytes, "the output projection's is a copy"))
    return saved


def _latent_saved(spec: ModelSpec, latent: Latent, shape: LocalShape) -> list[SavedTensor]:
    """Of latent attention (models/latent_attention.py): each small vector before and after its norm."""
    vectors = [("keys' and values'", latent.kv_rank)]
    if latent.query_rank:
        vectors.append(("queries'", latent.query_rank))
    saved = []
    for whose, rank in vectors:
        vector_bytes, norm_bytes = shape.tokens * rank * shape.element_bytes, STATISTIC * shape.tokens
        saved += [
            SavedTensor("norms", f"{whose} small vectors", vector_bytes, "row_norm keeps its input"),
            SavedTensor("norms", f"{whose} norm statistics", norm_bytes, "row_norm keeps float32 per row"),
            SavedTensor("attention", f"{whose} normed vectors", vector_bytes, "the input of what is made of them"),
        ]
    return saved


@lru_cache(maxsize=4096)
def mlp_saved(spec: ModelSpec, layer: int, shape: LocalShape) -> tuple[SavedTensor, ...]:
    """Of the second half: from the sum with the attention's output to the MLP's output before it is added."""
    input_bytes = shape.stream_bytes(spec) if spec.is_routed(layer) else shape.inputs_bytes(spec)
    stream_bytes, norm_bytes = shape.stream_bytes(spec), statistic_bytes(spec, shape.stream_tokens)
    saved = [
        SavedTensor("residual", "sum after attention", stream_bytes, "row_norm keeps the sum it norms"),
        SavedTensor("norms", "MLP norm statistics", norm_bytes, "row_norm keeps float32 per row"),
        SavedTensor("mlp", "input", input_bytes, "gate and up projections (or router) share the norm's output"),
    ]
    saved += _experts_saved(spec, shape) if spec.is_routed(layer) else _dense_saved(spec, spec.mlp_size, shape)
    if spec.sandwich_norms:
        saved += [
            SavedTensor("norms", "MLP output before its norm", stream_bytes, "row_norm keeps its input"),
            SavedTensor("norms", "MLP output norm statistics", norm_bytes, "row_norm keeps float32 per row"),
        ]
    return tuple(saved)


def _dense_saved(spec: ModelSpec, width: int, shape: LocalShape) -> list[SavedTensor]:
    inner_bytes = shape.inner_bytes(width)
    if not spec.gated:
        activated_bytes = inner_bytes // (shape.element_bytes if shape.codes_inputs else 1)
        return [
            SavedTensor("mlp", "up", inner_bytes, "the activation keeps its input"),
            SavedTensor("mlp", "activated", activated_bytes, "the down projection keeps its input"),
        ]
    saved = [SavedTensor("mlp", "gate and up", 2 * inner_bytes, "gated_mlp keeps both, and not their product")]
    if spec.mlp_bias or shape.mesh_ranks:
        why = "projections with biases, or on a mesh, are by themselves, and down keeps its input"
        saved.append(SavedTensor("mlp", "product", inner_bytes, why))
    return saved


def _experts_saved(spec: ModelSpec, shape: LocalShape) -> list[SavedTensor]:
    """What kernels/routed_mlp.py keeps: gate and up of every (token, expert) row.

    Expert ranks (parallel/expert.py, in balance) keep what they received, and the way of their rows on both sides.
    """
    experts = spec.experts
    assert experts is not None
    tokens, element_bytes, chosen = shape.tokens, shape.element_bytes, experts.per_token * shape.tokens
    rows = shape.routed_rows(spec)
    probabilities_bytes = STATISTIC * (tokens + 1) * experts.count
    weights_bytes = chosen * element_bytes + (STATISTIC * (chosen + tokens) if experts.normalise else 0)
    travels = shape.expert > 1
    indices_bytes = INDEX * (2 * chosen + (3 if travels else 1) * rows) + OFFSET * experts.count // shape.expert
    inner_bytes = shape.experts_inner_bytes(spec)
    saved = [
        SavedTensor("routing", "router probabilities", probabilities_bytes, "softmax output, balance shares"),
        SavedTensor("routing", "chosen experts and rows", indices_bytes, "top-k, each row's token, each token's rows"),
        SavedTensor("routing", "weights", weights_bytes, "normalising keeps both sides, combining its factor"),
        SavedTensor("mlp", "experts' gate and up", 2 * inner_bytes, "no copies of tokens, no products, no outputs"),
    ]
    if experts.z_weight:
        logits_bytes = STATISTIC * tokens * (experts.count + 1)
        saved.append(SavedTensor("routing", "router logits", logits_bytes, "float32, and their logsumexp: the z-loss"))
    if spec.mlp_bias:
        biased_bytes = INDEX * chosen + tokens * experts.count * element_bytes
        saved.append(
            SavedTensor("routing", "weights by expert", biased_bytes, "of down biases: a [tokens, experts] product")
        )
    if travels:
        received_bytes = shape.copies_bytes(spec)
        saved.append(SavedTensor("mlp", "received rows", received_bytes, "the input of this rank's experts"))
    if experts.shared_size:
        gated_bytes = shape.hidden_bytes(spec) + tokens * element_bytes
        saved += _dense_saved(spec, experts.shared_size, shape)
    if experts.shared_size and experts.shared_gated:
        saved.append(SavedTensor("mlp", "shared expert's output and gate", gated_bytes, "mul keeps both sides"))
    return saved


def product_saved(spec: ModelSpec, layer: int, shape: LocalShape) -> list[SavedTensor]:
    """Results of the output projection and of the MLP's, the last only where a norm or a router needs it."""
    hidden_bytes = shape.hidden_bytes(spec)
    saved = [SavedTensor("attention", "projected output", hidden_bytes, "the sum with the residual is made again")]
    if not spec.is_routed(layer):
        inner_bytes = (2 if spec.gated else 1) * shape.inner_bytes(spec.mlp_size)
        saved.append(SavedTensor("mlp", "gate and up", inner_bytes, "the activation is computed again"))
        if spec.sandwich_norms:
            saved.append(SavedTensor("mlp", "output", hidden_bytes, "its norm is computed again"))
        return saved
    experts = spec.experts
    assert experts is not None
    scores_bytes = shape.tokens * experts.count * shape.element_bytes
    output_bytes = shape.copies_bytes(spec) if needs_last_product(spec, layer) else 0
    experts_bytes = 2 * shape.experts_inner_bytes(spec) + output_bytes
    saved += [
        SavedTensor("routing", "router's scores", scores_bytes, "the choice of experts is computed again"),
        SavedTensor("mlp", "experts' products", experts_bytes, "gate and up; with a shared expert the outputs too"),
    ]
    if experts.shared_size:
        gate_bytes = hidden_bytes + shape.tokens * shape.element_bytes if experts.shared_gated else 0
        shared_bytes = 2 * shape.inner_bytes(experts.shared_size) + gate_bytes
        saved.append(SavedTensor("mlp", "shared expert's gate, up, output and share", shared_bytes, "multiplied again"))
    return saved


def statistic_bytes(spec: ModelSpec, rows: int) -> int:
    """What a norm keeps per row: 1/rms, and the mean of a LayerNorm."""
    return STATISTIC * rows * (2 if spec.norm == "layer" else 1)
