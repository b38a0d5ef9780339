"""Attention of prompts' pieces over the paged cache against the reference that gathers."""

from typing import Any

import pytest
import torch

from tests.covering import sampled
from tests.kernels.truth import DEVICE, DTYPES, assert_no_worse
from tightfit.kernels.decoding.paged_prefill import Rows, paged_prefill, paged_prefill_eager, query_tiles, tile_rows

PIECES = [Rows(2, 1, 0), Rows(3, 37, 0), Rows(40, 5, 19), Rows(45, 33, 64), Rows(78, 16, 16)]


@sampled(6)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "D", "block_size", "window", "softcap", "has_sinks"),
    [
        (4, 2, 16, 16, None, None, False),
        (3, 1, 24, 4, None, None, False),
        (4, 4, 32, 8, 20, None, False),
        (2, 1, 64, 16, 7, 0.7, False),
        (2, 1, 16, 16, 20, None, True),
    ],
)
def test_it_is_causal_attention_over_the_blocks_of_the_tables(
    heads: int,
    kv_heads: int,
    D: int,
    block_size: int,
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
    dtype: torch.dtype,
) -> None:
    per_piece = -(-97 // block_size)
    blocks = len(PIECES) * per_piece
    tables = torch.randperm(blocks).view(len(PIECES), per_piece).int().to(DEVICE)
    query = torch.randn(96, heads, D, device=DEVICE).to(dtype)
    keys, values = (torch.randn(blocks, block_size, kv_heads, D, device=DEVICE).to(dtype) for _ in range(2))
    settings: Any = {"scale": D**-0.5, "window": window, "softcap": softcap}
    if has_sinks:
        settings["sinks"] = torch.randn(heads, device=DEVICE).to(dtype)
    tiles = torch.tensor(query_tiles(PIECES, tile_rows(query)), dtype=torch.int32, device=DEVICE)
    out = torch.full_like(query, 7.0)
    paged_prefill(query, keys, values, tables, tiles, out, **settings)
    eager = paged_prefill_eager(query, keys, values, tables, PIECES, **settings)
    settings |= {"sinks": settings["sinks"].double()} if has_sinks else {}
    truth = paged_prefill_eager(query.double(), keys.double(), values.double(), tables, PIECES, **settings)
    assert_no_worse([out[2:94]], [eager], [truth])
    assert (out[:2] == 7).all()  # rows of nobody's piece are left alone
    assert (out[94:] == 7).all()


def test_tiles_cover_every_row_once_and_begin_with_the_longest() -> None:
    tiles = query_tiles(PIECES, 16)
    rows = sorted(row for at, count, _, _ in tiles for row in range(at, at + count))
    assert rows == list(range(2, 94))
    assert [tile[2] for tile in tiles] == sorted((tile[2] for tile in tiles), reverse=True)
    for at, _, position, index in tiles:
        assert position - PIECES[index].before == at - PIECES[index].first_row


def test_what_lies_beyond_a_sequence_is_not_read() -> None:
    keys = torch.full((3, 16, 1, 16), float("nan"), device=DEVICE)
    keys[1, :5] = 1.0
    tables = torch.tensor([[1, 2]], dtype=torch.int32, device=DEVICE)
    query = torch.randn(5, 2, 16, device=DEVICE)
    tiles = torch.tensor(query_tiles([Rows(0, 5, 0)], tile_rows(query)), dtype=torch.int32, device=DEVICE)
    out = torch.empty_like(query)
    paged_prefill(query, keys, keys, tables, tiles, out, scale=1.0)
    torch.testing.assert_close(out, torch.ones_like(out))
