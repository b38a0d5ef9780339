"""What fine-tuning brings back after pruning: held-out loss before, after cutting, and after some steps.

A trained model of ours (a run of `tightfit train`, whose data it goes on with) is cut to a smaller shape, or has single
weights pruned that stay zero (optimizer.keep_zeros), and is tuned on the data alone and with the original as its
teacher, on the same batches. Appends to benchmarks/results/recovery.csv.

    python -m benchmarks.recovery runs/stdlib --keep-mlp 256 --steps 150
    python -m benchmarks.recovery runs/stdlib --prune wanda --pattern 2:4
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.rows import RESULTS, append_row
from tightfit.compress.compression import CompressionJob, compress
from tightfit.compress.recipe import recipe_of
from tightfit.compress.structure.narrowing import NarrowingJob, narrow
from tightfit.compress.structure.structured import KeptShape
from tightfit.jobs.job import Job
from tightfit.jobs.load import load_job
from tightfit.models.loading import load_model, source_spec
from tightfit.models.resolve import checkpoints_of
from tightfit.train.loop import run_job


def tuned(
    base: Job, small: Path, out: Path, steps: int, lr: float, teacher: Path | None, *, keep_zeros: bool = False
) -> Job:
    """The run's job on the smaller model."""
    fields: dict[str, Any] = base.model_dump(mode="json") | {
        "model": {"source": str(small)},
        "tokenizer": {"source": str(small)},
        "output": str(out),
        "steps": steps,
        "epochs": None,
        "optimizer": {"lr": lr, "keep_zeros": keep_zeros},
        "schedule": {"warmup_steps": steps // 10},
        "saving": {"every": 0},
        "distill": {} if teacher is None else {"teacher": str(teacher), "alpha": 0.9},
    }
    return Job.model_validate(fields)


def smaller(chosen: argparse.Namespace, given: dict[str, Any]) -> str:
    """Prune the model as was chosen, into `given["out"]`; what was done, in a few words."""
    silent = (lambda cost: None, lambda done, total, layer: None)
    if chosen.prune is not None:
        recipe = recipe_of(chosen.prune, sparsity=chosen.sparsity, pattern=chosen.pattern)
        return compress(CompressionJob(recipe=recipe, **given), *silent).recipe
    kept = KeptShape(layers=chosen.keep_layers, heads=chosen.keep_heads, mlp=chosen.keep_mlp)
    return narrow(NarrowingJob(kept=kept, **given), *silent).recipe


def nonzero(model: Path) -> int:
    """Weights that are not zero, in the directory of a model."""
    return sum(int(tensor.count_nonzero()) for tensor in load_model(str(model)).model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("run", type=Path)
    parser.add_argument("--keep-layers", type=int)
    parser.add_argument("--keep-heads", type=int)
    parser.add_argument("--keep-mlp", type=int)
    parser.add_argument("--prune", choices=("magnitude", "wanda", "sparsegpt"), help="single weights instead")
    parser.add_argument("--sparsity", type=float)
    parser.add_argument("--pattern")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="recorded in the rows where this is not a git checkout")
    chosen = parser.parse_args()
    base, original = load_job(chosen.run / "job.yaml"), checkpoints_of(chosen.run)[-1]
    folder = Path(tempfile.mkdtemp(prefix="tightfit-recovery-"))
    given = {"model": str(original), "out": folder / "small", "data": tuple(base.data.train), "samples": 64}
    told = smaller(chosen, {**given, "length": base.data.sequence_length, "cache": base.data.cache})
    kept, keeps = nonzero(folder / "small"), chosen.prune is not None
    before = run_job(tuned(base, original, folder / "as-it-was", 1, 1e-9, None), quiet=True)
    assert before.start is not None
    for name, teacher in (("data alone", None), ("with the original as teacher", original)):
        job = tuned(base, folder / "small", folder / name, chosen.steps, chosen.lr, teacher, keep_zeros=keeps)
        result = run_job(job, quiet=True)
        assert result.start is not None
        assert result.end is not None
        if keeps:
            assert nonzero(result.checkpoint) <= kept, "zeros have become weights"
        row = {
            "cut": told,
            "params": source_spec(str(original)).params(),
            "kept_params": kept if keeps else result.params,
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
