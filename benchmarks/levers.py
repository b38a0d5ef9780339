"""Records: what one GPU trains with which levers, how fast, in how much memory, beside peers on the same work.

Each case is a shape and some ways to train it: ours with given levers (or `fit`: what the planner picks for the card or
for a smaller one), Hugging Face's model as it is and with Liger, and DeepSpeed with its optimizer on the host, each
where it is installed. What a row says is in benchmarks/records/record.py. Writes benchmarks/results/levers.csv.
`1b-ladder` has every lever alone, which `python -m benchmarks.pictures levers` draws; `1b-allocator` is run twice, the
second time with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment.

    python -m benchmarks.levers --case 3b-offload --case 8b-24gb
    python -m benchmarks.levers --ladder
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.training_step import is_installed
from benchmarks.records.record import FIT, Case, Way, row_of, run
from benchmarks.reports.levers import LEVERS
from benchmarks.rows import RESULTS, append_row
from tightfit.hardware.host import free_host_bytes
from tightfit.train.fitting import cap_memory

PURE: Any = {"precision": "pure-bf16"}
BACK = "update_in_backward=true"
AWAY = f"offload=optimizer {BACK} checkpoint_every=1 loss_chunk_bytes=0"
ALL_AWAY = f"offload=weights {BACK} checkpoint_every=1 offload_checkpoints=true"
LONG = f"{BACK} checkpoint_every=1 offload_checkpoints=true"
LIGER = "huggingface+liger"
DEEPSPEED = Way(who="deepspeed", levers="checkpoint_every=1 offload=optimizer")
ONE, THREE, EIGHT = "llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b"

RECORDS = {
    "3b-offload": Case(model=THREE, length=8192, ways=(Way(levers="checkpoint_every=1"), Way(levers=AWAY), DEEPSPEED)),
    "3b-offload-short": Case(model=THREE, length=512, ways=(Way(levers=AWAY), DEEPSPEED)),
    "8b-32k-away": Case(
        model=EIGHT,
        length=32_768,
        steps=2,
        warm_up=1,
        ways=(Way(levers=ALL_AWAY), Way(levers=f"checkpoint_every=1 {BACK}")),
    ),
    "8b-256k": Case(model=EIGHT, length=262_144, steps=1, warm_up=0, ways=(Way(levers=f"{LONG} tiles=8", **PURE),)),
    "8b-512k-few-layers": Case(
        model=EIGHT, length=524_288, steps=1, warm_up=1, layers=2, ways=(Way(levers=f"{LONG} tiles=16", **PURE),)
    ),
    "8b-32k": Case(
        model=EIGHT,
        length=32_768,
        warm_up=1,
        ways=(
            Way(levers=FIT, **PURE),
            Way(levers=f"offload=optimizer {BACK}", **PURE),
            Way(levers=f"offload=optimizer {BACK} checkpoint_budget_bytes=100000000000 matmul=fp8-tensor", **PURE),
            Way(who=LIGER, levers="checkpoint_every=1", **PURE),
        ),
    ),
    "8b-8k": Case(
        model=EIGHT,
        length=8192,
        steps=5,
        ways=(
            Way(**PURE),
            Way(levers="matmul=fp8-tensor", **PURE),
            Way(levers="matmul=fp8-row", **PURE),
            Way(who=LIGER, **PURE),
        ),
    ),
    "8b-8k-fp32-states": Case(
        model=EIGHT,
        length=8192,
        ways=(Way(levers=f"offload=optimizer {BACK} offload_keep_bytes={80 * 2**30}"), Way(levers=FIT)),
    ),
    "8b-24gb": Case(model=EIGHT, length=2048, cap_gb=24, ways=(Way(levers=FIT),)),
    "1b-16gb": Case(model=ONE, length=8192, cap_gb=16, steps=5, ways=(Way(levers=FIT),)),
}
TINY = ("", "checkpoint_every=1 tiles=2", FIT)
CASES = RECORDS | {
    "1b-ladder": Case(model=ONE, length=16_384, ways=tuple(Way(levers=each) for each in LEVERS)),
    "1b-allocator": Case(model=ONE, length=16_384, ways=(Way(levers=ALL_AWAY), Way(levers="checkpoint_every=1"))),
    "cpu-tiny": Case(
        model="tiny-llama",
        length=64,
        rows=2,
        steps=2,
        ways=tuple(Way(precision="fp32", levers=each) for each in TINY),
    ),
    "cpu-deepspeed": Case(model="tiny-llama", length=64, rows=2, steps=2, ways=(DEEPSPEED,)),
}


def ways_here(case: Case, chosen: argparse.Namespace) -> Iterator[Way]:
    """Those that are installed and wanted."""
    for way in case.ways:
        wanted = (not chosen.only or way.who in chosen.only) and way.who not in chosen.without
        if wanted and chosen.having in way.levers and is_installed(way.who):
            yield way


def main() -> None:
    """Run the chosen cases and append a row for every way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--case", choices=CASES, action="append", default=[])
    parser.add_argument("--ladder", action="store_true", help="every lever alone, for the picture")
    parser.add_argument("--only", action="append", default=[], help="this implementation")
    parser.add_argument("--without", action="append", default=[], help="not this implementation")
    parser.add_argument("--having", default="", help="only ways whose levers contain this text")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="recorded in the rows where this is not a git checkout")
    chosen = parser.parse_args()
    device, free = torch.device("cuda" if torch.cuda.is_available() else "cpu"), free_host_bytes()
    for name in [*chosen.case, *(["1b-ladder"] if chosen.ladder else [])]:
        case = CASES[name]
        if case.cap_gb is not None:
            cap_memory(int(case.cap_gb * 1e9))
        for way in ways_here(case, chosen):
            row = row_of(name, case, way, run(case, way, device, free))
            append_row("levers", row, folder=chosen.results, commit=chosen.commit)
            print(" ".join(str(value) or "-" for value in row.values()), flush=True)
        if case.cap_gb is not None and device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0)


if __name__ == "__main__":
    main()
