"""A model that guesses with some of its own layers says the same; what gave way comes back from the host."""

from dataclasses import replace

import pytest
import torch

from tests.models.huggingface.reference import pair
from tests.serve.conftest import SHAPE
from tests.serve.test_families import LENGTHS, SMALL, expected, greedy
from tightfit.errors import UserError
from tightfit.memory.formulas.serving import CacheFormat, cache_bytes_per_token
from tightfit.models.decoder import Decoder
from tightfit.models.initialisation import init_weights
from tightfit.serve.config import EngineConfig
from tightfit.serve.engine import Engine
from tightfit.serve.requests.request import Request
from tightfit.serve.requests.sampling import Sampling
from tightfit.serve.sampling.sampler import probabilities
from tightfit.serve.speculation.skipping import kept_layers

CONFIG = EngineConfig(max_sequences=8, step_tokens=32, block_size=4, cache_bytes=2**20)


@pytest.fixture(scope="module")
def deep() -> Decoder:
    torch.manual_seed(0)
    made = Decoder(replace(SHAPE, layers=5))
    init_weights(made, gain=2.0)
    return made.eval()


def test_layers_are_left_out_evenly_between_first_and_last() -> None:
    assert kept_layers(12, 4) == [0, 1, 3, 5, 6, 8, 10, 11]
    assert kept_layers(4, 2) == [0, 3]
    assert all(len(kept_layers(30, skipped)) == 30 - skipped for skipped in range(1, 29))
    with pytest.raises(UserError, match="skip is 3, but a model of 4 layers has 2"):
        kept_layers(4, 3)


@pytest.mark.parametrize(("skipped", "async_steps"), [(1, False), (3, False), (3, True)])
def test_greedy_answers_stay_the_same(deep: Decoder, skipped: int, async_steps: bool) -> None:
    sampling = Sampling(max_tokens=20, temperature=0)
    prompts = [[5, 17, 3, 42, 8, 99], [9, 8, 7, 9], [1]]
    requests = [Request(id=str(i), prompt=prompt, sampling=sampling) for i, prompt in enumerate(prompts)]
    plain = Engine(deep, None, CONFIG).generate(requests)
    config = replace(CONFIG, speculation="skip", skipped_layers=skipped, speculated_tokens=3, async_steps=async_steps)
    engine = Engine(deep, None, config)
    assert {key: each[0].tokens for key, each in engine.generate(requests).items()} == {
        key: each[0].tokens for key, each in plain.items()
    }
    assert engine.counts.guessed > engine.counts.kept >= 0
    assert engine.pool.free == engine.pool.size


@pytest.mark.parametrize("async_steps", [False, True])
@pytest.mark.parametrize("name", ["gemma2", "qwen2_moe", "deepseek_v3"])
def test_families_guess_for_themselves(name: str, async_steps: bool) -> None:
    model = pair(name).ours
    assert model.spec.layers >= 3, "one is skipped between first and last"
    config = replace(SMALL, speculation="skip", skipped_layers=1, speculated_tokens=2, async_steps=async_steps)
    engine = Engine(model, None, config)
    found = engine.generate(greedy(name))
    assert [found[str(i)][0].tokens for i in range(len(LENGTHS))] == expected(name)


@pytest.mark.thorough
def test_the_distribution_is_the_whole_models(deep: Decoder) -> None:
    """The pair of first tokens has the probability that the model alone gives it, within five standard errors."""
    prompt, draws = [9, 8, 7, 9, 8, 7, 9, 8], 600
    sampling = Sampling(max_tokens=3, temperature=0.7, top_k=3)  # the second is guessed: there is room for one more
    config = replace(
        CONFIG, speculation="skip", skipped_layers=3, speculated_tokens=1, max_sequences=100, step_tokens=400
    )
    engine = Engine(deep, None, config)
    requests = [Request(id=str(s), prompt=prompt, sampling=replace(sampling, seed=s)) for s in range(draws)]
    made = [tuple(found[0].tokens[:2]) for found in engine.generate(requests).values()]
    assert 0 < engine.counts.kept < engine.counts.guessed
    with torch.no_grad():
        first = probabilities(deep(torch.tensor([prompt])).logits[0, -1:], [sampling])[0]
        for a in first.nonzero().flatten().tolist():
            second = probabilities(deep(torch.tensor([[*prompt, a]])).logits[0, -1:], [sampling])[0]
            for b in second.nonzero().flatten().tolist():
                chance = float(first[a] * second[b])
                assert abs(made.count((a, b)) / draws - chance) <= 5 * (chance * (1 - chance) / draws) ** 0.5


def test_the_budget_counts_the_layers_that_guess(deep: Decoder) -> None:
    config = replace(CONFIG, cache_bytes=2**18, max_sequences=32)
    plain, guessing = (
        Engine(deep, None, each) for each in (config, replace(config, speculation="skip", skipped_layers=3))
    )
    layer_bytes = CONFIG.block_size * 2 * SHAPE.kv_size * 4
    assert plain.pool.size == 2**18 // (5 * layer_bytes)
    assert guessing.pool.size == 2**18 // (7 * layer_bytes)  # five layers, and the two that are kept once more


@pytest.mark.parametrize("form", ["model", "int8"])
@pytest.mark.parametrize("async_steps", [False, True])
def test_what_gave_way_comes_back_from_the_host(form: CacheFormat, async_steps: bool) -> None:
    model = pair("llama").ours
    tiny = replace(
        SMALL,
        cache_format=form,
        cache_bytes=8 * 4 * cache_bytes_per_token(model.spec, 4, form),
        async_steps=async_steps,
    )
    computed = Engine(model, None, replace(tiny, prefix_cache=False))
    wanted = computed.generate(greedy("llama"))
    kept = Engine(model, None, replace(tiny, prefix_cache=False, host_bytes=2**20))
    found = kept.generate(greedy("llama"))
    assert {key: each[0].tokens for key, each in found.items()} == {key: each[0].tokens for key, each in wanted.items()}
    assert kept.host is not None
    assert kept.host.restored_count > 0
    assert kept.host.used_bytes == 0
    assert kept.counts.steps <= computed.counts.steps
    if form == "model":
        assert [found[str(i)][0].tokens for i in range(len(LENGTHS))] == expected("llama")


def test_a_full_host_and_cancelled_answers() -> None:
    model = pair("llama").ours
    block = 4 * cache_bytes_per_token(model.spec, 4)
    config = replace(SMALL, cache_bytes=8 * block, prefix_cache=False, host_bytes=block // 2)
    engine = Engine(model, None, config)
    assert {key: each[0].tokens for key, each in engine.generate(greedy("llama")).items()} == {
        str(i): tokens for i, tokens in enumerate(expected("llama"))
    }
    assert engine.scheduler.preemptions > 0
    assert engine.host is not None
    assert engine.host.saved_count == 0  # half a block is no room for any
    engine = Engine(model, None, replace(config, host_bytes=2**20))
    for request in greedy("llama"):
        engine.submit(request)
    while engine.host is not None and not engine.host.used_bytes:
        engine.step()
    for index in range(len(LENGTHS)):
        engine.cancel(str(index))
    assert engine.host is not None
    assert engine.host.used_bytes == 0
    assert engine.pool.free == engine.pool.size
