"""A model of PyTorch's CUDA caching allocator: allocated and reserved bytes for a sequence of requests.

The rules are those of c10/cuda/CUDACachingAllocator.cpp without expandable segments: requests are rounded to 512 bytes;
those up to 1 MiB come from segments of 2 MiB, others below 10 MiB from segments of 20 MiB, the rest from segments of
their own rounded to 2 MiB; the smallest free block that is large enough is taken, and split if what is left over is
worth keeping; freed blocks join their free neighbours; each stream has pools of its own. Of free blocks of one size the
lowest is taken, and the driver puts each new segment below those before it. With a capacity, segments that are wholly
free are given back when the device is full, and a request that still does not fit is an error.
Limits: no garbage-collection threshold, no maximal split size, no events that delay a free.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import Any, Protocol

from tightfit.memory.formulas.segments import MIN_BLOCK_BYTES, SMALL_BYTES, rounded, segment_bytes

HIGHEST_ADDRESS = 2**62
Key = tuple[int, int]


class OutOfMemoryError(Exception):
    """A request does not fit beside the blocks in use."""

    def __init__(self, wanted_bytes: int, missing_bytes: int) -> None:
        super().__init__(f"{wanted_bytes} bytes do not fit, {missing_bytes} are missing")
        self.wanted_bytes, self.missing_bytes = wanted_bytes, missing_bytes


class Allocator(Protocol):
    """An allocator through which a trace can be replayed."""

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the blocks in use."""

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the segments taken from the device."""

    def allocate(self, wanted_bytes: int, stream: int = 0) -> Any:
        """A block of at least `wanted_bytes`."""

    def release(self, block: Any) -> None:
        """Free a block."""

    def empty_cache(self) -> None:
        """Return reserved memory that is wholly free to the device."""


class PlainAllocator:
    """Counts exactly what is requested and reserves nothing, like the CPU's allocator."""

    def __init__(self) -> None:
        self.allocated_bytes = 0

    @property
    def reserved_bytes(self) -> int:
        """The same as allocated: nothing is cached."""
        return self.allocated_bytes

    def allocate(self, wanted_bytes: int, stream: int = 0) -> int:
        """Returns the size as the block."""
        self.allocated_bytes += wanted_bytes
        return wanted_bytes

    def release(self, block: int) -> None:
        """Free a block."""
        self.allocated_bytes -= block

    def empty_cache(self) -> None:
        """Nothing is cached."""


@dataclass(eq=False)
class Block:
    """A block of a segment, in use or free, with its neighbours."""

    address: int
    size: int
    pool: "Pool"
    segment: int
    in_use: bool = False
    before: "Block | None" = None
    after: "Block | None" = None


@dataclass(eq=False)
class Pool:
    """The free blocks of one stream and size class, smallest first."""

    small: bool
    free: list[tuple[int, int]] = field(default_factory=list)
    blocks: dict[Key, Block] = field(default_factory=dict)

    def put(self, block: Block) -> None:
        """Add a free block."""
        key = (block.size, block.address)
        insort(self.free, key)
        self.blocks[key] = block

    def drop(self, block: Block) -> None:
        """Remove a free block that is taken or merged."""
        key = (block.size, block.address)
        del self.free[bisect_left(self.free, key)]
        del self.blocks[key]

    def best(self, size: int) -> Block | None:
        """The smallest free block of at least `size`."""
        at = bisect_left(self.free, (size, -1))
        return self.blocks[self.free[at]] if at < len(self.free) else None


class CachingAllocator:
    """Counts what is allocated and reserved, now and at most."""

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self._pools: dict[tuple[int, bool], Pool] = {}
        self._segments: dict[int, int] = {}
        self._lowest_address = HIGHEST_ADDRESS

    def allocate(self, wanted_bytes: int, stream: int = 0) -> Block:
        """A block of at least `wanted_bytes`."""
        size = rounded(wanted_bytes)
        pool = self._pools.setdefault((stream, size <= SMALL_BYTES), Pool(size <= SMALL_BYTES))
        block = pool.best(size)
        if block is None:
            block = self._new_segment(size, pool)
        else:
            pool.drop(block)
        self._split(block, size)
        block.in_use = True
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def release(self, block: Block) -> None:
        """Free a block and merge it with its free neighbours."""
        self.allocated_bytes -= block.size
        block.in_use = False
        for neighbour in (block.before, block.after):
            if neighbour is not None and not neighbour.in_use:
                block.pool.drop(neighbour)
                _join(block, neighbour)
        block.pool.put(block)

    def empty_cache(self) -> None:
        """Return wholly free segments to the device, as `torch.cuda.empty_cache` does."""
        for pool in self._pools.values():
            for block in [b for b in pool.blocks.values() if b.size == self._segments[b.segment]]:
                pool.drop(block)
                self.reserved_bytes -= self._segments.pop(block.segment)

    def _new_segment(self, size: int, pool: Pool) -> Block:
        segment = segment_bytes(size)
        if self.capacity_bytes is not None and self.reserved_bytes + segment > self.capacity_bytes:
            self.empty_cache()
            missing = self.reserved_bytes + segment - self.capacity_bytes
            if missing > 0:
                raise OutOfMemoryError(size, missing)
        self.reserved_bytes += segment
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        self._lowest_address = address = self._lowest_address - segment
        self._segments[address] = segment
        return Block(address, segment, pool, address)

    def _split(self, block: Block, size: int) -> None:
        left_over = block.size - size
        if left_over < MIN_BLOCK_BYTES or (not block.pool.small and left_over <= SMALL_BYTES):
            return
        rest = Block(block.address + size, left_over, block.pool, block.segment, before=block, after=block.after)
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        block.pool.put(rest)


def _join(block: Block, neighbour: Block) -> None:
    """Merge a free neighbour into `block`."""
    if neighbour is block.before:
        block.address, block.before = neighbour.address, neighbour.before
        if block.before is not None:
            block.before.after = block
    else:
        block.after = neighbour.after
        if block.after is not None:
            block.after.before = block
    block.size += neighbour.size
