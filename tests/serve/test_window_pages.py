"""Layers with a window keep pages for what is still seen: every token finds there what was written for it."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.covering import sampled, thorough
from tests.serve.conftest import SHAPE
from tests.serve.test_scheduler import arrive, cancel_one, collect, sequence
from tightfit.memory.formulas.serving import cache_bytes, cache_bytes_per_token, layer_token_bytes, pages_for
from tightfit.models.decoder import Decoder
from tightfit.models.initialisation import init_weights
from tightfit.models.presets import preset
from tightfit.serve import budget
from tightfit.serve.cache.host_store import HostStore
from tightfit.serve.cache.paged import PagedCache
from tightfit.serve.config import EngineConfig
from tightfit.serve.engine import Engine
from tightfit.serve.requests.request import Request
from tightfit.serve.requests.sampling import Sampling
from tightfit.serve.schedule.block_pool import BlockPool
from tightfit.serve.schedule.scheduler import Chunk, Limits, Scheduler
from tightfit.serve.schedule.sequence import Sequence
from tightfit.serve.schedule.window_pages import WindowPages

BLOCK = 4
LIMITS = Limits(sequences=6, step_tokens=20)


def stamp(own: Sequence, position: int, chosen: dict[Sequence, list[int]]) -> float:
    """What a layer writes at `position`, by all tokens so far; `chosen` has also tokens that are still on their way."""
    known = own.tokens if position < len(own.tokens) else chosen[own]
    return float(hash(tuple(known[: position + 1])) % 1_000_003)


class Layer:
    """A layer with a window over the pages of `windows`: writes the stamps of a step, and reads what the step sees."""

    def __init__(self, windows: WindowPages, cache: PagedCache) -> None:
        assert cache.windowed is not None
        self.windows, self.numbers = windows, cache.windowed.numbers[0, 0, :, :, 0, 0].numpy()

    def run(self, chunks: list[Chunk]) -> None:
        own = {chunk.sequence: [*chunk.sequence.tokens, *[0] * 8] for chunk in chunks}
        places = [self._places(chunk, chunk.start, chunk.end + chunk.lookahead) for chunk in chunks]
        written = [place for each in places for place in each]
        assert len(set(written)) == len(written), "two tokens of a step are written to one place"
        assert all(page < self.windows.pages for page, _ in written), "a token is written to the page for padding"
        for chunk, where in zip(chunks, places, strict=True):
            for place, position in zip(where, range(chunk.start, chunk.end + chunk.lookahead), strict=True):
                self.numbers[place] = stamp(chunk.sequence, position, own)
        for chunk in chunks:
            first = max(0, chunk.start - self.windows.window + 1)
            for place, position in zip(self._places(chunk, first, chunk.end), range(first, chunk.end), strict=True):
                assert self.numbers[place] == stamp(chunk.sequence, position, own), (position, chunk.start, chunk.end)

    def _places(self, chunk: Chunk, first: int, end: int) -> list[tuple[int, int]]:
        pages = self.windows.of_block[np.array(chunk.sequence.blocks)]
        return [(int(pages[position // BLOCK]), position % BLOCK) for position in range(first, end)]


@pytest.mark.parametrize(
    ("window", "blocks", "lookahead", "host_bytes"),
    [
        (5, 60, 0, 0),  # fewer pages than blocks
        (9, 24, 3, 600),  # as many pages as blocks
        (1, 60, 0, 2**20),
        thorough(5, 60, 3, 2**20),
        thorough(16, 60, 0, 600),
        thorough(30, 24, 0, 0),
    ],
)
def test_every_token_sees_what_was_written_through_arrivals_cancels_and_preemptions(
    window: int, blocks: int, lookahead: int, host_bytes: int
) -> None:
    rng = random.Random(window)
    pool, limits = BlockPool(blocks, BLOCK), replace(LIMITS, lookahead=lookahead)
    pages = min(blocks, pages_for(window, limits.sequences, limits.step_tokens, BLOCK))
    windows = WindowPages(pages=pages, blocks=blocks, block_size=BLOCK, window=window)
    spec = replace(SHAPE, layers=2, kv_heads=1, head_dim=2, window=window, window_layers=(1,))
    cache = PagedCache(spec, blocks, BLOCK, torch.device("cpu"), torch.float64, "model", windows=windows)
    layer, host = Layer(windows, cache), HostStore(cache, host_bytes) if host_bytes else None
    scheduler, arrivals, cached = Scheduler(pool, limits, host, windows), 0, 0
    alive: list[Sequence] = []
    while arrivals < 2_000 or scheduler.has_work:
        if arrivals < 2_000:
            arrivals = arrive(scheduler, alive, rng, lambda: int(rng.random() < 0.1), arrivals)
        cancel_one(scheduler, alive, rng, share=0.2)
        chunks = scheduler.schedule()
        layer.run(chunks)
        scheduler.mark_launched(chunks)
        collect(scheduler, chunks, rng)
        cached += sum(chunk.sequence.cached for chunk in chunks if chunk.sequence.answered == 1)
        alive = [each for each in alive if each.state != "finished"]
    assert scheduler.preemptions > 20
    assert cached > 0
    assert not windows._held
    assert not any(windows._readers)
    assert len(windows._idle) == pages
    if host is not None:
        assert host.restored_count > 10


def test_an_old_prefix_is_found_only_while_its_last_window_is_there() -> None:
    """Its blocks are all there; of their pages only the last, which the next token sees, are needed."""
    windows = WindowPages(pages=3, blocks=8, block_size=BLOCK, window=6)
    own = sequence([0] * 32)
    own.blocks = list(range(8))
    for start in range(0, 32, BLOCK):
        windows.move(own, start, start + BLOCK)
    assert [int(page) < 3 for page in windows.of_block[:8]] == [False] * 5 + [True] * 3
    assert list(windows.usable(own.blocks)) == own.blocks
    assert list(windows.usable(own.blocks[:7])) == own.blocks[:7]
    assert list(windows.usable(own.blocks[:6])) == []
    windows.drop(own)
    windows.forget([7])
    assert list(windows.usable(own.blocks)) == own.blocks[:7]


@pytest.fixture(scope="module")
def model() -> Decoder:
    torch.manual_seed(0)
    made = Decoder(replace(SHAPE, layers=4, window=24, window_layers=(0, 2, 3)))
    init_weights(made, gain=2.0)
    return made.eval()


CONFIG = EngineConfig(max_sequences=3, step_tokens=32, max_length=128, block_size=8)


@sampled(2)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"cache_format": "int8"},
        {"async_steps": True, "host_bytes": 2**20},
        {"async_steps": True, "speculation": "lookup"},
        {"speculation": "skip", "skipped_layers": 1, "prefix_cache": False},
        {"batch_invariant": True},
    ],
    ids=str,
)
def test_answers_are_those_of_layers_that_keep_all_positions(
    model: Decoder, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of requests with partly equal prompts, which give way to each other."""
    rng = random.Random(0)
    start = [rng.randrange(300) for _ in range(40)]
    prompts = [start[: rng.choice((0, 20, 40))] + [rng.randrange(300) for _ in range(n)] for n in (3, 30, 60, 7, 50, 9)]
    sampling = Sampling(max_tokens=20, temperature=0)
    requests = [Request(id=str(n), prompt=each, sampling=sampling, priority=-n % 3) for n, each in enumerate(prompts)]
    layer_bytes = CONFIG.block_size * layer_token_bytes(SHAPE, 4, changes.get("cache_format", "model"))
    skipping_bytes = 3 * layer_bytes * ("skipped_layers" in changes)
    pages = pages_for(24, CONFIG.max_sequences, CONFIG.step_tokens, CONFIG.block_size)
    few = replace(CONFIG, cache_bytes=22 * (layer_bytes + skipping_bytes) + pages * 3 * layer_bytes, **changes)
    engine = Engine(model, None, few)
    assert (engine.budget.blocks, engine.budget.pages, engine.budget.cache_bytes) == (22, pages, few.cache_bytes)
    assert pages < 22
    made = engine.generate(requests)
    assert engine.scheduler.preemptions > 0
    assert engine.pool.free == engine.pool.size
    monkeypatch.setattr(budget, "split_window", lambda spec, length: None)
    whole = Engine(model, None, replace(few, cache_bytes=None))
    assert whole.budget.pages == 0
    assert {name: [each.tokens for each in found] for name, found in made.items()} == {
        name: [each.tokens for each in found] for name, found in whole.generate(requests).items()
    }


def test_a_prefix_whose_pages_went_to_others_is_found_again_once_it_is_computed_again(model: Decoder) -> None:
    """Its blocks are still there, and of no use without their pages."""
    rng = random.Random(0)
    start, other = ([rng.randrange(300) for _ in range(length)] for length in (48, 100))
    sampling, engine = Sampling(max_tokens=4, temperature=0), Engine(model, None, CONFIG)
    assert engine.budget.pages < engine.budget.blocks
    cached = []
    for number, begun in enumerate((start, other, other[50:], start, start)):
        prompt = [*begun, *(rng.randrange(300) for _ in range(10))]
        answer = engine.generate([Request(id=str(number), prompt=prompt, sampling=sampling)])[str(number)][0]
        cached.append(answer.cached)
    assert cached == [0, 0, 0, 0, 48]


@pytest.mark.parametrize(("room", "expected"), [(100, (20, 20)), (1000, (780, 55)), (10**6, (4000, 55)), (4, (0, 0))])
def test_memory_is_shared_between_blocks_and_pages(room: int, expected: tuple[int, int]) -> None:
    """Blocks of 1 byte and pages of 4: both of as many blocks, or the pages of all windows and blocks for the rest."""
    sizes = {"useful": 4000, "most_pages": 55}
    assert budget._blocks_and_pages(room, 1, 4, **sizes) == expected
    assert budget._blocks_and_pages(room, 5, 0, **sizes) == (min(4000, room // 5), 0)
    assert budget._blocks_and_pages(10**6, 0, 4, **sizes) == (4000, 55), "all layers have windows"


def test_the_page_says_what_windows_save() -> None:
    spec, length = preset("gemma-3-27b"), 32_768
    kept, whole = cache_bytes(spec, 1, length), cache_bytes_per_token(spec) * length
    told = f"takes {kept / 2**30:.1f} GiB of cache instead of {whole / 2**30:.1f} GiB"
    assert told in " ".join((Path(__file__).parents[2] / "docs/serving.md").read_text().split())
