"""The scheduler and its pool without a model: no block is ever lost, held twice by mistake, or shared while written."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.covering import sampled, thorough
from tests.serve.conftest import SHAPE
from tightfit.serve.cache.host_store import HostStore
from tightfit.serve.cache.paged import PagedCache
from tightfit.serve.requests.sampling import Sampling
from tightfit.serve.schedule.block_pool import ROOT, BlockPool, block_digest
from tightfit.serve.schedule.scheduler import Chunk, Limits, Scheduler
from tightfit.serve.schedule.sequence import Sequence


def sequence(prompt: list[int], max_tokens: int = 8, priority: int = 0, arrival: int = 0) -> Sequence:
    return Sequence(prompt, Sampling(max_tokens=max_tokens, seed=0), priority=priority, arrival=arrival)


def collect(scheduler: Scheduler, chunks: list[Chunk], rng: random.Random) -> None:
    """Tokens of a step whose chunks had been launched."""
    for chunk, chose in [(chunk, chunk.sequence.pending > 0) for chunk in chunks]:
        own = chunk.sequence
        if not chose:
            scheduler.cache_full_blocks(own)
            continue
        own.pending = 0
        own.append(rng.randrange(3))
        if own.state != "finished" and (own.generated >= own.sampling.max_tokens or rng.random() < 0.03):
            scheduler.remove(own, "stop")
        scheduler.cache_full_blocks(own)


def arrive(
    scheduler: Scheduler, alive: list[Sequence], rng: random.Random, token: Callable[[], int], arrived: int
) -> int:
    """Let some sequences arrive, of prompts drawn by `token`; how many had `arrived` then."""
    for _ in range(rng.choice((0, 0, 1, 1, 2))):
        prompt = [token() for _ in range(rng.choice((1, 3, 9, 20, 40)))]
        alive.append(sequence(prompt, rng.randint(1, 30), rng.randrange(3), arrived))
        scheduler.add(alive[-1])
        arrived += 1
    return arrived


def cancel_one(scheduler: Scheduler, alive: list[Sequence], rng: random.Random, share: float) -> None:
    """Cancel one of `alive` in that share of calls; in most where many wait."""
    if alive and rng.random() < (share if scheduler.waiting < 30 else 0.9):
        scheduler.remove(alive.pop(rng.randrange(len(alive))), "cancelled")


def check(scheduler: Scheduler) -> None:
    """Held blocks are those of running sequences, and whatever is still to be written has one holder."""
    pool = scheduler.pool
    held = [block for each in scheduler.running for block in each.blocks]
    assert pool.used == len(set(held))
    for block in set(held):
        assert pool._holders[block] == held.count(block)
    for each in scheduler.running:
        assert len(each.blocks) >= pool.blocks_for(each.stored)
        for block in each.blocks[each.stored // pool.block_size :]:
            assert held.count(block) == 1
    slots = [each.slot for each in scheduler.running]
    assert len(set(slots)) == len(slots)


def cache_of(pool: BlockPool) -> PagedCache:
    """A number a position, in the blocks of `pool`."""
    spec = replace(SHAPE, layers=1, kv_heads=1, head_dim=2)
    return PagedCache(spec, pool.size, pool.block_size, torch.device("cpu"), torch.float32, "model")


@sampled(2)
@pytest.mark.parametrize(
    ("lookahead", "depth", "host_bytes"),
    [(0, 1, 0), (3, 0, 0), (0, 0, 2**20), (0, 1, 600), thorough(0, 0, 0), thorough(3, 0, 600)],
)
def test_ten_thousand_random_arrivals_cancels_and_preemptions_leave_the_pool_full(
    lookahead: int, depth: int, host_bytes: int
) -> None:
    """Also where what gives way is copied to the host: all of it, or as little as there is room for."""
    rng = random.Random(lookahead * 2 + depth)
    pool = BlockPool(size=24, block_size=4)
    limits = Limits(sequences=6, step_tokens=20, lookahead=lookahead)
    host = HostStore(cache_of(pool), host_bytes) if host_bytes else None
    scheduler, arrivals, flying = Scheduler(pool, limits, host), 0, []
    alive: list[Sequence] = []
    while arrivals < 10_000 or scheduler.has_work:
        if arrivals < 10_000:
            arrivals = arrive(scheduler, alive, rng, lambda: rng.randrange(2), arrivals)
        cancel_one(scheduler, alive, rng, share=0.3)
        chunks = scheduler.schedule()
        assert sum(chunk.count + chunk.lookahead for chunk in chunks) <= limits.step_tokens
        assert len({id(chunk.sequence) for chunk in chunks}) == len(chunks)
        scheduler.mark_launched(chunks)
        flying.append(chunks)
        while len(flying) > (depth if chunks else 0):
            collect(scheduler, flying.pop(0), rng)
        if arrivals % 16 == 0:
            check(scheduler)
            assert host is None or host.used_bytes <= host_bytes
        alive = [each for each in alive if each.state != "finished"]
    assert arrivals >= 10_000
    assert scheduler.preemptions > 100
    assert pool.free == pool.size
    assert all(count == 0 for count in pool._holders)
    assert len(scheduler._slots) == limits.sequences
    if host is not None:
        assert host.restored_count > 50
        assert host.saved_count >= host.restored_count
        assert host.used_bytes == 0


def run_alone(scheduler: Scheduler, steps: int) -> list[list[Chunk]]:
    made = []
    for _ in range(steps):
        chunks = scheduler.schedule()
        scheduler.mark_launched(chunks)
        for chunk in chunks:
            if chunk.sequence.pending:
                chunk.sequence.pending = 0
                chunk.sequence.append(1)
            scheduler.cache_full_blocks(chunk.sequence)
        made.append(chunks)
    return made


def test_long_prompts_come_in_pieces_beside_answers() -> None:
    scheduler = Scheduler(BlockPool(64, 4), Limits(sequences=4, step_tokens=10))
    first = sequence([1] * 4, arrival=0)
    scheduler.add(first)
    run_alone(scheduler, 1)
    scheduler.add(sequence([2] * 25, arrival=1))
    steps = run_alone(scheduler, 4)
    assert [[chunk.count for chunk in step] for step in steps] == [[1, 9], [1, 9], [1, 7], [1, 1]]


def test_an_equal_prefix_is_found_and_the_last_position_is_computed_anyway() -> None:
    pool = BlockPool(64, 4)
    scheduler = Scheduler(pool, Limits(sequences=4, step_tokens=100))
    scheduler.add(sequence([7] * 16))
    run_alone(scheduler, 1)
    for prompt, found in (([7] * 16, 12), ([7] * 17, 16), ([7] * 6 + [8] * 10, 4), ([8] * 16, 0)):
        other = sequence(prompt, arrival=1)
        scheduler.add(other)
        run_alone(scheduler, 1)
        assert other.cached == found
        scheduler.remove(other, "cancelled")


def test_freed_blocks_are_found_until_they_are_taken() -> None:
    pool = BlockPool(3, 2)
    one = pool.take(2)
    digest = block_digest(ROOT, [1, 2])
    pool.remember(one[0], digest)
    pool.release(one)
    assert pool.free == 3
    assert pool.find([digest]) == [one[0]]
    pool.take(3)
    assert pool.find([digest]) == []


def test_a_digest_tells_tokens_places_and_prefixes_apart() -> None:
    first = block_digest(ROOT, [1, 2])
    others = {block_digest(ROOT, [2, 1]), block_digest(first, [1, 2]), block_digest(ROOT, [1, 2, 0])}
    assert len(others | {first}) == 4


def test_a_better_priority_takes_the_place_of_a_worse() -> None:
    scheduler = Scheduler(BlockPool(8, 4), Limits(sequences=1, step_tokens=100))
    worse, better = sequence([1] * 4, priority=5, arrival=0), sequence([2] * 4, priority=0, arrival=1)
    scheduler.add(worse)
    run_alone(scheduler, 2)
    scheduler.add(better)
    run_alone(scheduler, 1)
    assert (worse.state, better.state) == ("waiting", "running")
    run_alone(scheduler, 12)
    scheduler.remove(better, "stop")
    run_alone(scheduler, 1)
    assert worse.state == "running"
    assert worse.tokens[4:6] == [1, 1]


def test_the_last_to_come_is_the_first_to_go() -> None:
    scheduler = Scheduler(BlockPool(5, 4), Limits(sequences=4, step_tokens=100, prefix_cache=False))
    old, new = sequence([1] * 8, 12, arrival=0), sequence([2] * 8, 12, arrival=1)
    scheduler.add(old)
    scheduler.add(new)
    run_alone(scheduler, 6)
    assert (old.state, new.state) == ("running", "waiting")
    assert len(new.blocks) == 0
    assert new.preemptions == 1
