"""The 8-bit codes of a weight and of an activation, in the forms that the products of a linear layer take.

With y = x Wᵀ for x [M, K] and W [N, K], all factors contracted over their last dimension:

| product | factors | scaled per tensor | scaled per row |
|---|---|---|---|
| y [M, N] | x, W | one scale each | a scale per row of x, a scale per row of W |
| dx [M, K] | dy, Wᵀ | one scale each | a scale per row of dy, a scale per column of W |
| dW [N, K] | dyᵀ, xᵀ | one scale each | not in 8 bits: the sum runs over tokens, across the rows that are scaled |

x and W are e4m3 everywhere. Gradients are e5m2 with a scale per tensor, whose rows may differ by orders of magnitude,
and e4m3 with one per row, which have more bits where the range is taken care of (as torchao's two recipes).

Codes of weights are made when forward first asks, in both forms from one reading, and kept until backward has used
them: two bytes a weight at most, none by the time weights change. (Versions of tensors would not tell: torch's fused
optimizers do not raise them.) Where weights are gathered from ranks or streamed from the host, keeping codes would undo
what that saves: each product then makes the form it needs.
"""

import weakref
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tightfit.kernels.fp8_quantize import quantize, quantize_columns, quantize_rows

Scaling = Literal["tensor", "row"]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Factor(NamedTuple):
    """Codes of one factor of a product, and the scale or scales of its rows."""

    codes: Tensor
    scale: Tensor


class Both(NamedTuple):
    """A matrix as it lies and transposed."""

    plain: Factor
    transposed: Factor


def quantized(x: Tensor, scaling: Scaling, dtype: torch.dtype, *, transposed: bool, amax: Tensor | None = None) -> Both:
    """Activations or their gradient [M, K]; scaled per row they have no transposed form."""
    if scaling == "row":
        rows = Factor(*quantize_rows(x))
        return Both(rows, rows)
    plain, turned, scale = quantize(x, dtype, transposed=transposed, amax=amax)
    return Both(Factor(plain, scale), Factor(turned, scale))


@dataclass
class WeightCodes:
    """The codes of one weight."""

    scaling: Scaling
    keep: bool
    _key: tuple[int, int] | None = None
    _held: Both | None = None

    def forward(self, weight: Tensor, *, backward_follows: bool) -> Factor:
        """For y: rows over K."""
        key = weight.untyped_storage()._cdata, weight._version
        if self._held is not None and key == self._key:
            return self._held.plain
        self._held = None
        if not (self.keep and backward_follows):
            return self._plain(weight)
        if self.scaling == "row":
            self._held = Both(self._plain(weight), self._turned(weight))
        else:
            self._held = quantized(weight, "tensor", E4M3, transposed=True)
        self._key = key
        return self._held.plain

    def backward(self, weight: Tensor) -> Factor:
        """For dx: rows over N. Nothing is kept any longer."""
        held, self._held = self._held, None
        return self._turned(weight) if held is None else held.transposed

    def _plain(self, weight: Tensor) -> Factor:
        if self.scaling == "row":
            return Factor(*quantize_rows(weight))
        codes, _, scale = quantize(weight, transposed=False)
        return Factor(codes, scale)

    def _turned(self, weight: Tensor) -> Factor:
        if self.scaling == "row":
            return Factor(*quantize_columns(weight))
        _, codes, scale = quantize(weight, plain=False)
        return Factor(codes, scale)


@dataclass
class SharedInput:
    """The codes of an activation that `users` linear layers are given one after another."""

    scaling: Scaling
    users: int
    _given: "weakref.ref[Tensor] | None" = None
    _codes: Both | None = None
    _left: int = 0

    def codes(self, x: Tensor, *, transposed: bool) -> Both:
        """Of x [..., K]; made for the first user, forgotten with the last."""
        known = self._codes
        if known is None or self._given is None or self._given() is not x:
            known = quantized(x.detach().reshape(-1, x.shape[-1]), self.scaling, E4M3, transposed=transposed)
            self._given, self._codes, self._left = weakref.ref(x), known, self.users
        self._left -= 1
        if self._left == 0:
            self._given = self._codes = None
        return known
