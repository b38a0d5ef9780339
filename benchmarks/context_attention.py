"""Attention under context parallelism beside one rank's, at equal work: as one rank of a fake group on one GPU.

Forward and backward of one layer's attention over rows of T tokens, by exchange of heads, by a ring, and by both, as
`tightfit train` runs them: the collectives are fake and take no time, so what is measured is what stays when they hide
(copies, joins, attention to pieces). Beside it plain attention of all heads over T/√c tokens, which is as many pairs of
queries and keys. The goal is ≥ 90 % of its rate. Into results/context_attention.csv.

    python -m benchmarks.context_attention
    python -m benchmarks.context_attention --length 32768 --kernels      (what a rank of the largest ring spends where)
    python -m benchmarks.context_attention --length 256 --device cpu --dry-run
"""

import argparse
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.operations.measure import time_step
from benchmarks.rows import RESULTS, append_row
from tightfit.jobs.layout import Layout
from tightfit.kernels.attention.attention import AttentionMask, attention
from tightfit.memory.simulation import fake_world
from tightfit.parallel.head_exchange import gather_rows, scatter_rows
from tightfit.parallel.mesh import context_group, make_mesh
from tightfit.parallel.ring import ring_attention

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
SCALE = HEAD_DIM**-0.5
LAYOUTS = [(4, 1), (4, 4), (8, 1), (8, 2), (8, 8)]
"""Context ranks, and the ring of them."""
LENGTHS = (32_768, 131_072)
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def heads_of(length: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Query, key and value as the decoder has them."""
    made = (
        torch.randn(1, length, heads, HEAD_DIM, device=device, dtype=dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    return [x.transpose(1, 2).requires_grad_() for x in made]


def split_attention(length: int, ring: dist.ProcessGroup | None, heads: dist.ProcessGroup | None) -> Attend:
    """What parallel/context.py does with a layer's heads, rows of one document."""
    rows = length if ring is None else length // ring.size()

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if heads is not None:
            query, key, value = gather_rows(query, key, value, heads)
        if ring is not None:
            attended = ring_attention(query, key, value, None, ring, scale=SCALE)
        else:
            attended = attention(query, key, value, AttentionMask(rows, rows, query.device), scale=SCALE)
        return attended if heads is None else scatter_rows(attended, heads)

    return attend


def whole_attention(length: int) -> Attend:
    """One rank's, over `length` tokens."""
    return lambda q, k, v: attention(q, k, v, AttentionMask(length, length, q.device), scale=SCALE)


def timed_ms(attend: Attend, given: list[Tensor], device: torch.device) -> float:
    """Forward and backward."""
    d_out = torch.randn_like(given[0])

    def step() -> None:
        attend(*given).backward(d_out)

    def forget() -> None:
        for x in given:
            x.grad = None

    step()
    forget()
    return time_step(step, forget, device, rounds=9).p50_ms


def measure(lengths: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Iterator[dict[str, object]]:
    """A row per length and layout."""
    for length in lengths:
        for context, ring in LAYOUTS:
            same_work = max(64, round(length / math.sqrt(context) / 64) * 64)
            whole_ms = timed_ms(whole_attention(same_work), heads_of(same_work, device, dtype), device)
            with fake_world(context):
                mesh = make_mesh(Layout(context=context, ring=ring), device.type)
                attend = split_attention(length, context_group(mesh, "ring"), context_group(mesh, "heads"))
                split_ms = timed_ms(attend, heads_of(length // context, device, dtype), device)
            yield row_of(length, context, ring, same_work, split_ms=split_ms, whole_ms=whole_ms)


def kernel_table(length: int, device: torch.device, dtype: torch.dtype) -> str:
    """Time of every kernel of forward and backward as a rank of the largest ring, averaged over ten."""
    context, ring = LAYOUTS[-1]
    with fake_world(context):
        mesh = make_mesh(Layout(context=context, ring=ring), device.type)
        attend = split_attention(length, context_group(mesh, "ring"), context_group(mesh, "heads"))
        given = heads_of(length // context, device, dtype)
        d_out = torch.randn_like(given[0])
        attend(*given).backward(d_out)
        with torch.profiler.profile() as profile:
            for _ in range(10):
                attend(*given).backward(d_out)
    by = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    return str(profile.key_averages().table(sort_by=by, row_limit=20, max_name_column_width=60))


def row_of(
    length: int, context: int, ring: int, same_work: int, *, split_ms: float, whole_ms: float
) -> dict[str, object]:
    """Milliseconds and rates; 3.5 times forward's 4 operations per channel and pair."""
    split_flops = 3.5 * 4 * HEAD_DIM * HEADS * length**2 / 2 / context
    whole_flops = 3.5 * 4 * HEAD_DIM * HEADS * same_work**2 / 2
    split_rate, whole_rate = split_flops / split_ms / 1e9, whole_flops / whole_ms / 1e9
    return {
        "length": length,
        "context": context,
        "ring": ring,
        "ms_p50": f"{split_ms:.3f}",
        "tflop_s": f"{split_rate:.1f}",
        "one_rank_length": same_work,
        "one_rank_ms_p50": f"{whole_ms:.3f}",
        "one_rank_tflop_s": f"{whole_rate:.1f}",
        "share": f"{split_rate / whole_rate:.3f}",
    }


def main() -> None:
    """Measure every layout, print and append."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--length", type=int, action="append", help="tokens of a row; 32 768 and 131 072 unless given")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="recorded in the rows where this is not a git checkout")
    parser.add_argument("--dry-run", action="store_true", help="print only")
    parser.add_argument(
        "--kernels", action="store_true", help="also print where a rank of the largest ring spends time"
    )
    chosen = parser.parse_args()
    device = torch.device(chosen.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for measured in measure(tuple(chosen.length or LENGTHS), device, dtype):
        print(measured, flush=True)
        if not chosen.dry_run:
            append_row("context_attention", measured, folder=chosen.results, commit=chosen.commit)
    if chosen.kernels:
        print(kernel_table(max(chosen.length or LENGTHS), device, dtype))


if __name__ == "__main__":
    main()
