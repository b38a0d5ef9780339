"""SpQR's codes, coded scales and outliers in the order in which `spqr_linear.py` reads them.

A tile is 256 neighbouring inputs of one row: 16 groups of 16, which have a scale and a zero point each. Codes of b bits
take b sets of 8 words. The two halves of word w of a set hold codes 2w and 2w + 1 of ⌊16 / b⌋ groups, at rising shifts;
at 3 bits five groups leave one bit of each half, and the spare bits of the three sets hold the sixteenth group. So a
shift and a mask of 8 words give a group's 16 codes, two in each word, and 3-bit codes take no more than 3 bits. Codes
of scales and zero points, 3 bits each, are stored as such pairs too: three words a row and tile.

| tensor | shape | bytes a weight |
|---|---|---|
| words | int32 [rows / 16, tiles, bits, 16, 8] | b / 8 |
| statistics | int32 [tiles, 3, rows] | 3 / 64 |
| ranges: step and start of scales, then of zero points | float16 [rows / 16, groups, 4] | 1 / 32 |
| columns uint16, values and changes float16 | [outliers] | 6 an outlier |

Files take as many bytes: 16-bit columns leave room for `changes`, an outlier's value less the value of its code.
"""

from typing import NamedTuple

import torch
from torch import Tensor

BITS = (2, 3, 4)
GROUP = 16
STATISTIC_BITS = 3
STRIP_ROWS = 16
TILE_GROUPS = 16
TILE = TILE_GROUPS * GROUP
LANES = GROUP // 2
"""Words that hold a group's codes."""
ROWS = 32
"""Rows must be a multiple of this, so that coded scales fill whole words."""
MOST_INPUTS = 2**16
HALF = 16


class SpqrTensors(NamedTuple):
    """A weight [rows, inputs]; outliers `starts[r]` to `starts[r + 1]` replace the values of their codes in row r."""

    words: Tensor
    statistics: Tensor
    ranges: Tensor
    starts: Tensor
    columns: Tensor
    values: Tensor
    changes: Tensor

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.words.shape[2]

    @property
    def rows(self) -> int:
        """Outputs of the layer."""
        return self.words.shape[0] * STRIP_ROWS

    @property
    def inputs(self) -> int:
        """Inputs of the layer."""
        return self.words.shape[1] * TILE


def can_be_arranged(rows: int, inputs: int, bits: int) -> bool:
    """Whether a weight [rows, inputs] consists of whole tiles and whole words of scales."""
    return bits in BITS and rows % ROWS == 0 and inputs % TILE == 0 and inputs <= MOST_INPUTS


def arrange_codes(codes: Tensor, bits: int) -> Tensor:
    """Codes [rows, inputs] as words."""
    rows, inputs = codes.shape
    sets = _pack_sets(codes.view(rows, inputs // TILE, TILE_GROUPS, LANES, 2), bits)  # [rows, tiles, bits, lanes]
    return sets.view(rows // STRIP_ROWS, STRIP_ROWS, *sets.shape[1:]).permute(0, 2, 3, 1, 4).contiguous()


def codes_of(words: Tensor) -> Tensor:
    """The inverse of `arrange_codes`, uint8 [rows, inputs]."""
    strips, tiles, bits, _, _ = words.shape
    sets = words.permute(0, 3, 1, 2, 4).reshape(strips * STRIP_ROWS, tiles, bits, LANES)
    return _unpack_sets(sets, bits).reshape(strips * STRIP_ROWS, tiles * TILE)


def arrange_statistics(scale: Tensor, zero: Tensor) -> Tensor:
    """Codes of scales and of zero points [rows, groups] as words."""
    pairs = torch.stack((scale, zero), dim=-1).view(len(scale), -1, TILE_GROUPS, 1, 2)
    return _pack_sets(pairs, STATISTIC_BITS)[..., 0].permute(1, 2, 0).contiguous()


def statistics_of(statistics: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `arrange_statistics`."""
    pairs = _unpack_sets(statistics.permute(2, 0, 1)[..., None], STATISTIC_BITS)  # [rows, tiles, groups, 1, 2]
    scale, zero = pairs.flatten(1, 3).unbind(-1)
    return scale.contiguous(), zero.contiguous()


def arrange_ranges(scale: Tensor, zero: Tensor) -> Tensor:
    """Steps and starts [groups, rows / 16, 2] of scales and of zero points, side by side: [rows / 16, groups, 4]."""
    return torch.cat((scale, zero), dim=-1).transpose(0, 1).contiguous()


def ranges_of(ranges: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `arrange_ranges`."""
    scale, zero = ranges.transpose(0, 1).split(2, dim=-1)
    return scale.contiguous(), zero.contiguous()


def scales_of(weight: SpqrTensors) -> tuple[Tensor, Tensor]:
    """Scales and zero points, float32 [rows, groups]."""
    codes, ranges = statistics_of(weight.statistics), ranges_of(weight.ranges)
    scale, zero = (_stretched(*pair) for pair in zip(codes, ranges, strict=True))
    return scale, zero


def _stretched(codes: Tensor, ranges: Tensor) -> Tensor:
    """code · step + start, of the range that 16 rows share."""
    step, start = ranges.to(torch.float32).transpose(0, 1).repeat_interleave(STRIP_ROWS, 0).unbind(-1)
    return codes.to(torch.float32) * step + start


def _pack_sets(codes: Tensor, bits: int) -> Tensor:
    """Pairs of codes [..., 16 groups, lanes, 2] as words [..., bits, lanes]."""
    groups, per = codes.to(torch.int32).unbind(-3), HALF // bits
    halves = []
    for place in range(bits):
        half = torch.zeros_like(groups[0])
        for step in range(per):
            half |= groups[per * place + step] << (bits * step)
        if bits == 3:
            half |= ((groups[-1] >> place) & 1) << (HALF - 1)
        halves.append(half)
    low, high = torch.stack(halves, dim=-3).unbind(-1)
    return low | (high << HALF)


def _unpack_sets(words: Tensor, bits: int) -> Tensor:
    """The inverse of `_pack_sets`, uint8."""
    per = HALF // bits
    sets = torch.stack((words & 0xFFFF, (words >> HALF) & 0xFFFF), dim=-1).unbind(-3)  # of [..., lanes, 2]
    groups = [(half >> (bits * step)) & (2**bits - 1) for half in sets for step in range(per)]
    if bits == 3:
        groups.append(sum(((half >> (HALF - 1)) & 1) << place for place, half in enumerate(sets)))
    return torch.stack(groups, dim=-3).to(torch.uint8)
