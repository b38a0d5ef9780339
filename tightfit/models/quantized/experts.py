"""The experts' matrices of a routed layer in packed codes, dequantized while the layer runs."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tightfit.models.quantized.coded_weight import CodedWeight
from tightfit.models.quantized.linear import QuantizedLinear


class QuantizedStack(nn.Module):
    """Takes the place of a stacked parameter [experts, outputs, inputs]; iterating dequantizes expert after expert."""

    def __init__(self, weights: list[CodedWeight], dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.experts = nn.ModuleList(QuantizedLinear(weight) for weight in weights)

    def __len__(self) -> int:
        return len(self.experts)

    def __iter__(self) -> Iterator[Tensor]:
        return (expert.dequantize(self.dtype) for expert in self._linears())

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """All experts' matrices, stacked."""
        return torch.stack([expert.dequantize(dtype) for expert in self._linears()])

    def _linears(self) -> Iterator[QuantizedLinear]:
        for expert in self.experts:
            assert isinstance(expert, QuantizedLinear)
            yield expert
