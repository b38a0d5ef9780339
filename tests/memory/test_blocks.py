"""Block sizes from a history: the modelled allocator's, which splits by the same rule, recovered from addresses."""

import random
from typing import Any

import pytest

from tightfit.memory.allocator import Block, CachingAllocator
from tightfit.memory.blocks import HistoryBlocks

MIB = 2**20


def event(action: str, address: int, size: int) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size}


def test_what_is_not_worth_a_block_is_given_along() -> None:
    blocks = HistoryBlocks()
    assert blocks.grown_by(event("segment_alloc", 0, 20 * MIB)) == 0
    assert blocks.grown_by(event("alloc", 0, 3 * MIB)) == 3 * MIB
    assert blocks.grown_by(event("alloc", 3 * MIB, 16 * MIB + 100)) == 17 * MIB
    assert blocks.grown_by(event("free_completed", 0, 3 * MIB)) == -3 * MIB
    assert blocks.grown_by(event("alloc", 0, 2 * MIB + 1)) == 3 * MIB
    assert blocks.grown_by(event("free_completed", 3 * MIB, 16 * MIB + 100)) == -17 * MIB
    assert blocks.grown_by(event("segment_alloc", 64 * MIB, 2 * MIB)) == 0
    assert blocks.grown_by(event("alloc", 64 * MIB, 1000)) == 1024
    assert blocks.grown_by(event("segment_free", 64 * MIB, 2 * MIB)) == 0
    assert blocks.grown_by(event("alloc", 99 * MIB, 700)) == 1024, "a segment from before"
    assert blocks.grown_by(event("free_completed", 999 * MIB, 700)) == -1024, "a block from before"


def test_segments_from_before_are_those_of_the_snapshot() -> None:
    held = [
        {"address": 0, "size": 3 * MIB, "state": "active_allocated"},
        {"address": 3 * MIB, "size": 17 * MIB, "state": "inactive"},
    ]
    snapshot = [{"address": 0, "total_size": 20 * MIB, "is_expandable": False, "blocks": held}]
    blocks = HistoryBlocks(snapshot)
    assert blocks.grown_by(event("alloc", 3 * MIB, 16 * MIB + 100)) == 17 * MIB, "the rest is given along"
    assert blocks.grown_by(event("free_completed", 0, 2 * MIB + 1)) == -3 * MIB, "so was that of a block from before"
    assert blocks.grown_by(event("alloc", 0, 2 * MIB + 1)) == 3 * MIB


@pytest.mark.parametrize("seed", range(6))
def test_sizes_are_those_of_the_allocator_that_made_the_history(seed: int) -> None:
    draw, allocator, blocks = random.Random(seed), CachingAllocator(), HistoryBlocks()
    alive: list[tuple[Block, int]] = []
    known: set[int] = set()
    total = 0
    for _ in range(1500):
        if alive and draw.random() < 0.48:
            block, size = alive.pop(draw.randrange(len(alive)))
            total += blocks.grown_by(event("free_completed", block.address, size))
            allocator.release(block)
        else:
            size = draw.choice((1, 700, MIB // 3, 3 * MIB, 9 * MIB, 11 * MIB)) + draw.randrange(MIB)
            block = allocator.allocate(size)
            if block.segment not in known:
                known.add(block.segment)
                blocks.grown_by(event("segment_alloc", block.segment, allocator._segments[block.segment]))
            total += blocks.grown_by(event("alloc", block.address, size))
            alive.append((block, size))
        assert total == allocator.allocated_bytes
    assert len(known) > 5
