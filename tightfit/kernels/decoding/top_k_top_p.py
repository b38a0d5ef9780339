"""Top-k and top-p: of each row of probabilities the k likeliest, and of those the fewest that together reach p.

Sorting a vocabulary of 128 256 for 64 rows takes a GPU as long as a decoding step of a small model. What is needed is
one number per row, the smallest probability that is kept, and whether a number is small enough is a sum away:

    T_k = max { t : #{ p_i ≥ t } ≥ k }        T_p = max { t : Σ p_i [p_i ≥ t] ≥ p · (sum of the k likeliest) }

Floats that are not negative have the order of their bits read as integers, so both are found by search over those: a
program reads its row once for every two bits, from the L2 cache, with three candidates at a time. Of probabilities
that equal T the first are kept, as many as are needed.
On a CPU, where even a sort of one row takes milliseconds, the likeliest few are looked at first.
"""

import torch
from torch import Tensor

from tightfit.kernels.operators import on_device_of
from tightfit.kernels.triton_support import Impl, is_interpreted, tl, triton, use_triton

BLOCK = 64 if is_interpreted() else 8192
FIRST_LOOK = 512
SCANNED = 1024
"""Probabilities that one program of the GPU sums up."""


def top_k_top_p(chances: Tensor, top_k: Tensor | None, top_p: Tensor | None, impl: Impl = "auto") -> Tensor:
    """Rows of `chances` [R, V], float32, cut by top_k [R, 1] and then by top_p [R, 1], and divided by what is left of
    their sums. A row with k = V or p = 1 is not cut by it; None is that for all rows."""
    if use_triton(impl, chances):
        kept = _launch(chances.contiguous(), top_k, top_p)
    else:
        kept = _kept_by_sorting(chances, top_k, top_p)
    return kept / kept.sum(-1, keepdim=True)


def cumulated(chances: Tensor) -> Tensor:
    """Cumulative sums of rows [R, V], added in one order however busy a GPU is.

    Torch's scan of a single long row there adds partial sums in the order in which its blocks happen to end. Here rows
    are cut into blocks, each of which one program sums up.
    """
    if not chances.is_cuda:
        return chances.cumsum(-1)
    gap = -chances.shape[-1] % SCANNED
    within = torch.nn.functional.pad(chances, (0, gap)).unflatten(-1, (-1, SCANNED)).cumsum(-1)
    totals = within[..., -1]
    return (within + (totals.cumsum(-1) - totals)[..., None]).flatten(-2)[..., : chances.shape[-1]]


def _kept_by_sorting(chances: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    width = chances.shape[-1]
    looked = width
    if not chances.is_cuda:
        largest_k = width if top_k is None else int(top_k.max())
        looked = min(width, largest_k if largest_k < width else FIRST_LOOK)
    kept = _among_likeliest(chances, top_k, top_p, looked)
    if kept is None:
        kept = _among_likeliest(chances, top_k, top_p, width)
    assert kept is not None
    return kept


def _among_likeliest(chances: Tensor, top_k: Tensor | None, top_p: Tensor | None, looked: int) -> Tensor | None:
    """What is kept, sought among the `looked` likeliest tokens of each row only; None where these do not suffice."""
    width = chances.shape[-1]
    ordered, index = chances.topk(looked) if looked < width else chances.sort(descending=True)
    if top_k is not None:
        ordered = ordered.masked_fill(torch.arange(looked, device=chances.device) >= top_k, 0.0)
    if looked < width and _needs_more(ordered, top_k, top_p, looked, width):
        return None
    if top_p is not None:
        whole = chances.sum(-1, keepdim=True)
        if top_k is not None:
            whole = torch.where(top_k >= width, whole, ordered.sum(-1, keepdim=True))
        reached = cumulated(ordered) - ordered >= top_p * whole
        ordered = ordered.masked_fill(reached & (top_p < 1), 0.0)
    return torch.zeros_like(chances).scatter_(-1, index, ordered)


def _needs_more(ordered: Tensor, top_k: Tensor | None, top_p: Tensor | None, looked: int, width: int) -> bool:
    """Whether some row keeps tokens beyond the `looked` likeliest. What top-p keeps of more than these many is unknown:
    it is a share of their sum."""
    suffices = torch.zeros(len(ordered), 1, dtype=torch.bool) if top_k is None else top_k <= looked
    if top_p is not None:
        reached = (ordered.sum(-1, keepdim=True) >= top_p) & (top_p < 1)
        suffices = suffices | (reached if top_k is None else reached & (top_k >= width))
    return not bool(suffices.all())


def _launch(chances: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    out = torch.empty_like(chances)
    with on_device_of(chances):
        _kernel[(len(chances),)](
            chances,
            out,
            out if top_k is None else top_k.contiguous(),
            out if top_p is None else top_p.contiguous(),
            chances.shape[-1],
            HAS_K=top_k is not None,
            HAS_P=top_p is not None,
            BLOCK=BLOCK,
            num_warps=1 if is_interpreted() else 32,
        )
    return out


@triton.jit
def _sum_above(row, V, threshold, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of a row's probabilities whose bits are above `threshold`."""
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        p = tl.load(row + at, mask=at < V, other=0.0)
        total += tl.where(p.to(tl.int32, bitcast=True) > threshold, p, 0.0)
    return tl.sum(total, 0)


@triton.jit
def _threshold(row, V, low, high, needed, BY_COUNT: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The highest bits T in [low, high) such that the probabilities from T up are, or sum up to, what is `needed`; and
    the number or sum of those above T. Those from `low` up are enough, and there are none from `high` up."""
    above = tl.full([], 0, tl.float32)
    while high - low > 1:
        step = (high - low + 3) // 4
        one, two, three = low + step, low + 2 * step, low + 3 * step
        from_one, from_two = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
        from_three = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, V, BLOCK):
            at = start + tl.arange(0, BLOCK)
            p = tl.load(row + at, mask=at < V, other=0.0)
            bits = p.to(tl.int32, bitcast=True)
            counted = 1.0 if BY_COUNT else p
            from_one += tl.where(bits >= one, counted, 0.0)
            from_two += tl.where(bits >= two, counted, 0.0)
            from_three += tl.where(bits >= three, counted, 0.0)
        has_one, has_two, has_three = tl.sum(from_one, 0), tl.sum(from_two, 0), tl.sum(from_three, 0)
        old_high = high
        if (one < old_high) & (has_one < needed):
            high, above = one, has_one
        elif one < old_high:
            low = one
            if (two < old_high) & (has_two < needed):
                high, above = two, has_two
            elif two < old_high:
                low = two
                if (three < old_high) & (has_three < needed):
                    high, above = three, has_three
                elif three < old_high:
                    low = three
    return low, above


@triton.jit
def _kernel(  # type: ignore[no-untyped-def]
    chances,
    out,
    top_k,
    top_p,
    V,
    HAS_K: tl.constexpr,
    HAS_P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row: its threshold, then what is kept of it."""
    index = tl.program_id(0).to(tl.int64)
    row, written = chances + index * V, out + index * V
    totals, largest = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        p = tl.load(row + at, mask=at < V, other=0.0)
        totals += p
        largest = tl.maximum(largest, p)
    whole = tl.sum(totals, 0)
    high = tl.max(largest, 0).to(tl.int32, bitcast=True) + 1
    threshold = tl.full([], 0, tl.int32)
    equal = tl.full([], 1e9, tl.float32)  # how many that equal the threshold are kept at most
    if HAS_K:
        k = tl.load(top_k + index)
        if k < V:
            threshold, above = _threshold(row, V, threshold, high, k, True, BLOCK)
            equal = k - above
            whole = _sum_above(row, V, threshold, BLOCK) + equal * threshold.to(tl.float32, bitcast=True)
    if HAS_P:
        share = tl.load(top_p + index)
        if share < 1:
            needed = share * whole
            found, above = _threshold(row, V, threshold, high, needed, False, BLOCK)
            smallest = found.to(tl.float32, bitcast=True)
            most = tl.where(found > threshold, 1e9, equal)
            if found > 0:
                most = tl.minimum(most, tl.maximum(tl.ceil((needed - above) / smallest), 1.0))
            threshold, equal = found, most
    seen = tl.full([], 0, tl.float32)
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        p = tl.load(row + at, mask=at < V, other=0.0)
        bits = p.to(tl.int32, bitcast=True)
        is_equal = tl.where((bits == threshold) & (at < V), 1.0, 0.0)
        place = seen + tl.cumsum(is_equal, 0)
        keeps = (bits > threshold) | ((is_equal > 0) & (place <= equal))
        tl.store(written + at, tl.where(keeps, p, 0.0), mask=at < V)
        seen += tl.sum(is_equal, 0)
