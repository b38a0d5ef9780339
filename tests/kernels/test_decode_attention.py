"""Norm, rope, write and attention of a decoding step in one kernel, against the steps one after the other."""

from typing import Any

import pytest
import torch

from tests.covering import sampled
from tests.kernels.truth import DEVICE, DTYPES, assert_no_worse
from tightfit.kernels.decoding.decode_attention import decode_attention, decode_attention_eager
from tightfit.kernels.decoding.paged_attention import KeyBlocks


@sampled(6)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "D", "half", "block_size", "splits", "blocks", "window", "softcap", "norm"),
    [
        (4, 2, 16, 8, 16, 1, None, None, None, False),
        (6, 2, 24, 8, 8, 3, None, None, None, True),
        (8, 1, 64, 32, 16, 4, KeyBlocks(32, 2, 2), 20, None, False),
        (3, 3, 16, 8, 4, 2, None, None, 5.0, True),
        (4, 2, 32, 16, 16, None, None, 7, 0.7, False),
    ],
)
def test_it_is_norm_rope_write_and_attention(
    heads: int,
    kv_heads: int,
    D: int,
    half: int,
    block_size: int,
    splits: int | None,
    blocks: KeyBlocks | None,
    window: int | None,
    softcap: float | None,
    norm: bool,
    dtype: torch.dtype,
) -> None:
    lengths = torch.tensor([1, 17, 50, 64, 33], dtype=torch.int64, device=DEVICE)
    B, per_row = len(lengths), -(-64 // block_size)
    stored = B * per_row + 3
    tables = torch.randperm(stored)[: B * per_row].view(B, per_row).int().to(DEVICE)
    qkv = torch.randn(B, (heads + 2 * kv_heads) * D, device=DEVICE).to(dtype)
    cache = torch.randn(2, stored, block_size, kv_heads, D, device=DEVICE).to(dtype)
    angles = torch.rand(64, half) * 6
    cos, sin = (table.to(DEVICE, dtype) for table in (angles.cos(), angles.sin()))
    weights = [(torch.rand(D) + 0.5).to(DEVICE, dtype) if norm else None for _ in range(2)]
    counters = torch.zeros(B * kv_heads, dtype=torch.int32, device=DEVICE)
    settings: Any = {"heads": heads, "scale": D**-0.5, "window": window, "softcap": softcap, "norm_eps": 1e-5}

    def run(kind: torch.dtype, eager: bool) -> list[torch.Tensor]:
        own = cache.to(kind, copy=True)
        q_norm, k_norm = (None if weight is None else weight.to(kind) for weight in weights)
        inputs: Any = {"qkv": qkv.to(kind), "keys": own[0], "values": own[1], "tables": tables, "lengths": lengths}
        inputs |= {"cos": cos.to(kind), "sin": sin.to(kind), "q_norm": q_norm, "k_norm": k_norm, "norm_offset": 0.5}
        if eager:
            return [decode_attention_eager(**inputs, **settings), own]
        made = decode_attention(**inputs, counters=counters, splits=splits, blocks=blocks, **settings)
        assert not counters.any()
        return [made, own]

    found = run(dtype, False)
    assert_no_worse(found, run(dtype, True), run(torch.float64, True))
    changed = (found[1] != cache).flatten(3).any(-1).flatten(1).any(0).nonzero().flatten().tolist()
    last = (lengths - 1).cpu()
    places = tables.cpu().long().gather(1, (last // block_size)[:, None])[:, 0] * block_size + last % block_size
    assert changed == sorted(places.tolist())
