"""The classic layer: GPT in half precision with dropout and unfused attention, one row per saved tensor.

Korthikanti et al. 2022 ("Reducing Activation Recomputation in Large Transformer Models", section 4.1): attention keeps
13bsh + 5bs²a bytes and the MLP 21bsh, layer norms included, for b rows of s tokens, hidden size h and a heads; their
sum is the often quoted 34bsh + 5bs²a per layer. Today's layers save other tensors: see layer.py.
"""

from typing import Literal, NamedTuple

Half = Literal["attention", "mlp"]


class Row(NamedTuple):
    """One kept tensor: `bsh` and `bssa` multiply b·s·h and b·s²·a."""

    half: Half
    name: str
    bsh: int
    bssa: int = 0


ROWS = (
    Row("attention", "input of the projections", 2),
    Row("attention", "queries and keys", 4),
    Row("attention", "scores (softmax output)", 0, 2),
    Row("attention", "softmax dropout mask", 0, 1),
    Row("attention", "dropped scores", 0, 2),
    Row("attention", "values", 2),
    Row("attention", "output projection input", 2),
    Row("attention", "output dropout mask", 1),
    Row("attention", "layer norm input", 2),
    Row("mlp", "first linear input", 2),
    Row("mlp", "GELU input", 8),
    Row("mlp", "second linear input", 8),
    Row("mlp", "output dropout mask", 1),
    Row("mlp", "layer norm input", 2),
)


def layer_bytes(b: int, s: int, h: int, a: int, half: Half | None = None) -> int:
    """Activations of one layer, or of one `half` of it."""
    return sum(row.bsh * b * s * h + row.bssa * b * s * s * a for row in ROWS if half in (None, row.half))


def model_bytes(b: int, s: int, h: int, a: int, layers: int) -> int:
    """Activations of all layers."""
    return layers * layer_bytes(b, s, h, a)
