"""Attention to parts of the keys, joined: equal to attention to all of them, forward and backward."""

import pytest
import torch
from torch import Tensor

from tests.covering import sampled
from tests.kernels.truth import DEVICE
from tightfit.kernels.attention.attention import attention_eager
from tightfit.kernels.attention.flash_attention import attend, like_rows
from tightfit.kernels.attention.flash_attention_backward import attend_backward
from tightfit.kernels.attention.flash_blocks import capability, passes
from tightfit.kernels.attention.join_parts import join_
from tightfit.kernels.attention.partial_attention import (
    LN2,
    Part,
    attend_part,
    attend_part_backward,
    attend_part_backward_eager,
    attend_part_eager,
)

QUERIES, BEFORE = 37, 50
CAPS = {"plain": None, "capped": 0.7}


def tensors(kv_heads: int = 2) -> list[Tensor]:
    """Queries, and keys and values of the tokens before theirs and of theirs."""
    generator = torch.Generator().manual_seed(3)
    sizes = [(2 * kv_heads, QUERIES), (kv_heads, BEFORE + QUERIES), (kv_heads, BEFORE + QUERIES)]
    return [torch.randn(2, heads, length, 16, generator=generator).to(DEVICE) for heads, length in sizes]


def first_keys(window: int | None) -> Tensor | None:
    """By position in the row; the second row has a document that begins inside of the queries."""
    if window is None:
        return None
    position = torch.arange(BEFORE, BEFORE + QUERIES, device=DEVICE)
    document = torch.stack([position * 0, torch.where(position >= BEFORE + 20, BEFORE + 20, 7)])
    return torch.maximum(document, position - window + 1).int()


def truth(given: list[Tensor], first: Tensor | None, softcap: float | None, d_out: Tensor) -> list[Tensor]:
    query, key, value = (x.double().requires_grad_() for x in given)
    at = torch.arange(BEFORE + QUERIES, device=DEVICE)
    seen = (at <= at[BEFORE:, None])[None]
    if first is not None:
        seen = seen & (at >= first[:, :, None])
    out = attention_eager(query, key, value, seen[:, None], scale=0.3, softcap=softcap)
    return [out, *torch.autograd.grad(out, (query, key, value), d_out.double())]


def parts_of(first: Tensor | None, softcap: float | None) -> list[tuple[slice, Part]]:
    """The keys before the queries, and their own."""
    earlier = None if first is None else first.clamp(0, BEFORE)
    own = None if first is None else (first - BEFORE).clamp(0)
    return [
        (slice(BEFORE, None), Part(0.3, softcap, causal=True, first=own, keys=QUERIES)),
        (slice(BEFORE), Part(0.3, softcap, causal=False, first=earlier, keys=BEFORE)),
    ]


@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("window", [None, 60, 5])
def test_parts_joined_are_the_whole(window: int | None, cap: str) -> None:
    """With a window of five most queries see none of the keys before them."""
    given, first = tensors(), first_keys(window)
    d_out = torch.randn(given[0].shape, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    wanted = truth(given, first, CAPS[cap], d_out)
    query, key, value = given
    parts = parts_of(first, CAPS[cap])
    (out, logs), (more, more_logs) = (attend_part(query, key[:, :, at], value[:, :, at], p) for at, p in parts)
    join_(out, logs, more, more_logs)
    found = [out, torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)]
    for at, part in parts:
        gradients = attend_part_backward(d_out, query, key[:, :, at], value[:, :, at], out, logs, part)
        for sums, gradient in zip((found[1], found[2][:, :, at], found[3][:, :, at]), gradients, strict=True):
            sums += gradient
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.allclose(ours.double(), theirs, atol=2e-5, rtol=1e-4)


@sampled(3)
@pytest.mark.parametrize(("window", "cap"), [(None, "plain"), (60, "capped"), (5, "plain")])
def test_our_kernels_do_the_same(window: int | None, cap: str) -> None:
    """Of rows that see no key nothing but a low logsumexp is wanted."""
    (query, key, value), first = tensors(kv_heads=1), first_keys(window)
    blocks = passes(16, torch.float32, capability(query.device)).forward
    for at, part in parts_of(first, CAPS[cap]):
        keys, values = key[:, :, at], value[:, :, at]
        wanted, wanted_logs = attend_part_eager(query, keys, values, part)
        out, logs = attend(query, keys, values, part.problem(keys.shape[2]), blocks)
        seeing = wanted_logs > -1e20
        assert torch.allclose(logs[seeing] * LN2, wanted_logs[seeing], atol=1e-5)
        assert (logs[~seeing] < -1e20).all()
        assert out.isfinite().all()
        assert torch.allclose(out[seeing], wanted[seeing], atol=1e-5)
        shared = torch.where(seeing, wanted_logs, 0.0)  # as if other keys were seen
        gradients = like_rows(query), like_rows(keys), like_rows(values)
        problem = part.problem(keys.shape[2])
        attend_backward(wanted + 1, query, keys, values, wanted, (shared / LN2).contiguous(), problem, gradients)
        for ours, theirs in zip(
            gradients, attend_part_backward_eager(wanted + 1, query, keys, values, wanted, shared, part), strict=True
        ):
            assert torch.allclose(ours, theirs, atol=3e-5, rtol=1e-4)
