"""Rotary positions' kernel against plain torch and complex numbers: layouts, partial heads, in place."""

from itertools import product

import pytest
import torch
from torch import Tensor

from tests.covering import covering, sampled
from tests.kernels.truth import DEVICE, DTYPES, assert_no_worse, both_ways
from tightfit.errors import UserError
from tightfit.kernels.attention.rope import rope, rope_eager
from tightfit.models.layers.rope import tables
from tightfit.models.spec import Rope

# B, heads, kv_heads, T, head size, rotated size
SHAPES = [(1, 1, 1, 1, 2, 2), (2, 3, 1, 7, 8, 8), (1, 9, 3, 5, 12, 4), (2, 4, 2, 33, 16, 14)]


def cos_sin(batch: int, length: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    positions = torch.randint(0, 5000, (batch, length), device=DEVICE)
    return tables(Rope(), dim, 8192, positions, dtype)


def projected(batch: int, heads: int, length: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """[B, heads, T, D] as a view of what a projection writes."""
    made = torch.randn(batch, length, heads * head_dim, device=DEVICE, dtype=torch.float64).to(dtype)
    return made.unflatten(-1, (heads, head_dim)).transpose(1, 2)


CASES = list(product(DTYPES, SHAPES, (False, True)))


@sampled(2)
@pytest.mark.parametrize(("dtype", "shape", "interleaved"), covering(CASES, pairs=True), ids=str)
def test_no_worse_than_eager(dtype: torch.dtype, shape: tuple[int, ...], interleaved: bool) -> None:
    B, heads, kv_heads, T, D, rotated = shape
    q, k = projected(B, heads, T, D, dtype), projected(B, kv_heads, T, D, dtype)
    cos, sin = cos_sin(B if T != 5 else 1, T, rotated, dtype)

    def eager(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return rope_eager(q, k, cos.to(q.dtype), sin.to(q.dtype), interleaved=interleaved)

    reference, truth = both_ways(eager, (q, k), dtype), both_ways(eager, (q, k), torch.float64)
    for inplace in (False, True):
        found = both_ways(
            # Leaves cannot be changed: the copies stand for what projections return.
            lambda q, k, inplace=inplace: rope(
                q * 1, k * 1, cos, sin, interleaved=interleaved, inplace=inplace, impl="triton"
            ),
            (q, k),
            dtype,
        )
        assert_no_worse(found, reference, truth)


def test_interleaved_is_multiplication_by_complex_numbers() -> None:
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    cos, sin = cos_sin(2, 5, 8, torch.float64)
    cos, sin = cos.cpu(), sin.cpu()
    wanted = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.complex(cos, sin)).flatten(-2)
    assert torch.allclose(rope_eager(x, x, cos, sin, interleaved=True)[0], wanted)
    halves = torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)
    assert torch.allclose(rope_eager(halves, x, cos, sin)[0], torch.cat([wanted[..., 0::2], wanted[..., 1::2]], dim=-1))


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "slices of one projection", "column major", "expanded tables"])
def test_layouts(layout: str, inplace: bool) -> None:
    B, heads, T, D = 2, 3, 6, 8
    cos, sin = cos_sin(1, T, D, torch.float32)
    whole = torch.randn(B, T, 6 * D, device=DEVICE)
    q, k, v = whole.unflatten(-1, (-1, D)).transpose(1, 2).split((heads, 2, 1), dim=1)
    untouched = v.clone()
    if layout == "contiguous":
        q, k = q.contiguous(), k.contiguous()
    elif layout == "column major":
        q = torch.randn(B, heads, D, T, device=DEVICE).transpose(2, 3)
    elif layout == "expanded tables":
        cos, sin = cos.expand(B, -1, -1, -1), sin.clone().expand(B, -1, -1, -1)
    wanted = rope_eager(q.clone(), k.clone(), cos, sin)
    found = rope(q, k, cos, sin, inplace=inplace, impl="triton")
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, wanted, strict=True))
    assert (found[1].data_ptr() == k.data_ptr()) == (inplace and layout != "column major")
    assert torch.equal(v, untouched)


def test_in_place_uses_no_memory_and_is_noticed_by_who_kept_the_old_values() -> None:
    q = projected(1, 2, 4, 6, torch.float32).requires_grad_()
    cos, sin = cos_sin(1, 4, 6, torch.float32)
    made = q * 2
    kept = made.square()  # keeps `made` for its gradient
    turned, _ = rope(made, q.detach() * 1, cos, sin, inplace=True, impl="triton")
    assert turned.data_ptr() == made.data_ptr()
    assert turned.is_leaf is False
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (kept.sum() + turned.sum()).backward()


def test_leaves_are_never_changed() -> None:
    q = projected(1, 2, 4, 6, torch.float32).clone().requires_grad_()
    before = q.detach().clone()
    rope(q, q.detach().clone(), *cos_sin(1, 4, 6, torch.float32), inplace=True, impl="triton")
    assert torch.equal(q, before)


def test_twice_differentiable() -> None:
    q, k = (projected(1, 2, 3, 4, torch.float32).requires_grad_() for _ in range(2))
    cos, sin = cos_sin(1, 3, 4, torch.float32)
    q_out, k_out = rope(q, k, cos, sin, impl="triton")
    (dq,) = torch.autograd.grad(q_out.pow(3).sum() + k_out.sum(), q, create_graph=True)
    (found,) = torch.autograd.grad(dq.square().sum(), q)
    (dq,) = torch.autograd.grad(rope_eager(q, k, cos, sin)[0].pow(3).sum(), q, create_graph=True)
    (wanted,) = torch.autograd.grad(dq.square().sum(), q)
    assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_registered_properly() -> None:
    q, k = projected(2, 3, 5, 8, torch.float32).requires_grad_(), projected(2, 1, 5, 8, torch.float32).requires_grad_()
    cos, sin = cos_sin(2, 5, 6, torch.float32)
    torch.library.opcheck(torch.ops.tightfit.rope.default, (q, k, cos, sin, False, False))
    torch.library.opcheck(torch.ops.tightfit.rope_.default, (q.detach(), k.detach(), cos, sin, True))


def test_inside_compile_and_checkpoint() -> None:
    q, k = projected(2, 3, 5, 8, torch.float32).requires_grad_(), projected(2, 1, 5, 8, torch.float32).requires_grad_()
    cos, sin = cos_sin(2, 5, 8, torch.float32)

    def block(q: Tensor, k: Tensor) -> Tensor:
        q, k = rope(q * 1, k * 1, cos, sin, inplace=True, impl="triton")
        return (q * k).square().sum()

    wanted = torch.autograd.grad(block(q, k), (q, k))
    for way in (
        lambda: torch.utils.checkpoint.checkpoint(block, q, k, use_reentrant=False),
        lambda: torch.compile(block, backend="aot_eager", fullgraph=True)(q, k),
    ):
        for a, b in zip(torch.autograd.grad(way(), (q, k)), wanted, strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-4)


def test_refused() -> None:
    q, cos = torch.ones(2, 3, 5, 8), torch.ones(1, 1, 5, 4)
    with pytest.raises(UserError, match="only their number of heads may differ"):
        rope(q, q[:, :, :4], cos, cos)
    for tables_ in (cos[:, :, :4], torch.ones(1, 1, 5, 5), torch.ones(3, 1, 5, 4), cos[0]):
        with pytest.raises(UserError, match="both must be"):
            rope(q, q, tables_, tables_)
    with pytest.raises(UserError, match="both must be"):
        rope(q, q, cos, cos[..., :3])
