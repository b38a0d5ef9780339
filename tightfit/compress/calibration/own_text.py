"""Calibration rows where the user gives no text: text that the model itself generates, seeded.

Every row begins with a token drawn from the whole vocabulary, so that rows differ, and goes on at temperature one, by
the distribution that the model has learned (as in LLM-QAT, arXiv 2305.17888). Of text that is at hand everywhere this
is the nearest to what the model was trained on: SmolLM2-135M, a third of its layers in 3 bits by GPTQ, has a KL of
0.155 on WikiText-2 so, and 0.126 calibrated on WikiText-2 itself, 0.229 on Python's help texts, 0.237 on Python's
library (docs/LOG.md). It costs a forward pass a token with the whole model in memory (in 16 bits on a GPU), so rows are
fewer; they are kept in the cache, and the same weights get the same rows.
"""

from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress, TaskID

from tightfit.compress.calibration.calibration import Calibration
from tightfit.durable import durable_file, refuse_unwritable
from tightfit.errors import UserError
from tightfit.models.generate import Sampling, sample_rows
from tightfit.models.loading import digest_of, load_model
from tightfit.models.spec import ModelSpec

MOST_ROWS = 32
LONGEST_ROW = 512
SOURCE = "the model's own text, as no --data is given; text like what it will read is better"


def writing_dtype(device: str) -> torch.dtype:
    """The dtype in which the model generates: float32 where 16 bits are no faster."""
    return torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16


def describe_own_text(rows: int, length: int) -> str:
    """The rows in a few words, before they are generated."""
    return f"{rows} × {length} tokens of {SOURCE}"


def own_text(
    model: str, spec: ModelSpec, *, rows: int, length: int, device: str, cache: Path, progress: bool
) -> Calibration:
    """`rows` rows of `length` tokens that the model at `model` generates now, or has before (from the cache)."""
    file = cache.expanduser() / f"own-text-{digest_of(model)[:32]}-{rows}x{length}.npy"
    found = _cached_rows(file, rows, length, spec.vocab_size)
    if found is None:
        refuse_unwritable(file.parent, file)
        found = _generated_rows(model, spec, rows, length, device, progress)
        try:
            with durable_file(file) as temporary, temporary.open("wb") as opened:
                np.save(opened, found.numpy())
        except OSError as error:
            raise UserError(
                f"cannot write {file}: {error.strerror or error}; make room, or name another --cache"
            ) from error
    return Calibration(found, SOURCE)


def _cached_rows(file: Path, rows: int, length: int, vocab_size: int) -> torch.Tensor | None:
    """The rows that an earlier run has kept; None where there are none or the file is damaged."""
    try:
        tokens = torch.from_numpy(np.load(file, allow_pickle=False))
    except (OSError, EOFError, ValueError, TypeError):
        return None
    fits = tokens.dtype == torch.long and tokens.shape == (rows, length)
    return tokens if fits and 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size else None


def _generated_rows(model: str, spec: ModelSpec, rows: int, length: int, device: str, progress: bool) -> torch.Tensor:
    try:
        return _sampled(model, spec, rows, length, device, progress)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"{model} does not fit on {device} as a whole, so it cannot generate its calibration text; give --data"
        ) from error


def _sampled(model: str, spec: ModelSpec, rows: int, length: int, device: str, progress: bool) -> torch.Tensor:
    decoder = load_model(model, device=device, dtype=writing_dtype(device)).model
    first = torch.randint(0, spec.vocab_size, (rows,), generator=torch.Generator().manual_seed(0))
    with Progress(console=Console(stderr=True), disable=not progress) as bar:
        task = bar.add_task("the model writes", total=length)
        advance = partial(_advance, bar, task)
        rows_made = sample_rows(decoder, first, length, Sampling(temperature=1.0), advance)
    return rows_made.clone()  # out of inference mode: --fit differentiates


def _advance(bar: Progress, task: TaskID, done: int) -> None:
    bar.update(task, completed=done)
