"""What fine-tuning brings back after structured pruning: held-out loss before, after cutting, and after some steps.

A trained model of ours (a run of `tightfit train`, whose data it goes on with) is cut to a smaller shape and tuned,
on the data alone and with the original as its teacher, on the same batches. Appends to benchmarks/results/recovery.csv.

    python -m benchmarks.recovery runs/stdlib --keep-mlp 256 --steps 150
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.rows import RESULTS, append_row
from tightfit.compress.narrowing import NarrowingJob, narrow
from tightfit.compress.structured import KeptShape
from tightfit.jobs.job import Job
from tightfit.jobs.load import load_job
from tightfit.models.loading import source_spec
from tightfit.models.resolve import checkpoints_of
from tightfit.train.loop import run_job


def tuned(base: Job, small: Path, out: Path, steps: int, lr: float, teacher: Path | None) -> Job:
    """The run's job on the smaller model."""
    fields: dict[str, Any] = base.model_dump(mode="json") | {
        "model": {"source": str(small)},
        "tokenizer": {"source": str(small)},
        "output": str(out),
        "steps": steps,
        "epochs": None,
        "optimizer": {"lr": lr},
        "schedule": {"warmup_steps": steps // 10},
        "saving": {"every": 0},
        "distill": {} if teacher is None else {"teacher": str(teacher), "alpha": 0.9},
    }
    return Job.model_validate(fields)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("run", type=Path)
    parser.add_argument("--keep-layers", type=int)
    parser.add_argument("--keep-heads", type=int)
    parser.add_argument("--keep-mlp", type=int)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="recorded in the rows where this is not a git checkout")
    chosen = parser.parse_args()
    base, original = load_job(chosen.run / "job.yaml"), checkpoints_of(chosen.run)[-1]
    folder = Path(tempfile.mkdtemp(prefix="tightfit-recovery-"))
    kept = KeptShape(layers=chosen.keep_layers, heads=chosen.keep_heads, mlp=chosen.keep_mlp)
    job = NarrowingJob(
        model=str(original),
        out=folder / "small",
        kept=kept,
        data=tuple(base.data.train),
        samples=64,
        length=base.data.sequence_length,
        cache=base.data.cache,
    )
    told = narrow(job, lambda cost: None, lambda done, total, layer: None).recipe
    before = run_job(tuned(base, original, folder / "as-it-was", 1, 1e-9, None), quiet=True)
    assert before.start is not None
    for name, teacher in (("data alone", None), ("with the original as teacher", original)):
        result = run_job(tuned(base, folder / "small", folder / name, chosen.steps, chosen.lr, teacher), quiet=True)
        assert result.start is not None
        assert result.end is not None
        row = {
            "cut": told,
            "params": source_spec(str(original)).params(),
            "kept_params": result.params,
            "tuning": name,
            "steps": chosen.steps,
            "loss_before": round(before.start.loss, 4),
            "loss_cut": round(result.start.loss, 4),
            "loss_tuned": round(result.end.loss, 4),
        }
        append_row("recovery", row, folder=chosen.results, commit=chosen.commit)
        print(row, flush=True)


if __name__ == "__main__":
    main()
