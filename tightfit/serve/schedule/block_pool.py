"""The blocks of the paged key/value cache: how many sequences hold each, and which have a prefix that can be reused.

A block is a page of `block_size` positions (PagedAttention, Kwon et al. 2023). Every holder counts once; a block
without holders is free, but keeps its contents until it is taken: the least recently freed is taken first, so that
prefixes in use survive longest. A full block is known by a hash of its tokens and of all blocks before it, so equal
prefixes of different requests meet in one block. Only full blocks are shared, and full blocks are never written again.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

Digest = bytes
ROOT: Digest = b""


def block_digest(before: Digest, tokens: Sequence[int]) -> Digest:
    """The digest of a full block: of its tokens and of `before`, the digest of the block before it."""
    return blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()


class BlockPool:
    """Counts holders of `size` blocks, and finds full blocks by their digest."""

    def __init__(self, size: int, block_size: int) -> None:
        assert size >= 1
        assert block_size >= 1
        self.size, self.block_size = size, block_size
        self._holders = [0] * size
        self._free = OrderedDict.fromkeys(range(size))  # in the order in which they will be taken
        self._digest_of: dict[int, Digest] = {}
        self._block_of: dict[Digest, int] = {}

    @property
    def free(self) -> int:
        """How many blocks can be taken."""
        return len(self._free)

    @property
    def used(self) -> int:
        """How many blocks have a holder."""
        return self.size - len(self._free)

    def blocks_for(self, positions: int) -> int:
        """How many blocks hold that many positions."""
        return -(-positions // self.block_size)

    def take(self, count: int) -> list[int]:
        """`count` free blocks, now with one holder each; their old contents can no longer be found."""
        assert count <= self.free, f"asked for {count} blocks of {self.free}"
        taken = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self.forget(block)
            self._holders[block] = 1
            taken.append(block)
        return taken

    def find(self, digests: Iterable[Digest]) -> list[int]:
        """The blocks of the longest prefix of `digests` that is still here; does not add a holder."""
        found = []
        for digest in digests:
            block = self._block_of.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def free_among(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` have no holder: holding them leaves so many fewer to take."""
        return sum(block in self._free for block in blocks)

    def hold(self, blocks: Iterable[int]) -> None:
        """One more holder for each."""
        for block in blocks:
            if self._holders[block] == 0:
                del self._free[block]
            self._holders[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One holder less. Later blocks of a prefix become free before earlier ones, which more requests share."""
        for block in reversed(list(blocks)):
            assert self._holders[block] > 0, f"block {block} released more often than held"
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free[block] = None

    def remember(self, block: int, digest: Digest) -> None:
        """Let `block`, which is full, be found by `digest`; the first block with that digest stays the one."""
        if digest not in self._block_of and block not in self._digest_of:
            self._digest_of[block], self._block_of[digest] = digest, block

    def forget(self, block: int) -> None:
        """Let `block` be found no more."""
        digest = self._digest_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]
