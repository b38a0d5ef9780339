"""Rotary positions and every scaling rule the supported families use.

RoPE (Su et al. 2021) turns pair (i, i + d/2) of each head by position × θ^(−2i/d). Longer contexts stretch the
frequencies: linear interpolation; dynamic NTK; YaRN (Peng et al. 2023); Llama-3's smoothed band; LongRoPE (Ding et al.
2024). Angles are computed in float32 whatever the model's dtype: in bf16 positions above 256 are no longer distinct.
Dynamic NTK and LongRoPE depend on the longest sequence in the batch, as in transformers; it stays a tensor, to avoid a
GPU synchronisation. Keys already in a cache keep the frequencies they were rotated by when that length grows.
"""

import math

import torch
from torch import Tensor

from tightfit.models.spec import Rope


def frequencies(rope: Rope, head_dim: int, max_positions: int, positions: Tensor) -> tuple[Tensor, float]:
    """Frequencies of the rotated pairs for sequences with `positions`, and the factor cos and sin are multiplied by."""
    dim = int(head_dim * rope.rotated_share)
    plain = _plain(rope.theta, dim, positions.device)
    match rope.scaling:
        case "none":
            return plain, 1.0
        case "linear":
            return plain / _need(rope, "factor"), 1.0
        case "dynamic":
            return _dynamic(rope, dim, max_positions, positions.max() + 1), 1.0
        case "llama3":
            return _llama3(rope, plain), 1.0
        case "yarn":
            return _yarn(rope, plain, dim, max_positions)
        case "longrope":
            return _longrope(rope, plain, max_positions, positions.max() + 1)


def tables(
    rope: Rope, head_dim: int, max_positions: int, positions: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin for `positions` [B, T] as [B, 1, T, d/2], where d is the rotated part of a head."""
    freqs, scale = frequencies(rope, head_dim, max_positions, positions)
    angles = positions[:, None, :, None].float() * freqs
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def _plain(theta: float | Tensor, dim: int, device: torch.device) -> Tensor:
    """θ^(−2i/d)."""
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim))


def _need(rope: Rope, name: str) -> float:
    value = rope.factor(name)
    assert value is not None, f"rope scaling {rope.scaling} without {name}"
    return value


def _dynamic(rope: Rope, dim: int, max_positions: int, length: Tensor) -> Tensor:
    """NTK-aware: the base grows with the length once it exceeds what the model was trained on."""
    factor, length = _need(rope, "factor"), length.clamp(min=max_positions)
    theta = rope.theta * ((factor * length / max_positions) - (factor - 1)) ** (dim / (dim - 2))
    return _plain(theta, dim, length.device)


def _llama3(rope: Rope, plain: Tensor) -> Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between blended."""
    factor, low, high = _need(rope, "factor"), _need(rope, "low_freq_factor"), _need(rope, "high_freq_factor")
    trained = _need(rope, "original_max_position_embeddings")
    waves = 2 * math.pi / plain
    blend = ((trained / waves - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * plain / factor + blend * plain


def _yarn(rope: Rope, plain: Tensor, dim: int, max_positions: int) -> tuple[Tensor, float]:
    """NTK-by-parts between `beta_fast` and `beta_slow` rotations, and the attention temperature."""
    factor = _need(rope, "factor")
    trained = rope.factor("original_max_position_embeddings") or max_positions

    def pair_with(rotations: float) -> float:
        return dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_with(rope.factor("beta_fast") or 32.0), pair_with(rope.factor("beta_slow") or 1.0)
    if rope.factor("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32, device=plain.device) - low) / ((high - low) or 1e-3)
    ramp = ramp.clamp(0, 1)
    return plain / factor * ramp + plain * (1 - ramp), _yarn_scale(rope, factor)


def _yarn_scale(rope: Rope, factor: float) -> float:
    def temperature(mscale: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    given = rope.factor("attention_factor")
    if given is not None:
        return given
    mscale, mscale_all = rope.factor("mscale"), rope.factor("mscale_all_dim")
    return temperature(mscale) / temperature(mscale_all) if mscale and mscale_all else temperature()


def _longrope(rope: Rope, plain: Tensor, max_positions: int, length: Tensor) -> tuple[Tensor, float]:
    """One divisor per pair, one set for lengths seen in training and one beyond them."""
    trained = rope.factor("original_max_position_embeddings") or max_positions
    both = torch.tensor([rope.long_factor, rope.short_factor]).to(plain.device, non_blocking=True)
    divisors = torch.where(length > trained, both[0], both[1])
    factor = rope.factor("factor") or max_positions / trained
    given = rope.factor("attention_factor")
    computed = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
    return plain / divisors, computed if given is None else given
