"""Keys and values in int8 and fp8: errors within their bounds, the same answers in any company, and counted bytes."""

import math
from dataclasses import replace

import pytest
import torch

from tests.covering import sampled
from tests.models.huggingface.reference import pair
from tests.serve.test_families import LENGTHS, SMALL, greedy
from tightfit.kernels.decoding.paged_attention import paged_attention, paged_attention_eager
from tightfit.memory.formulas.serving import CacheFormat, cache_bytes_per_token
from tightfit.models.decoder import Decoder
from tightfit.serve.cache.codes import as_numbers, decode, encode
from tightfit.serve.cache.paged import PagedCache
from tightfit.serve.config import EngineConfig
from tightfit.serve.engine import Engine
from tightfit.serve.requests.sampling import Sampling
from tightfit.serve.schedule.scheduler import Chunk
from tightfit.serve.schedule.sequence import Sequence
from tightfit.serve.schedule.step import make_step

FORMATS: list[CacheFormat] = ["int8", "fp8"]
ROUNDING = 1 + 2**-20
"""Of the float32 arithmetic around the codes."""


def error_bound(x: torch.Tensor, form: CacheFormat) -> torch.Tensor:
    """What serve/cache/codes.py promises for each element."""
    largest = x.abs().amax(-1, keepdim=True)
    if form == "int8":
        return (largest / 254).expand_as(x) * ROUNDING
    return torch.maximum(x.abs() / 16, largest / 448 / 1024) * ROUNDING


@pytest.mark.parametrize("form", FORMATS)
def test_no_element_is_further_off_than_promised(form: CacheFormat) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 3, 16) * torch.logspace(-6, 6, 64)[:, None, None]
    x[0], x[1, :, 1:], x[2, :, 0] = 0.0, 0.0, 3e4  # nothing at all, one element alone, one far above the others
    codes, scales = encode(x, form)
    assert (codes.element_size(), codes.shape, scales.shape) == (1, x.shape, x.shape[:-1])
    back = decode(codes, scales, form, torch.float32)
    assert (back - x).abs().le(error_bound(x, form)).all()
    assert back[0].eq(0).all()


def attended(
    form: CacheFormat, lengths: list[int], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """What the last token of each sequence gets, after all before it went into the cache in pieces."""
    spec = pair("llama").ours.spec
    cache = PagedCache(spec, 16, 4, torch.device("cpu"), torch.float32, form)
    sequences, at = [], 0
    for length in lengths:
        own = Sequence([0] * length, Sampling(max_tokens=1))
        own.blocks = list(range(at, at + -(-length // 4)))
        at += len(own.blocks)
        sequences.append(own)
    made = query.new_zeros(0)
    for begin, end in ((0, -3), (-3, -1), (-1, 0)):
        chunks = [Chunk(own, own.length + begin if begin else 0, 0) for own in sequences]
        for chunk, own in zip(chunks, sequences, strict=True):
            chunk.count = own.length + end - chunk.start
        cache.step = make_step(chunks, 4, torch.device("cpu"))
        rows = [(index, p) for index, c in enumerate(chunks) for p in range(c.start, c.end)]
        parts = [torch.stack([x[index, p] for index, p in rows], dim=1)[None] for x in (query, key, value)]
        made = cache.attend(0, *parts, scale=0.3, window=None, softcap=None)
    return made[0]


@pytest.mark.parametrize("form", FORMATS)
def test_attention_is_within_its_bound_of_the_float32_cache(form: CacheFormat) -> None:
    spec, lengths = pair("llama").ours.spec, [7, 13, 5]
    torch.manual_seed(1)
    query = torch.randn(3, 13, spec.heads, spec.head_dim)
    key, value = (torch.randn(3, 13, spec.kv_heads, spec.head_dim) for _ in range(2))
    exact, found = (attended(each, lengths, query, key, value) for each in ("model", form))
    for index, length in enumerate(lengths):
        k, v = key[index, :length], value[index, :length]
        key_error, value_error = (error_bound(x, form).max().item() for x in (k, v))
        for head in range(spec.heads):
            epsilon = 0.3 * query[index, length - 1, head].abs().sum().item() * key_error
            bound = (math.exp(2 * epsilon) - 1) * v.abs().max().item() + value_error
            off = (found[head, index] - exact[head, index]).abs().max().item()
            assert 0 < off <= bound + 1e-5


@sampled(3)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_moe"])
def test_answers_are_the_same_in_any_company(name: str, form: CacheFormat) -> None:
    """What is stored depends on the token alone: not on pieces, batches, prefixes or preemptions."""
    config = replace(SMALL, cache_format=form)
    spec = pair(name).ours.spec
    alone = [Engine(pair(name).ours, None, config).generate([each])[each.id][0].tokens for each in greedy(name)]
    tiny = replace(config, cache_bytes=8 * 4 * cache_bytes_per_token(spec, 4, form))
    for other in (config, replace(config, step_tokens=64), replace(config, async_steps=True), tiny):
        engine = Engine(pair(name).ours, None, other)
        found = engine.generate(greedy(name))
        assert [found[str(i)][0].tokens for i in range(len(LENGTHS))] == alone
        assert engine.pool.free == engine.pool.size


@pytest.mark.parametrize("form", FORMATS)
def test_the_budget_counts_codes_and_scales(model: Decoder, form: CacheFormat) -> None:
    config = EngineConfig(max_sequences=8, step_tokens=32, block_size=4, cache_bytes=2**18, cache_format=form)
    engine, plain = Engine(model, None, config), Engine(model, None, replace(config, cache_format="model"))
    spec = model.spec
    block_bytes = 4 * 2 * spec.layers * spec.kv_heads * (spec.head_dim + 4)
    assert engine.budget.cache_bytes == engine.pool.size * block_bytes <= 2**18
    assert engine.runner.cache.bytes == (engine.pool.size + 1) * block_bytes  # one more, for padding
    assert engine.pool.size == pytest.approx(plain.pool.size * 4 * spec.head_dim / (spec.head_dim + 4), rel=0.02)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_the_kernel_reads_codes(form: CacheFormat, softcap: float | None) -> None:
    torch.manual_seed(2)
    keys, values = (torch.randn(9, 4, 2, 8) for _ in range(2))
    both = [encode(x, form) for x in (keys, values)]
    key, value = (decode(*each, form, torch.float32) for each in both)
    query, lengths = torch.randn(3, 6, 8), torch.tensor([5, 12, 1], dtype=torch.int32)
    tables = torch.tensor([[1, 3, 0], [8, 2, 4], [5, 0, 0]], dtype=torch.int32)
    scales = torch.stack([each[1] for each in both])
    key_codes, value_codes = (as_numbers(each[0], form) for each in both)
    made = paged_attention(
        query, key_codes, value_codes, tables, lengths, scales=scales, scale=0.3, softcap=softcap, splits=2
    )
    wanted = paged_attention_eager(query, key, value, tables, lengths, scale=0.3, softcap=softcap)
    torch.testing.assert_close(made, wanted, rtol=1e-5, atol=1e-5)
