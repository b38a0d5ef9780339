"""The real sizes of the blocks in PyTorch's allocator history, from their addresses.

The history has requested sizes and addresses. A block is often larger: requests are rounded to 512 bytes, and a small
remainder of a free block (up to 1 MiB in the pools of large blocks) is not split off. Torch counts all of it as
allocated. From a block's start and the next block in use (or the segment's end) the allocator's splitting rule
(allocator.py) gives the block's end.
Segments from before the history are known from the allocator's snapshot, if one is given. Limit: blocks of unknown
segments, and of expandable ones, are assumed to be always split.
"""

from bisect import bisect_right, insort
from collections.abc import Iterable, Mapping
from typing import Any

from tightfit.memory.formulas.segments import MIN_BLOCK_BYTES, SMALL_BYTES, SMALL_SEGMENT_BYTES, rounded

Event = Mapping[str, Any]
ALLOCATED, FREED = "alloc", "free_completed"
TAKEN, GIVEN_BACK = "segment_alloc", "segment_free"
FREE = "inactive"
"""The state of a free block in a snapshot."""


class HistoryBlocks:
    """The blocks in use, updated event by event."""

    def __init__(self, before: Iterable[Mapping[str, Any]] = ()) -> None:
        """`before` are the segments of a snapshot (`torch.cuda.memory_snapshot`) taken when the history begins."""
        fixed = [segment for segment in before if not segment["is_expandable"]]
        self._segments: dict[int, int] = {segment["address"]: segment["total_size"] for segment in fixed}
        self._segment_starts: list[int] = sorted(self._segments)
        blocks = (block for segment in fixed for block in segment["blocks"])
        self._sizes: dict[int, int] = {block["address"]: block["size"] for block in blocks if block["state"] != FREE}
        self._in_use: list[int] = sorted(self._sizes)

    def grown_by(self, event: Event) -> int:
        """Bytes that `event` adds to allocated memory; negative for a free."""
        address, size = event["addr"], event["size"]
        match event["action"]:
            case "alloc":
                return self._take(address, size)
            case "free_completed":
                return -self._give_back(address, size)
            case "segment_alloc":
                self._segments[address] = size
                insort(self._segment_starts, address)
            case "segment_free":
                if self._segments.pop(address, None) is not None:
                    self._segment_starts.remove(address)
        return 0

    def _take(self, address: int, size: int) -> int:
        wanted = rounded(size)
        left_over = self._room_at(address) - wanted
        segment = self._segment_of(address)
        small = segment is not None and self._segments[segment] == SMALL_SEGMENT_BYTES
        splits = left_over >= MIN_BLOCK_BYTES if small else left_over > SMALL_BYTES
        taken = wanted if splits or left_over < 0 else wanted + left_over
        insort(self._in_use, address)
        self._sizes[address] = taken
        return taken

    def _give_back(self, address: int, size: int) -> int:
        if address not in self._sizes:
            return rounded(size)
        del self._in_use[bisect_right(self._in_use, address) - 1]
        return self._sizes.pop(address)

    def _room_at(self, address: int) -> int:
        """Free bytes from `address` on: to the next block in use, or to the segment's end; -1 where that is unknown."""
        segment = self._segment_of(address)
        if segment is None:
            return -1
        end = segment + self._segments[segment]
        after = bisect_right(self._in_use, address)
        return (min(end, self._in_use[after]) if after < len(self._in_use) else end) - address

    def _segment_of(self, address: int) -> int | None:
        at = bisect_right(self._segment_starts, address) - 1
        if at < 0:
            return None
        start = self._segment_starts[at]
        return start if address < start + self._segments[start] else None
