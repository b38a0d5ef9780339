"""Bubble: the time pipeline ranks wait for each other, by schedule.

K ranks, M micro-batches, F and B seconds forward and backward (recompute R belongs to B) of one micro-batch:

    gpipe, 1f1b     (K−1)(F+B)        a share (K−1)/(K+M−1) of the step; one micro-batch is the naive pipeline, (K−1)/K
    interleaved     (K−1)(F+B)/v      v stages of the model per rank (Narayanan et al. 2021)
    zero-bubble     (K−1)(F+R)        backward for weights, half of B, fills the rest (ZB-H1, Qi et al. 2023): one idle
                    + (K−M) B/2       slot per micro-batch, so that with M < K some slots stay empty
    zb-v            (K−1)(F+R)/2      as zero-bubble, with half the layers to wait for at the start (Qi et al. 2024);
                                      at least (2K−1−M)(F+R) where M is too small to fill the V
    2bw             none              no flush between steps (Narayanan et al. 2021); (K−1)(F+B) at a flush, for a
                                      checkpoint or an evaluation
"""

from tightfit.jobs.layout import Layout


def bubble_s(layout: Layout, *, micro_batches: int, forward_s: float, backward_s: float, recompute_s: float) -> float:
    """Seconds a rank idles in one step; `backward_s` does not include `recompute_s`."""
    others = layout.pipeline - 1
    if layout.has_two_versions:
        return 0.0
    if layout.schedule == "zero-bubble":
        unfilled_s = max(0, layout.pipeline - micro_batches) * backward_s / 2
        return others * (forward_s + recompute_s) + unfilled_s
    if layout.schedule == "zb-v":
        return max(others / 2, 2 * layout.pipeline - 1 - micro_batches) * (forward_s + recompute_s)
    return others * (forward_s + backward_s + recompute_s) / layout.stages_per_rank


def bubble_share(ranks: int, micro_batches: int, stages_per_rank: int = 1) -> float:
    """Share of a step that is bubble: (K−1)/(K−1+vM), which is (K−1)/(K+M−1) for v=1."""
    return (ranks - 1) / (ranks - 1 + stages_per_rank * micro_batches)
