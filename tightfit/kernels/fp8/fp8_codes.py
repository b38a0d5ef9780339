"""fp8 weights and activations in the layouts that the GEMMs of a linear layer need.

With y = x Wᵀ for x [M, K] and W [N, K]; fp8 GEMMs contract over the last dimension of both operands:

| product | operands | scaled per tensor | scaled per row |
|---|---|---|---|
| y [M, N] | x, W | one scale each | a scale per row of x, a scale per row of W |
| dx [M, K] | dy, Wᵀ | one scale each | a scale per row of dy, a scale per column of W |
| dW [N, K] | dyᵀ, xᵀ | one scale each | not in 8 bits: the sum runs over tokens, across the rows that are scaled |

x and W are always e4m3. Gradients are e5m2 with a scale per tensor, as their rows may differ by orders of magnitude,
and e4m3 with a scale per row (as in torchao's two recipes).

A weight is quantized in its first forward, in both layouts from one read, and its codes are kept until backward has
used them: two bytes a weight at most, none when the optimizer changes weights. (To notice such a change by tensor
versions alone would not do: torch's fused optimizers do not raise them.) Where weights are all-gathered or streamed
from the host, keeping codes would undo what that saves, so each product quantizes the layout it needs.
"""

import weakref
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tightfit.kernels.fp8.fp8_quantize import quantize, quantize_columns, quantize_rows

Scaling = Literal["tensor", "row"]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Operand(NamedTuple):
    """fp8 codes of one operand of a GEMM, with one scale or one per row."""

    codes: Tensor
    scale: Tensor


class BothLayouts(NamedTuple):
    """A quantized matrix, plain and transposed."""

    plain: Operand
    transposed: Operand


def quantized(
    x: Tensor, scaling: Scaling, dtype: torch.dtype, *, transposed: bool, amax: Tensor | None = None
) -> BothLayouts:
    """Quantized activations or gradients [M, K]; scaled per row they have no transposed layout."""
    if scaling == "row":
        rows = Operand(*quantize_rows(x))
        return BothLayouts(rows, rows)
    plain, turned, scale = quantize(x, dtype, transposed=transposed, amax=amax)
    return BothLayouts(Operand(plain, scale), Operand(turned, scale))


@dataclass
class WeightCodes:
    """The codes of one weight, kept from forward to backward where `keep`."""

    scaling: Scaling
    keep: bool
    _key: tuple[int, int] | None = None
    _kept: BothLayouts | None = None

    def forward(self, weight: Tensor, *, backward_follows: bool) -> Operand:
        """The operand for y: rows over K."""
        key = weight.untyped_storage()._cdata, weight._version
        if self._kept is not None and key == self._key:
            return self._kept.plain
        self._kept = None
        if not (self.keep and backward_follows):
            return self._plain(weight)
        if self.scaling == "row":
            self._kept = BothLayouts(self._plain(weight), self._turned(weight))
        else:
            self._kept = quantized(weight, "tensor", E4M3, transposed=True)
        self._key = key
        return self._kept.plain

    def backward(self, weight: Tensor) -> Operand:
        """The operand for dx: rows over N. Frees the kept codes."""
        kept, self._kept = self._kept, None
        return self._turned(weight) if kept is None else kept.transposed

    def _plain(self, weight: Tensor) -> Operand:
        if self.scaling == "row":
            return Operand(*quantize_rows(weight))
        codes, _, scale = quantize(weight, transposed=False)
        return Operand(codes, scale)

    def _turned(self, weight: Tensor) -> Operand:
        if self.scaling == "row":
            return Operand(*quantize_columns(weight))
        _, codes, scale = quantize(weight, plain=False)
        return Operand(codes, scale)


@dataclass
class SharedInput:
    """The codes of an activation that `users` linear layers (q, k and v, or gate and up) use one after another."""

    scaling: Scaling
    users: int
    _given: "weakref.ref[Tensor] | None" = None
    _codes: BothLayouts | None = None
    _left: int = 0

    def codes(self, x: Tensor, *, transposed: bool) -> BothLayouts:
        """The codes of x [..., K]; quantized for the first user, freed with the last."""
        known = self._codes
        if known is None or self._given is None or self._given() is not x:
            known = quantized(x.detach().reshape(-1, x.shape[-1]), self.scaling, E4M3, transposed=transposed)
            self._given, self._codes, self._left = weakref.ref(x), known, self.users
        self._left -= 1
        if self._left == 0:
            self._given = self._codes = None
        return known
