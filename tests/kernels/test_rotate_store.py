"""Norm, rope and the write into the cache at once, against the three of them."""

import pytest
import torch

from tests.covering import sampled
from tests.kernels.truth import DEVICE, DTYPES, assert_no_worse
from tightfit.kernels.decoding.rotate_store import rotate_store, rotate_store_eager


@sampled(4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [[5, 0, 14], list(range(30, 0, -1)) + list(range(31, 96))])
@pytest.mark.parametrize(("heads", "kv_heads", "D", "half", "norm"), [(4, 2, 16, 8, False), (3, 1, 24, 9, True)])
def test_it_is_norm_rope_and_write(
    heads: int, kv_heads: int, D: int, half: int, norm: bool, tokens: list[int], dtype: torch.dtype
) -> None:
    M, blocks, size = len(tokens), 24, 4
    qkv = torch.randn(M, (heads + 2 * kv_heads) * D).to(DEVICE, dtype)
    angles = torch.rand(200, half) * 6
    cos, sin = (table.to(DEVICE, dtype) for table in (angles.cos(), angles.sin()))
    slots, positions = torch.tensor(tokens, device=DEVICE), torch.tensor(tokens, device=DEVICE) * 2 + 3
    weights = [(torch.rand(D) + 0.5).to(DEVICE, dtype) if norm else None for _ in range(2)]
    made = []
    for kind, run in ((dtype, rotate_store), (dtype, rotate_store_eager), (torch.float64, rotate_store_eager)):
        cache = torch.zeros(2, blocks, size, kv_heads, D, device=DEVICE, dtype=kind)
        q_norm, k_norm = (None if weight is None else weight.to(kind) for weight in weights)
        q = run(
            qkv.to(kind),
            cache[0],
            cache[1],
            slots,
            positions,
            cos.to(kind),
            sin.to(kind),
            heads=heads,
            q_norm=q_norm,
            k_norm=k_norm,
            norm_eps=1e-5,
            norm_offset=0.5,
        )
        made.append([q, cache])
    assert_no_worse(*made)
    touched = made[0][1].flatten(1, 2).abs().sum((0, 2, 3)).nonzero().flatten().tolist()
    assert touched == sorted(tokens)
