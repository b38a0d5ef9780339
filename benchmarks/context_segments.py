"""The longest rows of 8B through two models of torch's allocator: fixed segments, and segments that grow.

The step of a case of context_rows.py is traced once and replayed through each, on a card without end and on the card of
the case, where what nobody uses is given back before a request fails. Rows go to
benchmarks/results/context_segments.csv.

    python -m benchmarks.context_segments --tokens 3735552 4063232
"""

import argparse
from pathlib import Path
from typing import Any

from benchmarks.context_rows import CASES, GIB, HOST, workload_of
from benchmarks.rows import RESULTS, append_row
from tightfit.hardware.machine import parse_machine
from tightfit.memory.allocator import CachingAllocator, OutOfMemoryError
from tightfit.memory.formulas.overheads import DEFAULT
from tightfit.memory.growing_allocator import GrowingAllocator
from tightfit.memory.trace import Trace
from tightfit.prove.rehearsal import trace_training_step

KINDS: dict[str, type[CachingAllocator] | type[GrowingAllocator]] = {
    "fixed": CachingAllocator,
    "growing": GrowingAllocator,
}


def replayed(trace: Trace, kind: str, card_bytes: int) -> dict[str, Any]:
    """What the allocator holds of a trace, and whether it goes through on the card."""
    endless, full = KINDS[kind](), KINDS[kind](card_bytes)
    trace.replay(endless)
    try:
        trace.replay(full)
        missing = 0
    except OutOfMemoryError as error:
        missing = error.missing_bytes
    return {
        "segments": kind,
        "in_use_gib": f"{endless.peak_allocated_bytes / GIB:.1f}",
        "reserved_gib": f"{endless.peak_reserved_bytes / GIB:.1f}",
        "card_gib": f"{card_bytes / GIB:.1f}",
        "missing_gib": f"{missing / GIB:.1f}",
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--case", choices=CASES, default="8, heads")
    parser.add_argument("--tokens", type=int, nargs="+", required=True)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="recorded in the rows where this is not a git checkout")
    chosen = parser.parse_args()
    case = CASES[chosen.case]
    card = parse_machine(case.on, HOST).accelerator.memory_bytes - DEFAULT.context_bytes
    for tokens in chosen.tokens:
        traced = trace_training_step(workload_of(tokens), case.layout, case.levers)
        for name in KINDS:
            row = {"case": chosen.case, "sequence_length": tokens} | replayed(traced, name, card)
            print(row, flush=True)
            append_row("context_segments", row, folder=chosen.results, commit=chosen.commit)
