"""Segments: what PyTorch's allocator counts for one tensor beyond its own bytes, as far as that has a closed form.

Requests are rounded to 512 bytes. Those up to 1 MiB come from segments of 2 MiB, others below 10 MiB from segments of
20 MiB, the rest from segments of their own, rounded to 2 MiB. Of a large segment, up to 1 MiB that would be left over
is not split off: it counts as allocated with the block before it (c10/cuda/CUDACachingAllocator.cpp; allocator.py
replays all of it). For tensors of one size that live as long as the run this is a fixed share; for others it depends on
the order of requests and is left to the simulation.
"""

MIN_BLOCK_BYTES = 512
SMALL_BYTES = 2**20
SMALL_SEGMENT_BYTES = 2 * 2**20
LARGE_SEGMENT_BYTES = 20 * 2**20
OWN_SEGMENT_BYTES = 10 * 2**20
SEGMENT_ROUND_BYTES = 2 * 2**20


def rounded(wanted_bytes: int) -> int:
    """The size of the block a request gets before splitting."""
    return max(MIN_BLOCK_BYTES, -(-wanted_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES)


def segment_bytes(size: int) -> int:
    """The segment taken from the device for a block of `size`."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size // SEGMENT_ROUND_BYTES) * SEGMENT_ROUND_BYTES


def unsplit_bytes(tensor_bytes: int) -> int:
    """Counted with one tensor of many of this size: its share of what is left of a segment and not split off."""
    if tensor_bytes <= SMALL_BYTES:
        return 0
    segment = segment_bytes(tensor_bytes)
    tensors = segment // tensor_bytes
    left_bytes = segment - tensors * tensor_bytes
    return left_bytes // tensors if left_bytes <= SMALL_BYTES else 0
