"""Tables in README.md and docs/ that come from the program and its results, so that they cannot drift apart from them.

A page holds `<!-- begin NAME -->` and `<!-- end NAME -->`; what stands between is made by the function of that name.
`make docs` (python -m benchmarks.reports.documentation) rewrites them; a test fails where a page is out of date.
"""

import csv
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.reports.adapters import adapter_rows
from benchmarks.reports.compression import (
    ahead_rows,
    cost_rows,
    fewer_windows_rows,
    gptq_mix_rows,
    head_rows,
    measured_over,
    mix_rows,
    mix_text,
    nearest_rows,
    predicted_cost_rows,
    quality_rows,
    quality_text,
    same_numbers_rows,
    served_rows,
    static_rows,
    static_text,
)
from benchmarks.reports.context_rows import longest_row_lines, longest_rows, segment_rows
from benchmarks.reports.distillation import distillation_measured, distillation_rows
from benchmarks.reports.layers import classic_rows, layer_rows
from benchmarks.reports.levers import measured_block, predicted_rows
from benchmarks.reports.planning import (
    accelerator_rows,
    efficiency_rows,
    example_rows,
    export_rows,
    link_rows,
    sustained_rows,
)
from benchmarks.reports.products import block_rows, blocks_measured, product_rows, products_measured
from benchmarks.reports.published import engine_rows, group_rows
from benchmarks.reports.records import allocator_rows, curve_rows, long_rows, measured_at, record_rows
from benchmarks.reports.scale import plan_rows, published_rows, stage_rows, time_rows
from benchmarks.reports.serving import (
    behind_text,
    cpu_prediction_rows,
    gpu_prediction_rows,
    memory_measured,
    memory_rows,
    on_gpu_at,
    request_rows,
    speculation_rows,
    speed_commits,
    speed_rows,
    window_rows,
)
from benchmarks.reports.sparse import sparse_rows
from benchmarks.reports.step_profile import profile_rows
from benchmarks.reports.truth import measured_on, step_error_rows, summary_rows, truth_rows
from tightfit.jobs.fields import field_rows

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
TRUTH = RESULTS / "memory_truth.csv"
LEVERS_TRUTH = RESULTS / "lever_truth.csv"
SPLITS_TRUTH = RESULTS / "split_truth.csv"
FAMILY_TRUTH = RESULTS / "family_truth.csv"
LEVERS = RESULTS / "levers.csv"
PLAN_COMMAND = "tightfit plan llama-3.1-8b --on 8xV100-32GB --seq 512 --global-batch 64"
COLUMNS = 104


def pages() -> list[Path]:
    """Every page that may hold such tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def refreshed(text: str, but: str | None = None) -> str:
    """`text` with every marked block, `but` one, made anew."""

    def block(match: re.Match[str]) -> str:
        if match[1] == but:
            return match[0]
        return f"<!-- begin {match[1]} -->\n{BLOCKS[match[1]]()}\n<!-- end {match[1]} -->"

    return re.sub(r"<!-- begin ([\w-]+) -->\n.*?<!-- end \1 -->", block, text, flags=re.DOTALL)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A GitHub table; bars in cells are escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def newest_of_schedules(path: Path) -> dict[str, dict[str, str]]:
    """The newest row of each schedule of a pipeline."""
    with path.open(encoding="utf-8", newline="") as file:
        return {row["schedule"]: row for row in csv.DictReader(file)}


def flow_rows(path: Path) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """The newest record of each schedule over several steps, from what benchmarks/pipeline_flow.py wrote."""
    rows = [
        (
            f"`{name}`",
            row["ranks"],
            row["micro_batches"],
            row["steps"],
            f"{float(row['seconds']):.2f} s",
            f"{float(row['waited']):.1%}",
            f"{float(row['formula']):.1%}",
        )
        for name, row in newest_of_schedules(path).items()
    ]
    return ("schedule", "K", "M", "steps", "took", "ranks waited", "formula"), rows


def flushed_rows(path: Path) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """The newest curve with and without a flush, from what benchmarks/pipeline_convergence.py wrote."""
    rows = [
        (
            f"`{name}`",
            f"{row['steps']} × {row['batch']} × {row['sequence_length']}",
            f"{float(row['final_loss']):.3f}",
            f"{float(row['above_first']):+.3f}",
            f"{float(row['largest_difference']):.3f}",
        )
        for name, row in newest_of_schedules(path).items()
    ]
    return ("schedule", "steps × rows × tokens", "loss of the last 20", "above `1f1b`", "largest difference"), rows


def bubble_rows(path: Path) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """The newest recorded bubble of each schedule, from what benchmarks/pipeline_bubble.py wrote."""
    rows = [
        (
            f"`{name}`",
            row["ranks"],
            row["micro_batches"],
            row["pieces"],
            f"{float(row['waited']):.1%}",
            f"{float(row['formula']):.1%}",
        )
        for name, row in newest_of_schedules(path).items()
    ]
    return ("schedule", "K", "M", "v", "ranks waited", "(K−1)/(K−1+vM)"), rows


def default_rows(path: Path) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """The newest run of the default job under each schedule, from what benchmarks/pipeline_default.py wrote."""
    rows = [
        (
            f"`{name}`",
            row["steps"],
            f"{float(row['final_loss']):.3f}",
            f"{float(row['held_out_loss']):.3f}",
            f"{float(row['held_out_above_first']):+.3f}",
        )
        for name, row in newest_of_schedules(path).items()
    ]
    return ("schedule", "steps", "loss of the last 20", "held-out loss", "above `1f1b`"), rows


def doctor_rows(path: Path) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """The newest row of each number of ranks, from what benchmarks/doctor_time.py wrote."""
    with path.open(encoding="utf-8", newline="") as file:
        newest = {int(row["ranks"]): row for row in csv.DictReader(file)}
    rows = [
        (
            str(ranks),
            row["cores"],
            row["splits"],
            row["left_out"] or "none",
            f"{row['wall_s']} s",
            "healthy" if row["healthy"] == "True" else "not healthy",
        )
        for ranks, row in sorted(newest.items())
    ]
    return ("ranks", "cores", "splits checked", "left out", "took", "verdict"), rows


def job_fields() -> str:
    """Every field of a job file."""
    rows = [(f"`{row.path}`", row.type, f"`{row.default}`", row.meaning) for row in field_rows()]
    return markdown_table(("field", "type", "default", "meaning"), rows)


def train_step() -> str:
    """Every case and implementation, also on CPUs, whose machines are shared: these give the ratio alone."""
    newest = _newest_steps()
    rows = []
    for (case, who), row in sorted(newest.items(), key=lambda item: (item[0][0], item[0][1] == "tightfit")):
        baseline = newest[case, "huggingface"]
        ratio = float(baseline["step_ms_p50"]) / float(row["step_ms_p50"])
        workload = f"{row['model']} shape, {row['batch']} × {row['sequence_length']} tokens, {row['dtype']}"
        on_gpu = float(row["peak_gib"]) > 0
        speed = f"{int(row['tokens_per_second']):,}" if on_gpu else "–"
        peak = f"{row['peak_gib']} GiB" if on_gpu else "–"
        rows.append((row["device"], workload, who, speed, f"{ratio:.2f}×", peak, f"`{row['commit']}`"))
    return markdown_table(("device", "workload", "implementation", "tokens/s", "speed", "peak memory", "commit"), rows)


def speed_summary() -> str:
    """The README's table: the same measurements on a GPU, a row for each model and a column for each implementation."""
    columns = {
        "huggingface": "Hugging Face",
        "huggingface+liger": "with Liger",
        "huggingface+tightfit": "with our kernels",
        "tightfit": "tightfit",
    }
    newest = _newest_steps()
    cases = dict.fromkeys(case for (case, _), row in newest.items() if float(row["peak_gib"]) > 0)
    rows = []
    for case in cases:
        found = {who: newest[case, who] for who in columns if (case, who) in newest}
        first = found["huggingface"]
        workload = f"{first['model']}, {first['batch']} × {int(first['sequence_length']):,} tokens"
        cells = [
            f"{int(row['tokens_per_second']):,} tok/s, {float(row['peak_gib']):.0f} GiB" if row else "–"
            for row in (found.get(who) for who in columns)
        ]
        rows.append((int(first["tokens_per_second"]), (workload, *cells, f"`{first['commit']}`")))
    small_first = [row for _, row in sorted(rows, reverse=True)]
    return markdown_table(("a step, bf16", *columns.values(), "commit"), small_first)


def _newest_steps() -> dict[tuple[str, str], dict[str, str]]:
    """The newest row of each case and implementation of benchmarks/train_step.py and hf_step.py."""
    newest: dict[tuple[str, str], dict[str, str]] = {}
    for name in ("train_step.csv", "hf_step.csv"):
        with (RESULTS / name).open(encoding="utf-8", newline="") as file:
            newest |= {(row["case"], row["implementation"]): row for row in csv.DictReader(file)}
    return newest


def hf_step() -> str:
    """The same of hf_step.py alone: a column for each way to run the Hugging Face model."""
    columns = {"huggingface": "as it is", "huggingface+liger": "with Liger", "huggingface+tightfit": "with ours"}
    return steps_by_column(RESULTS / "hf_step.csv", columns)


def routed_step() -> str:
    """Steps of routed models."""
    grouped = "huggingface grouped_mm"
    columns = {grouped: "transformers, grouped products", f"{grouped} + tightfit": "with ours", "tightfit": "tightfit"}
    return steps_by_column(RESULTS / "routed_step.csv", columns)


def steps_by_column(path: Path, columns: dict[str, str]) -> str:
    """Steps of each case's newest run, a column for each implementation; other runs may have had other conditions."""
    with path.open(encoding="utf-8", newline="") as file:
        newest = {(row["case"], row["implementation"]): row for row in csv.DictReader(file)}
    rows = []
    for case in dict.fromkeys(case for case, _ in newest):
        first = newest[case, next(iter(columns))]
        measured = (newest.get((case, name)) for name in columns)
        found = [row if row and row["commit"] == first["commit"] else None for row in measured]
        workload = f"{first['model']} shape, {first['batch']} × {first['sequence_length']} tokens"
        steps = [f"{row['step_ms_p50']} ms, {row['peak_gib']} GiB" if row else "–" for row in found]
        rows.append((workload, *steps, f"`{first['commit']}`"))
    return markdown_table(("a training step", *columns.values(), "commit"), rows)


def compress_quality(length: int) -> str:
    """Quality of compressed weights in windows of `length`: what it is over, our best beside others', all rows."""
    path = RESULTS / "compress_quality.csv"
    parts = [quality_text(path, length)]
    for made in (ahead_rows(path, length), same_numbers_rows(path, length), quality_rows(path, length)):
        parts += [markdown_table(*made)] if made[1] else []
    return "\n\n".join(parts)


def compress_static() -> str:
    """Inputs rounded statically: what it is over, and all rows."""
    path = RESULTS / "compress_quality.csv"
    header, rows = static_rows(path)
    return "\n\n".join([static_text(path), *([markdown_table(header, rows)] if rows else [])])


def compress_mixes() -> str:
    """Mixes of bits, predicted beside measured, and the errors of the predictions."""
    path = RESULTS / "fit_quality.csv"
    return f"{mix_text(path)}\n\n{markdown_table(*mix_rows(path))}"


def compress_gptq_mixes() -> str:
    """Mixes chosen by `--fit` beside one width for all, coded by GPTQ."""
    path = RESULTS / "fit_gptq.csv"
    return f"{measured_over(path)}\n\n{markdown_table(*gptq_mix_rows(path))}"


def compress_head() -> str:
    """What a coded output projection costs."""
    path = RESULTS / "head_quality.csv"
    return f"{measured_over(path)}\n\n{markdown_table(*head_rows(path))}"


def distill_loss() -> str:
    """Time and memory of the distillation loss beside others'."""
    path = RESULTS / "distill_loss.csv"
    return f"{markdown_table(*distillation_rows(path))}\n\n{distillation_measured(path)}"


def compress_cost() -> str:
    """Seconds and memory of compressing large models."""
    header, rows = cost_rows(RESULTS / "compress_speed.csv")
    return markdown_table(header, rows) if rows else "No large model has been measured yet."


def plan_output() -> str:
    """What `tightfit plan` prints, and the command itself."""
    return "\n".join(["```", PLAN_COMMAND, "```", "", "```text", *_planned(), "```"])


def plan_summary() -> str:
    """The same for the README: without the lines of single components, alternatives and notes."""
    lines = _planned()
    bar = next(number for number, line in enumerate(lines) if "░" in line)
    times = next(line for line in lines if line.startswith("time of a step"))
    return "\n".join(["```", PLAN_COMMAND, "```", "", "```text", *lines[: bar + 1], times, "```"])


def _planned() -> list[str]:
    plain = {**os.environ, "COLUMNS": str(COLUMNS), "NO_COLOR": "1", "TERM": "dumb"}
    words = [sys.executable, "-m", *shlex.split(PLAN_COMMAND)]
    printed = subprocess.run(words, env=plain, capture_output=True, text=True, check=True, encoding="utf-8").stdout
    return [line.rstrip() for line in printed.splitlines()]


def truth_summary(results: Path) -> str:
    """Mean and worst errors by source, and what they were measured on."""
    return f"{markdown_table(*summary_rows(results))}\n\n{measured_on(results)}"


def default_run() -> str:
    """The end of the embedded job's screen, as benchmarks/default_run.py kept it."""
    return f"```text\n{(RESULTS / 'default_run.txt').read_text(encoding='utf-8').rstrip()}\n```"


def default_run_summary() -> str:
    """The same without its samples."""
    lines = (RESULTS / "default_run.txt").read_text(encoding="utf-8").splitlines()
    first_sample = next(number for number, line in enumerate(lines) if line.startswith("╭"))
    return "\n".join(["```text", *lines[:first_sample], "```"])


BLOCKS: dict[str, Callable[[], str]] = {
    "job-fields": job_fields,
    "train-step": train_step,
    "hf-step": hf_step,
    "routed-step": routed_step,
    "adapter-step": lambda: markdown_table(*adapter_rows(RESULTS / "adapter_step.csv")),
    "speed-summary": speed_summary,
    "default-run": default_run,
    "default-run-summary": default_run_summary,
    "step-profile": lambda: markdown_table(*profile_rows(RESULTS / "step_profile.csv")),
    "sparse-products": lambda: markdown_table(*sparse_rows(RESULTS / "sparse_graphs.csv")),
    "packed-products": lambda: f"{markdown_table(*product_rows(RESULTS))}\n\n{products_measured(RESULTS)}",
    "packed-blocks": lambda: f"{markdown_table(*block_rows(RESULTS))}\n\n{blocks_measured(RESULTS)}",
    "accelerators": lambda: markdown_table(*accelerator_rows()),
    "links": lambda: markdown_table(*link_rows()),
    "efficiencies": lambda: markdown_table(*efficiency_rows()),
    "plan-examples": lambda: markdown_table(*example_rows()),
    "export-checks": lambda: markdown_table(*export_rows(RESULTS / "export_checks.csv")),
    "plan-output": plan_output,
    "plan-summary": plan_summary,
    "classic-layer": lambda: markdown_table(*classic_rows()),
    "one-layer": lambda: markdown_table(*layer_rows()),
    "truth-summary": lambda: truth_summary(TRUTH),
    "split-truth-summary": lambda: truth_summary(SPLITS_TRUTH),
    "split-truth": lambda: markdown_table(*truth_rows(SPLITS_TRUTH)),
    "truth": lambda: markdown_table(*truth_rows(TRUTH)),
    "lever-truth": lambda: f"{markdown_table(*truth_rows(LEVERS_TRUTH))}\n\n{measured_on(LEVERS_TRUTH)}",
    "lever-predictions": lambda: markdown_table(*predicted_rows()),
    "levers": lambda: measured_block(LEVERS),
    "records": lambda: f"{markdown_table(*record_rows(LEVERS))}\n\n{measured_at(LEVERS)}",
    "long-rows": lambda: markdown_table(*long_rows()),
    "allocator": lambda: markdown_table(*allocator_rows(LEVERS)),
    "state-curves": lambda: markdown_table(*curve_rows(RESULTS / "optimizer_states.csv", "states")),
    "fp8-curves": lambda: markdown_table(*curve_rows(RESULTS / "fp8_convergence.csv", "matmul")),
    "pipeline-curves": lambda: markdown_table(*flushed_rows(RESULTS / "pipeline_convergence.csv")),
    "pipeline-default": lambda: markdown_table(*default_rows(RESULTS / "pipeline_default.csv")),
    "pipeline-flow": lambda: markdown_table(*flow_rows(RESULTS / "pipeline_flow.csv")),
    "pipeline-bubbles": lambda: markdown_table(*bubble_rows(RESULTS / "pipeline_bubble.csv")),
    "doctor-time": lambda: markdown_table(*doctor_rows(RESULTS / "doctor_time.csv")),
    "sustained": lambda: markdown_table(*sustained_rows()),
    "step-errors": lambda: markdown_table(*step_error_rows([TRUTH, LEVERS_TRUTH, FAMILY_TRUTH])),
    "family-truth": lambda: f"{markdown_table(*truth_rows(FAMILY_TRUTH))}\n\n{measured_on(FAMILY_TRUTH)}",
    "engines": lambda: markdown_table(*engine_rows()),
    "published-groups": lambda: markdown_table(*group_rows()),
    "scale-plans": lambda: markdown_table(*plan_rows(RESULTS)),
    "scale-times": lambda: markdown_table(*time_rows(RESULTS)),
    "scale-published": lambda: markdown_table(*published_rows(RESULTS)),
    "scale-stages": lambda: markdown_table(*stage_rows(RESULTS)),
    **{f"compress-quality-{length}": partial(compress_quality, length) for length in (512, 2048)},
    "compress-fewer-windows": lambda: markdown_table(
        *fewer_windows_rows(RESULTS / "compress_quality.csv", lengths=(512, 2048))
    ),
    "compress-nearest": lambda: markdown_table(*nearest_rows(RESULTS / "compress_quality.csv")),
    "compress-static": compress_static,
    "compress-mixes": compress_mixes,
    "compress-gptq-mixes": compress_gptq_mixes,
    "compress-head": compress_head,
    "compress-cost": compress_cost,
    "distill-loss": distill_loss,
    "compress-predicted": lambda: markdown_table(*predicted_cost_rows()),
    "compress-served": lambda: markdown_table(*served_rows(RESULTS / "serve_speed.csv")),
    "serve-memory": lambda: f"{markdown_table(*memory_rows(RESULTS))}\n\n{memory_measured(RESULTS)}",
    "serve-predicted-gpu": lambda: markdown_table(*gpu_prediction_rows(RESULTS)),
    "serve-predicted": lambda: markdown_table(*cpu_prediction_rows(RESULTS)),
    "serve-requests": lambda: "\n\n".join(
        [markdown_table(*request_rows(RESULTS)), on_gpu_at(RESULTS, "serve_requests.csv")]
    ),
    "serve-windows": lambda: "\n\n".join(
        [markdown_table(*window_rows(RESULTS)), on_gpu_at(RESULTS, "serve_windows.csv")]
    ),
    "serve-speculation": lambda: "\n\n".join(
        [markdown_table(*speculation_rows(RESULTS)), on_gpu_at(RESULTS, "serve_speculation.csv")]
    ),
    "serve-speed": lambda: "\n\n".join(
        [markdown_table(*speed_rows(RESULTS)), f"{behind_text(RESULTS)} {speed_commits(RESULTS)}"]
    ),
    "context-rows": lambda: markdown_table(*longest_rows(RESULTS)),
    "context-segments": lambda: markdown_table(*segment_rows(RESULTS)),
    "context-row-lines": lambda: markdown_table(*longest_row_lines(RESULTS)),
}


if __name__ == "__main__":
    for page in pages():
        page.write_text(refreshed(page.read_text(encoding="utf-8")), encoding="utf-8")
