"""Ring attention: keys and values go round the ranks while each attends with its own queries (Liu et al. 2023).

Ring rank i of r has pieces i and 2r − 1 − i of every row's 2r (row_split.py). Of the keys of rank j it attends to

| from | queries | keys |
|---|---|---|
| itself | all | all, causally |
| j < i | all | the first piece, wholly |
| j > i | the second piece | all, wholly |

which is as much work for each j and every rank. kernels/attention/partial_attention.py gets the first key that each
query sees of a part, so windows and packed documents hold across ranks. Outputs are joined by their logsumexp in
float32. The next keys and values are received while attention to the current ones runs.

Backward sends keys and values round once more. Their gradients follow one step behind, summed in float32: the sum
begins at the rank after the owner and reaches the owner after r − 1 sends, each overlapped with the next part's
computation.

Elements that a rank sends for t tokens of k key heads of D channels: forward 2 (r − 1) t k D; backward as many, and as
many float32.

The whole ring is one operator, so that selective checkpointing saves its result as that of any attention, and
simulations take it as one step: `_forward_scratch` and `_backward_scratch` declare its workspace.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tightfit.jobs.precision import FLOAT32_BYTES
from tightfit.kernels.attention.flash_attention import attend_and_save, fake_attended, like_rows
from tightfit.kernels.attention.join_parts import add_rows, join_
from tightfit.kernels.attention.partial_attention import Part, attend_part, attend_part_backward
from tightfit.kernels.operators import operator


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first: Tensor | None,
    group: dist.ProcessGroup,
    *,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Attention of this rank's queries [B, heads, t, D] to the keys and values [B, kv_heads, t, D] of all ranks.

    `first` int32 [B, t] is the first key of every query, by its position in the row; None: the row's first.
    """
    return attend_in_ring(query, key, value, first, scale, softcap or 0.0, group.group_name)[0]


class Region(NamedTuple):
    """Queries from `queries_from` on of one rank, and keys up to `keys_to` of another, that attend to each other."""

    queries_from: int
    keys_to: int
    causal: bool


def region_of(rank: int, source: int, length: int) -> Region:
    """The region of the queries of ring rank `rank` and the keys of rank `source`, each `length` tokens of a row."""
    if source == rank:
        return Region(0, length, causal=True)
    if source < rank:
        return Region(0, length // 2, causal=False)
    return Region(length // 2, length, causal=False)


def _part(first: Tensor | None, region: Region, source: int, ring: int, length: int, scale: float, cap: float) -> Part:
    """The region as kernels take it: each query's first key becomes an index into the keys of `source`."""
    part = Part(scale, softcap=cap or None, causal=region.causal, keys=region.keys_to)
    if first is None:
        return part
    piece = length // 2
    starts = (source * piece, (2 * ring - 1 - source) * piece)[: region.keys_to // piece]
    seen = sum(((first - start).clamp(0, piece) for start in starts), torch.zeros_like(first))
    return Part(part.scale, part.softcap, part.causal, seen[:, region.queries_from :].contiguous(), part.keys)


class _Ring:
    """This rank's place in the ring, and its messages to the next rank."""

    def __init__(self, group_name: str) -> None:
        resolve: Any = dist.distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
        self.group: dist.ProcessGroup = resolve(group_name)
        self.size, self.rank = self.group.size(), self.group.rank()

    def pass_round(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield every rank and its tensor like `own`, this rank's first; the next is received while one is in use."""
        held = own
        del own
        for step in range(self.size):
            arriving, works = held, list[Any]()
            if step < self.size - 1:
                arriving, works = self.hand_on(held)
            yield (self.rank - step) % self.size, held
            for work in works:
                work.wait()
            held = arriving

    def hand_on(self, held: Tensor) -> tuple[Tensor, list[Any]]:
        """Start to send `held` to the next rank and to receive from the one before; returns the receive buffer, valid
        after waiting for the works."""
        arriving = torch.empty_like(held)
        operations = [
            dist.P2POp(dist.isend, held, group=self.group, group_peer=(self.rank + 1) % self.size),
            dist.P2POp(dist.irecv, arriving, group=self.group, group_peer=(self.rank - 1) % self.size),
        ]
        return arriving, dist.batch_isend_irecv(operations)


class _RowSums:
    """The sum over the ring's steps for each of this rank's queries: attention joined, or dQ added.

    The first step's result is taken as it is, sums in between are float32, and the last step rounds. On ring rank 0 all
    later steps add to the second piece alone; on the others the first of them adds to all rows (see the table above).
    """

    def __init__(self, ring: _Ring, first: Tensor) -> None:
        self.last_step, self.step, self.start, self.offset = ring.size - 1, 0, 0, 0
        self.sums, self.dtype = first, first.dtype
        self.result: Tensor | None = first

    def next(self, start: int) -> tuple[Tensor, Tensor]:
        """The sum so far of the rows from `start` on, and the tensor to write it to with this step's added."""
        self.step, self.start = self.step + 1, start
        before = self.sums[:, :, start - self.offset :]
        if self.step == self.last_step:
            if self.result is None:
                self.result = torch.empty_like(self.sums, dtype=self.dtype)
            return before, self.result[:, :, start:]
        if self.step == 1 and self.dtype.itemsize < FLOAT32_BYTES:
            self.offset, self.sums = start, torch.empty_like(before, dtype=torch.float32)
            self.result = self.result if start else None
        return before, self.sums[:, :, start - self.offset :]

    def total(self) -> Tensor:
        """All rows after the last step, also those that it did not add to."""
        assert self.result is not None
        if self.offset == 0 and self.result is not self.sums:
            self.result[:, :, : self.start].copy_(self.sums[:, :, : self.start])
        return self.result


def _run(
    query: Tensor, key: Tensor, value: Tensor, first: Tensor | None, scale: float, softcap: float, group: str
) -> tuple[Tensor, Tensor]:
    ring, length = _Ring(group), query.shape[2]
    out, logs = None, query.new_empty(0)
    for source, held in ring.pass_round(torch.stack([key, value])):
        region = region_of(ring.rank, source, length)
        part = _part(first, region, source, ring.size, length, scale, softcap)
        keys, values = held[:, :, :, : region.keys_to].unbind()
        more, more_logs = attend_part(query[:, :, region.queries_from :], keys, values, part)
        if out is None:
            out, logs = _RowSums(ring, more), more_logs.contiguous()
        else:
            before, into = out.next(region.queries_from)
            join_(before, logs[:, :, region.queries_from :], more, more_logs, into)
            del before, into
        del more, keys, values, held
    assert out is not None
    return out.total(), logs


class _KeyGradients:
    """Gradients of keys and values, summed on their way round the ring, one step behind the keys and values."""

    def __init__(self, ring: _Ring) -> None:
        self.ring = ring
        self.own: tuple[Tensor, Tensor] | None = None
        self.passing: Tensor | None = None
        self.works: list[Any] = []

    def add(self, d_key: Tensor, d_value: Tensor, like: Tensor, region: Region) -> None:
        """Add this rank's gradients of the current keys and values (`like` them) to earlier ranks' sum; send it on."""
        if self.own is None:
            self.own = d_key, d_value
            return
        if self.passing is None:
            total = torch.empty_like(like, dtype=torch.float32)
            total[:, :, :, region.keys_to :].zero_()
            for sums, found in zip(total, (d_key, d_value), strict=True):
                sums[:, :, : region.keys_to].copy_(found)
        else:
            total = self._arrived()
            for sums, found in zip(total, (d_key, d_value), strict=True):
                seen = sums[:, :, : region.keys_to]
                add_rows(seen, found, seen)
        self.passing, self.works = self.ring.hand_on(total)

    def _arrived(self) -> Tensor:
        assert self.passing is not None
        for work in self.works:
            work.wait()
        return self.passing

    def total(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Gradients of this rank's own keys and values, [B, kv_heads, t, D]."""
        assert self.own is not None
        arrived = self._arrived()
        total = torch.empty_like(arrived, dtype=dtype)
        for own, others, both in zip(self.own, arrived, total, strict=True):
            add_rows(others, own, both)
        return total[0], total[1]


def _run_backward(
    d_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logs: Tensor,
    first: Tensor | None,
    scale: float,
    softcap: float,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    ring, length = _Ring(group), query.shape[2]
    d_query, key_gradients = None, _KeyGradients(ring)
    denominators: dict[int, Tensor] = {}  # by first query: contiguous copies, as kernels take no strides of them
    for source, held in ring.pass_round(torch.stack([key, value])):
        region = region_of(ring.rank, source, length)
        part = _part(first, region, source, ring.size, length, scale, softcap)
        keys, values = held[:, :, :, : region.keys_to].unbind()
        start = region.queries_from
        if start not in denominators:
            denominators[start] = logs[:, :, start:].contiguous()
        given, queries, attended = (x[:, :, start:] for x in (d_out, query, out))
        found = attend_part_backward(given, queries, keys, values, attended, denominators[start], part)
        if d_query is None:
            d_query = _RowSums(ring, found[0])
        else:
            before, into = d_query.next(start)
            add_rows(before, found[0], into)
            del before, into
        key_gradients.add(found[1], found[2], held, region)
        del found, held, keys, values
    assert d_query is not None
    return d_query.total(), *key_gradients.total(key.dtype)


def _fake_backward(_: Tensor, query: Tensor, key: Tensor, *__: Any) -> tuple[Tensor, Tensor, Tensor]:
    both = key.new_empty(2, *key.shape)
    return like_rows(query), both[0], both[1]


def _forward_scratch(query: Tensor, key: Tensor, *_: Any) -> int:
    """Bytes: keys and values, current and arriving; a part's output and, for 16-bit results, the float32 sum."""
    narrow = query.element_size() < FLOAT32_BYTES
    return 4 * key.numel() * key.element_size() + query.numel() * (query.element_size() + FLOAT32_BYTES * narrow)


def _backward_scratch(d_out: Tensor, query: Tensor, key: Tensor, *_: Any) -> int:
    """Bytes: keys and values, current and arriving; their gradients (own; float32, current and arriving); dQ's sum.

    And the workspace of fused attention's backward (memory/cuda_rules.py): dQ in float32, dK and dV per query head.
    """
    grouped = query.shape[1] != key.shape[1]
    kernel_bytes = query.numel() * (FLOAT32_BYTES + 2 * query.element_size() * grouped)
    passing_bytes = 6 * key.numel() * key.element_size() + 4 * FLOAT32_BYTES * key.numel()
    return passing_bytes + FLOAT32_BYTES * query.numel() + kernel_bytes


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        return attend_and_save(ctx, attend_in_ring, *given)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, out, logs, first = ctx.saved_tensors
        d_out = grads[0] if grads[0] is not None else torch.zeros_like(out)  # other ranks wait for this one
        found = attend_backward_in_ring(d_out, query, key, value, out, logs, first, *ctx.settings)
        return *found, None, None, None, None


SETTINGS = "Tensor? first, float scale, float softcap, str group"
attend_backward_in_ring = operator(
    "ring_attention_backward(Tensor d_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logs, "
    f"{SETTINGS}) -> (Tensor, Tensor, Tensor)",
    _run_backward,
    _fake_backward,
    scratch_bytes=_backward_scratch,
)
attend_in_ring = operator(
    f"ring_attention(Tensor query, Tensor key, Tensor value, {SETTINGS}) -> (Tensor, Tensor)",
    _run,
    fake_attended,
    _RingAttention,
    scratch_bytes=_forward_scratch,
)
