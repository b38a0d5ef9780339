"""A student half as wide as its teacher, with and without it, on the same tokens: held-out loss, as rows and a picture.

The teacher is trained first, on the same text for longer; then each student sees the same batches from the same start,
and only the loss differs. Everything goes through jobs as `tightfit train` runs them: a byte-level BPE of 1024 tokens
on the prose and source of Python's standard library, float32. About a quarter of an hour on one CPU core.
Appends to benchmarks/results/distillation.csv.

    python -m benchmarks.distillation
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.rows import RESULTS, append_row
from tightfit.jobs.job import Job
from tightfit.report.figure import panels
from tightfit.train.loop import RunResult, run_job
from tightfit.train.metrics import METRICS_FILE, read_metrics

VOCABULARY = 1024
TEACHER = {"layers": 4, "hidden_size": 192, "heads": 6, "kv_heads": 6, "mlp_size": 512}
STUDENT = {"layers": 3, "hidden_size": 96, "heads": 3, "kv_heads": 3, "mlp_size": 256}
VARIANTS: dict[str, dict[str, Any]] = {
    "alone": {},
    "forward KL": {"alpha": 0.9, "temperature": 2.0, "divergence": "forward"},
    "reverse KL": {"alpha": 0.9, "temperature": 2.0, "divergence": "reverse"},
    "JSD": {"alpha": 0.9, "temperature": 2.0, "divergence": "jsd"},
    "forward KL, features": {"alpha": 0.9, "temperature": 2.0, "features": 1.0},
}
COLORS = ("#888888", "#1f5fa8", "#d1495b", "#2a9d5c", "#8a5bc7")


def job(output: Path, steps: int, shape: dict[str, int], teacher: Path | None, distill: dict[str, Any]) -> Job:
    """One run; with a teacher its tokenizer and vocabulary are the teacher's."""
    tokenizer: dict[str, Any] = {"source": "train", "vocab_size": VOCABULARY, "train_bytes": 2_000_000}
    fields: dict[str, Any] = {
        "model": {"source": "nano-llama", "shape": shape},
        "tokenizer": tokenizer if teacher is None else {"source": str(teacher)},
        "data": {"train": ["stdlib"], "held_out": 0.02, "sequence_length": 128, "cache": str(output.parent / "cache")},
        "output": str(output),
        "steps": steps,
        "global_batch": 4,
        "layout": {"micro_batch": 4},
        "precision": "fp32",
        "device": "cpu",
        "optimizer": {"lr": 4e-3},
        "schedule": {"warmup_steps": min(50, steps // 4), "final_ratio": 0.05},
        "evaluation": {"every": max(steps // 12, 1), "max_rows": 64},
        "saving": {"every": 0},
    }
    if distill:
        fields["distill"] = {"teacher": str(teacher), **distill}
    return Job.model_validate(fields)


def losses(result: RunResult) -> list[tuple[int, float]]:
    """Held-out losses by step."""
    rows = read_metrics(result.run / METRICS_FILE)
    return [(row["step"], row["held_out_loss"]) for row in rows if isinstance(row.get("held_out_loss"), float)]


def draw(curves: dict[str, list[tuple[int, float]]], teacher_loss: float, path: Path, title: str) -> None:
    """Held-out loss over steps, from the second evaluation on."""
    with panels(path, 1, 1, width=7.5, height=4.6) as (_, grid):
        axes = grid[0][0]
        for (name, curve), color in zip(curves.items(), COLORS, strict=False):
            steps, values = zip(*curve[2:], strict=True)
            axes.plot(steps, values, label=f"{name}: {values[-1]:.3f}", color=color, linewidth=1.4, marker=".")
        axes.axhline(teacher_loss, color="#111111", linestyle=":", label=f"the teacher: {teacher_loss:.3f}")
        axes.set(xlabel="step", ylabel="held-out loss (nats a token)", title=title)
        axes.legend(frameon=False)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--teacher-steps", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--picture", type=Path, default=RESULTS / "distillation.png")
    parser.add_argument("--commit", help="recorded in the rows where this is not a git checkout")
    chosen = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="tightfit-distillation-"))
    taught = run_job(job(folder / "teacher", chosen.teacher_steps, TEACHER, None, {}), quiet=True)
    assert taught.end is not None
    print(f"teacher: {taught.params:,} parameters, held-out loss {taught.end.loss:.4f}", flush=True)
    curves: dict[str, list[tuple[int, float]]] = {}
    shape = {**STUDENT, "vocab_size": VOCABULARY}
    for name, distill in VARIANTS.items():
        run = folder / name.replace(" ", "-").replace(",", "")
        result = run_job(job(run, chosen.steps, shape, taught.checkpoint, distill), quiet=True)
        assert result.end is not None
        curves[name] = losses(result)
        row = {
            "student": name,
            "student_params": result.params,
            "teacher_params": taught.params,
            "teacher_steps": chosen.teacher_steps,
            "teacher_loss": round(taught.end.loss, 4),
            "steps": chosen.steps,
            "tokens": chosen.steps * 4 * 128,
            "held_out_loss": round(result.end.loss, 4),
            "below_alone": round(curves["alone"][-1][1] - result.end.loss, 4),
            "train_seconds": round(result.train_seconds, 1),
        }
        append_row("distillation", row, folder=chosen.results, commit=chosen.commit)
        print(row, flush=True)
    sizes = f"{result.params / 1e6:.2f} M parameters, teacher {taught.params / 1e6:.2f} M"
    draw(curves, taught.end.loss, chosen.picture, f"The same tokens with and without a teacher: {sizes}")


if __name__ == "__main__":
    main()
