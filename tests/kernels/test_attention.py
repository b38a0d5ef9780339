"""Attention: every backend against the eager reference, the reference against a loop, and which one is chosen."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.covering import sampled
from tightfit.errors import UserError
from tightfit.kernels.attention import attention as module
from tightfit.kernels.attention.attention import AttentionMask, attention, attention_backend, attention_eager

CPU = torch.device("cpu")


def qkv(queries: int, keys: int, heads: int = 4, kv_heads: int = 2, dim: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(queries + keys)
    query = torch.randn(2, heads, queries, dim, requires_grad=True)
    key, value = (torch.randn(2, kv_heads, keys, dim, requires_grad=True) for _ in range(2))
    return query, key, value


def packed(length: int) -> Tensor:
    first = torch.arange(length) // 5
    return torch.stack([first, torch.zeros_like(first)])


def by_hand(query: Tensor, key: Tensor, value: Tensor, scale: float, **seen: Any) -> Tensor:
    """One query, one head at a time, straight from the definition."""
    window, softcap, documents = seen.get("window"), seen.get("softcap"), seen.get("documents")
    out = torch.zeros_like(query)
    batch, heads, queries, _ = query.shape
    keys, group = key.shape[2], heads // key.shape[1]
    for b in range(batch):
        for head in range(heads):
            for i in range(queries):
                at = keys - queries + i
                visible = [j for j in range(at + 1) if window is None or at - j < window]
                visible = [j for j in visible if documents is None or documents[b, j] == documents[b, at]]
                scores = key[b, head // group, visible] @ query[b, head, i] * scale
                scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
                out[b, head, i] = scores.softmax(0) @ value[b, head // group, visible]
    return out


SETTINGS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window": 3},
    "window-of-one": {"window": 1},
    "window-beyond": {"window": 99},
    "packed": {"documents": packed(13)},
    "packed-window": {"documents": packed(13), "window": 3},
    "softcap": {"softcap": 0.5},
    "softcap-packed-window": {"softcap": 0.5, "documents": packed(13), "window": 3},
}
SHAPES = {
    "square": {"queries": 13, "keys": 13},
    "one-of-many": {"queries": 1, "keys": 13},
    "few-of-many": {"queries": 4, "keys": 13},
    "single": {"queries": 1, "keys": 1},
}
COMBINATIONS = [
    pytest.param(SHAPES[shape], SETTINGS[setting], id=f"{shape}-{setting}")
    for shape in SHAPES
    for setting in SETTINGS
    if "documents" not in SETTINGS[setting] or shape == "square"
]


def run(impl: Any, shape: dict[str, int], setting: dict[str, Any], heads: int = 4) -> tuple[Tensor, ...]:
    query, key, value = qkv(**shape, heads=heads)
    mask = AttentionMask(shape["queries"], shape["keys"], CPU, setting.get("documents"))
    limits = {name: setting.get(name) for name in ("window", "softcap")}
    out = attention(query, key, value, mask, scale=0.3, impl=impl, **limits)
    return (out, *torch.autograd.grad(out.square().sum(), (query, key, value)))


@sampled(3)
@pytest.mark.parametrize(("shape", "setting"), COMBINATIONS)
def test_plain_implementations_follow_the_definition(shape: dict[str, int], setting: dict[str, Any]) -> None:
    query, key, value = (x.detach() for x in qkv(**shape))
    wanted = by_hand(query, key, value, 0.3, **setting)
    for impl in ("sdpa", "eager", "auto"):
        assert torch.allclose(run(impl, shape, setting)[0], wanted, atol=1e-5), impl


@sampled(3)
@pytest.mark.parametrize("heads", [2, 4, 8])
@pytest.mark.parametrize(("shape", "setting"), COMBINATIONS)
def test_sdpa_equals_eager_in_output_and_gradients(shape: dict[str, int], setting: dict[str, Any], heads: int) -> None:
    for fused, eager in zip(run("sdpa", shape, setting, heads), run("eager", shape, setting, heads), strict=True):
        assert torch.allclose(fused, eager, atol=1e-5)


def test_scale_and_unmasked_reference() -> None:
    query, key, value = (x.detach() for x in qkv(3, 7))
    wanted = torch.softmax(query @ key.repeat_interleave(2, 1).mT / math.sqrt(6), -1) @ value.repeat_interleave(2, 1)
    assert torch.allclose(attention_eager(query, key, value, None, scale=6**-0.5), wanted, atol=1e-6)


@sampled(4)
@pytest.mark.parametrize("setting", SETTINGS)
def test_flex_equals_eager(setting: str) -> None:
    """Uncompiled, over more than one of its blocks, and forward only: on CPUs it has no more."""
    limits = dict(SETTINGS[setting])
    documents = packed(150) // 7 if limits.pop("documents", None) is not None else None
    query, key, value = (x.detach() for x in qkv(150, 150))
    mask = AttentionMask(150, 150, CPU, documents)
    flex, eager = (attention(query, key, value, mask, scale=0.3, impl=impl, **limits) for impl in ("flex", "eager"))
    assert torch.allclose(flex, eager, atol=1e-5)


def test_low_precision_eager_keeps_its_dtype() -> None:
    query, key, value = (x.detach().bfloat16() for x in qkv(5, 5))
    assert attention_eager(query, key, value, None, scale=1.0).dtype == torch.bfloat16


@pytest.mark.parametrize("impl", ["cudnn", "flash", "efficient"])
@pytest.mark.parametrize("setting", [{"window": 3}, {"softcap": 1.0}, {"documents": packed(13)}])
def test_fused_backends_refuse_what_they_would_get_wrong(impl: Any, setting: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="plain causal attention only"):
        run(impl, SHAPES["square"], setting)


def test_mistakes_are_named() -> None:
    with pytest.raises(UserError, match="attention is 'fast'; give one of auto, sdpa"):
        run("fast", SHAPES["square"], {})
    with pytest.raises(UserError, match="key/value cache"):
        run("flex", SHAPES["few-of-many"], {})


def on_gpu(monkeypatch: pytest.MonkeyPatch, major: int = 9) -> None:
    """Pretend that tensors are on a GPU of this compute capability."""
    monkeypatch.setattr(module, "use_triton", lambda impl, tensor: True)
    monkeypatch.setattr(module, "capability", lambda device: major)


def backend_of(
    length: int = 13,
    documents: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    kv_heads: int = 2,
    **limits: Any,
) -> str:
    query, key, _ = qkv(length, length, kv_heads=kv_heads)
    return attention_backend(query.to(dtype), key.to(dtype), AttentionMask(length, length, CPU, documents), **limits)


def test_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch)
    assert backend_of() == backend_of(window=99) == "sdpa"
    assert backend_of(window=3) == backend_of(softcap=1.0) == backend_of(documents=packed(13)) == "triton"
    query, key, _ = qkv(4, 13)
    assert attention_backend(query, key, AttentionMask(4, 13, CPU)) == "triton"
    assert attention_backend(query[:, :, :1], key, AttentionMask(1, 13, CPU)) == "sdpa"
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert backend_of() == "triton"


@pytest.mark.parametrize(("major", "dtype"), [(9, torch.float32), (7, torch.float16), (7, torch.float32)], ids=str)
def test_where_torch_has_no_fused_kernel_for_grouped_heads_ours_is_taken(
    major: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu(monkeypatch, major)
    assert backend_of(dtype=dtype) == "triton"
    assert backend_of(dtype=dtype, kv_heads=4) == "sdpa"


def test_auto_runs_what_the_rule_says(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch)
    taken = []
    monkeypatch.setattr(module, "flash_attention", lambda query, *_, **__: taken.append("triton") or query)
    monkeypatch.setattr(module, "_sdpa", lambda query, *_, **__: taken.append("sdpa") or query)
    query, key, value = (x.bfloat16() for x in qkv(13, 13))
    for documents in (None, packed(13)):
        attention(query, key, value, AttentionMask(13, 13, CPU, documents), scale=1.0)
    assert taken == ["sdpa", "triton"]


def test_cpus_take_sdpa() -> None:
    assert backend_of() == backend_of(window=3) == backend_of(softcap=1.0) == "sdpa"
