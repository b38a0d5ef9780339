"""Low-rank factors of a matrix W [outputs, inputs]: W ≈ B A of rank r, for its weights or for its outputs.

    svd       the least ‖W − B A‖_F   W = U S Vᵀ     B A = U_r S_r · V_rᵀ               (Eckart and Young 1936)
    whitened  the least tr(Δ H Δᵀ)    W L = U S Vᵀ   B A = U_r S_r · V_rᵀ L⁻¹, H = L Lᵀ   (SVD-LLM, Wang et al. 2024)

The squared singular values beyond r are the error exactly, of the weights or of the outputs. Ranks share one budget: a
rank of a matrix costs outputs + inputs numbers and is worth its share of the matrix's squared singular values, so ranks
go where a number is worth most, and a matrix that would not get smaller stays whole.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Literal

import torch
from torch import Tensor

from tightfit.compress.calibration.inputs import unusable_inputs

LowRankMethod = Literal["svd", "whitened"]
DAMPING = 1e-6
"""Added to the diagonal of H, as a share of its mean; ten times more where H still cannot be factored."""


@dataclass(frozen=True)
class Factors:
    """A [rank, inputs] and B [outputs, rank]."""

    first: Tensor
    second: Tensor

    @property
    def product(self) -> Tensor:
        """B A."""
        return self.second @ self.first


def factor(weight: Tensor, rank: int, hessian: Tensor | None = None) -> Factors:
    """The best factors of `rank`; with the second moment of its inputs, the best for its outputs."""
    root = None if hessian is None else whitener(hessian)
    wide = weight.double()
    u, s, v = torch.linalg.svd(wide if root is None else wide @ root, full_matrices=False)
    second, first = u[:, :rank] * s[:rank].sqrt(), s[:rank, None].sqrt() * v[:rank]
    if root is not None:
        first = torch.linalg.solve_triangular(root, first, upper=False, left=False)
    return Factors(first.to(weight.dtype), second.to(weight.dtype))


def singular_energies(weight: Tensor, hessian: Tensor | None = None) -> Tensor:
    """Squared singular values as shares of their sum, falling."""
    wide = weight.double() if hessian is None else weight.double() @ whitener(hessian)
    squares = torch.linalg.svdvals(wide).square()
    return squares / squares.sum().clamp(min=1e-300)


def whitener(hessian: Tensor) -> Tensor:
    """L with L Lᵀ = H, lower triangular, float64."""
    wide = hessian.double()
    diagonal = wide.diagonal().clone()
    mean = diagonal.mean().clamp(min=1e-30)
    for attempt in range(8):
        wide.diagonal().copy_(diagonal + DAMPING * 10**attempt * mean)
        lower, failed = torch.linalg.cholesky_ex(wide)
        if not failed:
            return lower
        del lower  # H is large
    raise unusable_inputs()


def choose_ranks(
    energies: Mapping[str, list[float]], shapes: Mapping[str, tuple[int, int]], kept_share: float
) -> dict[str, int]:
    """The rank of every matrix to factor, so that all of them together keep at most `kept_share` of their numbers.

    Matrices that stay whole are left out; each has at least rank 1.
    """
    budget = int(kept_share * sum(outputs * inputs for outputs, inputs in shapes.values()))
    ranks, held = dict.fromkeys(energies, 1), sum(sum(shapes[name]) for name in energies)
    queue = [(-_worth(energies[name], 1, shapes[name]), name) for name in energies]
    heapify(queue)
    while queue:
        _, name = heappop(queue)
        outputs, inputs = shapes[name]
        next_held = held + outputs + inputs
        if (ranks[name] + 1) * (outputs + inputs) >= outputs * inputs:
            next_held = held - ranks[name] * (outputs + inputs) + outputs * inputs
            if next_held <= budget:
                held = next_held
                del ranks[name]
            continue
        if next_held > budget:
            continue
        ranks[name], held = ranks[name] + 1, next_held
        heappush(queue, (-_worth(energies[name], ranks[name], shapes[name]), name))
    return ranks


def _worth(energies: list[float], rank: int, shape: tuple[int, int]) -> float:
    """The worth of the next rank per number it costs."""
    return (energies[rank] if rank < len(energies) else 0.0) / sum(shape)
