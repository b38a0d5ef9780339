"""Everything a request may ask for, mixed in one batch with adapters, guesses, prefixes, preemptions and hang-ups.

Greedy answers, so that whoever guesses and whoever shares a batch gets what the same request gets alone.
"""

import random
from dataclasses import replace
from typing import Any

import pytest

from tests.covering import sampled
from tests.serve.company import answered_in_company
from tests.serve.test_adapters import ATTENTION, write_adapter
from tightfit.memory.formulas.serving import cache_bytes_per_token
from tightfit.models.decoder import Decoder
from tightfit.models.huggingface.adapter import Adapter, load_adapter
from tightfit.models.text.tokenizer import Tokenizer
from tightfit.serve.config import EngineConfig
from tightfit.serve.engine import Engine
from tightfit.serve.requests.grammar import Grammar
from tightfit.serve.requests.request import Request
from tightfit.serve.requests.sampling import Sampling

BASE = EngineConfig(max_sequences=6, step_tokens=24, block_size=4, cache_bytes=2**22)
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.7, "frequency_penalty": 0.2},
    {"logit_bias": {40: 6.0, 41: -50.0}},
    {"grammar": Grammar("regex", "[a-f]{3,9}x+")},
    {"grammar": Grammar("json_schema", '{"enum": ["one", "two", 3]}'), "repetition_penalty": 1.2},
    {"stop": ("e", "the", "\n")},
    {"grammar": Grammar("regex", "(ab)*c"), "stop": ("bab",)},
)


@pytest.fixture(scope="module")
def adapter(model: Decoder, tmp_path_factory: pytest.TempPathFactory) -> Adapter:
    return load_adapter(write_adapter(tmp_path_factory.mktemp("adapters") / "one", model, ATTENTION, seed=3), model)


def requests_of(chance: random.Random, model: Decoder, tokenizer: Tokenizer, names: list[str | None]) -> list[Request]:
    stem = [chance.randrange(model.spec.vocab_size) for _ in range(20)]
    made = []
    for index in range(24):
        again = [chance.randrange(model.spec.vocab_size) for _ in range(3)]  # what a lookup finds
        prompt = stem[: chance.randrange(20)] + again * 2 + [chance.randrange(model.spec.vocab_size)]
        sampling = Sampling(
            temperature=0,
            max_tokens=chance.randrange(2, 20),
            logprobs=chance.choice((None, 0, 2)),
            stop_ids=tokenizer.stop_ids,
            **KINDS[index % len(KINDS)],
        )
        made.append(
            Request(
                id=str(index),
                prompt=prompt,
                sampling=sampling,
                priority=chance.randrange(3),
                adapter=chance.choice(names),
            )
        )
    return made


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlapped": {"async_steps": True},
    "host": {"host_bytes": 2**24},
    "lookup": {"speculation": "lookup"},
    "draft": {"speculation": "draft"},
    "draft, at fixed addresses": {"speculation": "draft", "async_steps": True},
    "adapters": {},
    "adapters, overlapped": {"async_steps": True},
    "adapters, lookup": {"speculation": "lookup"},
    "adapters, draft": {"speculation": "draft"},
    "adapters, draft, at fixed addresses": {"speculation": "draft", "async_steps": True},
}


@sampled(2)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_mixture_is_its_parts(
    variant: str, model: Decoder, smaller: Decoder, tokenizer: Tokenizer, adapter: Adapter
) -> None:
    chance = random.Random(list(VARIANTS).index(variant))
    adapters = {"one": adapter} if "adapters" in variant else {}
    requests = requests_of(chance, model, tokenizer, [None, *adapters])
    row_bytes = cache_bytes_per_token(model.spec, 4, "model")
    tight = replace(BASE, cache_bytes=20 * 4 * row_bytes, **VARIANTS[variant])
    engine = Engine(model, tokenizer, tight, draft=smaller if "draft" in variant else None, adapters=adapters)
    found = answered_in_company(engine, requests, chance)
    assert engine.scheduler.preemptions > 0
    assert len(found) > 12
    alone = Engine(model, tokenizer, replace(BASE, prefix_cache=False), adapters=adapters)
    for request in (request for request in requests if request.id in found):
        wanted, had = alone.generate([request])[request.id][0], found[request.id]
        assert (had.tokens, had.text, had.finish) == (wanted.tokens, wanted.text, wanted.finish), request
        assert [each.token for each in had.logprobs] == [each.token for each in wanted.logprobs]
        for one, other in zip(had.logprobs, wanted.logprobs, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert len(one.top) == len(other.top)
