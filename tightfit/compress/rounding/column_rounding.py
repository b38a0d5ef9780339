"""A block of columns rounded one after the other, each column's error passed on to those after it in the block.

    q_j = round(w_j / S + Z),   e_j = (w_j − (q_j − Z) · S) / U[j, j],   w_k ← w_k − e_j · U[j, k] for k > j

This is the inner loop of GPTQ: ten small kernels a column, whose launches take longer than the kernels themselves. On a
GPU the loop over a block of integers is captured once per shape as a CUDA graph and replayed for every block.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from tightfit.kernels.capture import capturing
from tightfit.models.quantized.rounding import decode, encode
from tightfit.models.quantized.scheme import Scheme

GRAPHS_KEPT = 8
"""CUDA graphs that stay in memory: one for each shape of matrix, and one for a last block that is narrower."""


@dataclass(frozen=True)
class ColumnBlock:
    """`weight` [outputs, width], its part `upper` [width, width] of U; per weight scale, zero point and pruned mask."""

    weight: Tensor
    upper: Tensor
    scale: Tensor
    zero: Tensor | None
    pruned: Tensor | None

    def tensors(self) -> list[Tensor]:
        """Those that are not None."""
        return [t for t in (self.weight, self.upper, self.scale, self.zero, self.pruned) if t is not None]


def round_columns(block: ColumnBlock, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Codes and errors e, both [outputs, width]; the block's own tensors stay as they are."""
    if block.weight.is_cuda and scheme.kind == "int":
        return _recorded(block, scheme)
    return _rounded(block, scheme)


def _rounded(block: ColumnBlock, scheme: Scheme) -> tuple[Tensor, Tensor]:
    left = block.weight.clone()
    codes = torch.empty_like(left, dtype=torch.float8_e4m3fn if scheme.kind == "fp8" else torch.uint8)
    errors = torch.empty_like(left)
    for j in range(left.shape[1]):
        column = left[:, j]
        scale, zero = block.scale[:, j], None if block.zero is None else block.zero[:, j]
        wanted = column if block.pruned is None else column.masked_fill(block.pruned[:, j], 0)
        codes[:, j] = encode(wanted, scale, zero, scheme)
        errors[:, j] = (column - decode(codes[:, j], scale, zero, scheme)) / block.upper[j, j]
        left[:, j + 1 :].addr_(errors[:, j], block.upper[j, j + 1 :], alpha=-1)
    return codes, errors


@dataclass(frozen=True)
class _Shape:
    """The key of a captured graph: what blocks must share to be rounded by it."""

    scheme: Scheme
    outputs: int
    width: int
    device: torch.device
    has_zero: bool
    has_pruned: bool

    def empty(self) -> ColumnBlock:
        """A block of this shape: static inputs of the graph, to which other blocks are copied."""
        shape = (self.outputs, self.width)
        return ColumnBlock(
            weight=torch.zeros(shape, device=self.device),
            upper=torch.eye(self.width, device=self.device),
            scale=torch.ones(shape, device=self.device),
            zero=torch.zeros(shape, device=self.device) if self.has_zero else None,
            pruned=torch.zeros(shape, device=self.device, dtype=torch.bool) if self.has_pruned else None,
        )


class _Recording:
    """The loop as a CUDA graph, with its static inputs and outputs."""

    def __init__(self, shape: _Shape) -> None:
        self.block = shape.empty()
        _rounded(self.block, shape.scheme)  # loads the kernels, which must not happen during capture
        self.graph = torch.cuda.CUDAGraph()
        with capturing(self.graph):
            self.codes, self.errors = _rounded(self.block, shape.scheme)

    def __call__(self, block: ColumnBlock) -> tuple[Tensor, Tensor]:
        for mine, given in zip(self.block.tensors(), block.tensors(), strict=True):
            mine.copy_(given)
        self.graph.replay()
        return self.codes, self.errors


_recording = lru_cache(maxsize=GRAPHS_KEPT)(_Recording)


def _recorded(block: ColumnBlock, scheme: Scheme) -> tuple[Tensor, Tensor]:
    outputs, width = block.weight.shape
    shape = _Shape(
        scheme=scheme,
        outputs=outputs,
        width=width,
        device=block.weight.device,
        has_zero=block.zero is not None,
        has_pruned=block.pruned is not None,
    )
    codes, errors = _recording(shape)(block)
    return codes.clone(), errors.clone()
