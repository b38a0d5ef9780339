"""Jobs that train in well under a second."""

from pathlib import Path
from typing import Any

from tightfit.jobs.job import Job


def tiny_job(output: Path, corpus: Path, cache: Path, **changes: Any) -> Job:
    """A pre-training job on the corpus with a tokenizer of its own; `changes` replace top-level fields."""
    fields: dict[str, Any] = {
        "model": {"source": "tiny-llama"},
        "tokenizer": {"source": "train", "vocab_size": 320},
        "data": {"train": [str(corpus)], "held_out": 0.1, "sequence_length": 32, "cache": str(cache)},
        "output": str(output),
        "steps": 5,
        "global_batch": 4,
        "layout": {"micro_batch": 2},
        "precision": "fp32",
        "optimizer": {"lr": 5e-3},
        "schedule": {"kind": "cosine", "warmup_steps": 1},
    }
    return Job.model_validate({**fields, **changes})


def checkpoint_files(checkpoint: Path) -> dict[str, bytes]:
    """Everything a checkpoint consists of, except the job it names its own place in."""
    files = {str(p.relative_to(checkpoint)): p.read_bytes() for p in sorted(checkpoint.rglob("*")) if p.is_file()}
    files.pop("training/state.json")
    return files


def run_and_die(fields: dict[str, Any], resume: bool) -> None:
    """What the process that gets killed runs."""
    import torch

    from tightfit.train.loop import run_job

    torch.set_num_threads(1)
    run_job(Job.model_validate(fields), resume=resume, quiet=True)
