"""PackedWeight: a matrix of integer codes, in groups that have a scale each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from tightfit.kernels.mlp.glu import glu
from tightfit.kernels.quantized.packed_rows import by_group
from tightfit.kernels.quantized.packed_vector import packed_vector, takes_vector
from tightfit.kernels.quantized.packing import has_strips
from tightfit.kernels.quantized.quantized_linear import quantized_linear
from tightfit.models.quantized.linear import QuantizedLinear
from tightfit.models.spec import Activation
from tightfit.serve.weights.weight import Fused, Weight, join_buffers


@dataclass(frozen=True, eq=False)
class PackedWeight(Weight):
    """Packed codes, scales and zero points as kernels/quantized/quantized_linear.py takes them."""

    words: Tensor
    scale: Tensor
    zero: Tensor | None
    bits: int
    group: int
    bias: Tensor | None
    overlap: bool
    """Let kernels begin while the one before them ends."""

    @staticmethod
    def takes(linears: Sequence[nn.Module]) -> bool:
        """Whether all layers are packed integers of one scheme, which can be joined one above the other."""
        first = linears[0]
        return all(
            isinstance(linear, QuantizedLinear)
            and linear.is_packed
            and (has_strips(linear.out_features) or len(linears) == 1)
            and linear.scheme == first.scheme
            and linear.scale is not None
            and linear.scale.dtype == first.scale.dtype
            and (linear.zero is None) == (first.zero is None)
            and (linear.zero is None or linear.zero.dtype == first.zero.dtype)
            for linear in linears
        )

    @classmethod
    def joined(cls, linears: Sequence[QuantizedLinear], bias: Tensor | None, *, overlap: bool) -> Self:
        """Layers of one input, one above the other."""
        scheme, words = linears[0].scheme, join_buffers(linears, "packed")
        scale, zero = (join_buffers(linears, name, arranged=by_group) for name in ("scale", "zero"))
        assert words is not None
        assert scale is not None
        return cls(words, scale, zero, bits=scheme.bits, group=max(scheme.group, 0), bias=bias, overlap=overlap)

    def product(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        y = quantized_linear(
            x, self.words, self.scale, self.zero, self.bits, self.group, residual=residual, overlap=self.overlap
        )
        return y if self.bias is None else y + self.bias

    def gated_product(self, x: Tensor, activation: Activation) -> Tensor:
        if self.bias is not None:
            gate, up = self.product(x).chunk(2, dim=-1)
            return glu(gate, up, activation)
        return quantized_linear(
            x, self.words, self.scale, self.zero, self.bits, self.group, activation=activation, overlap=self.overlap
        )

    def one_token(self, x: Tensor, fused: Fused) -> Tensor:
        if self._has_vector_kernel(x.dtype):
            return packed_vector(
                x,
                self.words,
                self.scale,
                self.zero,
                self.bits,
                self.group,
                bias=self.bias,
                activation=fused.activation or "",
                out_dtype=fused.out_dtype,
                **fused.around,
            )
        x = fused.normed(x)
        if fused.activation is not None:
            return self.gated_product(x, fused.activation)
        return self.product(x, fused.residual)

    def _has_vector_kernel(self, dtype: torch.dtype) -> bool:
        return self.words.is_cuda and takes_vector(self.words, self.bits, self.group, dtype)
