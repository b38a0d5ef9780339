"""The longest rows of 8B that 8 and 32 H100 hold, on paper: by formula, and rehearsed line by line on fake tensors.

One row a step, split over all ranks by context parallelism; ZeRO-3 over the same ranks; every layer recomputed, its
input exact on the host as far as that has room; layers in tiles. A node has 1 TB of host memory. The longest row is
found by the closed forms, in steps of 64 Ki tokens; then the real step is rehearsed at that length. ALST (Bekman et al.
2025) published 3.7 and 15 million tokens on the same GPUs. Rows go to benchmarks/results/context_rows.csv and
context_rows_lines.csv.

    python -m benchmarks.context_rows                seconds
    python -m benchmarks.context_rows --rehearse     and a rehearsal of each, minutes
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.rows import RESULTS, append_row
from tightfit.hardware.machine import Machine, parse_machine
from tightfit.jobs.layout import Layout
from tightfit.jobs.lever_table import describe_levers
from tightfit.jobs.levers import Levers
from tightfit.jobs.rules.refusals import refuse_untrainable
from tightfit.jobs.rules.rule import Run
from tightfit.jobs.workload import Workload
from tightfit.memory.formulas.training import training_ledger
from tightfit.memory.ledger import Ledger
from tightfit.models.presets import preset
from tightfit.plan.cost import Costs
from tightfit.plan.describe import describe_layout
from tightfit.prove.rehearsal import rehearse

GIB = 2**30
HOST = "1000GB"
STEP_TOKENS = 65_536
MOST_STEPS = 1024
TILES = 16
HOST_CHECKPOINT_BYTES = 105 * GIB
"""Of a rank: what a node's memory leaves for them beside a gathered checkpoint of the run; the others stay here."""
LEVERS = Levers(checkpoint_every=1, offload_checkpoints=True, checkpoint_host_bytes=HOST_CHECKPOINT_BYTES, tiles=TILES)
HALF = LEVERS.model_copy(update={"checkpoint_format": "fp8"})


@dataclass(frozen=True)
class Case:
    """A machine, how its ranks split a row, and what was published for as many GPUs."""

    on: str
    layout: Layout
    levers: Levers
    published_tokens: int


CASES = {
    "8, heads": Case("8xH100-80GB", Layout(context=8, zero=3, micro_batch=1), LEVERS, 3_700_000),
    "8, ring": Case("8xH100-80GB", Layout(context=8, ring=8, zero=3, micro_batch=1), LEVERS, 3_700_000),
    "8, ring, fp8 checkpoints": Case("8xH100-80GB", Layout(context=8, ring=8, zero=3, micro_batch=1), HALF, 3_700_000),
    "32, heads": Case("4x8xH100-80GB", Layout(context=32, zero=3, micro_batch=1), LEVERS, 15_000_000),
    "32, ring": Case("4x8xH100-80GB", Layout(context=32, ring=32, zero=3, micro_batch=1), LEVERS, 15_000_000),
}


def workload_of(length: int) -> Workload:
    """One row of `length` tokens a step; rope is stretched as far as it is."""
    spec = replace(preset("llama-3.1-8b"), max_positions=length)
    return Workload(spec=spec, sequence_length=length, global_batch=1, precision="bf16")


def host_bytes(ledger: Ledger, machine: Machine) -> int:
    """Of all ranks of one node."""
    return ledger.peak_allocated_bytes(place="host") * machine.per_node


def fits(case: Case, machine: Machine, length: int) -> bool:
    """Whether card and host hold it, by formula, slack and CUDA context included."""
    ledger = training_ledger(workload_of(length), case.layout, case.levers)
    assert machine.host_bytes is not None
    return ledger.peak_bytes() <= machine.accelerator.memory_bytes and host_bytes(ledger, machine) <= machine.host_bytes


def longest(case: Case, machine: Machine) -> int:
    """The longest row, in steps."""
    low, high = 1, MOST_STEPS
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(case, machine, middle * STEP_TOKENS) else (low, middle - 1)
    return low * STEP_TOKENS


def row_of(name: str, length: int, rehearsed: Ledger | None) -> dict[str, Any]:
    """What a case needs at its longest row."""
    case = CASES[name]
    machine, workload = parse_machine(case.on, HOST), workload_of(length)
    ledger = training_ledger(workload, case.layout, case.levers)
    assert machine.host_bytes is not None
    return {
        "case": name,
        "machine": case.on,
        "layout": describe_layout(case.layout),
        "levers": describe_levers(case.levers),
        "sequence_length": length,
        "published_tokens": case.published_tokens,
        "peak_gib": f"{ledger.peak_bytes() / GIB:.1f}",
        "card_gib": f"{machine.accelerator.memory_bytes / GIB:.1f}",
        "rehearsed_gib": "" if rehearsed is None else f"{rehearsed.peak_allocated_bytes() / GIB:.1f}",
        "host_gib": f"{host_bytes(ledger, machine) / GIB:.0f}",
        "host_of_gib": f"{machine.host_bytes / GIB:.0f}",
        "step_s": f"{Costs(workload, machine).step(case.layout, case.levers).step_s:.4g}",
    }


def lines_of(name: str, length: int, rehearsed: Ledger | None) -> Iterator[dict[str, Any]]:
    """Components of the fullest moment, by formula and rehearsed."""
    case = CASES[name]
    ledger = training_ledger(workload_of(length), case.layout, case.levers)
    phase, rank = ledger.fullest()
    ours = ledger.by_component(phase, rank)
    theirs = {} if rehearsed is None else rehearsed.by_component(*rehearsed.fullest())
    for component in dict.fromkeys([*ours, *theirs]):
        yield {
            "case": name,
            "sequence_length": length,
            "component": component,
            "formula_gib": f"{ours.get(component, 0) / GIB:.2f}",
            "rehearsed_gib": f"{theirs.get(component, 0) / GIB:.2f}" if theirs else "",
        }


def main() -> None:
    """Find the longest row of every case and write it down."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", action="append", choices=CASES, help="this case alone")
    parser.add_argument("--rehearse", action="store_true", help="rehearse each step too")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="recorded in the rows where this is not a git checkout")
    chosen = parser.parse_args()
    for name in chosen.only or CASES:
        case = CASES[name]
        length = longest(case, parse_machine(case.on, HOST))
        workload = workload_of(length)
        refuse_untrainable(
            Run(
                layout=case.layout,
                levers=case.levers,
                precision=workload.precision,
                spec=workload.spec,
                sequence_length=length,
            )
        )
        rehearsed = rehearse(workload, case.layout, case.levers) if chosen.rehearse else None
        row = row_of(name, length, rehearsed)
        print(*row.values(), sep=", ", flush=True)
        append_row("context_rows", row, folder=chosen.results, commit=chosen.commit)
        for line in lines_of(name, length, rehearsed):
            append_row("context_rows_lines", line, folder=chosen.results, commit=chosen.commit)


if __name__ == "__main__":
    main()
