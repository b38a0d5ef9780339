"""Random requests in random company: arrivals, cancels, pieces of prompts, prefixes, preemptions."""

import random
from dataclasses import dataclass, replace

from tightfit.memory.formulas.serving import cache_bytes_per_token
from tightfit.models.decoder import Decoder
from tightfit.serve.config import EngineConfig
from tightfit.serve.engine import Engine
from tightfit.serve.requests.request import Answer, Request
from tightfit.serve.requests.sampling import Sampling

BASE = EngineConfig(max_sequences=8, step_tokens=64, block_size=4, cache_bytes=2**22, batch_invariant=True)
KINDS = (
    Sampling(temperature=0),
    Sampling(temperature=1.3, seed=1),
    Sampling(temperature=0.9, seed=2, top_p=0.8),
    Sampling(temperature=1.5, seed=3, top_k=9, min_p=0.02),
    Sampling(temperature=1.0, seed=4, typical_p=0.7),
    Sampling(temperature=1.1, seed=5, presence_penalty=0.5, repetition_penalty=1.2),
    Sampling(temperature=0, logit_bias={3: 1.5}),
)


@dataclass
class Seen:
    """What happened to the requests of some trials."""

    preemptions: int = 0
    restored: int = 0
    cached: int = 0
    compared: int = 0


def random_requests(chance: random.Random, model: Decoder, count: int, longest: int) -> list[Request]:
    """Prompts that often begin alike; most answers come with what the model thought of them."""
    top = model.spec.vocab_size
    stems = [[chance.randrange(top) for _ in range(longest // 2)] for _ in range(2)]
    made = []
    for index in range(count):
        stem = chance.choice(stems)[: chance.randrange(longest // 2)] if chance.random() < 0.6 else []
        prompt = stem + [chance.randrange(top) for _ in range(chance.randrange(1, longest // 2))]
        sampling = replace(
            KINDS[index % len(KINDS)],
            max_tokens=chance.randrange(2, 16),
            logprobs=chance.choice((None, 0, 3, 3)),
        )
        made.append(Request(id=str(index), prompt=prompt, sampling=sampling, priority=chance.randrange(3)))
    return made


def random_config(chance: random.Random, model: Decoder, base: EngineConfig, longest: int) -> EngineConfig:
    """Room for the longest answer and little more, so that others give way."""
    row_bytes = cache_bytes_per_token(model.spec, model.embed.weight.element_size(), base.cache_format)
    blocks = -(-(longest + 16) // base.block_size) + chance.randrange(12)
    sequences = chance.choice((2, 3, 5, 8))
    return replace(
        base,
        max_sequences=sequences,
        step_tokens=max(sequences, chance.choice((3, 7, 16, 40, 64))),
        cache_bytes=blocks * base.block_size * row_bytes,
        prefix_cache=chance.random() < 0.7,
        host_bytes=chance.choice((0, 2**24)),
    )


def answered_in_company(engine: Engine, requests: list[Request], chance: random.Random) -> dict[str, Answer]:
    """Their answers, submitted one after the other while others run; some are cancelled, and have none."""
    waiting, answers = list(requests), {request.id: Answer() for request in requests}
    chance.shuffle(waiting)
    while waiting or engine.has_work:
        for _ in range(chance.choice((0, 0, 1, 3))):
            if waiting:
                engine.submit(waiting.pop())
        if chance.random() < 0.05 and answers:
            gone = chance.choice(sorted(answers))
            if all(request.id != gone for request in waiting) and answers[gone].finish is None:
                engine.cancel(gone)
                del answers[gone]
        for output in engine.step():
            if output.request in answers:
                answers[output.request].add(output)
    assert engine.pool.free == engine.pool.size
    return answers


def assert_company_changes_nothing(model: Decoder, base: EngineConfig, *, seed: int, count: int, longest: int) -> Seen:
    """Tokens and their chances are those of the same request alone in an engine with room, bit by bit."""
    chance = random.Random(seed)
    requests = random_requests(chance, model, count, longest)
    engine = Engine(model, None, random_config(chance, model, base, longest))
    found = answered_in_company(engine, requests, chance)
    alone = Engine(model, None, replace(base, prefix_cache=False))
    for request in requests:
        if request.id in found:
            wanted = alone.generate([request])[request.id][0]
            assert found[request.id].tokens == wanted.tokens, (seed, request)
            assert found[request.id].logprobs == wanted.logprobs, (seed, request)
    restored = engine.host.restored_count if engine.host is not None else 0
    return Seen(engine.scheduler.preemptions, restored, engine.counts.cached_tokens, len(found))
