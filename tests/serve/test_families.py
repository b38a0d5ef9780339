"""Greedy answers of the engine are what transformers generates, for every family, alone and in any company."""

import warnings
from functools import cache

import pytest
import torch
import transformers
from packaging.version import Version

from tests.covering import sampled, thorough
from tests.models.huggingface.reference import CASES, pair
from tightfit.serve.config import EngineConfig
from tightfit.serve.engine import Engine
from tightfit.serve.requests.request import Request
from tightfit.serve.requests.sampling import Sampling

SKIPPED = {"llama-dynamic-beyond"}  # whose prompts would be longer than its positions
WRITTEN_OTHERWISE = {
    "llama-biases",
    "llama-linear",
    "llama-new-style",
    "llama-no-groups",
    "llama-yarn-constants",
    "llama-yarn-mscale",
    "llama-yarn-temperature",
    "gemma2-uncapped",
    "gemma3-new-style",
    "gemma3-scaled",
    "gpt2-untied",
    "gpt_oss-plain-rope",
    "mistral-unwindowed",
    "olmoe-normed",
    "qwen2_moe-normed",
}
"""Of a family with others, and different in what the decoder computes alike with a cache and without: numbers of rope,
biases, norms of routers, ties. Its logits are compared in models/huggingface/test_parity.py."""
LONGROPE = "phi3-longrope-long"
RECOMPUTING = Version("5.22")
"""Of transformers, that generates past the trained length with the keys of all tokens made anew, as the engine does."""
LENGTHS = (3, 17, 9, 20)
NEW_TOKENS = 10
SMALL = EngineConfig(max_sequences=4, step_tokens=11, block_size=4, cache_bytes=2**20)


@cache
def prompts(name: str) -> list[list[int]]:
    rows = pair(name).tokens.flatten().tolist()
    return [rows[at : at + length] for at, length in enumerate(LENGTHS)]


@cache
def expected(name: str) -> list[list[int]]:
    """What transformers says to each prompt, one at a time."""
    if name == LONGROPE and Version(transformers.__version__) < RECOMPUTING:
        pytest.skip(f"transformers {transformers.__version__} keeps keys rotated for the trained length")
    theirs = pair(name).theirs
    made = []
    for prompt in prompts(name):
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ids = torch.tensor([prompt])
            settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
            out = theirs.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        made.append(out[0, len(prompt) :].tolist())
    return made


def greedy(name: str) -> list[Request]:
    sampling = Sampling(max_tokens=NEW_TOKENS, temperature=0)
    return [Request(id=str(i), prompt=prompt, sampling=sampling) for i, prompt in enumerate(prompts(name))]


@sampled(5)
@pytest.mark.parametrize(
    "name", [thorough(name) if name in WRITTEN_OTHERWISE else name for name in CASES if name not in SKIPPED]
)
def test_answers_are_what_transformers_generates(name: str) -> None:
    engine = Engine(pair(name).ours, None, SMALL)
    found = engine.generate(greedy(name))
    assert [found[str(i)][0].tokens for i in range(len(LENGTHS))] == expected(name)
    assert engine.pool.free == engine.pool.size


@sampled(5)
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "qwen3_moe", LONGROPE])
def test_one_request_at_a_time_gives_the_same(name: str) -> None:
    for request, wanted in zip(greedy(name), expected(name), strict=True):
        assert Engine(pair(name).ours, None, SMALL).generate([request])[request.id][0].tokens == wanted


def test_too_small_a_cache_costs_time_and_nothing_else() -> None:
    """Eight blocks of four positions: no two of these fit together to their end."""
    spec = pair("llama").ours.spec
    config = EngineConfig(
        max_sequences=4, step_tokens=11, block_size=4, cache_bytes=8 * 4 * 2 * spec.kv_size * 4 * spec.layers
    )
    engine = Engine(pair("llama").ours, None, config)
    assert engine.pool.size == 8
    found = engine.generate(greedy("llama"))
    assert [found[str(i)][0].tokens for i in range(len(LENGTHS))] == expected("llama")
    assert engine.scheduler.preemptions > 0
    assert engine.pool.free == engine.pool.size
