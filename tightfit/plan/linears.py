"""Linears: the matrix products of a layer, one by one.

    t = fixed + operations / rate,    2 m k n operations of y = x Wᵀ

Both constants are fitted to 72 products of 512 to 4096 columns (benchmarks/calibrate.py), which they meet within 6 % on
average. The fixed part fills and empties the card: a third of the time of a product of 2048 tokens and 1024 columns,
nothing of a large one. No product takes less than reading its weights. Backward has two for each.
Tensor ranks split each evenly (Shoeybi et al. 2019). Experts' weights count as those a token goes through.
"""

from dataclasses import dataclass
from functools import cache
from typing import Literal

from tightfit.models.spec import ModelSpec

Part = Literal["projections", "output", "inner", "down"]
"""Queries, keys and values; attention's output; what the MLP widens to; and back."""


@dataclass(frozen=True)
class Linear:
    """`count` products of x [tokens, taken] with weights [made, taken]."""

    part: Part
    taken: float
    made: float
    count: int = 1

    def weights(self, tensor: int = 1) -> float:
        """Of all of them, on one rank."""
        return self.count * self.taken * self.made / tensor

    def flops(self, tokens: float, tensor: int = 1) -> float:
        """Of forward, on one of `tensor` ranks."""
        return 2 * tokens * self.weights(tensor)


@cache
def linears(spec: ModelSpec, mlp_width: float) -> tuple[Linear, ...]:
    """Of a layer whose tokens pass through so many columns of an MLP."""
    hidden = spec.hidden_size
    return (
        Linear("projections", hidden, spec.query_size),
        Linear("projections", hidden, spec.kv_size, 2),
        Linear("output", spec.query_size, hidden),
        Linear("inner", hidden, mlp_width, 2 if spec.gated else 1),
        Linear("down", mlp_width, hidden),
    )
