"""Batch-invariant steps: every token gets the same bits whatever else is in its step.

A matrix product of another number of rows may sum in another order, so a token's last bits depend on the rest of the
batch; then two almost equally likely tokens change places. Here the tokens of a step run in passes of a few fixed
sizes, padded where they are fewer, so that libraries do the same for each; attention is computed for every token by
itself, over exactly the keys it sees (cache/paged.py). Prompts, pieces of them, answers and tokens that are computed
again after a preemption are rows alike: one path for all.

It remains whether a row's bits depend on its place among the rows of a pass, or on which of the sizes it ran in. That
is tested when an engine starts: a pass that repeats one token must give equal rows, and another size is only used if it
gives the same bits. Another order of summation shows in float32 at once; rounded to 16 bits, or to codes of a cache, it
shows in one of ten thousand numbers, so more tokens are tried, and a model too small for that has one size only. Where
no size passes, rows run one at a time, which is always right. Models with routed layers always run one token at a time:
experts gather rows, so other tokens decide how many are multiplied together. So do those with LLM.int8, which keeps
channels wide that are large in any row.

(He et al. 2025, "Defeating Nondeterminism in LLM Inference", of kernels written for this.)
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tightfit.models.spec import ModelSpec
from tightfit.serve.schedule.device import to_device
from tightfit.serve.schedule.step import Step

SIZES = {"cpu": (16, 1, 4, 64), "cuda": (64, 16, 256)}
"""Rows of a pass, in the order in which they are tried: the first whose rows agree is the reference for the others."""
ONE = (1,)
PROBES, MOST_PROBES = 3, 16
"""Tokens with which sizes are tried, usually and at most."""
SHOWING = 2**17
"""So many rounded numbers show another order of summation: in a dozen of them."""

Span = tuple[int, int, int]
"""First row, rows, and the size of the pass they run in."""


def cut_rows(count: int, sizes: Sequence[int]) -> Iterator[Span]:
    """Spans that cut `count` rows into passes of `sizes` (ascending), padded to at most twice their number where the
    sizes allow it."""
    first = 0
    while first < count:
        left = count - first
        above = next((size for size in sizes if size >= left), None)
        below = max((size for size in sizes if size <= left), default=None)
        size = above if below is None or (above is not None and above <= 2 * left) else below
        assert size is not None
        yield first, min(left, size), size
        first += size


def steady_sizes(run: Callable[[int, int], Tensor], sizes: Sequence[int], probes: int = PROBES) -> tuple[int, ...]:
    """The `sizes` at which run(size, probe) [size, W] of equal rows gives equal rows, the same as at the first such
    size."""
    results = {size: [run(size, probe) for probe in range(probes)] for size in sizes}
    steady = [size for size in sizes if all(_are_equal(rows) for rows in results[size])]
    if not steady:
        return ONE
    measure = [rows[0] for rows in results[steady[0]]]
    same = [s for s in steady if all(torch.equal(rows[0], row) for rows, row in zip(results[s], measure, strict=True))]
    return tuple(sorted(same))


def _trial(device: torch.device, numbers: int | None) -> tuple[tuple[int, ...], int]:
    """Sizes to try and the number of tokens to try them with, where a row has at least `numbers` rounded numbers; None:
    nothing is rounded."""
    sizes = SIZES[device.type]
    needed = PROBES if numbers is None else max(PROBES, -(-SHOWING // numbers))
    return (sizes, needed) if needed <= MOST_PROBES else (sizes[:1], PROBES)


def _are_equal(rows: Tensor) -> bool:
    return torch.equal(rows, rows[:1].expand_as(rows))


@dataclass(frozen=True)
class Passes:
    """The two halves of a model's forward pass, each of which runs one pass of rows."""

    states: Callable[[Step], Tensor]
    """The residual stream after the last layer, [N, H], of a step that wants all its rows."""
    project: Callable[[Tensor], Tensor]
    """Logits [R, V] of states [R, H]."""


class RowTiles:
    """Runs steps of a model of `spec` in passes of fixed sizes."""

    def __init__(
        self,
        spec: ModelSpec,
        passes: Passes,
        *,
        device: torch.device,
        rounded: bool,
        kept_rounded: bool,
        positions: int,
        block_size: int,
        padding_block: int,
        rows_mix: bool = False,
    ) -> None:
        """`rounded`: results of products are rounded to 16 bits; `kept_rounded`: at least keys and values are.
        `rows_mix`: a row's result depends on other rows, for another reason than experts (LLM.int8)."""
        self.passes, self.block_size, self.padding_block, self.device = passes, block_size, padding_block, device
        chance = np.random.default_rng(0)
        probes = [(int(chance.integers(spec.vocab_size)), int(chance.integers(positions))) for _ in range(MOST_PROBES)]
        sizes, needed = _trial(device, spec.layers * spec.kv_size if kept_rounded else None)
        sizes = ONE if rows_mix or spec.experts is not None else sizes
        self.sizes = steady_sizes(lambda size, probe: self._tried(size, *probes[probe]), sizes, needed)
        sizes, needed = _trial(device, spec.vocab_size if rounded else None)
        states = [self._tried(self.sizes[0], *probe)[:1] for probe in probes[:needed]]
        self.head_sizes = steady_sizes(lambda size, probe: passes.project(states[probe].repeat(size, 1)), sizes, needed)

    def states(self, step: Step) -> Tensor:
        """The residual stream after the last layer at the step's rows, [R, H]."""
        count = step.tokens.shape[1]
        tables, lengths = tables_of_rows(step), (step.positions[0] + 1).int()
        ropes = [length for tokens, length in step.rope_lengths for _ in range(tokens)]
        parts = []
        for first, rows, size in cut_rows(count, self.sizes):
            own = slice(first, first + rows)
            part = self._pass(
                _padded(step.tokens[0, own], size, 0),
                _padded(step.positions[0, own], size, 0),
                _padded(step.slots[own], size, self.padding_block * self.block_size),
                _padded(tables[own], size, self.padding_block),
                _padded(lengths[own], size, 1),
                ropes[own] + [1] * (size - rows) if ropes else [],
                rows,
            )
            parts.append(self.passes.states(part)[:rows])
        states = torch.cat(parts)
        return states if step.rows.numel() == count else states[step.rows]

    def project(self, states: Tensor) -> Tensor:
        """Logits [R, V] of states [R, H]."""
        spans = cut_rows(len(states), self.head_sizes)
        parts = [
            self.passes.project(_padded(states[first : first + rows], size, 0))[:rows] for first, rows, size in spans
        ]
        return torch.cat(parts) if parts else self.passes.project(states)

    def _pass(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        tables: Tensor,
        lengths: Tensor,
        ropes: list[int],
        rows: int,
    ) -> Step:
        """A step of tokens that each attend by themselves; those after the first `rows` are padding."""
        return Step(
            tokens=tokens[None],
            positions=positions[None],
            slots=slots,
            decode_tokens=rows,
            tables=tables,
            lengths=lengths,
            rope_lengths=[(1, length) for length in ropes],
            rows=slots,  # as many as there are tokens: all of them
            block_size=self.block_size,
            row_by_row=True,
        )

    def _tried(self, size: int, token: int, position: int) -> Tensor:
        """The states of one token repeated `size` times, all at one slot of the padding block; it also sees the slot
        before: over a single key, attention would not depend on query and key."""
        seen = min(2, self.block_size)
        slot = self.padding_block * self.block_size + seen - 1

        def repeated(number: int) -> Tensor:
            return torch.full((size,), number, device=self.device)

        tables, lengths = repeated(self.padding_block).int()[:, None], repeated(seen).int()
        ropes = [position + 1] * size
        step = self._pass(repeated(token), repeated(position), repeated(slot), tables, lengths, ropes, size)
        return self.passes.states(step)


def tables_of_rows(step: Step) -> Tensor:
    """The blocks of each token's sequence, int32 [N, most blocks]."""
    if not step.pieces:
        return step.tables
    columns = max(step.tables.shape[1], step.joint_tables.shape[1])
    every = torch.cat([_widened(step.tables, columns), _widened(step.joint_tables, columns)])
    of_pieces = np.repeat(np.arange(len(step.pieces)), [piece.count for piece in step.pieces])
    whose = np.concatenate([np.arange(step.decode_tokens), step.decode_tokens + of_pieces])
    return every.index_select(0, to_device(whose, every.device))


def _widened(tables: Tensor, columns: int) -> Tensor:
    return torch.nn.functional.pad(tables, (0, columns - tables.shape[1]))


def _padded(rows: Tensor, size: int, value: int) -> Tensor:
    """A copy of `rows`, padded with `value` to `size`: in memory of its own, so that all are aligned alike."""
    padded = rows.new_full((size, *rows.shape[1:]), value)
    padded[: len(rows)] = rows
    return padded
