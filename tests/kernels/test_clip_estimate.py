"""The estimated clipping factor: against float64, torch's operations and what is no number."""

import pytest
import torch
from torch import Tensor

from tests.covering import sampled
from tests.kernels.truth import DEVICE
from tightfit.kernels.optimizer.clip_estimate import CLIP_EPSILON, TRUST, clip_estimate, trusted_totals
from tightfit.kernels.triton_support import Impl

IMPLS: tuple[Impl, ...] = ("torch", "triton")
COUNT = 37
LAST_BITS = 8 * torch.finfo(torch.float32).eps
"""Eight operations, each rounded once."""


def drawn(grown: float = 1.0) -> Tensor:
    """Norms of this step and of the one before, over six orders of magnitude."""
    return (3 * torch.randn(2, COUNT)).exp() * torch.tensor([[grown], [1.0]])


def factors(norms: Tensor, clip_norm: float, impl: Impl) -> tuple[Tensor, Tensor]:
    """Of every gradient in turn, and the squares seen then."""
    own = norms.to(DEVICE)
    seen, totals = torch.zeros(2, device=DEVICE), trusted_totals(own[1].square().sum())
    found = [clip_estimate(own, number, seen, totals, clip_norm, impl) for number in range(COUNT)]
    return torch.stack(found), seen


@sampled(3)
@pytest.mark.parametrize("clip_norm", [0.1, 1.0, 1e4])
@pytest.mark.parametrize("grown", [1.0, 30.0, 1 / 30])
def test_it_is_the_formula_in_float64(clip_norm: float, grown: float) -> None:
    norms = drawn(grown)
    squares = norms.double().square()
    now, then = squares.cumsum(1)
    total = squares[1].sum()
    estimate = (total * (now + TRUST * total) / (then + TRUST * total)).sqrt()
    wanted = (clip_norm / (estimate + CLIP_EPSILON)).clamp(max=1.0)
    for impl in IMPLS:
        found, seen = factors(norms, clip_norm, impl)
        assert found.double().cpu() == pytest.approx(wanted, rel=COUNT * LAST_BITS)
        assert seen.double().cpu() == pytest.approx(squares.sum(1), rel=COUNT * LAST_BITS)


def test_the_kernel_rounds_as_torch_does() -> None:
    """But for the sum of squares, which a processor may round once or twice: from the same sum, the same bits."""
    norms, totals = torch.zeros(2, COUNT, device=DEVICE), torch.rand(2, device=DEVICE)
    for number in range(COUNT):
        seen = torch.rand(2, device=DEVICE) * 10.0**number
        plain, ours = (clip_estimate(norms, number, seen.clone(), totals, 0.7, impl) for impl in IMPLS)
        assert torch.equal(plain, ours), number


@pytest.mark.parametrize("impl", IMPLS)
def test_what_is_no_number_stays_none(impl: Impl) -> None:
    norms = drawn()
    norms[0, 3] = float("nan")
    found, seen = factors(norms, 1.0, impl)
    assert found[:3].isfinite().all()
    assert found[3:].isnan().all()
    assert seen[0].isnan()
