"""Attention to parts of the keys on a GPU: every backend joined to the whole, and one rank of a ring."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.truth import assert_no_worse
from tightfit.jobs.layout import Layout
from tightfit.kernels.attention import partial_attention
from tightfit.kernels.attention.attention import AttentionMask, attention
from tightfit.kernels.attention.join_parts import join_
from tightfit.kernels.attention.partial_attention import Part, attend_part, attend_part_backward
from tightfit.memory.simulation import fake_world
from tightfit.parallel.mesh import context_group, make_mesh
from tightfit.parallel.ring import ring_attention

CUDA = torch.device("cuda")
LENGTH, SCALE = 512, 128**-0.5


def leaves() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(2, LENGTH, heads, 128, generator=generator).bfloat16() for heads in (8, 2, 2)]
    return [x.transpose(1, 2).to(CUDA) for x in made]


def whole(dtype: torch.dtype, d_out: Tensor, **limits: Any) -> list[Tensor]:
    """The second half of the queries over all keys, eagerly."""
    query, key, value = (x.to(dtype).requires_grad_() for x in leaves())
    mask = AttentionMask(LENGTH, LENGTH, CUDA)
    out = attention(query, key, value, mask, scale=SCALE, impl="eager", **limits)[:, :, LENGTH // 2 :]
    gradients = torch.autograd.grad(out, (query, key, value), d_out.to(dtype))
    return [out, gradients[0][:, :, LENGTH // 2 :], *gradients[1:]]


def by_parts(d_out: Tensor, window: int | None = None, softcap: float | None = None) -> list[Tensor]:
    """The same from the first half of the keys and the queries' own."""
    half = LENGTH // 2
    query, key, value = leaves()
    query = query[:, :, half:]
    earlier, own = None, None
    if window is not None:
        first = (torch.arange(half, LENGTH, device=CUDA) - window + 1).clamp(0).expand(2, -1)
        earlier, own = first.clamp(0, half).int().contiguous(), (first - half).clamp(0).int()
    parts = [
        (slice(half, None), Part(SCALE, softcap, causal=True, first=own, keys=half)),
        (slice(half), Part(SCALE, softcap, causal=False, first=earlier, keys=half)),
    ]
    (narrow, logs), (more, more_logs) = (attend_part(query, key[:, :, at], value[:, :, at], p) for at, p in parts)
    out, logs = narrow.float(), logs.contiguous()
    join_(out, logs, more, more_logs)
    out = out.to(query.dtype)
    sums = [torch.zeros_like(x, dtype=torch.float32) for x in (query, key, value)]
    for at, part in parts:
        found = attend_part_backward(d_out, query, key[:, :, at], value[:, :, at], out, logs, part)
        for total, gradient in zip((sums[0], sums[1][:, :, at], sums[2][:, :, at]), found, strict=True):
            total += gradient
    return [out, *(x.to(query.dtype) for x in sums)]


@pytest.mark.parametrize("backend", ["cudnn", "flash", "triton"])
def test_every_backend_joins_to_the_whole(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_attention, "_backend", lambda *_: backend)
    d_out = torch.randn(2, 8, LENGTH // 2, 128, generator=torch.Generator().manual_seed(1)).bfloat16().to(CUDA)
    assert_no_worse(by_parts(d_out), whole(torch.bfloat16, d_out), whole(torch.float64, d_out))


@pytest.mark.parametrize("limits", [{"window": 77}, {"softcap": 5.0}, {"window": 300, "softcap": 5.0}], ids=str)
def test_windows_and_caps(limits: dict[str, Any]) -> None:
    d_out = torch.randn(2, 8, LENGTH // 2, 128, generator=torch.Generator().manual_seed(1)).bfloat16().to(CUDA)
    truth, eager = (whole(dtype, d_out, **limits) for dtype in (torch.float64, torch.bfloat16))
    assert_no_worse(by_parts(d_out, **limits), eager, truth)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_of_a_ring_runs(ranks: int) -> None:
    """What others would have sent is whatever was in memory; shapes and dtypes are not."""
    query, key, value = given = [x.requires_grad_() for x in leaves()]
    with fake_world(ranks):
        group = context_group(make_mesh(Layout(context=ranks, ring=ranks), "cuda"), "ring")
        assert group is not None
        out = ring_attention(query, key, value, None, group, scale=SCALE)
        out.sum().backward()
    assert out.shape == given[0].shape
    assert out.dtype == torch.bfloat16
    assert all(x.grad is not None and x.grad.dtype == torch.bfloat16 for x in given)
