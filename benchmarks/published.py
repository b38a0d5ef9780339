"""Predicted against published: speed and memory of runs that others have reported, by engine, card, length and scale.

The runs are in benchmarks/results/published_runs.json, each with its source, layout and levers in our words. A seeded
two thirds of them were looked at while constants were set (`fitted`); the others were not (`held out`). Nothing is
fitted per row: the constants are those of jobs/engine.py, hardware/sustained.py and plan/seconds/stragglers.py.

    python -m benchmarks.published            (seconds; no GPU)
    python -m benchmarks.published --rows     every run
    python -m benchmarks.published --runs FILE
"""

import argparse
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.rows import RESULTS
from tightfit.hardware.machine import Machine, parse_machine
from tightfit.jobs.engine import find_engine
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.workload import Workload
from tightfit.memory.formulas.training import training_ledger
from tightfit.models.resolve import resolve_spec
from tightfit.models.spec import ModelSpec
from tightfit.plan.cost import Costs
from tightfit.plan.steptime import StepTime

RUNS = RESULTS / "published_runs.json"
SEED, FITTED_SHARE = 14, 2 / 3
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Run:
    """One published run."""

    name: str
    engine: str
    machine: Machine
    workload: Workload
    layout: Layout
    levers: Levers
    tokens_s_gpu: float
    memory_gib: float | None
    is_fitted: bool

    def time(self) -> StepTime:
        """As predicted for its engine."""
        return Costs(self.workload, self.machine).step(self.layout, self.levers)

    def speed_error(self) -> float:
        """Predicted tokens per second beyond published ones, as a share."""
        predicted = self.workload.tokens / self.time().step_s / self.machine.ranks
        return predicted / self.tokens_s_gpu - 1

    def memory_error(self) -> float | None:
        """Predicted memory beyond the published one, as a share; None where none was published."""
        if self.memory_gib is None:
            return None
        ledger = training_ledger(self.workload, self.layout, self.levers)
        return ledger.peak_bytes() / GIB / self.memory_gib - 1


def read_runs(path: Path = RUNS) -> list[Run]:
    """All runs of the file, a seeded part of them marked as fitted."""
    rows = json.loads(path.read_text(encoding="utf-8"))
    names = sorted(row["id"] for row in rows)
    fitted = set(random.Random(SEED).sample(names, round(FITTED_SHARE * len(names))))
    return [_run(row, is_fitted=row["id"] in fitted) for row in rows]


def _run(row: Mapping[str, Any], *, is_fitted: bool) -> Run:
    machine = parse_machine(row["on"])
    machine = replace(machine, accelerator=replace(machine.accelerator, **row.get("card", {})))
    spec = _spec(row["model"])
    return Run(
        name=f"{row['id']} {row['name']}",
        engine=row["engine"],
        machine=machine,
        workload=Workload(
            spec=replace(spec, max_positions=max(spec.max_positions, row["sequence_length"])),
            sequence_length=row["sequence_length"],
            global_batch=row["global_batch"],
            precision=row["precision"],
            engine_name=find_engine(row["engine"]).name,
        ),
        layout=Layout(**row["layout"]),
        levers=Levers(**row["levers"]),
        tokens_s_gpu=row["tokens_s_gpu"],
        memory_gib=row["memory_gib"],
        is_fitted=is_fitted,
    )


def _spec(model: str | Mapping[str, Any]) -> ModelSpec:
    if isinstance(model, str):
        return resolve_spec(model)
    given = {name: value for name, value in model.items() if name != "has_rope"}
    return ModelSpec(**given) if model["has_rope"] else ModelSpec(**given, rope=None)


GROUPS: dict[str, Callable[[Run], str]] = {
    "part": lambda run: "fitted" if run.is_fitted else "held out",
    "engine": lambda run: run.engine,
    "card": lambda run: run.machine.accelerator.name,
    "tokens": lambda run: _class(run.workload.sequence_length, (2048, 4096, 8192)),
    "GPUs": lambda run: _class(run.machine.ranks, (8, 64, 128)),
    "products": lambda run: "bf16" if run.levers.matmul == "native" else "fp8",
    "recomputation": lambda run: "none" if run.levers.checkpoint_every == 0 else "some",
}


def _class(value: int, bounds: Sequence[int]) -> str:
    return next((f"up to {bound:,}" for bound in bounds if value <= bound), f"beyond {bounds[-1]:,}")


@dataclass(frozen=True)
class GroupErrors:
    """Of a group of runs: how many, mean absolute error and bias, as shares."""

    group: str
    rows: int
    mean: float
    bias: float


def group_errors(runs: Sequence[Run], error: Callable[[Run], float | None]) -> Iterator[GroupErrors]:
    """All runs together, and every group."""
    found = [(run, value) for run in runs if (value := error(run)) is not None]
    yield _errors("all", [value for _, value in found])
    for kind, name_of in GROUPS.items():
        for name in sorted({name_of(run) for run, _ in found}):
            yield _errors(f"{kind}: {name}", [value for run, value in found if name_of(run) == name])


def _errors(name: str, values: Sequence[float]) -> GroupErrors:
    count = max(1, len(values))
    return GroupErrors(name, len(values), sum(map(abs, values)) / count, sum(values) / count)


def main() -> None:
    """Print errors by group."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=Path, default=RUNS)
    parser.add_argument("--rows", action="store_true", help="every run")
    parser.add_argument("--fitted", action="store_true", help="only runs that constants may be set from")
    chosen = parser.parse_args()
    runs = [run for run in read_runs(chosen.runs) if run.is_fitted or not chosen.fitted]
    if chosen.rows:
        for run in runs:
            memory = run.memory_error()
            parts = ", ".join(f"{name} {seconds / run.time().step_s:.0%}" for name, seconds in run.time().parts()[:5])
            said = "" if memory is None else f" memory {memory:+.0%}"
            print(f"{run.speed_error():+5.0%}{said}  {run.name} on {run.machine.text}: {parts}")
    for what, error in (("speed", Run.speed_error), ("memory", Run.memory_error)):
        for group in group_errors(runs, error):
            print(f"{what}  {group.group:34}{group.rows:4}  mean {group.mean:5.1%}  bias {group.bias:+6.1%}")


if __name__ == "__main__":
    main()
