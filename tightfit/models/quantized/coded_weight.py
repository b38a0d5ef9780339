"""CodedWeight: one weight matrix as codes with scales, which every method makes and every file format stores.

    integers  w = (q − Z) · S        tables  w = number(q) · S        8-bit floats  w = q · S

One scale, and one zero point where there are any, per row and group of inputs. With `group_of`, input j is in group
group_of[j] instead of j // group (GPTQ's order by activation). Outliers are added on top (SpQR).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tightfit.errors import UserError
from tightfit.models.quantized.codebooks import TABLES, table
from tightfit.models.quantized.scheme import Scheme

MOVED = ("codes", "scale", "zero", "group_of", "input_scale")
"""Fields of a coded weight that are a single tensor or None."""


@dataclass(frozen=True)
class Outliers:
    """Single weights in compressed sparse rows (CSR): those of row r are `starts[r]` to `starts[r + 1]`."""

    starts: Tensor
    columns: Tensor
    values: Tensor

    def rows(self) -> Tensor:
        """The row of each outlier, without a synchronisation with the device, so that CUDA graphs can be captured."""
        counts = self.starts.long().diff()
        every = torch.arange(len(counts), device=counts.device)
        return every.repeat_interleave(counts, output_size=len(self.columns))

    def add_to(self, weight: Tensor) -> None:
        """Write the outliers into the dense matrix, over the values of the codes there."""
        weight[self.rows(), self.columns.long()] = self.values.to(weight.dtype)


@dataclass(frozen=True)
class CodedWeight:
    """A matrix [outputs, inputs]: `codes` uint8 (e4m3 for fp8), `scale` and `zero` [outputs, groups] float32."""

    scheme: Scheme
    codes: Tensor
    scale: Tensor
    zero: Tensor | None = None
    group_of: Tensor | None = None
    outliers: Outliers | None = None
    coded_scales: Mapping[str, Tensor] = field(default_factory=dict)
    """The tensors in which scales are coded themselves, by their names in files; empty for plain scales."""
    input_scale: Tensor | None = None
    """The scale [1] of the layer's inputs where they are rounded statically."""

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix that the codes stand for."""
        values = code_values(self.scheme, self.codes)
        zero = self.scheme.middle if self.scheme.kind == "int" and self.zero is None else self.zero
        weight = scaled(values, self.scale, zero, self.group_of).to(dtype)
        if self.outliers is not None:
            self.outliers.add_to(weight)
        return weight

    def rows(self, start: int, stop: int) -> "CodedWeight":
        """Rows `start` to `stop`, to compute with: coded scales (other than mxfp4's) span all rows and are left out."""
        assert self.outliers is None, "outliers are not cut"
        scale = self.scale if self.scale.shape[0] == 1 else self.scale[start:stop]
        zero = None if self.zero is None else self.zero[start:stop]
        by_row = self.coded_scales if self.scheme.kind == "mxfp4" else {}
        return CodedWeight(
            self.scheme,
            self.codes[start:stop],
            scale,
            zero,
            self.group_of,
            coded_scales={name: tensor[start:stop] for name, tensor in by_row.items()},
            input_scale=self.input_scale,
        )

    def to(self, device: torch.device | str) -> "CodedWeight":
        """This weight on another device."""
        moved = {name: _moved(getattr(self, name), device) for name in MOVED}
        lost = self.outliers
        outliers = lost and Outliers(lost.starts.to(device), lost.columns.to(device), lost.values.to(device))
        scales = {name: tensor.to(device) for name, tensor in self.coded_scales.items()}
        return CodedWeight(self.scheme, outliers=outliers, coded_scales=scales, **moved)  # type: ignore[arg-type]

    def stored_bytes(self) -> int:
        """Bytes of the packed weight, outliers included."""
        lost = self.outliers
        kept = 0 if lost is None else sum(t.nbytes for t in (lost.starts, lost.columns, lost.values))
        order = 0 if self.group_of is None else 4 * self.codes.shape[1]
        return self.scheme.weight_bytes(*self.shape) + kept + order


def _moved(tensor: Tensor | None, device: torch.device | str) -> Tensor | None:
    return None if tensor is None else tensor.to(device)


def code_values(scheme: Scheme, codes: Tensor) -> Tensor:
    """What codes mean before zero point and scale, float32."""
    if scheme.kind in TABLES:
        return table(scheme.kind, codes.device).index_select(0, codes.flatten().int()).view(codes.shape)
    return codes.to(torch.float32)


def scaled(values: Tensor, scale: Tensor, zero: Tensor | int | None, group_of: Tensor | None) -> Tensor:
    """(values − zero) · scale, with scale and zero of each column's group; in place of `values`."""
    outputs, inputs = values.shape
    if group_of is not None:
        scale = scale[:, group_of.long()]
        zero = zero[:, group_of.long()] if isinstance(zero, Tensor) else zero
    elif scale.shape[1] > 1:
        values, scale = values.reshape(outputs, scale.shape[1], -1), scale[:, :, None]
        zero = zero[:, :, None] if isinstance(zero, Tensor) else zero
    if zero is not None:
        values.sub_(zero)
    return values.mul_(scale).reshape(outputs, inputs)


def stack_rows(parts: Sequence[CodedWeight], name: str) -> CodedWeight:
    """Matrices one above the other, as families that keep query, key and value in one tensor `name` have them."""
    first = parts[0]
    if len(parts) == 1:
        return first
    schemes = [part.scheme for part in parts]
    require_stacking(schemes, name)
    if not all(_same_order(part, first) for part in parts):
        raise _unstackable(schemes, name)
    zeros = [part.zero for part in parts if part.zero is not None]
    return CodedWeight(
        first.scheme,
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scale for part in parts]),
        torch.cat(zeros) if zeros else None,
        first.group_of,
        coded_scales={name: torch.cat([part.coded_scales[name] for part in parts]) for name in first.coded_scales},
        input_scale=first.input_scale,  # of one input, which they share
    )


def require_stacking(schemes: Sequence[Scheme | None], name: str) -> None:
    """Refuse parts of the tensor `name` that cannot be one: some plain, coded differently or not row by row."""
    if len(schemes) == 1:
        return
    coded = [scheme for scheme in schemes if scheme is not None]
    if len(coded) < len(schemes):
        raise UserError(f"{name} is one tensor in files of this family, but only some of its parts are quantized")
    if len(set(coded)) > 1 or not coded[0].is_by_row:
        raise _unstackable(coded, name)


def _unstackable(schemes: Sequence[Scheme], name: str) -> UserError:
    told = " and ".join(dict.fromkeys(scheme.describe() for scheme in schemes))
    return UserError(
        f"{name} is one tensor in files of this family, and {told} of its parts cannot be made one; use integers of "
        "one width with groups or rows and without outliers, or mxfp4"
    )


def _same_order(part: CodedWeight, first: CodedWeight) -> bool:
    """Whether inputs are in the same groups."""
    return part.group_of is first.group_of or (
        part.group_of is not None and first.group_of is not None and torch.equal(part.group_of, first.group_of)
    )
