"""Jobs that train in well under a second."""

import time
from pathlib import Path
from typing import Any

from tightfit.jobs.job import Job
from tightfit.models.resolve import checkpoints_of
from tightfit.train.loop import RunResult

SMALL_RUN: dict[str, Any] = {
    "model": {"source": "tiny-llama", "shape": {"layers": 1, "hidden_size": 32, "mlp_size": 48}},
    "evaluation": {"max_rows": 1},
    "global_batch": 2,
    "steps": 2,
}
Snapshot = dict[str, tuple[int, bytes]]


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
        "saving": {"sharded": False},
        "evaluation": {"max_rows": 2},
    }
    return Job.model_validate({**fields, **changes})


def ended_run(folder: Path) -> RunResult:
    """What a run of two steps told, as far as anybody asks."""
    return RunResult(
        run=folder,
        checkpoint=folder,
        step=2,
        steps=2,
        params=1,
        device="CPU",
        precision="fp32",
        start=None,
        end=None,
        tokens_per_second=1.0,
        train_seconds=1.0,
        peak_bytes=1,
    )


def latest_checkpoint(run: Path) -> Path | None:
    """The newest complete checkpoint of a run."""
    found = checkpoints_of(run)
    return found[-1] if found else None


def checkpoint_files(checkpoint: Path) -> dict[str, bytes]:
    """Everything a checkpoint consists of, except the job it names its own place in."""
    files = {str(p.relative_to(checkpoint)): p.read_bytes() for p in sorted(checkpoint.rglob("*")) if p.is_file()}
    files.pop("training/state.json")
    return files


def snapshot(folder: Path) -> Snapshot:
    """Every path below, with its kind and content."""
    paths = sorted(folder.rglob("*"))
    return {str(p.relative_to(folder)): (p.stat().st_mode, p.read_bytes() if p.is_file() else b"") for p in paths}


def tokenize_slowly(data: Path, tokenizer: Path, seconds_per_text: float, found: Any) -> None:
    """What a process does that gets killed at it, or overtaken; it sends the fingerprint of what it made."""
    from tightfit.models.text.tokenizer import Tokenizer, load_tokenizer
    from tightfit.train.data import shards

    class Slow(Tokenizer):
        seconds = 0.0

        def encode_many(self, texts: Any) -> Any:
            time.sleep(self.seconds)
            self.seconds = seconds_per_text  # the first text goes through at once
            return super().encode_many(texts)

    shards.BATCH_PIECES = 1
    slow = Slow(load_tokenizer(str(tokenizer))._wrapped)
    found.send(shards.prepare_text([str(data)], slow, cache_dir=data.parent / "cache", vocab_size=280).fingerprint)


def run_and_die(fields: dict[str, Any], resume: bool) -> None:
    """What the process that gets killed runs."""
    import torch

    from tightfit.train.loop import run_job

    torch.set_num_threads(1)
    run_job(Job.model_validate(fields), resume=resume, quiet=True)
