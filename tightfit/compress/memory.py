"""The ledger of compressing: bytes that the layer-by-layer pass holds, predicted before it begins.

With T calibration tokens, hidden size h, MLP width f, queries q and keys k wide, vocabulary V, one layer of P weights:

| phase | what | bytes |
|---|---|---|
| init | the whole model in numbers of w bytes, where it generates the calibration text itself | w · all weights |
| | the KV cache of that text | w · 2 T k · layers |
| load | embedding or output projection, and its copy in 16 bits to be written | 4 V h + 2 V h |
| | both, where they are tied: allocated apart and then tied | 2 · 4 V h |
| | a coded output projection, R ≤ 4096 rows at a time | 4 V h + a · 4 R h + b · 4 h² + (V − R) h |
| | the original's and the coded one's, from b-bit words and codes, to measure the loss | 2 · 4 V h + (1 + b / 8) V h |
| | calibration rows, embedded | 4 T h |
| forward | calibration rows: a layer's inputs, its wanted and its new outputs | 3 · 4 T h |
| | the original model's inputs, where rounding is learned for its outputs | 4 T h |
| | the original's, of the t ≤ 8 · 512 tokens that the loss is measured on (loss_probe.py); while coding, too | 4 t h |
| | the layer in float32; codes of a byte each, with scales and zero points in float32 | 4 P + P + 4 to 8 P / group |
| | a batch of B ≤ 8192 tokens in the MLP: gate, its activation, up, their product; the stream twice | 4 B (4 f + 2 h) |
| | or in attention: q, k, v, q and k rotated, attention's output, the stream | 4 B (3 q + 3 k + h) |
| coding | calibration rows without the new outputs | 2 or 3 · 4 T h |
| | the layer and its codes | 4 P + P |
| | the peak while any matrix [m, n] is coded: copies of it and of its inputs' second moment | a · 4 m n + b · 4 n² |

The moments at which coding a matrix can peak are those of its method, each a `CodingPeak` below with the tensors
alive in it. The scales of AWQ and SmoothQuant are searched while the second moments of all sets of layers are alive.
Learned rounding trains a whole layer (`_learning`) and keeps its original weights until then. Nothing here imports
torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tightfit.compress.linear_sets import linear_sets
from tightfit.compress.recipe import CALIBRATED, Recipe, Step
from tightfit.memory.ledger import Ledger, Line
from tightfit.models.quantized.matrices import HEAD, matrices, matrices_of_layer
from tightfit.models.spec import ModelSpec

BATCH_TOKENS = 8192
"""Tokens of the calibration rows that go through a layer together, in whole rows."""
FLOAT = 4
PROBED_ROWS, PROBED_LENGTH = 8, 512
"""Calibration rows on which the loss of compressing is measured, and tokens of each; sampling noise is far below it."""
CHUNK_SHARE = 16
"""Hidden size over the tokens whose logits are in memory at a time: these take less than the head's 16-bit copy did."""

HEAD_ROWS = 4096
"""Rows of the output projection that are coded at a time (head_compression.py)."""


@dataclass(frozen=True)
class CodingPeak:
    """A moment of coding a matrix [m, n]: `copies` float32 tensors [m, n] and `squares` of [n, n] are alive."""

    what: str
    copies: float
    squares: int
    row_bytes: int = 0
    """Further bytes for each of the m rows, whatever n is."""


ROUNDING = CodingPeak("weights rounded: w / S, + Z, rounded, clamped", 4, 2)
ERROR = CodingPeak("the error: made, its change, w and the product with H; Σ x xᵀ, H", 4, 2)
INVERTED = CodingPeak("H inverted: w without dead inputs; Σ x xᵀ, H, damped, its factor, the inverse", 1, 5)
PEAKS: dict[str, tuple[CodingPeak, ...]] = {
    "gptq": (
        CodingPeak("H inverted: w, w in order; Σ x xᵀ, H, H in order, damped, its factor, the inverse", 2, 6),
        CodingPeak("scales refitted: w, w rounded, codes twice, q − Z, two products; Σ x xᵀ, H", 5.25, 2),
    ),
    "gptq by groups": (
        CodingPeak("scales refitted: w, w rounded, codes twice, both in order, two products; Σ x xᵀ, H, H", 6.25, 3),
    ),
    "spqr": (
        INVERTED,
        CodingPeak("columns rounded: w, what is left, what is kept, an update; Σ x xᵀ, H, U", 4.25, 3),
    ),
    "sparsegpt": (
        INVERTED,
        CodingPeak("128 columns pruned: w; their worth, order and errors; Σ x xᵀ, H, U", 1, 3, row_bytes=20 * 128),
    ),
    "svd": (CodingPeak("singular vectors in float64: w, w wide, U, V", 7, 1),),
    "whitened": (
        CodingPeak("H factored in float64: w; Σ x xᵀ, H, damped, its factor", 1, 6),
        CodingPeak("singular vectors in float64: w, w wide, w L, U, V; Σ x xᵀ, H, L", 9, 4),
    ),
    "structured": (CodingPeak("refitted: w, its change, two products; Σ x xᵀ, H, H of what stays, its factor", 4, 4),),
}
"""By method, in addition to `ROUNDING` and `ERROR`, which every method has."""
PEAKS["round"] = PEAKS["gptq"]
FACTORED = ("svd", "whitened")
LEARNING_TOKENS = 4096
"""Tokens of a step of learned rounding, in whole rows (learned_rounding.py)."""
SEARCH = 5
"""Copies alive while a scale is tried: w scaled, w / S, + Z, rounded; the previous matrix's change (AWQ) or w itself
(SmoothQuant, whose w is a whole set)."""


def compression_ledger(
    spec: ModelSpec,
    recipe: Recipe,
    rows: int,
    length: int,
    *,
    rewritten: str | None = None,
    writing_bytes: int = 0,
) -> Ledger:
    """Bytes at the peak of every phase of compressing with `rows` calibration rows of `length` tokens.

    `rewritten` is svd, whitened or structured where layers are rewritten rather than coded by a recipe. `writing_bytes`
    is the size of a number while the model generates its own calibration text; 0 where text is given.
    """
    stream_bytes = FLOAT * rows * length * spec.hidden_size
    load = [
        _ends(spec, recipe, has_rows=rows * length > 0),
        Line(component="inputs", phase="load", bytes=stream_bytes, why="4 T h"),
    ]
    streams = 3 + recipe.learns
    probed_bytes = FLOAT * min(rows, PROBED_ROWS) * min(length, PROBED_LENGTH) * spec.hidden_size
    probe = Line(component="inputs", phase="forward", bytes=probed_bytes, detail="the original's", why="4 t h")
    forward = [
        probe,
        Line(component="inputs", phase="forward", bytes=streams * stream_bytes, why=f"{streams} · 4 T h"),
        Line(component="activations", phase="forward", bytes=_batch_bytes(spec, rows, length), why="4 B (4 f + 2 h)"),
    ]
    coding = [
        replace(probe, phase="coding"),
        Line(component="inputs", phase="coding", bytes=(streams - 1) * stream_bytes, why=f"{streams - 1} · 4 T h"),
        *_fullest(spec, recipe, rewritten, rows, length),
    ]
    written = _writing(spec, rows * length, writing_bytes)
    return Ledger("formulas", (*written, *load, *_layer(spec, recipe, rewritten), *forward, *coding))


def _ends(spec: ModelSpec, recipe: Recipe, *, has_rows: bool) -> Line:
    """Embedding or output projection at their peak: while they are loaded and written, rounded, or compared."""
    matrix, step = spec.vocabulary_params, recipe.coding(HEAD)
    scheme = None if step is None else step.scheme()
    found = [(2 * FLOAT * matrix, "2 · 4 V h") if spec.tied else ((FLOAT + 2) * matrix, "4 V h + 2 V h")]
    if step is not None and scheme is not None:
        at_once = min(spec.vocab_size, HEAD_ROWS) * spec.hidden_size
        scales = spec.vocab_size * FLOAT * scheme.groups(spec.hidden_size) * (1 if scheme.symmetric else 2)
        piece = _piece_bytes(step, at_once, spec.hidden_size, has_rows=has_rows)
        coded = (FLOAT + 1) * matrix - at_once + scales + piece
        found.append((coded, "4 V h + a · 4 R h + b · 4 h² + (V − R) h and scales"))
        found.append(((FLOAT + 2) * matrix + 2 * scales, "4 V h + 2 V h and scales"))
        if has_rows:
            found.append(((2 * FLOAT + 1) * matrix + scheme.bits * matrix // 8, "2 · 4 V h + (1 + b / 8) V h"))
    largest, why = max(found)
    return Line(component="weights", phase="load", bytes=largest, why=why)


def _piece_bytes(step: Step, weights: int, inputs: int, *, has_rows: bool) -> int:
    """The peak while some rows of the output projection, of so many `weights`, are coded, beside themselves."""
    if step.method not in CALIBRATED:
        rounded = CodingPeak("w / S, + Z, rounded; for the error Σ x xᵀ, H", 3, 2 if has_rows else 0)
        return _peak_bytes(rounded, weights, inputs)
    inverted, *others = PEAKS[step.method]  # before any piece; its factor is alive until the last
    known = [replace(peak, squares=max(peak.squares, 3)) for peak in others]
    return max(_peak_bytes(peak, weights, inputs) for peak in (replace(inverted, copies=0), *known))


def _peak_bytes(peak: CodingPeak, weights: int, inputs: int) -> int:
    return int(peak.copies * FLOAT * weights) + peak.squares * FLOAT * inputs**2


def _writing(spec: ModelSpec, tokens: int, number_bytes: int) -> list[Line]:
    """The whole model and its KV cache, while it generates its own calibration text."""
    if not number_bytes:
        return []
    cache_bytes = number_bytes * 2 * tokens * spec.kv_size * spec.layers
    return [
        Line(
            component="weights", phase="init", bytes=number_bytes * spec.params(), detail="all", why="w · all weights"
        ),
        Line(component="activations", phase="init", bytes=cache_bytes, detail="cache", why="w · 2 T k · layers"),
    ]


def _layer(spec: ModelSpec, recipe: Recipe, rewritten: str | None) -> list[Line]:
    """The layer and its codes (or low-rank factors, no larger than it), in forward passes and while it is coded."""
    layer = max(spec.layer_params(i) for i in range(spec.layers))
    beside = (max(_code_bytes(spec, recipe)), "its codes", "P and scales")
    if rewritten in FACTORED:
        beside = (FLOAT * layer, "its factors", "4 P at most")
    return [
        Line(component="weights", phase=phase, bytes=bytes_, detail=detail, why=why)
        for phase in ("forward", "coding")
        for bytes_, detail, why in ((FLOAT * layer, "one layer", "4 P"), beside)
    ]


def _code_bytes(spec: ModelSpec, recipe: Recipe) -> list[int]:
    """Bytes of every layer's codes: a byte a code, and scales and zero points in float32."""
    coded = [0] * spec.layers
    for name, (count, outputs, inputs) in matrices(spec).items():
        step = recipe.coding(name)
        scheme = None if step is None else step.scheme()
        if scheme is not None:
            scales = scheme.groups(inputs) * (1 if scheme.symmetric else 2)
            coded[int(name.split(".")[1])] += count * outputs * (inputs + FLOAT * scales)
    return coded


def _batch_bytes(spec: ModelSpec, rows: int, length: int) -> int:
    """Bytes of a batch's activations inside a layer; batches are whole rows."""
    tokens = min(rows, max(BATCH_TOKENS // max(length, 1), 1)) * length
    mlp = 4 * _width(spec) + 2 * spec.hidden_size
    attention = 3 * spec.query_size + 3 * spec.kv_size + spec.hidden_size
    return FLOAT * tokens * max(mlp, attention)


def _width(spec: ModelSpec) -> int:
    """MLP channels of a token alive at a time: a dense layer's, its experts', or the shared expert's after them."""
    if spec.experts is None:
        return spec.mlp_size
    return max(spec.mlp_size, spec.experts.per_token * spec.experts.mlp_size, spec.experts.shared_size)


def _fullest(spec: ModelSpec, recipe: Recipe, rewritten: str | None, rows: int, length: int) -> Sequence[Line]:
    """Lines of the moment with the most bytes: of any matrix, scale search or learned rounding."""
    has_rows = rows * length > 0
    found = [
        [*_peak_lines(peak, outputs, inputs, has_rows=has_rows), *originals]
        for layer in range(spec.layers)
        for originals in [_originals(spec, recipe, layer)]
        for name, (_, outputs, inputs) in matrices_of_layer(spec, layer).items()
        for peak in (
            _peaks(recipe.coding(name), recipe.pruning(name)) if rewritten is None else (ERROR, *PEAKS[rewritten])
        )
    ]
    if has_rows:
        found += [lines for layer in range(spec.layers) if (lines := _search(spec, recipe, layer))]
        tokens = min(rows, max(LEARNING_TOKENS // length, 1)) * length
        found += [lines for layer in range(spec.layers) if (lines := _learning(spec, recipe, layer, tokens))]
    return max(found, key=lambda lines: sum(line.bytes for line in lines), default=())


def _peaks(coding: Step | None, pruning: Step | None) -> list[CodingPeak]:
    """Possible peaks of a matrix that is pruned, coded or both; the pruned matrix is alive while it is coded."""
    found = [ROUNDING, ERROR] if coding is not None or pruning is not None else []
    if pruning is not None:
        found += PEAKS.get(pruning.method, ())
    if coding is not None:
        extra = PEAKS.get(coding.method, ())
        by_groups = coding.method == "gptq" and coding.act_order == "groups"
        own = [*extra, *(PEAKS["gptq by groups"] if by_groups else ())]
        found += [replace(peak, copies=peak.copies + (pruning is not None)) for peak in own]
    return found


def _peak_lines(peak: CodingPeak, outputs: int, inputs: int, *, has_rows: bool) -> list[Line]:
    squares = peak.squares if has_rows else 0
    return _lines(
        copies_bytes=int(peak.copies * FLOAT * outputs * inputs) + peak.row_bytes * outputs,
        squares_bytes=squares * FLOAT * inputs**2,
        why=(f"{peak.copies:g} · 4 m n ({peak.what})", f"{squares} · 4 n²"),
    )


def _lines(*, copies_bytes: int, squares_bytes: int, why: tuple[str, str]) -> list[Line]:
    return [
        Line(component="workspace", phase="coding", bytes=squares_bytes, detail="second moments", why=why[1]),
        Line(component="workspace", phase="coding", bytes=copies_bytes, detail="one matrix", why=why[0]),
    ]


def _search(spec: ModelSpec, recipe: Recipe, layer: int) -> list[Line]:
    """AWQ and SmoothQuant before anything is coded: all second moments, and a set of layers while scales are tried."""
    sets = _scaled_sets(spec, layer)
    methods = {names: step.method for names in sets if (step := recipe.coding(names[0])) is not None}
    searched = [names for names, method in methods.items() if method in ("awq", "smoothquant")]
    if not searched:
        return []
    shapes = matrices_of_layer(spec, layer)
    moments = sum(shapes[names[0]][2] ** 2 for names in searched)
    tried = []
    for names in searched:
        sizes = [shapes[name][1] * shapes[name][2] for name in names]
        is_awq = methods[names] == "awq"  # one matrix after the other, and H for its errors
        tried.append((SEARCH * (max(sizes) if is_awq else sum(sizes)), is_awq * shapes[names[0]][2] ** 2))
    copies, hessian = max(tried, key=sum)
    return _lines(
        copies_bytes=FLOAT * copies,
        squares_bytes=FLOAT * (moments + hessian),
        why=(f"{SEARCH} · 4 m n (scales tried)", "Σ 4 n² over the sets of layers"),
    )


def _learned_sizes(spec: ModelSpec, recipe: Recipe, layer: int) -> dict[str, int]:
    """Weights of every matrix of a layer whose rounding is learned; experts' is not."""
    return {
        name: outputs * inputs
        for name, (_, outputs, inputs) in matrices_of_layer(spec, layer).items()
        if ".experts." not in name and (step := recipe.coding(name)) is not None and step.method == "round"
    }


def _originals(spec: ModelSpec, recipe: Recipe, layer: int) -> list[Line]:
    """The original weights that learned rounding needs, kept until all matrices of the layer are coded."""
    kept = sum(_learned_sizes(spec, recipe, layer).values())
    line = Line(component="weights", phase="coding", bytes=FLOAT * kept, detail="the layer as it was", why="4 P")
    return [line] if kept else []


def _learning(spec: ModelSpec, recipe: Recipe, layer: int, tokens: int) -> list[Line]:
    """The peak of a step of learned rounding: inside the MLP's backward pass, after it, or at the end of backward.

    Original weights, u, Adam's two moments and rounded ŵ of all matrices are alive throughout, gradients as far as the
    backward pass has come. In the MLP gate, its activation, up and the gradients of the three are alive, too.
    """
    sizes = _learned_sizes(spec, recipe, layer)
    if not sizes:
        return []
    mlp = sum(size for name, size in sizes.items() if ".mlp." in name)
    attention_kept = 5 * spec.hidden_size + 2 * spec.query_size + 2 * spec.kv_size
    moments = (
        (5 * sum(sizes.values()), attention_kept + 5 * spec.hidden_size + 6 * _width(spec)),
        (5 * sum(sizes.values()) + mlp, attention_kept + spec.hidden_size),
        (6 * sum(sizes.values()) + max(sizes.values()), 3 * spec.hidden_size),
    )
    weights, kept = max(moments, key=lambda moment: moment[0] + moment[1] * tokens)
    why = "w, u, ŵ, Adam's moments and gradients: 5 to 6 · 4 P"
    return [
        Line(component="workspace", phase="coding", bytes=FLOAT * weights, detail="learned rounding", why=why),
        Line(
            component="activations",
            phase="coding",
            bytes=FLOAT * kept * tokens,
            why="at most 4 B (10 h + 2 q + 2 k + 6 f)",
        ),
    ]


def _scaled_sets(spec: ModelSpec, layer: int) -> list[tuple[str, ...]]:
    """Sets of matrices whose input scale can be folded into the module before them."""
    sets = [group.names for group in linear_sets(spec, layer) if group.before is not None]
    return [tuple(f"layers.{layer}.{name}" for name in names) for names in sets]
