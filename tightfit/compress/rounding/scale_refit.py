"""Scales fitted once more when the codes are known: the best ones for the layer's outputs, in closed form.

GPTQ fixes a group's scale before it chooses codes. With the codes q and zero points Z decided, a row is linear in its
scales, ŵ = Σ_g s_g v_g with v_g = q − Z in group g and 0 elsewhere, and the error of its outputs is quadratic:

    (w − Σ s_g v_g) H (w − Σ s_g v_g)ᵀ,    least where  A s = b,   A_gh = v_g H v_hᵀ,   b_g = v_g H wᵀ

One small system per row. Scales are rounded to the format in which they are stored, and a row takes new scales only
where its error falls. Only integers with a scale per group or row are refitted.

Where no inputs were seen, H is the identity and every group has an equation of its own: s = ⟨v, w⟩ / ⟨v, v⟩. Weights
are denser near zero than far from it, so of those that round to a code more lie below it than above, and s is a little
smaller than the range over the number of steps: outputs of layers rounded to nearest are too large by that much. So
rounding to nearest in few bits is `nearest_fitted`, where weights are coded and where `--fit` estimates its cost.
"""

from dataclasses import replace

import torch
from torch import Tensor

from tightfit.models.quantized.coded_weight import CodedWeight, scaled
from tightfit.models.quantized.ranges import RangeRule, fit_grid, in_groups
from tightfit.models.quantized.rounding import store_scales
from tightfit.models.quantized.scheme import Scheme

REFITTED_BITS = 3
"""Up to this width, rounding to nearest refits its scales to the codes: SmolLM2 in 3 bits has 5 to 7 % less perplexity
by it, in 4 bits none (docs/LOG.md)."""
RIDGE = 1e-4
"""Share of A's mean diagonal that is added to it: groups whose codes are nearly all zero leave it near singular."""


def nearest_fitted(
    weight: Tensor, scheme: Scheme, rule: RangeRule = "minmax", importance: Tensor | None = None
) -> CodedWeight:
    """A float32 matrix rounded to nearest; where steps are wide, its scales are fitted to the codes."""
    coded = fit_grid(weight, scheme, rule, importance).code(weight)
    return refit_scales(coded, weight) if scheme.bits <= REFITTED_BITS else coded


def refit_scales(coded: CodedWeight, weight: Tensor, hessian: Tensor | None = None) -> CodedWeight:
    """`coded` with the scales of least tr(Δ H Δᵀ) against the original `weight`; of least ‖Δ‖² without H."""
    if coded.scheme.kind != "int" or coded.scheme.group < 0 or coded.coded_scales or coded.outliers is not None:
        return coded
    return _for_weights(coded, weight) if hessian is None else _for_outputs(coded, weight, hessian)


def _for_weights(coded: CodedWeight, weight: Tensor) -> CodedWeight:
    assert coded.group_of is None, "without inputs, groups are in order"
    values = in_groups(_values(coded), coded.scheme)
    squares = values.square().sum(-1)
    product = values.mul_(in_groups(weight, coded.scheme)).sum(-1)
    refitted = store_scales(product / squares, coded.scheme).scale
    better = refitted * (refitted * squares - 2 * product) < coded.scale * (coded.scale * squares - 2 * product)
    # A group whose codes are all zero keeps its scale: 0 / 0 compares as no better.
    return replace(coded, scale=torch.where(better, refitted, coded.scale))


def _for_outputs(coded: CodedWeight, weight: Tensor, hessian: Tensor) -> CodedWeight:
    groups = coded.scale.shape[1]
    values, sizes = _values(coded), [coded.shape[1] // groups] * groups
    order = None if coded.group_of is None else coded.group_of.long().argsort(stable=True)
    if order is not None:  # the columns of a group side by side
        values, weight, hessian = values[:, order], weight[:, order], hessian[order[:, None], order]
    quadratic, linear = _system(values, weight, hessian, sizes)
    ridge = RIDGE * quadratic.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] * torch.eye(groups, device=weight.device)
    found, failed = torch.linalg.solve_ex(quadratic + ridge, linear[..., None])
    refitted = store_scales(found[..., 0], coded.scheme).scale
    usable = (failed == 0)[:, None] & refitted.isfinite() & (found[..., 0] > 0)
    refitted = torch.where(usable.all(1, keepdim=True), refitted, coded.scale)
    better = _error(refitted, quadratic, linear) < _error(coded.scale, quadratic, linear)
    return replace(coded, scale=torch.where(better[:, None], refitted, coded.scale))


def _values(coded: CodedWeight) -> Tensor:
    """q − Z of every weight."""
    ones = torch.ones_like(coded.scale)
    zero = coded.scheme.middle if coded.zero is None else coded.zero
    return scaled(coded.codes.float(), ones, zero, coded.group_of)


def _system(values: Tensor, weight: Tensor, moment: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor]:
    """A [outputs, groups, groups] and b [outputs, groups]."""
    rows, groups = len(values), len(sizes)
    quadratic = values.new_empty(rows, groups, groups)
    start = 0
    for group, size in enumerate(sizes):
        here = slice(start, start + size)
        quadratic[:, :, group] = _by_group(values * (values[:, here] @ moment[here]), sizes)
        start += size
    return quadratic, _by_group(values * (weight @ moment), sizes)


def _by_group(products: Tensor, sizes: list[int]) -> Tensor:
    """Sums over the columns of each group [outputs, groups]."""
    return torch.stack([part.sum(1) for part in products.split(sizes, dim=1)], dim=1)


def _error(scale: Tensor, quadratic: Tensor, linear: Tensor) -> Tensor:
    """s A sᵀ − 2 b sᵀ of every row: its error up to the constant w H wᵀ."""
    return torch.einsum("rg,rgh,rh->r", scale, quadratic, scale) - 2 * (linear * scale).sum(1)
