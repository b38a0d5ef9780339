"""Attention: SDPA against the eager reference, the reference against a loop, and who sees whom."""

import math

import pytest
import torch
from torch import Tensor

from tightfit.kernels.attention import Visibility, attention, attention_eager

CPU = torch.device("cpu")


def qkv(queries: int, keys: int, heads: int = 4, kv_heads: int = 2, dim: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(queries + keys)
    query = torch.randn(2, heads, queries, dim, requires_grad=True)
    key, value = (torch.randn(2, kv_heads, keys, dim, requires_grad=True) for _ in range(2))
    return query, key, value


def packed(length: int) -> Tensor:
    first = torch.arange(length) // 5
    return torch.stack([first, torch.zeros_like(first)])


def by_hand(query: Tensor, key: Tensor, value: Tensor, scale: float, **seen) -> Tensor:
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


SETTINGS = {
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


def run(impl: str, shape: dict, setting: dict, heads: int = 4) -> tuple[Tensor, ...]:
    query, key, value = qkv(**shape, heads=heads)
    visible = Visibility(shape["queries"], shape["keys"], CPU, setting.get("documents"))
    limits = {name: setting.get(name) for name in ("window", "softcap")}
    out = attention(query, key, value, visible, scale=0.3, impl=impl, **limits)
    return (out, *torch.autograd.grad(out.square().sum(), (query, key, value)))


@pytest.mark.parametrize(("shape", "setting"), COMBINATIONS)
def test_both_implementations_follow_the_definition(shape, setting):
    query, key, value = (x.detach() for x in qkv(**shape))
    wanted = by_hand(query, key, value, 0.3, **setting)
    for impl in ("sdpa", "eager"):
        assert torch.allclose(run(impl, shape, setting)[0], wanted, atol=1e-5), impl


@pytest.mark.parametrize("heads", [2, 4, 8])
@pytest.mark.parametrize(("shape", "setting"), COMBINATIONS)
def test_sdpa_equals_eager_in_output_and_gradients(shape, setting, heads):
    for fused, eager in zip(run("sdpa", shape, setting, heads), run("eager", shape, setting, heads), strict=True):
        assert torch.allclose(fused, eager, atol=1e-5)


def test_scale_and_unmasked_reference():
    query, key, value = (x.detach() for x in qkv(3, 7))
    wanted = torch.softmax(query @ key.repeat_interleave(2, 1).mT / math.sqrt(6), -1) @ value.repeat_interleave(2, 1)
    assert torch.allclose(attention_eager(query, key, value, None, scale=6**-0.5), wanted, atol=1e-6)


def test_plain_causal_attention_needs_no_mask_and_others_share_one():
    assert Visibility(9, 9, CPU).mask(None) is None
    assert Visibility(9, 9, CPU).mask(9) is None
    assert Visibility(1, 9, CPU).mask(None) is None
    visible = Visibility(9, 9, CPU)
    assert visible.mask(4) is visible.mask(4)
    assert visible.mask(4) is not visible.mask(5)
    assert Visibility(2, 9, CPU).mask(None).shape == (1, 1, 2, 9)
    assert Visibility(10, 10, CPU, packed(10)).mask(None).shape == (2, 1, 10, 10)


def test_documents_with_a_cache_before_them_are_refused():
    with pytest.raises(ValueError, match="do not go together"):
        Visibility(4, 9, CPU, packed(4))


def test_low_precision_eager_keeps_its_dtype():
    query, key, value = (x.detach().bfloat16() for x in qkv(5, 5))
    assert attention_eager(query, key, value, None, scale=1.0).dtype == torch.bfloat16
