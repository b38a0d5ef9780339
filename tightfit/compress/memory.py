"""The ledger of compressing: what the layer-by-layer pass holds, predicted before it begins.

With T calibration tokens, hidden size h, MLP width f, one layer of P weights, and n inputs of the widest matrix:

| phase | what | bytes |
|---|---|---|
| load | the embedding, and the copy of it that is written | 2 · 4 V h |
| forward | calibration rows: a layer's inputs, its wanted and its new outputs | 3 · 4 T h |
| | the layer in float32, and its codes, a byte each | 4 P + P |
| | a batch of B ≤ 8192 tokens inside the layer: gate, its activation, up, their product, three of h | 4 B (4 f + 3 h) |
| coding | calibration rows without the new outputs | 2 · 4 T h |
| | Σ x xᵀ of the widest inputs and H; GPTQ: H in rounding order, damped, inverted, factored | 2 to 6 · 4 n² |
| | the largest matrix while its ranges are searched | 10 · 4 P_max |

The layer and its codes are there in both. Nothing here imports torch.
"""

from tightfit.compress.matrices import matrices
from tightfit.compress.recipe import Recipe
from tightfit.memory.ledger import Ledger, Line
from tightfit.models.spec import ModelSpec

BATCH_TOKENS = 8192
FLOAT = 4
MOMENTS = {"gptq": 6, "sparsegpt": 6, "spqr": 5}
"""Matrices of n² there are at once while H is inverted: SpQR does not reorder it. Other methods hold two."""
SEARCH_COPIES = 10


def compression_ledger(spec: ModelSpec, recipe: Recipe, rows: int, length: int) -> Ledger:
    """Bytes at the peak of every phase of compressing with `rows` calibration rows of `length` tokens."""
    stream_bytes = FLOAT * rows * length * spec.hidden_size
    layer = max(spec.layer_params(i) for i in range(spec.layers))
    embedding = Line(
        component="weights", phase="load", bytes=2 * FLOAT * spec.vocab_size * spec.hidden_size, why="2 · 4 V h"
    )
    held = [
        Line(component="weights", phase=phase, bytes=bytes_, detail=detail, why=why)
        for phase in ("forward", "coding")
        for bytes_, detail, why in ((FLOAT * layer, "one layer", "4 P"), (layer, "its codes", "P"))
    ]
    forward = [
        Line(component="inputs", phase="forward", bytes=3 * stream_bytes, why="3 · 4 T h"),
        Line(component="activations", phase="forward", bytes=_batch_bytes(spec, rows, length), why="4 B (4 f + 3 h)"),
    ]
    return Ledger("formulas", (embedding, *held, *forward, *_coding(spec, recipe, stream_bytes)))


def _batch_bytes(spec: ModelSpec, rows: int, length: int) -> int:
    """What a batch leaves inside a layer; batches are whole rows."""
    tokens = min(rows, max(BATCH_TOKENS // max(length, 1), 1)) * length
    return FLOAT * tokens * (4 * _width(spec) + 3 * spec.hidden_size)


def _width(spec: ModelSpec) -> int:
    """MLP channels that a token goes through."""
    if spec.experts is None:
        return spec.mlp_size
    return max(spec.mlp_size, spec.experts.per_token * spec.experts.mlp_size)


def _coding(spec: ModelSpec, recipe: Recipe, stream_bytes: int) -> list[Line]:
    shapes = matrices(spec)
    steps = [step for name in shapes for step in (recipe.coding(name), recipe.pruning(name)) if step is not None]
    widest = max(inputs for _, _, inputs in shapes.values())
    largest = max(outputs * inputs for _, outputs, inputs in shapes.values())
    copies = max((MOMENTS.get(step.method, 2) for step in steps), default=0) if stream_bytes else 0
    return [
        Line(component="inputs", phase="coding", bytes=2 * stream_bytes, why="2 · 4 T h"),
        Line(
            component="workspace",
            phase="coding",
            bytes=copies * FLOAT * widest**2,
            detail="second moments",
            why=f"{copies} · 4 n²",
        ),
        Line(
            component="workspace",
            phase="coding",
            bytes=SEARCH_COPIES * FLOAT * largest,
            detail="one matrix",
            why="10 · 4 P_max",
        ),
    ]
