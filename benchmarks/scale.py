"""Plans on paper: 70B on 64 H100, 405B on 1 024 and 16 384, and layouts that others have published figures for.

Everything is computed: memory of every pipeline stage by the closed forms and, of some stages, by rehearsing the step
on fake tensors; time by the planner's model. Published layouts are not searched for but costed as they were.
Rows go to benchmarks/results/scale.csv (a layout each) and scale_stages.csv (a pipeline stage each); docs/scale.md is
made from the newest rows of each case.

    python -m benchmarks.scale                   a minute
    python -m benchmarks.scale --simulate 600    with rehearsals that may take so many seconds each
"""

import argparse
import csv
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.rows import RESULTS, append_row
from tightfit.hardware.machine import Machine, parse_machine
from tightfit.jobs.layout import Layout
from tightfit.jobs.lever_table import describe_levers
from tightfit.jobs.levers import Levers
from tightfit.jobs.workload import Workload
from tightfit.memory.formulas.pipeline import layer_counts
from tightfit.memory.formulas.training import training_ledger
from tightfit.memory.ledger import Ledger
from tightfit.models.presets import preset
from tightfit.plan.answer import Question, answer, make_workload
from tightfit.plan.cost import Costs
from tightfit.plan.describe import describe_layout
from tightfit.plan.search.pins import parse_pins
from tightfit.plan.steptime import StepTime

NO_LEVERS = Levers()


@dataclass(frozen=True)
class Case:
    """A question, or with `layout` a published run and what was said of it."""

    model: str
    on: str
    sequence_length: int
    rows: int
    layout: Layout | None = None
    levers: Levers = NO_LEVERS
    published: str = ""
    published_tokens: str = ""
    """Tokens a second and GPU; empty where only a share of the peak was published."""
    published_mfu: str = ""
    pins: tuple[str, ...] = ()
    """Of a question: what is decided already."""


RECOMPUTED = Levers(checkpoint_every=1)
LLAMA3 = "Llama 3 paper, table 4"
TITAN = "torchtitan"
CASES = {
    "70B on 64": Case("llama-3.1-70b", "8x8xH100-80GB", 8192, 512),
    "405B on 1024": Case("llama-3.1-405b", "128x8xH100-80GB", 8192, 2048),
    "405B on 16384": Case("llama-3.1-405b", "2048x8xH100-80GB", 8192, 2048),
    "70B on 64, pipeline": Case(
        "llama-3.1-70b",
        "8x8xH100-80GB",
        8192,
        512,
        pins=("layout.data=2", "layout.zero=1", "layout.tensor=8", "layout.pipeline=4", "layout.schedule=1f1b"),
    ),
    "405B on 1024, pipeline": Case(
        "llama-3.1-405b",
        "128x8xH100-80GB",
        8192,
        2048,
        pins=("layout.data=8", "layout.zero=1", "layout.tensor=8", "layout.pipeline=16", "layout.schedule=1f1b"),
    ),
    "8B on 8, FSDP": Case(
        "llama-3.1-8b",
        "8xH100-80GB",
        8192,
        16,
        Layout(data=8, zero=3, micro_batch=2),
        Levers(checkpoint_every=1, checkpoint_keep="matmuls"),
        f"{TITAN}, bf16, plain to compiled",
        "5762–6667",
    ),
    "405B on 512, 1f1b": Case(
        "llama-3.1-405b",
        "64x8xH100-80GB",
        8192,
        256,
        Layout(data=8, zero=1, tensor=8, pipeline=8, micro_batch=1),
        RECOMPUTED,
        f"{TITAN}, 1F1B, fp8",
        "100",
    ),
    "405B on 512, interleaved": Case(
        "llama-3.1-405b",
        "64x8xH100-80GB",
        8192,
        256,
        Layout(data=8, zero=1, tensor=8, pipeline=8, micro_batch=1, schedule="interleaved", stages_per_rank=2),
        RECOMPUTED,
        f"{TITAN}, interleaved 1F1B, fp8",
        "128",
    ),
    "405B on 8192": Case(
        "llama-3.1-405b",
        "1024x8xH100-80GB",
        8192,
        2048,
        Layout(data=64, zero=1, tensor=8, pipeline=16, micro_batch=1, schedule="interleaved", stages_per_rank=4),
        Levers(),
        LLAMA3,
        "",
        "0.43",
    ),
    "405B on 16384, Llama 3": Case(
        "llama-3.1-405b",
        "2048x8xH100-80GB",
        8192,
        2048,
        Layout(data=128, zero=1, tensor=8, pipeline=16, micro_batch=1, schedule="interleaved", stages_per_rank=4),
        Levers(),
        LLAMA3,
        "",
        "0.41",
    ),
    "405B on 16384, 128K": Case(
        "llama-3.1-405b",
        "2048x8xH100-80GB",
        131072,
        128,
        Layout(
            data=8,
            zero=1,
            tensor=8,
            context=16,
            ring=16,
            pipeline=16,
            micro_batch=1,
            schedule="interleaved",
            stages_per_rank=4,
        ),
        Levers(),
        LLAMA3,
        "",
        "0.38",
    ),
}


@dataclass(frozen=True)
class Chosen:
    """A layout to write down: of which case, how it was found, and what it is costed for."""

    case: str
    how: str
    workload: Workload
    machine: Machine
    layout: Layout
    levers: Levers


def chosen(name: str, case: Case) -> Chosen:
    """The planner's pick, of what the case leaves open; or the published layout."""
    machine = parse_machine(case.on)
    workload = make_workload(
        preset(case.model), machine, sequence_length=case.sequence_length, rows=case.rows, precision="bf16"
    )
    if case.layout is not None:
        return Chosen(name, "published", workload, machine, case.layout, case.levers)
    question = Question(model=case.model, workload=workload, machine=machine, pins=parse_pins(case.pins))
    plan = answer(question).plan
    return Chosen(name, "pinned" if case.pins else "planned", workload, machine, plan.layout, plan.levers)


def token_flops(workload: Workload) -> float:
    """What a token costs the model itself: six a weight (not the embedding's), six a width and visible position."""
    spec = workload.spec
    products = spec.params() - (0 if spec.tied else spec.vocab_size * spec.hidden_size)
    return 6.0 * products + 6.0 * spec.layers * spec.query_size * workload.sequence_length


def row_of(one: Chosen) -> dict[str, Any]:
    """The numbers of a layout, with what was published about it."""
    case, gpus = CASES[one.case], one.machine.ranks
    time = Costs(one.workload, one.machine).layout_cost(one.layout).step(one.levers)
    speed = one.workload.tokens / time.step_s / gpus
    peak = one.machine.accelerator.rates.bf16 or 0.0
    ledger = training_ledger(one.workload, one.layout, one.levers)
    return {
        "case": one.case,
        "how": one.how,
        "model": case.model,
        "machine": case.on,
        "gpus": gpus,
        "sequence_length": case.sequence_length,
        "global_batch": case.rows,
        "layout": describe_layout(one.layout),
        "levers": describe_levers(one.levers),
        "layout_json": one.layout.model_dump_json(),
        "levers_json": one.levers.model_dump_json(),
        "step_s": f"{time.step_s:.4g}",
        "tokens_per_second_per_gpu": f"{speed:.4g}",
        "mfu": f"{speed * token_flops(one.workload) / (peak * 1e12):.3f}",
        **{name: f"{seconds:.4g}" for name, seconds in _parts(time).items()},
        "card_gib": f"{one.machine.accelerator.memory_bytes / 2**30:.1f}",
        "peak_gib": f"{ledger.peak_bytes() / 2**30:.1f}",
        "published": case.published,
        "published_tokens": case.published_tokens,
        "published_mfu": case.published_mfu,
    }


def _parts(time: StepTime) -> dict[str, float]:
    """By column: waiting for launches and a teacher's forward count as compute."""
    parts = asdict(time)
    parts["compute_s"] += sum(parts.pop(name) for name in ("launch_s", "teacher_s"))
    return parts


def stage_bytes(ledger: Ledger, stage: int) -> int:
    """The most one pipeline stage needs of its card."""
    return Ledger(ledger.source, tuple(line for line in ledger.lines if line.rank == stage)).peak_bytes()


def stage_rows(one: Chosen, seconds: float) -> Iterator[dict[str, Any]]:
    """Every stage by formula; the first and the last of a plan by rehearsal too, where there is time."""
    ledger = training_ledger(one.workload, one.layout, one.levers)
    counts = layer_counts(one.workload.spec, one.workload.sequence_length, one.layout)
    rehearsed = {0, one.layout.pipeline - 1} if seconds and one.how != "published" else set()
    for stage, layers in enumerate(counts):
        formula = f"{stage_bytes(ledger, stage) / 2**30:.1f}"
        before = rehearsed_before(one, stage, formula)
        simulated = rehearse_apart(one, stage, seconds) if stage in rehearsed else before
        yield {
            "case": one.case,
            "how": one.how,
            "stage": stage,
            "stages": one.layout.pipeline,
            "layers": layers,
            "formula_gib": formula,
            "simulated_gib": simulated,
        }


def rehearsed_before(one: Chosen, stage: int, formula_gib: str) -> str:
    """What a rehearsal of the same stage said, where the layout and its closed form are what they were."""
    with (RESULTS / "scale.csv").open(encoding="utf-8", newline="") as file:
        layouts = {(row["case"], row["how"]): row["layout_json"] for row in csv.DictReader(file)}
    if layouts.get((one.case, one.how)) != one.layout.model_dump_json():
        return ""
    with (RESULTS / "scale_stages.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if (row["case"], row["how"]) == (one.case, one.how)]
    told = [row for row in rows if row["stage"] == str(stage) and row["formula_gib"] == formula_gib]
    return told[-1]["simulated_gib"] if told else ""


def rehearse_apart(one: Chosen, stage: int, seconds: float) -> str:
    """GiB of a stage's rehearsal, in a process of its own; nothing where it takes too long or is refused."""
    words = json.dumps([one.case, one.layout.model_dump(), one.levers.model_dump(), stage])
    try:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.scale", "--stage", words],
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        print(f"{one.case}, {one.how}, stage {stage}: no rehearsal within {seconds:.0f} s")
        return ""
    if done.returncode:
        print(f"{one.case}, {one.how}, stage {stage}: {done.stderr.strip().splitlines()[-1]}")
        return ""
    return done.stdout.strip()


def fewer_replicas(workload: Workload, layout: Layout) -> tuple[Workload, Layout]:
    """The same rank among two copies of the model: how many more there are changes nothing in its memory."""
    if layout.zero or layout.data == 1:
        return workload, layout
    rows = 2 * workload.global_batch // layout.data
    return replace(workload, global_batch=rows), layout.model_copy(update={"data": 2})


def rehearse_stage(words: str) -> None:
    """The other side of that."""
    from tightfit.memory.formulas.overheads import DEFAULT
    from tightfit.memory.trace import ledger_of_replay
    from tightfit.prove.rehearsal import rehearse, trace_training_step

    name, layout, levers, stage = json.loads(words)
    workload = chosen(name, CASES[name]).workload
    how = *fewer_replicas(workload, Layout.model_validate(layout)), Levers.model_validate(levers)
    if how[1].pipeline == 1:
        ledger = rehearse(*how)
    else:
        replay = trace_training_step(*how, stage=stage).replay()
        ledger = ledger_of_replay(replay, "simulation", context_bytes=DEFAULT.context_bytes)
    print(f"{ledger.peak_bytes() / 2**30:.1f}")


def main() -> None:
    """All cases, or one rehearsal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--dry-run", action="store_true", help="write nothing")
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stage:
        return rehearse_stage(options.stage)
    for name in options.case or CASES:
        one = chosen(name, CASES[name])
        row, stages = row_of(one), list(stage_rows(one, options.simulate))
        print(
            f"{name} ({one.how}): {row['layout']}; {row['levers']}; {row['step_s']} s, {row['peak_gib']} GiB, "
            f"{row['tokens_per_second_per_gpu']} tok/s/GPU, MFU {row['mfu']}",
            flush=True,
        )
        if not options.dry_run:
            append_row("scale", row)
            for stage in stages:
                append_row("scale_stages", stage)


if __name__ == "__main__":
    main()
