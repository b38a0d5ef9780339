"""Steps launched before the last one's tokens are read give the same answers; here without a GPU, uncaptured.

Our kernels run in Triton's interpreter where that is asked for.
"""

from dataclasses import replace

import pytest
import torch

from tests.covering import sampled
from tests.models.huggingface.reference import pair
from tests.serve.test_families import expected, greedy
from tightfit.models.decoder import Decoder
from tightfit.serve.config import EngineConfig
from tightfit.serve.engine import Engine
from tightfit.serve.forward.runner import Runner
from tightfit.serve.graphs.sizes import decode_sizes
from tightfit.serve.graphs.steps import Steps
from tightfit.serve.requests.request import Request
from tightfit.serve.requests.sampling import Sampling

CONFIG = EngineConfig(max_sequences=4, step_tokens=11, block_size=4, cache_bytes=2**20, async_steps=True)


@sampled(2)
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen2", "qwen3_moe", "gpt2"])
def test_greedy_answers_are_the_same(name: str) -> None:
    engine = Engine(pair(name).ours, None, CONFIG)
    found = engine.generate(greedy(name))
    assert [found[str(i)][0].tokens for i in range(4)] == expected(name)
    assert engine.pool.free == engine.pool.size
    assert not engine.has_work


def test_what_is_captured_writes_to_no_block_of_a_sequence() -> None:
    """Buffers are filled before the first request: steps are captured with them."""
    runner = Engine(pair("llama").ours, None, CONFIG).runner
    assert isinstance(runner, Runner)
    steps, cache = Steps(runner, repeats=True, guesses=2), runner.cache
    assert steps.graphs is not None
    assert steps.checks is not None
    before = cache.whole.numbers.clone()
    with torch.inference_mode():
        for part in steps.parts:
            part.capture()
        states = [steps.checks._check(size) for size in steps.checks.sizes]
        states += [steps.graphs._decode(kind) for kind in steps.graphs._kinds]
        states += [steps.graphs._read_prompt(size) for size in steps.graphs._prompt_sizes]
    assert all(bool(each.isfinite().all()) for each in states)
    assert torch.equal(before[:, :, : cache.padding_block], cache.whole.numbers[:, :, : cache.padding_block])


def test_our_kernels_give_the_same() -> None:
    name = "qwen3"  # which has norms of queries and keys
    engine = Engine(pair(name).ours, None, CONFIG)
    assert engine.runner.program is not None
    engine.runner.program.on_gpu = True
    requests = [replace(each, sampling=replace(each.sampling, max_tokens=3)) for each in greedy(name)[:2]]
    found = engine.generate(requests)
    assert [found[str(i)][0].tokens for i in range(2)] == [tokens[:3] for tokens in expected(name)[:2]]


def test_small_caches_stops_seeds_and_the_hosts_turns_do_not_matter(model: Decoder) -> None:
    """Preemptions, stop ids, several answers and penalties between steps launched ahead, against steps one by one."""
    base = Sampling(max_tokens=14, temperature=1.3, seed=5)
    kinds = [
        base,
        replace(base, top_k=4),
        replace(base, top_p=0.7, min_p=0.1),
        replace(base, temperature=0),
        replace(base, presence_penalty=0.5),
        replace(base, stop_ids=frozenset(range(0, 300, 7))),
    ]
    requests = [
        Request(
            id=f"{i}", prompt=[7 + i, 3, 9, 9, i + 1] * (1 + i % 4), sampling=kinds[i % len(kinds)], count=1 + i % 3
        )
        for i in range(18)
    ]
    row_bytes = 2 * model.spec.kv_size * 4 * model.spec.layers
    config = replace(CONFIG, cache_bytes=14 * 4 * row_bytes)
    made = []
    for async_steps in (False, True):
        engine = Engine(model, None, replace(config, async_steps=async_steps))
        made.append(engine.generate(requests))
        assert engine.scheduler.preemptions > 0
        assert engine.pool.free == engine.pool.size
        assert engine._host_bound == 0
    plain, ahead = ({k: [(a.tokens, a.finish) for a in v] for k, v in each.items()} for each in made)
    assert plain == ahead


def test_cancelling_what_is_under_way(model: Decoder) -> None:
    engine = Engine(model, None, CONFIG)
    for index in range(3):
        engine.submit(Request(id=str(index), prompt=[1, 2, 3 + index], sampling=Sampling(max_tokens=9, seed=0)))
    engine.step()
    engine.step()
    engine.cancel("1")
    seen = set()
    while engine.has_work:
        seen |= {output.request for output in engine.step()}
    assert seen == {"0", "2"}
    assert engine.pool.free == engine.pool.size


def test_sizes_reach_every_number_of_sequences() -> None:
    for most in (1, 3, 16, 17, 64, 100, 256):
        sizes = decode_sizes(most)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == most
    assert decode_sizes(64) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]


def test_padding_goes_where_nobody_reads(model: Decoder) -> None:
    engine = Engine(model, None, replace(CONFIG, max_sequences=8))
    engine.generate([Request(id=str(i), prompt=[1, 2, i], sampling=Sampling(max_tokens=4, seed=0)) for i in range(3)])
    storage = engine.runner.cache.whole.numbers
    assert storage.shape[2] == engine.pool.size + 1
    assert torch.isfinite(storage).all()
