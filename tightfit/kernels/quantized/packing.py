"""Codes of 1 to 8 bits laid side by side in 32-bit words, in the orders that public formats have.

The dense order is one stream of bits a row, lowest first: code i has bits [i · b, (i + 1) · b) of little-endian words.
32 codes fill exactly b words, so widths that do not divide 32 cross word borders there and nowhere else. GPTQ stores
the same words transposed; AWQ permutes the eight codes of each word; nibble formats store bytes, either half first.

Our own kernels read another order (`pack_tiles`): 16 words hold a tile of neighbouring inputs, such that one shift and
one mask of all 16 give 32 neighbouring codes, two in each word, in the order that tensor cores take. The tiles of 16
rows (a strip) alternate, all rows' first tile, then all rows' second: a program that goes along its rows reads memory
contiguously, where scattered reads of 64 bytes get half the bandwidth.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

WORD = 32
TILE_WORDS = 16
STRIP_ROWS = 16
"""Rows whose tiles alternate in memory."""
PIECE_CODES = 2**20
"""Codes that are packed at a time: intermediates take eight bytes for each."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighbouring codes stands in each nibble of an AWQ word, lowest nibble first."""


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes [rows, n] below 2^bits as int32 words [rows, ⌈n · bits / 32⌉]."""
    rows, count = codes.shape
    words = -(-count * bits // WORD)
    made = torch.empty(rows, words, dtype=torch.int32, device=codes.device)
    step = max(PIECE_CODES // max(count, 1), 1)
    for piece, packed in zip(codes.split(step), made.split(step), strict=True):
        stream = _to_bytes(F.pad(piece.to(torch.uint8), (0, -count % WORD)), bits)
        packed.copy_(stream.view(torch.int32)[:, :words])
    return made


def _to_bytes(codes: Tensor, bits: int) -> Tensor:
    """Rows of bytes: eight codes make `bits` bytes, each code in two neighbouring ones at most (in 16 bits)."""
    rows = codes.shape[0]
    starts = torch.arange(8, device=codes.device) * bits
    shifted = codes.view(rows, -1, 8).to(torch.int16).bitwise_left_shift_((starts % 8).to(torch.int16))
    made = shifted.new_zeros(rows, shifted.shape[1], bits + 1)  # the last is for the last code, which spills nothing
    made.index_add_(2, starts // 8, shifted & 255)
    made.index_add_(2, starts // 8 + 1, shifted.bitwise_right_shift_(8))
    return made[:, :, :bits].to(torch.uint8).reshape(rows, -1)


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` codes, uint8, of each row of int32 words: the inverse of `pack`."""
    rows = words.shape[0]
    # A column of one word counts as contiguous whatever its strides are, and could not be viewed as bytes.
    stream = words.contiguous().flatten().view(torch.uint8).view(rows, -1)
    if bits == 8:
        return stream[:, :count]
    if bits == 4:
        return torch.stack((stream & 15, stream >> 4), dim=-1).view(rows, -1)[:, :count]
    return _from_bytes(stream, bits)[:, :count]


def _from_bytes(stream: Tensor, bits: int) -> Tensor:
    """All codes of rows of bytes: `bits` bytes hold eight of them, each in two neighbouring bytes at most.

    In 16 bits, which hold the bits needed of both bytes: five bytes a code at the peak, where 64-bit words take 25.
    """
    rows = stream.shape[0]
    chunks = F.pad(stream, (0, -stream.shape[1] % bits)).view(rows, -1, bits)
    starts = torch.arange(8, device=stream.device) * bits
    codes = chunks[:, :, starts // 8].to(torch.int16)
    if 8 % bits:
        codes |= F.pad(chunks, (0, 1))[:, :, starts // 8 + 1].to(torch.int16).bitwise_left_shift_(8)
    codes.bitwise_right_shift_((starts % 8).to(torch.int16)).bitwise_and_(2**bits - 1)
    return codes.to(torch.uint8).view(rows, -1)


def pack_tiles(codes: Tensor, bits: int) -> Tensor:
    """Codes [rows, n] as words in the order of the kernels: code 2w + h of the s-th 32 of a tile stands in its word w,
    at place s in the lower half (h = 0) or upper half (h = 1). Where tiles do not fill the row: as `pack`; where strips
    do not fill the rows: tiles row by row."""
    rows, count = codes.shape
    if not has_tiles(count, bits):
        return pack(codes, bits)
    steps = WORD // bits // 2
    tiles = codes.reshape(rows, -1, steps, TILE_WORDS, 2)
    words = pack(tiles.permute(0, 1, 3, 4, 2).reshape(codes.shape), bits)
    if not has_strips(rows):
        return words
    return words.view(rows // STRIP_ROWS, STRIP_ROWS, -1, TILE_WORDS).transpose(1, 2).reshape(words.shape)


def unpack_tiles(words: Tensor, bits: int, count: int) -> Tensor:
    """The inverse of `pack_tiles`."""
    rows = words.shape[0]
    if not has_tiles(count, bits):
        return unpack(words, bits, count)
    if has_strips(rows):
        strips = words.reshape(rows // STRIP_ROWS, -1, STRIP_ROWS, TILE_WORDS)
        words = strips.transpose(1, 2).reshape(words.shape)
    tiles = unpack(words, bits, count).reshape(rows, -1, TILE_WORDS, 2, WORD // bits // 2)
    return tiles.permute(0, 1, 4, 2, 3).reshape(rows, count)


def has_strips(rows: int) -> bool:
    """Whether `rows` rows are whole strips."""
    return rows % STRIP_ROWS == 0


def has_tiles(count: int, bits: int) -> bool:
    """Whether rows of `count` codes are whole tiles."""
    return bits in (2, 4, 8) and count % (TILE_WORDS * WORD // bits) == 0


def pack_awq(codes: Tensor) -> Tensor:
    """4-bit codes [rows, n] as AWQ's words [rows, n / 8]."""
    rows, count = codes.shape
    assert count % 8 == 0, f"{count} codes make no whole words"
    return pack(codes.view(rows, -1, 8)[:, :, list(AWQ_ORDER)].reshape(rows, count), 4)


def unpack_awq(words: Tensor) -> Tensor:
    """The inverse of `pack_awq`."""
    rows = words.shape[0]
    back = [AWQ_ORDER.index(place) for place in range(8)]
    return unpack(words, 4, words.shape[1] * 8).view(rows, -1, 8)[:, :, back].reshape(rows, -1)


def pack_nibbles(codes: Tensor, *, high_first: bool) -> Tensor:
    """4-bit codes [..., n] as bytes [..., n / 2]."""
    assert codes.shape[-1] % 2 == 0, f"{codes.shape[-1]} codes make no whole bytes"
    first, second = codes[..., 0::2].to(torch.uint8), codes[..., 1::2].to(torch.uint8)
    return (first << 4) | second if high_first else first | (second << 4)


def unpack_nibbles(packed: Tensor, *, high_first: bool) -> Tensor:
    """The inverse of `pack_nibbles`."""
    halves = (packed >> 4, packed & 15) if high_first else (packed & 15, packed >> 4)
    return torch.stack(halves, dim=-1).flatten(-2)
