"""Records as tables: what one GPU trains, beside peers and predictions, from the rows of benchmarks/levers.py.

The newest row of every way counts; what the planner picks is one way, whatever it picks. A prediction was made by the
same program just before its step, so a row shows both; what today's costs say of the step stands beside them.
"""

import csv
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from tightfit.errors import UserError
from tightfit.hardware.machine import parse_machine
from tightfit.jobs.job import PrecisionName
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.workload import Workload
from tightfit.memory.formulas.training import training_ledger
from tightfit.memory.ledger import COMPONENTS, Component, Place
from tightfit.models.presets import preset
from tightfit.plan.cost import Costs
from tightfit.plan.search.pins import parse_pins

Row = dict[str, str]
Table = tuple[Sequence[str], Sequence[Sequence[str]]]
JOBS = {
    "3b-offload": "3B, 8,192 tokens, float32 states",
    "3b-offload-short": "3B, 512 tokens, float32 states",
    "8b-32k-away": "8B, 32,768 tokens, float32 states",
    "8b-256k": "8B, 262,144 tokens",
    "8b-512k-few-layers": "{layers} layers of 8B, 524,288 tokens",
    "8b-32k": "8B, 32,768 tokens",
    "8b-8k": "8B, 8,192 tokens",
    "8b-8k-fp32-states": "8B, 8,192 tokens, float32 states",
    "8b-24gb": "8B, 2,048 tokens, float32 states, in 24 GB",
    "1b-16gb": "1B, 8,192 tokens, float32 states, in 16 GB",
}
"""What each case is about. Where float32 states are not named, weights, gradients and moments are bf16."""
PEERS = {"huggingface": "Hugging Face", "huggingface+liger": "Hugging Face + Liger", "deepspeed": "DeepSpeed ZeRO-3"}
ALLOCATOR = "1b-allocator"
GIB = 2**30
LENGTHS = (262_144, 524_288)
LONG = Levers(
    update_in_backward=True, checkpoint_every=1, offload_checkpoints=True, tiles=16, checkpoint_host_bytes=90 * GIB
)
"""Levers with which one row of LENGTHS of an 8 B model in pure bf16 fits an H200 and 110 GiB of host memory."""


def read_rows(path: Path, cases: Iterable[str], key: Sequence[str]) -> list[Row]:
    """The newest row of every `key` of these cases, in the order of the cases and then of first appearance."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror}); run benchmarks/levers.py first") from None
    latest = {_key(row, key): row for row in rows}
    return [row for case in cases for row in latest.values() if row["case"] == case]


def _key(row: Row, columns: Sequence[str]) -> tuple[str, ...]:
    picked = row.get("fitted") == "1"
    return tuple("" if picked and column == "levers" else row[column] for column in columns)


def record_rows(path: Path) -> Table:
    """Every record beside its peers."""
    rows = read_rows(path, JOBS, ("case", "implementation", "levers", "fitted"))
    header = ("job", "by", "step", "tokens/s", "GPU", "host", "predicted", "costs today")
    return header, [_record(row) for row in rows if not _is_told_elsewhere(row)]


def _is_told_elsewhere(row: Row) -> bool:
    """One claim has one number: without levers, this case is that of hf_step.csv, which README.md quotes."""
    return row["case"] == "8b-8k" and not row["levers"]


def _record(row: Row) -> Sequence[str]:
    job = JOBS[row["case"]].format(layers=row["layers"])
    if row["result"] != "ok":
        return job, _way(row), row["result"], "–", "–", "–", _predicted(row), "–"
    return (
        job,
        _way(row),
        f"{float(row['step_s']):.3g} s",
        f"{int(row['tokens_per_second']):,}",
        f"{float(row['peak_allocated_gib']):.1f} GiB",
        _host(row),
        _predicted(row),
        _costs_today(row),
    )


def _way(row: Row) -> str:
    """Who, and with which levers."""
    levers = ", ".join(f"`{_short(each)}`" for each in row["levers"].split())
    if row["implementation"] in PEERS:
        return PEERS[row["implementation"]] + (", layers recomputed" if "checkpoint_every" in row["levers"] else "")
    return f"`--fit`: {levers or 'no lever'}" if row["fitted"] == "1" else levers or "no lever"


def _short(lever: str) -> str:
    """As a job file has it; bytes in GB."""
    name, value = lever.split("=")
    if name.endswith("_bytes") and value.isdigit() and int(value) >= 10**9:
        value = f"{int(value) / 1e9:.0f}e9"
    return f"{name}={value.lower() if value in ('True', 'False') else value}"


def _host(row: Row) -> str:
    return f"{float(row['host_gib']):.1f} GiB" if float(row["host_gib"]) >= 0.05 else "–"


def _predicted(row: Row) -> str:
    """Seconds and GPU memory that were said before."""
    if not row["predicted_s"]:
        return "–"
    return f"{float(row['predicted_s']):.3g} s, {float(row['predicted_gib']):.1f} GiB"


def _costs_today(row: Row) -> str:
    """Seconds that `tightfit plan` says of the same step now, for a calibrated host."""
    if not row["predicted_s"]:
        return "–"
    rows, length = int(row["rows"]), int(row["sequence_length"])
    spec = preset(row["model"])
    spec = replace(spec, max_positions=max(spec.max_positions, length), layers=int(row["layers"]))
    precision = cast(PrecisionName, row["precision"])
    workload = Workload(spec=spec, sequence_length=length, global_batch=rows, precision=precision)
    levers = Levers(**parse_pins([f"levers.{each}" for each in row["levers"].split()]).levers)
    return f"{Costs(workload, parse_machine('H200')).step(Layout(micro_batch=rows), levers).step_s:.3g} s"


def allocator_rows(path: Path) -> Table:
    """Reserved beside allocated memory with and without expandable segments, and calls of CUDA in steady steps."""
    rows = read_rows(path, [ALLOCATOR], ("case", "levers", "allocator"))
    header = ("levers", "segments", "allocated", "reserved", "cudaMalloc", "cudaFree", "step")
    return header, [
        (
            _way(row),
            "expandable" if "expandable_segments:True" in row["allocator"] else "torch's default",
            f"{float(row['peak_allocated_gib']):.2f} GiB",
            f"{float(row['peak_reserved_gib']):.2f} GiB",
            row["device_mallocs"],
            row["device_frees"],
            f"{float(row['step_s']):.3f} s",
        )
        for row in rows
        if row["result"] == "ok"
    ]


def curve_rows(path: Path, column: str) -> Table:
    """Loss curves in numbers: the newest run of each way of benchmarks/convergence.py."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            latest = {row[column]: row for row in csv.DictReader(file) if "CPU" not in row["device"]}
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror}); run benchmarks/{path.stem}.py first") from None
    header = (column, "bytes a parameter", "final loss", "above the first", "largest difference", "update", "step")
    return header, [
        (
            name,
            f"{float(row['state_bytes_per_parameter']):.2f}",
            row["final_loss"],
            f"{float(row['above_first']):+.3f}",
            f"{float(row['largest_difference']):.3f}",
            f"{float(row['update_ms_p50']):.1f} ms",
            f"{float(row['step_ms_p50']):.0f} ms",
        )
        for name, row in latest.items()
    ]


def measured_at(path: Path) -> str:
    """On what, at which commits."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if "CPU" not in row["device"]]
    devices = sorted({f"{row['device']}, torch {row['torch']}" for row in rows})
    commits = ", ".join(f"`{commit}`" for commit in dict.fromkeys(row["commit"] for row in rows))
    return f"Measured on one {' and one '.join(devices)}; commits {commits}."


def long_rows() -> Table:
    """Where every GiB of one long row goes at the fullest moment of backward, by the formulas."""
    places: tuple[Place, ...] = ("gpu", "host")
    held = [_held(length, place) for length in LENGTHS for place in places]
    header = ("what", *(f"{length:,} tokens, {place}" for length in LENGTHS for place in ("GPU", "host")))
    rows = [(component, *(_shown(each.get(component, 0)) for each in held)) for component in COMPONENTS]
    total = ("together", *(_shown(sum(each.values())) for each in held))
    return header, [*(row for row in rows if any(cell != "–" for cell in row[1:])), total]


def _held(length: int, place: Place) -> dict[Component, int]:
    spec = replace(preset("llama-3.1-8b"), max_positions=length)
    workload = Workload(spec=spec, sequence_length=length, global_batch=1, precision="pure-bf16")
    ledger = training_ledger(workload, Layout(micro_batch=1), LONG)
    return ledger.by_component("backward", 0, place)


def _shown(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB / 200 else "–"
