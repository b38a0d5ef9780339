"""The clipping factor of a gradient while the norm of all gradients is not known yet, in one launch.

For updates inside backward (train/optimizer/backward_update.py). From ‖g‖ of a gradient that is complete, in this step
(now) and in the one before (then), the sums of squares seen so far in both, and T = Σ‖g‖² of the step before:

    seen += ‖g‖²        estimate² = T · (seen now + T/100) / (seen then + T/100)        factor = min(1, clip / estimate)

Eight numbers: as torch operations these were ten launches for every weight, most of what the host did for its update.
Each operation rounds as torch's does.
"""

import torch
from torch import Tensor

from tightfit.kernels.operators import on_device_of, operator
from tightfit.kernels.triton_support import Impl, tl, triton, use_triton

CLIP_EPSILON = 1e-6
TRUST = 1 / 100
"""Weight of the previous step's norm in the estimate, as a share of its Σ‖g‖²."""


def clip_factor(norm: Tensor, largest: float) -> Tensor:
    """The factor, at most 1, by which gradients of global `norm` are scaled to a norm of at most `largest`."""
    return (largest / (norm + CLIP_EPSILON)).clamp(max=1.0)


def trusted_totals(total: Tensor) -> Tensor:
    """T and T/100, as `clip_estimate` takes them."""
    return torch.stack((total, TRUST * total))


def clip_estimate(
    norms: Tensor, number: int, seen: Tensor, totals: Tensor, clip_norm: float, impl: Impl = "auto"
) -> Tensor:
    """The factor of gradient `number` of norms [2, n], whose squares are added to `seen` [2]; all of them float32."""
    factor: Tensor = _clip_estimate(norms, number, seen, totals, clip_norm, impl)
    return factor


def clip_estimate_eager(norms: Tensor, number: int, seen: Tensor, totals: Tensor, clip_norm: float) -> Tensor:
    """The reference, one operation after another."""
    both = norms[:, number]
    total, trusted = totals.unbind()
    now, then = (seen.addcmul_(both, both) + trusted).unbind()
    return clip_factor((total * now / then).sqrt(), clip_norm)


@triton.jit(do_not_specialize=["number"])
def clip_estimate_kernel(  # type: ignore[no-untyped-def]
    norms_ptr, seen_ptr, totals_ptr, factor_ptr, number, count, clip_norm, epsilon
):
    norm_now = tl.load(norms_ptr + number)
    norm_then = tl.load(norms_ptr + count + number)
    now = tl.load(seen_ptr) + norm_now * norm_now
    then = tl.load(seen_ptr + 1) + norm_then * norm_then
    tl.store(seen_ptr, now)
    tl.store(seen_ptr + 1, then)
    total, trusted = tl.load(totals_ptr), tl.load(totals_ptr + 1)
    estimate = tl.sqrt_rn(tl.div_rn(total * (now + trusted), then + trusted)) + epsilon
    factor = tl.div_rn(tl.full((), 1.0, tl.float32), estimate) * clip_norm
    tl.store(factor_ptr, tl.where(factor > 1.0, 1.0, factor))  # NaN stays NaN


def _launch(norms: Tensor, number: int, seen: Tensor, totals: Tensor, clip_norm: float) -> Tensor:
    factor = seen.new_empty(())
    with on_device_of(seen):
        clip_estimate_kernel[(1,)](
            norms, seen, totals, factor, number, norms.shape[1], clip_norm, CLIP_EPSILON, num_warps=1
        )
    return factor


def _run(norms: Tensor, number: int, seen: Tensor, totals: Tensor, clip_norm: float, impl: Impl) -> Tensor:
    do = _launch if use_triton(impl, seen) else clip_estimate_eager
    return do(norms, number, seen, totals, clip_norm)


def _fake(norms: Tensor, number: int, seen: Tensor, totals: Tensor, clip_norm: float, impl: Impl) -> Tensor:
    return seen.new_empty(())


_clip_estimate = operator(
    "clip_estimate(Tensor norms, int number, Tensor(a!) seen, Tensor totals, float clip_norm, str impl) -> Tensor",
    _run,
    _fake,
)
