"""Our flash attention against the eager reference: odd lengths and heads, every way of not seeing, both directions."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from tests.covering import sampled
from tests.kernels.truth import DEVICE, DTYPES, assert_no_worse
from tightfit.errors import UserError
from tightfit.kernels.attention.attention import AttentionMask, attention
from tightfit.kernels.attention.flash_attention import flash_attention

SETTINGS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window": 11},
    "packed": {"packed": 13},
    "packed-window": {"packed": 29, "window": 11},
    "softcap": {"softcap": 0.7},
    "everything": {"packed": 29, "window": 11, "softcap": 0.7},
}
SHAPES: dict[str, dict[str, int]] = {
    "square": {"queries": 53, "keys": 53},
    "grouped": {"queries": 19, "keys": 19, "heads": 4, "kv_heads": 2, "batch": 2},
    "head-of-20": {"queries": 33, "keys": 33, "dim": 20},
    "few-of-many": {"queries": 21, "keys": 60},
    "one-of-many": {"queries": 1, "keys": 33},
    "single": {"queries": 1, "keys": 1},
}
LOW = DTYPES[1:]
CASES = [
    *(("square", setting, dtype) for setting in SETTINGS for dtype in LOW),
    *(("grouped", setting, dtype) for setting in ("causal", "packed") for dtype in LOW),
    *((shape, setting, LOW[-1]) for shape in list(SHAPES)[2:] for setting in ("causal", "window")),
    ("square", "everything", torch.float32),
    ("square", "causal", torch.float32),
]


def tensors(queries: int, keys: int, heads: int = 1, kv_heads: int = 1, batch: int = 1, dim: int = 16) -> list[Tensor]:
    """Query, key, value as the decoder has them: transposed views of [B, T, heads · D]."""
    generator = torch.Generator().manual_seed(keys)
    sizes = [(queries, heads), (keys, kv_heads), (keys, kv_heads)]
    flat = [torch.randn(batch, T, n * dim, generator=generator).half() for T, n in sizes]
    return [x.unflatten(-1, (-1, dim)).transpose(1, 2).to(DEVICE) for x in flat]


def results(impl: Any, given: list[Tensor], dtype: torch.dtype, packed: int = 0, **limits: Any) -> list[Tensor]:
    query, key, value = (x.detach().to(dtype).requires_grad_() for x in given)
    queries, keys = query.shape[2], key.shape[2]
    documents = None
    if packed:
        row = torch.arange(keys, device=DEVICE)
        documents = torch.stack([row // packed, (row >= keys - 3).long()])[: query.shape[0]]
    mask = AttentionMask(queries, keys, query.device, documents)
    out = attention(query, key, value, mask, scale=0.3, impl=impl, **limits)
    d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).half().to(DEVICE, dtype)
    return [out, *torch.autograd.grad(out, (query, key, value), d_out)]


@sampled(5)
@pytest.mark.parametrize(("shape", "setting", "dtype"), CASES, ids=str)
def test_no_worse_than_eager(shape: str, setting: str, dtype: torch.dtype) -> None:
    given = [x.to(dtype) for x in tensors(**SHAPES[shape])]
    truth, eager = (results("eager", given, x, **SETTINGS[setting]) for x in (torch.float64, dtype))
    assert_no_worse(results("triton", given, dtype, **SETTINGS[setting]), eager, truth)


def test_twice_the_same() -> None:
    given = tensors(33, 33)
    first, second = (results("triton", given, torch.float16, window=5) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_results_lie_as_projections_take_them() -> None:
    query, key, value = (x.requires_grad_() for x in tensors(9, 9, heads=2, kv_heads=2))
    out = flash_attention(query, key, value, scale=1.0)
    assert out.transpose(1, 2).is_contiguous()
    assert all(g.transpose(1, 2).is_contiguous() for g in torch.autograd.grad(out.sum(), (query, key, value)))


def test_any_strides() -> None:
    query, key, value = (x.contiguous() for x in tensors(9, 9))
    odd = query.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0)
    assert odd.stride(3) != 1
    assert torch.equal(*(flash_attention(q, key, value, scale=0.3) for q in (query, odd)))


def test_operator_is_well_formed() -> None:
    given = [x.requires_grad_() for x in tensors(9, 9)]
    torch.library.opcheck(torch.ops.tightfit.flash_attention, (*given, None, 0.3, 5, 0.0))


def test_checkpointing() -> None:
    given = [x.requires_grad_() for x in tensors(9, 9)]
    plain = torch.autograd.grad(flash_attention(*given, scale=0.3).sum(), given)
    again = checkpoint(lambda *x: flash_attention(*x, scale=0.3), *given, use_reentrant=False)
    assert all(torch.equal(a, b) for a, b in zip(plain, torch.autograd.grad(again.sum(), given), strict=True))


def test_fake_tensors_have_the_real_shapes() -> None:
    with FakeTensorMode():
        query, key = (torch.empty(2, h, 4096, 128, dtype=torch.bfloat16, requires_grad=True) for h in (32, 8))
        out = flash_attention(query, key, key, scale=1.0)
        out.sum().backward()
    assert out.shape == query.shape
    assert key.grad is not None
    assert key.grad.shape == key.shape


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": (1, 1, 9, 8)}, "do not fit"),
        ({"value": (1, 1, 8, 16)}, "do not fit"),
        ({"query": (1, 2, 10, 16)}, "do not fit"),
        ({"query": (1, 1, 9, 512), "key": (1, 1, 9, 512), "value": (1, 1, 9, 512)}, "heads have 512 channels"),
        ({"bounds": (2, 1, 8)}, "document bounds are"),
    ],
)
def test_mistakes_are_named(change: dict[str, Any], message: str) -> None:
    shapes = {"query": (1, 1, 9, 16), "key": (1, 1, 9, 16), "value": (1, 1, 9, 16)} | change
    given: dict[str, Any] = {name: torch.zeros(shape) for name, shape in shapes.items()}
    with pytest.raises(UserError, match=message):
        flash_attention(**given, scale=1.0)
