"""Paged attention against the reference that gathers: odd lengths, windows, caps, groups, splits, scattered blocks."""

from typing import Any

import pytest
import torch

from tests.covering import sampled
from tests.kernels.truth import DEVICE, DTYPES, assert_no_worse
from tightfit.kernels.decoding.paged_attention import paged_attention, paged_attention_eager


@sampled(5)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "D", "block_size", "splits", "window", "softcap", "has_sinks"),
    [
        (4, 2, 16, 16, 1, None, None, False),
        (6, 2, 24, 8, 3, None, None, False),
        (8, 1, 64, 16, 4, 20, None, False),
        (3, 3, 16, 4, 2, None, 5.0, False),
        (4, 2, 32, 16, None, 7, 0.7, False),
        (4, 2, 16, 16, 1, None, None, True),
        (6, 2, 16, 8, 3, 9, None, True),
    ],
)
def test_it_is_attention_over_the_blocks_of_the_tables(
    heads: int,
    kv_heads: int,
    D: int,
    block_size: int,
    splits: int | None,
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
    dtype: torch.dtype,
) -> None:
    lengths = torch.tensor([1, 17, 50, 64], dtype=torch.int32, device=DEVICE)
    per_row = -(-64 // block_size)
    tables = torch.randperm(4 * per_row + 3)[: 4 * per_row].view(4, per_row).int().to(DEVICE)
    blocks = 4 * per_row + 3
    query = torch.randn(4, heads, D, device=DEVICE).to(dtype)
    keys, values = (torch.randn(blocks, block_size, kv_heads, D, device=DEVICE).to(dtype) for _ in range(2))
    settings: Any = {"scale": D**-0.5, "window": window, "softcap": softcap}
    if has_sinks:
        settings["sinks"] = torch.randn(heads, device=DEVICE).to(dtype)
    found = paged_attention(query, keys, values, tables, lengths, splits=splits, **settings)
    eager = paged_attention_eager(query, keys, values, tables, lengths, **settings)
    settings |= {"sinks": settings["sinks"].double()} if has_sinks else {}
    truth = paged_attention_eager(query.double(), keys.double(), values.double(), tables, lengths, **settings)
    assert_no_worse([found], [eager], [truth])


def test_what_lies_beyond_a_sequence_is_not_read() -> None:
    keys = torch.full((3, 16, 1, 16), float("nan"), device=DEVICE)
    keys[1, :5] = 1.0
    tables = torch.tensor([[1, 2]], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([5], dtype=torch.int32, device=DEVICE)
    query = torch.randn(1, 2, 16, device=DEVICE)
    for splits in (1, 2):
        made = paged_attention(query, keys, keys, tables, lengths, scale=1.0, splits=splits)
        torch.testing.assert_close(made, torch.ones_like(made))
