"""GPTQ: codes chosen column by column, each column's error made up for by the columns that follow.

With H = Σ x xᵀ over the layer's inputs, the error of a row is Δ H Δᵀ. Rounding column j by e_j leaves least error if
the columns after it change by −e_j · U[j, j+1:] / U[j, j], where U is the upper Cholesky factor of H⁻¹ (Frantar et al.
2022): one factorisation serves all rows and all columns. Columns go in blocks: most of the update is one product.

H is damped by a share of its mean diagonal. With `act_order` columns go by falling H[j, j]: the weights that matter
most are rounded while all others can still make up for them. `static` keeps groups where they lie (their ranges are
fixed before), `groups` makes groups of columns that were rounded together, which files then have to say (g_idx).
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from tightfit.models.quantized.coded_weight import CodedWeight
from tightfit.models.quantized.ranges import Grid, RangeRule, fit_grid
from tightfit.models.quantized.rounding import StoredScales, decode, encode
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


def gptq(weight: Tensor, hessian: Tensor, scheme: Scheme, options: GptqOptions | None = None) -> CodedWeight:
    """The codes of a float32 matrix whose inputs have the second moment `hessian` [inputs, inputs]."""
    options = options or GptqOptions()
    if options.act_order == "groups" and (scheme.group <= 0 or scheme.kind != "int"):
        options = replace(options, act_order="static")  # only integers in groups may lie in any order
    weight, hessian = without_dead(weight, hessian)
    importance = hessian.diagonal()
    order = torch.arange(weight.shape[1], device=weight.device)
    if options.act_order != "none":
        order = importance.argsort(descending=True, stable=True)
    grid = None
    if options.act_order == "static" or scheme.group <= 0 or scheme.kind != "int":
        grid = fit_grid(weight, scheme, options.ranges, importance)  # fixed before errors move
    columns = _Columns(
        weight[:, order], scheme, options, importance[order], grid, _columns_groups(order, scheme, options)
    )
    columns.run(inverse_factor(hessian[order][:, order], options.damping))
    return columns.coded(order)


def without_dead(weight: Tensor, hessian: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs that are always zero get weight zero, lest H be singular."""
    dead = hessian.diagonal() == 0
    hessian = hessian.clone()
    hessian.diagonal()[dead] = 1
    return weight.masked_fill(dead, 0), hessian


def inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """The upper Cholesky factor of the damped H⁻¹; damping grows tenfold where H is too close to singular."""
    mean = hessian.diagonal().mean()
    for attempt in range(6):
        damped = hessian + torch.eye(len(hessian), device=hessian.device) * (damping * 10**attempt * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed and bool(upper.isfinite().all()):
                return upper
    raise ArithmeticError("the second moment of a layer's inputs is not positive even when damped")


def _columns_groups(order: Tensor, scheme: Scheme, options: GptqOptions) -> Tensor:
    """The group of every column in the order in which columns are rounded."""
    if scheme.group <= 0:
        return torch.zeros_like(order)
    places = torch.arange(len(order), device=order.device) if options.act_order == "groups" else order
    return places // scheme.group


class _Columns:
    """The weights in rounding order, what has been decided, and the errors still to be passed on."""

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
        self.group_of = group_of.tolist()
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
        for start in range(0, inputs, self.options.block):
            stop = min(start + self.options.block, inputs)
            errors = torch.empty_like(self.weight[:, start:stop])
            for j in range(start, stop):
                if self.grid is None and j % self.scheme.group == 0:
                    self._fit(j)
                errors[:, j - start] = self._round(j) / upper[j, j]
                self.weight[:, j:stop] -= errors[:, j - start, None] * upper[j, j:stop]
            self.weight[:, stop:] -= errors @ upper[start:stop, stop:]

    def _fit(self, first: int) -> None:
        """The range of the group that begins at column `first`, from weights as they are by now."""
        last = first + self.scheme.group
        part = fit_grid(
            self.weight[:, first:last].contiguous(), self.scheme, self.options.ranges, self.importance[first:last]
        )
        group = self.group_of[first]
        self.scale[:, group] = part.scale[:, 0]
        if self.zero is not None and part.zero is not None:
            self.zero[:, group] = part.zero[:, 0]

    def _round(self, j: int) -> Tensor:
        """Decide column j; its error."""
        column, group = self.weight[:, j], self.group_of[j]
        scale, zero = self.scale[:, group], None if self.zero is None else self.zero[:, group]
        wanted = column if self.pruned is None else column.masked_fill(self.pruned[:, j], 0)
        self.codes[:, j] = encode(wanted, scale, zero, self.scheme)
        return column - decode(self.codes[:, j], scale, zero, self.scheme)

    def coded(self, order: Tensor) -> CodedWeight:
        """The result with columns where they were."""
        back = order.argsort()
        stored = self.grid.stored if self.grid is not None else StoredScales(self.scale, {})
        group_of = None
        if self.options.act_order == "groups" and self.scheme.group > 0 and self.grid is None:
            group_of = torch.tensor(self.group_of, dtype=torch.int32, device=back.device)[back]
        made = CodedWeight(self.scheme, self._back(back), stored.scale, self.zero, group_of)
        return replace(made, coded_scales=stored.coded)

    def _back(self, back: Tensor) -> Tensor:
        if self.scheme.kind == "fp8":
            return self.codes.view(torch.uint8)[:, back].view(torch.float8_e4m3fn)
        return self.codes[:, back]
