"""cos and sin for every position a server may reach, made once; a step picks its rows.

LongRoPE (and dynamic NTK beyond a model's positions, which no request may reach) depends on how long a sequence is, not
on the position alone. A sequence that outgrows the trained length is computed again with the other frequencies, all of
it: what `transformers` does for one request alone. Whatever else is in the batch changes nothing.
"""

import torch
from torch import Tensor

from tightfit.models.layers.rope import tables
from tightfit.models.spec import ModelSpec, Rope
from tightfit.serve.schedule.step import Step


def length_of_change(spec: ModelSpec) -> int | None:
    """The length beyond which LongRoPE rotates keys differently, so that no prefix can be shared across it; None
    without LongRoPE."""
    trained = [rope.factor("original_max_position_embeddings") for rope in ropes_of(spec) if rope.scaling == "longrope"]
    return int(trained[0] or spec.max_positions) if trained else None


def ropes_of(spec: ModelSpec) -> list[Rope]:
    """The different ropes of a model's layers."""
    found = (spec.rope_of(layer) for layer in range(spec.layers))
    return list(dict.fromkeys(rope for rope in found if rope is not None))


class RopeTables:
    """The tables of all ropes of a model for positions below `length`."""

    def __init__(self, spec: ModelSpec, length: int, device: torch.device, dtype: torch.dtype) -> None:
        self.spec, self.dtype = spec, dtype
        positions = torch.arange(length, device=device)[None]
        self.by_length = any(rope.scaling == "longrope" for rope in ropes_of(spec))
        self.fixed = {
            rope: tables(rope, spec.rope_dim, spec.max_positions, positions, dtype)
            for rope in ropes_of(spec)
            if rope.scaling != "longrope"
        }

    def of(self, step: Step) -> dict[Rope, tuple[Tensor, Tensor]]:
        """cos and sin [1, 1, N, d/2] of each rope at the step's positions."""
        positions = step.positions[0]
        found = {rope: (cos[:, :, positions], sin[:, :, positions]) for rope, (cos, sin) in self.fixed.items()}
        others = (rope for rope in ropes_of(self.spec) if rope not in found)
        return found | {rope: self._by_length(rope, step) for rope in others}

    def _by_length(self, rope: Rope, step: Step) -> tuple[Tensor, Tensor]:
        parts, start = [], 0
        for count, length in step.rope_lengths:
            own = step.positions[:, start : start + count]
            # The tables of a sequence of `length`: its last position is added to say so, and dropped again.
            with_last = torch.cat([own, own.new_full((1, 1), length - 1)], dim=1)
            cos_sin = tables(rope, self.spec.rope_dim, self.spec.max_positions, with_last, self.dtype)
            parts.append([part[:, :, :-1] for part in cos_sin])
            start += count
        cos, sin = (torch.cat(part, dim=2) for part in zip(*parts, strict=True))
        return cos, sin
