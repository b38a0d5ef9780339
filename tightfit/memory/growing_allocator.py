"""A model of PyTorch's CUDA caching allocator with expandable segments: segments that grow, page by page.

The rules are those of c10/cuda/CUDACachingAllocator.cpp under `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`. Each
stream has one segment for requests up to 1 MiB and one for larger ones, each a range of addresses as large as the card,
in which pages of 2 and of 20 MiB are mapped as needed. Requests are rounded to 512 bytes; the smallest free mapped
block that is large enough is taken, and split; else the first run of free addresses that is large enough is mapped
where it is not yet. On a full device all whole free pages are unmapped, also those in the middle of a segment: memory
that fixed segments lose to holes (allocator.py) is not lost here.
Limits: those of allocator.py; a segment's addresses are assumed to be unlimited.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

from tightfit.memory.allocator import HIGHEST_ADDRESS, OutOfMemoryError
from tightfit.memory.formulas.segments import SMALL_BYTES, rounded

SMALL_PAGE_BYTES, PAGE_BYTES = 2 * 2**20, 20 * 2**20


@dataclass(eq=False)
class Range:
    """Addresses of a segment that are in use, mapped and free, or not mapped; with its neighbours."""

    address: int
    size: int
    segment: "Segment"
    mapped: bool = False
    in_use: bool = False
    before: "Range | None" = None
    after: "Range | None" = None

    def cut(self, size: int) -> "Range":
        """Shorten this range to `size` and return the rest as a new one. Must not be listed as free meanwhile."""
        rest = Range(self.address + size, self.size - size, self.segment, self.mapped, before=self, after=self.after)
        if self.after is not None:
            self.after.before = rest
        self.after, self.size = rest, size
        return rest

    def joined(self) -> "Range":
        """This range merged with neighbours that are free and mapped alike."""
        found = self
        if self.before is not None and self.before.is_like(self):
            found = self.before
            found._take_next()
        if found.after is not None and found.after.is_like(found):
            found._take_next()
        return found

    def is_like(self, other: "Range") -> bool:
        """Whether both are free, and both mapped or not."""
        return not self.in_use and not other.in_use and self.mapped == other.mapped

    def _take_next(self) -> None:
        assert self.after is not None
        self.size += self.after.size
        self.after = self.after.after
        if self.after is not None:
            self.after.before = self


class Segment:
    """The addresses of one stream and size class, and its free mapped ranges, smallest first."""

    def __init__(self, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.first = Range(0, HIGHEST_ADDRESS, self)
        self._sizes: list[tuple[int, int]] = []
        self._free: dict[tuple[int, int], Range] = {}

    def ranges(self) -> Iterator[Range]:
        """All ranges in the order of their addresses."""
        at: Range | None = self.first
        while at is not None:
            yield at
            at = at.after

    def free(self) -> list[Range]:
        """The free ranges that are mapped."""
        return list(self._free.values())

    def put(self, free: Range) -> None:
        """List a free mapped range."""
        key = (free.size, free.address)
        insort(self._sizes, key)
        self._free[key] = free

    def drop(self, free: Range) -> None:
        """Remove a range from the list of free ones, before it changes."""
        key = (free.size, free.address)
        if self._free.pop(key, None) is not None:
            del self._sizes[bisect_left(self._sizes, key)]

    def best(self, size: int) -> Range | None:
        """The smallest free mapped range of at least `size`, no longer listed."""
        at = bisect_left(self._sizes, (size, -1))
        if at == len(self._sizes):
            return None
        found = self._free[self._sizes[at]]
        self.drop(found)
        return found

    def room_for(self, size: int) -> list[Range]:
        """The first run of adjacent free ranges with at least `size` addresses that has an unmapped one; a run does not
        begin with two mapped ranges."""
        found: list[Range] = []
        for each in self.ranges():
            found = [] if each.in_use else [*found, each]
            while found and found[0].mapped and len(found) > 1 and found[1].mapped:
                found.pop(0)
            if sum(part.size for part in found) >= size and any(not part.mapped for part in found):
                return found
        raise AssertionError("addresses never end")

    def pages(self, count: int) -> int:
        """`count` bytes or addresses, rounded up to whole pages."""
        return -(-count // self.page_bytes) * self.page_bytes


class GrowingAllocator:
    """Counts what is allocated and reserved, now and at most."""

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self._segments: dict[tuple[int, bool], Segment] = {}

    def allocate(self, wanted_bytes: int, stream: int = 0) -> Range:
        """A range of at least `wanted_bytes`."""
        size = rounded(wanted_bytes)
        small = size <= SMALL_BYTES
        segment = self._segments.get((stream, small))
        if segment is None:
            segment = self._segments[stream, small] = Segment(SMALL_PAGE_BYTES if small else PAGE_BYTES)
        taken = segment.best(size) or self._grown(segment, size)
        if taken.size > size:
            segment.put(taken.cut(size))
        taken.in_use = True
        self.allocated_bytes += size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return taken

    def release(self, block: Range) -> None:
        """Free a range and merge it with its free neighbours."""
        self.allocated_bytes -= block.size
        block.in_use = False
        for neighbour in (block.before, block.after):
            if neighbour is not None:
                block.segment.drop(neighbour)
        block.segment.put(block.joined())

    def empty_cache(self) -> None:
        """Give back all pages that are wholly free."""
        for segment in self._segments.values():
            for free in segment.free():
                self._unmap(free)

    def _grown(self, segment: Segment, size: int) -> Range:
        """A free range of at least `size` from the first run of free addresses, mapped as far as needed."""
        missing = self._missing(segment, size)
        if self.capacity_bytes is not None and self.reserved_bytes + missing > self.capacity_bytes:
            self.empty_cache()
            missing = self._missing(segment, size)
            if (over := self.reserved_bytes + missing - self.capacity_bytes) > 0:
                raise OutOfMemoryError(size, over)
        self.reserved_bytes += missing
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        whole, *others = segment.room_for(size)
        segment.drop(whole)
        self._map(whole, size)
        for each in others:
            if whole.size < size:
                segment.drop(each)
                self._map(each, size - whole.size)
                whole = whole.joined()
        return whole

    @staticmethod
    def _missing(segment: Segment, size: int) -> int:
        """Bytes of pages that must be mapped for `size`."""
        missing = 0
        for each in segment.room_for(size):
            if not each.mapped and size > 0:
                missing += min(segment.pages(size), each.size)
            size -= each.size
        return missing

    @staticmethod
    def _map(part: Range, size: int) -> None:
        """Map the first whole pages of `part` that hold `size` bytes; unmapped ranges consist of whole pages."""
        if part.mapped:
            return
        if (pages := min(part.segment.pages(size), part.size)) < part.size:
            part.cut(pages)
        part.mapped = True

    def _unmap(self, free: Range) -> None:
        """Unmap the whole pages of a free mapped range; the partial pages at its ends stay mapped."""
        segment, end = free.segment, free.address + free.size
        first, last = segment.pages(free.address), end // segment.page_bytes * segment.page_bytes
        if first >= last:
            return
        segment.drop(free)
        middle = free
        if first > free.address:
            middle = free.cut(first - free.address)
            segment.put(free)
        if last < end:
            segment.put(middle.cut(last - first))
        middle.mapped = False
        self.reserved_bytes -= last - first
        middle.joined()
