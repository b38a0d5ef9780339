"""QuantizedLinear: a linear layer whose weight stays packed and is expanded while it is used.

The plain path expands the whole matrix and multiplies: right everywhere, and no faster than unquantized. On CUDA
`kernels/quantized/quantized_linear.py`, `kernels/quantized/spqr_linear.py` and `kernels/quantized/rounded_linear.py`
read packed codes; on a CPU `kernels/quantized/int4_linear.py` does for few tokens, in layers repacked for it
(`pack_for_cpu`). Inputs of schemes with activations are rounded too: with a scale per token or, where they are static,
one for all from calibration, beyond whose range they saturate. LLM.int8 (Dettmers et al. 2022) leaves input channels
that reach ±6 anywhere in the batch unrounded.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tightfit.kernels.quantized.int4_linear import (
    MOST_ROWS,
    int4_linear,
    int4_scales,
    pack_int4,
    takes_int4,
    unpack_int4,
)
from tightfit.kernels.quantized.packing import pack_tiles, unpack_tiles
from tightfit.kernels.quantized.quantized_linear import SOME_ROWS, expanded, quantized_linear
from tightfit.kernels.quantized.rounded_linear import rounded_linear, rounded_values
from tightfit.kernels.quantized.spqr_layout import SpqrTensors
from tightfit.kernels.quantized.spqr_linear import expanded_spqr, spqr_linear
from tightfit.kernels.triton_support import Impl, use_triton
from tightfit.models.quantized.coded_scales import read_scales
from tightfit.models.quantized.coded_weight import CodedWeight, Outliers
from tightfit.models.quantized.held_spqr import arranged, coded_of
from tightfit.models.quantized.scheme import UNREAD_BYTES

OUTLIER = 6.0
"""LLM.int8: input channels with a value of this size are not rounded."""


class QuantizedLinear(nn.Module):
    """y = x · Wᵀ + b with W in packed codes. Scales that are coded too stay so (`scale` is then None)."""

    packed: Tensor
    scale: Tensor | None
    zero: Tensor | None
    group_of: Tensor | None
    input_scale: Tensor | None
    outlier_starts: Tensor | None
    outlier_columns: Tensor | None
    outlier_values: Tensor | None
    outlier_changes: Tensor | None
    """Outliers minus the values of their codes, for the kernel of SpQR; codes and scales are then in its order."""
    spqr_statistics: Tensor | None
    spqr_ranges: Tensor | None
    cpu_scales: Tensor | None
    """Scales rounded for the CPU's kernel, where the codes are packed for it; else None."""

    def __init__(
        self, weight: CodedWeight, bias: Tensor | None = None, impl: Impl = "auto", *, for_cpu: bool = False
    ) -> None:
        """With `for_cpu`, the codes are packed as by `pack_for_cpu`, which has to be possible."""
        super().__init__()
        self.scheme, self.impl = weight.scheme, impl
        self.out_features, self.in_features = weight.shape
        spqr = arranged(weight)
        packed = spqr.words if spqr is not None else pack_int4(weight.codes) if for_cpu else self._pack(weight.codes)
        self.register_buffer("packed", packed)
        self.coded_names = tuple(weight.coded_scales) if spqr is None else ()
        for name in self.coded_names:
            self.register_buffer(_buffer(name), weight.coded_scales[name])
        is_coded = bool(weight.coded_scales)
        self.register_buffer("scale", None if is_coded else _half_where_exact(weight.scale))
        self.register_buffer("zero", None if is_coded else _narrow(weight.zero))
        self.register_buffer("group_of", weight.group_of)
        self.register_buffer("input_scale", weight.input_scale)
        for name in ("statistics", "ranges"):
            self.register_buffer(f"spqr_{name}", None if spqr is None else getattr(spqr, name))
        lost = weight.outliers if spqr is None else spqr
        for name in ("starts", "columns", "values"):
            self.register_buffer(f"outlier_{name}", None if lost is None else getattr(lost, name))
        self.register_buffer("outlier_changes", None if spqr is None else spqr.changes)
        cpu_scales = int4_scales(weight.scale, weight.zero) if for_cpu else None
        self.register_buffer("cpu_scales", cpu_scales, persistent=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def _pack(self, codes: Tensor) -> Tensor:
        """Codes as they are held: e4m3 as it is, int8 where integers are multiplied, else words."""
        if self.scheme.kind == "fp8":
            return codes
        if self.scheme.activations is not None:
            return (codes.to(torch.int16) - self.scheme.middle).to(torch.int8)
        return pack_tiles(codes, self.scheme.bits)

    def _unpack(self) -> Tensor:
        if self.scheme.kind == "fp8":
            return self.packed
        if self.scheme.activations is not None:
            return (self.packed.to(torch.int16) + self.scheme.middle).to(torch.uint8)
        if self.cpu_scales is not None:
            return unpack_int4(self.packed)
        return unpack_tiles(self.packed, self.scheme.bits, self.in_features)

    def coded(self) -> CodedWeight:
        """The weight with its codes unpacked."""
        if (spqr := self._spqr()) is not None:
            return coded_of(self.scheme, spqr)
        coded = {name: self.get_buffer(_buffer(name)) for name in self.coded_names}
        scale, zero = self._scales(coded)
        return CodedWeight(
            self.scheme, self._unpack(), scale, zero, self.group_of, self._outliers(), coded, self.input_scale
        )

    def _scales(self, coded: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Scales and zero points in float32."""
        if self.scale is None:
            return read_scales(self.scheme, coded, self.out_features)
        return self.scale.to(torch.float32), None if self.zero is None else self.zero.to(torch.float32)

    @property
    def is_packed(self) -> bool:
        """Whether the codes are plain integers in words: groups in order, no outliers, not repacked for a CPU."""
        ordered = self.group_of is None and self.outlier_starts is None and self.cpu_scales is None
        return self.scheme.kind == "int" and self.scheme.activations is None and ordered and self._has_row_scales

    @property
    def can_be_packed_for_cpu(self) -> bool:
        """Whether this CPU has a kernel that multiplies by such codes."""
        if self.packed.device.type != "cpu" or not self.is_packed:
            return False
        return takes_int4(self.out_features, self.in_features, self.scheme.bits, self.scheme.group)

    def pack_for_cpu(self) -> None:
        """Repack the codes for the CPU's kernel, which multiplies few tokens by them."""
        assert self.can_be_packed_for_cpu, self.scheme.describe()
        assert self.scale is not None
        self.packed, self.cpu_scales = pack_int4(self._unpack()), int4_scales(self.scale, self.zero)

    def expanding_bytes(self, rows: int, dtype: torch.dtype) -> int:
        """Bytes that a product with `rows` rows of `dtype` takes beside the packed matrix.

        Kernels read few rows of 16 bits packed, and expand into the rows' dtype in one step; elsewhere codes go through
        float32.
        """
        scheme, count = self.scheme, self.out_features * self.in_features
        if self.cpu_scales is not None and rows <= MOST_ROWS:
            return 0
        has_kernels = use_triton(self.impl, torch.empty(0, dtype=dtype, device=self.packed.device))
        if has_kernels and self.is_packed and scheme.is_read_packed(self.in_features):
            return 0 if rows <= SOME_ROWS and dtype != torch.float32 else dtype.itemsize * count
        if has_kernels and self.outlier_changes is not None:
            return dtype.itemsize * count
        expanded_bytes = scheme.expanded_bytes(self.out_features, self.in_features)
        return expanded_bytes if has_kernels else max(expanded_bytes, UNREAD_BYTES * count)

    @property
    def rows_mix(self) -> bool:
        """Whether a row's result depends on other rows: LLM.int8's outlier channels are found over the whole batch."""
        return self.scheme.activations == "llm.int8"

    @property
    def _has_row_scales(self) -> bool:
        """Whether every row has a scale, or several, of its own."""
        return self.scale is not None and self.scale.shape[0] == self.out_features

    def _outliers(self) -> Outliers | None:
        starts, columns, values = self.outlier_starts, self.outlier_columns, self.outlier_values
        return None if starts is None or columns is None or values is None else Outliers(starts, columns, values)

    def _spqr(self) -> SpqrTensors | None:
        """The weight as kernels/quantized/spqr_linear.py takes it; None where it is not arranged so."""
        if self.outlier_changes is None:
            return None
        outliers = (self.outlier_starts, self.outlier_columns, self.outlier_values, self.outlier_changes)
        return SpqrTensors(self.packed, self.spqr_statistics, self.spqr_ranges, *outliers)  # type: ignore[arg-type]

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The whole matrix."""
        return self.coded().dequantize(dtype)

    def expand(self, dtype: torch.dtype) -> Tensor:
        """`dequantize`, by the kernel that reads packed codes where there is one."""
        if (spqr := self._spqr()) is not None:
            return expanded_spqr(spqr, dtype, impl=self.impl)
        if not self.is_packed or self.scale is None:
            return self.dequantize(dtype)
        scheme, group = self.scheme, max(self.scheme.group, 0)
        return expanded(self.packed, self.scale, self.zero, scheme.bits, self.in_features, group, dtype, impl=self.impl)

    def forward(self, x: Tensor) -> Tensor:
        if self.rows_mix:
            return self._with_outlier_channels(x)
        y = self._product(x)
        return y if self.bias is None else y + self.bias

    def _product(self, x: Tensor) -> Tensor:
        scheme, scale = self.scheme, self.scale if self._has_row_scales else None
        if scheme.activations is not None and self.scale is not None:
            return rounded_linear(x, self.packed, self.scale.expand(self.out_features, 1), self.input_scale)
        if self.cpu_scales is not None and x.numel() <= MOST_ROWS * self.in_features:
            return int4_linear(x, self.packed, self.cpu_scales, scheme.group)
        if self.is_packed and scale is not None:
            return quantized_linear(x, self.packed, scale, self.zero, scheme.bits, max(scheme.group, 0), impl=self.impl)
        if (spqr := self._spqr()) is not None:
            return spqr_linear(x, spqr, impl=self.impl)
        return F.linear(x, self.dequantize(x.dtype))

    def _with_outlier_channels(self, x: Tensor) -> Tensor:
        large = (x.abs() >= OUTLIER).flatten(0, -2).any(0)
        small = rounded_values(x.masked_fill(large, 0), torch.int8)
        return F.linear(torch.where(large, x, small), self.dequantize(x.dtype), self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features} → {self.out_features}, {self.scheme.describe()}"


def _buffer(name: str) -> str:
    """The name of a coded scale's buffer in the layer."""
    return f"coded_{name}"


def _half_where_exact(scale: Tensor) -> Tensor:
    """Scales in float16 where that holds them exactly, as it does those of groups, which files store in float16."""
    half = scale.to(torch.float16)
    return half if bool((half.to(torch.float32) == scale).all()) else scale


def _narrow(zero: Tensor | None) -> Tensor | None:
    """Zero points as bytes where they are whole numbers, as in most formats."""
    if zero is None or not bool(((zero == zero.round()) & (zero >= 0) & (zero <= 255)).all()):
        return zero
    return zero.to(torch.uint8)


def quantize_linear(linear: nn.Linear, weight: CodedWeight) -> QuantizedLinear:
    """The layer that takes the place of `linear`."""
    return QuantizedLinear(weight.to(linear.weight.device), None if linear.bias is None else linear.bias.detach())
