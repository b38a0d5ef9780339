"""The model of expandable segments: what is mapped, what is given back, and where holes stop to matter."""

import random

import pytest

from tightfit.memory.allocator import CachingAllocator, OutOfMemoryError
from tightfit.memory.growing_allocator import PAGE_BYTES, SMALL_PAGE_BYTES, GrowingAllocator, Range

MIB = 2**20


def test_pages_are_mapped_as_they_are_needed() -> None:
    allocator = GrowingAllocator()
    allocator.allocate(100)
    assert allocator.reserved_bytes == SMALL_PAGE_BYTES
    first = allocator.allocate(30 * MIB)
    assert allocator.reserved_bytes == SMALL_PAGE_BYTES + 2 * PAGE_BYTES
    allocator.allocate(10 * MIB)  # what is left of the second page
    assert allocator.reserved_bytes == SMALL_PAGE_BYTES + 2 * PAGE_BYTES
    allocator.release(first)
    allocator.allocate(31 * MIB)  # not in the hole, which is too small: at the end
    assert allocator.reserved_bytes == SMALL_PAGE_BYTES + 4 * PAGE_BYTES


def test_the_last_free_block_grows() -> None:
    """Where other segments would need one of their own for a request a little larger than what was freed."""
    for allocator, reserved in ((GrowingAllocator(), 120), (CachingAllocator(), 202)):
        allocator.release(allocator.allocate(100 * MIB))  # type: ignore[arg-type]
        allocator.allocate(102 * MIB)
        assert allocator.reserved_bytes == reserved * MIB


def test_on_a_full_device_holes_are_given_back() -> None:
    capacity = 200 * MIB
    allocator = GrowingAllocator(capacity)
    held = [allocator.allocate(40 * MIB) for _ in range(5)]
    for block in held[::2]:
        allocator.release(block)
    allocator.allocate(100 * MIB)  # of the three holes' pages
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (180 * MIB, 180 * MIB)
    with pytest.raises(OutOfMemoryError):
        allocator.allocate(40 * MIB)


def test_it_counts_what_its_ranges_say() -> None:
    drawn, allocator = random.Random(0), GrowingAllocator(2**31)
    held: list[Range] = []
    for _ in range(2000):
        if held and drawn.random() < 0.5:
            allocator.release(held.pop(drawn.randrange(len(held))))
        elif allocator.allocated_bytes < 2**30:
            sizes = (600, 5_000, MIB, 3 * MIB, 50 * MIB, drawn.randrange(1, 2**27))
            held.append(allocator.allocate(drawn.choice(sizes), stream=drawn.randrange(2)))
        ranges = [each for segment in allocator._segments.values() for each in segment.ranges()]
        assert sum(each.size for each in ranges if each.mapped) == allocator.reserved_bytes
        assert sum(each.size for each in ranges if each.in_use) == allocator.allocated_bytes
        free = [each for segment in allocator._segments.values() for each in segment.free()]
        assert len(free) == sum(each.mapped and not each.in_use for each in ranges)
    for block in held:
        allocator.release(block)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0
