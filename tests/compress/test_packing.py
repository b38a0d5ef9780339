"""Packing: codes come back, and the words are those that public formats have, computed by hand or by their own code."""

import numpy as np
import pytest
import torch

from tightfit.kernels.quantized.packing import (
    AWQ_ORDER,
    pack,
    pack_awq,
    pack_nibbles,
    unpack,
    unpack_awq,
    unpack_nibbles,
)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("count", [1, 31, 32, 33, 100])
def test_words_are_one_stream_of_bits(bits: int, count: int) -> None:
    codes = torch.randint(0, 2**bits, (3, count), generator=torch.Generator().manual_seed(bits * 100 + count))
    words = pack(codes, bits)
    streams = np.unpackbits(codes.numpy().astype(np.uint8)[..., None], axis=-1, count=bits, bitorder="little")
    padded = np.pad(streams.reshape(3, -1), ((0, 0), (0, -count * bits % 32)))
    assert np.array_equal(words.numpy().view(np.uint8), np.packbits(padded, axis=-1, bitorder="little"))
    assert torch.equal(unpack(words, bits, count), codes.to(torch.uint8))


@pytest.mark.parametrize("bits", range(1, 9))
def test_rows_of_one_word_that_were_columns(bits: int) -> None:
    """As zero points of few outputs are stored: turned round, they need not lie in memory word by word."""
    codes = (torch.arange(5 * (32 // bits)).view(5, -1) % 2**bits).to(torch.uint8)
    turned = pack(codes, bits).T.contiguous().T
    assert torch.equal(unpack(turned.as_strided((5, 1), (1, 5)), bits, codes.shape[1]), codes)


def test_awq_interleaves_eight_codes() -> None:
    codes = torch.arange(8)[None]
    word = sum(code << (4 * AWQ_ORDER.index(code)) for code in range(8))
    assert pack_awq(codes).item() == word - 2**32 * (word >= 2**31)
    many = torch.randint(0, 16, (5, 64))
    assert torch.equal(unpack_awq(pack_awq(many)), many.to(torch.uint8))


@pytest.mark.parametrize(("high_first", "byte"), [(True, 0x12), (False, 0x21)])
def test_nibbles(high_first: bool, byte: int) -> None:
    packed = pack_nibbles(torch.tensor([1, 2]), high_first=high_first)
    assert packed.tolist() == [byte]
    assert unpack_nibbles(packed, high_first=high_first).tolist() == [1, 2]


def test_words_of_compressed_tensors() -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    for bits in (2, 3, 4, 8):
        codes = torch.randint(0, 2**bits, (6, 70))
        theirs = helpers.pack_to_int32((codes - 2 ** (bits - 1)).to(torch.int8), bits)
        assert torch.equal(pack(codes, bits), theirs)
