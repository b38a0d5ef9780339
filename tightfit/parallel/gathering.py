"""Gathers sharded tensors whole onto the first process only.

DTensor's `full_tensor` is a collective per tensor, which takes longer than a small model's step, and gives every rank
the whole tensor. Here ranks exchange descriptions of their shards; then each sends the first process the shards that no
earlier rank holds, many per message. At most `BATCH_BYTES` are in flight (or one tensor, if larger). Messages go
through host memory.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tightfit.collectives.shards import local, local_region
from tightfit.parallel.ranks import Ranks

BATCH_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Shard:
    """Which region of the tensor `name` a process holds."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dtype: torch.dtype
    region: tuple[tuple[int, int], ...]
    """Start and length along each dimension."""

    @property
    def lengths(self) -> list[int]:
        """The shape of the shard."""
        return [length for _, length in self.region]

    @property
    def shard_bytes(self) -> int:
        """Bytes of the shard."""
        return math.prod(self.lengths) * self.dtype.itemsize

    @property
    def whole_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


def gather_to_first(tensors: Mapping[str, Tensor], ranks: Ranks) -> Iterator[tuple[str, Tensor | None]]:
    """Every tensor that any process holds shards of: whole on the first process, None on the others."""
    own = [Shard(name, tuple(t.shape), t.dtype, local_region(t)) for name, t in tensors.items()]
    by_process = [own]
    if ranks.processes > 1:
        by_process = [[] for _ in range(ranks.processes)]
        dist.all_gather_object(by_process, own)
    for batch in _batches(by_process):
        needed = _without_copies(by_process, batch)
        if ranks.first:
            yield from _assemble(tensors, batch, needed)
            continue
        if needed[ranks.process]:
            dist.send(_message(tensors, needed[ranks.process]), dst=0)
        yield from ((name, None) for name in batch)


def _batches(by_process: Sequence[Sequence[Shard]]) -> Iterator[list[str]]:
    """Tensor names in batches of at most BATCH_BYTES, ordered by the first process that holds a shard."""
    sizes: dict[str, int] = {}
    for shards in by_process:
        sizes |= {s.name: s.whole_bytes for s in sorted(shards, key=lambda s: s.name) if s.name not in sizes}
    batch: list[str] = []
    for name, size in sizes.items():
        if batch and sum(sizes[other] for other in batch) + size > BATCH_BYTES:
            yield batch
            batch = []
        batch.append(name)
    yield batch


def _without_copies(by_process: Sequence[Sequence[Shard]], names: Sequence[str]) -> list[list[Shard]]:
    """For every process, the shards of tensors `names` that no earlier process holds."""
    wanted, known = set(names), set[Shard]()
    found = []
    for shards in by_process:
        found.append([s for s in shards if s.name in wanted and s not in known and s.shard_bytes])
        known.update(found[-1])
    return found


def _message(tensors: Mapping[str, Tensor], shards: Sequence[Shard]) -> Tensor:
    """The bytes of `shards`, concatenated."""
    return torch.cat([local(tensors[s.name]).detach().reshape(-1).view(torch.uint8).cpu() for s in shards])


def _assemble(
    tensors: Mapping[str, Tensor], names: Sequence[str], needed: Sequence[Sequence[Shard]]
) -> Iterator[tuple[str, Tensor | None]]:
    """The whole tensors, from local shards and what the other processes send; None where shards are missing."""
    found: dict[str, Tensor] = {}
    filled = dict.fromkeys(names, 0)
    for process, shards in enumerate(needed):
        received = torch.empty(sum(s.shard_bytes for s in shards), dtype=torch.uint8)
        if process and shards:
            dist.recv(received, src=process)
        offset = 0
        for s in shards:
            target = found.setdefault(s.name, torch.empty(s.shape, dtype=s.dtype))
            region = tuple(slice(start, start + length) for start, length in s.region)
            sent = received[offset : offset + s.shard_bytes].clone().view(s.dtype).view(s.lengths)
            target[region] = sent if process else local(tensors[s.name]).detach()
            filled[s.name] += math.prod(s.lengths)
            offset += s.shard_bytes
    yield from ((name, found[name] if filled[name] == found[name].numel() else None) for name in names)
