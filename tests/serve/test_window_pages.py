"""Layers with a window keep pages for what is still seen: every token finds there what was written for it."""

import itertools
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
from tightfit.serve.schedule import window_pages
from tightfit.serve.schedule.block_pool import BlockPool
from tightfit.serve.schedule.scheduler import Chunk, Limits, Scheduler
from tightfit.serve.schedule.sequence import Sequence
from tightfit.serve.schedule.window_pages import LEAST_PIECE, WindowPages

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
    ("window", "blocks", "at_once", "lookahead", "host_bytes"),
    [
        (5, 60, LIMITS.sequences, 0, 0),  # fewer pages than blocks
        (9, 24, LIMITS.sequences, 3, 600),  # as many pages as blocks
        (1, 60, LIMITS.sequences, 0, 2**20),
        (16, 60, 2, 3, 2**20),  # pages for two of the sequences that there are slots for
        (7, 60, 2, 9, 0),  # with more guesses than a block has positions
        thorough(9, 60, 2, 0, 0),
        thorough(5, 60, LIMITS.sequences, 3, 2**20),
        thorough(16, 60, LIMITS.sequences, 0, 600),
        thorough(30, 24, LIMITS.sequences, 0, 0),
    ],
)
def test_every_token_sees_what_was_written_through_arrivals_cancels_and_preemptions(
    window: int, blocks: int, at_once: int, lookahead: int, host_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window_pages, "LEAST_PIECE", BLOCK)
    rng = random.Random(window)
    pool, limits = BlockPool(blocks, BLOCK), replace(LIMITS, lookahead=lookahead)
    step_tokens = limits.step_tokens if at_once == limits.sequences else BLOCK
    pages = min(blocks, pages_for(window, at_once, step_tokens, BLOCK))
    windows = WindowPages(pages=pages, blocks=blocks, block_size=BLOCK, window=window, step_tokens=limits.step_tokens)
    spec = replace(SHAPE, layers=2, kv_heads=1, head_dim=2, window=window, window_layers=(1,))
    cache = PagedCache(spec, blocks, BLOCK, torch.device("cpu"), torch.float64, "model", pages=pages)
    layer, host = Layer(windows, cache), HostStore(cache, host_bytes, windows) if host_bytes else None
    scheduler, arrivals, cached = Scheduler(pool, limits, host, windows), 0, 0
    alive: list[Sequence] = []
    most = 0
    while arrivals < 2_000 or scheduler.has_work:
        if arrivals < 2_000:
            arrivals = arrive(scheduler, alive, rng, lambda: int(rng.random() < 0.1), arrivals)
        cancel_one(scheduler, alive, rng, share=0.2)
        chunks = scheduler.schedule()
        most = max(most, len(scheduler.running))
        layer.run(chunks)
        scheduler.mark_launched(chunks)
        collect(scheduler, chunks, rng)
        cached += sum(chunk.sequence.cached for chunk in chunks if chunk.sequence.answered == 1)
        alive = [each for each in alive if each.state != "finished"]
    assert scheduler.preemptions > 20
    assert most == LIMITS.sequences or at_once <= most
    assert cached > 0
    assert not windows._held
    assert not any(windows._readers)
    assert len(windows._idle) == pages
    if host is not None:
        assert host.restored_count > 10


def test_an_old_prefix_is_found_only_while_its_last_window_is_there() -> None:
    """Its blocks are all there; of their pages only the last, which the next token sees, are needed."""
    windows = WindowPages(pages=5, blocks=10, block_size=BLOCK, window=6, step_tokens=BLOCK)
    own = sequence([0] * 40)
    own.blocks = list(range(10))
    windows.promise(own)
    for start in range(0, 40, BLOCK):
        windows.move(own, start, start + BLOCK)
    assert [int(page) < 5 for page in windows.of_block[:10]] == [False] * 5 + [True] * 5
    assert list(windows.usable(own.blocks)) == own.blocks
    assert list(windows.usable(own.blocks[:7])) == own.blocks[:7]
    assert list(windows.usable(own.blocks[:6])) == []
    windows.drop(own)
    windows.forget([9])
    assert list(windows.usable(own.blocks)) == own.blocks[:9]


@pytest.fixture(scope="module")
def model() -> Decoder:
    torch.manual_seed(0)
    made = Decoder(replace(SHAPE, layers=4, window=8, window_layers=(0, 2, 3)))
    init_weights(made, gain=2.0)
    return made.eval()


CONFIG = EngineConfig(max_sequences=6, step_tokens=32, max_length=128, block_size=8)


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
    lengths = (60, 50, 64, 57, 9, 61, 58, 62)
    prompts = [start[: rng.choice((20, 40))] + [rng.randrange(300) for _ in range(n)] for n in lengths]
    sampling = Sampling(max_tokens=24, temperature=0)
    requests = [Request(id=str(n), prompt=each, sampling=sampling, priority=-n % 3) for n, each in enumerate(prompts)]
    layer_bytes = CONFIG.block_size * layer_token_bytes(SHAPE, 4, changes.get("cache_format", "model"))
    skipping_bytes = 3 * layer_bytes * ("skipped_layers" in changes)
    pages = pages_for(8, CONFIG.max_sequences, CONFIG.step_tokens, CONFIG.block_size)
    few = replace(CONFIG, cache_bytes=66 * (layer_bytes + skipping_bytes) + pages * 3 * layer_bytes, **changes)
    engine = Engine(model, None, few)
    assert (engine.budget.blocks, engine.budget.pages, engine.budget.cache_bytes) == (66, pages, few.cache_bytes)
    assert pages < 66
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


@pytest.mark.parametrize(
    ("room", "expected"),
    [(4, (0, 0)), (30, (6, 6)), (100, (52, 12)), (440, (220, 55)), (1000, (780, 55)), (10**6, (4000, 55))],
)
def test_memory_is_shared_between_blocks_and_pages(room: int, expected: tuple[int, int]) -> None:
    """Blocks of 1 byte and pages of 4: a page for every block, half of the room for either, or the pages of all windows
    and blocks for the rest."""
    sizes = {"useful": 4000, "most_pages": 55, "fewest": 10}
    assert budget._blocks_and_pages(room, 1, 4, **sizes) == expected


@pytest.mark.parametrize(("room", "expected"), [(30, (7, 7)), (100, (4000, 25)), (10**6, (4000, 55))])
def test_layers_that_all_have_windows_need_pages_alone(room: int, expected: tuple[int, int]) -> None:
    sizes = {"useful": 4000, "most_pages": 55, "fewest": 10}
    assert budget._blocks_and_pages(room, 0, 4, **sizes) == expected


def test_no_division_of_memory_has_room_for_more_than_twice_as_many_requests() -> None:
    """Whatever their length, where neither the number of sequences nor a request's length ends it first."""
    window, step, block, most = 1024, 2048, 16, 64
    sizes = {"useful": most * 2048, "most_pages": pages_for(window, most, step), "fewest": 0}
    spare = pages_for(window, 0, LEAST_PIECE)
    for room, per_block, per_page in itertools.product((2 * 10**5, 10**6), (1, 3, 8), (5, 8, 40)):
        blocks, pages = budget._blocks_and_pages(room, per_block, per_page, **sizes)
        assert blocks * per_block + pages * per_page <= room
        for length in (256, 1024, 4096, 32_768):
            each, held = -(-length // block), min(pages_for(window, 1, 0), -(-length // block))
            found = blocks // each if pages == blocks else min(blocks // each, (pages - spare) // held)
            best = max(
                min((room - some * per_page) // per_block // each, (some - spare) // held)
                for some in range(spare, room // per_page)
            )
            assert min(found, most) >= min(best, most) // 2 - 1


def test_the_page_says_what_windows_save() -> None:
    spec, length = preset("gemma-3-27b"), 32_768
    kept, whole = cache_bytes(spec, 1, length), cache_bytes_per_token(spec) * length
    told = f"takes {kept / 2**30:.1f} GiB of cache instead of {whole / 2**30:.1f} GiB"
    assert told in " ".join((Path(__file__).parents[2] / "docs/serving.md").read_text().split())
