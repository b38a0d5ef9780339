"""Named tensors of which every rank holds parts, whole on the first process and nowhere else.

A collective for each tensor, as DTensor makes them, costs more time than a small model's step does, and gives every
rank all of it. Here ranks tell each other what they hold and where it belongs; then each sends the first process, many
parts in one message, what no rank before it holds. So many bytes are on their way at a time: `BATCH_BYTES`, or one
tensor if that is larger. Messages go through host memory.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tightfit.collectives.shards import local, place
from tightfit.parallel.ranks import Ranks

BATCH_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Part:
    """Where a process's part of a tensor lies in the whole."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    place: tuple[tuple[int, int], ...]

    @property
    def counts(self) -> list[int]:
        """Elements along each dimension."""
        return [count for _, count in self.place]

    @property
    def part_bytes(self) -> int:
        """Of this part."""
        return math.prod(self.counts) * self.dtype.itemsize

    @property
    def whole_bytes(self) -> int:
        """Of the tensor it is a part of."""
        return math.prod(self.shape) * self.dtype.itemsize


def gathered_here(parts: Mapping[str, Tensor], ranks: Ranks) -> Iterator[tuple[str, Tensor | None]]:
    """Every tensor of the model, whole, on the first process (None on others), whoever holds its parts."""
    own = [Part(name, tuple(t.shape), t.dtype, place(t)) for name, t in parts.items()]
    everyones = [own]
    if ranks.processes > 1:
        everyones = [[] for _ in range(ranks.processes)]
        dist.all_gather_object(everyones, own)
    for batch in _batches(everyones):
        needed = _needed(everyones, batch)
        if ranks.first:
            yield from _assembled(parts, batch, needed)
            continue
        if needed[ranks.process]:
            dist.send(_message(parts, needed[ranks.process]), dst=0)
        yield from ((name, None) for name in batch)


def _batches(everyones: Sequence[Sequence[Part]]) -> Iterator[list[str]]:
    """Names, by the first process that holds a part; as many at a time as may be on their way."""
    sizes: dict[str, int] = {}
    for held in everyones:
        sizes |= {part.name: part.whole_bytes for part in sorted(held, key=lambda p: p.name) if part.name not in sizes}
    batch: list[str] = []
    for name, size in sizes.items():
        if batch and sum(sizes[other] for other in batch) + size > BATCH_BYTES:
            yield batch
            batch = []
        batch.append(name)
    yield batch


def _needed(everyones: Sequence[Sequence[Part]], names: Sequence[str]) -> list[list[Part]]:
    """Of every process, the parts that no process before it holds."""
    wanted, known = set(names), set[Part]()
    found = []
    for held in everyones:
        found.append([part for part in held if part.name in wanted and part not in known and part.part_bytes])
        known.update(found[-1])
    return found


def _message(parts: Mapping[str, Tensor], wanted: Sequence[Part]) -> Tensor:
    """The bytes of `wanted`, one after another."""
    return torch.cat([local(parts[part.name]).detach().reshape(-1).view(torch.uint8).cpu() for part in wanted])


def _assembled(
    parts: Mapping[str, Tensor], names: Sequence[str], needed: Sequence[Sequence[Part]]
) -> Iterator[tuple[str, Tensor | None]]:
    """The whole tensors, from what is here and what the other processes send; None where parts are missing."""
    found: dict[str, Tensor] = {}
    filled = dict.fromkeys(names, 0)
    for process, wanted in enumerate(needed):
        received = torch.empty(sum(part.part_bytes for part in wanted), dtype=torch.uint8)
        if process and wanted:
            dist.recv(received, src=process)
        first = 0
        for part in wanted:
            target = found.setdefault(part.name, torch.empty(part.shape, dtype=part.dtype))
            region = tuple(slice(start, start + count) for start, count in part.place)
            sent = received[first : first + part.part_bytes].clone().view(part.dtype).view(part.counts)
            target[region] = sent if process else local(parts[part.name]).detach()
            filled[part.name] += math.prod(part.counts)
            first += part.part_bytes
    yield from ((name, found[name] if filled[name] == found[name].numel() else None) for name in names)
