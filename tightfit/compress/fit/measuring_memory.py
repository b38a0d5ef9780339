"""The ledger of measuring how sensitive layers are (sensitivity.py), with one layer in memory at a time.

With R rows of L tokens, t = R L, hidden size h, MLP width f, queries q and keys k wide, vocabulary V, N layers of P
weights, W widths:

| phase | what | bytes |
|---|---|---|
| evaluation | inputs of all layers of the original, and outputs of its last one | 4 t h (N + 1) |
| | the rows' hidden states for every width | W · 4 t h |
| | the layer, and its matrices as they were before they were rounded | 4 P + 4 P |
| | a row in the MLP or in attention, or what rounding a matrix [m, n] takes | 4 L (4 f + 3 h) or 3 · 4 m n |
| loss | the inputs, the rows of every width, gradients | 4 t h (N + 2 + W) |
| | output projection; a tied one is allocated apart from the embedding and then tied | 4 V h or 8 V h |
| | logits of h / 16 tokens: of the original and of a width, p, their difference and the product | 5 · 4 V h / 16 |
| backward | the inputs, outputs of the last layer, gradients | 4 t h (N + 2) |
| | the layer, and Σ g² x² of its matrices | 4 P + 4 P |
| | a row kept for gradients and their squares, or what rounding takes | 4 L (7 f + 5 h + 2 q + 2 k) or 3 · 4 m n |

Experts are not measured. Nothing here imports torch.
"""

from tightfit.compress.memory import CHUNK_SHARE, FLOAT, PROBED_LENGTH, PROBED_ROWS
from tightfit.memory.ledger import Component, Ledger, Line, Phase
from tightfit.models.quantized.matrices import matrices_of_layer
from tightfit.models.spec import ModelSpec

ROUNDING_COPIES = 3
LOGITS = 5


def measuring_ledger(spec: ModelSpec, rows: int, length: int, widths: int) -> Ledger:
    """Bytes at the peak of every phase, with `rows` calibration rows of `length` tokens and `widths` widths tried."""
    rows, length = min(rows, PROBED_ROWS), min(length, PROBED_LENGTH)
    stream = FLOAT * rows * length * spec.hidden_size
    sizes = [
        [outputs * inputs for _, outputs, inputs in matrices_of_layer(spec, index).values()]
        for index in range(spec.layers)
    ]
    layer = FLOAT * max(spec.layer_params(index) for index in range(spec.layers))
    beside = FLOAT * max(sum(each) for each in sizes)
    rounding = ROUNDING_COPIES * FLOAT * max(max(each) for each in sizes)
    q, k, h, f = spec.query_size, spec.kv_size, spec.hidden_size, spec.mlp_size
    forward = FLOAT * length * max(4 * f + 3 * h, 3 * q + 3 * k + h)
    backward = FLOAT * length * (7 * f + 5 * h + 2 * q + 2 * k)
    ends = FLOAT * spec.vocabulary_params
    logits = 0 if spec.tied else LOGITS * ends // CHUNK_SHARE
    lines = (
        _line("inputs", "evaluation", stream * (spec.layers + 1 + widths), "4 t h (N + 1 + W)"),
        _line("weights", "evaluation", layer, "4 P", "one layer"),
        _line("weights", "evaluation", beside, "4 P", "the layer as it was"),
        _line("activations", "evaluation", max(forward, rounding), "4 L (4 f + 3 h) or 3 · 4 m n"),
        _line("inputs", "loss", stream * (spec.layers + 2 + widths), "4 t h (N + 2 + W)"),
        _line(
            "weights", "loss", (2 if spec.tied else 1) * ends, "8 V h" if spec.tied else "4 V h", "output projection"
        ),
        _line("logits and loss", "loss", logits, "5 · 4 V h / 16"),
        _line("inputs", "backward", stream * (spec.layers + 2), "4 t h (N + 2)"),
        _line("weights", "backward", layer, "4 P", "one layer"),
        _line("gradients", "backward", beside, "4 P", "squares beside weights"),
        _line("activations", "backward", max(backward, rounding), "4 L (7 f + 5 h + 2 q + 2 k) or 3 · 4 m n"),
    )
    return Ledger("formulas", lines)


def _line(component: Component, phase: Phase, bytes_: int, why: str, detail: str = "") -> Line:
    return Line(component=component, phase=phase, bytes=bytes_, why=why, detail=detail)
