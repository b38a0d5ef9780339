"""Segments: what PyTorch's allocator counts for one tensor beyond its own bytes, as far as that has a closed form.

Requests are rounded to 512 bytes. Those up to 1 MiB come from segments of 2 MiB, others below 10 MiB from segments of
20 MiB, the rest from segments of their own, rounded to 2 MiB. Of a large segment, up to 1 MiB that would be left over
is not split off: it counts as allocated with the block before it (c10/cuda/CUDACachingAllocator.cpp; allocator.py
replays all of it). For tensors that live as long as the run, layer after layer, this is a fixed share, and for large
ones that are kept for backward; for others it depends on the order of requests and is left to the simulation.
"""

from functools import lru_cache

MIN_BLOCK_BYTES = 512
SMALL_BYTES = 2**20
SMALL_SEGMENT_BYTES = 2 * 2**20
LARGE_SEGMENT_BYTES = 20 * 2**20
OWN_SEGMENT_BYTES = 10 * 2**20
SEGMENT_ROUND_BYTES = 2 * 2**20
REPLAYED_LAYERS = 8


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


def unsplit_rest(tensor_bytes: int) -> int:
    """Counted with a tensor that has a segment of its own, beyond its bytes."""
    size = rounded(tensor_bytes)
    rest_bytes = segment_bytes(size) - size
    return rest_bytes if size >= OWN_SEGMENT_BYTES and rest_bytes <= SMALL_BYTES else 0


@lru_cache(maxsize=4096)
def unsplit_bytes(matrices: tuple[int, ...], weight_bytes: float, ranks: int) -> int:
    """Counted with a layer's matrices beyond their bytes, each a tensor of `weight_bytes` a weight split over `ranks`:
    the share of one of several layers that live as long as the run."""
    sizes = [rounded(int(weight_bytes * matrix) // ranks) for matrix in matrices]
    free: list[int] = []
    not_split_off = 0
    for size in [each for each in sizes if each > SMALL_BYTES] * REPLAYED_LAYERS:
        block = min((each for each in free if each >= size), default=0)
        if block:
            free.remove(block)
        left_bytes = (block or segment_bytes(size)) - size
        if left_bytes > SMALL_BYTES:
            free.append(left_bytes)
        else:
            not_split_off += left_bytes
    return not_split_off // REPLAYED_LAYERS
