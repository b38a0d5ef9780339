"""Attention's backends on a GPU: right in both directions, chosen under checkpointing, and without a T × T mask."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.truth import assert_no_worse
from tightfit.kernels.attention.attention import AttentionMask, attention

CUDA = torch.device("cuda")
LENGTH = 300
SETTINGS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window": 77},
    "packed": {"packed": 90},
    "everything": {"packed": 130, "window": 77, "softcap": 5.0},
}
CASES = [
    *(("causal", impl, head_dim) for impl in ("cudnn", "flash", "efficient") for head_dim in (64, 128)),
    *((name, impl, head_dim) for name in SETTINGS for impl in ("triton", "flex") for head_dim in (64, 128, 256)),
]


def leaves(dtype: torch.dtype, head_dim: int, length: int = LENGTH) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(2, length, heads, head_dim, generator=generator).bfloat16() for heads in (4, 2, 2)]
    return [x.transpose(1, 2).to(CUDA, dtype).requires_grad_() for x in made]


def documents(length: int, every: int) -> Tensor:
    return (torch.arange(length, device=CUDA)[None] // every).int().expand(2, -1)


def both_ways(impl: str, dtype: torch.dtype, head_dim: int, packed: int = 0, **limits: Any) -> list[Tensor]:
    given = leaves(dtype, head_dim)
    mask = AttentionMask(LENGTH, LENGTH, CUDA, documents(LENGTH, packed) if packed else None)
    query, key, value = given
    out = attention(query, key, value, mask, scale=head_dim**-0.5, impl=impl, **limits)  # type: ignore[arg-type]
    d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(CUDA, dtype)
    return [out, *torch.autograd.grad(out, given, d_out)]


@pytest.mark.parametrize(("setting", "impl", "head_dim"), CASES)
def test_every_backend_is_no_worse_than_eager(setting: str, impl: str, head_dim: int) -> None:
    limits = SETTINGS[setting]
    truth, eager = (both_ways("eager", dtype, head_dim, **limits) for dtype in (torch.float64, torch.bfloat16))
    assert_no_worse(both_ways(impl, torch.bfloat16, head_dim, **limits), eager, truth)


def test_packed_documents_need_no_quadratic_memory() -> None:
    length = 16384
    given = leaves(torch.bfloat16, 64, length)
    mask = AttentionMask(length, length, CUDA, documents(length, 1000))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    query, key, value = given
    attention(query, key, value, mask, scale=0.125, impl="auto").sum().backward()
    assert torch.cuda.max_memory_allocated() - before < length**2 // 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_rule_never_holds_all_scores(dtype: torch.dtype) -> None:
    length = 8192
    given = leaves(dtype, 64, length)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    query, key, value = given
    attention(query, key, value, AttentionMask(length, length, CUDA), scale=0.125, impl="auto").sum().backward()
    scores = given[0].shape[0] * given[0].shape[1] * length**2
    assert torch.cuda.max_memory_allocated() - before < scores // 4  # bytes: all scores would be two or four each
