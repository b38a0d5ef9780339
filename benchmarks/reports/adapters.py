"""The table of benchmarks/adapter_step.py."""

import csv
from pathlib import Path

from benchmarks.adapter_step import CASES
from benchmarks.reports.planning import Rows
from tightfit.hardware.machine import parse_machine
from tightfit.plan.cost import Costs


def adapter_rows(path: Path) -> Rows:
    """Steps of adapters with what is predicted of their time today, and PEFT's."""
    with path.open(encoding="utf-8", newline="") as file:
        newest_rows = {(row["case"], row["implementation"]): row for row in csv.DictReader(file)}
    shown = []
    for (name, implementation), row in newest_rows.items():
        held, taken_ms, case = float(row["measured_gib"]), float(row["measured_step_ms"]), CASES[name]
        said_s = Costs(case.workload, parse_machine(case.machine)).step(case.layout, case.levers).step_s
        ours = implementation == "tightfit"
        shown.append(
            (
                row["adapter"] + (f", `{row['levers']}`" if row["levers"] else ""),
                implementation,
                f"{held:.2f} GiB" + (f" ({float(row['simulated_gib']) / held - 1:+.1%})" if ours else ""),
                f"{taken_ms:.0f} ms" + (f" ({1e3 * said_s / taken_ms - 1:+.1%})" if ours else ""),
                f"{int(row['tokens_per_second']):,}",
            )
        )
    return ("8B, 4,096 tokens", "with", "peak (simulation)", "step (costs)", "tokens/s"), shown
