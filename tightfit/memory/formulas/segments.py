"""Segments: bytes that PyTorch's allocator counts for a tensor beyond its own, as far as that has a closed form.

Requests are rounded to 512 bytes. Those up to 1 MiB come from segments of 2 MiB, others below 10 MiB from segments of
20 MiB, the rest from segments of their own, rounded to 2 MiB. A remainder of a large segment of up to 1 MiB is not
split off: it counts as allocated with the block before it (c10/cuda/CUDACachingAllocator.cpp; allocator.py replays all
of it). These remainders are a fixed share of tensors that live as long as the run, and of large tensors saved for
backward; for other tensors they depend on the order of requests and are left to the simulation.
"""

from functools import lru_cache

MIN_BLOCK_BYTES = 512
SMALL_BYTES = 2**20
SMALL_SEGMENT_BYTES = SEGMENT_ROUND_BYTES = 2 * 2**20
LARGE_SEGMENT_BYTES = 20 * 2**20
OWN_SEGMENT_BYTES = 10 * 2**20
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
    """Unsplit remainder of a tensor with a segment of its own; 0 for smaller tensors."""
    size = rounded(tensor_bytes)
    rest_bytes = segment_bytes(size) - size
    return rest_bytes if size >= OWN_SEGMENT_BYTES and rest_bytes <= SMALL_BYTES else 0


@lru_cache(maxsize=4096)
def unsplit_bytes(matrices: tuple[int, ...], weight_bytes: float, ranks: int) -> int:
    """Unsplit remainders per layer, where a layer's matrices are allocated once for the run, layer after layer, each a
    tensor of `weight_bytes` per weight sharded over `ranks`: the mean of REPLAYED_LAYERS layers, best fit."""
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
