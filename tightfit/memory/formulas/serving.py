"""Serving: bytes of the weights in their format, of the key/value cache, and of one forward pass.

Quantized formats are those of GGUF files (ggml's blocks of 32 weights: Q8_0 holds a 16-bit scale and 32 bytes, Q4_0 a
scale and 16, Q4_1 a scale, a minimum and 16). Matrices are quantized; norms, biases and learned positions stay float32
there. The cache holds all positions; in layers with a window it holds pages for what running requests see and for the
tokens of a step (`pages_for`; serve/schedule/window_pages.py). In int8 or fp8 the key or value of a token and head is D
bytes and a scale. With latent attention a token has one small vector per layer.
Limits: blocks of other layers are not counted, of which the last per request is half empty on average.
"""

from typing import Literal

from tightfit.jobs.precision import FLOAT32_BYTES
from tightfit.memory.formulas.layer import layer_cost
from tightfit.memory.formulas.local_shape import LocalShape, ceil
from tightfit.memory.formulas.overheads import DEFAULT, Overheads
from tightfit.memory.formulas.story import About
from tightfit.memory.ledger import Ledger, Line, Phase
from tightfit.models.spec import ModelSpec

WeightFormat = Literal["fp32", "fp16", "bf16", "q8_0", "q4_1", "q4_0"]
CacheFormat = Literal["model", "int8", "fp8"]
"""How keys and values are kept: as the model computes them, or a byte each with a float32 scale per vector."""
SCALE_BYTES = 4
PREFILL_TOKENS = 2048
"""Tokens of prompts that a server reads at a time."""
BLOCK_POSITIONS = 16
"""Positions of a block of the cache."""


BLOCKS: dict[WeightFormat, tuple[int, int]] = {
    "fp32": (4, 1),
    "fp16": (2, 1),
    "bf16": (2, 1),
    "q8_0": (34, 32),
    "q4_1": (20, 32),
    "q4_0": (18, 32),
}
"""Bytes of a quantization block, and weights in it."""


def weight_bytes(spec: ModelSpec, form: WeightFormat) -> int:
    """All weights in `form`; norms, biases and learned positions are not quantized."""
    block_bytes, block_weights = BLOCKS[form]
    if block_weights == 1:
        return block_bytes * spec.params()
    norms = spec.norm_params * spec.norms_per_layer + spec.qk_norm_params
    attention = (spec.query_size + 2 * spec.kv_size) * spec.qkv_bias + spec.hidden_size * spec.output_bias
    mlp = (spec.up_projections * spec.mlp_size + spec.hidden_size) * spec.mlp_bias
    positions = spec.max_positions * spec.hidden_size if spec.rope is None else 0
    small = spec.layers * (norms + attention + mlp) + spec.norm_params + positions
    return ceil((spec.params() - small) * block_bytes, block_weights) + FLOAT32_BYTES * small


def cache_bytes(
    spec: ModelSpec, requests: int, length: int, element_bytes: int = 2, form: CacheFormat = "model"
) -> int:
    """Keys and values of `requests` requests of `length` tokens each, as our engine holds them."""
    window, whole, windowed = split_window(spec, length), spec.layers, 0
    if window is not None:
        windowed = len(spec.window_layers)
        whole -= windowed
    kept = 0 if window is None else min(requests * length, BLOCK_POSITIONS * pages_for(window, requests))
    return layer_token_bytes(spec, element_bytes, form) * (whole * requests * length + windowed * kept)


def split_window(spec: ModelSpec, length: int) -> int | None:
    """The window of the layers that keep pages, where requests have up to `length` tokens; None where all layers keep
    all positions."""
    return spec.window if spec.window_layers and spec.window is not None and spec.window < length else None


def pages_for(
    window: int, requests: int, step_tokens: int = PREFILL_TOKENS, block_positions: int = BLOCK_POSITIONS
) -> int:
    """Pages that are enough for the windows of all requests and for the tokens of a step.

    n positions in a row touch at most ⌈(n − 1) / block⌉ + 1 blocks: a request's are window − 1 and those of the step.
    """
    return requests * (ceil(window, block_positions) + 2) + ceil(step_tokens, block_positions)


def seen_cache_bytes(
    spec: ModelSpec, requests: int, length: int, element_bytes: int = 2, form: CacheFormat = "model"
) -> int:
    """Those of them that the next tokens attend to: in layers with a window its positions alone."""
    seen = (min(length, spec.window_of(layer) or length) for layer in range(spec.layers))
    return layer_token_bytes(spec, element_bytes, form) * requests * sum(seen)


def cache_bytes_per_token(spec: ModelSpec, element_bytes: int = 2, form: CacheFormat = "model") -> int:
    """Cache bytes of one token in all layers."""
    return layer_token_bytes(spec, element_bytes, form) * spec.layers


def stored_vectors(spec: ModelSpec) -> tuple[int, int, int]:
    """Vectors that a layer caches per token: kinds (keys, values), heads of each, and width.

    Latent attention caches one vector, from which keys and values of all heads are projected (serve/cache/latent.py).
    """
    if spec.latent is not None:
        return 1, 1, spec.latent.kv_rank + spec.latent.rope_dim
    return 2, spec.kv_heads, spec.head_dim


def layer_token_bytes(spec: ModelSpec, element_bytes: int, form: CacheFormat) -> int:
    """Cache bytes of one token in one layer."""
    kinds, heads, width = stored_vectors(spec)
    return kinds * heads * (width * element_bytes if form == "model" else width + SCALE_BYTES)


def serving_ledger(
    spec: ModelSpec,
    *,
    form: WeightFormat = "bf16",
    requests: int = 1,
    length: int,
    cache: CacheFormat = "model",
    overheads: Overheads = DEFAULT,
    stored_bytes: int | None = None,
    expanded_bytes: int = 0,
    copied_bytes: int = 0,
    element_bytes: int = 2,
) -> Ledger:
    """The ledger of a server of `requests` requests of `length` tokens, with chunked prefill of PREFILL_TOKENS.

    `stored_bytes`: weights of a compressed model; `expanded_bytes`: one of its matrices dequantized for a product;
    `copied_bytes`: a 16-bit copy of the weights that a CPU's products read; `element_bytes`: of a computed number.
    """
    prompt = LocalShape(spec, rows=1, length=min(PREFILL_TOKENS, length), element_bytes=element_bytes)
    weights = About("weights", form, "bytes per block of weights, norms in float32"), weight_bytes(spec, form)
    if stored_bytes is not None:
        weights = About("weights", "compressed", "codes, scales and what stays plain, as stored"), stored_bytes
    kept = About("key/value cache", "keys and values", "two vectors a token, head and layer; one if latent")
    work = About("activations", "prefill", "a forward pass that keeps nothing")
    logits = About("logits and loss", "last token's logits", "float32, one a request")
    parts = [
        weights,
        (kept, cache_bytes(spec, requests, length, element_bytes, form=cache)),
        (work, layer_cost(prompt, spec.layers - 1).forward_working),
        (logits, FLOAT32_BYTES * spec.vocab_size * requests),
        (About("workspace", "cuBLAS", "one thread"), overheads.workspace_bytes // 2),
    ]
    if copied_bytes:
        parts.append((About("weights", "a copy in 16 bits", "what a CPU's products read"), copied_bytes))
    if expanded_bytes:
        parts.append((About("workspace", "an expanded matrix", "widths that no kernel reads packed"), expanded_bytes))
    lines: list[Line] = []
    phases: dict[Phase, list[tuple[About, int]]] = {"load": [weights], "forward": parts}
    for phase, held in phases.items():
        lines += [Line(**about._asdict(), phase=phase, bytes=size) for about, size in held]
        lines += overheads.lines(phase, sum(size for _, size in held))
    return Ledger("formulas", tuple(lines))
