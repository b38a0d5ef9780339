"""Weight: a matrix [N, K] of the model, or several of one input one above the other, as a step multiplies by it.

Each kind of matrix is a file of this folder. Every kind has a `product`; a kind with a kernel for the one token of a
decoding step on a GPU, which fuses the norm before the product and what comes after it, also has a `one_token`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tightfit.kernels.decoding.decode_linear import decode_linear
from tightfit.kernels.decoding.few_rows import few_rows, takes_few_rows
from tightfit.kernels.mlp.glu import glu
from tightfit.models.quantized.linear import QuantizedLinear
from tightfit.models.spec import Activation
from tightfit.serve.weights.norm import Norm


@dataclass(frozen=True, kw_only=True)
class Fused:
    """What is fused with a product of one token: a norm before it; a gated activation or a residual after it."""

    norm: Norm | None = None
    activation: Activation | None = None
    """If there is one, the matrix is gate over up."""
    residual: Tensor | None = None
    out_dtype: torch.dtype | None = None
    overlap: bool = False
    """Let the kernel begin while the one before it ends."""

    @property
    def around(self) -> dict[str, Any]:
        """Norm and residual as arguments of our kernels."""
        norm = self.norm
        before = {} if norm is None else {"norm": norm.weight, "norm_eps": norm.eps, "norm_offset": norm.offset}
        return before | {"residual": self.residual, "overlap": self.overlap}

    def normed(self, x: Tensor) -> Tensor:
        """The product's input: x after the norm, if there is one."""
        return x if self.norm is None else self.norm(x)


class Weight(ABC):
    """A matrix and its bias, with the products that a step needs."""

    @abstractmethod
    def product(self, x: Tensor) -> Tensor:
        """x · Wᵀ + b of x [M, K]."""

    def gated_product(self, x: Tensor, activation: Activation) -> Tensor:
        """act(g) · u where the matrix is gate over up."""
        gate, up = self.product(x).chunk(2, dim=-1)
        return glu(gate, up, activation)

    def product_of_gated(self, gate_up: "Weight", x: Tensor, activation: Activation) -> Tensor:
        """The product of act(g) · u, which `gate_up` makes of x."""
        return self.product(gate_up.gated_product(x, activation))

    def one_token(self, x: Tensor, fused: Fused) -> Tensor:
        """The product of x [1, K] and what is fused with it; here one after the other."""
        x = fused.normed(x)
        y = self.product(x) if fused.activation is None else self.gated_product(x, fused.activation)
        return y if fused.residual is None else y + fused.residual


@dataclass(frozen=True, eq=False)
class PlainWeight(Weight):
    """A matrix that is not quantized."""

    matrix: Tensor
    bias: Tensor | None
    overlap: bool = False
    """Let kernels for few tokens begin while the one before them ends."""

    def product(self, x: Tensor) -> Tensor:
        if takes_few_rows(x, self.matrix):
            return few_rows(x, self.matrix, self.bias, overlap=self.overlap)
        return F.linear(x, self.matrix, self.bias)

    def gated_product(self, x: Tensor, activation: Activation) -> Tensor:
        if takes_few_rows(x, self.matrix):
            return few_rows(x, self.matrix, self.bias, activation, overlap=self.overlap)
        return super().gated_product(x, activation)

    def one_token(self, x: Tensor, fused: Fused) -> Tensor:
        kept: dict[str, Any] = {"bias": self.bias, "out_dtype": fused.out_dtype, **fused.around}
        return decode_linear(x, self.matrix, activation=fused.activation, **kept)


def join_buffers(
    linears: Sequence[QuantizedLinear],
    name: str,
    *,
    dim: int = 0,
    arranged: Callable[[Tensor], Tensor] = lambda joint: joint,
) -> Tensor | None:
    """The buffer `name` of layers, joined and `arranged`; the layers' own become views of it, so that nothing is
    held twice."""
    parts = [getattr(linear, name) for linear in linears]
    if parts[0] is None:
        return None
    joint = arranged(torch.cat(parts, dim) if len(parts) > 1 else parts[0])
    for linear, part in zip(linears, joint.split([part.shape[dim] for part in parts], dim), strict=True):
        setattr(linear, name, part)
    return joint
