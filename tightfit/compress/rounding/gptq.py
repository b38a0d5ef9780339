"""GPTQ: codes chosen column by column, each column's error made up for by the columns that follow.

With H = Σ x xᵀ over the layer's inputs, the error of a row is Δ H Δᵀ. Rounding column j by e_j leaves least error if
the columns after it change by −e_j · U[j, j+1:] / U[j, j], where U is the upper Cholesky factor of H⁻¹ (Frantar et al.
2022): one factorisation serves all rows and all columns. Columns go in blocks, so that most of the update is one matrix
product.

H is damped by a share of its mean diagonal. With `act_order` columns go by falling H[j, j]: the weights that matter
most are rounded while all others can still make up for them. `static` keeps groups where they lie (their ranges are
fixed before), `groups` makes groups of columns that were rounded together, which files then have to say (g_idx).
When all codes are decided, scales are fitted once more (scale_refit.py), which GPTQ itself does not do.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from tightfit.compress.calibration.inputs import unusable_inputs
from tightfit.compress.rounding.column_rounding import ColumnBlock, round_columns
from tightfit.compress.rounding.scale_refit import refit_scales
from tightfit.models.quantized.coded_weight import CodedWeight
from tightfit.models.quantized.ranges import Grid, RangeRule, fit_grid
from tightfit.models.quantized.rounding import StoredScales
from tightfit.models.quantized.scheme import Scheme

ActOrder = Literal["none", "static", "groups"]


@dataclass(frozen=True, kw_only=True)
class GptqOptions:
    """How columns are ordered, how much H is damped (a share of its mean diagonal), and how ranges are chosen."""

    act_order: ActOrder = "static"
    damping: float = 0.01
    block: int = 128
    ranges: RangeRule = "mse"
    keep_zeros: bool = False
    """Whether weights that are zero stay so, as those of a pruned matrix should."""
    refit: bool = True
    """Whether scales are fitted once more when the codes are known (scale_refit.py)."""


@dataclass(frozen=True)
class InverseFactor:
    """The upper Cholesky factor of the damped H⁻¹, with rows and columns in the order in which columns are rounded."""

    order: Tensor
    upper: Tensor

    @classmethod
    def of(cls, hessian: Tensor, options: GptqOptions) -> "InverseFactor":
        """That of an H without dead inputs, for all matrices that read them."""
        order = torch.arange(len(hessian), device=hessian.device)
        if options.act_order != "none":
            order = hessian.diagonal().argsort(descending=True, stable=True)
            hessian = hessian[order[:, None], order]
        return cls(order, inverse_factor(hessian, options.damping))


def gptq(
    weight: Tensor,
    hessian: Tensor,
    scheme: Scheme,
    options: GptqOptions | None = None,
    factor: InverseFactor | None = None,
) -> CodedWeight:
    """The codes of a float32 matrix whose inputs have the second moment `hessian` [inputs, inputs]; `factor` is that of
    the same options, where it is known already."""
    options = options or GptqOptions()
    if options.act_order == "groups" and (scheme.group <= 0 or scheme.kind != "int"):
        options = replace(options, act_order="static")  # only integers in groups may lie in any order
    weight, hessian = without_dead(weight, hessian)
    importance = hessian.diagonal().clone()
    factor = factor or InverseFactor.of(hessian, options)
    order, grid = factor.order, None
    if options.act_order == "static" or scheme.group <= 0 or scheme.kind != "int":
        grid = fit_grid(weight, scheme, options.ranges, importance)  # fixed before errors are passed on
    columns = _Columns(
        weight[:, order], scheme, options, importance[order], grid, _columns_groups(order, scheme, options)
    )
    columns.run(factor.upper)
    del factor  # H is large: what nobody else holds is freed here
    coded = columns.coded(order)
    return refit_scales(coded, weight, hessian) if options.refit else coded


def without_dead(weight: Tensor, hessian: Tensor) -> tuple[Tensor, Tensor]:
    """Weight and H in which inputs that are always zero have weight 0 and H[j, j] = 1, lest H be singular."""
    return weight.masked_fill(hessian.diagonal() == 0, 0), moment_without_dead(hessian)


def moment_without_dead(hessian: Tensor) -> Tensor:
    """H with H[j, j] = 1 of inputs that are always zero."""
    hessian = hessian.clone()
    hessian.diagonal()[hessian.diagonal() == 0] = 1
    return hessian


def inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """The upper Cholesky factor of the damped H⁻¹; damping grows tenfold where H is too close to singular."""
    mean, damped = hessian.diagonal().mean(), hessian.clone()
    for attempt in range(6):
        damped.diagonal().copy_(hessian.diagonal() + damping * 10**attempt * mean)
        factor, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            factor = torch.cholesky_inverse(factor)  # H is large: the first factor is freed here
            factor, failed = torch.linalg.cholesky_ex(factor, upper=True)
            if not failed and bool(factor.diagonal().isfinite().all()):
                return factor
    raise unusable_inputs()


def _columns_groups(order: Tensor, scheme: Scheme, options: GptqOptions) -> Tensor:
    """The group of every column in the order in which columns are rounded."""
    if scheme.group <= 0:
        return torch.zeros_like(order)
    places = torch.arange(len(order), device=order.device) if options.act_order == "groups" else order
    return places // scheme.group


class _Columns:
    """The loop over columns: weights in rounding order with errors so far passed on, and the codes decided so far."""

    def __init__(
        self,
        weight: Tensor,
        scheme: Scheme,
        options: GptqOptions,
        importance: Tensor,
        grid: Grid | None,
        group_of: Tensor,
    ) -> None:
        self.weight, self.scheme, self.options, self.importance = weight.clone(), scheme, options, importance
        self.group_of = group_of
        self.pruned = weight == 0 if options.keep_zeros else None
        outputs, inputs = weight.shape
        self.codes = torch.empty(
            weight.shape, device=weight.device, dtype=torch.float8_e4m3fn if scheme.kind == "fp8" else torch.uint8
        )
        groups = scheme.groups(inputs)
        self.grid = grid
        self.scale = grid.scale.expand(outputs, -1) if grid is not None else weight.new_empty(outputs, groups)
        self.zero = None if scheme.symmetric else (weight.new_empty(outputs, groups) if grid is None else grid.zero)

    def run(self, upper: Tensor) -> None:
        """Round all columns; `upper` is the factor of H⁻¹."""
        inputs = self.weight.shape[1]
        # a group whose range is fitted during the loop begins where a block begins
        width = self.options.block if self.grid is not None else math.gcd(self.options.block, self.scheme.group)
        for start in range(0, inputs, width):
            stop = min(start + width, inputs)
            if self.grid is None and start % self.scheme.group == 0:
                self._fit(start)
            codes, errors = round_columns(self._block(slice(start, stop), upper), self.scheme)
            self.codes[:, start:stop] = codes
            self.weight[:, stop:] -= errors @ upper[start:stop, stop:]

    def _block(self, here: slice, upper: Tensor) -> ColumnBlock:
        groups = self.group_of[here]
        return ColumnBlock(
            weight=self.weight[:, here],
            upper=upper[here, here],
            scale=self.scale[:, groups],
            zero=None if self.zero is None else self.zero[:, groups],
            pruned=None if self.pruned is None else self.pruned[:, here],
        )

    def _fit(self, first: int) -> None:
        """Fit the range of the group that begins at column `first` to the weights with all errors so far passed on."""
        last = first + self.scheme.group
        part = fit_grid(
            self.weight[:, first:last].contiguous(), self.scheme, self.options.ranges, self.importance[first:last]
        )
        group = first // self.scheme.group
        self.scale[:, group] = part.scale[:, 0]
        if self.zero is not None and part.zero is not None:
            self.zero[:, group] = part.zero[:, 0]

    def coded(self, order: Tensor) -> CodedWeight:
        """The result, with columns back in their original order."""
        back = order.argsort()
        stored = self.grid.stored if self.grid is not None else StoredScales(self.scale, {})
        group_of = None
        if self.options.act_order == "groups" and self.scheme.group > 0 and self.grid is None:
            group_of = self.group_of[back].to(torch.int32)
        coded = CodedWeight(self.scheme, self._back(back), stored.scale, self.zero, group_of)
        return replace(coded, coded_scales=stored.coded)

    def _back(self, back: Tensor) -> Tensor:
        if self.scheme.kind == "fp8":
            return self.codes.view(torch.uint8)[:, back].view(torch.float8_e4m3fn)
        return self.codes[:, back]
