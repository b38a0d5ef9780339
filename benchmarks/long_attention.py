"""Attention for seconds on end: what cuDNN's kernel reaches at the card's power limit, by the length of a row.

Bursts of a few milliseconds run at a higher clock than a step of long rows, which is nearly all attention. Each length
runs until its seconds are over, after one pass that counts for nothing; the last counts. Writes
benchmarks/results/long_attention.csv.

    python -m benchmarks.long_attention                      on a GPU, half a minute
    python -m benchmarks.long_attention --tiny --device cpu  the same code on tiny shapes
"""

import argparse
import itertools
import time
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as attention

from benchmarks.rows import RESULTS, append_row

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
LENGTHS = (32_768, 65_536, 131_072, 262_144)
LONGEST = 524_288
BACKWARD_WORK = 2.5


def passes(length: int, device: torch.device, seconds: float) -> tuple[float, float, int]:
    """Milliseconds of the last forward and backward within `seconds`, and how many there were."""
    query, key, value = (
        torch.randn(1, heads, length, HEAD_DIM, device=device, dtype=torch.bfloat16, requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    gradient = torch.randn_like(query)
    backend = SDPBackend.CUDNN_ATTENTION if device.type == "cuda" else SDPBackend.MATH
    count, end = -1, 0.0
    with sdpa_kernel(backend):
        while count < 1 or time.perf_counter() < end:
            end = time.perf_counter() + seconds if count == 0 else end
            marks = [_now(device)]
            out = attention(query, key, value, is_causal=True, enable_gqa=True)
            marks.append(_now(device))
            out.backward(gradient)
            marks.append(_now(device))
            count += 1
            if device.type == "cuda":
                torch.cuda.synchronize(device)
    forward_ms, backward_ms = (_between_ms(*pair) for pair in itertools.pairwise(marks))
    return forward_ms, backward_ms, count


def _now(device: torch.device) -> "torch.cuda.Event | float":
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between_ms(before: "torch.cuda.Event | float", after: "torch.cuda.Event | float") -> float:
    if isinstance(before, float):
        assert isinstance(after, float)
        return 1e3 * (after - before)
    assert not isinstance(after, float)
    return before.elapsed_time(after)


def main() -> None:
    """A row for each length."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--longest", action="store_true", help=f"{LONGEST:,} tokens too: half a minute more")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each length")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="recorded in the rows where this is not a git checkout")
    chosen = parser.parse_args()
    lengths = (64, 128) if chosen.tiny else (*LENGTHS, LONGEST) if chosen.longest else LENGTHS
    for length in lengths:
        forward_ms, backward_ms, count = passes(length, torch.device(chosen.device), chosen.seconds)
        tflop = 4 * HEADS * HEAD_DIM * length**2 / 2 * 1e-12
        row = {
            "length": length,
            "heads": f"{HEADS}/{KV_HEADS}x{HEAD_DIM}",
            "passes": count,
            "forward_ms": f"{forward_ms:.3f}",
            "backward_ms": f"{backward_ms:.3f}",
            "forward_tflop_s": f"{1e3 * tflop / forward_ms:.1f}",
            "backward_tflop_s": f"{BACKWARD_WORK * 1e3 * tflop / backward_ms:.1f}",
        }
        append_row("long_attention", row, folder=chosen.results, commit=chosen.commit)
        print(" ".join(str(value) for value in row.values()), flush=True)


if __name__ == "__main__":
    main()
