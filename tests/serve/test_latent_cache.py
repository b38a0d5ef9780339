"""The cache of latent attention: small vectors, counted as such, and the same answers whatever happens to them."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.covering import sampled
from tests.models.huggingface.reference import pair
from tests.serve.test_families import LENGTHS, SMALL, expected, greedy
from tightfit.errors import UserError
from tightfit.memory.formulas.serving import cache_bytes, cache_bytes_per_token
from tightfit.models.layers.latent_attention import Expansion
from tightfit.models.presets import preset
from tightfit.serve.engine import Engine

NAME = "deepseek_v3"


def test_folded_weights_give_what_expanded_keys_and_values_give() -> None:
    """q · (W_k c) = (q W_k) · c and Σ p (W_v c) = W_v Σ p c, in float64."""
    torch.manual_seed(0)
    heads, plain, rotated, value, rank = 3, 4, 2, 5, 7
    expansion = Expansion(
        keys=torch.randn(heads, plain, rank, dtype=torch.float64),
        values=torch.randn(heads, value, rank, dtype=torch.float64),
    )
    vectors = torch.randn(1, 6, rank + rotated, dtype=torch.float64)
    query = torch.randn(1, heads, 1, plain + rotated, dtype=torch.float64)
    key, padded = expansion.expanded(vectors)
    wanted = torch.softmax(query @ key.mT, -1) @ padded[..., :value]
    folded = torch.cat([query[..., :plain] @ expansion.keys, query[..., plain:]], dim=-1)
    found = torch.softmax(folded @ vectors[:, None].mT, -1) @ vectors[:, None, :, :rank] @ expansion.values.mT
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_a_token_has_one_small_vector_a_layer() -> None:
    engine = Engine(pair(NAME).ours, None, SMALL)
    spec = pair(NAME).ours.spec
    assert spec.latent is not None
    token_bytes = spec.layers * (spec.latent.kv_rank + spec.latent.rope_dim) * 4
    assert cache_bytes_per_token(spec, 4) == token_bytes < 2 * spec.layers * spec.kv_size * 4
    assert engine.runner.cache.bytes == (engine.pool.size + 1) * SMALL.block_size * token_bytes
    assert engine.budget.cache_bytes == engine.pool.size * SMALL.block_size * token_bytes


def test_plans_count_it() -> None:
    """DeepSeek-V3: 61 layers of 512 + 64 numbers a token, 68.6 KiB in bf16."""
    assert cache_bytes(preset("deepseek-v3"), 2, 4096) == 2 * 4096 * 61 * 576 * 2


@sampled(3)
@pytest.mark.parametrize("change", [{"cache_bytes": 0}, {"cache_bytes": 0, "host_bytes": 2**20}, {"async_steps": True}])
def test_answers_stay_the_same(change: dict[str, Any]) -> None:
    """In a cache too small for all of them, computed again or kept on the host; and a step ahead."""
    if "cache_bytes" in change:
        change = change | {"cache_bytes": 8 * 4 * cache_bytes_per_token(pair(NAME).ours.spec, 4), "prefix_cache": False}
    engine = Engine(pair(NAME).ours, None, replace(SMALL, **change))
    found = engine.generate(greedy(NAME))
    assert [found[str(i)][0].tokens for i in range(len(LENGTHS))] == expected(NAME)
    assert engine.scheduler.preemptions > 0 or "cache_bytes" not in change


def test_adapters_of_folded_weights_are_refused() -> None:
    adapter: Any = SimpleNamespace(changes={"layers.0.attention.kv_b": None}, bytes=0)
    with pytest.raises(UserError, match="adapter 'mine' changes kv_b_proj, which latent attention is served without"):
        Engine(pair(NAME).ours, None, SMALL, adapters={"mine": adapter})
