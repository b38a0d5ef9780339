"""Block sizes of our flash attention: every kernel alone with every candidate, into results/flash_blocks.csv.

The fastest are what `tightfit/kernels/attention/flash_blocks.py` has in its table. 2 × 8192 tokens, 32 heads on 8,
bf16, causal.

    python -m benchmarks.flash_blocks --head-dim 64 --head-dim 128
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.operations.measure import time_step
from benchmarks.rows import RESULTS, append_row
from tightfit.kernels.attention.flash_attention import attend, like_rows
from tightfit.kernels.attention.flash_attention_backward import (
    BackwardInputs,
    write_key_gradients,
    write_query_gradients,
)
from tightfit.kernels.attention.flash_blocks import Blocks, Problem

BATCH, LENGTH, HEADS, KV_HEADS = 2, 8192, 32, 8
PRODUCTS = {"forward": 2, "key_gradients": 4, "query_gradients": 3}
"""Matrix products of each kernel over the seen half of the scores."""
CANDIDATES = [
    Blocks(queries, keys, warps, stages)
    for queries, keys in ((32, 64), (64, 32), (64, 64), (64, 128), (128, 32), (128, 64), (128, 128))
    for warps in (4, 8)
    for stages in (2, 3, 4)
    if queries * keys >= 1024 * warps // 4
]


def launches(head_dim: int, device: torch.device) -> dict[str, Callable[[Blocks], object]]:
    """Each kernel on random tensors, given its blocks."""

    def random(heads: int) -> Tensor:
        return torch.randn(BATCH, LENGTH, heads, head_dim, device=device, dtype=torch.bfloat16).transpose(1, 2)

    query, key, value, d_out = (random(heads) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS))
    problem = Problem(head_dim**-0.5, 0, 0.0, None)
    logs, deltas = (torch.full((BATCH, HEADS, LENGTH), x, device=device) for x in (12.0, 0.0))
    inputs = BackwardInputs(query, key, value, d_out, logs, deltas, problem)
    d_query, d_key, d_value = like_rows(query), like_rows(key), like_rows(value)
    return {
        "forward": lambda blocks: attend(query, key, value, problem, blocks),
        "key_gradients": lambda blocks: write_key_gradients(inputs, d_key, d_value, blocks),
        "query_gradients": lambda blocks: write_query_gradients(inputs, d_query, blocks),
    }


def measure(head_dim: int, device: torch.device) -> Iterator[dict[str, object]]:
    """A row per kernel and candidate that compiles and fits."""
    for name, launch in launches(head_dim, device).items():
        work = PRODUCTS[name] * BATCH * HEADS * LENGTH**2 * head_dim
        for blocks in CANDIDATES:
            row: dict[str, object] = {"head_dim": head_dim, "kernel": name, **vars(blocks), "ms_p50": "", "tflop_s": ""}
            try:
                launch(blocks)
                p50 = time_step(partial(launch, blocks), lambda: None, device, rounds=9).p50_ms
            except Exception as error:  # too much shared memory, or a layout Triton does not do: kept, with the reason
                yield row | {"note": f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"}
                continue
            yield row | {"ms_p50": f"{p50:.3f}", "tflop_s": f"{work / p50 / 1e9:.0f}", "note": ""}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--head-dim", type=int, action="append", required=True)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="recorded in the rows where this is not a git checkout")
    arguments = parser.parse_args()
    for head_dim in arguments.head_dim:
        for measured in measure(head_dim, torch.device("cuda")):
            print(measured)
            append_row("flash_blocks", measured, folder=arguments.results, commit=arguments.commit)
