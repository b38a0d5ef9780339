"""Weights as the blocks of GGUF types, scales searched for the least weighted error as llama.cpp does.

| type | block | a number is | bits |
|---|---|---|---|
| Q4_0, Q5_0 | 32 | d · (q − 2^(b−1)) | 4.5, 5.5 |
| Q4_1, Q5_1 | 32 | d · q + m | 5, 6 |
| Q8_0 | 32 | d · q | 8.5 |
| Q4_K, Q5_K | 256 | d · s · q − m · t: 6-bit s and t for each 32 | 4.5, 5.5 |
| Q6_K | 256 | d · s · (q − 32): 8-bit s for each 16 | 6.5625 |

A squared error is weighted by the importance of its input channel (the importance matrix: mean x²) times √(σ² + w²),
which llama.cpp found to do best; without importance, by |w| plus the block's root mean square. Layouts: ggml-common.h
of llama.cpp.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

SUPER = 256
"""Numbers in a block of the K types (a super-block)."""


def fit_scale(x: Tensor, weights: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Scales [n, 1] and codes −most … most − 1 [n, k] that minimise Σ w (x − d q)²; the largest number gets −most."""
    at = x.abs().argmax(-1, keepdim=True)
    largest = x.gather(-1, at)
    largest = torch.where(largest == 0, torch.ones_like(largest), largest)
    best_gain = torch.full_like(largest, -1.0)
    best = torch.zeros_like(largest)
    for step in range(-9, 10):
        codes = (x * (-(most + 0.1 * step) / largest)).round().clamp(-most, most - 1)
        cross, square = (weights * x * codes).sum(-1, keepdim=True), (weights * codes * codes).sum(-1, keepdim=True)
        gain = cross * cross / square.clamp(min=1e-30)
        better = gain > best_gain
        best_gain, best = (
            torch.where(better, gain, best_gain),
            torch.where(better, cross / square.clamp(min=1e-30), best),
        )
    return best, _codes(x, best, -most, most - 1)


def fit_scale_and_minimum(x: Tensor, weights: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Scales and minima [n, 1], d ≥ 0 and m ≥ 0, that minimise Σ w (x − (d q − m))² with q from 0 to `most`."""
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True)
    span = (high - low).clamp(min=1e-20)
    sum_w, sum_x = weights.sum(-1, keepdim=True), (weights * x).sum(-1, keepdim=True)
    scale, minimum = span / most, -low
    error = _error(x, weights, scale, minimum, most)
    for step in range(21):
        codes = ((x - low) * ((most - 1 + 0.1 * step) / span)).round().clamp(0, most)
        sum_l, sum_l2 = (weights * codes).sum(-1, keepdim=True), (weights * codes * codes).sum(-1, keepdim=True)
        sum_xl = (weights * x * codes).sum(-1, keepdim=True)
        determinant = (sum_w * sum_l2 - sum_l * sum_l).clamp(min=1e-30)
        new_scale = (sum_w * sum_xl - sum_x * sum_l) / determinant
        new_low = (sum_l2 * sum_x - sum_l * sum_xl) / determinant
        positive = new_low > 0
        new_scale = torch.where(positive, sum_xl / sum_l2.clamp(min=1e-30), new_scale)
        new_low = new_low.clamp(max=0)
        new_error = _error(x, weights, new_scale, -new_low, most)
        better = (new_error < error) & (new_scale > 0)
        scale, minimum = torch.where(better, new_scale, scale), torch.where(better, -new_low, minimum)
        error = torch.where(better, new_error, error)
    return scale, minimum


def _error(x: Tensor, weights: Tensor, scale: Tensor, minimum: Tensor, most: int) -> Tensor:
    codes = _codes(x + minimum, scale, 0, most)
    return (weights * (codes * scale - minimum - x).square()).sum(-1, keepdim=True)


def _codes(x: Tensor, scale: Tensor, low: int, high: int) -> Tensor:
    """Nearest codes; a scale of zero codes zeros."""
    safe = torch.where(scale == 0, torch.ones_like(scale), scale)
    return torch.where(scale == 0, torch.zeros_like(x), x / safe).round().clamp(low, high)


def error_weights(x: Tensor, importance: Tensor | None) -> Tensor:
    """How much the error of each of [blocks, k] numbers counts; `importance` is of the same shape."""
    mean_square = x.square().mean(-1, keepdim=True)
    if importance is None:
        return mean_square.sqrt() + x.abs()
    return importance * (mean_square + x.square()).sqrt()


def _half(values: Tensor) -> tuple[Tensor, Tensor]:
    """Values [n, k] as float16 bytes [n, 2 · k], and as float32 after that rounding."""
    half = values.to(torch.float16)
    return half.contiguous().view(torch.uint8).view(len(values), -1), half.to(torch.float32)


@dataclass(frozen=True)
class Fitted:
    """Blocks with fitted scales: the `stored` bytes of these; code q of a number means scale · q + offset."""

    stored: Tensor
    scale: Tensor
    offset: Tensor


@dataclass(frozen=True)
class BlockType:
    """Blocks of `size` numbers in codes of `bits`: `fit` chooses scales, `pack` lays scales and codes out as bytes."""

    size: int
    bits: int
    fit: Callable[[Tensor, Tensor], Fitted]
    pack: Callable[[Tensor, Tensor], Tensor]


def _q8_0(x: Tensor, weights: Tensor) -> Fitted:
    """8 bits leave nothing to search."""
    return _around_zero(x, x.abs().amax(-1, keepdim=True) / 127, 128)


def _q4_0(x: Tensor, weights: Tensor) -> Fitted:
    return _around_zero(x, fit_scale(x, weights, 8)[0], 8)


def _q5_0(x: Tensor, weights: Tensor) -> Fitted:
    return _around_zero(x, fit_scale(x, weights, 16)[0], 16)


def _around_zero(x: Tensor, scale: Tensor, middle: int) -> Fitted:
    stored, read = _half(scale)
    return Fitted(stored, read.expand(x.shape), (-middle * read).expand(x.shape))


def _q4_1(x: Tensor, weights: Tensor) -> Fitted:
    return _with_minimum(x, weights, 15)


def _q5_1(x: Tensor, weights: Tensor) -> Fitted:
    return _with_minimum(x, weights, 31)


def _with_minimum(x: Tensor, weights: Tensor, most: int) -> Fitted:
    low = x.amin(-1, keepdim=True)
    scale, minimum = fit_scale_and_minimum(x - low, weights, most)
    stored, read = _half(torch.cat([scale, low - minimum], 1))
    return Fitted(stored, read[:, :1].expand(x.shape), read[:, 1:].expand(x.shape))


def _pack_8(stored: Tensor, codes: Tensor) -> Tensor:
    """Blocks of 34 bytes: signed codes."""
    return torch.cat([stored, codes ^ 128], 1)


def _pack_4(stored: Tensor, codes: Tensor) -> Tensor:
    """Blocks of 18 bytes, 20 with a minimum."""
    return torch.cat([stored, _nibbles(codes)], 1)


def _pack_5(stored: Tensor, codes: Tensor) -> Tensor:
    """Blocks of 22 bytes, 24 with a minimum."""
    return torch.cat([stored, _fifth_bits(codes), _nibbles(codes & 15)], 1)


def _nibbles(codes: Tensor) -> Tensor:
    """32 codes as 16 bytes: the first half in the low nibbles, the second in the high ones."""
    return codes[:, :16] | (codes[:, 16:] << 4)


def _fifth_bits(codes: Tensor) -> Tensor:
    """The fifth bits of 32 codes as 4 bytes, lowest first."""
    bits = ((codes >> 4) & 1).view(-1, 4, 8).to(torch.int32)
    return (bits << torch.arange(8, device=codes.device)).sum(-1).to(torch.uint8)


def _pack_4_k(stored: Tensor, codes: Tensor) -> Tensor:
    """Blocks of 144 bytes."""
    return torch.cat([stored, _paired(codes)], 1)


def _pack_5_k(stored: Tensor, codes: Tensor) -> Tensor:
    """Blocks of 176 bytes."""
    high = (codes >> 4).view(len(codes), 8, 32).to(torch.int32) << torch.arange(8, device=codes.device)[:, None]
    return torch.cat([stored, high.sum(1).to(torch.uint8), _paired(codes & 15)], 1)


def _paired(codes: Tensor) -> Tensor:
    """256 codes as 128 bytes: of every 64, the first 32 in the low nibbles and the others in the high ones."""
    pairs = codes.view(len(codes), 4, 2, 32)
    return (pairs[:, :, 0] | (pairs[:, :, 1] << 4)).flatten(1)


def _q4_k(x: Tensor, weights: Tensor) -> Fitted:
    return _k_block(x, weights, 15)


def _q5_k(x: Tensor, weights: Tensor) -> Fitted:
    return _k_block(x, weights, 31)


def _k_block(x: Tensor, weights: Tensor, most: int) -> Fitted:
    """Fit blocks [n, 256]: 8 scales and 8 minima of 6 bits, and a float16 step for each kind, 16 bytes."""
    parts = x.view(-1, 32)
    scale, minimum = (found.view(-1, 8) for found in fit_scale_and_minimum(parts, weights.view(-1, 32), most))
    matter = weights.view(len(x), 8, 32).sum(-1)
    stored, read = _half(torch.cat([_fit_unsigned(scale, matter, 63), _fit_unsigned(minimum, matter, 63)], 1))
    sixes = [_codes(values, read[:, i : i + 1], 0, 63).to(torch.uint8) for i, values in enumerate((scale, minimum))]
    wide = [(six.float() * read[:, i : i + 1]).repeat_interleave(32, 1) for i, six in enumerate(sixes)]
    return Fitted(torch.cat([stored, _six_bits(*sixes)], 1), wide[0], -wide[1])


def _fit_unsigned(values: Tensor, weights: Tensor, most: int) -> Tensor:
    """Steps d [n, 1] that minimise Σ w (v − d q)² for values [n, k] ≥ 0 and codes 0 … `most`."""
    largest = values.amax(1, keepdim=True)
    best = largest / most
    error = (weights * (_codes(values, best, 0, most) * best - values).square()).sum(1, keepdim=True)
    for step in range(-8, 9):
        codes = _codes(values, largest / (most + 0.25 * step), 0, most)
        square = (weights * codes * codes).sum(1, keepdim=True).clamp(min=1e-30)
        fitted = (weights * values * codes).sum(1, keepdim=True) / square
        fitted_error = (weights * (_codes(values, fitted, 0, most) * fitted - values).square()).sum(1, keepdim=True)
        better = fitted_error < error
        best, error = torch.where(better, fitted, best), torch.where(better, fitted_error, error)
    return best


def _six_bits(scales: Tensor, minima: Tensor) -> Tensor:
    """Eight scales and eight minima of 6 bits as 12 bytes."""
    low = scales[:, :4] | ((scales[:, 4:] >> 4) << 6)
    middle = minima[:, :4] | ((minima[:, 4:] >> 4) << 6)
    return torch.cat([low, middle, (scales[:, 4:] & 15) | ((minima[:, 4:] & 15) << 4)], 1)


def _q6_k(x: Tensor, weights: Tensor) -> Fitted:
    """Fit blocks [n, 256]: 16 scales of 8 bits and their float16 step, 18 bytes."""
    scale = fit_scale(x.view(-1, 16), weights.view(-1, 16), 32)[0].view(-1, 16)
    at = scale.abs().argmax(1, keepdim=True)
    stored, read = _half(scale.gather(1, at) / -128)
    eights = _codes(scale, read, -128, 127)
    wide = (eights * read).repeat_interleave(16, 1)
    return Fitted(torch.cat([eights.to(torch.int8).view(torch.uint8), stored], 1), wide, -32 * wide)


def _pack_6_k(stored: Tensor, codes: Tensor) -> Tensor:
    """Blocks of 210 bytes."""
    codes = codes.view(-1, 2, 4, 32)
    low = torch.cat(
        [(codes[:, :, 0] & 15) | ((codes[:, :, 2] & 15) << 4), (codes[:, :, 1] & 15) | ((codes[:, :, 3] & 15) << 4)], 2
    )
    high = sum(((codes[:, :, i] >> 4) << (2 * i) for i in range(1, 4)), codes[:, :, 0] >> 4)
    return torch.cat([low.flatten(1), high.flatten(1), stored], 1)


CODERS: dict[str, BlockType] = {
    "Q8_0": BlockType(size=32, bits=8, fit=_q8_0, pack=_pack_8),
    "Q4_0": BlockType(size=32, bits=4, fit=_q4_0, pack=_pack_4),
    "Q4_1": BlockType(size=32, bits=4, fit=_q4_1, pack=_pack_4),
    "Q5_0": BlockType(size=32, bits=5, fit=_q5_0, pack=_pack_5),
    "Q5_1": BlockType(size=32, bits=5, fit=_q5_1, pack=_pack_5),
    "Q4_K": BlockType(size=SUPER, bits=4, fit=_q4_k, pack=_pack_4_k),
    "Q5_K": BlockType(size=SUPER, bits=5, fit=_q5_k, pack=_pack_5_k),
    "Q6_K": BlockType(size=SUPER, bits=6, fit=_q6_k, pack=_pack_6_k),
}


def encode_rows(weight: Tensor, kind: str, importance: Tensor | None = None) -> Tensor:
    """A float32 matrix [..., inputs] as rows of blocks, uint8; `importance` [inputs] is mean x²."""
    fitted = fit_rows(weight, kind, importance)
    blocks = weight.reshape(fitted.scale.shape)
    codes = _codes(blocks - fitted.offset, fitted.scale, 0, 2 ** CODERS[kind].bits - 1).to(torch.uint8)
    return pack_rows(fitted, codes, kind, weight.shape)


def fit_rows(weight: Tensor, kind: str, importance: Tensor | None) -> Fitted:
    """The scales of all blocks of a matrix."""
    size = CODERS[kind].size
    blocks = weight.reshape(-1, size)
    own = None if importance is None else importance.expand(weight.shape).reshape(-1, size)
    return CODERS[kind].fit(blocks, error_weights(blocks, own))


def pack_rows(fitted: Fitted, codes: Tensor, kind: str, shape: torch.Size) -> Tensor:
    """Codes [blocks, size] with their scales as rows of bytes, for a matrix of `shape`."""
    return CODERS[kind].pack(fitted.stored, codes).reshape(*shape[:-1], -1)
