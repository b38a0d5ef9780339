"""The learning rate of every step: linear warm-up, then cosine, linear, constant, or stable-then-decay (WSD)."""

import math

from tightfit.jobs.job import Schedule


def lr_ratio(schedule: Schedule, step: int, steps: int) -> float:
    """Share of the peak learning rate used by step `step` (from 0) of `steps`.

    Warm-up reaches the peak on its last step; the final step of a decaying schedule is at `final_ratio`.
    """
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    decay_steps = steps - schedule.warmup_steps
    if schedule.kind == "wsd":
        decay_steps = min(decay_steps, math.ceil(steps * schedule.decay_share))
    into_decay = step - (steps - decay_steps) + 1
    progress = min(max(into_decay / decay_steps, 0.0), 1.0) if decay_steps else 0.0
    return schedule.final_ratio + (1 - schedule.final_ratio) * _remaining(schedule.kind, progress)


def _remaining(kind: str, progress: float) -> float:
    """What is left of the decay after `progress` of it: 1 at its start, 0 at its end."""
    match kind:
        case "cosine":
            return 0.5 * (1 + math.cos(math.pi * progress))
        case "constant":
            return 1.0
        case _:
            return 1 - progress
