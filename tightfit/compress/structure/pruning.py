"""Pruning of single weights: a share of a matrix, or M − N of every M inputs (N:M), becomes zero.

| method | a weight is worth | compared with | the others |
|---|---|---|---|
| magnitude | abs(w) | the whole matrix | stay |
| Wanda (Sun et al. 2023) | abs(w_ij) · ‖x_j‖ | its row | stay |
| SparseGPT (Frantar and Alistarh 2023) | w_ij² / [H⁻¹]_jj | 128 columns of all rows | make up for it, as in GPTQ |

‖x_j‖² is H_jj up to a factor that all have; [H⁻¹]_jj is that of the columns not yet decided, U_jj² of the Cholesky
factor U of H⁻¹. Of N:M, the best N of every M neighbours stay, whatever the method. A matrix is [outputs, inputs].
Zeros save neither bytes nor time by themselves: 2:4 does on GPUs with sparse tensor cores (`semi_structured.py`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tightfit.compress.calibration.inputs import InputStatistics
from tightfit.compress.recipe import Step
from tightfit.compress.rounding.gptq import inverse_factor, without_dead

BLOCK = 128
"""Columns among which SparseGPT chooses; the paper's."""


@dataclass(frozen=True)
class Sparsity:
    """`share` of the weights is pruned, or with `group` all but `kept` of every `group` neighbours."""

    share: float = 0.5
    kept: int = 0
    group: int = 0


def sparsity_of(step: Step) -> Sparsity:
    """What a pruning step of a recipe asks for."""
    kept, group = step.kept_of_group or (0, 0)
    return Sparsity(step.sparsity, kept, group)


def prune_weight(weight: Tensor, seen: InputStatistics | None, step: Step) -> Tensor:
    """`weight` pruned by the method of `step`; by magnitude where no inputs were seen."""
    sparsity = sparsity_of(step)
    if step.method == "magnitude" or seen is None:
        return magnitude(weight, sparsity)
    if step.method == "wanda":
        return wanda(weight, seen.hessian, sparsity)
    return sparsegpt(weight, seen.hessian, sparsity, step.damping)


def magnitude(weight: Tensor, sparsity: Sparsity) -> Tensor:
    """The smallest weights of the matrix become zero."""
    worth = weight.abs()
    if sparsity.group:
        return weight.masked_fill(_least_of_groups(worth, sparsity), 0)
    return weight.masked_fill(_least(worth.view(1, -1), sparsity.share).view_as(weight), 0)


def wanda(weight: Tensor, hessian: Tensor, sparsity: Sparsity) -> Tensor:
    """Weights with the smallest abs(w_ij) · ‖x_j‖ of their row become zero."""
    worth = weight.abs() * hessian.diagonal().sqrt()
    pruned = _least_of_groups(worth, sparsity) if sparsity.group else _least(worth, sparsity.share)
    return weight.masked_fill(pruned, 0)


def sparsegpt(weight: Tensor, hessian: Tensor, sparsity: Sparsity, damping: float = 0.01) -> Tensor:
    """Weights with the smallest w² / [H⁻¹]_jj become zero; columns that follow make up for each."""
    weight, hessian = without_dead(weight, hessian)
    upper = inverse_factor(hessian, damping)
    inputs = weight.shape[1]
    size = BLOCK if not sparsity.group else max(BLOCK // sparsity.group, 1) * sparsity.group
    for start in range(0, inputs, size):
        stop = min(start + size, inputs)
        errors = _prune_block(weight[:, start:stop], upper[start:stop, start:stop], sparsity)
        weight[:, stop:] -= errors @ upper[start:stop, stop:]
    return weight


def _prune_block(block: Tensor, upper: Tensor, sparsity: Sparsity) -> Tensor:
    """Prune a block in place; e_j = w_j / U_jj of pruned weights, whose product with U_j later columns subtract."""
    errors = torch.zeros_like(block)
    pivots = upper.diagonal()
    pruned = torch.zeros_like(block, dtype=torch.bool)
    if not sparsity.group:
        pruned = _least((block / pivots).square().reshape(1, -1), sparsity.share).view_as(block)
    for j in range(block.shape[1]):
        if sparsity.group and j % sparsity.group == 0:
            last = j + sparsity.group
            pruned[:, j:last] = _least_of_groups((block[:, j:last] / pivots[j:last]).square(), sparsity)
        errors[:, j] = torch.where(pruned[:, j], block[:, j], 0) / pivots[j]
        block[:, j + 1 :] -= errors[:, j, None] * upper[j, j + 1 :]
        block[:, j].masked_fill_(pruned[:, j], 0)
    return errors


def _least(worth: Tensor, share: float) -> Tensor:
    """Mask of the least `share` of every row."""
    count = round(share * worth.shape[1])
    pruned = torch.zeros_like(worth, dtype=torch.bool)
    return pruned.scatter_(1, worth.topk(count, dim=1, largest=False).indices, True)


def _least_of_groups(worth: Tensor, sparsity: Sparsity) -> Tensor:
    """Mask of all but the best `kept` of every `group` neighbours."""
    groups = worth.reshape(-1, sparsity.group)
    pruned = torch.ones_like(groups, dtype=torch.bool)
    return pruned.scatter_(1, groups.topk(sparsity.kept, dim=1).indices, False).view_as(worth)
